"""Right kernels pass, whatever they ask of memory and however little a shape leaves to compare; one whose first call
alone is wrong does not."""

from __future__ import annotations

import gc
from typing import Any
from unittest.mock import ANY

import mutations
import numpy as np
import pytest

from attnbench import frameworks, masks, registry
from attnbench.measuring.session import Options, Session
from attnbench.spec import Cell, Config, Environment, Implementation, Workload
from attnbench.verifying.checks import examine, examine_after
from attnbench.verifying.draws import Draws
from attnbench.verifying.invariants import DEPENDS_ON_DOUT
from attnbench.verifying.probes import counted_pairs
from attnbench.verifying.subject import Wrong

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch


class Eager(Implementation):
    """torch.eager behind a function of its inputs."""

    name, framework = "torch.mine", "torch"

    def supports(self, workload: Workload, environment: Environment) -> str | None:
        return None

    def build(self, workload: Workload, config: Config) -> Any:
        inner = registry.get("torch.eager").build(workload, {})
        return lambda *arrays: self.call(inner, arrays)

    def call(self, inner: Any, arrays: Any) -> Any:
        return inner(*arrays)


class Contiguous(Eager):
    """As kernels of ctypes, Triton or CUDA, which read memory and not strides."""

    def call(self, inner: Any, arrays: Any) -> Any:
        assert all(array.is_contiguous() for array in arrays), [array.stride() for array in arrays]
        return inner(*arrays)


class WrongAtFirst(Eager):
    """As one that returns an unwritten buffer while it tunes or captures a graph."""

    calls = 0

    def call(self, inner: Any, arrays: Any) -> Any:
        self.calls += 1
        return inner(*arrays) * (self.calls > 1)


@pytest.mark.parametrize("pass_", ["forward", "train"])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("fields", [{}, {"mask": masks.causal()}, {"dtype": "bfloat16", "softcap": 20.0}], ids=str)
def test_checks_hand_out_contiguous_arrays(pass_: str, kv_heads: int, fields: dict[str, Any]):
    workload = Workload(batch=2, q_len=32, heads=4, kv_heads=kv_heads, head_dim=16, pass_=pass_, **fields)  # pyright: ignore
    assert mutations.Bench("cpu").verdict(Contiguous(), workload) == ("ok", "")


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["torch.eager", "torch.sdpa", "numpy.reference"])
@pytest.mark.parametrize(
    "fields",
    [
        {"batch": 2, "q_len": 13, "kv_len": 1, "heads": 3, "head_dim": 5},
        {"batch": 1, "q_len": 1, "heads": 1, "head_dim": 8, "dtype": "float64"},
        {"batch": 1, "q_len": 1, "heads": 2, "head_dim": 16, "dtype": "float64"},
    ],
    ids=str,
)
def test_gradients_that_are_0_at_any_scale_and_place(name: str, fields: dict[str, Any], seed: int):
    """Of a query that sees one key dQ and dK are 0, and only rounding is left to compare."""
    assert mutations.Bench("cpu").verdict(registry.get(name), Workload(pass_="train", **fields), seed) == ("ok", "")


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("bias", ["all", "three rows"])
def test_an_lse_of_float32_below_a_large_bias(dtype: str, bias: str):
    values = np.random.default_rng(0).normal(size=(7, 40)) - (1e4 if bias == "all" else 0)
    if bias != "all":
        values[:3] = -1e9
    workload = Workload(batch=1, q_len=7, kv_len=40, heads=2, head_dim=64, dtype=dtype, mask=masks.dense(values))  # pyright: ignore
    for name in ("numpy.reference", "torch.eager"):
        assert mutations.Bench("cpu").verdict(registry.get(name), workload) == ("ok", ""), name


def opened(implementation: Implementation, pass_: str) -> Session:
    """A session that examines the implementation, as a worker makes it."""
    framework, workload = frameworks.get("torch"), Workload(batch=1, q_len=16, heads=2, head_dim=8, pass_=pass_)  # pyright: ignore
    cell = Cell(implementation.name, workload)
    session = Session(framework, framework.environment("cpu"), implementation, cell, Options())
    session.open(Draws(framework, "cpu", workload, 0))
    return session


@pytest.mark.parametrize("pass_", ["forward", "train"])
def test_a_first_call_that_is_wrong_is_found(pass_: str):
    with pytest.raises(Wrong, match="wrong in the first call only, out"):
        opened(WrongAtFirst(), pass_)
    opened(Eager(), pass_)


