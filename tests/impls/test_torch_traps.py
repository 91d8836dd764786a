"""Each known trap of torch's and Transformers' attention: shown to be there, and adapted to or refused."""

import numpy as np
import pytest

from attnbench import masks
from attnbench.errors import Unsupported
from attnbench.spec import Environment, Workload

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from torch.nn.functional import scaled_dot_product_attention

from attnbench.frameworks.base import Inputs
from attnbench.frameworks.torch.framework import FRAMEWORK
from attnbench.frameworks.torch.plain import plain_call
from attnbench.impls.torch import _masks as torch_masks
from attnbench.impls.torch import eager as torch_eager
from attnbench.impls.torch import flex as torch_flex
from attnbench.impls.torch import hugging_face as torch_hf
from attnbench.impls.torch import sdpa as torch_sdpa

CPU = Environment(device="cpu", device_name="test")
CUDA = Environment(device="cuda", device_name="test", capability=(9, 0))


def attention(q_len=6, kv_len=6, heads=2, head_dim=8, **more):
    return Workload(batch=2, q_len=q_len, kv_len=kv_len, heads=heads, head_dim=head_dim, **more)


def inputs(w, dtype=torch.float32):
    sizes = ((w.heads, w.q_len, w.head_dim), (w.kv_heads, w.kv_len, w.head_dim), (w.kv_heads, w.kv_len, w.value_dim))
    return Inputs(*(torch.randn(w.batch, *s, dtype=dtype) for s in (*sizes, (w.heads, w.q_len, w.value_dim))))


def plain(w, q, k, v):
    return plain_call(w)(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)


def test_is_causal_is_top_left_and_a_rectangular_mask_does_not_use_it():
    w = attention(3, 6, mask=masks.causal())
    q, k, v, _ = inputs(w)
    right = plain(w, q, k, v)
    assert not torch.allclose(scaled_dot_product_attention(q, k, v, is_causal=True), right, atol=1e-3)
    for implementation in (torch_sdpa.AUTO, torch_sdpa.MATH, torch_sdpa.FLASH, torch_hf.SDPA):
        torch.testing.assert_close(implementation.build(w, {})(q, k, v), right)


@pytest.mark.parametrize(
    "q_len,kv_len,mask,expected",
    [
        (6, 6, masks.full(), "none"),
        (6, 6, masks.causal(), "causal"),
        (6, 6, masks.window(None, 0), "causal"),
        (3, 6, masks.causal("top-left"), "causal"),
        (3, 6, masks.causal(), "lower-right"),
        (6, 3, masks.causal(), "lower-right"),
        (1, 6, masks.causal(), "none"),
        (6, 6, masks.lengths([6, 6]), "none"),
        (6, 6, masks.lengths([6, 5]), "array"),
        (6, 6, masks.window(2), "array"),
        (6, 6, masks.prefix(3), "array"),
        (6, 6, masks.dilated([3, 6], [1, 2]), "bias"),
        (6, 6, masks.dense(np.zeros((6, 6))), "bias"),
    ],
)
def test_the_cheapest_route_that_says_the_same(q_len, kv_len, mask, expected):
    assert torch_masks.route(attention(q_len, kv_len, mask=mask)) == expected


def test_a_wide_value_falls_to_math_so_flash_refuses_and_raises_rather_than_fall_back():
    w = attention(v_head_dim=4)
    example = inputs(w)
    names, _ = FRAMEWORK.kernels(
        FRAMEWORK.programs(torch_sdpa.AUTO.build(w, {}), "forward", example).main, example, "cpu"
    )
    assert any("_scaled_dot_product_attention_math" in name for name in names or [])
    assert "v_head_dim" in str(torch_sdpa.FLASH.supports(w, CPU))
    with pytest.raises(Unsupported, match="has no kernel"):
        torch_sdpa.FLASH.build(w, {})(*example[:3])


@pytest.mark.parametrize("pass_", ["forward", "backward", "train"])
@pytest.mark.parametrize("name", ["MATH", "FLASH"])
def test_the_profile_proves_the_backend(name, pass_):
    import re

    implementation = getattr(torch_sdpa, name)
    other = torch_sdpa.FLASH if name == "MATH" else torch_sdpa.MATH
    w = attention(mask=masks.causal(), pass_=pass_)
    example = inputs(w)
    names, why = FRAMEWORK.kernels(FRAMEWORK.programs(implementation.build(w, {}), pass_, example).main, example, "cpu")
    assert names is not None, why

    def matches(patterns):
        return any(re.search(pattern, name) for pattern in patterns for name in names)

    assert matches(implementation.expects)
    assert not matches(implementation.forbids)
    assert not matches(other.expects)


def test_transformers_eager_gives_the_mean_of_v_for_a_row_without_keys_and_is_refused():
    pytest.importorskip("transformers")
    w = attention(mask=masks.lengths([0, 6]))
    q, k, v, _ = inputs(w)
    mean = torch_hf.EAGER.build(w, {})(q, k, v)[0]
    torch.testing.assert_close(mean, v[0].mean(1, keepdim=True).expand_as(mean))
    assert "no key" in str(torch_hf.EAGER.supports(w, CPU))
    assert torch_hf.EAGER.supports(attention(mask=masks.lengths([1, 6])), CPU) is None


