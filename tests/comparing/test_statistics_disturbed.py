"""What disturbs a launch or a whole comparison must neither raise an alarm nor hide a difference."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
from launch_factory import METRICS, estimate, flat, launch, poisoned, sequence, swapped

from attnbench.comparing.statistics import Decision, after_fresh_launches, decide, is_overwhelming
from attnbench.comparison import LOOKS, Launch

HITS = [(side, factor) for side in "ab" for factor in (2.0, 3.0)]


def with_one_poisoned(seed: int, side: str, factor: float, effect: float = 0.0) -> list[Launch]:
    """Twenty-four launches; the one that is hit is among the first six, where it weighs most."""
    rng = np.random.default_rng(seed)
    made = [launch(rng, effect=effect, pairs=6) for _ in range(24)]
    place = int(rng.integers(LOOKS[0]))
    made[place] = poisoned(made[place], side, factor)
    return made


def verdict_of(made: list[Launch]) -> str | None:
    return sequence(iter(made).__next__).verdict


@pytest.mark.parametrize("effect, verdict", [(0.05, "slower"), (0.10, "slower"), (-0.15, "faster")])
@pytest.mark.parametrize("side, factor", HITS)
def test_a_difference_is_found_through_one_poisoned_launch(side: str, factor: float, effect: float, verdict: str):
    seen = Counter(verdict_of(with_one_poisoned(seed, side, factor, effect)) for seed in range(10))
    assert seen[verdict] >= 9
    assert set(seen) <= {verdict, "inconclusive"}


@pytest.mark.parametrize("side, factor", HITS)
def test_identical_code_with_one_poisoned_launch_never_alarms(side: str, factor: float):
    seen = Counter(verdict_of(with_one_poisoned(seed, side, factor)) for seed in range(100, 115))
    assert set(seen) <= {"same", "inconclusive"}


@pytest.mark.parametrize("seed", range(5))
def test_six_launches_with_a_poisoned_one_decide_nothing(seed: int):
    for side, factor in (("a", 1.4), ("b", 1.4), *HITS):
        assert decide(with_one_poisoned(seed, side, factor)[:6], METRICS).verdict is None


@pytest.mark.parametrize("off", [0.3, -0.1, -0.3])
def test_one_poisoned_launch_never_turns_a_slowdown_green(off: float):
    rng = np.random.default_rng(8)
    made = [launch(rng, effect=0.05) for _ in range(23)]
    made.insert(2, launch(np.random.default_rng(0), effect=off))
    seen = [decide(made[:look], METRICS).verdict for look in LOOKS]
    assert seen[-1] == "slower"
    assert not {"same", "faster"} & set(seen)


def test_two_of_sixteen_and_three_of_twenty_four_may_be_poisoned():
    """More than are left out at one end are more than chance: nobody knows then what is normal."""
    assert decide(flat(*[0.03] * 14, -0.3, -0.3), METRICS).verdict == "slower"
    assert decide(flat(*[0.03] * 21, -0.3, -0.3, -0.3), METRICS).verdict == "slower"
    assert decide(flat(*[0.03] * 16, *[-0.3] * 8), METRICS).verdict == "inconclusive"
    assert decide(flat(*[0.0] * 16, *[0.3] * 8), METRICS).verdict == "inconclusive"


@pytest.mark.parametrize("side, factor", HITS)
def test_p_values_see_through_one_poisoned_launch(side: str, factor: float):
    """What the gate's second stage makes of 16 fresh launches."""
    assert estimate(with_one_poisoned(1, side, factor, 0.05)[:16], "wall", 0.01).p_slower < 1e-4
    assert estimate(with_one_poisoned(1, side, factor, -0.05)[:16], "wall", 0.01).p_faster < 1e-4
    innocent = estimate(with_one_poisoned(1, side, factor)[:16], "wall", 0.01)
    assert min(innocent.p_slower, innocent.p_faster) > 0.1


@pytest.mark.parametrize("effect", [0.0, 0.05])
def test_swapping_the_arms_mirrors_a_poisoned_comparison(effect: float):
    mirrored = {"faster": "slower", "slower": "faster"}
    for seed in range(4):
        made = with_one_poisoned(seed, *HITS[seed], effect)
        for look in LOOKS:
            one, other = decide(made[:look], METRICS), decide(swapped(made[:look]), METRICS)
            assert other.verdict == mirrored.get(one.verdict or "", one.verdict)
            for name in METRICS:
                mine, theirs = one.estimates[name], other.estimates[name]
                assert (theirs.p_slower, theirs.p_faster) == (mine.p_faster, mine.p_slower)


def drifting(rng: np.random.Generator) -> Iterator[Launch]:
    """A machine that grows slower by half within ten launches and jitters meanwhile, block by block."""
    for turn in range(24):
        trend = np.linspace(0.04 * turn, 0.04 * (turn + 1), 10)
        yield launch(rng, drift=trend + np.cumsum(0.02 * rng.standard_normal(10)))


