"""The step `multihead`: its reference against autograd, its implementations against its reference."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from attnbench import masks, registry
from attnbench.run import protocol as p
from attnbench.run.remote import Local
from attnbench.spec import Cell, Workload
from attnbench.steps import kind_of
from attnbench.steps.multihead import TorchMultiheadDilated
from attnbench.workloads.cost import demand

torch = pytest.importorskip("torch")
PATTERN = masks.dilated((16, 32), (1, 2))
BLOCKS = masks.blocks(np.tri(4, dtype=bool), 16)
SHAPE = {"batch": 2, "q_len": 61, "heads": 4, "kv_heads": 2, "head_dim": 16, "step": "multihead"}
PLAIN = ["torch.multihead-dilated", "torch.multihead-dilated-improved", "torch.multihead-dilated-ring"]
SPARSE = "torch.multihead-dilated-block-sparse-ring"


def step(**fields) -> Workload:
    return Workload(**(SHAPE | {"mask": masks.causal() & PATTERN} | fields))


def opened(name: str, workload: Workload):
    worker = Local("torch", "cpu")
    return worker.ask(p.Open(Cell(name, workload), False, True, None, 3, None, False), 60)


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize(
    "fields",
    [
        {"pass_": "train"},
        {"pass_": "train", "mask": PATTERN},
        {"dtype": "bfloat16", "pass_": "train"},
        {"kv_heads": 4, "mask": PATTERN},
        {"scale": 0.1},
    ],
)
def test_modules_are_right(name: str, fields: dict):
    answer = opened(name, step(**fields))
    assert isinstance(answer, p.Opened), answer
    record = answer.record
    assert record.status == "ok"
    assert record.verified_at.share == 1.0
    if fields.get("pass_"):
        assert record.errors.backward is not None
        assert record.errors.backward <= record.errors.backward_allowed


def test_the_block_sparse_ring_is_right():
    answer = opened(SPARSE, step(mask=masks.causal() & PATTERN & BLOCKS, pass_="train", q_len=64))
    assert isinstance(answer, p.Opened), answer


@pytest.mark.parametrize("name", PLAIN)
def test_lengths_reach_the_module(name: str):
    answer = opened(name, step(mask=PATTERN & masks.lengths([61, 20]), pass_="train"))
    assert isinstance(answer, p.Opened), answer


@pytest.mark.parametrize(
    ("name", "fields", "reason"),
    [
        (PLAIN[0], {"mask": masks.causal()}, "takes one dilated mask"),
        (PLAIN[0], {"mask": PATTERN & BLOCKS, "q_len": 64}, "without blocks"),
        (SPARSE, {}, "combined with blocks"),
        (PLAIN[0], {"kv_len": 80, "mask": None}, "self-attention"),
        (PLAIN[0], {"pass_": "backward"}, "its backward pass alone is not timed"),
        (PLAIN[0], {"step": ""}, "computes the step multihead, not attention alone"),
        ("torch.eager", {}, "computes attention alone, not the step multihead"),
    ],
)
def test_what_they_do_not_take_is_refused(name: str, fields: dict, reason: str):
    answer = opened(name, step(**fields))
    assert isinstance(answer, p.Closed)
    assert answer.record.status == "unsupported"
    assert reason in answer.record.reason


class Wrong(TorchMultiheadDilated):
    """Forgets the projection back."""

    def function(self, workload, config):
        right = super().function(workload, config)

        def run(state):
            module, x, *rest = state
            out, *gradients = right((module, x, *rest))
            return out + 0.05 * x, *gradients

        return run


def test_a_wrong_module_has_no_time(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(registry._registered, "torch.wrong", Wrong("torch.wrong", "standard"))
    answer = opened("torch.wrong", step(pass_="train"))
    assert isinstance(answer, p.Closed)
    assert answer.record.status == "incorrect"
    assert "out" in answer.record.reason


def test_the_reference_is_the_derivative():
    workload = step(pass_="train", dtype="float64", mask=masks.causal() & masks.dilated((61,), (1,)))
    kind = kind_of("multihead")
    values = {name: array.astype(np.float64) for name, array in kind.draw(workload, 0).items()}
    found = kind.reference(workload, values, lambda array: array)
    x, w_in, w_back, dout = (
        torch.tensor(values[n], requires_grad=n != "dout") for n in ("x", "w_in", "w_back", "dout")
    )
    q, k, v = (x @ w_in).split((64, 32, 32), -1)
    heads = [part.unflatten(-1, (-1, 16)).transpose(1, 2) for part in (q, k, v)]
    attended = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
    out = attended.transpose(1, 2).flatten(-2) @ w_back
    gradients = torch.autograd.grad(out, (x, w_in, w_back), dout)
    for name, exact in zip(("out", "dx", "d_in", "d_back"), (out, *gradients)):
        np.testing.assert_allclose(found[name], exact.detach().numpy(), rtol=1e-9, atol=1e-9)


def test_the_projections_are_counted():
    attention, whole = demand(step(step="")), demand(step())
    width = 64
    assert whole.flops - attention.flops == 2 * 2 * 61 * width * (width + 2 * 32 + width)
    assert demand(step(pass_="train")).flops - demand(step(step="", pass_="train")).flops == 3 * (
        whole.flops - attention.flops
    )


def test_a_step_is_part_of_the_identity():
    assert step().id.endswith("-step=multihead")
    assert msgspec.json.decode(msgspec.json.encode(step()), type=Workload) == step()
