"""Records -> policy: the known best is chosen, ties are settled alike every time, constraints hold, regret is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from choice_stability import agreement, measured
from length_factory import GPU, along
from msgspec import structs
from policy_factory import entry, policy
from record_factory import CPU, incorrect, named_run, ok, timing, unsupported, workload

from attnbench import masks
from attnbench.choosing.candidates import Ground
from attnbench.choosing.choose import Chosen, choose, fixed_losses, policy_loss
from attnbench.choosing.text import document
from attnbench.errors import UnknownName
from attnbench.policy import Constraints, Policy, load_policy, policy_text
from attnbench.results.run_file import read_run
from attnbench.spec import Errors, Failed, Memory, Ok, Record

ROOT = Path(__file__).parents[2]
LENGTHS = (128, 256, 512, 1024, 2048)


def timed(name: str, ns: float, seed: int = 0, spread: float = 0.01, q_len: int = 128, **fields) -> Ok:
    """Interleaved rounds of a machine that drifts: the drift is everybody's, the noise is its own."""
    rng, rounds = np.random.default_rng([seed, *name.encode()]), 30
    drift = np.exp(0.1 * np.sin(np.arange(rounds) / 4))
    shape = fields.pop("shape", {})
    return ok(name, ns * drift * np.exp(spread * rng.standard_normal(rounds)), workload(q_len, **shape), **fields)


def chosen(*records: Record, **constraints) -> Chosen:
    return choose([named_run("run.jsonl", "2026-01-01", records)], Constraints(**constraints))


def picks(found: Chosen | Policy) -> dict[int, str]:
    policy = found.policy if isinstance(found, Chosen) else found
    return {entry.at.q_len: entry.use.label for entry in policy.entries}


def memory(peak: int) -> Memory:
    return Memory(peak_bytes=peak)


