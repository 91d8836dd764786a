"""The optional torch engines against stand-in packages (fake_engines/) that carry the real ones' traps."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from cache_problem import Problem, must_agree

from attnbench import masks, spec
from attnbench.errors import Unsupported
from attnbench.impls.torch.flash_attention import FA2, FA3, FA4
from attnbench.impls.torch.flashinfer import FLASHINFER
from attnbench.impls.torch.sage import SAGE
from attnbench.impls.torch.transformer_engine import TRANSFORMER_ENGINE
from attnbench.impls.torch.xformers import XFORMERS

pytestmark = pytest.mark.torch

FAKES = Path(__file__).parent / "fake_engines"
ROOTS = {
    "plain_attention", "flash_attn", "flash_attn_interface", "flash_attn_config", "fa3_fwd_interface", "fa3_fwd_config",
    "cutlass", "xformers", "flashinfer", "sageattention", "transformer_engine",
}  # fmt: skip
FOLDERS = {
    "torch.flash-attn": "fa2",
    "torch.fa3": "fa3_full",
    "torch.fa4": "fa4",
    "torch.xformers": "xformers",
    "torch.flashinfer": "flashinfer",
    "torch.sageattention": "sage1",
    "torch.transformer-engine": "te",
}
ENGINES = [FA2, FA3, FA4, XFORMERS, FLASHINFER, SAGE, TRANSFORMER_ENGINE]
H200 = spec.Environment(device="cuda", device_name="NVIDIA H200", capability=(9, 0))
CPU = spec.Environment(device="cpu", device_name="cpu")


def _forget():
    for name in list(sys.modules):
        if name.partition(".")[0] in ROOTS:
            del sys.modules[name]


@pytest.fixture
def install(monkeypatch):
    """install("fa4", ...): put stand-ins on the path of a process that knows none of the packages."""
    real = sorted(name for name in ROOTS if find_spec(name) is not None)
    if real:
        pytest.skip(f"a stand-in must not meet the real {', '.join(real)}")
    # Set, then deleted, so that what an engine sets is undone after the test.
    monkeypatch.setenv("NVTE_UNFUSED_ATTN", "0")
    monkeypatch.delenv("NVTE_UNFUSED_ATTN")

    def put(*folders):
        for folder in ("math", *folders):
            monkeypatch.syspath_prepend(str(FAKES / folder))

    yield put
    _forget()


def work(**changes):
    base = {"batch": 2, "q_len": 7, "heads": 4, "kv_heads": 2, "head_dim": 64, "dtype": "bfloat16"}
    return spec.Workload(**{**base, **changes})


def arrays(w, seed=0):
    rng = np.random.default_rng(seed)
    shapes = [
        (w.batch, w.q_len, w.heads, w.head_dim),
        (w.batch, w.kv_len, w.kv_heads, w.head_dim),
        (w.batch, w.kv_len, w.kv_heads, w.value_dim),
    ]
    return [torch.tensor(rng.standard_normal(shape)).to(getattr(torch, w.dtype)) for shape in shapes]


def reference(w, q, k, v):
    """(out, lse) in float64 NumPy: SEMANTICS by hand."""
    q, k, v = (array.detach().double().numpy() for array in (q, k, v))
    k, v = (np.repeat(array, w.group, axis=2) for array in (k, v))
    logits = np.einsum("bihd,bjhd->bhij", q, k) * w.softmax_scale
    if w.softcap is not None:
        logits = w.softcap * np.tanh(logits / w.softcap)
    logits = logits + w.visible_mask.bias(w.mask_shape)
    with np.errstate(divide="ignore"):
        lse = np.log(np.exp(logits).sum(-1))
    weights = np.exp(logits - np.where(np.isfinite(lse), lse, 0.0)[..., None])
    return np.einsum("bhij,bjhd->bihd", weights, v), lse


def close(actual, expected, tolerance=1e-2):
    actual = actual.detach().double().numpy()
    assert actual.shape == expected.shape
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(actual[~finite], expected[~finite])
    np.testing.assert_allclose(actual[finite], expected[finite], atol=tolerance, rtol=tolerance)


def check(engine, w):
    """Right numbers and LSE, inputs untouched."""
    assert engine.available(H200) is None
    assert engine.supports(w, H200) is None
    inputs = arrays(w)
    before = [array.clone() for array in inputs]
    out, lse = reference(w, *inputs)
    close(engine.build(w, {})(*inputs), out)
    with_lse = engine.build_lse(w, {})
    if with_lse is not None:
        found, found_lse = with_lse(*inputs)
        close(found, out)
        close(found_lse, lse, 1e-4)
        assert found_lse.dtype == torch.float32
    assert all(torch.equal(a, b) for a, b in zip(inputs, before, strict=True)), "the call wrote to its inputs"


MASKS = {
    "full": masks.full(),
    "causal": masks.causal(),
    "window": masks.window(2),
    "two-sided": masks.window(2, 1),
    "left-open": masks.window(None, 2),
    "right-open": masks.window(2, None),
    "causal-by-window": masks.window(None, 0),
    "full-by-window": masks.window(None, None),
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("kv_len", [7, 11])
@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.name)
def test_what_it_claims_it_computes(engine, kv_len, mask, install):
    install(FOLDERS[engine.name])
    w = work(mask=mask, kv_len=kv_len, scale=0.3)
    if engine.supports(w, H200) is None:
        check(engine, w)
    else:
        assert kv_len != 7 or mask.id not in ("full", "causal"), "square full and causal are for all"


@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.name)
def test_default_scale_is_passed(engine, install):
    """The stand-ins apply scale 1 when none is passed."""
    install(FOLDERS[engine.name])
    check(engine, work(heads=2))


@pytest.mark.parametrize("engine", [FA2, FA3, FA4, FLASHINFER], ids=lambda engine: engine.name)
def test_softcap(engine, install):
    install(FOLDERS[engine.name])
    check(engine, work(softcap=1.5, mask=masks.causal()))


@pytest.mark.parametrize("engine", [XFORMERS, SAGE, TRANSFORMER_ENGINE], ids=lambda engine: engine.name)
def test_softcap_is_refused(engine):
    assert "softcap" in engine.supports(work(softcap=1.5), H200)


@pytest.mark.parametrize("engine", [FA2, FA3, FA4], ids=lambda engine: engine.name)
@pytest.mark.parametrize("mask", [masks.causal(), masks.window(1, 0)], ids=["causal", "window"])
def test_rows_that_see_no_key_are_zero_with_lse_minus_inf(engine, mask, install):
    """flash-attn 2 writes +inf there."""
    install(FOLDERS[engine.name])
    w = work(q_len=9, kv_len=5, mask=mask)
    assert not np.isfinite(reference(w, *arrays(w))[1]).all()
    check(engine, w)


@pytest.mark.parametrize("engine", [XFORMERS, FLASHINFER, TRANSFORMER_ENGINE], ids=lambda engine: engine.name)
def test_rows_that_see_no_key_are_refused(engine):
    assert "see no key" in engine.supports(work(q_len=9, kv_len=5, mask=masks.causal()), H200)


@pytest.mark.parametrize("engine", [FA2, FA3, FA4, FLASHINFER], ids=lambda engine: engine.name)
def test_top_left_is_refused_unless_square(engine):
    rectangular, square = (work(kv_len=n, mask=masks.causal(align="top-left")) for n in (11, 7))
    assert "bottom-right" in engine.supports(rectangular, H200)
    assert engine.supports(square, H200) is None


@pytest.mark.parametrize("engine", [XFORMERS, TRANSFORMER_ENGINE], ids=lambda engine: engine.name)
def test_top_left_is_native(engine, install):
    install(FOLDERS[engine.name])
    check(engine, work(kv_len=11, mask=masks.causal(align="top-left")))


def test_sage_refuses_rectangular_causal():
    assert "q_len = kv_len" in SAGE.supports(work(kv_len=11, mask=masks.causal()), H200)


OTHER = [
    masks.prefix(2),
    masks.documents([0, 0, 0, 1, 1, 1, 1]),
    masks.blocks(np.ones((2, 2), bool), 4),
    masks.dense(np.zeros((7, 7), np.float32)),
    masks.dilated([4], [2]),
    masks.causal() & masks.lengths([7, 5]),
    masks.causal() & masks.window(3, 3),
]


@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.name)
def test_other_masks_are_refused(engine):
    for mask in OTHER:
        assert engine.supports(work(mask=mask), H200) is not None, mask.id


@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.name)
def test_other_devices_precisions_and_sizes_are_refused(engine, install):
    install(FOLDERS[engine.name])
    assert "this is cpu" in engine.available(CPU)
    assert engine.supports(work(dtype="float64"), H200) is not None
    assert engine.supports(work(head_dim=520, dtype="float16"), H200) is not None or engine is XFORMERS


@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.name)
def test_absent_package_says_what_brings_it(engine, install):
    install()
    assert "pip install" in engine.available(H200)


@pytest.mark.parametrize("engine", [FLASHINFER, SAGE], ids=lambda engine: engine.name)
def test_forward_only_engines_refuse_gradients(engine):
    assert "backward" in engine.supports(work(pass_="train"), H200)


def test_probes_import_nothing():
    """`available` of every engine, with every package there, loads neither torch nor the package."""
    code = (
        "import sys; from attnbench.spec import Environment; from attnbench import registry\n"
        "here = Environment(device='cuda', device_name='x', capability=(9, 0))\n"
        "from attnbench.impls.torch import flash_attention as f, xformers as x, flashinfer as i, sage as s\n"
        "from attnbench.impls.torch import transformer_engine as t\n"
        "engines = [f.FA2, f.FA3, x.XFORMERS, i.FLASHINFER, s.SAGE, t.TRANSFORMER_ENGINE]\n"
        "assert [e.available(here) for e in engines] == [None] * 6\n"
        "print(sorted({n.partition('.')[0] for n in sys.modules} & {'torch', 'flash_attn', 'xformers', 'flashinfer'}))"
    )
    folders = ("math", "fa2", "fa3_full", "xformers", "flashinfer", "sage1", "te")
    path = ":".join([str(Path(spec.__file__).parents[1]), *(str(FAKES / folder) for folder in folders)])
    result = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": path}, capture_output=True, text=True)
    assert result.stdout.strip() == "[]", result.stderr


def test_probe_finds_modules_inside_namespace_packages(install, monkeypatch, tmp_path):
    from attnbench.impls.conditions import find_module

    (tmp_path / "cutlass" / "inner").mkdir(parents=True)
    (tmp_path / "cutlass" / "inner" / "leaf.py").touch()
    install()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert find_module("cutlass.inner.leaf") is not None
    assert find_module("cutlass.inner.other") is None
    assert find_module("cutlass.inner.leaf.below") is None
    assert find_module("flash_attn.cute") is None


def test_fa4_alone_is_not_taken_for_fa2(install):
    install("fa4")
    assert "flash_attn.flash_attn_interface is not installed" in FA2.available(H200)
    assert FA4.available(H200) is None


def test_fa2_alone_is_not_taken_for_fa4(install):
    install("fa2")
    assert "flash_attn.cute is not installed" in FA4.available(H200)


def test_fa4_without_cutlass_on_the_path(install, monkeypatch, tmp_path):
    install()
    (tmp_path / "flash_attn").symlink_to(FAKES / "fa4" / "flash_attn")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "cutlass is not installed" in FA4.available(H200)


def test_xformers_beside_fa4_is_refused_and_would_die(install):
    install("fa4", "xformers")
    assert "FA4" in XFORMERS.available(H200)
    with pytest.raises(ImportError):
        XFORMERS.build(work(), {})


def test_xformers_beside_fa2_is_fine(install):
    install("fa2", "xformers")
    check(XFORMERS, work())


def test_fa3_stub_of_the_index_is_seen_through(install):
    install("fa3_stub")
    assert "stub" in FA3.available(H200)
    with pytest.raises(Unsupported, match="stub"):
        FA3.build(work(), {})


def test_fa3_forward_wheel_behind_the_stub_is_found(install):
    install("fa3_stub", "fa3_fwd")
    check(FA3, work(mask=masks.causal()))


def test_fa3_forward_wheel_refuses_what_it_was_built_without(install):
    install("fa3_fwd")
    assert "float16" in FA3.supports(work(dtype="float16"), H200)
    assert "window" in FA3.supports(work(mask=masks.window(2)), H200)
    assert "backward" in FA3.supports(work(pass_="train"), H200)
    assert FA3.partial(work(), {}) is None
    check(FA3, work(mask=masks.window(None, 0)))
    check(FA3, work(softcap=2.0))


def test_fa3_full_build_has_the_rest(install):
    install("fa3_full")
    for changes in ({"dtype": "float16"}, {"mask": masks.window(2)}, {"pass_": "train"}):
        assert FA3.supports(work(**changes), H200) is None


def test_fa3_that_always_returns_a_tuple(install):
    install("fa3_old")
    check(FA3, work(mask=masks.causal()))
    assert FA3.partial(work(), {}) is None


def test_fa3_without_lse_says_so(install, monkeypatch):
    install("fa3_old")
    module = pytest.importorskip("flash_attn_interface")
    with_lse = module.flash_attn_func
    monkeypatch.setattr(module, "flash_attn_func", lambda q, k, v, softmax_scale, causal: with_lse(q, k, v)[0])
    call = FA3.build_lse(work(), {})
    with pytest.raises(Unsupported, match="no LSE"):
        call(*arrays(work()))


@pytest.mark.parametrize(
    ("dims", "fine"), [((192, 128), True), ((64, 256), True), ((128, 64), False), ((60, 60), False)]
)
def test_fa3_head_sizes(dims, fine, install):
    install("fa3_fwd")
    w = work(head_dim=dims[0], v_head_dim=dims[1])
    assert (FA3.supports(w, H200) is None) == fine
    if fine:
        check(FA3, w)


def test_fa4_head_sizes_by_device():
    blackwell = spec.Environment(device="cuda", device_name="B200", capability=(10, 0))
    assert FA4.supports(work(head_dim=192), H200) is None
    assert "Blackwell" in FA4.supports(work(head_dim=192), blackwell)
    assert FA4.supports(work(head_dim=192, v_head_dim=128), blackwell) is None
    assert FA4.supports(work(head_dim=60), H200) is not None


def test_capabilities(install):
    install("fa3_full", "fa4")
    ampere, blackwell = (spec.Environment(device="cuda", device_name="x", capability=c) for c in ((8, 0), (10, 0)))
    assert "9.0" in FA3.available(ampere)
    assert "9.0" in FA4.available(ampere)
    assert "Hopper" in FA3.available(blackwell)
    assert FA4.available(blackwell) is None


@pytest.mark.parametrize("engine", [FA2, FA3, FA4], ids=lambda engine: engine.name)
def test_gradients_flow_through_the_call(engine, install):
    install(FOLDERS[engine.name])
    w = work(pass_="train", mask=masks.causal(), kv_len=9)
    inputs = [array.requires_grad_() for array in arrays(w)]
    found = torch.autograd.grad(engine.build(w, {})(*inputs).sum(), inputs)
    assert all(grad.abs().sum() > 0 for grad in found)


def _expected_gradients(w, inputs, dout):
    import plain_attention

    left, right = (None, 0) if w.visible_mask.id == "causal" else (w.visible_mask.left, w.visible_mask.right)
    leaves = [array.detach().double().requires_grad_() for array in inputs]
    out, _ = plain_attention.attend(*leaves, w.softmax_scale, left, right)
    return torch.autograd.grad(out, leaves, dout.double())


@pytest.mark.parametrize("mask", [masks.causal(), masks.window(2, 1)], ids=["causal", "window"])
@pytest.mark.parametrize("kv_len", [5, 11])
@pytest.mark.parametrize("engine", [FA2, FA3, FA4], ids=lambda engine: engine.name)
def test_partial(engine, kv_len, mask, install):
    """Also with rows that see no key (kv_len 5)."""
    install(FOLDERS[engine.name])
    w = work(kv_len=kv_len, mask=mask)
    inputs = arrays(w)
    forward, backward = engine.partial(w, {})
    out, lse = forward(*inputs)
    close(out, reference(w, *inputs)[0])
    close(lse, reference(w, *inputs)[1], 1e-4)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    for grad, expected in zip(backward(*inputs, out, lse, dout), _expected_gradients(w, inputs, dout), strict=True):
        close(grad, expected.numpy(), 5e-2)


@pytest.mark.parametrize("engine", [FA2, FA3, FA4], ids=lambda engine: engine.name)
def test_partial_backward_takes_out_and_lse_of_a_whole(engine, install):
    """Gradients of one half of the keys under the softmax over both."""
    install(FOLDERS[engine.name])
    whole, half = work(kv_len=8), work(kv_len=4)
    q, k, v = arrays(whole)
    out, lse = engine.partial(whole, {})[0](q, k, v)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    _, dk, dv = _expected_gradients(work(kv_len=8, mask=masks.window(None, None)), (q, k, v), dout)
    _, found_dk, found_dv = engine.partial(half, {})[1](q, k[:, :4], v[:, :4], out, lse, dout)
    close(found_dk, dk[:, :4].numpy(), 5e-2)
    close(found_dv, dv[:, :4].numpy(), 5e-2)


@pytest.mark.parametrize("mask", [masks.full(), masks.causal(), masks.window(2, 1)], ids=lambda m: m.id)
def test_xformers_partial(mask, install):
    install("xformers")
    w = work(kv_len=11, mask=mask, kv_heads=4)
    inputs = arrays(w)
    forward, backward = XFORMERS.partial(w, {})
    out, lse = forward(*inputs)
    close(out, reference(w, *inputs)[0])
    close(lse, reference(w, *inputs)[1], 1e-4)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    full = work(kv_len=11, kv_heads=4, mask=masks.window(None, None)) if mask.id == "full" else w
    for grad, expected in zip(backward(*inputs, out, lse, dout), _expected_gradients(full, inputs, dout), strict=True):
        close(grad, expected.numpy(), 5e-2)
    assert XFORMERS.partial(work(mask=mask), {}) is None, "its backward pass takes no grouped heads"


def test_a_forward_only_build_has_one_pass(install):
    install("fa3_fwd")
    w = work(mask=masks.causal())
    forward, backward = FA3.passes(w, {})
    assert backward is None
    out, lse = forward(*arrays(w))
    close(out, reference(w, *arrays(w))[0])
    close(lse, reference(w, *arrays(w))[1], 1e-4)


def test_fa4_forward_of_later_betas_returns_more(install, monkeypatch):
    install("fa4")
    import flash_attn.cute.interface as interface

    monkeypatch.setattr(interface, "FORWARD_VALUES", 5)
    w = work(mask=masks.causal())
    out, lse = FA4.partial(w, {})[0](*arrays(w))
    close(out, reference(w, *arrays(w))[0])
    close(lse, reference(w, *arrays(w))[1], 1e-4)


def test_no_partial_where_the_private_functions_changed(install, monkeypatch):
    install("fa2", "fa4")
    import flash_attn.flash_attn_interface as interface

    assert FA2.partial(work(head_dim=60), {}) is None
    monkeypatch.setattr(interface, "_flash_attn_backward", lambda dout, q, k, v, out, lse, window_size: None)
    assert FA2.partial(work(), {}) is None


def test_signature_is_read_through_a_custom_operator():
    from attnbench.impls.torch.flash_attention import parameters

    def plain(x: torch.Tensor, window_size_left: int) -> torch.Tensor:
        return x.clone()

    wrapped = torch.library.custom_op("attnbench_test::plain", plain, mutates_args=())
    assert "window_size_left" in parameters(wrapped)


def test_fa3_offers_split_keys_for_few_queries(install):
    install("fa3_full")
    w = work(q_len=1, kv_len=33)
    configs = FA3.configs(w)
    assert [dict(config) for config in configs] == [{}, {"num_splits": 0}]
    close(FA3.build(w, configs[1])(*arrays(w)), reference(w, *arrays(w))[0])
    assert len(FA3.configs(work(q_len=128))) == 1


def test_xformers_grouped_heads_have_no_backward():
    assert "grouped" in XFORMERS.supports(work(pass_="train"), H200)
    assert XFORMERS.supports(work(pass_="train", kv_heads=4), H200) is None


def test_xformers_window_is_16_bit_only():
    assert XFORMERS.supports(work(dtype="float32"), H200) is None
    assert "float32" in XFORMERS.supports(work(dtype="float32", mask=masks.window(2)), H200)


def test_flashinfer_plans_once_and_for_the_dtype(install):
    install("flashinfer")
    for dtype in ("float16", "bfloat16"):
        w = work(dtype=dtype)
        call = FLASHINFER.build(w, {})
        for seed in (0, 1):
            close(call(*arrays(w, seed)), reference(w, *arrays(w, seed))[0])
    assert len(sys.modules["flashinfer"].PLANS) == 2


def test_flashinfer_has_only_causal_windows():
    assert "right = 0" in FLASHINFER.supports(work(mask=masks.window(2, 1)), H200)
    assert FLASHINFER.supports(work(mask=masks.window(2, 0)), H200) is None


def test_sage_declares_its_error():
    assert SAGE.approximate
    assert 0 < SAGE.declared_error < 0.1
    assert SAGE.build_lse(work(), {}) is None


def test_sage_1_does_not_write_to_the_callers_keys(install):
    install("sage1")
    check(SAGE, work(mask=masks.causal()))


def test_sage_2_gets_the_keys_themselves(install):
    install("sage2")
    w = work()
    q, k, v = arrays(w)
    SAGE.build(w, {})(q, k, v)
    assert sys.modules["sageattention"].KEYS[0] is k


def test_transformer_engine_cannot_fall_back(install, monkeypatch):
    """Its own default would run unfused; a user's explicit wish is left alone and caught by the kernels that ran."""
    install("te")
    check(TRANSFORMER_ENGINE, work(v_head_dim=32))
    assert TRANSFORMER_ENGINE.forbids
    monkeypatch.setenv("NVTE_UNFUSED_ATTN", "1")
    with pytest.raises(AssertionError, match="fallen back"):
        TRANSFORMER_ENGINE.build(work(), {})(*arrays(work()))


