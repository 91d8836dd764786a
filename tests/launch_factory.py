"""Launches made by hand, with every kind of noise that machines make: for tests of what is concluded from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from attnbench.comparing.statistics import Decision, _as_estimate, _evidence, decide, published
from attnbench.comparison import FLOOR, Block, Comparison, Estimate, Launch

METRICS = ("wall", "cpu")
CALL_NS = 8e6
Noise = Callable[[np.random.Generator, int], np.ndarray]
"""Generator and number of blocks -> logarithms by which the blocks of one side are off."""


def quiet(rng: np.random.Generator, count: int) -> np.ndarray:
    """5 % of spread per block: 7 % per pair."""
    return 0.05 * rng.standard_normal(count)


def bursty(rng: np.random.Generator, count: int) -> np.ndarray:
    """One block in five is hit by something else and takes up to three times as long."""
    return quiet(rng, count) + np.where(rng.random(count) < 0.2, rng.uniform(0, 1.1, count), 0)


def bimodal(rng: np.random.Generator, count: int) -> np.ndarray:
    """Either of two clock speeds, 25 % apart, and either of two memory layouts per launch, 2 % apart."""
    return 0.02 * rng.standard_normal(count) + 0.22 * rng.integers(2, size=count) + 0.02 * rng.integers(2)


def launch(
    rng: np.random.Generator,
    effect: float = 0.0,
    cpu_effect: float | None = None,
    noise: Noise = quiet,
    pairs: int = 10,
    launch_sd: float = 0.0075,
    drift: np.ndarray | float = 0.0,
    tick: float = 1.0,
) -> Launch:
    """One launch in which b really takes 1 + effect as long; CPU time is half as noisy as wall time."""
    ratios = {"wall": effect, "cpu": effect if cpu_effect is None else cpu_effect}
    bias = launch_sd * rng.standard_normal()
    sides: list[dict[str, np.ndarray]] = [{}, {}]
    for metric, scale in (("wall", 1.0), ("cpu", 0.5)):
        for side, factor, off in ((0, 1.0, -bias / 2), (1, 1 + ratios[metric], bias / 2)):
            ns = CALL_NS * factor * np.exp(drift + off + scale * noise(rng, pairs))
            sides[side][metric] = np.maximum(np.round(ns / tick), 1) * tick
    a, b = ([Block({name: float(side[name][i]) for name in METRICS}) for i in range(pairs)] for side in sides)
    return Launch(a=tuple(a), b=tuple(b))


def flat(*log_ratios: float, pairs: int = 4, metrics: Sequence[str] = METRICS) -> list[Launch]:
    """A launch for each log-ratio, without any noise inside, equal on all metrics."""
    a = Block(dict.fromkeys(metrics, CALL_NS))
    return [
        Launch(a=(a,) * pairs, b=(Block(dict.fromkeys(metrics, CALL_NS * float(np.exp(log)))),) * pairs)
        for log in log_ratios
    ]


def by_metric(**ratios: float) -> list[Launch]:
    """Twenty-four launches without noise, with one ratio per metric."""
    a = Block(dict.fromkeys(ratios, CALL_NS))
    b = Block({name: CALL_NS * ratio for name, ratio in ratios.items()})
    return [Launch(a=(a,) * 4, b=(b,) * 4)] * 24


def poisoned(one: Launch, side: str, factor: float) -> Launch:
    """A launch in which something else made one side take `factor` times as long by every metric."""
    a, b = (
        tuple(
            Block({metric: ns * (factor if name == side else 1.0) for metric, ns in block.ns.items()})
            for block in sides
        )
        for name, sides in (("a", one.a), ("b", one.b))
    )
    return Launch(a=a, b=b)


def swapped(launches: Sequence[Launch]) -> list[Launch]:
    """The same with a and b exchanged."""
    return [Launch(a=one.b, b=one.a) for one in launches]


def sequence(make: Callable[[], Launch], looks: Sequence[int] = (6, 10, 16, 24), floor: float = 0.01) -> Decision:
    """Launch after launch until the rule says stop."""
    launches: list[Launch] = []
    while True:
        launches.append(make())
        decision = decide(launches, METRICS, looks=looks, floor=floor)
        if decision.verdict is not None:
            return decision


def comparison(decision: Decision, **fields: object) -> Comparison:
    """What a runner would make of a decision."""
    main = decision.estimates[published(list(decision.estimates))]
    made = {
        "verdict": decision.verdict,
        "ratio": main.ratio,
        "interval": main.interval,
        "smallest_slowdown": min(one.detectable for one in decision.estimates.values()),
        "estimates": decision.estimates,
    }
    return Comparison(**(made | fields))  # type: ignore[arg-type]


def estimate(launches: Sequence[Launch], metric: str, alpha: float, floor: float = FLOOR) -> Estimate:
    """The ratio by one metric; each bound of an interval errs with probability alpha."""
    return _as_estimate(_evidence(launches, metric, alpha), metric, floor)