class TestBest:
    def test_the_fastest_of_each_shape(self):
        eager = [timed("torch.eager", 10 * n, q_len=n) for n in LENGTHS]
        fast = [timed("torch.sdpa", 4000 + 2 * n, q_len=n) for n in LENGTHS]
        found = chosen(*eager, *fast)
        assert picks(found) == {
            128: "torch.eager", 256: "torch.eager", 512: "torch.sdpa", 1024: "torch.sdpa", 2048: "torch.sdpa",
        }  # fmt: skip
        (place,) = found.policy.places
        assert (place.device_name, place.framework, place.threads) == ("Test CPU 9000", "torch", 2)
        assert (place.runs, place.made) == (("run.jsonl",), "2026-01-01")
        last = place.entries[-1].use
        assert (last.regret, last.candidates, last.measured) == (1.0, 2, workload(2048).id)
        assert last.runner_up is not None
        assert last.runner_up.implementation == "torch.eager"
        assert last.runner_up.ratio == pytest.approx(20480 / 8096, rel=0.02)
        assert last.regret_high == 1

    def test_frameworks_and_devices_are_chosen_for_apart(self):
        jax = structs.replace(CPU, framework="jax", packages={"jax": "0.10"})
        found = chosen(
            timed("torch.eager", 1e6), timed("jax.xla", 2e6, environment=jax), timed("torch.fa3", 1e3, environment=GPU)
        )
        told = [(place.device, place.framework, place.entries[0].use.label) for place in found.policy.places]
        assert sorted(told) == [
            ("cpu", "jax", "jax.xla"),
            ("cpu", "torch", "torch.eager"),
            ("cuda", "torch", "torch.fa3"),
        ]

    def test_a_library_that_only_one_run_had_makes_no_place_of_its_own(self):
        more = structs.replace(CPU, packages=CPU.packages | {"flash-attn-4": "4.0"})
        newer = structs.replace(more, packages=more.packages | {"flash-attn-4": "5.0"})
        first, second = timed("torch.sdpa", 1e6), timed("torch.sdpa", 2e6, q_len=512, environment=more)
        (place,) = chosen(first, second).policy.places
        assert [len(place.entries), place.software["flash-attn-4"]] == [2, "4.0"]
        third = timed("torch.sdpa", 2e6, q_len=1024, environment=newer)
        assert len(chosen(second, third).policy.places) == 2

    def test_configs_are_candidates(self):
        found = chosen(timed("torch.flex", 2e6), timed("torch.flex", 1e6, config={"block_size": 64}))
        (entry,) = found.policy.entries
        assert (entry.use.implementation, entry.use.config) == ("torch.flex", {"block_size": 64})

    def test_what_may_not_be_chosen(self):
        found = choose(
            [
                named_run(
                    "run",
                    "2026",
                    [
                        timed("torch.sage", 1e3, approximate=True),
                        timed("torch.ring", 1e3),
                        timed("torch.hf-sdpa", 1e3),
                        timed("my_kernel", 1e3),
                        timed("anchor.matmul", 1e3),
                        ok("torch.checked"),
                        timed("torch.nowhere", 1e3, environment=None),
                        unsupported("torch.fa3", "needs cuda"),
                        timed("torch.eager", 1e6),
                    ],
                )
            ],
            left_out={"torch.ring": "by name only: it takes several devices"},
        )
        assert picks(found) == {128: "torch.eager"}
        assert found.policy.entries[0].use.candidates == 1

    def test_what_could_not_be_chosen_says_why(self):
        found = chosen(timed("torch.eager", 1e6), unsupported("torch.fa3", "needs cuda", workload(256)))
        (one,) = found.unchosen
        assert (one.framework, one.workload) == ("torch", workload(256).id)
        assert one.why == "torch.fa3: unsupported: needs cuda"

    def test_workloads_that_one_entry_stands_for_are_settled_together(self):
        first, last = ({"mask": masks.valid([early] * 64 + [not early] * 64)} for early in (True, False))
        found = chosen(
            timed("torch.flex", 1e6, shape=first), timed("torch.flex", 4e6, shape=last),
            timed("torch.sdpa", 3e6, shape=first), timed("torch.sdpa", 3e6, shape=last),
        )  # fmt: skip
        (entry,) = found.policy.entries
        assert entry.use.implementation == "torch.flex"
        assert entry.use.alternatives[0].ratio == pytest.approx((3 * 3 / 4) ** 0.5, rel=0.02)

    def test_a_narrow_and_a_wide_window_have_entries_of_their_own(self):
        narrow, wide = ({"mask": masks.window(size)} for size in (16, 64))
        found = chosen(
            timed("torch.flex", 1e6, shape=narrow), timed("torch.flex", 4e6, shape=wide),
            timed("torch.sdpa", 3e6, shape=narrow), timed("torch.sdpa", 3e6, shape=wide),
        )  # fmt: skip
        told = {entry.at.visible: entry.use.implementation for entry in found.policy.entries}
        assert told == {0.125: "torch.flex", 0.381: "torch.sdpa"}

    def test_other_clocks_are_not_compared(self):
        wall = [timed("torch.eager", 4e6), timed("torch.sdpa", 3e6)]
        graph = ok("torch.fa3", time=timing([1e3] * 30, clock="graph"))
        assert picks(chosen(*wall, graph)) == {128: "torch.sdpa"}


