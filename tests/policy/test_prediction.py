"""Models of time in policy files: the formula, what a file may hold, and policies that are merged."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from policy_factory import entry, policy
from record_factory import CPU, workload

from attnbench import masks
from attnbench.errors import BrokenFile
from attnbench.policy import HeldOutCheck, Prediction, Regret, TimeModel, load_policy, packaged, policy_text, shape_of
from attnbench.policy.prediction import costs

GOOD = Regret(mean=1.01, worst=1.2, worst_at="somewhere", shapes=12)
BAD = Regret(mean=1.3, worst=4.0, worst_at="somewhere", shapes=12)


def model(name: str = "torch.sdpa", **fields: Any) -> TimeModel:
    made = {
        "implementation": name,
        "pass_": "forward",
        "dtypes": ("float32",),
        "shapes": 9,
        "rates": {"launch": 1000.0, "work": 2000.0},
        "factors": {
            "mask": {"causal": 1.0, "full": 1.1},
            "softcap": {"no": 1.0},
            "head_dim": {"32": 1.0, "128": 2.0},
            "queries": {"many": 1.0},
        },
        "ranges": {"rows": (1, 64), "group": (1, 1), "q_len": (64, 4096), "kv_len": (64, 4096)},
    }
    return TimeModel(**(made | fields))


def prediction(*models: TimeModel, passed: bool = True) -> Prediction:
    check = HeldOutCheck(predicted=GOOD, fixed=BAD) if passed else HeldOutCheck(predicted=BAD, fixed=GOOD)
    parts = ("shape", "class", "head_dim", "mask")
    return Prediction(units=2, models=models or (model(),), checks=dict.fromkeys(parts, check))


def time(one: TimeModel, q_len: int = 1024, hidden: bool = False, **fields: Any) -> float:
    return one.time_ns(shape_of(workload(q_len, **fields)), hidden, 2)


def test_hidden_pairs_cost_what_visible_ones_do():
    work = model(rates={"work": 1.0})
    assert time(work, hidden=True) / time(work) == pytest.approx(2, rel=0.01)
    wide = masks.window(63, 0)
    assert time(work, mask=wide) < 0.1 * time(work, mask=wide, hidden=True)


def test_factors_of_known_classes_and_longer_times_of_unknown_ones():
    plain = time(model(rates={"launch": 1000.0}))
    one = model(rates={"launch": 1000.0})
    assert time(one, head_dim=128) == 2 * plain
    assert time(one, mask=masks.full()) == pytest.approx(1.1 * plain)
    assert time(one, head_dim=64) == pytest.approx(2**0.5 * 1.1 * plain)  # between two, an octave from both
    assert time(one, head_dim=256) == pytest.approx(2 * 1.1 * plain)
    assert time(one, mask=masks.window(100)) == pytest.approx(1.3 * plain)
    assert time(one, softcap=30.0) == pytest.approx(1.3 * plain)
    assert time(one, 8192) == pytest.approx(1.15**2 * plain)  # an octave beyond the queries, and the keys


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 64), st.integers(0, 6), st.integers(0, 6), st.integers(0, 3), st.integers(1, 256))
def test_costs_grow_with_every_size(batch, queries, keys, heads, units):
    def at(**sizes: int):
        base = {"batch": batch, "q_len": 2**queries, "kv_len": 2**keys, "heads": 2**heads, "head_dim": 32}
        return costs(shape_of(workload(**(base | sizes), mask=masks.full())), True, units)

    base = at()
    assert all(cost > 0 for cost in base)
    for name, size in (("batch", 2 * batch), ("kv_len", 2 ** (keys + 1)), ("head_dim", 64)):
        more = at(**{name: size})
        assert all(b >= a * (1 - 1e-12) for a, b in zip(base, more, strict=True)), name


def test_a_file_keeps_it(tmp_path):
    path = tmp_path / "policy.json"
    made = policy(entry("torch.sdpa"), prediction=prediction())
    path.write_text(policy_text(made))
    assert load_policy(path).places == made.places


def test_a_file_of_before_predicts_nothing(tmp_path):
    path = tmp_path / "policy.json"
    path.write_text(policy_text(policy(entry("torch.sdpa"))))
    assert "prediction" not in path.read_text()
    assert "time_us" not in path.read_text()
    assert load_policy(path).predicted(workload(1 << 20), "torch", CPU, lambda *_: False) is None


@pytest.mark.parametrize(("change", "words"), [
    (lambda p: p.update(units=0), "units must be at least 1"),
    (lambda p: p["checks"].update(moon=p["checks"]["mask"]), "checks are of shape, class, head_dim, mask, not of moon"),
    (lambda p: p["models"][0]["rates"].update(moon=1.0), "a model has rates for"),
    (lambda p: p["models"][0].update(rates={}), "a model needs rates, all positive"),
    (lambda p: p["models"][0]["rates"].update(launch=-1.0), "a model needs rates, all positive"),
    (lambda p: p["models"][0]["factors"]["mask"].update(causal=0.0), "factors and ranges must be positive"),
    (lambda p: p["models"][0]["ranges"].update(rows=[5, 2]), "factors and ranges must be positive"),
    (lambda p: p["models"][0]["factors"]["head_dim"].update(wide=1.0), "head_dim"),
])  # fmt: skip
def test_broken_models_are_refused(tmp_path, change, words):
    document = json.loads(policy_text(policy(entry("torch.sdpa"), prediction=prediction())))
    change(document["places"][0]["prediction"])
    path = tmp_path / "policy.json"
    path.write_text(json.dumps(document))
    with pytest.raises(BrokenFile, match=words):
        load_policy(path)


def test_of_merged_places_the_models_of_more_shapes_stay():
    few, many = (policy(entry("torch.sdpa"), prediction=prediction(model(shapes=n))) for n in (9, 20))
    for merged in (few | many, many | few):
        (place,) = merged.places
        assert place.prediction is not None
        assert place.prediction.models[0].shapes == 20
    none = policy(entry("torch.sdpa", 64))
    assert (none | few).places[0].prediction == (few | none).places[0].prediction == few.places[0].prediction


def test_which_check_stands_for_a_shape():
    known = [shape_of(workload(1024)), shape_of(workload(1024, head_dim=64, mask=masks.full()))]
    worse = HeldOutCheck(predicted=structs.replace(GOOD, mean=1.2), fixed=BAD)
    parts = prediction().checks | {"mask": worse}
    some = structs.replace(prediction(), checks=parts)
    for fields, words, mean in [
        ({}, "no measured shape is near", 1.01),
        ({"head_dim": 64}, "these axes were not measured together", 1.01),
        ({"head_dim": 96}, "head_dim 96 was not measured", 1.01),
        ({"mask": masks.window(10)}, "mask window was not measured", 1.2),
        ({"mask": masks.window(10), "head_dim": 96}, "mask window and head_dim 96 were not measured", 1.2),
    ]:
        check, why = some.check(shape_of(workload(1 << 16, **fields)), known)
        assert why == words
        assert check is not None
        assert check.predicted.mean == mean


def test_the_packaged_models_are_small():
    for one in packaged():
        for place in one.places:
            if place.prediction is not None:
                assert len(policy_text(structs.replace(one, places=(place,)))) < 120_000
                assert len(place.prediction.models) <= 40
                assert all(len(known.factors["mask"]) <= 16 for known in place.prediction.models)
