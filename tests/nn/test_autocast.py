"""Under torch's autocast everything of ours computes as on inputs in autocast's dtype, forward and backward."""

from __future__ import annotations

import numpy as np
import pytest

import attnbench as ab
from attnbench.errors import InvalidWorkload

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore::attnbench.errors.PolicyWarning")]

from attnbench import nn
from attnbench.kernels.ring.function import ring_attention

CAUSAL, PATTERN = ab.masks.causal(), ([8, 32], [1, 2])
DILATED, BLOCKS = ab.masks.dilated(*PATTERN), ab.masks.blocks(np.tri(4, dtype=bool), 8)


def by_name(impl: str, mask: ab.masks.Mask, **more: object):
    return lambda q, k, v: ab.attention(q, k, v, mask=mask, impl=impl, **more)


def of_module(module: torch.nn.Module):
    return lambda q, k, v: module(q, k, v)


def by_eager(kind: type[nn.DilatedAttention]) -> nn.DilatedAttention:
    module = kind(*PATTERN)
    module.how = {"kernel": "torch.eager"}
    return module


FUNCTIONS = {
    "ring, eager": lambda q, k, v: ring_attention(q, k, v, causal=True, inner="torch.eager"),
    "ring, auto": lambda q, k, v: ring_attention(q, k, v, causal=True),
    "ring, dilated": of_module(nn.RingDilatedAttention(*PATTERN)),
    "block-sparse ring": of_module(nn.BlockSparseRingDilatedAttention(*PATTERN, sparsity=0.5, block_size=8)),
    "dilated module": of_module(nn.DilatedAttention(*PATTERN)),
    "improved dilated module": of_module(nn.ImprovedDilatedAttention(*PATTERN, causal=True)),
    "block-sparse module": of_module(nn.create_block_sparse_attention(0.5, "local", block_size=8)),
    "adaptive module": of_module(nn.create_adaptive_sparse_attention(0.1, 0.7, block_size=8, pool=4)),
    "eager": by_name("torch.eager", CAUSAL),
    "flash": by_name("torch.sdpa-flash", CAUSAL),
    "pair": by_name("torch.pair[forward=torch.sdpa-flash,backward=torch.eager]", CAUSAL),
    "chunked": by_name("torch.chunked[chunk=8,inner=torch.eager]", CAUSAL),
    "dilated, eager": of_module(by_eager(nn.DilatedAttention)),
    "dilated-improved, eager": of_module(by_eager(nn.ImprovedDilatedAttention)),
    "dilated by name": by_name("torch.dilated-improved", DILATED),
    "block-sparse": by_name("torch.block-sparse", BLOCKS),
    "compiled pair": torch.compile(
        by_name("torch.pair[forward=torch.sdpa-flash,backward=torch.eager]", CAUSAL), backend="eager"
    ),
    "compiled dilated": torch.compile(by_name("torch.dilated", DILATED), backend="aot_eager"),
}


def arrays(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    make = torch.Generator().manual_seed(0)
    return [(6 * torch.randn(1, 32, 4, 16, generator=make)).to(dtype).requires_grad_() for _ in range(3)]


def results(function, leaves, *, forward: bool, backward: bool) -> list[torch.Tensor]:
    """Output and gradients, each pass inside an autocast block or not."""
    with torch.autocast("cpu", torch.bfloat16, enabled=forward):
        out = function(*leaves)
    with torch.autocast("cpu", torch.bfloat16, enabled=backward):
        grads = torch.autograd.grad(out.float().square().sum(), leaves)
    return [x.detach().float() for x in (out, *grads)]


@pytest.mark.parametrize("backward", [False, True], ids=["backward outside", "backward inside"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_it_computes_as_on_inputs_in_autocasts_dtype(name: str, backward: bool):
    function = FUNCTIONS[name]
    want = results(function, arrays(torch.bfloat16), forward=False, backward=False)
    got = results(function, arrays(), forward=True, backward=backward)
    for one, other in zip(got, want):
        assert float((one - other).norm() / other.norm()) < 1e-5
    on_halves = results(function, arrays(torch.bfloat16), forward=True, backward=backward)
    for one, other in zip(on_halves, want):
        assert float((one - other).norm() / other.norm()) < 1e-5


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if not name.startswith("compiled")])
def test_mixed_dtypes_are_one_under_autocast_and_refused_in_words_without(name: str):
    function, (q, k, v) = FUNCTIONS[name], arrays()
    v = v.detach().bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        assert function(q, k, v).dtype == torch.bfloat16
    with pytest.raises(InvalidWorkload, match="one dtype"):
        function(q, k, v)


def test_blocks_are_told_as_they_are_taken():
    module = nn.create_adaptive_sparse_attention(0.1, 0.7, block_size=8, pool=4)
    q, k, _ = arrays()
    with torch.autocast("cpu", torch.bfloat16):
        told = module.blocks(q, k)
    assert torch.equal(told, module.blocks(q.bfloat16(), k.bfloat16()))


def test_explain_tells_of_what_attention_computes():
    q, k, v = arrays()
    with torch.autocast("cpu", torch.bfloat16):
        assert ab.explain(q, k, v).workload.dtype == "bfloat16"
        assert ab.explain(q, k.bfloat16(), v).pick is not None
    assert ab.explain(q, k, v).workload.dtype == "float32"


def test_autocast_is_on_again_after_a_failure():
    q, k, v = arrays()
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(InvalidWorkload):
            nn.DilatedAttention(*PATTERN)(q, k, v[:, :3])
        assert torch.is_autocast_enabled("cpu")
