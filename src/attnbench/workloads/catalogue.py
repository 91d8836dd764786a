"""The built-in suites as Python: name -> description and workloads. Real models' shapes come from models.toml."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from attnbench.spec import Workload
from attnbench.workloads.block_sparse import block_sparse
from attnbench.workloads.edge import edge
from attnbench.workloads.grid import grid
from attnbench.workloads.pi0_sizes import in_blocks
from attnbench.workloads.regression import regression
from attnbench.workloads.suite_file import models

K = 1024
LLAMA_HEADS = "32:8"


def quick() -> list[Workload]:
    """Six small problems that between them touch every kind of path; milliseconds each on two CPU cores."""
    shape = {"batch": 1, "q_len": 512, "heads": 8, "head_dim": 64}
    return [
        *grid(**shape, mask=["full", "causal"]),
        *grid(**shape, mask="causal", dtype="bfloat16"),
        *grid(batch=2, q_len=256, heads=8, head_dim=64, mask="window:64:0"),
        *grid(batch=2, q_len=128, heads="8:2", head_dim=64, mask="causal", pass_="train"),
        *grid(batch=2, q_len=1, kv_len=1 * K, heads="8:2", head_dim=64, tags=["decode"]),
    ]


def ci() -> list[Workload]:
    """What a gate measures in every change: a forward pass, a masked one, a training step and a decoding step."""
    shape = {"batch": 1, "q_len": 512, "heads": 8, "head_dim": 64}
    return [
        *grid(**shape, mask=["full", "causal"]),
        *grid(batch=1, q_len=256, heads="8:2", head_dim=64, mask="causal", pass_="train"),
        *grid(batch=4, q_len=1, kv_len=4 * K, heads="8:2", head_dim=64, tags=["decode"]),
    ]


def whole_grid() -> list[Workload]:
    """The first founding document's grid: 5 lengths x 4 batches x 2 head layouts x 2 passes."""
    return _grid([512, 1 * K, 2 * K, 4 * K, 8 * K], [1, 4, 8, 16], ["32:32", LLAMA_HEADS], ["forward", "train"])


def _grid(q_len: list[int], batch: list[int], heads: list[str], passes: list[str]) -> list[Workload]:
    return grid(q_len=q_len, batch=batch, heads=heads, pass_=passes, head_dim=128, dtype="bfloat16", mask="causal")


def grid_gpu() -> list[Workload]:
    """24 of `grid`: each length from launch-bound to large, both head layouts, forward and train."""
    both, passes = ["32:32", LLAMA_HEADS], ["forward", "train"]
    corners = [(512, [1, 16]), (1 * K, [4]), (2 * K, [8]), (4 * K, [4]), (8 * K, [1])]
    return [workload for q_len, batch in corners for workload in _grid([q_len], batch, both, passes)]


def square_cpu() -> list[Workload]:
    """One head, as many tokens as dimensions, on the third founding document's ramps and on normals."""
    sizes = (32, 64, 128, 256, 512)
    kinds = ["sincostan", "normal"]
    return [
        w
        for n in sizes
        for w in grid(batch=1, q_len=n, heads=1, head_dim=n, inputs=kinds, source="founding document 3")
    ]


def decode() -> list[Workload]:
    """Few queries against a long cache, one sequence and sixteen; the last query sees every key."""
    shape = {"heads": LLAMA_HEADS, "head_dim": 128, "dtype": "bfloat16"}
    kv_len = [1 * K, 4 * K, 16 * K, 64 * K, 128 * K]
    return [
        *grid(q_len=1, kv_len=kv_len, batch=[1, 16], **shape),
        *grid(q_len=[4, 8], kv_len=kv_len, batch=1, mask="causal", **shape),
    ]


def long() -> list[Workload]:
    """32k to 1M tokens, causal, and the same with a window where only a linear cost is bearable."""
    shape = {"batch": 1, "heads": 8, "head_dim": 128, "dtype": "bfloat16"}
    return [
        *grid(q_len=[32 * K, 64 * K, 128 * K, 256 * K, 512 * K, 1024 * K], mask="causal", **shape),
        *grid(q_len=[32 * K, 64 * K, 128 * K, 256 * K], mask="causal", pass_="train", **shape),
        *grid(q_len=[128 * K, 1024 * K], mask="window:4095:0", **shape),
    ]


def million() -> list[Workload]:
    """What only linear memory can do: 1M tokens, forward and train, 4 query heads on one key/value head."""
    return grid(
        batch=1, q_len=1024 * K, heads="4:1", head_dim=128, dtype="bfloat16", mask="causal", pass_=["forward", "train"]
    )


PAPER_DILATION = "dilated:2048r1+4096r2+8192r4+16384r6+32768r12"


