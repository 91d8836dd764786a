"""torch.nn.functional.scaled_dot_product_attention: torch's own pick, and pinned to one backend.

Layout is bhsd. `is_causal` is aligned top-left, so a rectangular bottom-right mask goes as an array, or, if the flash
kernel of a GPU is asked for, as torch's lower-right bias. A pinned backend that cannot run raises; it never falls back.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, NamedTuple

from msgspec.structs import replace

from attnbench.errors import Unsupported
from attnbench.frameworks.torch.device_masks import values_call
from attnbench.frameworks.torch.plain import MaskTensors, once_per_device
from attnbench.impls import conditions
from attnbench.impls.conditions import first_reason
from attnbench.impls.partial.torch_passes import call_at_positive_scale, dense_rows, has_dense_rows, positive_scale
from attnbench.impls.torch import _sdpa_operators
from attnbench.impls.torch._caches import sliced_decode
from attnbench.impls.torch._masks import SdpaMask, may_have_dead_rows, needs_packed_bounds, route, sdpa_mask
from attnbench.impls.torch._sdpa_pins import Pinned
from attnbench.impls.torch._varlen import varlen_call
from attnbench.masks.device import MaskForm
from attnbench.spec import Array, CacheCall, Call, Config, Environment, Implementation, Partial, ValuesCall, Workload

Backend = Literal["auto", "math", "flash", "efficient", "cudnn"]
MATH_OPERATOR = r"_scaled_dot_product_attention_math"


class BackendFacts(NamedTuple):
    """Facts about a backend of scaled_dot_product_attention."""

    description: str
    operators: tuple[str, ...] = ()
    """Patterns of its operators in a profile."""
    enum: str = ""
    """Name in `torch.nn.attention.SDPBackend`."""
    flag: str = ""
    """Name in `torch.backends.cuda.enable_*_sdp`."""
    devices: tuple[str, ...] = ()
    """Kinds of device that it runs on; empty for all."""
    since: tuple[int, int] = (0, 0)
    """Least compute capability for which torch 2.11 to 2.13 has kernels."""


BACKENDS: dict[Backend, BackendFacts] = {
    "auto": BackendFacts("PyTorch's scaled_dot_product_attention with the backend that torch itself picks."),
    "math": BackendFacts(
        "PyTorch's scaled_dot_product_attention pinned to plain operators; stores all scores.",
        (MATH_OPERATOR, r"(?i)softmax\w*backward"),
        enum="MATH",
        flag="math",
    ),
    "flash": BackendFacts(
        "PyTorch's scaled_dot_product_attention pinned to torch's flash kernel (FlashAttention 2 on a GPU).",
        (r"_scaled_dot_product_flash_attention", r"_scaled_dot_product_fused_attention_overrideable"),
        enum="FLASH_ATTENTION",
        flag="flash",
        devices=("cpu", "cuda", "rocm", "xpu"),
        since=(8, 0),
    ),
    "efficient": BackendFacts(
        "PyTorch's scaled_dot_product_attention pinned to its memory-efficient CUTLASS kernels.",
        (r"_scaled_dot_product_efficient_attention",),
        enum="EFFICIENT_ATTENTION",
        flag="mem_efficient",
        devices=("cuda", "rocm"),
        since=(5, 0),
    ),
    "cudnn": BackendFacts(
        "PyTorch's scaled_dot_product_attention pinned to cuDNN.",
        (r"_scaled_dot_product_cudnn_attention",),
        enum="CUDNN_ATTENTION",
        flag="cudnn",
        devices=("cuda",),
        since=(8, 0),
    ),
}
VARLEN_SINCE = (2, 11)
"""First release of torch whose varlen function takes a scale and a window."""
NO_KERNEL = ("No available kernel", "No viable backend")
HALF = ("float16", "bfloat16")


class Sdpa(Implementation):
    """PyTorch's scaled_dot_product_attention, by torch's own choice or pinned to a backend."""

    framework = "torch"
    layout = "bhsd"
    traceable = True
    lse_gradient = True
    any_kv_len = True
    untested = ("rocm", "xpu", "mps")

    def __init__(self, backend: Backend) -> None:
        self.backend: Backend = backend
        self.name = "torch.sdpa" if backend == "auto" else f"torch.sdpa-{backend}"
        self.description, self.expects = BACKENDS[backend].description, BACKENDS[backend].operators
        self.materialises_scores = backend == "math"
        self.forbids = () if backend in ("auto", "math") else (MATH_OPERATOR,)
        self.switches = () if backend == "auto" else (BACKENDS[backend].flag,)
        self.not_deterministic = ("forward", "backward") if backend == "cudnn" else ()

    def available(self, environment: Environment) -> str | None:
        facts = BACKENDS[self.backend]
        if not facts.devices:
            return None
        return first_reason(
            conditions.needs_device(environment, *facts.devices), conditions.needs_at_least(environment, facts.since)
        )

    def supports(self, workload: Workload, environment: Environment) -> str | None:
        on_cpu = environment.device == "cpu"
        reason = first_reason(self.available(environment), conditions.needs_no_softcap(workload))
        if reason is not None or self.backend == "math":
            return reason
        if (large := conditions.needs_small_alibi(workload)) is not None:
            return large
        if on_cpu and self.backend == "auto":
            return None
        if on_cpu:
            return conditions.needs_equal_dims(workload)
        if self.backend == "auto":
            return _exact_bias(workload)
        checks = {"flash": _flash_on_gpu, "efficient": _efficient, "cudnn": _cudnn}
        return checks[self.backend](workload, environment)

    def computes_hidden(self, workload: Workload, environment: Environment) -> bool:
        way = route(workload)
        if way == "lower-right":
            return self.backend != "flash" or environment.device == "cpu"
        return self.backend == "math" or way not in ("none", "causal")

    def build(self, workload: Workload, config: Config) -> Call:
        return call_at_positive_scale(self._call, workload)

    def _call(self, workload: Workload) -> Call:
        import torch
        from torch.compiler import is_dynamo_compiling

        # Torch's own function; `redirect_sdpa` replaces only the name in torch.nn.functional.
        native = torch._C._nn.scaled_dot_product_attention  # pyright: ignore[reportAttributeAccessIssue]
        masks = once_per_device(lambda device: self._mask(workload, device))
        (pinned, followed), scale, grouped = self._pinned(), workload.softmax_scale, workload.group > 1
        # Dynamo does not follow torch's lower-right bias; the operator below it aligns masks bottom-right by itself.
        biased = self.backend == "flash" and route(workload) == "lower-right"
        may_be_cudnn = self.backend in ("auto", "cudnn")
        operator = _sdpa_operators.operator("flash", workload) if biased else None

        def call(q: Array, k: Array, v: Array) -> Array:
            pin = pinned
            if is_dynamo_compiling():
                q, k, v = dense_rows(q), dense_rows(k), dense_rows(v)
                if operator is not None and q.device.type != "cpu":
                    return operator(q, k, v)[0]
                pin = followed()
            mask = masks(q.device)
            # The bias compares with the function under that name; a redirection passes on the calls of implementations.
            on_bias = biased and q.device.type != "cpu"
            attend = torch.nn.functional.scaled_dot_product_attention if on_bias else native
            try:
                with pin:
                    out = attend(q, k, v, mask.attn_mask, 0.0, mask.is_causal, scale=scale, enable_gqa=grouped)
            except RuntimeError as error:
                if any(words in str(error) for words in NO_KERNEL):
                    if not all(map(has_dense_rows, (q, k, v))):
                        return call(dense_rows(q), dense_rows(k), dense_rows(v))
                    raise Unsupported(
                        f"{self.name} has no kernel for {workload.id} on {q.device.type}: {error}"
                    ) from error
                raise
            if out.requires_grad and out.is_cuda and may_be_cudnn and not is_dynamo_compiling():
                # A graph of cuDNN that was built for a dO of other strides would read this one wrongly.
                key = _sdpa_operators.graph_key(q, k, v)
                out.register_hook(lambda dout: _sdpa_operators.strided_as_at_first(key, dout))
            return out if mask.dead is None else out.masked_fill(mask.dead, 0.0)

        return call

    def supports_values(self, workload: Workload, form: MaskForm, environment: Environment) -> str | None:
        if self.backend == "flash":
            return _varlen(workload, form, environment)
        if self.backend != "auto":
            return super().supports_values(workload, form, environment)
        rounded = _exact_bias(replace(workload, mask=form.fixed)) if environment.device != "cpu" else None
        return first_reason(conditions.needs_no_softcap(workload), conditions.needs_small_bias(form), rounded)

    def build_values(self, workload: Workload, form: MaskForm, config: Config, with_lse: bool) -> ValuesCall | None:
        if self.backend == "flash":
            return varlen_call(workload, form, with_lse)
        return None if with_lse else _values_call(workload, form)

    def build_lse(self, workload: Workload, config: Config) -> Call | None:
        return _sdpa_operators.with_lse(self.backend, workload)

    def partial(self, workload: Workload, config: Config) -> Partial | None:
        return _sdpa_operators.partial(self.backend, workload)

    def decode(
        self, workload: Workload, environment: Environment, config: Config, page_size: int | None
    ) -> CacheCall | str:
        """Return a call of the CPU's flash kernel; those of a GPU would need the lengths on the host, or an array."""
        if self.backend == "flash" and environment.device == "cpu":
            return sliced_decode(workload)
        return "reads KV caches with its flash kernel on a CPU alone: it takes no lengths of sequences"

    def _mask(self, workload: Workload, device: Any) -> SdpaMask:
        on_cpu = device.type == "cpu"
        if self.backend == "flash" and not on_cpu and route(workload) == "lower-right":
            from torch.nn.attention.bias import causal_lower_right

            return SdpaMask(causal_lower_right(workload.q_len, workload.kv_len), False)
        return sdpa_mask(workload, device, zeroes_dead_rows=on_cpu or self.backend == "math")

    def _pinned(self) -> tuple[AbstractContextManager[Any], Callable[[], AbstractContextManager[Any]]]:
        """Return a context for every call, and a maker of torch's own context, which Dynamo follows but costs more."""
        if self.backend == "auto":
            return nullcontext(), nullcontext
        from torch.nn.attention import SDPBackend, sdpa_kernel

        facts = BACKENDS[self.backend]
        backend = getattr(SDPBackend, facts.enum)
        return Pinned(facts.flag), lambda: sdpa_kernel(backend)


