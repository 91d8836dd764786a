"""torch.nn.functional.scaled_dot_product_attention: torch's own pick, and pinned to one backend.

Layout is bhsd. `is_causal` is aligned top-left, so a rectangular bottom-right mask goes as an array, or, where the
flash kernel of a GPU is asked for, as torch's lower-right bias. A pinned backend that cannot run raises; it never falls
back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

from attnbench.errors import Unsupported
from attnbench.frameworks.torch.plain import once_per_device
from attnbench.impls import conditions
from attnbench.impls._splitting import Split
from attnbench.impls.conditions import first_reason
from attnbench.impls.partial.torch_passes import call_at_positive_scale, dense_rows, has_dense_rows
from attnbench.impls.torch import _sdpa_operators
from attnbench.impls.torch._masks import SdpaMask, may_have_dead_rows, route, sdpa_mask
from attnbench.impls.torch._sdpa_pins import Pinned
from attnbench.spec import Array, Call, Config, Environment, Implementation, Partial, Workload

Backend = Literal["auto", "math", "flash", "efficient", "cudnn"]
MATH_OPERATOR = r"_scaled_dot_product_attention_math"
OPERATORS: dict[Backend, tuple[str, ...]] = {
    "auto": (),
    "math": (MATH_OPERATOR, r"(?i)softmax\w*backward"),
    "flash": (r"_scaled_dot_product_flash_attention", r"_scaled_dot_product_fused_attention_overrideable"),
    "efficient": (r"_scaled_dot_product_efficient_attention",),
    "cudnn": (r"_scaled_dot_product_cudnn_attention",),
}
ENUM_NAMES = {
    "math": "MATH",
    "flash": "FLASH_ATTENTION",
    "efficient": "EFFICIENT_ATTENTION",
    "cudnn": "CUDNN_ATTENTION",
}
FLAG_NAMES = {"math": "math", "flash": "flash", "efficient": "mem_efficient", "cudnn": "cudnn"}
SINCE: dict[Backend, tuple[int, int]] = {"flash": (8, 0), "efficient": (5, 0), "cudnn": (8, 0)}
"""Least compute capability for which torch 2.11 to 2.13 has kernels of a backend."""
DESCRIPTIONS: dict[Backend, str] = {
    "auto": "PyTorch's scaled_dot_product_attention with the backend that torch itself picks.",
    "math": "PyTorch's scaled_dot_product_attention pinned to plain operators; stores all scores.",
    "flash": "PyTorch's scaled_dot_product_attention pinned to torch's flash kernel (FlashAttention 2 on a GPU).",
    "efficient": "PyTorch's scaled_dot_product_attention pinned to its memory-efficient CUTLASS kernels.",
    "cudnn": "PyTorch's scaled_dot_product_attention pinned to cuDNN.",
}
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
        self.description = DESCRIPTIONS[backend]
        self.materialises_scores = backend == "math"
        self.expects = OPERATORS[backend]
        self.forbids = () if backend in ("auto", "math") else (MATH_OPERATOR,)
        self.switches = () if backend == "auto" else (FLAG_NAMES[backend],)
        self.not_deterministic = ("forward", "backward") if backend == "cudnn" else ()

    def available(self, environment: Environment) -> str | None:
        kinds = {"efficient": ("cuda", "rocm", "xpu"), "cudnn": ("cuda",), "flash": ("cpu", "cuda", "rocm", "xpu")}
        if self.backend not in kinds:
            return None
        return conditions.needs_device(environment, *kinds[self.backend]) or conditions.needs_at_least(
            environment, SINCE[self.backend]
        )

    def supports(self, workload: Workload, environment: Environment) -> str | None:
        on_cpu = environment.device == "cpu"
        reason = first_reason(self.available(environment), conditions.needs_no_softcap(workload))
        if reason is not None or self.backend == "math" or (on_cpu and self.backend == "auto"):
            return reason
        if on_cpu:
            return conditions.needs_equal_dims(workload)
        if self.backend == "auto":
            return _exact_bias(workload)
        checks = {"flash": _flash_on_gpu, "efficient": _efficient, "cudnn": _cudnn}
        return checks[self.backend](workload, environment)

    def build(self, workload: Workload, config: Config) -> Call:
        return call_at_positive_scale(self._call, workload)

    def _call(self, workload: Workload) -> Call:
        import torch
        from torch.compiler import is_dynamo_compiling

        # The function under torch.nn.functional's name, which `redirect_sdpa` replaces: this one is never another.
        torchs_own = torch._C._nn.scaled_dot_product_attention  # pyright: ignore[reportAttributeAccessIssue]
        masks = once_per_device(lambda device: self._mask(workload, device))
        (pinned, followed), scale, grouped = self._pinned(), workload.softmax_scale, workload.group > 1
        # Dynamo does not follow torch's lower-right bias; the operator under it aligns so by itself.
        biased = self.backend == "flash" and route(workload) == "lower-right"
        operator = _sdpa_operators.operator("flash", workload) if biased else None

        def call(q: Array, k: Array, v: Array) -> Array:
            pin = pinned
            if is_dynamo_compiling():
                q, k, v = dense_rows(q), dense_rows(k), dense_rows(v)
                if operator is not None and q.device.type != "cpu":
                    return operator(q, k, v)[0]
                pin = followed()
            mask = masks(q.device)
            # The bias looks for the name as it is now; a redirection leaves alone what an implementation calls.
            on_bias = biased and q.device.type != "cpu"
            attend = torch.nn.functional.scaled_dot_product_attention if on_bias else torchs_own
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
            return out if mask.dead is None else out.masked_fill(mask.dead, 0.0)

        return call

    def build_lse(self, workload: Workload, config: Config) -> Call | None:
        return _sdpa_operators.with_lse(self.backend, workload)

    def partial(self, workload: Workload, config: Config) -> Partial | None:
        return _sdpa_operators.partial(self.backend, workload)

    def _mask(self, workload: Workload, device: Any) -> SdpaMask:
        on_cpu = device.type == "cpu"
        if self.backend == "flash" and not on_cpu and route(workload) == "lower-right":
            from torch.nn.attention.bias import causal_lower_right

            return SdpaMask(causal_lower_right(workload.q_len, workload.kv_len), False)
        return sdpa_mask(workload, device, zeroes_dead_rows=on_cpu or self.backend == "math")

    def _pinned(self) -> tuple[AbstractContextManager[Any], Callable[[], AbstractContextManager[Any]]]:
        """Return a context for every call, and a function that makes torch's own context, which Dynamo follows but
        costs more."""
        if self.backend == "auto":
            return nullcontext(), nullcontext
        from torch.nn.attention import SDPBackend, sdpa_kernel

        backend = getattr(SDPBackend, ENUM_NAMES[self.backend])
        return Pinned(FLAG_NAMES[self.backend]), lambda: sdpa_kernel(backend)


def _exact_bias(workload: Workload) -> str | None:
    """Refuse a bias in 16 bits: fused GPU kernels take it in the inputs' dtype, which would round the weights."""
    if workload.visible_mask.weighted and workload.dtype in HALF:
        return f"takes an additive mask only in the inputs' dtype, and {workload.dtype} would round it"
    return None


