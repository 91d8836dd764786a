"""A field of many names in a real Chromium: one kernel counts once, few lines are firm, and paper is light."""

from __future__ import annotations

import re
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from chromium import BROWSER, NO_CHROMIUM, Opened
from page_factory import page_of, timed

pytest.importorskip("playwright")
pytest.importorskip("altair")
pytest.importorskip("jinja2")
pytest.importorskip("vl_convert")

from attnbench.report.html.charts import DARK, LIGHT
from attnbench.report.html.page import Page, render

pytestmark = pytest.mark.skipif(BROWSER is None, reason=NO_CHROMIUM)
CUDNN = ("cudnn_fprop",)
SPEEDS = {"torch.eager": 9e6, "torch.sdpa-cudnn": 1e6, "torch.sdpa": 1.001e6, "torch.fa3": 1.5e6, "torch.slow": 8e6}
SPEEDS |= {"torch.near-b": 2.101e6}
SPEEDS |= {f"torch.{letter}": 2e6 + 1e5 * place for place, letter in enumerate("abcd")}
LENGTHS = (128, 256, 512)


@pytest.fixture(scope="module")
def page() -> Page:
    kernels = {"torch.sdpa": CUDNN, "torch.sdpa-cudnn": CUDNN}
    return page_of(
        *(timed(name, n * ns, n, kernels=kernels.get(name, (name,))) for name, ns in SPEEDS.items() for n in LENGTHS)
    )


@pytest.fixture(scope="module")
def report(page: Page, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(render(page), encoding="utf-8")
    return path


def test_the_answer_names_the_kernel_once(opened: Opened):
    told = opened.page.locator(".headline").inner_text()
    assert told.split()[:2] == ["PyTorch,", "forward"]
    assert "torch.sdpa (the same kernel as torch.sdpa-cudnn) leads on all 3 shapes" in told
    picks = opened.page.locator(".picks tbody")
    assert picks.locator("b").get_attribute("title") == "the same kernel as torch.sdpa-cudnn"
    assert "≈" not in picks.inner_text()


def test_the_map_and_its_table_name_the_plainest(opened: Opened):
    told = opened.page.locator("[data-chart=winners] svg .mark-text text").all_text_contents()
    assert {text for text in told if "torch" in text} == {"torch.sdpa"}
    assert set(opened.column("winners", 2)) == {"torch.sdpa"}
    assert set(opened.column("winners", 3)) == {"torch.sdpa-cudnn"}
    assert set(opened.column("winners", 5)) == {"torch.fa3"}
    assert set(opened.column("winners", 7)) == {"yes"}
    assert opened.page.locator("[data-view=winners] .legend button").all_inner_texts() == ["torch.sdpa"]


def test_hiding_the_plainest_leaves_the_kernel_its_other_name(opened: Opened):
    opened.page.locator(".labels summary").click()
    opened.page.get_by_label("torch.sdpa", exact=True).uncheck()
    assert set(opened.column("winners", 2)) == {"torch.sdpa-cudnn"}
    opened.page.locator(".labels summary").click()


HIDDEN = [(), ("torch.sdpa", "torch.sdpa-cudnn"), ("torch.sdpa", "torch.sdpa-cudnn", "torch.fa3", "torch.a")]


@pytest.mark.parametrize("hidden", HIDDEN)
def test_what_a_filter_leaves_has_the_winners_of_the_standing(opened: Opened, page: Page, hidden: tuple[str, ...]):
    standings = page.parts[0].cells.standings.overall.values()
    left = [one.only(lambda record: record.implementation not in hidden) for one in standings]
    opened.page.locator(".labels summary").click()
    for name in hidden:
        opened.page.get_by_label(name, exact=True).uncheck()
    headings = opened.headings("winners")
    shown = [opened.column("winners", headings.index(name) + 1) for name in ("fastest", "next best", "certain")]
    expected = []
    for one in left:
        first, second = one.kernels[:2]
        told = "no, too close to call" if one.close else "yes"
        expected.append((first[0].implementation, second[0].implementation, told))
    assert sorted(zip(*shown)) == sorted(expected)
    assert any(one.close for one in left) == (len(hidden) > 2)
    opened.page.locator("button[type=reset]").click()
    opened.page.locator(".labels summary").click()


def named(page: Page) -> list[str]:
    """Return the names that the chart of times draws firmly."""
    (view,) = [view for view in page.parts[0].views if view.name == "length"]
    return view.charts[0].choices[0].named


def firm(opened: Opened) -> int:
    return opened.page.evaluate(
        "[...document.querySelectorAll('[data-chart=time] svg .mark-symbol path')]"
        ".filter(path => Number(path.getAttribute('opacity')) > 0.5).length"
    )


def test_few_lines_are_firm_until_a_name_is_pointed_at(opened: Opened, page: Page):
    names = named(page)
    quiet = opened.page.locator("[data-view=length] .legend .minor").all_inner_texts()
    assert set(quiet) == set(SPEEDS) - set(names)
    assert firm(opened) == len(names) * len(LENGTHS)
    opened.page.locator("[data-view=length] .legend button", has_text="torch.slow").focus()
    opened.page.wait_for_function(
        "[...document.querySelectorAll('[data-chart=time] svg .mark-symbol path')]"
        f".filter(path => Number(path.getAttribute('opacity')) > 0.5).length == {len(LENGTHS)}"
    )


def colours_of(pdf: bytes) -> set[str]:
    """Every colour that a PDF draws with."""
    found: set[str] = set()
    for stream in re.findall(rb"stream\r?\n(.*?)endstream", pdf, re.DOTALL):
        with suppress(zlib.error):
            for colour in re.findall(rb"([\d.]+) ([\d.]+) ([\d.]+) (?:rg|RG)\b", zlib.decompress(stream)):
                found.add("#" + "".join(f"{round(255 * float(part)):02x}" for part in colour))
    return found


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_paper_is_light_whatever_the_screen_is(browser: Any, report: Path, page: Page, scheme: str):
    opened = Opened(browser, report, color_scheme=scheme)
    drawn = colours_of(opened.page.pdf())
    assert len(drawn & set(LIGHT)) >= len(named(page))
    assert drawn.isdisjoint(DARK)
    opened.page.wait_for_selector(f"[data-chart=time][data-theme={scheme}]")
    assert opened.complaints == []
    opened.context.close()
