"""Every output of a run file, or of several, names the same winner and the same ties.

What is printed, written and sent to the page is read back here and held against `--json` and against each other; who
should win is worked out from the ranks and medians of `--json` once more, without the engine.
"""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Sequence
from math import log
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import structs
from page_factory import JAX, source
from record_factory import CPU, incorrect, named_run, ok, workload
from rich.console import Console

from attnbench.choosing.choose import choose
from attnbench.choosing.text import closing
from attnbench.cli.run import document
from attnbench.comparing.gate_text import clean
from attnbench.errors import AttnBenchError
from attnbench.report.terminal import print_rankings
from attnbench.results import standings as engine
from attnbench.results.families import FRAMEWORKS
from attnbench.results.ratios import RANK_LEVEL, paired_ratio
from attnbench.results.records import framework_of, label, on_one_clock
from attnbench.results.run_file import NamedRun, read_run
from attnbench.results.sentences import answer, counted
from attnbench.results.standings import Standings, rank
from attnbench.spec import Failed, Incorrect, Ok, Record

pytest.importorskip("altair")
pytest.importorskip("jinja2")
pytest.importorskip("vl_convert")

import gallery_captions as captions

from attnbench.report.html.cells import pack, unpack, winner_rows
from attnbench.report.html.page import Page, PageSection, compose, summarise
from attnbench.report.html.views import side_by_side
from attnbench.report.summaries import performance, summary_text

RESULTS = Path(__file__).parents[2] / "results"
FILES = sorted(path.relative_to(RESULTS).as_posix() for path in RESULTS.rglob("*.jsonl"))
Ranking = list[dict[str, Any]]


def published(name: str) -> list[Record]:
    try:
        records = list(read_run(RESULTS / name).records)
    except AttnBenchError:
        pytest.skip("is not a run file")
    return records


def shown(records: Sequence[Record]) -> tuple[dict[str, Ranking], str]:
    """Ranking and closing sentence of `show --json`."""
    standings = Standings([records])
    found = document(Path("run"), records, answer(standings), standings)
    return found["ranking"], found["closing"]


def printed_marks(records: Sequence[Record]) -> list[list[tuple[str, str]]]:
    """What stands before each name in each table of the terminal."""
    text = io.StringIO()
    print_rankings(Console(file=text, width=400), records)
    tables: list[list[tuple[str, str]]] = []
    for line in text.getvalue().splitlines():
        words = line.split()
        if words[:2] == ["#", "implementation"]:
            tables.append([])
        elif tables and len(words) > 2 and re.fullmatch(r"\d+|=|>=", words[0]) and line.startswith(" "):
            tables[-1].append((words[0], words[1]))
    return tables


def unbeaten(ranking: Ranking) -> list[str]:
    return [row["implementation"] for row in ranking if row["rank"] == 1 and not row["behind"]]


def best_of(standings: dict[str, tuple[list[str], dict[str, float]]]) -> str:
    """Who is unbeaten most often, then loses least: of workload -> (unbeaten names, medians)."""
    counts = Counter(name for names, _ in standings.values() for name in names)
    losses = {
        name: np.mean([log(times[name] / min(times.values())) for _, times in standings.values() if name in times])
        for name in counts
    }
    return min(counts, key=lambda name: (-counts[name], losses[name], name))


def of_framework(ranking: Ranking, records: dict[str, Ok], framework: str) -> tuple[list[str], dict[str, float]]:
    """Unbeaten names and medians of one framework: its best rank, without who is certainly behind the first of it.

    A framework that was timed by another clock than the others is ranked among itself."""
    members = [record for record in records.values() if framework_of(record) == framework]
    mine = [row for row in ranking if row["rank"] and framework_of(records[row["implementation"]]) == framework]
    if not mine:
        alone = [row for row in rank(members) if row.rank]
        times = {row.implementation: row.record.time.median_ns for row in alone}
        return [row.implementation for row in alone if row.rank == 1 and not row.behind], times
    names = [row["implementation"] for row in mine if row["rank"] == mine[0]["rank"]]
    compared = {label(record): record for record in on_one_clock(records.values())}
    behind = [n for n in names[1:] if paired_ratio(compared[names[0]], compared[n], RANK_LEVEL).sign > 0]
    return [n for n in names if n not in behind], {row["implementation"]: row["median_ns"] for row in mine}


def same_kernel(records: Sequence[Record], a: str, b: str) -> bool:
    """Whether two names are known to have launched the same kernels somewhere."""
    by_name: dict[str, dict[str, Ok]] = {}
    for record in records:
        if isinstance(record, Ok) and record.kernels:
            by_name.setdefault(label(record), {})[record.workload.id] = record
    ours, theirs = by_name.get(a, {}), by_name.get(b, {})
    return a == b or any(set(ours[key].kernels) == set(theirs[key].kernels) for key in ours.keys() & theirs.keys())