@pytest.mark.parametrize("scale", [1e-3, 1e-5, 1e-7])
def test_pairs_are_counted_by_finite_inputs_at_any_scale(scale: float):
    workload = Workload(batch=1, q_len=16, heads=2, head_dim=8, dtype="float16", scale=scale, pass_="train")
    drawn = counted_pairs(frameworks.get("torch"), "cpu", workload, np.full(16, 16), 0)
    assert all(torch.isfinite(array).all() for array in drawn)


@pytest.mark.parametrize("name", ["torch.eager", "torch.sdpa-math", "numpy.float32", "jax.einsum"])
@pytest.mark.parametrize(
    "fields",
    [
        {"dtype": "float16", "scale": 1e-5},
        {"dtype": "float16", "scale": 1e-3, "mask": masks.causal()},
        {"dtype": "float32", "scale": 1e-20},
        {"dtype": "bfloat16", "scale": 1e-20},
        {"dtype": "float32", "softcap": 0.1},
        {"dtype": "bfloat16", "softcap": 0.3, "mask": masks.causal()},
    ],
    ids=str,
)
def test_a_tiny_scale_or_soft_cap(name: str, fields: dict[str, Any]):
    """Inputs that make logits large stay finite, a soft cap keeps a slope, and gradients may underflow."""
    if not frameworks.installed(name.partition(".")[0]):
        pytest.skip("not installed")
    workload = Workload(batch=1, q_len=24, heads=2, head_dim=16, pass_="train", **fields)
    status, reason = mutations.Bench("cpu").verdict(registry.get(name), workload)
    assert status in ("ok", "unsupported"), reason


class Refuses(Eager):
    """As kernels whose backward pass asks for a contiguous dO, and checks it."""

    def call(self, inner: Any, arrays: Any) -> Any:
        out = inner(*arrays)
        out.register_hook(self.check)
        return out

    def check(self, dout: Any) -> None:
        assert dout.is_contiguous(), "dO is not contiguous"


@pytest.mark.parametrize("kernel", [Eager(), Refuses()], ids=lambda kernel: type(kernel).__name__)
def test_a_backward_pass_that_refuses_a_strided_dout_passes_without_the_property(kernel: Eager):
    workload = Workload(batch=1, q_len=16, heads=2, head_dim=8, pass_="train")
    properties = examine(mutations.Bench("cpu").subject(kernel, workload), thorough=False).errors.properties
    assert ("dO in any order of memory" in properties) == (type(kernel) is Eager)


@pytest.mark.parametrize("name", ["torch.sdpa-flash", "torch.sdpa-math", "torch.eager"])
@pytest.mark.parametrize("kind", ["normal", "ALiBi"])
@pytest.mark.parametrize("seed", range(3))
def test_training_in_16_bits_under_a_bias(name: str, kind: str, seed: int):
    """Keys whose weights differ by orders of magnitude: rounding of a large term hides a small one."""
    rows, keys, heads = 64, 128, 8
    if kind == "normal":
        bias = 3 * np.random.default_rng(0).standard_normal((heads, rows, keys))
    else:
        distance = np.abs(np.arange(rows)[:, None] + keys - rows - np.arange(keys))
        bias = -distance * (2.0 ** -np.arange(1, heads + 1))[:, None, None]
    workload = Workload(
        batch=2, q_len=rows, kv_len=keys, heads=heads, kv_heads=2, head_dim=32, dtype="bfloat16", pass_="train",
        mask=masks.dense(bias.astype(np.float32)),
    )  # fmt: skip
    assert mutations.Bench("cpu").verdict(registry.get(name), workload, seed) in (("ok", ""), ("unsupported", ANY))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("backward", [masks.causal("top-left"), masks.window(3, 0), None], ids=str)
def test_wrong_gradients_under_a_bias(dtype: str, backward: Any):
    """A backward pass under a bias that forgets it, or hides other keys, is found."""
    bias = masks.dense(2 * np.random.default_rng(1).standard_normal((1, 4, 48, 48)).astype(np.float32))
    workload = Workload(batch=1, q_len=48, heads=4, head_dim=16, dtype=dtype, pass_="train", mask=bias)  # pyright: ignore
    other = mutations.changed(workload, mask=backward if backward is None else bias & backward)
    kernel = mutations.Kernel(workload, backward=other)
    status, reason = mutations.Bench("cpu").verdict(mutations.Mutant("mutant", kernel), workload)
    assert status == "incorrect", reason


