"""Predicted picks on devices whose law of time is known: off the grid the right implementation is found."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from math import ceil
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from length_factory import GPU
from msgspec import structs
from record_factory import incorrect, named_run, ok

import attnbench as ab
from attnbench import masks, registry
from attnbench.choosing.choose import Chosen, choose
from attnbench.choosing.fitting import _nonnegative, computes_hidden
from attnbench.policy import Choice, Constraints, Policy, shape_of
from attnbench.spec import Record, Workload

UNITS = 64
LENGTHS, BATCHES, DIMS = (512, 1024, 2048, 4096, 8192), (1, 4), (64, 128)
CAUSAL, WINDOW = masks.causal(), masks.window(128, 0)
Law = Callable[[Workload], float]


def work(q_len: int = 1024, **fields: Any) -> Workload:
    sizes = {"batch": 1, "q_len": q_len, "heads": 8, "head_dim": 64, "dtype": "bfloat16", "mask": CAUSAL}
    return Workload(**(sizes | fields))


def law(name: str, launch: float, rate: float, waves: bool = False, **factors: float) -> Law:
    """Nanoseconds: a launch, a rate for the pairs that are computed, and factors for a head_dim or a kind of mask."""

    def time(on: Workload) -> float:
        pairs = on.visible_mask.pairs(on.mask_shape)
        if computes_hidden(name, {}, on, GPU):
            pairs = on.batch * on.heads * on.q_len * on.kv_len
        tiles = on.batch * on.heads * ceil(on.q_len / 128)
        idle = ceil(tiles / UNITS) * UNITS / tiles if waves else 1.0
        factor = factors.get(f"dim{on.head_dim}", 1.0) * factors.get(on.visible_mask.kinds[0], 1.0)
        return (launch + rate * idle * 4e-9 * pairs * on.head_dim) * factor

    return time


QUICK_START = law("torch.sdpa-flash", 5e3, 4000.0, waves=True)
HIGH_RATE = law("torch.sdpa-cudnn", 30e3, 1500.0, waves=True)
STORES = law("torch.eager", 15e3, 9000.0)
DEVICE: dict[str, Law] = {"torch.sdpa-flash": QUICK_START, "torch.sdpa-cudnn": HIGH_RATE, "torch.eager": STORES}


def grid(**fields: Any) -> list[Workload]:
    return [work(n, batch=b, head_dim=d, **fields) for n in LENGTHS for b in BATCHES for d in DIMS]


def measured(laws: dict[str, Law], *workloads: Workload) -> list[Record]:
    rng = np.random.default_rng(0)
    noise = {on.id: np.exp(0.003 * rng.standard_normal(12)) for on in workloads}
    return [
        ok(name, tuple(time(on) * noise[on.id]), on, environment=GPU, compile_ns=4 * 10**9 if "flex" in name else 0)
        for on in workloads
        for name, time in laws.items()
    ]


def chosen(*records: Record, **constraints: Any) -> Chosen:
    return choose([named_run("run.jsonl", "2026-01-01", records)], Constraints(**constraints))


def predicted(policy: Policy, on: Workload, usable: tuple[str, ...] = ()) -> Choice | str | None:
    """What is predicted where everything can run, or only the implementations named."""

    def about(name: str, config: Any, named: Any) -> bool | None:
        return computes_hidden(name, config, on, GPU) if not usable or name in usable else None

    return policy.predicted(on, "torch", GPU, about)


def fastest(laws: dict[str, Law], on: Workload) -> str:
    return min(laws, key=lambda name: laws[name](on))


@pytest.fixture(scope="module")
def device() -> Policy:
    return chosen(*measured(DEVICE, *grid(), *grid(mask=masks.full()))).policy


OFF_THE_GRID = [
    work(n, batch=batch, head_dim=dim, mask=mask, dtype=dtype)
    for n, batch, dim, mask, dtype in [
        (700, 1, 64, CAUSAL, "bfloat16"), (3000, 3, 128, CAUSAL, "float16"), (2048, 2, 96, CAUSAL, "bfloat16"),
        (1500, 1, 80, masks.full(), "bfloat16"), (32768, 1, 64, CAUSAL, "bfloat16"), (256, 1, 64, CAUSAL, "bfloat16"),
        (384, 1, 96, CAUSAL, "float16"), (16384, 1, 112, masks.full(), "float16"),
    ]
]  # fmt: skip


@pytest.mark.parametrize("on", OFF_THE_GRID, ids=lambda on: on.id)
def test_the_right_pick_off_the_grid(device, on):
    found = predicted(device, on)
    assert isinstance(found, Choice)
    assert found.implementation == fastest(DEVICE, on)
    assert {found.implementation, *(one.implementation for one in found.alternatives)} == set(DEVICE)


def test_a_known_law_is_found_within_a_few_percent(device):
    (place,) = device.places
    assert place.prediction is not None
    assert place.prediction.units == UNITS
    for model in place.prediction.models:
        for on in (*grid(), *OFF_THE_GRID[:2]):
            hidden = computes_hidden(model.implementation, {}, on, GPU)
            guess = model.time_ns(shape_of(on), hidden, place.prediction.units)
            assert guess == pytest.approx(DEVICE[model.implementation](on), rel=0.2), (model.label, on.id)


def test_its_regret_is_that_of_left_out_shapes(device):
    (place,) = device.places
    assert place.prediction is not None
    assert set(place.prediction.checks) == {"shape", "class", "head_dim", "mask"}
    for check in place.prediction.checks.values():
        assert check.passed
        assert check.predicted.mean < 1.02 < check.fixed.mean
        assert check.predicted.shapes == check.fixed.shapes == 40
    found = predicted(device, work(4096, head_dim=96))
    assert isinstance(found, Choice)
    assert found.regret == place.prediction.checks["head_dim"].predicted.mean
    assert str(found).startswith("torch.sdpa-cudnn: predicted, as head_dim 96 was not measured (expected regret 1.0")


def test_where_one_breaks_at_a_head_dim_another_is_taken():
    laws = DEVICE | {"torch.sdpa-cudnn": law("torch.sdpa-cudnn", 30e3, 1500.0, waves=True, dim256=6.0)}
    wide = [work(n, head_dim=256) for n in (512, 4096)]
    policy = chosen(*measured(laws, *grid(), *grid(mask=masks.full()), *wide)).policy
    for on in (work(16384, head_dim=256, batch=2), work(2048, batch=4, head_dim=256, mask=masks.full())):
        found = predicted(policy, on)
        assert isinstance(found, Choice)
        assert found.implementation == fastest(laws, on) == "torch.sdpa-flash"


def test_who_was_never_measured_at_a_head_dim_gives_way_to_who_was():
    """Both are as fast elsewhere, up to a little: at 256 only one was measured."""
    laws = {"torch.sdpa-flash": law("torch.sdpa-flash", 9e3, 2000.0), "torch.eager": STORES}
    better = {"torch.sdpa-cudnn": law("torch.sdpa-cudnn", 8.8e3, 1950.0)}
    policy = chosen(
        *measured(laws | better, *grid()), *measured(laws, *(work(n, head_dim=256) for n in LENGTHS))
    ).policy
    at_64, at_256 = (predicted(policy, work(100_000, head_dim=dim)) for dim in (64, 256))
    assert isinstance(at_64, Choice)
    assert isinstance(at_256, Choice)
    assert (at_64.implementation, at_256.implementation) == ("torch.sdpa-cudnn", "torch.sdpa-flash")


WITH_FLEX = DEVICE | {"torch.flex": law("torch.flex", 40e3, 2500.0, waves=True)}


@pytest.fixture(scope="module")
def with_flex() -> Policy:
    return chosen(*measured(WITH_FLEX, *grid(), *grid(mask=masks.full()))).policy


class TestMasks:
    def test_an_unknown_mask_goes_to_what_skips_hidden_pairs(self, with_flex):
        on = work(8192, mask=WINDOW)
        found = predicted(with_flex, on)
        assert isinstance(found, Choice)
        assert found.implementation == fastest(WITH_FLEX, on) == "torch.flex"
        assert "mask window was not measured" in found.predicted
        assert found.compile_s == 4.0

    def test_causal_does_not(self, with_flex):
        found = predicted(with_flex, work(8192, head_dim=96))
        assert isinstance(found, Choice)
        assert found.implementation == "torch.sdpa-cudnn"

    def test_a_mask_that_was_slow_by_measurement_is_known_to_be(self):
        laws = WITH_FLEX | {"torch.flex": law("torch.flex", 40e3, 2500.0, waves=True, prefix=30.0)}
        some = [work(n, mask=masks.prefix(200)) for n in (1024, 4096)]
        policy = chosen(*measured(laws, *grid(), *grid(mask=masks.full()), *some)).policy
        on = work(2048, mask=masks.prefix(100), head_dim=128)
        found = predicted(policy, on)
        assert isinstance(found, Choice)
        assert found.implementation == fastest(laws, on) == "torch.sdpa-cudnn"


class TestLimits:
    def test_another_width_or_pass_is_not_predicted(self, device):
        assert predicted(device, work(dtype="float32")) is None
        assert predicted(device, work(pass_="train")) is None
        assert isinstance(predicted(device, work(dtype="float16")), Choice)

    def test_another_device_is_not_predicted(self, device):
        there = structs.replace(GPU, device_name="Another GPU")
        assert device.predicted(work(), "torch", there, lambda *_: False) is None

    def test_what_cannot_run_is_left_out(self, device):
        found = predicted(device, work(100_000), usable=("torch.eager", "torch.sdpa-flash"))
        assert isinstance(found, Choice)
        assert (found.implementation, found.candidates) == ("torch.sdpa-flash", 2)
        assert predicted(device, work(100_000), usable=("torch.flex",)) is None

    def test_forbidden_is_never_predicted(self):
        policy = chosen(*measured(DEVICE, *grid()), forbid=("torch.sdpa-cudnn",)).policy
        found = predicted(policy, work(100_000))
        assert isinstance(found, Choice)
        assert found.implementation == "torch.sdpa-flash"
        assert found.within == "without torch.sdpa-cudnn"
        assert "chosen within: without torch.sdpa-cudnn" in str(found)

    def test_who_was_incorrect_in_the_class_is_not_predicted(self):
        wrong = structs.replace(incorrect("torch.sdpa-cudnn", "is wrong", work(768)), environment=GPU)
        policy = chosen(*measured(DEVICE, *grid()), wrong).policy
        there, elsewhere = predicted(policy, work(100_000)), predicted(policy, work(100_000, head_dim=128))
        assert isinstance(there, Choice)
        assert isinstance(elsewhere, Choice)
        assert (there.implementation, elsewhere.implementation) == ("torch.sdpa-flash", "torch.sdpa-cudnn")
        asked = chosen(*measured(DEVICE, *grid())).policy.predicted(
            work(100_000), "torch", GPU, lambda *_: False, (policy,)
        )
        assert isinstance(asked, Choice)
        assert asked.implementation == "torch.sdpa-flash"

    @pytest.mark.parametrize("bound", [{"max_memory": 10**12}, {"max_error": 0.5}])
    def test_bounded_memory_and_errors_predict_nothing(self, bound):
        from attnbench.spec import Memory

        known = [structs.replace(one, memory=Memory(peak_bytes=10)) for one in measured(DEVICE, *grid())]
        policy = chosen(*known, **bound).policy
        assert policy.entries
        assert predicted(policy, work(100_000)) is None

    def test_who_was_not_deterministic_somewhere_is_not_predicted(self):
        records = [
            structs.replace(one, deterministic=not (one.workload.q_len == 512 and "cudnn" in one.implementation))
            for one in measured(DEVICE, *grid())
        ]
        found = predicted(chosen(*records, deterministic=True).policy, work(100_000))
        assert isinstance(found, Choice)
        assert found.implementation == "torch.sdpa-flash"

    def test_few_shapes_make_no_models(self):
        assert chosen(*measured(DEVICE, *grid()[:7])).policy.places[0].prediction is None

    def test_one_head_dim_cannot_be_checked(self):
        policy = chosen(*measured(DEVICE, *(one for one in grid() if one.head_dim == 64))).policy
        assert isinstance(predicted(policy, work(100_000)), Choice)
        assert predicted(policy, work(1024, head_dim=96)) == (
            "a policy made in this process predicts no choice, as that could not be checked on enough shapes "
            "(head_dim 96 was not measured)"
        )

    def test_predictions_that_lose_more_than_the_fixed_order_are_not_followed(self):
        """One leads at heads of 64 and falls behind at 128, which the other head_dim does not tell."""
        laws = {
            "torch.sdpa-cudnn": law("torch.sdpa-cudnn", 1e3, 2000.0),
            "torch.sdpa-flash": law("torch.sdpa-flash", 1e3, 2000.0, dim64=0.5, dim128=4.0),
        }
        policy = chosen(*measured(laws, *grid())).policy
        (place,) = policy.places
        assert place.prediction is not None
        assert not place.prediction.checks["head_dim"].passed
        told = str(predicted(policy, work(2048, head_dim=96)))
        assert "predicted picks lost 2.8" in told
        assert "on held-out shapes and the fixed order 1.4" in told
        assert isinstance(predicted(policy, work(100_000)), Choice)


def test_unregistered_names_are_fitted_too():
    laws = {"torch.mine": law("torch.mine", 5e3, 1000.0), **DEVICE}
    assert "torch.mine" not in registry.names()
    (place,) = chosen(*measured(laws, *grid())).policy.places
    assert place.prediction is not None
    assert "torch.mine" in {one.label for one in place.prediction.models}


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10**9), st.integers(2, 6), st.integers(0, 10), st.floats(-2, 2))
def test_nonnegative_least_squares_against_all_subsets(seed, columns, more, offset):
    rng = np.random.default_rng(seed)
    lines = rng.standard_normal((columns + more, columns)) + offset
    wanted = rng.standard_normal(columns + more)
    found = _nonnegative(lines, wanted)
    assert (found >= 0).all()
    best = float(wanted @ wanted)
    for size in range(1, columns + 1):
        for kept in combinations(range(columns), size):
            some = np.linalg.lstsq(lines[:, kept], wanted, rcond=None)[0]
            if (some >= 0).all():
                best = min(best, float(((lines[:, kept] @ some - wanted) ** 2).sum()))
    assert ((lines @ found - wanted) ** 2).sum() <= best * (1 + 1e-6) + 1e-9


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 40), st.integers(1, 40), st.sampled_from(["bottom-right", "top-left"]), st.booleans(),
    st.integers(1, 3),
)  # fmt: skip
def test_the_visible_share_is_that_of_the_mask(queries, keys, align, causal, batch):
    mask = masks.causal(align=align) if causal else masks.full()
    on = ab.Workload(batch=batch, q_len=queries, kv_len=keys, heads=2, head_dim=16, mask=mask)
    seen = mask.pairs(on.mask_shape) / (batch * 2 * queries * keys)
    assert shape_of(on).share == pytest.approx(seen)
