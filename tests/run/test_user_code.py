"""What a user's file does to its process is its own affair: rivals, anchors and ceilings are as without it, and whoever
changes what times or checks rely on has no time."""

from __future__ import annotations

import os
import re
import textwrap
from pathlib import Path

import msgspec
import psutil
import pytest
from cli_process import wait_for

from attnbench import masks, processes, registry
from attnbench.comparing.compare import compare
from attnbench.frameworks.numpy import _blas_counters
from attnbench.run import protocol as p
from attnbench.run.pool import Pool
from attnbench.spec import Failed, Incorrect, Ok, OutOfMemory, Workload

HERE = Path(__file__).parent


@pytest.fixture
def kernel(tmp_path, monkeypatch):
    """Write a user's file; every process that imports it leaves its number in a log."""
    monkeypatch.setenv("IMPORT_LOG", str(tmp_path))

    def write(name: str, at_import: str = "", in_call: str = "", body: str = "return attend(q, k, v)") -> str:
        text = f"""
import os, sys
with open(os.path.join(os.environ["IMPORT_LOG"], "{name}.log"), "a") as log:
    log.write(f"{{os.getpid()}}\\n")
sys.path.insert(0, {str(HERE)!r})
{textwrap.dedent(at_import)}

def {name}(q, k, v):
    from traps import attend
{textwrap.indent(textwrap.dedent(in_call), "    ")}
    {body}
"""
        (tmp_path / f"{name}.py").write_text(text)
        return f"{tmp_path / name}.py:{name}"

    return write


@pytest.fixture
def importers(tmp_path):
    return lambda name: set((tmp_path / f"{name}.log").read_text().split())


def judge(seen, told):
    """`told`: name -> (status, pattern of the reason, or of a note if the status is ok)."""
    for name, (kind, pattern) in told.items():
        record = seen.by_name[name]
        assert isinstance(record, kind), f"{name}: {record.status}: {record.reason}"
        text = " ".join(record.notes) if isinstance(record, Ok) else record.reason
        assert re.search(pattern, text), f"{name}: {text}"


REFUSED = {
    "renices": ("os.nice(1)", "", r"the nice value from \d+ to \d+ while it was loaded"),
    "renices_late": (
        "calls = []",
        "calls.append(1); os.nice(1 if len(calls) == 1 else 0)",
        "nice value .* while it was",
    ),
    "scales_time": (
        "import time; real = time.perf_counter_ns; time.perf_counter_ns = lambda: int(real() * 0.5)",
        "",
        "changed time.perf_counter_ns while it was loaded: its time cannot be trusted",
    ),
    "scales_time_late": (
        "import time; real = time.perf_counter_ns",
        "time.perf_counter_ns = lambda: int(real() * 0.5)",
        "changed time.perf_counter_ns while it was built",
    ),
    "patches_the_clock": (
        "from attnbench.frameworks.base import WallClock; WallClock.sample = lambda *_: 1 / 0",
        "",
        r"attnbench.frameworks.base.WallClock.sample while it was loaded",
    ),
    "swaps_code": (
        """
        from attnbench.frameworks.base import WallClock
        def sample(self, program, inputs, count, calls=1):
            return None
        WallClock.sample.__code__ = sample.__code__
        """,
        "",
        "WallClock.sample while it was loaded",
    ),
    "patches_the_session": (
        "from attnbench.measuring.session import Session; Session.sample = lambda *_: [1.0]",
        "",
        "session.Session.sample",
    ),
    "patches_the_check": (
        "from attnbench.measuring import session; session.examine = lambda *_: None",
        "",
        "attnbench.measuring.session.examine",
    ),
    "patches_the_list_of_checks": (
        "from attnbench.verifying import checks; checks.examine.__defaults__ = (None, None, ())",
        "",
        "attnbench.verifying.checks.examine",
    ),
    "patches_a_check": (
        "from attnbench.verifying.checks import CHECKS; CHECKS[0].run.__code__ = (lambda e: ()).__code__",
        "",
        r"attnbench.verifying.checks.CHECKS \(one value in all of V\)",
    ),
    "patches_a_field": (
        "from attnbench.verifying.tolerance import Compared; Compared.fault = ''",
        "",
        "attnbench.verifying.tolerance.Compared.fault",
    ),
    "patches_the_message": (
        "from attnbench.run import protocol; real = protocol.encode; protocol.encode = lambda m: real(m)",
        "",
        "attnbench.run.protocol.encode",
    ),
    "patches_the_watch": (
        "from attnbench.run.integrity import ProcessState; ProcessState.changes = lambda s: []; os.nice(1)",
        "",
        "the nice value",
    ),
    "patches_numpy": ("import numpy as np; np.linalg.norm = lambda *_, **__: 0.0", "", "numpy.linalg.norm"),
    "patches_builtins": ("import builtins; builtins.sum = lambda *_: 0", "", "changed sum while"),
    "patches_the_adapter": (
        "from attnbench.frameworks import get; get('numpy').same_bits = lambda a, b: True",
        "",
        "adapter of numpy",
    ),
    "raises_ceilings": (
        """
        from attnbench.measuring import anchors
        from attnbench.measuring.rates import Ceilings
        anchors.measure_ceilings = lambda *_, **__: Ceilings(1e30, 1e30)
        """,
        "",
        "attnbench.measuring.anchors.measure_ceilings",
    ),
}
TOLD = {
    "limits_files": (
        "import resource as r; r.setrlimit(r.RLIMIT_NOFILE, (200, r.getrlimit(r.RLIMIT_NOFILE)[1]))",
        "",
        r"the resource limit NOFILE from .* to \(200, ",
    ),
    "stops_collecting": ("", "import gc; gc.disable()", "garbage collection .* while it was built and checked"),
    "sets_variables": ("os.environ['OMP_NUM_THREADS'] = '7'", "", r"environment variables .*'OMP_NUM_THREADS', '7'"),
}


