"""Policies: what they say of a shape, when they hold their tongue, how they merge, stack, and are read and written."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from msgspec import structs
from policy_factory import barred, entry, place, policy, rival
from record_factory import CPU, workload

import attnbench as ab
from attnbench import policy as policies
from attnbench.cli.choose import choose_from, read_sources
from attnbench.errors import BrokenFile, UsageError
from attnbench.policy import (
    REACH,
    Choice,
    Constraints,
    Policy,
    distance,
    load_policy,
    place_of,
    save_policy,
    shape_of,
    use_policy,
)

GPU = structs.replace(CPU, device="cuda", device_name="Test GPU", threads=8, packages={"torch": "2.13.0", "fa3": "1"})


def pick(found: Policy, q_len: int = 1024, **fields) -> str | None:
    choice = found.choice(workload(q_len, **fields), "torch", CPU)
    return None if choice is None else choice.implementation


class TestChoice:
    two = policy(entry("torch.eager", 256), entry("torch.sdpa", 4096))

    def test_a_measured_shape_gets_its_own(self):
        choice = self.two.choice(workload(256), "torch", CPU)
        assert choice is not None
        assert (choice.implementation, choice.distance) == ("torch.eager", 0)
        assert choice.measured == workload(256).id

    def test_between_shapes_the_nearest_in_log_space_speaks(self):
        assert pick(self.two, 1000) == "torch.eager"
        assert pick(self.two, 1100) == "torch.sdpa"
        choice = self.two.choice(workload(512), "torch", CPU)
        assert choice is not None
        assert choice.distance == pytest.approx(1)

    def test_bounded_memory_holds_for_no_larger_shape(self):
        bounded = policy(entry("torch.eager", 256), entry("torch.sdpa", 4096), within=Constraints(max_memory=10**7))
        assert pick(bounded, 256) == pick(bounded, 200) == "torch.eager"
        assert pick(bounded, 300) is None
        assert pick(bounded, 2000) == "torch.sdpa"
        why = bounded.miss(workload(8192), "torch", CPU)
        assert why is not None
        assert "bounds memory, and 1 x 8192 tokens" in why
        assert pick(self.two, 8192) == "torch.sdpa"

    def test_off_the_grid_the_regret_is_what_was_lost_there(self):
        lost = policies.Regret(mean=1.02, worst=1.3, worst_at="there", shapes=9)
        found = policy(entry("torch.eager", 256), held_out=lost)
        on, off = (found.choice(workload(n), "torch", CPU) for n in (256, 300))
        assert on is not None
        assert (on.regret, on.regret_high) == (1, 1)
        assert off is not None
        assert (off.regret, off.regret_high) == (1.02, 1.3)
        assert str(off).endswith("0.2 octaves away (expected regret 1.020)")

    def test_beyond_its_reach_it_is_silent_and_says_why(self):
        assert pick(self.two, 4096 * 4) == "torch.sdpa"
        assert pick(self.two, 4096 * 5) is None
        why = self.two.miss(workload(4096 * 5), "torch", CPU)
        assert why is not None
        assert "2.3 octaves away, more than the limit of 2" in why

    def test_a_hair_beyond_its_reach_is_seen_to_be_beyond(self):
        why = self.two.miss(workload(4096 * 4 + 1), "torch", CPU)
        assert "is 2.0001 octaves away, more than the limit of 2" in str(why)

    @pytest.mark.parametrize(
        "change",
        [{"dtype": "bfloat16"}, {"mask": ab.masks.full()}, {"pass_": "train"}, {"head_dim": 64}, {"softcap": 30.0}],
        ids=lambda change: next(iter(change)),
    )
    def test_hard_axes_must_agree(self, change):
        assert pick(self.two, 256, **change) is None
        why = self.two.miss(workload(256, **change), "torch", CPU)
        assert why is not None
        name = next(iter(change)).rstrip("_")
        assert f"has no entry for {name}" in why

    def test_a_missing_combination_is_named_whole(self):
        found = policy(entry("torch.eager", 256), entry("torch.sdpa", 256, dtype="bfloat16", head_dim=64))
        why = found.miss(workload(256, dtype="bfloat16"), "torch", CPU)
        assert why is not None
        assert "pass forward, dtype bfloat16, mask causal, head_dim 32 together" in why

    def test_another_size_of_a_mask_is_some_way_off(self):
        found = policy(entry("torch.flex", 256, mask=ab.masks.window(64)))
        near = found.choice(workload(256, mask=ab.masks.window(32)), "torch", CPU)
        assert near is not None
        assert near.implementation == "torch.flex"
        assert near.distance == pytest.approx(0.5 * np.log2(0.22 / 0.12), abs=0.05)
        assert "octaves away" in str(near)

    def test_a_narrow_window_is_not_answered_by_a_wide_one(self):
        found = policy(entry("torch.flex", 8192, mask=ab.masks.window(4096)))
        narrow = workload(8192, mask=ab.masks.window(128))
        assert found.choice(narrow, "torch", CPU) is None
        assert "window (0.38 visible) · float32 · forward) is 2.3 octaves away" in str(found.miss(narrow, "torch", CPU))
        assert pick(found, 8192, mask=ab.masks.window(2048)) == "torch.flex"

    def test_a_file_that_does_not_say_how_much_is_visible_speaks_as_it_did(self):
        told = entry("torch.flex", 8192, mask=ab.masks.window(4096))
        old = policy(structs.replace(told, at=structs.replace(told.at, visible=None)))
        assert pick(old, 8192, mask=ab.masks.window(128)) == "torch.flex"

    def test_causal_and_full_masks_are_told_by_their_lengths(self):
        assert shape_of(workload(1024)).visible is shape_of(workload(64, mask=ab.masks.full())).visible is None

    def test_the_order_of_a_masks_parts_does_not_matter(self):
        one = ab.masks.causal() & ab.masks.lengths([100])
        other = ab.masks.lengths([90]) & ab.masks.causal() & ab.masks.full()
        assert pick(policy(entry("torch.flex", 128, mask=one)), 128, mask=other) == "torch.flex"

    def test_a_mask_that_hides_nothing_is_full(self):
        found = policy(entry("torch.sdpa", 1, kv_len=512, mask=ab.masks.full()))
        assert pick(found, 1, kv_len=512, mask=ab.masks.causal()) == "torch.sdpa"
        assert pick(found, 1, kv_len=512, mask=ab.masks.block_causal([0] * 512)) == "torch.sdpa"
        assert pick(found, 1, kv_len=512, mask=ab.masks.lengths([511])) is None
        assert pick(found, 1, kv_len=512, mask=ab.masks.dense(np.zeros((1, 512)))) is None

    def test_block_causal_masks_of_many_blocks_are_another_kind(self):
        """pi0's three blocks are three calls without a mask; pi0-FAST's text behind its prefix is not."""
        few, other = (np.repeat([0, 1, 2], n) for n in ([96, 1, 31], [64, 2, 62]))
        many = np.concatenate([np.zeros(64, int), np.arange(1, 65)])
        found = policy(entry("jax.cudnn-split", 128, mask=ab.masks.block_causal(few)))
        assert pick(found, 128, mask=ab.masks.block_causal(other)) == "jax.cudnn-split"
        assert pick(found, 128, mask=ab.masks.block_causal(many)) is None
        assert "many blocks" in shape_of(workload(128, mask=ab.masks.block_causal(many))).title
        rows = ab.masks.block_causal(np.stack([few, many]))
        assert "many blocks" in shape_of(workload(128, batch=2, mask=rows)).mask

    def test_batch_and_heads_count_less_than_tokens(self):
        here = shape_of(workload(1024))
        assert distance(here, shape_of(workload(2048))) == pytest.approx(1)
        assert distance(here, shape_of(workload(1024, batch=4))) == pytest.approx(1)
        assert distance(here, shape_of(workload(1024, kv_heads=1))) == pytest.approx(2)
        assert distance(here, shape_of(workload(1024, kv_len=4096))) == pytest.approx(2**0.5)

    def test_a_foreign_framework_device_or_thread_count_is_refused(self):
        assert self.two.choice(workload(256), "jax", CPU) is None
        assert "has no entries for jax" in str(self.two.miss(workload(256), "jax", CPU))
        assert self.two.choice(workload(256), "torch", GPU) is None
        assert "measured on Test CPU 9000 (cpu), this is Test GPU (cuda)" in str(self.two.stale(GPU))
        assert "measured with 2 threads, this process has 7" in str(self.two.stale(structs.replace(CPU, threads=7)))
        assert self.two.stale(CPU) is None

    def test_other_software_makes_it_stale(self):
        newer = structs.replace(CPU, packages={"torch": "2.14.0"})
        assert "measured with torch 2.13.0 (here 2.14.0)" in str(self.two.stale(newer))
        assert self.two.choice(workload(256), "torch", newer) is None
        assert "torch 2.13.0" in str(self.two.miss(workload(256), "torch", newer))

    def test_software_that_computes_no_attention_does_not(self):
        beside = structs.replace(CPU, packages={"torch": "2.13.0", "transformers": "9", "numpy": "3"})
        assert self.two.stale(beside) is None
        assert "transformers" not in place_of(beside).software

    def test_an_absent_package_does_not_but_another_version_does(self):
        found = policy(entry("torch.fa3"), at=GPU)
        without = structs.replace(GPU, packages={"torch": "2.13.0"})
        assert found.stale(without) is None
        assert "fa3 1 (here 2)" in str(found.stale(structs.replace(GPU, packages={"torch": "2.13.0", "fa3": "2"})))

    def test_of_two_places_that_hold_the_one_with_more_of_the_software_speaks(self):
        bare = structs.replace(GPU, packages={"torch": "2.13.0"})
        found = policy(entry("torch.sdpa"), at=bare, made="2027") | policy(entry("torch.fa3"), at=GPU, made="2026")
        choice = found.choice(workload(1024), "torch", GPU)
        assert choice is not None
        assert choice.implementation == "torch.fa3"


def among(one: policies.Entry, *others: policies.Alternative) -> policies.Entry:
    """An entry with alternatives."""
    return structs.replace(one, use=structs.replace(one.use, candidates=1 + len(others), alternatives=others))


class TestBarred:
    """Who was found incorrect at a shape, or kept out by a constraint, is not chosen there from another shape."""

    rivals = rival("torch.eager", 2.0), rival("torch.flex", 3.0)
    wrong = policy(among(entry("torch.fa4", 256), *rivals), barred=(barred(512, ("torch.fa4",)),))

    def test_the_next_best_stands_in_where_that_is_the_nearer_evidence(self):
        assert [pick(self.wrong, n) for n in (128, 256, 362)] == ["torch.fa4"] * 3
        assert [pick(self.wrong, n) for n in (363, 512, 1024)] == ["torch.eager"] * 3
        choice = self.wrong.choice(workload(512), "torch", CPU)
        assert choice is not None
        assert (choice.candidates, choice.regret_known) == (2, False)
        assert [(one.implementation, one.ratio) for one in choice.alternatives] == [("torch.flex", 1.5)]
        assert f"torch.fa4 is left out: found incorrect at {workload(512).id}" in str(choice)

    def test_a_slower_one_that_is_wrong_is_no_alternative(self):
        found = policy(among(entry("torch.fa4", 256), *self.rivals), barred=(barred(512, ("torch.eager",)),))
        choice = found.choice(workload(512), "torch", CPU)
        assert choice is not None
        assert (choice.implementation, [one.label for one in choice.alternatives]) == ("torch.fa4", ["torch.flex"])
        assert choice.left_out == ""

    def test_with_nobody_left_it_is_a_miss_that_says_why(self):
        found = policy(entry("torch.fa4", 256), barred=(barred(512, ("torch.fa4",)),))
        assert pick(found, 256) == "torch.fa4"
        assert pick(found, 512) is None
        why = str(found.miss(workload(512), "torch", CPU))
        assert "has nobody left for 1 x 512 tokens" in why
        assert f"torch.fa4 was found incorrect at {workload(512).id}" in why

    def test_with_nobody_left_the_next_nearest_shape_answers(self):
        found = policy(entry("torch.fa4", 256), entry("torch.sdpa", 1100), barred=(barred(512, ("torch.fa4",)),))
        assert pick(found, 512) == "torch.sdpa"
        assert found.miss(workload(512), "torch", CPU) is None

    def test_other_classes_and_other_configs_are_not_meant(self):
        flex = structs.replace(entry("torch.flex", 256), use=Choice(implementation="torch.flex", config={"size": 64}))
        assert pick(policy(flex, barred=(barred(512, ("torch.flex",)),)), 512) == "torch.flex"
        assert pick(policy(flex, barred=(barred(512, ("torch.flex[size=64]",)),)), 512) is None
        train = policy(entry("torch.fa4", 256), barred=(barred(512, ("torch.fa4",), pass_="train"),))
        assert pick(train, 512) == "torch.fa4"

    def test_a_constraint_keeps_out_at_its_own_place_only(self):
        bound = policy(
            entry("torch.fa4", 256), within=Constraints(deterministic=True), barred=(barred(512, (), ("torch.fa4",)),)
        )
        assert pick(bound, 512) is None
        assert "torch.fa4 was outside the constraints at" in str(bound.miss(workload(512), "torch", CPU))
        assert pick(bound | policy(entry("torch.fa4", 256)), 512) == "torch.fa4"
        wrong = policy(entry("torch.sdpa", 8192), within=Constraints(deterministic=True)) | self.wrong
        assert pick(wrong, 512) == "torch.eager"

    def test_merged_policies_keep_it_until_the_newer_has_it_right_at_that_workload(self):
        for both in (self.wrong | policy(entry("torch.sdpa", 8192)), policy(entry("torch.sdpa", 8192)) | self.wrong):
            assert pick(both, 512) == "torch.eager"
        assert pick(self.wrong | policy(entry("torch.fa4", 512)), 512) == "torch.fa4"
        assert pick(policy(entry("torch.fa4", 512)) | self.wrong, 512) == "torch.eager"
        scaled = policy(entry("torch.fa4", 256), barred=(barred(512, ("torch.fa4",), scale=0.5),))
        assert pick(scaled | policy(among(entry("torch.fa4", 512), *self.rivals)), 512) == "torch.eager"

    def test_a_file_keeps_it_and_one_without_it_reads_as_before(self, tmp_path: Path):
        save_policy(self.wrong, tmp_path / "p.json")
        assert structs.replace(load_policy(tmp_path / "p.json"), origin="") == self.wrong
        document = json.loads((tmp_path / "p.json").read_text())
        del document["places"][0]["barred"]
        (tmp_path / "old.json").write_text(json.dumps(document))
        assert pick(load_policy(tmp_path / "old.json"), 512) == "torch.fa4"


class TestMerge:
    def test_the_right_side_wins_where_both_speak(self):
        left = policy(entry("torch.eager", 256), entry("torch.eager", 512), runs=("a",), made="2026-01")
        right = policy(entry("torch.sdpa", 512), entry("torch.sdpa", 1024), runs=("b",), made="2026-02")
        both = left | right
        assert [pick(both, n) for n in (256, 512, 1024)] == ["torch.eager", "torch.sdpa", "torch.sdpa"]
        (one,) = both.places
        assert (one.runs, one.made) == (("a", "b"), "2026-02")
        assert [pick(right | left, n) for n in (256, 512, 1024)] == ["torch.eager", "torch.eager", "torch.sdpa"]

    def test_only_policies_merge(self):
        with pytest.raises(TypeError, match="unsupported operand"):
            policy(entry("torch.eager", 512)) | {}

    def test_places_stay_apart(self):
        both = policy(entry("torch.eager")) | policy(entry("torch.fa3"), at=GPU)
        assert [one.device for one in both.places] == ["cpu", "cuda"]
        assert both == policy(entry("torch.fa3"), at=GPU) | policy(entry("torch.eager"))

    def test_another_config_is_another_choice(self):
        lost = policies.Regret(mean=1.0, worst=1.0, worst_at="there", shapes=1)
        old, new = (
            structs.replace(one, use=structs.replace(one.use, config={"BLOCK_M": size}))
            for size, one in ((64, entry("torch.flex", 256)), (128, entry("torch.flex", 256)))
        )
        both = policy(old, entry("torch.sdpa", 512), held_out=lost) | policy(new)
        assert both.places[0].held_out is None

    def test_held_out_regret_is_pooled(self):
        def lost(mean: float, shapes: int):
            return policies.Regret(mean=mean, worst=mean, worst_at=f"{mean}", shapes=shapes, missed=1)

        both = policy(entry("torch.eager", 256), held_out=lost(1.0, 3)) | policy(entry("a.b"), held_out=lost(1.1, 1))
        found = both.places[0].held_out
        assert found is not None
        assert found.mean == pytest.approx(1.1**0.25)
        assert (found.worst, found.worst_at, found.shapes, found.missed) == (1.1, "1.1", 4, 2)

    def test_what_is_already_part_of_it_is_not_counted_again(self):
        lost = policies.Regret(mean=1.1, worst=1.2, worst_at="there", shapes=2, missed=1)
        one = policy(entry("torch.eager", 256), entry("torch.eager", 512), held_out=lost, runs=("a",))
        two = policy(entry("torch.sdpa", 1024), held_out=structs.replace(lost, mean=1.0, shapes=4), runs=("b",))
        assert one | one == one
        both = one | two
        assert both.places[0].held_out.shapes == 6  # pyright: ignore[reportOptionalMemberAccess]
        assert both | two == both | both == both
        assert (two | both).places[0].held_out == (both | one).places[0].held_out == both.places[0].held_out

    def test_what_was_found_about_replaced_choices_goes(self):
        """Crossings and held-out regrets of a place are of all its entries together."""
        lost = policies.Regret(mean=1.1, worst=1.3, worst_at="there", shapes=2)
        crossing = policies.Crossing(track="full", pass_="forward", below="a.b", above="c.d", low=256, high=512)
        old = policy(entry("a.b", 256), entry("c.d", 512), held_out=lost, crossings=(crossing,), runs=("a",))
        whole = policy(entry("e.f", 256), entry("e.f", 512), held_out=structs.replace(lost, mean=1.0), runs=("b",))
        part = policy(entry("e.f", 512), held_out=lost, runs=("b",))
        assert (old | whole).places[0].crossings == ()
        assert (old | whole).places[0].held_out == whole.places[0].held_out
        assert (old | part).places[0].crossings == ()
        assert (old | part).places[0].held_out is None
        kept = (old | policy(entry("c.d", 1024), runs=("b",))).places[0]
        assert (kept.crossings, kept.held_out) == ((crossing,), lost)

    def test_no_shape_is_counted_twice(self):
        """Of places that share shapes the one with more speaks, of as many the newer."""

        def made(run: str, mean: float, *lengths: int) -> Policy:
            lost = policies.Regret(mean=mean, worst=1.2, worst_at=run, shapes=len(lengths))
            return policy(*(entry("torch.eager", n) for n in lengths), held_out=lost, runs=(run,))

        one, same = made("a", 1.1, 256, 512), made("b", 1.0, 256, 512)
        assert (one | same).places[0].held_out == same.places[0].held_out
        assert (same | one).places[0].held_out == one.places[0].held_out
        more, beside = made("c", 1.05, 512, 1024, 2048), made("d", 1.05, 4096)
        for both in (one | more, more | one):
            assert both.places[0].held_out == more.places[0].held_out
        silent = policy(entry("torch.eager", 256), runs=("e",))
        assert (one | silent).places[0].held_out == (silent | one).places[0].held_out == one.places[0].held_out
        assert (one | beside).places[0].held_out.shapes == 3  # pyright: ignore[reportOptionalMemberAccess]

    def test_choices_under_other_constraints_stay_apart(self):
        free = policy(entry("torch.eager", 256), made="2026-01")
        bound = policy(entry("torch.sdpa", 256), made="2026-02", within=Constraints(deterministic=True))
        both = free | bound
        assert [one.within for one in both.places] == [None, Constraints(deterministic=True)]
        choice = both.choice(workload(256), "torch", CPU)
        assert choice is not None
        assert (choice.implementation, choice.within) == ("torch.sdpa", "deterministic"), "the younger stands"


class TestFiles:
    whole = policy(
        structs.replace(
            entry("torch.flex", 300),
            use=Choice(
                implementation="torch.flex",
                config={"block_size": 64, "wide": True, "name": "x"},
                regret=1.005,
                regret_high=1.02,
                candidates=3,
                alternatives=(rival("torch.eager", 1.2), rival("torch.sdpa", 0.995)),
                measured="b1",
            ),
        ),
        entry("torch.sdpa", 4096, v_head_dim=16, softcap=20.0),
        held_out=policies.Regret(mean=1.01, worst=1.1, worst_at="there", shapes=2),
        crossings=(
            policies.Crossing(track="t", pass_="forward", below="a.a", above="b.b", tokens=640, low=512, high=1024),
        ),
    )

    def test_round_trip(self, tmp_path: Path):
        path = tmp_path / "made" / "policy.json"
        save_policy(self.whole, path)
        assert structs.replace(load_policy(path), origin="") == self.whole
        assert load_policy(path).origin == str(path)
        assert [one.name for one in path.parent.iterdir()] == ["policy.json"]

    def test_the_text_is_stable_readable_and_plain(self):
        text = policies.policy_text(self.whole)
        assert text == policies.policy_text(self.whole)
        assert json.loads(text)["schema"] == 1
        assert [line.strip()[:5] for line in text.splitlines()].count('"use"') == 2
        assert "origin" not in text

    def test_printed_it_is_a_line_for_each_place(self):
        text = str(self.whole)
        assert len(text.splitlines()) == 1 + len(self.whole.places)
        assert f"{len(self.whole.entries)} choices" in text
        assert "regret" in text

    def test_what_is_not_there(self, tmp_path: Path):
        with pytest.raises(UsageError, match=r"cannot read the policy .*none\.json: No such file.*attnbench choose"):
            load_policy(tmp_path / "none.json")
        with pytest.raises(UsageError, match="Is a directory"):
            load_policy(tmp_path)

    @pytest.mark.parametrize(
        ("content", "why"),
        [
            ("", "not a policy file"),
            ("{", "not a policy file"),
            ("[1]", 'has no "kind": "policy"'),
            ('{"line": "header"}', 'has no "kind": "policy"'),
            ("[" * 100_000, "not a policy file"),
            ('{"kind": "policy", "schema": 2}', "newer attnbench"),
            ('{"kind": "policy", "schema": "x"}', "Expected `int`"),
            ('{"kind": "policy", "places": [{"device": "cpu"}]}', "device_name"),
            ('{"kind": "policy", "place": []}', "unknown field `place`"),
            ("\udcff", "not a policy file"),
        ],
        ids=["empty", "torn", "list", "run file", "deep", "newer", "no number", "no name", "misspelt", "bytes"],
    )
    def test_broken_files(self, tmp_path: Path, content: str, why: str):
        path = tmp_path / "policy.json"
        path.write_bytes(content.encode("utf-8", "surrogateescape"))
        with pytest.raises(BrokenFile, match=why) as caught:
            load_policy(path)
        assert str(caught.value).startswith(str(path))

    def test_the_line_that_is_broken_is_named(self, tmp_path: Path):
        path = tmp_path / "policy.json"
        lines = policies.policy_text(self.whole).splitlines()
        at = next(n for n, line in enumerate(lines) if '"framework":' in line)
        lines[at] = lines[at].replace('"framework":', '"framework"')
        path.write_text("\n".join(lines))
        with pytest.raises(BrokenFile, match=rf"policy\.json, line {at + 1}: .*Expecting ':'"):
            load_policy(path)

    @pytest.mark.parametrize(
        ("field", "value", "why"),
        [
            ("q_len", 0, "q_len must be at least 1"),
            ("batch", -3, "batch must be at least 1"),
            ("pass", "sideways", "Invalid enum"),
            ("dtype", "float33", r'dtype "float33" is not one of float64, .* at `\$\.places\[0\]\.entries\[0\]\.at`'),
            ("mask", "causl", r'mask "causl" is not one of .*causal, .* at `\$\.places\[0\]\.entries\[0\]\.at`'),
            ("mask", "lengths&causal", 'mask "lengths&causal" must be written causal&lengths'),
            ("mask", "causal&full", "must be written causal"),
            ("mask", "causal (many blocks)", "is not one of"),
            ("implementation", "", "must name an implementation"),
            ("regret", 0.5, "regret must be 1 or more"),
            ("regret_high", 0.9, "regret_high at least regret, not"),
            ("config", {"a": [1]}, "config"),
        ],
    )
    def test_hostile_entries(self, tmp_path: Path, field: str, value: object, why: str):
        document = json.loads(policies.policy_text(self.whole))
        one = document["places"][0]["entries"][0]
        one["at" if field in one["at"] else "use"][field] = value
        path = tmp_path / "policy.json"
        path.write_text(json.dumps(document))
        with pytest.raises(BrokenFile, match=why):
            load_policy(path)

    def test_two_entries_for_one_shape_are_refused(self, tmp_path: Path):
        document = json.loads(policies.policy_text(self.whole))
        entries = document["places"][0]["entries"]
        entries.append(entries[0])
        path = tmp_path / "policy.json"
        path.write_text(json.dumps(document))
        why = r"more than one choice for 1 x 300 tokens · 4 heads of 32 .* at `\$\.places\[0\]`"
        with pytest.raises(BrokenFile, match=why):
            load_policy(path)

    def test_a_place_where_nothing_can_be_written(self, tmp_path: Path):
        (tmp_path / "file").write_text("")
        with pytest.raises(UsageError, match="Choose another file with -o"):
            save_policy(self.whole, tmp_path / "file" / "policy.json")


@pytest.fixture
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Neither settings nor packaged policies."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("attnbench.policy.stack.packaged", lambda: ())
    monkeypatch.delenv("ATTNBENCH_POLICY", raising=False)
    policies.forget()
    yield
    policies.forget()


@pytest.mark.usefixtures("_alone")
class TestActive:
    inner, outer = policy(entry("torch.sdpa", 512)), policy(entry("torch.eager", 512), entry("torch.eager", 128))

    def test_they_stack_and_the_innermost_is_asked_first(self):
        assert policies.active() == ()
        with ab.use_policy(self.outer):
            with ab.use_policy(self.inner) as given:
                assert given is self.inner
                assert policies.active() == (self.inner, self.outer)
                found = policies.find(workload(512), "torch", CPU)
                assert found.choice is not None
                assert (found.choice.implementation, found.policy, found.misses) == ("torch.sdpa", self.inner, ())
            assert policies.active() == (self.outer,)
        assert policies.active() == ()

    def test_one_that_is_silent_lets_the_next_speak(self):
        on = workload(512, head_dim=64)
        other = policy(entry("torch.flex", 512, head_dim=64))
        with use_policy(other), use_policy(self.inner):
            found = policies.find(on, "torch", CPU)
        assert found.choice is not None
        assert found.choice.implementation == "torch.flex"
        assert "has no entry for head_dim 64" in found.misses[0]

    def test_whom_one_found_incorrect_the_next_does_not_choose(self):
        """The other way round it does: the policy that is asked first has the last word."""
        wrong = policy(entry("torch.fa4", 128), barred=(barred(512, ("torch.fa4",)),))
        right = policy(among(entry("torch.fa4", 512), rival("torch.eager", 2.0)))
        with use_policy(right), use_policy(wrong):
            found = policies.find(workload(512), "torch", CPU)
        assert found.choice is not None
        assert (found.choice.implementation, found.policy) == ("torch.eager", right)
        assert "torch.fa4 was found incorrect at" in found.misses[0]
        with use_policy(wrong), use_policy(right):
            found = policies.find(workload(512), "torch", CPU)
        assert found.choice is not None
        assert found.choice.implementation == "torch.fa4"

    def test_a_miss_carries_every_reason(self):
        with use_policy(self.outer), use_policy(self.inner):
            found = policies.find(workload(512), "torch", GPU)
        assert found.choice is None
        assert len(found.misses) == 2
        assert all("does not hold here" in why for why in found.misses)

    def test_the_generation_tells_what_is_active(self):
        before = policies.generation()
        with use_policy(self.inner):
            inside = policies.generation()
            with use_policy(self.outer):
                assert policies.generation() not in (before, inside)
            assert policies.generation() == inside
        assert policies.generation() == before != inside
        with use_policy(structs.replace(self.inner, origin="elsewhere")):
            assert policies.generation() == inside
        assert len({before, inside}) == 2
        policies.forget()
        assert policies.generation() != before

    @pytest.mark.parametrize("given", ["policy.json", {"kind": "policy"}, None])
    def test_a_file_is_no_policy(self, given):
        with pytest.raises(UsageError, match=r"what load_policy\(path\) returns"), ab.use_policy(given):
            raise AssertionError("never reached")

    def test_an_error_inside_takes_it_off_the_stack(self):
        with pytest.raises(ZeroDivisionError), use_policy(self.inner):
            _ = 1 / 0
        assert policies.active() == ()

    def test_threads_do_not_see_each_others(self):
        seen: dict[int, bool] = {}
        barrier = threading.Barrier(8)

        def work(number: int) -> None:
            mine = policy(entry(f"torch.n{number}", 512))
            good = policies.active() == ()
            for _ in range(200):
                with use_policy(mine):
                    barrier.wait()
                    good &= policies.active() == (mine,)
                    found = policies.find(workload(512), "torch", CPU)
                    good &= found.choice is not None and found.choice.implementation == f"torch.n{number}"
            seen[number] = good and policies.active() == ()

        threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
        with use_policy(self.outer):
            for one in threads:
                one.start()
            for one in threads:
                one.join()
        assert seen == dict.fromkeys(range(8), True)

    def test_the_users_file_comes_after_the_with_and_before_the_packaged(self, monkeypatch, tmp_path: Path):
        monkeypatch.setattr("attnbench.policy.stack.packaged", lambda: (self.outer,))
        save_policy(self.inner, tmp_path / "mine.json")
        (tmp_path / "attnbench.toml").write_text('policy = "mine.json"\n')
        policies.forget()
        with use_policy(self.inner):
            assert [one.origin for one in policies.active()] == ["", str(tmp_path / "mine.json"), ""]
        monkeypatch.setenv("ATTNBENCH_POLICY", "nowhere.json")
        assert len(policies.active()) == 2  # read once, not at every call
        policies.forget()
        with pytest.raises(UsageError, match=r"nowhere\.json"):
            policies.active()


class TestPackaged:
    def test_each_holds_for_its_device_and_is_small(self):
        found = policies.packaged()
        assert {(place.device, place.framework) for one in found for place in one.places} >= {
            ("cpu", "torch"),
            ("cpu", "jax"),
            ("cuda", "torch"),
            ("cuda", "jax"),
        }
        for one in found:
            assert one.origin.startswith("packaged ")
            assert all(place.entries and place.software and place.runs and place.made for place in one.places)
            assert len(policies.policy_text(one)) < 160_000

    @pytest.mark.parametrize(
        ("name", "runs"), [("h200", ["h200/*.jsonl"]), ("cpu", ["cpu/quick.jsonl", "cpu/regret-grid.jsonl"])]
    )
    def test_they_are_what_the_published_runs_say(self, name: str, runs: list[str]):
        """`make policies` writes them anew."""
        results = Path(__file__).parents[2] / "results"
        paths = [path for some in runs for path in sorted(results.glob(some))]
        sources = read_sources([str(path) for path in paths])
        chosen = choose_from(sources, Constraints(forbid=("torch.compiled",))).policy
        packaged = Path(policies.__file__).parents[1] / "policies" / f"{name}.json"
        assert policies.policy_text(chosen) == packaged.read_text()

    def test_the_h200_is_chosen_for(self):
        (found,) = (one for one in policies.packaged() if any(place.device == "cuda" for place in one.places))
        (there,) = (place for place in found.places if place.framework == "torch")
        here = structs.replace(GPU, device_name=there.device_name, packages=there.software, capability=(9, 0))
        on = ab.Workload(
            batch=1, q_len=3000, heads=32, kv_heads=8, head_dim=128, dtype="bfloat16", mask=ab.masks.causal()
        )
        choice = found.choice(on, "torch", here)
        assert choice is not None
        assert choice.candidates > 3
        assert 0 < choice.distance <= REACH


def test_it_is_light():
    code = (
        "import sys, attnbench.policy; "
        "print([n for n in sys.modules if n.split('.')[0] in ('torch', 'jax', 'scipy', 'rich') "
        "or n.startswith(('attnbench.measuring', 'attnbench.run', 'attnbench.report', 'attnbench.analyse'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


def test_a_place_without_entries_has_no_regret():
    assert place().on_grid is None
