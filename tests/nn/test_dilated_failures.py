"""Ways in which public implementations of dilated attention are wrong; each is shown not to happen here."""

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

import dilated_oracle as oracle
from dilated_family import EIGHT, WITH_LSE
from hypothesis import given, settings
from hypothesis import strategies as st

ALL = pytest.mark.parametrize("kind", EIGHT.values(), ids=EIGHT)
THOSE_WITH_LSE = pytest.mark.parametrize("kind", WITH_LSE.values(), ids=WITH_LSE)
LENGTHS = [name for name in EIGHT if "Ring" not in name]
THOSE_WITH_LENGTHS = pytest.mark.parametrize("kind", [EIGHT[name] for name in LENGTHS], ids=LENGTHS)


def draw(tokens, heads, dim=8, batch=1):
    rng = torch.Generator().manual_seed(tokens)
    return [torch.randn(batch, tokens, heads, dim, dtype=torch.float64, generator=rng) for _ in range(3)]


def dense(q, k, v, causal=False):
    return oracle.attention(q, k, v, oracle.visible_counts(q, [q.shape[1]], [1], causal=causal))[0]


@ALL
@pytest.mark.parametrize("causal", [False, True])
def test_one_segment_of_rate_one_is_ordinary_attention(kind, causal):
    """Elsewhere it attended over heads (2.9 off), or divided by a sum over tokens."""
    q, k, v = draw(13, 4)
    torch.testing.assert_close(kind([13], [1], causal=causal)(q, k, v), dense(q, k, v, causal))


@ALL
@pytest.mark.parametrize("branches", [2, 3])
def test_identical_branches_are_ordinary_attention(kind, branches):
    """Dividing by the number of branches gave a half or a third of it."""
    q, k, v = draw(13, 4)
    torch.testing.assert_close(kind([13] * branches, [1] * branches)(q, k, v), dense(q, k, v))


@ALL
def test_tokens_attend_and_heads_do_not(kind):
    """A changed token moved only its own output where heads were taken for tokens; a changed head moves none other."""
    q, k, v = draw(12, 4)
    module = kind([12], [1])
    before = module(q, k, v)
    k[:, 5] += 1
    v[:, 5] += 1
    moved = (module(q, k, v) - before).abs().amax((0, 2, 3)) > 1e-9
    assert moved.all()
    before = module(q, k, v)
    k[:, :, 2] += 1
    v[:, :, 2] += 1
    assert ((module(q, k, v) - before).abs().amax((0, 1, 3)) > 1e-9).tolist() == [False, False, True, False]


@ALL
def test_every_head_runs_every_branch(kind):
    """Heads were dealt out to branches elsewhere, and with 12 heads on 5 branches two of them stayed zero."""
    q, k, v = draw(24, 12)
    segments, rates = [4, 8, 12, 24, 24], [1, 2, 4, 6, 12]
    out = kind(segments, rates)(q, k, v)
    assert (out.abs().amax((0, 1, 3)) > 0).all()
    for left_out in range(5):
        keep = [n for n in range(5) if n != left_out]
        fewer = kind([segments[n] for n in keep], [rates[n] for n in keep])(q, k, v)
        assert ((out - fewer).abs().amax((0, 1, 3)) > 1e-9).all(), f"branch {left_out} changes every head"


@THOSE_WITH_LSE
@pytest.mark.parametrize("heads", [1, 2, 3, 12])
def test_only_rows_that_no_branch_holds_are_zero(kind, heads):
    """An offset shared by all heads left 54 % of the rows exactly zero."""
    q, k, v = draw(30, heads)
    out, lse = kind([10, 30], [2, 3])(q, k, v, return_lse=True)
    seen = oracle.visible_counts(q, [10, 30], [2, 3]).any(-1)
    assert ((out.abs().amax(-1) > 0).transpose(1, 2) == seen).all()
    assert (lse.isfinite() == seen).all()
    assert seen.any(1).all() if heads >= 6 else True


