"""What will not run is said before anything runs, and what cannot mean anything is refused."""

from __future__ import annotations

import re
import subprocess
from importlib.util import find_spec

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnbench import frameworks, masks, registry
from attnbench.errors import UsageError
from attnbench.run import machine
from attnbench.run.launch import Listener, Request, launch, plan_only
from attnbench.run.plan import (
    Asked,
    Planned,
    cells_of,
    distinct,
    does_not_fit,
    group_of,
    inputs_do_not_fit,
    least_bytes,
    require_dtype,
    shard,
)
from attnbench.spec import Cell, Environment, Workload

SMALL = Workload(batch=1, q_len=8, heads=2, head_dim=4)
GPU = Environment(device="cuda", device_name="Test GPU", memory_bytes=24_000_000_000)


def request(*names, workloads=(SMALL,), **options):
    return Request(workloads=tuple(workloads), implementations=names, **options)


def test_what_does_not_fit_is_refused_with_both_sizes():
    large = Workload(batch=4, q_len=17_000, heads=4, head_dim=128)
    eager, flash = registry.get("torch.eager"), registry.get("torch.sdpa-flash")
    assert does_not_fit(eager, large, GPU) == "needs 38.2 GB, 24 GB here"
    assert does_not_fit(flash, large, GPU) is None
    assert does_not_fit(eager, large, msgspec.structs.replace(GPU, memory_bytes=None)) is None


def test_inputs_that_cannot_fit_are_refused_without_asking_the_mask(monkeypatch):
    endless = Workload(batch=1, q_len=2_000_000_000, heads=8, head_dim=64, mask=masks.causal())
    monkeypatch.setattr(type(endless.visible_mask), "interval", lambda *_: pytest.fail("asked for an array of rows"))
    assert inputs_do_not_fit(endless, GPU) == "needs 24.6 TB, 24 GB here"
    assert inputs_do_not_fit(SMALL, GPU) is None


def test_sizes_are_plain_numbers():
    eager = registry.get("torch.eager")
    huge = Workload(batch=1, q_len=16_777_216, heads=2, head_dim=64)
    told = does_not_fit(eager, huge, GPU) or ""
    assert re.fullmatch(r"needs \d{4} TB, 24 GB here", told), told
    nearly = msgspec.structs.replace(GPU, memory_bytes=999_900_000_000)
    assert (does_not_fit(eager, huge, nearly) or "").endswith(" TB, 1000 GB here")


def test_gradients_need_more_than_the_output():
    train = msgspec.structs.replace(SMALL, pass_="train")
    eager = registry.get("torch.eager")
    assert least_bytes(eager, train) > least_bytes(eager, SMALL) > least_bytes(registry.get("torch.sdpa-flash"), SMALL)


def test_a_plan_says_what_is_too_large_for_this_machine():
    huge = Workload(batch=64, q_len=1 << 20, heads=64, head_dim=128)
    planned = plan_only(request("numpy.float32", workloads=[SMALL, huge]), Listener())
    assert planned[0].reason is None
    assert planned[1].reason is not None
    assert planned[1].reason.startswith("needs ")
    assert planned[1].reason.endswith(" GB here")


@given(st.lists(st.integers(1, 99), unique=True, max_size=30), st.integers(1, 9))
def test_shards_are_a_partition(lengths, count):
    workloads = [Workload(batch=1, q_len=n, heads=1, head_dim=1) for n in lengths]
    parts = [shard(workloads, index, count) for index in range(1, count + 1)]
    assert sorted(w.q_len for part in parts for w in part) == sorted(lengths)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_cells_of_one_workload_stay_together_and_problems_are_distinct():
    other = msgspec.structs.replace(SMALL, q_len=9, kv_len=9)
    same = msgspec.structs.replace(SMALL, source="elsewhere")
    cells = cells_of(distinct([SMALL, other, same]), [Asked("a"), Asked("b", {"world": 4})])
    assert [(cell.workload.q_len, cell.implementation) for cell in cells] == [(8, "a"), (8, "b"), (9, "a"), (9, "b")]
    assert group_of(registry.get("numpy.float32")) == ("numpy", "", 0)


def test_a_framework_that_is_not_installed_is_a_reason(monkeypatch):
    monkeypatch.setattr(frameworks, "find_spec", lambda name: None if name == "torch" else find_spec(name))
    torch, numpy = plan_only(request("torch.eager", "numpy.float32"), Listener())
    assert torch.reason == "torch is not installed: pip install 'attnbench[torch]'"
    assert numpy.reason is None


