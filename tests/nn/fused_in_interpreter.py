"""Run with TRITON_INTERPRET=1: the fused merge and sum against the eager ones, forward and backward, on a CPU."""

import os

from attnbench.run.machine import isa_cap

os.environ.update(isa_cap())  # before torch is first imported

import torch

from attnbench import masks
from attnbench.kernels.dilated.pieces import DilatedProblem, Task
from attnbench.kernels.dilated.torch_engines import dilated

CASES = {
    "ragged, three branches": ((1, 70, 2, 2, 16), ([16, 40, 70], [1, 3, 6]), {}, {}),
    "whole segments of several batch rows": ((2, 32, 2, 2, 8), ([8, 16], [1, 2]), {"causal": True}, {}),
    "rows and heads that see nothing": ((2, 9, 3, 3, 8), ([4], [2]), {}, {}),
    "grouped heads of different offsets": ((2, 21, 4, 2, 8), ([7, 21], [2, 3]), {"causal": True}, {}),
    "group offsets, one call an offset": ((1, 20, 4, 4, 8), ([10], [4]), {"offset": "group"}, {"diagonal": False}),
    "bfloat16, a width that is no power of two": ((1, 24, 2, 2, 20), ([8, 24], [1, 2]), {"dtype": torch.bfloat16}, {}),
    "heads first in memory": ((2, 16, 2, 2, 8), ([8, 16], [1, 2]), {"heads_first": True}, {}),
    "more pieces than one launch is told of": ((6, 11, 2, 2, 8), ([4, 8], [1, 2]), {"causal": True}, {}),
    "detached weights": ((1, 16, 2, 2, 8), ([8, 16], [1, 2]), {}, {"detached": True}),
}


def run(shape, pattern, options, how, merge):
    batch, tokens, heads, kv_heads, dim = shape
    rng = torch.Generator().manual_seed(1)
    sizes = [(batch, tokens, h, dim) for h in (heads, kv_heads, kv_heads, heads)]
    *arrays, dout = (torch.randn(size, generator=rng).to(options.get("dtype", torch.float32)) for size in sizes)
    if options.get("heads_first"):
        arrays = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in arrays]
    leaves = [x.requires_grad_() for x in arrays]
    mask = masks.dilated(*pattern, options.get("offset", "mod"))
    problem = DilatedProblem(mask, batch, tokens, heads, kv_heads, options.get("causal", False))
    out, lse = dilated(*leaves, "strided", Task(problem, dim**-0.5, merge=merge, **how))
    return out, lse, *torch.autograd.grad(out, leaves, dout)


for name, case in CASES.items():
    close = {"atol": 2e-2, "rtol": 2e-2} if "bfloat16" in name else {"atol": 1e-5, "rtol": 1e-4}
    for got, want in zip(run(*case, "triton"), run(*case, "eager"), strict=True):
        torch.testing.assert_close(got, want, **close, msg=lambda text, name=name: f"{name}: {text}")
print(f"{len(CASES)} cases agree")
