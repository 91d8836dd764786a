"""`ab.attention` inside torch.compile: one graph without a break, the same numbers, new graphs only where needed."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest
from compiled_problem import Counter, arrays, assert_same
from dispatch_problem import entry, here

import attnbench as ab
from attnbench import registry
from attnbench.dispatch import torch_compile
from attnbench.errors import Unsupported
from attnbench.policy import Choice, Entry, shape_of
from attnbench.spec import Implementation

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore::attnbench.errors.PolicyWarning")]
OUTER = ab.masks.causal()
HOLES = np.random.default_rng(0).random((2, 24)) < 0.7
MASKS = {
    "full": None,
    "causal": OUTER,
    "window": ab.masks.window(5, 2),
    "prefix": ab.masks.prefix(7),
    "documents": OUTER & ab.masks.documents([0] * 10 + [1] * 14),
    "an empty row": ab.masks.lengths([0, 17]),
    "valid": ab.masks.valid(HOLES),
    "dilated": ab.masks.dilated([8, 24], [1, 3]),
    "blocks": ab.masks.blocks(np.tri(3, dtype=bool), 8),
    "bias": ab.masks.dense(np.random.default_rng(1).standard_normal((1, 4, 24, 24)).astype(np.float32)),
}
LAYOUTS = {"bshd": {}, "bhsd": {"layout": "bhsd"}, "packed": {"layout": "packed", "heads": (4, 2)}}


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("grad", [False, True], ids=["forward", "train"])
@pytest.mark.parametrize("name", MASKS)
def test_every_mask_is_one_graph(name, grad):
    def function(q, k, v):
        return ab.attention(q * 2, k, v, mask=MASKS[name]) + 1

    inputs = arrays(grad=grad)
    assert_same(function, torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=False), inputs, grad)
    torch._dynamo.reset()
    told = torch._dynamo.explain(function)(*inputs)
    assert (told.graph_break_count, told.graph_count) == (0, 1), told.break_reasons


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("grad", [False, True], ids=["forward", "train"])
def test_layouts_and_lse(layout, grad):
    def function(q, k, v):
        return ab.attention(q, k, v, mask=OUTER, return_lse=True, **LAYOUTS[layout])

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=False)
    assert_same(function, compiled, arrays(layout=layout, grad=grad), grad)


NAMED = ["torch.eager", "torch.sdpa", "torch.sdpa-math", "torch.sdpa-flash", "torch.chunked[chunk=8]"]


@pytest.mark.parametrize("impl", NAMED)
def test_named_implementations(impl):
    def function(q, k, v):
        return ab.attention(q, k, v, mask=OUTER, impl=impl)

    assert_same(function, torch.compile(function, backend="aot_eager", fullgraph=True), arrays())


def test_a_pinned_backend_is_pinned_in_the_graph():
    """The kernel that the graph calls is the one named, not what torch would pick."""
    names = []

    def backend(graph, inputs):
        from torch._dynamo.backends.common import aot_autograd

        def lowered(graph, inputs):
            names.extend(str(node.target) for node in graph.graph.nodes)
            return graph.forward

        return aot_autograd(fw_compiler=lowered)(graph, inputs)

    for impl, operator in (("torch.sdpa-flash", "flash_attention_for_cpu"), ("torch.sdpa-math", "softmax")):
        names.clear()
        torch._dynamo.reset()
        compiled = torch.compile(lambda q, k, v: ab.attention(q, k, v, impl=impl), backend=backend, fullgraph=True)  # noqa: B023
        compiled(*arrays())
        assert any(operator in name for name in names), names


@pytest.mark.slow(reason="compiles with Inductor")
@pytest.mark.parametrize("impl", ["auto", "torch.flex", "torch.compiled"])
def test_inductor(impl):
    def function(q, k, v):
        return ab.attention(q * 2, k, v, mask=OUTER, impl=impl) + 1

    grad = impl != "torch.flex"
    assert_same(function, torch.compile(function, fullgraph=True, dynamic=False), arrays(grad=grad), grad)


def test_masks_of_numbers_may_be_made_inside():
    def function(q, k, v):
        near = ab.masks.causal() & ab.masks.window(9)
        return ab.attention(q, k, v, mask=near & ab.masks.lengths([20, 24]) & OUTER)

    assert_same(function, torch.compile(function, backend="aot_eager", fullgraph=True), arrays())


def test_traced_tensors_that_must_be_read_are_refused_in_words():
    def read(q, k, v, lengths):
        return ab.attention(q, k, v, mask=ab.masks.lengths(lengths, constant=True))

    def dense(q, k, v, lengths):
        return ab.attention(q, k, v, mask=ab.masks.dense(lengths > 3))

    for function in (read, dense):
        torch._dynamo.reset()
        with pytest.raises(Exception, match="build masks from arrays outside"):
            torch.compile(function, backend="eager", fullgraph=True)(*arrays(), torch.tensor([3, 4]))


def test_a_new_graph_for_another_mask_and_none_for_an_equal_one():
    counter = Counter()

    def function(q, k, v, mask, scale):
        return ab.attention(q, k, v, mask=mask, scale=scale)

    compiled, inputs = torch.compile(function, backend=counter, fullgraph=True), arrays()
    seen = []
    for mask, scale in [
        (ab.masks.window(5), None), (ab.masks.window(5), None), (ab.masks.window(7), None),
        (ab.masks.lengths([3, 4]), None), (ab.masks.lengths([3, 4]), None), (ab.masks.lengths([3, 5]), None),
        (None, 0.1), (None, 0.2), (None, 0.3), (None, 0.2),
    ]:  # fmt: skip
        assert_same(lambda q, k, v: function(q, k, v, mask, scale), lambda *x: compiled(*x, mask, scale), inputs)  # noqa: B023
        seen.append(len(counter.graphs))
    assert seen == [1, 1, 2, 3, 3, 4, 5, 6, 7, 7]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("grad", [False, True], ids=["forward", "train"])
def test_dynamic_sizes_are_one_graph_that_chooses_when_it_runs(layout, grad):
    counter = Counter()

    def function(q, k, v):
        return ab.attention(q, k, v, mask=OUTER, **LAYOUTS[layout])

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    counted = torch.compile(function, backend=counter, fullgraph=True)
    for batch, tokens in ((2, 24), (3, 40), (4, 17)):
        inputs = arrays(tokens, batch, layout, grad)
        for x in inputs:
            torch._dynamo.mark_dynamic(x, 0)
            torch._dynamo.mark_dynamic(x, 2 if layout == "bhsd" else 1)
        assert_same(function, compiled, inputs, grad)
        counted(*inputs)
    assert len(counter.graphs) == 1


def test_lengths_that_keep_changing_stop_compiling():
    counter = Counter()

    def function(q, k, v):
        return ab.attention(q, k, v, mask=OUTER)

    compiled = torch.compile(function, backend=counter, fullgraph=True)
    for tokens in (16, 24, 32, 40, 48, 56, 64, 72, 80, 88, 96):
        assert_same(function, compiled, arrays(tokens))
    assert len(counter.graphs) == 2


class Opaque(type(registry.get("torch.eager"))):
    """Something that dynamo could not look into."""

    name = "torch.opaque"
    traceable = False

    def __init__(self, pair=True):
        self.pair = pair
        self._made = []  # shared with copies, which `ab.attention` builds

    @property
    def calls(self):
        return len(self._made)

    def build(self, workload, config):
        call = super().build(workload, config)

        def run(q, k, v):
            self._made.append(None)
            assert not torch.compiler.is_dynamo_compiling()
            return call(q, k, v)

        return run

    def partial(self, workload, config):
        return super().partial(workload, config) if self.pair else None


def test_what_cannot_be_looked_into_is_one_operator():
    with registry.restored():
        opaque = registry.register(Opaque())
        counter = Counter()

        def function(q, k, v):
            return ab.attention(q, k, v, mask=OUTER, impl="torch.opaque")

        for grad in (False, True):
            assert_same(function, torch.compile(function, backend="aot_eager", fullgraph=True), arrays(grad=grad), grad)
        torch._dynamo.reset()
        torch.compile(function, backend=counter, fullgraph=True)(*arrays())
        assert "attnbench.forward" in counter.graphs[0].code.replace("attnbench::", "attnbench.")
        assert opaque.calls > 1
        opaque.pair = False
        torch._dynamo.reset()
        torch.compile(function, backend="eager", fullgraph=True)(*arrays())
        torch._dynamo.reset()
        with pytest.raises(Exception, match=r"torch.opaque cannot run .* no backward pass that a graph"):
            torch.compile(function, backend="eager", fullgraph=True)(*arrays(grad=True))


def test_the_operator_says_what_torch_expects_of_one():
    from attnbench.dispatch.demand import Words
    from attnbench.dispatch.torch_compile import GraphRequest, _remember, forward

    for layout in ("bshd", "bhsd"):
        words = Words(OUTER, None, None, "auto", layout, None, False)
        key = _remember(GraphRequest(words, True, None))
        torch.library.opcheck(forward, (*arrays(layout=layout, grad=True), [], [], key))


def test_a_refusal_keeps_its_words():
    with pytest.raises(Exception, match=r"torch.fa3 cannot run .*needs cuda"):
        torch.compile(lambda q, k, v: ab.attention(q, k, v, impl="torch.fa3"), backend="eager", fullgraph=True)(
            *arrays()
        )


def test_a_module_with_its_own_mask():
    class Layer(torch.nn.Module):
        def __init__(self, window):
            super().__init__()
            self.mask, self.scale = ab.masks.window(window), 0.3 / window
            self.project = torch.nn.Linear(16, 16)

        def forward(self, q, k, v):
            return ab.attention(self.project(q), k, v, mask=self.mask, scale=self.scale)

    layers = torch.nn.ModuleList([Layer(3), Layer(9), Layer(3)])

    def function(q, k, v):
        for layer in layers:
            q = layer(q, k, v)
        return q

    assert_same(function, torch.compile(function, backend="aot_eager", fullgraph=True), arrays(grad=True), True)


@pytest.mark.parametrize("dynamic", [False, True], ids=["while tracing", "when it runs"])
def test_a_policy_is_asked(dynamic):
    with registry.restored():
        opaque = registry.register(Opaque())

        def function(q, k, v):
            return ab.attention(q, k, v, mask=OUTER)

        compiled = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=dynamic)
        q, k, v = (torch.randn(1, 32, 4, 16) for _ in range(3))
        with ab.use_policy(here(entry("torch.opaque"), entry("torch.nobody", mask=ab.masks.full())), on_miss="error"):
            torch.testing.assert_close(compiled(q, k, v), ab.attention(q, k, v, mask=OUTER, impl="torch.eager"))
            assert opaque.calls == 1
            torch._dynamo.reset()
            with pytest.raises(Exception, match="no measured policy covers"):
                torch.compile(lambda q, k, v: ab.attention(q, k, v), backend="eager", fullgraph=True)(q, k, v)


class Twin(Implementation):
    """torch.eager's two passes, each noted."""

    framework = "torch"

    def __init__(self, name):
        self.name, self.passes_run = name, []

    def supports(self, workload, environment):
        return None

    def build(self, workload, config):
        return registry.get("torch.eager").build(workload, {})

    def partial(self, workload, config):
        forward, backward = registry.get("torch.eager").partial(workload, {})

        def noted(name, function):
            return lambda *arrays: self.passes_run.append(name) or function(*arrays)

        return noted("forward", forward), noted("backward", backward)