class TestTies:
    def test_within_one_percent_the_one_with_error_to_spare(self):
        strained = Errors(forward=9e-7, forward_allowed=1e-6)
        a = timed("torch.a", 1e6, errors=strained, memory=memory(10))
        b = timed("torch.b", 1.004e6, memory=memory(10))
        (entry,) = chosen(a, b).policy.entries
        assert entry.use.implementation == "torch.b"
        assert 1 < entry.use.regret < 1.01
        assert entry.use.regret_high >= entry.use.regret

    def test_then_less_memory_then_no_config_then_the_name(self):
        light = timed("torch.b", 1.002e6, memory=memory(10_000))
        assert picks(chosen(timed("torch.a", 1e6, memory=memory(20_000)), light)) == {128: "torch.b"}
        close = timed("torch.a", 1.002e6, memory=memory(10_100))
        assert picks(chosen(close, light)) == {128: "torch.a"}
        plain = timed("torch.c", 1.002e6)
        assert picks(chosen(timed("torch.a", 1e6, config={"x": 1}), plain)) == {128: "torch.c"}

    def test_unknown_memory_decides_nothing(self):
        known = timed("torch.b", 1e6, memory=memory(10))
        assert picks(chosen(known, timed("torch.a", 1.001e6))) == {128: "torch.a"}

    def test_unknown_memory_of_one_does_not_keep_the_others_from_being_compared(self):
        heavy, light = timed("torch.a", 1e6, memory=memory(20_000)), timed("torch.b", 1e6, memory=memory(10_000))
        assert picks(chosen(heavy, light, timed("torch.c", 1e6))) == {128: "torch.b"}
        assert picks(chosen(heavy, timed("torch.b", 1e6))) == {128: "torch.a"}

    @pytest.mark.parametrize("kernels, expected", [(("k",), "torch.a"), (None, "torch.b")])
    def test_names_of_one_kernel_go_by_the_rule_however_noisy(self, kernels, expected):
        noise = np.exp(0.3 * np.random.default_rng(0).permutation(np.linspace(-1, 1, 30)))
        a, b = 1.1e6 * noise, np.full(30, 1e6)
        records = [ok(name, took, kernels=kernels) for name, took in (("torch.a", a), ("torch.b", b))]
        assert picks(chosen(*records)) == {128: expected}

    def test_names_of_one_kernel_that_are_surely_apart_are_not_one(self):
        a, b = (timed(name, ns, kernels=("k",)) for name, ns in (("torch.a", 1.2e6), ("torch.b", 1e6)))
        assert picks(chosen(a, b)) == {128: "torch.b"}

    def test_who_leads_on_the_other_shapes_leads_among_the_tied(self):
        a = [timed("torch.a", (1.2 if n > 128 else 1.0) * n * 1e3, q_len=n) for n in LENGTHS]
        b = [timed("torch.b", n * 1e3, q_len=n) for n in LENGTHS]
        assert picks(chosen(a[0], b[0])) == {128: "torch.a"}
        assert picks(chosen(*a, *b)) == dict.fromkeys(LENGTHS, "torch.b")

    @pytest.mark.parametrize("seed", range(5))
    def test_more_than_five_percent_is_no_tie_however_noisy(self, seed: int):
        few = [timed("torch.a", 1.06e6, seed, spread=0.3), timed("torch.b", 1e6, seed, spread=0.3)]
        (entry,) = chosen(*few).policy.entries
        assert entry.use.regret <= 1.05

    @pytest.mark.parametrize("gap", [0.0, 0.004, 0.05, 0.5])
    @pytest.mark.parametrize("spread", [0.003, 0.02])
    def test_reruns_agree(self, gap: float, spread: float):
        """torch.b is never slower; where the gap is a tie the name decides, else the speed does."""
        found = []
        for seed in range(100):
            a, b = timed("torch.a", 1e6 * (1 + gap), seed, spread), timed("torch.b", 1e6, seed, spread)
            found.append(picks(chosen(a, b))[128])
        expected = "torch.a" if gap < 0.01 else "torch.b"
        assert found.count(expected) >= 95

    @pytest.mark.parametrize(
        ("name", "draws", "least"), [("h200/grid-gpu", 10, 0.95), ("cpu/regret-grid", 20, 0.95), ("cpu/quick", 20, 0.9)]
    )
    def test_a_resampled_run_agrees(self, name: str, draws: int, least: float):
        """A published run with its rounds drawn again, the same rounds for all of a workload."""
        stays = agreement(measured(ROOT / "results" / f"{name}.jsonl"), draws)
        assert sum(stays.values()) / len(stays) >= least


