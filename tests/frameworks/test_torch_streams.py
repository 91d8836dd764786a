"""What is made once and read on several CUDA streams: finished before it is found, and kept while one reads it."""

from __future__ import annotations

import pytest

import attnbench as ab

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from attnbench.frameworks.torch import internals, plain
from attnbench.frameworks.torch.plain import MaskTensors, once_per_device

CUDA = torch.device("cuda", 0)


class Device:
    """Stands in for a GPU: which stream is current, what was waited for, and who is known to read a tensor."""

    def __init__(self, monkeypatch):
        self.stream, self.finished, self.readers = 1, [], []
        monkeypatch.setattr(internals, "stream_of", lambda device: self.stream)
        monkeypatch.setattr(internals, "finish", lambda device: self.finished.append(self.stream))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: self.stream)
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: self.readers.append(stream))


@pytest.fixture
def device(monkeypatch):
    return Device(monkeypatch)


def test_it_is_finished_when_it_is_made_and_each_reading_stream_is_told_once(device):
    made = once_per_device(lambda _: MaskTensors(torch.ones(2), None, torch.ones(2)))
    first = made(CUDA)
    assert (device.finished, device.readers) == ([1], [])
    made(CUDA)
    assert device.readers == [], "the stream that made it needs no word"
    device.stream = 2
    assert made(CUDA) is first
    made(CUDA)
    assert (device.finished, device.readers) == ([1], [2, 2]), "both tensors, once"


def test_nothing_is_waited_for_without_tensors(device):
    once_per_device(lambda _: MaskTensors(None, None, None))(CUDA)
    once_per_device(lambda _: plain.MaskTensors(torch.ones(1), None, None))(torch.device("cpu"))
    assert device.finished == []


def test_a_function_may_hold_tensors_that_cannot_be_seen(device):
    once_per_device(lambda _: lambda q: q, constant=False)(CUDA)
    assert device.finished == [1]


def test_what_has_tensors():
    from torch.nn.attention.bias import causal_lower_right
    from torch.nn.attention.flex_attention import create_block_mask

    a, b = torch.ones(1), torch.ones(2)
    assert list(internals.tensors_of((a, (None, [b]), 3, causal_lower_right(2, 3)))) == [a, b]
    table = create_block_mask(lambda b, h, q, k: q >= k, 1, 1, 128, 128, device="cpu")
    assert len(list(internals.tensors_of(table))) >= 4


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::attnbench.errors.PolicyWarning")
def test_streams_of_a_gpu():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    q, k, v = (torch.randn(2, 2048, 8, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    mask = ab.masks.window(100) & ab.masks.lengths([2000, 1500])
    streams = [torch.cuda.Stream() for _ in range(4)]
    torch.cuda.synchronize()
    found = []
    for stream in streams:
        with torch.cuda.stream(stream):
            found.append(ab.attention(q, k, v, mask=mask, impl="torch.eager"))
    torch.cuda.synchronize()
    wanted = ab.attention(q, k, v, mask=mask, impl="torch.eager")
    assert all(torch.equal(one, wanted) for one in found)
