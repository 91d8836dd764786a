from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from attnbench.comparing.statistics import trimmed_mean

ALPHA = 0.01


@pytest.mark.parametrize("count", [2, 3, 6, 7])
def test_few_values_give_plain_students_t(count: int):
    values = np.random.default_rng(count).normal(0.02, 0.01, count)
    found, plain = trimmed_mean(values), stats.ttest_1samp(values, 0.0, alternative="greater")
    assert found.value == pytest.approx(values.mean())
    assert found.p_above(found.value) == pytest.approx(plain[1])
    assert found.value - found.half_width(ALPHA) == pytest.approx(plain.confidence_interval(1 - ALPHA).low)


@pytest.mark.parametrize("count, cut", [(8, 1), (10, 1), (16, 2), (24, 3)])
def test_an_eighth_is_left_out_at_either_end_and_winsorised_in_the_error(count: int, cut: int):
    values = np.random.default_rng(count).standard_t(3, count)
    found, kept = trimmed_mean(values), count - 2 * cut
    winsorised = np.asarray(stats.mstats.winsorize(values, limits=(cut / count, cut / count)))
    squares = ((winsorised - winsorised.mean()) ** 2).sum()
    assert found.value == pytest.approx(stats.trim_mean(values, cut / count))
    assert found.se == pytest.approx((squares / (kept * (kept - 1))) ** 0.5)
    assert found.freedom == kept - 1


@pytest.mark.parametrize("count", [10, 16, 24])
def test_both_tails_keep_their_level(count: int):
    rng = np.random.default_rng(count)
    trials, alpha = 4000, 0.02
    for draw in (rng.standard_normal, lambda size: rng.standard_t(3, size)):
        made = [trimmed_mean(draw(count)) for _ in range(trials)]
        for sign in (1, -1):
            assert sum(one.p_above(sign * one.value) <= alpha for one in made) <= 1.35 * alpha * trials


@pytest.mark.parametrize("count", [6, 10, 16, 24])
def test_negated_values_negate_the_mean_to_the_last_bit(count: int):
    for seed in range(50):
        values = np.random.default_rng(seed).normal(0.01, 0.3, count)
        one, other = trimmed_mean(values), trimmed_mean(-values)
        assert (other.value, other.se) == (-one.value, one.se)


def test_one_value_knows_nothing_of_its_spread():
    lone = trimmed_mean(np.array([0.3]))
    assert (lone.value, lone.se) == (0.3, None)
    assert lone.half_width(ALPHA) == float("inf")
    assert lone.p_above(1.0) == 1


def test_equal_values_leave_no_doubt():
    none = trimmed_mean(np.zeros(16))
    assert (none.value, none.se, none.p_above(0.0), none.p_above(0.01)) == (0, 0, 1, 0)
