"""The step `multihead`: x [b, s, e] -> projections to Q, K and V -> attention -> projection back, without biases."""

from __future__ import annotations

import numpy as np

from attnbench import reference
from attnbench.spec import Workload
from attnbench.steps import Outputs, Rounded, StepKind, Values

FORWARD, GRADIENTS = ("out",), ("dx", "d_in", "d_back")


class Multihead(StepKind):
    """Projections and attention. `w_in` is [e, (heads + 2 kv_heads) * dim], Q, K and V side by side; `w_back` is [heads
    * dim, e]."""

    name = "multihead"

    def outputs(self, workload: Workload) -> tuple[str, ...]:
        """Return the names of the output, and of the gradients of x and of both weights."""
        return {"forward": FORWARD, "backward": GRADIENTS, "train": FORWARD + GRADIENTS}[workload.pass_]

    def draw(self, workload: Workload, seed: int) -> Values:
        """Return inputs and weights; weights of variance 1 / e keep every stage at variance 1."""
        w, rng = workload, np.random.default_rng(seed)
        width, kv_width = w.heads * w.head_dim, w.kv_heads * w.head_dim

        def normal(*shape: int) -> np.ndarray:
            return rng.standard_normal(shape, dtype=np.float32)

        return {
            "x": normal(w.batch, w.q_len, width),
            "w_in": normal(width, width + 2 * kv_width) * width**-0.5,
            "w_back": normal(width, width) * width**-0.5,
            "dout": normal(w.batch, w.q_len, width),
        }

    def reference(self, workload: Workload, values: Values, rounded: Rounded) -> Outputs:
        """Compute the outputs stage by stage in float64."""
        w = workload
        x, w_in, w_back, dout = (values[name].astype(np.float64) for name in ("x", "w_in", "w_back", "dout"))
        q, k, v = self._heads(w, rounded(x @ w_in))
        attended, _ = reference.attention(w, q, k, v)
        attended = rounded(attended).reshape(*x.shape)
        found = {"out": rounded(attended @ w_back)}
        if not w.needs_gradients:
            return found
        d_attended = rounded(dout @ w_back.T)
        grads = reference.attention_gradients(w, q, k, v, d_attended.reshape(q.shape))
        d_projected = rounded(np.concatenate([grad.reshape(*x.shape[:2], -1) for grad in grads], axis=-1))
        found |= {
            "dx": rounded(d_projected @ w_in.T),
            "d_in": rounded(np.einsum("bse,bsf->ef", x, d_projected)),
            "d_back": rounded(np.einsum("bse,bsf->ef", attended, dout)),
        }
        return found if w.pass_ == "train" else {name: found[name] for name in GRADIENTS}

    def _heads(self, w: Workload, projected: np.ndarray) -> list[np.ndarray]:
        width, kv_width = w.heads * w.head_dim, w.kv_heads * w.head_dim
        parts = np.split(projected, [width, width + kv_width], axis=-1)
        return [part.reshape(*part.shape[:2], -1, w.head_dim) for part in parts]


MULTIHEAD = Multihead()
