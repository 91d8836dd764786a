"""Masks of both alignments, and of other shares: where the lengths differ, neither alignment answers for the other."""

from __future__ import annotations

import json
from functools import reduce
from operator import and_

import numpy as np
import pytest
from dispatch_problem import here
from hypothesis import given
from hypothesis import strategies as st
from policy_factory import entry, policy
from record_factory import CPU, named_run, ok, workload

import attnbench as ab
from attnbench import masks
from attnbench.choosing.choose import choose
from attnbench.masks import AnyMask, MaskShape
from attnbench.policy import Choice, Constraints, Entry, distance, load_policy, mask_kind, policy_text, shape_of

LONG = {"q_len": 64, "kv_len": 2048}
BOTH = ("bottom-right", "top-left")
ALIGNED = {
    "causal": masks.causal,
    "window": lambda align: masks.window(32, align=align),
    "two-sided window": lambda align: masks.window(8, 8, align=align),
    "prefix": lambda align: masks.prefix(16, align),
    "causal&lengths": lambda align: masks.causal(align) & masks.lengths([1500]),
}


@pytest.mark.parametrize("made", ALIGNED.values(), ids=ALIGNED)
@pytest.mark.parametrize("lengths", [(64, 2048), (2048, 64), (2047, 2048)], ids=str)
def test_one_alignment_does_not_answer_for_the_other(made, lengths):
    q_len, kv_len = lengths
    for measured, asked in (BOTH, BOTH[::-1]):
        found = policy(entry("torch.sdpa", q_len, kv_len=kv_len, mask=_cut(made(measured), kv_len)))
        on = workload(q_len, kv_len=kv_len, mask=_cut(made(asked), kv_len))
        assert found.choice(on, "torch", CPU) is None
        assert f"has no entry for mask {mask_kind(on)}" in str(found.miss(on, "torch", CPU))
        assert ("(top-left)" in mask_kind(on)) == (asked == "top-left")