def page_rows(page: Page, number: int) -> list[dict[str, Any]]:
    """What the page is sent, as it reads it."""
    return unpack(pack(page.parts[number].cells.rows))


def check_page(page: Page) -> None:
    """Markdown, summaries and advice of a page say what its map says."""
    told = summarise(page)
    parts = page.parts
    text = " ".join(summary_text(parts, performance(parts)).split())
    for number, part in enumerate(page.parts):
        rows = page_rows(page, number)
        winners = winner_rows(rows)
        for row in winners[:60]:
            name = f"{row['label']} (the same kernel as {row['same']})" if row["same"] else row["label"]
            begin = f"| {clean(row['shape'])} | {clean(name)} |"
            line = next((one for one in told.splitlines() if one.startswith(begin)), None)
            if "More is left out here" not in told:
                assert line is not None, begin
                assert ("(too close to call)" in line) == row["close"]
        tied = {row["workload"]: _tied(rows, row) for row in winners}
        for one in part.headline[:1] if len(page.parts) == 1 else ():
            assert one.pick is not None
            assert one.pick.name in text
        check_speedups(part, {row["workload"]: row for row in winners}, tied)
        check_sides(part, {row["workload"]: row for row in winners}, tied)
        if winners:
            counts = Counter(row["label"] for row in winners)
            caption = captions.winners(part, part.views[0].charts[0]) if part.views[0].charts else ""
            for name, count in counts.items() if caption else ():
                assert re.search(rf"{re.escape(name)} {count}( times|,|;| \()", caption), caption
            if caption:
                assert f"({counted(sum(row['close'] for row in winners), 'shape')})" in caption
        for one in part.advice:
            if one.pick is not None and one.family.startswith("Overall"):
                names = {one.pick.name, *one.pick.same}
                assert one.pick.led == sum(not names.isdisjoint(tied[key]) for key in one.workloads)


def check_speedups(part: PageSection, winners: dict[str, dict[str, Any]], tied: dict[str, set[str]]) -> None:
    """A category of a speed-up, on the page and in the documents, calls tied what the ranking calls tied."""
    named = {one.title: one for one in [part]}
    for row in performance(list(named.values()))["speedups"]:
        first, ratio = winners.get(row["workload"]), row["ratio"]
        assert (row["category"] in ("no significant difference", "cannot tell")) == (ratio.sign == 0)
        if first is None or first["label"] != row["baseline"] or first["same"] or row["approximate"]:
            continue
        if row["implementation"] in {r["label"] for r in part.cells.rows if r.get("group") == first["group"]}:
            assert (row["implementation"] in tied[row["workload"]]) == (row["category"] != "investigate"), row


def check_sides(part: PageSection, winners: dict[str, dict[str, Any]], tied: dict[str, set[str]]) -> None:
    """The table of both frameworks names the faster of two as the winner map does."""
    for row in side_by_side(part.cells):
        standing = part.cells.standings.overall[row["workload"]]
        pair = {"torch": row["torch"], "JAX": row["jax"]}
        if not set(pair.values()) <= standing.ranked.keys():
            continue
        assert tied[row["workload"]] & set(pair.values()), "the first is the best of its framework"
        if row["side"] in pair:
            slower = pair["JAX" if row["side"] == "torch" else "torch"]
            assert winners[row["workload"]]["label"] != slower
            assert slower not in tied[row["workload"]]


def _tied(rows: list[dict[str, Any]], first: dict[str, Any]) -> set[str]:
    """Labels of the first kernel of a shape and of those that cannot be told from it."""
    mine = [row for row in rows if row["workload"] == first["workload"] and "place" in row]
    near = first.get("near") or ()
    return {row["label"] for row in mine if row["kernel"] == first["kernel"] or row["place"] in near}


def check_policy(sources: Sequence[NamedRun], page: Page) -> None:
    """`choose` picks from the run that decides on the page, and what it picks is unbeaten there."""
    placed: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for number in range(len(page.parts)):
        for row in page_rows(page, number):
            if "place" in row:
                placed.setdefault((row["framework"], row["workload"]), []).append(row)
    for place in choose(sources).policy.places:
        for entry in place.entries:
            use = entry.use
            rows = sorted(placed.get((place.framework, use.measured), ()), key=lambda row: row["place"])
            candidates = {use.label, *(one.label for one in use.alternatives)}
            if use.candidates > len(candidates) or len(page.parts) > 1 or "valid" in use.measured:
                continue
            assert candidates <= {row["label"] for row in rows}, "another run decides"
            left = [row for row in rows if row["label"] in candidates]
            if len(left) == len(rows):
                tied = _tied(rows, rows[0])
                assert use.label in tied, (use.measured, use.label, tied)