def test_with_dynamic_sizes_the_backward_is_that_of_the_kernel_that_ran():
    """Policies may be others by then: backward passes come after a `with` block, or on autograd's own threads."""
    with registry.restored():
        first, second = (registry.register(Twin(f"torch.{name}")) for name in ("first", "second"))
        mine, other = (
            here(entry(one.name), train_entry(one.name), entry("torch.nobody", mask=ab.masks.full()))
            for one in (first, second)
        )
        compiled = torch.compile(
            lambda q, k, v: ab.attention(q, k, v, mask=OUTER), backend="aot_eager", fullgraph=True, dynamic=True
        )
        leaves = [torch.randn(1, 32, 4, 16, requires_grad=True) for _ in range(3)]
        with ab.use_policy(mine):
            out = compiled(*leaves)
        with ab.use_policy(other):
            later = compiled(*leaves)
            got = torch.autograd.grad(out.sum(), leaves)
        torch.autograd.grad(later.sum(), leaves)
        assert (first.passes_run, second.passes_run) == (["forward", "backward"], ["forward", "backward"])
        want = torch.autograd.grad(ab.attention(*leaves, mask=OUTER, impl="torch.eager").sum(), leaves)
        for a, b in zip(got, want):
            torch.testing.assert_close(a, b, atol=5e-5, rtol=0)


