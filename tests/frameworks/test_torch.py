"""The torch adapter: arrays, passes, clocks, memory and kernels on a CPU; accelerator clocks where there is one."""

import json
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest

from attnbench import masks
from attnbench.errors import UnknownName, UsageError
from attnbench.frameworks import get
from attnbench.frameworks.base import Framework, Inputs, Program, Watch
from attnbench.masks import MaskShape

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from attnbench.frameworks.torch import clocks, plain
from attnbench.frameworks.torch.programs import recorded

FRAMEWORK = get("torch")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def scores_stored(q, k, v):
    return torch.softmax(q @ k.transpose(-1, -2), -1) @ v


def fused(q, k, v):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=1.0)


def draw(length=8, dim=4, device="cpu"):
    return Inputs(*(torch.randn(1, 2, length, dim, device=device) for _ in range(4)))


def run(program, inputs):
    return program.run(program.prepare(inputs))


def test_it_is_a_whole_framework():
    assert isinstance(FRAMEWORK, Framework)
    assert FRAMEWORK.devices()[-1] == "cpu"
    environment = FRAMEWORK.environment("cpu")
    assert environment.framework == "torch"
    assert environment.packages["torch"] == torch.__version__
    assert environment.memory_bytes > environment.free_bytes > 0
    assert environment.threads == torch.get_num_threads()


def test_unknown_devices_and_clocks_are_usage_errors():
    with pytest.raises(UsageError, match='no device "abacus"'):
        FRAMEWORK.array(np.zeros(1), "float32", "abacus")
    with pytest.raises(UnknownName, match="clock on cpu"):
        FRAMEWORK.clock("graph", "cpu")


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
def test_arrays_round_to_the_dtype_and_come_back_exactly(dtype):
    values = np.random.default_rng(0).normal(size=(3, 5))
    array = FRAMEWORK.array(values, dtype, "cpu")
    assert array.dtype == FRAMEWORK.dtype(dtype)
    back = FRAMEWORK.numpy(array)
    assert back.dtype == (np.float64 if dtype == "float64" else np.float32)
    assert FRAMEWORK.same_bits(FRAMEWORK.array(back, dtype, "cpu"), array)
    assert FRAMEWORK.cast(array, "float32").dtype == torch.float32


def test_owns_plain_tensors_only():
    from torch._subclasses import FakeTensorMode

    assert FRAMEWORK.owns(torch.zeros(1))
    assert FRAMEWORK.owns(torch.nn.Parameter(torch.zeros(1)))
    with FakeTensorMode():
        assert not FRAMEWORK.owns(torch.zeros(1))
    assert not FRAMEWORK.owns(torch.zeros(1, device="meta"))
    assert not FRAMEWORK.owns(np.zeros(1))
    assert not FRAMEWORK.owns((torch.zeros(1),))


def test_bits_signs_and_elements():
    a = torch.tensor([1.0, float("nan"), 0.0])
    assert FRAMEWORK.same_bits(a, a.clone())
    assert not FRAMEWORK.same_bits(a, torch.tensor([1.0, float("nan"), -0.0]))
    assert not FRAMEWORK.same_bits(a, a[:2])
    assert not FRAMEWORK.is_finite(a)
    changed = FRAMEWORK.put(a, (slice(1, 2),), 5.0)
    assert (changed.tolist(), bool(a[1].isnan())) == ([1.0, 5.0, 0.0], True)
    flipped = FRAMEWORK.multiply(changed, np.array([-1, 1, -1]))
    assert flipped.tolist() == [-1.0, 5.0, 0.0]
    assert changed.tolist() == [1.0, 5.0, 0.0]


def test_transpose_copies_only_between_layouts():
    a = torch.randn(2, 3, 4, 5)
    assert FRAMEWORK.transpose(a, "bshd", "bshd") is a
    swapped = FRAMEWORK.transpose(a, "bshd", "bhsd")
    assert swapped.is_contiguous()
    assert torch.equal(swapped, a.transpose(1, 2))


