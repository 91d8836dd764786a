"""`ab.attention`: one call for torch, jax and numpy arrays. Light: nothing here measures or reports."""

from __future__ import annotations

from typing import Any

from attnbench import registry
from attnbench.dispatch.arrays import device_of, framework_of, pass_of, to_layout, workload_of
from attnbench.dispatch.order import built
from attnbench.spec import Array
from attnbench.workloads.masks import AnyMask


def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    mask: AnyMask | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    impl: str = "auto",
    layout: str = "bshd",
    heads: int | tuple[int, int] | None = None,
    return_lse: bool = False,
) -> Any:
    """Attention as SEMANTICS defines it; differentiable, output in the input's layout.

    `layout` is bshd, bhsd or packed ([b, s, heads * dim]; then `heads` is the number of heads, or (heads, kv_heads)).
    `impl` is a name, which is used or refused, or "auto": the documented order of `attnbench.dispatch.order`.
    With `return_lse` also the log-sum-exp [b, heads, q_len], natural log, float32.
    """
    framework = framework_of(q, k, v)
    pass_ = pass_of(framework, q, k, v)
    workload = workload_of(q, k, v, mask=mask, scale=scale, softcap=softcap, layout=layout, heads=heads, pass_=pass_)
    call, native = built(workload, framework, device_of(q, framework), impl, return_lse, registry.generation())
    arrays = [to_layout(x, layout, native, n) for x, n in zip((q, k, v), (workload.heads, *[workload.kv_heads] * 2))]
    result = call(*arrays)
    out, lse = result if return_lse else (result, None)
    out = to_layout(out, native, layout)
    return (out, lse) if return_lse else out
