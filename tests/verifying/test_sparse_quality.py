"""Quality of sparse attention in the record: sparsity, recall and output error by hand; judged where declared."""

from __future__ import annotations

import numpy as np
import pytest

from attnbench import masks, registry
from attnbench.masks.block_patterns import sparse_mask
from attnbench.results.exports.formats import COLUMNS
from attnbench.run import protocol as p
from attnbench.run.remote import Local
from attnbench.spec import Cell, Implementation, Workload
from attnbench.workloads.inputs import draw

pytest.importorskip("torch")
pytestmark = pytest.mark.torch

SHAPE = {"batch": 1, "q_len": 128, "heads": 2, "head_dim": 16, "inputs": "structured"}
SEED = 3


@pytest.fixture(scope="module")
def verified():
    worker = Local("torch", "cpu")

    def ask(name, workload):
        question = p.Open(Cell(name, workload), thorough=False, measure=False, clock=None, seed=SEED)
        return worker.ask(question, 120).record

    yield ask
    worker.kill()


def dense(w, visible=None):
    """(probabilities [h, i, j], out) in float64 on the first input set of a seed."""
    q, k, v, _ = (x.astype(np.float64)[0].transpose(1, 0, 2) for x in draw(w, 2 * SEED))
    logits = q @ k.transpose(0, 2, 1) * w.softmax_scale
    logits = logits if visible is None else np.where(visible, logits, -np.inf)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return weights, weights @ v


@pytest.mark.parametrize("causal", [False, True])
def test_of_a_mask_with_blocks(verified, causal):
    rest = masks.causal() if causal else masks.full()
    w = Workload(**SHAPE)
    mask = sparse_mask("random", 0.5, w.mask_shape, block_size=16, causal=causal)
    record = verified("torch.block-sparse", Workload(**SHAPE, mask=mask))
    assert record.status == "ok", record.reason
    kept = mask.array(w.mask_shape)[0]
    weights, out = dense(w, rest.array(w.mask_shape)[0])
    _, sparse_out = dense(w, kept)
    want = {
        "sparsity": 1 - mask.parts[1].block_mask.array.sum() / 72 if causal else 0.5,
        "recall": (weights * kept).sum(-1).mean(),
        "output_error": np.linalg.norm(sparse_out - out) / np.linalg.norm(out),
    }
    assert record.quality == pytest.approx(want, rel=1e-5)
    assert record.cost.flops == mask.pairs(w.mask_shape) * 4 * 16


def test_dense_attention_has_none(verified):
    assert verified("torch.eager", Workload(**SHAPE)).quality == {}
    assert "quality" in COLUMNS


def test_of_a_choice_by_content(verified):
    w = Workload(**(SHAPE | {"q_len": 512, "head_dim": 32}))
    record = verified("torch.block-sparse-dynamic", w)
    assert record.status == "ok", record.reason
    assert record.approximate
    found = record.quality
    assert found["sparsity"] == pytest.approx(0.5, abs=0.1)
    assert found["work"] == pytest.approx(1 - found["sparsity"] + 0.5 / 64, abs=1e-6)
    assert record.cost.flops == pytest.approx(found["work"] * 4 * 32 * 2 * 512**2, rel=1e-6)
    assert found["output_error"] == record.errors.forward <= record.errors.forward_allowed
    assert 0.8 < found["recall"] < 1
    assert record.errors.lse is None, "an approximate LSE is no error, it is the recall"
    assert "structured" in verified("torch.block-sparse-dynamic", Workload(**(SHAPE | {"inputs": "normal"}))).reason


class Blinkered(Implementation):
    """Sees the first half of the keys, and promises more."""

    name, framework, approximate, declared_error, declared_recall = "torch.blinkered", "torch", True, 10.0, 0.99

    def supports(self, workload, environment):
        return None

    def build(self, workload, config):
        return lambda q, k, v: self.build_lse(workload, config)(q, k, v)[0]

    def build_lse(self, workload, config):
        half = masks.window(None, None) & masks.lengths([workload.kv_len // 2] * workload.batch)
        narrowed = Workload(**(SHAPE | {"mask": half}))
        return registry.get("torch.eager").build_lse(narrowed, {})

    def quality(self, workload, config):
        return lambda q, k, v: {"sparsity": 0.5}


class Boastful(Implementation):
    """Computes exactly what is asked, and reports another amount of work, or of recall."""

    framework = "torch"

    def __init__(self, name: str, figures: dict[str, float], approximate: bool = False, with_lse: bool = True) -> None:
        self.name, self.figures, self.approximate, self.with_lse = name, figures, approximate, with_lse
        self.declared_error, self.declared_recall = (0.1, 0.9) if approximate else (None, None)

    def supports(self, workload, environment):
        return None

    def build(self, workload, config):
        return registry.get("torch.eager").build(workload, {})

    def build_lse(self, workload, config):
        return registry.get("torch.eager").build_lse(workload, {}) if self.with_lse else None

    def quality(self, workload, config):
        return lambda q, k, v: dict(self.figures)


@pytest.mark.parametrize("work", [2.0, 0.01])
def test_the_work_of_an_exact_kernel_is_that_of_the_workload(verified, work):
    with registry.restored():
        registry.register(Boastful(f"torch.boastful-{work:g}", {"work": work}))
        record = verified(f"torch.boastful-{work:g}", Workload(**SHAPE))
    assert (record.status, record.quality) == ("ok", {})


@pytest.mark.parametrize(
    "figures,with_lse,says",
    [
        ({"work": 2.0}, True, "reports work 2"),
        ({"work": 0.0}, True, "reports work 0"),
        ({"sparsity": float("nan")}, True, "reports sparsity nan"),
        ({"recall": 1.0}, False, "returns no LSE to measure it by"),
    ],
    ids=str,
)
def test_figures_that_cannot_be_are_refused(verified, figures, with_lse, says):
    with registry.restored():
        name = f"torch.{says.replace(' ', '-')}"
        registry.register(Boastful(name, figures, approximate=True, with_lse=with_lse))
        record = verified(name, Workload(**SHAPE))
    assert record.status == "incorrect"
    assert says in record.reason


def test_a_recall_below_the_declared_one_is_wrong(verified):
    with registry.restored():
        registry.register(Blinkered())
        record = verified("torch.blinkered", Workload(**SHAPE))
    assert record.status == "incorrect"
    assert "is less than the declared 0.990" in record.reason
