"""Shapes in few words: what varies within a section is said of each shape, what does not is said once."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from msgspec import Struct

from attnbench.analyse.families import head_words, kind_of
from attnbench.spec import Workload

DIGEST = re.compile(r"[-+][0-9a-f]{8}\b")
"""What tells masks made of arrays apart in an id, and tells a reader nothing."""


class Families(Struct, frozen=True):
    """How the shapes of a section are told apart."""

    varying: frozenset[str]
    constant: str
    """What all shapes share, in words."""
    digests: bool = False
    """Whether masks are written with their digest, because without it two shapes would read alike."""
    named: bool = True
    """Whether shapes of models go by their names: not where two would read alike."""

    def family(self, workload: Workload) -> str:
        """Everything that varies but batch and length: shapes of a family lie on one line of a chart."""
        return " · ".join(self._words(workload)) or "all shapes"

    def track(self, workload: Workload) -> str:
        """Batch and family."""
        return " · ".join([f"batch {workload.batch}", *self._words(workload)])

    def shape(self, workload: Workload) -> str:
        """Batch, length and the model or the family it belongs to: one shape."""
        name = self.model(workload)
        words = [name] if name else self._words(workload, but="queries")
        return " · ".join([f"{workload.batch} x {length_text(workload)}", *words])

    def model(self, workload: Workload) -> str:
        """What a shape taken from a model is called there, such as "pi0 denoise"; else nothing."""
        return " ".join(workload.tags) if self.named and workload.source else ""

    def _words(self, workload: Workload, but: str = "") -> list[str]:
        words = axis_words(workload, self.digests)
        return [word for name, word in words.items() if word and name in self.varying and name != but]


def find_families(workloads: Iterable[Workload]) -> Families:
    """What varies over these workloads; as few words as tell them all apart."""
    distinct = list({workload.id: workload for workload in workloads}.values())
    tried = [_families(distinct, digests, named) for digests in (False, True) for named in (True, False)]
    return next((one for one in tried if len(set(map(one.shape, distinct))) == len(distinct)), tried[-1])


def _families(workloads: Sequence[Workload], digests: bool, named: bool) -> Families:
    seen: dict[str, dict[str, None]] = {}
    for workload in workloads:
        for name, word in axis_words(workload, digests).items():
            seen.setdefault(name, {})[word] = None
    varying = frozenset(name for name, words in seen.items() if len(words) > 1)
    constant = " · ".join(next(iter(words)) for name, words in seen.items() if name not in varying and any(words))
    return Families(varying, constant, digests, named)


def axis_words(workload: Workload, digests: bool = True) -> dict[str, str]:
    """Every axis but batch and length in a word or two; empty where there is nothing to say."""
    heads = f"{workload.heads}" if workload.heads == workload.kv_heads else f"{workload.heads}:{workload.kv_heads}"
    width = f"{workload.head_dim}"
    if workload.value_dim != workload.head_dim:
        width += f"/{workload.value_dim}"
    mask = _mask_words(workload)
    queries = "1 query" if workload.q_len == 1 else f"{workload.q_len} queries"
    words = {
        "pass": workload.pass_,
        "queries": "" if workload.q_len == workload.kv_len else queries,
        "heads": head_words(heads, width),
        "mask": mask if digests else DIGEST.sub("", mask),
        "dtype": workload.dtype,
    }
    return words | {"extras": " ".join(f"{name} {value}" for name, value in workload.extras.items())}


def kind_words(workload: Workload) -> str:
    """The kind of shapes in the words of the answer, for the filter."""
    return f"batch {workload.batch} · {kind_of(workload)}"


def _mask_words(workload: Workload) -> str:
    """The id of the mask, its kinds spelled as everywhere else: block_causal, which ids write as one word."""
    mask = workload.visible_mask
    told = mask.id
    for kind in mask.kinds:
        told = re.sub(rf"\b{kind.replace('_', '')}(?![a-z])", kind, told)
    return told


def length_text(workload: Workload) -> str:
    """512, or 11 x 827 where queries and keys differ in number."""
    if workload.q_len == workload.kv_len:
        return f"{workload.q_len}"
    return f"{workload.q_len} x {workload.kv_len}"