def test_masks_evaluate_in_the_namespace_as_in_numpy():
    mask, shape = masks.dilated([3, 6], [1, 2]), MaskShape(1, 2, 6, 6)
    namespace = FRAMEWORK.namespace("cpu")
    index = [namespace.asarray(i) for i in mask.indices(shape)]
    np.testing.assert_array_equal(mask.predicate(shape, namespace)(*index).numpy(), mask.array(shape))
    weight, reference = (mask.log_weight(shape, n) for n in (namespace, np))
    np.testing.assert_allclose(weight(*index).numpy(), reference(*mask.indices(shape)), rtol=1e-15)


def test_passes_give_what_autograd_gives():
    inputs = draw()
    q, k, v = (x.clone().requires_grad_() for x in inputs[:3])
    out = scores_stored(q, k, v)
    grads = torch.autograd.grad(out, (q, k, v), inputs.dout)
    wanted = {"forward": (out,), "backward": grads, "train": (out, *grads)}
    for pass_, want in wanted.items():
        programs = FRAMEWORK.programs(scores_stored, pass_, inputs)
        assert programs.compile_ns == 0
        for got, expected in zip(run(programs.main, inputs), want, strict=True):
            torch.testing.assert_close(got, expected)
    assert set(programs.parts) == {"forward", "backward"}
    (part,) = run(programs.parts["forward"], inputs)
    assert part.requires_grad, "the forward part saves what backward needs"
    assert not any(x.requires_grad for x in inputs)


def test_forward_builds_no_graph_and_backward_can_be_rerun_for_a_capture():
    inputs = draw()
    (out,) = run(FRAMEWORK.programs(scores_stored, "forward", inputs).main, inputs)
    assert not out.requires_grad
    program = FRAMEWORK.programs(scores_stored, "backward", inputs).main
    state = program.prepare(inputs)
    first, second = program.rerun(state), program.rerun(state)
    assert all(torch.equal(a, b) for a, b in zip(first, second))


def test_a_call_that_returns_no_tensor_is_named():
    inputs = draw()
    with pytest.raises(TypeError, match="returned tuple"):
        run(FRAMEWORK.programs(lambda q, k, v: (q, k), "forward", inputs).main, inputs)


def test_a_tensor_without_values_is_told_apart_from_what_is_no_tensor():
    class Wrapped(torch.Tensor):
        pass

    for give, told in [
        (lambda q, k, v: q.to("meta"), "a tensor of the meta device, which holds no values"),
        (lambda q, k, v: q.as_subclass(Wrapped), "returned Wrapped, not a plain torch.Tensor"),
    ]:
        programs = FRAMEWORK.programs(give, "forward", draw())
        with pytest.raises(TypeError, match=told):
            run(programs.main, draw())


def test_compile_time_is_reported_only_by_calls_that_compile():
    class Compiles:
        compiles, calls = True, 0

        def __call__(self, q, k, v):
            self.calls += 1
            return scores_stored(q, k, v)

    call = Compiles()
    assert FRAMEWORK.programs(call, "train", draw()).compile_ns > 0
    assert call.calls == 3, "main, forward and backward were each warmed once"


@pytest.mark.parametrize("pass_", ["forward", "backward", "train"])
def test_peak_memory_sees_the_scores(pass_):
    length = 256
    inputs = draw(length, 8)
    scores = 2 * length * length * 4
    stored, flash = (
        FRAMEWORK.peak(FRAMEWORK.programs(call, pass_, inputs).main, inputs, "cpu", None).bytes
        for call in (scores_stored, fused)
    )
    assert scores <= stored <= 4 * scores
    assert inputs.q.nbytes <= flash < scores


def test_memory_that_torch_did_not_allocate_is_not_published_as_none_at_all():
    """Computed in NumPy, or kept from an earlier call: both would be 0 bytes."""
    inputs = draw(256, 16)
    kept = fused(inputs.q, inputs.k, inputs.v)
    in_numpy = lambda q, k, v: torch.from_numpy(q.numpy() + 1)  # noqa: E731
    for call in (in_numpy, lambda q, k, v: kept):
        peak = FRAMEWORK.peak(FRAMEWORK.programs(call, "forward", inputs).main, inputs, "cpu", None)
        assert peak.bytes is None
        assert "not seen: the output's own memory did not come from torch's allocator" in peak.reason