@ALL
@pytest.mark.parametrize("segment,rate", [(16, 6), (32, 12), (10, 4), (7, 3)])
def test_segments_that_no_rate_divides_keep_their_places(kind, segment, rate):
    """Padding each segment to a multiple of the rate put outputs at wrong positions beyond the first one."""
    q, k, v = draw(3 * segment + 1, 12)
    want = oracle.attention(q, k, v, oracle.visible_counts(q, [segment], [rate]))[0]
    torch.testing.assert_close(kind([segment], [rate])(q, k, v), want)


@ALL
@pytest.mark.parametrize("tokens", [9, 17, 23])
def test_padding_takes_no_part_in_the_softmax(kind, tokens):
    """Zero keys of a ragged end shared the weight (0.40 off); V = 1 gives exactly 1 when they do not."""
    q, k, v = draw(tokens, 4)
    out = kind([8, 16], [1, 2])(q, k, torch.ones_like(v))
    torch.testing.assert_close(out, torch.ones_like(out))


@ALL
def test_the_future_does_not_leak(kind):
    """Dividing by a sum over all tokens moved token 0 by 5.6 when the last value changed."""
    q, k, v = draw(40, 12)
    module = kind([8, 20, 40], [1, 2, 6], causal=True)
    before = module(q, k, v)
    for x in (q, k, v):
        x[:, 25:] = torch.randn_like(x[:, 25:])
    assert torch.equal(module(q, k, v)[:, :25], before[:, :25])


@THOSE_WITH_LSE
def test_an_lse_of_zero_is_an_output_like_any_other(kind):
    """torchscale takes LSE 0 for "nothing here"; one key with logit 0 has just that."""
    q, k, v = draw(6, 1)
    q.zero_()
    out, lse = kind([1, 6], [1, 6])(q, k, v, return_lse=True)
    assert lse[0, 0, 3] == 0
    torch.testing.assert_close(out[0, 3], v[0, 3])


@ALL
def test_values_keep_their_scale(kind):
    """Dividing each channel by its sum made the output independent of V's scale."""
    q, k, v = draw(24, 4)
    module = kind([8, 24], [1, 3])
    torch.testing.assert_close(module(q, k, 3 * v), 3 * module(q, k, v))


@THOSE_WITH_LENGTHS
def test_key_lengths_are_not_ignored(kind):
    """Masks were accepted and dropped; here padding may hold anything."""
    q, k, v = draw(16, 4, batch=2)
    module = kind([8, 16], [1, 2])
    before = module(q, k, v, kv_lengths=[16, 5])
    k[1, 5:], v[1, 5:] = 1e3, 1e3
    assert torch.equal(module(q, k, v, kv_lengths=torch.tensor([16, 5])), before)
    assert not torch.allclose(module(q, k, v), before)


@given(st.data())
@settings(max_examples=20, deadline=None)
def test_a_changed_token_moves_exactly_the_rows_that_may_see_it(data):
    tokens, heads = data.draw(st.integers(1, 40)), data.draw(st.sampled_from([1, 2, 4, 12]))
    branches = data.draw(
        st.lists(st.tuples(st.integers(1, 44), st.sampled_from([1, 2, 3, 6, 12])), min_size=1, max_size=3)
    )
    causal, token = data.draw(st.booleans()), data.draw(st.integers(0, tokens - 1))
    segments, rates = zip(*branches)
    q, k, v = draw(tokens, heads, dim=4)
    seen = oracle.visible_counts(q, segments, rates, causal=causal)[0, :, :, token] > 0
    changed = v.clone()
    changed[:, token] += 1
    for name, kind in EIGHT.items():
        module = kind(segments, rates, causal=causal)
        moved = (module(q, k, changed) - module(q, k, v)).abs().amax((0, 3)).transpose(0, 1) > 1e-12
        assert (moved == seen).all(), name
