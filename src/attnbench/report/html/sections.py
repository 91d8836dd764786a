"""Sections: the records of one machine and one set of packages, whose times may stand in one chart; and their shapes'
names: the axes that vary within a section name each shape, the axes that do not are written once.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import product

from msgspec import Struct, field

from attnbench.results.families import FRAMEWORKS, family_of_shape, length_text
from attnbench.results.records import is_anchor, is_timed, machine_differences
from attnbench.results.run_file import NamedRun
from attnbench.spec import Environment, Record, Workload

MACHINE = ("device", "device_name", "capability", "cpu", "processor", "cores", "driver", "system")
DIGEST = re.compile(r"[-+][0-9a-f]{8}\b")
"""Part of an id that distinguishes masks made of arrays, and says nothing to a reader."""


class Section(Struct):
    """Records of one machine and one set of packages, by the run they come from."""

    environments: dict[str, Environment]
    """Framework -> environment it ran in."""
    runs: dict[int, list[Record]] = field(default_factory=dict)
    """Place of the source -> its records, without the anchors."""

    @property
    def records(self) -> list[Record]:
        """All records, in the order of the runs."""
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
        """Return whether times measured there may stand beside those of this section: on one machine, with every
        framework that both know in the same versions. A library that only one of them has makes no difference."""
        pairs = product(self.environments.values(), environments.values())
        both = self.environments.keys() & environments.keys()
        return not any(machine_differences(a, b, MACHINE) for a, b in pairs) and all(
            self.environments[name].agrees(environments[name]) for name in both
        )

    def learn(self, environments: Mapping[str, Environment]) -> None:
        """Note where further frameworks ran."""
        for name, environment in environments.items():
            self.environments.setdefault(name, environment)


def gather(sources: Sequence[NamedRun]) -> list[Section]:
    """Return the sections of all runs, the one with most timed records first. A run is split before it is put beside
    others: its frameworks were timed in interleaved rounds and stay together."""
    sections: list[Section] = []
    for place, source in enumerate(sources):
        for part in _parts([r for r in source.run.records if not is_anchor(r)], place):
            known = [section for section in sections if section.environments and section.admits(part.environments)]
            if not known or not part.environments:
                sections.append(part)
                continue
            home = max(known, key=lambda section: len(section.environments.keys() & part.environments.keys()))
            home.learn(part.environments)
            home.runs |= part.runs
    return sorted(sections, key=lambda section: -sum(map(is_timed, section.records)))


def _parts(records: Sequence[Record], place: int) -> list[Section]:
    """Return one run as sections. Timed records decide which sections there are; the others join where they can, else
    the first section."""
    parts: list[Section] = []
    homes: dict[int, Section] = {}
    for record in sorted(records, key=lambda record: not is_timed(record)):
        environment = record.environment
        if id(environment) in homes:
            continue
        here = {} if environment is None else {environment.framework: environment}
        home = next((part for part in parts if here and part.admits(here)), None)
        if home is not None:
            home.learn(here)
        elif not parts or is_timed(record):
            home = Section(here)
            parts.append(home)
        homes[id(environment)] = home or parts[0]
    for record in records:
        homes[id(record.environment)].runs.setdefault(place, []).append(record)
    return parts


class ShapeNames(Struct, frozen=True):
    """The names of the shapes of a section."""

    varying: frozenset[str]
    constant: str
    """Axes that all shapes share, in words."""
    digests: bool = False
    """Whether masks are written with their digest, because without digests two shapes would read alike."""
    named: bool = True
    """Whether shapes of models go by the model's name; not if two shapes would read alike."""

    def family(self, workload: Workload) -> str:
        """Return every axis that varies except batch and length: shapes of a family lie on one line of a chart."""
        return " · ".join(self._words(workload)) or "all shapes"

    def track(self, workload: Workload) -> str:
        """Return the batch and the family of a workload."""
        return " · ".join([f"batch {workload.batch}", *self._words(workload)])

    def shape(self, workload: Workload) -> str:
        """Return batch, length and the model or family of a workload: the name of one shape."""
        name = self.model(workload)
        words = [name] if name else self._words(workload, but="queries")
        return " · ".join([f"{workload.batch} x {length_text(workload)}", *words])

    def model(self, workload: Workload) -> str:
        """Return the name of a shape in the model it was taken from, such as "pi0 denoise"; empty for any other."""
        return " ".join(workload.tags) if self.named and workload.source else ""

    def fields(self, workload: Workload) -> dict[str, str]:
        """Return the fields of a row by which the page names and filters a shape."""
        kind = f"batch {workload.batch} · {family_of_shape(workload).shapes}"
        return {"shape": self.shape(workload), "workload": workload.id, "kind": kind, "pass": workload.pass_}

    def _words(self, workload: Workload, but: str = "") -> list[str]:
        words = axis_words(workload, self.digests)
        return [word for name, word in words.items() if word and name in self.varying and name != but]


def name_shapes(workloads: Iterable[Workload]) -> ShapeNames:
    """Return names for these workloads, with as few words as distinguish all of them."""
    distinct = list({workload.id: workload for workload in workloads}.values())
    tried = [_names(distinct, digests, named) for digests in (False, True) for named in (True, False)]
    return next((one for one in tried if len(set(map(one.shape, distinct))) == len(distinct)), tried[-1])


def _names(workloads: Sequence[Workload], digests: bool, named: bool) -> ShapeNames:
    seen: dict[str, dict[str, None]] = {}
    for workload in workloads:
        for name, word in axis_words(workload, digests).items():
            seen.setdefault(name, {})[word] = None
    varying = frozenset(name for name, words in seen.items() if len(words) > 1)
    constant = " · ".join(next(iter(words)) for name, words in seen.items() if name not in varying and any(words))
    return ShapeNames(varying, constant, digests, named)


def axis_words(workload: Workload, digests: bool = True) -> dict[str, str]:
    """Return every axis except batch and length in a word or two; empty if there is nothing to say."""
    mask = workload.visible_mask.id
    for kind in workload.visible_mask.kinds:  # ids write block_causal as one word
        mask = re.sub(rf"\b{kind.replace('_', '')}(?![a-z])", kind, mask)
    family = family_of_shape(workload)
    queries = "1 query" if workload.q_len == 1 else f"{workload.q_len} queries"
    return {
        "pass": workload.pass_,
        "queries": "" if workload.q_len == workload.kv_len else queries,
        "heads": family.head_words,
        "mask": mask if digests else DIGEST.sub("", mask),
        "dtype": workload.dtype,
        "extras": family.extras,
    }
