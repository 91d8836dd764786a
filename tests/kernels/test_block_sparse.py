"""torch.block-sparse on a CPU: right numbers at every edge, and no work for dropped blocks."""

import numpy as np
import pytest

from attnbench import masks
from attnbench.masks import MaskShape
from attnbench.masks.block_patterns import sparse_mask
from attnbench.spec import Environment, Workload
from attnbench.workloads import cost

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from block_sparse_cases import CASES, check, draw, workload
from torch.utils._python_dispatch import TorchDispatchMode

from attnbench.impls.torch import _masks as torch_masks
from attnbench.impls.torch import eager as torch_eager
from attnbench.impls.torch import flex as torch_flex
from attnbench.impls.torch import sdpa as torch_sdpa
from attnbench.kernels.block_sparse import cpu
from attnbench.kernels.block_sparse.torch_impls import BLOCK_SPARSE

CPU = Environment(device="cpu", device_name="test")
ALLOWED = {"float64": 2e-7, "float32": 2e-6, "bfloat16": 1e-2, "float16": 2e-3}


@pytest.mark.parametrize("case", CASES)
def test_numbers(case):
    w = workload(case)
    assert BLOCK_SPARSE.supports(w, CPU) is None
    check(BLOCK_SPARSE, w, {}, ALLOWED["float32"])


@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "float16"])
@pytest.mark.parametrize("case", ["per head", "ragged"])
def test_precisions(case, dtype):
    check(BLOCK_SPARSE, workload(case, dtype=dtype), {}, ALLOWED[dtype])


def test_small_chunks_change_nothing(monkeypatch):
    monkeypatch.setattr(cpu, "CHUNK_ELEMENTS", 1)
    for case in ("causal", "lengths", "per batch and head"):
        check(BLOCK_SPARSE, workload(case), {}, ALLOWED["float32"])


@pytest.mark.parametrize("causal", [False, True])
def test_all_kept_equals_dense(causal):
    rest = masks.causal() if causal else masks.full()
    shape = {"batch": 2, "q_len": 96, "heads": 4, "kv_heads": 2, "head_dim": 32, "pass_": "train"}
    sparse = Workload(**shape, mask=rest & masks.blocks(np.ones((3, 3), bool), 32))
    dense = Workload(**shape, mask=rest)
    (q, k, v, dout), _ = draw(dense)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    results = []
    for implementation, w in ((BLOCK_SPARSE, sparse), (torch_sdpa.FLASH, dense)):
        out = implementation.build(w, {})(q, k, v)
        results.append((out, *torch.autograd.grad(out, (q, k, v), dout)))
    for one, other in zip(*results):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


class CountPairs(TorchDispatchMode):
    """Query-key pairs that torch's attention operators are handed."""

    def __init__(self):
        super().__init__()
        self.forward = self.backward = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__
        if "_scaled_dot_product_flash_attention_for_cpu" in name:
            q, k = args[1:3] if "backward" in name else args[:2]
            pairs = q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2]
            self.forward += 0 if "backward" in name else pairs
            self.backward += pairs if "backward" in name else 0
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("pattern", ["random", "local", "strided", "global_local"])
def test_work_follows_the_kept_blocks(pattern):
    """What the operator computes is what the workload's FLOPs count, and shrinks with the sparsity."""
    shape = {"batch": 1, "q_len": 640, "heads": 2, "head_dim": 16, "pass_": "train"}
    done = {}
    for sparsity in (0.0, 0.5, 0.75, 0.9):
        mask = sparse_mask(pattern, sparsity, MaskShape(1, 2, 640, 640), block_size=32)
        w = Workload(**shape, mask=mask)
        (q, k, v, dout), _ = draw(w)
        q, k, v = (x.requires_grad_() for x in (q, k, v))
        call = BLOCK_SPARSE.build(w, {})
        with CountPairs() as counted:
            torch.autograd.grad(call(q, k, v), (q, k, v), dout)
        assert counted.forward == counted.backward == mask.pairs(w.mask_shape)
        assert cost.demand(w).flops == counted.forward * cost.flops_per_pair(w)
        done[sparsity] = counted.forward
    assert [done[s] / done[0.0] for s in (0.5, 0.75, 0.9)] == pytest.approx([0.5, 0.25, 0.1])