def test_each_engine_has_its_own_process_and_says_where_it_never_ran():
    assert len({engine.process for engine in ENGINES}) == len(ENGINES)
    ran = {"torch.fa3", "torch.fa4", "torch.sageattention"}  # on an H200: see results/h200 and results/README.md
    assert {engine.name for engine in ENGINES if "cuda" not in engine.untested} == ran


# KV caches

CACHES = {
    "one query": Problem((5, 64, 0), dim=64, v_dim=64),
    "few queries": Problem((2, 0, 200, 8), queries=8, dim=64, v_dim=64, capacity=256),
    "window": Problem((100, 3), queries=3, window=30, dim=64, v_dim=64, capacity=128),
    "soft cap": Problem((100, 3), softcap=1.5, dim=64, v_dim=64, capacity=128),
    "pages of 16": Problem((50, 0, 16), queries=2, dim=64, v_dim=64, page_size=16),
    "pages of 256": Problem((300, 256), queries=2, dim=64, v_dim=64, page_size=256, capacity=512),
}
READERS = {"fa2": FA2, "fa3_full": FA3, "fa3_fwd": FA3, "fa4": FA4, "flashinfer": FLASHINFER}
NOT_READ = {
    ("fa2", "pages of 16"): "multiple of 256 tokens, not 16",
    ("fa3_fwd", "pages of 16"): "no pages in this build",
    ("fa3_fwd", "pages of 256"): "no pages in this build",
    ("fa3_fwd", "window"): "this build has no window",
}


