"""KV caches with known contents, and attention of the gathered, trimmed keys in float64."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

import attnbench as ab

ALLOWED = {"float64": 1e-12, "float32": 3e-6, "float16": 3e-3, "bfloat16": 2e-2}
POISON = float("nan")


@dataclass(frozen=True)
class Problem:
    """Sequences of unequal lengths; keys and values per sequence, and how they lie in a cache."""

    lengths: tuple[int, ...]
    queries: int = 1
    heads: int = 4
    kv_heads: int = 2
    dim: int = 16
    v_dim: int = 16
    page_size: int | None = None
    capacity: int = 64
    scale: float | None = None
    softcap: float | None = None
    window: int | None = None
    shared: int = 0
    """Number of first tokens that all sequences have in common: their whole pages are shared."""
    seed: int = 0

    @property
    def words(self):
        return {"scale": self.scale, "softcap": self.softcap, "window": self.window}

    def tokens(self):
        """Queries [b, n, h, d], and keys and values of each sequence, normal and seen through float32."""
        rng = np.random.default_rng(self.seed)

        def draw(*shape):
            return rng.normal(size=shape).astype(np.float32)

        common = draw(self.shared, self.kv_heads, self.dim), draw(self.shared, self.kv_heads, self.v_dim)
        k = [draw(length, self.kv_heads, self.dim) for length in self.lengths]
        v = [draw(length, self.kv_heads, self.v_dim) for length in self.lengths]
        for mine in zip(k, v):
            for own, first in zip(mine, common):
                own[: self.shared] = first[: len(own)]
        return draw(len(self.lengths), self.queries, self.heads, self.dim), k, v

    def cache_arrays(self, dtype=np.float32, poison=POISON):
        """Arrays of a cache as NumPy's: k, v, and in pages the block table; poison wherever no token lies."""
        _, k, v = self.tokens()
        if self.page_size is None:
            stored = []
            for parts in (k, v):
                whole = np.full((len(k), self.capacity, *parts[0].shape[1:]), poison, dtype)
                for row, part in zip(whole, parts):
                    row[: len(part)] = part
                stored.append(whole)
            return stored[0], stored[1], None
        return self._paged(k, v, dtype, poison)

    def _paged(self, k, v, dtype, poison):
        assert self.page_size is not None
        size, rng = self.page_size, np.random.default_rng(self.seed + 1)
        columns = -(-self.capacity // size)
        free = list(rng.permutation(len(k) * columns + 3))
        pages = [np.full((len(free), size, *parts[0].shape[1:]), poison, dtype) for parts in (k, v)]
        # Entries behind the end of a sequence are no pages at all.
        table = rng.choice(np.array([-1, -7, 1 << 30, len(free)], np.int32), (len(k), columns))
        common = {}
        for b, length in enumerate(self.lengths):
            for column in range(-(-length // size)):
                start, stop = column * size, min((column + 1) * size, length)
                whole_and_shared = stop - start == size and stop <= self.shared
                page = common.get(column) if whole_and_shared else None
                if page is None:
                    page = free.pop()
                    for stored, parts in zip(pages, (k, v)):
                        stored[page, : stop - start] = parts[b][start:stop]
                    if whole_and_shared:
                        common[column] = page
                table[b, column] = page
        return pages[0], pages[1], table.astype(np.int32)

    def expected(self, rounded=lambda x: x):
        """(out, lse) in float64, each sequence by itself; `rounded` makes of an array what a cache of a dtype holds."""
        q, k, v = self.tokens()
        outs, lses = [], []
        for b, length in enumerate(self.lengths):
            out, lse = dense(rounded(q[b]), rounded(k[b]), rounded(v[b]), length, self)
            outs.append(out)
            lses.append(lse)
        return np.stack(outs), np.stack(lses)


def dense(q, k, v, length, problem):
    """Attention of one sequence, written out: q [n, h, d], k and v [length, g, d] -> out [n, h, d], lse [h, n]."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    count, heads, dim = q.shape
    out, lse = np.zeros((count, heads, v.shape[2])), np.full((heads, count), -np.inf)
    for h in range(heads):
        group = h // (heads // problem.kv_heads)
        for i in range(count):
            last = length - count + i
            first = 0 if problem.window is None else max(last - problem.window, 0)
            if last < 0:
                continue
            keys, values = k[first : last + 1, group], v[first : last + 1, group]
            logits = keys @ q[i, h] * (dim**-0.5 if problem.scale is None else problem.scale)
            if problem.softcap is not None:
                logits = problem.softcap * np.tanh(logits / problem.softcap)
            top = logits.max()
            weights = np.exp(logits - top)
            out[i, h], lse[h, i] = weights @ values / weights.sum(), top + np.log(weights.sum())
    return out, lse


def cache_of(k, v, table, lengths):
    return ab.ContiguousCache(k, v, lengths) if table is None else ab.PagedCache(k, v, table, lengths)


def must_agree(found, expected, dtype="float32"):
    """Fail unless out and LSE are right; rows that see nothing are 0 and -inf exactly."""
    (out, lse), (right, right_lse) = ((np.asarray(x, np.float64) for x in pair) for pair in (found, expected))
    blind = np.isneginf(right_lse)
    assert out.shape == right.shape
    assert lse.shape == right_lse.shape
    assert np.isfinite(out).all()
    assert np.isneginf(lse[blind]).all()
    assert (out[blind.transpose(0, 2, 1)] == 0).all()
    allowed = ALLOWED[dtype]
    np.testing.assert_allclose(out, right, atol=allowed * max(1.0, np.abs(right).max()), rtol=0)
    np.testing.assert_allclose(lse[~blind], right_lse[~blind], atol=allowed * 4, rtol=allowed)
