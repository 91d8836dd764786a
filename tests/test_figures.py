"""Figures of the pages are those of the files under results/cpu."""

from __future__ import annotations

from pathlib import Path

import figures
import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("page", figures.PAGES)
def test_the_page_says_what_the_files_say(page: str):
    text = (ROOT / page).read_text()
    for name, block in figures.blocks(page).items():
        assert block in text, f"block {name} of {page} is stale: `make figures` writes it anew"


def test_counts_of_the_calibration_are_added_up():
    rows = [{"found": "5/6 (35.9%-99.6%)"}, {"found": "6/6 (54.1%-100.0%)"}]
    assert figures.total(rows, lambda row: row["found"]) == (11, 12)


def test_the_block_of_make_bench_follows_its_run_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    before = figures.blocks("README.md")["bench"]
    lines = (figures.RESULTS / "quick.jsonl").read_text().splitlines(keepends=True)
    kept = [line for line in lines if '"implementation":"torch.hf-sdpa"' not in line]
    assert len(kept) < len(lines)
    for path in figures.RESULTS.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "quick.jsonl").write_text("".join(kept))
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    after = figures.blocks("README.md")["bench"]
    assert "torch.hf-sdpa" in before
    assert "torch.hf-sdpa" not in after
    assert "more tables; what was not run, and why]" in after