class TestConstraints:
    records = (
        timed("torch.fast", 1e6, memory=memory(5000), deterministic=False, errors=Errors(forward=1e-3, backward=2e-3)),
        timed("torch.fast-two", 2e6, memory=memory(900), errors=Errors(forward=1e-4, backward=5e-3)),
        timed("torch.slow", 3e6, memory=memory(100), errors=Errors(forward=1e-4)),
    )

    @pytest.mark.parametrize(
        ("constraints", "expected"),
        [
            ({}, "torch.fast"),
            ({"max_memory": 1000}, "torch.fast-two"),
            ({"deterministic": True}, "torch.fast-two"),
            ({"max_error": 1e-3}, "torch.slow"),
            ({"forbid": ("torch.fast",)}, "torch.slow"),
            ({"forbid": ("torch.fast-two",)}, "torch.fast"),
            ({"only": ("torch.slow",)}, "torch.slow"),
            ({"only": ("torch",), "max_memory": 100}, "torch.slow"),
        ],
        ids=str,
    )
    def test_they_hold(self, constraints, expected):
        assert picks(chosen(*self.records, **constraints)) == {128: expected}

    def test_unknown_memory_keeps_to_no_limit(self):
        found = chosen(timed("torch.eager", 1e6), max_memory=10**12)
        assert picks(found) == {}
        assert "its peak memory is unknown" in found.unchosen[0].why

    @pytest.mark.parametrize(
        "pass_, errors, expected",
        [
            ("forward", Errors(), {}),
            ("forward", Errors(backward=1e-6), {}),
            ("forward", Errors(forward=1e-6), {128: "torch.eager"}),
            ("backward", Errors(backward=1e-6), {128: "torch.eager"}),
            ("train", Errors(forward=1e-6), {}),
            ("train", Errors(forward=1e-6, backward=1e-6), {128: "torch.eager"}),
        ],
    )
    def test_an_unknown_error_keeps_to_no_limit(self, pass_, errors, expected):
        found = chosen(timed("torch.eager", 1e6, errors=errors, shape={"pass_": pass_}), max_error=1e-3)
        assert picks(found) == expected
        assert expected or "its error is unknown" in found.unchosen[0].why

    def test_nothing_left_says_why(self):
        found = chosen(*self.records, max_error=1e-9)
        assert picks(found) == {}
        assert "torch.slow: has an error of 1.0e-04" in found.unchosen[0].why

    def test_names_nobody_has_are_refused_with_the_nearest(self):
        with pytest.raises(
            UnknownName, match=r'no implementation in these runs called "torch\.slw"\. Near: torch\.slow'
        ):
            chosen(*self.records, forbid=("torch.slw",))

    def test_what_is_known_may_be_forbidden_though_no_run_holds_it(self):
        source = named_run("run", "", self.records)
        assert picks(choose([source], Constraints(forbid=("torch.flex",)), known=["torch.flex"])) == {128: "torch.fast"}
        with pytest.raises(UnknownName):
            choose([source], Constraints(only=("torch.flex",)), known=["torch.flex"])

    def test_what_nobody_asked_for_is_not_missed(self):
        elsewhere = timed("jax.xla", 1e6, environment=structs.replace(CPU, framework="jax"))
        assert chosen(*self.records, elsewhere, only=("jax",)).unchosen == ()

    def test_what_sweeps_leave_out_may_be_asked_for(self):
        source = named_run("run", "", [timed("torch.ring", 1e3), timed("torch.eager", 1e6)])
        reasons = {"torch.ring": "by name only"}
        assert picks(choose([source], Constraints(only=("torch.ring",)), reasons)) == {128: "torch.ring"}
        assert picks(choose([source], Constraints(only=("torch",)), reasons)) == {128: "torch.eager"}


