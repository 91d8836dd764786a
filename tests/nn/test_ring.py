"""Dilated attention over ranks: the plan pair by pair, one rank beside the plain module, several under torchrun."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from dilated_oracle import attention, counts, visible_counts
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks_of_torchrun import told_by_ranks

import attnbench as ab
from attnbench import masks
from attnbench.errors import InvalidWorkload, UsageError
from attnbench.kernels.ring import schedule
from attnbench.kernels.ring.work import calls
from attnbench.nn import (
    BlockSparseRingDilatedAttention,
    BlockSparseRingMultiheadDilatedAttention,
    DilatedAttention,
    MultiheadDilatedAttention,
    RingDilatedAttention,
    RingMultiheadDilatedAttention,
)

PATTERN = ([8, 16, 48], [1, 2, 3])
WORLD = 3
EVERY = np.ones((7, 7), bool)


@st.composite
def problems(draw):
    branches = draw(st.lists(st.tuples(st.integers(1, 40), st.sampled_from([1, 2, 3, 6])), min_size=1, max_size=3))
    sizes = draw(st.integers(1, 40)), draw(st.integers(1, 4)), draw(st.integers(1, 4))
    blocks = draw(st.none() | st.integers(1, 12))
    limit = draw(st.none() | st.integers(0, sizes[0]))
    return branches, sizes, draw(st.sampled_from(schedule.LAYOUTS)), draw(st.booleans()), blocks, limit


@given(problems())
@settings(max_examples=150, deadline=None)
def test_all_ranks_together_compute_each_pair_as_often_as_it_meets(problem):
    branches, (tokens, heads, world), layout, causal, size, limit = problem
    segments, rates = zip(*branches)
    pattern = masks.dilated(segments, rates)
    want = counts(tokens, heads, segments, rates).numpy().astype(int)
    want = np.tril(want) if causal else want
    blocks = None
    if size is not None:
        n = -(-tokens // size)
        kept = np.random.default_rng(0).random((heads, n, n)) < 0.5
        blocks = masks.blocks(kept, size)
        want = want * kept.repeat(size, 1).repeat(size, 2)[:, :tokens, :tokens]
    want[:, :, tokens if limit is None else limit :] = 0
    found = np.zeros_like(want)
    held = [schedule.runs(layout, tokens, world, rank) for rank in range(world)]
    seen = held if limit is None else [schedule.before(runs, limit) for runs in held]
    places = [schedule.positions(layout, tokens, world, rank) for rank in range(world)]
    for rank in range(world):
        for source in range(world):
            for call in calls(pattern, heads, held[rank], seen[source], causal, blocks):
                assert len(np.unique(call.rows)) == call.rows.size, "a row that occurs twice would lose one of them"
                for rows, keys in zip(call.rows, call.keys):
                    m, n = len(rows), len(keys)
                    pairs = np.tri(m, n, dtype=int) if call.causal else 1
                    found[np.ix_(call.heads, places[rank][rows], places[source][keys])] += pairs
    assert (found == want).all()


def draw(heads=6, kv_heads=2, tokens=53):
    torch.manual_seed(0)
    return [torch.randn(2, tokens, h, 8) for h in (heads, kv_heads, kv_heads, heads)]


@pytest.mark.parametrize("mix_grad", ["full", "detached"])
def test_one_rank_gives_what_the_plain_module_gives(mix_grad):
    options = {"causal": True, "mix_grad": mix_grad}
    q, k, v, dout = draw()
    results = []
    for kind in (DilatedAttention, RingDilatedAttention):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out, lse = kind(*PATTERN, **options)(*leaves, return_lse=True)
        results.append([out, lse, *torch.autograd.grad(out, leaves, dout)])
    for one, other in zip(*results):
        torch.testing.assert_close(one, other)


def test_all_blocks_kept_is_the_ring_and_none_is_nothing():
    q, k, v, _ = draw()
    ring = RingDilatedAttention(*PATTERN)(q, k, v)
    kept = BlockSparseRingDilatedAttention(*PATTERN, sparsity=0.0, block_size=8)
    torch.testing.assert_close(kept(q, k, v), ring)
    none = BlockSparseRingDilatedAttention(*PATTERN, block_mask=np.zeros((7, 7), bool), block_size=8)
    out, lse = none(q, k, v, return_lse=True)
    assert not out.any()
    assert torch.isneginf(lse).all()


@pytest.mark.parametrize("pattern", ["local", "strided", "global_local", "random"])
def test_patterns_drop_what_they_say(pattern):
    q, k, v, _ = draw(4, 4, 64)
    seed = {"seed": 2} if pattern == "random" else {}
    module = BlockSparseRingDilatedAttention(
        [64], [1], causal=True, sparsity=0.5, pattern=pattern, block_size=4, **seed
    )
    kept = torch.from_numpy(module.blocks(64, 4).block_mask.array)
    every = kept.repeat_interleave(4, -2).repeat_interleave(4, -1)
    want, _ = attention(*(x.double() for x in (q, k, v)), visible_counts(q, [64], [1], causal=True) * every)
    torch.testing.assert_close(module(q, k, v).double(), want, atol=1e-5, rtol=1e-4)
    assert abs(module.achieved_sparsity(64, 4) - 0.5) < 0.06


def test_multihead_kinds_share_parameters_and_numbers():
    torch.manual_seed(1)
    plain = ab.nn.MultiheadDilatedAttention(32, 4, *PATTERN, causal=True)
    x, states = torch.randn(1, 29, 32), plain.state_dict()
    for kind, options in (
        (RingMultiheadDilatedAttention, {"layout": "striped"}),
        (BlockSparseRingMultiheadDilatedAttention, {"sparsity": 0.0, "block_size": 4}),
    ):
        module = kind(32, 4, *PATTERN, causal=True, **options)
        module.load_state_dict(states)
        torch.testing.assert_close(module(x), plain(x))


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: RingDilatedAttention(*PATTERN, layout="spiral"), "not one of contiguous"),
        (lambda: BlockSparseRingDilatedAttention(*PATTERN), "either block_mask or sparsity"),
        (lambda: BlockSparseRingDilatedAttention(*PATTERN, sparsity=0.5, block_mask=[[True]]), "not both"),
        (lambda: BlockSparseRingDilatedAttention(*PATTERN, sparsity=1.0), "less than 1"),
        (lambda: BlockSparseRingDilatedAttention(*PATTERN, sparsity=0.5, pattern="learned"), "fixed patterns local,"),
        (lambda: BlockSparseRingDilatedAttention(*PATTERN, block_mask=np.ones((2, 1, 3, 3), bool)), "all batch rows"),
        (lambda: BlockSparseRingDilatedAttention(*PATTERN, block_mask=EVERY, pattern="random"), "pattern= is used"),
        (lambda: BlockSparseRingDilatedAttention(*PATTERN, block_mask=EVERY, seed=3), "seed= is used only with"),
        (lambda: BlockSparseRingDilatedAttention(*PATTERN, sparsity=0.5, seed=3), "seed= is used by pattern random"),
        (
            lambda: BlockSparseRingDilatedAttention(*PATTERN, block_mask=masks.blocks(EVERY, 4), block_size=16),
            "has blocks of 4 tokens: leave out block_size=16",
        ),
        (lambda: RingDilatedAttention(*PATTERN, dropout=0.1), "dropout"),
    ],
)  # fmt: skip
def test_what_is_not_done_is_refused(make, words):
    with pytest.raises((UsageError, InvalidWorkload), match=words):
        make()


def test_an_unknown_option_is_an_error():
    with pytest.raises(TypeError, match="memory_pool"):
        RingMultiheadDilatedAttention(32, 4, *PATTERN, memory_pool=True)


@pytest.fixture(scope="module")
def told_by_all(tmp_path_factory):
    """What the ranks of every script found, started as torchrun does it."""
    launches = [("ring_ranks", WORLD), *(("ring_length_ranks", world) for world in (1, 2, 3))]
    return told_by_ranks(launches, tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def told(told_by_all):
    """What each of three ranks found."""
    return told_by_all["ring_ranks", WORLD]


@pytest.mark.parametrize("what", ["ring", "block sparse", "detached", "multihead", "dense", "subgroup"])
def test_three_ranks_give_what_one_device_gives(told, what):
    for rank, found in enumerate(told):
        values = found[what] if isinstance(found[what], list) else [found[what]]
        assert max(values) < 1e-13, f"rank {rank}: {values}"


def test_the_gradient_of_the_lse_is_one_devices_even_where_one_rank_alone_asks_for_it(told):
    for rank, found in enumerate(told):
        assert max(found["lse"]) < 1e-6, f"rank {rank}: {found['lse']}"
        assert max(found["scaled"]) < 2e-3, f"rank {rank}: {found['scaled']}"


def test_a_wrong_shard_is_refused_by_every_rank(told):
    for found in told:
        assert (
            found["wrong"] == 'ranks hold 16, 17, 16 queries, but layout "zigzag" divides 49 queries into 17, 16, 16.'
        )


@pytest.mark.parametrize(
    "what,of_rank_1",
    [
        ("unsupported", "torch.flash-attn"),
        ("unknown", "torch.nothing"),
        ("layout", "round"),
        ("shape", "shapes do not go together"),
        ("dtype", "must have one dtype"),
        ("kind", "takes torch tensors, not None"),
        ("key lengths", "cannot be negative"),
        ("module's shape", "shapes do not go together"),
        ("multihead's shape", "x must be [batch, tokens, 32]"),
        ("multihead's dtype", "cast one of them"),
    ],
)
def test_what_one_rank_refuses_all_refuse(told, what, of_rank_1):
    """The others would wait for it until the process group gives up."""
    for rank, found in enumerate(told):
        wanted = of_rank_1 if rank == 1 else f"rank 1 of 3 refused this call, so rank {rank} stops too"
        assert wanted in found["refused"][what], rank


@pytest.mark.parametrize(
    "what,name", [("return_lse", "return_lse"), ("inner", "inner"), ("module's return_lse", "return_lse")]
)
def test_ranks_that_disagree_are_told_on_what(told, what, name):
    for found in told:
        assert found["refused"][what] == f"ranks disagree on {name}: every rank must give the same value."


@pytest.fixture(scope="module", params=[1, 2, 3])
def told_of_lengths(request, told_by_all):
    return told_by_all["ring_length_ranks", request.param]


@pytest.mark.parametrize("what", ["dilated", "detached", "block sparse", "dense"])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
def test_ranks_give_what_one_device_and_the_oracle_give(told_of_lengths, layout, what):
    for rank, found in enumerate(told_of_lengths):
        assert max(found[layout][what]) < 1e-13, f"rank {rank}: {found[layout][what]}"


def test_lengths_that_differ_from_rank_to_rank_are_refused_by_all(told_of_lengths):
    for found in told_of_lengths if len(told_of_lengths) > 1 else ():
        assert (
            found["unlike"]
            == "kv_lengths differ between ranks: every rank must give the lengths of the whole sequence."
        )


def test_whatever_else_differs_from_rank_to_rank_is_refused_by_all(told_of_lengths):
    for found in told_of_lengths if len(told_of_lengths) > 1 else ():
        for name, answer in found["disagreements"]:
            assert answer == f"ranks disagree on {name}: every rank must give the same value."


def test_multihead_with_lengths():
    torch.manual_seed(1)
    plain = MultiheadDilatedAttention(32, 4, [8, 16], [1, 2], causal=True)
    ring = RingMultiheadDilatedAttention(32, 4, [8, 16], [1, 2], causal=True)
    ring.load_state_dict(plain.state_dict())
    x = torch.randn(2, 29, 32)
    torch.testing.assert_close(ring(x, kv_lengths=[29, 9]), plain(x, kv_lengths=[29, 9]))


@pytest.mark.parametrize(
    "lengths, words",
    [
        ([5], "has 1 batch rows"),
        ([5, 99], "lie in 0 ... 53"),
        ([5, -1], "negative"),
        ([5, 2.5], "whole numbers"),
    ],
)
def test_impossible_lengths_are_refused(lengths, words):
    with pytest.raises(UsageError, match=words):
        RingDilatedAttention([8], [1])(*[torch.randn(2, 53, 4, 8)] * 3, kv_lengths=lengths)


PAGE = Path(__file__).parents[2] / "docs" / "ring.md"


def test_the_program_of_the_documentation_runs_under_torchrun(tmp_path):
    text = PAGE.read_text()
    (program,) = re.findall(r"```python\n(# ring\.py.*?)```", text, re.DOTALL)
    (tmp_path / "ring.py").write_text(program)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", tmp_path / "ring.py"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.strip() == "(2, 500, 8, 64) (2, 500, 8, 64) (2, 1000, 8, 64)"
    assert f"prints `{done.stdout.strip()}`" in text
    assert program.splitlines()[-1].startswith("dist.destroy_process_group()")
