"""Key lengths over 1, 2 and 3 ranks in every layout, beside one device and the float64 oracle."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from ranks_of_torchrun import told_by_ranks

from attnbench.errors import UsageError
from attnbench.nn import MultiheadDilatedAttention, RingDilatedAttention, RingMultiheadDilatedAttention


@pytest.fixture(scope="module", params=[1, 2, 3])
def told(request, tmp_path_factory):
    return told_by_ranks("ring_length_ranks.py", request.param, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("what", ["dilated", "detached", "block sparse", "dense"])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
def test_ranks_give_what_one_device_and_the_oracle_give(told, layout, what):
    for rank, found in enumerate(told):
        assert max(found[layout][what]) < 1e-13, f"rank {rank}: {found[layout][what]}"


def test_lengths_that_differ_from_rank_to_rank_are_refused_by_all(told):
    for found in told if len(told) > 1 else ():
        assert found["unlike"] == "kv_lengths differ from rank to rank: every rank gives those of the whole sequence."


def test_whatever_else_differs_from_rank_to_rank_is_refused_by_all(told):
    for found in told if len(told) > 1 else ():
        for name, answer in found["disagreements"]:
            assert answer == f"ranks disagree on {name}: every rank gives the same."


def test_multihead():
    torch.manual_seed(1)
    plain = MultiheadDilatedAttention(32, 4, [8, 16], [1, 2], causal=True)
    ring = RingMultiheadDilatedAttention(32, 4, [8, 16], [1, 2], causal=True)
    ring.load_state_dict(plain.state_dict())
    x = torch.randn(2, 29, 32)
    torch.testing.assert_close(ring(x, kv_lengths=[29, 9]), plain(x, kv_lengths=[29, 9]))


@pytest.mark.parametrize(
    "lengths, words",
    [
        ([5], "names 1 batch rows"),
        ([5, 99], "lie in 0 ... 53"),
        ([5, -1], "negative"),
        ([5, 2.5], "whole numbers"),
    ],
)
def test_impossible_lengths_are_refused(lengths, words):
    with pytest.raises(UsageError, match=words):
        RingDilatedAttention([8], [1])(*[torch.randn(2, 53, 4, 8)] * 3, kv_lengths=lengths)
