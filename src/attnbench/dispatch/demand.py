"""Demands: what a call asks of an implementation, read from its arrays (framework, device, pass) and its arguments."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from attnbench import frameworks
from attnbench.errors import InvalidWorkload
from attnbench.frameworks import environment_of
from attnbench.frameworks.jax.plain import kind_of_device
from attnbench.frameworks.jax.shards import Shards, shards_of
from attnbench.impls._arguments import fitting, workload_of
from attnbench.impls.partial.torch_choice import NO_RULES, Rules, current
from attnbench.masks import AnyMask, MaskShape
from attnbench.masks.device import MaskForm
from attnbench.spec import Array, Environment, Pass, Workload

META = "meta"
"""Torch's device of tensors that have a shape and no numbers, which count as a CPU's."""
Form = Literal["call", "traced", "operator", "array", "cache"]
"""How an implementation will be run: called, traced by torch.compile if it can be, as one operator of a compiled graph,
with its mask an array that is an argument of the call, or over a KV cache (Implementation.decode)."""


class Outline(NamedTuple):
    """Facts of an array that a choice depends on."""

    shape: tuple[int, ...]
    dtype: Any
    device: Any = None


class Words(NamedTuple):
    """All arguments of a call except its arrays."""

    mask: AnyMask | MaskForm | None
    scale: float | None
    softcap: float | None
    impl: str
    layout: str
    heads: int | tuple[int, int] | None
    return_lse: bool
    sinks: bool = False
    """Whether attention sinks join the rows, for which the LSE is returned too."""


class Demand(NamedTuple):
    """Workload, device and further requirements of a call, which an implementation must meet."""

    workload: Workload
    framework: str
    device: str
    with_lse: bool = False
    form: Form = "call"
    rules: Rules = NO_RULES
    """Kernels that the user allows torch; only automatic choices obey."""
    any_kv_len: bool = False
    """Whether the built call must compute any number of keys."""
    shards: Shards | None = None
    """How JAX arrays are sharded over devices; the workload is that of one device if each computes its own shards."""
    page_size: int | None = None
    """Tokens of a page of the KV cache; None if the keys of a sequence lie in one piece."""
    with_sinks: bool = False
    """Whether attention sinks will join the rows: their gradients flow through the LSE, which is as wide as q."""
    values: MaskForm | None = None
    """Form of a mask whose values are arguments of the call; the workload's mask is a stand-in of the same kinds."""

    @property
    def environment(self) -> Environment:
        """Environment of the device."""
        return environment_of(self.framework, "cpu" if self.device == META else self.device)


def demand_of(
    q: Array, k: Array, v: Array, words: Words, train: bool, form: Form = "call", framework: str = ""
) -> Demand:
    """Return what a call with these arrays asks."""
    framework = framework or framework_of(q, k, v)
    device = device_of(q, framework)
    mask, scale, softcap, _, layout, heads, return_lse, sinks = words
    how: Any = {"scale": scale, "softcap": softcap, "layout": layout, "heads": heads}
    how["pass_"] = "train" if train else "forward"
    rules = current() if framework == "torch" else NO_RULES
    if isinstance(mask, MaskForm):  # what takes its values is partitioned by XLA, so shards do not matter
        if mask.packed:
            q, k, v = (_batch_of(x, mask.sequences) for x in (q, k, v))
        a, b, _, _ = fitting(q, k, v, layout, heads)
        stand_in = mask.stand_in(MaskShape(a.batch, a.heads, a.tokens, b.tokens))
        workload = workload_of(q, k, v, mask=stand_in, **how)
        return Demand(workload, framework, device, return_lse, form, rules, values=mask, with_sinks=sinks)
    how["mask"] = mask
    workload = workload_of(q, k, v, **how)
    demand = Demand(workload, framework, device, return_lse, form, rules, with_sinks=sinks)
    shards = shards_of(q, k, v, layout, mask) if framework == "jax" else None
    if shards is None:
        return demand
    if shards.separate:
        local = (Outline(shape, array.dtype) for shape, array in zip(shards.shapes, (q, k, v)))
        demand = demand._replace(workload=workload_of(*local, **how))
    return demand._replace(shards=shards)


def _batch_of(packed: Array, sequences: int) -> Outline:
    """Return a batch of sequences of the mean length, for an array [tokens, heads, dim] of packed ones."""
    tokens, *rest = packed.shape
    return Outline((sequences, -(-tokens // sequences), *rest), packed.dtype, getattr(packed, "device", None))


def framework_of(*arrays: Array) -> str:
    """Return the framework that all arrays belong to; raise InvalidWorkload if there are several."""
    names = {frameworks.of(array) for array in arrays}
    if len(names) > 1:
        raise InvalidWorkload(f"q, k and v must be arrays of one framework, not {' and '.join(sorted(names))}.")
    return names.pop()


def device_of(array: Array, framework: str) -> str:
    """Return attnbench's name of an array's device; for a JAX array that is traced or only a shape the default one."""
    if framework == "torch":
        kind = array.device.type
        kinds = frameworks.get("torch").devices()
        return "rocm" if kind == "cuda" and "rocm" in kinds else kind
    if framework == "numpy":
        return "cpu"
    return kind_of_device(array)


def pass_of(framework: str, *arrays: Array) -> Pass:
    """Return "train" if gradients may be asked of a call: torch records it, any traced JAX array may want them."""
    if framework == "torch":
        import torch

        return "train" if torch.is_grad_enabled() and any(array.requires_grad for array in arrays) else "forward"
    if framework == "jax":
        from jax.core import Tracer

        return "train" if any(isinstance(array, Tracer) for array in arrays) else "forward"
    return "forward"


def to_layout(array: Array, source: str, target: str, heads: int | None = None) -> Array:
    """Return a view in another layout, differentiable and traceable; `heads` is needed if the source is packed."""
    if source == "packed":
        array = array.reshape(*array.shape[:2], heads, -1)
        source = "bshd"
    if target == "packed":
        array = to_layout(array, source, "bshd")
        return array.reshape(*array.shape[:2], -1)
    if source == target:
        return array
    return array.transpose(1, 2) if hasattr(array, "requires_grad") else array.transpose(0, 2, 1, 3)