class Switches(Eager):
    """As kernels that take another path after some calls."""

    later: Any = None

    def call(self, inner: Any, arrays: Any) -> Any:
        return inner(*arrays) if self.later is None else self.later(*arrays)


@pytest.mark.parametrize(
    "mistake",
    [{"overflows": True}, {"fill": -100.0}, {"padding": "value"}, {"clamp": 8.0}, {"value_clamp": 20.0}],
    ids=str,
)
def test_a_path_that_changes_after_the_examination_is_examined_too(mistake: dict[str, Any]):
    workload = Workload(batch=1, q_len=32, heads=2, head_dim=16, mask=masks.causal())
    kernel = Switches()
    subject = mutations.Bench("cpu").subject(kernel, workload)
    examine(subject, thorough=False)
    examine_after(subject)
    kernel.later = mutations.Mutant("mutant", mutations.Kernel(workload, **mistake)).build(workload, {})
    with pytest.raises(Wrong):
        examine_after(subject)


class Pool(Eager):
    """As kernels that write their results into few buffers by turns, at a pace at which a visit has one call."""

    def __init__(self) -> None:
        self.buffers: list[Any] = []

    def call(self, inner: Any, arrays: Any) -> Any:
        out = inner(*arrays)
        self.buffers = [out, *self.buffers] if len(self.buffers) < 6 else self.buffers[-1:] + self.buffers[:-1]
        return self.buffers[0].copy_(out)


def test_a_result_that_a_much_later_call_overwrites():
    workload = Workload(batch=1, q_len=16, heads=2, head_dim=8)
    status, reason = mutations.Bench("cpu").verdict(Pool(), workload)
    assert (status, reason) == ("incorrect", "overwrites the result of its previous call")


@pytest.mark.parametrize("pass_", ["forward", "train"])
@pytest.mark.parametrize("scale", [3e-4, 1e-5])
@pytest.mark.parametrize("name", ["torch.eager", "torch.sdpa-flash", "torch.sdpa-math"])
def test_products_of_queries_and_keys_are_finite_in_float16(name: str, scale: float, pass_: str):
    workload = Workload(batch=1, q_len=64, heads=2, head_dim=32, dtype="float16", scale=scale, pass_=pass_)  # pyright: ignore
    assert mutations.Bench("cpu").verdict(registry.get(name), workload) == ("ok", "")


class OfFirstDout(torch.autograd.Function):
    """Identity whose gradient is read with the strides that dO had in the first call with such strides of Q."""

    @staticmethod
    def forward(ctx: Any, out: Any, plans: dict[Any, Any], key: Any) -> Any:
        ctx.plans, ctx.key = plans, key
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        dout = grads[0] if grads[0].stride(-1) == 1 else grads[0].contiguous()
        return dout.as_strided(dout.shape, ctx.plans.setdefault(ctx.key, dout.stride())), None, None


class KeepsPlans(Eager):
    """As torch's cuDNN backward, which keeps a plan by the strides of Q, K and V alone."""

    def __init__(self) -> None:
        self.plans: dict[Any, Any] = {}

    def call(self, inner: Any, arrays: Any) -> Any:
        return OfFirstDout.apply(inner(*arrays), self.plans, tuple(x.stride() for x in arrays))


def test_a_plan_for_the_first_order_of_dout_is_noted():
    workload = Workload(batch=1, q_len=16, heads=2, head_dim=8, pass_="train")
    found = examine(mutations.Bench("cpu").subject(KeepsPlans(), workload), thorough=False)
    assert found.notes == (DEPENDS_ON_DOUT,)
    assert "dO in any order of memory" not in found.errors.properties


class ReadsDense(Eager):
    """As kernels that get pointers and no strides."""

    def call(self, inner: Any, arrays: Any) -> Any:
        return inner(*(x.as_strided(x.shape, torch.empty(x.shape).stride()) for x in arrays))


@pytest.mark.parametrize("pass_", ["forward", "train"])
def test_a_kernel_for_dense_arrays_says_so(pass_: str):
    workload = Workload(batch=2, q_len=16, heads=2, head_dim=8, pass_=pass_)  # pyright: ignore
    found = examine(mutations.Bench("cpu").subject(ReadsDense(), workload), thorough=False)
    (note,) = found.notes
    assert note.startswith("takes dense arrays only: the output is wrong if Q, K and V are views (batch 0, head 0")
    right = examine(mutations.Bench("cpu").subject(Eager(), workload), thorough=False)
    assert right.notes == ()
    assert "Q, K and V in any order of memory" in right.errors.properties