def sdpa_with_tensors(q: Array, k: Array, v: Array, mask: MaskTensors, scale: float) -> Array:
    """Return attention in bhsd by torch's own choice; the mask must say which rows see no key.

    Those rows are computed with all keys and then set to 0: a fused kernel may give NaN there.
    """
    import torch

    scale, sign = positive_scale(scale)
    q = q if sign == 1.0 else q * sign
    seen: Any = mask.visible
    seen = seen if mask.dead is None else seen | mask.dead
    weights = seen if mask.weight is None else mask.weight.where(seen, float("-inf"))
    group = q.shape[1] // k.shape[1]
    if group > 1 and q.device.type != "cpu":  # no fused kernel of a GPU takes a mask together with grouped heads
        k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
        group = 1
    # Torch's own function; `redirect_sdpa` replaces only the name in torch.nn.functional.
    native = torch._C._nn.scaled_dot_product_attention  # pyright: ignore[reportAttributeAccessIssue]
    out = native(q, k, v, attn_mask=weights, scale=scale, enable_gqa=group > 1)
    return out if mask.dead is None else out.masked_fill(mask.dead, 0.0)


def _values_call(workload: Workload, form: MaskForm) -> ValuesCall:
    def attend(q: Array, k: Array, v: Array, mask: MaskTensors) -> tuple[Array, None]:
        if form.packed:  # these come as [batch, tokens, heads, dim]
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        mask = mask if mask.weight is None else MaskTensors(mask.visible, mask.weight.to(q.dtype), mask.dead)
        out = sdpa_with_tensors(q, k, v, mask, workload.softmax_scale)
        return out.transpose(1, 2) if form.packed else out, None

    return values_call(workload, form, False, attend, "bhsd")


