"""Tri Dao's flash-attention in three generations: `flash_attn` 2, FA3 and FA4 (`flash_attn.cute`).

All take layout bshd, group heads contiguously, align causal and window masks bottom-right, and return 0 for a row that
sees no key. Traps: FA4 spells "no bound" None, the others -1 (there (-1, 0) means full, not causal); FA2 writes an LSE
of +inf for a row that sees no key; FA3 returns a tensor or a tuple by version, FA4 always a tuple; FA4 makes
`flash_attn` a namespace package, which other libraries take for FA2. Each runs in a process of its own, and
`available` looks for modules, not for distribution names.

Two packages offer FA3: the full build of flash-attention's hopper/ folder (`flash_attn_interface`) and the forward-only
wheel `fa3-fwd` (`fa3_fwd_interface`). On the package index the first name is an unrelated stub of a few bytes.
"""

from __future__ import annotations

import inspect
import sys
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from attnbench.errors import Unsupported
from attnbench.impls import WithLse, conditions
from attnbench.impls.conditions import find_module, first_reason
from attnbench.impls.partial.torch_passes import dense_rows, for_backward, with_dense_rows
from attnbench.impls.torch import _masks
from attnbench.masks.device import MaskForm
from attnbench.spec import Array, CacheCall, Call, Config, Environment, Partial, Passes, ValuesCall, Workload

PackedBackward = Callable[..., tuple[Array, Array, Array]]
"""Function (dout, q, k, v, out, lse, keywords of packed sequences) -> (dq, dk, dv), of arrays [tokens, heads, dim]."""


def fa3_module() -> str | None:
    """Return the FA3 interface that is really installed; a file without `flash_attn_func` is the index's stub."""
    for name in ("flash_attn_interface", "fa3_fwd_interface"):
        spec = find_module(name)
        source = Path((spec and spec.origin) or "")
        if source.is_file() and "def flash_attn_func" in source.read_text(errors="replace"):
            return name
    return None


def fa3_missing() -> str:
    """Return why there is no FA3, and what installs it."""
    if find_module("flash_attn_interface") is not None:
        return "flash_attn_interface here is a stub, not FA3: pip uninstall flash_attn_interface; pip install fa3-fwd"
    return "neither flash_attn_interface (FA3's hopper/ folder) nor fa3_fwd_interface is installed: pip install fa3-fwd"


def fa3_interface() -> Any:
    """Return the interface module; the forward-only wheel asks for its build flags under the full build's name."""
    name = fa3_module()
    if name is None:
        raise Unsupported(f"torch.fa3: {fa3_missing()}.")
    if name == "fa3_fwd_interface":
        sys.modules.setdefault("flash_attn_config", import_module("fa3_fwd_config"))
    return import_module(name)


def fa3_left_out() -> frozenset[str]:
    """Return what the build left out ("BACKWARD", "LOCAL", "FP16", "HDIM96", ...), from its configuration module."""
    forward_only = fa3_module() == "fa3_fwd_interface"
    module = "fa3_fwd_config" if forward_only else "flash_attn_config"
    if find_module(module) is None:
        return frozenset({"BACKWARD", "LOCAL", "FP16"}) if forward_only else frozenset()
    flags: Mapping[str, bool] = import_module(module).CONFIG["build_flags"]
    return frozenset(flag.partition("DISABLE_")[2] for flag, off in flags.items() if off and "DISABLE_" in flag)


def _fa3_dims(workload: Workload, off: frozenset[str]) -> str | None:
    """Return why the build has no kernel for these head sizes; None if it has one."""
    dim, value_dim = workload.head_dim, workload.value_dim
    if dim != value_dim:
        wide = dim <= 64 and value_dim <= 512 and "HDIMDIFF64" not in off
        latent = 128 < dim <= 192 and 96 < value_dim <= 128 and "HDIMDIFF192" not in off
        if workload.needs_gradients or not (wide or latent) or dim % 8 or value_dim % 8:
            return f"has no kernel for head_dim {dim} with v_head_dim {value_dim}"
        return None
    sizes = [size for size in (64, 96, 128, 192, 256) if f"HDIM{size}" not in off]
    return conditions.needs_head_dim(workload, max(sizes, default=0), multiple_of=8)