def dilated() -> list[Workload]:
    """LongNet's configuration, 2k to 1M tokens; wider heads, grouped heads, and both directions at a few lengths."""
    shape = {
        "batch": 1,
        "dtype": "bfloat16",
        "source": "LongNet (arXiv 2307.02486): w = 2048-32768, r = 1-12, 12 heads",
    }
    tokens, passes = [2 * K, 8 * K, 32 * K, 128 * K, 512 * K, 1024 * K], ["forward", "train"]
    causal = f"causal&{PAPER_DILATION}"
    return [
        *grid(q_len=tokens, heads=12, head_dim=64, mask=causal, pass_=passes, tags=["paper"], **shape),
        *grid(q_len=tokens, heads=12, head_dim=128, mask=causal, pass_=passes, tags=["wide"], **shape),
        *grid(
            q_len=[32 * K, 128 * K], heads="12:4", head_dim=128, mask=causal, pass_=passes, tags=["grouped"], **shape
        ),
        *grid(q_len=[32 * K, 128 * K], heads=12, head_dim=64, mask=PAPER_DILATION, pass_=passes, **shape),
    ]


def multihead() -> list[Workload]:
    """The dilated modules with their projections, so that the cost of those is seen."""
    shape = {"batch": 1, "dtype": "bfloat16", "step": "multihead"}
    causal = f"causal&{PAPER_DILATION}"
    return [
        *grid(q_len=[8 * K, 32 * K, 128 * K], heads=12, head_dim=64, mask=causal, pass_=["forward", "train"], **shape),
        *grid(q_len=32 * K, heads="12:4", head_dim=128, mask=causal, pass_=["forward", "train"], **shape),
        *grid(q_len=32 * K, heads=12, head_dim=64, mask=PAPER_DILATION, **shape),
    ]


def models_e2e() -> list[Workload]:
    """Gemma-2B blocks on 8k tokens in JAX and PyTorch; pi0's and pi0-FAST's steps at openpi's sizes."""
    shape = {"heads": "8:1", "head_dim": 256, "dtype": "bfloat16"}
    stack = shape | {"mask": "causal", "step": "gemma-stack", "pass_": ["forward", "train"], "tags": ["gemma"]}
    lengths = (1 * K, 2 * K, 4 * K, 8 * K)
    return [w for n in lengths for w in grid(q_len=n, batch=8 * K // n, **stack)] + _pi0_steps(shape)


def _pi0_steps(shape: dict[str, object]) -> list[Workload]:
    """Training with batch 32, the others for one observation; 32 tokens are decoded."""
    pi0 = shape | {
        "mask": in_blocks(816, 1, 50),
        "source": "pi0: openpi, 3 x 256 image + 48 text tokens, 1 + 50 others",
    }
    fast = shape | {"batch": 1, "source": "pi0-FAST: openpi, 768 image + 250 text tokens, cache for 256 more"}
    decode = fast | {"source": "pi0-FAST: openpi, 1018 tokens of prompt, the first 32 of its 256 steps"}
    joint = ["pi0-attention", "pi0-block", "pi0-model"]
    return [
        *grid(batch=32, q_len=867, step=joint, pass_=["forward", "train"], tags=["pi0", "train"], **pi0),
        *grid(batch=1, q_len=51, kv_len=867, step="pi0-sampler", tags=["pi0", "denoise"], **pi0),
        *grid(
            q_len=1018, kv_len=1274, mask="lengths:1018", step="pi0-fast-prefill", tags=["pi0-FAST", "prefill"], **fast
        ),
        *grid(q_len=32, kv_len=1050, mask="causal", step="pi0-fast-decode", tags=["pi0-FAST", "decode"], **decode),
    ]


def _from_models(suite: str) -> Callable[[], list[Workload]]:
    return lambda: [workload for of, _, workloads in models() if of == suite for workload in workloads]


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
    "gemma": ("openpi's pi0, pi0.5, pi0-FAST and SigLIP: train, prefill, denoise, decode", _from_models("gemma")),
    "square-cpu": ("one head, tokens = dim in 32-512, sin/cos/tan and random inputs, float32", square_cpu),
    "decode": ("1-8 queries against 1k-128k keys, 32:8 heads of 128, bfloat16", decode),
    "long": ("32k-1M tokens, 8 heads of 128, bfloat16", long),
    "block-sparse": (
        "50-95 % of the blocks dropped, 2k-32k tokens, forward and train; structured inputs for selection by content",
        block_sparse,
    ),
    "million": ("1M tokens, causal, 4:1 heads of 128, bfloat16, forward and train", million),
    "models": ("Llama-3.1, Qwen3, Gemma-2, Gemma-3 and DeepSeek-V3: prefill and train", _from_models("models")),
    "dilated": ("LongNet's five branches, 2k-1M tokens, 12 heads of 64 and 128, forward and train, bfloat16", dilated),
    "multihead": ("the dilated modules with their projections, 8k-128k tokens, forward and train", multihead),
    "models-e2e": (
        "four Gemma-2B blocks on 1k-8k tokens in JAX and PyTorch; pi0's attention, block, model and sampler; pi0-FAST",
        models_e2e,
    ),
    "edge": ("conformance: small shapes at every edge of the semantics", edge),
}
