"""The built-in suites as Python: name -> description and workloads. Real models' shapes come from models.toml."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from attnbench import masks
from attnbench.masks import MaskShape, block_causal
from attnbench.masks.block_patterns import SPARSITIES, sparse_mask
from attnbench.masks.text import parse_mask
from attnbench.spec import Workload
from attnbench.workloads.steps import in_blocks
from attnbench.workloads.suite_file import grid, models

K = 1024
PASSES = ["forward", "train"]
SMALL = {"batch": 2, "q_len": 64, "heads": 4, "head_dim": 32}
HEAD_DIMS = (8, 16, 32, 64, 72, 80, 96, 128, 192, 256)


def edge() -> list[Workload]:
    """Return the workloads of the suite `edge`: small shapes at every edge of the semantics."""
    return [*_edge_shapes(), *_edge_masks(), *_edge_logits()]


def _edge(tag: str, **fields: Any) -> list[Workload]:
    return grid(**(SMALL | fields), tags=[tag])


def _edge_shapes() -> list[Workload]:
    """Return sizes, groups of heads, precisions, and q_len != kv_len in both alignments, with rows that see nothing."""
    aligned = ["causal", "causal:top-left", "window:20:0", "window:20:5:top-left", "prefix:10", "prefix:10:top-left"]
    return [
        *_edge("one query", q_len=1, kv_len=64),
        *_edge("one key", q_len=64, kv_len=1),
        *_edge("one pair", batch=1, q_len=1, kv_len=1, heads=1, pass_="train"),
        *_edge("primes", batch=3, q_len=61, kv_len=127, heads=5, mask=["full", "causal"]),
        *_edge("primes", batch=1, q_len=131, mask="causal", pass_="train"),
        *(case for dim in HEAD_DIMS for case in _edge("head_dim", head_dim=dim, mask="causal")),
        *_edge("head_dim", head_dim=[72, 256], mask="causal", pass_="train"),
        *_edge("v_head_dim", head_dim=48, v_head_dim=32, mask="causal", pass_=PASSES),
        *_edge("v_head_dim", head_dim=32, v_head_dim=64),
        *_edge("MLA", head_dim=192, v_head_dim=128, mask="causal", pass_=PASSES),
        *_edge("long row", batch=1, heads=1, q_len=3, kv_len=2000, mask="causal"),
        *_edge("MHA", mask=["full", "causal"], pass_=["backward", "train"]),
        *_edge("GQA", heads="6:2", mask=["full", "causal"], pass_=PASSES),
        *_edge("MQA", heads="8:1", mask="causal", pass_=PASSES),
        *_edge("odd group", heads="9:3", mask="causal"),
        *_edge("precision", dtype=["bfloat16", "float16", "float64"], mask="causal", pass_=PASSES),
        *_edge("precision", dtype="bfloat16", heads="8:2", head_dim=64, q_len=128, mask="window:32:0"),
        *_edge("T < S", q_len=40, kv_len=96, mask=aligned),
        *_edge("T < S", q_len=40, kv_len=96, heads="4:2", mask=aligned[:2], pass_="train"),
        *_edge("T > S", q_len=96, kv_len=40, mask=aligned),
        *_edge("T > S, rows that see nothing", q_len=96, kv_len=40, mask="causal", pass_="train"),
    ]


def _edge_masks() -> list[Workload]:
    holes = np.ones((2, 64), bool)
    holes[0, 20:40] = holes[1, :11] = False
    left_padded = np.arange(64)[None] >= np.array([[0], [17]])
    rng = np.random.default_rng(0)
    kept = rng.random((2, 4, 4, 4)) < 0.5
    return [
        *_edge("ragged", mask=["lengths:64,13", "lengths:1,63"], pass_=PASSES),
        *_edge("ragged, an empty row", mask="lengths:0,40", pass_=PASSES),
        *_edge("ragged and causal", mask="causal&lengths:64,13"),
        *_edge("ragged decode", q_len=1, kv_len=64, heads="4:1", mask="lengths:64,13"),
        *_edge("holes", mask=masks.valid(holes), pass_=PASSES),
        *_edge("left padding, rows that see nothing", mask=masks.causal() & masks.valid(left_padded), pass_=PASSES),
        *_edge("window", mask=["window:0:0", "window:7:0", "window:7:3", "window:all:5", "window:5:all"]),
        *_edge("window", mask="window:7:0", pass_="train"),
        *_edge("prefix", mask=["prefix:0", "prefix:20", "prefix:64"]),
        *_edge("prefix", mask="prefix:20", pass_="train"),
        *_edge("block causal", mask="block_causal:40,1,23", pass_=PASSES),
        *_edge("block causal decode", q_len=24, kv_len=64, heads="8:1", mask="block_causal:40,1,23"),
        *_edge("documents", mask=["documents:10,30,24", "causal&documents:10,30,24"], pass_=PASSES),
        *_edge("documents, unsorted", mask=masks.documents(rng.integers(0, 3, (2, 64)))),
        *_edge("blocks", mask=masks.blocks(kept[0, 0], 16)),
        *_edge("blocks per head", mask=masks.blocks(kept, 16), pass_=PASSES),
        *_edge("blocks and causal", heads="4:2", mask=masks.causal() & masks.blocks(kept[0], 16), pass_="train"),
        *_edge("blocks, ragged edge", q_len=57, kv_len=57, mask=masks.blocks(np.tri(4, dtype=bool), 16)),
        *_edge("dense boolean", mask=masks.dense(rng.random((1, 1, 64, 64)) < 0.5)),
        *_edge("dense, one row sees nothing", mask=masks.dense(np.arange(64)[:, None] * np.ones((1, 64)) != 7.0)),
    ]


def _edge_logits() -> list[Workload]:
    """Return biases, dilated patterns (whose pairs carry weights), scales, soft caps and ramps."""
    rng = np.random.default_rng(1)
    bias = rng.standard_normal((1, 4, 64, 64)).astype(np.float32)
    partly_hidden = np.where(rng.random((2, 1, 64, 64)) < 0.2, -np.inf, bias[:, :1]).astype(np.float32)
    return [
        *_edge("bias", mask=masks.dense(bias), pass_=PASSES),
        *_edge("bias with -inf", mask=masks.dense(partly_hidden)),
        *_edge("bias and causal", mask=masks.causal() & masks.dense(bias)),
        *_edge("alibi", mask=["causal&alibi", "alibi"], pass_=PASSES),
        *_edge("alibi", q_len=40, kv_len=96, heads="6:2", mask=["causal&alibi", "alibi:top-left"]),
        *_edge("alibi", mask=masks.alibi([0.5, 2.0, 0.0, 0.03]) & masks.window(20) & masks.lengths([64, 13])),
        *_edge("alibi and documents", mask="causal&alibi&documents:10,30,24", pass_="train"),
        *_edge("dilated", mask=["dilated:16r1+32r2+64r4", "dilated:16r1+32r3+64r6:group"]),
        *_edge("dilated and causal", mask="causal&dilated:16r1+32r2+64r4", pass_=PASSES),
        *_edge("dilated, ragged", q_len=61, mask="dilated:16r1+40r3"),
        *_edge("dilated, rows that see nothing", mask="dilated:32r2"),
        *_edge("dilated, no rate divides a segment", q_len=61, heads=12, mask="dilated:16r1+32r6+61r12", pass_="train"),
        *_edge("dilated, grouped heads", heads="6:2", mask="causal&dilated:16r1+64r4", pass_="train"),
        *_edge("dilated, ragged and an empty row", mask="dilated:16r1+64r3&lengths:0,41", pass_=PASSES),
        *_edge("dilated, 16 bits", dtype="bfloat16", mask="causal&dilated:16r1+64r4", pass_="train"),
        *_edge("softcap", softcap=5.0, mask="causal", pass_=PASSES),
        *_edge("softcap", softcap=50.0, mask="window:16:0", heads="4:2"),
        *_edge("scale", scale=[0.05, 1.0], mask="causal"),
        *_edge("scale and softcap", scale=0.5, softcap=20.0, mask="causal"),
        *_edge("ramps", inputs="sincostan", mask="causal"),
    ]


def step_edges() -> list[Workload]:
    """Return small steps: dilated with grouped heads, an odd length, 16 bits, lengths, blocks; Gemma blocks; pi0."""
    pattern, shape = "dilated:16r1+32r2", {"head_dim": 16, "step": "multihead"}
    return [
        *grid(batch=2, q_len=61, heads="4:2", mask=f"causal&{pattern}", pass_="train", **shape),
        *grid(batch=2, q_len=64, heads=4, mask=pattern, pass_="train", dtype="bfloat16", **shape),
        *grid(batch=2, q_len=64, heads=4, mask=f"{pattern}&lengths:64,20", pass_="train", **shape),
        *grid(batch=1, q_len=256, heads=4, mask=f"causal&{pattern}&blocks:local:50", pass_="train", **shape),
        *grid(batch=2, q_len=24, heads="4:1", head_dim=16, mask="causal", pass_="train", step="gemma-stack"),
        *pi0_edges(),
        # Enough tokens for a flash path to treat them like longer sequences.
        *grid(
            batch=2, heads="4:1", head_dim=32, tags=["pi0"], q_len=150, mask=in_blocks(144, 1, 5), step="pi0-attention",
            pass_="train",
        ),
    ]  # fmt: skip


def pi0_edges(**fields: Any) -> list[Workload]:
    """Return each of pi0's steps in a small size: two rows of a prefix of 12 tokens, one state and 5 actions."""
    shape = {"batch": 2, "heads": "4:1", "head_dim": 32, "tags": ["pi0"]} | fields
    blocks = in_blocks(12, 1, 5)
    return [
        *grid(q_len=18, mask=blocks, step=["pi0-attention", "pi0-block", "pi0-model"], pass_="train", **shape),
        *grid(q_len=6, kv_len=18, mask=blocks, step="pi0-sampler", **shape),
        *grid(q_len=12, kv_len=16, mask="lengths:12,12", step="pi0-fast-prefill", **shape),
        *grid(q_len=4, kv_len=16, mask="causal", step="pi0-fast-decode", **shape),
    ]