def _cut(mask: AnyMask, kv_len: int) -> AnyMask:
    """The mask, with lengths that fit."""
    return mask.split()[0] & masks.lengths([kv_len * 3 // 4]) if "lengths" in mask.kinds else mask


@pytest.mark.parametrize("made", ALIGNED.values(), ids=ALIGNED)
def test_where_the_lengths_are_equal_both_are_one_mask(made):
    one, other = (shape_of(workload(2048, mask=made(align))) for align in BOTH)
    assert one == other
    assert "top-left" not in one.mask


def test_a_part_of_each_alignment():
    on = workload(**LONG, mask=masks.causal() & masks.causal("top-left"))
    assert shape_of(on).mask == "causal&causal (top-left)"
    assert shape_of(on).visible == pytest.approx(65 / 2 / 2048, rel=0.01)


def test_an_entry_of_before_is_aligned_to_the_bottom_right(tmp_path):
    """Files of an attnbench that did not tell the alignments apart."""
    document = json.loads(policy_text(policy(entry("torch.sdpa", **LONG))))
    (place,) = document["places"]
    (one,) = place["entries"]
    assert one["at"]["mask"] == "causal"
    one["at"] = {
        "pass": "forward", "dtype": "float32", "mask": "causal", "head_dim": 32, "heads": 4, "kv_heads": 4, "batch": 1,
        **LONG,
    }  # fmt: skip
    path = tmp_path / "policy.json"
    path.write_text(json.dumps(document))
    read = load_policy(path)
    choice = read.choice(workload(**LONG), "torch", CPU)
    assert choice is not None
    assert choice.distance == 0
    assert read.choice(workload(**LONG, mask=masks.causal("top-left")), "torch", CPU) is None


def test_what_is_measured_at_the_top_left_is_written_and_read(tmp_path):
    made = policy(entry("torch.eager", **LONG, mask=masks.causal("top-left")), entry("torch.sdpa", **LONG))
    path = tmp_path / "policy.json"
    path.write_text(policy_text(made))
    assert {one.at.mask: one.use.implementation for one in load_policy(path).entries} == {
        "causal (top-left)": "torch.eager",
        "causal": "torch.sdpa",
    }


def test_a_run_of_both_alignments_gives_an_entry_for_each():
    times = {("bottom-right", "torch.eager"): 2e6, ("bottom-right", "torch.sdpa"): 1e6}
    times |= {("top-left", "torch.eager"): 1e6, ("top-left", "torch.sdpa"): 2e6}
    records = [
        ok(name, ns * np.linspace(0.999, 1.001, 30), workload(**LONG, mask=masks.causal(align)))
        for (align, name), ns in times.items()
    ]
    found = choose([named_run("run.jsonl", "2026-01-01", records)], Constraints()).policy
    assert {one.at.mask: one.use.implementation for one in found.entries} == {
        "causal": "torch.sdpa",
        "causal (top-left)": "torch.eager",
    }


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore::attnbench.errors.PolicyWarning")
@pytest.mark.parametrize(("measured", "asked"), [BOTH, BOTH[::-1]])
def test_explain_tells_the_truth_for_both(measured, asked):
    torch = pytest.importorskip("torch")
    q, k = (torch.zeros(1, n, 4, 16) for n in LONG.values())
    on = ab.Workload(batch=1, **LONG, heads=4, head_dim=16, mask=masks.causal(measured))
    use = Choice(implementation="torch.eager", candidates=4, measured=on.id)
    with ab.use_policy(here(Entry(at=shape_of(on), use=use))):
        same, other = (ab.explain(q, k, k, mask=masks.causal(align)) for align in (measured, asked))
    assert same.evidence is not None
    assert (same.pick, same.evidence.distance) == ("torch.eager", 0)
    assert f"first of 4 measured at {on.id}" in same.why
    assert (other.evidence, other.regret) == (None, None)
    assert "no measured policy covers it" in other.why
    assert any("has no entry for mask causal" in reason for reason in other.missed)


@pytest.mark.parametrize("size", [0, 1, 2048])
def test_a_mask_that_shows_nothing_answers_for_no_other(size: int):
    nothing = workload(**LONG, mask=masks.lengths([0]))
    found = policy(entry("torch.sdpa", **LONG, mask=masks.lengths([0])))
    choice = found.choice(workload(**LONG, mask=masks.lengths([size])), "torch", CPU)
    assert (choice is not None) == (size == 0)
    assert "lengths (0 visible)" in shape_of(nothing).title


SIDES = st.none() | st.integers(0, 15)
KINDS = ("block_causal", "causal", "documents", "lengths", "prefix", "window")


@st.composite
def mask_of(draw: st.DrawFn, kind: str, shape: MaskShape) -> AnyMask:
    """A mask of the kind that fits the lengths."""
    align = draw(st.sampled_from(BOTH))
    ids = st.lists(st.integers(0, 3), min_size=shape.kv_len, max_size=shape.kv_len).map(sorted)
    q_ids = st.lists(st.integers(0, 3), min_size=shape.q_len, max_size=shape.q_len)
    match kind:
        case "causal":
            return masks.causal(align)
        case "window":
            return masks.window(draw(SIDES), draw(SIDES), align)
        case "prefix":
            return masks.prefix(draw(st.integers(0, 15)), align)
        case "lengths":
            return masks.lengths([draw(st.integers(0, shape.kv_len))])
        case "documents":
            return masks.documents(draw(ids), draw(q_ids))
        case _:
            return masks.block_causal(draw(ids), draw(q_ids))


@given(st.data(), st.integers(1, 13), st.integers(1, 13), st.sets(st.sampled_from(KINDS), min_size=1, max_size=2))
def test_masks_that_show_unequal_shares_are_never_one_measured_shape(data, q_len, kv_len, kinds):
    shape = MaskShape(1, 4, q_len, kv_len)
    drawn = [[data.draw(mask_of(kind, shape)) for kind in sorted(kinds)] for _ in range(2)]
    one, other = (workload(q_len, kv_len=kv_len, mask=reduce(and_, parts)) for parts in drawn)
    a, b = shape_of(one), shape_of(other)
    if a.hard == b.hard and distance(a, b) == 0:
        pairs = [w.visible_mask.array(shape).mean() for w in (one, other)]
        assert pairs[0] == pytest.approx(pairs[1], rel=0.01)
