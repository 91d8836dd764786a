"""How large a page may be, and that the benchmark of it says no when a claim is broken."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import report_size
from page_factory import source

pytest.importorskip("altair")
pytest.importorskip("jinja2")
pytest.importorskip("vl_convert")

from attnbench.report.html.page import compose, render

PUBLISHED = json.loads((Path(__file__).parents[1] / "results/cpu/report_size.json").read_text())["reports"]


@pytest.mark.parametrize("count", [2000])
def test_a_page_stays_within_its_share_of_what_5000_records_may_take(count: int):
    page = render(compose([source(*report_size.records(count))]))
    assert len(page.encode()) < report_size.CLAIMS["page_bytes_at_5000"] * count / 5000


def test_the_published_figures_keep_the_claims():
    assert report_size.broken(PUBLISHED) == []


@pytest.mark.parametrize(
    ("count", "name", "told"),
    [
        (10_000, "seconds", "10,000 records: seconds is"),
        (10_000, "peak_bytes", "10,000 records: peak_bytes is"),
        (5_000, "page_bytes", "5,000 records: page_bytes is"),
        (5_000, "open_seconds", "5,000 records: open_seconds is"),
        (1_000, "cpu_seconds", "cpu_seconds grows faster than the records from 100 to 1,000"),
    ],
)
def test_a_broken_claim_ends_with_an_error(
    count: int, name: str, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    figures = {row["records"]: dict(row) for row in PUBLISHED}
    figures[count][name] *= 100
    monkeypatch.setattr(report_size, "measure", lambda size, folder: figures[size])
    monkeypatch.setattr(sys, "argv", ["report_size.py"])
    assert report_size.main() == 1
    assert told in capsys.readouterr().err
    monkeypatch.setattr(report_size, "measure", lambda size, folder: PUBLISHED[[100, 1000, 5000, 10000].index(size)])
    assert report_size.main() == 0