def test_a_device_that_nobody_has_is_a_usage_error():
    with pytest.raises(UsageError, match=r'nothing can run on device "tpu": numpy has no tpu here, only cpu'):
        plan_only(request("numpy.float32", device="tpu"), Listener())
    records = []
    with pytest.raises(UsageError, match="nothing can run on device"):
        launch(request("numpy.float32", device="tpu"), records.extend, Listener())
    assert records == []


@pytest.mark.parametrize("value", ["1", "yes"])
def test_a_variable_that_distorts_times_is_refused(monkeypatch, value):
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", value)
    with pytest.raises(UsageError, match=r"CUDA_LAUNCH_BLOCKING is set.*Unset it"):
        launch(request("numpy.float32"), lambda records: None, Listener())


def test_an_unknown_name_has_its_nearest():
    with pytest.raises(UsageError, match=r'no implementation called "numpy.flaot32". Near: numpy.float32'):
        plan_only(request("numpy.flaot32"), Listener())


class Processor:
    """A machine for `isa_cap`: what it advertises, and how a probe ends there."""

    def __init__(self, monkeypatch, folder, flags, code):
        self.probes = 0
        (folder / "cpuinfo").write_text(f"flags : sse {flags}\n")
        real = machine.Path
        monkeypatch.setattr(machine, "Path", lambda text: folder / "cpuinfo" if "cpuinfo" in text else real(text))
        monkeypatch.setenv("ATTNBENCH_CACHE", str(folder))
        monkeypatch.delenv(machine.VARIABLE, raising=False)
        monkeypatch.setattr(machine, "version", lambda name: "2.13.0")
        monkeypatch.setattr(machine, "installed", lambda name: True)
        monkeypatch.setattr(machine.subprocess, "run", lambda *args, **options: self._probe(code))

    def _probe(self, code):
        self.probes += 1
        return subprocess.CompletedProcess([], code)


@pytest.mark.parametrize(
    ("flags", "code", "cap", "probes"),
    [
        ("avx512f amx_bf16", -4, {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16"}, 1),
        ("avx512f amx_bf16", 0, {}, 1),
        ("avx512f", -4, {}, 0),
    ],
)
def test_matrix_instructions_that_trap_are_capped(monkeypatch, tmp_path, flags, code, cap, probes):
    processor = Processor(monkeypatch, tmp_path, flags, code)
    assert machine.isa_cap() == cap
    assert machine.isa_cap() == cap
    assert processor.probes == probes


def test_a_cap_set_by_the_user_stands(monkeypatch, tmp_path):
    processor = Processor(monkeypatch, tmp_path, "amx_bf16", -4)
    monkeypatch.setenv(machine.VARIABLE, "AVX2")
    assert machine.isa_cap() == {}
    assert processor.probes == 0


def test_a_dtype_that_nothing_takes_is_refused_with_the_reasons():
    def refused(*reasons):
        return [Planned(Cell(f"numpy.n{n}", SMALL), reason) for n, reason in enumerate(reasons)]

    takes = "takes bfloat16, not float32."
    require_dtype([])
    require_dtype(refused(takes, None))
    require_dtype(refused(takes, "needs cuda"))
    with pytest.raises(UsageError, match=r"supports this dtype\. numpy.n0, numpy.n1: takes bfloat16, not float32\.$"):
        require_dtype(refused(takes, takes))
    with pytest.raises(UsageError, match=r"n2: float32 c; `run --list` with the same options lists the rest\.$"):
        require_dtype(refused("float32 a", "float32 b", "float32 c", "float32 d"))


def test_only_a_strict_request_is_refused_as_a_whole_and_a_resumed_one_never_is():
    half = Workload(batch=1, q_len=8, heads=2, head_dim=4, dtype="bfloat16")
    records = []
    strict = request("numpy.float32", workloads=(half,), strict=True)
    with pytest.raises(UsageError, match=r"numpy.float32: takes float32, not bfloat16"):
        launch(strict, records.extend, Listener())
    assert records == []
    launch(request("numpy.float32", workloads=(half,)), records.extend, Listener())
    launch(strict, records.extend, Listener(), done=frozenset({Cell("numpy.float32", SMALL).id}))
    assert [record.status for record in records] == ["unsupported", "unsupported"]
