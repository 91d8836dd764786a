"""Floors per case: only upward, always with a reason, and the line of what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from attnbench.comparing.gate_cases import load_thresholds
from attnbench.comparison import FLOOR
from attnbench.errors import BrokenFile

TEXT = """
[[case]]
implementation = "torch.sdpa"
workload = "*causal*"
floor = 0.03
reason = "two thread pools"

[[case]]
workload = "b1-*"
floor = 0.02
reason = "small shapes start slowly"
"""


def test_the_highest_floor_that_covers_a_case(tmp_path: Path):
    (tmp_path / "floors.toml").write_text(TEXT)
    floor = load_thresholds(tmp_path / "floors.toml")
    assert floor("torch.sdpa", "b1-t64-causal-float32") == 0.03
    assert floor("torch.sdpa-math", "b1-t64-causal-float32") == 0.02
    assert floor("torch.sdpa", "b2-t64-full-float32") == FLOOR


def test_without_a_file_the_floor_is_everywhere_the_same():
    assert load_thresholds(None)("torch.sdpa", "any") == FLOOR


WRONG = [
    ('[[case]]\nfloor = 0.005\nreason = "quiet"\n', 2, "below 0.01: floors go only upward"),
    ('[[case]]\nreason = "percent"\nfloor = 3.0\n', 3, "write 0.03 for 3 %"),
    ("[[case]]\nfloor = 0.03\n", 1, "missing required field `reason`"),
    ('[[case]]\nfloor = 0.03\nreason = " "\n', 3, "reason is empty"),
    ('[[case]]\nfloor = 0.03\nreason = "a"\n\n[[case]]\nfloor = "x"\nreason = "a"\n', 6, "Expected `float`, got `str`"),
    ('[[case]]\nfloor = 0.03\nreason = "a"\nworklod = "*"\n', 4, "unknown field `worklod`"),
    ("[[cases]]\nfloor = 0.03\n", 1, "write [[case]] tables"),
    ('[case]\nfloor = 0.03\nreason = "a"\n', 1, "two brackets"),
    ("[[case]]\nfloor = = 1\n", 2, "no valid TOML"),
]


@pytest.mark.parametrize("text,line,words", WRONG, ids=[words for *_, words in WRONG])
def test_wrong_files_name_the_line(tmp_path: Path, text: str, line: int, words: str):
    path = tmp_path / "floors.toml"
    path.write_text(text)
    with pytest.raises(BrokenFile) as caught:
        load_thresholds(path)
    assert str(caught.value).startswith(f"{path}, line {line}: ")
    assert words in str(caught.value)


def test_a_missing_file(tmp_path: Path):
    with pytest.raises(BrokenFile, match="cannot be read"):
        load_thresholds(tmp_path / "none.toml")