def _flash_on_gpu(workload: Workload, environment: Environment) -> str | None:
    way, square = route(workload), workload.q_len == workload.kv_len
    mask = None
    if way in ("array", "bias"):
        mask = "takes no mask but causal on a GPU"
    elif way == "causal" and not square:
        mask = "aligns a rectangular causal mask bottom-right, not top-left"
    elif may_have_dead_rows(workload):
        mask = "is not known to give 0 for rows that see no key"
    return first_reason(
        conditions.needs_dtype(workload, *HALF),
        conditions.needs_head_dim(workload, 256, 8),
        conditions.needs_equal_dims(workload),
        conditions.needs_room_for_gradients(workload, environment),
        mask,
    )


def _efficient(workload: Workload, environment: Environment) -> str | None:
    grouped = "has no grouped heads" if workload.group > 1 else None
    step = 8 if workload.dtype in HALF else 4
    return first_reason(
        conditions.needs_dtype(workload, "float32", *HALF),
        conditions.needs_bfloat16(workload, environment),
        grouped,
        conditions.needs_head_dim(workload, 65536, step),
        _exact_bias(workload),
    )


def _cudnn(workload: Workload, environment: Environment) -> str | None:
    one_key = "takes 2 or more keys" if workload.kv_len == 1 else None
    return first_reason(
        conditions.needs_dtype(workload, *HALF),
        conditions.needs_cudnn_head_dim(workload, environment),
        one_key,
        _exact_bias(workload),
    )


AUTO = Sdpa("auto")
MATH = Sdpa("math")
FLASH = Sdpa("flash")
EFFICIENT = Sdpa("efficient")
CUDNN = Sdpa("cudnn")


class TorchSplit(Split):
    """A mask split into calls of a backend of scaled_dot_product_attention without a mask array.

    block_causal and documents masks become calls without a mask. The causal part of a prefix mask is torch's
    lower-right bias, which only the flash kernel of a GPU takes without an array; on a CPU, and with cuDNN, such a
    piece is refused.
    """

    def __init__(self, inner: Sdpa, never_on: tuple[str, ...] = ()) -> None:
        super().__init__(inner)
        self.description = f"Masks of a few blocks as calls of {inner.name} without a mask array."
        self.untested = (*never_on, *inner.untested)
        self._lower_right = inner.backend == "flash"

    def needs_array(self, part: Workload, environment: Environment) -> bool:
        way = route(part)
        if way == "lower-right":
            return not self._lower_right or environment.device == "cpu"
        return way not in ("none", "causal")

    def join(self, parts: Sequence[Array], axis: int) -> Array:
        import torch

        return torch.cat(list(parts), dim=axis)


FLASH_SPLIT = TorchSplit(FLASH, never_on=("cuda",))
CUDNN_SPLIT = TorchSplit(CUDNN)