@pytest.mark.parametrize(
    "call, times",
    [
        (lambda q, k, v: q + 1, 1),
        (lambda q, k, v: (q + 1).transpose(1, 2).transpose(1, 2), 1),
        (lambda q, k, v: torch.cat((q, k)).add_(1)[: len(q)], 2),
        (lambda q, k, v: (q[:, :1] + 1).expand(q.shape), 1 / 2),
        (lambda q, k, v: v[:], 0),
        (lambda q, k, v: torch.exp(q, out=torch.empty_like(q)).mul_(2), 1),
    ],
    ids=["new", "view", "part", "expanded", "input", "in place"],
)
def test_views_and_work_in_place_keep_their_peak(call, times):
    inputs = draw(256, 16)
    peak = FRAMEWORK.peak(FRAMEWORK.programs(call, "forward", inputs).main, inputs, "cpu", None)
    assert peak.bytes == pytest.approx(times * inputs.q.nbytes, abs=1024), peak.reason


def test_peak_counts_what_run_frees():
    """A buffer made by `prepare` and freed inside `run` makes room for the next one."""

    def refill(state):
        state.clear()
        return (torch.ones(1 << 16),)

    program = Program(run=refill, prepare=lambda _: [torch.ones(1 << 16)])
    assert FRAMEWORK.peak(program, draw(), "cpu", None).bytes < 1 << 16


def test_kernels_name_the_work_and_not_the_views():
    inputs = draw()
    names, why = FRAMEWORK.kernels(FRAMEWORK.programs(scores_stored, "forward", inputs).main, inputs, "cpu")
    assert why is None
    assert {"aten::bmm", "aten::_softmax"} <= set(names)
    assert not {"aten::transpose", "aten::empty", "aten::matmul"} & set(names)
    names, _ = FRAMEWORK.kernels(FRAMEWORK.programs(fused, "forward", inputs).main, inputs, "cpu")
    assert names == ["aten::_scaled_dot_product_flash_attention_for_cpu"]


def test_trace_is_a_chrome_trace(tmp_path):
    inputs = draw()
    program = FRAMEWORK.programs(fused, "forward", inputs).main
    path = FRAMEWORK.trace(program, inputs, tmp_path / "deep" / "trace.json", "cpu")
    assert any("flash_attention" in event.get("name", "") for event in json.loads(path.read_text())["traceEvents"])


@pytest.mark.parametrize("pass_", ["backward", "train"])
def test_nothing_of_the_cotangent_exists_while_the_untimed_forward_pass_runs(pass_):
    made = []

    def attend(q, k, v):
        made.append("forward")
        return scores_stored(q, k, v)

    inputs = draw()
    programs = FRAMEWORK.programs(attend, pass_, inputs)
    later = inputs._replace(dout=lambda: made.append("dO") or inputs.dout)
    program = programs.parts.get("backward", programs.main)
    found = run(program, later)
    assert made == ["forward", "dO"]
    torch.testing.assert_close(found, run(program, inputs))
    torch.testing.assert_close(run(programs.main, later), run(programs.main, inputs))


def test_a_checksum_tells_whether_an_array_was_changed():
    array = torch.randn(2, 3, 4, 5).to(torch.bfloat16)
    before = FRAMEWORK.checksum(array)
    assert FRAMEWORK.checksum(array.clone()) == before
    for change in (lambda x: x.zero_(), lambda x: x[0, 1, 2].neg_(), lambda x: x.copy_(x.flip(-2))):
        changed = array.clone()
        change(changed)
        assert FRAMEWORK.checksum(changed) != before


def test_a_part_is_a_copy_of_a_box():
    array = torch.randn(2, 3, 4, 5)
    part = FRAMEWORK.part(array, (1, 0, 2, 0), (1, 3, 2, 5))
    assert torch.equal(part, array[1:, :, 2:])
    array.zero_()
    assert part.any()


