"""Attention with a mask that is an argument: against the reference, where rows may see nothing."""

from __future__ import annotations

import numpy as np
import pytest

import attnbench as ab
from attnbench.dispatch import array_masks
from attnbench.dispatch.array_masks import attention_with_array
from attnbench.dispatch.demand import Words
from attnbench.errors import InvalidWorkload, Unsupported

SHAPES = [(2, 5, 4, 8), (2, 7, 2, 8), (2, 7, 2, 8)]
RANDOM = np.random.default_rng(0)
Q, K, V = (RANDOM.standard_normal(shape, np.float32) for shape in SHAPES)
VISIBLE = RANDOM.random((2, 1, 5, 7)) < 0.5
VISIBLE[:, :, 0] = True
VISIBLE[1, 0, 3] = False
BIAS = RANDOM.standard_normal((1, 4, 5, 7)).astype(np.float32)
HIDING = np.where(RANDOM.random((1, 4, 5, 7)) < 0.3, -np.inf, BIAS).astype(np.float32)
CASES = {
    "visible": (VISIBLE, None),
    "bias": (None, BIAS),
    "both": (VISIBLE, BIAS),
    "bias that hides": (VISIBLE, HIDING),
}
TORCH = ("auto", "torch.sdpa", "torch.eager", "torch.sdpa-math")
JAX = ("auto", "jax.xla", "jax.einsum")
IMPLS = [
    *(pytest.param("torch", impl, marks=pytest.mark.torch) for impl in TORCH),
    *(pytest.param("jax", impl, marks=pytest.mark.jax) for impl in JAX),
    pytest.param("numpy", "auto"),
]


def to(framework, array):
    if array is None or framework == "numpy":
        return array
    if framework == "torch":
        import torch

        return torch.from_numpy(array.copy())
    import jax.numpy as jnp

    return jnp.asarray(array)


def expected(visible, bias, **more):
    parts = [ab.masks.dense(array) for array in (visible, bias) if array is not None]
    mask = parts[0] if len(parts) == 1 else parts[0] & parts[1]
    return ab.attention(Q, K, V, mask=mask, impl="numpy.reference", **more)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("framework", "impl"), IMPLS)
def test_as_the_reference(framework, impl, case):
    visible, bias = CASES[case]
    arrays = [to(framework, x) for x in (Q, K, V)]
    found = attention_with_array(
        *arrays, visible=to(framework, visible), bias=to(framework, bias), scale=0.4, impl=impl
    )
    np.testing.assert_allclose(np.asarray(found), expected(visible, bias, scale=0.4), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "framework", [pytest.param(name, marks=getattr(pytest.mark, name)) for name in ("torch", "jax")]
)
def test_a_soft_cap_is_taken_before_the_bias(framework):
    arrays = [to(framework, x) for x in (Q, K, V)]
    found = attention_with_array(*arrays, visible=to(framework, VISIBLE), bias=to(framework, BIAS), softcap=0.7)
    np.testing.assert_allclose(np.asarray(found), expected(VISIBLE, BIAS, softcap=0.7), rtol=1e-5, atol=1e-5)


@pytest.mark.torch
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_gradients_of_rows_that_see_nothing_are_no_nan(softcap):
    arrays = [to("torch", x).requires_grad_() for x in (Q, K, V)]
    out = attention_with_array(*arrays, visible=to("torch", VISIBLE), softcap=softcap)
    out.square().sum().backward()
    assert not out[1, 3].any()
    assert not arrays[0].grad[1, 3].any()
    assert all(x.grad.isfinite().all() for x in arrays)


@pytest.mark.torch
def test_a_bias_gets_its_gradient_or_is_refused():
    arrays = [to("torch", x) for x in (Q, K, V)]
    bias = to("torch", BIAS).requires_grad_()
    for impl in ("auto", "torch.sdpa", "torch.eager"):
        bias.grad = None
        attention_with_array(*arrays, bias=bias, impl=impl).square().sum().backward()
        assert bias.grad.abs().sum() > 0
    with pytest.raises(InvalidWorkload, match="mask is a constant"):
        attention_with_array(*arrays, bias=bias, impl="torch.sdpa-math")
    attention_with_array(*arrays, bias=bias.detach(), impl="torch.sdpa-math")


@pytest.mark.torch
def test_what_cannot_be_is_refused():
    arrays = [to("torch", x) for x in (Q, K, V)]
    with pytest.raises(Unsupported, match="does not support softcap"):
        attention_with_array(*arrays, visible=to("torch", VISIBLE), softcap=1.0, impl="torch.sdpa")


@pytest.mark.jax
def test_a_mask_of_another_shape_is_refused():
    arrays = [to("jax", x) for x in (Q, K, V)]
    with pytest.raises(InvalidWorkload, match=r"the mask of shape \(3, 7\) does not broadcast"):
        attention_with_array(*arrays, visible=to("jax", np.ones((3, 7), bool)))
    with pytest.raises(Unsupported, match=r"jax\.cudnn"):
        attention_with_array(*arrays, visible=to("jax", VISIBLE), impl="jax.cudnn")


