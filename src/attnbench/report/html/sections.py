"""Run files -> sections: what was measured in one place, so that its times may stand in one chart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from msgspec import Struct

from attnbench.analyse.ranking import ANCHOR, is_timed
from attnbench.spec import Environment, Record
from attnbench.store.runfile import Run


class Source(Struct, frozen=True):
    """A run file that was read, and what it is called on the page."""

    name: str
    run: Run


class Section(Struct):
    """Records of one machine and one set of packages, by the run they come from."""

    environments: dict[str, Environment]
    """Framework -> where it ran."""
    runs: dict[int, list[Record]]
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
        versions = [
            f"{name} {environment.packages.get(name, '')}".strip() for name, environment in self.environments.items()
        ]
        driver = f"driver {first.driver}" if first.driver else ""
        threads = f"{first.threads} threads" if first.device == "cpu" and first.threads else ""
        return " · ".join(fact for fact in (first.device_name, *versions, driver, threads) if fact)

    def admits(self, environment: Environment) -> bool:
        """Whether times measured there may be compared with those of this section."""
        alike = next(iter(self.environments.values()), None)
        if alike is None or _machine(alike) != _machine(environment):
            return False
        known = self.environments.get(environment.framework)
        return known is None or known.fingerprint == environment.fingerprint


def gather(sources: Sequence[Source]) -> list[Section]:
    """The sections of all runs, the one with most timed records first."""
    sections: list[Section] = []
    for place, source in enumerate(sources):
        homeless: list[Record] = []
        used: Counter[int] = Counter()
        for record in _shown(source.run.records):
            if record.environment is None:
                homeless.append(record)
                continue
            index = _place(sections, record.environment)
            sections[index].runs.setdefault(place, []).append(record)
            used[index] += 1
        if homeless:
            if not used:
                sections.append(Section({}, {}))
                used[len(sections) - 1] += 1
            sections[used.most_common(1)[0][0]].runs.setdefault(place, []).extend(homeless)
    return sorted(sections, key=lambda section: -sum(is_timed(record) for record in section.records))


def _shown(records: Iterable[Record]) -> Iterable[Record]:
    return (record for record in records if not record.implementation.startswith(ANCHOR))


def _place(sections: list[Section], environment: Environment) -> int:
    for index, section in enumerate(sections):
        if section.admits(environment):
            section.environments.setdefault(environment.framework, environment)
            return index
    sections.append(Section({environment.framework: environment}, {}))
    return len(sections) - 1


def _machine(environment: Environment) -> tuple[object, ...]:
    names = ("device", "device_name", "capability", "cpu", "cores", "driver", "system")
    return tuple(getattr(environment, name) for name in names)
