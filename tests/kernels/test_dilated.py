"""The dilated implementations in the registry: what they take and refuse, pieces, partial forms, verify, attention."""

from itertools import product

import numpy as np
import pytest

import attnbench as ab
from attnbench import masks, registry
from attnbench.cli.options import loadable_names
from attnbench.cli.verify import FAMILY_SPREAD, SPREAD, ShapeOptions, _implementations, _workloads
from attnbench.errors import Unsupported, UsageError
from attnbench.kernels.dilated.pieces import DilatedProblem, computed_pairs, pieces, problem_of
from attnbench.spec import Environment, Workload
from attnbench.workloads import suites

CPU = Environment(device="cpu", device_name="test")
NAMES = ["torch.dilated", "torch.dilated-improved", "jax.dilated"]
PATTERN = masks.dilated([8, 20], [1, 3])
PAPER = masks.dilated([2048, 4096, 8192, 16384, 32768], [1, 2, 4, 6, 12])


def work(mask, **changes):
    return Workload(**{"batch": 2, "q_len": 20, "heads": 6, "head_dim": 8, "mask": mask} | changes)


@pytest.mark.parametrize("name", NAMES)
def test_they_take_the_dilated_mask_and_no_other(name):
    taken = [PATTERN, PATTERN & masks.causal(), masks.lengths([20, 3]) & PATTERN & masks.causal("top-left")]
    assert [registry.get(name).supports(work(mask), CPU) for mask in taken] == [None] * 3
    refused = {
        "one dilated mask": masks.causal(),
        "not 2": PATTERN & masks.dilated([4], [1]),
        "with window": PATTERN & masks.window(3),
        "softcap": PATTERN,
    }
    for words, mask in refused.items():
        reason = registry.get(name).supports(work(mask, softcap=3.0 if words == "softcap" else None), CPU)
        assert words in str(reason)


def test_a_workload_is_read_as_a_problem():
    mask = masks.lengths([20, 3]) & PATTERN & masks.causal()
    assert problem_of(work(mask, kv_heads=2)) == DilatedProblem(PATTERN, 2, 20, 6, 2, True, (20, 3))
    assert problem_of(work(PATTERN)).lengths is None


