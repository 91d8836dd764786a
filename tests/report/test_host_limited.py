"""A time of kernels that is a tenth of the call never stands alone: every page and every piece of advice says so."""

from __future__ import annotations

import io
import json
from html import unescape
from pathlib import Path

import pytest
from length_factory import along
from msgspec import structs
from page_factory import source
from record_factory import named_run, noisy, ok, recommend, timing, unsupported, workload
from rich.console import Console

from attnbench.choosing.choose import choose
from attnbench.choosing.text import closing as closing_of_choice
from attnbench.choosing.text import document as document_of_choice
from attnbench.cli.run import document
from attnbench.measuring.rates import BOUND, host_limit, notes_of
from attnbench.report.terminal import print_cell, print_rankings
from attnbench.results.exports.formats import rows
from attnbench.results.run_file import NamedRun, Run, new_header, read_run
from attnbench.results.sentences import closing, count_notes
from attnbench.results.standings import Standings
from attnbench.spec import Ok, Record

RESULTS = Path(__file__).parents[2] / "results"
LEGEND = "host-limited: the call takes 9.2x its kernel time"


def timed(name: str, kernel: float, published: str = "kernel", **calls: float) -> Ok:
    """A record by its kernels, with the call by other clocks; or published by one of those, with the kernels beside."""
    clocks = {"kernel": kernel, **calls}
    times = {clock: timing(noisy(ns, 1), clock=clock) for clock, ns in clocks.items()}
    return ok(name, time=times.pop(published), also=times)


SLOW = timed("torch.dilated", 592e3, events=5468e3)
FINE = timed("torch.sdpa", 900e3, events=950e3)


@pytest.mark.parametrize(
    ("record", "ratio"),
    [
        (SLOW, 5468 / 592),
        (FINE, None),
        (timed("x", 1e6, wall=2.0e6), 2.0),
        (timed("x", 1e6, wall=1.99e6), None),
        (timed("x", 1e6, events=1.5e6), 1.5),
        (timed("x", 1e6, events=1.49e6), None),
        (timed("x", 1e6, wall=1.9e6, events=1.6e6), 1.6),
        (timed("x", 1e6, "events", events=7e6), 7.0),
        (timed("x", 1e6, "wall", wall=7e6), 7.0),
        (timed("x", 1e6), None),
        (ok("x", time=timing(noisy(1e6, 1), clock="events")), None),
        (ok("x"), None),
        (unsupported("x", "no"), None),
    ],
)
def test_the_rule_looks_at_the_times_that_a_record_holds(record: Record, ratio: float | None):
    assert host_limit(record) == (None if ratio is None else pytest.approx(ratio))
    if isinstance(record, Ok):
        assert any(note.startswith("host-limited") for note in notes_of(record)) == (ratio is not None)


def test_the_advice_about_launches_goes_by_the_same_rule():
    for factor in (0.99, 1.01):
        for clock, bound in BOUND.items():
            call = {clock: lambda n, bound=bound, factor=factor: bound * factor * 1e6}
            records = along("torch.x", lambda n: 1e6, (512, 1024), clock="kernel", also=call)
            told = [one for one in recommend(records) if one.kind == "launch-bound"]
            assert bool(told) == (factor > 1) == all(host_limit(one) is not None for one in records)


def text_of(show, *arguments: object, width: int = 200) -> str:
    stream = io.StringIO()
    show(Console(file=stream, width=width), *arguments)
    return stream.getvalue()


@pytest.mark.parametrize("width", [200, 60])
def test_the_table_marks_it_on_any_screen_and_says_what_the_mark_means(width: int):
    lines = text_of(print_rankings, [SLOW, FINE], width=width).splitlines()
    marked = [line for line in lines if "us" in line and "*" in line and "host" not in line]
    assert [line.split()[1] for line in marked] == ["torch.dilated"]
    assert any(f"* {LEGEND} (torch.dilated)" in line for line in lines)
    plain = text_of(print_rankings, [FINE], width=width)
    assert "*" not in plain
    assert "host" not in plain


