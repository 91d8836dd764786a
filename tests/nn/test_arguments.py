"""Arguments that cannot be meant are refused in one sentence: nothing is rounded, parsed or taken for true."""

from __future__ import annotations

import inspect

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from attnbench import masks, nn
from attnbench.dispatch.torch_sdpa import scaled_dot_product_attention
from attnbench.errors import UsageError
from attnbench.kernels.ring.function import ring_attention
from attnbench.nn import (
    BlockSparseRingDilatedAttention,
    BlockSparseRingMultiheadDilatedAttention,
    DilatedAttention,
    ImprovedDilatedAttention,
    ImprovedMultiheadDilatedAttention,
    MultiheadDilatedAttention,
    RingDilatedAttention,
    RingMultiheadDilatedAttention,
    create_adaptive_sparse_attention,
    create_block_sparse_attention,
)

PLAIN = pytest.mark.parametrize("kind", [DilatedAttention, ImprovedDilatedAttention, RingDilatedAttention])
MULTIHEAD = pytest.mark.parametrize(
    "kind", [MultiheadDilatedAttention, ImprovedMultiheadDilatedAttention, RingMultiheadDilatedAttention]
)

MODULES = [
    DilatedAttention,
    ImprovedDilatedAttention,
    RingDilatedAttention,
    BlockSparseRingDilatedAttention,
    MultiheadDilatedAttention,
    ImprovedMultiheadDilatedAttention,
    RingMultiheadDilatedAttention,
    BlockSparseRingMultiheadDilatedAttention,
]


@PLAIN
@pytest.mark.parametrize(
    "given, options, words",
    [
        (([4.5], [1]), {}, "each of segment_lengths must be a whole number, not 4.5"),
        (([8], [1.7]), {}, "each of dilation_rates must be a whole number, not 1.7"),
        ((["8"], [1]), {}, "whole number, not '8'"),
        ((["8"], ["1"]), {}, "whole number"),
        (([True], [1]), {}, "whole number, not True"),
        ((8, [1]), {}, "segment_lengths must be a list of whole numbers, not 8"),
        (("8", [1]), {}, "segment_lengths must be a list"),
        (([0], [1]), {}, "at least 1"),
        (([8], [1]), {"causal": "no"}, "causal must be True or False, not 'no'"),
        (([8], [1]), {"scale": "big"}, "scale must be a finite number"),
        (([8], [1]), {"scale": float("nan")}, "scale must be a finite number"),
        (([8], [1]), {"mix_grad": "x"}, "mix_grad must be"),
        (([8], [1]), {"offset": "x"}, "offset is"),
    ],
    ids=str,
)
def test_constructors(kind, given, options, words):
    with pytest.raises(UsageError, match=words):
        kind(*given, **options)


def test_whole_numbers_of_other_libraries_are_whole_numbers():
    assert masks.dilated(np.array([8, 16]), torch.tensor([1, 2])) == masks.dilated([8, 16], [1, 2])


@MULTIHEAD
@pytest.mark.parametrize(
    "sizes, options, words",
    [
        ((32, 0), {}, "num_heads must be at least 1, not 0"),
        ((0, 4), {}, "embed_dim must be at least 1, not 0"),
        ((32, 4.0), {}, "num_heads must be a whole number, not 4.0"),
        ((32, 4), {"num_kv_heads": 0}, "num_kv_heads must be at least 1"),
        ((32, 4), {"num_kv_heads": 3}, "does not divide"),
        ((32, 5), {}, "not a multiple"),
        ((32, 4), {"causal": 1}, "causal must be True or False"),
        ((32, 4), {"dropout": 0.1}, "no dropout"),
    ],
    ids=str,
)
def test_multihead_constructors(kind, sizes, options, words):
    with pytest.raises(UsageError, match=words):
        kind(*sizes, [8], [1], **options)


@PLAIN
def test_arrays(kind):
    module, x = kind([8], [1]), torch.randn(2, 16, 4, 8)
    with pytest.raises(UsageError, match="dtype int64 is not one of"):
        module(*[x.long()] * 3)
    with pytest.raises(UsageError, match="one dtype"):
        module(x, x.double(), x.double())
    with pytest.raises(UsageError, match="at least"):
        module(*[x[:, :0]] * 3)
    with pytest.raises(UsageError, match="4 axes"):
        module(*[x[0]] * 3)


@pytest.mark.parametrize("kind", MODULES, ids=lambda kind: kind.__name__)
def test_arrays_of_another_library(kind):
    sparse = {"sparsity": 0.5, "block_size": 4} if "BlockSparse" in kind.__name__ else {}
    multihead = "Multihead" in kind.__name__
    module = kind(*([32, 4] if multihead else []), [8], [1], **sparse)
    given = [np.zeros((2, 16, 32))] if multihead else [np.zeros((2, 16, 4, 8))] * 3
    with pytest.raises(
        UsageError, match=f"{kind.__name__} takes torch tensors, not numpy.ndarray: convert with torch.as_tensor"
    ):
        module(*given)


