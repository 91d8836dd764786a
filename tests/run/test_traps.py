"""Every trap gets the right status and a reason that names its fault, is never ranked, and harms nobody beside it."""

from __future__ import annotations

import re
from types import SimpleNamespace

import msgspec
import pytest

from attnbench.frameworks.host_memory import HostMemory
from attnbench.run import remote
from attnbench.spec import Failed, Incorrect, Ok, OutOfMemory, Timeout

OUTPUT = r"output: [\d.]+ x the .* error allowed .* first at batch 0, head {}, row {}"
TIMED = "a timed call returned a wrong out, right when checked"
STORED = r"wrong out after its inputs were overwritten in place: a stored result\?"
EARLY = r"returned before its work was done: out changed after the call|error allowed"

NUMPY_TRAPS = {
    "zeros": (Incorrect, OUTPUT.format(0, 0)),
    "ignores_the_mask": (Incorrect, OUTPUT.format(0, 0)),
    "leaks_the_future": (Incorrect, OUTPUT.format(0, 0)),
    "drops_the_scale": (Incorrect, OUTPUT.format(0, 1)),
    "attends_over_heads": (Incorrect, OUTPUT.format(0, 1)),
    "interleaves_the_groups": (Incorrect, OUTPUT.format(1, 0)),
    "writes_nan": (Incorrect, "out holds NaN or infinite values, where the reference is finite"),
    "wrong_shape": (Incorrect, r"out has shape \(2, 23, 4, 8\), expected \(2, 24, 4, 8\)"),
    "wrong_dtype": (Incorrect, "out is float64, but the inputs are float32"),
    "overflows": (Incorrect, r"unstable: NaN or Inf if all logits lie far below 0"),
    "cached_result": (Incorrect, r"on the second input set only: a stored result\?"),
    "cached_by_queries": (Incorrect, ""),
    "cached_by_address": (Incorrect, STORED),
    "cached_by_size": (Incorrect, ""),
    "overwrites_its_last_result": (Incorrect, "overwrites the result of its previous call"),
    "zeroes_its_queries_at_first": (Incorrect, "changed its inputs"),
    "right_in_every_other_call": (Incorrect, TIMED),
    "right_when_checked": (Incorrect, TIMED),
    "returns_early": (Incorrect, EARLY),
    "returns_a_lazy_object": (Incorrect, r"returned traps\.Lazy, not a plain numpy array"),
    "changes_its_inputs": (Incorrect, "changed its inputs"),
    "changes_its_inputs_and_raises": (Failed, "ValueError: no kernel for this shape"),
    "raises": (Failed, "ValueError: no kernel for this shape"),
    "exits": (Failed, "SystemExit: done for today"),
    "raises_out_of_memory": (OutOfMemory, "unable to allocate 640 TiB"),
    "poisons_the_process": (Failed, "RuntimeError: an illegal memory access was encountered"),
    "poisons_when_timed": (Failed, "RuntimeError: an illegal memory access was encountered"),
    "crashes": (Failed, "crashed with SIGSEGV"),
    "crashes_when_timed": (Failed, "crashed with SIGSEGV"),
    "leaves": (Failed, "the process ended with code 7"),
}


@pytest.fixture
def little_memory(monkeypatch):
    """A machine whose free memory a few steps of the hoarder fill."""
    free = remote.SPARE_BYTES + (1 << 30)
    monkeypatch.setattr(remote, "host_memory", lambda: HostMemory(free, free))


def check(seen, traps, companions):
    for name, (kind, reason) in traps.items():
        record = seen.by_name[name]
        assert isinstance(record, kind), f"{name}: {record.status}: {record.reason}"
        assert re.search(reason, record.reason), f"{name}: {record.reason}"
        assert record.time is None
        assert not re.search(rf"\b{name} (is [\d.]+x|wins|and )|(than|of|and) {name}\b", seen.closing)
    for name in companions:
        assert isinstance(seen.by_name[name], Ok), f"{name}: {seen.by_name[name].reason}"
        assert seen.by_name[name].time is not None
    assert seen.ranked == set(companions)


