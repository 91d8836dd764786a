"""The list of checks: every one has a name of its own and says what it costs; words about a wrong result."""

from __future__ import annotations

import numpy as np
import pytest

from attnbench.verifying.checks import CHECKS, RowPlaces, describe
from attnbench.verifying.tolerance import FORWARD_FACTOR, compare


def test_checks_have_names_of_their_own_and_a_cost():
    assert len({check.name for check in CHECKS}) == len(CHECKS)
    assert all(check.cost for check in CHECKS)


def test_only_a_kernel_of_declared_error_or_a_short_examination_is_spared_checks():
    always = {check.name for check in CHECKS if not check.exact and not check.thorough}
    assert always == {
        "one value in all of V",
        "other batch rows and heads",
        "other values in the same memory",
        "Q, K and V in another order of memory",
        "memory that was not written",
        "memory beside the inputs",
        "inputs in one array",
        "dO in another order of memory",
        "LSE",
        "magnitudes",
        "NaN in V",
        "a call after one with larger logits",
    }


PLACES = RowPlaces(((0, 0), (1, 1)), np.arange(20), 4)
"""Two key/value heads of four query heads each: heads 0-3 of batch row 0, 4-7 of batch row 1."""


@pytest.fixture
def truth():
    return [np.random.default_rng(n).standard_normal((4, 20, 8)) for n in range(2)]


def told(got, truth):
    plain = [x + 1e-4 * np.random.default_rng(9).standard_normal(x.shape) for x in truth]
    found = compare("output", got, truth, plain, "float32", FORWARD_FACTOR)
    assert found.fault
    return describe(got, truth, found.bad, found.first_row, PLACES)


def test_rows_and_heads_are_named(truth):
    got = [x.copy() for x in truth]
    got[1][2, 12:] += np.random.default_rng(5).standard_normal((8, 8))
    text = told(got, truth)
    assert "8 of 160 compared rows are wrong" in text
    assert "1:6 (1 of 8 compared)" in text
    assert "rows: 12-19 of 0-19" in text
    assert "first at batch 1, head 6, row 12" in text
    shown = [line.split()[1:5] for line in text.splitlines() if line.strip().startswith(("got", "expected"))]
    assert [float(x) for x in shown[0]] == pytest.approx(got[1][2, 12, :4], rel=1e-3)
    assert [float(x) for x in shown[1]] == pytest.approx(truth[1][2, 12, :4], rel=1e-3)


def test_a_constant_factor_is_recognised(truth):
    assert "0.125 x the expected ones: a missing or doubled factor?" in told([x / 8 for x in truth], truth)
    assert "1.1 x the expected ones: check scale, softcap and output" in told([x * 1.1 for x in truth], truth)
    assert "all of the wrong rows are 0" in told([x * 0 for x in truth], truth)


def test_heads_that_are_mixed_up_are_recognised(truth):
    got = [x[[1, 0, 2, 3]] for x in truth]
    text = told(got, truth)
    assert "all 8 compared" not in text
    assert "this row is the expected one of batch 0, head 1" in text


def test_scattered_rows_are_not_all_listed(truth):
    got = [x.copy() for x in truth]
    got[0][0, ::2] += 1
    assert "rows: 0, 2, 4, 6, ... (10 rows) of 0-19" in told(got, truth)


def test_rows_that_are_not_finite_are_shown(truth):
    got = [x.copy() for x in truth]
    got[0][3, 7] = np.nan
    text = told(got, truth)
    assert "1 of 160 compared rows are wrong" in text
    assert "nan" in text
