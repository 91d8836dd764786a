"""The gallery of the README: `make gallery`, or `python benchmarks/gallery.py`.

Reads results/h200/*.jsonl (repetitions, `*-again.jsonl`, for the history alone), writes the report of all of them and
its summaries beside them, four charts to docs/gallery, and the README's two blocks between markers: the table of one
workload, and the charts with captions. Nothing there is written by hand; a test holds the blocks against the run files.
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Sequence
from pathlib import Path

import vl_convert
from gallery_captions import CAPTIONS
from marked_blocks import marked, replaced
from printed_ranking import fullest, printed

from attnbench.files import write_texts
from attnbench.report.html.charts import VEGA_LITE, Chart
from attnbench.report.html.history import find_history
from attnbench.report.html.images import drawable
from attnbench.report.html.page import Page, PageSection, compose, render
from attnbench.report.summaries import folder_of, write_summaries
from attnbench.results.records import is_timed
from attnbench.results.run_file import NamedRun, read_run

ROOT = Path(__file__).parents[1]
AGAIN = "-again"
SCALE = 1.5
SHOWN = "grid-gpu-device-time.jsonl"
"""The run whose charts the README shows: one kind of shapes over lengths and batches, torch and JAX by one clock. The
report has them all."""


def read(folder: Path, again: bool = False) -> list[NamedRun]:
    """The runs of a folder, the oldest first, or their repetitions, each of which would take the place of a run."""
    paths = [path for path in sorted(folder.glob("*.jsonl")) if path.stem.endswith(AGAIN) == again]
    sources = [NamedRun(path.name, read_run(path), path.relative_to(ROOT).as_posix()) for path in paths]
    return sorted(sources, key=lambda source: source.run.header.created)


def page_of(sources: Sequence[NamedRun], again: Sequence[NamedRun] = ()) -> Page:
    """Of the runs; a repetition is a point of the history and nothing else."""
    ordered = sorted([*sources, *again], key=lambda source: source.run.header.created)
    return compose(sources, history=find_history(ordered, {}))


def blocks(page: Page, folder: Path, images: Path, root: Path = ROOT) -> dict[str, str]:
    """Name -> text of each block of the README."""
    front = shown(page)
    place = folder.relative_to(root).as_posix()
    files = hashlib.sha256(b"".join(read_bytes(folder))).hexdigest()[:12]
    texts = {"ranking": ranking(front.parts[0]), "gallery": gallery(front, place, images.relative_to(root).as_posix())}
    made = f"made by `make gallery` from {place} (sha256 {files})"
    return {name: marked(name, made, text) for name, text in texts.items()}


def shown(page: Page) -> Page:
    """The page of the run that the README shows; the page itself where it is not there."""
    chosen = [source for source in page.sources if source.name == SHOWN]
    return compose(chosen) if chosen else page


def read_bytes(folder: Path) -> list[bytes]:
    return [path.read_bytes() for path in sorted(folder.glob("*.jsonl"))]


def ranking(part: PageSection) -> str:
    """The fullest workload as the terminal prints it."""
    chosen = fullest(part.cells.records)
    device = next(iter(part.section.environments.values())).device_name
    clocks = sorted({record.time.clock for record in chosen if record.time is not None})
    words = {"kernel": "device"}  # kernels, copies and fills
    clocks = [words.get(clock, clock) for clock in clocks]
    return f"{device}, {' and '.join(clocks)} times:\n\n```\n{printed(chosen)}\n```"


def gallery(page: Page, place: str, images: str) -> str:
    part = page.parts[0]
    timed = sum(map(is_timed, part.cells.records))
    runs = ", ".join(f"`{page.sources[number].name}`" for number in part.section.runs)
    opening = (
        f"{part.section.title}: {timed} timed cells of {runs} in `{place}`. "
        f"[The whole report]({place}/report.html), of all runs there, is one HTML file: download it and open it."
    )
    charts = charts_of(part)
    pictures = [
        f"![{alt}]({images}/{name}.png)\n\n*{tell(part, charts[name])}*" for name, (alt, tell) in CAPTIONS.items()
    ]
    return "\n\n".join([opening, *pictures])


def charts_of(part: PageSection) -> dict[str, Chart]:
    return {chart.name: chart for view in part.views for chart in view.charts}


def draw(page: Page, images: Path) -> None:
    page = shown(page)
    part = page.parts[0]
    images.mkdir(parents=True, exist_ok=True)
    for name in CAPTIONS:
        spec = drawable(charts_of(part)[name], part.cells.rows, page.labels)
        (images / f"{name}.png").write_bytes(vl_convert.vegalite_to_png(spec, vl_version=VEGA_LITE, scale=SCALE))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path, default=ROOT / "results/h200")
    parser.add_argument("--images", type=Path, default=ROOT / "docs/gallery")
    given = parser.parse_args()
    readme = ROOT / "README.md"
    page = page_of(read(given.runs), read(given.runs, again=True))
    text = replaced(readme, blocks(page, given.runs, given.images))
    draw(page, given.images)
    report = given.runs / "report.html"
    write_texts({report: render(page), readme: text})
    write_summaries(page.parts, folder_of(report), page.left)
    print(f"{report}\n{folder_of(report)}\n{given.images}\n{readme}")


if __name__ == "__main__":
    main()
