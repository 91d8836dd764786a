from __future__ import annotations

import pytest

from attnbench.report.units import percent, significant


@pytest.mark.parametrize(
    ("value", "told"),
    [(123.4, "123"), (12.34, "12.3"), (1.234, "1.23"), (0.0234, "0.023"), (0.000234, "0.00023"), (0, "0.00")],
)
def test_a_small_number_is_not_zero(value: float, told: str):
    assert significant(value) == told


@pytest.mark.parametrize(
    ("share", "told"), [(-1e-9, "0.0 %"), (0.021, "2.1 %"), (0.5, "50 %"), (3.5, "350 %"), (142.11, "142x")]
)
def test_percent(share: float, told: str):
    assert percent(share) == told
