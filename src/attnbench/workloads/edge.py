"""The `edge` suite: small problems at every edge of the semantics, each tagged with what it probes."""

from __future__ import annotations

from typing import Any

import numpy as np

from attnbench.spec import Workload
from attnbench.workloads import masks
from attnbench.workloads.grid import grid
from attnbench.workloads.pi0_sizes import in_blocks

SMALL = {"batch": 2, "q_len": 64, "heads": 4, "head_dim": 32}
HEAD_DIMS = (8, 16, 32, 64, 72, 80, 96, 128, 192, 256)


def edge() -> list[Workload]:
    """All of them."""
    return [*_shapes(), *_heads(), *_precisions(), *_rectangles(), *_padding(), *_patterns(), *_weights(), *_logits()]


def _cases(tag: str, **fields: Any) -> list[Workload]:
    return grid(**(SMALL | fields), tags=[tag])


def _shapes() -> list[Workload]:
    return [
        *_cases("one query", q_len=1, kv_len=64),
        *_cases("one key", q_len=64, kv_len=1),
        *_cases("one pair", batch=1, q_len=1, kv_len=1, heads=1, pass_="train"),
        *_cases("primes", batch=3, q_len=61, kv_len=127, heads=5, mask=["full", "causal"]),
        *_cases("primes", batch=1, q_len=131, mask="causal", pass_="train"),
        *(case for dim in HEAD_DIMS for case in _cases("head_dim", head_dim=dim, mask="causal")),
        *_cases("head_dim", head_dim=[72, 256], mask="causal", pass_="train"),
        *_cases("v_head_dim", head_dim=48, v_head_dim=32, mask="causal", pass_=["forward", "train"]),
        *_cases("v_head_dim", head_dim=32, v_head_dim=64),
        *_cases("long row", batch=1, heads=1, q_len=3, kv_len=2000, mask="causal"),
    ]


def _heads() -> list[Workload]:
    return [
        *_cases("MHA", mask=["full", "causal"], pass_=["backward", "train"]),
        *_cases("GQA", heads="6:2", mask=["full", "causal"], pass_=["forward", "train"]),
        *_cases("MQA", heads="8:1", mask="causal", pass_=["forward", "train"]),
        *_cases("odd group", heads="9:3", mask="causal"),
    ]


def _precisions() -> list[Workload]:
    return [
        *_cases("precision", dtype=["bfloat16", "float16", "float64"], mask="causal", pass_=["forward", "train"]),
        *_cases("precision", dtype="bfloat16", heads="8:2", head_dim=64, q_len=128, mask="window:32:0"),
    ]


def _rectangles() -> list[Workload]:
    """T != S, both alignments; more queries than keys leaves bottom-right rows that see nothing."""
    aligned = ["causal", "causal:top-left", "window:20:0", "window:20:5:top-left", "prefix:10", "prefix:10:top-left"]
    return [
        *_cases("T < S", q_len=40, kv_len=96, mask=aligned),
        *_cases("T < S", q_len=40, kv_len=96, heads="4:2", mask=aligned[:2], pass_="train"),
        *_cases("T > S", q_len=96, kv_len=40, mask=aligned),
        *_cases("T > S, rows that see nothing", q_len=96, kv_len=40, mask="causal", pass_="train"),
    ]


def _padding() -> list[Workload]:
    holes = np.ones((2, 64), bool)
    holes[0, 20:40] = holes[1, :11] = False
    left_padded = np.arange(64)[None] >= np.array([[0], [17]])
    return [
        *_cases("ragged", mask=["lengths:64,13", "lengths:1,63"], pass_=["forward", "train"]),
        *_cases("ragged, an empty row", mask="lengths:0,40", pass_=["forward", "train"]),
        *_cases("ragged and causal", mask="causal&lengths:64,13"),
        *_cases("ragged decode", q_len=1, kv_len=64, heads="4:1", mask="lengths:64,13"),
        *_cases("holes", mask=masks.valid(holes), pass_=["forward", "train"]),
        *_cases(
            "left padding, rows that see nothing",
            mask=masks.causal() & masks.valid(left_padded),
            pass_=["forward", "train"],
        ),
    ]


def _patterns() -> list[Workload]:
    rng = np.random.default_rng(0)
    kept = rng.random((2, 4, 4, 4)) < 0.5
    return [
        *_cases("window", mask=["window:0:0", "window:7:0", "window:7:3", "window:all:5", "window:5:all"]),
        *_cases("window", mask="window:7:0", pass_="train"),
        *_cases("prefix", mask=["prefix:0", "prefix:20", "prefix:64"]),
        *_cases("prefix", mask="prefix:20", pass_="train"),
        *_cases("block causal", mask="block_causal:40,1,23", pass_=["forward", "train"]),
        *_cases("block causal decode", q_len=24, kv_len=64, heads="8:1", mask="block_causal:40,1,23"),
        *_cases("documents", mask=["documents:10,30,24", "causal&documents:10,30,24"], pass_=["forward", "train"]),
        *_cases("documents, unsorted", mask=masks.documents(rng.integers(0, 3, (2, 64)))),
        *_cases("blocks", mask=masks.blocks(kept[0, 0], 16)),
        *_cases("blocks per head", mask=masks.blocks(kept, 16), pass_=["forward", "train"]),
        *_cases("blocks and causal", heads="4:2", mask=masks.causal() & masks.blocks(kept[0], 16), pass_="train"),
        *_cases("blocks, ragged edge", q_len=57, kv_len=57, mask=masks.blocks(np.tri(4, dtype=bool), 16)),
        *_cases("dense boolean", mask=masks.dense(rng.random((1, 1, 64, 64)) < 0.5)),
        *_cases("dense, one row sees nothing", mask=masks.dense(np.arange(64)[:, None] * np.ones((1, 64)) != 7.0)),
    ]


