"""Measured choices per device, software and shape class: what a policy holds, and how it answers."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable
from math import exp, inf, isfinite, log

import msgspec
from msgspec import Struct, field, structs

from attnbench.policy.shapes import REACH, Shape, distance, shape_of
from attnbench.printable import printable
from attnbench.spec import Environment, Pass, Workload, other_versions


class Constraints(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """What a choice must keep to; as it stands in a policy file."""

    max_memory: int | None = None
    """Peak extra bytes of a call."""
    deterministic: bool = False
    """The same bits every time."""
    max_error: float | None = None
    """Relative error against float64, of the output and of the gradients."""
    only: tuple[str, ...] = ()
    """Names, families or frameworks; none: all."""
    forbid: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return self != Constraints()

    def __str__(self) -> str:
        told = [
            f"at most {self.max_memory:,} extra bytes" if self.max_memory is not None else "",
            "deterministic" if self.deterministic else "",
            f"error up to {self.max_error:g}" if self.max_error is not None else "",
            f"only {', '.join(self.only)}" if self.only else "",
            f"without {', '.join(self.forbid)}" if self.forbid else "",
        ]
        return "; ".join(one for one in told if one)


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
    named: tuple[str, ...] = ()
    """What whoever made the policy asked for by name; in a file the place says so."""

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


SCHEMA = 1
IMMATERIAL = {"torch": {"numpy", "transformers"}, "jax": {"numpy", "ml_dtypes", "flax"}}
"""Packages that no attention of the framework is computed by."""


class Regret(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Time of what was chosen over time of the fastest, over shapes."""

    mean: float
    """Geometric."""
    worst: float
    worst_at: str
    shapes: int
    missed: int = 0
    """Shapes beside them that nothing could be said of."""