class TestRuns:
    def test_runs_are_never_mixed(self):
        first = named_run("a", "2026-01-01", [timed("torch.eager", 4e6), timed("torch.flex", 2e6)])
        later = named_run("b", "2026-01-02", [timed("torch.sdpa", 1.95e6)])
        for sources in ([first, later], [later, first]):
            (entry,) = choose(sources).policy.entries
            assert (entry.use.implementation, entry.use.candidates) == ("torch.flex", 2)

    @pytest.mark.parametrize(
        "old, new, expected",
        [
            ({"torch.eager": 5e6}, {"torch.fa3": 1e6, "torch.sdpa": 1.2e6}, ("torch.fa3", 2)),
            ({"torch.eager": 4e6, "torch.flex": 2e6}, {"torch.sdpa": 1e6}, ("torch.sdpa", 1)),
            ({"torch.fa3": 1e6}, {"torch.eager": 5e6, "torch.flex": 4e6}, ("torch.fa3", 1)),
            ({"torch.eager": 1e6}, {"torch.flex": 1.05e6, "torch.sdpa": 3e6}, ("torch.flex", 2)),
            ({"torch.eager": 1e6}, {"torch.flex": 0.95e6}, ("torch.eager", 1)),
        ],
    )
    def test_of_runs_that_share_nobody_the_clearly_faster_counts_else_the_larger(self, old, new, expected):
        sources = [
            named_run(day, day, [timed(name, ns) for name, ns in run.items()])
            for day, run in (("2026-01-01", old), ("2026-01-02", new))
        ]
        (entry,) = choose(sources).policy.entries
        assert (entry.use.label, entry.use.candidates) == expected

    def test_times_of_two_clocks_say_nothing(self):
        fast = ok("torch.fa3", time=timing([1e3] * 30, clock="graph"))
        sources = [
            named_run("a", "2026-01-01", [timed("torch.eager", 4e6)]),
            named_run("b", "2026-01-02", [fast]),
        ]
        assert picks(choose(sources)) == {128: "torch.eager"}

    def test_a_newer_run_with_those_that_led_counts(self):
        first = named_run("a", "2026-01-01", [timed("torch.a", 1e6), timed("torch.b", 2e6), timed("torch.c", 9e6)])
        later = named_run("b", "2026-01-02", [timed("torch.a", 3e6), timed("torch.b", 2e6)])
        assert picks(choose([first, later])) == {128: "torch.b"}

    @pytest.mark.parametrize(
        "kernels, twin_ns, chosen",
        [(("k",), 1.2e6, "torch.new"), (("l",), 1.2e6, "torch.a"), (("k",), 1.4e6, "torch.a")],
    )
    def test_one_that_led_may_be_there_by_another_name_of_its_kernel(self, kernels, twin_ns, chosen):
        """Of the older run the newer has torch.twin, not torch.b: good enough if both were one kernel, and as fast."""
        led = [timed("torch.a", 1e6, kernels=("a",)), timed("torch.b", 1.2e6, kernels=("k",))]
        first = named_run("a", "2026-01-01", [*led, timed("torch.twin", twin_ns, kernels=kernels)])
        twin = timed("torch.twin", twin_ns, kernels=kernels)
        again = [timed("torch.a", 1e6), twin, timed("torch.new", 0.95e6)]
        assert picks(choose([first, named_run("b", "2026-01-02", again)])) == {128: chosen}

    @pytest.mark.parametrize("kernels", [("fallback",), None])
    def test_a_twin_that_ran_another_kernel_later_speaks_for_nobody(self, kernels):
        slow = timed("torch.eager", 3e6)
        old = [timed("torch.fa3", 1e6, kernels=("k",)), timed("torch.sdpa", 1e6, kernels=("k",)), slow]
        new = [timed("torch.sdpa", 2.9e6, kernels=kernels), slow]
        assert picks(choose([named_run("a", "2026-01-01", old), named_run("b", "2026-01-02", new)])) == {
            128: "torch.fa3"
        }

    @pytest.mark.parametrize("seed", range(6))
    def test_a_twin_that_was_too_noisy_to_tell_speaks_for_nobody(self, seed: int):
        noise = {"kernels": ("k",), "spread": 0.6, "seed": seed}
        slow = timed("torch.eager", 9e6)
        old = [timed("torch.fa3", 1e6, **noise), timed("torch.sdpa", 1.2e6, **noise), slow]
        new = [timed("torch.sdpa", 1.2e6, kernels=("k",)), slow]
        (entry,) = choose([named_run("a", "2026-01-01", old), named_run("b", "2026-01-02", new)]).policy.entries
        assert {entry.use.label, entry.use.alternatives[0].label} == {"torch.fa3", "torch.sdpa"}

    @pytest.mark.parametrize("faster, chosen", [(1.05, "torch.a"), (1.3, "torch.d")])
    def test_a_newcomer_counts_if_it_is_clearly_ahead_by_what_both_runs_have(self, faster, chosen):
        """The second machine is half as fast: only ratios to torch.c, which is in both, may speak."""
        first = named_run("a", "2026-01-01", [timed("torch.a", 1e6), timed("torch.b", 1.2e6), timed("torch.c", 9e6)])
        later = named_run("b", "2026-01-02", [timed("torch.c", 18e6), timed("torch.d", 2e6 / faster)])
        assert picks(choose([first, later])) == {128: chosen}

    def test_what_a_newer_run_found_incorrect_is_left_out_on_its_device(self):
        """The newer run lacks torch.b, so that the older decides; torch.a is wrong on the CPU only."""
        both = [
            timed(name, ns, environment=at) for at in (CPU, GPU) for name, ns in (("torch.a", 1e6), ("torch.b", 2e6))
        ]
        sources = [
            named_run("b", "2026-01-02", [incorrect("torch.a", "wrong")]),
            named_run("a", "2026-01-01", both),
        ]
        found = choose(sources)
        assert {place.device: place.entries[0].use.label for place in found.policy.places} == {
            "cpu": "torch.b",
            "cuda": "torch.a",
        }
        assert [(one.record, one.is_wrong) for one in found.setbacks] == [(both[0], True)]
        assert choose(sources, Constraints(forbid=("torch.a",))).setbacks == ()
        again = named_run("c", "2026-01-03", [timed("torch.a", 1e6)])
        assert choose([*sources, again]).setbacks == ()

    @pytest.mark.parametrize("fields", [
        {"packages": {"torch": "2.14.0"}}, {"threads": 1}, {"processor": "Intel 6 143"}
    ], ids=["versions", "threads", "processor"])  # fmt: skip
    def test_it_is_left_out_where_it_is_incorrect_though_a_newer_run_finds_it_right_elsewhere(self, fields):
        here = structs.replace(CPU, processor="Intel 6 85")
        there = structs.replace(here, **fields)
        wrong = structs.replace(incorrect("torch.a", "wrong"), environment=here)

        def both(at):
            return [timed("torch.a", 1e6, environment=at), timed("torch.b", 2e6, environment=at)]

        runs = (both(here), [wrong], both(there))
        found = choose([named_run(str(day), f"2026-01-0{day}", run) for day, run in enumerate(runs, start=1)])
        picked = [found.policy.choice(workload(), "torch", at) for at in (here, there)]
        assert [one and one.implementation for one in picked] == ["torch.b", "torch.a"]
        assert [(one.record, one.right_elsewhere) for one in found.setbacks] == [(runs[0][0], True)]

    def test_what_was_found_incorrect_at_a_shape_is_not_chosen_for_it_by_its_neighbours(self):
        first = named_run("a", "2026-01-01", [
            timed("torch.fa4", 1e6, q_len=256), timed("torch.eager", 3e6, q_len=256), timed("torch.fa4", 2e6, q_len=512)
        ])  # fmt: skip
        later = named_run("b", "2026-01-02", [incorrect("torch.fa4", "wrong", workload(512))])
        found = choose([first, later]).policy
        chosen = [found.choice(workload(n), "torch", CPU) for n in (256, 512)]
        assert [one and one.implementation for one in chosen] == ["torch.fa4", "torch.eager"]
        assert [(one.measured, one.incorrect) for one in found.places[0].barred] == [(workload(512).id, ("torch.fa4",))]
        again = named_run("c", "2026-01-03", [timed("torch.fa4", 2e6, q_len=512)])
        assert choose([first, later, again]).policy.places[0].barred == ()

    def test_what_is_incorrect_at_one_scale_is_chosen_at_none(self):
        wrong = incorrect("torch.x", "ignores the scale", workload(scale=0.5))
        found = chosen(timed("torch.x", 1e6), timed("torch.eager", 3e6), wrong)
        for on in (workload(), workload(scale=0.5)):
            assert found.policy.choice(on, "torch", CPU).implementation == "torch.eager"  # pyright: ignore[reportOptionalMemberAccess]
        alone = chosen(timed("torch.x", 1e6), wrong)
        assert alone.policy.entries == ()
        why = f"torch.x: is incorrect at {wrong.workload.id}, which has the same shape"
        assert {one.workload: one.why for one in alone.unchosen}[workload().id] == why

    @pytest.mark.parametrize(
        "constraints, fields",
        [({"deterministic": True}, {"deterministic": False}), ({"max_error": 1e-3}, {"errors": Errors(forward=1e-2)})],
        ids=["deterministic", "error"],
    )
    def test_what_a_constraint_refused_at_a_shape_is_not_chosen_for_it_by_its_neighbours(self, constraints, fields):
        good = [timed(n, t, q_len=256, errors=Errors(forward=1e-6)) for n, t in (("torch.a", 1e6), ("torch.b", 2e6))]
        records = *good, timed("torch.a", 2e6, q_len=512, **fields), timed("torch.c", 9e6, q_len=512, approximate=True)
        found = chosen(*records, **constraints).policy
        picked = [found.choice(workload(n), "torch", CPU) for n in (256, 512)]
        assert [one and one.implementation for one in picked] == ["torch.a", "torch.b"]
        assert [(one.incorrect, one.kept_out) for one in found.places[0].barred] == [((), ("torch.a",))]
        free = chosen(*records).policy.choice(workload(512), "torch", CPU)
        assert free is not None
        assert free.implementation == "torch.a"

    def test_what_a_newer_run_lost_is_told_where_the_older_decides(self):
        lost = Failed(implementation="torch.a", workload=workload(), reason="boom", environment=CPU)
        old = [timed("torch.a", 1e6), timed("torch.b", 2e6)]
        near, ahead = [lost, timed("torch.b", 2e6)], [lost, timed("torch.b", 2e6), timed("torch.c", 0.5e6)]
        first = named_run("a", "2026-01-01", old)
        found = choose([first, named_run("b", "2026-01-02", near)])
        assert picks(found) == {128: "torch.a"}
        assert [(one.record, one.newer) for one in found.setbacks] == [(old[0], lost)]
        found = choose([first, named_run("b", "2026-01-02", ahead)])
        assert (picks(found), found.setbacks) == ({128: "torch.c"}, ())

    def test_newer_is_what_was_measured_later_not_what_is_in_the_newer_file(self):
        """The older file was resumed after the newer was made, with a shape that both have."""
        resumed = [timed("torch.a", 1e6), timed("torch.a", 6e6, q_len=256), timed("torch.b", 3e6, q_len=256)]
        newer = [timed("torch.a", 2e6, q_len=256), timed("torch.b", 3e6, q_len=256)]
        sources = [
            named_run("a", "2026-01-01", resumed, ("2026-01-01", "2026-11-19", "2026-11-19")),
            named_run("b", "2026-02-01", newer),
        ]
        assert picks(choose(sources)) == {128: "torch.a", 256: "torch.b"}
        assert picks(choose([named_run("a", "2026-01-01", resumed), sources[1]])) == {128: "torch.a", 256: "torch.a"}

    def test_shapes_of_several_runs_come_together(self):
        sources = [named_run(f"{n}", f"2026-01-0{n}", [timed("torch.a", 1e6, q_len=64 * n)]) for n in (1, 2)]
        (place,) = choose(sources).policy.places
        assert [entry.at.q_len for entry in place.entries] == [64, 128]
        assert (place.runs, place.made) == (("1", "2"), "2026-01-02")


