"""Arguments and arrays at the edges: NumPy's numbers, meta tensors, JAX's default device, a bias by name."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

import attnbench as ab
from attnbench.errors import InvalidWorkload, Unsupported

pytestmark = pytest.mark.filterwarnings("ignore::attnbench.errors.PolicyWarning")


@pytest.mark.parametrize("number", [np.float32(0.5), np.float64(0.5), np.float16(0.5), np.int64(2)])
def test_numbers_of_numpy_are_numbers(number):
    q, k, v = (np.random.default_rng(n).standard_normal((1, 8, 2, 8)).astype(np.float32) for n in range(3))
    for name in ("scale", "softcap"):
        given = ab.attention(q, k, v, **{name: number})
        np.testing.assert_array_equal(given, ab.attention(q, k, v, **{name: float(number)}))
        work = ab.Workload(batch=1, q_len=8, heads=2, head_dim=8, **{name: number})
        assert type(getattr(work, name)) is float
        assert work.id == ab.Workload(batch=1, q_len=8, heads=2, head_dim=8, **{name: float(number)}).id


@pytest.mark.parametrize("number", [np.float32("nan"), np.float64("inf"), True, "0.5"])
def test_what_is_no_finite_number_is_refused(number):
    with pytest.raises(InvalidWorkload, match="scale must be a finite number"):
        ab.Workload(batch=1, q_len=8, heads=2, head_dim=8, scale=number)


@pytest.mark.torch
@pytest.mark.parametrize("mask", [None, ab.masks.causal(), ab.masks.lengths([3, 8])], ids=str)
def test_meta_tensors_give_shapes(mask):
    import torch

    q, k, v = (torch.empty(2, 8, heads, 16, device="meta", requires_grad=True) for heads in (4, 2, 2))
    out, lse = ab.attention(q, k, v, mask=mask, return_lse=True)
    assert (out.shape, out.device.type, lse.shape) == (q.shape, "meta", (2, 4, 8))
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    assert [x.shape for x in grads] == [x.shape for x in (q, k, v)]


@pytest.mark.torch
def test_explain_of_meta_tensors_names_what_the_call_takes(monkeypatch):
    """And nobody is told of a miss: there is nothing to choose."""
    import torch

    from attnbench.dispatch import torch_compile
    from attnbench.dispatch.array_masks import attention_with_array

    built, ran = torch_compile.built, []
    monkeypatch.setattr(
        torch_compile, "built", lambda pick, *more, **how: ran.append(pick.name) or built(pick, *more, **how)
    )
    q = torch.empty(2, 8, 4, 16, device="meta")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ab.attention(q, q, q, mask=ab.masks.causal(), scale=0.123)
        attention_with_array(q, q, q, visible=torch.empty(8, 8, dtype=torch.bool, device="meta"))
    told = ab.explain(q, q, q, mask=ab.masks.causal(), scale=0.123)
    assert ran == [told.pick] == ["torch.eager"]
    assert (told.device, told.policy, told.able) == ("meta", None, ["torch.eager"])
    assert "meta tensors have no values" in told.why
    assert ab.explain(q, q, q, impl="torch.sdpa-math").pick == "torch.sdpa-math"


@pytest.mark.torch
def test_a_bias_that_would_be_rounded_is_refused_by_name():
    """On a GPU, of which fake tensors are enough: nothing is computed before the refusal."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from attnbench.dispatch.array_masks import attention_with_array

    with FakeTensorMode():
        q = torch.empty(1, 2, 8, 16, device="cuda", dtype=torch.bfloat16)
        bias = torch.empty(1, 2, 8, 8, device="cuda")
        with pytest.raises(Unsupported, match="would round"):
            attention_with_array(q, q, q, bias=bias, impl="torch.sdpa", layout="bhsd")


@pytest.mark.torch
def test_one_warning_for_all_shapes_that_torchs_own_takes():
    import torch

    from attnbench.dispatch import torch_sdpa

    torch_sdpa._WARNED.clear()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for tokens in (5, 6, 7):
            q, k = torch.randn(2, 4, tokens, 8), torch.randn(1, 4, tokens, 8)
            torch_sdpa.scaled_dot_product_attention(q, k, k, fallback=True)
    assert len([one for one in seen if "broadcast" in str(one.message)]) == 1


@pytest.mark.jax
def test_a_trace_under_a_default_device_is_for_that_device(monkeypatch):
    import jax

    from attnbench.frameworks import get
    from attnbench.frameworks.jax.plain import kind_of_device

    monkeypatch.setattr(type(get("jax")), "devices", lambda self: ("cuda", "cpu"))
    shape = jax.ShapeDtypeStruct((1,), "float32")
    assert kind_of_device(shape) == "cuda"
    with jax.default_device(jax.devices("cpu")[0]):
        assert kind_of_device(shape) == "cpu"
    with jax.default_device("cpu"):
        assert kind_of_device(shape) == "cpu"


def _at_scale(scale, mask, **words):
    """Arrays that want gradients, a gradient of the output, and float64's answers: output, LSE, gradients."""
    import torch

    from attnbench import reference

    work = ab.Workload(batch=1, q_len=8, heads=2, head_dim=8, mask=mask, scale=scale, pass_="train", **words)
    drawn = [np.random.default_rng(n).standard_normal((1, 8, 2, 8)) for n in range(4)]
    out, lse = reference.attention(work, *drawn[:3])
    *arrays, dout = (torch.from_numpy(x).float() for x in drawn)
    return [x.requires_grad_() for x in arrays], dout, out, lse, reference.attention_gradients(work, *drawn)


