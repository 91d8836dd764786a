"""Which automatic choices could not run a call, remembered for calls like it.

What an implementation has kernels for is asked before it is chosen. One that raises Unsupported all the same when it
runs is left out of the automatic choices of this process for calls of the same class: device, pass, dtype, kind of
mask, head dims, soft cap, LSE and settings of torch are the same, heads are grouped in both or in neither, and sizes
have the same power of two. A wider class would leave a kernel out for sizes that it can do, a narrower one would try
it in vain at every new length.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING

from attnbench import registry
from attnbench.spec import Config

if TYPE_CHECKING:
    from attnbench.dispatch.order import Demand

MOST = 4096
_failed: dict[Hashable, str] = {}


def remember(name: str, config: Config, demand: Demand, reason: str) -> None:
    """Leave an implementation with these settings out of the choices for calls like this one."""
    if len(_failed) >= MOST:
        _failed.clear()
    _failed[_class_of(name, config, demand)] = f"could not run such a call: {reason}"


def take_back(name: str, config: Config, demand: Demand) -> None:
    """Let an implementation be chosen again for calls like this one."""
    _failed.pop(_class_of(name, config, demand), None)


def remembered(name: str, config: Config, demand: Demand) -> str | None:
    """Return why an implementation could not run a call like this one; None if nothing is known."""
    return _failed.get(_class_of(name, config, demand)) if _failed else None


def forget() -> None:
    """Let everything be chosen again."""
    _failed.clear()


def _class_of(name: str, config: Config, demand: Demand) -> Hashable:
    """Return what two calls have in common if a kernel missing for one is taken to be missing for the other."""
    work = demand.workload
    sizes = (work.batch * work.heads, work.q_len, work.kv_len)
    return (
        name, repr(sorted(config.items())), registry.generation(), demand.framework, demand.device, demand.with_lse,
        demand.rules, work.pass_, work.dtype, work.visible_mask.kinds, work.head_dim, work.value_dim,
        work.softcap is None, work.group > 1, work.q_len < work.kv_len, work.q_len > work.kv_len,
        *(size.bit_length() for size in sizes),
    )  # fmt: skip