class Crossing(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Along the length, from where on another implementation is chosen."""

    track: str
    """What is alike at both lengths."""
    pass_: Pass = field(name="pass")
    below: str
    above: str
    tokens: float | None = None
    """Where both take as long, interpolated; null where the measured lengths are too far apart to say."""
    low: float
    high: float


class Place(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Where entries were measured; they hold nowhere else."""

    device: str
    device_name: str
    framework: str
    capability: tuple[int, int] | None = None
    threads: int = 0
    """Of a CPU; 0 elsewhere."""
    software: dict[str, str] = {}
    """Package -> version, of those that compute attention."""
    driver: str = ""
    """For the reader; not compared."""
    made: str = ""
    runs: tuple[str, ...] = ()
    within: Constraints | None = None
    """What the choices had to keep to; null where they were free."""
    held_out: Regret | None = None
    """Off the grid: each shape in turn chosen for by the others."""
    crossings: tuple[Crossing, ...] = ()
    entries: tuple[Entry, ...] = ()

    def __post_init__(self) -> None:
        times = Counter(entry.at for entry in self.entries)
        if twice := next((shape for shape, count in times.items() if count > 1), None):
            raise ValueError(f"entries has more than one for {twice.title}")

    @property
    def key(self) -> tuple[object, ...]:
        """Two places of one key may share their entries."""
        software = tuple(sorted(self.software.items()))
        within = (self.within,) if self.within else ()
        return (self.device, self.device_name, self.framework, self.capability or (), self.threads, software, *within)

    def agrees(self, other: Place) -> bool:
        """One key but for packages that only one of them has: a library more or less changes nothing for the rest."""
        bare = (structs.replace(one, software={}).key for one in (self, other))
        return next(bare) == next(bare) and not other_versions(self.software, other.software)

    def __str__(self) -> str:
        regrets = ((self.on_grid, "on the measured shapes"), (self.held_out, "held out"))
        told = [f"regret {one.mean:.3f} {where}" for one, where in regrets if one is not None]
        told += [str(self.within)] if self.within else []
        return f"{self.framework} on {self.device_name}: {', '.join([f'{len(self.entries)} shapes', *told])}"

    @property
    def on_grid(self) -> Regret | None:
        """Over the measured shapes themselves; None without entries."""
        return pooled(
            Regret(mean=e.use.regret, worst=e.use.regret, worst_at=e.at.title, shapes=1) for e in self.entries
        )

    def stale(self, environment: Environment) -> str | None:
        """Why the entries do not hold there; None where they do."""
        if self.framework != environment.framework:
            return f"measured with {self.framework}, not with {environment.framework}"
        if (self.device, self.device_name) != (environment.device, environment.device_name):
            here = f"{environment.device_name} ({environment.device})"
            return f"measured on {self.device_name} ({self.device}), this is {here}"
        if self.threads and self.threads != environment.threads:
            return f"measured with {self.threads} threads, here are {environment.threads}"
        changed = [
            f"{name} {self.software[name]} (here {environment.packages[name]})"
            for name in other_versions(self.software, environment.packages)
        ]
        return f"measured with {', '.join(changed)}" if changed else None

    def nearest(self, shape: Shape) -> tuple[float, Entry] | None:
        """The entry nearest in log space of those that agree in every hard axis; None where none does."""
        alike = [entry for entry in self.entries if entry.at.hard == shape.hard]
        found = ((distance(entry.at, shape), entry) for entry in alike)
        return min(found, key=lambda one: (one[0], one[1].at.order), default=None)


class Policy(
    Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True, tag_field="kind", tag="policy"
):
    """Measured choices. `a | b` merges: where both have an entry for a shape at one place, b's stands."""

    schema: int = SCHEMA
    places: tuple[Place, ...] = ()
    origin: str = ""
    """The file it was read from; not written."""

    @property
    def entries(self) -> tuple[Entry, ...]:
        """Of every place."""
        return tuple(entry for place in self.places for entry in place.entries)

    @property
    def within(self) -> str:
        """What its choices had to keep to, place by place; empty where they were free."""
        return "; or ".join(dict.fromkeys(str(place.within) for place in self.places if place.within))

    @property
    def name(self) -> str:
        """For messages."""
        return self.origin or "a policy made in this process"

    @property
    def digest(self) -> str:
        """Twelve hex digits over what it says."""
        return hashlib.sha256(msgspec.json.encode(structs.replace(self, origin=""), order="sorted")).hexdigest()[:12]

    def choice(self, workload: Workload, framework: str, environment: Environment) -> Choice | None:
        """What to run: the nearest measured shape within reach, at a place that this environment is; None on a miss.

        Off the grid the regret is that of the entry times what the place lost on held-out shapes; where nothing was
        held out it is not known, and `regret_high` is infinite.
        """
        found = self._nearest(workload, framework, environment)
        if found is None or found[0] > REACH:
            return None
        octaves, entry, place = found
        use, lost = structs.replace(entry.use, named=place.within.only if place.within else ()), place.held_out
        if place.within:
            use = structs.replace(use, within=str(place.within))
        if octaves == 0:
            return use
        if lost is None:
            return structs.replace(use, distance=octaves, regret_high=inf)
        regret = use.regret * lost.mean
        high = max(regret, use.regret_high, lost.worst)
        return structs.replace(use, distance=octaves, regret=regret, regret_high=high)

    def miss(self, workload: Workload, framework: str, environment: Environment) -> str | None:
        """Why `choice` has nothing to say; None where it has."""
        environment = structs.replace(environment, framework=framework)
        if why := self.stale(environment):
            return why
        found = self._nearest(workload, framework, environment)
        shape = shape_of(workload)
        if found is None:
            places = [place for place in self.places if place.stale(environment) is None]
            return f"{self.name} has no entry for {_lacking(shape, [e for p in places for e in p.entries])}"
        if found[0] <= REACH:
            return None
        return (
            f"the nearest entry of {self.name} ({found[1].at.title}) is {_too_far(found[0])} octaves away, "
            f"more than {REACH:g} are too far"
        )

    def stale(self, environment: Environment) -> str | None:
        """Why nothing in it holds in this environment (another device, framework or software); None where some does."""
        reasons = [place.stale(environment) for place in self.places]
        if any(reason is None for reason in reasons):
            return None
        of_framework = [r for r, p in zip(reasons, self.places) if r and p.framework == environment.framework]
        if not of_framework:
            return f"{self.name} holds nothing for {environment.framework or 'this framework'}"
        return f"{self.name} does not hold here: {'; '.join(dict.fromkeys(of_framework))}"

    def __str__(self) -> str:
        """One line for each place; `repr` has everything."""
        lines = [f"{self.name}: {len(self.entries)} choices", *(f"  {place}" for place in self.places)]
        return "\n".join(map(printable, lines))

    def __or__(self, other: Policy) -> Policy:
        if not isinstance(other, Policy):
            return NotImplemented
        places = {place.key: place for place in self.places}
        for place in other.places:
            places[place.key] = _merged(places[place.key], place) if place.key in places else place
        return Policy(places=tuple(places[key] for key in sorted(places, key=repr)))

    def _nearest(
        self, workload: Workload, framework: str, environment: Environment
    ) -> tuple[float, Entry, Place] | None:
        environment = structs.replace(environment, framework=framework)
        shape = shape_of(workload)
        # Of two places that hold here, the one that shares more of the software, then the younger.
        places = [place for place in self.places if place.stale(environment) is None]
        places.sort(key=lambda place: (len(place.software.keys() & environment.packages.keys()), place.made))
        found = [(*one, place) for place in reversed(places) if (one := place.nearest(shape)) is not None]
        return min(found, key=lambda one: one[0], default=None)


def place_of(environment: Environment) -> Place:
    """The place of an environment, without entries."""
    skipped = IMMATERIAL.get(environment.framework, set())
    return Place(
        device=environment.device,
        device_name=environment.device_name,
        framework=environment.framework,
        capability=environment.capability,
        threads=environment.threads if environment.device == "cpu" else 0,
        software={name: version for name, version in sorted(environment.packages.items()) if name not in skipped},
        driver=environment.driver,
    )


def pooled(parts: Iterable[Regret]) -> Regret | None:
    """The regret over the shapes of all parts; None where there are none."""
    each = list(parts)
    if not each:
        return None
    count = sum(one.shapes for one in each)
    worst = max(each, key=lambda one: one.worst)
    mean = exp(sum(log(one.mean) * one.shapes for one in each) / count)
    missed = sum(one.missed for one in each)
    return Regret(mean=mean, worst=worst.worst, worst_at=worst.worst_at, shapes=count, missed=missed)


def _merged(old: Place, new: Place) -> Place:
    entries = {entry.at: entry for entry in (*old.entries, *new.entries)}
    crossings = {(one.track, one.pass_, one.below, one.above): one for one in (*old.crossings, *new.crossings)}
    return structs.replace(
        new,
        made=max(old.made, new.made),
        runs=tuple(dict.fromkeys((*old.runs, *new.runs))),
        held_out=_held_out(old, new),
        crossings=tuple(crossings.values()),
        entries=tuple(sorted(entries.values(), key=lambda entry: entry.at.order)),
    )


def _held_out(old: Place, new: Place) -> Regret | None:
    """Of both, unless one is made of the other's runs and shapes: these are not counted again."""
    for whole, part in ((old, new), (new, old)):
        shapes = {entry.at for entry in whole.entries}
        if whole.held_out and set(part.runs) <= set(whole.runs) and shapes.issuperset(e.at for e in part.entries):
            return whole.held_out
    return pooled(one for one in (old.held_out, new.held_out) if one is not None)


def _too_far(octaves: float) -> str:
    """With as many digits as it takes to see that it is more than the reach."""
    told = (f"{octaves:.{digits}f}" for digits in range(1, 16))
    return next((text for text in told if float(text) > REACH), str(octaves))


def _lacking(shape: Shape, entries: Iterable[Entry]) -> str:
    """The hard axes of a shape that no entry agrees in, or all of them where only the combination is missing."""
    known = [entry.at.hard for entry in entries]
    missing = [f"{name} {value}" for name, value in shape.hard.items() if all(one[name] != value for one in known)]
    together = [f"{name} {value}" for name, value in shape.hard.items() if value is not False and name != "v_head_dim"]
    return ", ".join(missing) if missing else f"{', '.join(together)} together"
