"""One query against a cache that grows by a key at each token: planned once for each doubling of the keys.

`ab.attention` makes a plan for every shape it meets, which a decode loop would pay at every token. Here lengths are
told apart by their power of two: the choice is that of the first length met in each class. Only implementations that
say that what they build for a full mask computes any number of keys (`any_kv_len`) are kept so; others are planned for
each length, as everywhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attnbench import policy, registry
from attnbench.dispatch import attention as dispatch
from attnbench.dispatch.plan import Plan, Plans, Words, built, chosen, demand_of
from attnbench.workloads.masks import Full

if TYPE_CHECKING:
    import torch

_CLASSES = Plans()
_FULL = Full()


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float | None, softcap: float | None, impl: str
) -> torch.Tensor:
    """One query that sees every key, layout bhsd, without gradients; the same as `ab.attention`."""
    batch, kv_heads, keys, dim = k.shape
    key = (
        q.shape, batch, kv_heads, keys.bit_length(), dim, v.shape[3], q.dtype, k.dtype, v.dtype, q.device,
        scale, softcap, impl, registry.generation(), policy.generation(),
    )  # fmt: skip
    run = _CLASSES.get(key)
    if run is None:
        run = _planned(q, k, v, Words(None, scale, softcap, impl, "bhsd", None, False))
        _CLASSES.put(key, Plan(run))
    if run is EACH or v.shape[:3] != k.shape[:3]:
        return dispatch.attention(q, k, v, mask=_FULL, scale=scale, softcap=softcap, impl=impl, layout="bhsd")
    return run(q, k, v)


EACH = object()
"""Of a class whose implementation is built for one length alone."""


def _planned(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, words: Words) -> Any:
    demand = demand_of(q, k, v, words, False)
    pick, decision = chosen(words.impl, demand)
    return built(pick, decision, demand, words.layout) if pick.any_kv_len else EACH
