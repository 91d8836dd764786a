"""torch.pair: both passes and the LSE's gradient against float64, what it refuses, what betrays a part."""

import msgspec
import numpy as np
import pytest

from attnbench import masks, registry
from attnbench.dispatch.attention import attention
from attnbench.errors import Unsupported, UsageError
from attnbench.frameworks import environment_of
from attnbench.run import protocol as p
from attnbench.run.launch import Listener, Request, plan_only
from attnbench.run.remote import Local
from attnbench.spec import Cell, Environment, Implementation, Workload

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from test_torch_engines import H200, arrays, install, reference, work  # noqa: F401
from test_torch_numbers import CASES, CPU, attention_in_float64, draw, workload

from attnbench.impls import pair as torch_pair
from attnbench.impls.pair import TORCH_PAIR as PAIR

FLASH_EAGER = {"forward": "torch.sdpa-flash", "backward": "torch.eager"}
EAGER_FLASH = {"forward": "torch.eager", "backward": "torch.sdpa-flash"}
ON_CPU = [FLASH_EAGER, EAGER_FLASH]
ONE_LIBRARY = ("softcap", "value_dim")
ERROR = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 3e-2, "float16": 4e-3}


def close(got, want, dtype):
    values = got.detach().double().numpy()
    assert np.isfinite(values).all()
    # The gradients of one key cancel to 0; rounding leaves what it leaves of their terms.
    assert np.linalg.norm(values - want) <= ERROR[dtype] * max(np.linalg.norm(want), 1.0)


def told(config):
    return f"{config['forward']} -> {config['backward']}"


@pytest.mark.parametrize("dtype", ERROR)
@pytest.mark.parametrize("case", [case for case in CASES if case not in (*ONE_LIBRARY, "bias_large")])
@pytest.mark.parametrize("config", ON_CPU, ids=told)
def test_output_lse_and_gradients(config, case, dtype):
    w = workload(case, pass_="train", dtype=dtype)
    assert PAIR.configured(config).supports(w, CPU) is None
    (q, k, v, dout), exact = draw(w)
    want_out, want_lse, *want = attention_in_float64(w, *exact)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out, lse = PAIR.build_lse(w, config)(q, k, v)
    assert lse.dtype == torch.promote_types(q.dtype, torch.float32)
    np.testing.assert_array_equal(np.isneginf(lse.detach().numpy()), np.isneginf(want_lse))
    seen = np.isfinite(want_lse)
    allowed = max(ERROR[dtype], 2e-6)
    np.testing.assert_allclose(lse.detach().numpy()[seen], want_lse[seen], rtol=allowed, atol=allowed)
    close(out, want_out, dtype)
    for got, expected, like in zip(torch.autograd.grad(out, (q, k, v), dout), want, (q, k, v)):
        assert got.dtype == like.dtype
        close(got, expected, dtype)


def heads_first(x):
    """bshd -> bhsd, in memory too."""
    return x.detach().transpose(1, 2).contiguous()