class TestOffGrid:
    def test_the_regret_of_left_out_shapes(self):
        """Chosen by its neighbours: 128 by 256 (eager there too), 256 by 128, 512 by 256 or 1024, and so on."""
        eager = [timed("torch.eager", 10 * n, q_len=n, spread=0) for n in LENGTHS]
        fast = [timed("torch.sdpa", 4000 + 2 * n, q_len=n, spread=0) for n in LENGTHS]
        (place,) = chosen(*eager, *fast).policy.places
        assert place.held_out is not None
        assert (place.held_out.shapes, place.held_out.missed) == (5, 0)
        assert place.held_out.worst == pytest.approx(5120 / 5024, rel=1e-3)
        assert place.held_out.mean == pytest.approx((5120 / 5024) ** 0.2, rel=1e-3)
        assert place.on_grid is not None
        assert place.on_grid.mean == 1

    def test_a_shape_without_neighbours_is_missed(self):
        (place,) = chosen(*(timed("torch.a", 1e6, q_len=n) for n in (128, 256, 8192))).policy.places
        assert place.held_out is not None
        assert (place.held_out.shapes, place.held_out.missed) == (2, 1)
        (alone,) = chosen(timed("torch.a", 1e6)).policy.places
        assert alone.held_out is None

    def test_where_the_neighbours_choice_did_not_run_its_next_best_counts(self):
        records = [timed("torch.a", 1e6), timed("torch.b", 2e6), timed("torch.c", 5e6)]
        records += [timed("torch.b", 2e6, q_len=256, spread=0), timed("torch.c", 1e6, q_len=256, spread=0)]
        (place,) = chosen(*records).policy.places
        assert place.held_out is not None
        assert place.held_out.worst_at.startswith("1 x 128") or place.held_out.worst >= 2


