"""Policies: measured choices per device, software and shape class, and how a policy answers for a workload."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Sequence
from math import inf, isfinite

import msgspec
from msgspec import Struct, field, structs

from attnbench.policy.labels import Labelled, Settings
from attnbench.policy.prediction import FEWEST_HELD_OUT, HeldOutCheck, Prediction, TimeModel
from attnbench.policy.regret import Regret, pooled
from attnbench.policy.shapes import REACH, Shape, distance, shape_of
from attnbench.printable import printable
from attnbench.spec import Environment, Pass, Workload, other_versions


class Constraints(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Constraints on a choice, as a policy file holds them."""

    max_memory: int | None = None
    """Most extra bytes of a call at its peak."""
    deterministic: bool = False
    """Whether only implementations that give the same bits every time are allowed."""
    max_error: float | None = None
    """Largest relative error against float64, of the output and of the gradients."""
    only: tuple[str, ...] = ()
    """Names, families or frameworks that may be chosen; empty: all."""
    forbid: tuple[str, ...] = ()
    """Names, families or frameworks that may not be chosen."""

    def __bool__(self) -> bool:
        return self != Constraints()

    @property
    def bounds_measurements(self) -> bool:
        """Whether memory or errors are bounded, which are known of measured workloads alone."""
        return self.max_memory is not None or self.max_error is not None

    def __str__(self) -> str:
        parts = [
            "" if self.max_memory is None else f"at most {self.max_memory:,} extra bytes",
            "deterministic" if self.deterministic else "",
            "" if self.max_error is None else f"error up to {self.max_error:g}",
            f"only {', '.join(self.only)}" if self.only else "",
            f"without {', '.join(self.forbid)}" if self.forbid else "",
        ]
        return "; ".join(filter(None, parts))


