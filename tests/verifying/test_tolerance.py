"""What the rule "at most twice the plain error" lets pass, and what each of its three norms is there to catch."""

from __future__ import annotations

import numpy as np
import pytest

from attnbench.verifying.tolerance import BACKWARD_FACTOR, EPS, FORWARD_FACTOR, WHOLE_FLOOR_ULPS, compare, compare_lse

NOISE = 1e-3


@pytest.fixture
def truth():
    return np.random.default_rng(0).standard_normal((2, 50, 16))


@pytest.fixture
def plain(truth):
    return truth + NOISE * np.random.default_rng(1).standard_normal(truth.shape)


def judge(got, truth, plain, dtype="float32", factor=FORWARD_FACTOR, declared=None):
    return compare("output", [got], [truth], [plain], dtype, factor, declared)


def test_the_exact_and_the_plain_result_pass(truth, plain):
    assert judge(truth, truth, plain).fault == ""
    same = judge(plain, truth, plain)
    assert same.fault == ""
    assert same.error == pytest.approx(np.linalg.norm(plain - truth) / np.linalg.norm(truth))
    assert same.max_abs == pytest.approx(np.abs(plain - truth).max())


@pytest.mark.parametrize("factor", [FORWARD_FACTOR, BACKWARD_FACTOR])
def test_the_rule_is_a_multiple_of_the_plain_error(truth, plain, factor):
    error = plain - truth
    assert judge(truth + 0.98 * factor * error, truth, plain, factor=factor).fault == ""
    refused = judge(truth + 1.05 * factor * error, truth, plain, factor=factor)
    assert "the relative error allowed" in refused.fault
    assert refused.error > refused.allowed


@pytest.mark.parametrize("dtype", EPS)
def test_a_little_is_allowed_where_plain_is_exact(truth, dtype):
    floor = EPS[dtype] * WHOLE_FLOOR_ULPS[dtype]
    assert judge(truth * (1 + 0.9 * floor), truth, truth, dtype).fault == ""
    assert judge(truth * (1 + 1.1 * floor), truth, truth, dtype).fault != ""


def test_a_missing_row_of_small_values_is_caught_by_its_row_and_named(truth, plain):
    truth[1, 7] *= 3e-4
    plain[1, 7] = truth[1, 7]
    got = truth.copy()
    got[1, 7] = 0
    assert np.linalg.norm(got - truth) / np.linalg.norm(truth) < NOISE, "the whole must miss it"
    assert np.abs(got - truth).max() < NOISE, "and so must the largest element"
    result = judge(got, truth, plain)
    assert "worst row's" in result.fault
    assert result.first_row == 50 + 7


def test_a_row_that_should_be_zero_may_hold_rounding_but_not_a_row(truth, plain):
    truth[1, 7] = plain[1, 7] = 0
    got = truth.copy()
    got[1, 7] = NOISE * np.random.default_rng(2).standard_normal(truth.shape[-1])
    assert judge(got, truth, plain, "bfloat16").fault == ""
    got[1, 7] = truth[1, 8]
    result = judge(got, truth, plain, "bfloat16")
    assert result.first_row == 50 + 7


def test_one_wrong_element_is_caught_by_the_maximum():
    truth = np.random.default_rng(0).standard_normal((1, 4000, 64))
    plain = truth + NOISE * np.random.default_rng(1).standard_normal(truth.shape)
    got = truth.copy()
    got[0, 1234, 5] += 0.02
    assert np.linalg.norm(got - truth) / np.linalg.norm(truth) < NOISE
    result = judge(got, truth, plain)
    assert "largest" in result.fault
    assert result.first_row == 1234


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_is_caught_with_its_place(truth, plain, bad):
    got = truth.copy()
    got[1, 9, 3] = bad
    result = judge(got, truth, plain)
    assert "1 rows hold NaN or infinite" in result.fault
    assert result.first_row == 50 + 9
    assert not result.error <= result.allowed


def test_places_count_over_all_heads(truth, plain):
    got = truth.copy()
    got[0, 2] = 99
    result = compare("output", [truth, got], [truth, truth], [plain, plain], "float32", 2.0)
    assert result.first_row == 100 + 2


def test_zeros_never_pass(truth, plain):
    assert judge(np.zeros_like(truth), truth, plain).fault != ""


def test_where_every_row_is_masked_zero_is_right_and_anything_else_wrong():
    nothing = np.zeros((1, 4, 8))
    assert judge(nothing, nothing, nothing).fault == ""
    assert judge(nothing + 0.1, nothing, nothing).fault != ""


def test_a_row_that_should_be_zero_must_be_zero(truth, plain):
    truth[0, 5] = plain[0, 5] = 0
    got = truth.copy()
    got[0, 5] = 0.1
    result = judge(got, truth, plain)
    assert result.fault != ""
    assert result.first_row == 5


def test_a_declared_error_replaces_the_rule(truth, plain):
    got = truth * 1.04
    assert judge(got, truth, plain).fault != ""
    assert judge(got, truth, plain, declared=0.05).fault == ""
    assert "more than the declared" in judge(got, truth, plain, declared=0.03).fault
    assert judge(truth * np.nan, truth, plain, declared=0.5).fault != ""


def test_lse_has_minus_infinity_exactly_where_nothing_is_seen():
    truth = np.array([[1.0, -np.inf, 3.0]])
    assert compare_lse([truth], [truth], [truth]).fault == ""
    for wrong in ([1.0, 0.0, 3.0], [1.0, np.nan, 3.0], [1.0, np.inf, 3.0], [-np.inf, -np.inf, 3.0]):
        assert "rows that see no key" in compare_lse([np.array([wrong])], [truth], [truth]).fault
    empty = np.full((1, 3), -np.inf)
    assert compare_lse([empty], [empty], [empty]).fault == ""


def test_lse_in_base_two_is_caught():
    truth = np.random.default_rng(0).standard_normal((4, 30)) + 5
    assert compare_lse([truth + 1e-6], [truth], [truth]).fault == ""
    assert "off by" in compare_lse([truth / np.log(2)], [truth], [truth]).fault
