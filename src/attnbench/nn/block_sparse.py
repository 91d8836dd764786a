"""Block-sparse attention as torch modules: fixed patterns, and blocks chosen by content or by a learned gate.

All take q [b, t, h, d], k and v [b, s, g, d] and return [b, t, h, d]; one softmax runs over all kept blocks of a row.
Dropped blocks are neither read nor computed, forward or backward. Gradients flow through the kept blocks; the choice
of blocks has no gradient, so a gate is trained apart. Causal masks are aligned bottom-right.

    gate = BlockGate(heads=16, head_dim=128)
    losses = train_gate(gate, [(q, k), ...], masks.causal(), block_size=128)
    attend = create_block_sparse_attention(0.9, "learned", causal=True, gate=gate)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from attnbench.errors import InvalidWorkload, UnknownName, UsageError
from attnbench.frameworks.torch.internals import under_autocast, without_autocast
from attnbench.impls._arguments import check_causal, check_scale, check_tensors, check_whole, dtype_name, number
from attnbench.kernels.block_sparse import selection
from attnbench.kernels.block_sparse.selection import LEARNING_RATE, POOL, BlockChoice, BlockGate, estimate
from attnbench.kernels.block_sparse.tables import BlockTables, tables_of
from attnbench.kernels.block_sparse.torch_impls import attend
from attnbench.masks import Mask, MaskShape, causal, full
from attnbench.masks.block_patterns import BLOCK_SIZE, PATTERNS, check_sparsity, sparse_mask
from attnbench.masks.cuts import block_layout
from attnbench.tracing import outside_graphs

MOST_SIZES = 16
"""Most sizes whose tables a module keeps, the last used: tables of ever new lengths would fill the device."""
BY_CONTENT = ("dynamic_threshold", "learned")
Kept = tuple[BlockTables, float]
"""The blocks of a call, and the share that was dropped."""


class _SparseAttention(torch.nn.Module):
    """Attention over the blocks that `_select` returns: what all block-sparse modules share."""

    def __init__(self, *, block_size: int, causal: bool, scale: float | None) -> None:
        super().__init__()
        check_whole("block_size", block_size, 1)
        check_scale(scale)
        check_causal(causal)
        self.block_size, self.causal, self.scale = block_size, causal, scale
        self._made: dict[Any, Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Leave out tables that can be made again: they may lie on a device, and are not state of the module."""
        return {**super().__getstate__(), "_made": {}}

    def _made_once(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return what `make` returns, made once for each key; threads may share the module."""
        value = self._made.pop(key, None)
        if value is None:
            value = make()
        self._made[key] = value
        for old in list(self._made)[:-MOST_SIZES]:
            self._made.pop(old, None)
        return value

    @outside_graphs
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, return_lse: bool = False) -> Any:
        """Return [b, t, h, d]; with `return_lse` also the LSE [b, h, t], natural log, float32.

        Under autocast the arrays are cast to its dtype, as in `ab.attention`.
        """
        q, k, v = _heads_first(q, k, v)
        with without_autocast(q.device.type):
            tables, _ = self._select(q, k)
            out, lse = attend(q, k, v, tables, self._scale(q))
        return (out.transpose(1, 2), lse) if return_lse else out.transpose(1, 2)

    def blocks(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        """Return which blocks a call keeps, [b or 1, h or 1, query blocks, key blocks]."""
        return self._selected(q, k)[0].kept

    def achieved_sparsity(self, q: torch.Tensor, k: torch.Tensor) -> float:
        """Return the share of the blocks visible under the mask that this call drops."""
        return self._selected(q, k)[1]

    def _selected(self, q: torch.Tensor, k: torch.Tensor) -> Kept:
        """Return the blocks that `forward` keeps for such arrays."""
        q, k, _ = _heads_first(q, k, k)
        with without_autocast(q.device.type):
            return self._select(q, k)

    def _select(self, q: torch.Tensor, k: torch.Tensor) -> Kept:
        """Return the blocks for q and k in layout bhsd."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        shared = {"block_size": self.block_size, "causal": self.causal, "scale": self.scale}
        return ", ".join(f"{name}={value}" for name, value in (self._asked() | shared).items())

    def _asked(self) -> dict[str, Any]:
        """Return the options of the subclass, in order."""
        raise NotImplementedError

    def _scale(self, q: torch.Tensor) -> float:
        return q.shape[-1] ** -0.5 if self.scale is None else self.scale

    def _choice(self, q: torch.Tensor, k: torch.Tensor) -> BlockChoice:
        """Return the blocks that may be chosen for arrays of these sizes, made once."""
        shape = MaskShape(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
        mask = causal() if self.causal else full()
        key = ("choice", shape, q.device, self.block_size, self.causal)
        return self._made_once(key, lambda: selection.choice(mask, shape, self.block_size, q.device))


class BlockSparseAttention(_SparseAttention):
    """Block-sparse attention with a named pattern at a sparsity.

    Fixed patterns (local, strided, global_local, random) drop that share in every row of blocks, within one block.
    For `dynamic_threshold` and `learned` sparsity is a mean: `calibrate(q, k)` sets the threshold on typical inputs.
    """

    threshold: torch.Tensor

    def __init__(
        self,
        sparsity: float,
        pattern: str,
        *,
        block_size: int = BLOCK_SIZE,
        causal: bool = False,
        scale: float | None = None,
        seed: int | None = None,
        pool: int | None = None,
        gate: BlockGate | None = None,
        threshold: float | None = None,
    ) -> None:
        super().__init__(block_size=block_size, causal=causal, scale=scale)
        known = (*PATTERNS, *BY_CONTENT)
        if pattern not in known:
            raise UnknownName("block pattern", str(pattern), known, "attnbench.nn.create_block_sparse_attention")
        check_sparsity(sparsity)
        self.sparsity, self.pattern, self.seed = sparsity, pattern, checked_seed(seed, pattern)
        _refuse_unused("pool", pool, pattern, ("dynamic_threshold",))
        _refuse_unused("gate", gate, pattern, ("learned",))
        _refuse_unused("threshold", threshold, pattern, BY_CONTENT)
        if threshold is not None:
            _check_share("threshold", threshold)
        if pattern == "learned" and gate is None:
            raise UsageError('pattern "learned" needs gate=, a BlockGate(heads, head_dim) trained with train_gate.')
        self.gate = gate
        self.pool = _checked_pool(pool, gate, block_size, scale) if pattern in BY_CONTENT else POOL
        value = float("nan") if threshold is None else float(threshold)
        self.register_buffer("threshold", torch.tensor(value, dtype=torch.float32))

    def _asked(self) -> dict[str, Any]:
        asked = {"sparsity": self.sparsity, "pattern": self.pattern}
        if self.pattern == "random":
            asked["seed"] = self.seed
        if self.pattern in BY_CONTENT:
            asked |= {"pool": self.pool, "threshold": f"{float(self.threshold):.4g}"}
        return asked

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Apply torch's conversion and keep the threshold float32: `.bfloat16()` would keep other blocks."""
        before = self.threshold
        super()._apply(fn, recurse)
        after = self.threshold
        self.threshold = after.float() if before.is_meta else before.to(after.device)
        return self

    def calibrate(self, q: torch.Tensor, k: torch.Tensor) -> float:
        """Set the threshold so that the mean sparsity on these inputs is the requested one; return it."""
        if self.pattern not in BY_CONTENT:
            raise UsageError(f'pattern "{self.pattern}" has no threshold to calibrate.')
        q, k, _ = _heads_first(q, k, k)
        with without_autocast(q.device.type):
            threshold = selection.calibrated(self._mass(q, k), self._choice(q, k), self.sparsity)
        self.threshold.fill_(threshold)
        return threshold

    def _mass(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return estimate(q, k, self._choice(q, k), self._scale(q), self.pool, self.gate)

    def _select(self, q: torch.Tensor, k: torch.Tensor) -> Kept:
        if self.pattern not in BY_CONTENT:
            return self._pattern(q, k)
        threshold = float(self.threshold)
        if threshold != threshold:
            raise UsageError(
                f'pattern "{self.pattern}" needs a threshold: calibrate(q, k) on typical inputs, or give threshold=.'
            )
        chosen = self._choice(q, k)
        tables = chosen.keeping(selection.by_threshold(self._mass(q, k), threshold))
        return tables, chosen.sparsity(tables.kept)

    def _pattern(self, q: torch.Tensor, k: torch.Tensor) -> Kept:
        shape = MaskShape(q.shape[0], q.shape[1], q.shape[2], k.shape[2])

        def made() -> Kept:
            mask = sparse_mask(
                self.pattern, self.sparsity, shape, block_size=self.block_size, causal=self.causal, seed=self.seed
            )
            layout = block_layout(mask, shape)
            assert layout is not None
            return tables_of(layout, shape, q.device), layout.sparsity

        settings = (self.pattern, self.sparsity, self.block_size, self.causal, self.seed)
        return self._made_once(("pattern", shape, q.device, *settings), made)


class AdaptiveSparseAttention(_SparseAttention):
    """The fewest blocks that hold a share of the estimated attention mass, within bounds on what a row of blocks drops.

    Rows whose attention is spread out keep more, down to `min_sparsity`; concentrated ones keep less, up to
    `max_sparsity`. A row keeps at least one block and all blocks that the mask cuts; if no number of blocks lies
    between the bounds, `min_sparsity` holds.
    """

    def __init__(
        self,
        min_sparsity: float,
        max_sparsity: float,
        *,
        mass: float = 0.95,
        block_size: int = BLOCK_SIZE,
        causal: bool = False,
        scale: float | None = None,
        pool: int | None = None,
        gate: BlockGate | None = None,
    ) -> None:
        super().__init__(block_size=block_size, causal=causal, scale=scale)
        check_sparsity(min_sparsity)
        check_sparsity(max_sparsity)
        if min_sparsity > max_sparsity:
            raise UsageError(f"min_sparsity {min_sparsity:g} is more than max_sparsity {max_sparsity:g}.")
        _check_share("mass", mass)
        self.min_sparsity, self.max_sparsity, self.mass = min_sparsity, max_sparsity, mass
        self.pool, self.gate = _checked_pool(pool, gate, block_size, scale), gate

    def _asked(self) -> dict[str, Any]:
        bounds = {"min_sparsity": self.min_sparsity, "max_sparsity": self.max_sparsity}
        return bounds | {"mass": self.mass, "pool": self.pool}

    def _select(self, q: torch.Tensor, k: torch.Tensor) -> Kept:
        chosen = self._choice(q, k)
        mass = estimate(q, k, chosen, self._scale(q), self.pool, self.gate)
        tables = chosen.keeping(selection.within_budget(mass, chosen, self.mass, self.min_sparsity, self.max_sparsity))
        return tables, chosen.sparsity(tables.kept)


def create_block_sparse_attention(sparsity: float, pattern: str, **options: Any) -> BlockSparseAttention:
    """Return `BlockSparseAttention(sparsity, pattern, **options)`; an unknown option raises."""
    return BlockSparseAttention(sparsity, pattern, **options)


def create_adaptive_sparse_attention(
    min_sparsity: float, max_sparsity: float, **options: Any
) -> AdaptiveSparseAttention:
    """Return `AdaptiveSparseAttention(min_sparsity, max_sparsity, **options)`; an unknown option raises."""
    return AdaptiveSparseAttention(min_sparsity, max_sparsity, **options)


def _heads_first(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the arrays as [batch, heads, tokens, dim], in autocast's dtype if it is on; raise if they do not fit."""
    check_tensors("block-sparse attention", q, k, v)
    q, k, v = under_autocast(q, k, v)
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if not (q.ndim == k.ndim == v.ndim == 4) or k.shape != v.shape or q.shape[0] != k.shape[0]:
        raise InvalidWorkload(
            f"q, k and v must be [batch, tokens, heads, dim], and k and v of one shape, not {shapes}."
        )
    if q.shape[3] != k.shape[3] or q.shape[2] % k.shape[2]:
        raise InvalidWorkload(
            f"the heads of k must divide those of q, and q and k must have one head_dim, not {shapes}."
        )
    dtypes = {dtype_name(x) for x in (q, k, v)}
    if len(dtypes) > 1:
        raise InvalidWorkload(f"q, k and v must have one dtype, not {', '.join(sorted(dtypes))}.")
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def _check_share(name: str, value: Any) -> None:
    """Raise UsageError unless the value is a share of attention mass."""
    if not number(value) or not 0 < value <= 1:
        raise UsageError(f"{name} must be the share of attention to keep, above 0 and at most 1, not {value!r}.")


def _refuse_unused(name: str, value: Any, pattern: str, patterns: tuple[str, ...]) -> None:
    """Raise UsageError if an option is given that the pattern would ignore."""
    if value is not None and pattern not in patterns:
        raise UsageError(f'{name}= is used by pattern {" and ".join(patterns)}, not by "{pattern}": leave it out.')


def checked_seed(seed: int | None, pattern: str) -> int:
    """Return the seed, 0 if none was given; raise UsageError if the pattern does not use one."""
    _refuse_unused("seed", seed, pattern, ("random",))
    if seed is not None:
        check_whole("seed", seed, 0)
    return seed or 0


def _checked_pool(pool: int | None, gate: BlockGate | None, block_size: int, scale: float | None) -> int:
    """Return the pool size of the estimate, a gate's own if there is one; raise if gate and module do not fit."""
    if gate is not None and not isinstance(gate, BlockGate):
        raise UsageError(f"gate must be a BlockGate(heads, head_dim) trained with train_gate, not {gate!r}.")
    if gate is not None and pool is not None:
        raise UsageError("leave out pool= if a gate is given: the gate has a pool size of its own.")
    size = POOL if pool is None else pool
    if gate is not None:
        size, wanted = gate.pool, gate.query.shape[-1] ** -0.5 if scale is None else scale
        if not math.isclose(gate.scale, wanted):
            raise UsageError(f"the gate was made for scale {gate.scale:g}: give scale={gate.scale:g}, not {wanted:g}.")
    check_whole("pool", size, 1)
    if block_size % size:
        raise UsageError(f"pool must divide the block size; {size} does not divide {block_size}.")
    return size


def train_gate(
    gate: BlockGate,
    examples: Sequence[tuple[torch.Tensor, torch.Tensor]],
    mask: Mask,
    block_size: int,
    *,
    steps: int = 200,
    learning_rate: float = LEARNING_RATE,
) -> list[float]:
    """Fit the gate to true attention; return each step's loss (cross entropy).

    Examples are (q [b, t, h, d], k [b, s, g, d]), as the modules take them.
    """
    if not examples:
        raise UsageError("train_gate needs at least one example (q, k).")
    check_whole("steps", steps, 1)
    check_whole("block_size", block_size, 1)
    pairs = [_example(gate, q, k) for q, k in examples]
    return selection.train_gate(gate, pairs, mask, block_size, steps=steps, learning_rate=learning_rate)


def _example(gate: BlockGate, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    heads, dim = gate.query.shape[:2]
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}"
    if q.ndim != 4 or k.ndim != 4 or q.shape[0] != k.shape[0]:
        raise InvalidWorkload(f"examples must be q and k of [batch, tokens, heads, dim], not {shapes}.")
    if q.shape[2:] != (heads, dim) or k.shape[3] != dim or heads % k.shape[2]:
        raise InvalidWorkload(
            f"this gate is for {heads} heads of {dim}, and heads of k must divide those: "
            f"give q and k of [batch, tokens, heads, dim], not {shapes}."
        )
    return q.transpose(1, 2), k.transpose(1, 2)