@pytest.mark.parametrize("case", ["causal", "mqa", "bias"])
def test_arrays_lie_as_the_backward_pass_has_them(case):
    assert [PAIR.configured(config).layout for config in ({}, FLASH_EAGER, EAGER_FLASH)] == ["bshd", "bshd", "bhsd"]
    pair, w = PAIR.configured(EAGER_FLASH), workload(case, pass_="train", dtype="float64")
    arrays, exact = draw(w)
    *leaves, dout = map(heads_first, arrays)
    want, want_lse, *grads = attention_in_float64(w, *exact)
    out, lse = pair.build_lse(w, EAGER_FLASH)(*(x.requires_grad_() for x in leaves))
    close(out.transpose(1, 2), want, "float64")
    np.testing.assert_allclose(lse.detach().numpy(), want_lse, rtol=2e-6, atol=2e-6)
    for got, expected in zip(torch.autograd.grad(out, leaves, dout, retain_graph=True), grads):
        close(got.transpose(1, 2), expected, "float64")
    for got in torch.autograd.grad(lse.sum(), leaves):
        assert got.isfinite().all()


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
@pytest.mark.parametrize("case", ["causal", "mqa", "bias"])
@pytest.mark.parametrize("config", ON_CPU, ids=told)
def test_the_lse_has_a_gradient(config, case, dtype):
    """Of a loss in both outputs, and of the LSE alone; against autograd in float64."""
    w = workload(case, pass_="train", dtype=dtype)
    (q, k, v, dout), exact = draw(w)
    # Larger than the output's, and nothing that 16 bits hold exactly.
    dlse = torch.linspace(-30.1, 41.7, w.batch * w.heads * w.q_len, dtype=torch.float64).view(w.batch, w.heads, w.q_len)
    dlse = dlse.masked_fill(torch.from_numpy(np.isneginf(attention_in_float64(w, *exact)[1])), 0.0)
    wide = [torch.from_numpy(x).requires_grad_() for x in exact[:3]]
    plain = registry.get("torch.eager").build_lse(msgspec.structs.replace(w, dtype="float64"), {})
    leaves = [x.requires_grad_() for x in (q, k, v)]
    call = PAIR.build_lse(w, config)
    for weight in (1.0, 0.0):
        want_out, want_lse = plain(*wide)
        want_lse = torch.where(torch.isneginf(want_lse), 0.0, want_lse).double()
        loss = (want_out * torch.from_numpy(exact[3]) * weight).sum() + (want_lse * dlse).sum()
        want = torch.autograd.grad(loss, wide)
        out, lse = call(*leaves)
        got_lse = torch.where(torch.isneginf(lse), 0.0, lse).double()
        loss = (got_lse * dlse).sum() + ((out * dout).sum() if weight else 0.0)
        for got, expected in zip(torch.autograd.grad(loss, leaves), want):
            close(got, expected.numpy(), "float32" if dtype == "float64" else dtype)


def test_any_view_is_a_gradient_and_there_is_no_second_one():
    w = workload("causal", pass_="train")
    (q, k, v, _), exact = draw(w)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    _, _, *want = attention_in_float64(w, *exact[:3], np.ones_like(exact[3]))
    for config in ON_CPU:
        for got, expected in zip(torch.autograd.grad(PAIR.build(w, config)(q, k, v).sum(), (q, k, v)), want):
            close(got, expected, "float32")
    out = PAIR.build(w, FLASH_EAGER)(q, k, v)
    (dq,) = torch.autograd.grad(out.square().sum(), (q,), create_graph=True)
    with pytest.raises(Unsupported, match="second derivatives"):
        dq.sum().backward()


@pytest.mark.parametrize("case", ONE_LIBRARY)
def test_what_one_library_alone_can_do(case):
    w = workload(case, pass_="train")
    assert PAIR.supports(w, CPU) == "needs two libraries, and only torch.eager can run this here"
    assert "torch.sdpa-flash as the forward pass" in PAIR.configured(FLASH_EAGER).supports(w, CPU)
    assert "torch.sdpa-flash as the backward pass" in PAIR.configured(EAGER_FLASH).supports(w, CPU)
    with pytest.raises(Unsupported, match=r"only torch\.eager can run this here"):
        PAIR.build(w, {})(*draw(w)[0][:3])


REFUSED = {
    "torch.eager/torch.eager": "ask for torch.eager itself",
    "torch.sdpa-flash/torch.hf-sdpa": "no backward pass that can be called alone",
    "torch.hf-sdpa/torch.eager": "torch.hf-sdpa as the forward pass: returns no LSE",
    "jax.einsum/torch.eager": "is not a torch implementation",
    "torch.sdpa-flash/torch.pair": "is a pair itself",
    "torch.fa3/torch.eager": "torch.fa3 as the forward pass: needs cuda, this is cpu",
    "torch.eager/torch.block-sparse": "torch.block-sparse as the backward pass: takes a mask with one blocks part",
    "torch.block-sparse-dynamic/torch.eager": "is approximate",
}