class KeepsMaximum(Eager):
    """As kernels with delayed scaling: exponentials of logits minus the largest one of the call before."""

    def __init__(self, dtype: Any) -> None:
        self.dtype, self.largest = dtype, None

    def call(self, inner: Any, arrays: Any) -> Any:
        q, k, v = (x.transpose(1, 2).float() for x in arrays)
        logits = q @ k.mT * q.shape[-1] ** -0.5
        own = float(logits.detach().amax())
        start, self.largest = own if self.largest is None else self.largest, own
        for largest in (start, own):
            powers = (logits - largest).exp().to(self.dtype).float()
            out = powers @ v / powers.sum(-1, keepdim=True)
            if bool(out.isfinite().all()):
                return out.to(arrays[0].dtype).transpose(1, 2).contiguous()
        return inner(*arrays)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_maximum_that_is_kept_from_call_to_call(dtype: Any):
    workload = Workload(batch=1, q_len=32, heads=2, head_dim=16)
    status, reason = mutations.Bench("cpu").verdict(KeepsMaximum(dtype), workload)
    assert status == "incorrect", reason


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("mistake", [{"skips": float(np.exp(-8))}, {"replaces_nan": True}], ids=str)
@pytest.mark.parametrize("n", [64, 256])
def test_light_keys_count_and_nan_shows(dtype: str, mistake: dict[str, Any], n: int):
    workload = Workload(batch=1, q_len=n, heads=2, head_dim=16, dtype=dtype, mask=masks.causal())  # pyright: ignore
    bench = mutations.Bench("cpu")
    assert bench.verdict(mutations.Mutant("right", mutations.Kernel(workload)), workload) == ("ok", "")
    status, reason = bench.verdict(mutations.Mutant("mutant", mutations.Kernel(workload, **mistake)), workload)
    assert status == "incorrect", reason


def test_a_kernel_that_refuses_nan_passes():
    class Refuses(Eager):
        def call(self, inner: Any, arrays: Any) -> Any:
            assert all(bool(x.isfinite().all()) for x in arrays)
            return inner(*arrays)

    workload = Workload(batch=1, q_len=16, heads=2, head_dim=8, mask=masks.causal())
    assert mutations.Bench("cpu").verdict(Refuses(), workload) == ("ok", "")


def test_a_ring_of_buffers_that_is_longer_than_any_visit():
    class Ring(Eager):
        buffers: list[Any] = []
        calls = 0

        def call(self, inner: Any, arrays: Any) -> Any:
            out, at = inner(*arrays), self.calls % 500
            self.calls += 1
            if len(self.buffers) <= at:
                self.buffers.append(out)
            return self.buffers[at].copy_(out)

    session = opened(Ring(), "forward")
    inputs = session._call_inputs(2)
    for n in range(500):
        session.programs.main.run(session.programs.main.prepare(inputs[n % 2]))
    with pytest.raises(Wrong, match="overwrites the result of an earlier call"):
        session.examine_after()


class ScalesInPlace(Eager):
    """As kernels that fold the scale into K in place, and restore its bits afterwards."""

    def call(self, inner: Any, arrays: Any) -> Any:
        q, k, v = arrays
        k.mul_(2.0)
        out = inner(q / 2, k, v)
        k.mul_(0.5)
        return out


def test_a_kernel_that_changes_k_for_a_moment_is_wrong_if_v_is_k():
    workload = Workload(batch=1, q_len=16, heads=2, head_dim=8)
    status, reason = mutations.Bench("cpu").verdict(ScalesInPlace(), workload)
    assert (status, reason.partition(":")[0]) == ("incorrect", "the output is wrong if V is the same array as K")


class OtherGradient(Eager):
    """Whose call that returns the LSE has no gradient through its weights."""

    def build_lse(self, workload: Workload, config: Config) -> Any:
        inner = registry.get("torch.eager").build_lse(workload, {})
        assert inner is not None

        def call(q: Any, k: Any, v: Any) -> Any:
            out, lse = inner(q.detach(), k.detach(), v)
            return out + 0 * (q.sum() + k.sum()), lse

        return call


