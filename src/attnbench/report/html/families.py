"""Shapes in few words: what varies within a section is said of each shape, what does not is said once."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from attnbench.spec import Workload


class Families(Struct, frozen=True):
    """How the shapes of a section are told apart."""

    varying: frozenset[str]
    constant: str
    """What all shapes share, in words."""

    def family(self, workload: Workload) -> str:
        """Everything that varies but batch and length: shapes of a family lie on one line of a chart."""
        return " · ".join(self._words(workload)) or "all shapes"

    def track(self, workload: Workload) -> str:
        """Batch and family."""
        return " · ".join([f"batch {workload.batch}", *self._words(workload)])

    def shape(self, workload: Workload) -> str:
        """Batch, length and family: one shape."""
        return " · ".join([f"{workload.batch} x {length_text(workload)}", *self._words(workload, but="queries")])

    def _words(self, workload: Workload, but: str = "") -> list[str]:
        words = axis_words(workload)
        return [word for name, word in words.items() if word and name in self.varying and name != but]


def find_families(workloads: Iterable[Workload]) -> Families:
    """What varies over these workloads."""
    seen: dict[str, dict[str, None]] = {}
    for workload in workloads:
        for name, word in axis_words(workload).items():
            seen.setdefault(name, {})[word] = None
    varying = frozenset(name for name, words in seen.items() if len(words) > 1)
    constant = " · ".join(next(iter(words)) for name, words in seen.items() if name not in varying and any(words))
    return Families(varying, constant)


def axis_words(workload: Workload) -> dict[str, str]:
    """Every axis but batch and length in a word or two; empty where there is nothing to say."""
    heads = f"{workload.heads}" if workload.heads == workload.kv_heads else f"{workload.heads}:{workload.kv_heads}"
    width = f"{workload.head_dim}"
    if workload.value_dim != workload.head_dim:
        width += f"/{workload.value_dim}"
    words = {
        "pass": workload.pass_,
        "queries": "" if workload.q_len == workload.kv_len else f"{workload.q_len} queries",
        "heads": f"{heads} heads",
        "width": f"width {width}",
        "mask": workload.visible_mask.id,
        "dtype": workload.dtype,
    }
    axes = workload.axes
    extras = [f"{name} {axes[name]}" for name in ("scale", "softcap", "inputs") if name in axes]
    return words | {"extras": " ".join(extras)}


def length_text(workload: Workload) -> str:
    """512, or 11x827 where queries and keys differ in number."""
    if workload.q_len == workload.kv_len:
        return f"{workload.q_len}"
    return f"{workload.q_len}x{workload.kv_len}"