PER_HEAD_TOKENS = 4 * K
"""Largest length with a random pattern per head; above it heads share one, because a record carries its mask."""


def block_sparse() -> list[Workload]:
    """Return random blocks over lengths, every pattern (causal, 90 %), small cases for a CPU, and structured inputs."""
    large = {"batch": 1, "heads": 16, "head_dim": 128, "dtype": "bfloat16"}
    small = {"batch": 1, "heads": 4, "head_dim": 64, "dtype": "float32"}
    return [
        *(case for q_len in (4 * K, 16 * K, 32 * K) for s in SPARSITIES for case in _sparse("random", s, q_len, large)),
        *(
            case
            for pattern in ("local", "strided", "global_local", "random")
            for case in _sparse(pattern, 0.9, 8 * K, large, causal=True)
        ),
        *(case for s in SPARSITIES for case in _sparse("random", s, 2 * K, small, block_size=64)),
        *(case for s in SPARSITIES for case in _sparse("local", s, 2 * K, small, block_size=64, causal=True)),
        *grid(**small, q_len=2 * K, mask=["full", "causal"], inputs="structured", tags=["structured"]),
        *grid(**large, q_len=16 * K, mask=["full", "causal"], inputs="structured", tags=["structured"]),
    ]


def _sparse(pattern: str, sparsity: float, q_len: int, fields: dict[str, Any], **options: Any) -> list[Workload]:
    heads = fields["heads"] if q_len <= PER_HEAD_TOKENS else 1
    mask = sparse_mask(pattern, sparsity, MaskShape(1, heads, q_len, q_len), **options)
    tags = [pattern, f"{sparsity:.0%} sparse"]
    return grid(**fields, q_len=q_len, mask=mask, pass_=PASSES, tags=tags)


