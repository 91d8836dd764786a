"""Comparisons whose true answer is known, a line of a file each: what compare_ and gate_calibration share."""

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from attnbench.comparison import Comparison
from attnbench.spec import Ok


@contextmanager
def beside(target: Callable[..., None], arguments: Iterable[tuple[Any, ...]]) -> Iterator[None]:
    """Run a function in a process for each of its arguments, until the end."""
    start = multiprocessing.get_context("spawn").Process
    processes = [start(target=target, args=one, daemon=True) for one in arguments]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.join()


def keep(out: Path, condition: str, effect: str, found: Comparison, **more: Any) -> None:
    """Add the line of a comparison to the file, and say what was found."""
    environment = found.record_a.environment if isinstance(found.record_a, Ok) else None
    line = {
        "condition": condition,
        "effect": effect,
        "verdict": found.verdict,
        "reason": found.reason,
        "ratios": {name: [one.ratio, *one.interval] for name, one in found.estimates.items()},
        "launches": len(found.launches),
        "elapsed_s": round(found.elapsed_s, 2),
        **more,
        "device": environment and environment.device_name,
        "fingerprint": environment and environment.fingerprint,
        "packages": environment and {k: v for k, v in environment.packages.items() if k in ("torch", "numpy")},
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    with out.open("a") as file:
        file.write(json.dumps(line) + "\n")
    told = f"{found.verdict or found.reason} {found.ratio or 0:.3f}, {len(found.launches)} launches"
    print(f"{condition} {effect}: {told}, {found.elapsed_s:.0f} s", flush=True)


def read(out: Path) -> list[dict[str, Any]]:
    """Return the lines of the file; none if there is no file yet."""
    return [json.loads(text) for text in out.read_text().splitlines()] if out.exists() else []


def decided(lines: Iterable[dict[str, Any]]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Return the lines that have a verdict, by condition and effect, in order."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for line in lines:
        if line["verdict"] is not None:
            groups.setdefault((line["condition"], line["effect"]), []).append(line)
    return dict(sorted(groups.items()))
