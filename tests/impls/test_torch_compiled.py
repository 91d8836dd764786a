"""torch.compile and FlexAttention: right numbers, proof that compiled code ran, no fall-back past dynamo's limit."""

import re
import shutil
from functools import partial

import numpy as np
import pytest

from attnbench import masks
from attnbench.errors import Unsupported
from attnbench.spec import Environment, Workload

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from attnbench.frameworks.base import Inputs
from attnbench.frameworks.torch.framework import FRAMEWORK
from attnbench.frameworks.torch.plain import plain_call
from attnbench.impls.torch import _compile as torch_compile
from attnbench.impls.torch import _masks as torch_masks
from attnbench.impls.torch import eager as torch_eager
from attnbench.impls.torch import flex as torch_flex

CPU = Environment(device="cpu", device_name="test")
needs_compiler = pytest.mark.skipif(
    torch_compile.needs_compiler(CPU) is not None, reason="no C++ compiler, which torch.compile needs on a CPU"
)
random = np.random.default_rng(1)
KEPT = random.random((2, 4, 5)) > 0.4


def attention(**more):
    return Workload(**{"batch": 2, "q_len": 37, "kv_len": 50, "heads": 4, "kv_heads": 2, "head_dim": 16, **more})


def inputs(w, layout):
    sizes = ((w.q_len, w.heads), (w.kv_len, w.kv_heads), (w.kv_len, w.kv_heads), (w.q_len, w.heads))
    dims = (w.head_dim, w.head_dim, w.value_dim, w.value_dim)
    arrays = (torch.randn(w.batch, *size, dim) for size, dim in zip(sizes, dims))
    return Inputs(*(x.transpose(1, 2).contiguous() if layout == "bhsd" else x for x in arrays))


def plain_bhsd(w, q, k, v):
    return plain_call(w)(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)