def test_details_notes_and_documents_say_it():
    assert LEGEND in " ".join(text_of(print_cell, SLOW).split())
    assert "host" not in text_of(print_cell, FINE)
    (note,) = count_notes([SLOW, FINE])
    assert note.startswith("host-limited: 1 cell (")
    (ranking,) = document(Path("r"), [SLOW, FINE], "", Standings([[SLOW, FINE]]))["ranking"].values()
    found = {row["implementation"]: row["host_limited"] for row in ranking}
    assert found == {"torch.dilated": pytest.approx(9.24, rel=0.01), "torch.sdpa": None}


def test_times_of_kernels_only_show_it_too():
    """Records of JAX whose clock has another name since."""
    renamed = structs.replace(SLOW, time=structs.replace(SLOW.time, clock="kernels only"))
    assert host_limit(renamed) == host_limit(SLOW) == pytest.approx(9.24, rel=0.01)


def test_exports_hold_the_note():
    (row,) = rows([NamedRun("r", Run(new_header("0", "s"), {}, (SLOW,)))])
    assert row["notes"] == LEGEND


def test_who_is_said_to_be_fastest_is_said_to_wait():
    told = closing([SLOW, FINE])
    assert "torch.dilated is 1." in told
    assert f"torch.dilated is {LEGEND}" in told
    assert "host" not in closing([FINE, timed("torch.eager", 5e6, events=5.2e6)])


def test_advice_says_it():
    slow = along("torch.dilated", lambda n: 100.0 * n, (512, 1024, 2048), 1, clock="kernel",
                 also={"events": lambda n: 400.0 * n})  # fmt: skip
    fine = along("torch.sdpa", lambda n: 200.0 * n, (512, 1024, 2048), 2, clock="kernel",
                 also={"events": lambda n: 210.0 * n})  # fmt: skip
    for one in recommend([*slow, *fine]):
        if one.kind in ("overall", "winner"):
            assert "torch.dilated is host-limited: the call takes up to 4.0x its kernel time" in one.text
    crossing = along("torch.dilated", lambda n: 1e5 + 10.0 * n, (512, 1024, 2048, 4096, 8192, 16384), 1,
                     clock="kernel", also={"events": lambda n: 4e5 + 40.0 * n})  # fmt: skip
    other = along("torch.sdpa", lambda n: 60.0 * n, (512, 1024, 2048, 4096, 8192, 16384), 2, clock="kernel",
                  also={"events": lambda n: 61.0 * n})  # fmt: skip
    (told,) = [one.text for one in recommend([*crossing, *other]) if one.kind == "threshold"]
    assert "torch.dilated is host-limited" in told
    assert "torch.sdpa is host-limited" not in told


def test_a_choice_says_it():
    chosen = choose([named_run("run", "2026", [SLOW, FINE])])
    told = (
        "1 of 1 choices is host-limited (torch.dilated): the call takes up to 9.2x the kernel time that was compared."
    )
    assert told in closing_of_choice(chosen)
    (one,) = json.loads(json.dumps(document_of_choice(chosen, None)["host_limited"]))
    assert (one["use"], one["workload"], one["ratio"]) == (
        "torch.dilated",
        workload().id,
        pytest.approx(9.24, rel=0.01),
    )
    fine = choose([named_run("run", "2026", [FINE, timed("torch.eager", 5e6, events=5.2e6)])])
    assert "host" not in closing_of_choice(fine)


def test_the_page_and_its_markdown_say_it():
    pytest.importorskip("altair")
    from attnbench.report.html.page import compose, summarise

    page = compose([source(SLOW, FINE)])
    (part,) = page.parts
    remarks = {row["label"]: row.get("notes") for row in part.cells.rows}
    assert remarks == {"torch.dilated": LEGEND, "torch.sdpa": None}
    text = unescape(summarise(page))
    (row,) = [line for line in text.splitlines() if line.startswith("| ") and "torch.dilated" in line]
    assert "* 9.2x" in row
    assert "* host-limited: the call takes that many times its kernel time" in text
    assert "host-limited" not in summarise(compose([source(FINE)]))


def test_published_files_that_are_older_show_it():
    """torch.dilated at 2048 tokens: 592 us of kernels in a call of 5,468."""
    records = read_run(RESULTS / "h200" / "dilated.jsonl").records
    found = [
        one for one in records
        if one.implementation == "torch.dilated" and one.workload.q_len == 2048 and one.workload.pass_ == "forward"
    ]  # fmt: skip
    assert any((host_limit(one) or 0) > 9 for one in found)
    assert "* host-limited: the call takes" in text_of(print_rankings, found)
