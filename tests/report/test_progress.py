from __future__ import annotations

import io

from record_factory import CPU, incorrect, noisy, ok, unsupported, workload
from rich.console import Console

from attnbench.report.progress import Bars, Lines, Silent, headline, make_listener
from attnbench.run.plan import Planned
from attnbench.spec import Cell

SHAPES = (workload(64), workload(128))
RECORDS = [record for on in SHAPES for record in (ok("a", noisy(1e6, 1), on), incorrect("b", "wrong", on))]


def console(terminal: bool) -> tuple[Console, io.StringIO]:
    stream = io.StringIO()
    return Console(file=stream, width=160, force_terminal=terminal, color_system=None), stream


def play(listener) -> None:
    """What a run reports, in its order."""
    with listener:
        listener.environment("torch", CPU)
        skipped = unsupported("c", "needs cuda", SHAPES[0])
        listener.planned([*(Planned(r.cell, None) for r in RECORDS), Planned(skipped.cell, "needs cuda")])
        for record in RECORDS:
            listener.stage(record.cell, "verify")
            listener.verified(record.cell, record.status == "ok")
        for record in RECORDS:
            if record.status == "ok":
                listener.stage(record.cell, "measure")
            listener.finished(record)
        listener.finished(ok("anchor.copy", [1.0], SHAPES[0]))
        listener.warning("watch [out]")


def test_bars_count_what_was_verified_and_measured():
    where, stream = console(terminal=True)
    bars = make_listener(where, quiet=False)
    assert isinstance(bars, Bars)
    play(bars)
    text = stream.getvalue()
    assert "4/4" in text
    assert "2/2" in text
    assert "✓ 2" in text
    assert "✗ 2" in text
    assert "Test CPU 9000 · torch 2.13.0 · 2 implementations x 2 workloads" in text


def test_one_is_not_several():
    planned = [Planned(RECORDS[0].cell, None)]
    assert headline({"torch": CPU}, planned).endswith(" · 1 implementation x 1 workload")


def test_a_crash_before_verification_is_over_too():
    where, _ = console(terminal=True)
    bars = Bars(where)
    bars.planned([Planned(r.cell, None) for r in RECORDS])
    for record in RECORDS:
        bars.finished(record)
    bars.__exit__(None, None, None)
    assert len(bars.count.checked) == 4
    assert bars.count.to_measure == 2


def test_without_a_terminal_one_line_per_workload():
    where, stream = console(terminal=False)
    lines = make_listener(where, quiet=False)
    assert isinstance(lines, Lines)
    play(lines)
    printed = stream.getvalue().splitlines()
    assert len(printed) == 1 + len(SHAPES) + 1
    assert printed[1].startswith("2/4 cells · ")
    assert "\x1b" not in stream.getvalue()


def test_quiet_prints_warnings_only():
    where, stream = console(terminal=True)
    quiet = make_listener(where, quiet=True)
    assert type(quiet) is Silent
    play(quiet)
    assert stream.getvalue() == "warning: watch [out]\n"


def test_planning_in_parts_adds_up():
    where, _ = console(terminal=False)
    lines = Lines(where)
    for on in SHAPES:
        lines.planned([Planned(Cell("a", on), None)])
    assert len(lines.count.runnable) == 2
