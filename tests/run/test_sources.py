"""Files of functions given by reference: found without an import, and held against what they were."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from attnbench.errors import UsageError
from attnbench.run.user_functions import fingerprint_sources, refuse_changed_sources

RUN = Path("runs/cpu/own.jsonl")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mykernels" / "parts").mkdir(parents=True)
    for name in ("mine.py", "mykernels/__init__.py", "mykernels/fast.py", "mykernels/parts/slow.py"):
        (tmp_path / name).write_text(f"raise SystemExit  # {name}")
    return tmp_path


def test_each_file_once_and_nothing_is_imported():
    asked = [
        "mine.py:f",
        "mine.py:g",
        "mykernels.fast:f",
        "mykernels:f",
        "mykernels.parts.slow:f",
        "torch.sdpa",
        len,
    ]
    found = fingerprint_sources([*asked, "nowhere.py:f", "sys:exit", ":f"])
    assert list(found) == ["mine.py", "mykernels.fast", "mykernels", "mykernels.parts.slow"]
    assert len(set(found.values())) == 4
    assert "mykernels" not in sys.modules


@pytest.mark.parametrize(("reference", "file"), [("mine.py:f", "mine.py"), ("mykernels.fast:f", "mykernels/fast.py")])
def test_a_changed_file_is_refused_until_it_is_as_it_was(folder: Path, reference: str, file: str):
    before = fingerprint_sources([reference])
    refuse_changed_sources(RUN, before, [reference])
    text = (folder / file).read_text()
    (folder / file).write_text("changed = True")
    with pytest.raises(UsageError, match=r"has changed since runs/cpu/own.jsonl began.* start a new run"):
        refuse_changed_sources(RUN, before, [reference])
    (folder / file).write_text(text)
    refuse_changed_sources(RUN, before, [reference])


def test_another_spelling_is_the_same_file_and_other_files_do_not_matter(folder: Path):
    before = fingerprint_sources(["mine.py:f", "mykernels.fast:f"])
    (folder / "mine.py").write_text("changed = True")
    refuse_changed_sources(RUN, before, ["mykernels.fast:f"])
    refuse_changed_sources(RUN, {}, ["mine.py:f"])
    with pytest.raises(UsageError, match=r"mine.py has changed"):
        refuse_changed_sources(RUN, before, ["./mine.py:g"])