@pytest.mark.parametrize("names", REFUSED)
def test_a_refusal_names_the_part_and_its_reason(names):
    pair = PAIR.configured(dict(zip(("forward", "backward"), names.split("/"))))
    assert REFUSED[names] in pair.supports(workload("causal", pass_="train"), CPU)


def test_a_pair_is_for_training():
    assert "is for training" in PAIR.supports(workload("causal"), CPU)
    assert PAIR.supports(workload("causal", pass_="backward"), CPU) is None
    assert PAIR.supports(workload("causal", pass_="train"), Environment(device="tpu", device_name="x")) is not None


def test_parts_are_checked_when_they_are_asked_for():
    assert registry.asked("torch.pair[forward=torch.eager]") == ("torch.pair", {"forward": "torch.eager"})
    with pytest.raises(UsageError, match=r"torch\.egaer"):
        registry.asked("torch.pair[forward=torch.egaer,backward=torch.sdpa-flash]")
    with pytest.raises(UsageError, match="no setting"):
        registry.asked("torch.pair[inner=torch.eager]")


def test_a_part_of_auto_that_has_no_such_pass_after_all_gives_way(monkeypatch):
    """torch.sdpa says that it supports the workload, and only its operators know that they cannot be called alone."""
    w = workload("causal", pass_="train")
    monkeypatch.setattr(torch_pair, "TORCH_FORWARDS", ("torch.sdpa", "torch.eager"))
    monkeypatch.setattr(torch_pair, "TORCH_BACKWARDS", ("torch.sdpa", "torch.sdpa-flash"))
    (q, k, v, _), exact = draw(w)
    close(PAIR.build(w, {})(q, k, v), attention_in_float64(w, *exact)[0], "float32")
    with pytest.raises(Unsupported, match=r"torch\.sdpa as the backward pass: has no backward pass"):
        PAIR.build(w, {"forward": "torch.eager", "backward": "torch.sdpa"})(q, k, v)


def test_configs_on_a_cpu():
    w = workload("causal", pass_="train")
    assert list(PAIR.configs_here(w, CPU)) == ON_CPU
    assert PAIR.configs_here(workload("softcap", pass_="train"), CPU) == []
    assert PAIR.configs_here(workload("causal"), CPU) == ()
    assert {"forward": "torch.fa3", "backward": "torch.fa4"} in PAIR.configs(w)


def test_configs_on_a_gpu(install):  # noqa: F811
    install("fa3_fwd", "fa4")
    found = [told(config) for config in PAIR.configs_here(work(pass_="train", mask=masks.causal()), H200)]
    assert found[0] == "torch.fa3 -> torch.fa4"
    assert len(found) == len(set(found)) == 7
    assert not any(name.endswith("-> torch.fa3") for name in found), "this build has no backward pass"
    wide = PAIR.configs_here(work(pass_="train", mask=masks.causal(), head_dim=256), H200)
    assert told(wide[0]) == "torch.fa3 -> torch.sdpa-cudnn"


@pytest.mark.parametrize("mask", [masks.full(), masks.causal()], ids=lambda m: m.id)
@pytest.mark.parametrize("kv_len", [5, 9])
@pytest.mark.parametrize("names", ["torch.fa3/torch.fa4", "torch.fa4/torch.eager", "torch.eager/torch.fa4"])
def test_engines_by_their_stand_ins(names, kv_len, mask, install, monkeypatch):  # noqa: F811
    install("fa3_fwd", "fa4")
    monkeypatch.setattr(torch_pair, "environment_of", lambda framework, device: H200)
    w = work(pass_="train", kv_len=kv_len, mask=mask)
    config = dict(zip(("forward", "backward"), names.split("/")))
    leaves = [x.requires_grad_() for x in arrays(w)]
    exact = [x.detach().double().numpy() for x in leaves]
    dout = np.random.default_rng(1).standard_normal((w.batch, w.q_len, w.heads, w.head_dim))
    dout = torch.tensor(dout, dtype=torch.bfloat16)
    want, want_lse, *grads = attention_in_float64(w, *exact, dout.double().numpy())
    out, lse = PAIR.build_lse(w, config)(*leaves)
    close(out, want, "bfloat16")
    allowed = 2e-2 if "torch.eager" in names else 1e-3  # whose products are rounded to bfloat16
    np.testing.assert_allclose(lse.detach().numpy(), want_lse, rtol=allowed, atol=allowed)
    for got, expected in zip(torch.autograd.grad(out, leaves, dout), grads):
        close(got, expected, "bfloat16")


