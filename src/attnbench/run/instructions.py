"""A processor that advertises matrix instructions (AMX) but traps on them kills torch in its first bfloat16 product.

Some virtual machines do. The cure is an upper bound on what oneDNN may use; whether it is needed is found out by
trying, in a child process, once per machine.
"""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from attnbench.frameworks import installed
from attnbench.run.ceilings import cache_folder

VARIABLE = "ONEDNN_MAX_CPU_ISA"
CAP = "AVX512_CORE_FP16"
PROBE = "import torch; a = torch.ones(64, 64, dtype=torch.bfloat16); a @ a"


def isa_cap() -> dict[str, str]:
    """Variables that workers need so that torch survives here; empty on a healthy machine."""
    if VARIABLE in os.environ or not _advertises_amx() or not installed("torch"):
        return {}
    note = cache_folder() / f"amx-{platform.node()}-{platform.release()}-{version('torch')}"
    try:
        trapped = note.read_text() == "trapped"
    except OSError:
        trapped = _probe()
        _remember(note, trapped)
    return {VARIABLE: CAP} if trapped else {}


def _advertises_amx() -> bool:
    try:
        return "amx_bf16" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


def _probe() -> bool:
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, timeout=120)
    return done.returncode == -signal.SIGILL


def _remember(note: Path, trapped: bool) -> None:
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        note.write_text("trapped" if trapped else "fine")
    except OSError:
        return  # the next run probes again
