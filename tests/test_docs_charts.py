"""docs/charts.md speaks of every view of the report, and its figures are those of the run it names."""

from __future__ import annotations

import re
from functools import cache
from math import exp, log
from pathlib import Path
from typing import get_args

import pytest
from documented import DOCS, ROOT

from attnbench.report.units import size
from attnbench.results.records import ANCHOR, is_timed
from attnbench.results.run_file import read_run
from attnbench.results.sentences import Category
from attnbench.results.standings import Standings
from attnbench.spec import Ok

PAGE = DOCS / "charts.md"
RUN = ROOT / "results" / "h200" / "grid-gpu.jsonl"
LARGEST = "b8-t2048-"


@cache
def said() -> str:
    return " ".join(PAGE.read_text().split())


@cache
def timed() -> list[Ok]:
    return [r for r in read_run(RUN).records if is_timed(r) and not r.implementation.startswith(ANCHOR)]


def named(name: str, where: str = "") -> list[Ok]:
    return [record for record in timed() if record.implementation == name and where in record.workload.id]


def median(record: Ok) -> float:
    assert record.time is not None
    return record.time.median_ns


def regret(name: str) -> tuple[int, int, float]:
    """Shapes, how often its kernel is first, and the geometric mean of the extra time over the first."""
    standings, wins, over = Standings([read_run(RUN).records]), 0, []
    for key, whole in standings.overall.items():
        mine = next((one for one in standings.apart(key) if name in one.ranked), None)
        if mine is not None and mine.first is not None:
            over.append(max(1.0, mine.ratio(mine.first, name).value))
            wins += name in whole.ranked and any(name == row.implementation for row in whole.kernels[0])
    return len(over), wins, exp(sum(map(log, over)) / len(over)) - 1


def test_the_regrets_are_those_of_the_run():
    shapes, wins, mean = regret("torch.fa3")
    assert f"`torch.fa3` is fastest on {wins} of its {shapes} shapes with a mean regret of {mean:.1%}" in percent(
        said()
    )
    shapes, wins, mean = regret("torch.sdpa")
    assert f"`torch.sdpa` fastest on {wins} of {shapes} with {mean:.0%}" in percent(said())
    tutorial = percent(" ".join((DOCS / "tutorial.md").read_text().split()))
    assert f"`torch.sdpa` ran on all {shapes} and costs {mean:.0%} on average" in tutorial


def percent(text: str) -> str:
    return text.replace(" %", "%")


def test_the_shares_of_the_ceiling_are_those_of_the_run():
    cells = [record for name in ("torch.fa3", "torch.eager") for record in named(name, f"{LARGEST}h32:8")]
    shares = [record.cost.roofline or 0.0 for record in cells if record.workload.pass_ == "forward"]
    told = f"with 32:8 heads, `torch.fa3` reaches {shares[0]:.0%} at 8 x 2048 forward, `torch.eager` {shares[1]:.1%}"
    assert told in percent(said())


def test_the_peaks_are_those_of_the_run():
    peaks = {
        record.implementation: record.memory.peak_bytes or 0
        for record in timed()
        if record.workload.id.startswith(f"{LARGEST}h32-") and not record.workload.needs_gradients
    }
    assert f"`torch.eager` {size(peaks['torch.eager'])}" in said()
    fused = [peaks[name] for name in ("torch.fa3", "torch.fa4", "torch.sdpa", "torch.sdpa-flash", "jax.cudnn")]
    least, most = (size(edge).removesuffix(" MB") for edge in (min(fused), max(fused)))
    assert f"the fused kernels need {least} to {most} MB" in said()
    (copying,) = (one for one in named("torch.hf-sdpa", f"{LARGEST}h32-") if not one.workload.needs_gradients)
    assert 1.95 < peaks["torch.hf-sdpa"] / copying.memory.theory_bytes < 2.05


def test_the_longest_compilation_is_that_of_the_run():
    longest = max(timed(), key=lambda record: record.compile_ns or 0)
    seconds = (longest.compile_ns or 0) / 1e9
    assert f"the longest compilation is {seconds:.1f} s (`{longest.implementation}`, 1 x 512 in training)" in said()
    assert longest.workload.id.startswith("b1-t512-")
    assert longest.workload.pass_ == "train"


def test_so_many_implementations_were_asked_for():
    names = {r.implementation for r in read_run(RUN).records if not r.implementation.startswith(ANCHOR)}
    assert f"`results/h200/grid-gpu.jsonl`: {len(names)} implementations" in said()


def test_every_view_and_chart_is_explained():
    pytest.importorskip("altair")
    pytest.importorskip("jinja2")
    from attnbench.report.html.page import compose
    from attnbench.results.run_file import NamedRun

    sources = [NamedRun(path.name, read_run(path)) for path in (RUN, ROOT / "results" / "cpu" / "quick.jsonl")]
    views = [view for part in compose(sources).parts for view in part.views]
    headings = set(re.findall(r"^## (.+)$", PAGE.read_text(), re.MULTILINE))
    assert {view.title for view in views} <= headings
    pictures = {Path(name).stem for name in re.findall(r"\(charts/(\S+)\)", PAGE.read_text())}
    assert pictures | {"rate"} == {chart.name for view in views for chart in view.charts}


def test_every_category_is_explained():
    for category in get_args(Category):
        assert f"| {category} |" in said()