DILATION = "dilated:64r1+128r2+256r4"
BLOCK = 32
SPARSITY = 0.75


def regression() -> list[Workload]:
    """Return dense, causal, grouped, windowed, prefixed, decoding, dilated and block-sparse problems, and steps."""
    shape = {"batch": 1, "q_len": 256, "heads": 4, "head_dim": 64}
    step = shape | {"head_dim": 32}
    place = MaskShape(1, 4, 256, 256)
    blocks = sparse_mask("random", SPARSITY, place, block_size=BLOCK)
    return [
        *grid(**shape, pass_=PASSES),
        *grid(**shape, mask="causal"),
        *grid(**shape | {"heads": "4:2"}, mask="causal", pass_="train", tags=["grouped"]),
        *grid(**shape, mask="window:64:0"),
        *grid(**shape, mask=block_causal([0] * 200 + [1] * 56), pass_="train", tags=["prefix"]),
        *grid(batch=2, q_len=1, kv_len=1024, heads="4:2", head_dim=64, tags=["decode"]),
        *grid(**shape, mask=f"causal&{DILATION}", pass_=PASSES, tags=["dilated"]),
        *grid(**shape, mask=blocks, pass_=PASSES, tags=["block-sparse"]),
        *grid(**shape, mask="causal", inputs="structured", tags=["structured"]),
        *grid(**step, mask=f"causal&{DILATION}", pass_="train", step="multihead", tags=["dilated"]),
        *grid(**step, mask=parse_mask(DILATION, place) & blocks, step="multihead", tags=["dilated", "block-sparse"]),
        *grid(**step | {"q_len": 64, "heads": "4:1"}, mask="causal", pass_="train", step="gemma-stack", tags=["gemma"]),
        *pi0_edges(),
    ]


