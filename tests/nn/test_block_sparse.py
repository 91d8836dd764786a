"""Block-sparse modules: fixed patterns exactly, choice by content by its promises, and a gate that really learns."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

import attnbench as ab
from attnbench.errors import InvalidWorkload, UnknownName, UsageError
from attnbench.masks import MaskShape
from attnbench.masks.block_patterns import PATTERNS, sparse_mask
from attnbench.spec import Workload
from attnbench.workloads.inputs import draw

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from torch.utils.flop_counter import FlopCounterMode

from attnbench import nn
from attnbench.kernels.block_sparse import selection
from attnbench.kernels.block_sparse.selection import estimate, true_mass
from attnbench.kernels.block_sparse.selection import train_gate as train_heads_first
from attnbench.nn import block_sparse
from attnbench.nn.block_sparse import MOST_SIZES

SIZE = 16
STRUCTURED = Workload(batch=1, q_len=512, heads=2, head_dim=32, inputs="structured")


def arrays(w, seed):
    """q, k and v, layout bshd."""
    return [torch.from_numpy(x) for x in draw(w, seed)[:3]]


def normal(b=2, t=90, s=90, h=4, g=2, d=16):
    return torch.randn(b, t, h, d), torch.randn(b, s, g, d), torch.randn(b, s, g, d)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("pattern", sorted(PATTERNS))
def test_a_fixed_pattern_is_attention_under_its_mask(pattern, causal):
    q, k, v = (x.requires_grad_() for x in normal())
    module = nn.create_block_sparse_attention(0.6, pattern, block_size=SIZE, causal=causal, scale=0.3)
    out, lse = module(q, k, v, return_lse=True)
    mask = sparse_mask(pattern, 0.6, MaskShape(2, 4, 90, 90), block_size=SIZE, causal=causal)
    want, want_lse = ab.attention(q, k, v, mask=mask, scale=0.3, impl="torch.eager", return_lse=True)
    torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse, want_lse, rtol=1e-4, atol=1e-5)
    dout = torch.randn_like(out)
    for got, right in zip(torch.autograd.grad(out, (q, k, v), dout), torch.autograd.grad(want, (q, k, v), dout)):
        torch.testing.assert_close(got, right, rtol=1e-3, atol=1e-5)
    assert module.achieved_sparsity(q, k) == pytest.approx(0.6, abs=1 / 6)


@pytest.mark.parametrize("pattern", ["local", "dynamic_threshold"])
def test_nothing_dropped_is_dense(pattern):
    q, k, v = normal(s=70)
    options = {"threshold": 1.0, "pool": 4} if pattern == "dynamic_threshold" else {}
    module = nn.create_block_sparse_attention(0.0, pattern, block_size=SIZE, **options)
    torch.testing.assert_close(module(q, k, v), ab.attention(q, k, v), rtol=1e-4, atol=1e-5)
    assert module.achieved_sparsity(q, k) == 0


def everything(w, block_size=SIZE, causal=False):
    mask = ab.masks.causal() if causal else ab.masks.full()
    return selection.choice(mask, w.mask_shape, block_size, torch.device("cpu"))


def test_by_threshold_keeps_the_fewest_that_reach_it():
    mass = torch.rand(2, 3, 5, 8, generator=torch.Generator().manual_seed(0)).softmax(-1)
    for threshold in (0.1, 0.5, 0.9):
        kept = selection.by_threshold(mass, threshold)
        held = (mass * kept).sum(-1)
        assert (held >= threshold - 1e-6).all()
        lightest = mass.masked_fill(~kept, 2.0).amin(-1)
        assert (held - lightest < threshold).all(), "one fewer would not do"
        assert (lightest >= mass.masked_fill(kept, -1.0).amax(-1)).all(), "the heaviest are kept"


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sparsity", [0.5, 0.75])
def test_calibration_meets_the_mean_on_other_inputs_too(sparsity, causal):
    module = nn.create_block_sparse_attention(sparsity, "dynamic_threshold", block_size=SIZE, causal=causal)
    q, k, v = arrays(STRUCTURED, 0)
    threshold = module.calibrate(q, k)
    assert 0 < threshold < 1
    assert module.achieved_sparsity(q, k) == pytest.approx(sparsity, abs=0.01)
    fresh = arrays(STRUCTURED, 1)
    assert module.achieved_sparsity(*fresh[:2]) == pytest.approx(sparsity, abs=0.05)
    assert float(module.state_dict()["threshold"]) == pytest.approx(threshold), "saved with the model"
    kept = module.blocks(q, k)
    per_row = kept.sum(-1)
    assert per_row.min() < per_row.max(), "sparsity is an outcome, row by row"
    mask = (ab.masks.causal() if causal else ab.masks.full()) & ab.masks.blocks(kept, SIZE)
    torch.testing.assert_close(module(q, k, v), ab.attention(q, k, v, mask=mask), rtol=1e-4, atol=1e-5)


def test_estimates_never_take_the_full_product():
    q, k = (x.transpose(1, 2) for x in arrays(STRUCTURED, 0)[:2])
    chosen = everything(STRUCTURED)
    with FlopCounterMode(display=False) as counted:
        estimate(q, k, chosen, 32**-0.5, pool=8)
    assert counted.get_total_flops() == 2 * 2 * (512 // 8) ** 2 * 32, "1/64 of QK^T"


def recall_of(mass, chosen, truth, sparsity):
    """Attention mass in the kept blocks at a mean sparsity."""
    kept = chosen.keeping(selection.by_threshold(mass, selection.calibrated(mass, chosen, sparsity))).kept
    assert chosen.sparsity(kept) == pytest.approx(sparsity, abs=0.01)
    return float((truth * kept).sum(-1).mean())


@pytest.mark.parametrize("causal", [False, True])
def test_the_gate_learns(causal):
    """On draws it never saw: more mass than untrained, and than random blocks, at equal sparsity."""
    mask = ab.masks.causal() if causal else ab.masks.full()
    gate = nn.BlockGate(heads=2, head_dim=32)
    examples = [tuple(arrays(STRUCTURED, seed)[:2]) for seed in range(100, 112)]
    chosen = everything(STRUCTURED, causal=causal)
    held_out = [tuple(x.transpose(1, 2) for x in arrays(STRUCTURED, seed)[:2]) for seed in (0, 1)]

    def recalls(sparsity):
        with torch.no_grad():
            return [
                recall_of(gate(q, k, chosen), chosen, true_mass(q, k, chosen, gate.scale), sparsity)
                for q, k in held_out
            ]

    before = {sparsity: recalls(sparsity) for sparsity in (0.75, 0.85)}
    losses = nn.train_gate(gate, examples, mask, SIZE, steps=100)
    assert np.mean(losses[-12:]) < 0.9 * np.mean(losses[:12])
    random = torch.rand(1, 2, 32, 32, generator=torch.Generator().manual_seed(0)) * chosen.free
    for sparsity, untrained in before.items():
        trained = recalls(sparsity)
        by_chance = [
            recall_of(
                random / random.sum(-1, keepdim=True).clamp(min=1e-9),
                chosen,
                true_mass(q, k, chosen, gate.scale),
                sparsity,
            )
            for q, k in held_out
        ]
        assert np.mean(trained) > np.mean(untrained) + 0.02
        assert np.mean(trained) > np.mean(by_chance) + 0.2


def test_a_gate_is_trained_on_what_the_modules_take():
    """Heads first was taken for tokens first without a word where there were as many tokens as heads."""
    q, k, _ = normal(b=1, t=8, s=8, h=4, g=2, d=8)
    gate = nn.BlockGate(4, 8, pool=2)
    assert len(nn.train_gate(gate, [(q, k)], ab.masks.full(), 4, steps=3)) == 3
    for shapes in ((q.transpose(1, 2), k.transpose(1, 2)), (q[0], k[0]), (q, k[..., :4]), (q[:, :, :2], k)):
        with pytest.raises(InvalidWorkload, match="batch, tokens, heads, dim"):
            nn.train_gate(gate, [shapes], ab.masks.full(), 4)
    with pytest.raises(UsageError, match="at least one example"):
        nn.train_gate(gate, [], ab.masks.full(), 4)
    square = torch.randn(1, 4, 4, 8, generator=torch.Generator().manual_seed(1))
    by_module, by_hand = nn.BlockGate(4, 8, pool=1), nn.BlockGate(4, 8, pool=1)
    nn.train_gate(by_module, [(square, square)], ab.masks.full(), 1, steps=5)
    heads_first = square.transpose(1, 2)
    train_heads_first(by_hand, [(heads_first, heads_first)], ab.masks.full(), 1, steps=5)
    torch.testing.assert_close(by_module.query, by_hand.query)


def test_an_untrained_gate_is_the_plain_estimate():
    q, k = (x.transpose(1, 2) for x in arrays(STRUCTURED, 0)[:2])
    chosen = everything(STRUCTURED, causal=True)
    gate = nn.BlockGate(2, 32)
    torch.testing.assert_close(gate(q, k, chosen), estimate(q, k, chosen, 32**-0.5))
    module = nn.create_block_sparse_attention(0.5, "learned", gate=gate, block_size=SIZE, causal=True)
    assert "gate.query" in module.state_dict()
    q, k, v = arrays(STRUCTURED, 0)
    module.calibrate(q, k)
    assert torch.isfinite(module(q, k, v)).all()
    with pytest.raises(UsageError, match="for 2 heads of 32, but q has 4 heads of 16"):
        nn.create_block_sparse_attention(0.5, "learned", gate=gate, threshold=0.5)(*normal())


def test_true_mass_is_the_mean_attention_of_a_block():
    w = Workload(batch=2, q_len=50, kv_len=70, heads=4, kv_heads=2, head_dim=16)
    q, k, _ = (x.transpose(1, 2) for x in normal(t=50, s=70))
    found = true_mass(q, k, everything(w, causal=True), 0.25)
    logits = q @ k.repeat_interleave(2, 1).transpose(-1, -2) * 0.25
    seen = torch.arange(70)[None] <= torch.arange(50)[:, None] + 20
    p = logits.masked_fill(~seen, -torch.inf).softmax(-1)
    p = torch.nn.functional.pad(p, (0, 10)).unflatten(3, (5, 16)).sum(-1)
    want = torch.stack([p[:, :, i : i + 16].mean(2) for i in range(0, 50, 16)], 2)
    torch.testing.assert_close(found, want)


def test_a_later_key_changes_no_earlier_row():
    """Selection under a causal mask looks at no block that some of the rows cannot see."""
    module = nn.create_block_sparse_attention(0.6, "dynamic_threshold", block_size=SIZE, causal=True)
    q, k, v = arrays(STRUCTURED, 0)
    module.calibrate(q, k)
    before = module(q, k, v)
    for key in (200, 207):  # the first and an inner token of a block
        other_k, other_v = k.clone(), v.clone()
        other_k[:, key], other_v[:, key] = 9.0, -9.0
        after = module(q, other_k, other_v)
        torch.testing.assert_close(after[:, :key], before[:, :key], rtol=0, atol=0)
        assert not torch.equal(after[:, key:], before[:, key:])


def test_adaptive_stays_within_its_bounds_and_adapts():
    module = nn.create_adaptive_sparse_attention(0.25, 0.9, mass=0.8, block_size=SIZE)
    structured, flat = arrays(STRUCTURED, 0), normal(1, 512, 512, 2, 2, 32)
    kept = {name: module.blocks(q, k).sum(-1) for name, (q, k, _) in (("structured", structured), ("flat", flat))}
    for counts in kept.values():
        assert counts.min() >= 4, "at most 90 % of 32 dropped leaves 4"
        assert counts.max() <= 24, "25 % dropped leaves 24"
    assert (kept["flat"] == 24).float().mean() > 0.9, "no sparsity to find: all that is allowed"
    assert module.achieved_sparsity(*structured[:2]) > 0.5
    q, k, v = structured
    mask = ab.masks.blocks(module.blocks(q, k), SIZE)
    torch.testing.assert_close(module(q, k, v), ab.attention(q, k, v, mask=mask), rtol=1e-4, atol=1e-5)
    causal = nn.create_adaptive_sparse_attention(0.25, 0.9, mass=0.8, block_size=SIZE, causal=True)
    assert torch.isfinite(causal(q, k, v)).all()
    same = nn.create_adaptive_sparse_attention(0.5, 0.5, block_size=SIZE)
    assert (same.blocks(q, k).sum(-1) == 16).all()


@pytest.mark.parametrize("least, most, kept", [(0.5, 0.9, 3), (0.0, 0.7, 3), (0.55, 0.56, 3), (0.95, 0.99, 1)])
def test_rounding_leaves_no_bound_where_blocks_suffice(least, most, kept):
    """Of 7 blocks a row: spread-out attention goes to the lower bound, concentrated attention to the upper one."""
    q, k, _ = normal(1, 7 * SIZE, 7 * SIZE, 2, 2, 32)
    mass = 1.0 if least else 1e-6
    module = nn.create_adaptive_sparse_attention(least, most, mass=mass, block_size=SIZE)
    assert (module.blocks(q, k).sum(-1) == kept).all()


REFUSED = [
    (lambda: nn.create_block_sparse_attention(0.5, None), UnknownName, 'no block pattern called "None"'),
    (lambda: nn.create_block_sparse_attention(0.5, "diagonal"), UnknownName, "no block pattern"),
    (lambda: nn.create_block_sparse_attention(1.0, "local"), InvalidWorkload, "less than 1"),
    (
        lambda: nn.create_block_sparse_attention(0.5, "local", seed=3),
        UsageError,
        "seed= is used by pattern random, not",
    ),
    (
        lambda: nn.create_block_sparse_attention(0.5, "local", threshold=0.5),
        UsageError,
        "threshold= is used by pattern",
    ),
    (lambda: nn.create_block_sparse_attention(0.5, "learned", pool=4, gate=nn.BlockGate(1, 8)), UsageError, "pool="),
    (lambda: nn.create_block_sparse_attention(0.5, "learned"), UsageError, "needs gate="),
    (lambda: nn.create_block_sparse_attention(0.5, "local", block_size=0), UsageError, "block_size"),
    (lambda: nn.create_block_sparse_attention(0.5, "local", dropout=0.1), TypeError, "dropout"),
    (lambda: nn.create_block_sparse_attention(0.5, "dynamic_threshold")(*normal()), UsageError, "calibrate"),
    (lambda: nn.create_block_sparse_attention(0.5, "local").calibrate(*normal()[:2]), UsageError, "no threshold"),
    (lambda: nn.create_block_sparse_attention(0.5, "local")(*normal(g=3)), InvalidWorkload, "must divide"),
    (
        lambda: nn.create_block_sparse_attention(0.95, "dynamic_threshold", block_size=16, causal=True).calibrate(
            *normal()[:2]
        ),
        UsageError,
        "cannot be reached",
    ),
    (
        lambda: nn.create_block_sparse_attention(0.5, "dynamic_threshold", block_size=12, threshold=0.5)(*normal()),
        UsageError,
        "8 does not divide 12",
    ),
    (lambda: nn.create_adaptive_sparse_attention(0.9, 0.5), UsageError, "more than max_sparsity"),
    (lambda: nn.create_adaptive_sparse_attention(0.5, 0.9, mass=0), UsageError, "above 0"),
    (lambda: nn.create_adaptive_sparse_attention(0.5, 0.9, pattern="local"), TypeError, "pattern"),
]


GATE = {"gate": nn.BlockGate(1, 8)}
IGNORED = [
    ("dynamic_threshold", {"threshold": 1.5}, "threshold must be the share of attention to keep"),
    ("dynamic_threshold", {"threshold": -1}, "threshold must be the share of attention to keep"),
    ("dynamic_threshold", {"threshold": float("nan")}, "threshold must be the share of attention to keep"),
    ("dynamic_threshold", {"pool": 0}, "pool must be a whole number of at least 1, not 0"),
    ("dynamic_threshold", {"pool": -3}, "pool must be a whole number of at least 1, not -3"),
    ("dynamic_threshold", {"pool": 7}, "7 does not divide 128"),
    ("learned", {"gate": 3}, "gate must be a BlockGate.* not 3"),
    ("learned", GATE | {"scale": 0.5}, "the gate was made for scale"),
    ("learned", GATE | {"block_size": 12}, "8 does not divide 12"),
    ("local", {"causal": "x"}, "causal must be True or False"),
    ("local", {"scale": float("nan")}, "scale must be a finite number"),
    ("local", {"scale": "wide"}, "scale must be a finite number"),
    ("random", {"seed": -1}, "seed must be a whole number of at least 0"),
]


@pytest.mark.parametrize("pattern, options, words", IGNORED)
def test_a_value_that_means_nothing_is_refused(pattern, options, words):
    with pytest.raises(UsageError, match=words):
        nn.create_block_sparse_attention(0.5, pattern, **options)
    if pattern == "learned" or not {"threshold", "seed"} & set(options):
        with pytest.raises(UsageError, match=words):
            nn.create_adaptive_sparse_attention(0.5, 0.9, **options)


@pytest.mark.parametrize("options", [{"pool": 0}, {"heads": 0}, {"head_dim": 1.5}, {"scale": float("inf")}])
def test_a_gate_that_cannot_be_is_refused(options):
    with pytest.raises(UsageError, match=next(iter(options))):
        nn.BlockGate(**({"heads": 2, "head_dim": 8} | options))


def test_arrays_of_another_layout_are_refused_wherever_they_come_in():
    module = nn.create_block_sparse_attention(0.5, "dynamic_threshold", threshold=0.5)
    for call in (module.calibrate, module.blocks, module.achieved_sparsity):
        with pytest.raises(InvalidWorkload, match="batch, tokens, heads, dim"):
            call(torch.randn(90, 4, 16), torch.randn(90, 4, 16))


@pytest.mark.parametrize("make, error, words", REFUSED, ids=[words for *_, words in REFUSED])
def test_nothing_is_silently_ignored(make, error, words):
    with pytest.raises(error, match=words):
        make()


def test_the_public_names_are_there():
    names = {"BlockSparseAttention", "AdaptiveSparseAttention", "BlockGate", "train_gate"}
    assert names | {"create_block_sparse_attention", "create_adaptive_sparse_attention"} <= set(dir(nn))


@pytest.mark.parametrize("make", [
    lambda: nn.create_block_sparse_attention(0.5, "local", block_size=8),
    lambda: nn.create_adaptive_sparse_attention(0.1, 0.7, block_size=8, pool=4),
], ids=["fixed", "adaptive"])  # fmt: skip
def test_tables_are_of_few_sizes_and_not_pickled(make):
    module = make()
    empty = len(pickle.dumps(module))
    for tokens in range(8, 8 * 40, 8):
        x = torch.randn(1, tokens, 2, 8)
        module(x, x, x)
    assert len(module._made) <= MOST_SIZES
    assert len(pickle.dumps(module)) == empty
    copied = pickle.loads(pickle.dumps(module))
    torch.testing.assert_close(copied(x, x, x), module(x, x, x))


@pytest.mark.parametrize("change", [{"sparsity": 0.75}, {"causal": True}, {"block_size": 16}, {"pattern": "strided"}])
def test_a_setting_that_is_changed_holds_for_sizes_that_were_seen(change):
    """Tables are kept by size, and by everything else that they are made of."""
    settings = {"sparsity": 0.5, "pattern": "local", "block_size": 8, "causal": False}
    q, k, v = (torch.randn(1, 64, 2, 8) for _ in range(3))
    module = nn.create_block_sparse_attention(**settings)
    before = module(q, k, v)
    for name, value in change.items():
        setattr(module, name, value)
    want = nn.create_block_sparse_attention(**(settings | change))
    torch.testing.assert_close(module(q, k, v), want(q, k, v), rtol=0, atol=0)
    assert module.achieved_sparsity(q, k) == want.achieved_sparsity(q, k)
    assert not torch.equal(module(q, k, v), before)


@pytest.mark.parametrize("change", [{"causal": True}, {"block_size": 16}])
def test_a_changed_setting_holds_for_blocks_chosen_by_content(change):
    settings = {"mass": 0.5, "block_size": 8, "pool": 8, "causal": False}
    q, k, v = (torch.randn(1, 64, 2, 8) for _ in range(3))
    module = nn.create_adaptive_sparse_attention(0.0, 0.9, **settings)
    module(q, k, v)
    for name, value in change.items():
        setattr(module, name, value)
    want = nn.create_adaptive_sparse_attention(0.0, 0.9, **(settings | change))
    torch.testing.assert_close(module(q, k, v), want(q, k, v), rtol=0, atol=0)


def test_the_sizes_used_last_are_kept(monkeypatch):
    made = []
    tables = block_sparse.tables_of
    monkeypatch.setattr(block_sparse, "tables_of", lambda *given: made.append(given[1].q_len) or tables(*given))
    module = nn.create_block_sparse_attention(0.5, "local", block_size=8)

    def call(tokens):
        module(*(torch.randn(1, tokens, 1, 8) for _ in range(3)))

    sizes = [16 + 8 * at for at in range(MOST_SIZES)]
    for tokens in (*sizes, sizes[0], 1024, sizes[0], sizes[2]):
        call(tokens)
    assert made == [*sizes, 1024]
    call(sizes[1])  # the one used least recently made room for 1024
    assert made == [*sizes, 1024, sizes[1]]
    assert len(module._made) == MOST_SIZES


@pytest.mark.parametrize("cast", ["bfloat16", "half", "double"])
def test_the_threshold_is_not_rounded_with_the_module(cast):
    module = nn.create_block_sparse_attention(0.5, "dynamic_threshold", block_size=SIZE, threshold=0.9137)
    getattr(module, cast)()
    assert (module.threshold.dtype, float(module.threshold)) == (torch.float32, float(torch.tensor(0.9137)))
    empty = module.to("meta").to_empty(device="cpu")
    assert (empty.threshold.dtype, empty.threshold.device.type) == (torch.float32, "cpu")