def test_what_spoils_a_measurement_is_refused_the_rest_is_told_and_rivals_see_nothing_of_it(lab, kernel, importers):
    alone = lab("numpy.float32", measure=False)
    written = {name: kernel(name, *parts[:2]) for name, parts in {**REFUSED, **TOLD}.items()}
    seen = lab("numpy.float32", *written.values(), kernel("plain"))
    judge(seen, {name: (Failed, parts[2]) for name, parts in REFUSED.items()})
    judge(seen, {name: (Ok, parts[2]) for name, parts in TOLD.items()})
    judge(seen, {"numpy.float32": (Ok, ""), "plain": (Ok, "")})
    assert not any("changed" in note for name in ("numpy.float32", "plain") for note in seen.by_name[name].notes)
    assert seen.by_name["numpy.float32"].environment.hard_key == alone.records[0].environment.hard_key
    anchors = [record for batch in seen.batches for record in batch if record.implementation.startswith("anchor.")]
    assert [record.status for record in anchors] == ["ok", "ok"]
    once = [name for name in TOLD if len(importers(name)) == 1]
    assert once == list(TOLD), "no other process imports a user's file"


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core cannot be left")
def test_another_affinity_is_refused(lab, kernel):
    seen = lab(
        kernel("moves", "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})"),
        kernel("moves_late", "", "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})"),
        "numpy.float32",
    )
    judge(
        seen,
        {
            "moves": (Failed, r"the CPU affinity from \(.*\) to \(\d+,\) while it was loaded: .* pass --threads"),
            "moves_late": (Failed, "the CPU affinity .* while it was built and checked"),
            "numpy.float32": (Ok, ""),
        },
    )
    assert seen.by_name["numpy.float32"].environment.cores == len(os.sched_getaffinity(0))


def test_another_number_of_threads_of_numpy_is_refused(lab, kernel):
    """As threadpoolctl sets it."""
    counters = _blas_counters()
    if not counters or counters[0]() < 2:
        pytest.skip("this NumPy's BLAS has one thread, or does not tell")
    sets = """
        import ctypes
        from attnbench.frameworks.numpy import _blas_counters
        (count,) = _blas_counters()[:1]
        path = next(l.split()[-1] for l in open("/proc/self/maps") if "blas" in l.split()[-1])
        set_threads = getattr(ctypes.CDLL(path), count.__name__.replace("get_num", "set_num"))
        """
    seen = lab(
        kernel("sets_blas", f"{textwrap.dedent(sets)}\nset_threads(1)"),
        kernel("sets_blas_late", sets, "set_threads(1)"),
        "numpy.float32",
    )
    judge(
        seen,
        {
            "sets_blas": (Failed, r"threads of NumPy's BLAS from \(\d+,\) to \(1,\) while it was loaded: .* --threads"),
            "sets_blas_late": (Failed, "threads of NumPy's BLAS from .* while it was built and checked"),
            "numpy.float32": (Ok, ""),
        },
    )