def test_partial_backward_takes_out_and_lse_of_the_whole():
    """Blocks cut into two masks: the parts' gradients with the whole's out and lse add up to the whole's."""
    w = workload("causal")
    kept = np.random.default_rng(0).random((4, 4)) < 0.5
    listed = w.visible_mask.parts[1].block_mask.array
    halves = [masks.causal() & masks.blocks(listed & half, 16) for half in (kept, ~kept)]
    q, k, v, dout = (x.transpose(1, 2) for x in draw(w)[0])
    whole = BLOCK_SPARSE.partial(w, {})
    out, lse = whole[0](q, k, v)
    want = whole[1](q, k, v, out, lse, dout)
    parts = [BLOCK_SPARSE.partial(workload("causal", mask=half), {}) for half in halves]
    found = [sum(grads) for grads in zip(*(part[1](q, k, v, out, lse, dout) for part in parts))]
    for got, right in zip(found, want):
        torch.testing.assert_close(got, right, rtol=1e-4, atol=1e-5)
    merged = torch.logaddexp(*(part[0](q, k, v)[1] for part in parts))
    torch.testing.assert_close(merged, lse)


def test_the_lse_has_a_gradient():
    w = workload("causal", dtype="float64", pass_="train")
    (q, k, v, _), _ = draw(w)
    dlse = torch.linspace(-1.0, 2.0, w.batch * w.heads * w.q_len, dtype=torch.float64).view(w.batch, w.heads, w.q_len)
    found = []
    for implementation, swapped in ((BLOCK_SPARSE, False), (torch_eager.EAGER, True)):
        leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
        lse = implementation.build_lse(w, {})(*(x.transpose(1, 2) if swapped else x for x in leaves))[1].double()
        seen = torch.isfinite(lse)
        found.append(torch.autograd.grad((lse[seen] * dlse[seen]).sum(), leaves, materialize_grads=True))
    for got, want in zip(*found):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


REFUSED = {
    "none": {"mask": masks.causal()},
    "several": {"mask": masks.blocks(np.ones((4, 4), bool), 16) & masks.blocks(np.ones((2, 2), bool), 32)},
    "not with valid": {"mask": masks.blocks(np.ones((4, 4), bool), 16) & masks.valid([True] * 64)},
    "not with dilated": {"mask": masks.blocks(np.ones((4, 4), bool), 16) & masks.dilated([16], [2])},
    "softcap": {"mask": masks.blocks(np.ones((4, 4), bool), 16), "softcap": 3.0},
    "v_head_dim": {"mask": masks.blocks(np.ones((4, 4), bool), 16), "v_head_dim": 16},
}


@pytest.mark.parametrize("words", REFUSED)
def test_refusals(words):
    w = Workload(**{"batch": 2, "q_len": 64, "heads": 4, "head_dim": 32, **REFUSED[words]})
    assert words in str(BLOCK_SPARSE.supports(w, CPU))
    assert "cuda" in str(BLOCK_SPARSE.supports(w, Environment(device="cuda", device_name="test")))


def test_same_bits_every_time():
    w = workload("per head")
    (q, k, v, dout), _ = draw(w)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    call = BLOCK_SPARSE.build(w, {})
    first, again = (torch.autograd.grad(call(q, k, v), (q, k, v), dout) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, again))


def test_flex_gets_the_masks_own_blocks_without_looking_at_pairs(monkeypatch):
    """A table for 32k tokens is made from the blocks: evaluating the pairs of 16 heads would take minutes."""
    mask = sparse_mask("random", 0.9, MaskShape(1, 16, 32768, 32768), causal=True)
    w = Workload(batch=1, q_len=32768, heads=16, head_dim=128, dtype="bfloat16", mask=mask)

    def no_pairs(*_):
        raise AssertionError("pairs were evaluated")

    monkeypatch.setattr(type(mask), "predicate", lambda *_: no_pairs)
    table = torch_masks.block_mask(w, torch.device("cpu"), 128)
    assert table is not None
    assert table.BLOCK_SIZE == (128, 128)
    kept = (table.kv_num_blocks + table.full_kv_num_blocks).sum().item()
    assert kept == mask.parts[1].block_mask.array.sum()
    assert (table.kv_num_blocks == 1).all(), "only the diagonal is partial"
    small = Workload(batch=1, q_len=256, heads=2, head_dim=64, mask=masks.blocks(np.eye(4, dtype=bool), 64))
    assert torch_flex.FLEX.configs(small)[0] == {"block_size": 64}


def test_the_plain_way_agrees():
    w = workload("documents")
    (q, k, v, _), _ = draw(w)
    want = torch_eager.EAGER.build(w, {})(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)
    torch.testing.assert_close(BLOCK_SPARSE.build(w, {})(q, k, v), want, rtol=1e-4, atol=1e-5)
