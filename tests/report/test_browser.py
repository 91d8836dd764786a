"""The page in a real Chromium without a network: drawn, filtered, sorted, dark, narrow, and never script from a run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from chromium import BROWSER, NO_CHROMIUM, Opened
from record_factory import CPU, noisy, ok, unsupported, workload
from run_history import step_history

from attnbench.results.run_file import Header, Run
from attnbench.spec import Cost, Errors, Incorrect, Memory, Record

pytest.importorskip("playwright")
pytest.importorskip("altair")
pytest.importorskip("jinja2")
pytest.importorskip("vl_convert")

from playwright.sync_api import expect

from attnbench.report.html.history import find_history
from attnbench.report.html.page import compose, render
from attnbench.results.run_file import NamedRun

pytestmark = pytest.mark.skipif(BROWSER is None, reason=NO_CHROMIUM)
expect.set_options(timeout=30_000)
HOSTILE = "<img src=x onerror=window.hacked=1>"
BREAKER = "</script><script>window.hacked=2</script>"
JAX = msgspec.structs.replace(CPU, framework="jax", packages={"jax": "0.10.2"})
COST = Cost(flops=10**9, bytes=10**6, tflops=1.5, gb_per_s=1.5, roofline=0.5, bound="compute")
INHERITED = ("constructor", "toString", "__proto__")
"""Names that every JavaScript object knows already."""
SPEEDS = {"torch.eager": 4e6, "torch.sdpa": 1e6, "jax.xla": 2e6, HOSTILE: 3e6, BREAKER: 5e6}
SPEEDS |= {name: 6e6 + place * 1e5 for place, name in enumerate(INHERITED)}


def records() -> list[Record]:
    made: list[Record] = []
    for place, (name, median) in enumerate(SPEEDS.items()):
        for length in (128, 256, 512):
            for pass_ in ("forward", "train"):
                made.append(
                    ok(
                        name,
                        noisy(median * length / 128, seed=place + length),
                        on=workload(length, pass_=pass_),
                        environment=JAX if name.startswith("jax") else CPU,
                        memory=Memory(peak_bytes=1000 * length, theory_bytes=900 * length, fragmentation=0.1),
                        cost=COST,
                        compile_ns=10**8 * (place + 1),
                        kernels=(f"kernel of {name}",),
                    )
                )
    wrong = Errors(forward=0.5, forward_allowed=0.01)
    return [
        *made,
        unsupported(HOSTILE, f"because of {BREAKER}", workload(64)),
        Incorrect(implementation="jax.wrong", workload=workload(256), reason="wrong", errors=wrong, environment=JAX),
    ]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    header = Header(schema=1, attnbench="0", created="2026-01-01T00:00:00+00:00", suite=BREAKER)
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(render(compose([NamedRun(HOSTILE, Run(header, {}, tuple(records())))])), encoding="utf-8")
    return path


def test_it_loads_offline_without_a_complaint(opened: Opened, report: Path):
    assert opened.complaints == []
    assert opened.asked == [report.as_uri()]


@pytest.mark.parametrize(
    "chart", ["winners", "time", "rate", "memory", "roofline", "compile", "correctness", "frameworks"]
)
def test_every_chart_is_drawn(opened: Opened, chart: str):
    box = opened.page.locator(f"[data-chart={chart}]")
    box.scroll_into_view_if_needed()
    drawn = box.screenshot()
    box.evaluate("box => { box.firstElementChild.style.visibility = 'hidden'; }")
    blank = box.screenshot()
    box.evaluate("box => { box.firstElementChild.style.visibility = ''; }")
    assert drawn != blank
    marks = box.locator("svg .mark-symbol path, svg .mark-rect path")
    assert marks.count() >= 3


def test_the_winner_is_on_the_map(opened: Opened):
    told = opened.page.locator("[data-chart=winners] svg .mark-text text").all_text_contents()
    assert "torch.sdpa" in told
    assert "torch.eager" not in told


def test_a_framework_filters_tables_and_charts(opened: Opened):
    before = opened.page.locator("[data-chart=time] svg .mark-symbol path").count()
    opened.page.select_option("select[name=framework]", "jax")
    assert set(opened.column("speedups", 2)) == {"jax.xla"}
    assert opened.page.locator("#count").inner_text() == "7 of 50 cells"
    opened.page.wait_for_function("document.querySelectorAll('[data-chart=time] svg .mark-symbol path').length == 3")
    assert before == 24


def test_pass_and_shape_filter_together(opened: Opened):
    opened.page.select_option("select[name=pass]", "train")
    opened.page.fill("input[name=words]", "t256 causal")
    shapes = opened.column("speedups", 1)
    assert len(shapes) == len(SPEEDS)
    assert set(shapes) == {"1 x 256 · train"}
    assert opened.page.locator("[data-view=length] select.pick").evaluate("s => s.selectedOptions[0].text") == "train"


def test_an_implementation_can_be_hidden(opened: Opened):
    opened.page.locator(".labels summary").click()
    opened.page.get_by_label("torch.sdpa", exact=True).uncheck()
    assert "torch.sdpa" not in opened.column("speedups", 2)
    opened.page.wait_for_function(
        "![...document.querySelectorAll('[data-chart=winners] svg text')].some(t => t.textContent == 'torch.sdpa')"
    )
    opened.page.locator(".labels summary").click()


def test_regret_follows_the_filters(opened: Opened):
    def regret() -> dict[str, str]:
        return dict(zip(opened.column("regret", 1), opened.column("regret", 4)))

    before = regret()
    assert before["torch.sdpa"] == "0.0 %"
    opened.page.select_option("select[name=framework]", "jax")
    assert regret() == {"jax.xla": "0.0 %"}
    assert before["jax.xla"] != "0.0 %"


def test_regret_counts_the_shapes_first(opened: Opened):
    opened.page.fill("input[name=words]", "t256")
    assert set(opened.column("regret", 2)) == {"2 of 2"}
    assert opened.column("regret", 1)[0] == "torch.sdpa"


def test_the_table_under_the_map_tells_what_a_tooltip_does(opened: Opened):
    assert opened.headings("winners")[:6] == [
        "shape", "fastest", "time", "next best", "regret of the next best", "certain",
    ]  # fmt: skip
    assert set(opened.column("winners", 2)) == {"torch.sdpa"}
    assert set(opened.column("winners", 4)) == {"jax.xla"}
    assert set(opened.column("winners", 6)) == {"yes"}


def rows_of(opened: Opened) -> dict[str, int]:
    views = opened.page.locator(".part [data-view]:has(.table)")
    names = views.evaluate_all("all => all.map(one => one.dataset.view)")
    counts = views.evaluate_all("all => all.map(one => one.querySelectorAll('tbody tr').length)")
    return dict(zip(names, counts))


def words_of(opened: Opened, view: str) -> str:
    return opened.page.locator(f"[data-view={view}] tbody").inner_text()


OF_SHAPES = {"frameworks"}
"""Views whose rows belong to no implementation and no framework."""
FEWER_SHAPES = {"regret", "growth-time", "growth-memory", "kernels"}
"""Views whose rows stand for several shapes: they stay, with what is left."""


@pytest.mark.parametrize("words", ["t64", "t256 causal", "no such shape"])
def test_every_view_follows_the_filter_of_shapes(opened: Opened, words: str):
    before = rows_of(opened)
    assert {"growth-time", "growth-memory", "kernels", "not-run", "correctness"} <= before.keys()
    opened.page.fill("input[name=words]", words)
    after = rows_of(opened)
    if words == "no such shape":
        assert set(after.values()) == {0}
    elif words == "t64":
        assert {view for view, count in after.items() if count} == {"not-run"}
        assert "because of" in words_of(opened, "not-run")
    else:
        assert all(0 < after[view] < before[view] for view in before.keys() - FEWER_SHAPES)
        assert all(after[view] > 0 for view in FEWER_SHAPES)
        assert set(opened.column("kernels", 3)) == {"1"}
        assert "because of" not in words_of(opened, "not-run")


@pytest.mark.parametrize(("field", "value"), [("framework", "jax"), ("pass", "train")])
def test_every_view_follows_framework_and_pass(opened: Opened, field: str, value: str):
    before = rows_of(opened)
    opened.page.select_option(f"select[name={field}]", value)
    after = rows_of(opened)
    unmoved = {view for view in before if after[view] == before[view]}
    if field == "framework":
        assert unmoved <= OF_SHAPES | {"winners"}
        assert "because of" not in words_of(opened, "not-run")
        assert "torch." not in words_of(opened, "kernels") + words_of(opened, "growth-time")
    else:
        assert unmoved <= {"regret"}
        assert after["not-run"] == 0


def test_every_view_follows_the_implementations(opened: Opened):
    opened.page.locator(".labels summary").click()
    opened.page.get_by_label("torch.sdpa", exact=True).uncheck()
    opened.page.get_by_label("jax.wrong", exact=True).uncheck()
    for view in rows_of(opened).keys() - OF_SHAPES:
        assert "torch.sdpa" not in words_of(opened, view)
        assert "jax.wrong" not in words_of(opened, view)
    opened.page.locator(".labels summary").click()


def test_what_is_wrong_is_drawn_beyond_the_line(opened: Opened):
    assert "wrong" in opened.column("correctness", 3)
    marks = opened.page.locator("[data-chart=correctness] svg .mark-rect path[aria-label*='jax.wrong']")
    assert marks.count() == 1
    assert "50" in (marks.get_attribute("aria-label") or "")


def test_a_chart_that_fails_stops_no_other(browser: Any, report: Path, tmp_path: Path):
    broken = tmp_path / "broken.html"
    text = report.read_text(encoding="utf-8")
    assert '"datum.drawn_share"' in text
    broken.write_text(text.replace('"datum.drawn_share"', '"datum.drawn_share +"'), encoding="utf-8")
    opened = Opened(browser, broken)
    assert opened.page.locator("[data-chart=correctness]").inner_text() == "This chart could not be drawn."
    assert opened.page.locator(".chart[data-drawn=yes]").count() == 7
    opened.context.close()


def test_a_very_long_name_is_cut_and_its_title_is_whole(browser: Any, tmp_path: Path):
    name = "torch." + "x" * 3000 + ".end"
    found = [ok(one, noisy(ns, seed=3), on=workload(128)) for one, ns in ((name, 1e6), ("torch.b", 2e6))]
    header = Header(schema=1, attnbench="0", created="2026-01-01T00:00:00+00:00", suite="s")
    path = tmp_path / "long.html"
    path.write_text(render(compose([NamedRun("run", Run(header, {}, tuple(found)))])), encoding="utf-8")
    opened = Opened(browser, path)
    assert "x" * 100 not in opened.page.locator("body").inner_text()
    assert opened.page.locator("[data-view=length] .legend button").first.get_attribute("title") == name
    assert opened.page.locator("[data-view=speedups] td.label[title]").first.get_attribute("title") == name
    assert opened.complaints == []
    opened.context.close()


def test_nothing_timed_gives_the_reasons_and_no_empty_choice(browser: Any, tmp_path: Path):
    found = [unsupported(f"torch.{n}", f"reason {n % 4}.", workload(128)) for n in range(9)]
    header = Header(schema=1, attnbench="0", created="2026-01-01T00:00:00+00:00", suite="s")
    path = tmp_path / "nothing.html"
    path.write_text(render(compose([NamedRun("run", Run(header, {}, tuple(found)))])), encoding="utf-8")
    opened = Opened(browser, path)
    answer = opened.page.locator("#answer").inner_text()
    assert "reason 0 (3 cells); reason 1 (2 cells); reason 2 (2 cells)." in answer
    assert opened.page.locator("select.baseline").count() == 0
    opened.context.close()


def test_a_heading_sorts_by_click_and_by_key(opened: Opened):
    heading = opened.page.locator("[data-view=percentiles]").get_by_role("button", name="P50", exact=True)
    place = opened.headings("percentiles").index("P50") + 1
    heading.click()
    rising = opened.column("percentiles", place)
    heading.focus()
    opened.page.keyboard.press("Enter")
    falling = opened.column("percentiles", place)
    assert rising[0] != falling[0]
    assert rising == falling[::-1]
    assert opened.page.locator("[data-view=percentiles] th[aria-sort=descending]").inner_text().startswith("P50")


def test_intervals_sort_by_their_low_edge_and_have_no_negative_nought(browser: Any, tmp_path: Path):
    powers = {"torch.flat": 0.0, "torch.falling": -1.0, "torch.steep": -2.0, "torch.rising": 1.0}
    made = [
        ok(name, [1e6 * (n / 128) ** power * wobble for wobble in (0.9999, 1, 1.0001)], on=workload(n), cost=COST)
        for name, power in powers.items()
        for n in (128, 256, 512, 1024)
    ]
    path = tmp_path / "growth.html"
    header = Header(schema=1, attnbench="0", created="2026-01-01T00:00:00+00:00", suite="quick")
    path.write_text(render(compose([NamedRun("run", Run(header, {}, tuple(made)))])), encoding="utf-8")
    opened = Opened(browser, path)
    opened.page.locator("[data-view=growth-time]").get_by_role("button", name="95 %", exact=True).click()
    headings = opened.headings("growth-time")
    names = opened.column("growth-time", headings.index("implementation") + 1)
    place = next(at for at, heading in enumerate(headings, start=1) if heading.startswith("95 %"))
    told = opened.column("growth-time", place)
    assert names == ["torch.steep", "torch.falling", "torch.flat", "torch.rising"]
    assert told == ["-2.00 to -2.00", "-1.00 to -1.00", "0.00 to 0.00", "1.00 to 1.00"]
    opened.context.close()


def test_another_baseline(opened: Opened):
    def gain(name: str) -> str:
        rows = zip(opened.column("speedups", 1), opened.column("speedups", 2), opened.column("speedups", 5))
        return next(text for shape, label, text in rows if label == name and shape == "1 x 128 · forward")

    assert gain("torch.sdpa").startswith(("3.9", "4.0"))
    opened.page.locator("select.baseline").select_option(label="torch.sdpa")
    assert gain("torch.sdpa").startswith("1.00x")
    assert gain("torch.eager").startswith("0.2")
    opened.page.locator("select.baseline").select_option(index=0)


def test_another_family_of_shapes(opened: Opened):
    choice = opened.page.locator("[data-view=length] select.pick")
    assert choice.locator("option").all_inner_texts() == ["forward", "train"]
    choice.select_option(label="train")
    opened.page.wait_for_function(
        "[...document.querySelectorAll('[data-chart=time] svg .mark-symbol path')]"
        ".every(p => p.getAttribute('aria-label').includes('train'))"
    )
    choice.select_option(label="forward")


def test_a_hostile_name_stays_text(opened: Opened):
    assert opened.page.evaluate("window.hacked") is None
    assert opened.page.locator("img").count() == 0
    assert HOSTILE in opened.column("speedups", 2)
    assert BREAKER in opened.column("speedups", 2)
    legend = opened.page.locator("[data-view=length] .legend button").all_inner_texts()
    assert {HOSTILE, BREAKER, *INHERITED} <= set(legend)
    assert opened.complaints == []


def test_a_hostile_name_stays_text_in_a_tooltip(opened: Opened):
    opened.page.locator("[data-chart=time]").scroll_into_view_if_needed()
    mark = opened.page.locator("[data-chart=time] svg .mark-symbol path[aria-label*='onerror']").first
    mark.hover()
    tooltip = opened.page.locator("#vg-tooltip-element.visible")
    tooltip.wait_for()
    assert HOSTILE in tooltip.inner_text()
    assert tooltip.locator("img").count() == 0
    assert opened.page.evaluate("window.hacked") is None


def test_pointing_at_the_legend_fades_the_others(opened: Opened):
    opened.page.locator("[data-view=length] .legend button", has_text="torch.sdpa").focus()
    opened.page.wait_for_function(
        "[...document.querySelectorAll('[data-chart=time] svg .mark-symbol path')]"
        ".filter(p => Number(p.getAttribute('opacity')) < 0.5).length == 21"
    )


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_it_fits_the_screen(browser: Any, report: Path, scheme: str, width: int):
    opened = Opened(browser, report, viewport={"width": width, "height": 844}, color_scheme=scheme)
    assert opened.overflow() <= 0
    assert opened.complaints == []
    ground = opened.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert ground == ("rgb(255, 255, 255)" if scheme == "light" else "rgb(20, 24, 29)")
    assert opened.page.locator("[data-chart=time]").get_attribute("data-theme") == scheme
    opened.context.close()


def test_the_scheme_may_change_while_it_is_open(browser: Any, report: Path):
    opened = Opened(browser, report, color_scheme="light")
    opened.page.emulate_media(color_scheme="dark")
    opened.page.wait_for_selector("[data-chart=time][data-theme=dark]")
    assert opened.complaints == []
    opened.context.close()


def test_paper_shows_tables_whole_and_no_filters(browser: Any, report: Path):
    opened = Opened(browser, report)
    opened.page.emulate_media(media="print")
    assert not opened.page.locator("#filters").is_visible()
    assert opened.page.evaluate("getComputedStyle(document.querySelector('.table')).overflow") == "visible"
    assert len(opened.column("speedups", 1)) == 20
    assert opened.page.locator("[data-view=speedups] .more").inner_text() == "20 of 48 rows"
    cut = (
        "[...document.querySelectorAll('.chart svg')].some(one => one.clientWidth > one.closest('.chart').clientWidth)"
    )
    opened.page.set_viewport_size({"width": 700, "height": 900})
    opened.page.wait_for_function(f"!({cut})")  # charts are drawn again a moment later
    assert opened.page.pdf().startswith(b"%PDF")
    opened.page.emulate_media(media="screen")
    expect(opened.page.locator("[data-view=speedups] tbody tr")).to_have_count(48)
    opened.context.close()


def test_the_answer_is_the_first_thing_a_keyboard_reaches(browser: Any, report: Path):
    opened = Opened(browser, report)
    opened.page.keyboard.press("Tab")
    assert opened.page.evaluate("document.activeElement.getAttribute('href')") == "#answer"
    opened.page.keyboard.press("Tab")
    assert opened.page.evaluate("document.activeElement.closest('form, .answer') !== null")
    opened.context.close()


def test_figures_behind_a_sentence_can_be_unfolded(opened: Opened):
    fold = opened.page.locator(".answer .basis").first
    assert not fold.locator("li").first.is_visible()
    fold.locator("summary").focus()
    opened.page.keyboard.press("Enter")
    assert "time of torch.eager / torch.sdpa" in fold.inner_text()


@pytest.fixture(scope="module")
def history(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Opened]:
    sources = step_history(8, 4, lengths=(128, 256))
    path = tmp_path_factory.mktemp("history") / "report.html"
    path.write_text(render(compose(sources, history=find_history(sources, {}))), encoding="utf-8")
    opened = Opened(browser, path, viewport={"width": 1280, "height": 900})
    yield opened
    opened.context.close()


def history_texts(opened: Opened) -> list[str]:
    return opened.page.locator("[data-chart=history] svg .mark-text text").all_text_contents()


def test_the_history_of_a_cell_shows_its_step(history: Opened):
    pytest.importorskip("ruptures")
    choice = history.page.locator("[data-view=history] select.pick")
    names = choice.locator("option").all_inner_texts()
    assert [name.partition(" ")[0] for name in names] == ["torch.sdpa", "torch.sdpa", "torch.eager", "torch.eager"]
    points = history.page.locator("[data-chart=history] svg .mark-symbol path")
    assert points.count() == 8
    assert any("slower" in text for text in history_texts(history))
    choice.select_option(label="torch.eager · 1 x 256")
    history.page.wait_for_function(
        "[...document.querySelectorAll('[data-chart=history] svg .mark-symbol path')]"
        ".every(p => p.getAttribute('aria-label').includes('torch.eager · 1 x 256'))"
    )
    assert not any("slower" in text for text in history_texts(history))
    choice.select_option(label=names[0])


def test_the_history_follows_the_filters(history: Opened):
    choice = history.page.locator("[data-view=history] select.pick")
    history.page.fill("input[name=words]", "t256")
    assert choice.locator("option:not([disabled])").count() == 2
    assert choice.evaluate("s => s.selectedOptions[0].text").endswith("1 x 256")
    assert len(history.column("history", 1)) == 2
    history.page.locator("button[type=reset]").click()
    assert history.complaints == []