def test_crossings_carry_an_interval():
    slow = along("torch.eager", lambda n: 10.0 * n, LENGTHS)
    fast = along("torch.sdpa", lambda n: 4000.0 + 2 * n, LENGTHS, seed=1)
    (place,) = chosen(*slow, *fast).policy.places
    (crossing,) = place.crossings
    assert (crossing.below, crossing.above) == ("torch.eager", "torch.sdpa")
    assert (crossing.low, crossing.high) == (256, 512) or (crossing.low, crossing.high) == (256, 1024)
    assert crossing.low < 500 < crossing.high
    assert crossing.tokens is None or crossing.tokens == pytest.approx(500, rel=0.05)
    assert "PyTorch" in crossing.track


def test_one_run_gives_one_text(tmp_path: Path):
    records = read_run(ROOT / "results" / "cpu" / "quick.jsonl").records
    texts = {policy_text(choose([named_run("quick", "2026", found)]).policy) for found in (records, records[::-1])}
    assert len(texts) == 1
    path = tmp_path / "policy.json"
    path.write_text(texts.pop())
    assert load_policy(path).entries


@pytest.fixture
def ground() -> Ground:
    eager = along("torch.eager", lambda n: 10.0 * n, (128, 512, 2048), environment=CPU)
    sdpa = along("torch.sdpa", lambda n: 4000.0 + 2 * n, (512, 2048), seed=1, environment=CPU)
    (found,) = choose([named_run("run", "", [*eager, *sdpa])]).grounds
    return found


