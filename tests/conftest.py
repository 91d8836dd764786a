"""Test set-up: survive a CPU that traps on AMX, keep the cache apart, skip what the machine cannot do."""

from __future__ import annotations

import gc
import importlib.util
import os
import signal
import sys
from contextlib import nullcontext
from importlib.metadata import version
from itertools import count
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
"""Arrays are tiny here, and threads of tests side by side wait for each other's cores: one each takes a third of the
time. NumPy reads it when it is imported. Tests of how workers run are without it: run/conftest.py."""

import numpy as np
import pytest
import standing_workers

from attnbench import registry
from attnbench.comparing import compare
from attnbench.frameworks.jax import framework as jax_framework
from attnbench.run import launch, workload
from attnbench.run.machine import isa_cap
from attnbench.run.remote import Remote

os.environ.update(isa_cap())  # before torch is first imported
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it, and so do its children
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it
os.environ.setdefault("ATTNBENCH_THREADS", "1")
"""Likewise for the workers of commands that tests start. Tests of threads say how many."""
if importlib.util.find_spec("jaxlib") and version("jaxlib").startswith("0.10."):
    # XLA's older code generator compiles tiny programs in half the time; a flag that it does not know would end the
    # process. Whole commands and the tests of how workers run are without it: cli_process.py, run/conftest.py.
    os.environ.setdefault("XLA_FLAGS", "--xla_cpu_use_fusion_emitters=false")
HERE = Path(__file__).parent
COMPILED = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "attnbench-tests"
for variable, folder in {
    "JAX_COMPILATION_CACHE_DIR": "jax",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
}.items():
    os.environ.setdefault(variable, str(COMPILED / folder))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
"""What frameworks compile is kept between test processes, runs of the suite and clones: most programs are the same."""
WORKER = os.environ.get("PYTEST_XDIST_WORKER", "main")
os.environ["ATTNBENCH_CACHE"] = str(HERE.parent / ".pytest_cache" / f"attnbench-{WORKER}")
"""Of its own for each test process: who tests side by side must not find the other's lock."""
if importlib.util.find_spec("hypothesis"):
    from hypothesis import HealthCheck, settings

    # Neither a busy machine nor the draw of a day may decide whether a test passes.
    settings.register_profile(
        "repeatable", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("repeatable")
gc.set_threshold(200_000, 50, 100)
TESTS_PER_FREEZE = 5
_tests_begun = count()
if sys.platform == "linux":
    # For the whole run, not for a test: workers in this process refuse functions of attnbench that have changed.
    Remote.start = classmethod(standing_workers.start)
# For the whole run too: how many threads a run takes must not depend on what else the machine does.
launch.threads_left = compare.threads_left = lambda device: (None, "")
workload.busy_cores = lambda: 0.0
# And what verification in this process compiles with JAX is kept as other programs are: a run compiles it each time.
_compiling_anew, jax_framework._no_persistent_cache = jax_framework._no_persistent_cache, nullcontext
LONG_FILES = ("models", "impls", "dispatch", "nn", "run", "report")
OPTIMIZE_LITTLE = "jax_disable_most_optimizations"


def pytest_collection_modifyitems(items):
    long = [item.nodeid[:200] for item in items if len(item.nodeid) > 600]
    if long:  # an array as text can have megabytes, and every process of pytest-xdist sends and keeps each id
        raise pytest.UsageError(f"the ids of these tests are too long, name their parameters: {long}")
    items.sort(key=lambda item: _turn(item.path))
    have_gpu = _have_gpu() if any("gpu" in item.keywords for item in items) else False
    for item in items:
        if "gpu" in item.keywords and not have_gpu:
            item.add_marker(pytest.mark.skip(reason="no CUDA device here"))
        for framework in ("torch", "jax"):
            if framework in item.keywords and importlib.util.find_spec(framework) is None:
                item.add_marker(pytest.mark.skip(reason=f"{framework} is not installed"))


@pytest.fixture(autouse=True)
def _registry_restored():
    """A test that registers an implementation must not change which names the next test sees."""
    with registry.restored():
        yield


@pytest.fixture(autouse=True)
def _collections_are_short():
    """Torch and JAX hold millions of objects, and each full collection would walk through all of them."""
    if next(_tests_begun) % TESTS_PER_FREEZE == 0:
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True)
def _new_workers(request, monkeypatch):
    """Tests do not wait for workers that import a framework, unless they are marked `new_workers`."""
    new = any(map(request.node.get_closest_marker, ("new_workers", "gpu")))
    monkeypatch.setattr(standing_workers, "forking", not new)


@pytest.fixture(autouse=True)
def _same_numbers_every_time():
    """Arrays that a test draws without a generator of its own must not decide whether it passes."""
    np.random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture(autouse=True)
def _nothing_compiled_before():
    """Dynamo counts compilations by code object: tests of one function with many parameters would use up its limit."""
    yield
    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].reset()


@pytest.fixture
def compiled_anew(monkeypatch):
    """Programs that are timed are compiled as a run does it, not read from the disk."""
    monkeypatch.setattr(jax_framework, "_no_persistent_cache", _compiling_anew)


@pytest.fixture
def quick_to_compile(request):
    """JAX programs are tiny here: without XLA's optimisations they compile sooner. A GPU's kernels need them."""
    if request.node.get_closest_marker("gpu") or importlib.util.find_spec("jax") is None:
        yield
        return
    import jax

    before = jax.config.read(OPTIMIZE_LITTLE)
    jax.config.update(OPTIMIZE_LITTLE, True)
    yield
    jax.config.update(OPTIMIZE_LITTLE, before)


def _turn(path):
    """Whole programs first, then the folders of long files: at the end no core waits long for the last of them."""
    if path.parent == HERE:
        return 0
    folder = path.relative_to(HERE).parts[0]
    return 1 + LONG_FILES.index(folder) if folder in LONG_FILES else 1 + len(LONG_FILES)


def _have_gpu():
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()