LLAMA_HEADS = "32:8"


def quick() -> list[Workload]:
    """Return six small problems that together use every kind of path, in milliseconds each on two CPU cores."""
    shape = {"batch": 1, "q_len": 512, "heads": 8, "head_dim": 64}
    return [
        *grid(**shape, mask=["full", "causal"]),
        *grid(**shape, mask="causal", dtype="bfloat16"),
        *grid(batch=2, q_len=256, heads=8, head_dim=64, mask="window:64:0"),
        *grid(batch=2, q_len=128, heads="8:2", head_dim=64, mask="causal", pass_="train"),
        *grid(batch=2, q_len=1, kv_len=1 * K, heads="8:2", head_dim=64, tags=["decode"]),
    ]


def ci() -> list[Workload]:
    """Return what a gate measures in every change: a forward pass, a masked one, a training and a decoding step."""
    shape = {"batch": 1, "q_len": 512, "heads": 8, "head_dim": 64}
    return [
        *grid(**shape, mask=["full", "causal"]),
        *grid(batch=1, q_len=256, heads="8:2", head_dim=64, mask="causal", pass_="train"),
        *grid(batch=4, q_len=1, kv_len=4 * K, heads="8:2", head_dim=64, tags=["decode"]),
    ]


def whole_grid() -> list[Workload]:
    """Return the grid of 5 lengths x 4 batches x 2 head layouts x 2 passes."""
    return _grid([512, 1 * K, 2 * K, 4 * K, 8 * K], [1, 4, 8, 16])


def _grid(q_len: list[int], batch: list[int]) -> list[Workload]:
    shape = {"heads": ["32:32", LLAMA_HEADS], "pass_": PASSES, "head_dim": 128, "dtype": "bfloat16", "mask": "causal"}
    return grid(q_len=q_len, batch=batch, **shape)


