"""What a policy says of a shape, and what that rests on."""

from __future__ import annotations

from math import isfinite

from msgspec import Struct

from attnbench.policy.shapes import Shape

Settings = dict[str, int | float | str | bool]
"""A config of an implementation, as a file holds it."""


def label_of(implementation: str, config: Settings) -> str:
    """The implementation, and the config where it is not the default: its name in tables."""
    told = ",".join(f"{k}={v}" for k, v in sorted(config.items()))
    return f"{implementation}[{told}]" if told else implementation


class Alternative(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The next best, for where the choice cannot run."""

    implementation: str
    config: Settings = {}
    ratio: float
    """Its time over that of the choice, same run."""

    @property
    def label(self) -> str:
        """Name in tables."""
        return label_of(self.implementation, self.config)


class Choice(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """What to run, what it is expected to lose against the best, and on what evidence."""

    implementation: str
    config: Settings = {}
    regret: float = 1.0
    """Its time over that of the fastest: more than 1 where a near tie was settled otherwise, and off the grid."""
    regret_high: float = 1.0
    """Upper edge of the 99 % interval, against every other candidate."""
    candidates: int = 1
    """Implementations (and configs) that were timed there and might have been chosen."""
    alternatives: tuple[Alternative, ...] = ()
    """The others, fastest first."""
    measured: str = ""
    """Id of the workload that was measured."""
    distance: float = 0.0
    """Octaves from the shape asked for to the measured one; 0 in a file."""
    within: str = ""
    """What it had to keep to when it was chosen; in a file the place says so."""

    def __post_init__(self) -> None:
        if not self.implementation:
            raise ValueError("a choice must name an implementation")
        if not 1 <= self.regret <= self.regret_high:
            raise ValueError(
                f"regret is 1 or more and regret_high not below it, not {self.regret} and {self.regret_high}"
            )

    @property
    def label(self) -> str:
        """Name in tables."""
        return label_of(self.implementation, self.config)

    @property
    def regret_known(self) -> bool:
        """Off the grid only where shapes were held out."""
        return isfinite(self.regret_high)

    @property
    def runner_up(self) -> Alternative | None:
        """The best of the others."""
        return self.alternatives[0] if self.alternatives else None

    def __str__(self) -> str:
        near = "" if self.distance == 0 else f", {self.distance:.1f} octaves away"
        others = f"first of {self.candidates}" if self.candidates > 1 else "alone"
        lost = f"expected regret {self.regret:.3f}" if self.regret_known else "regret off the grid not known"
        kept = f", chosen within: {self.within}" if self.within else ""
        return f"{self.label}: {others} measured at {self.measured}{near} ({lost}){kept}"


class Entry(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One line of a policy: a measured shape, and the choice there."""

    at: Shape
    use: Choice