def parameters(function: Any) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a function, also if it is wrapped as a torch custom operator, which hides them."""
    return inspect.signature(getattr(function, "_init_fn", function)).parameters


class Flash(WithLse):
    """Base of the three generations: the mask as two bounds, the call, and the LSE beside it."""

    framework = "torch"
    any_kv_len = True
    not_deterministic = ("backward",)
    unbounded: int | None = -1
    """Value that means "no bound" for a window side."""
    lse_flag = "return_attn_probs"
    table_name = "block_table"
    """Name of the argument for the pages of a KV cache."""

    @abstractmethod
    def library(self) -> Any:
        """Import the library's module of `flash_attn_func` and `flash_attn_varlen_func`."""

    def function(self) -> Callable[..., Any]:
        """Import the library and return its `flash_attn_func`."""
        return self.library().flash_attn_func

    def supports(self, workload: Workload, environment: Environment) -> str | None:
        return first_reason(
            conditions.needs_dtype(workload, "float16", "bfloat16"),
            _masks.needs_bounds(workload),
            _masks.needs_bottom_right(workload),
            conditions.needs_positive_scale(workload),
        )

    def window(self, workload: Workload) -> tuple[int | None, int | None]:
        """Return the library's `window_size`; a causal mask has a flag of its own and leaves both sides open."""
        sides = _masks.bounds(workload) if _masks.is_windowed(workload) else (None, None)
        left, right = (self.unbounded if side is None else side for side in sides)
        return left, right

    def options(self, workload: Workload, config: Config) -> dict[str, Any]:
        """Return keywords of the public function: some only if needed, since older versions lack them."""
        options: dict[str, Any] = {"softmax_scale": workload.softmax_scale, "causal": _masks.is_causal(workload)}
        if _masks.is_windowed(workload):
            options["window_size"] = self.window(workload)
        if workload.softcap is not None:
            options["softcap"] = workload.softcap
        return options | dict(config)

    def private_options(self, workload: Workload) -> dict[str, Any]:
        """Return all keywords of the private functions, with the window as two sides."""
        left, right = self.window(workload)
        return {
            "softmax_scale": workload.softmax_scale,
            "causal": _masks.is_causal(workload),
            "softcap": workload.softcap or 0.0,
            "window_size_left": left,
            "window_size_right": right,
        }

    def call(self, workload: Workload, config: Config, with_lse: bool) -> Call:
        function, options, natural = self.function(), self.options(workload, config), self.natural(workload)
        if with_lse and self.lse_flag in parameters(function):
            options[self.lse_flag] = True

        def run(q: Array, k: Array, v: Array) -> Any:
            result = function(q, k, v, **options)
            return (result[0], natural(self._lse_of(result))) if with_lse else _output(result)

        return run

    def _lse_of(self, result: Any) -> Array:
        if not isinstance(result, tuple | list) or result[1] is None:
            raise Unsupported(f"{self.name}: this version returns no LSE; install a newer one.")
        return result[1]

    def supports_values(self, workload: Workload, form: MaskForm, environment: Environment) -> str | None:
        return first_reason(
            conditions.needs_packed(form),
            _masks.needs_packed_bounds(workload, form),
            self.supports(workload, environment),
        )

    def build_values(self, workload: Workload, form: MaskForm, config: Config, with_lse: bool) -> ValuesCall | None:
        function, options = self.library().flash_attn_varlen_func, self.options(workload, config)
        if with_lse and self.lse_flag in parameters(function):
            options[self.lse_flag] = True

        def call(q: Array, k: Array, v: Array, *values: Any) -> Any:
            result = function(dense_rows(q), dense_rows(k), dense_rows(v), **self.packed_words(values), **options)
            if not with_lse:
                return _output(result)
            return result[0], _masks.natural_lse(self._lse_of(result))

        return call

    def packed_words(self, values: tuple[Any, ...]) -> dict[str, Any]:
        """Return the keywords that all generations have for packed sequences."""
        *offsets, q_longest, k_longest = values
        return {
            "cu_seqlens_q": offsets[0].contiguous(), "cu_seqlens_k": offsets[-1].contiguous(),
            "max_seqlen_q": q_longest, "max_seqlen_k": k_longest,
        }  # fmt: skip

    def partial_values(self, workload: Workload, form: MaskForm, config: Config) -> Partial | None:
        """Return both passes of packed sequences; None if the library does not offer its backward pass by itself."""
        import torch

        backward, call = self.packed_backward(workload), self.build_values(workload, form, config, True)
        if backward is None or call is None:
            return None

        def gradients(
            q: Array, k: Array, v: Array, out: Array, lse: Array, dout: Array, *values: Any
        ) -> tuple[Array, Array, Array]:
            arrays = [dense_rows(x) for x in (q, k, v, out)]
            return backward(dense_rows(dout), *arrays, lse, self.packed_words(values))

        return torch.no_grad()(call), gradients

    def packed_backward(self, workload: Workload) -> PackedBackward | None:
        """Return the library's backward pass of packed sequences, or None."""
        return None

    def passes(self, workload: Workload, config: Config) -> Passes:
        """Return both passes, or the forward pass alone for forward-only builds."""
        forward = self._forward(workload, config)
        return self.partial(workload, config) or (lambda *arrays: forward(*map(dense_rows, arrays)), None)

    def cache_function(self) -> Callable[..., Any] | str:
        """Return the library's `flash_attn_with_kvcache`, or why there is none."""
        return "offers no function over KV caches in this version"

    def needs_page_size(self, page_size: int) -> str | None:
        """Refuse pages that the library does not take."""
        return None

    def decode(
        self, workload: Workload, environment: Environment, config: Config, page_size: int | None
    ) -> CacheCall | str:
        """Return a call of the library's function over caches, which splits the keys by a heuristic of its own."""
        reason = self.needs_page_size(page_size) if page_size is not None else None
        function = self.cache_function() if reason is None else reason
        if isinstance(function, str):
            return function
        options = {"num_splits": 0} | self.options(workload, config)

        def call(q: Array, k: Array, v: Array, lengths: Array, table: Array | None) -> tuple[Array, Array]:
            place = {} if table is None else {self.table_name: table}
            out, lse = function(q, k, v, cache_seqlens=lengths, return_softmax_lse=True, **place, **options)[:2]
            return out, _masks.natural_lse(lse)

        return call

    def natural(self, workload: Workload) -> Callable[[Array], Array]:
        """Return a function that corrects the library's LSE; it costs nothing if every row sees a key."""
        return _masks.natural_lse if _masks.may_have_dead_rows(workload) else lambda lse: lse

    def _forward(self, workload: Workload, config: Config) -> Call:
        """Return build_lse without autograd, the forward pass of `partial`."""
        import torch

        return torch.no_grad()(self.call(workload, config, with_lse=True))


