"""Plain attention in torch, one operator after another: the yardstick of rounding error and the body of `torch.eager`.

Products are taken in the inputs' dtype, everything on the logits in float32 (float64 for float64 inputs). Mask tensors
are made on the device from the mask's own predicate, once per device, and passed in: nothing here depends on the call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from attnbench.frameworks.torch.internals import Shared, outside_modes, share
from attnbench.masks import Full
from attnbench.masks.large_bias import shifted
from attnbench.spec import Call, Workload
from attnbench.tracing import constant_when_traced, is_fake

if TYPE_CHECKING:
    import torch

Made = TypeVar("Made")


class TorchNamespace:
    """The functions that a mask predicate needs, with its arrays on one device.

    `exact` takes logarithms in float64: right for a bias that is made once, wasteful inside a compiled kernel.
    """

    def __init__(self, device: torch.device | str, exact: bool = False) -> None:
        self._device = device
        self._exact = exact

    def asarray(self, array: np.ndarray, /) -> torch.Tensor:
        """Copy an array to the device."""
        import torch

        return torch.from_numpy(np.array(array)).to(self._device)

    def log(self, x: torch.Tensor, /) -> torch.Tensor:
        """Return the natural logarithm of each element."""
        wide = x.double() if self._exact else x.float()  # counts are integers, and their default dtype is the user's
        return wide.log()

    def where(self, condition: torch.Tensor, x: torch.Tensor | float, y: torch.Tensor | float, /) -> torch.Tensor:
        """Choose x or y per element; both may be plain numbers."""
        import torch

        return torch.where(condition, x, y)

    def arange(self, size: int, /) -> torch.Tensor:
        """Return 0, 1, ... in 32 bits."""
        import torch

        return torch.arange(size, dtype=torch.int32, device=self._device)

    def searchsorted(self, ends: torch.Tensor, tokens: torch.Tensor, /) -> torch.Tensor:
        """Return how many of the sorted ends each token has reached."""
        import torch

        return torch.searchsorted(ends, tokens, right=True, out_int32=True)

    def clip(self, x: torch.Tensor, low: int, high: int, /) -> torch.Tensor:
        """Return x within low ... high."""
        return x.clamp(low, high)


class MaskTensors(NamedTuple):
    """A mask on a device, axes [b or 1, h or 1, q, kv]; None for what the mask does not have."""

    visible: torch.Tensor | None
    weight: torch.Tensor | None
    """Log-weights of visible pairs, float32 or float64."""
    dead: torch.Tensor | None
    """Rows that see no key, [b or 1, h or 1, q, 1]; None when every row sees one."""
    top: torch.Tensor | None = None
    """Log-weight that the LSE of whole rows needs and `weight` lacks, [b or 1, h or 1, q]; None if it lacks nothing."""


def mask_tensors(workload: Workload, device: torch.device) -> MaskTensors:
    """Evaluate the workload's mask on the device."""
    import torch

    mask, shape = workload.visible_mask, workload.mask_shape
    if isinstance(mask, Full):
        return MaskTensors(None, None, None)
    exact = workload.dtype == "float64"
    namespace = TorchNamespace(device, exact)
    sizes = (shape.batch if mask.per_batch else 1, shape.heads if mask.per_head else 1, shape.q_len, shape.kv_len)
    index = [
        torch.arange(size, device=device).view([-1 if n == axis else 1 for n in range(4)])
        for axis, size in enumerate(sizes)
    ]
    visible = mask.predicate(shape, namespace)(*index).expand(sizes).contiguous()
    weight = top = None
    if (shift := shifted(mask, shape, np.float64 if exact else np.float32)) is not None:
        weight, top = (torch.from_numpy(array).to(device) for array in shift)
    elif (log_weight := mask.log_weight(shape, namespace)) is not None:
        kind = torch.float64 if exact else torch.float32
        weight = log_weight(*index).to(kind).expand(sizes).contiguous()
    dead = ~visible.any(-1, keepdim=True)
    return MaskTensors(visible, weight, dead if dead.is_meta or is_fake(dead) or bool(dead.any()) else None, top)


