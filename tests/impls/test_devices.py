"""Limits of every kernel on GPUs that are not here: device x implementation x head_dim x dtype x pass, from what the
libraries document and check. Everything counts as installed, in a build that leaves nothing out."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

import attnbench as ab
from attnbench import registry
from attnbench.impls import conditions
from attnbench.impls.torch import _compile, flash_attention, xformers
from attnbench.spec import Environment, Workload

CHIPS = {
    "V100": (7, 0), "T4": (7, 5), "A100": (8, 0), "A10": (8, 6), "L4": (8, 9), "H100": (9, 0), "B200": (10, 0),
    "RTX 5090": (12, 0),
}  # fmt: skip
AMPERE = ("A100", "A10", "L4", "H100", "B200", "RTX 5090")
ALL = ("V100", "T4", *AMPERE)
ROOMY = ("A100", "H100", "B200")
"""Chips whose shared memory holds flash-attention 2's gradients of head_dim 193 to 224."""

# implementation -> (dtype, head_dim, pass) -> chips that can run it; a case that is not named is refused everywhere
HALF_128 = {("float16", 128, "forward"): AMPERE, ("bfloat16", 128, "forward"): AMPERE}
TRAIN_128 = {("float16", 128, "train"): AMPERE, ("bfloat16", 128, "train"): AMPERE}
FLASH_2 = HALF_128 | TRAIN_128 | {
    ("float16", 256, "forward"): AMPERE, ("bfloat16", 256, "train"): AMPERE, ("bfloat16", 208, "forward"): AMPERE,
    ("bfloat16", 208, "train"): ROOMY,
}  # fmt: skip
CUDNN = HALF_128 | TRAIN_128 | {
    ("float16", 256, "forward"): ("H100",), ("bfloat16", 256, "train"): ("H100",),
    ("bfloat16", 208, "forward"): ("H100",), ("bfloat16", 208, "train"): ("H100",),
}  # fmt: skip
ANY_HALF = {
    ("float16", 128, "forward"): ALL, ("bfloat16", 128, "forward"): AMPERE, ("float16", 128, "train"): ALL,
    ("bfloat16", 128, "train"): AMPERE, ("float32", 128, "forward"): ALL, ("float32", 128, "train"): ALL,
    ("float16", 256, "forward"): ALL, ("bfloat16", 256, "train"): AMPERE, ("bfloat16", 208, "forward"): AMPERE,
    ("bfloat16", 208, "train"): AMPERE,
}  # fmt: skip
Able = dict[tuple[str, int, str], tuple[str, ...]]
EVERYTHING: Able = dict.fromkeys(
    [(dtype, dim, pass_) for dtype in ("float16", "bfloat16", "float32") for dim in (128, 208, 256)
     for pass_ in ("forward", "train")], ALL,
)  # fmt: skip
TABLE: dict[str, Able] = {
    "torch.eager": EVERYTHING,
    "torch.sdpa": EVERYTHING,
    "torch.sdpa-math": EVERYTHING,
    "torch.sdpa-flash": FLASH_2,
    "torch.sdpa-cudnn": CUDNN,
    "torch.sdpa-efficient": ANY_HALF,
    "torch.flex": ANY_HALF,
    "torch.flash-attn": FLASH_2,
    "torch.fa3": dict.fromkeys(FLASH_2, ("H100",)),
    "torch.fa4": {
        case: ("H100", "B200") if case[1] != 208 else ("H100",) for case in FLASH_2
    },
    "torch.xformers": ANY_HALF,
    "torch.flashinfer": {
        ("float16", 128, "forward"): ("T4", *AMPERE), ("bfloat16", 128, "forward"): AMPERE,
        ("float16", 256, "forward"): ("T4", *AMPERE),
    },
    "torch.sageattention": HALF_128,
    "torch.transformer-engine": HALF_128 | TRAIN_128 | {
        ("float16", 256, "forward"): AMPERE, ("bfloat16", 208, "forward"): AMPERE,
        ("bfloat16", 256, "train"): ("H100",), ("bfloat16", 208, "train"): ("H100",),
    },
    "jax.einsum": EVERYTHING,
    "jax.xla": EVERYTHING,
    "jax.cudnn": CUDNN,
    "jax.tokamax-cudnn": CUDNN,
    "jax.tokamax-mosaic": {
        case: ("H100", "B200") if case[2] == "train" else ("A100", "A10", "L4", "H100", "B200") for case in FLASH_2
    },
    "jax.tokamax-triton": dict.fromkeys(ANY_HALF, AMPERE),
    "jax.pallas-triton": HALF_128 | TRAIN_128 | {
        ("float32", 128, "forward"): AMPERE, ("float32", 128, "train"): AMPERE,
    },
    "jax.kvax": HALF_128 | TRAIN_128 | {("float16", 256, "forward"): AMPERE, ("bfloat16", 256, "train"): AMPERE},
    "jax.flash-attn": HALF_128 | TRAIN_128 | {
        ("float16", 256, "forward"): AMPERE, ("bfloat16", 256, "train"): AMPERE, ("bfloat16", 208, "forward"): AMPERE,
        ("bfloat16", 208, "train"): ROOMY,
    },
}  # fmt: skip
CASES = (
    ("float16", 128, "forward"), ("float16", 128, "train"), ("bfloat16", 128, "forward"), ("bfloat16", 128, "train"),
    ("float32", 128, "forward"), ("float32", 128, "train"), ("float16", 256, "forward"), ("bfloat16", 256, "train"),
    ("bfloat16", 208, "forward"), ("bfloat16", 208, "train"),
)  # fmt: skip