def test_the_gradient_of_the_call_that_returns_the_lse():
    workload = Workload(batch=1, q_len=16, heads=2, head_dim=8, pass_="train")
    status, reason = mutations.Bench("cpu").verdict(OtherGradient(), workload)
    assert (status, reason.partition(":")[0]) == ("incorrect", "the call that returns the LSE gives another dq")


@pytest.mark.parametrize("kept", [0, 3 << 20])
def test_what_a_kernel_keeps_is_counted_without_the_copies_of_its_first_result(
    monkeypatch: pytest.MonkeyPatch, kept: int
):
    class Keeps(Eager):
        workspace: Any = None

        def call(self, inner: Any, arrays: Any) -> Any:
            self.workspace = torch.empty(kept, dtype=torch.uint8) if self.workspace is None else self.workspace
            return inner(*arrays)

    def held(framework: Any, device: str) -> int:
        tensors = [one for one in gc.get_objects() if isinstance(one, torch.Tensor)]
        return sum({one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}.values())

    monkeypatch.setattr(type(frameworks.get("torch")), "held", held)
    monkeypatch.setattr("attnbench.measuring.session.UNSEEN_BYTES", 1)
    gc.collect()
    assert opened(Keeps(), "train")._kept_bytes == kept


def test_an_implementation_that_keeps_what_it_was_built_for_last():
    class Last(Eager):
        def build(self, workload: Workload, config: Config) -> Any:
            self.inner = registry.get("torch.eager").build(workload, {})
            return lambda *arrays: self.inner(*arrays)

    workload = Workload(batch=1, q_len=600, heads=2, head_dim=8, mask=masks.window(100, 0))
    kernel, bench = Last(), mutations.Bench("cpu")
    with pytest.raises((Wrong, RuntimeError)):
        examine(bench.subject(kernel, workload), thorough=True, build=lambda w: kernel.build(w, {}))
    examine(bench.subject(kernel, workload), thorough=False)


@pytest.mark.parametrize("pass_", ["forward", "backward", "train"])
@pytest.mark.parametrize("name", ["torch.eager", "torch.sdpa-math"])
def test_a_scale_of_0_in_float16(name: str, pass_: str):
    workload = Workload(batch=1, q_len=24, heads=2, head_dim=16, dtype="float16", scale=0.0, pass_=pass_)  # pyright: ignore
    assert mutations.Bench("cpu").verdict(registry.get(name), workload) == ("ok", "")


def test_a_scale_whose_effect_is_too_small_to_square():
    workload = Workload(
        batch=1, q_len=24, heads=2, head_dim=16, mask=masks.window(1), softcap=1e4, scale=-1.0, pass_="backward"
    )
    assert mutations.Bench("cpu").verdict(registry.get("torch.eager"), workload) == ("ok", "")


def test_queries_keys_and_values_in_one_array():
    class Scales(Eager):
        def call(self, inner: Any, arrays: Any) -> Any:
            q, k, v = arrays
            q.mul_(2.0)
            out = inner(q / 2, k, v)
            q.mul_(0.5)
            return out

    status, reason = mutations.Bench("cpu").verdict(Scales(), Workload(batch=1, q_len=16, heads=2, head_dim=8))
    assert (status, reason.partition(":")[0]) == (
        "incorrect", "the output is wrong if Q, K and V are the same array"
    )  # fmt: skip


class AddsToWhatWasThere(Eager):
    """As kernels that add to a buffer which nobody has cleared: new memory of this size holds zeros."""

    def call(self, inner: Any, arrays: Any) -> Any:
        sums = torch.empty(1 << 24)
        return inner(*arrays) + sums[:1]


class ReadsBehind(Eager):
    """As kernels that read whole tiles, and give weight 0 to what lies behind the last value."""

    def call(self, inner: Any, arrays: Any) -> Any:
        v = arrays[2]
        end = v.storage_offset() + v.numel()
        behind = v.as_strided((1,), (1,), end) if v.untyped_storage().nbytes() > end * v.element_size() else 0.0
        return inner(*arrays) + 0.0 * behind