def test_one_for_everything(ground: Ground):
    eager, sdpa = fixed_losses(ground)
    assert (eager.name, sdpa.name) == ("torch.eager", "torch.sdpa")
    assert eager.regret is not None
    assert (eager.regret.shapes, eager.regret.missed) == (3, 0)
    assert eager.regret.worst == pytest.approx(20480 / 8096, rel=0.02)
    assert eager.regret.worst_at.startswith("1 x 2048 tokens")
    assert sdpa.regret is not None
    assert (sdpa.regret.shapes, sdpa.regret.missed) == (2, 1)
    assert sdpa.regret.mean == pytest.approx(1, abs=0.02)


def test_a_policy_on_shapes_it_has_not_seen(ground: Ground):
    found = policy_loss(policy(entry("torch.eager", 256), entry("torch.sdpa", 1024)), ground).regret
    assert found is not None
    assert (found.shapes, found.missed) == (3, 0)
    assert found.mean == pytest.approx(1, abs=0.02)
    wrong = policy_loss(policy(entry("torch.eager", 1024)), ground).regret
    assert wrong is not None
    assert (wrong.shapes, wrong.missed) == (2, 1)
    assert wrong.worst == pytest.approx(20480 / 8096, rel=0.02)


def test_a_policy_that_does_not_hold_there(ground: Ground):
    other = policy(entry("torch.eager", 256), device_name="Another CPU")
    assert policy_loss(other, ground).regret is None


def test_two_versions_on_one_machine_are_two_keys_of_a_document():
    runs = []
    for day, version in enumerate(("2.11", "2.13"), 1):
        where = structs.replace(CPU, packages={"torch": version})
        records = [timed(name, ns, environment=where) for name, ns in (("torch.sdpa", 1e6), ("torch.eager", 2e6))]
        runs.append(named_run(f"{version}.jsonl", f"2026-01-0{day}", records))
    found = choose(runs, Constraints())
    assert len(found.policy.places) == 2
    told: Any = document(found, None)["on_grid"]
    assert set(told) == {"Test CPU 9000/torch#1", "Test CPU 9000/torch#2"}
    assert document(choose(runs[::-1], Constraints()), None)["fixed"] == document(found, None)["fixed"]
