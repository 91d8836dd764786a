"""Hugging Face Transformers: `register()`, then `attn_implementation="attnbench"`.

Both interfaces are registered. That of masks (`attnbench.dispatch.hf_masks`) describes the mask of a step as one of
attnbench. A mask that cannot be described, and one that is traced by torch.compile, stays the boolean array that
Transformers itself would make. A model that computes attention by itself, for masks of another form, is refused: when
it is loaded, when its implementation is set, or when it asks for a mask (`attnbench.dispatch.hf_models`).

A feature that attnbench's attention does not have (dropout, sinks, a position bias, attention weights) is refused with
the reason; nothing is ignored silently, with one exception. If the layers are compiled instead of the whole model, and
the model does not pass the request for attention weights on to its layers (GPT-2, OPT, StableLM), a graph that was
traced before does not see that request. The weights are empty then, as with Transformers' own sdpa.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import partial, wraps
from threading import Lock
from typing import Any, NamedTuple

import torch

from attnbench import masks
from attnbench.dispatch import array_masks, hf_decode, hf_models
from attnbench.dispatch import attention as dispatch
from attnbench.dispatch.hf_masks import DescribedMask, KeyRangeMask, MaskArray, describe
from attnbench.dispatch.torch_sdpa import check_impl
from attnbench.errors import Unsupported, UsageError
from attnbench.masks import Full
from attnbench.tracing import constant_when_traced

REFUSED = {
    "position_bias": "a position bias",
    "head_mask": "a head mask",
    "cache": "a paged cache",
    "indices": "sparse indices",
    "block_indices": "block indices",
}
"""Keyword -> the feature it asks for, which would change the result."""
NO_MATTER = frozenset({
    "position_ids", "use_cache", "cache_position", "past_key_values", "num_items_in_batch", "output_hidden_states",
    "output_router_logits", "return_dict", "logits_to_keep", "seq_idx", "max_length_q", "max_length_k",
    "deterministic", "target_dtype", "sliding_window", "layer_idx", "position_embeddings",
})  # fmt: skip
"""Keywords that do not change what attention computes here; the window is part of the mask."""


_registered: set[str] = set()
_watching = Lock()


def register(name: str = "attnbench", impl: str = "auto") -> str:
    """Register `attn_implementation=name` with Transformers, to call `ab.attention` with `impl`; return the name."""
    try:
        from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
    except ImportError as error:
        raise UsageError(f"Transformers 5.0 or newer is needed ({error}): pip install 'attnbench[hf]'.") from error
    check_impl(impl)
    if not isinstance(name, str) or not name:
        raise UsageError(f"the name of an attn_implementation must be a non-empty string, not {name!r}.")
    if "flash" in name:
        raise UsageError(
            f'Transformers treats a name that contains "flash" as a flash-attention package, so no model would load '
            f'with "{name}": leave the word out, as in "{name.replace("flash", "fa")}".'
        )
    if "/" in name or name.startswith("paged|"):
        raise UsageError(
            f'Transformers treats "owner/name" as a kernel of the Hub and removes a prefix "paged|", so no model '
            f'would load with "{name}": leave out the slash and the prefix.'
        )
    if name not in _registered and (name == "eager" or name in AttentionInterface().valid_keys()):
        raise UsageError(f'"{name}" is a name of Transformers itself: register attnbench under another name.')
    _registered.add(name)
    AttentionInterface.register(name, partial(attention_forward, impl=impl))
    AttentionMaskInterface.register(name, describe)
    with _watching:  # once and for the whole process
        if not hasattr(PreTrainedModel, "_attnbench_watches"):
            _watch_models(PreTrainedModel)
    return name


def _watch_models(PreTrainedModel: Any) -> None:
    """Check each model that is loaded with or set to a name of attnbench: Transformers accepts any registered name.

    Three methods of every Transformers model are wrapped. They behave as before for a model without a name of attnbench
    in its config.
    """
    accept: Any = PreTrainedModel.get_correct_attn_implementation
    built: Any = PreTrainedModel.post_init
    change: Any = PreTrainedModel.set_attn_implementation

    @wraps(accept)
    def get_correct_attn_implementation(self: Any, requested_attention: str | None, *more: Any, **how: Any) -> str:
        if _is_ours(requested_attention):  # its modules do not exist yet
            attention = hf_models.attention_of_class(type(self))
            if attention.loses_masks:
                raise Unsupported(hf_models.refusal(type(self).__name__, attention))
        return accept(self, requested_attention, *more, **how)

    @wraps(built)
    def post_init(self: Any, *more: Any, **how: Any) -> Any:
        if any(_is_ours(_implementation(config)) for config in _with_parts(self.config)):
            hf_models.remember(self)
            configs = [config for config, _ in hf_models.by_config(self)]
            _check_parts(self, [config for config in configs if _is_ours(_implementation(config))])
        return built(self, *more, **how)

    @wraps(change)
    def set_attn_implementation(self: Any, attn_implementation: Any, *more: Any, **how: Any) -> Any:
        asked = list(_configs_asked(self, self.config, attn_implementation))
        if asked:
            hf_models.remember(self)
            _check_parts(self, asked)
        return change(self, attn_implementation, *more, **how)

    PreTrainedModel.get_correct_attn_implementation = get_correct_attn_implementation
    PreTrainedModel.post_init = post_init
    PreTrainedModel.set_attn_implementation = set_attn_implementation
    PreTrainedModel._attnbench_watches = True


def _is_ours(name: Any) -> bool:
    """Return whether a name was registered with Transformers by `register`."""
    return isinstance(name, str) and name in _registered


def _with_parts(config: Any) -> Iterator[Any]:
    """Yield a config and the configs of the parts of its model."""
    yield config
    for key in getattr(config, "sub_configs", ()):
        part = getattr(config, key, None)
        if part is not None:
            yield from _with_parts(part)


def _implementation(config: Any) -> Any:
    return getattr(config, "_attn_implementation", None)


def _configs_asked(model: Any, config: Any, request: Any) -> Iterator[Any]:
    """Yield the configs to which `set_attn_implementation` would give a registered name: all, or those in a dict."""
    if not isinstance(request, dict):
        if _is_ours(request):
            yield from _with_parts(config)
            yield from (one for one, _ in hf_models.by_config(model) if config is model.config)
        return
    for key, value in request.items():
        if key == "":
            if _is_ours(value):
                yield config
        else:
            yield from _configs_asked(model, getattr(config, key, None), value)


def _check_parts(model: Any, configs: list[Any]) -> None:
    """Refuse parts with these configs that would lose their masks; warn of others that never call attnbench."""
    for config, modules in hf_models.by_config(model):
        if config is None or not any(config is one for one in configs):
            continue
        attention = hf_models.attention_of(type(one) for one in modules)
        name = type(modules[0]).__name__
        if attention.loses_masks:
            raise Unsupported(hf_models.refusal(name, attention))
        if attention.own and not attention.calling and name not in _warned:
            _warned.add(name)
            warnings.warn(
                f"{name} computes attention by itself ({', '.join(attention.own)}): attnbench is not called there. "
                "attnbench.dispatch.hf.check(model) lists the modules that call attnbench, and those that do not.",
                stacklevel=4,
            )


_warned: set[str] = set()


class AttentionModule(NamedTuple):
    """One attention module of a model."""

    path: str
    kind: str
    implementation: str | None
    """`attn_implementation` of its config."""
    ours: bool
    """Whether it will call attnbench."""

    def __str__(self) -> str:
        by = "calls attnbench" if self.ours else f'does not call it (attn_implementation="{self.implementation}")'
        return f"{self.path} ({self.kind}): {by}"


class ModelCheck(NamedTuple):
    """Attention modules of a model, and why the model is refused if it is."""

    modules: tuple[AttentionModule, ...]
    refusal: str | None

    def __str__(self) -> str:
        ours = sum(one.ours for one in self.modules)
        summary = f"{ours} of {len(self.modules)} attention modules call attnbench."
        return "\n".join(filter(None, [self.refusal, summary, *(str(one) for one in self.modules if not one.ours)]))


def check(model: torch.nn.Module) -> ModelCheck:
    """Return which attention modules of a loaded model will call attnbench, read from their code without a run."""
    paths = {id(module): path for path, module in model.named_modules()}
    attention_modules: list[AttentionModule] = []
    refusal = None
    for config, modules in hf_models.by_config(model):
        name = _implementation(config)
        attention = hf_models.attention_of(type(one) for one in modules)
        if name in _registered and attention.loses_masks:
            refusal = hf_models.refusal(type(modules[0]).__name__, attention)
        for module in modules:
            kind = type(module)
            calls = hf_models.calls_interface(kind)
            if calls or hf_models.own_attention(kind):
                attention_modules.append(
                    AttentionModule(paths[id(module)], kind.__name__, name, calls and name in _registered)
                )
    return ModelCheck(tuple(attention_modules), refusal)


def attention_forward(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    attention_mask: torch.Tensor | None, *, impl: str = "auto", dropout: float = 0.0, scaling: float | None = None,
    softcap: float | None = None, is_causal: bool | None = None, sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None, **others: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Compute attention for a layer: query, key, value [b, heads, tokens, dim], output [b, tokens, heads, dim].

    `s_aux` [heads] are attention sinks.
    """
    _check_array(attention_mask)
    _check(dropout, attention_mask, others)
    usual = scaling is None or scaling == query.shape[-1] ** -0.5
    options: Any = {"scale": None if usual else scaling, "softcap": softcap, "impl": impl, "layout": "bhsd"}
    options["sinks"] = s_aux
    if attention_mask is None or isinstance(attention_mask, DescribedMask):
        if attention_mask is None:
            causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
            described = _without_mask(query.shape[2], key.shape[2], causal, sliding_window)
        else:
            described = attention_mask.described
        if described.first or described.last != key.shape[2]:
            key, value = (x[:, :, described.first : described.last] for x in (key, value))
        alone = query.shape[2] == 1 and (type(described.mask) is Full or described.real is not None)
        wants_gradient = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
        if alone and not wants_gradient and not torch.compiler.is_compiling():
            more: Any = {"mask": described.mask, "real": described.real, "sinks": s_aux}
            out = hf_decode.attend(query, key, value, scale=options["scale"], softcap=softcap, impl=impl, **more)
        else:
            out = dispatch.attention(query, key, value, mask=described.mask, **options)
    else:
        array = attention_mask.plain() if isinstance(attention_mask, MaskArray) else attention_mask
        array = array[..., : key.shape[2]]
        kind = "visible" if str(array.dtype) == "torch.bool" else "bias"
        out = array_masks.attention_with_array(query, key, value, **{kind: array}, **options)
    return out.transpose(1, 2).contiguous(), None