@pytest.mark.parametrize("name, engine", [("torch.fa3", "fa3_fwd"), ("torch.fa4", "fa4")])
def test_the_output_lies_as_the_queries_do(name, engine, install):  # noqa: F811
    install(engine)
    w = work(mask=masks.causal())
    q, k, v = arrays(w)
    forward, _ = registry.get(name).passes(w, {})
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    (out, lse), (other, other_lse) = forward(q, k, v), forward(*turned)
    assert out.stride() == q.stride() != other.stride() == turned[0].stride()
    assert torch.equal(out, other)
    assert torch.equal(lse, other_lse)


class WrongBase(Implementation):
    """Right outputs, and an LSE in base 2: what a library that was not looked at closely would hand over."""

    name = "torch.base-two"
    framework = "torch"

    def supports(self, workload, environment):
        return None

    def build(self, workload, config):
        return registry.get("torch.eager").build(workload, config)

    def partial(self, workload, config):
        forward, backward = registry.get("torch.eager").partial(workload, config)

        def with_lse(q, k, v):
            out, lse = forward(q, k, v)
            return out, lse / np.log(2.0)

        return with_lse, backward


class NeverRuns(WrongBase):
    name = "torch.never-runs"
    expects = (r"a kernel that nobody has",)

    def partial(self, workload, config):
        return registry.get("torch.eager").partial(workload, config)


@pytest.fixture
def examine():
    worker = Local("torch", "cpu")

    def ask(workload, **config):
        question = p.Open(Cell("torch.pair", workload, config), thorough=True, measure=False, clock=None, seed=3)
        return worker.ask(question, 60).record

    with registry.restored():
        registry.register(WrongBase())
        registry.register(NeverRuns())
        yield ask
    worker.kill()


EXAMINED = Workload(batch=2, q_len=64, heads=4, kv_heads=2, head_dim=32, mask=masks.causal(), pass_="train")


def test_a_wrong_lse_is_caught(examine):
    parts = {"forward": "torch.base-two", "backward": "torch.sdpa-flash"}
    assert examine(EXAMINED, **EAGER_FLASH).status == "ok"
    wrong = examine(EXAMINED, **parts)
    assert wrong.status == "incorrect"
    assert "gradient" in wrong.reason
    wrong = examine(msgspec.structs.replace(EXAMINED, pass_="backward"), **parts)
    assert wrong.status == "incorrect"


def test_each_library_must_be_seen(examine):
    for role, other in (("forward", "backward"), ("backward", "forward")):
        record = examine(EXAMINED, **{role: "torch.never-runs", other: "torch.sdpa-flash"})
        assert record.status == "failed"
        assert "a kernel that nobody has" in record.reason
    alone = msgspec.structs.replace(EXAMINED, pass_="backward")
    assert examine(alone, forward="torch.never-runs", backward="torch.sdpa-flash").status == "ok"


def test_scores_are_counted_where_a_part_stores_them():
    assert PAIR.configured(FLASH_EAGER).materialises_scores
    assert not PAIR.materialises_scores
    assert PAIR.configured(FLASH_EAGER).forbids == registry.get("torch.sdpa-flash").forbids


