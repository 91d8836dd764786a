"""What a plan of dilated attention depends on, that a call finds its own, and that many threads do."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from attnbench import masks
from attnbench.kernels.dilated.pieces import DilatedProblem, Task

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

import dilated_oracle as oracle

from attnbench.kernels.dilated import torch_engines
from attnbench.nn import ImprovedDilatedAttention

SEGMENTS, RATES = [4, 8], [1, 2]


def draw(seed, batch, tokens, dim, dtype=torch.float32):
    rng = torch.Generator().manual_seed(seed)
    return [torch.randn(batch, tokens, 4, dim, generator=rng).to(dtype) for _ in range(3)]


def assert_right(out, q, k, v):
    want, _ = oracle.attention(*(x.double() for x in (q, k, v)), oracle.visible_counts(q, SEGMENTS, RATES, causal=True))
    low = out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), want, atol=3e-2 if low else 1e-5, rtol=3e-2 if low else 1e-5)


def task(arrays, **options):
    (batch, tokens, heads, _), kv_heads = arrays[0].shape, arrays[1].shape[2]
    return Task(DilatedProblem(masks.dilated(SEGMENTS, RATES), batch, tokens, heads, kv_heads, True), 0.5, **options)


def test_arrays_alike_share_a_plan_and_others_do_not(monkeypatch):
    monkeypatch.setattr(torch_engines, "partial_of", lambda *_: (draw, draw))  # no kernel runs on the device "meta"
    torch_engines._plan.cache_clear()
    arrays = draw(0, 2, 16, 8)
    one = torch_engines.plan_of(task(arrays), *arrays)
    assert torch_engines.plan_of(task(arrays), *draw(1, 2, 16, 8)) is one
    assert torch_engines.plan_of(task(arrays), *(x.clone()[:, :, :] for x in arrays)) is one
    heads_first = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in arrays]
    others = [
        (task(arrays), draw(0, 2, 16, 4)),
        (task(arrays), draw(0, 2, 16, 8, torch.bfloat16)),
        (task(arrays), heads_first),
        (task(arrays), [*arrays[:2], heads_first[2]]),
        (task(arrays), [x.to("meta") for x in arrays]),
        (task(arrays, diagonal=False), arrays),
        (task(arrays, kernel="torch.eager"), arrays),
        (task(arrays)._replace(scale=0.25), arrays),
    ]
    plans = [one, *(torch_engines.plan_of(*asked[:1], *asked[1]) for asked in others)]
    torch_engines._plan.cache_clear()
    assert len({id(plan) for plan in plans}) == len(plans)


def test_one_module_is_right_whatever_it_was_called_with_before():
    module = ImprovedDilatedAttention(SEGMENTS, RATES, causal=True)
    for _ in range(2):
        for seed, (batch, tokens, dim) in enumerate([(1, 16, 8), (2, 16, 8), (2, 13, 8), (2, 16, 4)]):
            for dtype in (torch.float32, torch.bfloat16):
                arrays = draw(seed, batch, tokens, dim, dtype)
                packed = torch.cat([x.flatten(2) for x in arrays], -1).split(4 * dim, -1)
                slices = [x.unflatten(-1, (4, dim)) for x in packed]
                turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in arrays]
                for given in (arrays, slices, turned):
                    assert_right(module(*given), *arrays)


def test_settings_of_a_module_that_change_between_calls_are_followed():
    module, (q, k, v) = ImprovedDilatedAttention(SEGMENTS, RATES, causal=True), draw(0, 1, 16, 8)
    assert_right(module(q, k, v), q, k, v)
    module.scale = 0.1
    flat, causal = module(q, k, v), oracle.visible_counts(q, SEGMENTS, RATES, causal=True)
    want = oracle.attention(q.double(), k.double(), v.double(), causal, 0.1)[0]
    torch.testing.assert_close(flat.double(), want, atol=1e-5, rtol=1e-5)
    module.causal, module.scale = False, None
    full = oracle.attention(q.double(), k.double(), v.double(), oracle.visible_counts(q, SEGMENTS, RATES))[0]
    torch.testing.assert_close(module(q, k, v).double(), full, atol=1e-5, rtol=1e-5)


def test_plans_are_forgotten_and_made_by_many_threads_at_once():
    module = ImprovedDilatedAttention(SEGMENTS, RATES, causal=True)
    cases = [draw(seed, 1 + seed % 2, 9 + seed % 5, 8) for seed in range(10)]

    def work(number):
        for turn in range(20):
            arrays = cases[(number + turn) % len(cases)]
            leaves = [x.clone().requires_grad_() for x in arrays]
            out = module(*leaves)
            out.sum().backward()
            assert_right(out.detach(), *arrays)
            assert all(x.grad.isfinite().all() for x in leaves)
            if turn == number:
                torch_engines._plan.cache_clear()

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(6)))