@pytest.mark.torch
@pytest.mark.parametrize("scale", [0.0, -0.5])
@pytest.mark.parametrize("impl", ["auto", "torch.sdpa-flash", "torch.chunked", "torch.hf-sdpa", "torch.pair"])
def test_a_scale_that_is_not_positive_under_a_causal_mask(impl, scale):
    """torch's flash kernel of a CPU multiplies the hidden -inf by it."""
    import torch

    if impl == "torch.hf-sdpa":
        pytest.importorskip("transformers")
    arrays, dout, out, lse, gradients = _at_scale(scale, ab.masks.causal())
    words = {"mask": ab.masks.causal(), "scale": scale}
    name = "torch.pair[forward=torch.sdpa-flash,backward=torch.eager]" if impl == "torch.pair" else impl
    got = ab.attention(*arrays, impl=name, **words)
    np.testing.assert_allclose(got.detach(), out, atol=2e-6)
    for grad, want in zip(torch.autograd.grad(got, arrays, dout), gradients):
        np.testing.assert_allclose(grad, want, atol=2e-6)
    if impl not in ("torch.hf-sdpa", "torch.chunked"):
        got_lse = ab.attention(*arrays, impl=name, return_lse=True, **words)[1]
        np.testing.assert_allclose(got_lse.detach(), lse, atol=2e-6)


@pytest.mark.torch
def test_a_negative_scale_in_the_drop_in_a_ring_a_dilated_module_and_a_graph():
    import torch

    from attnbench.dispatch.torch_sdpa import scaled_dot_product_attention
    from attnbench.nn import create_dilated_attention
    from attnbench.nn.ring import ring_attention

    (q, k, v), _, out, _, _ = _at_scale(-0.5, ab.masks.causal())
    turned = scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True, scale=-0.5)
    graph = torch.compile(ab.attention, backend="eager", fullgraph=True)
    found = {
        "drop-in": turned.transpose(1, 2),
        "ring": ring_attention(q, k, v, causal=True, scale=-0.5),
        "graph": graph(q, k, v, mask=ab.masks.causal(), scale=-0.5),
    }
    for kind in ("standard", "improved"):
        found[kind] = create_dilated_attention(kind, [8], [1], causal=True, scale=-0.5)(q, k, v)
    for name, got in found.items():
        np.testing.assert_allclose(got.detach(), out, atol=2e-6, err_msg=name)


@pytest.mark.parametrize("scale", [0.0, -0.5])
def test_fused_libraries_refuse_a_scale_that_is_not_positive(scale):
    """Those that run on a GPU alone; which would be right is not known."""
    from attnbench import registry
    from attnbench.spec import Environment

    gpu = Environment(device="cuda", device_name="test", capability=(9, 0))
    names = (
        "torch.flash-attn", "torch.fa4", "torch.flashinfer", "torch.sageattention", "torch.transformer-engine",
        "torch.xformers", "jax.cudnn", "jax.flash-attn", "jax.pallas-triton", "jax.tokamax-mosaic",
        "jax.tokamax-triton", "jax.tokamax-cudnn",
    )  # fmt: skip
    work = ab.Workload(batch=1, q_len=128, heads=2, head_dim=64, dtype="bfloat16", mask=ab.masks.causal(), scale=scale)
    for name in names:
        assert f"takes a positive scale, not {scale:g}" in str(registry.get(name).supports(work, gpu)), name


@pytest.mark.torch
@pytest.mark.parametrize("away", [0, 1, 2])
def test_tensors_of_several_devices_are_refused(away):
    """Also by a call that has a plan: the same shapes on one device were seen before."""
    import torch

    from attnbench.dispatch import hf_decode
    from attnbench.dispatch.array_masks import attention_with_array
    from attnbench.nn import create_dilated_attention

    here = [torch.randn(1, 4, 2, 8) for _ in range(3)]
    apart = [x.to("meta") if n == away else x for n, x in enumerate(here)]
    dilated = create_dilated_attention("improved", [4], [1])
    calls = {
        "auto": lambda *x: ab.attention(*x),
        "eager": lambda *x: ab.attention(*x, impl="torch.eager"),
        "array": lambda *x: attention_with_array(*x, visible=torch.ones_like(x[0][0, :, 0, :4]).bool()),
        "decode": lambda q, k, v: hf_decode.attend(q[:, :, :1], k, v, scale=None, softcap=None, impl="auto"),
        "module": lambda *x: dilated(*x),
        "graph": torch.compile(lambda *x: ab.attention(*x), backend="eager", fullgraph=True),
    }
    for call in calls.values():
        call(*here)
        with pytest.raises(Exception, match="must be on one device, not on"):  # torch.compile wraps it
            call(*apart)


def test_a_large_bias_of_alibi_is_read_by_no_fused_kernel():
    """Each would read an array of all pairs; what computes the bias itself, or stores all scores anyway, takes it."""
    from attnbench import registry
    from attnbench.frameworks import environment_of

    small, large = (
        ab.Workload(batch=1, q_len=tokens, heads=32, head_dim=64, mask=ab.masks.alibi(32)) for tokens in (2048, 4096)
    )
    here = environment_of("torch", "cpu")
    for name in ("torch.sdpa", "torch.sdpa-flash", "torch.hf-sdpa"):
        one = registry.get(name)
        assert one.supports(small, here) is None
        assert one.supports(large, here) == "reads the bias of alibi as an array, which would take 2.0 GiB"
    for name in ("torch.eager", "torch.sdpa-math", "torch.flex"):
        assert registry.get(name).supports(large, here) is None