class Kept(Watch):
    """Looks at the calls of each sample that a test names."""

    def __init__(self, *picked):
        self.picked, self.outputs = picked, {}

    def pick(self, calls):
        return [index for index in self.picked if index < calls]

    def look(self, call, output):
        self.outputs[call] = FRAMEWORK.snapshot(output)


@pytest.mark.parametrize("picked", [(0,), (1,), (2,), (0, 2), (0, 1, 2), ()])
def test_wall_clock_rotates_inputs_and_shows_the_picked_calls(picked):
    sets = [draw(), draw()]
    program = FRAMEWORK.programs(scores_stored, "train", sets[0]).main
    assert FRAMEWORK.clocks("cpu") == ("wall",)
    watch = Kept(*picked)
    samples = FRAMEWORK.clock("wall", "cpu").sample(program, sets, count=4, calls=3, watch=watch)
    assert len(samples.ns) == 4
    assert min(samples.ns) > 0
    assert sorted(watch.outputs) == [3 * sample + index for sample in range(4) for index in picked]
    for call, output in watch.outputs.items():
        torch.testing.assert_close(output, tuple(x.detach() for x in run(program, sets[call % 2])))


def test_anchors_return_their_operands():
    product, a, b = FRAMEWORK.matmul(16, "float32", "cpu").run(None)
    torch.testing.assert_close(product, a @ b)
    target, source = FRAMEWORK.copy(4096, "cpu").run(None)
    assert source.nbytes == 4096
    assert torch.equal(target, source)


def test_out_of_memory_is_recognised_and_other_errors_are_not():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 50)
    assert FRAMEWORK.is_out_of_memory(caught.value)
    assert FRAMEWORK.is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory."))
    assert not FRAMEWORK.is_out_of_memory(RuntimeError("shapes do not match"))


def test_rows_without_keys_have_zero_output_and_finite_gradients():
    from attnbench.spec import Workload

    w = Workload(batch=1, q_len=4, heads=2, head_dim=4, mask=masks.lengths([0]))
    q, k, v = (torch.randn(1, 4, 2, 4).requires_grad_() for _ in range(3))
    out = plain.plain_call(w)(q, k, v)
    assert torch.count_nonzero(out) == 0
    assert all(torch.count_nonzero(g) == 0 for g in torch.autograd.grad(out.sum(), (q, k, v)))


def event(name, ns, device="CUDA", annotation=False):
    kind = SimpleNamespace(name=device)
    return SimpleNamespace(
        name=lambda: name, duration_ns=lambda: ns, device_type=lambda: kind, is_user_annotation=lambda: annotation
    )


def test_the_kernel_clock_counts_only_work_between_fences():
    fence = event("fill<short>", 900)
    host = [event("aten::bmm", 99, "CPU"), event("region", 50, annotation=True)]
    one_call = [fence, event("gemm", 5), event("softmax", 7), *host, fence]
    preparation = [event("forward", 1000)]
    events = preparation + one_call + preparation + one_call
    assert clocks._between_fences(events, {"fill<short>"}, 2) == [12, 12]
    with pytest.raises(RuntimeError, match="3 fences for 2 calls"):
        clocks._between_fences(events[:-1], {"fill<short>"}, 2)


def test_samples_are_means_over_calls():
    assert clocks._means([1, 3, 5, 7], 2) == [2, 6]


class Silent:
    """A cache that is never flushed, and an event that is never recorded."""

    def __init__(self, *_):
        pass

    def flush(self):
        pass

    mark = record = flush

    def elapsed_time(self, other):
        return 1.0


