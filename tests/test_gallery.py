"""The README's gallery: its figures are those of the run files, and `make gallery` was run after they changed."""

from __future__ import annotations

import re
import struct
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from page_factory import JAX, page_of, timed

from attnbench.spec import Cost, Memory

pytest.importorskip("altair")
pytest.importorskip("jinja2")
pytest.importorskip("vl_convert")

import gallery
from gallery_captions import CAPTIONS
from marked_blocks import replaced

from attnbench.report.html.images import GREY, drawable
from attnbench.report.html.layout import MOST_FEATURED

ROOT = Path(__file__).parents[1]
RUNS, IMAGES = ROOT / "results/h200", ROOT / "docs/gallery"
RUN_AGAIN = "the run files changed: `make gallery` writes the README, the charts and the report anew"


def test_the_readme_says_what_the_run_files_say():
    readme = (ROOT / "README.md").read_text()
    for name, text in gallery.blocks(gallery.page_of(gallery.read(RUNS)), RUNS, IMAGES).items():
        assert text in readme, f"block {name}: {RUN_AGAIN}"
    for picture in re.findall(r"\]\((docs/gallery/[^)]*)\)", readme):
        assert (ROOT / picture).is_file()


def test_the_winner_map_shows_every_shape_that_its_caption_counts():
    part = gallery.shown(gallery.page_of(gallery.read(RUNS))).parts[0]
    timed = [row for row in part.cells.rows if row.get("ns") is not None and row["exact"]]
    drawn = gallery.charts_of(part)["winners"]
    assert {row["workload"] for row in timed if row.get("map") == drawn.map} == {row["workload"] for row in timed}
    rows = Counter((row["row"], row["column"], row["workload"]) for row in timed)
    assert len({(row, column) for row, column, _ in rows}) == len(rows), "two shapes in one place"


def test_charts_are_wide_enough_to_read_and_small():
    for name in CAPTIONS:
        content = (IMAGES / f"{name}.png").read_bytes()
        width, height = struct.unpack(">II", content[16:24])
        assert width >= 1000
        assert height >= 200
        assert len(content) < 500_000


def test_the_report_is_that_of_the_runs_and_small():
    report = RUNS / "report.html"
    assert report.stat().st_size < 3_500_000
    text = report.read_text()
    for source in gallery.read(RUNS):
        assert source.name in text, RUN_AGAIN


def test_repetitions_do_not_take_the_place_of_what_they_repeat():
    names = [source.name for source in gallery.read(RUNS)]
    assert "grid-gpu.jsonl" in names
    assert not any("again" in name for name in names)


def test_a_repetition_is_the_history_of_what_it_repeats():
    runs, again = gallery.read(RUNS), gallery.read(RUNS, again=True)
    assert "grid-gpu-again.jsonl" in [source.name for source in again]
    alone, both = (gallery.page_of(runs, more).parts[0] for more in ([], again))
    (history,) = [view for view in both.views if view.name == "history"]
    assert history.table is not None
    assert history.table.rows is not None
    assert history.table.rows["count"] > 0
    assert [cell["ns"] for cell in both.cells.rows if "ns" in cell] == [
        cell["ns"] for cell in alone.cells.rows if "ns" in cell
    ]


def test_line_charts_name_few_and_count_the_rest():
    page = gallery.page_of(gallery.read(RUNS))
    for name in ("rate", "memory"):
        chart = gallery.charts_of(page.parts[0])[name]
        spec = drawable(chart, page.parts[0].cells.rows, page.labels)
        drawn = {row["label"] for row in spec["datasets"]["rows"]}
        told = [set(legend["values"]) for legend in legends_of(spec)]
        assert len(drawn) > MOST_FEATURED
        assert all(names == told[0] for names in told)
        assert len(told[0]) == MOST_FEATURED
        assert "=torch.eager" in told[0]
        assert f"{len(drawn) - MOST_FEATURED} more implementations in grey" in spec["title"]["subtitle"]
        grey = {f"={label}" for label, one in zip(page.labels, spec["config"]["range"]["category"]) if one == GREY}
        assert grey == {f"={label}" for label in drawn} - told[0]


def legends_of(node: Any) -> list[dict[str, Any]]:
    if isinstance(node, list):
        return [found for one in node for found in legends_of(one)]
    if not isinstance(node, dict):
        return []
    here = [node["legend"]] if isinstance(node.get("legend"), dict) and "values" in node["legend"] else []
    return here + [found for value in node.values() for found in legends_of(value)]


def test_captions_are_read_from_the_rows():
    def cost(tflops: float) -> Cost:
        return Cost(flops=10**9, bytes=10**6, tflops=tflops, roofline=tflops / 1000, bound="compute")

    records = []
    for n in (128, 256):
        plain, fused = (Memory(peak_bytes=bytes, theory_bytes=n) for bytes in (100 * n * n, 1000 * n))
        records += [
            timed("torch.eager", 4e6, n, cost=cost(10), memory=plain),
            timed("torch.sdpa", 1e6, n, cost=cost(n), memory=fused),
            timed("jax.xla", 0.5e6 if n == 128 else 3e6, n, environment=JAX, cost=cost(5)),
        ]
    part = page_of(*records).parts[0]
    charts = gallery.charts_of(part)
    told = {name: tell(part, charts[name]) for name, (_, tell) in CAPTIONS.items()}
    assert told["winners"].startswith("The fastest of 3 implementations on 2 shapes: ")
    assert "torch.sdpa 1" in told["winners"]
    assert "(0 shapes)" in told["winners"]
    assert "torch.sdpa reaches 256 TFLOP/s at 1 x 256, 26 % of the ceiling" in told["rate"]
    assert "torch.eager reaches 10.0 there" in told["rate"]
    assert "at 1 x 256 torch.eager needs 6.55 MB, 25.6 times the 256 kB of torch.sdpa" in told["memory"]
    assert "on the 2 shapes that both ran: torch is faster on 1, JAX on 1, 0 are too close" in told["frameworks"]
    assert re.search(r"from 0\.\d\dx \(.*\) at 1 x 128 to 3\.\d\dx \(.*\) at 1 x 256", told["frameworks"])


def test_the_largest_of_the_fullest_workloads_is_printed():
    records = [timed(name, 1e6, n) for n in (128, 256) for name in ("torch.eager", "torch.sdpa")]
    text = gallery.ranking(page_of(*records, timed("torch.sdpa", 1e6, 512)).parts[0])
    assert text.startswith("Test CPU 9000, wall times:")
    assert "1 x 256 tokens" in text
    assert "1 x 128 tokens" not in text


def test_a_page_without_a_place_for_a_block_is_one_sentence(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text("nothing here")
    with pytest.raises(SystemExit, match=r"page\.md has 0 blocks"):
        replaced(page, {"gallery": "text"})
    page.write_text("a <!-- gallery: x --> old <!-- end of gallery --> b")
    assert replaced(page, {"gallery": "\\1 new"}) == "a \\1 new b"
