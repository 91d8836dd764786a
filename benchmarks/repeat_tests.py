"""Run the whole test suite several times and keep what each run said (`python benchmarks/repeat_tests.py`).

A test that chance, order or load can decide fails now and then, so one green run shows little. Each run adds a line to
results/cpu/test_runs.jsonl: when, at which commit, how many passed, failed and were skipped, which failed, how long it
took, how many busy processes ran beside it. With `--busy 2` the last two runs have two busy processes beside them.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from attnbench.run.environment import commit_of

ROOT = Path(__file__).parents[1]
SUITE = ("-m", "pytest", "-q", "-n", "3", "--dist", "loadfile", "--no-loadscope-reorder", "-p", "no:cacheprovider")
COUNTS = re.compile(r"(\d+) (passed|failed|skipped|errors?|xfailed|xpassed)")
BUSY = 2
"""Processes beside a disturbed run: one for each core of the machine that the figures come from."""


@contextmanager
def busy_processes(count: int, command: str | None) -> Iterator[None]:
    """Keep so many processes computing meanwhile: a command in which {n} is the number of the process, or a loop."""
    loop = [sys.executable, "-c", "while True: sum(range(100000))"]
    commands = [shlex.split(command.format(n=n + 1)) if command else loop for n in range(count)]
    started = [subprocess.Popen(one, cwd=ROOT, stdout=subprocess.DEVNULL) for one in commands]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def run_once(busy: int, beside: str | None, chosen: list[str]) -> dict[str, object]:
    """Run the suite and read its closing line."""
    commit, started, begin = commit_of(ROOT), datetime.now(UTC), time.monotonic()
    with busy_processes(busy, beside):
        done = subprocess.run([sys.executable, *SUITE, *chosen], cwd=ROOT, capture_output=True, text=True)
    counts = {name.rstrip("s") if name.startswith("error") else name: int(n) for n, name in COUNTS.findall(done.stdout)}
    return {
        "started": started.isoformat(timespec="seconds"),
        "commit": commit,
        "cores": os.cpu_count(),
        "python": sys.version.split()[0],
        "load_before": round(os.getloadavg()[0], 2),
        "busy": busy,
        **({"beside": beside} if busy and beside else {}),
        "seconds": round(time.monotonic() - begin),
        "exit": done.returncode,
        **counts,
        "failures": re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--busy", type=int, default=2, help="how many of these runs have busy processes beside them")
    parser.add_argument("--beside", help="what these processes run, with {n} for 1 or 2; a loop by default")
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "results/cpu/test_runs.jsonl")
    parser.add_argument("chosen", nargs="*", help="further arguments for pytest, such as a folder")
    given = parser.parse_args()
    for number in range(given.times):
        found = run_once(BUSY if number >= given.times - given.busy else 0, given.beside, given.chosen)
        with given.output.open("a") as file:
            file.write(json.dumps(found) + "\n")
        print(f"run {number + 1} of {given.times}: {json.dumps(found)}", flush=True)
    lines = [json.loads(line) for line in given.output.read_text().splitlines()]
    green = sum(line["exit"] == 0 for line in lines)
    beside = sum(line["exit"] == 0 and line["busy"] > 0 for line in lines)
    print(f"{green} of {len(lines)} runs passed, {beside} of them beside busy processes: {given.output}")


if __name__ == "__main__":
    main()
