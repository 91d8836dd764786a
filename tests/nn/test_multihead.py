"""The modules with projections: the same numbers in all variants, state dicts that load across, the factory."""

import re
from inspect import signature
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

import dilated_oracle as oracle

import attnbench as ab
from attnbench import nn
from attnbench.errors import UnknownName, UsageError
from attnbench.nn import (
    BlockSparseRingDilatedAttention,
    BlockSparseRingMultiheadDilatedAttention,
    DilatedAttention,
    ImprovedDilatedAttention,
    ImprovedMultiheadDilatedAttention,
    MultiheadDilatedAttention,
    RingDilatedAttention,
    RingMultiheadDilatedAttention,
    create_dilated_attention,
    create_multihead_dilated_attention,
)

PATTERN = ([8, 24], [1, 3])
BOTH = [MultiheadDilatedAttention, ImprovedMultiheadDilatedAttention]


def by_hand(module, x, **options):
    """The projections written out around the dense oracle."""
    weight, bias = module.in_proj.weight, 0 if module.in_proj.bias is None else module.in_proj.bias
    q, k, v = (x @ weight.T + bias).split(module.widths, -1)
    q, k, v = (part.unflatten(-1, (-1, module.head_dim)) for part in (q, k, v))
    out = oracle.attention(q, k, v, oracle.visible_counts(q, *PATTERN, **options))[0].flatten(-2)
    return module.out_proj(out)


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("kv_heads", [None, 2, 1])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("causal,lengths", [(False, None), (True, None), (True, [23, 9])])
def test_numbers_and_gradients(kind, kv_heads, bias, causal, lengths):
    torch.manual_seed(0)
    module = kind(24, 6, *PATTERN, num_kv_heads=kv_heads, causal=causal, bias=bias, dtype=torch.float64)
    x = torch.randn(2, 23, 24, dtype=torch.float64, requires_grad=True)
    want, out = by_hand(module, x, causal=causal, lengths=lengths), module(x, kv_lengths=lengths)
    torch.testing.assert_close(out, want)
    cotangent, leaves = torch.randn_like(want), [x, *module.parameters()]
    got = torch.autograd.grad(out, leaves, cotangent)
    for one, expected in zip(got, torch.autograd.grad(want, leaves, cotangent)):
        torch.testing.assert_close(one, expected)


@pytest.mark.parametrize("source", BOTH)
@pytest.mark.parametrize("target", BOTH)
def test_a_state_dict_of_one_loads_in_all(source, target):
    saved, other = source(24, 6, *PATTERN, num_kv_heads=3), target(24, 6, *PATTERN, num_kv_heads=3)
    other.load_state_dict(saved.state_dict())
    x = torch.randn(1, 17, 24)
    torch.testing.assert_close(other(x), saved(x), atol=1e-6, rtol=1e-5)


def test_parameters_are_named_and_shaped_alike():
    shapes = [
        {name: tuple(p.shape) for name, p in kind(24, 6, *PATTERN, num_kv_heads=2).named_parameters()} for kind in BOTH
    ]
    assert shapes[0] == shapes[1] == {
        "in_proj.weight": (40, 24), "in_proj.bias": (40,), "out_proj.weight": (24, 24), "out_proj.bias": (24,),
    }  # fmt: skip


@pytest.mark.parametrize("kind", [*BOTH, DilatedAttention, ImprovedDilatedAttention])
def test_segments_come_before_rates_everywhere(kind):
    """Elsewhere the two classes had them in opposite orders, and tests that passed them swapped did not notice."""
    names = [name for name in signature(kind.__init__).parameters if name in ("segment_lengths", "dilation_rates")]
    assert names == ["segment_lengths", "dilation_rates"]


def test_one_return_type():
    x = torch.randn(1, 9, 24)
    assert all(isinstance(kind(24, 6, *PATTERN)(x), torch.Tensor) for kind in BOTH)


def test_training_mode_and_device_arguments():
    module = ImprovedMultiheadDilatedAttention(24, 6, *PATTERN, dtype=torch.bfloat16, device="cpu")
    assert module.in_proj.weight.dtype == torch.bfloat16
    assert module.eval()(torch.randn(1, 9, 24, dtype=torch.bfloat16)).dtype == torch.bfloat16
    assert "dilated8r1+24r3" in repr(module)


@pytest.mark.parametrize("sizes,options,words", [
    ((25, 6), {}, "not a multiple of num_heads"),
    ((24, 6), {"num_kv_heads": 4}, "does not divide"),
    ((24, 6), {"dropout": 0.5}, "no dropout"),
])  # fmt: skip
@pytest.mark.parametrize("kind", BOTH)
def test_refusals(kind, sizes, options, words):
    with pytest.raises(UsageError, match=words):
        kind(*sizes, *PATTERN, **options)


def test_x_of_another_width_is_refused():
    with pytest.raises(UsageError, match=r"\[batch, tokens, 24\]"):
        MultiheadDilatedAttention(24, 6, *PATTERN)(torch.randn(2, 9, 23))


KINDS = {
    "auto": (ImprovedDilatedAttention, ImprovedMultiheadDilatedAttention),
    "improved": (ImprovedDilatedAttention, ImprovedMultiheadDilatedAttention),
    "standard": (DilatedAttention, MultiheadDilatedAttention),
    "ring": (RingDilatedAttention, RingMultiheadDilatedAttention),
    "distributed": (RingDilatedAttention, RingMultiheadDilatedAttention),
    "block_sparse_ring": (BlockSparseRingDilatedAttention, BlockSparseRingMultiheadDilatedAttention),
}


def test_every_kind_is_tried():
    assert set(KINDS) == {*nn.KINDS, *nn.ALIASES}


@pytest.mark.parametrize("kind", KINDS)
def test_the_factory_builds_each_kind(kind):
    plain, multihead = KINDS[kind]
    options = {"causal": True, "sparsity": 0.5} if kind == "block_sparse_ring" else {"causal": True}
    assert type(create_dilated_attention(kind, *PATTERN, **options)) is plain
    made = create_multihead_dilated_attention(kind, 24, 6, segment_lengths=[8, 24], dilation_rates=[1, 3], **options)
    assert type(made) is multihead
    assert made.attention.causal


def test_no_option_is_dropped_silently():
    with pytest.raises(TypeError, match="sparsity"):
        create_dilated_attention("improved", *PATTERN, sparsity=0.5)
    with pytest.raises(TypeError, match="memory_pool"):
        create_multihead_dilated_attention("standard", 24, 6, *PATTERN, memory_pool=True)


@pytest.mark.parametrize("kind, near", [("improve", "Near: improved."), ("spiral", ""), (None, "")])
def test_an_unknown_kind_names_the_nearest_and_all_there_are(kind, near):
    every = "Known: standard, improved, ring, block_sparse_ring, auto, distributed."
    for make in (create_dilated_attention, lambda *given: create_multihead_dilated_attention(kind, 24, 6, *given[1:])):
        with pytest.raises(UnknownName) as caught:
            make(kind, *PATTERN)
        assert near in str(caught.value)
        assert every in str(caught.value)


def test_the_readmes_example_runs():
    text = (Path(__file__).parents[2] / "README.md").read_text()
    (block,) = (block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "create_multihead" in block)
    names: dict = {}
    exec(block, names)
    assert names["out"].shape == (1, 1000, 12, 64)
    assert names["lse"].shape == (1, 12, 1000)


def test_the_package_offers_the_modules():
    assert ab.nn.DilatedAttention is DilatedAttention
