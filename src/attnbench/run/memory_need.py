"""What a cell will need in memory at least, so that a plan can say what cannot fit before anything is tried."""

from __future__ import annotations

from attnbench.spec import DTYPE_BYTES, Environment, Implementation, Workload
from attnbench.verifying.draws import SETS
from attnbench.workloads.cost import demand

SCORE_COPIES = {"forward": 2, "backward": 3, "train": 3}
"""Logits and probabilities, and their gradient, live at once in an implementation that stores them."""
GB = 1e9


def least_bytes(implementation: Implementation, workload: Workload) -> int:
    """Input sets, outputs and stored scores."""
    need = demand(workload)
    scores = need.scores_bytes * SCORE_COPIES[workload.pass_] if implementation.materialises_scores else 0
    return SETS * need.io_bytes + need.output_bytes + scores


def inputs_do_not_fit(workload: Workload, environment: Environment) -> str | None:
    """The same of Q, K and V alone, by arithmetic: a mask of such a size must not even be asked how much it hides."""
    w = workload
    keys = w.kv_len * w.kv_heads * (w.head_dim + w.value_dim)
    need = SETS * w.batch * (w.q_len * w.heads * w.head_dim + keys) * DTYPE_BYTES[w.dtype]
    return _too_much(need, environment)


def does_not_fit(implementation: Implementation, workload: Workload, environment: Environment) -> str | None:
    """`needs 38 GB, 24 GB here`, or None."""
    return _too_much(least_bytes(implementation, workload), environment)


def _too_much(need: int, environment: Environment) -> str | None:
    have = environment.memory_bytes
    if have is None or need <= have:
        return None
    return f"needs {_size_text(need)}, {_size_text(have)} here"


def _size_text(size: int) -> str:
    return f"{_rounded(size / GB)} GB" if size < 1000 * GB else f"{_rounded(size / GB / 1000)} TB"


def _rounded(value: float) -> str:
    """Three significant digits without an exponent."""
    return f"{float(f'{value:.3g}'):.10g}"