def test_every_numpy_trap_is_caught_in_one_process_with_honest_ones(lab, trap):
    names = ["honest", *NUMPY_TRAPS, "also_honest"]
    seen = lab(*(trap(name) for name in names))
    assert [record.implementation for record in seen.records] == names
    check(seen, NUMPY_TRAPS, ["honest", "also_honest"])
    wrong = [name for name, (kind, _) in NUMPY_TRAPS.items() if kind is Incorrect]
    assert all(f"{name} is not ranked: " in seen.closing for name in wrong)


def test_a_hoarder_is_killed_before_the_machine_is_full(lab, trap, little_memory):
    seen = lab(trap("honest"), trap("eats_all_memory"), trap("also_honest"))
    check(seen, {"eats_all_memory": (OutOfMemory, "took more than the 1.07 GB of memory")}, ["honest", "also_honest"])


@pytest.mark.parametrize("name", ["hangs", "hangs_without_python"])
def test_a_hang_is_given_up(lab, trap, name):
    seen = lab(trap("honest"), trap(name), timeout_s=3.0)
    check(seen, {name: (Timeout, "no answer within 3 s")}, ["honest"])


@pytest.mark.torch
def test_every_torch_trap_is_caught(lab, torch_trap):
    traps = {
        "zeros": (Incorrect, OUTPUT.format(0, 0)),
        "attends_over_heads": (Incorrect, OUTPUT.format(0, 0)),
        "interleaves_the_groups": (Incorrect, OUTPUT.format(1, 0)),
        "cached_result": (Incorrect, r"on the second input set only: a stored result\?"),
        "cached_by_address": (Incorrect, STORED),
        "cached_by_version": (Incorrect, STORED),
        "overwrites_its_last_result": (Incorrect, "overwrites the result of its previous call"),
        "zeroes_its_queries_at_first": (Incorrect, "changed its inputs"),
        "right_in_every_other_call": (Incorrect, TIMED),
        "right_when_checked": (Incorrect, TIMED),
        "returns_early": (Incorrect, EARLY),
        "returns_a_lazy_tensor": ((Incorrect, Failed), "LazyTensor, not a"),
        "changes_its_inputs": (Incorrect, "changed its inputs"),
        "torch.claims-flash": (Failed, "fell back: .*_scaled_dot_product_attention_math.* ran"),
        "torch.claims-compiled": (Failed, "fell back: no kernel like Torch-Compiled Region"),
    }
    references = [name.removeprefix("torch.").replace("-", "_") for name in traps]
    seen = lab(*(torch_trap(name) for name in ["honest", *references]), framework="torch")
    check(seen, {name.removeprefix("torch.").replace("-", "_"): told for name, told in traps.items()}, ["honest"])


@pytest.mark.torch
def test_a_few_rows_left_out_of_timed_calls_are_caught_in_16_bits(lab, torch_trap, causal):
    halves = msgspec.structs.replace(causal, batch=1, q_len=512, kv_len=512, dtype="bfloat16")
    seen = lab(torch_trap("honest"), torch_trap("forgets_rows_when_timed"), framework="torch", workloads=[halves])
    check(seen, {"forgets_rows_when_timed": (Incorrect, f"{TIMED}: batch 0, head 0, row 51[01] differs")}, ["honest"])


@pytest.mark.torch
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_factor_of_little_more_than_1_is_caught_in_16_bits(lab, torch_trap, causal, dtype):
    halves = [
        msgspec.structs.replace(causal, q_len=length, kv_len=length, head_dim=64, dtype=dtype) for length in (24, 256)
    ]
    traps = {"one_percent_too_large": (Incorrect, r"output: [\d.]+ x the relative error allowed")}
    seen = lab(torch_trap("honest"), *map(torch_trap, traps), framework="torch", workloads=halves)
    for workload in halves:
        check(seen.of(workload), traps, ["honest"])


