"""Do reruns choose alike: `python benchmarks/choice_stability.py RUN... [-o FILE]` on published run files.

Each run is chosen from as it is and `--draws` times with its rounds drawn again, the same rounds for all of a workload:
the share of picks that stay, of all shapes together and of the least steady one, and what the picks lose in the run.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import numpy as np
from msgspec import structs
from publishing import publish

from attnbench.choosing.choose import choose
from attnbench.measuring.sampling import summarise
from attnbench.policy import Policy
from attnbench.results.records import ANCHOR, is_timed
from attnbench.results.run_file import Header, NamedRun, Run, read_run
from attnbench.spec import Ok, Record

DRAWS = 20
Picks = dict[tuple[str, str], str]
"""Framework and shape -> what is chosen there."""


def measured(path: Path) -> list[Record]:
    return [one for one in read_run(path).records if not one.implementation.startswith(ANCHOR)]


def chosen(records: Sequence[Record]) -> Policy:
    run = Run(Header(schema=1, attnbench="", created=""), {}, tuple(records))
    return choose([NamedRun("run", run)]).policy


def picks(policy: Policy) -> Picks:
    return {(place.framework, one.use.measured): one.use.label for place in policy.places for one in place.entries}


def resampled(records: Sequence[Record], seed: int) -> list[Record]:
    """The rounds that every implementation of a workload has, drawn again."""
    counts: dict[str, int] = {}
    for one in filter(is_timed, records):
        assert one.time is not None
        counts[one.workload.id] = min(len(one.time.rounds), counts.get(one.workload.id, len(one.time.rounds)))
    return [_redrawn(one, counts[one.workload.id], seed) if is_timed(one) else one for one in records]


def _redrawn(record: Ok, shared: int, seed: int) -> Ok:
    assert record.time is not None
    parts = np.split(np.array(record.time.samples_ns), np.cumsum(record.time.rounds)[:-1])
    order = np.random.default_rng([seed, *record.workload.id.encode()]).integers(shared, size=shared)
    time = summarise([parts[place].tolist() for place in order], record.time.clock, record.time.calls_per_sample)
    return structs.replace(record, time=time)


def agreement(records: Sequence[Record], draws: int) -> dict[tuple[str, str], float]:
    """Framework and shape -> the share of draws with the same pick."""
    first = picks(chosen(records))
    again = [picks(chosen(resampled(records, seed))) for seed in range(draws)]
    return {key: sum(one.get(key) == name for one in again) / draws for key, name in first.items()}


def facts(path: Path, draws: int) -> dict[str, Any]:
    records = measured(path)
    stays = agreement(records, draws)
    regrets = [entry.use.regret for entry in chosen(records).entries if entry.use.regret is not None]
    (_, least_steady), least = min(stays.items(), key=lambda one: one[1])
    return {
        "shapes": len(stays),
        "agreement": round(sum(stays.values()) / len(stays), 4),
        "least": least,
        "least_steady": least_steady,
        "regret": round(geometric_mean(regrets), 4),
        "measured_on": next(one.environment.device_name for one in records if one.environment is not None),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--draws", type=int, default=DRAWS)
    parser.add_argument("-o", "--out", type=Path)
    options = parser.parse_args()
    found = {f"{path.parent.name}/{path.stem}": facts(path, options.draws) for path in options.runs}
    publish({"draws": options.draws, "runs": found}, options.out)


if __name__ == "__main__":
    main()
