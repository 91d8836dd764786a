"""What happens when no measured policy speaks for a call: a warning once, an error, or silence (setting `on_miss`).

Asked when a problem is first seen, not at every call. A policy that somebody asked for and that does not hold here
(stale, or of another device) is named once as well, even where another one speaks.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Hashable

from attnbench import policy
from attnbench.dispatch.choice import Decision, of_elsewhere
from attnbench.dispatch.order import META, Demand
from attnbench.errors import PolicyMiss, PolicyWarning
from attnbench.printable import printable

HOW = "`attnbench run` and `attnbench choose` make one; ATTNBENCH_ON_MISS=quiet silences this"
NOTHING_TO_CHOOSE = ("numpy",)
"""Frameworks whose implementations differ in what they take, not in speed."""
_warned: dict[Hashable, object] = {}


def report(decision: Decision, demand: Demand) -> None:
    """Say once what the policies could not answer, by the rule in force."""
    if demand.framework in NOTHING_TO_CHOOSE or demand.device == META:
        return
    rule = policy.on_miss()
    if decision.evidence is None and rule == "error":
        raise PolicyMiss(f"{_miss(decision, demand)}, and on_miss is error; {HOW.partition(';')[0]}.")
    if rule != "quiet":
        for one in policy.active():
            why = None if of_elsewhere(one, demand.environment) else one.stale(demand.environment)
            if why is not None:
                _warn_once((one.digest, demand.framework, demand.device), f"{why}: it is not used.")
        if decision.evidence is None:
            _warn_once(_class_of(decision, demand), f"{_miss(decision, demand)}; {_pick(decision)}. {HOW}.")


def tell_failure(label: str, reason: str, instead: str, demand: Demand) -> None:
    """Warn once that a candidate was chosen and could not run, and who takes its place."""
    text = f"{label} was chosen for {demand.workload.title} on {demand.device} and could not run it ({reason})"
    _warn_once(("failed", label, demand.framework, demand.device), f"{text}; {instead} takes its place.")


def forget() -> None:
    """Warn again of what was told."""
    _warned.clear()


def _miss(decision: Decision, demand: Demand) -> str:
    reasons = "; ".join(decision.missed) or "none is of this device"
    return f"no measured policy speaks for {demand.workload.title} on {demand.device} ({reasons})"


def _pick(decision: Decision) -> str:
    return f"{decision.pick.name} is taken, the first of the fixed order that can run it" if decision.pick else ""


def _class_of(decision: Decision, demand: Demand) -> Hashable:
    """Problems that one warning covers: all of a device without policies, else those alike in all but sizes."""
    place = (demand.framework, demand.device)
    if all(one.stale(demand.environment) for one in policy.active()):
        return place
    shape = policy.shape_of(demand.workload)
    return (*place, tuple(shape.hard.items()), decision.pick and decision.pick.name)


def _warn_once(key: Hashable, text: str) -> None:
    mine = object()
    if _warned.setdefault(key, mine) is mine:
        warnings.warn(printable(text), PolicyWarning, stacklevel=_callers_level())


def _callers_level() -> int:
    """Of the first frame outside of attnbench, seen from the function that warns."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("attnbench."):
        level, frame = level + 1, frame.f_back
    return level