def counted(problem, fold, diagonal):
    """[b, h, i, j] by walking every piece's views."""
    group = problem.heads // problem.kv_heads
    found = np.zeros((problem.batch, problem.heads, problem.tokens, problem.tokens), int)
    for piece in pieces(problem, fold, diagonal):
        heads = piece.heads
        for stacked, n in product(range(piece.stack), range(heads.number)):
            head = heads.first + n * heads.step
            kv_head = heads.kv_first + n // (heads.number // heads.kv_number) * heads.kv_step
            assert kv_head == head // group
            begin = piece.row * problem.tokens + piece.start + stacked * piece.apart + heads.offset + n * heads.shift
            for query, key in product(range(piece.queries), range(piece.keys)):
                if key <= query or not piece.causal:
                    i, j = begin + (piece.skip + query) * piece.rate, begin + key * piece.rate
                    assert i // problem.tokens == j // problem.tokens, "no piece crosses batch rows"
                    found[i // problem.tokens, head, i % problem.tokens, j % problem.tokens] += 1
    return found


@pytest.mark.parametrize("fold,diagonal", list(product([True, False], repeat=2)))
@pytest.mark.parametrize("offset", ["mod", "group"])
@pytest.mark.parametrize("heads,kv_heads", [(12, 12), (12, 4), (5, 5), (6, 1)])
def test_pieces_hold_every_pair_as_often_as_the_mask_counts_it(heads, kv_heads, offset, fold, diagonal):
    for tokens, causal, lengths in ((18, False, None), (13, True, None), (1, True, None), (13, True, (0, 7))):
        pattern = masks.dilated([6, 9, 18], [1, 2, 12], offset)
        mask = pattern & masks.causal() if causal else pattern
        mask = mask if lengths is None else mask & masks.lengths(lengths)
        w = Workload(batch=2, q_len=tokens, heads=heads, kv_heads=kv_heads, head_dim=8, mask=mask)
        bias = np.broadcast_to(w.visible_mask.bias(w.mask_shape), (2, heads, tokens, tokens))
        problem = DilatedProblem(pattern, 2, tokens, heads, kv_heads, causal, lengths)
        np.testing.assert_allclose(counted(problem, fold, diagonal), np.exp(bias), atol=1e-12)


def test_computed_pairs_count_a_pair_as_often_as_it_is_computed():
    problem = DilatedProblem(masks.dilated([6, 9], [1, 2]), 2, 13, 4, 2, True, (13, 7))
    assert computed_pairs(problem) == counted(problem, True, True).sum()
    paper = DilatedProblem(PAPER, 1, 128 * 1024, 12, 12, True)
    by_hand = sum(w / (2 * r * r) for w, r in zip(PAPER.segment_lengths, PAPER.dilation_rates))
    assert computed_pairs(paper) == pytest.approx(12 * 128 * 1024 * by_hand, rel=2e-3)


def test_the_papers_branches_are_few_calls():
    """25 offsets on 12 heads; diagonals leave 12 calls, each of them a single strided view."""
    problem = DilatedProblem(PAPER, 1, 128 * 1024, 12, 12, True)
    assert len(pieces(problem, diagonal=False)) == 25
    assert len(pieces(problem)) == 12
    assert len(pieces(problem._replace(batch=4))) == 12


def test_the_suite_has_the_papers_configuration_at_every_length():
    found = suites.load("dilated").workloads
    paper = [w for w in found if "paper" in w.tags]
    assert {w.q_len for w in paper} == {1024 * n for n in (2, 8, 32, 128, 512, 1024)}
    assert {(w.heads, w.head_dim, w.pass_) for w in paper} == {(12, 64, "forward"), (12, 64, "train")}
    assert all(PAPER in w.visible_mask.parts for w in paper)
    assert paper[0].id == f"b1-t2048-h12-d64-causal&{PAPER.id}-bfloat16-forward"
    assert len(found) == 32


def test_verify_of_the_family_checks_it_on_dilated_edges():
    chosen = _workloads(None, False, ShapeOptions(), (), ("dilated",), ())
    assert {w.id for w in chosen} == set(FAMILY_SPREAD["dilated"]), "each is of the edge suite"
    assert {w.pass_ for w in chosen} == {"forward", "train"}
    assert {w.dtype for w in chosen} == {"float32", "bfloat16"}
    assert {kind for w in chosen for kind in w.visible_mask.kinds} == {"dilated", "causal", "lengths"}
    assert any(w.kv_heads < w.heads for w in chosen)
    patterns = [problem_of(w).pattern for w in chosen]
    assert {one.offset for one in patterns} == {"mod", "group"}
    assert any(all(rate > 1 for rate in one.dilation_rates) for one in patterns), "rows that no branch holds"
    edges = {w.id for w in _workloads(None, False, ShapeOptions(), (), ("sdpa",), ())}
    assert edges == set(SPREAD)
    both = _workloads(None, False, ShapeOptions(), (), ("sdpa", "dilated"), ())
    assert {w.id for w in both} == edges | set(FAMILY_SPREAD["dilated"])


def test_verify_of_the_family_leaves_none_of_it_out():
    every = {name for name in registry.names() if "dilated" in name}
    assert len(every) == 7
    assert set(_implementations((), ("dilated",), None)) == every & set(loadable_names())


@pytest.mark.torch
@pytest.mark.parametrize("name", NAMES[:2])
@pytest.mark.parametrize(
    "mask", [PATTERN & masks.causal(), PATTERN & masks.lengths([20, 7])], ids=["causal", "lengths"]
)
def test_partial_backward_takes_out_and_lse_of_a_whole(name, mask):
    """Two patterns are parts of the pattern with the branches of both."""
    pytest.importorskip("torch")
    from test_torch_numbers import attention_in_float64, draw

    from attnbench.impls.partial.torch_passes import merge_, nothing_yet

    rest = mask.parts[1]
    whole = work(mask, dtype="float64", kv_heads=2)
    parts = [work(masks.dilated([w], [r]) & rest, dtype="float64", kv_heads=2) for w, r in ((8, 1), (20, 3))]
    (q, k, v, dout), exact = draw(whole)
    want_out, want_lse, *want = attention_in_float64(whole, *exact)
    pairs = [registry.get(name).partial(part, {}) for part in parts]
    out, lse = nothing_yet(q.shape, q.dtype, q.device)
    for forward, _ in pairs:
        merge_(out, lse, *forward(q, k, v))
    np.testing.assert_allclose(out.numpy(), want_out, atol=1e-12)
    np.testing.assert_allclose(lse.numpy(), want_lse, atol=1e-12)
    grads = [backward(q, k, v, out, lse, dout) for _, backward in pairs]
    for got, expected in zip((sum(parts) for parts in zip(*grads)), want):
        np.testing.assert_allclose(got.numpy(), expected, atol=1e-11)


@pytest.mark.torch
def test_options_are_known_or_refused():
    torch = pytest.importorskip("torch")
    implementation = registry.get("torch.dilated-improved")
    arrays = [torch.randn(2, 20, 6, 8) for _ in range(3)]
    plain = implementation.build(work(PATTERN), {})(*arrays)
    for config in ({"kernel": "torch.eager"}, {"diagonal": False}, {"merge": "eager"}):
        torch.testing.assert_close(implementation.build(work(PATTERN), config)(*arrays), plain, atol=1e-6, rtol=1e-5)
    with pytest.raises(UsageError, match="no setting blocks"):
        implementation.build(work(PATTERN), {"blocks": 3})
    with pytest.raises(Unsupported, match=r"torch.sdpa-cudnn needs cuda"):
        implementation.build(work(PATTERN), {"kernel": "torch.sdpa-cudnn"})(*arrays)


@pytest.mark.torch
def test_attention_picks_them_for_the_dilated_mask():
    torch = pytest.importorskip("torch")
    arrays = [torch.randn(2, 20, 6, 8) for _ in range(3)]
    assert ab.explain(*arrays, mask=PATTERN).pick == "torch.dilated-improved"
    assert ab.explain(*arrays, mask=ab.masks.causal()).pick == "torch.sdpa-flash"
    out, lse = ab.attention(*arrays, mask=PATTERN, return_lse=True)
    want, want_lse = ab.attention(*arrays, mask=PATTERN, impl="torch.eager", return_lse=True)
    torch.testing.assert_close(out, want, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(lse, want_lse, atol=1e-5, rtol=1e-4)
