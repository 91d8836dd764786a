"""The Python face: verify, measure, BenchmarkRunner, compare_implementations, through real workers on tiny shapes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from record_factory import ok

import attnbench as ab
from attnbench import reference, registry, runner
from attnbench.errors import InvalidWorkload, UnknownName, UsageError
from attnbench.runner import Results, workload_from

WORKLOAD = ab.Workload(batch=2, q_len=32, heads=2, head_dim=16, mask=ab.masks.causal())
CONFIG = {"batch_size": 2, "sequence_length": 16, "d_model": 32, "num_heads": 2}
NAMES = ("numpy.float32", "numpy.reference")


def plain(q, k, v):
    """Honest causal attention of WORKLOAD's shape, in NumPy."""
    return reference.attention(WORKLOAD, q, k, v)[0]


def softmax_attention(xp, q, k, v):
    """The same in any namespace with NumPy's names."""
    logits = xp.einsum("bihd,bjhd->bhij", q, k) * 0.25
    logits = xp.where(xp.tril(xp.ones((32, 32))) > 0, logits, -xp.inf)
    weights = xp.exp(logits - logits.max(-1, keepdims=True))
    return xp.einsum("bhij,bjhd->bihd", weights / weights.sum(-1, keepdims=True), v)


def test_verify_an_implementation_by_name():
    record = ab.verify("numpy.float32", WORKLOAD)
    assert (record.status, record.implementation, record.isolation) == ("ok", "numpy.float32", "worker")
    assert record.time is None
    assert record.workload == WORKLOAD
    assert record.errors.forward < record.errors.forward_allowed
    assert record.errors.properties[0] == "V = 1 gives 1"
    assert record.environment.framework == "numpy"
    assert record.environment.device == "cpu"


def test_measure_fills_every_part_of_a_record():
    start = time.perf_counter()
    record = ab.measure("numpy.float32", WORKLOAD, budget_s=0.2)
    assert record.status == "ok", record
    times = record.time
    assert times.min_ns <= times.ci95_ns[0] <= times.median_ns <= times.ci95_ns[1] <= times.max_ns
    assert 1e3 < times.median_ns < 1e9
    assert len(times.samples_ns) == sum(times.rounds)
    assert record.throughput.calls_per_s == pytest.approx(1e9 / times.median_ns)
    assert record.throughput.tokens_per_s == pytest.approx(2 * 32 * 1e9 / times.median_ns)
    assert record.cost.flops == 4 * 16 * (32 * 33 // 2) * 2 * 2
    assert record.cost.tflops == pytest.approx(record.cost.flops / times.median_ns / 1e3)
    assert 0 < record.cost.roofline < 1
    assert record.memory.peak_bytes > 2 * 32 * 2 * 16 * 4, "at least the output"
    assert record.first_call_ns > 0
    assert record.compile_ns == 0
    assert time.perf_counter() - start < 60


def test_what_is_not_supported_has_a_reason_and_no_time():
    record = ab.measure("numpy.float32", ab.Workload(batch=1, q_len=8, heads=1, head_dim=8, dtype="float64"))
    assert (record.status, record.time) == ("unsupported", None)
    assert record.reason == "takes float32, not float64"


def test_an_unknown_name_is_answered_with_the_nearest():
    for call in (ab.verify, ab.measure):
        with pytest.raises(UnknownName, match=r'"numpy.float23".*Near: numpy.float32'):
            call("numpy.float23", WORKLOAD)
    with pytest.raises(UsageError, match="not int"):
        ab.verify(3, WORKLOAD)


def test_a_function_and_a_lambda_of_this_module_travel_to_a_worker():
    named = ab.verify(plain, WORKLOAD, framework="numpy")
    assert (named.status, named.implementation, named.isolation) == ("ok", "plain", "worker")
    factor = np.float32(1.001)
    closure = ab.measure(lambda q, k, v: plain(q, k, v) * factor, WORKLOAD, framework="numpy", budget_s=0.1)
    assert (closure.status, closure.isolation) == ("incorrect", "worker")
    assert "error allowed" in closure.reason
    assert closure.time is None
    assert closure.errors.forward == pytest.approx(0.001, rel=0.01)


def test_a_function_is_held_to_the_mask_of_its_workload():
    full = ab.Workload(batch=2, q_len=32, heads=2, head_dim=16)
    assert ab.verify(plain, full, framework="numpy").status == "incorrect"


def test_a_function_that_cannot_travel_is_run_here_and_the_record_says_so():
    lock, where = threading.Lock(), []

    def guarded(q, k, v):
        with lock:
            where.append(os.getpid())
            return plain(q, k, v)

    record = ab.measure(guarded, WORKLOAD, framework="numpy", budget_s=0.1)
    assert (record.status, record.isolation) == ("ok", "in-process")
    assert record.time.median_ns > 0
    assert set(where) == {os.getpid()}
    assert "guarded" not in ab.implementations(), "a function of one call is not registered for ever"


def test_an_implementation_registered_here_travels_by_its_name(monkeypatch):
    monkeypatch.setattr(registry, "_registered", {})
    ab.register(registry.Function(plain, "numpy", "numpy.mine"))
    record = ab.verify("numpy.mine", WORKLOAD)
    assert (record.status, record.implementation, record.isolation) == ("ok", "numpy.mine", "worker")


def test_a_function_in_a_file():
    text = f"{__file__}:plain"
    record = ab.verify(text, WORKLOAD, framework="numpy")
    assert (record.status, record.implementation) == ("ok", "plain")


@pytest.mark.torch
def test_a_torch_function_after_torch_has_used_its_threads_here(monkeypatch):
    import torch

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    threads = torch.get_num_threads()
    torch.set_num_threads(max(2, threads))
    torch.randn(600, 600) @ torch.randn(600, 600)
    torch.set_num_threads(threads)
    record = ab.measure(
        lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in (q, k, v)), is_causal=True
        ).transpose(1, 2),
        ab.Workload(batch=2, q_len=32, heads=2, head_dim=16, mask=ab.masks.causal(), pass_="train"),
        budget_s=0.1,
    )
    assert (record.status, record.isolation) == ("ok", "worker"), record.reason
    assert set(record.also) >= {"forward", "backward"}
    assert record.errors.backward < record.errors.backward_allowed


