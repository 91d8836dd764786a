"""`ab.MemoryProfiler`: extra bytes at the peak of any block of code.

On an accelerator torch's allocator counts exactly. On a CPU the high-water mark of resident memory is used, which
covers every library's pages; malloc is set to take large blocks from the system and return them at once, so that freed
memory is not counted again.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from types import TracebackType
from typing import Any

from attnbench.frameworks.host_memory import restart_peak, status_bytes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
THRESHOLD_BYTES = 1 << 16


class MemoryProfiler:
    """Context that measures peak memory: `with MemoryProfiler() as m: ...`, then `m.get_peak_memory()`.

    device: "cuda", "cuda:1", "cpu" or a torch.device; by default the GPU if torch is loaded and has one, else the CPU.
    Without an index the peaks of all GPUs are added up. If the peak cannot be measured, it is None and `m.reason` says
    why. Blocks do not nest: the inner one resets the counter.
    On a CPU malloc returns freed memory at once from the first block on, which cannot be undone: measure times in
    another process.
    """

    def __init__(self, device: Any = None) -> None:
        self.reason: str | None = None
        self.method = ""
        self._device, _, index = ("" if device is None else str(device)).partition(":")
        self._indices = [int(index)] if index.isdigit() else None
        """The devices that are counted; None for all."""
        self._torch: Any = None
        """The torch module if its CUDA allocator counts, else None."""
        self._before = 0
        self._peak: int | None = None

    def __enter__(self) -> MemoryProfiler:
        gc.collect()
        torch = sys.modules.get("torch")
        if torch is not None and self._device in ("", "cuda") and torch.cuda.is_available():
            torch.cuda.init()
            self._torch = torch
            self.method = "torch CUDA allocator"
            self._indices = self._indices or list(range(torch.cuda.device_count()))
            self._wait()
            for index in self._indices:
                torch.cuda.reset_peak_memory_stats(index)
            self._before = sum(map(torch.cuda.memory_allocated, self._indices))
        elif self._device not in ("", "cpu"):
            self.reason = f"no peak counter for {self._device}: torch with that device is not loaded in this process"
        else:
            self._start_resident()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.reason is not None:
            return
        if self._torch is not None:
            self._wait()
            self._peak = sum(map(self._torch.cuda.max_memory_allocated, self._indices or [])) - self._before
        else:
            self._peak = max(0, status_bytes("VmHWM") - self._before)

    def get_peak_memory(self) -> int | None:
        """Return the extra bytes at the peak of the block, or None with `reason`."""
        if self._peak is None and self.reason is None:
            self.reason = "the block has not been run"
        return self._peak

    def _wait(self) -> None:
        """Wait for the devices in use; waiting for another one would put a context on it."""
        for index in self._indices or []:
            if self._torch.cuda.memory_reserved(index):
                self._torch.cuda.synchronize(index)

    def _start_resident(self) -> None:
        self.method = "resident high-water mark"
        if not sys.platform.startswith("linux"):
            self.reason = "the high-water mark of resident memory can be reset on Linux only"
            return
        libc = ctypes.CDLL(None)
        if hasattr(libc, "mallopt"):
            libc.mallopt(M_MMAP_THRESHOLD, THRESHOLD_BYTES)
            libc.mallopt(M_TRIM_THRESHOLD, THRESHOLD_BYTES)
        try:
            self._before = restart_peak()
        except OSError as error:
            self.reason = f"the high-water mark cannot be reset here: {error}"
