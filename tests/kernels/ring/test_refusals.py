"""What a ring cannot mean is refused in one sentence, before anything is read or sent."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from attnbench.errors import UsageError
from attnbench.kernels.ring.function import ring_attention
from attnbench.nn import BlockSparseRingDilatedAttention, RingDilatedAttention

WHOLE = (2, 64, 4, 8)
CALLS = {
    "function": ring_attention,
    "ring": RingDilatedAttention([64], [1]),
    "block-sparse": BlockSparseRingDilatedAttention([64], [1], sparsity=0.5, block_size=16),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize(
    "k, v, words",
    [
        ((1, 64, 4, 8), (1, 64, 4, 8), "do not go together"),
        ((3, 64, 4, 8), (3, 64, 4, 8), "do not go together"),
        (WHOLE, (2, 4, 4, 8), "do not go together"),
        (WHOLE, (2, 90, 4, 8), "do not go together"),
        (WHOLE, (2, 64, 2, 8), "do not go together"),
        ((2, 64, 4, 4), (2, 64, 4, 4), "do not go together"),
        ((2, 64, 3, 8), (2, 64, 3, 8), "4 query heads cannot share 3"),
        ((64, 4, 8), (64, 4, 8), "4 axes, not 3"),
    ],
    ids=str,
)
def test_shapes(call, k, v, words):
    with pytest.raises(UsageError, match=words):
        call(torch.randn(*WHOLE), torch.randn(*k), torch.randn(*v))


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_dtypes_and_empty_sequences(call):
    whole = torch.randn(*WHOLE)
    with pytest.raises(UsageError, match="one dtype, not float32, float64"):
        call(whole, whole.double(), whole.double())
    with pytest.raises(UsageError, match="dtype int64 is not one of"):
        call(*[whole.long()] * 3)
    with pytest.raises(UsageError, match="at least one query and one key"):
        call(*[whole[:, :0]] * 3)
    with pytest.raises(UsageError, match="batch must be a whole number of at least 1"):
        call(*[whole[:0]] * 3)


def test_an_option_that_would_do_nothing():
    with pytest.raises(UsageError, match="detached= applies to"):
        ring_attention(*[torch.randn(*WHOLE)] * 3, detached=True)
