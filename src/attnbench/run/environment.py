"""The environment of a run: device, libraries really loaded and the copies they hide, clocks, variables, commit."""

from __future__ import annotations

import os
import re
import subprocess
from importlib.metadata import version
from pathlib import Path

import msgspec
import psutil
from msgspec import Struct

from attnbench.errors import UsageError
from attnbench.frameworks import Framework
from attnbench.measuring.sampling import ESTIMATOR, nvml_handle
from attnbench.processes import mapped_files
from attnbench.run import git
from attnbench.spec import DIRTY, Environment, Library

LIBRARIES = re.compile(
    r"/(lib(?:cudnn|cublas|cublasLt|cudart|cupti|nccl|mkl_core|mkl_rt|openblas|scipy_openblas|gomp|iomp5|omp|torch_cpu|"
    r"torch_cuda|MIOpen|amdhip64|ze_loader|xla_extension|_jax|jax_common)[-_\w.]*\.so[\d.]*)$"
)
VARIABLES = re.compile(
    r"^(ONEDNN_|DNNL_|CUDA_(?!VERSION|HOME)|CUDNN_|NVIDIA_(?:TF32_OVERRIDE|VISIBLE_DEVICES)|OMP_|MKL_|OPENBLAS_|KMP_|XLA_|JAX_|TORCH|PYTORCH_|TRITON_|NCCL_(?!VERSION)|HIP_|ROCR_|MALLOC_|ATTNBENCH_(?!WORKER|CACHE))"
)
USR = ("lib", "local/lib", "lib/x86_64-linux-gnu", "lib/aarch64-linux-gnu", "local/cuda/lib64")
"""Folders below /usr that the loader searches."""


class ImplementationState(Struct, frozen=True, kw_only=True):
    """Whether an implementation can run on this machine."""

    name: str
    framework: str
    origin: str
    approximate: bool
    reason: str | None
    timed: bool
    note: str = ""
    untested: tuple[str, ...] = ()


class Diagnosis(Struct, frozen=True, kw_only=True):
    """The results of `attnbench doctor`."""

    environments: dict[str, Environment]
    frameworks: dict[str, str | None]
    """Reason by framework why it cannot be used, or None."""
    implementations: list[ImplementationState]


def describe(framework: Framework, device: str, folder: Path | None = None) -> Environment:
    """Return the full environment of this process; call it after the framework has been used.

    The commit is that of `folder`, the folder of the measured code if known; else that of the working folder.
    """
    light = framework.environment(device)
    clocks = {"load": os.getloadavg()[0]} if hasattr(os, "getloadavg") else {}
    if device == "cpu" and hasattr(psutil, "cpu_freq") and (frequency := psutil.cpu_freq()):
        clocks["cpu_mhz"] = frequency.current
    elif device == "cuda":
        clocks |= _nvidia_facts()
    return msgspec.structs.replace(
        light,
        libraries=tuple(_library(path) for path in mapped_files() if LIBRARIES.search(path)),
        variables={name: value for name, value in os.environ.items() if VARIABLES.match(name)},
        clocks=clocks,
        driver=light.driver or (driver_version() if device == "cuda" else ""),
        harness=f"{version('attnbench')} (estimator {ESTIMATOR})",
        commit=commit_of(folder),
    )


def _library(path: str) -> Library:
    """Return a loaded library, with other copies of it that the loader could have found."""
    name = Path(path).name
    stem = name.partition(".so")[0]
    others = {
        str(other.resolve())
        for folder in (*os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep), *(f"/usr/{one}" for one in USR))
        if folder and Path(folder).is_dir()
        for other in Path(folder).glob(f"{stem}.so*")
    }
    real = str(Path(path).resolve())
    number = re.search(r"\.so\.([\d.]+)$", real)
    return Library(name, number.group(1) if number else "", without_home(real), tuple(sorted(others - {real})))


def without_home(text: str) -> str:
    """Return a text whose paths begin at the environment's or the package's folder, without folders of the user."""
    return re.sub(r"(?:/[^\s/\"':;,]+)+/(?=site-packages/|attnbench/)", "", text)


def _nvidia_facts() -> dict[str, float]:
    import pynvml

    if (handle := nvml_handle()) is None:
        return {}
    try:
        return {
            "sm_mhz": float(pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)),
            "memory_mhz": float(pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_MEM)),
            "temperature_c": float(pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)),
            "power_limit_w": pynvml.nvmlDeviceGetPowerManagementLimit(handle) / 1000,
            "throttle_bits": float(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)),
            "processes": float(len(pynvml.nvmlDeviceGetComputeRunningProcesses(handle))),
        }
    except pynvml.NVMLError:
        return {}


def driver_version() -> str:
    """Return the version of NVIDIA's driver; empty if there is none."""
    import pynvml

    try:
        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    except pynvml.NVMLError:
        return ""


def commit_of(folder: Path | None = None) -> str:
    """Return the commit of the tree around a folder, by default the working folder, with a mark if it holds other code.

    Other code means changed files that git knows, those at which it was told not to look too, and unknown files that
    Python could import.
    """
    place = folder or Path()
    try:
        done = git.ask(place, "rev-parse", "--short=12", "HEAD", timeout_s=PATIENCE_S)
    except (UsageError, subprocess.TimeoutExpired):
        return ""
    if done.returncode:
        return ""
    try:
        changed = bool(git.changes(place, code=(".py", ".so", ".pyd"), timeout_s=PATIENCE_S))
    except (UsageError, subprocess.TimeoutExpired):  # too many files to tell in time
        changed = True
    return done.stdout.strip() + (DIRTY if changed else "")


PATIENCE_S = 5.0
"""Seconds that a question to git about the tree of a run may take."""


LOOK_S, BUSY_CORES = 0.25, 0.5
"""Seconds for which other programs are watched, and how many cores they may use unnoticed."""


def busy_cores() -> float:
    """Return how many cores are in use for a moment, in which this process and its workers do nothing."""
    return psutil.cpu_percent(LOOK_S) / 100 * (os.cpu_count() or 1)


def threads_left(device: str | None) -> tuple[int | None, str]:
    """Return as many threads as there are cores that other programs leave free, at least 1, and a sentence about it.

    On an idle machine, or if the device is no CPU, that is None, for one thread per core, and nothing is said. A call
    of several threads waits for the last of them: on a busy machine its time says how long a core was taken.
    """
    if device != "cpu" and (device is not None or driver_version()):
        return None, ""
    cores, busy = os.cpu_count() or 1, busy_cores()
    mine = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores
    threads = max(1, round(cores - busy))
    if busy < BUSY_CORES or threads >= mine:
        return None, ""
    told = "1 thread" if threads == 1 else f"{threads} threads"
    return threads, f"other programs use {busy:.1f} of {cores} cores: measured with {told} (--threads {mine} takes all)"