@pytest.mark.parametrize("implementation", [torch_hf.EAGER, torch_hf.SDPA], ids=lambda i: i.name)
def test_transformers_gets_the_mask(implementation):
    """Without one these functions silently attend to the padding."""
    pytest.importorskip("transformers")
    w = attention(mask=masks.lengths([4, 6]))
    q, k, v, _ = inputs(w)
    call = implementation.build(w, {})
    before = call(q, k, v)
    k[0, :, 4:], v[0, :, 4:] = 7.0, 7.0
    torch.testing.assert_close(call(q, k, v)[0], before[0])
    assert not torch.allclose(implementation.build(attention(), {})(q, k, v)[0], before[0], atol=1e-3)


def test_heads_and_tokens_are_not_confused():
    w = attention(q_len=4, kv_len=4, heads=4, mask=masks.causal())
    q, k, v, _ = inputs(w)
    for implementation in (torch_eager.EAGER, torch_sdpa.FLASH, torch_hf.EAGER):
        layout = (lambda x: x.transpose(1, 2)) if implementation.layout == "bshd" else (lambda x: x)
        call = implementation.build(w, {})
        before = layout(call(*(layout(x) for x in (q, k, v))))
        changed = v.clone()
        changed[:, :, 2] += 1
        moved = (layout(call(*(layout(x) for x in (q, k, changed)))) - before).abs().amax((0, 1, 3)) > 1e-6
        assert moved.tolist() == [False, False, True, True]


def test_rows_without_keys_are_opened_and_cleared_for_kernels_that_do_not_give_zero():
    w = attention(mask=masks.lengths([0, 3]))
    opened = torch_masks.sdpa_mask(w, torch.device("cpu"), zeroes_dead_rows=False)
    assert opened.attn_mask is not None
    assert opened.dead is not None
    assert opened.attn_mask.any(-1).all()
    q, k, v, _ = inputs(w)
    out = scaled_dot_product_attention(q, k, v, opened.attn_mask).masked_fill(opened.dead, 0.0)
    torch.testing.assert_close(out, plain(w, q, k, v))


GPU_REFUSALS = [
    ("FLASH", {"mask": masks.window(2)}, "only a causal mask or none"),
    ("FLASH", {"q_len": 3, "mask": masks.causal("top-left")}, "bottom-right"),
    ("FLASH", {"q_len": 9, "mask": masks.causal()}, "no key"),
    ("FLASH", {"dtype": "float32"}, "float32"),
    ("FLASH", {"v_head_dim": 16}, "v_head_dim"),
    ("FLASH", {"head_dim": 264}, "up to 256"),
    ("EFFICIENT", {"kv_heads": 1}, "grouped"),
    ("EFFICIENT", {"head_dim": 6}, "steps of 8"),
    ("EFFICIENT", {"mask": masks.dense(np.ones((6, 6)))}, "would round"),
    ("CUDNN", {"mask": masks.dense(np.ones((6, 6)))}, "would round"),
    ("CUDNN", {"dtype": "float32"}, "float32"),
    ("AUTO", {"mask": masks.dilated([3, 6], [1, 2])}, "would round"),
    ("MATH", {"softcap": 3.0}, "softcap"),
]


@pytest.mark.parametrize("name,changes,words", GPU_REFUSALS)
def test_refusals_on_a_gpu_say_why(name, changes, words):
    w = attention(**{"dtype": "bfloat16", **changes})
    assert words in str(getattr(torch_sdpa, name).supports(w, CUDA))


@pytest.mark.parametrize("name", ["AUTO", "MATH", "FLASH", "EFFICIENT", "CUDNN"])
def test_what_gpus_are_asked_for_most_is_not_refused(name):
    for mask in (masks.full(), masks.causal()):
        w = attention(128, 128, head_dim=64, dtype="bfloat16", mask=mask, pass_="train")
        assert getattr(torch_sdpa, name).supports(w, CUDA) is None


def test_only_gpu_backends_refuse_a_cpu():
    assert [i.name for i in (torch_sdpa.EFFICIENT, torch_sdpa.CUDNN) if i.available(CPU) is None] == []
    assert "cpu" in str(torch_sdpa.CUDNN.available(CPU))


def test_flex_refuses_what_a_cpu_lacks():
    assert "backward" in str(torch_flex.FLEX.supports(attention(pass_="train"), CPU))
    assert "float64" in str(torch_flex.FLEX.supports(attention(dtype="float64"), CPU))
    assert "16 or more" in str(torch_flex.FLEX.supports(attention(dtype="bfloat16"), CUDA))
    assert torch_flex.FLEX.supports(attention(head_dim=16, dtype="bfloat16", pass_="train"), CUDA) is None


@pytest.mark.parametrize("mask,dead", [
    (masks.dilated([6], [2]), True),
    (masks.dilated([3, 6], [1, 2]), False),
    (masks.blocks(np.array([[True, False], [False, False]]), 3), True),
    (masks.dense(np.where(np.eye(6) > 0, 0.0, -np.inf)), False),
    (masks.valid(np.zeros((1, 6), bool)), True),
    (masks.valid(np.arange(6) > 2) & masks.causal(), True),
    (masks.valid(np.arange(6) < 2) & masks.causal(), False),
])  # fmt: skip
def test_rows_without_keys_are_found(mask, dead):
    assert torch_masks.may_have_dead_rows(attention(mask=mask)) is dead