@pytest.mark.jax
def test_a_jax_function():
    import jax.numpy as jnp

    record = ab.measure(
        lambda q, k, v: softmax_attention(jnp, q, k, v), WORKLOAD, framework="jax", device="cpu", budget_s=0.1
    )
    assert record.status == "ok", record.reason
    assert record.environment.framework == "jax"
    assert record.compile_ns > 0


def test_a_script_without_a_main_guard(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("""
import attnbench as ab
import numpy as np

def mine(q, k, v):
    logits = np.einsum("bihd,bjhd->bhij", q, k) * 0.25
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return np.einsum("bhij,bjhd->bihd", weights / weights.sum(-1, keepdims=True), v)

workload = ab.Workload(batch=1, q_len=16, heads=2, head_dim=16)
record = ab.verify(mine, workload, framework="numpy")
print("RESULT", record.status, record.isolation)
print("RESULT", ab.measure("numpy.float32", workload, budget_s=0.05).status)
""")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["RESULT ok worker", "RESULT ok"], "the script ran once, and so did its calls"


def test_a_worker_starts_no_workers(monkeypatch):
    monkeypatch.setenv("ATTNBENCH_WORKER", "1")
    with pytest.raises(UsageError, match="__main__"):
        ab.verify("numpy.float32", WORKLOAD)


def test_workers_are_kept_between_calls():
    ab.verify("numpy.float32", WORKLOAD)
    kept = dict(runner._pool(os.getpid(), None)._workers)
    assert kept
    ab.verify("numpy.reference", WORKLOAD)
    now = runner._pool(os.getpid(), None)._workers
    assert all(now[group] is worker for group, worker in kept.items())


@pytest.fixture
def bench():
    made = ab.BenchmarkRunner(device="cpu")
    made.register_baseline("numpy.reference")
    made.register_optimization("numpy.float32")
    return made


@pytest.mark.parametrize("kind", ["inference", "training"])
def test_a_timed_benchmark(bench, kind):
    results = bench.run_benchmark(name="first", benchmark_type=kind, config=CONFIG, trials=7)
    assert [record.implementation for record in results] == ["numpy.reference", "numpy.float32"]
    for record in results:
        assert record.status == "ok", record
        assert len(record.time.samples_ns) == 7
        assert record.workload.tags == ("first",)
        assert record.workload.pass_ == {"inference": "forward", "training": "train"}[kind]
        assert (record.workload.batch, record.workload.q_len) == (2, 16)
        assert (record.workload.heads, record.workload.head_dim) == (2, 16)
        assert set(record.also) == (set() if kind == "inference" else {"forward", "backward"})


@pytest.mark.parametrize("kind", ["memory", "accuracy"])
def test_a_benchmark_without_time(bench, kind):
    results = bench.run_benchmark(name="second", benchmark_type=kind, config=CONFIG, trials=5)
    assert [record.time for record in results] == [None, None]
    assert all(record.memory.peak_bytes > 0 for record in results)
    thorough = "0.1" in results["numpy.float32"].errors.stability
    assert thorough == (kind == "accuracy")


def test_scaling_doubles_twice(bench):
    results = bench.run_benchmark(name="third", benchmark_type="scaling", config=CONFIG, trials=3)
    assert [(record.workload.q_len, record.implementation) for record in results] == [
        (n, name) for n in (16, 32, 64) for name in ("numpy.reference", "numpy.float32")
    ]
    assert all(len(record.time.samples_ns) == 3 for record in results)


def test_a_benchmark_says_what_is_wrong_with_the_request(bench):
    with pytest.raises(UnknownName, match=r'"infrence".*Near: inference'):
        bench.run_benchmark(name="x", benchmark_type="infrence", config=CONFIG)
    with pytest.raises(UnknownName, match=r'"sequence_lenght".*Near: sequence_length'):
        bench.run_benchmark(name="x", benchmark_type="inference", config={"sequence_lenght": 8})
    with pytest.raises(UsageError, match="nothing is registered"):
        ab.BenchmarkRunner().run_benchmark(name="x", benchmark_type="inference", config=CONFIG)
    with pytest.raises(UnknownName, match=r"Near: numpy\.float32"):
        bench.register_baseline("numpy.float23")


@pytest.mark.parametrize(
    "config, fields",
    [
        (CONFIG, {"batch": 2, "q_len": 16, "kv_len": 16, "heads": 2, "head_dim": 16}),
        ({"seq_len": 8, "num_heads": 8, "num_kv_heads": 2}, {"q_len": 8, "heads": 8, "kv_heads": 2, "head_dim": 64}),
        ({"d_model": 256}, {"heads": 8, "head_dim": 32}),
        ({"causal": True}, {"mask": ab.masks.causal()}),
        ({"is_causal": False}, {"mask": ab.masks.full()}),
        ({"causal": True, "batch": 2, "mask": ab.masks.lengths([5, 9])},
         {"mask": ab.masks.lengths([5, 9]) & ab.masks.causal()}),
        ({"pass": "train", "dtype": "bfloat16"}, {"pass_": "train", "dtype": "bfloat16"}),
        ({}, {"batch": 1, "q_len": 512, "heads": 8, "head_dim": 64}),
    ],
)  # fmt: skip
def test_configs_in_both_vocabularies(config, fields):
    workload = workload_from(config)
    assert {name: getattr(workload, name) for name in fields} == fields


@pytest.mark.parametrize(
    "config, says",
    [
        ({"d_model": 100, "num_heads": 3}, "d_model 100 cannot be divided evenly into 3 heads"),
        ({"d_model": 64, "head_dim": 16, "num_heads": 2}, "head_dim"),
        ({"batch_size": 0}, "batch"),
        ({"d_model": "wide"}, "d_model and heads must be whole numbers"),
        ({"batch_size": 2, "batch": 3}, "a second time"),
        ({"d_model": 64, "num_heads": 0}, "divided evenly into 0 heads"),
        ({"num_heads": 12, "num_kv_heads": 5}, "must divide"),
        ({"dtype": "float8"}, "float8"),
    ],
)
def test_impossible_configs(config, says):
    with pytest.raises(InvalidWorkload, match=says):
        workload_from(config)


@pytest.mark.parametrize(
    "metrics, timed", [(["latency", "memory", "throughput"], True), (["throughput"], True), (["memory"], False)]
)
def test_compare_implementations(metrics, timed):
    results = ab.compare_implementations(implementations=NAMES, config={**CONFIG, "trials": 3}, metrics=metrics)
    assert [record.implementation for record in results] == list(NAMES)
    for record in results:
        assert record.status == "ok"
        assert (record.time is not None) == timed
        assert record.memory.peak_bytes > 0
        assert (record.throughput is not None) == timed


def test_a_metric_nobody_has():
    with pytest.raises(UnknownName, match=r'no metric called "latncy".*Near: latency'):
        ab.compare_implementations(implementations=NAMES, config=CONFIG, metrics=["latncy"])


def test_requests_of_the_wrong_type_are_one_sentence():
    with pytest.raises(UsageError, match=r'metrics must be a list, such as \["latency"\]'):
        ab.compare_implementations(implementations=NAMES, config=CONFIG, metrics="latency")
    with pytest.raises(UsageError, match="implementations must be a list"):
        ab.compare_implementations(implementations="numpy.float32", config=CONFIG)
    for budget in ("a", None, True, float("inf"), float("nan"), 0):
        with pytest.raises(UsageError, match="budget_s must be a finite number of seconds above 0"):
            ab.measure("numpy.float32", workload_from(CONFIG), budget_s=budget)
    with pytest.raises(UsageError, match="trials must be a whole number"):
        ab.compare_implementations(implementations=NAMES, config=CONFIG, trials=True)


def test_functions_and_names_are_compared_in_one_run():
    results = ab.compare_implementations(
        implementations=["numpy.float32", plain, plain],
        config={"batch": 2, "q_len": 32, "heads": 2, "head_dim": 16, "causal": True, "trials": 4},
        framework="numpy",
    )
    assert [record.implementation for record in results] == ["numpy.float32", "plain", "plain-2"]
    assert [record.status for record in results] == ["ok"] * 3
    assert {len(record.time.samples_ns) for record in results} == {4}


def test_results_are_a_list_that_knows_names(bench):
    results = bench.run_benchmark(name="x", benchmark_type="memory", config=CONFIG)
    assert isinstance(results, Results)
    assert results["numpy.float32"] is results[1] is results[-1]
    assert results[:1] == [results[0]]
    with pytest.raises(KeyError, match=r"no record of torch.sdpa; there are numpy.reference, numpy.float32"):
        results["torch.sdpa"]


def test_results_know_settings_apart():
    small, large = (ok("torch.chunked", [1e6] * 5, config={"chunk": size}) for size in (16, 64))
    plain = ok("torch.chunked", [2e6] * 5)
    results = Results([small, large, plain, ok("torch.flex", config={"block_size": 64})])
    assert results["torch.chunked"] is plain
    assert results["torch.chunked[chunk=16]"] is small
    assert results["torch.flex"] is results["torch.flex[block_size=64]"] is results[3]
    with pytest.raises(KeyError, match=r"no record of torch.chunked; there are torch.chunked\[chunk=16\], "):
        Results([small, large])["torch.chunked"]


@pytest.mark.torch
def test_devices_are_named_as_torch_names_them():
    import torch

    assert [runner._device_name(x) for x in (None, "cuda", "cuda:0", torch.device("cuda:0"), torch.device("cpu"))] == [
        None, "cuda", "cuda", "cuda", "cpu",
    ]  # fmt: skip
    with pytest.raises(UsageError, match="CUDA_VISIBLE_DEVICES=1"):
        runner._device_name(torch.device("cuda:1"))
    with pytest.raises(UsageError, match="tpu"):
        ab.verify("numpy.float32", WORKLOAD, device="tpu")


def test_a_config_may_name_its_mask_in_words():
    workload = runner.workload_from({"batch_size": 1, "sequence_length": 32, "mask": "window:8:0", "causal": True})
    assert workload.visible_mask.kinds == ("window", "causal")
