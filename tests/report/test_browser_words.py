"""Kinds of shapes in a real Chromium: the filter knows the words of the page, the first screen answers, tables fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from chromium import BROWSER, NO_CHROMIUM, Opened
from page_factory import JAX, page_of, timed
from record_factory import CPU, incorrect, unsupported, workload

from attnbench import masks
from attnbench.spec import Record, Workload

pytest.importorskip("playwright")
pytest.importorskip("altair")
pytest.importorskip("jinja2")
pytest.importorskip("vl_convert")

from playwright.sync_api import expect

from attnbench.report.html.page import render

pytestmark = pytest.mark.skipif(BROWSER is None, reason=NO_CHROMIUM)
expect.set_options(timeout=30_000)
SPEEDS = {"torch.eager": 4e6, "torch.sdpa": 1e6, "jax.einsum": 3e6, "jax.cudnn": 2e6}
BLOCKS = masks.block_causal([[0] * 64 + [1] * 64])


def shapes() -> list[Workload]:
    grid = [workload(n, batch=b, head_dim=128) for b, n in ((1, 512), (16, 512), (4, 1024))]
    return [*grid, workload(128, mask=BLOCKS, head_dim=64)]


def records() -> list[Record]:
    cells = [
        timed(name, ns, on=on, environment=JAX if name.startswith("jax") else CPU)
        for name, ns in SPEEDS.items()
        for on in shapes()
    ]
    lost = [unsupported("torch.fa3", "needs a GPU", on) for on in shapes()]
    return [*cells, *lost, *(incorrect(f"torch.bad-{n}", "first wrong row 3", shapes()[0]) for n in range(5))]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(render(page_of(*records())), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("1 x 512", {"1 x 512"}),
        ("16 x 512", {"16 x 512"}),
        ("x 512", {"1 x 512", "16 x 512"}),
        ("512", {"1 x 512", "16 x 512"}),
        ("t51", set()),
        ("batch 4", {"4 x 1024"}),
        ("block_causal", {"1 x 128"}),
        ("block_causal · float32 · forward", {"1 x 128"}),
        ("heads of 64", {"1 x 128"}),
        ("heads of 128", {"1 x 512", "16 x 512", "4 x 1024"}),
        ("4 heads of 128 · causal", {"1 x 512", "16 x 512", "4 x 1024"}),
        ("t512 caus", {"1 x 512", "16 x 512"}),
    ],
)
def test_the_filter_knows_the_words_of_the_page(words: str, found: set[str], opened: Opened):
    opened.page.fill("input[name=words]", words)
    assert {shape.partition(" · ")[0] for shape in opened.column("speedups", 1)} == found
    assert {shape.partition(" · ")[0] for shape in opened.column("frameworks", 1)} == found


def test_every_kind_of_shapes_that_is_printed_can_be_filtered_by(opened: Opened):
    kinds = opened.page.locator(".picks tbody th").all_inner_texts()
    assert len(kinds) == 2
    for kind in kinds:
        opened.page.fill("input[name=words]", kind)
        assert 0 < len(opened.column("winners", 1)) < len(shapes())


def test_the_first_screen_answers(opened: Opened):
    opened.page.evaluate("scrollTo(0, 0)")
    screen = opened.page.viewport_size["height"]
    for words in (".picks tbody tr:last-child", ".missing a", ".missing summary"):
        box = opened.page.locator(words).bounding_box()
        assert box["y"] + box["height"] < screen
    headings = opened.page.locator(".picks thead th").all_inner_texts()
    assert headings == ["shapes", "Overall", "PyTorch", "JAX"]
    first = opened.page.locator(".picks tbody tr").first.locator("td").all_inner_texts()
    assert [one.split()[0] for one in first] == ["torch.sdpa", "torch.sdpa", "jax.cudnn"]
    assert "3 of 3" in first[0]
    missing = opened.page.locator(".missing").inner_text()
    assert all(f"torch.bad-{n}" in missing for n in range(5))
    assert "4 of 25 cells did not run: needs a GPU (4)" in missing
    target = opened.page.locator(".missing a").get_attribute("href")
    assert opened.page.locator(target).get_attribute("data-view") == "not-run"


def test_one_map_and_what_is_alone_in_the_table(opened: Opened):
    told = opened.page.locator("[data-view=winners] .chart svg .mark-text text").all_text_contents()
    assert [one for one in told if "torch.sdpa" in one] == ["torch.sdpa"] * 3
    assert len(opened.column("winners", 1)) == 4


def test_a_map_without_a_cell_left_is_hidden_until_there_is_one(opened: Opened):
    figure = opened.page.locator("[data-view=winners] figure").first
    opened.page.fill("input[name=words]", "block_causal")
    expect(figure).to_be_hidden()
    assert len(opened.column("winners", 1)) == 1
    opened.page.fill("input[name=words]", "causal · 1 x 512")
    expect(figure).to_be_visible()
    expect(figure.locator("svg .mark-text text", has_text="torch.sdpa")).to_have_count(1)
    assert figure.locator("svg").bounding_box()["width"] > 300


SPILLED = """cells => cells.flatMap((cell) => {
  const edge = cell.getBoundingClientRect().right + 1;
  const inside = [...cell.querySelectorAll("span, b")];
  return inside.filter((one) => one.getBoundingClientRect().right > edge).map((one) => one.textContent);
})"""


@pytest.mark.parametrize(("width", "media"), [(718, "print"), (718, "screen"), (390, "screen")])
def test_no_answer_spills_into_the_next_column(browser: Any, tmp_path: Path, width: int, media: str):
    torch_only = [timed(name, SPEEDS[name], on=workload(128, heads=2)) for name in ("torch.eager", "torch.sdpa")]
    path = tmp_path / "report.html"
    path.write_text(render(page_of(*records(), *torch_only)), encoding="utf-8")
    narrow = Opened(browser, path, viewport={"width": width, "height": 900})
    narrow.page.emulate_media(media=media)
    assert narrow.page.get_by_text("no two frameworks timed together").is_visible()
    assert narrow.page.locator(".picks td").evaluate_all(SPILLED) == []
    narrow.context.close()


@pytest.mark.parametrize("view", ["winners", "speedups", "percentiles"])
def test_tables_fit_or_show_that_there_is_more(view: str, opened: Opened):
    box = opened.page.locator(f"[data-view={view}] .table")
    style = box.evaluate("e => [getComputedStyle(e).backgroundImage, getComputedStyle(e).backgroundAttachment]")
    assert style[0].count("linear-gradient") == 4
    assert style[1] == "local, local, scroll, scroll"
    if view == "winners":
        assert box.evaluate("e => e.scrollWidth - e.clientWidth") <= 0
