"""Which card NVML is asked about: the one in use, not the first of the machine."""

from __future__ import annotations

import ctypes

import pytest

from attnbench.measuring import block
from attnbench.run import environment

pynvml = pytest.importorskip("pynvml")
CARDS = {b"00000000:3B:00.0": 1980, b"00000000:86:00.0": 345}
"""Bus address -> clock of the multiprocessors; NVML's card 0 is the first."""


class Driver:
    """Stands in for libcuda: its device 0 is the machine's second card, as under CUDA_VISIBLE_DEVICES=1."""

    def cuInit(self, flags):
        return 0

    def cuDeviceGet(self, device, ordinal):
        assert ordinal == 0
        return 0

    def cuDeviceGetPCIBusId(self, address, length, device):
        address.value = b"00000000:86:00.0"
        return 0


@pytest.fixture
def two_cards(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver())
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByPciBusId", lambda address: address)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda index: list(CARDS)[index])
    monkeypatch.setattr(pynvml, "nvmlDeviceGetClockInfo", lambda handle, kind: CARDS[handle])
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCurrentClocksThrottleReasons", lambda handle: 0)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetTemperature", lambda handle, sensor: 40)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetPowerManagementLimit", lambda handle: 700_000)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetComputeRunningProcesses", lambda handle: [])
    block.nvml_handle.cache_clear()
    yield
    block.nvml_handle.cache_clear()


def test_the_card_in_use_is_read(two_cards):
    state = block.gpu_state()
    assert state is not None
    assert state.sm_mhz == 345
    assert environment._nvidia_facts()["sm_mhz"] == 345


def test_no_driver_means_no_facts(monkeypatch):
    def missing(name):
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    block.nvml_handle.cache_clear()
    assert block.gpu_state() is None
    assert environment._nvidia_facts() == {}
    block.nvml_handle.cache_clear()
