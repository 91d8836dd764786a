"""The quality of sparse attention beside dense attention: achieved sparsity, recall of attention mass, error of the
output.

There are two cases. A mask with a `blocks` part defines what is dropped: it is compared with the same mask without that
part, on the sampled rows, in float64. An approximate implementation that selects keys reports its selection, and its
LSE gives the recall: exp(its LSE - the true one) is the share of a row's attention mass that the kept keys have. Of an
exact implementation nothing is believed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from attnbench.masks.cuts import block_layout
from attnbench.spec import Config, Errors, Implementation
from attnbench.verifying.lse_and_partial import on_first_set
from attnbench.verifying.subject import Subject, Wrong
from attnbench.verifying.tolerance import relative_error

REPORTED = ("sparsity", "work")
"""Figures that an implementation reports of its selection; recall and error are measured."""


def quality_of(subject: Subject, implementation: Implementation, config: Config, errors: Errors) -> dict[str, float]:
    """Return figures by name; empty if nothing is dropped by blocks or by choice. Raises Wrong below a declared
    recall."""
    if subject.workload.pass_ == "backward":
        return {}
    chosen = implementation.quality(subject.workload, config) if implementation.approximate else None
    if chosen is None:
        if (dense := subject.draws.without_blocks) is None:
            return {}
        layout = block_layout(subject.workload.visible_mask, subject.workload.mask_shape)
        sparsity = {} if layout is None else {"sparsity": layout.sparsity}
        kept, whole = subject.draws.truths(0, gradients=False), dense.truths(0, gradients=False)
        recall = _recall([truth.lse for truth in kept], [truth.lse for truth in whole])
        error = relative_error([truth.out for truth in kept], [truth.out for truth in whole])
        return {**sparsity, "recall": recall, "output_error": error}
    inputs = subject.draws.inputs(subject.layout)[0]
    figures = {name: float(value) for name, value in chosen(inputs.q, inputs.k, inputs.v).items() if name in REPORTED}
    for name, value in figures.items():
        if not (0 < value <= 1 if name == "work" else 0 <= value <= 1):
            raise Wrong(f"reports {name} {value:g}, which must be a share of the pairs, at most 1")
    if errors.forward is not None:
        figures["output_error"] = errors.forward
    if subject.lse is not None:
        truths = subject.draws.truths(0, gradients=False)
        figures["recall"] = _recall(on_first_set(subject, subject.lse), [truth.lse for truth in truths])
    least = implementation.declared_recall
    if least is not None and "recall" not in figures:
        raise Wrong(f"declares a recall of {least:.3f}, but returns no LSE to measure it by")
    if least is not None and not figures.get("recall", 0.0) >= least:
        raise Wrong(f"recall of attention mass {figures.get('recall', 0.0):.3f} is less than the declared {least:.3f}")
    return figures


def _recall(kept: Sequence[np.ndarray], whole: Sequence[np.ndarray]) -> float:
    """Return the mean share of attention mass that is kept, over rows that see a key in the whole."""
    part, everything = (np.concatenate([lse.ravel() for lse in lses]) for lses in (kept, whole))
    seen = np.isfinite(everything)
    return float(np.exp(part[seen] - everything[seen]).mean()) if seen.any() else 1.0
