"""Hugging Face Transformers' own attention functions, called as a Llama layer calls them.

They take bhsd and return bshd. A mask that is not passed is silently lost there, so it is always passed. The eager one
hides pairs by the smallest finite number: a row that sees no key becomes the mean of V, so such masks are refused.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from attnbench.frameworks.torch.plain import mask_tensors, once_per_device
from attnbench.impls.conditions import first_reason, needs_dtype, needs_no_softcap, needs_package, needs_small_alibi
from attnbench.impls.partial.torch_passes import call_at_positive_scale
from attnbench.impls.torch._masks import SdpaMask, additive, may_have_dead_rows, sdpa_mask
from attnbench.spec import Array, Call, Config, Environment, Implementation, Workload

INSTALL = "pip install 'attnbench[hf]'"


class _Transformers(Implementation):
    framework = "torch"
    layout = "bhsd"
    untested = ("rocm", "xpu", "mps")

    def available(self, environment: Environment) -> str | None:
        return needs_package("transformers", INSTALL)


class HfEager(_Transformers):
    """Hugging Face Transformers' eager attention, as its Llama layers call it; stores all scores."""

    name = "torch.hf-eager"
    materialises_scores = True

    def supports(self, workload: Workload, environment: Environment) -> str | None:
        float64 = "computes the softmax in float32 even for float64" if workload.dtype == "float64" else None
        dead = "gives the mean of V for rows that see no key" if may_have_dead_rows(workload) else None
        overflow = "overflows float16 logits on large inputs" if workload.dtype == "float16" else None
        return first_reason(needs_no_softcap(workload), float64, overflow, dead)

    def build(self, workload: Workload, config: Config) -> Call:
        import torch
        from transformers.models.llama.modeling_llama import eager_attention_forward

        dtype = getattr(torch, workload.dtype)

        def make(device: Any) -> Array:
            mask = sdpa_mask(workload, device, zeroes_dead_rows=True)
            if mask.is_causal:
                square = torch.ones(workload.q_len, workload.kv_len, dtype=torch.bool, device=device)
                mask = SdpaMask(square.tril()[None, None], False)
            return additive(mask.attn_mask, dtype, hidden=torch.finfo(dtype).min)

        masks, layer, scale = once_per_device(make), _layer(workload), workload.softmax_scale
        return lambda q, k, v: eager_attention_forward(layer, q, k, v, masks(q.device), scale)[0].transpose(1, 2)


class HfSdpa(_Transformers):
    """Hugging Face Transformers' attention through scaled_dot_product_attention."""

    name = "torch.hf-sdpa"

    def supports(self, workload: Workload, environment: Environment) -> str | None:
        if environment.device == "cpu":
            return needs_no_softcap(workload) or needs_small_alibi(workload)
        return first_reason(
            needs_no_softcap(workload),
            needs_small_alibi(workload),
            needs_dtype(workload, "float32", "float64") if workload.visible_mask.weighted else None,
            "is not known to give 0 for rows that see no key" if may_have_dead_rows(workload) else None,
        )

    def build(self, workload: Workload, config: Config) -> Call:
        return call_at_positive_scale(self._call, workload)

    def _call(self, workload: Workload) -> Call:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        def make(device: Any) -> SdpaMask:
            mask = sdpa_mask(workload, device, zeroes_dead_rows=True)
            if mask.is_causal and workload.q_len == 1:  # the function takes one query to see every key
                return SdpaMask(mask_tensors(workload, device).visible, False)
            return mask

        masks, module, scale = once_per_device(make), _layer(workload), workload.softmax_scale

        def call(q: Array, k: Array, v: Array) -> Array:
            mask = masks(q.device)
            out, _ = sdpa_attention_forward(module, q, k, v, mask.attn_mask, scaling=scale, is_causal=mask.is_causal)
            return out.transpose(1, 2)

        return call


def _layer(workload: Workload) -> Any:
    """Return the three attributes that the functions read from the attention module."""
    return SimpleNamespace(num_key_value_groups=workload.group, is_causal=False, training=False)


EAGER = HfEager()
SDPA = HfSdpa()