def grid_gpu() -> list[Workload]:
    """Return 24 workloads of `grid`: each length from launch-bound to large, both head layouts, forward and train."""
    corners = [(512, [1, 16]), (1 * K, [4]), (2 * K, [8]), (4 * K, [4]), (8 * K, [1])]
    return [workload for q_len, batch in corners for workload in _grid([q_len], batch)]


def square_cpu() -> list[Workload]:
    """Return one head with as many tokens as dimensions, on ramps of sines, cosines and tangents and on normals."""
    source, kinds = "ramps of sines and cosines on square problems", ["sincostan", "normal"]
    square = [{"q_len": n, "head_dim": n} for n in (32, 64, 128, 256, 512)]
    return [w for sizes in square for w in grid(batch=1, heads=1, **sizes, inputs=kinds, source=source)]


def decode() -> list[Workload]:
    """Return few queries against a long cache, for one and sixteen sequences; the last query sees every key."""
    shape = {"heads": LLAMA_HEADS, "head_dim": 128, "dtype": "bfloat16"}
    kv_len = [1 * K, 4 * K, 16 * K, 64 * K, 128 * K]
    return [
        *grid(q_len=1, kv_len=kv_len, batch=[1, 16], **shape),
        *grid(q_len=[4, 8], kv_len=kv_len, batch=1, mask="causal", **shape),
    ]


def long() -> list[Workload]:
    """Return 32k to 1M tokens under a causal mask, and with a window where only a linear cost is affordable."""
    shape = {"batch": 1, "heads": 8, "head_dim": 128, "dtype": "bfloat16"}
    return [
        *grid(q_len=[32 * K, 64 * K, 128 * K, 256 * K, 512 * K, 1024 * K], mask="causal", **shape),
        *grid(q_len=[32 * K, 64 * K, 128 * K, 256 * K], mask="causal", pass_="train", **shape),
        *grid(q_len=[128 * K, 1024 * K], mask="window:4095:0", **shape),
    ]


def million() -> list[Workload]:
    """Return 1M tokens, forward and train, 4 query heads on one key/value head: only linear memory can compute them."""
    return grid(batch=1, q_len=1024 * K, heads="4:1", head_dim=128, dtype="bfloat16", mask="causal", pass_=PASSES)


PAPER_DILATION = "dilated:2048r1+4096r2+8192r4+16384r6+32768r12"


def dilated() -> list[Workload]:
    """Return LongNet's configuration at 2k to 1M tokens, at a few lengths with grouped heads and in both directions."""
    source = "LongNet (arXiv 2307.02486): w = 2048-32768, r = 1-12, 12 heads"
    shape = {"batch": 1, "dtype": "bfloat16", "pass_": PASSES, "source": source}
    tokens, few = [2 * K, 8 * K, 32 * K, 128 * K, 512 * K, 1024 * K], [32 * K, 128 * K]
    causal = f"causal&{PAPER_DILATION}"
    return [
        *grid(q_len=tokens, heads=12, head_dim=64, mask=causal, tags=["paper"], **shape),
        *grid(q_len=tokens, heads=12, head_dim=128, mask=causal, tags=["wide"], **shape),
        *grid(q_len=few, heads="12:4", head_dim=128, mask=causal, tags=["grouped"], **shape),
        *grid(q_len=few, heads=12, head_dim=64, mask=PAPER_DILATION, **shape),
    ]


def multihead() -> list[Workload]:
    """Return the dilated modules with their projections, to show the cost of the projections."""
    shape = {"batch": 1, "dtype": "bfloat16", "step": "multihead"}
    causal = f"causal&{PAPER_DILATION}"
    return [
        *grid(q_len=[8 * K, 32 * K, 128 * K], heads=12, head_dim=64, mask=causal, pass_=PASSES, **shape),
        *grid(q_len=32 * K, heads="12:4", head_dim=128, mask=causal, pass_=PASSES, **shape),
        *grid(q_len=32 * K, heads=12, head_dim=64, mask=PAPER_DILATION, **shape),
    ]


