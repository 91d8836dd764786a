"""The gradient of the LSE: right, or an error that says so; never silently zero."""

from __future__ import annotations

import numpy as np
import pytest
from dispatch_problem import assert_close, problem, to_framework

import attnbench as ab
from attnbench.errors import Unsupported

pytestmark = pytest.mark.filterwarnings("ignore::attnbench.errors.PolicyWarning")
MASKS = {"causal": ab.masks.causal(), "a row without keys": ab.masks.lengths([0, 17]), "window": ab.masks.window(5)}
DILATED = {
    "dilated": ab.masks.dilated([8, 24], [1, 2]),
    "causal": ab.masks.dilated([8, 24], [1, 2]) & ab.masks.causal(),
    "skipping": ab.masks.dilated([8, 16], [2, 4]) & ab.masks.causal(),
}
PAIR = "torch.pair[forward=torch.sdpa-flash,backward=torch.eager]"


def arrays(framework):
    return to_framework(framework, *problem(kv_heads=2)[1][:3])


def loss(found):
    """Of both, so that a gradient that is missing from one shows."""
    out, lse = found
    finite = lse > -1e30
    return (out * out).sum() + (lse * finite.astype(lse.dtype) if hasattr(lse, "astype") else lse[finite]).sum()


def torch_gradients(mask, impl, compiled=False, leaves=None, layout="bshd"):
    import torch

    q, k, v = (x.detach().requires_grad_() for x in leaves or arrays("torch"))

    def call(q, k, v):
        return ab.attention(q, k, v, mask=mask, impl=impl, return_lse=True, layout=layout)

    torch.compiler.reset()
    run = torch.compile(call, backend="aot_eager", fullgraph=True) if compiled else call
    return torch.autograd.grad(loss(run(q, k, v)), (q, k, v))


@pytest.mark.torch
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("impl", ["auto", "torch.sdpa-flash", PAIR])
def test_torch(impl, compiled, mask):
    for got, want in zip(
        torch_gradients(MASKS[mask], impl, compiled), torch_gradients(MASKS[mask], "torch.eager"), strict=True
    ):
        assert float(abs(want).max()) > 1e-3
        assert_close(got, want, 5e-5)


@pytest.mark.torch
def test_the_lse_alone_and_another_layout_in_a_compiled_operator():
    import torch

    leaves = [x.transpose(1, 2).contiguous().requires_grad_() for x in arrays("torch")]

    def lse(q, k, v, impl):
        return ab.attention(q, k, v, mask=MASKS["causal"], impl=impl, return_lse=True, layout="bhsd")[1].sum()

    compiled = torch.compile(lse, backend="aot_eager", fullgraph=True)
    wanted = torch.autograd.grad(lse(*leaves, "torch.eager"), leaves[:2])
    for got, want in zip(torch.autograd.grad(compiled(*leaves, PAIR), leaves[:2]), wanted):
        assert_close(got, want, 5e-5)


@pytest.mark.torch
def test_a_split_has_its_kernels_gradient():
    mask = ab.masks.block_causal(np.repeat([0, 1], [16, 8]))
    for got, want in zip(torch_gradients(mask, "torch.sdpa-flash-split"), torch_gradients(mask, "torch.eager")):
        assert_close(got, want, 5e-5)


@pytest.mark.torch
@pytest.mark.parametrize("mask", DILATED)
@pytest.mark.parametrize("impl", ["torch.dilated", "torch.dilated-improved"])
def test_the_dilated_ones_of_torch(impl, mask):
    for got, want in zip(torch_gradients(DILATED[mask], impl), torch_gradients(DILATED[mask], "torch.eager")):
        assert float(abs(want).max()) > 1e-3
        assert_close(got, want, 5e-5)


BLOCKS = ab.masks.blocks(np.tri(3, dtype=bool), 8)
HALF = {"auto": None, PAIR: None, "torch.dilated": DILATED["causal"], "torch.block-sparse": BLOCKS}
SCALES = [1.0, 65536.0, 2.0**24]
"""Of a loss: none, GradScaler's first, and one with which no row's gradient fits."""


def half_problem(scale):
    """Small enough for gradients that float16 can hold, and what the LSE's is."""
    size = 0.1 if scale <= 65536 else 0.001
    return [x * size for x in problem()[1][:3]], np.linspace(-1, 1, 24, dtype=np.float32) * scale


def assert_within_float16(found, wanted):
    for got, want in zip(found, wanted):
        got, want = (np.asarray(x, np.float64) for x in (got, want))
        assert np.abs(want).max() < 65504
        assert np.linalg.norm(got - want) < 2e-3 * np.linalg.norm(want)


@pytest.mark.torch
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("impl", HALF)
def test_torch_in_float16_with_a_loss_that_is_scaled(impl, scale):
    import torch

    drawn, dlse = half_problem(scale)
    leaves = [torch.from_numpy(x).half().requires_grad_() for x in drawn]
    exact = [x.detach().double().requires_grad_() for x in leaves]

    def gradients(arrays, impl, mask):
        lse = ab.attention(*arrays, mask=mask, impl=impl, return_lse=True)[1]
        return torch.autograd.grad((lse * torch.from_numpy(dlse)).sum(), arrays[:2])

    assert_within_float16(gradients(leaves, impl, HALF[impl]), gradients(exact, "torch.eager", HALF[impl]))