@pytest.mark.gpu
@pytest.mark.parametrize("case", ["visible", "both"])
def test_on_a_gpu(case):
    import torch

    visible, bias = CASES[case]
    arrays = [to("torch", x).to("cuda", torch.bfloat16) for x in (Q, K, V)]
    bias = None if bias is None else to("torch", bias).to("cuda", torch.bfloat16)
    found = attention_with_array(*arrays, visible=to("torch", visible).cuda(), bias=bias)
    assert found.isfinite().all()
    wanted = expected(visible, None if bias is None else bias.float().cpu().numpy())
    np.testing.assert_allclose(found.float().cpu(), wanted, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("word", ["visible", "bias"])
@pytest.mark.parametrize("dtype", ["int64", "uint8", "int32"])
@pytest.mark.parametrize(
    "framework", [pytest.param(name, marks=getattr(pytest.mark, name)) for name in ("torch", "jax")] + ["numpy"]
)
def test_a_mask_of_integers_is_refused(framework, dtype, word):
    """Nobody can tell whether 1 is visible or added to the logits."""
    arrays = [to(framework, x) for x in (Q, K, V)]
    for impl in ("auto", "numpy.reference" if framework == "numpy" else f"{framework}.eager"):
        with pytest.raises(InvalidWorkload, match="mask != 0"):
            attention_with_array(*arrays, **{word: to(framework, VISIBLE.astype(dtype))}, impl=impl)


def test_numbers_are_not_taken_for_what_is_visible():
    with pytest.raises(InvalidWorkload, match="visible pairs must be boolean, not float32"):
        attention_with_array(Q, K, V, visible=VISIBLE.astype(np.float32))


def broken(visible=None, **changes):
    """Arguments in torch, of which some do not go together."""
    given = {"q": Q, "k": K, "v": V, **({} if visible is None else {"visible": visible}), **changes}
    made = {name: to("torch", value) if isinstance(value, np.ndarray) else value for name, value in given.items()}
    return [made.pop(name) for name in ("q", "k", "v")], made


@pytest.mark.torch
@pytest.mark.parametrize("impl", ["auto", "torch.sdpa", "torch.eager"])
@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"visible": np.ones((3, 7), bool)}, "does not broadcast"),
        ({"visible": np.ones((4, 1, 5, 7), bool)}, "does not broadcast"),
        ({"visible": np.ones((1, 8, 5, 7), bool)}, "does not broadcast"),
        ({"visible": np.ones((1, 1, 1, 5, 7), bool)}, "does not broadcast"),
        ({"bias": np.zeros((2, 4, 5, 8), np.float32)}, "does not broadcast"),
        ({"visible": VISIBLE, "v": V[:, :, :1]}, "shapes do not go together"),
        ({"visible": VISIBLE, "k": K.astype(np.float64), "v": V.astype(np.float64)}, "must have one dtype"),
        ({"visible": VISIBLE, "q": Q.astype(np.int64), "k": K.astype(np.int64), "v": V.astype(np.int64)}, "int64"),
    ],
)
def test_arrays_that_do_not_go_together_are_refused(impl, changes, told):
    """Also after a call with arrays of these shapes that do."""
    attention_with_array(*[to("torch", x) for x in (Q, K, V)], visible=to("torch", VISIBLE), impl=impl)
    arrays, mask = broken(**changes)
    with pytest.raises(InvalidWorkload, match=told):
        attention_with_array(*arrays, **mask, impl=impl)


@pytest.mark.torch
@pytest.mark.parametrize("word", ["visible", "bias"])
@pytest.mark.parametrize("kind", ["numpy", "list", "elsewhere", "key", pytest.param("jax", marks=pytest.mark.jax)])
def test_a_mask_of_another_kind_is_refused(kind, word):
    arrays = [to("torch", x) for x in (Q, K, V)]
    mask = VISIBLE if word == "visible" else BIAS
    if kind == "key":
        arrays[1] = K
    made = {"list": mask.tolist(), "elsewhere": to("torch", mask).to("meta"), "key": to("torch", mask)}
    given = made[kind] if kind in made else to(kind, mask)
    with pytest.raises(InvalidWorkload, match=r"convert the mask|mask is on meta|one framework"):
        attention_with_array(*arrays, **{word: given})


@pytest.mark.torch
@pytest.mark.jax
def test_jax_takes_no_tensor_as_a_mask():
    arrays = [to("jax", x) for x in (Q, K, V)]
    with pytest.raises(InvalidWorkload, match="the inputs are jax arrays, but the mask is of type Tensor"):
        attention_with_array(*arrays, visible=to("torch", VISIBLE))
    found = attention_with_array(*arrays, visible=VISIBLE)
    np.testing.assert_allclose(found, expected(VISIBLE, None), rtol=1e-4, atol=1e-5)


@pytest.mark.torch
@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16"])
def test_a_bias_of_another_dtype_is_computed_or_refused_in_words(dtype):
    import torch

    arrays = [to("torch", x) for x in (Q, K, V)]
    bias = to("torch", BIAS).to(getattr(torch, dtype))
    found = attention_with_array(*arrays, bias=bias)
    assert found.dtype == torch.float32
    np.testing.assert_allclose(found, expected(None, bias.to(torch.float32).numpy()), rtol=1e-4, atol=1e-5)
    with pytest.raises(Unsupported, match="takes a bias in the dtype of its inputs"):
        attention_with_array(*arrays, bias=bias, impl="torch.sdpa")


@pytest.mark.torch
def test_the_choice_knows_what_torch_was_told():
    import torch

    arrays = [to("torch", x) for x in (Q, K, V)]
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        demand = array_masks._demand(*arrays, Words(None, None, None, "auto", "bshd", None, False), False, "torch")
    finally:
        torch.use_deterministic_algorithms(before)
    assert demand.rules.deterministic
