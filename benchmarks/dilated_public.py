"""Ours against the package dilated-attention-pytorch: `python benchmarks/dilated_public.py [-o FILE]` on a CUDA GPU.

Needs `pip install --no-deps dilated-attention-pytorch einops`. Only times are compared: its results are not attention
(it divides by a sum over tokens, and head h sees one branch instead of all), which the record shows by its difference
to ours and by the products each computes. Its call of xformers goes to torch's SDPA where xformers cannot be had.
Claim: ours is at least 3 x as fast at 32k and at 128k tokens, forward and in training, 12 heads of 64, causal.
`--smoke` runs tiny shapes on a CPU, where nothing is claimed.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any

import msgspec
import torch
from device_calls import milliseconds, synchronise
from dilated import GPU, HEADS, SMOKE, Scale, draw, module, pattern, step
from interleaving import in_turn, ratio
from publishing import publish
from torch.nn.functional import scaled_dot_product_attention

from attnbench import frameworks
from attnbench.kernels.dilated.pieces import DilatedProblem, computed_pairs

CLAIM, ROUNDS = 3.0, 25


def sdpa_as_xformers() -> None:
    """The two names of xformers that the package uses, on torch's SDPA; sequence before heads, as xformers has it."""

    class LowerTriangularMask:
        pass

    def memory_efficient_attention(query: Any, key: Any, value: Any, op: None, attn_bias: Any) -> Any:
        assert op is None, "torch picks the kernel"
        turned = (x.transpose(1, 2) for x in (query, key, value))
        return scaled_dot_product_attention(*turned, is_causal=attn_bias is not None).transpose(1, 2)

    package, ops = ModuleType("xformers"), ModuleType("xformers.ops")
    ops.LowerTriangularMask, ops.AttentionOp = LowerTriangularMask, Any  # pyright: ignore[reportAttributeAccessIssue]
    ops.memory_efficient_attention = memory_efficient_attention  # pyright: ignore[reportAttributeAccessIssue]
    package.ops = ops  # pyright: ignore[reportAttributeAccessIssue]
    sys.modules |= {"xformers": package, "xformers.ops": ops}


def their_module(scale: Scale) -> Callable[..., torch.Tensor]:
    from dilated_attention_pytorch.dilated_attention import (
        DilatedAttention,  # pyright: ignore[reportMissingImports]
    )

    one = pattern(scale)
    made = DilatedAttention(list(one.segment_lengths), list(one.dilation_rates))
    return lambda q, k, v: made(q, k, v, is_causal=True)


def their_pairs(scale: Scale, tokens: int) -> int:
    """Query-key pairs it computes: its heads are dealt out to the branches, a branch's heads see nothing else."""
    one = pattern(scale)
    branches = len(one.segment_lengths)
    total = 0
    for index, (width, every) in enumerate(zip(one.segment_lengths, one.dilation_rates)):
        heads = HEADS // branches + (index < HEADS % branches)
        kept = len(range(index % every, width, every))
        total += heads * (tokens // width) * kept * (kept + 1) // 2
    return total


def duel(scale: Scale, tokens: int, dim: int, train: bool) -> dict[str, Any]:
    """Both in turn, call by call, in an order drawn anew."""
    arrays = draw(scale, tokens, dim)
    runs = {"ours": step(module("improved", scale), arrays, train), "theirs": step(their_module(scale), arrays, train)}
    for run in runs.values():
        run(), run()
    synchronise(scale.device)
    times = in_turn({name: partial(milliseconds, run, scale.device) for name, run in runs.items()}, ROUNDS)
    faster, ci95 = ratio(times["theirs"], times["ours"])
    return {
        "ms": {name: round(median(values), 4) for name, values in times.items()},
        "faster": round(faster, 3),
        "ci95": [round(end, 3) for end in ci95],
    }


def difference(scale: Scale, tokens: int, dim: int) -> float:
    """Of their output to ours, relative."""
    leaves = [x.detach() for x in draw(scale, tokens, dim)[:3]]
    ours, theirs = (call(*leaves).double() for call in (module("improved", scale), their_module(scale)))
    return float((theirs - ours).norm() / ours.norm())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("-o", "--out", type=Path)
    options = parser.parse_args()
    if importlib.util.find_spec("dilated_attention_pytorch") is None:
        parser.error("needs the public package: pip install --no-deps dilated-attention-pytorch einops")
    if not options.smoke and not torch.cuda.is_available():
        parser.error("needs a CUDA GPU: run it on one, or with --smoke on this CPU.")
    scale = SMOKE if options.smoke else GPU
    through = "xformers" if importlib.util.find_spec("xformers") else "torch SDPA in place of xformers"
    if through != "xformers":
        sdpa_as_xformers()
    torch.manual_seed(0)
    dim, shapes = scale.dims[0], {}
    for tokens in (scale.short // 4 if not options.smoke else scale.short, scale.short):
        ours = computed_pairs(DilatedProblem(pattern(scale), 1, tokens, HEADS, HEADS, True))
        shapes[str(tokens)] = {
            "their_difference_to_ours": difference(scale, tokens, dim),
            "our_pairs_over_theirs": round(ours / their_pairs(scale, tokens), 2),
            "forward": duel(scale, tokens, dim, train=False),
            "train": duel(scale, tokens, dim, train=True),
        }
    found = {"smoke": options.smoke, "through": through, "head_dim": dim, "heads": HEADS, "tokens": shapes}
    found["environment"] = msgspec.to_builtins(frameworks.get("torch").environment(scale.device))
    if not options.smoke:
        found["claims"] = {
            f"{name} at {tokens} >= {CLAIM:g} x": one[name]["faster"] >= CLAIM
            for tokens, one in shapes.items()
            for name in ("forward", "train")
        }
    publish(found, options.out)


if __name__ == "__main__":
    main()
