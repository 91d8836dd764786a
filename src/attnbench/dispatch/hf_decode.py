"""Decoding: one query against a cache that grows by a key at each token, planned once for each doubling of the keys.

`ab.attention` makes a plan for every shape and every mask, which a decode loop would pay at every token. Here lengths
are distinguished by their power of two: the choice is that of the first length of each class. Without padding, one call
of an implementation with `any_kv_len` serves all lengths; padding stays an array (`choice.TAKE_ARRAYS`). What a policy
or a name asks for, but is built for one length, is planned for each length.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attnbench import policy, registry
from attnbench.dispatch import attention as dispatch
from attnbench.dispatch.array_masks import with_torch_array
from attnbench.dispatch.choice import TAKE_ARRAYS, chosen, decide, takes_any_length
from attnbench.dispatch.demand import Words, demand_of
from attnbench.dispatch.plan import Plans, running
from attnbench.dispatch.sinks import with_sinks
from attnbench.frameworks.torch.internals import under_autocast, without_autocast
from attnbench.frameworks.torch.plain import MaskTensors
from attnbench.impls.partial.torch_choice import current
from attnbench.masks import AnyMask, Full

if TYPE_CHECKING:
    import torch

_CLASSES = Plans()
_FULL = Full()
PLAN_EACH_LENGTH = object()
"""Value kept in place of a plan if the implementation is built for one length: every length gets its own plan."""


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float | None, softcap: float | None, impl: str,
    mask: AnyMask = _FULL, real: torch.Tensor | None = None, sinks: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Return attention of one query, layout bhsd, without gradients, as `ab.attention` computes it with the mask.

    The query sees every key, or in a padded batch those of `real` [b, 1, 1, keys], which equals `mask`; and `sinks`.
    """
    joined = sinks is not None
    q, k, v = under_autocast(q, k, v)
    batch, kv_heads, keys, dim = k.shape
    key = (
        current(), q.shape, batch, kv_heads, keys.bit_length(), dim, v.shape[3], q.dtype, k.dtype, v.dtype, q.device,
        k.device, v.device, scale, softcap, impl, mask.kinds, joined, registry.generation(), policy.generation(),
    )  # fmt: skip
    run = _CLASSES.get(key)
    if run is None:
        words = Words(mask, scale, softcap, impl, "bhsd", None, joined, joined)
        run = _planned(q, k, v, words) if real is None else _planned_padded(q, k, v, words)
        _CLASSES.put(key, run)
    if run is PLAN_EACH_LENGTH or v.shape[:3] != k.shape[:3]:
        options: Any = {"scale": scale, "softcap": softcap, "impl": impl, "layout": "bhsd", "sinks": sinks}
        return dispatch.attention(q, k, v, mask=mask, **options)
    with without_autocast(q.device.type):
        if real is not None:
            return run(q, k, v, real, sinks)
        return run(q, k, v) if sinks is None else with_sinks(run(q, k, v), sinks, "bhsd", False)


def _planned(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, words: Words) -> Any:
    demand = demand_of(q, k, v, words, False)
    decision = decide(words.impl, demand)
    fixed = decision.measured or words.impl != "auto"
    if fixed and not (decision.pick is not None and takes_any_length(decision.pick)):
        return PLAN_EACH_LENGTH
    return running(words.impl, demand._replace(any_kv_len=True), words.layout)


def _planned_padded(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, words: Words) -> Any:
    """Return a call with the padding as an array, or PLAN_EACH_LENGTH if the choice does not take arrays."""
    decision = decide(words.impl, demand_of(q, k, v, words, False))
    fixed = decision.measured or words.impl != "auto"
    if fixed and (decision.pick is None or decision.pick.name not in TAKE_ARRAYS["torch"]):
        return PLAN_EACH_LENGTH
    pick, _ = chosen(words.impl, demand_of(q, k, v, words, False, "array"))
    eager = pick.name == "torch.eager"
    return lambda q, k, v, real, sinks: with_torch_array(q, k, v, MaskTensors(real, None, None), eager, words, sinks)