@pytest.mark.parametrize(
    "call",
    [
        ring_attention,
        scaled_dot_product_attention,
        create_block_sparse_attention(0.5, "local", block_size=4),
        create_adaptive_sparse_attention(0.5, 0.9, block_size=8),
    ],
    ids=["ring", "sdpa", "block-sparse", "adaptive"],
)
@pytest.mark.parametrize("other", [0, 1, 2])
def test_one_array_of_another_library(call, other):
    given = [torch.zeros(2, 16, 4, 8) for _ in range(3)]
    given[other] = given[other].numpy()
    with pytest.raises(UsageError, match=r"takes torch tensors, not numpy\.ndarray"):
        call(*given)


@MULTIHEAD
def test_x(kind):
    module, x = kind(32, 4, [8], [1]), torch.randn(2, 16, 32)
    with pytest.raises(UsageError, match=r"x is torch\.int64, but the weights are torch\.float32"):
        module(x.long())
    with pytest.raises(UsageError, match=r"x is torch\.float64, but"):
        module(x.double())
    with pytest.raises(UsageError, match="at least"):
        module(x[:, :0])
    with pytest.raises(UsageError, match=r"\[batch, tokens, 32\]"):
        module(x[0])
    with torch.autocast("cpu", torch.bfloat16):
        assert module(x).dtype == torch.bfloat16


@pytest.mark.parametrize("kind", MODULES, ids=lambda kind: kind.__name__)
def test_every_argument_has_a_name_of_its_own(kind):
    parameters = inspect.signature(kind).parameters.values()
    assert not [p.name for p in parameters if p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]


@pytest.mark.parametrize("kind", MODULES, ids=lambda kind: kind.__name__)
def test_every_argument_does_something(kind):
    """What a signature names reaches the attention, whichever class has it."""
    base = [32, 4] if "Multihead" in kind.__name__ else []
    given = {"causal": True, "offset": "group", "scale": 0.5, "mix_grad": "detached", "layout": "striped"}
    given = {name: value for name, value in given.items() if name in inspect.signature(kind).parameters}
    sparse = (
        {"sparsity": 0.5, "pattern": "random", "seed": 3, "block_size": 4} if "BlockSparse" in kind.__name__ else {}
    )
    module = kind(*base, [8, 16], [1, 2], **given, **sparse)
    attention = module.attention if base else module
    assert (attention.pattern.segment_lengths, attention.pattern.offset) == ((8, 16), "group")
    for name, value in {**given, **sparse}.items():
        if name not in ("offset", "pattern"):
            assert getattr(attention, name) == value
    assert not sparse or attention.block_pattern == "random"
    with pytest.raises(UsageError, match="no dropout"):
        kind(*base, [8], [1], dropout=0.1)
    with pytest.raises(TypeError, match="memory_pool"):
        kind(*base, [8], [1], memory_pool=True)


BRANCHES = ([8, 24], [1, 3])
DESCRIBED = {
    "dilated8r1+24r3, causal=True": lambda: nn.DilatedAttention(*BRANCHES, causal=True),
    "dilated8r1+24r3, causal=False": lambda: nn.ImprovedDilatedAttention(*BRANCHES),
    "mix_grad=full, layout=striped": lambda: nn.RingDilatedAttention(*BRANCHES, layout="striped"),
    "sparsity=0.5, pattern=random, block_size=4, seed=3": lambda: nn.BlockSparseRingDilatedAttention(
        *BRANCHES, sparsity=0.5, pattern="random", block_size=4, seed=3
    ),
    "block_mask=blocks4-": lambda: nn.BlockSparseRingDilatedAttention(
        *BRANCHES, block_mask=np.ones((2, 2), bool), block_size=4
    ),
    "embed_dim=24, num_heads=6, num_kv_heads=2": lambda: nn.MultiheadDilatedAttention(24, 6, *BRANCHES, num_kv_heads=2),
    "embed_dim=24, num_heads=6, num_kv_heads=6": lambda: nn.RingMultiheadDilatedAttention(24, 6, *BRANCHES),
    "sparsity=0.75, pattern=local, block_size=16, causal=True, scale=None": lambda: nn.create_block_sparse_attention(
        0.75, "local", block_size=16, causal=True
    ),
    "pattern=random, seed=3": lambda: nn.create_block_sparse_attention(0.75, "random", seed=3),
    "pattern=dynamic_threshold, pool=4, threshold=0.9": lambda: nn.create_block_sparse_attention(
        0.75, "dynamic_threshold", pool=4, threshold=0.9
    ),
    "heads=2, head_dim=8, pool=8": lambda: nn.create_block_sparse_attention(0.5, "learned", gate=nn.BlockGate(2, 8)),
    "min_sparsity=0.5, max_sparsity=0.9, mass=0.95, pool=8": lambda: nn.create_adaptive_sparse_attention(0.5, 0.9),
}


@pytest.mark.parametrize("words", DESCRIBED)
def test_a_module_says_what_it_is(words):
    assert words in repr(DESCRIBED[words]())