@pytest.mark.torch
def test_wrong_gradients_are_caught(lab, torch_trap, causal):
    traps = {
        "wrong_gradient": (Incorrect, "gradient of K: .* error allowed .* first at batch 0, key/value head 0"),
        "has_no_gradient": (Failed, "RuntimeError: .* does not require grad"),
        "cached_result": (Failed, "not have been used in the graph"),
    }
    train = msgspec.structs.replace(causal, pass_="train")
    seen = lab(*(torch_trap(name) for name in ["honest", *traps]), framework="torch", workloads=[train])
    check(seen, traps, ["honest"])


def test_a_ceiling_that_is_exceeded_is_measured_again_for_every_cell(lab, trap, monkeypatch):
    from attnbench.measuring.rates import Ceilings
    from attnbench.run import pool

    asked = []
    monkeypatch.setattr(pool, "load_ceilings", lambda environment, dtype: Ceilings(1e3, 1e3))
    monkeypatch.setattr(pool, "store_ceilings", lambda *_: None)
    monkeypatch.setattr(pool.Pool, "_measure_ceilings", lambda *_: asked.append(1) or Ceilings(1e15, 1e15))
    seen = lab(trap("honest"), "numpy.float32")
    costs = [record.cost for record in seen.records if not record.implementation.startswith("anchor")]
    assert len(costs) == 2
    assert len({round(cost.tflops / cost.roofline, 6) for cost in costs}) == 1
    assert len(asked) == 1


def test_figures_above_the_ceiling_are_not_published(lab, trap, monkeypatch):
    from attnbench.measuring.rates import Ceilings
    from attnbench.run import pool

    low = Ceilings(1e3, 1e3)
    monkeypatch.setattr(pool, "load_ceilings", lambda environment, dtype: low)
    monkeypatch.setattr(pool, "store_ceilings", lambda *_: None)
    monkeypatch.setattr(pool.Pool, "_measure_ceilings", lambda *_: low)
    seen = lab(trap("honest"))
    check(seen, {"honest": (Failed, "implausible: .* the measured compute ceiling")}, [])


def test_nor_is_a_half_of_a_training_step_above_it():
    from attnbench.measuring.rates import Ceilings
    from attnbench.measuring.sampling import summarise
    from attnbench.run.launch import Listener
    from attnbench.run.pool import Pool
    from attnbench.run.workload import WorkloadRun
    from attnbench.spec import Environment, Workload

    workload = Workload(batch=1, q_len=64, heads=1, head_dim=8, pass_="train")
    here = Environment(device="cpu", device_name="CPU", framework="numpy")
    run = WorkloadRun(None, workload, Pool((), "cpu", None), Listener(), None, 0)
    run._ceilings = {"cpu": Ceilings(1e9, 1e12)}
    ok = SimpleNamespace(environment=here, ranks=None, quality={})
    honest, quick = (summarise([[ns] * 20], "wall", 1) for ns in (1e6, 1e3))
    times = {"main": honest, "forward": honest, "backward": honest}
    assert run._implausible(ok, times) is None
    assert run._implausible(ok, times | {"main": quick}).startswith("implausible")
    assert run._implausible(ok, times | {"backward": quick}).startswith("backward pass implausible")


def test_a_ceiling_measured_in_a_bad_moment_accuses_nobody(lab, trap, monkeypatch):
    from attnbench.measuring.rates import Ceilings
    from attnbench.run import pool

    monkeypatch.setattr(pool, "load_ceilings", lambda environment, dtype: Ceilings(1e3, 1e3))
    monkeypatch.setattr(pool, "store_ceilings", lambda *_: None)
    monkeypatch.setattr(pool.Pool, "_measure_ceilings", lambda *_: Ceilings(1e15, 1e15))
    assert lab(trap("honest")).by_name["honest"].status == "ok"
