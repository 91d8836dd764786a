"""The step `gemma-stack`: PyTorch's and JAX's stacks against one reference."""

from __future__ import annotations

import numpy as np
import pytest

from attnbench import masks
from attnbench.run import protocol as p
from attnbench.run.remote import Local
from attnbench.spec import Cell, Workload
from attnbench.steps import kind_of
from attnbench.workloads.cost import demand
from attnbench.workloads.steps import GEMMA_DEPTH

pytest.importorskip("torch")
pytest.importorskip("flax")
TORCH = ["torch.gemma-stack", "torch.gemma-stack-sdpa", "torch.gemma-stack-auto"]
JAX = ["jax.gemma-stack", "jax.gemma-stack-flash"]


def stack(**fields) -> Workload:
    shape = {"batch": 2, "q_len": 24, "heads": 4, "kv_heads": 1, "head_dim": 16, "step": "gemma-stack"}
    return Workload(**(shape | {"mask": masks.causal()} | fields))


def opened(name: str, workload: Workload, **config):
    worker = Local(name.partition(".")[0], "cpu")
    return worker.ask(p.Open(Cell(name, workload, config), False, True, None, 3, None, False), 300)


@pytest.mark.parametrize("name", [*TORCH, *JAX])
@pytest.mark.parametrize("fields", [{"pass_": "train"}, {"dtype": "bfloat16", "pass_": "train"}, {"mask": None}])
def test_stacks_are_right(name: str, fields: dict):
    answer = opened(name, stack(**fields))
    assert isinstance(answer, p.Opened), answer
    errors = answer.record.errors
    assert errors.forward <= errors.forward_allowed
    if "pass_" in fields:
        assert errors.backward <= errors.backward_allowed


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"kv_heads": 4}, "takes grouped heads"),
        ({"mask": masks.window(3)}, "takes a causal or full mask"),
        ({"kv_len": 30}, "takes self-attention"),
    ],
)
def test_what_is_no_stack_is_refused(fields: dict, reason: str):
    for name in ("torch.gemma-stack", "jax.gemma-stack"):
        answer = opened(name, stack(**fields))
        assert isinstance(answer, p.Closed)
        assert reason in answer.record.reason


def test_what_is_checked_keeps_its_head_dim():
    large = stack(batch=8, q_len=1024, heads=8, head_dim=256)
    small = kind_of("gemma-stack").small(large)
    assert (small.head_dim, small.heads, small.kv_heads, small.q_len, small.batch) == (256, 2, 1, 64, 2)


def test_rounding_is_what_makes_the_error():
    kind, workload = kind_of("gemma-stack"), stack(pass_="train")
    values = kind.draw(workload, 0)
    exact = kind.reference(workload, values, lambda array: array)
    coarse = kind.reference(workload, values, lambda array: array.astype(np.float16).astype(np.float64))
    for name in kind.outputs(workload):
        off = np.linalg.norm(coarse[name] - exact[name]) / np.linalg.norm(exact[name])
        assert 1e-5 < off < 1e-2, name


def test_attention_is_counted_once_for_each_layer():
    one, alone = demand(stack()), demand(stack(step=""))
    width, tokens = 64, 48
    weights = GEMMA_DEPTH * (2 * width * width + 2 * width * 16 + 3 * width * 8 * width)
    assert one.flops == GEMMA_DEPTH * alone.flops + 2 * tokens * weights
