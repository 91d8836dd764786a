"""A drop-in for `torch.nn.functional.scaled_dot_product_attention`, and the redirection of it in a model by hooks.

The arguments mean what they mean to torch: True in a boolean mask is "attend", `is_causal` is aligned top-left, a
floating mask is added to the logits, layout is [..., heads, tokens, dim] with any leading axes.

With `impl="auto"`, calls without a mask array go through `ab.attention`; calls with one go to torch's own function,
since reading the array's values would cost more than it could gain. A named implementation gets the array as
`masks.dense`. A call that attnbench does not take (dropout, nested tensors, broadcast batches, other dtypes) is an
error, or, with `fallback=True`, goes to torch's own function with a warning, once per reason.

`redirect_sdpa` and `capture` are handlers of hooks. While a hook has handlers, its function is replaced wherever a
loaded module has it at its top level, so that code that imported the name itself is reached too. A replacement that
code keeps afterwards behaves as the function again. Replacing is process-wide: all threads see it.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from threading import RLock
from typing import TYPE_CHECKING, Any

from attnbench import masks, registry
from attnbench.dispatch import attention as dispatch
from attnbench.dispatch.plan import OWN_RUN
from attnbench.errors import Unsupported, UsageError
from attnbench.frameworks.torch.internals import under_autocast
from attnbench.impls._arguments import check_tensors
from attnbench.spec import DTYPE_BYTES

if TYPE_CHECKING:
    import torch

Handler = Callable[..., Any]
"""`handler(proceed, *args, **kwargs)`; `proceed(*args, **kwargs)` is what would have been called without it."""
_WARNED: set[str] = set()


def scaled_dot_product_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False, *,
    impl: str = "auto", fallback: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Compute torch's function by attnbench; `impl` is a name or "auto", `fallback` lets torch compute other calls."""
    return _attend(native_sdpa, impl, fallback, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)


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
        if OWN_RUN.depth:
            return proceed(*args, **kwargs)
        with OWN_RUN:
            return _attend(proceed, impl, fallback, *args, **kwargs)

    with sdpa_hook().handled_by(handler), fast_path_off().held():
        yield


def check_impl(impl: str) -> None:
    """Raise UsageError for an unknown name, or one of another framework, before the first call."""
    framework = "torch" if impl == "auto" else registry.get(registry.asked(impl)[0]).framework
    if framework != "torch":
        raise UsageError(f"{impl} takes {framework} arrays: name an implementation that takes torch tensors.")