class Alternative(Labelled, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A slower candidate, which is used if the choice cannot run."""

    ratio: float
    """Time of the alternative / time of the choice, in the same run."""
    compile_s: float | None = None
    """Seconds for which it compiled before its first call; null if it compiled nothing, or if that is not known."""


class Choice(Labelled, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Implementation to run, the time it is expected to lose against the fastest, and the evidence."""

    regret: float = 1.0
    """Time of the choice / time of the fastest: more than 1 after a near tie, and off the measured grid."""
    regret_high: float = 1.0
    """Upper edge of the 99 % interval, against every other candidate."""
    candidates: int = 1
    """Number of implementations (and configs) that were timed at the shape and might have been chosen."""
    time_us: float | None = None
    """Microseconds of a call, as measured or predicted; null if not known (files of an older attnbench)."""
    compile_s: float | None = None
    """Seconds for which it compiled before its first call; null if it compiled nothing, or if that is not known."""
    alternatives: tuple[Alternative, ...] = ()
    """Other candidates, fastest first."""
    measured: str = ""
    """Id of the workload that was measured."""
    distance: float = 0.0
    """Octaves from the requested shape to the measured one; 0 in a file."""
    within: str = ""
    """Constraints under which it was chosen; empty in a file, whose place holds them."""
    named: tuple[str, ...] = ()
    """Implementations that the maker of the policy asked for by name; empty in a file, whose place holds them."""
    caveat: str = ""
    """Facts of the place that are not known, such as the kind of its processor; empty in a file."""
    left_out: str = ""
    """Why the choice of the entry is left out, if an alternative stands in for it; empty in a file."""
    predicted: str = ""
    """Reason why it is predicted, and from what; empty if it was measured, and in a file."""

    def __post_init__(self) -> None:
        if not self.implementation:
            raise ValueError("a choice must name an implementation")
        if not 1 <= self.regret <= self.regret_high:
            raise ValueError(
                f"regret must be 1 or more and regret_high at least regret, not {self.regret} and {self.regret_high}"
            )

    @property
    def regret_known(self) -> bool:
        """True if the regret is known: off the grid only if shapes were held out, and of no alternative."""
        return isfinite(self.regret_high)

    @property
    def runner_up(self) -> Alternative | None:
        """Fastest alternative; None without one."""
        return self.alternatives[0] if self.alternatives else None

    def without(self, names: Container[str]) -> Choice | None:
        """Return the choice among those that are not in `names`; None if nobody is left."""
        left = [one for one in self.alternatives if one.label not in names]
        gone = len(self.alternatives) - len(left) + (self.label in names)
        if not gone:
            return self
        rest = structs.replace(self, candidates=max(1, self.candidates - gone), alternatives=tuple(left))
        if self.label not in names:
            return rest
        if not left:
            return None
        first, others = left[0], [structs.replace(one, ratio=round(one.ratio / left[0].ratio, 4)) for one in left[1:]]
        use = {
            "implementation": first.implementation,
            "config": first.config,
            "time_us": self.time_us and round(self.time_us * first.ratio, 3),
            "compile_s": first.compile_s,
            "alternatives": tuple(others),
        }
        return structs.replace(rest, regret=1.0, regret_high=inf, **use)

    def __str__(self) -> str:
        kept = f", chosen within: {self.within}" if self.within else ""
        if self.predicted:
            return f"{self.label}: {self.predicted}{kept}" + (f", {self.caveat}" if self.caveat else "")
        near = "" if self.distance == 0 else f", {self.distance:.1f} octaves away"
        others = f"first of {self.candidates}" if self.candidates > 1 else "alone"
        unknown = "regret unknown" if self.left_out else "regret unknown off the grid"
        lost = f"expected regret {self.regret:.3f}" if self.regret_known else unknown
        unsure = "".join(f", {one}" for one in (self.left_out, self.caveat) if one)
        return f"{self.label}: {others} measured at {self.measured}{near} ({lost}){kept}{unsure}"


class Entry(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One line of a policy: a measured shape and the choice for it."""

    at: Shape
    use: Choice


class Barred(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A measured workload, and who may not be chosen for its shape, nor where it is nearer than the entry that names
    them. A shape says neither scale nor value of the soft cap, so that what was found at one holds for all."""

    at: Shape
    measured: str = ""
    """Id of the workload."""
    incorrect: tuple[str, ...] = ()
    """Names in tables of those that were found incorrect."""
    kept_out: tuple[str, ...] = ()
    """Names in tables of those that did not keep to the constraints of the place."""


UsableFor = Callable[[str, Settings, Collection[str]], bool | None]
"""Function of an implementation, its settings and the names that the maker of a policy asked for: whether it computes
the pairs that the mask of a workload hides; None if it cannot be used for the workload."""
SCHEMA = 1
IMMATERIAL = {"torch": {"numpy", "transformers"}, "jax": {"numpy", "ml_dtypes", "flax"}}
"""Framework -> packages that do not compute its attention, so that their versions do not matter."""


class Crossing(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Length from which on another implementation is chosen."""

    track: str
    """Description of everything that is equal at both lengths."""
    pass_: Pass = field(name="pass")
    below: str
    above: str
    tokens: float | None = None
    """Length at which both take as long, interpolated; null if the measured lengths are too far apart to say."""
    low: float
    high: float


class Place(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Device and software on which entries were measured; they hold only there."""

    device: str
    device_name: str
    framework: str
    capability: tuple[int, int] | None = None
    threads: int = 0
    """Threads of a CPU; 0 on other devices."""
    processor: str = ""
    """Kind of a CPU, beside its name; empty on other devices, and if it was not recorded."""
    software: dict[str, str] = {}
    """Package -> version, for packages that compute attention."""
    driver: str = ""
    """Driver version, for the reader; it is not compared."""
    made: str = ""
    runs: tuple[str, ...] = ()
    within: Constraints | None = None
    """Constraints on the choices; null if there were none."""
    held_out: Regret | None = None
    """Regret off the grid: each shape in turn is left out, and its choice is read from the remaining entries."""
    crossings: tuple[Crossing, ...] = ()
    entries: tuple[Entry, ...] = ()
    barred: tuple[Barred, ...] = ()
    """Who may not be chosen where, by measurement."""
    prediction: Prediction | None = None
    """Models by which a choice is predicted where no entry is near; null if too little was measured."""

    def __post_init__(self) -> None:
        times = Counter(entry.at for entry in self.entries)
        if twice := next((shape for shape, count in times.items() if count > 1), None):
            raise ValueError(f"entries has more than one choice for {twice.title}")

    @property
    def key(self) -> tuple[object, ...]:
        """Identity of the place: two places with the same key may share their entries."""
        software = tuple(sorted(self.software.items()))
        within = (self.within,) if self.within else ()
        kind = (self.processor,) if self.processor else ()
        where = (self.device, self.device_name, self.framework, self.capability or (), self.threads)
        return (*where, software, *kind, *within)

    def agrees(self, other: Place) -> bool:
        """Return whether two places have one key, apart from packages that only one of them has."""
        bare = (structs.replace(one, software={}).key for one in (self, other))
        return next(bare) == next(bare) and not other_versions(self.software, other.software)

    def __str__(self) -> str:
        regrets = ((self.on_grid, "on the measured shapes"), (self.held_out, "held out"))
        facts = [f"{len(self.entries)} shapes"]
        facts += [f"regret {one.mean:.3f} {where}" for one, where in regrets if one is not None]
        facts += [str(self.within)] if self.within else []
        return f"{self.framework} on {self.device_name}: {', '.join(facts)}"

    @property
    def on_grid(self) -> Regret | None:
        """Regret over the measured shapes themselves; None without entries."""
        return pooled(
            Regret(mean=e.use.regret, worst=e.use.regret, worst_at=e.at.title, shapes=1) for e in self.entries
        )

    def stale(self, environment: Environment) -> str | None:
        """Return why the entries do not hold in an environment; None if they do."""
        if self.framework != environment.framework:
            return f"measured with {self.framework}, not with {environment.framework}"
        if (self.device, self.device_name) != (environment.device, environment.device_name):
            here = f"{environment.device_name} ({environment.device})"
            return f"measured on {self.device_name} ({self.device}), this is {here}"
        if self.processor and environment.processor and self.processor != environment.processor:
            return f"measured on {self.device_name} of kind {self.processor}, this is {environment.processor}"
        if self.processor != environment.processor and not self.processor and self._names_many_processors:
            return (
                f'measured on a processor whose kind was not recorded and whose name, "{self.device_name}", virtual '
                f"machines give to many generations; this is {environment.processor}"
            )
        if self.threads and self.threads != environment.threads:
            return f"measured with {self.threads} threads, this process has {environment.threads}"
        changed = [
            f"{name} {self.software[name]} (here {environment.packages[name]})"
            for name in other_versions(self.software, environment.packages)
        ]
        return f"measured with {', '.join(changed)}" if changed else None

    @property
    def _names_many_processors(self) -> bool:
        """Whether a CPU is named without a number, as hypervisors name whatever they run on."""
        return self.device == "cpu" and not any(map(str.isdigit, self.device_name))

    def caveat(self, environment: Environment) -> str:
        """Return what is not known of the place where it might differ from an environment; empty if all is known."""
        if self.device != "cpu" or self.processor or not environment.processor:
            return ""
        return f"on a processor named {self.device_name} whose kind was not recorded"

    def nearest(self, shape: Shape) -> tuple[float, Entry] | None:
        """Return the nearest entry in log space that agrees in every hard axis, with its distance; None without one."""
        return next(iter(self.by_distance(shape)), None)

    def by_distance(self, shape: Shape) -> list[tuple[float, Entry]]:
        """Return the entries that agree with a shape in every hard axis, each with its distance, nearest first.

        If memory is bounded, a shape that is larger than a measured one in any axis may need more, so that its entry
        does not cover it.
        """
        bounded = self.within is not None and self.within.max_memory is not None
        entries = [one for one in self.entries if one.at.hard == shape.hard and not (bounded and shape.exceeds(one.at))]
        found = ((distance(entry.at, shape), entry) for entry in entries)
        return sorted(found, key=lambda one: (one[0], one[1].at.order))

    def ranking(self, shape: Shape, usable: UsableFor, barred: Container[str]) -> list[tuple[float, TimeModel]]:
        """Return the models of those that are usable for a shape with their predicted times, the shortest first,
        without those that may not be chosen for its class."""
        if self.prediction is None:
            return []
        out = {name for one in self.barred for name in one.kept_out}
        out |= {name for one in self.barred if one.at.hard == shape.hard for name in one.incorrect}
        named = self.within.only if self.within else ()
        found: list[tuple[float, TimeModel]] = []
        for one in self.prediction.models:
            if one.covers(shape) and one.label not in out and one.label not in barred:
                computes_hidden = usable(one.implementation, one.config, named)
                if computes_hidden is not None:
                    found.append((one.time_ns(shape, computes_hidden, self.prediction.units), one))
        return sorted(found, key=lambda one: (one[0], one[1].label))


class Covering(Struct, frozen=True, kw_only=True):
    """An entry that covers a shape, and those of its candidates that may not be chosen for it."""

    place: Place
    entry: Entry
    distance: float
    barred: dict[str, str]
    """Name in tables -> why it may not be chosen."""

    @property
    def use(self) -> Choice | None:
        """Choice of the entry among those that are left; None if nobody is."""
        use = self.entry.use.without(self.barred)
        why = self.barred.get(self.entry.use.label, "")
        if use is None or not why:
            return use
        return structs.replace(use, left_out=f"{self.entry.use.label} is left out: {why}")


def coverings(places: Sequence[Place], shape: Shape, asked: Sequence[Place] = ()) -> list[Covering]:
    """Return the entries that agree with a shape in every hard axis, nearest first, of places that hold together; of
    two as near, that of the earlier place comes first.

    Whoever was found incorrect at a shape no further away than the entry is left out of it, whichever of the places
    found it, or those of policies that were `asked` before; so is whoever did not keep to the constraints of the place
    of the entry.
    """
    near = [(octaves, entry, place) for place in places for octaves, entry in place.by_distance(shape)]
    known = [
        (distance(one.at, shape), one, place)
        for place in (*places, *asked)
        for one in place.barred
        if one.at.hard == shape.hard
    ]
    known.sort(key=lambda one: one[0])

    def barred(within: float, home: Place) -> dict[str, str]:
        found: dict[str, str] = {}
        for octaves, one, place in known:
            if octaves <= within:
                for name in one.incorrect:
                    found.setdefault(name, f"found incorrect at {one.measured or one.at.title}")
                for name in one.kept_out if place is home else ():
                    found.setdefault(name, f"outside the constraints at {one.measured or one.at.title}")
        return found

    return [
        Covering(place=place, entry=entry, distance=octaves, barred=barred(octaves, place))
        for octaves, entry, place in sorted(near, key=lambda one: one[0])
    ]


class Policy(
    Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True, tag_field="kind", tag="policy"
):
    """Measured choices. `a | b` merges: if both have an entry for a shape at one place, that of b is kept."""

    schema: int = SCHEMA
    places: tuple[Place, ...] = ()
    origin: str = ""
    """File that the policy was read from; not written."""

    @property
    def entries(self) -> tuple[Entry, ...]:
        """Entries of every place."""
        return tuple(entry for place in self.places for entry in place.entries)

    @property
    def within(self) -> str:
        """Constraints on the choices, place by place; empty if there were none."""
        return "; or ".join(dict.fromkeys(str(place.within) for place in self.places if place.within))

    @property
    def name(self) -> str:
        """Name in messages."""
        return self.origin or "a policy made in this process"

    @property
    def digest(self) -> str:
        """Twelve hex digits of a hash of the content."""
        return hashlib.sha256(msgspec.json.encode(structs.replace(self, origin=""), order="sorted")).hexdigest()[:12]

    def choice(
        self, workload: Workload, framework: str, environment: Environment, asked: Sequence[Policy] = ()
    ) -> Choice | None:
        """Return the choice of the nearest measured shape within reach, at a place that holds here; None on a miss.

        Whoever may not be chosen, by what was measured as near or nearer, is left out; with nobody left the next
        nearest shape answers. What policies that were `asked` before found incorrect is left out as well.
        Off the grid the regret is that of the entry times the mean regret of held-out shapes; if no shape was held out
        it is not known, and `regret_high` is infinite.
        """
        found = (one for one in self._coverings(workload, framework, environment, asked) if one.distance <= REACH)
        covering, use = next(((one, use) for one in found if (use := one.use) is not None), (None, None))
        if covering is None or use is None:
            return None
        octaves, place = covering.distance, covering.place
        use, off_grid = structs.replace(use, named=(), caveat=place.caveat(environment)), place.held_out
        if place.within:
            use = structs.replace(use, within=str(place.within), named=place.within.only)
        if octaves == 0:
            return use
        if off_grid is None:
            return structs.replace(use, distance=octaves, regret_high=inf)
        regret = use.regret * off_grid.mean
        high = max(regret, use.regret_high, off_grid.worst)
        return structs.replace(use, distance=octaves, regret=regret, regret_high=high)

    def predicted(
        self,
        workload: Workload,
        framework: str,
        environment: Environment,
        usable: UsableFor,
        asked: Sequence[Policy] = (),
    ) -> Choice | str | None:
        """Return the choice that the models of a place predict, whose regret is that of shapes that were left out of
        the fit; why it is not followed, if that was not checked or lost more than the fixed order; None without models.

        A place that bounds memory or errors predicts nothing: neither is known where nothing was measured.
        """
        shape, reason = shape_of(workload), None
        for place in self._holding(framework, environment):
            if place.prediction is None or (place.within and place.within.bounds_measurements):
                continue
            barred = {name for one in asked for name in one.found_incorrect(shape, framework, environment)}
            ranking = place.ranking(shape, usable, barred)[: 1 + MOST_PREDICTED]
            if not ranking:
                continue
            check, new = place.prediction.check(shape, (entry.at for entry in place.entries))
            if check is None or not check.passed:
                reason = reason or f"{self.name} predicts no choice, as {_unchecked(check)} ({new})"
                continue
            return _predicted_choice(place, ranking, check, new, environment)
        return reason

    def found_incorrect(self, shape: Shape, framework: str, environment: Environment) -> set[str]:
        """Return who was found incorrect at any shape of the same class, at a place that holds here."""
        places = self._holding(framework, environment)
        return {name for place in places for one in place.barred if one.at.hard == shape.hard for name in one.incorrect}

    def miss(
        self, workload: Workload, framework: str, environment: Environment, asked: Sequence[Policy] = ()
    ) -> str | None:
        """Return why `choice` returns None; None if it returns a choice."""
        environment = structs.replace(environment, framework=framework)
        if why := self.stale(environment):
            return why
        found = self._coverings(workload, framework, environment, asked)
        shape = shape_of(workload)
        if not found:
            entries = [entry for place in self.places if place.stale(environment) is None for entry in place.entries]
            if any(entry.at.hard == shape.hard for entry in entries):
                return f"{self.name} bounds memory, and {shape.title}, larger than every measured shape, may need more"
            return f"{self.name} has no entry for {_missing_axes(shape, entries)}"
        nearest = found[0]
        if nearest.distance <= REACH:
            if any(one.use is not None for one in found if one.distance <= REACH):
                return None
            use = nearest.entry.use
            reasons = [f"{one.label} was {nearest.barred[one.label]}" for one in (use, *use.alternatives)]
            return f"{self.name} has nobody left for {shape.title}: {'; '.join(reasons)}"
        # with digits enough to show that it is too far
        texts = (f"{nearest.distance:.{digits}f}" for digits in range(1, 16))
        octaves = next((text for text in texts if float(text) > REACH), str(nearest.distance))
        return (
            f"the nearest entry of {self.name} ({nearest.entry.at.title}) is {octaves} octaves away, "
            f"more than the limit of {REACH:g}"
        )

    def incorrect(self, workload: Workload, framework: str, environment: Environment) -> dict[str, str]:
        """Return who was found incorrect at the shape of a workload, at a place that holds here, and where."""
        environment = structs.replace(environment, framework=framework)
        known = [
            one for place in self.places if place.barred and place.stale(environment) is None for one in place.barred
        ]
        if not known:
            return {}
        shape = shape_of(workload)
        return {
            name: f"was found incorrect at {one.measured}" for one in known if one.at == shape for name in one.incorrect
        }

    def stale(self, environment: Environment) -> str | None:
        """Return why no place holds in an environment (device, framework or software differ); None if one does."""
        reasons = [place.stale(environment) for place in self.places]
        if any(reason is None for reason in reasons):
            return None
        of_framework = [r for r, p in zip(reasons, self.places) if r and p.framework == environment.framework]
        if not of_framework:
            return f"{self.name} has no entries for {environment.framework or 'this framework'}"
        return f"{self.name} does not hold here: {'; '.join(dict.fromkeys(of_framework))}"

    def __str__(self) -> str:
        """Return one line for each place; `repr` has everything."""
        lines = [f"{self.name}: {len(self.entries)} choices", *(f"  {place}" for place in self.places)]
        return "\n".join(map(printable, lines))

    def __or__(self, other: Policy) -> Policy:
        if not isinstance(other, Policy):
            return NotImplemented
        places = {place.key: place for place in self.places}
        for place in other.places:
            places[place.key] = _merge_places(places[place.key], place) if place.key in places else place
        return Policy(places=tuple(places[key] for key in sorted(places, key=repr)))

    def _coverings(
        self, workload: Workload, framework: str, environment: Environment, asked: Sequence[Policy]
    ) -> list[Covering]:
        places = self._holding(framework, environment)
        before = [place for one in asked for place in one._holding(framework, environment)]
        return coverings(places, shape_of(workload), before)

    def _holding(self, framework: str, environment: Environment) -> list[Place]:
        """Return the places that hold here, the one to be preferred first: that which says which processor it is, then
        that which shares more packages, then the newer."""
        environment = structs.replace(environment, framework=framework)
        places = [place for place in self.places if place.stale(environment) is None]
        shared = environment.packages.keys()
        places.sort(key=lambda place: (place.processor != "", len(place.software.keys() & shared), place.made))
        return places[::-1]


MOST_PREDICTED = 8
"""Largest number of alternatives of a predicted choice."""


def _predicted_choice(
    place: Place, ranking: Sequence[tuple[float, TimeModel]], check: HeldOutCheck, new: str, environment: Environment
) -> Choice:
    """Return the first of a ranking as a choice, the others as its alternatives."""
    (shortest, use), *others = ranking
    regret = check.predicted
    from_ = f"expected regret {regret.mean:.3f} from {regret.shapes} held-out shapes, worst {regret.worst:.2f}"
    return Choice(
        implementation=use.implementation,
        config=use.config,
        regret=regret.mean,
        regret_high=max(regret.mean, regret.worst),
        candidates=len(ranking),
        time_us=round(shortest / 1e3, 3),
        compile_s=use.compile_s,
        alternatives=tuple(
            Alternative(
                implementation=one.implementation,
                config=one.config,
                ratio=round(time / shortest, 4),
                compile_s=one.compile_s,
            )
            for time, one in others
        ),
        predicted=f"predicted, as {new} ({from_})",
        within=str(place.within or ""),
        named=place.within.only if place.within else (),
        caveat=place.caveat(environment),
    )


def _unchecked(check: HeldOutCheck | None) -> str:
    """Return why the predictions that a check stands for are not followed."""
    if check is None or check.predicted.shapes < FEWEST_HELD_OUT:
        return "that could not be checked on enough shapes"
    return (
        f"predicted picks lost {check.predicted.mean:.3f} on held-out shapes and the fixed order {check.fixed.mean:.3f}"
    )


def place_of(environment: Environment) -> Place:
    """Return the place of an environment, without entries."""
    skipped = IMMATERIAL.get(environment.framework, set())
    return Place(
        device=environment.device,
        device_name=environment.device_name,
        framework=environment.framework,
        capability=environment.capability,
        threads=environment.threads if environment.device == "cpu" else 0,
        processor=environment.processor if environment.device == "cpu" else "",
        software={name: version for name, version in sorted(environment.packages.items()) if name not in skipped},
        driver=environment.driver,
    )


def _merge_places(old: Place, new: Place) -> Place:
    entries = {entry.at: entry for entry in (*old.entries, *new.entries)}
    # What was found about all entries of the older place holds only while they choose what they did.
    kept = all(entries[entry.at].use.label == entry.use.label for entry in old.entries)
    whole = {entry.at for entry in new.entries}.issuperset(entry.at for entry in old.entries)
    crossings = (*(old.crossings if kept else ()), *(new.crossings if kept or whole else ()))
    held_out = _merge_held_out(old, new) if kept else new.held_out if whole else None
    return structs.replace(
        new,
        made=max(old.made, new.made),
        runs=tuple(dict.fromkeys((*old.runs, *new.runs))),
        held_out=held_out,
        crossings=tuple({(one.track, one.pass_, one.below, one.above): one for one in crossings}.values()),
        entries=tuple(sorted(entries.values(), key=lambda entry: entry.at.order)),
        barred=_merge_barred(old, new),
        prediction=_merge_prediction(old, new),
    )


def _merge_barred(old: Place, new: Place) -> tuple[Barred, ...]:
    """Return who may not be chosen by either place. Whom the newer place has among its candidates for the very workload
    at which the older barred them may be chosen again."""
    right = {
        (entry.at, entry.use.measured): {entry.use.label, *(one.label for one in entry.use.alternatives)}
        for entry in new.entries
    }
    found: dict[tuple[Shape, str], Barred] = {(one.at, one.measured): one for one in new.barred}
    for one in old.barred:
        key = one.at, one.measured
        there, gone = found.get(key, Barred(at=one.at, measured=one.measured)), right.get(key, set())
        incorrect = {*there.incorrect, *(name for name in one.incorrect if name not in gone)}
        kept_out = {*there.kept_out, *(name for name in one.kept_out if name not in gone)}
        names = {"incorrect": tuple(sorted(incorrect)), "kept_out": tuple(sorted(kept_out))}
        found[key] = structs.replace(there, **names)
    kept = [one for one in found.values() if one.incorrect or one.kept_out]
    return tuple(sorted(kept, key=lambda one: (one.at.order, one.measured)))


def _merge_prediction(old: Place, new: Place) -> Prediction | None:
    """Return the models that rest on more measured shapes, of as many those of the newer place."""
    known = [one for one in (new.prediction, old.prediction) if one is not None]
    return max(known, key=lambda one: sum(model.shapes for model in one.models), default=None)


def _merge_held_out(old: Place, new: Place) -> Regret | None:
    """Pool the held-out regrets of two places. No shape is counted twice: of places that share some, that with more
    held-out shapes speaks, of as many the newer."""
    shared = {entry.at for entry in old.entries} & {entry.at for entry in new.entries}
    known = [one for one in (new.held_out, old.held_out) if one is not None]
    return max(known, key=lambda one: one.shapes, default=None) if shared else pooled(known)


def _missing_axes(shape: Shape, entries: Iterable[Entry]) -> str:
    """Name the hard axes whose value no entry has, or all hard axes if only their combination is missing."""
    known = [entry.at.hard for entry in entries]
    missing = [f"{name} {value}" for name, value in shape.hard.items() if all(one[name] != value for one in known)]
    together = [f"{name} {value}" for name, value in shape.hard.items() if value is not False and name != "v_head_dim"]
    return ", ".join(missing) if missing else f"{', '.join(together)} together"