def _check_array(mask: Any) -> None:
    """Raise Unsupported for masks whose meaning is ambiguous."""
    if mask is None or isinstance(mask, DescribedMask):
        return
    if not isinstance(mask, torch.Tensor):
        raise Unsupported(f"a mask must be a tensor with 4 axes, not of type {type(mask).__name__}.")
    if mask.dtype != torch.bool and not mask.dtype.is_floating_point:
        raise Unsupported(
            f"a mask of {mask.dtype} is ambiguous, since it could mark visible pairs or be added to the logits: pass "
            "booleans (True is visible), as in mask != 0, or floating-point numbers to add."
        )
    if mask.dim() != 4:
        raise Unsupported(f"the mask has {mask.dim()} axes: pass one of shape [batch, heads or 1, q, kv].")


def _check(dropout: float, mask: torch.Tensor | None, others: dict[str, Any]) -> None:
    if dropout:
        raise Unsupported(
            f"attnbench's attention does not support dropout, but this layer asks for {dropout:g}: set "
            "config.attention_dropout (in some models attention_probs_dropout_prob) to 0, or call model.eval()."
        )
    if others.pop("output_attentions", None) or _weights_recorded():
        raise Unsupported('attnbench returns no attention weights: load the model with attn_implementation="eager".')
    packed = others.pop("cu_seq_lens_q", None), others.pop("cu_seq_lens_k", None)
    if packed[0] is not None and len(packed[0]) > 2 and not (isinstance(mask, DescribedMask) and mask.described.packed):
        raise Unsupported(
            "cu_seq_lens packs several sequences, but the mask of this step does not keep them apart: pass "
            "position_ids that start from 0 in each sequence, no attention_mask, and use_cache=False."
        )
    for name, value in others.items():
        if value is not None and name not in NO_MATTER:
            what = REFUSED.get(name, f"the keyword {name}")
            raise Unsupported(
                f'attnbench\'s attention does not support {what}: load the model with attn_implementation="eager".'
            )