def _output(result: Any) -> Array:
    """Return the output, which a library returns alone or first in a tuple."""
    return result[0] if isinstance(result, tuple | list) else result


class FlashAttention2(Flash):
    """FlashAttention 2, `flash_attn` 2.x, for Ampere and newer, 16 bits."""

    name = "torch.flash-attn"
    process = "flash-attn"
    expects = (r"flash",)
    untested = ("cuda", "rocm")

    def available(self, environment: Environment) -> str | None:
        # FA4 alone also answers to the name flash_attn: only this module tells them apart.
        return first_reason(
            conditions.needs_device(environment, "cuda", "rocm"),
            conditions.needs_package("flash_attn.flash_attn_interface", "pip install flash-attn --no-build-isolation"),
            conditions.needs_capability(environment, (8, 0)) if environment.device == "cuda" else None,
        )

    def supports(self, workload: Workload, environment: Environment) -> str | None:
        return first_reason(
            super().supports(workload, environment),
            conditions.needs_equal_dims(workload),
            conditions.needs_head_dim(workload, 256),
            conditions.needs_room_for_gradients(workload, environment),
        )

    def library(self) -> Any:
        return import_module("flash_attn.flash_attn_interface")

    def packed_backward(self, workload: Workload) -> PackedBackward | None:
        """Return the private function; None before 2.7, and if the public function would pad head_dim."""
        private = getattr(self.library(), "_flash_attn_varlen_backward", None)
        if private is None or workload.head_dim % 8 or "window_size_left" not in parameters(private):
            return None
        options = self.private_options(workload)
        fixed = {"dropout_p": 0.0, "alibi_slopes": None, "deterministic": False}

        def backward(
            dout: Array, q: Array, k: Array, v: Array, out: Array, lse: Array, packed: dict[str, Any]
        ) -> tuple[Array, Array, Array]:
            import torch

            grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
            private(dout, q, k, v, out, for_backward(lse), *grads, **packed, **options, **fixed)
            return grads

        return backward

    def cache_function(self) -> Callable[..., Any] | str:
        interface = import_module("flash_attn.flash_attn_interface")
        return getattr(interface, "flash_attn_with_kvcache", None) or super().cache_function()

    def needs_page_size(self, page_size: int) -> str | None:
        return f"takes pages of a multiple of 256 tokens, not {page_size}" if page_size % 256 else None

    def partial(self, workload: Workload, config: Config) -> Partial | None:
        """Return the private functions; None before 2.7, and if the public function would pad head_dim."""
        interface = import_module("flash_attn.flash_attn_interface")
        private = getattr(interface, "_flash_attn_backward", None)
        if private is None or workload.head_dim % 8 or "window_size_left" not in parameters(private):
            return None
        options = self.private_options(workload)

        def backward(q: Array, k: Array, v: Array, out: Array, lse: Array, dout: Array) -> tuple[Array, Array, Array]:
            import torch

            grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
            # Its own forward hands +inf to the backward for rows that see no key: exp(s - inf) = 0.
            fixed = {"dropout_p": 0.0, "alibi_slopes": None, "deterministic": False}
            private(dout, q, k, v, out, for_backward(lse), *grads, **options, **fixed)
            return grads

        return with_dense_rows((self._forward(workload, config), backward))


