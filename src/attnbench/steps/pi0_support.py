"""Which workloads pi0's and pi0-FAST's steps can be made of, and the small ones that are checked."""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from attnbench.spec import Workload
from attnbench.workloads import masks
from attnbench.workloads.pi0_sizes import block_sizes, in_blocks, parts

CHECKED_BATCH, CHECKED_GROUP, CHECKED_ACTIONS, CHECKED_STEPS = 2, 2, 5, 4
CHECKED_PROMPT = 144
"""Tokens: enough that a flash path does with them what it does with more (it leaves short blocks to XLA)."""


def unsupported(w: Workload) -> str | None:
    """Why this workload cannot be its step; None when it can."""
    if w.value_dim != w.head_dim or w.softcap or w.scale is not None:
        return "takes values as wide as keys, the usual scale and no softcap"
    if w.dtype not in ("float32", "bfloat16"):
        return f"takes float32 or bfloat16, not {w.dtype}"
    if w.kv_heads == w.heads:
        return "takes grouped heads, as Gemma has them"
    if w.head_dim % 2 or w.heads * w.head_dim % 4:
        return "takes an even head_dim and a width that 4 divides: half of it is the action expert's"
    return _FORMS[w.step](w)


def _joint(w: Workload) -> str | None:
    if w.q_len != w.kv_len or not _is_pi0(w):
        return "takes a block_causal mask of the blocks (prefix, 1, actions), all tokens of which are queries"
    return None


def _sampler(w: Workload) -> str | None:
    blocks = block_sizes(w) if _is_pi0(w) else None
    if blocks is None or w.q_len != w.kv_len - blocks[0]:
        return "takes a block_causal mask of the blocks (prefix, 1, actions), state and actions of which are queries"
    return _only_forward(w)


def _prefill(w: Workload) -> str | None:
    mask = w.visible_mask
    in_cache = isinstance(mask, masks.Lengths) and bool((mask.kv_lengths.array == w.q_len).all())
    if not in_cache and not (isinstance(mask, masks.Full) and w.q_len == w.kv_len):
        return "takes a prompt of q_len tokens in a cache of kv_len: lengths of q_len in every row, or a full square"
    return _only_forward(w)


def _decode(w: Workload) -> str | None:
    if w.visible_mask != masks.causal() or w.q_len >= w.kv_len:
        return "takes a causal mask with q_len tokens to decode behind a prompt of kv_len - q_len"
    return _only_forward(w)


def _is_pi0(w: Workload) -> bool:
    blocks = block_sizes(w)
    return blocks is not None and len(blocks) == 3 and blocks[1] == 1


def _only_forward(w: Workload) -> str | None:
    return "is run forward only" if w.needs_gradients else None


_FORMS: dict[str, Callable[[Workload], str | None]] = {
    "pi0-attention": _joint,
    "pi0-block": _joint,
    "pi0-model": _joint,
    "pi0-sampler": _sampler,
    "pi0-fast-prefill": _prefill,
    "pi0-fast-decode": _decode,
}


def small(w: Workload) -> Workload:
    """Fewer heads, rows and tokens (and with them depth and vocabulary), the same head_dim."""
    heads = min(w.group, CHECKED_GROUP)
    return replace(w, heads=heads, kv_heads=1, batch=min(w.batch, CHECKED_BATCH), mask=masks.full())


def small_in_blocks(w: Workload) -> Workload:
    """The same of a workload in pi0's blocks."""
    prefix, state, actions = parts(w)
    blocks = min(prefix, CHECKED_PROMPT), state, min(actions, CHECKED_ACTIONS)
    tokens = sum(blocks)
    q_len = tokens if w.q_len == w.kv_len else tokens - blocks[0]
    return replace(small(w), q_len=q_len, kv_len=tokens, mask=in_blocks(*blocks))


def small_prompt(w: Workload) -> Workload:
    """The same of a prompt in a cache, whose room is kept where it is little."""
    prompt, room = min(w.q_len, CHECKED_PROMPT), min(w.kv_len - w.q_len, CHECKED_STEPS)
    few = replace(small(w), q_len=prompt, kv_len=prompt + room)
    return replace(few, mask=masks.lengths([prompt] * few.batch)) if room else few


def small_decode(w: Workload) -> Workload:
    """The same of some steps behind a prompt."""
    steps, prompt = min(w.q_len, CHECKED_STEPS), min(w.kv_len - w.q_len, CHECKED_PROMPT)
    return replace(small(w), q_len=steps, kv_len=prompt + steps, mask=masks.causal())
