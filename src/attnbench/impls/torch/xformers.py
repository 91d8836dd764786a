"""`xformers.ops.memory_efficient_attention`: xFormers' own choice among FA2, cutlass and (if built) FA3 kernels.

Layout bshd. Heads are not broadcast: grouped heads go in as five axes with K and V expanded, forward only. The causal
class without "FromBottomRight" is aligned top-left. The LSE may be padded beyond q_len. Importing it fails if
`flash_attn` is installed without FA2 (FA4 installs such a package): so it runs in a process of its own, and `available`
looks for that case.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from attnbench.impls import WithLse, conditions
from attnbench.impls.conditions import find_module, first_reason
from attnbench.impls.partial.torch_passes import with_dense_rows
from attnbench.impls.torch import _masks
from attnbench.spec import Array, Call, Config, Environment, Partial, Workload


class Xformers(WithLse):
    """xFormers' memory_efficient_attention: its own choice among flash-attention and CUTLASS kernels."""

    name = "torch.xformers"
    framework = "torch"
    not_deterministic = ("backward",)
    process = "xformers"
    expects = (r"flash|fmha|cutlass|attention",)
    untested = ("cuda", "rocm")

    def available(self, environment: Environment) -> str | None:
        # xFormers takes any `flash_attn` for FA2 and imports its interface at once.
        only_fa4 = find_module("flash_attn") and not find_module("flash_attn.flash_attn_interface")
        return first_reason(
            conditions.needs_device(environment, "cuda", "rocm"),
            conditions.needs_package("xformers.ops", "pip install xformers"),
            "cannot be imported beside FA4's flash_attn package: uninstall flash-attn-4" if only_fa4 else None,
        )

    def supports(self, workload: Workload, environment: Environment) -> str | None:
        windowed = _masks.is_windowed(workload)
        half = workload.dtype in ("float16", "bfloat16")
        return first_reason(
            # Only the flash kernels know windows, and they are 16-bit and take one head size.
            conditions.needs_dtype(workload, "float16", "bfloat16", *(() if windowed else ("float32",))),
            conditions.needs_bfloat16(workload, environment),
            conditions.needs_at_least(environment, (8, 0)) if windowed else None,
            conditions.needs_room_for_gradients(workload, environment) if windowed else None,
            _masks.needs_bounds(workload),
            _masks.needs_bottom_right(workload) if windowed else None,
            _masks.needs_visible_rows(workload),
            conditions.needs_no_softcap(workload),
            conditions.needs_positive_scale(workload),
            conditions.needs_equal_dims(workload) if windowed else None,
            conditions.needs_head_dim(workload, 256 if windowed else 65536, multiple_of=8 if half else 4),
            "has no backward pass for grouped heads" if workload.needs_gradients and workload.group > 1 else None,
        )

    def call(self, workload: Workload, config: Config, with_lse: bool) -> Call:
        ops: Any = import_module("xformers.ops")
        function = ops.memory_efficient_attention_forward_requires_grad if with_lse else ops.memory_efficient_attention
        bias, scale = _bias(workload), workload.softmax_scale
        shape = workload.batch, workload.q_len, workload.heads, workload.value_dim

        def run(q: Array, k: Array, v: Array) -> Any:
            if workload.group > 1:  # [b, s, kv_heads, group, d], with K and V expanded, not copied
                k, v = (array.unsqueeze(3).expand(-1, -1, -1, workload.group, -1) for array in (k, v))
                q = q.unflatten(2, (workload.kv_heads, workload.group))
            result = function(q, k, v, attn_bias=bias, scale=scale)
            if not with_lse:
                return result.reshape(shape)
            out, lse = result
            lse = lse.reshape(workload.batch, workload.heads, -1)[..., : workload.q_len]
            return out.reshape(shape), _masks.natural_lse(lse).float()

        return run

    def partial(self, workload: Workload, config: Config) -> Partial | None:
        """Return the library's two functions without autograd; its backward pads the LSE and takes no grouped heads."""
        if workload.group > 1:
            return None
        import torch

        private = import_module("xformers.ops").memory_efficient_attention_backward
        forward = self.call(workload, config, with_lse=True)
        bias, scale = _bias(workload), workload.softmax_scale

        def backward(q: Array, k: Array, v: Array, out: Array, lse: Array, dout: Array) -> tuple[Array, Array, Array]:
            return private(dout, out, lse, q, k, v, bias, 0.0, scale)

        return with_dense_rows((torch.no_grad()(forward), torch.no_grad()(backward)))


def _bias(workload: Workload) -> Any:
    """Return the bias class with the mask's alignment; None for a full mask."""
    left, right = _masks.bounds(workload)
    if (left, right) == (None, None):
        return None
    classes = import_module("xformers.ops.fmha.attn_bias")
    if _masks.is_causal(workload):
        top_left = _masks.is_top_left(workload)
        return classes.LowerTriangularMask() if top_left else classes.LowerTriangularFromBottomRightMask()
    far = workload.q_len + workload.kv_len
    left, right = (far if side is None else side for side in (left, right))
    return classes.LocalAttentionFromBottomRightMask(window_left=left, window_right=right)


XFORMERS = Xformers()
