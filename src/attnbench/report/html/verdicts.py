"""What the checks found of each cell, the wrong ones included, for the view of correctness."""

from __future__ import annotations

from attnbench.report.html.cells import Cell, Cells, short
from attnbench.results.records import label
from attnbench.spec import Errors, Incorrect, Ok

FARTHEST = 1e3
"""Times the error allowed: whatever is farther off is drawn there."""


def add_verdicts(cells: Cells) -> None:
    """Give every cell that was checked its verdict and how much of the error allowed it made."""
    checked = {(label(one), one.workload.id): one for one in cells.records if isinstance(one, Ok | Incorrect)}
    for cell in cells.rows:
        record = checked.get((cell["label"], cell["workload"]))
        if record is None:
            continue
        cell["verdict"] = "right" if isinstance(record, Ok) else "wrong"
        if isinstance(record, Incorrect):
            cell |= {"why": short(record.reason)} | _errors(record.errors)
        share = share_of_allowed(record.errors)
        if share is not None:
            cell |= {"share": share, "drawn_share": min(share, FARTHEST)}


def share_of_allowed(errors: Errors | None) -> float | None:
    """The larger of the shares of output and gradients; None where neither was compared."""
    if errors is None:
        return None
    pairs = ((errors.forward, errors.forward_allowed), (errors.backward, errors.backward_allowed))
    shares = [error / allowed for error, allowed in pairs if error is not None and allowed]
    return max(shares, default=None)


def _errors(errors: Errors | None) -> Cell:
    if errors is None:
        return {}
    return {
        "error": errors.forward,
        "allowed": errors.forward_allowed,
        "gradient": errors.backward,
        "gradient_allowed": errors.backward_allowed,
        "lse": errors.lse,
        "stable": errors.stability or None,
        "hidden_nan": errors.hidden_nan or None,
    }
