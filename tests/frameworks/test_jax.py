"""The JAX adapter: precision, compiled programs of each pass, clocks (CUPTI faked), memory, traces."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import time
import types

import numpy as np
import pytest

from attnbench import masks
from attnbench.errors import UsageError
from attnbench.frameworks.base import Inputs, Program, Watch
from attnbench.frameworks.jax import clocks
from attnbench.frameworks.jax.clocks import CuptiFailed, DeviceActivity, split_calls
from attnbench.frameworks.jax.framework import FRAMEWORK as JAX
from attnbench.frameworks.jax.framework import Compiler
from attnbench.frameworks.jax.plain import plain_call
from attnbench.spec import Workload

jax = pytest.importorskip("jax")
pytestmark = [pytest.mark.jax, pytest.mark.usefixtures("compiled_anew")]
jnp = jax.numpy
SHAPE = {"batch": 1, "q_len": 8, "heads": 2, "head_dim": 4}


def inputs(dtype="float32", seed=0):
    random = np.random.default_rng(seed)
    return Inputs(*(JAX.array(random.standard_normal((1, 8, 2, 4)), dtype, "cpu") for _ in range(4)))


def causal(dtype="float32"):
    return plain_call(Workload(**SHAPE, mask=masks.causal(), dtype=dtype))


class TestArrays:
    @pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
    def test_round_trip_keeps_the_dtype(self, dtype):
        values = np.random.default_rng(0).standard_normal((3, 4))
        array = JAX.array(values, dtype, "cpu")
        assert str(array.dtype) == dtype
        back = JAX.numpy(array)
        assert back.dtype == (np.float64 if dtype == "float64" else np.float32)
        assert np.array_equal(back, values.astype(JAX.dtype(dtype)).astype(back.dtype))

    def test_float64_survives_every_operation_outside_x64(self):
        array = JAX.array(np.array([1.0, 1 + 2**-40]).reshape(1, 2, 1, 1), "float64", "cpu")
        assert not jax.config.jax_enable_x64
        changed = [
            JAX.transpose(array, "bshd", "bhsd"),
            JAX.multiply(array, np.ones(1)),
            JAX.put(array, (0, 0, 0, 0), 1.0),
            *JAX.snapshot((array,)),
            JAX.cast(JAX.array(np.ones(1), "float32", "cpu"), "float64"),
        ]
        assert {str(x.dtype) for x in changed} == {"float64"}
        assert JAX.numpy(changed[0]).max() == 1 + 2**-40

    def test_same_bits_tells_nan_and_signed_zero_apart(self):
        for dtype in ("float64", "float32", "bfloat16"):
            a = JAX.array(np.array([0.0, np.nan]), dtype, "cpu")
            assert JAX.same_bits(a, a)
            assert not JAX.same_bits(a, JAX.array(np.array([-0.0, np.nan]), dtype, "cpu"))
            assert not JAX.is_finite(a)

    def test_flip_and_put_leave_the_original(self):
        a = JAX.array(np.ones(2), "float32", "cpu")
        assert JAX.numpy(JAX.multiply(a, np.array([1, -1]))).tolist() == [1, -1]
        assert JAX.numpy(JAX.put(a, (0,), 5.0)).tolist() == [5, 1]
        assert JAX.numpy(a).tolist() == [1, 1]

    def test_owns_concrete_arrays_only(self):
        seen = []
        jax.jit(lambda x: seen.append(JAX.owns(x)) or x)(jnp.ones(2))
        assert seen == [False]
        assert JAX.owns(jnp.ones(2))
        assert not JAX.owns(np.ones(2))

    def test_exact_is_float64_and_compiled(self):
        x = JAX.array(np.array([1.0, 2.0**-40]), "float32", "cpu")
        total = JAX.exact(lambda a: JAX.cast(a, "float64").sum())(x)
        assert float(total) == 1 + 2**-40


class TestPrograms:
    def test_outputs_of_each_pass_agree(self):
        x = inputs()
        out = JAX.numpy(causal()(x.q, x.k, x.v))
        forward = JAX.programs(causal(), "forward", x)
        backward = JAX.programs(causal(), "backward", x)
        train = JAX.programs(causal(), "train", x)
        (found,) = forward.main.run(forward.main.prepare(x))
        gradients = backward.main.run(backward.main.prepare(x))
        both = train.main.run(train.main.prepare(x))
        assert [len(gradients), len(both)] == [3, 4]
        assert np.allclose(JAX.numpy(found), out, atol=1e-6)
        for a, b in zip((found, *gradients), both):
            assert np.allclose(JAX.numpy(a), JAX.numpy(b), atol=1e-6)
        assert set(train.parts) == {"forward", "backward"}
        part = train.parts["backward"]
        assert np.allclose(JAX.numpy(part.run(part.prepare(x))[2]), JAX.numpy(both[3]), atol=1e-6)
        assert np.allclose(JAX.numpy(train.parts["forward"].run(x)[0]), out, atol=1e-6)
        assert forward.compile_ns > 0
        assert backward.temp_bytes is not None

    def test_inputs_kept_for_the_backward_pass_are_not_copied(self):
        fused = jax.custom_vjp(lambda q, k, v: q * k + v)
        fused.defvjp(
            lambda q, k, v: (q * k + v, (q, k, v, q * 2)),
            lambda kept, dout: (dout * kept[1], dout * kept[0], dout),
        )
        x = inputs()
        part = JAX.programs(fused, "train", x).parts["backward"]
        kept, _ = part.prepare(x)
        leaves = jax.tree_util.tree_leaves(kept)
        assert all(any(leaf is one for leaf in leaves) for one in (x.q, x.k))
        assert np.allclose(JAX.numpy(part.run(part.prepare(x))[0]), JAX.numpy(x.dout * x.k))

    def test_fresh_inputs_reach_a_compiled_backward(self):
        main = JAX.programs(causal(), "backward", inputs()).main
        a, b = (main.run(main.prepare(inputs(seed=n))) for n in (1, 2))
        assert not np.allclose(JAX.numpy(a[0]), JAX.numpy(b[0]))

    def test_float64_is_accurate_to_1e_12(self):
        x = inputs("float64")
        main = JAX.programs(causal("float64"), "train", x).main
        out = main.run(main.prepare(x))[0]
        q, k, v = (JAX.numpy(a)[0] for a in x[:3])
        logits = np.where(np.tri(8), np.einsum("ihd,jhd->hij", q, k) / 2, -np.inf)
        p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
        assert abs(JAX.numpy(out)[0] - np.einsum("hij,jhd->ihd", p, v)).max() < 1e-12

    def test_float32_products_are_float32_products(self):
        seen = []

        def call(q, k, v):
            seen.append(jax.config.jax_default_matmul_precision)
            return q + k + v

        JAX.programs(call, "forward", inputs())
        JAX.programs(call, "forward", inputs("bfloat16"))
        assert seen == ["highest", None]

    def test_captured_arrays_become_arguments(self):
        captured = jnp.asarray(np.random.default_rng(0).standard_normal((512, 512)), jnp.float32)

        def call(q, k, v):
            return q + (captured @ captured).sum()

        compiler = Compiler(call, inputs())
        assert [array.shape for array in compiler._captured] == [(512, 512)]
        out = compiler.programs("forward").main.run(inputs())[0]
        assert np.allclose(JAX.numpy(out - inputs().q), float((captured @ captured).sum()), rtol=1e-3)

    def test_another_shape_is_rejected_not_recompiled(self):
        main = JAX.programs(causal(), "forward", inputs()).main
        with pytest.raises(TypeError):
            main.run(Inputs(*(a[:, :4] for a in inputs())))

    def test_a_call_must_return_one_array(self):
        with pytest.raises(UsageError, match="one array"):
            JAX.programs(lambda q, k, v: (q, k), "forward", inputs())

    def test_compile_time_does_not_come_from_a_cache(self, tmp_path):
        from jax.experimental.compilation_cache import compilation_cache

        old = {name: getattr(jax.config, name) for name in ("jax_compilation_cache_dir", *CACHE_EVERYTHING)}
        try:
            for name, value in {"jax_compilation_cache_dir": str(tmp_path), **CACHE_EVERYTHING}.items():
                jax.config.update(name, value)
            compilation_cache.reset_cache()
            JAX.programs(causal(), "forward", inputs())
            assert not list(tmp_path.iterdir())
            assert jax.config.jax_enable_compilation_cache
        finally:
            for name, value in old.items():
                jax.config.update(name, value)
            compilation_cache.reset_cache()


CACHE_EVERYTHING = {"jax_persistent_cache_min_compile_time_secs": 0.0, "jax_persistent_cache_min_entry_size_bytes": -1}


class TestMachine:
    def test_cpu_is_always_there_and_last(self):
        assert JAX.devices()[-1] == "cpu"
        environment = JAX.environment("cpu")
        assert environment.device == "cpu"
        assert environment.framework == "jax"
        assert environment.memory_bytes
        assert environment.packages["jax"] == jax.__version__

    def test_a_missing_device_is_one_sentence(self):
        if "tpu" in JAX.devices():
            pytest.skip("there is a TPU")
        with pytest.raises(UsageError, match="no tpu device"):
            JAX.environment("tpu")

    def test_accelerators_are_told_apart_by_their_client(self):
        from attnbench.frameworks.jax.framework import _accelerator_facts, _kind

        def device(platform, version):
            return types.SimpleNamespace(platform=platform, client=types.SimpleNamespace(platform_version=version))

        assert _kind(device("gpu", "PJRT C API\ncuda 13000")) == "cuda"
        assert _kind(device("gpu", "rocm 70000")) == "rocm"
        assert _kind(device("tpu", "")) == "tpu"
        card = types.SimpleNamespace(
            memory_stats=lambda: {"bytes_limit": 100, "bytes_in_use": 30},
            compute_capability="9.0",
            device_kind="NVIDIA H200",
        )
        assert _accelerator_facts(card) == {
            "device_name": "NVIDIA H200", "memory_bytes": 100, "free_bytes": 70, "capability": (9, 0),
        }  # fmt: skip

    def test_memory_is_not_preallocated(self):
        code = "import os; from attnbench.frameworks.jax.framework import import_jax; import_jax(); " \
            "print(os.environ['XLA_PYTHON_CLIENT_PREALLOCATE'])"  # fmt: skip
        assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "false"

    def test_out_of_memory(self):
        exhausted = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes.")
        assert JAX.is_out_of_memory(exhausted)
        assert JAX.is_out_of_memory(MemoryError())
        assert not JAX.is_out_of_memory(jax.errors.JaxRuntimeError("INTERNAL: illegal memory access"))
        assert not JAX.is_out_of_memory(ValueError("RESOURCE_EXHAUSTED"))

    def test_peak_is_temp_plus_outputs(self):
        programs = JAX.programs(causal(), "train", inputs())
        peak = JAX.peak(programs.main, inputs(), "cpu", programs.temp_bytes)
        assert peak.bytes == programs.temp_bytes + 4 * 8 * 2 * 4 * 4
        assert JAX.peak(programs.main, inputs(), "cpu", None).reason

    def test_trace_lands_where_asked(self, tmp_path):
        main = JAX.programs(causal(), "backward", inputs()).main
        unpacked = JAX.trace(main, inputs(), tmp_path / "new" / "cell.json", "cpu")
        assert json.loads(unpacked.read_text())["traceEvents"]
        packed = JAX.trace(main, inputs(), tmp_path, "cpu")
        assert packed.parent == tmp_path
        assert json.loads(gzip.decompress(packed.read_bytes()))["traceEvents"]

    def test_anchors(self):
        product, a, b = JAX.matmul(16, "float32", "cpu").run(None)
        assert np.allclose(JAX.numpy(product), JAX.numpy(a) @ JAX.numpy(b), atol=1e-5)
        target, source = JAX.copy(64, "cpu").run(None)
        assert target is not source
        assert JAX.same_bits(target, source)
        assert target.nbytes == 64

    def test_cpu_has_the_wall_clock_only(self):
        assert JAX.clocks("cpu") == ("wall",)
        assert JAX.kernels(Program(run=lambda x: (x,)), inputs(), "cpu")[0] is None
        with pytest.raises(UsageError, match="kernel clock"):
            JAX.clock("kernel", "cpu")
        samples = JAX.clock("wall", "cpu").sample(JAX.programs(causal(), "forward", inputs()).main, [inputs()], 3)
        assert len(samples.ns) == 3
        assert min(samples.ns) > 0


class FakeCupti:
    """Stands in for `cupti.record`: what the body launches, one piece of work after the other."""

    def __init__(self):
        self.seen: list[DeviceActivity] | None = None

    def launch(self, name, ms):
        if self.seen is not None:
            start = self.seen[-1].end_ns if self.seen else 0
            self.seen.append(DeviceActivity(name, start, start + round(ms * 1e6)))

    def record(self, body):
        self.seen = []
        body()
        seen, self.seen = self.seen, None
        return seen


@pytest.fixture
def cupti(monkeypatch):
    fake = FakeCupti()
    monkeypatch.setattr(clocks, "record", fake.record)

    class Flush:
        def __init__(self, device):
            del device

        def __call__(self):
            fake.launch("wrapped_xor", 0.5)

        def wait(self):
            return None

    monkeypatch.setattr(clocks, "Flush", Flush)
    clocks.cupti_problem.cache_clear()
    yield fake
    clocks.cupti_problem.cache_clear()


@pytest.mark.parametrize("pass_", ["backward", "train"])
def test_the_cotangent_may_be_made_when_it_is_needed(pass_):
    x = inputs()
    programs = JAX.programs(causal(), pass_, x)
    later = x._replace(dout=lambda: x.dout)
    for program in (programs.main, *programs.parts.values()):
        for a, b in zip(program.run(program.prepare(x)), program.run(program.prepare(later))):
            assert JAX.same_bits(a, b)


def test_a_part_is_a_box():
    array = jnp.arange(24.0).reshape(2, 3, 4)
    assert np.array_equal(JAX.part(array, (1, 0, 2), (1, 3, 2)), np.asarray(array)[1:, :, 2:])


class Third(Watch):
    """Looks at the third call."""

    def __init__(self):
        self.seen = []

    def pick(self, calls):
        return [2]

    def look(self, call, output):
        self.seen.append((call, float(output[0].max())))


class TestKernelClock:
    def program(self, cupti):
        def prepare(x):
            cupti.launch("forward", 9.0)
            return x

        def run(x):
            cupti.launch("Memset", 0.001)
            cupti.launch("attention", 0.001 * float(x.q[0, 0, 0, 0]))
            cupti.launch("Memcpy", 0.001)
            return (x.q,)

        return Program(run, prepare)

    def sets(self):
        return [inputs()._replace(q=jnp.full((1, 8, 2, 4), float(n))) for n in (1, 3)]

    def test_copies_and_fills_count_and_flushes_and_preparation_do_not(self, cupti):
        clock = clocks.JaxKernelClock(JAX, None)
        watch = Third()
        samples = clock.sample(self.program(cupti), self.sets(), count=5, watch=watch)
        assert np.allclose(samples.ns, [3000, 5000, 3000, 5000, 3000])
        assert watch.seen == [(0, 1.0)], "the third call has the first inputs again"
        assert np.allclose(clock.sample(self.program(cupti), self.sets(), count=3, calls=2).ns, 4000)

    def test_names_without_repeats(self, cupti):
        assert clocks.kernel_names(self.program(cupti), self.sets()[0]) == ["Memset", "attention", "Memcpy"]

    def test_cupti_is_tried_and_its_failure_is_the_reason(self, cupti, monkeypatch):
        assert clocks.cupti_problem("gpu0") is None

        def refuse(body):
            raise CuptiFailed("there is no CUPTI library here")

        monkeypatch.setattr(clocks, "record", refuse)
        assert "no CUPTI library" in clocks.cupti_problem("gpu1")

    @pytest.mark.parametrize(
        "names,words",
        [
            (["a", "flush", "a"], "before the first flush"),
            (["flush", "a"], "saw 1 calls"),
            (["flush", "a", "flush", "flush"], "1 of them without device work"),
            (["flush", "a", "flush", "a", "b"], "did 1 pieces of device work and another 2"),
        ],
    )
    def test_what_makes_no_sense_is_no_time(self, names, words):
        with pytest.raises(CuptiFailed, match=words):
            split_calls([DeviceActivity(name, 0, 1) for name in names], frozenset({"flush"}), 2)


@pytest.mark.gpu
@pytest.mark.skipif(JAX.devices()[0] != "cuda", reason="needs a CUDA device that JAX sees")
class TestCuda:
    def test_kernel_time_of_a_matmul_is_plausible_and_named(self):
        assert JAX.clocks("cuda") == ("kernel", "wall")
        program = JAX.matmul(4096, "bfloat16", "cuda")
        x = Inputs(*(JAX.array(np.ones((1, 1, 1, 1)), "float32", "cuda") for _ in range(4)))
        clock, start = JAX.clock("kernel", "cuda"), time.perf_counter_ns()
        kernel = clock.sample(program, [x], 5).ns
        elapsed = time.perf_counter_ns() - start  # of the same calls: no neighbour on the device can make it shorter
        assert min(kernel) > 1e4
        assert sum(kernel) < elapsed
        names, reason = JAX.kernels(program, x, "cuda")
        assert names
        assert reason is None

    def test_a_bare_copy_is_work_of_the_device(self):
        x = JAX.array(np.ones((1, 1024, 64, 64)), "float32", "cuda")
        copy = jax.jit(lambda array: array).lower(x).compile()
        program = Program(run=lambda state: (copy(state.q),))
        sets = [Inputs(x, x, x, x)]
        assert JAX.kernels(program, sets[0], "cuda")[0] == ["Memcpy DtoD"]
        assert min(JAX.clock("kernel", "cuda").sample(program, sets, 3).ns) > 1e3

    def test_counts_what_the_clock_of_torch_counts(self):
        done = subprocess.run([sys.executable, "-c", SAME_CALL_SEEN_TWICE], capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr[-2000:]
        by_torch, by_us = json.loads(done.stdout.splitlines()[-1])
        assert len(by_us) == len(by_torch)  # names of kernels are written in two ways: mangled and not
        copies_and_fills = [name for name in by_us if name.startswith("Mem")]
        assert copies_and_fills == [name for name in by_torch if name.startswith("Mem")]
        assert {"Memcpy DtoD", "Memset"} <= set(copies_and_fills)


SAME_CALL_SEEN_TWICE = """
import json
import torch
from attnbench.frameworks.jax import clocks

x = torch.randn(8, 1024, 512, device="cuda", dtype=torch.bfloat16)
target = torch.empty_like(x)

def call():
    target.copy_(x)                       # a copy by the copy engine
    cleared = torch.zeros(1 << 20, device="cuda", dtype=torch.uint8)
    torch.nn.functional.scaled_dot_product_attention(*[x.view(8, 8, 1024, 64)] * 3)
    torch.cuda.synchronize()
    return cleared

call()
with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
    call()
events = profiler.profiler.kineto_results.events()
names = [event.name() for event in events if event.device_type().name == "CUDA"]
by_torch = sorted(name.partition(" (")[0] if name.startswith("Mem") else name for name in names)
print(json.dumps([by_torch, sorted(work.name for work in clocks.record(call))]))
"""
