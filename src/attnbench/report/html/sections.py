"""Run files -> sections: what was measured in one place, so that its times may stand in one chart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct, field

from attnbench.analyse.families import FRAMEWORKS
from attnbench.results.records import ANCHOR, is_timed
from attnbench.results.run_file import Run
from attnbench.spec import Environment, Record

MACHINE = ("device", "device_name", "capability", "cpu", "cores", "driver", "system")


class Source(Struct, frozen=True):
    """A run file that was read, and what it is called on the page."""

    name: str
    run: Run
    path: str = ""
    """As it was given, for commands."""


class Section(Struct):
    """Records of one machine and one set of packages, by the run they come from."""

    environments: dict[str, Environment]
    """Framework -> where it ran."""
    runs: dict[int, list[Record]] = field(default_factory=dict)
    """Place of the source -> its records, without the anchors."""

    @property
    def records(self) -> list[Record]:
        """All of them, in the order of the runs."""
        return [record for records in self.runs.values() for record in records]

    @property
    def title(self) -> str:
        """The device and the versions that matter."""
        if not self.environments:
            return "Unknown machine"
        first = next(iter(self.environments.values()))
        known = sorted(self.environments.items(), key=lambda item: [*FRAMEWORKS, item[0]].index(item[0]))
        versions = [f"{name} {environment.packages.get(name, '')}".strip() for name, environment in known]
        driver = f"driver {first.driver}" if first.driver else ""
        threads = f"{first.threads} threads" if first.device == "cpu" and first.threads else ""
        return " · ".join(fact for fact in (first.device_name, *versions, driver, threads) if fact)

    def admits(self, environments: Mapping[str, Environment]) -> bool:
        """Whether times measured there may stand beside those of this section: one machine, and whatever framework
        both know in the same versions. A library that only one of them has changes nothing for the others."""
        both = self.environments.keys() & environments.keys()
        return all(_one_machine(a, b) for a in self.environments.values() for b in environments.values()) and all(
            self.environments[name].agrees(environments[name]) for name in both
        )

    def learn(self, environments: Mapping[str, Environment]) -> None:
        """Note where further frameworks ran."""
        for name, environment in environments.items():
            self.environments.setdefault(name, environment)


def gather(sources: Sequence[Source]) -> list[Section]:
    """The sections of all runs, the one with most timed records first.

    A run is split before it is put beside others: its frameworks were timed in interleaved rounds and stay together.
    """
    sections: list[Section] = []
    for place, source in enumerate(sources):
        for part in _parts([r for r in source.run.records if not r.implementation.startswith(ANCHOR)], place):
            known = [section for section in sections if section.environments and section.admits(part.environments)]
            if not known or not part.environments:
                sections.append(part)
                continue
            home = max(known, key=lambda section: len(section.environments.keys() & part.environments.keys()))
            home.learn(part.environments)
            home.runs |= part.runs
    return sorted(sections, key=lambda section: -sum(map(is_timed, section.records)))


def _parts(records: Sequence[Record], place: int) -> list[Section]:
    """One run as sections. What was timed decides which there are; the rest joins where it can, else the first."""
    parts: list[Section] = []
    homes: dict[int, Section] = {}
    for record in sorted(records, key=lambda record: not is_timed(record)):
        if id(record.environment) not in homes:
            homes[id(record.environment)] = _home(parts, record)
    for record in records:
        homes[id(record.environment)].runs.setdefault(place, []).append(record)
    return parts


def _home(parts: list[Section], record: Record) -> Section:
    """The part of a run that a record belongs to, which is made if need be."""
    environment = record.environment
    here = {} if environment is None else {environment.framework: environment}
    home = next((part for part in parts if here and part.admits(here)), None)
    if home is not None:
        home.learn(here)
    elif not parts or is_timed(record):
        home = Section(here)
        parts.append(home)
    return home or parts[0]


def _one_machine(a: Environment, b: Environment) -> bool:
    """Alike in everything that both know."""
    return all(getattr(a, name) == getattr(b, name) for name in MACHINE if getattr(a, name) and getattr(b, name))