def test_user_functions_never_share_a_process(lab, kernel, importers):
    """Also not those of one file, nor on another workload after a death."""
    look = "import builtins; spoiled = hasattr(builtins, 'spoiled'); builtins.spoiled = True"
    first = kernel("first", look, body="return attend(q, k, v) * (0 if spoiled else 1)")
    path = Path(first.rpartition(":")[0])
    path.write_text(path.read_text() + "\nsecond = first\n")
    seen = lab(first, f"{path}:second", kernel("third", look, body="return attend(q, k, v) * (0 if spoiled else 1)"))
    assert [record.status for record in seen.records] == ["ok", "ok", "ok"]
    assert len(importers("first")) == 2
    assert not importers("first") & importers("third")


def test_a_user_functions_processes_are_stopped_in_its_rivals_turns(lab, kernel, importers, monkeypatch):
    """Threads that spin and helpers would take the processor from whoever is timed."""
    monkeypatch.setattr(processes, "REFRESH_S", 0.0)
    helper = """
        import subprocess, time
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        """
    mine, ask, looks = kernel("helped", helper), Pool._ask, []

    def watched(pool, group, question, timeout_s):
        if isinstance(question, p.TakeSample):
            (worker,) = (psutil.Process(int(pid)) for pid in importers("helped"))
            family, mine = [worker, *worker.children(recursive=True)], group.has_user_code
            if not mine:
                wait_for(lambda: all(one.status() == psutil.STATUS_STOPPED for one in family))
            looks.append((mine, len(family)))
        return ask(pool, group, question, timeout_s)

    monkeypatch.setattr(Pool, "_ask", watched)
    seen = lab(mine, "numpy.float32")
    judge(seen, {"helped": (Ok, ""), "numpy.float32": (Ok, "")})
    assert {(True, 2), (False, 2)} <= set(looks)


def test_a_note_stands_in_every_record_of_the_function(lab, kernel, causal):
    workloads = [causal, msgspec.structs.replace(causal, q_len=16, kv_len=16)]
    seen = lab(kernel("stops_collecting", "import gc; gc.disable()"), workloads=workloads)
    assert [sum("garbage" in note for note in record.notes) for record in seen.records] == [1, 1]


