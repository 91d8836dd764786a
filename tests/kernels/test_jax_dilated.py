"""jax.dilated: the function against the dense softmax that defines it, jitted, with gradients."""

import numpy as np
import pytest

jax = pytest.importorskip("jax")
torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.jax, pytest.mark.usefixtures("quick_to_compile")]

import dilated_oracle as oracle

from attnbench.kernels.dilated import jax_attention
from attnbench.kernels.dilated.jax_attention import dilated_attention

CASES = {
    "twelve heads, no rate divides a segment": ((1, 61, 12, 12), ([16, 32, 61], [1, 6, 12]), {"causal": True}),
    "grouped heads and offsets, skipped rows": ((2, 25, 8, 2), ([10, 25], [2, 3]), {"offset": "group"}),
    "ragged, an empty batch row": ((2, 33, 4, 4), ([8, 33], [1, 2]), {"kv_lengths": [0, 20], "causal": True}),
    "segments wider than the sequence, one token": ((2, 1, 4, 4), ([8, 64], [1, 12]), {}),
}


def draw(shape):
    batch, tokens, heads, kv_heads = shape
    rng = torch.Generator().manual_seed(3)
    return [torch.randn(batch, tokens, h, 8, generator=rng).double() for h in (heads, kv_heads, kv_heads, heads)]


def compiled(arrays, dout, pattern, options):
    """(out, lse, (dq, dk, dv)) of one jitted program."""

    @jax.jit
    def run(*given):
        (out, lse), back = jax.vjp(lambda *a: dilated_attention(*a, *pattern, return_lse=True, **options), *given)
        return out, lse, back((jax.numpy.asarray(dout, "float32"), jax.numpy.zeros_like(lse)))

    return run(*(np.asarray(x, np.float32) for x in arrays))


def same(got, want):
    np.testing.assert_allclose(np.asarray(got), want.detach().numpy(), atol=2e-5, rtol=2e-4)


@pytest.mark.parametrize("case", CASES)
def test_values_lse_and_gradients(case):
    shape, pattern, options = CASES[case]
    *arrays, dout = draw(shape)
    leaves = [x.requires_grad_() for x in arrays]
    asked = {("lengths" if name == "kv_lengths" else name): value for name, value in options.items()}
    want, want_lse = oracle.attention(*leaves, oracle.visible_counts(arrays[0], *pattern, **asked))
    out, lse, grads = compiled([x.detach() for x in arrays], dout, pattern, options)
    same(out, want)
    same(lse, want_lse)
    for got, expected in zip(grads, torch.autograd.grad(want, leaves, dout)):
        same(got, expected)


def test_blocks_and_detached_weights(monkeypatch):
    """The blocked path, whose blocks do not divide the work, and torchscale's gradient."""
    monkeypatch.setattr(jax_attention, "BLOCK_PAIRS", 5 * 8**2)
    *arrays, dout = draw((2, 24, 6, 6))
    leaves = [x.requires_grad_() for x in arrays]
    want = oracle.detached(*leaves, [8, 24], [1, 3], True)
    options = {"causal": True, "mix_grad": "detached"}
    out, _, grads = compiled([x.detach() for x in arrays], dout, ([8, 24], [1, 3]), options)
    same(out, want)
    for got, expected in zip(grads, torch.autograd.grad(want, leaves, dout)):
        same(got, expected)


@pytest.mark.parametrize(
    "given, words",
    [
        ({"mix_grad": "x"}, "mix_grad must be"),
        ({"kv_lengths": [99]}, r"lie in 0 \.\.\. 8"),
        ({"kv_lengths": [8, 8]}, "has 2 batch rows"),
        ({"causal": "no"}, "causal must be True or False"),
        ({"segment_lengths": [4.5]}, "whole number, not 4.5"),
        ({"scale": "big"}, "scale must be a finite number"),
        ({"k": np.zeros((1, 7, 2, 4), np.float32)}, "do not go together"),
        ({"v": np.zeros((1, 8, 1, 4), np.float32)}, "do not go together"),
    ],
    ids=["mix_grad", "long", "two rows", "causal", "segments", "scale", "k", "v"],
)
def test_what_cannot_be_meant_is_refused(given, words):
    from attnbench.errors import UsageError

    x = np.zeros((1, 8, 2, 4), np.float32)
    arrays = {"q": x, "k": x, "v": x, "segment_lengths": [4], "dilation_rates": [1]}
    with pytest.raises(UsageError, match=words):
        dilated_attention(**(arrays | given))


TOKENS, PATTERN = 64, ([8, 20, 64], [1, 3, 6])


@pytest.fixture(scope="module")
def of_lengths():
    """(causal) -> one compiled function of (q, k, v, kv_lengths): 64 tokens, of which a length makes any 1 ... 64."""
    return {
        causal: jax.jit(
            lambda q, k, v, n, causal=causal: dilated_attention(q, k, v, *PATTERN, causal=causal, kv_lengths=n)
        )
        for causal in (False, True)
    }


@pytest.mark.parametrize("causal", [False, True])
def test_any_length(of_lengths, causal):
    """Segments are cut from the first token on, so the first n rows of a padded call are those of n tokens."""
    q, k, v, _ = draw((1, TOKENS, 6, 6))
    given = [np.asarray(x, np.float32) for x in (q, k, v)]
    for length in range(1, TOKENS + 1):
        some = [x[:, :length] for x in (q, k, v)]
        want, _ = oracle.attention(*some, oracle.visible_counts(some[0], *PATTERN, causal=causal))
        same(of_lengths[causal](*given, np.array([length]))[:, :length], want)


@pytest.mark.parametrize("causal", [False, True])
def test_a_changed_token_moves_exactly_the_rows_that_may_see_it(of_lengths, causal):
    """Those before it never under a causal mask; to the last bit, in one program."""
    q, k, v, _ = draw((1, TOKENS, 6, 6))
    counts = oracle.visible_counts(q, *PATTERN, causal=causal)[0]
    given, whole = [np.asarray(x, np.float32) for x in (q, k, v)], np.array([TOKENS])
    before = np.asarray(of_lengths[causal](*given, whole))
    for token in range(0, TOKENS, 7):
        changed = [given[0], *(x.copy() for x in given[1:])]
        changed[1][:, token] += 1
        changed[2][:, token] += 1
        moved = (np.asarray(of_lengths[causal](*changed, whole)) != before).any((0, 3)).T
        assert (moved == (counts[:, :, token] > 0).numpy()).all()


@pytest.mark.parametrize("branches", [1, 2, 3])
def test_identical_branches_are_ordinary_attention(branches):
    q, k, v, _ = draw((1, 13, 4, 4))
    want, _ = oracle.attention(q, k, v, oracle.visible_counts(q, [13], [1]))
    same(dilated_attention(*(np.asarray(x, np.float32) for x in (q, k, v)), [13] * branches, [1] * branches), want)


def test_arrays_of_another_library_are_refused():
    from attnbench.errors import UsageError

    with pytest.raises(
        UsageError, match=r"takes JAX arrays, not torch\.Tensor: convert it with jax\.numpy\.from_dlpack"
    ):
        dilated_attention(*[torch.zeros(1, 16, 4, 8)] * 3, [8], [1])
