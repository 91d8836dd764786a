"""Workloads: defaults, identity, refusals. Records: only ok has a speed. Environments: the fingerprint."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from attnbench import masks, spec
from attnbench.errors import InvalidWorkload
from attnbench.spec import Cell, Cost, Environment, Errors, Memory, Ok, Record, Time, VerifiedAt, Workload

SMALL = {"batch": 1, "q_len": 8, "heads": 4, "head_dim": 16}


def test_defaults_follow_the_given_sizes():
    w = Workload(**SMALL)
    assert (w.kv_len, w.kv_heads, w.value_dim, w.mask, w.group) == (8, 4, 16, masks.full(), 1)
    assert w.softmax_scale == 0.25
    assert not w.needs_gradients
    assert w == Workload(**SMALL, kv_len=8, kv_heads=4, v_head_dim=16, mask=masks.full())


def test_ids_are_pinned():
    """Run files, baselines and policies are keyed by these: a change here orphans all of them."""
    assert Workload(**SMALL).id == "b1-t8-h4-d16-full-float32-forward"
    w = Workload(
        batch=2, q_len=1, kv_len=64, heads=8, kv_heads=2, head_dim=192, v_head_dim=128, dtype="bfloat16",
        mask=masks.causal() & masks.window(4), pass_="train", scale=0.5, softcap=50.0, inputs="sincostan",
    )  # fmt: skip
    assert w.id == "b2-t1x64-h8:2-d192/128-causal&window4:0-bfloat16-train-scale=0.5-softcap=50-inputs=sincostan"


def test_source_and_tags_are_no_part_of_the_identity():
    assert Workload(**SMALL, source="somewhere", tags=("a",)).id == Workload(**SMALL).id


@pytest.mark.parametrize(
    "change",
    [{"batch": 2}, {"kv_len": 9}, {"kv_heads": 2}, {"v_head_dim": 8}, {"dtype": "float64"}, {"mask": masks.causal()},
     {"pass_": "train"}, {"scale": 1.0}, {"softcap": 3.0}, {"inputs": "sincostan"}],
    ids=str,
)  # fmt: skip
def test_everything_else_is(change):
    assert Workload(**(SMALL | change)).id != Workload(**SMALL).id
    assert Workload(**(SMALL | change)).axes != Workload(**SMALL).axes


def test_json_round_trip_keeps_the_id_and_speaks_of_pass():
    w = Workload(**SMALL, pass_="train", mask=masks.lengths([3]) & masks.causal())
    text = msgspec.json.encode(w)
    assert b'"pass":"train"' in text
    back = msgspec.json.decode(text, type=Workload)
    assert back == w
    assert back.id == w.id


WRONG = [
    ({"batch": 0}, "batch must be a whole number of at least 1, not 0"),
    ({"q_len": -1}, "q_len must be"),
    ({"q_len": 2.0}, "q_len must be"),
    ({"heads": True}, "heads must be"),
    ({"heads": 12, "kv_heads": 5}, "12 query heads cannot share 5 key/value heads: the second must divide the first "
     "(1, 2, 3, 4, 6 or 12)"),
    ({"batch": np.float64(2)}, "batch must be a whole number"),
    ({"batch": np.True_}, "batch must be a whole number"),
    ({"q_len": 10**20}, "q_len can be 2147483647 at most"),
    ({"heads": 2**31 - 1, "kv_heads": 2}, "must divide the first (1 or 2147483647)"),
    ({"scale": 10**400}, "scale must be a finite number"),
    ({"mask": np.ones((8, 8), bool)}, "wrap an array in masks.dense"),
    ({"dtype": "float8"}, 'dtype "float8" is not one of float64, float32'),
    ({"pass_": "both"}, 'pass "both" is not one of forward, backward, train'),
    ({"inputs": "zeros"}, 'inputs "zeros" is not one of'),
    ({"softcap": -1.0}, "softcap must be positive"),
    ({"softcap": "big"}, "softcap must be a finite number"),
    ({"scale": float("nan")}, "scale must be a finite number"),
    ({"mask": masks.lengths([1, 2])}, "has 2 batch rows, the workload has 1"),
    ({"mask": masks.dilated([4], [2]), "kv_len": 9}, "self-attention"),
]  # fmt: skip


@pytest.mark.parametrize("change,words", WRONG, ids=[words[:40] for _, words in WRONG])
def test_impossible_workloads_are_refused(change, words):
    with pytest.raises(InvalidWorkload) as caught:
        Workload(**(SMALL | change))
    assert words in str(caught.value)


def test_whole_numbers_of_numpy_are_taken_as_pythons_own():
    sizes = {name: np.int64(value) for name, value in SMALL.items()}
    w = Workload(**sizes, kv_len=np.int32(8), kv_heads=np.uint8(4))
    assert w == Workload(**SMALL)
    assert all(type(getattr(w, name)) is int for name in spec.SIZES)
    assert msgspec.json.encode(w) == msgspec.json.encode(Workload(**SMALL))


def test_cell_ids_tell_configs_apart():
    w = Workload(**SMALL)
    assert Cell("torch.flex", w).id == f"torch.flex/{w.id}"
    assert Cell("torch.flex", w, {"b": 2, "a": 1}).id == f"torch.flex[a=1,b=2]/{w.id}"


def ok(**more) -> Ok:
    return Ok(
        implementation="numpy.reference", workload=Workload(**SMALL), errors=Errors(forward=0.0), deterministic=True,
        verified_at=VerifiedAt(shape={"batch": 1}, share=1.0), memory=Memory(peak_bytes=None, reason="not asked"),
        cost=Cost(flops=1, bytes=1), **more,
    )  # fmt: skip


NOT_OK = (spec.Unsupported, spec.Incorrect, spec.OutOfMemory, spec.Failed, spec.Timeout)


def test_records_round_trip_by_their_status():
    records = [ok(), *(kind(implementation="x", workload=Workload(**SMALL), reason="why") for kind in NOT_OK)]
    statuses = ["ok", "unsupported", "incorrect", "out_of_memory", "failed", "timeout"]
    assert [record.status for record in records] == statuses
    for record, status in zip(records, statuses):
        text = msgspec.json.encode(record)
        assert f'"status":"{status}"'.encode() in text
        assert msgspec.json.decode(text, type=Record) == record


@pytest.mark.parametrize("kind", NOT_OK)
def test_only_ok_can_have_a_speed(kind):
    time = Time(
        samples_ns=(1.0,), median_ns=1.0, ci95_ns=(1.0, 1.0), min_ns=1.0, max_ns=1.0, p50_ns=1.0, p95_ns=1.0,
        p99_ns=1.0, mean_ns=1.0, std_ns=0.0, outliers=0,
    )  # fmt: skip
    assert ok(time=time).time.median_ns == 1.0
    with pytest.raises(TypeError):
        kind(implementation="x", workload=Workload(**SMALL), reason="why", time=time)
    assert kind(implementation="x", workload=Workload(**SMALL), reason="why").time is None


def test_fingerprint_is_of_the_hard_facts():
    base = Environment(device="cpu", device_name="x", packages={"torch": "2.13", "numpy": "2"})
    same = Environment(device="cpu", device_name="x", packages={"numpy": "2", "torch": "2.13"}, clocks={"load": 1.0})
    other = Environment(device="cpu", device_name="x", packages={"numpy": "2", "torch": "2.14"})
    assert base.fingerprint == same.fingerprint != other.fingerprint
    assert len(base.fingerprint) == 12


def test_another_version_of_attnbench_is_another_key():
    older, old, new = (
        Environment(device="cpu", device_name="x", harness=harness) for harness in ("", "0.1.0", "0.1.0 (estimator 2)")
    )
    assert len({one.fingerprint for one in (older, old, new)}) == 3
    assert not old.agrees(new)
    assert not older.agrees(old), "unknown is not the same"
    assert older.agrees(older)
