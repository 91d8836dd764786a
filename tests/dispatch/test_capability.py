"""What `auto` takes on GPUs that are not here: the choice alone, for environments as those GPUs have them."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

import attnbench as ab
from attnbench import registry
from attnbench.dispatch import choice, demand
from attnbench.dispatch.choice import decide
from attnbench.dispatch.demand import Demand
from attnbench.errors import PolicyWarning, Unsupported
from attnbench.impls.partial import torch_choice
from attnbench.impls.partial.torch_choice import Rules, ruled_out
from attnbench.impls.torch import _compile as torch_compile
from attnbench.impls.torch import flash_attention as torch_flash
from attnbench.policy import stack
from attnbench.spec import Environment, Implementation

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore::attnbench.errors.PolicyWarning")]
CHIPS = {
    "V100": (7, 0), "T4": (7, 5), "A100": (8, 0), "A10": (8, 6), "L4": (8, 9), "H100": (9, 0), "B200": (10, 0),
    "RTX 5090": (12, 0),
}  # fmt: skip
CAUSAL = ab.masks.causal()
HALF = ("float16", "bfloat16")


def torch_of(chip: str) -> Environment:
    packages = {"torch": "2.13.0", "triton": "3.6.0"}
    return Environment(device="cuda", device_name=chip, framework="torch", capability=CHIPS[chip], packages=packages)


def every_device_is(monkeypatch, environment):
    """Let every device be the one of an environment."""
    for module in (demand, choice):
        monkeypatch.setattr(module, "environment_of", lambda framework, device: environment)


@pytest.fixture(params=CHIPS)
def chip(request, monkeypatch) -> str:
    on(monkeypatch, request.param)
    return request.param


def on(monkeypatch, chip: str) -> None:
    """The process as if it ran there, with Triton installed and no policy but the packaged ones' absence."""
    every_device_is(monkeypatch, torch_of(chip))
    monkeypatch.setattr(torch_compile, "needs_package", lambda *_: None)


def shape(**fields) -> ab.Workload:
    return ab.Workload(**{"batch": 1, "q_len": 512, "heads": 8, "head_dim": 64, "dtype": "float16", **fields})


def picked(workload: ab.Workload, framework: str = "torch", **more) -> str:
    found = decide("auto", Demand(workload, framework, "cuda", **more))
    assert found.pick is not None
    return found.pick.name


def torchs_own_rules(backend: str, chip: tuple[int, int], workload: ab.Workload) -> bool:
    """What torch's own checks (sdp_utils.cpp, 2.11 to 2.13) say of a backend, of a plain causal call."""
    half, dim = workload.dtype in HALF, workload.head_dim
    if backend == "flash":
        small = (8, 6) <= chip <= (8, 9) or (12, 0) <= chip <= (12, 1)
        trains = not (workload.needs_gradients and small and 192 < dim <= 224)
        return half and chip >= (8, 0) and dim <= 256 and trains
    if backend == "efficient":
        return chip >= (5, 0) and (workload.dtype in ("float16", "float32") or (half and chip >= (8, 0)))
    return half and chip >= (8, 0) and dim <= (256 if chip == (9, 0) else 128)


@pytest.mark.parametrize("pass_", ["forward", "train"])
@pytest.mark.parametrize("dim", [64, 128, 192, 208, 224, 256])
@pytest.mark.parametrize("dtype", [*HALF, "float32"])
def test_a_pinned_backend_is_refused_where_torch_refuses_it(chip, dtype, dim, pass_):
    workload = shape(head_dim=dim, dtype=dtype, mask=CAUSAL, pass_=pass_)
    for backend in ("flash", "efficient", "cudnn"):
        one, where = registry.get(f"torch.sdpa-{backend}"), torch_of(chip)
        reason = one.available(where) or one.supports(workload, where)
        assert (reason is None) == torchs_own_rules(backend, CHIPS[chip], workload), (backend, reason)


@pytest.mark.parametrize("pass_", ["forward", "train"])
@pytest.mark.parametrize("fields", [
    {}, {"head_dim": 256}, {"head_dim": 208}, {"dtype": "bfloat16"}, {"dtype": "bfloat16", "head_dim": 256},
    {"dtype": "float32"}, {"kv_heads": 2, "dtype": "bfloat16"}, {"kv_heads": 2, "dtype": "float32"}, {"softcap": 30.0},
    {"mask": ab.masks.window(64)}, {"mask": ab.masks.lengths([300])}, {"q_len": 1, "kv_len": 700, "mask": None},
], ids=str)  # fmt: skip
def test_auto_takes_what_can_run(chip, fields, pass_):
    workload = shape(**{"mask": CAUSAL, "pass_": pass_, **fields})
    name = picked(workload)
    backend = name.removeprefix("torch.sdpa-")
    if backend != name:
        assert torchs_own_rules(backend, CHIPS[chip], workload)
    if name == "torch.flex":
        assert workload.dtype != "bfloat16" or CHIPS[chip] >= (8, 0)
    tile, _ = torch_choice_on(chip, shape(**{"mask": CAUSAL, "pass_": "train", **fields} | {"mask": CAUSAL}))
    assert tile.startswith("torch.")