@pytest.mark.parametrize(
    ("kernel", "reason", "held"),
    [
        (AddsToWhatWasThere(), "new memory does not hold zeros", "no unwritten memory is read"),
        (ReadsBehind(), "NaN lies beside its inputs in memory", "nothing is read beyond its inputs"),
    ],
    ids=["unwritten", "behind"],
)
@pytest.mark.parametrize("pass_", ["forward", "train"])
def test_a_kernel_that_reads_what_nobody_wrote(kernel: Eager, reason: str, held: str, pass_: str):
    workload = Workload(batch=1, q_len=16, heads=2, head_dim=8, pass_=pass_)  # pyright: ignore
    bench = mutations.Bench("cpu")
    status, why = bench.verdict(kernel, workload)
    assert (status, reason in why) == ("incorrect", True), why
    assert held in examine(bench.subject(Eager(), workload), thorough=False).errors.properties


def _biased(seed: int, heads: int, q_len: int, kv_len: int, size: float) -> Any:
    drawn = np.random.default_rng(seed).standard_normal((heads, q_len, kv_len))
    return masks.dense((size * drawn).astype(np.float32))


@pytest.mark.parametrize(
    ("name", "seed", "fields"),
    [
        # Weights from an LSE of 100 in float32 do not add up to 1 by many ulp.
        ("", 1, {"q_len": 129, "kv_len": 64, "heads": 9, "kv_heads": 3, "head_dim": 1, "v_head_dim": 3, "scale": 8.0}),
        # The derivative of a soft cap is what is left of 1 less nearly 1.
        (
            "torch.eager", 1,
            {
                "batch": 5, "q_len": 129, "kv_len": 3, "heads": 2, "kv_heads": 1, "head_dim": 100, "v_head_dim": 65,
                "mask": masks.causal(), "scale": -1.0, "softcap": 0.3,
            },
        ),
        # Biases of 60 round every logit, which the plain implementation avoids.
        (
            "torch.eager", 2,
            {
                "batch": 3, "q_len": 257, "kv_len": 65, "heads": 4, "kv_heads": 2, "head_dim": 64, "v_head_dim": 1,
                "mask": _biased(2, 4, 257, 65, 20),
            },
        ),
        (
            "", 3,
            {
                "batch": 2, "q_len": 17, "kv_len": 9, "heads": 3, "head_dim": 4, "v_head_dim": 3,
                "mask": _biased(3, 3, 17, 9, 20),
            },
        ),
        # Logits of 10,000 are rounded before a soft cap of 15 makes them small.
        (
            "torch.eager", 1,
            {
                "batch": 2, "q_len": 7, "heads": 3, "head_dim": 160, "v_head_dim": 128, "mask": masks.causal(),
                "scale": 8.0, "softcap": 15.0, "pass_": "forward",
            },
        ),
        # One query moves the gradients of both keys: they are no two estimates of the scale.
        (
            "torch.eager", 1,
            {
                "batch": 5, "q_len": 2, "kv_len": 513, "heads": 2, "kv_heads": 1, "head_dim": 160, "v_head_dim": 3,
                "mask": masks.causal("top-left"), "scale": 2.0, "dtype": "bfloat16",
            },
        ),
        # The mean of two values lies half way between two numbers of bfloat16, and a tiny scale decides which it is.
        (
            "", 2,
            {
                "batch": 5, "q_len": 300, "kv_len": 2, "heads": 2, "kv_heads": 1, "head_dim": 8, "v_head_dim": 3,
                "scale": 1e-5, "softcap": 50.0, "dtype": "bfloat16",
            },
        ),
        # Pairs cannot be counted in one channel.
        (
            "torch.eager", 1,
            {
                "batch": 1, "q_len": 63, "kv_len": 13, "heads": 3, "kv_heads": 1, "head_dim": 1, "softcap": 0.3,
                "mask": _biased(1, 3, 63, 13, 5),
            },
        ),
        # The plain implementation in float64 is the reference itself, which says nothing of rounding.
        (
            "torch.sdpa", 2,
            {
                "batch": 3, "q_len": 17, "heads": 3, "kv_heads": 1, "head_dim": 160, "v_head_dim": 65,
                "mask": masks.causal(), "scale": 8.0, "dtype": "float64",
            },
        ),
    ],
    ids=["lse", "soft-cap", "bias", "bias-gradients", "capped-lse", "one-query", "half-way", "one-channel", "float64"],
)  # fmt: skip
def test_large_logits_few_keys_and_one_channel(name: str, seed: int, fields: dict[str, Any]):
    workload = Workload(**{"batch": 1, "dtype": "float32", "pass_": "train", **fields})
    kernel = registry.get(name) if name else mutations.Mutant("right", mutations.Kernel(workload))
    assert mutations.Bench("cpu").verdict(kernel, workload, seed) == ("ok", "")
