"""Test set-up: survive a CPU that traps on AMX, keep the cache apart, skip what the machine cannot do."""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
from pathlib import Path

import pytest

from attnbench.run.instructions import isa_cap

os.environ.update(isa_cap())  # before torch is first imported
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it, and so do its children
HERE = Path(__file__).parent
WORKER = os.environ.get("PYTEST_XDIST_WORKER", "main")
os.environ["ATTNBENCH_CACHE"] = str(HERE.parent / ".pytest_cache" / f"attnbench-{WORKER}")
"""Of its own for each test process: who tests side by side must not find the other's lock."""


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.path.parent != HERE)  # whole programs first: no core waits for the last of them
    have_gpu = _have_gpu() if any("gpu" in item.keywords for item in items) else False
    for item in items:
        if "gpu" in item.keywords and not have_gpu:
            item.add_marker(pytest.mark.skip(reason="no CUDA device here"))
        for framework in ("torch", "jax"):
            if framework in item.keywords and importlib.util.find_spec(framework) is None:
                item.add_marker(pytest.mark.skip(reason=f"{framework} is not installed"))


def pytest_collection_finish():
    """One thread for torch in this process: arrays are tiny here, and workers side by side wait for each other's cores.

    Processes that tests start keep torch's own number.
    """
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


def _have_gpu():
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()