def torch_choice_on(chip: str, workload: ab.Workload):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_choice, "environment_of", lambda framework, device: torch_of(chip))
        torch_choice.choose.cache_clear()
        found = torch_choice.choose("auto", workload, "cuda")
        torch_choice.choose.cache_clear()
    backend = found[0].removeprefix("torch.sdpa-")
    assert backend == found[0] or torchs_own_rules(backend, CHIPS[chip], workload)
    return found


@pytest.mark.parametrize(("name", "chips"), {
    "torch.fa3": ("H100",), "torch.fa4": ("H100", "B200"),
    "torch.flash-attn": ("A100", "A10", "L4", "H100", "B200", "RTX 5090"),
}.items())  # fmt: skip
def test_generations_of_flash_attention(monkeypatch, name, chips):
    monkeypatch.setattr(torch_flash.conditions, "needs_package", lambda *_: None)
    monkeypatch.setattr(torch_flash, "fa3_module", lambda: "fa3")
    able = [chip for chip in CHIPS if registry.get(name).available(torch_of(chip)) is None]
    assert tuple(able) == chips


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_apples_gpu_takes_torchs_own_pick(monkeypatch, dtype):
    apple = Environment(device="mps", device_name="Apple M3", framework="torch")
    every_device_is(monkeypatch, apple)
    found = decide("auto", Demand(shape(dtype=dtype, mask=CAUSAL), "torch", "mps"))
    assert found.pick is not None
    assert found.pick.name == "torch.sdpa"


@pytest.mark.jax
@pytest.mark.parametrize("dim", [64, 256])
def test_cudnn_of_jax(chip, dim):
    name = picked(shape(head_dim=dim, dtype="bfloat16", mask=CAUSAL), "jax")
    wide = dim <= (256 if CHIPS[chip] == (9, 0) else 128)
    assert name == ("jax.cudnn" if CHIPS[chip] >= (8, 0) and wide else "jax.xla")