def _weights_recorded() -> bool:
    """Return whether the model collects attention weights: several models do not pass this on to their layers."""
    try:
        from transformers.utils.output_capturing import _active_collector as collector
    except ImportError:  # older versions
        return False
    if torch.compiler.is_dynamo_compiling() and not collector.compiling:
        return _weights_recorded_outside()
    return any("attentions" in key for key in collector.get() or ())


@constant_when_traced
def _weights_recorded_outside() -> bool:
    """Return the answer of `_weights_recorded` while a graph is traced: torch.compile cannot follow the ContextVar."""
    from transformers.utils.output_capturing import _active_collector as collector

    return any("attentions" in key for key in collector.context_var.get() or ())


def _without_mask(q_len: int, kv_len: int, causal: bool, sliding_window: int | None) -> KeyRangeMask:
    """Describe the mask of a layer that gets no mask (image encoders, cross-attention), from its `is_causal`."""
    if not causal or q_len == 1:
        if sliding_window is not None:
            raise Unsupported("this layer has a sliding window but got no mask: which keys a query sees is unknown.")
        return KeyRangeMask(masks.full(), 0, kv_len)
    if q_len != kv_len:
        raise Unsupported(
            f"a causal layer with {q_len} queries and {kv_len} keys got no mask: which keys a query sees is unknown."
        )
    mask = masks.causal() if sliding_window is None else masks.window(sliding_window - 1)
    return KeyRangeMask(mask, 0, kv_len)
