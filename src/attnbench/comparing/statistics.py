"""Statistics of a comparison: time of b / time of a with intervals, and the rule that says when the evidence is enough.

Everything is computed on ln(b / a) of neighbouring blocks. Swapping the sides negates each figure to the last bit, and
so mirrors the verdict. If metrics contradict each other, there is no verdict.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log, log1p

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from attnbench.comparison import ALPHA, FLOOR, LOOKS, Estimate, Launch, Verdict
from attnbench.errors import UsageError
from attnbench.results.ratios import LARGE_DIFFERENCE, SAME_WIDTH, SAME_WITHIN

LAUNCHES_PER_TRIMMED = 8
"""Launches per launch that is left out at either end: none of 6, one of 10, two of 16, three of 24."""
DRAWS = 4000
SEED = 20240229
ENDLESS = 50.0
"""Logarithm that stands for infinity, which JSON cannot hold."""
FEW_LAUNCHES = 6
"""Fewest launches for a bootstrap, which is far too narrow below; Student's t takes its place there."""
SES_TO_DETECT = 4.0
SURE_P = 1e-4
"""p-value below which a large difference needs no confirmation."""
CONFIRM_ALPHA, FEWEST_FRESH = 0.05, 3
CONTRADICTION = "the metrics contradict each other"
_WORDS = {1: "slower", -1: "faster", 0: "neither slower nor faster"}


class TrimmedMean(Struct, frozen=True):
    """A mean without the extremes."""

    value: float
    se: float | None
    """Standard error; None for a single launch, which says nothing about its own spread."""
    freedom: int
    """Degrees of freedom of the t distribution that the mean, over its standard error, follows."""

    def half_width(self, alpha: float) -> float:
        """Return half the width of the t interval each of whose bounds errs with probability alpha."""
        from scipy.special import stdtrit

        return float("inf") if self.se is None else float(stdtrit(self.freedom, 1 - alpha)) * self.se

    def p_above(self, excess: float) -> float:
        """Return the one-sided p-value of an excess under the hypothesis that there is none."""
        from scipy.special import stdtr

        if self.se is None:
            return 1.0
        if self.se == 0:
            return float(excess <= 0)
        return float(stdtr(self.freedom, -excess / self.se))


def trimmed_mean(values: np.ndarray) -> TrimmedMean:
    """Compute the trimmed mean of one value per launch; of fewer than 8 values nothing is trimmed.

    With five or fewer values left between the extremes, the bounds would be hopelessly wide. Extremes leave the mean
    but not its error, in which each counts as its nearest neighbour that stays. All sums run in the order of the
    launches, so that negated values give the negated mean to the last bit.
    """
    cut = len(values) // LAUNCHES_PER_TRIMMED
    ordered, kept = np.sort(values), len(values) - 2 * cut
    low, high = ordered[cut], ordered[-1 - cut]
    pulled_in = np.clip(values, low, high)
    mean = (float(pulled_in.sum()) - cut * float(low + high)) / kept
    if len(values) == 1:
        return TrimmedMean(mean, None, 0)
    spread = float(pulled_in.std(ddof=1)) * ((len(values) - 1) / (kept - 1)) ** 0.5
    return TrimmedMean(mean, spread / kept**0.5, kept - 1)


