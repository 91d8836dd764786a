"""The statistics of a comparison: how often verdicts are wrong, what intervals cover, which launches count."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from math import log1p

import msgspec
import numpy as np
import pytest
from launch_factory import METRICS, Noise, bimodal, bursty, by_metric, estimate, flat, launch, quiet, sequence, swapped
from scipy import stats

from attnbench.comparing.statistics import DRAWS, SEED, decide, median_draws, published, trimmed_mean
from attnbench.comparison import FLOOR, LOOKS, Block, Estimate, Launch
from attnbench.errors import UsageError

MIRRORED = {"faster": "slower", "slower": "faster", "same": "same", "inconclusive": "inconclusive", None: None}
NOISES = (quiet, bursty, bimodal)


def launches(count: int, seed: int, **fields: object) -> list[Launch]:
    rng = np.random.default_rng(seed)
    return [launch(rng, **fields) for _ in range(count)]  # type: ignore[arg-type]


def verdicts(trials: int, seed: int, **fields: object) -> Counter[str | None]:
    rng = np.random.default_rng(seed)
    make: Callable[[], Launch] = partial(launch, rng, **fields)  # type: ignore[arg-type]
    return Counter(sequence(make).verdict for _ in range(trials))


def test_draws_are_those_of_resampling_launches_by_hand():
    rng = np.random.default_rng(3)
    logs = [np.round(rng.normal(0, 1, size), 1) for size in (3, 8, 1, 5, 5, 6, 2)]
    times = np.random.default_rng(SEED).multinomial(7, [1 / 7] * 7, DRAWS)
    by_hand = [np.median(np.concatenate([np.tile(one, n) for one, n in zip(logs, row)])) for row in times]
    assert median_draws(logs) == pytest.approx(np.sort(by_hand))


@pytest.mark.parametrize("count", [6, 10])
def test_intervals_cover_and_p_values_keep_their_level(count: int):
    """At the edge of the floor, where the level is worst; both bounds may err in 5 %."""
    trials, inside, inside_t, alarms = 300, 0, 0, 0
    rng = np.random.default_rng(count)
    for _ in range(trials):
        found = estimate([launch(rng, effect=FLOOR, pairs=7) for _ in range(count)], "wall", 0.05)
        inside += found.interval[0] <= 1 + FLOOR <= found.interval[1]
        inside_t += found.t_interval[0] <= 1 + FLOOR <= found.t_interval[1]
        alarms += found.p_slower <= 0.05
    assert 0.80 * trials <= inside <= 0.95 * trials
    assert 0.86 * trials <= inside_t <= 0.95 * trials
    assert 0.02 * trials <= alarms <= 0.09 * trials


def test_identical_code_is_hardly_ever_called_different():
    seen = verdicts(200, seed=1)
    assert seen["slower"] + seen["faster"] <= 1
    assert seen["same"] >= 196


@pytest.mark.parametrize("noise", [bursty, bimodal])
def test_bursts_and_two_speeds_raise_no_alarm_either(noise: Noise):
    seen = verdicts(60, seed=2, noise=noise, pairs=20)
    assert seen["slower"] + seen["faster"] <= 1
    assert seen["same"] >= 54


@pytest.mark.parametrize("fields", [{}, {"noise": bursty}, {"launch_sd": 0.01, "pairs": 6}])
def test_five_percent_is_found(fields: dict[str, object]):
    assert verdicts(60, seed=3, effect=0.05, **fields)["slower"] >= 58


def test_five_percent_by_wall_time_alone_is_found():
    """A sleep: CPU time does not see it."""
    assert verdicts(60, seed=4, effect=0.05, cpu_effect=0.0, pairs=20)["slower"] >= 58
    awake = swapped(launches(24, 4, effect=0.05, cpu_effect=0.0))
    assert decide(awake, METRICS).verdict == "faster"


@pytest.mark.parametrize("noise", NOISES)
def test_an_improvement_is_never_a_regression(noise: Noise):
    seen = verdicts(40, seed=5, effect=-0.15, noise=noise)
    assert seen["slower"] == seen["same"] == 0
    assert seen["faster"] >= 39


def test_a_trend_that_both_arms_share_does_not_matter():
    rng = np.random.default_rng(6)
    trend = iter(np.linspace(0, 1.2, 24 * 10).reshape(24, 10))
    drifting = [launch(rng, drift=next(trend)) for _ in range(24)]
    still = launches(24, 6)
    a, b = (decide(one, METRICS) for one in (drifting, still))
    assert a.verdict == b.verdict == "same"
    assert a.estimates["wall"].ratio == pytest.approx(b.estimates["wall"].ratio, abs=1e-6)


@pytest.mark.parametrize("tick", [8e3, 4e5])
def test_quantised_clocks(tick: float):
    """A thousand ticks in a call, and twenty: nearly all pairs tie, or differ by 5 %."""
    unchanged, slower = (launches(24, 7, effect=effect, tick=tick) for effect in (0.0, 0.12))
    assert decide(unchanged, METRICS).verdict == "same"
    assert decide(slower, METRICS).verdict == "slower"


def test_identical_samples_are_the_same_either_way():
    made = flat(*[0.0] * 6)
    for one in (made, swapped(made)):
        decision = decide(one, METRICS)
        assert decision.verdict == "same"
        assert decision.estimates["wall"].interval == (1, 1)
        assert decision.estimates["wall"].p_slower == 1


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("effect", [0.0, 0.02, 0.05])
def test_swapping_the_arms_mirrors_everything(noise: Noise, effect: float):
    for seed in range(5):
        there = launches(10, seed, effect=effect, noise=noise, pairs=5 + seed)
        one, other = decide(there, METRICS), decide(swapped(there), METRICS)
        assert other.verdict == MIRRORED[one.verdict]
        for name in METRICS:
            _check_mirrored(one.estimates[name], other.estimates[name])


def _check_mirrored(one: Estimate, other: Estimate) -> None:
    assert other.ratio == pytest.approx(1 / one.ratio, rel=1e-12)
    assert other.interval == pytest.approx((1 / one.interval[1], 1 / one.interval[0]), rel=1e-12)
    assert other.t_interval == pytest.approx((1 / one.t_interval[1], 1 / one.t_interval[0]), rel=1e-12)
    assert (other.p_slower, other.p_faster) == pytest.approx((one.p_faster, one.p_slower), rel=1e-9)


def test_the_same_launches_give_the_same_answer():
    made = launches(10, 9)
    assert decide(made, METRICS) == decide(made, METRICS)


def test_evidence_is_only_looked_at_at_looks():
    made = by_metric(wall=1.5, cpu=1.5)
    for count in range(24):
        expected = "slower" if count in LOOKS else None
        decision = decide(made[:count], METRICS)
        assert decision.verdict == expected
        assert bool(decision.estimates) == (count in LOOKS)


def test_what_stays_open_is_inconclusive_at_the_end_only():
    made = launches(24, 10, launch_sd=0.3)
    assert [decide(made[:look], METRICS).verdict for look in LOOKS] == [None, None, None, "inconclusive"]
    assert decide(made[:7], METRICS).verdict is None
    assert decide(made[:7], METRICS, last=True).verdict == "inconclusive"


def test_the_risk_is_split_over_looks_and_metrics():
    made = launches(6, 11)
    split, whole = decide(made, METRICS), decide(made, ("wall",), looks=(6,))
    assert split.estimates["wall"] == estimate(made, "wall", 0.01 / 8)
    assert whole.estimates["wall"] == estimate(made, "wall", 0.01)


def test_few_launches_are_judged_with_care():
    made = launches(3, 12, effect=0.05)
    decision = decide(made, METRICS, last=True)
    assert decision.verdict == "inconclusive"
    assert decision.estimates["wall"].interval == decision.estimates["wall"].t_interval
    assert "3 launches" in decision.notes[0]
    assert decide(launches(4, 12, effect=3.0), METRICS, last=True).verdict == "slower"


def test_one_launch_proves_nothing_and_is_still_json():
    decision = decide(by_metric(wall=3.0, cpu=3.0)[:1], METRICS, last=True)
    assert decision.verdict == "inconclusive"
    found = decision.estimates["wall"]
    assert found.interval[0] < 1e-9 < 1e9 < found.interval[1]
    assert found.p_slower == 1
    assert msgspec.json.decode(msgspec.json.encode(found), type=Estimate) == found


def test_no_launch_at_all():
    assert decide([], METRICS).verdict is None
    assert decide([Launch(a=(), b=())], METRICS, last=True).verdict == "inconclusive"
    with pytest.raises(ValueError, match="nothing can be estimated"):
        estimate([], "wall", 0.05)


def test_a_launch_cut_short_keeps_its_pairs():
    whole = launches(6, 13)
    cut = [Launch(a=one.a, b=one.b[:7]) for one in whole]
    assert estimate(cut, "wall", 0.05).pairs == 42


def test_intervals_that_disagree_decide_nothing():
    """Of six launches, all slower, one is so far off that their mean could be anything."""
    made = flat(*[0.03] * 5, 0.6)
    assert estimate(made, "wall", 0.01 / 8).interval[0] > 1 + FLOOR
    assert decide(made, METRICS).verdict is None
    final = decide(made, METRICS, looks=(6,))
    assert final.verdict == "inconclusive"
    assert any("wall time: the bootstrap says slower, Student's t" in note for note in final.notes)
    assert decide(swapped(made), METRICS, looks=(6,)).verdict == "inconclusive"


@pytest.mark.parametrize(
    "ratios, verdict",
    [
        ({"wall": 1.02, "cpu": 1.0}, "slower"),
        ({"wall": 1.0, "cpu": 1.02}, "slower"),
        ({"wall": 1.005, "cpu": 1.005}, "same"),
        ({"wall": 0.98, "cpu": 1.0}, "faster"),
        ({"wall": 1.0, "cpu": 0.98}, "faster"),
        ({"wall": 0.995, "cpu": 0.995}, "same"),
        ({"wall": 0.796, "cpu": 1.27}, "inconclusive"),
        ({"wall": 0.9, "cpu": 1.02}, "inconclusive"),
        ({"wall": 1.02, "cpu": 0.9}, "inconclusive"),
        ({"wall": 1.02, "cpu": 0.995}, "slower"),
        ({"wall": 1.8, "cpu": 0.9}, "slower"),
        ({"wall": 3.0, "cpu": 0.995}, "slower"),
        ({"wall": 0.98, "cpu": 1.005}, "inconclusive"),
        ({"wall": 1.005, "cpu": 0.98}, "inconclusive"),
        ({"wall": 1.0, "device": 1.02}, "slower"),
        ({"wall": 0.995, "device": 1.02}, "slower"),
        ({"wall": 0.9, "device": 1.02}, "inconclusive"),
    ],
)
def test_one_metric_is_enough_unless_another_contradicts_it(ratios: dict[str, float], verdict: str):
    assert decide(by_metric(**ratios), list(ratios)).verdict == verdict


def test_faster_by_one_metric_does_not_cover_a_doubtful_slower_by_another():
    doubtful = flat(*[0.03] * 5, 0.6, metrics=["wall"])
    made = [
        Launch(a=tuple(Block({**x.ns, "cpu": 1e6}) for x in one.a), b=tuple(Block({**x.ns, "cpu": 9e5}) for x in one.b))
        for one in doubtful
    ]
    assert decide(made, ("cpu",), looks=(6,)).verdict == "faster"
    assert decide(made, METRICS, looks=(6,)).verdict == "inconclusive"


def test_a_small_slowdown_is_not_called_the_same_before_the_last_look():
    made = flat(0.004, 0.012, 0.016, 0.02, 0.024, 0.028)
    assert decide(made, METRICS).verdict is None
    assert decide(made, METRICS, last=True).verdict == "same"
    assert decide(flat(-0.002, 0.0, 0.002, 0.004, 0.001, 0.003), METRICS).verdict == "same"


def test_metrics_that_contradict_each_other_are_noted():
    decision = decide(by_metric(wall=0.9, cpu=1.05), METRICS)
    assert decision.verdict == "inconclusive", "more threads, or someone who takes the processor in one side's turns"
    assert decide(by_metric(wall=1.05, cpu=0.9), METRICS).verdict == "inconclusive"
    assert decide(by_metric(wall=0.9, cpu=1.05)[:6], METRICS).verdict is None, "more launches may settle it"
    assert decision.notes == ("the metrics contradict each other: faster by wall time, slower by cpu time",)


def test_device_time_is_published_where_there_is_one():
    assert published(("wall", "device")) == "device"
    assert published(("wall", "cpu")) == "wall"


def on_gpu(ratio: float, clock_ratio: float) -> list[Launch]:
    a, b = Block({"device": 1e6}, 0, 1980.0), Block({"device": 1e6 * ratio}, 0, 1980.0 * clock_ratio)
    return [Launch(a=(a,) * 4, b=(b,) * 4)] * 6


def test_a_verdict_on_a_gpu_must_hold_in_clock_cycles_too():
    assert decide(on_gpu(1.05, 1.0), ("device",)).verdict == "slower"
    doubted = decide(on_gpu(1.018, 1 / 1.018), ("device",))
    assert doubted.verdict is None, "as many cycles, at a lower clock: not b's fault"
    assert "not in clock cycles" in doubted.notes[0]
    assert decide(on_gpu(1 / 1.018, 1.018), ("device",), last=True).verdict == "inconclusive"
    assert decide(on_gpu(1.05, 1 / 1.018), ("device",)).verdict == "slower"
    assert decide(on_gpu(0.95, 1.0), ("device",)).verdict == "faster"


def test_a_floor_is_only_ever_raised():
    made = by_metric(wall=1.06, cpu=1.06)
    assert decide(made, METRICS).verdict == "slower"
    assert decide(made, METRICS, floor=0.08).verdict == "same"
    assert decide(by_metric(wall=1.1, cpu=1.1), METRICS, floor=0.08).verdict == "slower"
    with pytest.raises(UsageError, match="only be raised"):
        decide(made, METRICS, floor=0.005)


def test_a_block_of_no_time_is_refused():
    made = [Launch(a=(Block({"wall": 0.0}),), b=(Block({"wall": 5.0}),))] * 6
    with pytest.raises(ValueError, match=r"0 ns by wall time.*more calls"):
        decide(made, ("wall",))


def test_a_second_clock_too_coarse_is_left_out_and_said():
    block = Block({"wall": 1e6, "cpu": 0.0})
    decision = decide([Launch(a=(block,) * 4, b=(block,) * 4)] * 6, METRICS)
    assert decision.verdict == "same"
    assert list(decision.estimates) == ["wall"]
    assert "cpu time is not judged" in decision.notes[0]


def test_the_smallest_slowdown_is_the_floor_and_four_standard_errors():
    found = [estimate(launches(24, seed, pairs=5), "wall", 0.01).detectable for seed in range(20)]
    medians_sd = (0.0075**2 + (1.2 * 0.07) ** 2 / 5) ** 0.5
    expected = log1p(FLOOR) + 4 * medians_sd / 24**0.5
    assert np.median(np.log1p(found)) == pytest.approx(expected, rel=0.15)


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