def check_run(records: Sequence[Record]) -> None:
    ranking, closing = shown(records)
    timed = {key: {label(r): r for r in records if isinstance(r, Ok) and r.workload.id == key} for key in ranking}
    marks = printed_marks(records)
    ranked = [[row for row in rows if row["rank"] is not None] for rows in ranking.values()]
    expected = [
        [(">=" if r["behind"] else "=" if r["tied"] else str(r["rank"]), r["implementation"]) for r in rows]
        for rows in ranked
        if rows
    ]
    assert [table for table in marks if table] == [
        [(mark, name) for mark, name in table if len(name) < 60] for table in expected
    ]
    steps = {record.workload.id: record.workload.step for record in records}
    for step in dict.fromkeys(steps.values()):
        whole = {key: (unbeaten(rows), {r["implementation"]: r["median_ns"] for r in rows if r["rank"]})
                 for key, rows in ranking.items() if steps[key] == step and unbeaten(rows)}  # fmt: skip
        if not whole:
            continue
        best = best_of(whole)
        said = re.findall(r"(?:^|[.:] )(\S+) (?:\(the same kernel as [^)]*\) )?(?:is|and|was) ", closing)
        assert any(same_kernel(records, best, name) for name in said), (best, closing)
    page = compose([source(*records)])
    check_page(page)
    check_policy([named_run("run", "2026", records)], page)
    check_headlines(page, ranking, timed)
    if len(page.parts) > 1:
        return
    for row in winner_rows(page_rows(page, 0)):
        first = unbeaten(ranking[row["workload"]])
        same = [] if not row.get("same") else row["same"].split(", ")
        assert {row["label"], *same} <= set(first)
        assert row["close"] == bool(set(first) - {row["label"], *same})


def check_headlines(page: Page, ranking: dict[str, Ranking], timed: dict[str, dict[str, Ok]]) -> None:
    """Each headline names who is unbeaten most often in its framework and pass."""
    if len(page.parts) > 1:
        return
    (part,) = page.parts
    for one in part.headline:
        assert one.pick is not None
        title = one.family.partition(",")[0]
        framework = next((name for name, told in FRAMEWORKS.items() if told == title), title)
        found = {key: of_framework(ranking[key], timed[key], framework) for key in one.workloads}
        best = best_of(found)
        assert best in (one.pick.name, *one.pick.same), one.text
        names = {one.pick.name, *one.pick.same}
        assert one.pick.led == sum(not names.isdisjoint(first) for first, _ in found.values())


@pytest.mark.parametrize("name", FILES)
def test_every_output_of_a_published_run_names_the_same_winners(name: str):
    check_run(published(name))


NAMES = ("torch.a", "torch.b", "torch.b-fast", "torch.eager", "jax.xla")
MEDIANS = (1.0, 1.005, 1.012, 1.04, 1.08, 1.5, 3.0)


@st.composite
def runs_of(draw: st.DrawFn, most: int, names: Sequence[str] = NAMES) -> list[list[Record]]:
    """Runs of up to three lengths, in each of which some implementations were timed in turns; of several runs, some
    find some implementations incorrect, or lose them."""
    seed, made = draw(st.integers(0, 2**16)), []
    lengths = draw(st.lists(st.sampled_from([128, 256, 512]), min_size=1, max_size=3, unique=True))
    for number in range(draw(st.integers(1, most))):
        records: list[Record] = []
        for n in lengths:
            for name in draw(st.lists(st.sampled_from(names), min_size=1, max_size=len(names), unique=True)):
                rng = np.random.default_rng([seed, number, n, *name.encode()])
                spread = draw(st.sampled_from([1e-4, 3e-3, 0.05]))
                samples = 1e6 * draw(st.sampled_from(MEDIANS)) * np.exp(spread * rng.standard_normal(12))
                kernels = ("k",) if name.startswith("torch.b") else None
                here = JAX if name.startswith("jax") else CPU
                made_of = ok(name, samples, workload(n), kernels=kernels, environment=here)
                outcome = draw(st.sampled_from(["ok"] * 5 + ["incorrect"] * 2 + ["failed"])) if most > 1 else "ok"
                if outcome == "incorrect":
                    made_of = structs.replace(incorrect(name, "row 3 is wrong", workload(n)), environment=here)
                elif outcome == "failed":
                    made_of = Failed(implementation=name, workload=workload(n), reason="boom", environment=here)
                records.append(made_of)
        made.append(records)
    return made


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(runs_of(1))
def test_every_output_of_a_run_names_the_same_winners(runs: list[list[Record]]):
    check_run(runs[0])