def _exact_bias(workload: Workload) -> str | None:
    """Refuse a bias in 16 bits: fused GPU kernels take it in the inputs' dtype, which would round the weights."""
    if workload.visible_mask.weighted and workload.dtype in HALF:
        return f"takes an additive mask only in the inputs' dtype, and {workload.dtype} would round it"
    return None


def _flash_on_gpu(workload: Workload, environment: Environment) -> str | None:
    way, square = route(workload), workload.q_len == workload.kv_len
    mask = None
    if way in ("array", "bias"):
        mask = "takes only a causal mask or none on a GPU"
    elif way == "causal" and not square:
        mask = "aligns a rectangular causal mask bottom-right, not top-left"
    elif may_have_dead_rows(workload):
        mask = "is not known to give 0 for rows that see no key"
    return first_reason(
        conditions.needs_dtype(workload, *HALF),
        conditions.needs_head_dim(workload, 256, 8),
        conditions.needs_xpu_head_dim(workload, environment),
        conditions.needs_equal_dims(workload),
        conditions.needs_room_for_gradients(workload, environment),
        mask,
    )


def _varlen(workload: Workload, form: MaskForm, environment: Environment) -> str | None:
    """Return why torch's varlen function, which runs its flash kernel, cannot compute packed sequences."""
    return first_reason(
        conditions.needs_packed(form),
        conditions.needs_device(environment, "cuda"),
        conditions.needs_torch(environment, VARLEN_SINCE),
        conditions.needs_no_softcap(workload),
        conditions.needs_dtype(workload, *HALF),
        conditions.needs_head_dim(workload, 256, 8),
        conditions.needs_equal_dims(workload),
        conditions.needs_room_for_gradients(workload, environment),
        conditions.needs_positive_scale(workload),
        needs_packed_bounds(workload, form),
    )


def _efficient(workload: Workload, environment: Environment) -> str | None:
    return first_reason(
        conditions.needs_dtype(workload, "float32", *HALF),
        conditions.needs_bfloat16(workload, environment),
        "has no grouped heads" if workload.group > 1 else None,
        conditions.needs_head_dim(workload, 65536, 8 if workload.dtype in HALF else 4),
        _exact_bias(workload),
    )


def _cudnn(workload: Workload, environment: Environment) -> str | None:
    return first_reason(
        conditions.needs_dtype(workload, *HALF),
        conditions.needs_cudnn_head_dim(workload, environment),
        "takes 2 or more keys" if workload.kv_len == 1 else None,
        _exact_bias(workload),
    )


AUTO = Sdpa("auto")
MATH = Sdpa("math")
FLASH = Sdpa("flash")
EFFICIENT = Sdpa("efficient")
CUDNN = Sdpa("cudnn")
