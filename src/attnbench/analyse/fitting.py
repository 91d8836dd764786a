"""A track -> which implementations stop fitting the device's memory, and at which length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attnbench.analyse.advice import Figure, Recommendation, listed
from attnbench.analyse.families import Track, length
from attnbench.analyse.memory_limit import fits_until
from attnbench.analyse.scaling import exponent, growth, memory_points
from attnbench.spec import OutOfMemory, Record

INSTEAD = "; beyond, use one that does not store the scores"


def fitting_of(track: Track, names: Mapping[str, Sequence[Record]]) -> Recommendation | None:
    """What grows faster than the length or was seen to run out; None where nothing does."""
    told, figures, seen = [], [], []
    grows, said = False, set[str]()
    for name, records in names.items():
        limit = _limit(name, records, said)
        grows |= limit is not None
        found = limit or _seen(name, records)
        if found is not None:
            told.append(found[0])
            figures += found[1]
            seen += [record.workload.id for record in records]
    if not told:
        return None
    family = track.family
    return Recommendation(
        kind="memory",
        family=family.title,
        device=family.device,
        text=f"{family.title}, {track.title}: {listed(told)}{INSTEAD if grows else ''}.",
        workloads=tuple(dict.fromkeys(seen)),
        figures=tuple(figures),
    )


def _limit(name: str, records: Sequence[Record], said: set[str]) -> tuple[str, list[Figure]] | None:
    """From the growth of the peaks, where it is faster than the length; a memory that was `said` is not said again."""
    fit, limit = exponent(memory_points(records)), fits_until(records)
    if fit is None or limit is None or growth(fit.local.exponent) not in ("between", "O(n^2)"):
        return None
    span = f"{limit.low:,}-{limit.high:,}; " if limit.high > limit.low else ""
    memory = _memory_words(limit.memory_bytes, records)
    stops, peak = ("", "") if memory in said else (f" stops fitting {memory}", "peak memory ")
    said.add(memory)
    told = f"{name}{stops} at about {limit.length:,} tokens ({span}{peak}~ n^{fit.local.exponent:.2f})"
    if limit.out_of_memory_at is not None:
        told += f", and ran out at {limit.out_of_memory_at:,}"
    edges = {"low": float(limit.low), "high": float(limit.high)} if limit.high > limit.low else {}
    return told, [
        Figure(name=f"{name} fits until", value=limit.length, unit="tokens", **edges),
        Figure(name=f"exponent of {name}'s peak memory", value=fit.local.exponent),
    ]


def _memory_words(count: int, records: Sequence[Record]) -> str:
    """JAX knows what its allocator may take, which is less than the device has."""
    told = f"{count / 1e9:.3g} GB"
    known = [record.environment for record in records if record.environment is not None]
    of_jax = any(one.framework == "jax" and one.device != "cpu" for one in known)
    return f"the {told} that JAX's allocator may take of the device" if of_jax else told


def _seen(name: str, records: Sequence[Record]) -> tuple[str, list[Figure]] | None:
    """From an end of memory that happened."""
    failed = [length(record.workload) for record in records if isinstance(record, OutOfMemory)]
    if not failed:
        return None
    return f"{name} ran out of memory at {min(failed):,} tokens", [
        Figure(name=f"{name} ran out of memory at", value=min(failed), unit="tokens")
    ]