class FlashAttention3(Flash):
    """FlashAttention 3 for Hopper: the full build if installed, else the forward-only `fa3-fwd` wheel."""

    name = "torch.fa3"
    process = "fa3"
    expects = (r"flash|FlashAttn",)
    tunables = {"num_splits": 1}
    table_name = "page_table"

    def available(self, environment: Environment) -> str | None:
        newer = environment.capability is not None and environment.capability[0] > 9
        return first_reason(
            conditions.needs_device(environment, "cuda"),
            None if fa3_module() else fa3_missing(),
            conditions.needs_capability(environment, (9, 0)),
            "is built for Hopper (compute capability 9.x) only: use torch.fa4" if newer else None,
        )

    def supports(self, workload: Workload, environment: Environment) -> str | None:
        off = fa3_left_out()
        without = "this build has no"
        return first_reason(
            super().supports(workload, environment),
            f"{without} float16 kernels" if "FP16" in off and workload.dtype == "float16" else None,
            f"{without} window" if "LOCAL" in off and _masks.is_windowed(workload) else None,
            f"{without} softcap" if "SOFTCAP" in off and workload.softcap is not None else None,
            f"{without} backward pass" if "BACKWARD" in off and workload.needs_gradients else None,
            _fa3_dims(workload, off),
        )

    def configs(self, workload: Workload) -> Sequence[Config]:
        """Return settings for splitting the keys (0: the library's heuristic), which helps if there are few queries."""
        return ({}, {"num_splits": 0}) if workload.q_len <= 64 and not workload.needs_gradients else ({},)

    def library(self) -> Any:
        return fa3_interface()

    def packed_backward(self, workload: Workload) -> PackedBackward | None:
        """Return the private function; None for forward-only builds."""
        private = None if "BACKWARD" in fa3_left_out() else getattr(fa3_interface(), "_flash_attn_backward", None)
        if private is None or "window_size_left" not in parameters(private):
            return None
        options = self._backward_options(workload, private)

        def backward(
            dout: Array, q: Array, k: Array, v: Array, out: Array, lse: Array, packed: dict[str, Any]
        ) -> tuple[Array, Array, Array]:
            import torch

            grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
            places = {"dq": grads[0], "dk": grads[1], "dv": grads[2]}
            private(dout, q, k, v, out, lse, **places, **packed, **options)
            return grads

        return backward

    def _backward_options(self, workload: Workload, private: Any) -> dict[str, Any]:
        options = self.private_options(workload)
        if "is_causal" in parameters(private):
            options["is_causal"] = options.pop("causal")
        return options

    def cache_function(self) -> Callable[..., Any] | str:
        if "VARLEN" in fa3_left_out():
            return "takes no lengths of sequences in this build"
        return getattr(fa3_interface(), "flash_attn_with_kvcache", None) or super().cache_function()

    def needs_page_size(self, page_size: int) -> str | None:
        return "reads no pages in this build: use a ContiguousCache" if "PAGEDKV" in fa3_left_out() else None

    def _forward(self, workload: Workload, config: Config) -> Call:
        """Return a forward pass whose output has the strides of q: other libraries' backward may be slower on mixed
        layouts.

        Calls the function below the registered operator, which may not return its own argument.
        """
        import torch

        private = getattr(fa3_interface(), "_flash_attn_forward", None)
        function = getattr(private, "_init_fn", None)
        if function is None or "out_" not in parameters(private) or workload.value_dim != workload.head_dim:
            return super()._forward(workload, config)
        options, natural = self.private_options(workload) | dict(config), self.natural(workload)

        @torch.no_grad()
        def forward(q: Array, k: Array, v: Array) -> tuple[Array, Array]:
            out, lse = function(q, k, v, out_=torch.empty_like(q), **options)[:2]
            return out, natural(lse)

        return forward

    def partial(self, workload: Workload, config: Config) -> Partial | None:
        """Return the private functions; None for forward-only builds."""
        if "BACKWARD" in fa3_left_out():
            return None
        private = getattr(fa3_interface(), "_flash_attn_backward", None)
        if private is None or "window_size_left" not in parameters(private):
            return None
        options = self._backward_options(workload, private)

        def backward(q: Array, k: Array, v: Array, out: Array, lse: Array, dout: Array) -> tuple[Array, Array, Array]:
            import torch

            grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
            private(dout, q, k, v, out, lse, dq=grads[0], dk=grads[1], dv=grads[2], **options)
            return grads

        return with_dense_rows((self._forward(workload, config), backward))


