"""`ab.attention`: one call for torch, jax and numpy arrays. Light: nothing here measures or reports.

Everything that depends on shapes, types, device, gradients and arguments alone is looked up; a plan is made only for a
new problem.
"""

from __future__ import annotations

from typing import Any

from attnbench import policy, registry
from attnbench.dispatch.demand import Words, device_of, framework_of, pass_of
from attnbench.dispatch.plan import PLANS, planned
from attnbench.frameworks.torch.internals import is_autocast, under_autocast, without_autocast
from attnbench.impls.partial.torch_choice import current
from attnbench.masks import AnyMask
from attnbench.spec import Array
from attnbench.tracing import is_fake


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
    """Return attention of q, k and v in their layout; differentiable.

    `layout` is bshd, bhsd or packed ([b, s, heads * dim]; then `heads` is the number of heads, or (heads, kv_heads)).
    `impl` is a name (with settings in brackets if it has some), which is used or refused, or "auto": the choice of the
    active policies, else the first of the fixed order of `attnbench.dispatch.order`, with a warning.
    With `return_lse` also the log-sum-exp [b, heads, q_len], natural log, float32. A gradient flows through it if the
    implementation supports that (`lse_gradient`); with any other, asking for that gradient is an error.
    """
    recording, rules = False, None
    if hasattr(q, "requires_grad"):
        import torch

        if torch.compiler.is_dynamo_compiling() or torch._C._is_any_autocast_enabled():
            if is_autocast(q.device.type):
                q, k, v = under_autocast(q, k, v)
                with without_autocast(q.device.type):
                    return attention(
                        q, k, v, mask=mask, scale=scale, softcap=softcap, impl=impl, layout=layout, heads=heads,
                        return_lse=return_lse,
                    )  # fmt: skip
            if torch.compiler.is_dynamo_compiling():
                from attnbench.dispatch import torch_compile

                return torch_compile.attention(q, k, v, mask, scale, softcap, impl, layout, heads, return_lse)
        recording, rules = torch.is_grad_enabled(), current()
        place: Any = q.device
    else:
        place = None
    try:
        if place is None:
            place, train = _place_and_pass(q, k, v)
        else:
            train = recording and (q.requires_grad or k.requires_grad or v.requires_grad)
            if place != k.device or place != v.device:  # no plan has such a key: `planned` refuses it
                place = (place, k.device, v.device)
        dtype = q.dtype
        if dtype is not k.dtype or dtype is not v.dtype:
            dtype = (dtype, k.dtype, v.dtype)
        key = (
            q.shape, k.shape, v.shape, dtype, place, train, mask, scale, softcap, impl, layout, heads, return_lse,
            type(q), rules, registry.generation(), policy.generation(),
        )  # fmt: skip
        run = PLANS.get(key)
    except (AttributeError, TypeError):  # several frameworks, or not a mask: `planned` refuses them
        key, run, train = None, None, _place_and_pass(q, k, v)[1]
    if run is None:
        plan = planned(q, k, v, Words(mask, scale, softcap, impl, layout, heads, return_lse), train)
        if key is not None and not is_fake(q):  # a later call cannot use arrays made of fake ones
            PLANS.put(key, plan)
        run = plan.run
    return run(q, k, v)


def _place_and_pass(q: Array, k: Array, v: Array) -> tuple[Any, bool]:
    framework = framework_of(q, k, v)
    return (device_of(q, framework), type(k), type(v)), pass_of(framework, q, k, v) == "train"