def models_e2e() -> list[Workload]:
    """Return Gemma-2B blocks on 8k tokens in JAX and PyTorch, and pi0's and pi0-FAST's steps at openpi's sizes."""
    shape = {"heads": "8:1", "head_dim": 256, "dtype": "bfloat16"}
    stack = shape | {"mask": "causal", "step": "gemma-stack", "pass_": PASSES, "tags": ["gemma"]}
    lengths = (1 * K, 2 * K, 4 * K, 8 * K)
    return [w for n in lengths for w in grid(q_len=n, batch=8 * K // n, **stack)] + _pi0_steps(shape)


def _pi0_steps(shape: dict[str, object]) -> list[Workload]:
    """Return pi0's training with batch 32 and its other steps for one observation, with 32 tokens decoded."""
    pi0 = shape | {
        "mask": in_blocks(816, 1, 50),
        "source": "pi0: openpi, 3 x 256 image + 48 text tokens, 1 + 50 others",
    }
    fast = shape | {"batch": 1, "source": "pi0-FAST: openpi, 768 image + 250 text tokens, cache for 256 more"}
    decode = fast | {"source": "pi0-FAST: openpi, 1018 tokens of prompt, the first 32 of its 256 steps"}
    joint = ["pi0-attention", "pi0-block", "pi0-model"]
    return [
        *grid(batch=32, q_len=867, step=joint, pass_=PASSES, tags=["pi0", "train"], **pi0),
        *grid(batch=1, q_len=51, kv_len=867, step="pi0-sampler", tags=["pi0", "denoise"], **pi0),
        *grid(
            q_len=1018, kv_len=1274, mask="lengths:1018", step="pi0-fast-prefill", tags=["pi0-FAST", "prefill"], **fast
        ),
        *grid(q_len=32, kv_len=1050, mask="causal", step="pi0-fast-decode", tags=["pi0-FAST", "decode"], **decode),
    ]


BUILTIN: Mapping[str, tuple[str, Callable[[], list[Workload]]]] = {
    "quick": ("six small shapes for any machine: the default", quick),
    "ci": ("four shapes that a gate measures in every change", ci),
    "regression": (
        "small shapes of every kind, so that each implementation that runs on a CPU has a case in a gate",
        regression,
    ),
    "grid": (
        "512-8192 tokens x batch 1-16 x 32:32 and 32:8 heads of 128, forward and train, causal bfloat16",
        whole_grid,
    ),
    "grid-gpu": ("24 of grid, for a first run on a GPU", grid_gpu),
    "gemma": ("openpi's pi0, pi0.5, pi0-FAST and SigLIP: train, prefill, denoise, decode", lambda: models()["gemma"]),
    "square-cpu": ("one head, tokens = dim in 32-512, sin/cos/tan and random inputs, float32", square_cpu),
    "decode": ("1-8 queries against 1k-128k keys, 32:8 heads of 128, bfloat16", decode),
    "long": ("32k-1M tokens, 8 heads of 128, bfloat16", long),
    "block-sparse": (
        "50-95 % of the blocks dropped, 2k-32k tokens, forward and train; structured inputs for selection by content",
        block_sparse,
    ),
    "million": ("1M tokens, causal, 4:1 heads of 128, bfloat16, forward and train", million),
    "models": ("Llama-3.1, Qwen3, Gemma-2, Gemma-3 and DeepSeek-V3: prefill and train", lambda: models()["models"]),
    "dilated": ("LongNet's five branches, 2k-1M tokens, 12 heads of 64 and 128, forward and train, bfloat16", dilated),
    "multihead": ("the dilated modules with their projections, 8k-128k tokens, forward and train", multihead),
    "models-e2e": (
        "four Gemma-2B blocks on 1k-8k tokens in JAX and PyTorch; pi0's attention, block, model and sampler; pi0-FAST",
        models_e2e,
    ),
    "edge": ("conformance: small shapes at every edge of the semantics", edge),
}