def check_wrong(runs: Sequence[Sequence[Record]], sources: Sequence[NamedRun], page: Page) -> None:
    """A cell whose newest right or wrong record is wrong has a time in no output, and each says so."""
    newest: dict[tuple[str, str], Record] = {}
    timed: set[tuple[str, str]] = set()
    for record in (record for run in runs for record in run if not isinstance(record, Failed)):
        key = label(record), record.workload.id
        newest[key] = record
        timed |= {key} if isinstance(record, Ok) else set()
    gone = {key for key, record in newest.items() if isinstance(record, Incorrect)}
    shapes = Counter(name for name, _ in gone & timed)
    told = {
        f"{name} is left out on {counted(n, 'shape')}: a newer run found it incorrect." for name, n in shapes.items()
    }
    parts = page.parts
    speed, chosen = performance(parts), choose(sources)
    summary, (part,) = " ".join(summary_text(parts, speed).split()), page.parts
    texts = [summarise(page).replace("\\", ""), summary, " ".join(part.answer), answer(part.cells.standings)]
    for text in [*texts, closing(chosen)]:
        assert all(clean(one) in text or one in text for one in told), (told, text)
        assert text.count("a newer run found it incorrect") == len(told), text
    assert not gone & {(row["label"], row["workload"]) for row in page_rows(page, 0) if "ns" in row}
    assert not gone & {(row["implementation"], row["workload"]) for row in speed["cells"] + speed["speedups"]}
    for entry in chosen.policy.entries:
        used = (entry.use, *entry.use.alternatives)
        assert not gone & {(one.label, entry.use.measured) for one in used}
    for one in part.advice:
        if one.pick is not None and len(one.workloads) == 1:
            assert not gone & {(name, one.workloads[0]) for name in (one.pick.name, *one.pick.same)}


@settings(max_examples=50, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(runs_of(3))
def test_every_output_of_several_runs_names_the_same_winners(runs: list[list[Record]]):
    days = [f"2026-01-0{day + 1}" for day in range(len(runs))]
    page = compose([source(*records, created=day) for records, day in zip(runs, days)])
    check_page(page)
    sources = [named_run(day, day, records) for records, day in zip(runs, days)]
    check_policy(sources, page)
    check_wrong(runs, sources, page)
    (part,) = page.parts
    rows = page_rows(page, 0)
    for row in winner_rows(rows):
        held = {frozenset(label(r) for r in run if r.workload.id == row["workload"]) for run in runs}
        framework = [r for r in rows if r["workload"] == row["workload"] and r["framework"] == row["framework"]]
        together = {r["label"] for r in framework if "place" in r}
        assert any(together <= labels for labels in held), "of one run"
        alone = [one for one in part.advice if one.kind in ("winner", "tie") and one.workloads == (row["workload"],)]
        for one in alone:
            if one.pick is not None and one.pick.name.startswith(row["framework"]):
                assert {one.pick.name, *one.pick.same} & _tied(rows, row)


def test_two_runs_make_report_and_policy_name_one_winner():
    """The newer run lacks torch.c, which never led: it decides for both."""

    def timed(name: str, ms: float) -> Ok:
        return ok(name, ms * 1e6 * np.exp(1e-3 * np.random.default_rng(len(name)).standard_normal(10)))

    old = [timed("torch.a", 1.0), timed("torch.b", 1.08), timed("torch.c", 3.0)]
    new = [timed("torch.a", 1.08), timed("torch.b", 1.0)]
    (part,) = compose([source(*old), source(*new)]).parts
    assert part.headline[0].pick is not None
    (entry,) = choose([named_run("a", "2026-01-01", old), named_run("b", "2026-01-02", new)]).policy.entries
    assert part.headline[0].pick.name == entry.use.label == "torch.b"
    assert winner_rows(part.cells.rows)[0]["label"] == "torch.b"


@pytest.mark.parametrize("command", ["show", "report", "choose"])
def test_a_command_compares_two_records_once(command: str, monkeypatch: pytest.MonkeyPatch):
    records = published("cpu/quick.jsonl")
    counted: Counter[Any] = Counter()
    ratio, standing = engine.paired_ratio, engine.standing_of

    def count_ratio(a: Ok, b: Ok, level: float = 0.95) -> Any:
        counted[a.cell.id, b.cell.id, level] += 1
        return ratio(a, b, level)

    def count_standing(records: Any, base: str | None = None) -> Any:
        kept = list(records)
        counted[tuple(record.cell.id for record in kept)] += 1
        return standing(kept, base)

    monkeypatch.setattr(engine, "paired_ratio", count_ratio)
    monkeypatch.setattr(engine, "standing_of", count_standing)
    if command == "show":
        standings = Standings([records])
        document(Path("run"), records, answer(standings), standings)
        print_rankings(Console(file=io.StringIO()), standings)
    elif command == "report":
        page = compose([source(*records)])
        summarise(page)
        performance(page.parts)
    else:
        choose([named_run("run", "2026", records)])
    assert counted
    assert set(counted.values()) == {1}
