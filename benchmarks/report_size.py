"""What a report costs: `python benchmarks/report_size.py [-o FILE] [--counts 100 1000 10000]`.

Writes run files of made-up records, turns each into a page and its summaries in a fresh process, and prints time (of
the wall and of the processor, for a machine that others use too), size and peak memory; where there is a Chromium, also
how long the page takes to open: until it can be read and used, and until every chart is drawn.
Exits with 1 when a claim is not kept: at most linear growth, 10,000 records in under 20 s and 1 GB; 5,000 records in
under 5 MB, open within 3 s.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import numpy as np

from attnbench import masks
from attnbench.measuring.sampling import summarise
from attnbench.results.run_file import RunWriter, new_header
from attnbench.spec import Cost, Environment, Errors, Memory, Ok, Record, Throughput, Unsupported, VerifiedAt
from attnbench.spec import Workload as Attention

CLAIMS = {"seconds": 20.0, "bytes": 1_000_000_000, "page_bytes_at_5000": 5_000_000, "open_seconds_at_5000": 3.0}
LIMITS = (
    (10_000, "seconds", "seconds"),
    (10_000, "peak_bytes", "bytes"),
    (5_000, "page_bytes", "page_bytes_at_5000"),
    (5_000, "open_seconds", "open_seconds_at_5000"),
)
"""Records, figure, claim."""
GROWTH = 1.2
"""Times as much per record as at the size before is still linear: the rest is noise."""
COUNTS = (100, 1000, 5000, 10000)
LIBRARIES = 15
ROUNDS, PER_ROUND = 8, 20
HERE = Environment(
    device="cpu", device_name="Made-up", framework="torch", cpu="Made-up", cores=2, threads=2, packages={"torch": "0"}
)


def workloads() -> Iterator[Attention]:
    for heads in range(1, 1000):
        for batch in (1, 2, 4, 8, 16, 32):
            for length in (128, 256, 512, 1024, 2048, 4096, 8192):
                for pass_ in ("forward", "train"):
                    yield Attention(
                        batch=batch, q_len=length, heads=heads, head_dim=64, mask=masks.causal(), pass_=pass_
                    )


def records(count: int) -> Iterator[Record]:
    rng = np.random.default_rng(1)
    made = 0
    for workload in workloads():
        for library in range(LIBRARIES):
            if made == count:
                return
            made += 1
            name = f"torch.library-{library}"
            if library == LIBRARIES - 1:
                yield Unsupported(implementation=name, workload=workload, reason="not here", environment=HERE)
            else:
                yield timed(name, workload, 1e3 * workload.q_len * (1 + library / 10), rng)


def timed(name: str, workload: Attention, median: float, rng: np.random.Generator) -> Ok:
    samples = median * np.exp(0.02 * rng.standard_normal((ROUNDS, PER_ROUND)))
    took = summarise(samples.tolist(), "wall", 1)
    return Ok(
        implementation=name,
        workload=workload,
        environment=HERE,
        errors=Errors(forward=1e-7, forward_allowed=1e-6, max_abs=1e-6, stability="scales 100"),
        verified_at=VerifiedAt(shape={"q_len": workload.q_len}, share=1.0),
        deterministic=True,
        memory=Memory(peak_bytes=workload.q_len * 4096, theory_bytes=workload.q_len * 4000, kv_cache_bytes=4096),
        cost=Cost(
            flops=10**9, bytes=10**6, tflops=1e-3 / took.median_ns * 1e9, gb_per_s=3.0, roofline=0.4, bound="compute"
        ),
        time=took,
        compile_ns=10**9,
        first_call_ns=10**6,
        throughput=Throughput(tokens_per_s=1e6, calls_per_s=1e3, samples_per_s=1e3),
        kernels=("attention_forward",),
    )


def measure(count: int, folder: Path) -> dict[str, float]:
    run = folder / f"{count}.jsonl"
    writer = RunWriter(run, new_header("0", "made-up"))
    writer.write(list(records(count)))
    writer.close()
    page = folder / f"{count}.html"
    start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    code = f"from attnbench.cli import main; main(['report', {str(run)!r}, '-o', {str(page)!r}])"
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
    seconds = time.perf_counter() - start
    # The largest child so far: counts rise, so that it is the one of this count.
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {
        "records": count,
        "seconds": round(seconds, 2),
        "cpu_seconds": round(cpu, 2),
        "page_bytes": page.stat().st_size,
        "peak_bytes": 1024 * after.ru_maxrss,
        **opened(page),
    }


def opened(page: Path) -> dict[str, float]:
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    if browser is None or find_spec("playwright") is None:
        return {}
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        tab = chromium.new_page(viewport={"width": 1280, "height": 900})
        start = time.perf_counter()
        tab.goto(page.as_uri())
        loaded = time.perf_counter() - start
        tab.wait_for_selector("body[data-ready=yes]", timeout=120_000)
        drawn = time.perf_counter() - start
        chromium.close()
    return {"open_seconds": round(loaded, 2), "all_drawn_seconds": round(drawn, 2)}


def broken(reports: Sequence[Mapping[str, float]]) -> list[str]:
    """A sentence for each claim that these figures do not keep; a size that was not tried breaks none."""
    at = {int(row["records"]): row for row in reports}
    found = []
    for count, name, claim in LIMITS:
        row = at.get(count)
        if row is not None and name in row and row[name] > CLAIMS[claim]:
            found.append(f"{count:,} records: {name} is {row[name]:,}, more than {CLAIMS[claim]:,}")
    for (less, small), (more, large) in pairwise(sorted(at.items())):
        for name in ("cpu_seconds", "page_bytes"):
            if large[name] * less > GROWTH * small[name] * more:
                found.append(f"{name} grows faster than the records from {less:,} to {more:,}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--out", type=Path)
    parser.add_argument("--counts", type=int, nargs="+", default=COUNTS)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = {"claims": CLAIMS, "reports": [measure(count, Path(folder)) for count in sorted(given.counts)]}
    text = json.dumps(found, indent=1)
    if given.out is not None:
        given.out.write_text(text + "\n")
    print(text)
    told = broken(found["reports"])
    for sentence in told:
        print(sentence, file=sys.stderr)
    return 1 if told else 0


if __name__ == "__main__":
    sys.exit(main())