def train_entry(name):
    work = ab.Workload(batch=1, q_len=32, heads=4, head_dim=16, mask=OUTER, pass_="train")
    return Entry(at=shape_of(work), use=Choice(implementation=name, candidates=1, measured=work.id))


@pytest.mark.parametrize("impl", ["torch.sdpa", "torch.sdpa-math"])
def test_a_named_one_without_a_backward_pass_of_its_own_is_trained_at_every_size(impl):
    run = torch.compile(lambda *x: ab.attention(*x, impl=impl), backend="aot_eager", fullgraph=True)
    for batch in (2, 3, 4):
        given = [torch.randn(batch, 5, 4, 8, requires_grad=True) for _ in range(3)]
        found = torch.autograd.grad(run(*given).sum(), given)
        wanted = torch.autograd.grad(ab.attention(*given, impl="torch.eager").sum(), given)
        for one, exact in zip(found, wanted):
            torch.testing.assert_close(one, exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_export_and_fake_arrays_need_no_numbers(mask):
    from torch._subclasses.fake_tensor import FakeTensorMode

    class Model(torch.nn.Module):
        def forward(self, q, k, v):
            return ab.attention(q, k, v, mask=mask)

    given = [torch.randn(2, 24, 4, 8) for _ in range(3)]
    for _ in range(2):  # what the first made of fake arrays must not reach the second, nor real ones
        program = torch.export.export(Model(), tuple(given))
        with FakeTensorMode() as fakes:
            assert Model()(*map(fakes.from_tensor, given)).shape == given[0].shape
    torch.testing.assert_close(program.module()(*given), Model()(*given))


@pytest.mark.parametrize("dynamic", [False, True])
def test_what_compiled_code_needs_is_kept_once_for_each_call(dynamic):
    """Compiled code cannot say when it is gone, so nothing is dropped; a call that is traced again adds nothing."""

    def kept():
        return len(vars(torch_compile.CALLS)), len(torch_compile._requests), len(torch_compile._picks)

    def traced_anew(tokens):
        torch._dynamo.reset()
        lengths = ab.masks.lengths([tokens - 3])
        q, k, v = (torch.randn(1, tokens, 2, 8) for _ in range(3))
        if dynamic:
            for x in (q, k, v):
                torch._dynamo.mark_dynamic(x, 1)
        for mask, impl in ((lengths, "auto"), (ab.masks.causal(), "torch.chunked")):
            torch.compile(lambda q, k, v: ab.attention(q, k, v, mask=mask, impl=impl), backend="eager")(q, k, v)  # noqa: B023

    traced_anew(21)
    before = kept()
    for _ in range(3):
        traced_anew(21)
    assert kept() == before
    traced_anew(22)
    assert kept()[0] == before[0] + (1 if dynamic else 2)  # sizes that are dynamic have one graph


EXPORTED = {
    "auto": ab.masks.causal(),
    "torch.eager": ab.masks.window(3),
    "torch.sdpa-flash": None,
    "torch.chunked": ab.masks.causal(),
    "torch.dilated-improved": ab.masks.dilated([4, 8], [1, 2]),
}


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("impl", EXPORTED)
def test_export_of_dynamic_lengths(impl, strict):
    class Model(torch.nn.Module):
        def forward(self, q, k, v):
            return ab.attention(q, k, v, mask=EXPORTED[impl], impl=impl)

    def given(tokens):
        return [torch.randn(2, tokens, 4, 8) for _ in range(3)]

    tokens = torch.export.Dim("tokens", min=2, max=64)
    program = torch.export.export(Model(), tuple(given(8)), dynamic_shapes=({1: tokens},) * 3, strict=strict).module()
    for length in (8, 13):
        arrays = given(length)
        torch.testing.assert_close(program(*arrays), Model()(*arrays))


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_make_fx_with_a_mask_that_becomes_an_array(mask, mode):
    """And what was made while it traced holds in a call that is not traced."""
    from torch.fx.experimental.proxy_tensor import make_fx

    given = [torch.randn(2, 24, 4, 8) for _ in range(3)]
    graph = make_fx(lambda *x: ab.attention(*x, mask=mask), tracing_mode=mode)(*given)
    want = ab.attention(*given, mask=mask, impl="torch.eager")
    torch.testing.assert_close(graph(*given), want)
    torch.testing.assert_close(ab.attention(*given, mask=mask), want)


@pytest.mark.parametrize("kind", ["meta", "fake"])
@pytest.mark.parametrize(
    "impl,mask",
    [
        ("torch.block-sparse", ab.masks.blocks(np.eye(3, dtype=bool), 8)),
        ("torch.chunked", ab.masks.causal()),
        ("torch.dilated", ab.masks.dilated([8, 24], [1, 2])),
        ("torch.dilated-improved", ab.masks.dilated([8, 24], [1, 2])),
        ("torch.ring", ab.masks.causal()),
        ("torch.sdpa-flash", ab.masks.window(3)),
    ],
)
def test_an_implementation_by_name_tells_shapes(impl, mask, kind):
    from torch._subclasses.fake_tensor import FakeTensorMode

    given = [torch.randn(2, 24, heads, 8) for heads in (4, 2, 2)]
    with FakeTensorMode() if kind == "fake" else nullcontext() as fakes:
        arrays = [x.to("meta") if fakes is None else fakes.from_tensor(x) for x in given]
        out, lse = ab.attention(*arrays, mask=mask, impl=impl, return_lse=True)
        assert (out.shape, lse.shape, out.device) == (given[0].shape, (2, 4, 24), arrays[0].device)
        leaves = [x.requires_grad_() for x in arrays]
        if impl in ("torch.chunked", "torch.ring"):
            with pytest.raises(Unsupported, match="no backward pass that a graph"):
                ab.attention(*leaves, mask=mask, impl=impl)
            return
        grads = torch.autograd.grad(ab.attention(*leaves, mask=mask, impl=impl).sum(), leaves)
        assert [grad.shape for grad in grads] == [x.shape for x in leaves]