def _weights() -> list[Workload]:
    rng = np.random.default_rng(1)
    bias = rng.standard_normal((1, 4, 64, 64)).astype(np.float32)
    partly_hidden = np.where(rng.random((2, 1, 64, 64)) < 0.2, -np.inf, bias[:, :1]).astype(np.float32)
    return [
        *_cases("bias", mask=masks.dense(bias), pass_=["forward", "train"]),
        *_cases("bias with -inf", mask=masks.dense(partly_hidden)),
        *_cases("bias and causal", mask=masks.causal() & masks.dense(bias)),
        *_cases("dilated", mask=["dilated:16r1+32r2+64r4", "dilated:16r1+32r3+64r6:group"]),
        *_cases("dilated and causal", mask="causal&dilated:16r1+32r2+64r4", pass_=["forward", "train"]),
        *_cases("dilated, ragged", q_len=61, mask="dilated:16r1+40r3"),
        *_cases("dilated, rows that see nothing", mask="dilated:32r2"),
        *_cases(
            "dilated, no rate divides a segment", q_len=61, heads=12, mask="dilated:16r1+32r6+61r12", pass_="train"
        ),
        *_cases("dilated, grouped heads", heads="6:2", mask="causal&dilated:16r1+64r4", pass_="train"),
        *_cases("dilated, ragged and an empty row", mask="dilated:16r1+64r3&lengths:0,41", pass_=["forward", "train"]),
        *_cases("dilated, 16 bits", dtype="bfloat16", mask="causal&dilated:16r1+64r4", pass_="train"),
    ]


def _logits() -> list[Workload]:
    return [
        *_cases("softcap", softcap=5.0, mask="causal", pass_=["forward", "train"]),
        *_cases("softcap", softcap=50.0, mask="window:16:0", heads="4:2"),
        *_cases("scale", scale=[0.05, 1.0], mask="causal"),
        *_cases("scale and softcap", scale=0.5, softcap=20.0, mask="causal"),
        *_cases("ramps", inputs="sincostan", mask="causal"),
    ]


def step_edges() -> list[Workload]:
    """Small steps: dilated with grouped heads, an odd length, 16 bits, lengths, blocks; Gemma blocks; those of pi0."""
    pattern, shape = "dilated:16r1+32r2", {"head_dim": 16, "step": "multihead"}
    return [
        *grid(batch=2, q_len=61, heads="4:2", mask=f"causal&{pattern}", pass_="train", **shape),
        *grid(batch=2, q_len=64, heads=4, mask=pattern, pass_="train", dtype="bfloat16", **shape),
        *grid(batch=2, q_len=64, heads=4, mask=f"{pattern}&lengths:64,20", pass_="train", **shape),
        *grid(batch=1, q_len=256, heads=4, mask=f"causal&{pattern}&blocks:local:50", pass_="train", **shape),
        *grid(batch=2, q_len=24, heads="4:1", head_dim=16, mask="causal", pass_="train", step="gemma-stack"),
        *pi0_edges(),
        *_long_prefix(),
    ]


def _long_prefix() -> list[Workload]:
    """pi0's attention with as many tokens as a flash path needs to do with them what it does with more."""
    shape = {"batch": 2, "heads": "4:1", "head_dim": 32, "tags": ["pi0"]}
    return grid(q_len=150, mask=in_blocks(144, 1, 5), step="pi0-attention", pass_="train", **shape)


def pi0_edges(**fields: Any) -> list[Workload]:
    """Each of pi0's steps once, small: two rows of a prefix of 12 tokens, one state and 5 actions."""
    shape = {"batch": 2, "heads": "4:1", "head_dim": 32, "tags": ["pi0"]} | fields
    blocks = in_blocks(12, 1, 5)
    return [
        *grid(q_len=18, mask=blocks, step=["pi0-attention", "pi0-block", "pi0-model"], pass_="train", **shape),
        *grid(q_len=6, kv_len=18, mask=blocks, step="pi0-sampler", **shape),
        *grid(q_len=12, kv_len=16, mask="lengths:12,12", step="pi0-fast-prefill", **shape),
        *grid(q_len=4, kv_len=16, mask="causal", step="pi0-fast-decode", **shape),
    ]
