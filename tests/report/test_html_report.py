"""The page without a browser: what goes into it, and that nothing in it is markup."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

import msgspec
import pytest
from page_factory import BREAKER, HOSTILE, JAX, page_of, section_of, source, timed, two_frameworks
from record_factory import CPU, incorrect, noisy, ok, timing, unsupported, workload

from attnbench.errors import AttnBenchError
from attnbench.results.ratios import condensed, paired_ratio
from attnbench.results.sentences import category, format_ratio, speedups
from attnbench.spec import Cost, Errors, Incorrect, Memory

pytest.importorskip("altair")
pytest.importorskip("jinja2")
pytest.importorskip("vl_convert")

from attnbench import masks
from attnbench.report.html import images, views
from attnbench.report.html.cells import choose_baselines, make_cells, pack, unpack
from attnbench.report.html.charts import SYMBOLS, order_labels, ranges
from attnbench.report.html.images import write_images
from attnbench.report.html.layout import family_choices, set_beside
from attnbench.report.html.page import capital, compose, render, script_json, summarise
from attnbench.report.html.sections import gather, name_shapes
from attnbench.report.html.views import growth_rows
from attnbench.report.summaries import group_advice
from attnbench.results.records import share_of_allowed

pytestmark = pytest.mark.usefixtures("no_bundle")


class TestCells:
    def test_samples_stay_out(self):
        for cell in make_cells(section_of(*two_frameworks())).rows:
            assert not any(isinstance(value, list | tuple | dict) for value in cell.values())

    def test_speed_up_against_each_baseline(self):
        cells = make_cells(section_of(*two_frameworks()))
        fast = next(cell for cell in cells.rows if cell["label"] == "torch.sdpa" and cell["len"] == 128)
        assert cells.baselines[0] == "torch.eager"
        assert fast["gain0"] == pytest.approx(4, rel=0.05)
        assert fast["gain0_is"] == "excellent"
        place = cells.baselines.index("jax.xla")
        assert fast[f"gain{place}"] == pytest.approx(2, rel=0.05)
        assert fast[f"gain{cells.baselines.index('torch.sdpa')}_is"] == "baseline"

    def test_what_is_not_ok_has_no_figures(self):
        cells = make_cells(section_of(*two_frameworks())).rows
        refused = next(cell for cell in cells if cell["label"] == "torch.fa3")
        assert "ns" not in refused
        assert refused["reason"] == "needs a GPU"

    def test_of_a_cell_in_two_runs_the_newest_is_shown(self):
        sections = gather([source(timed("torch.sdpa", 1e6)), source(timed("torch.sdpa", 3e6))])
        cells = make_cells(sections[0])
        assert cells.repeated == 1
        assert len(cells.records) == 1
        assert cells.rows[0]["ns"] == pytest.approx(3e6, rel=0.2)

    def test_different_clocks_are_told(self):
        slow = timed("torch.eager", 4e6)
        assert slow.time is not None
        slow = msgspec.structs.replace(slow, time=msgspec.structs.replace(slow.time, clock="kernel"))
        *_, note = page_of(slow, timed("torch.sdpa", 1e6)).parts[0].notes
        assert (
            note
            == "1 shape was timed by different clocks (kernel, wall): shown and compared by one that most of them hold"
        )

    def test_kernel_times_are_called_so(self):
        records = [timed(name, ns) for name, ns in (("torch.eager", 4e6), ("torch.sdpa", 1e6))]
        assert page_of(*records).parts[0].notes == []
        short = [msgspec.structs.replace(r, time=msgspec.structs.replace(r.time, clock="kernel")) for r in records]
        (note,) = page_of(*short).parts[0].notes
        assert note.startswith("times are of the device's kernels")

    def test_ratios_are_taken_within_a_run(self):
        old = [timed("torch.eager", 4e6), timed("torch.sdpa", 1e6)]
        new = [timed("torch.flex", 2e6)]
        (section,) = gather([source(*old), source(*new)])
        cells = {cell["label"]: cell for cell in make_cells(section).rows}
        assert "gain0" not in cells["torch.flex"]
        assert cells["torch.sdpa"]["gain0"] == pytest.approx(4, rel=0.05)

    def test_the_run_that_decides_a_shape_is_shown_and_ranked(self):
        """The second run does not hold both contenders of the first, so that it decides nothing."""
        old = [timed("torch.eager", 4e6), timed("torch.sdpa", 1e6), timed("torch.eager", 8e6, 256)]
        page = compose([source(*old), source(timed("torch.sdpa", 2e6), timed("torch.flex", 3e6))])
        (part,) = page.parts
        cells = {(cell["label"], cell["len"]): cell for cell in part.cells.rows}
        assert cells["torch.sdpa", 128]["ns"] == pytest.approx(1e6, rel=0.2)
        assert [cells[name, 128]["rank"] for name in ("torch.sdpa", "torch.eager", "torch.flex")] == [1, 2, None]
        assert cells["torch.eager", 256]["rank"] == 1
        assert (part.cells.repeated, part.cells.pooled) == (1, 1)
        assert any("did not share their rounds" in note for note in part.notes)
        assert "too close to call" not in summarise(page)
        assert re.search(r"torch\.sdpa leads on 1 of 2 shapes, (3\.9|4\.0)\dx", part.answer[0])
        (winner,) = [one for one in part.advice if one.kind == "winner"]
        assert winner.figures[0].value == pytest.approx(4, rel=0.05)

    def test_a_shape_that_resume_added_to_an_older_file_is_the_newer(self):
        shape = [timed("torch.sdpa", 6e6, 256), timed("torch.eager", 3e6, 256)]
        older = source(timed("torch.sdpa", 1e6), *shape)
        resumed = msgspec.structs.replace(older.run, dates=("2026-01-01", "2026-11-19", "2026-11-19"))
        newer = source(timed("torch.sdpa", 2e6, 256), timed("torch.eager", 3e6, 256), created="2026-02-01")
        for run, first in ((resumed, "torch.eager"), (older.run, "torch.sdpa")):
            (part,) = compose([msgspec.structs.replace(older, run=run), newer]).parts
            assert [cell["label"] for cell in part.cells.rows if cell["len"] == 256 and cell["rank"] == 1] == [first]

    @pytest.mark.parametrize("pace", [1.0, 0.4, 3.0])
    def test_of_two_runs_the_newer_decides_if_it_holds_the_leaders_or_is_clearly_ahead(self, pace):
        """Both runs hold torch.sdpa, so that a machine that was quicker or slower in one of them deceives nobody."""

        def ranks(**new):
            old = [timed("torch.eager", 9e6), timed("torch.flash", 4.1e6), timed("torch.sdpa", 4e6)]
            newer = [timed(f"torch.{name}", ns * pace) for name, ns in new.items()]
            (section,) = gather([source(*old), source(*newer)])
            return {cell["label"]: cell["rank"] for cell in make_cells(section).rows}

        assert ranks(sdpa=4e6, math=16e6)["torch.math"] is None, "torch.flash is not there"
        assert ranks(sdpa=4e6, flash=8e6)["torch.flash"] == 2
        assert ranks(sdpa=4e6, mine=2e6) == {
            "torch.eager": None, "torch.flash": None, "torch.sdpa": 2, "torch.mine": 1,
        }  # fmt: skip

    def test_runs_that_share_no_implementation_are_not_compared(self):
        (part,) = compose([source(timed("torch.eager", 4e6)), source(timed("torch.sdpa", 1e6))]).parts
        assert part.answer == ["torch.sdpa is the only one that was ranked, over 1 shape."]
        assert part.advice == []

    def test_shapes_of_several_clocks_are_shown_by_one(self):
        def by(clock, record):
            return msgspec.structs.replace(record.time, clock=clock)

        slow, fast = timed("torch.eager", 4e6), timed("torch.sdpa", 1e6)
        events = msgspec.structs.replace(slow, time=by("events", slow), also={"kernel": by("kernel", slow)})
        kernel = msgspec.structs.replace(fast, time=by("kernel", fast))
        cells = make_cells(section_of(events, kernel)).rows
        assert {cell["clock"] for cell in cells} == {"kernel"}
        assert {cell["rank"] for cell in cells} == {1, 2}

    def test_baselines_are_few_when_records_are_many(self, monkeypatch: pytest.MonkeyPatch):
        records = two_frameworks()
        assert len(choose_baselines(records)) == 3
        monkeypatch.setattr("attnbench.report.html.cells.MOST_RATIOS", 10)
        assert choose_baselines(records, ["torch.sdpa"]) == ["torch.sdpa", "torch.eager"]


class TestLengths:
    def test_the_family_with_most_lengths_is_shown_first(self):
        rows = [{"family": "a", "batch": 1, "len": 1, "ns": 1.0}] * 5
        rows += [{"family": "b", "batch": 1, "len": n, "ns": 1.0} for n in (1, 2)]
        assert [choice.text for choice in family_choices(rows, "ns")] == ["b", "a"]

    def test_of_two_curves_the_one_with_more_cells_is_shown_first(self):
        rows = [{"family": "long", "batch": 1, "len": n, "ns": 1.0} for n in range(6)]
        rows += [{"family": "contested", "batch": 1, "len": n, "ns": 1.0} for n in range(3)] * 4
        assert [choice.text for choice in family_choices(rows, "ns")] == ["contested", "long"]

    def test_one_batch_at_a_time_where_that_makes_a_curve(self):
        rows = [
            {"family": "f", "batch": b, "len": n, "ns": 1.0}
            for b, most in ((1, 3), (8, 2), (9, 1))
            for n in range(most)
        ]
        assert [choice.text for choice in family_choices(rows, "ns")] == [
            "f · batch 1",
            "f · batch 8",
            "f · all batches",
        ]
        few = [row for row in rows if row["len"] < 2]
        assert family_choices(few, "ns")[0].text == "f · all batches"
        one, *_, every = family_choices(rows, "ns")
        assert [one.accepts(row) for row in rows] == [True] * 3 + [False] * 3
        assert all(every.accepts(row) for row in rows)
        assert family_choices(rows, "peak") == []

    def test_batches_of_one_length_stand_side_by_side_unless_there_are_curves(self):
        few = [{"family": "f", "batch": b, "len": n, "ns": 1.0} for b, n in ((1, 512), (16, 512), (4, 1024))]
        set_beside(few)
        assert few[0]["beside"] < 512 < few[1]["beside"]
        assert "beside" not in few[2]
        curves = [{"family": "f", "batch": b, "len": n, "ns": 1.0} for b in (1, 16) for n in (1, 2, 3)]
        set_beside(curves)
        assert not any("beside" in cell for cell in curves)

    def test_growth_finds_the_exponent(self):
        records = [
            timed("torch.eager", 1e3 * n**2, n, memory=Memory(peak_bytes=5 * n**2, theory_bytes=n**2))
            for n in (128, 256, 512)
        ]
        (row,) = growth_rows(records, name_shapes(record.workload for record in records))
        assert row["time"] == pytest.approx(2, abs=0.1)
        assert row["memory"] == pytest.approx(2, abs=0.01)
        assert row["memory_is"] == "O(n^2)"
        assert row["memory_theory"] == pytest.approx(2, abs=0.01)
        assert row["lengths"] == "128 to 512"

    def test_growth_says_where_compute_binds_and_memory_ends(self):
        here = msgspec.structs.replace(CPU, memory_bytes=10**9)
        records = [
            timed("torch.eager", 1e3 * n**2, n, environment=here,
                  memory=Memory(peak_bytes=5 * n**2, theory_bytes=5 * n**2),
                  cost=Cost(flops=n * n, bytes=n, bound="compute" if n > 128 else "memory"))
            for n in (128, 256, 2048)
        ]  # fmt: skip
        (row,) = growth_rows(records, name_shapes(record.workload for record in records))
        assert row["bound"] == "compute, from somewhere between 128 and 256 tokens"
        assert row["fits"] == pytest.approx((10**9 / 5) ** 0.5, rel=0.05)


class TestAnswers:
    def test_each_kind_of_shapes_once_under_its_question(self):
        names = {"torch.eager": 4.0, "torch.sdpa": 1.0, "jax.einsum": 4.0, "jax.cudnn": 2.0}
        records = [
            timed(name, ns * length, length, environment=JAX if name.startswith("jax") else CPU)
            for name, ns in names.items()
            for length in (128, 256)
        ]
        which, *_ = group_advice(page_of(*records).parts[0].advice)
        assert which.title == "Which one"
        (answer,) = which.folded
        assert answer.shapes == "4 heads of 32 · causal · float32 · forward"
        assert [one.framework for one in answer.told] == ["Overall", "PyTorch", "JAX"]
        assert answer.told[0].text.startswith("use torch.sdpa, 2.0")
        assert answer.told[1].text.startswith("use torch.sdpa, 4.0")
        assert "time of torch.eager / torch.sdpa 4.0" in answer.told[0].basis
        assert which.table is not None
        assert which.table.frameworks == ["Overall", "PyTorch", "JAX"]
        ((shapes, (overall, torch, jax)),) = which.table.rows
        assert shapes == answer.shapes
        assert overall is not None
        assert overall.name == "torch.sdpa"
        assert torch is not None
        assert (torch.name, torch.equal, torch.led, torch.of) == ("torch.sdpa", "", 2, 2)
        assert torch.over_next.startswith("4.0")
        assert torch.over_next.endswith("as fast as torch.eager")
        assert torch.gain == ""
        assert jax is not None
        assert jax.name == "jax.cudnn"

    def test_every_kind_of_shapes_is_a_row_and_its_sentences_are_folded(self):
        records = [timed(name, ns, heads, on=workload(128, heads=heads)) for heads in range(1, 8)
                   for name, ns in (("torch.eager", 4e6), ("torch.sdpa", 1e6))]  # fmt: skip
        (which,) = group_advice(page_of(*records).parts[0].advice)
        assert (len(which.open), len(which.folded)) == (0, 7)
        assert which.table is not None
        assert len(which.table.rows) == 7

    def test_what_is_not_certain_is_not_shown_as_a_figure_alone(self):
        times = {"torch.eager": (1e6, 1e6, 2e6, 1e6), "torch.sdpa": (2e6, 2e6, 1e6, 1e6)}
        records = [timed(name, ns, 128 * place) for name, row in times.items() for place, ns in enumerate(row, start=1)]
        text = render(page_of(*records))
        assert '<span class="quiet">by shape, most often</span> <b>torch.' in text
        span = r'<span class="figure">0\.\d\dx to \d\.\d\dx</span>'
        assert re.search(rf"3 of 4</span> · {span}, not certain</span>", text)

    def test_a_name_keeps_its_small_letter(self):
        assert capital("jax.xla is nowhere behind") == "jax.xla is nowhere behind"
        assert capital("use torch.sdpa") == "Use torch.sdpa"

    def test_sections_that_read_alike_name_their_runs(self):
        other = msgspec.structs.replace(CPU, threads=2, python="3.99")
        runs = [source(timed("torch.sdpa", 1e6, environment=e), name=n) for n, e in (("a", CPU), ("b", other))]
        titles = [part.title for part in compose(runs).parts]
        assert titles == [
            "Test CPU 9000 · torch 2.13.0 · 2 threads · a",
            "Test CPU 9000 · torch 2.13.0 · 2 threads · b",
        ]


class TestPacking:
    def test_rows_come_back_without_what_is_not_known(self):
        rows = [{"a": 1, "b": "x"}, {"a": None, "b": "y"}]
        assert unpack(pack(rows)) == [{"a": 1, "b": "x"}, {"b": "y"}]

    def test_columns_come_back_as_rows(self):
        packed = pack([{"a": 1.23456, "b": "x"}, {"b": "y", "c": None}])
        assert packed == {"count": 2, "columns": {"a": [1.2346, None], "b": {"words": ["x", "y"], "codes": [0, 1]}}}

    def test_large_numbers_stay_numbers(self):
        assert pack([{"a": 1234567.0, "b": 1e300}])["columns"] == {"a": [1234600], "b": [1e300]}

    @pytest.mark.parametrize("text", [HOSTILE, BREAKER, "a & b"])
    def test_nothing_in_a_script_is_markup(self, text: str):
        packed = script_json({"name": text})
        assert not set("<>&") & set(packed)
        assert msgspec.json.decode(packed)["name"] == text


class TestColours:
    def test_winners_come_first(self):
        rows = make_cells(section_of(*two_frameworks())).rows
        assert order_labels(rows)[0] == "torch.sdpa"

    def test_twenty_implementations_can_be_told_apart(self):
        found = ranges(20, tuple("abcdefghij"))
        assert len(set(zip(found["category"], found["symbol"]))) == 20
        assert set(found["symbol"]) == set(SYMBOLS)


class TestDerived:
    def test_frameworks_side_by_side(self):
        cells = make_cells(section_of(*two_frameworks()))
        (row,) = views.side_by_side(cells)
        assert (row["torch"], row["jax"]) == ("torch.sdpa", "jax.xla")
        assert row["gain"] == pytest.approx(2, rel=0.05)
        assert row["side"] == "torch"

    @pytest.mark.parametrize("order", [(0, 1), (1, 0)])
    def test_of_two_runs_the_one_with_the_fastest_on_both_sides_is_shown(self, order):
        whole = source(timed("torch.sdpa", 1e6), timed("jax.cudnn", 2e6, environment=JAX))
        narrow = source(timed("torch.sdpa", 1e6), timed("jax.tokamax-xla", 18e6, environment=JAX))
        (section,) = gather([(whole, narrow)[place] for place in order])
        (row,) = views.side_by_side(make_cells(section))
        assert (row["torch"], row["jax"]) == ("torch.sdpa", "jax.cudnn")
        assert row["gain"] == pytest.approx(2, rel=0.05)

    def test_what_is_shown_of_a_speedup_is_what_decides(self):
        cells = make_cells(section_of(*two_frameworks()))
        rows = {(cell["label"], cell["workload"]): cell for cell in cells.rows}
        found = [one for standing in cells.standings.overall.values() for one in speedups(standing, cells.baselines[0])]
        assert found
        for one in found:
            cell = rows[one.implementation, one.workload]
            assert (cell["gain0_text"], cell["gain0_is"]) == (format_ratio(one.ratio), category(one.ratio))

    def test_one_sample_cannot_tell_who_is_faster(self):
        here = {"torch.sdpa": CPU, "jax.xla": JAX}
        records = [ok(name, time=timing([1e6]), environment=place) for name, place in here.items()]
        (row,) = views.side_by_side(make_cells(section_of(*records)))
        assert row["side"] == "cannot tell"

    def test_kernels_of_several_shapes_share_a_row(self):
        rows = views.kernels(make_cells(section_of(*two_frameworks())))
        assert {(row["label"], row["kernels"]) for row in rows} == {("torch.sdpa", "flash_fwd")}
        assert len({row["workload"] for row in rows}) == 2

    def test_the_larger_share_of_output_and_gradients_counts(self):
        errors = Errors(forward=0.1, forward_allowed=1.0, backward=0.6, backward_allowed=2.0)
        assert share_of_allowed(errors) == pytest.approx(0.3)
        assert share_of_allowed(Errors()) is None
        assert share_of_allowed(None) is None

    def test_what_is_wrong_has_a_verdict_with_and_without_errors(self):
        far = Incorrect(implementation="a", workload=workload(128), reason="far", environment=CPU,
                        errors=Errors(forward=1e9, forward_allowed=1.0))  # fmt: skip
        silent = Incorrect(implementation="b", workload=workload(128), reason="silent", environment=CPU)
        cells = make_cells(section_of(far, silent, timed("torch.a", 1e6)))
        rows = {row["label"]: row for row in cells.rows}
        assert (rows["a"]["verdict"], rows["a"]["drawn_share"], rows["a"]["why"]) == ("wrong", 1000, "far")
        assert rows["b"]["verdict"] == "wrong"
        assert "share" not in rows["b"]
        assert rows["torch.a"]["verdict"] == "right"

    def test_one_line_per_reason(self):
        records = two_frameworks()
        rows = views.not_run(records, name_shapes(record.workload for record in records))
        assert [(row["status"], row["cells"], row["labels"]) for row in rows] == [
            ("unsupported", 2, "torch.fa3, torch.fa4"),
            ("incorrect", 1, "mine"),
        ]

    def test_ceilings_are_read_back(self):
        compute = Cost(flops=1000, bytes=1, tflops=5.0, gb_per_s=1.0, roofline=0.5, bound="compute")
        memory = Cost(flops=1, bytes=1, tflops=0.1, gb_per_s=100.0, roofline=0.5, bound="memory")
        cells = make_cells(section_of(timed("torch.a", 1e6, cost=compute), timed("torch.b", 1e6, cost=memory)))
        points = [(row["intensity"], row["tflops"]) for row in views.roofs(cells)]
        assert points == [(1.0, 0.2), (50.0, 10.0), (1000.0, 10.0)]

    def test_the_cache_belongs_to_the_shape(self):
        memory = Memory(peak_bytes=1, kv_cache_bytes=128 * 100)
        section = section_of(timed("torch.a", 1e6, memory=memory), timed("torch.b", 1e6, memory=memory))
        (row,) = views.kv_cache(make_cells(section))
        assert (row["cache"], row["per_token"]) == (12800, 100)


class TestPage:
    def test_it_has_every_view_there_is_data_for(self):
        text = render(page_of(*two_frameworks()))
        for view in ("winners", "length", "speedups", "percentiles", "correctness", "frameworks", "kernels", "not-run"):
            assert f'data-view="{view}"' in text

    def test_a_view_without_data_says_why_or_is_left_out(self):
        text = render(page_of(unsupported("torch.fa3", "needs a GPU")))
        assert "Nothing was timed." in text
        assert 'data-view="percentiles"' not in text

    def test_memory_that_was_not_measured_gives_its_reason(self):
        assert "No peak was measured: not asked for." in render(page_of(*two_frameworks()))

    def test_nothing_is_fetched(self):
        text = render(page_of(*two_frameworks()))
        assert not re.search(r'(src|href)="(?!#)', text)
        assert "@import" not in text
        assert "url(" not in text

    def test_only_its_own_scripts_may_run(self):
        text = render(page_of(*two_frameworks()))
        scripts = re.findall(r'<script type="module">(.*?)</script>', text, re.DOTALL)
        (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', text)
        hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
        assert len(hashes) == 2
        assert all(f"sha256-{one}" in policy for one in hashes)
        assert "default-src &#39;none&#39;" in policy
        assert "unsafe-eval" not in policy

    @pytest.mark.parametrize("text", [HOSTILE, BREAKER])
    def test_text_of_a_run_file_is_never_markup(self, text: str):
        environment = msgspec.structs.replace(CPU, device_name=text, packages={text: text}, variables={text: text})
        records = [
            timed(text, 1e6, environment=environment, kernels=(text,), notes=(text,)),
            timed("torch.eager", 2e6, environment=environment),
            msgspec.structs.replace(unsupported(text, text, workload(64)), environment=environment),
            msgspec.structs.replace(incorrect(text, text, workload(32)), environment=environment),
        ]
        html = render(compose([source(*records, name=text)]))
        assert text not in html
        assert "<img" not in html
        assert html.count("<script") == 3
        assert "alert(" in html

    def test_different_machines_are_told_apart(self):
        newer = msgspec.structs.replace(CPU, packages={"torch": "2.14.0"})
        text = render(page_of(timed("torch.sdpa", 1e6), timed("torch.sdpa", 1e6, environment=newer)))
        assert text.count('<article class="part"') == 2
        assert "Their times do not compare" in text

    def test_a_record_costs_few_bytes(self):
        few, many = ([timed("torch.sdpa", 1e6, n) for n in range(64, 64 + count)] for count in (10, 60))
        grown = len(render(page_of(*many))) - len(render(page_of(*few)))
        assert grown / 50 < 800


def test_images_are_drawn(tmp_path: Path):
    paths = write_images(page_of(*two_frameworks(), timed(HOSTILE, 3e6)), tmp_path / "charts")
    assert {path.name for path in paths} >= {"winners.png", "winners.svg", "time.png", "rate.svg"}
    assert (tmp_path / "charts/time.png").read_bytes().startswith(b"\x89PNG")
    svg = (tmp_path / "charts/time.svg").read_text()
    assert "torch.sdpa" in svg
    assert "<img" not in svg


@pytest.mark.parametrize("chart", ["time", "rate"])
def test_points_set_the_axis_and_not_their_intervals(tmp_path: Path, chart: str):
    """Two points, 4 times apart by time and by rate, whose intervals reach over six decades."""
    open_to_all = msgspec.structs.replace(timing([1e6, 4e6]), ci95_ns=(30.0, 80e6))
    records = [
        ok(
            "torch.sdpa",
            on=workload(n),
            time=msgspec.structs.replace(open_to_all, median_ns=ns),
            cost=Cost(flops=10**9, bytes=10**6, tflops=1e6 / ns),
        )
        for n, ns in ((128, 1e6), (256, 4e6))
    ]
    write_images(page_of(*records), tmp_path)
    told = re.search(r"Y-axis [^\"]* with values from ([\d.]+) to ([\d.]+)", (tmp_path / f"{chart}.svg").read_text())
    assert told is not None
    low, high = map(float, told.groups())
    assert 4 < high / low < 12


def test_every_family_of_shapes_has_its_own_images(tmp_path: Path):
    full = [timed("torch.sdpa", 3e6, n, on=workload(n, mask=masks.full())) for n in (128, 256)]
    paths = write_images(page_of(*two_frameworks(), *full), tmp_path)
    times = {path.name for path in paths if path.name.startswith("time") and path.suffix == ".svg"}
    assert len(times) == 2
    (other,) = times - {"time.svg"}
    assert (tmp_path / other).read_text() != (tmp_path / "time.svg").read_text()


TURNED = "torch.\u202egnorw\u2066"


def test_no_name_turns_the_rest_of_a_line_around(tmp_path: Path):
    page = page_of(*two_frameworks(), timed(TURNED, 0.5e6), unsupported("torch.fa3", f"no {TURNED}", workload(256)))
    write_images(page, tmp_path)
    texts = [render(page), *(path.read_text() for path in tmp_path.glob("*.svg"))]
    assert all("torch.gnorw" in text for text in (texts[0], (tmp_path / "time.svg").read_text()))
    for text in texts:
        assert not set(text) & set("\u202e\u2066")
        assert not re.search(r"\\u(202e|2066)|&#(8238|x202e|8294|x2066)", text, re.IGNORECASE)


class TestMarkdown:
    def test_the_answer_and_the_winners(self):
        text = summarise(page_of(*two_frameworks()))
        assert "incorrect, 1 cell: mine" in text
        assert "torch.sdpa" in text
        assert "| 1 x 256 | torch.sdpa | 4" in text
        assert "needs a GPU" in text

    def test_of_a_shape_in_two_runs_the_newest_is_shown_once(self):
        runs = [source(timed("torch.sdpa", ns), timed("torch.eager", 9e6)) for ns in (1e6, 3e6)]
        (line,) = [one for one in summarise(compose(runs)).splitlines() if one.startswith("| 1 x 128")]
        assert line.startswith("| 1 x 128 | torch.sdpa | 3")

    def test_nothing_in_it_is_markup(self):
        text = summarise(page_of(timed(HOSTILE, 1e6), unsupported("a|b", "see @everyone")))
        assert "<img" not in text
        assert "a|b" not in text
        assert "@everyone" not in text

    def test_it_is_capped(self):
        records = [unsupported(f"torch.x{n}", f"reason {n} " + "long " * 50) for n in range(400)]
        assert len(summarise(page_of(*records))) < 65_000


def test_condensed_records_compare_as_before():
    samples = noisy(1e6, 1, rounds=40), noisy(1.3e6, 2, rounds=40)
    a, b = (ok(f"torch.{n}", None, time=timing(values, rounds=(5,) * 8)) for n, values in enumerate(samples))
    assert len(condensed(a).time.samples_ns) == 8
    assert paired_ratio(condensed(a), condensed(b)) == paired_ratio(a, b)
    assert make_cells(section_of(a, b)).rows[0]["samples"] == 40


def test_a_chart_that_cannot_be_drawn_is_named_and_the_others_are_written(tmp_path: Path, monkeypatch):
    drawn = images.drawable

    def broken(chart, rows, colours, choice):
        return {"mark": 1} if chart.name == "time" else drawn(chart, rows, colours, choice)

    monkeypatch.setattr(images, "drawable", broken)
    with pytest.raises(AttnBenchError, match=r"these charts could not be drawn: time \(") as caught:
        write_images(page_of(*two_frameworks()), tmp_path)
    assert "\n" not in str(caught.value)
    assert (tmp_path / "winners.png").exists()
    assert not (tmp_path / "time.png").exists()


@pytest.mark.parametrize("name", ["constructor", "toString", "__proto__"])
def test_names_that_javascript_knows_are_drawn(tmp_path: Path, name: str):
    assert len(write_images(page_of(*two_frameworks(), timed(name, 3e6)), tmp_path)) >= 6