def _attend(
    native: Callable[..., Any], impl: str, fallback: bool,
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    attn_mask: torch.Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> torch.Tensor:  # fmt: skip
    check_tensors("scaled_dot_product_attention", query, key, value, *(() if attn_mask is None else (attn_mask,)))
    reason = _why_not(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa, impl)
    if reason is not None:
        message = f"attnbench's scaled_dot_product_attention does not take {reason}"
        if not fallback:
            raise Unsupported(f"{message}; fallback=True passes such calls to torch's own function.")
        kind = re.sub(r"[\d, ()]+", " ", reason)  # once for all shapes
        if kind not in _WARNED:
            _WARNED.add(kind)
            warnings.warn(f"{message}: torch's own function computes such calls.", stacklevel=3)
    if reason is not None or (attn_mask is not None and impl == "auto"):
        return native(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
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
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None, dropout_p: float,
    is_causal: bool, enable_gqa: bool, impl: str,
) -> str | None:  # fmt: skip
    """Return the part of a call that attnbench does not take; None if it takes the call."""
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
        return f"a mask that requires gradients, with impl={impl}"
    if min(x.ndim for x in arrays) < 2 or len({x.ndim for x in arrays}) > 1 or not all(x.numel() for x in arrays):
        return f"tensors of shape {', '.join(str(tuple(x.shape)) for x in arrays)}"
    if len({tuple(x.shape[:-3]) for x in arrays}) > 1 or key.shape[:-1] != value.shape[:-1]:
        return f"batches that broadcast ({', '.join(str(tuple(x.shape)) for x in arrays)})"
    if query.ndim > 2 and query.shape[-3] != key.shape[-3] and not enable_gqa:
        return f"{query.shape[-3]} query heads on {key.shape[-3]} key heads without enable_gqa"
    dtypes = {str(x.dtype).rpartition(".")[2] for x in under_autocast(*arrays)}
    if len(dtypes) > 1 or not dtypes <= set(DTYPE_BYTES):
        return f"the dtypes {', '.join(sorted(dtypes))}"
    return None


class Hook:
    """Handlers of one function; the latest is called first."""

    def __init__(
        self, function: Callable[..., Any], home: str, spare: tuple[str, ...] = (),
        original: Callable[..., Any] | None = None,
    ) -> None:  # fmt: skip
        """Wrap a function of the module `home`; modules whose name begins with one of `spare` keep the function.

        `original` is called in place of the function, if that would not work while it is replaced.
        """
        self._function, self._home, self._spare = function, home, spare
        self._original = original or function
        self._handlers: tuple[Handler, ...] = ()
        self._places: list[tuple[dict[str, Any], str]] = []
        self._lock = RLock()

        @wraps(function)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            return self._call(len(self._handlers), args, kwargs)

        self.replacement = replacement

    def _call(self, level: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        handlers = self._handlers[:level]
        if not handlers:
            return self._original(*args, **kwargs)
        return handlers[-1](lambda *a, **k: self._call(level - 1, a, k), *args, **kwargs)

    @contextmanager
    def handled_by(self, handler: Handler) -> Iterator[None]:
        """Pass every call to the handler while the block runs."""
        with self._lock:
            if not self._handlers:
                self._replace()
            self._handlers = (*self._handlers, handler)
        try:
            yield
        finally:
            with self._lock:
                at = len(self._handlers) - 1 - self._handlers[::-1].index(handler)
                self._handlers = self._handlers[:at] + self._handlers[at + 1 :]
                if not self._handlers:
                    for namespace, key in self._places:
                        if namespace.get(key) is self.replacement:
                            namespace[key] = self._function
                    self._places.clear()

    def _replace(self) -> None:
        name = self._function.__name__
        if getattr(sys.modules[self._home], name) is not self._function:
            raise UsageError(f"{self._home}.{name} has been replaced by other code already: restore it first.")
        for module_name, module in list(sys.modules.items()):
            if module_name.startswith(self._spare) and module_name != self._home:
                continue
            namespace = getattr(module, "__dict__", {})
            self._places += [(namespace, key) for key, value in list(namespace.items()) if value is self._function]
        for namespace, key in self._places:
            namespace[key] = self.replacement


class Meanwhile:
    """A process-wide setting that has another value while blocks run; the last block to end restores it."""

    def __init__(self, get: Callable[[], Any], put: Callable[[Any], None], value: Any) -> None:
        self._get, self._put, self._value = get, put, value
        self._blocks, self._before = 0, None
        self._lock = RLock()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Give the setting the value while the block runs."""
        with self._lock:
            if not self._blocks:
                self._before = self._get()
            self._put(self._value)
            self._blocks += 1
        try:
            yield
        finally:
            with self._lock:
                self._blocks -= 1
                if not self._blocks:
                    self._put(self._before)


def native_sdpa(*args: Any, **kwargs: Any) -> Any:
    """Call torch's own `scaled_dot_product_attention`, also while it is replaced."""
    import torch

    mask = kwargs.get("attn_mask", args[3] if len(args) > 3 else None)
    if mask is not None and type(mask).__name__ == "CausalBias":
        # This bias asks whether the function is the one in torch.nn.functional, which may be the replacement.
        now = torch.nn.functional.scaled_dot_product_attention
        return type(mask).__torch_function__(now, (type(mask),), args, kwargs)
    return torch._C._nn.scaled_dot_product_attention(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]


@cache
def sdpa_hook() -> Hook:
    """Return the hook on `F.scaled_dot_product_attention`; modules of attnbench and torch keep torch's function."""
    import torch

    function = torch._C._nn.scaled_dot_product_attention  # pyright: ignore[reportAttributeAccessIssue]
    return Hook(function, "torch.nn.functional", spare=("torch.", "attnbench."), original=native_sdpa)


@cache
def fast_path_off() -> Meanwhile:
    """Return a setting that disables the fused path of torch's MultiheadAttention, which never calls the function."""
    from torch.backends import mha

    return Meanwhile(mha.get_fastpath_enabled, mha.set_fastpath_enabled, False)