FA4_KNOWS = "has kernels for compute capability 9.x to 11.x"


class FlashAttention4(Flash):
    """FlashAttention 4, `flash_attn.cute`, for Hopper and Blackwell; compiled by the CuTe DSL at the first call of a
    shape."""

    name = "torch.fa4"
    process = "fa4"
    expects = (r"flash|Flash|kernel_cutlass",)
    unbounded = None
    lse_flag = "return_lse"

    def available(self, environment: Environment) -> str | None:
        chip = environment.capability
        return first_reason(
            conditions.needs_device(environment, "cuda"),
            conditions.needs_package("flash_attn.cute", "pip install flash-attn-4==4.0.0b12 nvidia-cutlass-dsl==4.4.2"),
            conditions.needs_package("cutlass", "pip install nvidia-cutlass-dsl==4.4.2"),
            conditions.needs_capability(environment, (9, 0)),
            None if chip is None or 9 <= chip[0] <= 11 else f"{FA4_KNOWS}, this is {chip[0]}.{chip[1]}",
        )

    def supports(self, workload: Workload, environment: Environment) -> str | None:
        return first_reason(super().supports(workload, environment), _fa4_dims(workload, environment))

    def library(self) -> Any:
        return import_module("flash_attn.cute")

    def packed_backward(self, workload: Workload) -> PackedBackward | None:
        """Return the private function; None if this version's has no packed sequences."""
        private = getattr(import_module("flash_attn.cute.interface"), "_flash_attn_bwd", None)
        if private is None or "max_seqlen_q" not in parameters(private):
            return None
        options = self.private_options(workload)

        def backward(
            dout: Array, q: Array, k: Array, v: Array, out: Array, lse: Array, packed: dict[str, Any]
        ) -> tuple[Array, Array, Array]:
            dq, dk, dv = private(q, k, v, out, dout, lse, **packed, **options)[:3]
            return dq, dk, dv

        return backward

    def decode(
        self, workload: Workload, environment: Environment, config: Config, page_size: int | None
    ) -> CacheCall | str:
        """Return a call of the function for sequences of unequal lengths; on Hopper it does not split the keys."""
        function = getattr(import_module("flash_attn.cute"), "flash_attn_varlen_func", None)
        if function is None or "seqused_k" not in parameters(function):
            return self.cache_function()
        hopper = environment.capability is not None and environment.capability[0] == 9
        options = self.options(workload, config) | {"num_splits": 1 if hopper else 0, self.lse_flag: True}

        def call(q: Array, k: Array, v: Array, lengths: Array, table: Array | None) -> tuple[Array, Array]:
            out, lse = function(q, k, v, seqused_k=lengths, page_table=table, **options)[:2]
            return out, _masks.natural_lse(lse)

        return call

    def partial(self, workload: Workload, config: Config) -> Partial | None:
        """Return the private functions; 4.0.0b12's forward returns 2 values, later ones more, out and LSE first."""
        import torch

        interface = import_module("flash_attn.cute.interface")
        forward = getattr(interface, "_flash_attn_fwd", None)
        backward = getattr(interface, "_flash_attn_bwd", None)
        if forward is None or backward is None or "return_lse" not in parameters(forward):
            return None
        options, natural = self.private_options(workload), self.natural(workload)
        as_queries = "out" in parameters(forward) and workload.value_dim == workload.head_dim

        def with_lse(q: Array, k: Array, v: Array) -> tuple[Array, Array]:
            place = {"out": torch.empty_like(q)} if as_queries else {}  # in memory as q lies, see FlashAttention3
            out, lse = forward(q, k, v, return_lse=True, **options, **config, **place)[:2]
            return out, natural(lse)

        def gradients(q: Array, k: Array, v: Array, out: Array, lse: Array, dout: Array) -> tuple[Array, Array, Array]:
            dq, dk, dv = backward(q, k, v, out, dout, lse, **options)[:3]
            return dq, dk, dv

        return with_dense_rows((with_lse, gradients))


def _fa4_dims(workload: Workload, environment: Environment) -> str | None:
    """Refuse head sizes by 4.0.0b12's rule: 8 to 256 on Hopper; on Blackwell 8 to 128, 192/128 or 256."""
    dims = workload.head_dim, workload.value_dim
    reason = conditions.needs_head_dim(workload, 256, multiple_of=8)
    if reason is not None or dims == (192, 128):
        return reason
    blackwell = environment.capability is not None and environment.capability[0] in (10, 11)
    if blackwell and max(dims) > 128 and dims != (256, 256):
        return f"takes head_dim up to 128, 192/128 or 256 on Blackwell, not {dims[0]}/{dims[1]}"
    return conditions.needs_equal_dims(workload)


FA2 = FlashAttention2()
FA3 = FlashAttention3()
FA4 = FlashAttention4()