@pytest.mark.parametrize("case", CACHES)
@pytest.mark.parametrize("folder", READERS)
def test_caches_are_read_as_the_library_takes_them(install, folder, case):
    """Of a GPU's adapter, with tensors of this machine: unequal lengths, pages, NaN behind the ends of sequences."""
    install(folder)
    engine, problem = READERS[folder], CACHES[case]
    words = {"scale": problem.scale, "softcap": problem.softcap}
    mask = masks.full() if problem.queries == 1 else masks.causal()
    w = work(
        batch=len(problem.lengths), q_len=problem.queries, kv_len=problem.capacity, **words,
        mask=mask if problem.window is None else masks.window(problem.window),
    )  # fmt: skip
    refusal = engine.supports(w, H200)
    call = refusal or engine.decode(w, H200, {}, problem.page_size)
    if (folder, case) in NOT_READ:
        assert NOT_READ[folder, case] in call
        return
    assert callable(call), call
    k, v, table = problem.cache_arrays()
    q, k, v = (torch.as_tensor(x).bfloat16() for x in (problem.tokens()[0], k, v))
    lengths = torch.tensor(problem.lengths, dtype=torch.int32)
    with torch.no_grad():
        found = call(q, k, v, lengths, None if table is None else torch.as_tensor(table))
    expected = problem.expected(lambda x: torch.as_tensor(x).bfloat16().double().numpy())
    must_agree([x.double().numpy() for x in found], expected, "bfloat16")


def test_an_old_library_without_caches_says_so(install, monkeypatch):
    install("fa2")
    import flash_attn.flash_attn_interface as interface

    monkeypatch.delattr(interface, "flash_attn_with_kvcache")
    assert "no function over KV caches" in FA2.decode(work(q_len=1), H200, {}, None)
