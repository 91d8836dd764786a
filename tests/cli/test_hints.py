"""What a run advises after wrong results: a command that finds them again."""

from __future__ import annotations

from pathlib import Path

import pytest
from record_factory import incorrect, workload

from attnbench import masks
from attnbench.cli.options import Sampling, Selection, ShapeOptions
from attnbench.cli.run import Order, explain_hints, prepare
from attnbench.run.launch import Request
from attnbench.run.recorder import Prepared
from attnbench.spec import ONLY_TIMED

WRONG = "output: 9 x the relative error allowed"


def order(*references: str, **choice: object) -> Prepared:
    return prepare(
        Order(
            suite=None,
            quick=False,
            shape=ShapeOptions(seq_len=(64,)),
            choice=Selection(impl=references, **({"against": ("numpy.float32",)} | choice)),  # type: ignore[arg-type]
            sampling=Sampling(),
            resume=None,
            out=None,
        )
    )


@pytest.mark.parametrize("references", [("a.py:f", "b.py:f"), ("b.py:f", "a.py:f")])
def test_of_functions_with_one_name_the_wrong_one_is_named(references: tuple[str, ...]):
    (hint,) = explain_hints([incorrect("b:f", WRONG)], order(*references))
    assert hint == "`attnbench verify --impl b.py:f --seq-len 64 --explain` shows where b:f is wrong."


def test_a_bare_function_is_looked_at_where_it_ran():
    (hint,) = explain_hints([incorrect("f", WRONG)], order("a.py:f", framework="jax", device="cpu"))
    assert "--impl a.py:f --seq-len 64 --framework jax --device cpu --explain`" in hint


def test_what_only_timing_finds_is_not_to_be_found_without():
    timed = incorrect("f", f"{ONLY_TIMED} out, right when checked: row 0 differs")
    (hint,) = explain_hints([timed], order("a.py:f"))
    assert hint.startswith("f was right when checked and wrong when timed")
    assert "--explain" not in hint
    (hint,) = explain_hints([timed, incorrect("f", WRONG, workload(256))], order("a.py:f"))
    assert "--explain" in hint


def test_a_resumed_run_spells_out_the_shape():
    request = Request(workloads=(), implementations=("a.py:f",), framework="jax")
    resumed = Prepared(request, "own", Path("runs"), resumed=Path("run.jsonl"))
    (hint,) = explain_hints([incorrect("f", WRONG, workload(96))], resumed)
    assert "verify --impl a.py:f --seq-len 96 --batch 1 --heads 4 --head-dim 32" in hint
    assert "--framework jax --explain`" in hint
    by_hand = workload(4, mask=masks.dense([[True, False, True, True]] * 4))
    assert explain_hints([incorrect("f", WRONG, by_hand)], resumed) == []


def test_a_reference_to_compare_with_goes_by_the_name_of_its_rows():
    assert order("a.py:f", against=("b.py:f", "numpy.float32")).against == ("b:f", "numpy.float32")
    assert order("a.py:f", against=("b.py:g",)).against == ("g",)
