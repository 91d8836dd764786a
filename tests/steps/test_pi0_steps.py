"""pi0's attention, block and pi0-FAST's steps: the models against float64, and what is refused, checked and counted."""

from __future__ import annotations

import numpy as np
import pytest
from pi0_cases import opened, require_right, small_step

from attnbench import masks
from attnbench.run import protocol as p
from attnbench.steps import KINDS, kind_of
from attnbench.steps.pi0 import drawn_rows, unsupported, whole
from attnbench.workloads import suites
from attnbench.workloads.cost import demand
from attnbench.workloads.steps import STEPS, block_sizes, depth, in_blocks, vocabulary

pytest.importorskip("torch")
pytest.importorskip("flax")
pytestmark = [pytest.mark.torch, pytest.mark.jax]
PI0 = [name for name in KINDS if name.startswith("pi0")]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("end", ["", "-flash"])
def test_the_attention_of_two_experts_is_right(end: str, dtype: str):
    require_right(opened("pi0-attention", end, dtype=dtype))


@pytest.mark.parametrize(
    ("step", "end", "dtype"),
    [
        ("pi0-block", "", "bfloat16"),
        ("pi0-block", "-flash", "float32"),
        ("pi0-fast-prefill", "", "float32"),
        ("pi0-fast-prefill", "-flash", "bfloat16"),
        ("pi0-fast-decode", "", "bfloat16"),
        ("pi0-fast-decode", "-flash", "float32"),
    ],
)
def test_blocks_prefill_and_decode_are_right(step: str, end: str, dtype: str):
    require_right(opened(step, end, dtype=dtype))


@pytest.mark.parametrize(
    ("step", "fields", "reason"),
    [
        ("pi0-attention", {"mask": masks.causal()}, "blocks (prefix, 1, actions)"),
        ("pi0-block", {"mask": in_blocks(12, 2, 4)}, "blocks (prefix, 1, actions)"),
        ("pi0-model", {"q_len": 6}, "with all tokens as queries"),
        ("pi0-model", {"dtype": "float64"}, "float32 or bfloat16, not float64"),
        ("pi0-model", {"kv_heads": 4}, "grouped heads"),
        ("pi0-model", {"softcap": 5.0}, "no softcap"),
        ("pi0-sampler", {"q_len": 5}, "with state and actions as queries"),
        ("pi0-sampler", {"pass_": "train"}, "forward only"),
        ("pi0-fast-prefill", {"mask": masks.lengths([12, 11])}, "lengths of q_len in every row"),
        ("pi0-fast-decode", {"mask": masks.causal("top-left")}, "takes a causal mask"),
        ("pi0-fast-decode", {"q_len": 16}, "behind a prompt"),
    ],
)
def test_what_is_no_such_step_is_refused(step: str, fields: dict, reason: str):
    workload = small_step(step, **fields)
    assert reason in (unsupported(workload) or "")
    assert demand(workload).flops > 0, "a plan counts before it refuses"


def test_a_refusal_reaches_the_record():
    answer = opened("pi0-attention", mask=masks.full())
    assert isinstance(answer, p.Closed)
    assert "block_causal" in answer.record.reason


@pytest.mark.parametrize("quick", [False, True])
def test_the_suite_has_every_step_in_a_form_that_is_taken(quick: bool):
    suite = suites.load("models-e2e")
    found = [w for w in (suites.quicken(suite) if quick else suite).workloads if w.step in PI0]
    assert {w.step for w in found} == set(PI0) < set(STEPS)
    assert [w.id for w in found if unsupported(w)] == []
    trained = {w.step for w in found if w.pass_ == "train"}
    assert trained == {"pi0-attention", "pi0-block", "pi0-model"}


def test_real_workloads_are_checked_small_with_the_same_head_dim():
    for workload in suites.load("models-e2e").workloads:
        if workload.step in PI0:
            assert (depth(workload), vocabulary(workload)) == (18, 257_152)
            small = kind_of(workload.step).small(workload)
            assert unsupported(small) is None
            assert (small.head_dim, small.heads, small.kv_heads, depth(small)) == (256, 2, 1, 2)
            assert small.kv_len <= 150
            assert kind_of(workload.step).small(small) == small
    assert block_sizes(kind_of("pi0-sampler").small(small_step("pi0-sampler"))) == (12, 1, 5)


@pytest.mark.parametrize("step", PI0)
def test_rounding_is_what_makes_the_error(step: str):
    kind, workload = kind_of(step), small_step(step)
    values = kind.draw(workload, 0)
    exact = kind.reference(workload, values, lambda array: array)
    coarse = kind.reference(workload, values, lambda array: array.astype(np.float16).astype(np.float64))
    assert tuple(exact) == kind.outputs(workload)
    for name in kind.outputs(workload):
        off = np.linalg.norm(coarse[name] - exact[name]) / np.linalg.norm(exact[name])
        assert 1e-5 < off < 2e-2, name


def test_a_whole_model_repeats_what_was_drawn():
    prefill = next(w for w in suites.load("models-e2e").workloads if w.step == "pi0-fast-prefill")
    assert drawn_rows(prefill) == (6272, 2048)
    drawn = {"q_einsum": np.arange(6).reshape(2, 3), "input_embedding": np.ones((6272, 1)), "images": np.ones((1, 7))}
    found = whole(drawn, prefill, np.tile)
    assert (found["q_einsum"] == drawn["q_einsum"][np.arange(18) % 2]).all()
    assert found["input_embedding"].shape == (257_152, 1)
    assert found["images"] is drawn["images"]