def gpu(chip: str, **fields: Any) -> Environment:
    packages = {"torch": "2.13.0", "triton": "3.6.0", "jax": "0.10.2"}
    made = {"device": "cuda", "device_name": chip, "capability": CHIPS.get(chip), "packages": packages}
    return Environment(**(made | fields))


def work(dtype: str = "bfloat16", dim: int = 128, pass_: Any = "forward", **fields: Any) -> Workload:
    sizes = {"batch": 1, "q_len": 512, "heads": 8, "mask": ab.masks.causal()}
    return Workload(**(sizes | {"head_dim": dim, "dtype": dtype, "pass_": pass_} | fields))


def why_not(name: str, on: Workload, environment: Environment) -> str | None:
    one = registry.get(name)
    where = structs.replace(environment, framework=one.framework)
    return one.available(where) or one.supports(on, where)


@pytest.fixture(autouse=True)
def everything_is_installed(monkeypatch):
    for module in (conditions, _compile, flash_attention, xformers):
        monkeypatch.setattr(module, "needs_package", lambda *_: None, raising=False)
        monkeypatch.setattr(module, "find_module", lambda name: name, raising=False)
    monkeypatch.setattr(flash_attention, "fa3_module", lambda: "flash_attn_interface")
    monkeypatch.setattr(flash_attention, "fa3_left_out", frozenset)


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("name", TABLE)
def test_what_runs_where(name, chip):
    for dtype, dim, pass_ in CASES:
        reason = why_not(name, work(dtype, dim, pass_), gpu(chip))
        able = chip in TABLE[name].get((dtype, dim, pass_), ())
        assert (reason is None) == able, (name, chip, dtype, dim, pass_, reason)
        assert reason is None or len(reason.split()) > 2, "a refusal is a clause that says why"


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_there_is_always_one_that_can(framework, chip):
    from attnbench.dispatch.choice import order_on

    shapes = [work(*case) for case in CASES]
    shapes += [
        work(mask=ab.masks.window(64, 0)), work(mask=ab.masks.prefix(100), pass_="train"), work(softcap=30.0),
        work(mask=ab.masks.lengths([300]) & ab.masks.causal()), work(q_len=1, kv_len=700, mask=ab.masks.full()),
        work("float32", 72, kv_heads=2), work(dim=192, v_head_dim=128), work(dim=36, pass_="train"),
        work("float64", 64),
    ]  # fmt: skip
    for on in shapes:
        assert any(why_not(name, on, gpu(chip)) is None for name in order_on(framework, "cuda")), on.id


