"""The history of a cell on the page: against the anchors, with its steps, or one sentence why there is none."""

from __future__ import annotations

import msgspec
import pytest
from page_factory import source
from run_history import run_at, step_history

pytest.importorskip("altair")
pytest.importorskip("jinja2")
pytest.importorskip("vl_convert")

from attnbench.report.html import history
from attnbench.report.html.cells import make_cells
from attnbench.report.html.history import NO_HISTORY, find_history, of_section, point_rows, trend_rows
from attnbench.report.html.page import compose, render
from attnbench.report.html.sections import gather
from attnbench.report.html.views import View
from attnbench.results.run_file import NamedRun

pytestmark = pytest.mark.usefixtures("no_bundle")


def rows_of(sources: list[NamedRun], make=point_rows, between=None) -> list[dict]:
    (section,) = gather(sources)
    trends = of_section(find_history(sources, {}, between), section)
    return make(trends, make_cells(section).names)


def view_of(sources: list[NamedRun]) -> View:
    (part,) = compose(sources, history=find_history(sources, {})).parts
    return next(view for view in part.views if view.name == "history")


def test_a_step_is_found_although_the_machine_wavers():
    pytest.importorskip("ruptures")
    rows = [row for row in rows_of(step_history()) if row["label"] == "torch.sdpa"]
    assert [row["place"] for row in rows if row["step"]] == [7]
    assert rows[7]["step"].startswith(("1.09x slower", "1.10x slower", "1.11x slower"))
    assert [row["ratio"] for row in rows] == pytest.approx([5.0] * 7 + [5.5] * 5, rel=0.02)
    assert [row["level"] for row in rows] == pytest.approx([5.0] * 7 + [5.5] * 5, rel=0.01)
    assert rows[0]["when"] == "2026-01-01 12:00 0000000"
    assert "ns" not in rows[0]


def test_cells_that_changed_come_first_and_say_since_when():
    pytest.importorskip("ruptures")
    first, second = rows_of(step_history(), trend_rows, lambda old, new: [(new, "an eighth more work")])
    assert (first["label"], first["runs"]) == ("torch.sdpa", 12)
    assert first["moved"] == pytest.approx(0.1, abs=0.02)
    assert 'slower since 000000000007 "an eighth more work"' in first["changes"]
    assert second["changes"] is None


def moved(run: NamedRun, **environment) -> NamedRun:
    """The same run with other facts of the environment."""
    records = [
        msgspec.structs.replace(r, environment=msgspec.structs.replace(r.environment, **environment))
        for r in run.run.records
    ]
    return source(*records, created=run.run.header.created)


def test_every_run_is_a_point_also_those_of_one_commit():
    assert len(rows_of([moved(run_at(n, {"torch.sdpa": 1e6}), commit="") for n in range(3)])) == 3


def test_a_step_within_one_commit_is_since_a_run():
    pytest.importorskip("ruptures")
    runs = [moved(run, commit="abc") for run in step_history()]
    assert "slower since the run of 2026-01-08" in rows_of(runs, trend_rows)[0]["changes"]


def test_the_axis_spans_more_than_the_noise():
    rows = rows_of([run_at(n, {"torch.eager": 4e6}) for n in range(8)])
    assert rows[0]["most"] / rows[0]["least"] == pytest.approx(1.05, rel=0.01)


def test_runs_within_a_minute_are_told_apart():
    runs = [
        source(*run_at(n, {"torch.sdpa": 1e6}).run.records, created=f"2026-01-01T12:00:0{n}+00:00") for n in range(2)
    ]
    assert [row["when"][:19] for row in rows_of(runs)] == ["2026-01-01 12:00:00", "2026-01-01 12:00:01"]


def test_series_that_would_read_alike_name_their_clock():
    runs = [run_at(n, {"torch.sdpa": 1e6}) for n in range(4)]
    for place in (2, 3):
        times = [msgspec.structs.replace(r.time, clock="cpu") for r in runs[place].run.records]
        records = [msgspec.structs.replace(r, time=time) for r, time in zip(runs[place].run.records, times)]
        runs[place] = source(*records, created=runs[place].run.header.created)
    assert len({row["series"] for row in rows_of(runs)}) == 2


class TestReasons:
    def test_one_run(self):
        assert view_of([run_at(0, {"torch.sdpa": 1e6})]).empty.startswith("One run has no history: name two or more")

    def test_two_runs_of_different_cells(self):
        view = view_of([run_at(0, {"torch.sdpa": 1e6}), run_at(1, {"torch.eager": 1e6})])
        assert view.empty == "No cell was timed beside anchor kernels in two of these runs."

    def test_no_anchors(self):
        view = view_of([run_at(n, {"torch.sdpa": 1e6}, anchors=False) for n in range(2)])
        assert "in two of these runs: its run has no anchor.matmul and no anchor.copy" in view.empty

    def test_too_few_for_a_step_are_shown_all_the_same(self):
        pytest.importorskip("ruptures")
        view = view_of(step_history(3, 1))
        assert "Too few runs to find a step: 3 at most, 6 are needed." in view.note
        assert view.charts[0].rows is not None
        assert view.charts[0].rows["count"] == 6

    def test_no_detector(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(history, "detector_missing", lambda: "steps need ruptures")
        assert "Steps were not searched for: steps need ruptures." in view_of(step_history()).note

    def test_how_many_changed(self):
        pytest.importorskip("ruptures")
        assert view_of(step_history()).note.endswith("1 of 2 cells changed by 2 % or more.")

    def test_what_the_noise_may_hide(self):
        pytest.importorskip("ruptures")
        runs = [run_at(n, {"torch.sdpa": 1e6 * (1.04 if n % 3 else 1.0)}) for n in range(8)]
        assert "Steps were found in 0 of 1 cells. Noise may hide a step of less than " in view_of(runs).note


@pytest.mark.parametrize(
    "fact, here, there", [("cores", 2, 9), ("processor", "GenuineIntel 6-85", "GenuineIntel 6-207")]
)
def test_a_history_belongs_to_its_machine(fact: str, here: object, there: object):
    runs = [moved(run, **{fact: value}) for value in (here, there) for run in step_history(4, 2)]
    page = compose(runs, history=find_history(runs, {}))
    assert len(page.parts) == 2
    for part in page.parts:
        (chart,) = next(view for view in part.views if view.name == "history").charts
        assert chart.rows is not None
        assert chart.rows["count"] == 8


def test_without_a_history_the_page_says_so():
    text = render(compose(step_history(2, 1), history=NO_HISTORY))
    assert 'data-view="history"' in text
    assert 'data-chart="history"' not in text