def once_per_device(make: Callable[[torch.device], Made], constant: bool = True) -> Callable[[torch.device], Made]:
    """Return a function that makes something at the first call on each device and keeps it.

    The device may be unknown when a call is built. torch.compile treats the result as a constant, unless it is a
    function, which must be traced and be made before. Calls on other CUDA streams may read what one call made.
    """
    made: dict[torch.device, Made] = {}
    shared: dict[torch.device, Shared] = {}

    def get(device: torch.device) -> Made:
        found = made.get(device)
        if found is None:
            with outside_modes():
                found = make(device)
            if (tensors := share(found, device)) is not None:
                shared[device] = tensors
            made[device] = found
        elif device in shared:
            shared[device].read_here()
        return found

    return constant_when_traced(get) if constant else get


def scores(q: torch.Tensor, k: torch.Tensor, mask: MaskTensors, scale: float, softcap: float | None) -> torch.Tensor:
    """Return logits [b, h, q, kv] of q and k in layout bshd: -inf if hidden; 0 in rows that see no key."""
    import torch

    (batch, q_len, heads, dim), kv_heads = q.shape, k.shape[2]
    # Query heads of one group are stacked as rows, so that grouped heads need no copies of K and V.
    stacked = (batch, kv_heads, heads // kv_heads * q_len)
    # Two transposes, not one permute: torch.compile takes the latter for its fused pattern and gets the axes wrong.
    rows, keys = q.transpose(1, 2).reshape(*stacked, dim), k.transpose(1, 2).transpose(-2, -1)
    if q.dtype == torch.float16:
        rows, keys = rows.float(), keys.float()  # a float16 product overflows long before the softmax would mind
    logits = rows @ keys
    logits = logits.reshape(batch, heads, q_len, -1).to(torch.promote_types(q.dtype, torch.float32)) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if mask.weight is not None:
        logits = logits + mask.weight
    if mask.visible is not None:
        logits = logits.masked_fill(~mask.visible, float("-inf"))
    if mask.dead is not None:
        # A softmax over -inf alone is NaN, and so would be its gradient.
        logits = logits.masked_fill(mask.dead, 0.0)
    return logits


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: MaskTensors, scale: float, softcap: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out, logits [b, h, q, kv]) in layout bshd; rows that see no key give 0 and have logits 0."""
    import torch

    (batch, q_len, heads, _), kv_heads = q.shape, k.shape[2]
    logits = scores(q, k, mask, scale, softcap)
    weights = torch.softmax(logits, -1)
    if mask.dead is not None:
        weights = weights.masked_fill(mask.dead, 0.0)
    out = weights.to(q.dtype).reshape(batch, kv_heads, heads // kv_heads * q_len, -1) @ v.transpose(1, 2)
    return out.reshape(batch, heads, q_len, -1).transpose(1, 2), logits


def log_sum_exp(logits: torch.Tensor, mask: MaskTensors) -> torch.Tensor:
    """Return the LSE [b, h, q] in the dtype of the logits, -inf for rows that see no key."""
    lse = logits.logsumexp(-1)
    lse = lse if mask.top is None else lse + mask.top
    return lse if mask.dead is None else lse.masked_fill(mask.dead.squeeze(-1), float("-inf"))


def plain_call(workload: Workload, with_lse: bool = False) -> Call:
    """Return the plain implementation of a workload, layout bshd, differentiable."""
    masks = once_per_device(lambda device: mask_tensors(workload, device))
    scale, softcap = workload.softmax_scale, workload.softcap

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        mask = masks(q.device)
        out, logits = attend(q, k, v, mask, scale, softcap)
        return (out, log_sum_exp(logits, mask)) if with_lse else out

    return call