def test_a_run_takes_every_pair_of_what_is_here():
    forward = msgspec.structs.replace(EXAMINED, pass_="forward")
    request = Request(workloads=(EXAMINED, forward), implementations=("torch.pair", "torch.eager"), device="cpu")
    assert [one.cell.config for one in plan_only(request, Listener())] == [{}] * 4
    planned = plan_only(msgspec.structs.replace(request, every_config=True), Listener())
    train = [one for one in planned if one.cell.workload == EXAMINED]
    assert [one.cell.config for one in train] == [*ON_CPU, {}]
    assert all(one.reason is None for one in train)
    refused = [one for one in planned if one.cell.workload == forward and one.cell.implementation == "torch.pair"]
    assert [(one.cell.config, one.reason.partition(":")[0]) for one in refused] == [({}, "is for training only")]


GPU_PAIRS = [
    "torch.fa3/torch.fa4", "torch.fa3/torch.sdpa-cudnn", "torch.fa4/torch.sdpa-cudnn", "torch.sdpa-cudnn/torch.fa4",
    "torch.sdpa-cudnn/torch.sdpa-flash", "torch.sdpa-flash/torch.sdpa-cudnn", "torch.sdpa-flash/torch.sdpa-efficient",
    "torch.sdpa-efficient/torch.eager", "torch.eager/torch.sdpa-cudnn", "torch.flex/torch.sdpa-flash",
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("mask", [masks.full(), masks.causal()], ids=lambda m: m.id)
@pytest.mark.parametrize("names", GPU_PAIRS)
def test_on_a_gpu(names, mask, head_dim):
    w = Workload(batch=2, q_len=160, heads=4, head_dim=head_dim, dtype="bfloat16", mask=mask, pass_="train")
    config = dict(zip(("forward", "backward"), names.split("/")))
    where = environment_of("torch", "cuda")
    reason = PAIR.configured(config).supports(w, where)
    if reason is not None:
        pytest.skip(reason)
    (q, k, v, dout), exact = draw(w)
    want_out, want_lse, *want = attention_in_float64(w, *exact)
    leaves = [x.cuda().requires_grad_() for x in (q, k, v)]
    out, lse = PAIR.build_lse(w, config)(*leaves)
    np.testing.assert_allclose(lse.detach().cpu().numpy(), want_lse, atol=3e-3)
    grads = torch.autograd.grad(out, leaves, dout.cuda(), retain_graph=True)
    for got, expected in zip((out, *grads), (want_out, *want)):
        close(got.cpu(), expected, "bfloat16")
    pair = PAIR.configured(config)
    if pair.layout == "bhsd":
        turned = [heads_first(x).requires_grad_() for x in leaves]
        other, _ = pair.build_lse(w, config)(*turned)
        if names.startswith(("torch.fa3", "torch.fa4")):
            assert other.stride() == turned[0].stride()
        for got, expected in zip((other, *torch.autograd.grad(other, turned, heads_first(dout).cuda())), (out, *grads)):
            torch.testing.assert_close(got.transpose(1, 2), expected, rtol=2e-2, atol=2e-2)
    wide = [torch.from_numpy(x).requires_grad_() for x in exact[:3]]
    plain = registry.get("torch.eager").build_lse(msgspec.structs.replace(w, dtype="float64"), {})
    want = torch.autograd.grad(plain(*wide)[1].sum(), wide[:2])
    for got, expected in zip(torch.autograd.grad(lse.sum(), leaves[:2]), want):
        close(got.cpu(), expected.numpy(), "bfloat16")


def test_a_pair_is_one_operator_of_a_compiled_graph():
    """In the first call already: nothing is looked into."""
    name = "torch.pair[forward=torch.sdpa-flash,backward=torch.eager]"
    q, k, v = (torch.randn(1, 40, heads, 16, requires_grad=True) for heads in (4, 2, 2))

    def attend(q, k, v):
        return attention(q, k, v, mask=masks.causal(), impl=name)

    out = torch.compile(attend, fullgraph=True)(q, k, v)
    found = torch.autograd.grad(out.square().sum(), (q, k, v))
    expected = torch.autograd.grad(attend(q, k, v).square().sum(), (q, k, v))
    for one, other in zip(found, expected):
        torch.testing.assert_close(one, other)
