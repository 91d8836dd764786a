"""Run by test_data_parallel.py on two gloo ranks: prints the largest differences of gradients and of a trained weight.

Each rank has its own half of the batch; the plain step has the whole batch on one rank.
"""

from __future__ import annotations

import copy
import json
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import attnbench as ab

warnings.simplefilter("ignore")
BATCH, TOKENS, HEADS, DIM = 4, 10, 2, 8
WIDTH = HEADS * DIM


class Layer(nn.Module):
    def __init__(self, implementation):
        super().__init__()
        self.qkv, self.out, self.implementation = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), implementation

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (HEADS, DIM)) for part in self.qkv(x).chunk(3, -1))
        attended = ab.attention(q, k, v, mask=ab.masks.causal(), impl=self.implementation)
        return x + self.out(attended.flatten(2))


def step(model, x):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    (model(x) ** 2).mean().backward()
    gradients = [one.grad for one in model.parameters()]
    optimizer.step()
    return [whole(one) for one in (*gradients, *model.parameters())]


def whole(array):
    return (array.full_tensor() if hasattr(array, "full_tensor") else array).detach().clone()


def apart(found, wanted):
    return max(float((a - b).abs().max()) for a, b in zip(found, wanted))


dist.init_process_group("gloo")
rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2,))
said = {}
for implementation in ("auto", "torch.sdpa-flash", "torch.eager", "torch.chunked"):
    torch.manual_seed(0)
    plain = nn.Sequential(Layer(implementation), Layer(implementation))
    x = torch.randn(BATCH, TOKENS, WIDTH)
    ddp, fsdp, compiled = (copy.deepcopy(plain) for _ in range(3))
    mine = x[2 * rank : 2 * rank + 2]
    wanted = step(plain, x)
    said[f"DDP, {implementation}"] = apart(step(DistributedDataParallel(ddp), mine), wanted)
    for layer in fsdp:
        fully_shard(layer, mesh=mesh)
    said[f"FSDP2, {implementation}"] = apart(step(fully_shard(fsdp, mesh=mesh), mine), wanted)
    if implementation == "auto":
        compiled = torch.compile(DistributedDataParallel(compiled), backend="aot_eager")
        said["DDP, compiled"] = apart(step(compiled, mine), wanted)
if rank == 0:
    print(json.dumps(said), flush=True)
dist.destroy_process_group()