@pytest.mark.torch
def test_torch_settings_patches_and_modes(lab, kernel, importers, causal):
    attends = """
        from torch.nn.functional import scaled_dot_product_attention as sdpa
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        """
    result = "return sdpa(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)"

    def torch_kernel(name, at_import, in_call=""):
        return kernel(name, at_import, textwrap.dedent(in_call) + textwrap.dedent(attends), result)

    patch = """
        import torch.nn.functional as F
        real = F.scaled_dot_product_attention
        F.scaled_dot_product_attention = lambda *a, **k: (real(*a, **k), real(*a, **k))[0]
        """
    mode = """
        import torch
        from torch.overrides import TorchFunctionMode
        class Lazy(TorchFunctionMode):
            def __torch_function__(self, function, types, args=(), kwargs=None):
                return function(*args, **(kwargs or {}))
        left = []
        """
    seen = lab(
        torch_kernel("patches_sdpa", patch),
        torch_kernel("sets_threads", "import torch; torch.set_num_threads(torch.get_num_threads() + 1)"),
        torch_kernel("sets_threads_late", "import torch; n = torch.get_num_threads()", "torch.set_num_threads(n + 1)"),
        torch_kernel("leaves_a_mode", mode, "left or left.append(Lazy().__enter__())"),
        torch_kernel("switches_flash_off", "import torch; torch.backends.cuda.enable_flash_sdp(False)"),
        torch_kernel("sets_the_dtype", "import torch; torch.set_default_dtype(torch.float64)"),
        torch_kernel("wants_tf32", "import torch; torch.set_float32_matmul_precision('high')"),
        torch_kernel("takes_tf32", "import torch", "torch.set_float32_matmul_precision('high')"),
        torch_kernel("patches_equal", "import torch; torch.equal = lambda a, b: True"),
        torch_kernel("patches_tensors", "import torch; torch.Tensor.__matmul__ = lambda a, b: torch.matmul(a, b)"),
        "torch.sdpa",
        framework="torch",
    )
    judge(
        seen,
        {
            "patches_sdpa": (Ok, "changed torch.nn.functional.scaled_dot_product_attention while it was loaded"),
            "sets_threads": (Failed, r"torch's threads from (\d+) to \d+ while it was loaded: .* pass --threads \d+"),
            "sets_threads_late": (Failed, "torch's threads from .* while it was built and checked"),
            "leaves_a_mode": (Failed, "left a mode of torch active .Lazy."),
            "switches_flash_off": (Ok, "flash SDPA switch from True to False while it was loaded"),
            "sets_the_dtype": (Ok, "default dtype from torch.float32 to torch.float64"),
            "wants_tf32": (Ok, "float32 matmul precision from highest to high while it was loaded"),
            "takes_tf32": (Failed, "float32 matmul precision from highest to high while it was built and checked"),
            "patches_equal": (Failed, "changed torch.equal"),
            "patches_tensors": (Failed, "changed torch.Tensor.__matmul__"),
            "torch.sdpa": (Ok, ""),
        },
    )
    assert not any("changed" in note for note in seen.by_name["torch.sdpa"].notes)
    assert len(importers("patches_sdpa")) == 1


@pytest.mark.jax
def test_jax_settings_are_told(lab, kernel):
    attends = """
        import jax
        import jax.numpy as jnp
        """
    result = "return jax.nn.dot_product_attention(q, k, v, is_causal=True)"
    seen = lab(
        kernel("sets_x64", "import jax; jax.config.update('jax_enable_x64', True)", attends, result),
        kernel("stops_jit", "import jax; jax.config.update('jax_disable_jit', True)", attends, result),
        "jax.einsum",
        framework="jax",
    )
    judge(
        seen,
        {
            "sets_x64": (Ok, "jax_enable_x64 from False to True while it was loaded"),
            "stops_jit": (Failed, "jax_disable_jit from False to True while it was loaded"),
            "jax.einsum": (Ok, ""),
        },
    )


DECLARES = """
from attnbench import Implementation

class Mean(Implementation):
    name, framework, declared_error = "numpy.mean", "numpy", 100.0

    def supports(self, workload, environment):
        return None

    def build(self, workload, config):
        return self.call

    def call(self, q, k, v):
        import numpy as np
        return np.broadcast_to(v.mean(1, keepdims=True).repeat(2, 2), q.shape).astype(q.dtype)

class Flips(Mean):
    reads = 0

    @property
    def approximate(self):
        import sys
        return sys._getframe(1).f_code.co_name == "_subject"

class FlipsWhenBuilt(Mean):
    approximate = False

    def build(self, workload, config):
        self.approximate = True
        return self.call

class Flatters(Mean):
    def apparatus(self, framework, config):
        return framework

flips, flips_when_built, flatters = Flips(), FlipsWhenBuilt(), Flatters()
"""


def test_what_is_declared_is_read_once_and_nobody_brings_a_clock(lab, tmp_path):
    path = tmp_path / "declares.py"
    path.write_text(DECLARES)
    names = ("flips", "flips_when_built", "flatters")
    seen = lab(*(f"{path}:{name}" for name in names))
    judge(
        seen,
        {
            "flips": (Incorrect, "error allowed"),
            "flips_when_built": (Incorrect, "error allowed"),
            "flatters": (Failed, "times itself .apparatus."),
        },
    )


def test_not_implemented_while_timed_is_a_failure(lab, kernel):
    late = kernel("late", "calls = []", "calls.append(1)\nif len(calls) > 100: raise NotImplementedError('not today')")
    early = kernel("early", "", "raise NotImplementedError('no such shape')")
    seen = lab(late, early, kernel("plain"))
    assert [(record.status, record.reason) for record in seen.records] == [
        ("failed", "NotImplementedError: not today"),
        ("unsupported", "no such shape"),
        ("ok", None),
    ]