@pytest.mark.parametrize("name", ["events", "kernel", "graph"])
def test_device_clocks_show_the_picked_calls_with_the_inputs_they_had(name, monkeypatch):
    """Without a device: what is timed is made up, what is looked at is real."""
    clock, static = clocks.CLOCKS[name]("cpu", FRAMEWORK.snapshot), torch.zeros(1, 2, 8, 4)

    def capture(program, inputs):
        return lambda: (static.copy_(program.run(inputs)[0]),)

    monkeypatch.setattr(clocks, "ColdCache", Silent)
    monkeypatch.setattr(clock, "_event", Silent)
    monkeypatch.setattr(clocks, "_fence_names", lambda device: frozenset())
    monkeypatch.setattr(clocks, "recorded", lambda device, host: recorded(device))
    monkeypatch.setattr(clocks, "_between_fences", lambda events, fences, calls: [1.0] * calls)
    monkeypatch.setattr(clocks.GraphClock, "_capture", staticmethod(capture))
    sets, watch = [draw() for _ in range(6)], Kept(1)
    program = FRAMEWORK.programs(scores_stored, "forward", sets[0]).main
    assert len(clock.sample(program, sets, count=3, calls=2, watch=watch).ns) == 3
    assert sorted(watch.outputs) == ([1] if clock.repeats_inputs else [1, 3, 5])
    for call, (output,) in watch.outputs.items():
        torch.testing.assert_close(output, run(program, sets[call])[0])


def test_recording_a_call_does_not_import_the_compiler():
    code = (
        "import sys, torch; from attnbench.frameworks.torch.programs import raw_events, recorded\n"
        "with recorded('cpu', profile_memory=True) as found: torch.ones(3) + 1\n"
        "assert 'aten::add' in {event.name() for event in raw_events(found)}\n"
        "print('torch._dynamo' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == ["False"], done.stderr


ROUNDS = 30


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("pass_", ["forward", "backward", "train"])
def test_gpu_clocks_agree(pass_):
    sets = [
        Inputs(*(torch.randn(4, 16, 2048, 64, device="cuda", dtype=torch.bfloat16) for _ in range(4))) for _ in range(2)
    ]
    program = FRAMEWORK.programs(fused, pass_, sets[0]).main
    run(program, sets[0])
    for _ in range(ROUNDS):  # a neighbour on the device may stretch some samples, but not those of every round
        medians = {}
        for name in FRAMEWORK.clocks("cuda"):
            watch = Kept(0)
            medians[name] = np.median(FRAMEWORK.clock(name, "cuda").sample(program, sets, 20, watch=watch).ns)
            assert watch.outputs
            for call, output in watch.outputs.items():
                for got, want in zip(output, run(program, sets[call % 2])):
                    torch.testing.assert_close(got, want.detach(), rtol=2e-2, atol=2e-2)
        if max(medians.values()) < 1.1 * min(medians.values()):
            break
        time.sleep(0.2)
    assert max(medians.values()) < 1.1 * min(medians.values()), medians


@pytest.mark.gpu
@needs_gpu
def test_gpu_facts():
    inputs = draw(256, 64, "cuda")
    program = FRAMEWORK.programs(scores_stored, "forward", inputs).main
    peak = FRAMEWORK.peak(program, inputs, "cuda", None)
    assert peak.bytes >= 2 * 256 * 256 * 4
    assert peak.reserved >= peak.bytes
    names, why = FRAMEWORK.kernels(program, inputs, "cuda")
    assert names, why
    environment = FRAMEWORK.environment(FRAMEWORK.devices()[0])
    assert environment.memory_bytes > environment.free_bytes > 0
    assert environment.capability is not None


def test_weights_of_a_mask_do_not_depend_on_the_users_default_dtype():
    from attnbench.frameworks.torch.plain import mask_tensors
    from attnbench.spec import Workload

    mask = masks.dilated([4, 16], [1, 3]) & masks.causal()
    workload = Workload(batch=1, q_len=16, heads=2, head_dim=8, mask=mask)
    want = mask_tensors(workload, torch.device("cpu")).weight
    try:
        torch.set_default_dtype(torch.bfloat16)
        got = mask_tensors(workload, torch.device("cpu")).weight
    finally:
        torch.set_default_dtype(torch.float32)
    assert got.dtype == want.dtype == torch.float32
    assert torch.equal(got, want)