class TestNoCompilationForOneCall:
    """torch.flex compiles for seconds at every build: never for a token, a prompt length or a padding."""

    @pytest.mark.parametrize("fields", [
        {"q_len": 1, "kv_len": 700, "softcap": 50.0, "kv_heads": 4},
        {"q_len": 1, "kv_len": 701, "softcap": 50.0, "kv_heads": 4},
        {"q_len": 4, "kv_len": 900, "softcap": 50.0},
        {"q_len": 700, "softcap": 50.0, "mask": CAUSAL},
        {"q_len": 1, "kv_len": 700, "dtype": "float32", "kv_heads": 2},
        {"mask": ab.masks.lengths([300]), "kv_heads": 1, "softcap": 30.0},
        {"mask": ab.masks.documents(np.arange(512) // 100) & CAUSAL, "softcap": 30.0},
        {"mask": ab.masks.dense(np.random.default_rng(0).standard_normal((8, 512, 512)).astype(np.float32))},
        {"mask": ab.masks.lengths([300]), "softcap": 30.0, "pass_": "train"},
    ], ids=[
        "even", "odd", "few queries", "causal", "float32", "lengths", "documents", "dense", "train",
    ])  # fmt: skip
    def test_the_fixed_order(self, chip, fields):
        name = picked(shape(**{"dtype": "bfloat16", **fields}))
        assert not registry.get(name).compiles_each_plan

    def test_training_at_one_shape_may_compile(self, monkeypatch):
        on(monkeypatch, "A100")
        workload = shape(dtype="float32", kv_heads=2, mask=CAUSAL, pass_="train")
        assert picked(workload) == "torch.flex"
        data = shape(dtype="float32", kv_heads=2, mask=CAUSAL & ab.masks.lengths([300]), pass_="train")
        assert picked(data) == "torch.eager"

    def test_scores_that_are_too_large_are_not_stored(self, monkeypatch):
        on(monkeypatch, "A100")
        assert picked(shape(q_len=1 << 15, softcap=30.0, mask=CAUSAL)) == "torch.flex"

    @pytest.mark.parametrize("fields", [
        {"mask": ab.masks.lengths([1000, 900, 800, 700]), "batch": 4, "q_len": 1000, "heads": 8, "kv_heads": 1},
        {"q_len": 1, "kv_len": 700, "softcap": 50.0, "heads": 16, "kv_heads": 8},
    ], ids=["lengths", "decode"])  # fmt: skip
    def test_policies_that_come_with_attnbench(self, monkeypatch, fields):
        monkeypatch.undo()
        here = Environment(
            device="cuda", device_name="NVIDIA H200", framework="torch", capability=(9, 0),
            packages={"torch": "2.11.0+cu130", "triton": "3.6.0"},
        )  # fmt: skip
        every_device_is(monkeypatch, here)
        monkeypatch.setattr(torch_compile, "needs_package", lambda *_: None)
        assert stack.packaged()
        name = picked(shape(**{"head_dim": 256, "dtype": "bfloat16", **fields}))
        assert not registry.get(name).compiles_each_plan

    def test_a_graph_of_torch_compile_is_compiled_anyway(self, monkeypatch):
        on(monkeypatch, "A100")
        assert picked(shape(softcap=30.0, mask=CAUSAL), form="traced") == "torch.flex"

    def test_decoding_asks_only_for_what_takes_any_number_of_keys(self, chip):
        workload = shape(q_len=1, kv_len=700, softcap=50.0, dtype="bfloat16")
        assert registry.get(picked(workload, any_kv_len=True)).any_kv_len


class TestRules:
    """torch.use_deterministic_algorithms and the switches of SDPA, which `auto` obeys."""

    def test_nothing_that_is_not_deterministic(self, chip):
        for pass_ in ("forward", "train"):
            workload = shape(dtype="bfloat16", mask=CAUSAL, pass_=pass_)
            one = registry.get(picked(workload, rules=Rules(deterministic=True)))
            assert not one.not_deterministic

    def test_pairs_and_splits_are_as_their_parts(self):
        workload = shape(dtype="bfloat16", mask=CAUSAL, pass_="train")
        name, config = registry.asked("torch.pair[forward=torch.sdpa-flash,backward=torch.fa4]")
        pair = registry.get(name).configured(config)
        assert "deterministic" in str(ruled_out(pair, workload, Rules(deterministic=True)))
        assert "enable_flash_sdp" in str(ruled_out(pair, workload, Rules(off=("flash",))))
        assert ruled_out(pair, workload, Rules(off=("cudnn",))) is None
        other = registry.get(name).configured({"forward": "torch.fa4", "backward": "torch.sdpa-flash"})
        assert ruled_out(other, workload, Rules(deterministic=True)) is None
        assert ruled_out(registry.get("torch.sdpa-cudnn-split"), workload, Rules(deterministic=True)) is not None
        assert ruled_out(registry.get("torch.fa4"), shape(mask=CAUSAL), Rules(deterministic=True)) is None

    def test_a_backend_that_is_switched_off(self, monkeypatch):
        on(monkeypatch, "H100")
        workload = shape(dtype="bfloat16", mask=CAUSAL, pass_="train")
        assert picked(workload) == "torch.sdpa-cudnn"
        assert picked(workload, rules=Rules(off=("cudnn",))) == "torch.sdpa-flash"
        assert picked(workload, rules=Rules(off=("cudnn", "flash"))) == "torch.sdpa-efficient"

    def test_live_switches(self):
        import torch

        q, k, v = (torch.randn(1, 16, 2, 8) for _ in range(3))
        before = torch.backends.cuda.flash_sdp_enabled()
        assert ab.explain(q, k, v).pick == "torch.sdpa-flash"
        expected = ab.attention(q, k, v)
        torch.backends.cuda.enable_flash_sdp(False)
        try:
            assert ab.explain(q, k, v).pick == "torch.eager"
            torch.testing.assert_close(ab.attention(q, k, v), expected)
            assert operators(lambda: ab.attention(q, k, v)) == set()
            assert "flash" in str(operators(lambda: ab.attention(q, k, v, impl="torch.sdpa-flash")))
            assert not torch.backends.cuda.flash_sdp_enabled()
        finally:
            torch.backends.cuda.enable_flash_sdp(before)
        assert ab.explain(q, k, v).pick == "torch.sdpa-flash"
        assert "flash" in str(operators(lambda: ab.attention(q, k, v)))

    def test_our_own_pins_are_no_switches_of_the_user(self):
        from attnbench.impls.partial.torch_choice import current
        from attnbench.impls.torch._sdpa_pins import Pinned

        before = current()
        with Pinned("math"):
            assert current() == before


def operators(function) -> set[str]:
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        function()
    return {event.key for event in seen.key_averages() if "scaled_dot_product" in event.key}


class Broken(Implementation):
    """Says that it can, and cannot when it runs."""

    framework, layout, any_kv_len = "torch", "bhsd", True

    def __init__(self, name: str, error: Exception) -> None:
        self.name, self._error = name, error
        self._made: list[None] = []  # shared with copies, which `ab.attention` builds

    @property
    def calls(self) -> int:
        return len(self._made)

    def supports(self, workload, environment):
        return None

    def build(self, workload, config):
        def call(q, k, v):
            self._made.append(None)
            raise self._error

        return call

    def partial(self, workload, config):
        return self.build(workload, config), None


class TestACandidateThatCannotRun:
    @pytest.fixture
    def broken(self, monkeypatch):
        one = Broken("torch.sdpa-flash", Unsupported("torch.sdpa-flash has no kernel for this"))
        with registry.restored():
            registry.register(one)
            yield one

    def arrays(self):
        import torch

        return [torch.randn(1, 16, 2, 8) for _ in range(3)]

    def test_the_next_takes_its_place_and_is_remembered(self, broken):
        import torch

        q, k, v = self.arrays()
        expected = ab.attention(q, k, v, impl="torch.eager")
        with pytest.warns(PolicyWarning, match="could not run it .*torch.eager is used instead"):
            torch.testing.assert_close(ab.attention(q, k, v), expected)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            torch.testing.assert_close(ab.attention(q, k, v), expected)
        assert broken.calls == 1

    def test_a_named_one_raises(self, broken):
        with pytest.raises(Unsupported, match="no kernel for this"):
            ab.attention(*self.arrays(), impl="torch.sdpa-flash")

    def test_if_nobody_is_left_it_raises(self, broken):
        registry.register(Broken("torch.eager", Unsupported("torch.eager neither")))
        with pytest.raises(Unsupported, match="neither"):
            ab.attention(*self.arrays())

    def test_other_errors_are_not_swallowed(self):
        with registry.restored():
            registry.register(Broken("torch.sdpa-flash", RuntimeError("CUDA error: an illegal memory access")))
            with pytest.raises(RuntimeError, match="illegal memory access"):
                ab.attention(*self.arrays())

    def test_calls_like_it_do_not_try_again_and_explain_knows(self, broken):
        """A mask or length that is new makes a new plan; sizes of another power of two may have a kernel."""
        import torch

        q, k, v = self.arrays()
        assert ab.explain(q, k, v).pick == "torch.sdpa-flash"
        ab.attention(q, k, v)
        told = ab.explain(q, k, v)
        assert told.pick == "torch.eager"
        assert "could not run a call like this one: torch.sdpa-flash has no kernel" in str(told)
        longer = [torch.randn(1, 19, 2, 8) for _ in range(3)]
        ab.attention(*longer)
        ab.attention(*longer, scale=0.3)
        assert ab.explain(*longer).pick == "torch.eager"
        assert broken.calls == 1
        twice = [torch.randn(1, 32, 2, 8) for _ in range(3)]
        assert ab.explain(*twice).pick == "torch.sdpa-flash"
        ab.attention(*twice)
        assert broken.calls == 2

    def test_another_kind_of_call_is_not_affected(self, broken):
        ab.attention(*self.arrays())
        for other in ({"mask": CAUSAL}, {"return_lse": True}, {"softcap": 5.0}):
            ab.attention(*self.arrays(), **other)
        assert broken.calls == 3  # the LSE it does not give, the others it tried once each

    def test_if_nobody_is_left_it_is_tried_again(self, broken):
        registry.register(other := Broken("torch.eager", Unsupported("torch.eager neither")))
        for _ in range(2):
            with pytest.raises(Unsupported, match=r"torch\.eager neither"):
                ab.attention(*self.arrays())
        assert (broken.calls, other.calls) == (1, 2)

    @pytest.mark.parametrize("train", [False, True])
    @pytest.mark.parametrize("dynamic", [False, True])
    @pytest.mark.parametrize("traceable", [False, True])
    def test_it_gives_way_inside_torch_compile(self, broken, traceable, dynamic, train):
        import torch

        broken.traceable = traceable
        torch._dynamo.reset()
        compiled = torch.compile(lambda q, k, v: ab.attention(q, k, v), backend="aot_eager", fullgraph=True)
        for tokens in (16, 18):
            leaves = [torch.randn(1, tokens, 2, 8).requires_grad_(train) for _ in range(3)]
            if dynamic:
                for x in leaves:
                    torch._dynamo.mark_dynamic(x, 1)
            expected = ab.attention(*leaves, impl="torch.eager")
            found = compiled(*leaves)
            torch.testing.assert_close(found, expected)
            if train:
                weights = torch.randn_like(expected)
                want = torch.autograd.grad((expected * weights).sum(), leaves)
                torch.testing.assert_close(torch.autograd.grad((found * weights).sum(), leaves), want)
        assert broken.calls == 1

    def test_a_named_one_raises_inside_torch_compile(self, broken):
        import torch

        torch._dynamo.reset()
        compiled = torch.compile(lambda q, k, v: ab.attention(q, k, v, impl="torch.sdpa-flash"), backend="aot_eager")
        with pytest.raises(Exception, match="no kernel for this"):
            compiled(*self.arrays())
