"""Families of workloads (alike but for length and batch) and their tracks (alike but for length).

One sentence of advice answers for a family; an exponent or a crossover is read along a track.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache

from msgspec import Struct

from attnbench.policy.shapes import mask_kind, part_kind
from attnbench.results.records import device_of, framework_of, grouped, is_anchor, label
from attnbench.spec import Pass, Record, Workload

FRAMEWORKS = {"torch": "PyTorch", "jax": "JAX", "numpy": "NumPy"}
SIZED = ("window", "prefix", "dilated")
"""Kinds of masks whose sizes a family leaves open."""
OVERALL = "Overall"
"""Title in place of a framework, for advice that compares all frameworks."""
NO_MASK = "full"


class Family(Struct, frozen=True, kw_only=True):
    """The axes that workloads have in common across lengths and batches, on one device."""

    device: str
    framework: str
    dtype: str
    heads: str
    """Query heads to key/value heads: 32:8."""
    head_dim: str
    mask: str
    """Kinds of its parts, such as causal or causal&lengths, or causal (top-left) if the lengths differ. A mask that
    hides nothing says so: kernels that refuse such a mask if it hides something take it as no mask."""
    pass_: Pass
    shape: str = ""
    """Empty if there are as many queries as keys; else decode (one query) or rectangular."""
    extras: str = ""

    @property
    def title(self) -> str:
        """One line for people, without the device."""
        return f"{FRAMEWORKS.get(self.framework, self.framework)} · {self.shapes}"

    @property
    def shapes(self) -> str:
        """One line for people, without the device and the framework."""
        facts = [self.shape, self.head_words, self.mask, self.dtype, self.pass_, self.extras]
        return " · ".join(fact for fact in facts if fact)

    @property
    def head_words(self) -> str:
        """Heads and their width: 32:8 heads of 128."""
        return f"{self.heads} head{'' if self.heads == '1' else 's'} of {self.head_dim}"


class Track(Struct, frozen=True, kw_only=True):
    """A family at one batch, with one mask and, if queries do not grow with the keys, one number of queries."""

    family: Family
    batch: int
    mask: str
    q_len: int | None = None

    @property
    def title(self) -> str:
        """Facts that the family's title leaves out."""
        queries = "" if self.q_len in (None, 1) else f"{self.q_len} queries"
        mask = self.mask if any(kind in self.family.mask for kind in SIZED) else ""
        return ", ".join(fact for fact in (f"batch {self.batch}", queries, mask) if fact)


Tracks = dict[Track, dict[str, list[Record]]]
"""Track -> name of the implementation -> its records, shortest first, one per length."""


def length(workload: Workload) -> int:
    """Return the tokens that grow along a track: the keys, and the queries with them unless their number is fixed."""
    return workload.kv_len


def length_text(workload: Workload) -> str:
    """Return the length as text: 512, or 11 x 827 if queries and keys differ in number."""
    return f"{workload.q_len}" if workload.q_len == workload.kv_len else f"{workload.q_len} x {workload.kv_len}"


def family_of(record: Record) -> Family:
    """Return the family that a record belongs to."""
    return family_of_shape(record.workload, device_of(record), framework_of(record))


@lru_cache(maxsize=4096)
def family_of_shape(w: Workload, device: str = "", framework: str = "") -> Family:
    """Return the family of a workload; its words do without the device and the framework."""
    kinds = [part_kind(part, w.mask_shape) for part in w.visible_mask.split()]
    idle = kinds != [NO_MASK] and mask_kind(w) == NO_MASK
    return Family(
        device=device,
        framework=framework,
        dtype=w.dtype,
        heads=f"{w.heads}" if w.heads == w.kv_heads else f"{w.heads}:{w.kv_heads}",
        head_dim=f"{w.head_dim}" if w.head_dim == w.value_dim else f"{w.head_dim}/{w.value_dim}",
        mask="&".join(kinds) + (" that hides nothing" if idle else ""),
        pass_=w.pass_,
        shape="" if w.q_len == w.kv_len else "decode" if w.q_len == 1 else "rectangular",
        extras=" ".join(f"{name} {value}" for name, value in w.extras.items()),
    )


def tracks(records: Iterable[Record]) -> Tracks:
    """Return every track of the records, without the anchors; of several records of one cell the last."""
    cells = {(family_of(record), record.cell.id): record for record in records if not is_anchor(record)}
    return tracks_of(grouped(cells.values(), family_of))


def tracks_of(families: Mapping[Family, Iterable[Record]]) -> Tracks:
    """Return every track of the families."""
    found: dict[Track, dict[str, dict[int, Record]]] = {}
    for family, members in families.items():
        for record in members:
            w = record.workload
            q_len = None if w.q_len == w.kv_len else w.q_len
            track = Track(family=family, batch=w.batch, mask=w.visible_mask.id, q_len=q_len)
            found.setdefault(track, {}).setdefault(label(record), {})[length(w)] = record
    return {
        track: {name: [one[n] for n in sorted(one)] for name, one in names.items()} for track, names in found.items()
    }