FIND_SOCKET = """
import stat
sockets = [int(fd) for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")]
sockets = [fd for fd in sockets if stat.S_ISSOCK(os.fstat(fd).st_mode)]
from attnbench.run import protocol as p
import struct
def framed(message):
    return struct.pack("!Q", len(message)) + message
def say(text):
    for fd in sockets:
        os.write(fd, text)
"""
BABBLE = {
    "eight_bytes": r"say(b'\x00\x00\x00\x04abcd')",
    "three_bytes": r"say(b'\x00\x00\x00')",
    "one_byte": r"say(b'\xff')",
    "a_huge_header": "say(struct.pack('!Q', 1 << 62))",
    "a_message_of_nothing": "say(framed(b''))",
    "deeply_nested": r"say(framed(b'\x91' * 200000 + b'\xc0'))",
    "a_wrong_number": "say(framed(p.encode(p.Numbered(7, p.Done()))))",
    "a_wrong_type": "say(framed(p.encode([1, 2, 3])))",
}


def test_whoever_writes_to_the_connection_costs_its_own_cell(lab, kernel):
    written = [kernel(name, FIND_SOCKET, line) for name, line in BABBLE.items()]
    seen = lab(kernel("plain"), *written, "numpy.float32")
    judge(seen, dict.fromkeys(BABBLE, (Failed, "its process sent an invalid answer")))
    judge(seen, {"plain": (Ok, ""), "numpy.float32": (Ok, "")})


GROWS = """
child = os.fork()
if not child:
    import time
    hoard = []
    while True:
        hoard.append(bytearray(b"x") * (1 << 26))
        time.sleep(0.01)
os.waitpid(child, 0)
"""


def test_memory_of_a_kernels_children_counts(lab, kernel, monkeypatch):
    from attnbench.frameworks.host_memory import HostMemory
    from attnbench.run import remote

    free = remote.SPARE_BYTES + (1 << 30)
    monkeypatch.setattr(remote, "host_memory", lambda: HostMemory(free, free))
    seen = lab(kernel("has_children", "", GROWS), "numpy.float32")
    judge(
        seen,
        {
            "has_children": (OutOfMemory, "and the processes that it started took more than the 1.07 GB"),
            "numpy.float32": (Ok, ""),
        },
    )


def test_a_comparison_refuses_the_same(kernel):
    workload = Workload(batch=1, q_len=16, heads=2, head_dim=8, mask=masks.causal())
    scaled = kernel("scales_time", REFUSED["scales_time"][0])
    found = compare(kernel("plain"), scaled, workload, framework="numpy", budget_s=5)
    assert found.verdict is None
    assert found.record_a.status == "ok"
    assert isinstance(found.record_b, Failed)
    assert "changed time.perf_counter_ns while it was loaded" in found.record_b.reason


THIRD_PARTY = """
import os, sys
from attnbench.impls.numpy import FLOAT32
from attnbench import Implementation
with open(os.path.join(os.environ["IMPORT_LOG"], "third.log"), "a") as log:
    log.write(f"{os.getpid()}\\n")
if "ATTNBENCH_WORKER" in os.environ:
    os.nice(1)

class Third(Implementation):
    name, framework = "numpy.third", "numpy"

    def supports(self, workload, environment):
        return None

    def build(self, workload, config):
        return FLOAT32.build(workload, config)

THIRD = Third()
"""


def test_an_implementation_of_another_package_has_its_own_process(lab, importers, tmp_path, monkeypatch):
    (tmp_path / "third_party.py").write_text(THIRD_PARTY)
    facts = tmp_path / "third_party-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: third-party\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text("[attnbench.implementations]\nnumpy.third = third_party:THIRD\n")
    monkeypatch.setenv("IMPORT_LOG", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.syspath_prepend(str(tmp_path))
    registry._entry_points.cache_clear()
    try:
        seen = lab("numpy.third", "numpy.float32")
    finally:
        registry._entry_points.cache_clear()
    judge(seen, {"numpy.third": (Failed, "the nice value .* when it was asked"), "numpy.float32": (Ok, "")})
    assert len(importers("third") - {str(os.getpid())}) == 1
