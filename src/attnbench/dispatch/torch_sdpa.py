"""A drop-in for `torch.nn.functional.scaled_dot_product_attention`, and the redirection of it in a model.

The arguments mean what they mean to torch: True in a boolean mask is "attend", `is_causal` is aligned top-left, a
floating mask is added to the logits, layout is [..., heads, tokens, dim] with any leading axes.

With `impl="auto"`, calls without a mask array go through `ab.attention`; calls with one go to torch's own function,
since reading the array's values would cost more than it could gain. A named implementation gets the array as
`masks.dense`. What attnbench does not take (dropout, nested tensors, broadcast batches, other dtypes) is an error, or,
with `fallback=True`, goes to torch's own function with a warning, once per reason.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from attnbench import masks, registry
from attnbench.dispatch import attention as dispatch
from attnbench.dispatch.hooks import OWN_RUN, fast_path_off, in_own_run, sdpa_hook, torch_sdpa
from attnbench.errors import Unsupported, UsageError
from attnbench.frameworks.torch.internals import under_autocast
from attnbench.impls._arguments import check_tensors
from attnbench.spec import DTYPE_BYTES

if TYPE_CHECKING:
    import torch

_WARNED: set[str] = set()


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    impl: str = "auto",
    fallback: bool = False,
) -> torch.Tensor:
    """Compute torch's function by attnbench; `impl` is a name or "auto", `fallback` passes on what is not taken."""
    return _attend(torch_sdpa, impl, fallback, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)


@contextmanager
def redirect_sdpa(impl: str = "auto", *, fallback: bool = False) -> Iterator[None]:
    """Replace `F.scaled_dot_product_attention` by attnbench's while the block runs, in torch's and any model's modules.

    Blocks nest (the inner one counts) and restore everything at the end, also after an exception. The fused fast path
    of torch's MultiheadAttention and TransformerEncoderLayer, which never calls the function, is off meanwhile. The
    function is replaced for the whole process: other threads that call it meanwhile are redirected too. The backward
    pass of a region under torch.utils.checkpoint calls it again, so it must run inside the block as well. Calls of
    `ab.attention` are not redirected, nor are calls that its implementation makes.
    """
    check_impl(impl)

    def handler(proceed: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if in_own_run():
            return proceed(*args, **kwargs)
        with OWN_RUN:
            return _attend(proceed, impl, fallback, *args, **kwargs)

    with sdpa_hook().handled_by(handler), fast_path_off().held():
        yield


def check_impl(impl: str) -> None:
    """Raise UsageError for an unknown name or one of another framework, before the first call."""
    if impl == "auto":
        return
    framework = registry.get(registry.asked(impl)[0]).framework
    if framework != "torch":
        raise UsageError(f"{impl} takes {framework} arrays; name one that takes torch's.")


def _attend(
    torchs_own: Callable[..., Any],
    impl: str,
    fallback: bool,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    check_tensors("scaled_dot_product_attention", query, key, value, *(() if attn_mask is None else (attn_mask,)))
    own = {"scale": scale, "enable_gqa": enable_gqa}
    reason = _why_not(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa, impl)
    if reason is not None:
        _refuse(reason, fallback)
    if reason is not None or (attn_mask is not None and impl == "auto"):
        return torchs_own(query, key, value, attn_mask, dropout_p, is_causal, **own)
    shape = (*query.shape[:-1], value.shape[-1])
    mask: Any = masks.causal("top-left") if is_causal else None
    if attn_mask is not None:
        pairs = (*query.shape[:-1], key.shape[-2])
        mask = masks.dense(_four_axes(attn_mask.broadcast_to(pairs)) if query.ndim > 4 else attn_mask)
    query, key, value = (_four_axes(x) for x in under_autocast(query, key, value))
    out = dispatch.attention(query, key, value, mask=mask, scale=scale, impl=impl, layout="bhsd")
    return out.reshape(shape)


def _four_axes(x: torch.Tensor) -> torch.Tensor:
    """Return [..., heads, tokens, dim] with one batch axis."""
    return x.flatten(0, -4) if x.ndim > 4 else x[(None,) * (4 - x.ndim)]


def _why_not(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    enable_gqa: bool,
    impl: str,
) -> str | None:
    """Return what attnbench does not take in a call; None if it takes the call."""
    arrays = (query, key, value)
    if any(x.is_nested for x in arrays):
        return "nested tensors"
    if dropout_p > 0:
        return f"attention dropout (dropout_p={dropout_p:g})"
    if type(attn_mask).__name__ == "CausalBias":
        return "a CausalBias as attn_mask"
    if attn_mask is not None and is_causal:
        return "attn_mask together with is_causal"
    if attn_mask is not None and impl != "auto" and attn_mask.requires_grad:
        return f"a mask that wants gradients, of {impl}"
    if min(x.ndim for x in arrays) < 2 or len({x.ndim for x in arrays}) > 1 or not all(x.numel() for x in arrays):
        return f"tensors of {', '.join(str(tuple(x.shape)) for x in arrays)}"
    if len({tuple(x.shape[:-3]) for x in arrays}) > 1 or key.shape[:-1] != value.shape[:-1]:
        return f"batches that broadcast ({', '.join(str(tuple(x.shape)) for x in arrays)})"
    if query.ndim > 2 and query.shape[-3] != key.shape[-3] and not enable_gqa:
        return f"{query.shape[-3]} query heads on {key.shape[-3]} key heads without enable_gqa"
    dtypes = {str(x.dtype).rpartition(".")[2] for x in under_autocast(*arrays)}
    if len(dtypes) > 1 or not dtypes <= set(DTYPE_BYTES):
        return f"the dtypes {', '.join(sorted(dtypes))}"
    return None


def _refuse(reason: str, fallback: bool) -> None:
    message = f"attnbench's scaled_dot_product_attention does not take {reason}"
    if not fallback:
        raise Unsupported(f"{message}; fallback=True passes such calls to torch's own function.")
    kind = re.sub(r"[\d, ()]+", " ", reason)  # once for all shapes
    if kind not in _WARNED:
        _WARNED.add(kind)
        warnings.warn(f"{message}: torch's own function computes such calls.", stacklevel=4)
