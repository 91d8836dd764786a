"""NumPy: the float64 reference itself, and the same computation in float32 as the plain CPU baseline.

Both work in blocks of query rows, so neither stores q_len x kv_len scores. Gradients are written out (NumPy has no
autograd): the call has them as `vjp`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from msgspec.structs import replace

from attnbench import reference
from attnbench.impls import WithLse
from attnbench.impls.conditions import needs_dtype
from attnbench.masks.large_bias import finite
from attnbench.spec import CacheCall, Call, Config, Environment, Workload


class _NumpyCall:
    """Attention `(q, k, v) -> out` in a fixed working precision, with `vjp(q, k, v, dout) -> (dq, dk, dv)`."""

    def __init__(self, workload: Workload, working: type, with_lse: bool) -> None:
        self._workload, self._working, self._with_lse = workload, working, with_lse

    def __call__(self, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> Any:
        out, lse = reference.attention(self._workload, *(x.astype(self._working, copy=False) for x in (q, k, v)))
        out = out.astype(q.dtype, copy=False)
        if not self._with_lse:
            return out
        # A large bias may be beyond float32; -inf says that a row sees no key, and nothing else.
        wide = np.float64 if q.dtype == np.float64 else np.float32
        return out, np.where(lse == -np.inf, wide(-np.inf), finite(lse, wide))

    def vjp(self, q: np.ndarray, k: np.ndarray, v: np.ndarray, dout: np.ndarray) -> tuple[np.ndarray, ...]:
        """Return the gradients in the dtype of the inputs."""
        arrays = [x.astype(self._working, copy=False) for x in (q, k, v, dout)]
        return tuple(g.astype(q.dtype, copy=False) for g in reference.attention_gradients(self._workload, *arrays))


class NumpyAttention(WithLse):
    """Attention in NumPy by blocks of query rows."""

    framework = "numpy"

    def __init__(self, name: str, working: type, description: str) -> None:
        self.name, self.description = name, description
        self._working = working

    def supports(self, workload: Workload, environment: Environment) -> str | None:
        dtypes = ("float32", "float64") if self._working is np.float64 else ("float32",)
        return needs_dtype(workload, *dtypes)

    def call(self, workload: Workload, config: Config, with_lse: bool) -> Call:
        return _NumpyCall(workload, self._working, with_lse)

    def decode(
        self, workload: Workload, environment: Environment, config: Config, page_size: int | None
    ) -> CacheCall | str:
        """Return a call that computes one sequence after another with the keys that it has."""
        working = self._working

        def call(
            q: np.ndarray, k: np.ndarray, v: np.ndarray, lengths: np.ndarray, table: np.ndarray | None
        ) -> tuple[np.ndarray, np.ndarray]:
            out = np.zeros((*q.shape[:3], v.shape[3]), q.dtype)
            lse = np.full((q.shape[0], q.shape[2], q.shape[1]), -np.inf, np.float32)
            for b, length in enumerate(int(one) for one in lengths):
                keys, values = k[b], v[b]
                if table is not None:
                    pages = table[b, : -(-length // k.shape[1])]
                    keys, values = (x[pages].reshape(-1, *x.shape[2:]) for x in (k, v))
                if length:
                    one: Any = replace(workload, batch=1, kv_len=length)
                    arrays = (x[None].astype(working, copy=False) for x in (q[b], keys[:length], values[:length]))
                    (out[b],), (lse[b],) = reference.attention(one, *arrays)
            return out, lse

        return call


REFERENCE = NumpyAttention("numpy.reference", np.float64, "NumPy in float64: the reference of verification.")
FLOAT32 = NumpyAttention("numpy.float32", np.float32, "NumPy in float32: a plain baseline on the CPU.")