def median_draws(logs: Sequence[np.ndarray]) -> np.ndarray:
    """Draw launches anew with replacement, many times, and return the medians over all pairs, ascending."""
    sizes = [len(one) for one in logs]
    pooled, owner = np.concatenate(logs), np.repeat(np.arange(len(logs)), sizes)
    order = np.argsort(pooled)
    ascending = pooled[order]
    passed = np.cumsum(owner[order, None] == np.arange(len(logs)), axis=0, dtype=float)
    times = np.random.default_rng(SEED).multinomial(len(logs), [1 / len(logs)] * len(logs), DRAWS).astype(float)
    total = times @ np.array(sizes, float)
    lower, upper = (ascending[_first_reaching(passed, times, rank)] for rank in ((total + 1) // 2, total // 2 + 1))
    return np.sort((lower + upper) / 2)


def _first_reaching(passed: np.ndarray, times: np.ndarray, rank: np.ndarray) -> np.ndarray:
    """Return per draw where in ascending order `rank` values are passed, a launch counted as often as it was drawn."""
    low, high = np.zeros(len(times), int), np.full(len(times), len(passed) - 1)
    while np.any(low < high):
        middle = (low + high) // 2
        reached = np.einsum("dl,dl->d", passed[middle], times) >= rank
        low, high = np.where(reached, low, middle + 1), np.where(reached, middle, high)
    return low


class Decision(Struct, frozen=True, kw_only=True):
    """Verdict and estimates after a number of launches."""

    verdict: Verdict | None
    """Verdict; None if more launches are needed."""
    estimates: dict[str, Estimate] = {}
    """Estimate by each metric; empty between looks."""
    notes: tuple[str, ...] = ()


class _Evidence(Struct, frozen=True, kw_only=True):
    """One metric's estimate as logarithms."""

    point: float
    low: float
    high: float
    t_low: float
    t_high: float
    mean: TrimmedMean
    """Trimmed mean of the launches' medians, which the t interval and the p-values come from."""
    se: float
    launches: int
    pairs: int

    def sign(self, floor: float) -> int:
        """Return 1 if the interval lies above the floor (slower), -1 if it lies below (faster), else 0."""
        return int(self.low > log1p(floor)) - int(self.high < -log1p(floor))

    def t_sign(self, floor: float) -> int:
        """Return the sign by the t interval."""
        return int(self.t_low > log1p(floor)) - int(self.t_high < -log1p(floor))


def launches_text(count: int) -> str:
    """Return a number of launches in words."""
    return f"{count} launch{'' if count == 1 else 'es'}"


def published(metrics: Sequence[str]) -> str:
    """Return the metric whose ratio is published: device time if there is one, else wall time."""
    return next((name for name in ("device", "wall") if name in metrics), metrics[0])


def decide(
    launches: Sequence[Launch],
    metrics: Sequence[str],
    floor: float = FLOOR,
    looks: Sequence[int] = LOOKS,
    alpha: float = ALPHA,
    last: bool = False,
) -> Decision:
    """Judge the launches at a look, or if this is the `last` chance; between looks there is no verdict. Slower by any
    metric is slower and faster by any is faster, unless another metric's interval lies on the other side of 1. `same`
    is decided by the published metric. The floor may only be raised."""
    if floor < FLOOR:
        raise UsageError(
            f"a floor of {floor:g} is below {FLOOR:g}, the effect of memory layout alone: it can only be raised."
        )
    launches = [launch for launch in launches if launch.a and launch.b]
    last = last or len(launches) >= looks[-1]
    if not last and len(launches) not in looks:
        return Decision(verdict=None)
    if not launches:
        return Decision(verdict="inconclusive", notes=("no launch has samples of both sides",))
    share = alpha / len(looks) / len(metrics)
    main, blocks = published(metrics), [block for launch in launches for block in launch.a + launch.b]
    blind = [name for name in metrics if name != main and not all(block.ns[name] > 0 for block in blocks)]
    notes = [f"{name} time is not judged: its clock is too coarse and saw blocks of 0 ns" for name in blind]
    found = {name: _evidence(launches, name, share) for name in metrics if name not in blind}
    verdict, doubts = _verdict(found, main, floor, last)
    by_device = found["device"].sign(floor) if "device" in found else 0
    if by_device and verdict == _WORDS[by_device] and not _holds_in_cycles(launches, by_device, floor):
        doubts.append(f"{verdict} by device time, but not in clock cycles: the GPU ran the two at different speeds")
        verdict = None
    if len(launches) < FEW_LAUNCHES:
        notes.append(f"only {launches_text(len(launches))}: judged by Student's t alone")
    return Decision(
        verdict="inconclusive" if verdict is None and last else verdict,
        estimates={name: _as_estimate(one, name, floor) for name, one in found.items()},
        notes=(*notes, *doubts),
    )


def is_overwhelming(decision: Decision) -> bool:
    """Return whether a decision needs no confirmation: it claims no difference, or a large and highly significant one.
    A verdict by device time needs none either: such a time does not depend on how a process lies in memory."""
    if decision.verdict not in ("slower", "faster") or "device" in decision.estimates:
        return True
    return any(
        abs(log(one.ratio)) > log(LARGE_DIFFERENCE)
        and (one.p_slower if decision.verdict == "slower" else one.p_faster) < SURE_P
        and (one.ratio > 1) == (decision.verdict == "slower")
        for one in decision.estimates.values()
    )


def after_fresh_launches(decision: Decision, launches: Sequence[Launch], first: int, floor: float = FLOOR) -> Decision:
    """Return the decision after fresh launches, all but the `first` ones: a verdict stays if they confirm it. They do
    if Student's t over them lies on the same side of 1 at 5 % by a metric that made the verdict, and by no metric on
    the other side. The estimates are those of all launches together."""
    fresh, word = launches[first:], decision.verdict
    sign, judged = (1 if word == "slower" else -1), list(decision.estimates)
    pooled = decide(launches, judged, floor=floor, last=True)
    claim = f"{word} in the first {first} launches"
    if len(fresh) < FEWEST_FRESH:
        note = f"{claim}, but the budget ended before fresh processes could confirm it: raise the budget"
        return replace(pooled, verdict="inconclusive", notes=(*pooled.notes, note))
    again = {name: _evidence(fresh, name, CONFIRM_ALPHA) for name in judged}
    made_it = {name for name, one in decision.estimates.items() if clears(one.interval, word, floor)}
    shown = any(again[name].t_sign(0.0) == sign for name in made_it)
    denied = any(one.t_sign(0.0) == -sign for one in again.values())
    if shown and not denied and pooled.verdict == word:
        return pooled
    note = f"{claim}, not confirmed by {len(fresh)} launches of fresh processes"
    verdict = "same" if pooled.verdict == "same" else "inconclusive"
    return replace(pooled, verdict=verdict, notes=(*pooled.notes, note))


def clears(interval: tuple[float, float], verdict: str | None, floor: float) -> bool:
    """Return whether an interval alone makes the verdict, slower or faster."""
    low, high = interval
    return low > 1 + floor if verdict == "slower" else high < 1 / (1 + floor)


def _verdict(found: dict[str, _Evidence], main: str, floor: float, last: bool) -> tuple[Verdict | None, list[str]]:
    """Return the verdict on b, None while it is open, and what is doubtful about it."""
    signs = {name: one.sign(floor) for name, one in found.items()}
    # The t interval must lie on the same side of 1; only the pooled median has to clear the floor.
    doubtful = [
        name
        for name, sign in signs.items()
        if (sign or name == main) and found[name].t_sign(0.0 if sign else floor) != sign
    ]
    doubts = [
        f"{name} time: the bootstrap says {_WORDS[signs[name]]}, Student's t over launches disagrees"
        for name in doubtful
    ]
    certain = {sign for name, sign in signs.items() if name not in doubtful}
    # Wall time beside device time is the host's: it contradicts only beyond the floor.
    sides = signs if main == "device" else {name: one.sign(0.0) for name, one in found.items()}
    if any(signs[name] and -signs[name] in sides.values() for name in found):
        # Something may have taken the processor in one side's turns, so that "faster" cannot be trusted. "Slower" by
        # the published time can if it is much, or if the other is hardly faster: waiting, or fewer threads, is slower
        # however little the processor did meanwhile.
        claims = ", ".join(f"{_WORDS[side]} by {name} time" for name, side in sides.items())
        much = found[main].low > log(LARGE_DIFFERENCE) or -1 not in signs.values()
        slower = signs[main] == 1 and main not in doubtful and much
        return ("slower" if slower else None), [*doubts, f"{CONTRADICTION}: {claims}"]
    if 1 in certain:
        return "slower", doubts
    if -1 in certain and 1 not in signs.values():
        return "faster", doubts
    if doubtful or any(signs.values()):
        return None, doubts
    # Wall time beside device time is the host's, and too noisy to ask it of.
    asked = [one for name, one in found.items() if name == main or name != "wall"]
    # Close enough to be called the same, yet leaning: a small slowdown needs more launches before it can be sure.
    leaning = any(abs(one.point) > log1p(floor) for one in asked)
    slack = floor - FLOOR  # a raised floor raises both limits by as much, or no ratio near the floor could ever pass
    edge, width = log1p(SAME_WITHIN + slack), log1p(SAME_WIDTH + slack)
    same = all(-edge < one.low and one.high < edge and one.high - one.low < width for one in asked)
    return ("same" if same and (last or not leaning) else None), doubts


def _holds_in_cycles(launches: Sequence[Launch], sign: int, floor: float) -> bool:
    """Return whether a verdict by device time is not due to the GPU's clock; True if that clock is not known."""
    blocks = [block for launch in launches for block in (*launch.a, *launch.b)]
    if any("device" not in block.ns or block.sm_mhz is None for block in blocks):
        return True
    clocks = [np.log(y.sm_mhz / x.sm_mhz) for one in launches for x, y in zip(one.a, one.b) if x.sm_mhz and y.sm_mhz]
    times = np.concatenate([_log_ratios(launch, "device") for launch in launches])
    ratio = float(np.median(times + np.array(clocks)))
    return sign * ratio > log1p(floor)


def _as_estimate(one: _Evidence, metric: str, floor: float) -> Estimate:
    return Estimate(
        metric=metric,
        ratio=exp(one.point),
        interval=(exp(one.low), exp(one.high)),
        t_interval=(exp(one.t_low), exp(one.t_high)),
        detectable=exp(min(log1p(floor) + SES_TO_DETECT * one.se, ENDLESS)) - 1,
        p_slower=one.mean.p_above(one.mean.value - log1p(floor)),
        p_faster=one.mean.p_above(-one.mean.value - log1p(floor)),
        launches=one.launches,
        pairs=one.pairs,
    )


def _evidence(launches: Sequence[Launch], metric: str, alpha: float) -> _Evidence:
    """Return the evidence by one metric; each bound of an interval errs with probability alpha.

    The p-values are those of a trimmed t over the launches' medians. Launches are what is independent, and with 6 to 16
    of them t keeps its level, while the bootstrap rejects two to six times too often. Trimming keeps a launch or two
    that something else disturbed from hiding what the others show.
    """
    logs = [_log_ratios(launch, metric) for launch in launches if launch.a and launch.b]
    if not logs:
        raise ValueError("no launch has blocks of both sides, so nothing can be estimated")
    pooled = np.concatenate(logs)
    point, mean = float(np.median(pooled)), trimmed_mean(np.array([np.median(one) for one in logs]))
    half = mean.half_width(alpha)
    low, high, se = mean.value - half, mean.value + half, ENDLESS if mean.se is None else mean.se
    if len(logs) >= FEW_LAUNCHES:
        draws = median_draws(logs)
        rank = int(alpha * DRAWS)
        low, high = float(draws[rank]), float(draws[-1 - rank])
        se = float(draws.std()) * (len(logs) / (len(logs) - 1)) ** 0.5
    return _Evidence(
        point=point,
        low=max(min(low, point), -ENDLESS),
        high=min(max(high, point), ENDLESS),
        t_low=max(mean.value - half, -ENDLESS),
        t_high=min(mean.value + half, ENDLESS),
        mean=mean,
        se=se,
        launches=len(logs),
        pairs=len(pooled),
    )


def _log_ratios(launch: Launch, metric: str) -> np.ndarray:
    pairs = min(len(launch.a), len(launch.b))
    ns = np.array([[block.ns[metric] for block in side[:pairs]] for side in (launch.a, launch.b)], float)
    wrong = ns[~((ns > 0) & np.isfinite(ns))]
    if len(wrong):
        raise ValueError(
            f"a block took {wrong[0]:g} ns by {metric} time: that clock is too coarse, put more calls into a block"
        )
    return np.log(ns[1]) - np.log(ns[0])
