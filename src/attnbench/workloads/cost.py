"""Cost of a workload, known before anything runs: exact FLOPs of the visible pairs, least bytes, sizes in memory.

Conventions (one multiply-add is 2 FLOPs; softmax, bias and masking are not counted, as everywhere in the field):
- forward: 2 matmuls per visible pair, QK^T and PV: 2 * (head_dim + v_head_dim), that is 4 * head_dim;
- backward: 5 matmuls, as a kernel that stores no scores must do them: QK^T again, dP = dO V^T, dV, dQ and dK:
  6 * head_dim + 4 * v_head_dim, that is 2.5 x forward; train is both, 3.5 x forward.
"""

from __future__ import annotations

from msgspec import Struct

from attnbench.masks.base import pairs, seen_keys
from attnbench.spec import DTYPE_BYTES, Workload
from attnbench.workloads.steps import STEPS

LOGIT_BYTES = 4
"""Bytes of a score or an LSE: float32 wherever they are stored."""


class CallCost(Struct, frozen=True, kw_only=True):
    """Cost of a call of the workload's pass."""

    flops: int
    bytes: int
    """Least traffic: every array once, of K and V only the keys of a head that some query sees."""
    scores_bytes: int
    """Bytes of the [b, h, q, kv] float32 logits, for implementations that store them."""
    kv_cache_bytes: int
    """Bytes of K and V at kv_len, in the workload's dtype."""
    io_bytes: int
    """Bytes of all arrays of the call: the least memory that is needed."""
    output_bytes: int
    """The part of io_bytes that the call makes: out, and dq, dk, dv if gradients are asked for."""

    @property
    def intensity(self) -> float:
        """FLOPs per byte, which decide which ceiling binds."""
        return self.flops / self.bytes


def demand(workload: Workload) -> CallCost:
    """Return the cost of a call: of the attention, and of the step around it if the workload has one.

    The backward pass of a step multiplies twice more with the weights and writes their gradient. Least traffic:
    weights, inputs and outputs once per pass, beside the traffic of the attention.
    """
    inside, w = _attention(workload), workload
    if not w.step:
        return inside
    around, size = STEPS[w.step].around(w), DTYPE_BYTES[w.dtype]
    attention = [(times, _attention(problem)) for times, problem in around.attention]
    passes = {"forward": 1, "backward": 2, "train": 3}[w.pass_]
    vectors = (around.inputs + around.outputs) * size  # or their gradients
    returned = around.weights + (around.inputs if around.input_gradients else 0)
    gradients = returned * size if w.needs_gradients else 0
    return CallCost(
        flops=sum(times * one.flops for times, one in attention) + 2 * around.products * passes,
        bytes=sum(times * one.bytes for times, one in attention)
        + (around.reads or around.weights) * size * passes
        + vectors * (2 if w.needs_gradients else 1),
        scores_bytes=max(one.scores_bytes for _, one in attention),
        kv_cache_bytes=inside.kv_cache_bytes,
        io_bytes=around.weights * size + vectors + gradients,
        output_bytes=gradients + (0 if w.pass_ == "backward" else around.outputs * size),
    )


def _attention(workload: Workload) -> CallCost:
    w, size = workload, DTYPE_BYTES[workload.dtype]
    q_bytes = w.batch * w.q_len * w.heads * w.head_dim * size
    out_bytes = w.batch * w.q_len * w.heads * w.value_dim * size
    kv_head_bytes = (w.head_dim + w.value_dim) * size
    kv_bytes = w.batch * w.kv_len * w.kv_heads * kv_head_bytes
    lse_bytes = w.batch * w.heads * w.q_len * LOGIT_BYTES
    kv_seen_bytes = seen_keys(w.visible_mask, w.mask_shape, w.kv_heads) * kv_head_bytes
    gradients = q_bytes + kv_bytes if w.needs_gradients else 0
    backward_only = gradients + out_bytes + lse_bytes if w.needs_gradients else 0  # + dout
    made = gradients + (0 if w.pass_ == "backward" else out_bytes)
    return CallCost(
        flops=pairs(w.visible_mask, w.mask_shape) * flops_per_pair(w),
        bytes=q_bytes + kv_seen_bytes + out_bytes + backward_only,
        scores_bytes=w.batch * w.heads * w.q_len * w.kv_len * LOGIT_BYTES,
        kv_cache_bytes=kv_bytes,
        io_bytes=q_bytes + kv_bytes + out_bytes + backward_only,
        output_bytes=made,
    )


def flops_per_pair(workload: Workload) -> int:
    """Return the FLOPs of one visible (query, key) pair of one head in the workload's pass."""
    qk, pv = 2 * workload.head_dim, 2 * workload.value_dim
    forward, backward = qk + pv, 3 * qk + 2 * pv
    return {"forward": forward, "backward": backward, "train": forward + backward}[workload.pass_]
