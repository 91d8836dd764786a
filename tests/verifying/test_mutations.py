"""Wrong kernels of every kind are found by the verification that a run does before timing, and right ones pass."""

from __future__ import annotations

import pytest

from attnbench import frameworks, masks, registry
from attnbench.spec import Workload
from attnbench.verifying import probes
from attnbench.verifying.draws import Draws
from attnbench.verifying.scales import estimate

torch = pytest.importorskip("torch")
mutations = pytest.importorskip("mutations")
pytestmark = pytest.mark.torch

np = mutations.np
TOKENS = 48
CASES = {
    f"{case.mutation} · {dtype} · {pass_}": case
    for dtype, pass_ in (
        ("bfloat16", "forward"),
        ("bfloat16", "train"),
        ("float16", "backward"),
        ("float32", "forward"),
    )
    for case in mutations.cases(TOKENS, dtype, pass_)
}
RIGHT = ("torch.eager", "torch.sdpa", "torch.sdpa-math", "torch.chunked", "numpy.float32", "jax.einsum", "jax.xla")


@pytest.fixture(scope="module")
def bench():
    return mutations.Bench("cpu")


@pytest.mark.parametrize("name", CASES)
def test_wrong_kernels_are_found_and_right_ones_pass(bench, name):
    case = CASES[name]
    status, reason = bench.verdict(mutations.Mutant("mutant", case.kernel, case.lse), case.workload)
    assert status == ("ok" if case.right else "incorrect"), reason