FLEX_CASES = {
    "full": {"softcap": 2.0},
    "causal": {"mask": masks.causal()},
    "dead_rows": {"q_len": 50, "kv_len": 37, "mask": masks.causal()},
    "window": {"mask": masks.window(5, 3)},
    "documents": {"mask": masks.documents(np.arange(50) // 13) & masks.causal()},
    "lengths": {"mask": masks.lengths([0, 41])},
    "valid": {"mask": masks.valid(random.random((2, 50)) > 0.5)},
    "dilated": {"kv_len": 37, "mask": masks.dilated([7, 37], [1, 3]) & masks.causal()},
    "blocks": {"heads": 2, "mask": masks.blocks(KEPT, 10)},
    "bias_large": {"mask": masks.dense(np.zeros((37, 50)) + np.resize([0.0, -1e9, 1e30], 37)[:, None])},
    "bias": {"softcap": 3.0, "mask": masks.dense(random.normal(size=(4, 37, 50)))},
}


@pytest.mark.parametrize("case", FLEX_CASES)
def test_mask_mod_and_score_mod_say_what_the_mask_says(case):
    from torch.nn.attention.flex_attention import flex_attention

    w = attention(**FLEX_CASES[case])
    q, k, v, _ = inputs(w, "bhsd")
    table, modify = torch_masks.block_mask(w, q.device, 16), torch_masks.score_mod(w, q.device)
    with torch.no_grad():
        out = flex_attention(q, k, v, modify, table, enable_gqa=w.group > 1)
    torch.testing.assert_close(out, plain_bhsd(w, q, k, v))


@pytest.mark.parametrize("case", [case for case in FLEX_CASES if case != "full"])
def test_the_block_table_is_exact(case, monkeypatch):
    """Compiled kernels skip blocks that are not in the table and trust those marked full; chunks change nothing."""
    monkeypatch.setattr(torch_masks, "CHUNK_PAIRS", 3000)
    w, size = attention(**FLEX_CASES[case]), 16
    table = torch_masks.block_mask(w, torch.device("cpu"), size)
    assert table is not None
    assert table.kv_indices is not table.full_kv_indices
    visible = w.visible_mask.array(w.mask_shape)
    pad = [(0, 0), (0, 0), (0, -w.q_len % size), (0, -w.kv_len % size)]
    grid = np.pad(visible, pad).reshape(*visible.shape[:2], -(-w.q_len // size), size, -(-w.kv_len // size), size)
    some, every = grid.any((3, 5)), grid.all((3, 5))
    for wanted, count, order in (
        (some & ~every, table.kv_num_blocks, table.kv_indices),
        (every, table.full_kv_num_blocks, table.full_kv_indices),
    ):
        listed = np.zeros_like(wanted)
        for at in np.ndindex(wanted.shape[:3]):
            listed[at][order[at][: count[at]].numpy()] = True
        np.testing.assert_array_equal(listed, wanted)


def profile(call, example):
    names, why = FRAMEWORK.kernels(FRAMEWORK.programs(call, "forward", example).main, example, "cpu")
    assert names is not None, why
    return names


def proved(implementation, names):
    hits = [
        any(re.search(p, name) for name in names for p in ps) for ps in (implementation.expects, implementation.forbids)
    ]
    return hits == [True, False]


@pytest.mark.slow  # compiles two C++ kernels, about a minute with a cold cache
@needs_compiler
def test_compiled_flex_on_a_cpu():
    for case in ("dead_rows", "dilated"):
        w = attention(**FLEX_CASES[case])
        example = inputs(w, "bhsd")
        call = torch_flex.FLEX.build(w, torch_flex.FLEX.configs(w)[1])
        programs = FRAMEWORK.programs(call, "forward", example)
        assert programs.compile_ns > 1e6
        (out,) = programs.main.run(example)
        torch.testing.assert_close(out, plain_bhsd(w, *example[:3]))
        assert proved(torch_flex.FLEX, profile(call, example))


@pytest.mark.slow  # compiles forward and backward, about a minute with a cold cache
@needs_compiler
def test_compiled_plain_on_a_cpu():
    w = attention(mask=masks.lengths([0, 41]), softcap=2.0, pass_="train")
    example = inputs(w, "bshd")
    programs = FRAMEWORK.programs(torch_eager.COMPILED.build(w, {}), "train", example)
    plain = FRAMEWORK.programs(plain_call(w), "train", example)
    assert programs.compile_ns > 1e6
    assert plain.compile_ns == 0
    for got, want in zip(*(p.main.run(p.main.prepare(example)) for p in (programs, plain))):
        torch.testing.assert_close(got, want)
    names, _ = FRAMEWORK.kernels(programs.main, example, "cpu")
    assert proved(torch_eager.COMPILED, names)


def test_an_eager_run_has_no_proof():
    w = attention()
    assert not proved(torch_eager.COMPILED, profile(plain_call(w), inputs(w, "bshd")))


@pytest.fixture
def quick_compile(monkeypatch):
    """Dynamo as it is, without the C++ compiler behind it: counting recompilations needs no kernels."""
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("quick_compile")
def test_more_shapes_than_dynamos_limit_all_run_compiled():
    for build in range(torch._dynamo.config.recompile_limit + 4):
        w = attention(q_len=5 + build)
        example = inputs(w, "bshd")
        call = torch_eager.COMPILED.build(w, {})
        names = profile(call, example)
        assert "Torch-Compiled Region" in names, f"build {build} ran eagerly"


@pytest.mark.usefixtures("quick_compile")
def test_a_shared_code_object_would_hit_the_limit_and_a_fresh_one_does_not():
    def body_for(n):
        def body(x):
            return x + n

        return body

    def run_all(compiler):
        for n in range(torch._dynamo.config.recompile_limit + 2):
            compiler(body_for(n))(torch.ones(n + 1))

    run_all(torch_compile.compile_fresh)
    with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
        run_all(partial(torch.compile, fullgraph=True, dynamic=False))


@pytest.mark.usefixtures("quick_compile")
def test_one_call_over_too_many_shapes_is_an_error_not_eager():
    call = torch_eager.COMPILED.build(attention(), {})

    def run_all():
        for length in range(torch._dynamo.config.recompile_limit + 2):
            call(*inputs(attention(q_len=5 + length), "bshd")[:3])

    with pytest.raises(Unsupported, match="recompile_limit"):
        run_all()


@pytest.mark.usefixtures("quick_compile")
@pytest.mark.parametrize("mine", [(True, False), (False, True), (False, False)])
@pytest.mark.parametrize("implementation", [torch_eager.COMPILED, torch_flex.FLEX], ids=lambda one: one.name)
def test_the_users_settings_of_dynamo_stay(implementation, mine):
    """Building and calling; a user's own function past the limit still runs eagerly if it did."""
    config, names = torch._dynamo.config, ("suppress_errors", "fail_on_recompile_limit_hit")
    with config.patch(dict(zip(names, mine))):
        w = attention()
        call = implementation.build(w, {})
        call(*inputs(w, implementation.layout)[:3])
        assert tuple(getattr(config, name) for name in names) == mine
        if not mine[1]:
            users = torch.compile(lambda x, n: x + n, dynamic=False)
            for n in range(config.recompile_limit + 3):
                users(torch.zeros(n + 2), n)


@pytest.mark.usefixtures("quick_compile")
def test_a_users_settings_do_not_make_ours_run_eagerly():
    """suppress_errors and no failure at the limit: a function of several graphs would run eagerly in silence."""
    call = torch_eager.COMPILED.build(attention(), {})

    def run_all():
        for length in range(torch._dynamo.config.recompile_limit + 2):
            call(*inputs(attention(q_len=5 + length), "bshd")[:3])

    settings = {"suppress_errors": True, "fail_on_recompile_limit_hit": False}
    with torch._dynamo.config.patch(settings), pytest.raises(Unsupported, match="recompile_limit"):
        run_all()


def test_without_a_compiler_it_is_not_available(monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    for implementation in (torch_eager.COMPILED, torch_flex.FLEX):
        assert "C++ compiler" in str(implementation.available(CPU))
    monkeypatch.setenv("CXX", "special-c++")
    assert "special-c++" in str(torch_eager.COMPILED.available(CPU))