@pytest.mark.parametrize(("device", "name", "able"), [
    ("rocm", "torch.sdpa", True), ("rocm", "torch.sdpa-flash", True), ("rocm", "torch.sdpa-efficient", True),
    ("rocm", "torch.sdpa-cudnn", False), ("rocm", "torch.flex", True), ("rocm", "torch.fa3", False),
    ("rocm", "torch.fa4", False), ("rocm", "torch.flash-attn", True), ("rocm", "torch.flashinfer", False),
    ("rocm", "torch.transformer-engine", False), ("rocm", "jax.cudnn", False), ("rocm", "jax.xla", True),
    ("xpu", "torch.sdpa", True), ("xpu", "torch.sdpa-flash", True), ("xpu", "torch.sdpa-efficient", False),
    ("xpu", "torch.sdpa-cudnn", False), ("xpu", "torch.flex", True), ("xpu", "torch.fa4", False),
    ("mps", "torch.sdpa", True), ("mps", "torch.sdpa-flash", False), ("mps", "torch.flex", False),
])  # fmt: skip
def test_other_vendors(device, name, able):
    there = Environment(device=device, device_name="Test GPU", packages={"torch": "2.13.0"})
    assert (why_not(name, work(), there) is None) == able


@pytest.mark.parametrize(("dim", "able"), [(64, True), (96, True), (128, True), (192, True), (80, False), (256, False)])
def test_head_dims_of_flash_on_an_xpu(dim, able):
    there = Environment(device="xpu", device_name="Test GPU")
    reason = why_not("torch.sdpa-flash", work(dim=dim), there)
    assert (reason is None) == able
    assert able or "takes head_dim 64, 96, 128 or 192 on an XPU" in str(reason)


@pytest.mark.parametrize("device", ["rocm", "xpu", "mps"])
def test_other_vendors_have_an_order(device):
    from attnbench.dispatch.choice import order_on

    there = Environment(device=device, device_name="Test GPU", packages={"torch": "2.13.0"})
    able = [name for name in order_on("torch", device) if why_not(name, work(dim=80), there) is None]
    assert able[0] == ("torch.sdpa-flash" if device == "rocm" else "torch.sdpa")


@pytest.mark.parametrize(("version", "chip", "able"), [
    ("1.0.6", "B200", True), ("2.2.0", "B200", False), ("2.2.0", "RTX 5090", True), ("2.2.0", "H100", True),
])  # fmt: skip
def test_versions_of_sageattention(version, chip, able):
    reason = why_not("torch.sageattention", work(), gpu(chip, packages={"sageattention": version}))
    assert (reason is None) == able
    assert able or "version 2 has no kernels for compute capability 10.0" in str(reason)


@pytest.mark.parametrize(("chip", "able"), [("A100", False), ("H100", True), ("B200", True), ("RTX 5090", True)])
def test_latent_heads_in_transformer_engine(chip, able):
    assert (
        why_not("torch.transformer-engine", work(dim=192, v_head_dim=128, pass_="train"), gpu(chip)) is None
    ) == able
    assert why_not("torch.transformer-engine", work(dim=192, v_head_dim=128), gpu(chip)) is None


def test_windows_of_xformers_need_the_flash_kernels():
    window = work("float16", mask=ab.masks.window(64, 0))
    assert "needs compute capability 8.0" in str(why_not("torch.xformers", window, gpu("T4")))
    assert why_not("torch.xformers", window, gpu("A100")) is None


@pytest.mark.parametrize("name", [
    "torch.sdpa-cudnn", "torch.flash-attn", "torch.fa3", "torch.fa4", "torch.xformers", "torch.transformer-engine",
])  # fmt: skip
def test_who_is_not_deterministic_says_so(name):
    assert "backward" in registry.get(name).not_deterministic


def test_block_sparse_triton_needs_hopper():
    one = registry.get("torch.block-sparse-triton")
    able = [chip for chip in CHIPS if one.available(structs.replace(gpu(chip), framework="torch")) is None]
    assert able == ["H100", "B200", "RTX 5090"]
