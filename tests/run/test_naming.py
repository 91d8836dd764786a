"""Names of functions given by reference: short, and never those of another."""

from __future__ import annotations

from pathlib import Path

import pytest

from attnbench.run.user_functions import name_references


@pytest.mark.parametrize(
    ("references", "names"),
    [
        (["a.py:f"], ["f"]),
        (["a.py:f", "b.py:g"], ["f", "g"]),
        (["a.py:f", "b.py:f", "a.py:g"], ["a:f", "b:f", "g"]),
        (["new/a.py:f", "old/a.py:f", "b.py:f"], ["new/a:f", "old/a:f", "b:f"]),
        (["a.py:f", "./a.py:f"], ["f", "f-2"]),
        (["a.py:f", "./a.py:f", "b.py:f"], ["a:f", "a:f-2", "b:f"]),
        (["kernels.fast:f", "kernels.slow:f"], ["fast:f", "slow:f"]),
        (["old.fast:f", "new.fast:f", "fast:f"], ["old.fast:f", "new.fast:f", "fast:f"]),
        (["a.py:f", "kernels.fast:f"], ["a:f", "fast:f"]),
    ],
)
def test_the_file_is_named_where_functions_share_a_name(
    references: list[str], names: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    assert name_references(references) == dict(zip(references, names))


def test_what_is_no_reference_is_left_alone_and_its_name_is_not_given_twice():
    assert name_references(["torch.sdpa", len, "a.py:f"], {"f"}) == {"a.py:f": "f-2"}
