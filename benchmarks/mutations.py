"""Does verification find wrong kernels, and only those? `python benchmarks/mutations.py [--device cuda] [-o FILE]`.

Wrong kernels of every kind (a mask parameter off by one, a scale off by 0.5 %, a soft cap that is missing, one row, one
key or one head wrong, a term of a gradient left out, an LSE in another base) are examined as `attnbench run` examines
what it times, over masks, sizes, dtypes and passes; each must be called incorrect. Right kernels, ours of the same form
and every installed implementation, are examined on the same workloads; each must pass. The result has one row per wrong
kernel: in how many cases it was found, and the smallest and largest size.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from attnbench import frameworks, masks, registry
from attnbench.measuring.session import refusal
from attnbench.run.environment import commit_of
from attnbench.run.machine import isa_cap
from attnbench.spec import Call, Config, Environment, Implementation, Workload
from attnbench.verifying.checks import examine
from attnbench.verifying.draws import Draws
from attnbench.verifying.subject import Subject, Wrong

os.environ.update(isa_cap())  # before torch is imported

import torch

from attnbench.frameworks.torch.plain import TorchNamespace

DTYPES = ("float32", "float16", "bfloat16")
SIZES = {"cpu": (64, 256, 1024, 4096), "cuda": (512, 2048, 8192)}
HEADS, KV_HEADS, DIM = 4, 2, 64
BUDGET_S = {"cpu": 600.0, "cuda": 230.0}
COMMIT = commit_of()
"""Of the code that is examined, taken before anything is."""
Tweak = Callable[..., Any]
"""(b, h, q, kv, visible) -> visible."""


@dataclass(frozen=True)
class Kernel:
    """Attention in float32, written out, of a workload that may not be the one that was asked for."""

    workload: Workload
    backward: Workload | None = None
    """What the gradients are of, where that is another."""
    tweak: Tweak | None = None
    clamp: float | None = None
    overflows: bool = False
    """Whether exponentials are taken of the logits as they are, and what overflows becomes 0."""
    start: float = -float("inf")
    """Where the running maximum of the softmax starts; a row whose weights are all 0 becomes 0."""
    fill: float = -float("inf")
    """What hidden logits are set to."""
    added: float | None = None
    """What is added to hidden logits instead."""
    padding: str = ""
    """"key", "value" or "token": keys of zeros are hidden, keys with a value of zeros, or keys with both; "logit":
    logits of exactly 0 are; "query": queries of zeros give 0."""
    skips: float = 0.0
    """Weights below this share of the largest of the row are left out."""
    replaces_nan: bool = False
    """Whether NaN of the output is replaced by 0."""
    narrow_sums: bool = False
    """Whether weights times values are added up before they are normalised, and no further than float16 goes."""
    lost_if_large: int = 0
    """One row in so many is the mean of V if its largest logit is above 200."""
    value_clamp: float | None = None
    half_gradients: bool = False
    """Whether the backward pass is computed in float16."""
    slope: bool = True
    delta: bool = True
    dq_scale: float = 1.0
    dk_scale: float = 1.0
    lost: dict[str, int] = field(default_factory=dict)
    """Rows of a gradient that are left 0."""
    missing: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Gradient -> (row, key): the pair that is left out of it."""
    group_sum: bool = True
    reads_memory: str = ""
    """Axes of dO that are read as if they were dense: "all", or "last"."""
    lse: Callable[[torch.Tensor], torch.Tensor] = lambda lse: lse

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return _Attention.apply(q, k, v, self)

    def with_lse(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(out, lse)."""
        parts = self.parts(self.workload, q, k, v)
        return parts["out"].to(q.dtype).transpose(1, 2).contiguous(), self.lse(parts["lse"])

    def parts(self, w: Workload, *arrays: torch.Tensor) -> dict[str, torch.Tensor]:
        """Everything in between, bhsd and float32."""
        q, k, v = (x.transpose(1, 2).float() for x in arrays)
        k, v = (x.repeat_interleave(w.group, 1) for x in (k, v))
        raw = q @ k.mT * w.softmax_scale
        logits, slope = raw, torch.ones(())
        if w.softcap is not None:
            squashed = torch.tanh(raw / w.softcap)
            logits, slope = w.softcap * squashed, 1 - squashed * squashed
        if self.clamp is not None:
            logits = logits.clamp(-self.clamp, self.clamp)
        index = [
            torch.arange(size, device=q.device).view([-1 if n == axis else 1 for n in range(4)])
            for axis, size in enumerate(w.mask_shape)
        ]
        space = TorchNamespace(q.device)
        visible = w.visible_mask.predicate(w.mask_shape, space)(*index)
        if (weight := w.visible_mask.log_weight(w.mask_shape, space)) is not None:
            logits = logits + weight(*index)
        if self.tweak is not None:
            visible = self.tweak(*index, visible)
        no_key, no_value = ((x == 0).all(-1)[:, :, None] for x in (k, v))
        if self.padding in ("key", "value", "token", "logit"):
            empty = {"key": no_key, "value": no_value, "token": no_key & no_value, "logit": raw == 0}[self.padding]
            logits = logits.masked_fill(empty, float("-inf"))
        if self.added is not None:
            logits = torch.where(visible, logits, logits + self.added)
        else:
            logits = logits.masked_fill(~visible, self.fill)
        lse = logits.logsumexp(-1)
        weights = (logits - lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp()
        if self.start > -torch.inf:
            powers = (logits - logits.amax(-1, keepdim=True).clamp(min=self.start)).exp()
            weights = (powers / powers.sum(-1, keepdim=True)).nan_to_num(0.0)
        if self.overflows:
            powers = logits.exp()
            weights = (powers / powers.sum(-1, keepdim=True)).nan_to_num(0.0, 0.0, 0.0)
        if self.skips:
            powers = (logits - logits.amax(-1, keepdim=True)).exp()
            powers = powers * (powers >= self.skips)
            weights = (powers / powers.sum(-1, keepdim=True)).nan_to_num(0.0)
        if self.padding == "query":
            weights = weights.masked_fill((q == 0).all(-1)[..., None], 0.0)
        if self.value_clamp is not None:
            v = v.clamp(-self.value_clamp, self.value_clamp)
        if self.lost_if_large:
            wrong = (index[2] % self.lost_if_large == 0) & (logits.amax(-1, keepdim=True) > 200)
            weights = torch.where(wrong, visible / visible.sum(-1, keepdim=True), weights)
        out = weights @ v
        if self.replaces_nan:
            out = out.nan_to_num(0.0)
        if self.narrow_sums:
            powers = (logits - logits.amax(-1, keepdim=True)).exp()
            out = (powers @ v).clamp(-65504, 65504) / powers.sum(-1, keepdim=True)
        return {"q": q, "k": k, "v": v, "p": weights, "out": out, "lse": lse, "slope": slope}

    def gradients(self, *arrays: torch.Tensor, dout: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """dq, dk and dv, bshd."""
        w = self.backward or self.workload
        parts = self.parts(w, *arrays)
        if self.reads_memory:
            dense = torch.empty(dout.shape).stride()
            dout = dout.as_strided(dout.shape, dense if self.reads_memory == "all" else (*dout.stride()[:3], 1))
        dout = dout.transpose(1, 2).float()
        if self.half_gradients:
            dout = dout.half().float()
        shared = (dout * parts["out"]).sum(-1, keepdim=True) if self.delta else 0.0
        dlogits = parts["p"] * (dout @ parts["v"].mT - shared)
        if self.slope:
            dlogits = dlogits * parts["slope"]
        dlogits = dlogits * w.softmax_scale
        if self.half_gradients:
            dlogits = dlogits.half().float()
        weights = {"dq": dlogits, "dk": dlogits, "dv": parts["p"]}
        for name, (row, key) in self.missing.items():
            weights[name] = weights[name].clone()
            weights[name][:, :, row, key] = 0
        found = {
            "dq": weights["dq"] @ parts["k"] * self.dq_scale,
            "dk": weights["dk"].mT @ parts["q"] * self.dk_scale,
            "dv": weights["dv"].mT @ dout,
        }
        for name in ("dk", "dv"):
            grouped = found[name].unflatten(1, (w.kv_heads, w.group))
            found[name] = grouped.sum(2) if self.group_sum else grouped[:, :, 0]
        for name, row in self.lost.items():
            found[name][:, :, row] = 0
        return tuple(found[name].to(arrays[0].dtype).transpose(1, 2).contiguous() for name in ("dq", "dk", "dv"))


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kernel: Kernel) -> torch.Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.kernel = kernel
        return kernel.parts(kernel.workload, q, k, v)["out"].to(q.dtype).transpose(1, 2).contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        return *ctx.kernel.gradients(*ctx.saved_tensors, dout=grads[0]), None


class Mutant(Implementation):
    """A kernel under a name."""

    framework = "torch"

    def __init__(self, name: str, kernel: Kernel, lse: bool = False) -> None:
        self.name, self._kernel, self._lse = name, kernel, lse

    def supports(self, workload: Workload, environment: Environment) -> str | None:
        return None

    def build(self, workload: Workload, config: Config) -> Call:
        return self._fitted(workload)

    def build_lse(self, workload: Workload, config: Config) -> Call | None:
        return self._fitted(workload).with_lse if self._lse else None

    def _fitted(self, workload: Workload) -> Kernel:
        """The kernel, made small where gradients are proved on a smaller shape: right there, so that only what is
        found at the shape itself counts."""
        same = workload.mask_shape == self._kernel.workload.mask_shape
        return self._kernel if same else Kernel(workload)


def changed(w: Workload, **fields: Any) -> Workload:
    return msgspec.structs.replace(w, **fields)


def _moved(ids: np.ndarray, at: int) -> np.ndarray:
    ids = ids.copy()
    ids[..., at] = ids[..., at - 1]
    return ids


def _blocks(n: int, flip: bool) -> np.ndarray:
    count = -(-n // 16)
    kept = np.random.default_rng(0).random((count, count)) < 0.5
    np.fill_diagonal(kept, True)
    if flip:
        kept[count - 1, count // 2] ^= True
    return kept


def mask_cases(n: int) -> dict[str, tuple[Any, dict[str, Any]]]:
    """Mask -> {mutation: another mask, or a Tweak}."""
    rng = np.random.default_rng(1)
    ids, left = np.sort(rng.integers(0, max(2, n // 20), n)), n // 3
    cut = int(np.flatnonzero(np.diff(ids))[len(np.flatnonzero(np.diff(ids))) // 2]) + 1
    holes = rng.random((2, n)) < 0.8
    holes[:, 0] = True
    hidden = np.argwhere(~holes)[len(np.argwhere(~holes)) // 2]
    solid = np.argwhere(holes)[len(np.argwhere(holes)) // 2]
    more, less = holes.copy(), holes.copy()
    more[tuple(hidden)], less[tuple(solid)] = True, False
    lengths = np.array([n - n // 3, n])
    segment = max(8, n // 4)
    return {
        "full": (masks.full(), {"middle key dropped": lambda b, h, q, kv, seen: seen & (kv != n // 2)}),
        "causal": (masks.causal(), {
            "diagonal + 1": lambda b, h, q, kv, seen: seen | (kv == q + 1),
            "diagonal - 1": lambda b, h, q, kv, seen: seen & ((kv != q) | (q == 0)),
        }),
        "window": (masks.window(left, 0), {
            "left - 1": masks.window(left - 1, 0), "left + 1": masks.window(left + 1, 0),
            "right + 1": masks.window(left, 1),
        }),
        "two-sided window": (masks.window(left, 5), {"right - 1": masks.window(left, 4)}),
        "prefix": (masks.prefix(left), {"n - 1": masks.prefix(left - 1), "n + 1": masks.prefix(left + 1)}),
        "documents": (masks.documents(ids), {"one boundary moved": masks.documents(_moved(ids, cut))}),
        "block_causal": (masks.block_causal(ids), {"one boundary moved": masks.block_causal(_moved(ids, cut))}),
        "lengths": (masks.lengths(lengths), {
            "one length - 1": masks.lengths(lengths - [1, 0]), "one length + 1": masks.lengths(lengths - [-1, 0])
        }),
        "valid": (masks.valid(holes), {"one hole open": masks.valid(more), "one hole more": masks.valid(less)}),
        "dilated": (masks.dilated([segment, n], [1, 4]), {
            "segment + 1": masks.dilated([segment + 1, n], [1, 4]),
            "rate + 1": masks.dilated([segment, n], [1, 5]),
            "offset by group": masks.dilated([segment, n], [1, 4], "group")
            if HEADS > 4 else masks.dilated([segment, n], [1, 3]),
        }),
        "blocks": (masks.blocks(_blocks(n, False), 16), {"one block flipped": masks.blocks(_blocks(n, True), 16)}),
        "causal documents": (masks.causal() & masks.documents(ids), {
            "one boundary moved": masks.causal() & masks.documents(_moved(ids, cut))
        }),
    }  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One kernel on one workload: `right` where it computes what is asked."""

    mutation: str
    workload: Workload
    kernel: Kernel
    lse: bool = False
    right: bool = False


def cases(n: int, dtype: str, pass_: str) -> Iterator[Case]:
    """All of a size, a dtype and a pass; the first of each workload is right."""
    base = Workload(batch=2, q_len=n, heads=HEADS, kv_heads=KV_HEADS, head_dim=DIM, dtype=dtype, pass_=pass_)  # pyright: ignore
    for name, (mask, others) in mask_cases(n).items():
        w = changed(base, mask=mask)
        yield Case(f"right: {name}", w, Kernel(w), lse=pass_ == "forward", right=True)
        for what, other in others.items():
            wrong = Kernel(w, tweak=other) if callable(other) else Kernel(changed(w, mask=other))
            yield Case(f"{name}: {what}", w, wrong)
            if pass_ != "forward" and not callable(other):
                yield Case(f"{name}: {what}, in the backward pass", w, Kernel(w, backward=changed(w, mask=other)))
    yield from _parameters(base)
    yield from _parameters(changed(base, mask=masks.causal()))
    yield from _low_logits(base)
    yield from _low_logits(changed(base, mask=masks.causal()))
    yield from _places(changed(base, mask=masks.causal()), n)
    yield from _places(base, n)
    if pass_ != "forward":
        yield from _gradients(changed(base, mask=masks.causal()), n)
        yield from _missing_pairs(changed(base, mask=masks.causal()), n)
        yield from _missing_pairs(base, n)
    if pass_ == "forward":
        yield from _lses(changed(base, mask=masks.causal()))
        rectangle = changed(base, q_len=n // 2, mask=masks.causal())
        yield Case("right: rectangle", rectangle, Kernel(rectangle), right=True)
        yield Case("causal: aligned top-left", rectangle, Kernel(changed(rectangle, mask=masks.causal("top-left"))))
        decode = changed(base, q_len=1)
        yield Case("right: decode", decode, Kernel(decode), right=True)
        yield Case(
            "decode: one key dropped", decode, Kernel(decode, tweak=lambda b, h, q, kv, seen: seen & (kv != n // 2))
        )
        yield Case("decode: scale x 1.005", decode, Kernel(changed(decode, scale=1.005 * DIM**-0.5)))


def _parameters(w: Workload) -> Iterator[Case]:
    kind = w.visible_mask.id
    for factor in (1.005, 0.995):
        other = changed(w, scale=factor * w.softmax_scale)
        yield Case(f"{kind}: scale x {factor:g}", w, Kernel(other))
        if w.needs_gradients:
            yield Case(f"{kind}: scale x {factor:g}, in the backward pass", w, Kernel(w, backward=other))
    for limit in (8.0, 30.0, 100.0):
        yield Case(f"{kind}: logits clamped to {limit:g}", w, Kernel(w, clamp=limit))
    yield Case(f"{kind}: no maximum subtracted, overflow becomes 0", w, Kernel(w, overflows=True))
    if w.pass_ != "backward":
        yield Case(f"{kind}: one row in eight is lost at logits above 200", w, Kernel(w, lost_if_large=8))
    yield Case(f"{kind}: soft cap of 300 that was not asked for", w, Kernel(changed(w, softcap=300.0)))
    if w.pass_ != "backward":
        yield Case(f"{kind}: V clamped to 20", w, Kernel(w, value_clamp=20.0))
    if w.needs_gradients and w.dtype == "bfloat16":
        yield Case(f"{kind}: gradients in float16", w, Kernel(w, half_gradients=True))
    for cap in (30.0, 50.0):
        capped = changed(w, softcap=cap)
        yield Case(f"right: {kind}: softcap {cap:g}", capped, Kernel(capped), right=True)
        yield Case(f"{kind}: softcap {cap:g} dropped", capped, Kernel(w))
        yield Case(f"{kind}: softcap {cap:g} x 1.1", capped, Kernel(changed(capped, softcap=1.1 * cap)))
        if w.needs_gradients:
            yield Case(f"{kind}: softcap {cap:g}: derivative dropped", capped, Kernel(capped, slope=False))
            yield Case(
                f"{kind}: softcap {cap:g} x 1.1, in the backward pass",
                capped,
                Kernel(capped, backward=changed(capped, softcap=1.1 * cap)),
            )


def _low_logits(w: Workload) -> Iterator[Case]:
    """Kernels that are right while some visible logit of every row is near 0 or above."""
    kind = w.visible_mask.id
    for start in (0.0, -50.0, -1000.0):
        yield Case(f"{kind}: running maximum starts at {start:g}", w, Kernel(w, start=start))
    for what in ("key", "logit", "value", "token", "query"):
        if w.pass_ != "backward" or what != "logit":
            yield Case(f"{kind}: a {what} of 0 is taken for padding", w, Kernel(w, padding=what))
    yield Case(f"{kind}: weights below e^-8 of the largest are left out", w, Kernel(w, skips=float(np.exp(-8))))
    if w.pass_ != "backward":
        yield Case(f"{kind}: NaN becomes 0", w, Kernel(w, replaces_nan=True))
    if w.pass_ != "backward" and w.dtype == "float16":
        yield Case(f"{kind}: unnormalised sums end at 65504", w, Kernel(w, narrow_sums=True))
    if kind == "full":
        return
    # Of finite products in float16 no logit of these sizes is below -8160.
    for value in (-1000.0,) if w.dtype == "float16" else (-1000.0, -1e4, -3e4):
        yield Case(f"{kind}: hidden logits are {value:g}", w, Kernel(w, fill=value))
        yield Case(f"{kind}: {value:g} is added to hidden logits", w, Kernel(w, added=value))


def _places(w: Workload, n: int) -> Iterator[Case]:
    kind = w.visible_mask.id
    first = max(4, n // 4 + 3)

    def half(q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        return kv > q // 2 if kind == "causal" else kv < n // 2

    yield Case(f"{kind}: four rows of every head see half of the keys", w, Kernel(w, tweak=lambda b, h, q, kv, seen: (
        seen & (half(q, kv) | (q < first) | (q >= first + 4))
    )))  # fmt: skip
    yield Case(f"{kind}: one row of one head sees half of the keys", w, Kernel(w, tweak=lambda b, h, q, kv, seen: (
        seen & (half(q, kv) | (q != first) | (h != 1) | (b != 1))
    )))  # fmt: skip
    yield Case(f"{kind}: one head misses its first key", w, Kernel(w, tweak=lambda b, h, q, kv, seen: (
        seen & ((kv != 0) | (h != 1) | (b != 0) | (q == 0))
    )))  # fmt: skip
    yield Case(f"{kind}: last row misses a key", w, Kernel(w, tweak=lambda b, h, q, kv, seen: (
        seen & ((kv != n // 3) | (q != n - 1))
    )))  # fmt: skip


def _gradients(w: Workload, n: int) -> Iterator[Case]:
    right = Kernel(w)
    yield Case("delta term dropped", w, replace(right, delta=False))
    yield Case("scale missing in dQ", w, replace(right, dq_scale=1 / w.softmax_scale))
    yield Case("scale missing in dK", w, replace(right, dk_scale=1 / w.softmax_scale))
    yield Case("dQ x 1.005", w, replace(right, dq_scale=1.005))
    yield Case("one row of dK lost", w, replace(right, lost={"dk": n // 2}))
    yield Case("one row of dV lost", w, replace(right, lost={"dv": n // 2}))
    yield Case("one row of dQ lost", w, replace(right, lost={"dq": n // 2}))
    for axes in ("all", "last"):
        yield Case(f"dO read as if its strides were dense: {axes}", w, replace(right, reads_memory=axes))
    yield Case("grouped heads not summed", w, replace(right, group_sum=False))


def _missing_pairs(w: Workload, n: int) -> Iterator[Case]:
    pair = (n - 1, n // 3)
    kind = w.visible_mask.id
    for name in ("dq", "dk", "dv"):
        yield Case(f"{kind}: one pair missing in d{name[1].upper()}", w, Kernel(w, missing={name: pair}))


def _lses(w: Workload) -> Iterator[Case]:
    right = Kernel(w)
    yield Case("LSE off by 1e-3", w, replace(right, lse=lambda lse: lse + 1e-3), lse=True)
    yield Case("LSE off by log 2", w, replace(right, lse=lambda lse: lse + float(np.log(2))), lse=True)
    yield Case("LSE in base 2", w, replace(right, lse=lambda lse: lse / float(np.log(2))), lse=True)
    yield Case("LSE without a maximum", w, replace(right, lse=lambda lse: lse.exp().log()), lse=True)
    yield Case("LSE not below -100", w, replace(right, lse=lambda lse: lse.clamp(min=-100)), lse=True)
    yield Case(
        "LSE 5 % too large above 50",
        w,
        replace(right, lse=lambda lse: torch.where(lse > 50, lse * 1.05, lse)),
        lse=True,
    )


class Bench:
    """Examines kernels on one device, keeping the draws of the last workload."""

    def __init__(self, device: str) -> None:
        self.device = device
        self._environments: dict[str, Environment] = {}
        self._draws: tuple[tuple[str, str, int], Draws] | None = None

    def verdict(self, implementation: Implementation, workload: Workload, seed: int = 1) -> tuple[str, str]:
        """(status, reason) as the verification of a run finds it; `unsupported` where it refuses."""
        name = implementation.framework
        if name not in self._environments:
            self._environments[name] = frameworks.get(name).environment(self.device)
        if reason := refusal(implementation, workload, self._environments[name]):
            return "unsupported", reason
        try:
            examine(self.subject(implementation, workload, seed), thorough=False)
        except Wrong as wrong:
            return "incorrect", str(wrong)
        except NotImplementedError as refused:
            return "unsupported", str(refused)
        except Exception as error:
            return "failed", f"{type(error).__name__}: {error}"[:300]
        return "ok", ""

    def subject(self, implementation: Implementation, workload: Workload, seed: int = 1) -> Subject:
        """What verification examines of a kernel that runs here."""
        framework, layout = frameworks.get(implementation.framework), implementation.layout
        framework = implementation.apparatus(framework, {})
        key = (implementation.framework, workload.id, seed)
        if self._draws is None or self._draws[0] != key:
            self._draws = (key, Draws(framework, self.device, workload, seed))
        draws = self._draws[1]
        programs = framework.programs(implementation.build(workload, {}), workload.pass_, draws.inputs(layout)[0])
        lse = None if workload.pass_ == "backward" else implementation.build_lse(workload, {})
        gradient = implementation.lse_gradient
        return Subject(framework, self.device, workload, layout, programs, draws, lse, None, gradient)


@dataclass
class Tally:
    """What became of the wrong kernels, by mutation, and of the right ones, by implementation."""

    found: dict[str, list[int]] = field(default_factory=dict)
    missed: list[dict[str, str]] = field(default_factory=list)
    right: dict[str, int] = field(default_factory=dict)
    alarms: list[dict[str, str]] = field(default_factory=list)
    failed: list[dict[str, str]] = field(default_factory=list)
    tried: dict[str, list[int]] = field(default_factory=dict)

    def wrong_kernel(self, case: Case, status: str, reason: str) -> None:
        size = case.workload.kv_len
        self.tried.setdefault(case.mutation, []).append(size)
        if status == "incorrect":
            self.found.setdefault(case.mutation, []).append(size)
        else:
            self.missed.append({"mutation": case.mutation, "workload": case.workload.id, "status": status + reason})

    def right_kernel(self, name: str, workload: Workload, status: str, reason: str) -> None:
        if status == "unsupported":
            return
        if status == "failed":
            self.failed.append({"implementation": name, "workload": workload.id, "reason": reason})
            return
        self.right[name] = self.right.get(name, 0) + 1
        if status == "incorrect":
            self.alarms.append({"implementation": name, "workload": workload.id, "reason": reason})

    def as_json(self) -> dict[str, Any]:
        rows = [
            {
                "mutation": name,
                "cases": len(sizes),
                "found": len(self.found.get(name, ())),
                "sizes": sorted(set(sizes)),
                "smallest_found": min(self.found.get(name, ()), default=None),
            }
            for name, sizes in self.tried.items()
        ]
        return {
            "wrong_cells": sum(row["cases"] for row in rows),
            "found_cells": sum(row["found"] for row in rows),
            "right_cells": sum(self.right.values()),
            "false_alarms": len(self.alarms),
            "mutations": rows,
            "missed": self.missed,
            "right": self.right,
            "alarms": self.alarms,
            "failed": self.failed,
        }

    def table(self) -> str:
        """Markdown."""
        return table(self.as_json())


def joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Add up what several shards found, on one kind of device."""
    whole = {name: parts[0][name] for name in ("device", "cpu", "packages", "dtypes", "passes")}
    whole["commit"] = ", ".join(sorted({one for part in parts for one in part["commit"].split(", ")}))
    rows: dict[str, dict[str, Any]] = {}
    for row in (row for part in parts for row in part["mutations"]):
        known = rows.setdefault(row["mutation"], {**row, "cases": 0, "found": 0})
        smallest = [size for size in (known["smallest_found"], row["smallest_found"]) if size is not None]
        known.update(
            cases=known["cases"] + row["cases"],
            found=known["found"] + row["found"],
            sizes=sorted({*known["sizes"], *row["sizes"]}),
            smallest_found=min(smallest, default=None),
        )
    right = Counter[str]()
    for part in parts:
        right.update(part["right"])
    counts = ("wrong_cells", "found_cells", "right_cells", "false_alarms", "spent_s")
    return {
        **whole,
        "shards": sum(part.get("shards", 1) for part in parts),
        **{name: round(sum(part[name] for part in parts), 1) for name in counts},
        "mutations": list(rows.values()),
        **{name: [one for part in parts for one in part[name]] for name in ("missed", "alarms", "failed")},
        "right": dict(right.most_common()),
    }


def table(found: dict[str, Any]) -> str:
    """Write the outcome as Markdown."""
    lines = ["| wrong kernel | found | sizes tried | smallest found |", "| --- | --- | --- | --- |"]
    for row in found["mutations"]:
        sizes = ", ".join(str(n) for n in row["sizes"])
        lines.append(f"| {row['mutation']} | {row['found']} of {row['cases']} | {sizes} | {row['smallest_found']} |")
    lines.append("")
    lines.append(
        f"Wrong kernels found: {found['found_cells']} of {found['wrong_cells']}. "
        f"Right kernels called wrong: {found['false_alarms']} of {found['right_cells']}."
    )
    return "\n".join(lines)


def controls(sizes: list[int], dtypes: list[str], passes: list[str], seed: int) -> Iterator[Workload]:
    """Workloads for right kernels, in random order."""
    found = [
        case.workload
        for n in sizes
        for dtype in dtypes
        for pass_ in passes
        for case in cases(n, dtype, pass_)
        if case.right
    ]
    yield from (found[n] for n in np.random.default_rng(seed).permutation(len(found)))


def random_workload(rng: np.random.Generator, device: str) -> Workload:
    """Draw a workload for right kernels: shapes, masks, dtypes and passes of every kind, most of them small."""

    def one(*choices: Any) -> Any:
        return choices[rng.integers(len(choices))]

    largest = 3e6 if device == "cpu" else 1e9
    while True:
        q_len = int(one(1, 8, 16, 33, 64, 100, 128, 256, 512, *(() if device == "cpu" else (1024, 2048))))
        kv_len = int(one(q_len, q_len, q_len, 2 * q_len, q_len + 7, 1024, max(4, q_len // 2)))
        batch, kv_heads = int(one(1, 1, 2, 3)), int(one(1, 2, 4))
        heads = kv_heads * int(one(1, 1, 2, 4, 8))
        head_dim = int(one(16, 32, 64, 64, 72, 80, 96, 128, 256))
        if batch * heads * q_len * kv_len > largest:
            continue
        ids = np.sort(rng.integers(0, max(2, kv_len // 8), kv_len))
        options = [
            None, None, masks.causal(), masks.causal(), masks.causal("top-left"),
            masks.window(int(one(0, 1, 4, 64)), 0), masks.window(int(one(1, 3, 8)), int(one(1, 3))),
            masks.prefix(max(1, q_len // 3)),
            masks.lengths([int(one(1, min(2, kv_len), min(5, kv_len), kv_len // 2, kv_len)) for _ in range(batch)]),
            masks.valid(rng.random((batch, kv_len)) < 0.7),
        ]  # fmt: skip
        slopes = 2.0 ** -np.arange(1, heads + 1)[:, None, None]
        distance = np.abs(np.arange(q_len)[:, None] + kv_len - q_len - np.arange(kv_len))
        options += [
            masks.dense(one(0.3, 1.0, 3.0) * rng.standard_normal((heads, q_len, kv_len)).astype(np.float32)),
            masks.dense((-slopes * distance).astype(np.float32)),
        ]
        if q_len == kv_len:
            options.append(masks.dilated([max(8, kv_len // 4), kv_len], [1, 3]))
        if q_len <= kv_len:
            options += [masks.documents(ids), masks.causal() & masks.documents(ids), masks.block_causal(ids)]
        return Workload(
            batch=batch, q_len=q_len, kv_len=kv_len, heads=heads, kv_heads=kv_heads, head_dim=head_dim,
            v_head_dim=int(one(head_dim, head_dim, head_dim, 32)), mask=one(*options),
            softcap=one(None, None, None, None, 5.0, 30.0, 50.0),
            scale=one(None, None, None, None, None, 1e-4, 0.01, 1.0),
            dtype=one("bfloat16", "bfloat16", "float16", "float32"), pass_=one("forward", "train", "train", "backward"),
        )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--sizes", type=lambda text: [int(n) for n in text.split(",")], help="tokens, 64,256,...")
    parser.add_argument("--dtypes", type=lambda text: text.split(","), default=list(DTYPES))
    parser.add_argument("--passes", type=lambda text: text.split(","), default=["forward", "backward", "train"])
    parser.add_argument(
        "--random", type=int, default=0, help="workloads drawn at random for right kernels, beside the fixed ones"
    )
    parser.add_argument("--control-sizes", type=lambda text: [int(n) for n in text.split(",")])
    parser.add_argument("--budget", type=float, help="seconds")
    parser.add_argument("--wrong-share", type=float, default=0.5, help="of these seconds, for wrong kernels")
    parser.add_argument("--shard", default="1/1", help="i/n: every n-th case, beginning with the i-th")
    parser.add_argument("--implementations", type=lambda text: text.split(","), help="right kernels; all by default")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("-o", "--out", type=Path)
    parser.add_argument("--join", type=Path, nargs="+", metavar="FILE", help="only add up what these shards found")
    options = parser.parse_args()
    if options.join:
        found = joined([json.loads(path.read_text()) for path in options.join])
        options.out.write_text(json.dumps(found, indent=1) + "\n")
        options.out.with_suffix(".md").write_text(table(found) + "\n")
        print(table(found))
        return
    sizes = options.sizes or SIZES.get(options.device, SIZES["cuda"])
    budget = options.budget or BUDGET_S.get(options.device, BUDGET_S["cuda"])
    tally, bench, start = Tally(), Bench(options.device), time.perf_counter()
    part, parts = (int(n) for n in options.shard.split("/"))
    kinds = [(n, dtype, pass_) for n in sizes for dtype in options.dtypes for pass_ in options.passes]
    order = np.random.default_rng(options.seed).permutation(len(kinds))
    every = [case for number in order for case in cases(*kinds[number])][part - 1 :: parts]
    for number, case in enumerate(every):
        if time.perf_counter() - start > budget * options.wrong_share:
            print(f"budget spent after {number} of {len(every)} wrong kernels", flush=True)
            break
        status, reason = bench.verdict(Mutant("mutant", case.kernel, case.lse), case.workload, options.seed)
        if case.right:
            tally.right_kernel("written out", case.workload, status, reason)
        else:
            tally.wrong_kernel(case, status, reason)
        if number % 50 == 0 or status != ("ok" if case.right else "incorrect"):
            print(f"{number}/{len(every)} {case.mutation}: {status} {reason}", flush=True)
        _keep(tally, options, sizes, start)
    names = options.implementations or registry.loadable()[0]
    order = list(controls(options.control_sizes or list(sizes)[:2], options.dtypes, options.passes, options.seed))
    rng = np.random.default_rng([options.seed, 1])
    order += [random_workload(rng, options.device) for _ in range(options.random)]
    for number, workload in enumerate(order[part - 1 :: parts]):
        if time.perf_counter() - start > budget:
            print(f"budget spent after {number} of {len(order)} workloads for right kernels", flush=True)
            break
        for name in sorted(names, key=lambda one: one.partition(".")[0]):
            implementation = registry.get(name)
            if implementation.approximate or implementation.step or implementation.by_name_only:
                continue
            if implementation.framework not in frameworks.NAMES or not frameworks.installed(implementation.framework):
                continue
            if options.device not in frameworks.get(implementation.framework).devices():
                continue
            status, reason = bench.verdict(implementation, workload, options.seed)
            tally.right_kernel(name, workload, status, reason)
            if status in ("incorrect", "failed"):
                print(f"{name} {workload.id}: {status} {reason}", flush=True)
        if number % 10 == 0:
            print(f"{sum(tally.right.values())} right cells, {len(tally.alarms)} called wrong", flush=True)
        frameworks.get("torch").reset()
        _keep(tally, options, sizes, start)
    print(tally.table())


def _keep(tally: Tally, options: argparse.Namespace, sizes: Any, start: float) -> None:
    if options.out is None:
        return
    environment = frameworks.get("torch").environment(options.device)
    found = {
        "device": environment.device_name,
        "cpu": environment.cpu,
        "threads": environment.threads,
        "packages": environment.packages,
        "commit": COMMIT,
        "seed": options.seed,
        "sizes": list(sizes),
        "dtypes": options.dtypes,
        "passes": options.passes,
        "shard": options.shard,
        "spent_s": round(time.perf_counter() - start, 1),
        **tally.as_json(),
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(found, indent=1) + "\n")
    options.out.with_suffix(".md").write_text(tally.table() + "\n")


if __name__ == "__main__":
    main()
