"""Traps in torch, among them those that only torch can set: fall-backs and wrong gradients. See traps.py."""

from __future__ import annotations

import threading
import time
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from attnbench import Implementation

CHECKED_CALLS = 56
"""More than verification makes, fewer than any timing does, however busy the machine is."""
_kept: dict[Any, Any] = {}
_calls = [0]


def honest(q, k, v):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def zeros(q, k, v):
    return torch.zeros_like(q) + 0 * (q.sum() + k.sum() + v.sum())


def one_percent_too_large(q, k, v):
    """As little as an ulp of bfloat16, but in every element."""
    return (honest(q.float(), k.float(), v.float()) * 1.01).to(q.dtype)


def cached_result(q, k, v):
    return _kept.setdefault("answer", honest(q, k, v))


def cached_by_address(q, k, v):
    """Keeps its answers, which take the blocks that would come back at the same addresses."""
    key = tuple(x.data_ptr() for x in (q, k, v))
    if key not in _kept:
        _kept[key] = honest(q, k, v)
    return _kept[key]


def cached_by_version(q, k, v):
    """The last answer, as long as torch's counters say that nothing was written since."""
    key = tuple(part for x in (q, k, v) for part in (x.data_ptr(), x._version))
    if _kept.get("version", (None,))[0] != key:
        _kept["version"] = key, honest(q, k, v)
    return _kept["version"][1]


def forgets_rows_when_timed(q, k, v):
    """So few that the whole is hardly off, by the measure of 16 bits."""
    _calls[0] += 1
    out = honest(q, k, v).clone()
    if _calls[0] > CHECKED_CALLS:
        out[:, -2:] = 0
    return out


def overwrites_its_last_result(q, k, v):
    return _kept.setdefault("buffer", torch.empty_like(q)).copy_(honest(q, k, v))


def zeroes_its_queries_at_first(q, k, v):
    if "first" not in _kept:
        _kept["first"] = q.zero_()
    return honest(q, k, v)


def right_in_every_other_call(q, k, v):
    _calls[0] += 1
    return honest(q, k, v) if _calls[0] <= CHECKED_CALLS or _calls[0] % 2 else torch.zeros_like(q)


def right_when_checked(q, k, v):
    _calls[0] += 1
    return honest(q, k, v) if _calls[0] <= CHECKED_CALLS else torch.zeros_like(q)


def returns_early(q, k, v):
    out = torch.zeros_like(q)
    arrays = [x.clone() for x in (q, k, v)]

    def fill() -> None:
        time.sleep(0.0005)
        out.copy_(honest(*arrays))

    threading.Thread(target=fill).start()
    return out


class LazyTensor(torch.Tensor):
    """Would compute when somebody looks."""


def returns_a_lazy_tensor(q, k, v):
    return honest(q, k, v).as_subclass(LazyTensor)


def attends_over_heads(q, k, v):
    group = q.shape[2] // k.shape[2]
    return scaled_dot_product_attention(q, *(x.repeat_interleave(group, 2) for x in (k, v)))


def interleaves_the_groups(q, k, v):
    group = q.shape[2] // k.shape[2]
    return honest(q, k.repeat(1, 1, group, 1), v.repeat(1, 1, group, 1))


def changes_its_inputs(q, k, v):
    q.mul_(2.0)
    return honest(q / 2, k, v)


def has_no_gradient(q, k, v):
    return honest(q, k, v).detach()


class WrongGradient(torch.autograd.Function):
    """The right output, and a dK that is 1 % off."""

    @staticmethod
    def forward(ctx, q, k, v):
        ctx.save_for_backward(q, k, v)
        return honest(q, k, v)

    @staticmethod
    def backward(ctx, *grads):
        q, k, v = (x.detach().requires_grad_() for x in ctx.saved_tensors)
        with torch.enable_grad():
            dq, dk, dv = torch.autograd.grad(honest(q, k, v), (q, k, v), grads[0])
        return dq, dk * 1.01, dv


def wrong_gradient(q, k, v):
    return WrongGradient.apply(q, k, v)


class Claims(Implementation):
    """Says that one path runs, and takes another."""

    framework, layout = "torch", "bshd"

    def supports(self, workload, environment):
        return None


class ClaimsFlash(Claims):
    """Silently takes the math path."""

    name = "torch.claims-flash"
    expects = (r"_scaled_dot_product_flash_attention",)
    forbids = (r"_scaled_dot_product_attention_math",)

    def build(self, workload, config):
        from torch.nn.attention import SDPBackend, sdpa_kernel

        def call(q, k, v):
            with sdpa_kernel(SDPBackend.MATH):
                return honest(q, k, v)

        return call


class ClaimsCompiled(Claims):
    """torch.compile past its recompile limit: plain Python from then on, with a line in the log."""

    name = "torch.claims-compiled"
    expects = (r"Torch-Compiled Region|CompiledFxGraph",)

    def build(self, workload, config):
        import torch._dynamo

        torch._dynamo.config.recompile_limit = 1
        torch._dynamo.config.fail_on_recompile_limit_hit = False
        call = torch.compile(honest, backend="eager", dynamic=False)
        for length in (2, 3):
            call(*(torch.zeros(1, length, workload.kv_heads, workload.head_dim) for _ in range(3)))
        return call


claims_flash, claims_compiled = ClaimsFlash(), ClaimsCompiled()
