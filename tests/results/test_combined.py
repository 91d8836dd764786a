from __future__ import annotations

from math import exp, log

import numpy as np
import pytest

from attnbench.results.ratios import Ratio, combine, geometric_mean


def test_one_ratio_is_its_own_mean():
    ratio = geometric_mean([Ratio(1.1, 1.05, 1.2)])
    assert (ratio.value, ratio.low, ratio.high) == pytest.approx((1.1, 1.05, 1.2))


def test_mean_of_many_is_tighter_by_the_root_of_their_number():
    one = Ratio(2.0, 2 * exp(-0.04), 2 * exp(0.08))
    mean = geometric_mean([one] * 4)
    assert mean.value == pytest.approx(2)
    assert log(mean.value / mean.low) == pytest.approx(0.02)
    assert log(mean.high / mean.value) == pytest.approx(0.04)


def test_a_divisor_lends_its_upper_bound_to_the_lower():
    certain, skew = Ratio(3.0, 3.0, 3.0), Ratio(2.0, 1.9, 2.5)
    quotient = combine([certain, skew], [1, -1])
    assert (quotient.value, quotient.low, quotient.high) == pytest.approx((1.5, 3 / 2.5, 3 / 1.9))


def test_interval_of_a_quotient_covers_as_often_as_its_parts():
    rng, sds, hits = np.random.default_rng(0), (0.01, 0.03), 0
    for _ in range(1000):
        parts = [Ratio(exp(m), exp(m - 1.645 * sd), exp(m + 1.645 * sd)) for sd in sds for m in [rng.normal(0, sd)]]
        both = combine(parts, [1, -1])
        hits += both.low <= 1 <= both.high
    assert 870 <= hits <= 930
