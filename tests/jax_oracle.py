"""Float64 attention written once more, from the mask's bias array alone, and what the JAX tests compare with it."""

from __future__ import annotations

from typing import Any

import numpy as np

from attnbench import masks
from attnbench.spec import Call, Environment, Implementation, Workload

CPU = Environment(device="cpu", device_name="test")
HOPPER = Environment(device="cuda", device_name="test", capability=(9, 0))


def draw(workload: Workload, seed: int = 0) -> tuple[np.ndarray, ...]:
    """q, k, v and dout as float64 bshd arrays."""
    w, random = workload, np.random.default_rng(seed)
    shapes = [
        (w.batch, w.q_len, w.heads, w.head_dim),
        (w.batch, w.kv_len, w.kv_heads, w.head_dim),
        (w.batch, w.kv_len, w.kv_heads, w.value_dim),
        (w.batch, w.q_len, w.heads, w.value_dim),
    ]
    return tuple(random.standard_normal(shape) for shape in shapes)


def oracle(workload: Workload, q: Any, k: Any, v: Any, dout: Any) -> dict[str, np.ndarray]:
    """out, lse, dq, dk, dv."""
    w = workload
    bias = np.broadcast_to(w.visible_mask.bias(w.mask_shape), tuple(w.mask_shape))
    keys, values = (np.repeat(x, w.group, axis=2) for x in (k, v))
    raw = np.einsum("bihd,bjhd->bhij", q, keys) * w.softmax_scale
    capped = raw if w.softcap is None else w.softcap * np.tanh(raw / w.softcap)
    logits = capped + bias
    top = logits.max(-1, keepdims=True)
    weights = np.exp(logits - np.where(np.isfinite(top), top, 0))
    total = weights.sum(-1, keepdims=True)
    p = weights / np.where(total == 0, 1, total)
    with np.errstate(divide="ignore"):
        lse = (np.where(np.isfinite(top), top, 0) + np.log(total))[..., 0]
    dp = np.einsum("bihd,bjhd->bhij", dout, values)
    dlogits = p * (dp - (p * dp).sum(-1, keepdims=True))
    if w.softcap is not None:
        dlogits = dlogits * (1 - (capped / w.softcap) ** 2)
    dlogits = dlogits * w.softmax_scale
    share = (w.batch, w.kv_len, w.kv_heads, w.group, -1)
    return {
        "out": np.einsum("bhij,bjhd->bihd", p, values),
        "lse": lse,
        "dq": np.einsum("bhij,bjhd->bihd", dlogits, keys),
        "dk": np.einsum("bhij,bihd->bjhd", dlogits, q).reshape(share).sum(3),
        "dv": np.einsum("bhij,bihd->bjhd", p, dout).reshape(share).sum(3),
    }


def check(
    implementation: Implementation,
    workload: Workload,
    tolerance: float,
    environment: Environment = CPU,
    compiled: bool = False,
    device: str = "cpu",
) -> None:
    """Forward, and gradients where the pass has them; op by op, since masks of one shape share those, or compiled."""
    from attnbench.frameworks.base import Inputs
    from attnbench.frameworks.jax.framework import FRAMEWORK as jax

    assert implementation.supports(workload, environment) is None
    arrays = [jax.array(x, workload.dtype, device) for x in draw(workload)]
    truth = oracle(workload, *(jax.numpy(x).astype(np.float64) for x in arrays))
    layout = implementation.layout
    inputs = Inputs(*(jax.transpose(x, "bshd", layout) for x in arrays))
    call = implementation.build(workload, implementation.configs(workload)[0])
    names = {"forward": ("out",), "backward": ("dq", "dk", "dv"), "train": ("out", "dq", "dk", "dv")}[workload.pass_]
    main = jax.programs(call, workload.pass_, inputs).main if compiled else None
    found = main.run(main.prepare(inputs)) if main else _op_by_op(call, workload.pass_, inputs)
    assert len(found) == len(names)
    for name, array in zip(names, found):
        assert str(array.dtype) == workload.dtype, name
        close(jax.numpy(jax.transpose(array, layout, "bshd")), truth[name], tolerance, name)


def _op_by_op(call: Call, pass_: str, inputs: Any) -> tuple[Any, ...]:
    import jax

    from attnbench.frameworks.jax.framework import precision_of

    with precision_of(inputs.q.dtype):
        if pass_ == "forward":
            return (call(*inputs[:3]),)
        out, pull_back = jax.vjp(call, *inputs[:3])
        gradients = pull_back(inputs.dout)
    return gradients if pass_ == "backward" else (out, *gradients)


def check_lse(implementation: Implementation, workload: Workload, tolerance: float) -> None:
    """(out, lse) of build_lse; rows that see no key have 0 and -inf."""
    from attnbench.frameworks.jax.framework import FRAMEWORK as jax

    arrays = [jax.array(x, workload.dtype, "cpu") for x in draw(workload)]
    truth = oracle(workload, *(jax.numpy(x).astype(np.float64) for x in arrays))
    call = implementation.build_lse(workload, implementation.configs(workload)[0])
    assert call is not None
    layout = implementation.layout
    out, lse = call(*(jax.transpose(x, "bshd", layout) for x in arrays[:3]))
    assert str(lse.dtype) == "float32"
    close(jax.numpy(jax.transpose(out, layout, "bshd")), truth["out"], tolerance, "out")
    close(jax.numpy(lse), truth["lse"], tolerance, "lse")


def close(found: np.ndarray, truth: np.ndarray, tolerance: float, name: str) -> None:
    """Relative to the largest true value; infinities must agree exactly."""
    assert found.shape == truth.shape, name
    finite = np.isfinite(truth)
    assert np.array_equal(found[~finite], truth[~finite]), name
    worst = np.abs(found[finite] - truth[finite]).max(initial=0) / max(1.0, np.abs(truth[finite]).max(initial=0))
    assert worst <= tolerance, f"{name}: {worst:.2e} > {tolerance:.0e}"


def every_mask(batch: int = 2, heads: int = 4, tokens: int = 24) -> dict[str, Any]:
    """One mask of each kind and some combinations, for square workloads; several have rows without keys."""
    random = np.random.default_rng(3)
    ids = np.sort(random.integers(0, 4, (batch, tokens)), axis=1)
    holes = random.random((batch, tokens)) > 0.4
    additive = random.standard_normal((heads, tokens, tokens)).astype(np.float32)
    additive[random.random(additive.shape) > 0.7] = -np.inf
    kept = random.random((heads, -(-tokens // 8), -(-tokens // 8))) > 0.4
    kept[:, 1] = False
    dense = random.random((batch, 1, tokens, tokens)) > 0.5
    dense[0, 0, 5] = False
    return {
        "full": masks.full(),
        "causal": masks.causal(),
        "window": masks.window(5, 0),
        "window-both": masks.window(3, 2),
        "window-open": masks.window(None, 2),
        "prefix": masks.prefix(7),
        "block_causal": masks.block_causal(ids),
        "documents": masks.documents(ids[:1]),
        "documents-causal": masks.documents(ids) & masks.causal(),
        "lengths": masks.lengths([tokens - 5, 0]),
        "lengths-causal": masks.lengths([tokens - 5, 3]) & masks.causal(),
        "valid": masks.valid(holes),
        "valid-causal": masks.valid(holes) & masks.causal(),
        "dilated": masks.dilated([4, 8], [1, 2]),
        "dilated-sparse": masks.dilated([8], [4]),
        "blocks": masks.blocks(kept, 8),
        "dense": masks.dense(dense),
        "additive": masks.dense(additive),
    }