@pytest.mark.torch
def test_only_finite_gradients_say_how_far_float16_is_exceeded():
    import torch

    from attnbench.impls.partial.torch_autograd import beyond_float16

    told = [[], [-3.0, 9.0], [-(2.0**17), 1.0], [2.0**17, float("nan"), -float("inf")]]
    assert [float(beyond_float16(torch.tensor(each))) for each in told] == [1.0, 1.0, 4.0, 4.0]


@pytest.mark.jax
@pytest.mark.parametrize("scale", SCALES)
def test_jax_in_float16_with_a_loss_that_is_scaled(scale):
    """By the passes of a pair; the libraries that take float16 are a GPU's."""
    import jax

    from attnbench.impls.partial.jax_passes import differentiable, plain_passes

    drawn, dlse = half_problem(scale)
    drawn = [jax.numpy.asarray(x, "float16") for x in drawn]
    pair = differentiable(plain_passes(problem(dtype="float16", pass_="train")[0]), with_lse=True)

    def exact(*arrays):
        return ab.attention(*arrays, impl="jax.einsum", return_lse=True)

    found, wanted = (
        jax.jit(jax.grad(lambda *x: (call(*x)[1] * dlse).sum(), argnums=(0, 1)))(*arrays)  # noqa: B023
        for call, arrays in ((pair, drawn), (exact, [x.astype("float32") for x in drawn]))
    )
    assert_within_float16(found, wanted)


@pytest.mark.torch
def test_torch_without_one_may_be_read_but_not_learned_from():
    q, k, v = (x.requires_grad_() for x in arrays("torch"))
    out, lse = ab.attention(q, k, v, mask=MASKS["causal"], impl="torch.chunked[chunk=8]", return_lse=True)
    (out.sum() + lse.detach().sum()).backward(retain_graph=True)
    assert q.grad is not None
    with pytest.raises(Unsupported, match=r"LSE of torch\.chunked"):
        loss((out, lse)).backward()


def jax_gradients(mask, impl, loss=loss):
    import jax

    def total(q, k, v):
        return loss(ab.attention(q, k, v, mask=mask, impl=impl, return_lse=True))

    return jax.jit(jax.grad(total, argnums=(0, 1, 2)))(*arrays("jax"))


@pytest.mark.jax
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("impl", ["auto", "jax.xla", "jax.pair"])
def test_jax(impl, mask):
    for got, want in zip(jax_gradients(MASKS[mask], impl), jax_gradients(MASKS[mask], "jax.einsum"), strict=True):
        assert_close(got, want, 5e-5)


@pytest.mark.jax
@pytest.mark.parametrize("of", ["both", "lse"])
@pytest.mark.parametrize("mask", DILATED)
def test_the_dilated_one_of_jax(mask, of):
    """Two branches that overlap: the LSE of a query is mixed from theirs."""
    total = loss if of == "both" else lambda found: loss((found[0] * 0, found[1] * found[1]))
    found, wanted = (jax_gradients(DILATED[mask], impl, total) for impl in ("jax.dilated", "jax.einsum"))
    assert all(float(abs(one).max()) > 1e-3 for one in wanted[:2])
    for got, want in zip(found, wanted, strict=True):
        assert_close(got, want, 5e-5)


@pytest.mark.jax
def test_jax_without_one_may_be_read_but_not_learned_from(monkeypatch):
    import jax

    from attnbench.impls.jax.nn import JaxEinsum

    monkeypatch.setattr(JaxEinsum, "lse_gradient", False)
    q, k, v = arrays("jax")

    def both(q):
        return ab.attention(q, k, v, mask=MASKS["causal"], impl="jax.einsum", return_lse=True)

    value, gradient = jax.jit(jax.value_and_grad(lambda q: both(q)[0].sum(), has_aux=False))(q)
    assert np.isfinite(value)
    assert float(abs(gradient).max()) > 0
    with pytest.raises(Unsupported, match=r"LSE of jax\.einsum"):
        jax.jit(jax.grad(lambda q: loss(both(q))))(q)


@pytest.mark.torch
@pytest.mark.gpu
@pytest.mark.parametrize("mask", MASKS)
def test_flex_of_a_gpu(mask):
    """Also where a row sees no key. On a CPU flex has no backward pass."""
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    leaves = [torch.randn(2, 24, heads, 64, device="cuda") for heads in (4, 2, 2)]
    found, wanted = (torch_gradients(MASKS[mask], impl, leaves=leaves) for impl in ("torch.flex", "torch.eager"))
    for got, want in zip(found, wanted, strict=True):
        assert torch.isfinite(got).all()
        assert float((got - want).norm() / want.norm()) < 1e-2


@pytest.mark.torch
@pytest.mark.gpu
def test_flex_and_the_fused_kernels_of_a_gpu():
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    leaves = [torch.randn(2, 128, heads, 64, device="cuda", dtype=torch.bfloat16) for heads in (4, 2, 2)]
    wanted = torch_gradients(MASKS["causal"], "torch.eager", leaves=leaves)
    for impl in ("torch.sdpa-flash", "torch.sdpa-cudnn", "torch.flex"):
        for got, want in zip(torch_gradients(MASKS["causal"], impl, leaves=leaves), wanted):
            assert float((got - want).norm() / want.norm()) < 3e-2, impl