def test_a_drifting_machine_raises_no_alarm_and_hides_nothing():
    rng = np.random.default_rng(20)
    seen = Counter(sequence(drifting(rng).__next__).verdict for _ in range(60))
    assert seen["slower"] + seen["faster"] == 0
    assert seen["same"] >= 57


@pytest.mark.parametrize("effect, found", [(0.025, 38), (0.05, 40), (0.10, 40)])
def test_power_without_any_disturbance(effect: float, found: int):
    """Of 40, as many as the untrimmed t found in the same sequences."""
    rng = np.random.default_rng(21)
    seen = Counter(verdict_of([launch(rng, effect=effect, pairs=8) for _ in range(24)]) for _ in range(40))
    assert seen["slower"] >= found


def confirmed(first: list[Launch], fresh: list[Launch]) -> Decision:
    decision = decide(first, METRICS)
    assert decision.verdict in ("slower", "faster"), "or there is nothing to confirm"
    return after_fresh_launches(decision, [*first, *fresh], len(first))


def test_a_difference_that_fresh_processes_do_not_show_is_no_verdict():
    """All launches of the first processes lean one way by 2.5 %, as a layout in memory would make them."""
    rng = np.random.default_rng(30)
    lucky = flat(*rng.normal(0.025, 0.001, 6))
    for word, made in (("slower", lucky), ("faster", swapped(lucky))):
        fresh = flat(*rng.normal(0.0, 0.001, 6))
        decision = confirmed(made, fresh)
        assert decision.verdict in ("same", "inconclusive")
        assert any(f"{word} in the first 6 launches, not confirmed by 6" in note for note in decision.notes)
        assert confirmed(made, made).verdict == word
        assert confirmed(made, swapped(made)).verdict in ("same", "inconclusive")


def test_a_budget_that_leaves_no_room_to_confirm_is_inconclusive():
    first = flat(0.05, 0.051, 0.052, 0.049, 0.05, 0.048)
    decision = confirmed(first, first[:2])
    assert decision.verdict == "inconclusive"
    assert any("the budget ended before fresh processes could confirm it" in note for note in decision.notes)


def test_only_large_and_sure_differences_need_no_confirmation():
    assert is_overwhelming(decide(flat(*[0.5, 0.51, 0.52, 0.5, 0.49, 0.5]), METRICS))
    assert is_overwhelming(decide(flat(*[-0.5, -0.51, -0.52, -0.5, -0.49, -0.5]), METRICS))
    assert is_overwhelming(decide(flat(*[0.0] * 6), METRICS)), "nothing is claimed"
    assert not is_overwhelming(decide(flat(*[0.05, 0.051, 0.052, 0.05, 0.049, 0.05]), METRICS)), "sure but small"
    unsure = decide(flat(0.3, 0.7, 0.4, 0.6, 0.5, 0.9), METRICS, last=True)
    assert unsure.verdict == "slower"
    assert not is_overwhelming(unsure)


def beside_a_neighbour(rng: np.random.Generator, effect: float, bias: float) -> Launch:
    """A launch beside a busy process: a third of the blocks lose up to half of their time to it, CPU time suffers from
    the shared cache, each launch is off by 2 %, and all that come of one parent process by `bias`."""

    def hit(rng: np.random.Generator, count: int) -> np.ndarray:
        return 0.03 * rng.standard_normal(count) + np.where(rng.random(count) < 0.33, rng.uniform(0, 0.7, count), 0)

    return launch(rng, effect=(1 + effect) * np.exp(bias) - 1, noise=hit, pairs=15, launch_sd=0.02)


def told(rng: np.random.Generator, effect: float) -> str | None:
    """What `compare` says: launches until a verdict, then as many of fresh processes if it claims a difference."""
    bias, made = 0.007 * rng.standard_normal(), []

    def make() -> Launch:
        made.append(beside_a_neighbour(rng, effect, bias))
        return made[-1]

    decision = sequence(make)
    if is_overwhelming(decision):
        return decision.verdict
    bias, first = 0.007 * rng.standard_normal(), len(made)
    for _ in range(first):
        make()
    return after_fresh_launches(decision, made, first).verdict


def test_identical_code_beside_a_busy_process_is_called_different_in_less_than_one_percent():
    """Without the fresh processes it is 5 of 300."""
    rng = np.random.default_rng(31)
    seen = Counter(told(rng, 0.0) for _ in range(100))
    assert seen["slower"] + seen["faster"] <= 1


def test_five_percent_is_found_beside_a_busy_process():
    rng = np.random.default_rng(32)
    seen = Counter(told(rng, 0.05) for _ in range(40))
    assert seen["slower"] >= 36
    assert not seen["faster"]