@pytest.mark.parametrize("pass_", ["forward", "train"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", RIGHT)
def test_libraries_pass(bench, name, dtype, pass_):
    """Of several masks and head sizes, with a soft cap."""
    if not frameworks.installed(name.partition(".")[0]):
        pytest.skip("not installed")
    asked = 0
    for fields in (
        {"mask": masks.causal(), "head_dim": 64},
        {"mask": masks.window(9, 3), "head_dim": 80, "softcap": 30.0},
        {"mask": masks.dilated([16, 48], [1, 3]), "head_dim": 16},
        {"mask": masks.valid(np.random.default_rng(0).random((2, 48)) < 0.7), "head_dim": 32, "kv_heads": 1},
    ):
        workload = Workload(**({"batch": 2, "q_len": 48, "heads": 4, "dtype": dtype, "pass_": pass_} | fields))
        status, reason = bench.verdict(registry.get(name), workload)
        assert status in ("ok", "unsupported"), (workload.id, reason)
        asked += status == "ok"
    assert asked or dtype == "bfloat16"


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_four_rows_of_every_head_between_the_sampled_ones_are_found(bench, dtype, monkeypatch):
    """Few rows are compared in float64; all are compared with what is exact beside 16 bits."""
    from attnbench.verifying import draws

    monkeypatch.setitem(draws.FORWARD_FLOPS, "cpu", 2e5)
    workload = Workload(batch=1, q_len=256, heads=8, head_dim=32, dtype=dtype)
    sampled = Draws(frameworks.get("torch"), "cpu", workload, 1).sample
    assert sampled.share < 0.05
    rows = [row for row in range(256) if row not in sampled.rows][100:104]

    def half(b, h, q, kv, seen):
        return seen & ((kv < 128) | ~torch.isin(q, torch.tensor(rows)))

    kernel = mutations.Kernel(workload, tweak=half)
    status, reason = mutations.Bench("cpu").verdict(mutations.Mutant("mutant", kernel), workload)
    assert status == "incorrect"
    assert "rows are wrong" in reason


@pytest.mark.parametrize("factor", [1.01, 0.99])
def test_one_head_among_four_that_is_off_by_a_percent_is_found_in_16_bits(bench, factor):
    """Over all heads the error is too small to be seen."""

    class OneHead(mutations.Mutant):
        def build(self, workload, config):
            def call(q, k, v):
                q, k, v = (x.transpose(1, 2) for x in (q, k, v))
                out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
                return (out * torch.tensor([1, 1, factor, 1], dtype=out.dtype)[:, None, None]).transpose(1, 2)

            return call

    workload = Workload(batch=1, q_len=512, heads=4, head_dim=64, dtype="bfloat16", mask=masks.causal())
    status, reason = bench.verdict(OneHead("one head", mutations.Kernel(workload)), workload)
    assert status == "incorrect"
    assert "out: as if in batch 0, head 2 scale were" in reason


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("softcap", [None, 5.0, 50.0, 100.0, 1000.0])
@pytest.mark.parametrize("head_dim", [16, 64, 72, 128])
def test_logits_of_counted_keys_are_exact_in_16_bits(dtype, softcap, head_dim):
    workload = Workload(batch=1, q_len=32, heads=2, head_dim=head_dim, dtype=dtype, softcap=softcap)
    draws = Draws(frameworks.get("torch"), "cpu", workload, 3)
    q, k, v, _ = (x[0, :, 0].double() for x in draws.probe("counted", "bshd"))
    logits = q @ k.T
    held = logits.to(getattr(torch, dtype)).double()
    assert torch.equal(held, logits)
    largest = float(logits.abs().max()) * workload.softmax_scale
    assert largest > (12 if softcap is None else 0.7 * softcap)
    partial = v.cumsum(0).abs()
    assert partial.max() <= 4 * max(probes.RUNS), "values of any run of keys cancel but for a few"


@pytest.mark.parametrize(
    "mask",
    [masks.causal(), masks.window(5, 2), masks.documents([0] * 9 + [1] * 15), masks.dilated([8, 24], [1, 3]),
     masks.valid(np.arange(24) % 5 != 3), masks.lengths([20, 0])],
    ids=lambda mask: mask.kinds[0],
)  # fmt: skip
def test_pointed_queries_point_at_edges_and_at_what_they_see(mask):
    workload = Workload(batch=2, q_len=24, heads=4, head_dim=64, mask=mask)
    first, second = probes.targets(workload, 0)
    seen = np.broadcast_to(mask.array(workload.mask_shape), (2, 4, 24, 24)).transpose(0, 2, 1, 3)
    first, second = (np.broadcast_to(x, (2, 24, 4))[..., None] for x in (first, second))
    any_seen = seen.any(-1)
    assert np.take_along_axis(seen, second, -1)[..., 0][any_seen].all()
    padded = np.pad(seen, ((0, 0),) * 3 + ((1, 1),))
    beside = np.stack([np.take_along_axis(padded, first + n, -1)[..., 0] for n in range(3)])
    edge = (beside.any(0) & ~beside.all(0)) | (first[..., 0] == 0) | (first[..., 0] == 23)
    assert edge[any_seen].all()
    assert 0.1 < beside[1][any_seen].mean() < 1, "inside and outside"


def test_a_parameter_is_estimated_with_its_standard_error():
    rng = np.random.default_rng(0)
    slope = rng.standard_normal((2, 1000, 5))
    found, chance = estimate([0.005 * slope + 0.02 * rng.standard_normal(slope.shape)], [slope])
    assert abs(found - 0.005) < chance
    assert chance == pytest.approx(5 * 0.0002, rel=0.1), "five standard errors of many rows"
    whole_rows = 0.02 * slope * rng.standard_normal((2, 1000, 1))
    assert estimate([whole_rows], [slope])[1] > 2 * chance
    assert estimate([slope], [0 * slope]) == (0.0, float("inf"))


def test_few_rows_say_little_of_a_parameter():
    rng = np.random.default_rng(0)
    slope = rng.standard_normal((8, 5))
    errors = 0.02 * rng.standard_normal(slope.shape)
    few, many = (estimate([errors[:n]], [slope[:n]])[1] for n in (4, 8))
    assert few > 5 * many
    assert estimate([errors[:1]], [slope[:1]])[1] == float("inf")


@pytest.mark.parametrize(
    "fields",
    [
        {"q_len": 64, "heads": 4, "head_dim": 64, "mask": masks.window(0, 0), "pass_": "train"},
        {"q_len": 1, "heads": 1, "head_dim": 8, "pass_": "train"},
        {"q_len": 1, "kv_len": 3, "heads": 1, "head_dim": 64},
        {"q_len": 1, "kv_len": 64, "heads": 1, "head_dim": 1},
        {"q_len": 64, "heads": 4, "head_dim": 32, "mask": masks.lengths([1, 64]), "batch": 2, "pass_": "backward"},
        {"q_len": 8, "kv_len": 1024, "heads": 2, "head_dim": 16, "pass_": "train"},
        {"q_len": 32, "heads": 4, "head_dim": 64, "pass_": "train",
         "mask": masks.dense(np.random.default_rng(1).standard_normal((1, 4, 32, 32)))},
        {"q_len": 32, "heads": 8, "kv_heads": 4, "head_dim": 128, "mask": masks.window(8, 1), "softcap": 50.0,
         "pass_": "train"},
    ],
    ids=["one key a row", "one pair", "three keys", "one number", "one key a batch row", "float16 underflows", "bias",
         "narrow window"],
)  # fmt: skip
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_right_kernels_pass_at_the_edges(fields, dtype):
    workload = Workload(**({"batch": 1, "dtype": dtype} | fields))
    for seed in range(3):
        for name in ("torch.sdpa", "torch.eager"):
            status, reason = mutations.Bench("cpu").verdict(registry.get(name), workload, seed)
            assert status in ("ok", "unsupported"), (name, seed, reason)


def test_sums_of_many_keys_may_be_rounded_otherwise(bench):
    """One key after the other, as an online softmax without tiles would add them up."""

    class Sequential(mutations.Mutant):
        def build(self, workload, config):
            def call(q, k, v):
                q, k, v = (x.transpose(1, 2) for x in (q, k, v))
                logits = q @ k.mT * workload.softmax_scale
                weights = (logits - logits.amax(-1, keepdim=True)).exp()
                total = weights.cumsum(-1)[..., -1:]
                return ((weights[..., None] * v[..., None, :, :]).cumsum(-2)[..., -1, :] / total).transpose(1, 2)

            return call

    workload = Workload(batch=1, q_len=2, kv_len=16384, heads=2, head_dim=8, dtype="float32")
    status, reason = bench.verdict(Sequential("sequential", mutations.Kernel(workload)), workload)
    assert status == "ok", reason


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_inputs_with_poles_pass_and_show_a_wrong_scale(bench, dtype):
    """`sincostan` inputs reach hundreds, and no two of their rows are independent."""
    workload = Workload(batch=1, q_len=64, heads=2, head_dim=64, dtype=dtype, inputs="sincostan")
    for name in ("torch.sdpa", "torch.eager"):
        status, reason = bench.verdict(registry.get(name), workload)
        assert status == "ok", (name, reason)
    wrong = mutations.Kernel(mutations.changed(workload, scale=1.02 * workload.softmax_scale))
    assert bench.verdict(mutations.Mutant("mutant", wrong), workload)[0] == "incorrect"
