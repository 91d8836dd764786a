"""Ratios, speed-ups and closing sentences in words."""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
from length_factory import GPU, along
from msgspec.structs import replace
from record_factory import CPU, incorrect, noisy, ok, recommend, timing, unsupported, workload

from attnbench.results.ratios import Ratio
from attnbench.results.records import baseline
from attnbench.results.sentences import (
    Speedup,
    all_of,
    category,
    closing,
    count_notes,
    counted,
    format_ratio,
    format_span,
    not_run,
    slightly_apart,
    speedups,
)
from attnbench.results.standings import Standings, rank
from attnbench.spec import Failed, Record

SHAPES = [workload(n) for n in (64, 128, 256, 512)]


def field(medians: dict[str, float], on=None, seed: int = 0) -> list:
    return [ok(name, noisy(median, seed + i), on) for i, (name, median) in enumerate(medians.items())]


def places(rows) -> list[tuple[str, int | None, bool]]:
    return [(row.implementation, row.rank, row.tied) for row in rows]


def test_rows_come_in_order_of_time():
    rows = rank(field({"b": 2e6, "a": 1e6, "c": 3e6}))
    assert places(rows) == [("a", 1, False), ("b", 2, False), ("c", 3, False)]


def test_wrong_approximate_untimed_and_anchors_are_not_ranked():
    records = [
        ok("torch.eager", noisy(4e6, 1)),
        ok("torch.sage", noisy(1e6, 2), approximate=True),
        incorrect("mine", "wrong"),
        unsupported("torch.fa3", "needs cuda"),
        ok("jax.splash"),
        ok("anchor.matmul", noisy(1e5, 3)),
    ]
    rows = rank(records, "torch.eager")
    assert places(rows)[0] == ("torch.eager", 1, False)
    assert [row.rank for row in rows[1:]] == [None] * 4
    assert "anchor.matmul" not in [row.implementation for row in rows]
    assert all(row.reason for row in rows[1:])
    assert rows[1].speedup is not None
    assert 3.8 < rows[1].speedup.value < 4.2


def test_config_is_part_of_the_label():
    rows = rank([ok("torch.flex", noisy(1e6, 1), config={"block": 64})])
    assert rows[0].implementation == "torch.flex[block=64]"


def test_baseline_is_the_plain_one_unless_named():
    records = field({"jax.einsum": 3, "torch.eager": 2, "torch.sdpa": 1, "jax.xla": 1})
    assert baseline(records) == "torch.eager"
    assert baseline(records, ["jax.xla"]) == "jax.xla"
    assert baseline(records, ["jax"]) == "jax.einsum"
    assert baseline(records[:1] + records[3:]) == "jax.einsum"
    assert baseline([*field({"numpy.float32": 1}), incorrect("torch.eager", "x")]) == "numpy.float32"
    assert baseline([]) is None


def test_closing_sentence_of_the_issue():
    records = []
    for i, shape in enumerate(SHAPES):
        fast, other = (3e6, 1e6) if i == 3 else (1e6, 2e6)
        records += field(
            {"torch.eager": 3e6 if i < 3 else 9e6, "torch.sdpa-flash": fast, "jax.xla": other}, shape, 10 * i
        )
    sentence = closing(records)
    assert re.match(r"torch.sdpa-flash is (2.9|3.0)\dx", sentence)
    assert "faster than torch.eager over 4 shapes; jax.xla wins 1." in sentence


def test_closing_without_a_confident_winner_says_so():
    records = []
    for i, shape in enumerate(SHAPES):
        records += field({"torch.eager": 3e6, "torch.sdpa": 1e6, "torch.sdpa-flash": 1.001e6}, shape, 10 * i)
    sentence = closing(records)
    assert sentence.startswith("No confident winner over 4 shapes: torch.sdpa")
    assert "faster than torch.eager" in sentence


def test_closing_names_nobody_who_is_certainly_behind():
    """c shares the first rank, since nobody can tell it from b: that is no reason to name it beside a."""
    same = noisy(1e6, 1)
    records = [ok(name, same * factor) for name, factor in (("a", 1), ("b", 1.008), ("c", 1.016))]
    assert [row.rank for row in rank(records)] == [1, 1, 1]
    assert closing(records) == "No confident winner over 1 shape: a is within the noise of b."


def test_closing_names_a_baseline_with_tunables_and_what_another_clock_timed():
    ring = ok("torch.ring", time=timing([1e6] * 8, clock="ranks"), config={"world": 2})
    alone = closing([ring, ok("torch.sdpa", time=timing([1e6] * 8))])
    assert alone == (
        "torch.ring[world=2] is the only one that was ranked, over 1 shape. "
        "torch.sdpa was timed by another clock (wall; the others by ranks): not compared."
    )
    fast, slow = ({"world": world} for world in (2, 4))
    both = [ok("torch.ring", noisy(1e6, 1), config=fast), ok("torch.ring", noisy(3e6, 2), config=slow)]
    assert closing(both).startswith("torch.ring[world=2] is 2.99x")
    assert "faster than torch.ring[world=4] over 1 shape" in closing(both)


def test_closing_when_the_baseline_wins_compares_with_the_next():
    sentence = closing(field({"torch.eager": 1e6, "torch.sdpa": 2e6}))
    assert sentence.startswith("torch.eager is ")
    assert "faster than torch.sdpa over 1 shape." in sentence


def test_closing_counts_the_shapes_both_ran():
    records = field({"torch.eager": 3e6, "torch.sdpa": 1e6}, SHAPES[0])
    records += [*field({"torch.sdpa": 1e6}, SHAPES[1]), unsupported("torch.eager", "no", SHAPES[1])]
    assert "over 1 of 2 shapes" in closing(records)


def test_closing_tells_where_the_one_asked_for_stands():
    sentence = closing(field({"torch.eager": 4e6, "torch.sdpa": 1e6, "mine": 2e6}), focus=["mine"])
    assert re.search(r"^torch.sdpa is (3.9|4.0)\dx .* faster than torch.eager", sentence)
    assert re.search(r"mine is (1.9|2.0)\dx .* slower than torch.sdpa", sentence)


def test_closing_answers_step_by_step():
    """Implementations of different steps never meet."""
    records = []
    for i, shape in enumerate(SHAPES[:2]):
        for step, gain in (("", 2), ("pi0-attention", 3), ("pi0-block", 4)):
            plain = f"jax.{step}" if step else "jax.einsum"
            records += field({plain: gain * 1e6, f"{plain}-flash": 1e6}, replace(shape, step=step), 10 * i)
    sentence = closing(records, focus=["jax.pi0-block-flash"])
    for told in (
        r"^attention: jax.einsum-flash is (1.9|2.0)\dx \(\S+\) faster than jax.einsum over 2 shapes\. pi0-att",
        r" pi0-attention: jax.pi0-attention-flash is (2.9|3.0)\dx \(\S+\) faster than jax.pi0-attention over 2",
        r" pi0-block: jax.pi0-block-flash is (3.9|4.0)\dx \(\S+\) faster than jax.pi0-block over 2 shapes\.$",
    ):
        assert re.search(told, sentence), sentence
    alone = [record for record in records if record.workload.step == "pi0-block"]
    assert closing(alone).startswith("jax.pi0-block-flash is "), "one step needs no name"


def test_closing_of_a_lone_implementation():
    assert closing(field({"mine": 1e6})) == "mine is the only one that was ranked, over 1 shape."


def test_closing_of_implementations_without_a_common_shape():
    small, large = workload(128), workload(256)
    records = [
        ok("torch.eager", noisy(1e6, 1), on=small),
        unsupported("torch.flex", "no", small),
        ok("torch.flex", noisy(1e6, 2), on=large),
        unsupported("torch.eager", "no", large),
    ]
    told = "torch.eager is the only one that was ranked on 1 of 2 shapes; torch.flex wins 1"
    assert closing(records).startswith(told)


def test_closing_when_nothing_is_ok():
    failed = Failed(implementation="b", workload=workload(), reason="raised")
    assert closing([unsupported("a", "no"), failed]) == "Nothing could be measured (1 unsupported, 1 failed)."
    assert closing([]) == "Nothing could be measured (no cells)."
    assert closing([ok("a")]) == "1 cell verified, none was timed."


def test_wrong_ones_are_named_before_the_answer():
    records = [
        *field({"torch.eager": 3e6, "torch.sdpa": 1e6}),
        incorrect("my_attention", "its gradient of K is wrong from row 4096 on."),
    ]
    sentence = closing(records)
    assert sentence.startswith(
        "my_attention is not ranked: its gradient of K is wrong from row 4096 on. torch.sdpa is "
    )


def test_one_that_is_wrong_on_some_shapes_only_is_told_after_the_answer():
    records = [
        *(record for shape in SHAPES for record in field({"torch.eager": 3e6, "torch.sdpa": 1e6}, shape)),
        ok("partly", noisy(5e6, 9), SHAPES[0]),
        incorrect("partly", "NaN", SHAPES[1]),
    ]
    assert closing(records).startswith("torch.sdpa is ")
    assert closing(records).endswith(" partly is not ranked on 1 shape: NaN.")
    assert closing(records, focus=("partly",)).startswith("partly is not ranked on 1 shape: NaN. torch.sdpa is ")


def test_one_wrong_setting_says_nothing_about_the_others():
    records = [
        *field({"torch.eager": 3e6, "torch.sdpa": 2e6}),
        ok("mine", noisy(1e6, 9)),
        incorrect("mine", "row 3 is wrong", config={"block": 64}),
        Failed(implementation="mine", workload=workload(), reason="raised", config={"block": 8}),
    ]
    for focus, lost in (((), ""), (("mine",), "mine[block=8] is not ranked: failed: raised. ")):
        start = f"mine[block=64] is not ranked: row 3 is wrong. {lost}mine is "
        assert closing(records, focus=focus).startswith(start)


def test_notes_are_counted_with_advice():
    records = [ok("a", notes=("unstable: +-7 %",)), ok("b", notes=("unstable: +-9 %", "something else"))]
    notes = count_notes(records)
    assert notes[0].startswith("unstable: 2 cells (")
    assert notes[1] == "something else: 1 cell"


def test_refusals_are_grouped_by_reason():
    records = [unsupported(n, r) for n, r in (("a", "one"), ("b", "two"), ("c", "two"), ("c", "two"))]
    assert not_run(records) == [("two", ["b", "c"]), ("one", ["a"])]


def test_ranking_of_many_is_quick():
    rng = np.random.default_rng(0)
    records = [ok(f"i{n}", rng.normal(1e6 + 1e4 * n, 1e4, 500)) for n in range(15)]
    assert len(rank(records, "i3")) == 15


@pytest.mark.parametrize(
    ("ratio", "expected"),
    [
        (Ratio(1.6, 1.55, 1.7), "excellent"),
        (Ratio(1.5, 1.4, 1.6), "good"),
        (Ratio(1.3, 1.2, 1.4), "good"),
        (Ratio(1.6, 1.1, 2.3), "measured"),
        (Ratio(1.19, 1.1, 1.3), "measured"),
        (Ratio(1.03, 1.02, 1.04), "measured"),
        (Ratio(1.01, 1.005, 1.02), "no significant difference"),
        (Ratio(0.99, 0.985, 0.995), "no significant difference"),
        (Ratio(0.9, 0.8, 0.99), "investigate"),
        (Ratio(1.6, 0.99, 2.5), "cannot tell"),
        (Ratio(0.9, 0.8, 1.0), "cannot tell"),
        (Ratio(1.0, 0.9, 1.1), "no significant difference"),
        (Ratio(30, 2, 300), "excellent"),
        (Ratio(5, 1.9, 20), "excellent"),
    ],
)
def test_categories(ratio, expected):
    assert category(ratio) == expected


def speedups_of(records: Sequence[Record], base: str) -> list[Speedup]:
    return [one for standing in Standings([records]).overall.values() for one in speedups(standing, base)]


def test_each_cell_against_the_baseline_of_its_workload():
    long = workload(512)
    records = [
        ok("torch.eager", noisy(3e6, 1)),
        ok("torch.fast", noisy(1e6, 2)),
        ok("torch.rough", noisy(1.5e6, 3), approximate=True),
        ok("torch.same", noisy(3e6, 4)),
        unsupported("torch.fa3", "needs cuda"),
        ok("anchor.matmul", noisy(1e5, 5)),
        ok("torch.fast", noisy(1e6, 6), long),
    ]
    found = {one.implementation: one for one in speedups_of(records, "torch.eager")}
    assert set(found) == {"torch.fast", "torch.rough", "torch.same"}
    assert found["torch.fast"].category == "excellent"
    assert found["torch.fast"].ratio.value == pytest.approx(3, rel=0.02)
    assert found["torch.fast"].workload == workload().id
    assert found["torch.same"].category == "no significant difference"
    for one in found.values():
        assert category(one.ratio) == one.category
    assert found["torch.rough"].approximate


def test_other_clocks_and_other_devices_are_not_compared():
    elsewhere = msgspec.structs.replace(CPU, device_name="Another CPU")
    records = [
        ok("torch.eager", noisy(3e6, 1)),
        ok("torch.kernel", time=timing(noisy(1e6, 2), clock="kernel")),
        ok("torch.fast", noisy(1e6, 3), environment=elsewhere),
    ]
    assert speedups_of(records, "torch.eager") == []
    assert speedups_of(records, "nobody") == []


@pytest.mark.parametrize(
    ("ratio", "told"),
    [
        (Ratio(1.96, 1.94, 1.98), "1.96x (1.94-1.98)"),
        (Ratio(30, 2, 300), "more than 2.00x"),
        (Ratio(0.1, 0.01, 0.5), "less than 0.50x"),
        (Ratio(1, 0.1, 10), "cannot tell"),
    ],
)
def test_a_ratio_never_hides_on_which_side_of_one_it_is(ratio: Ratio, told: str):
    assert format_ratio(ratio) == told


@pytest.mark.parametrize(
    ("ratio", "told"),
    [
        (Ratio(1.005, 1.003, 1.007), "certainly less than 1 % apart"),
        (Ratio(0.995, 0.993, 0.997), "certainly less than 1 % apart"),
        (Ratio(1.02, 1.005, 1.05), "perhaps less than 1 % apart"),
        (Ratio(0.98, 0.95, 0.995), "perhaps less than 1 % apart"),
        (Ratio(2.15, 1.002, 3.2), ""),
        (Ratio(0.47, 0.31, 0.999), ""),
        (Ratio(1.0, 0.999, 1.001), ""),
        (Ratio(1.5, 1.4, 1.6), ""),
        (Ratio(0.5, 0.4, 0.6), ""),
    ],
)
def test_a_small_difference_that_is_certain_has_its_own_words(ratio: Ratio, told: str):
    assert slightly_apart(ratio) == told


def test_counts():
    assert [counted(n, "cell") for n in (0, 1, 2, 1000)] == ["0 cells", "1 cell", "2 cells", "1,000 cells"]
    assert [all_of(n, "shape") for n in (1, 2, 3)] == ["the one shape", "both shapes", "all 3 shapes"]


def single(name: str, ns: float, q_len: int = 128) -> Record:
    """One sample: nobody knows how far it is off."""
    return ok(name, on=workload(q_len), time=timing([ns]), environment=GPU)


def test_what_one_sample_cannot_tell_is_said_once():
    records = [single(name, ns, n) for n in (128, 256) for name, ns in (("torch.eager", 2e6), ("torch.sdpa", 1e6))]
    told = [closing(records), *(one.text for one in recommend(records))]
    assert not [text for text in told if "cannot tell" in text or "all 2" in text]
    assert any("vary too much" in text for text in told)


def test_what_jax_may_take_is_not_taken_for_the_device():
    jax = msgspec.structs.replace(GPU, framework="jax")
    records = along("jax.einsum", float, (4096, 8192, 16384), peak=lambda n: 16 * n * n, environment=jax)
    (found,) = [one.text for one in recommend(records) if one.kind == "memory"]
    assert "jax.einsum stops fitting the 80 GB that JAX's allocator may take of the device at about" in found


def test_a_span_that_reads_as_one_figure_is_one():
    assert format_span(1.128, 1.131) == "1.13x"
    assert format_span(1.12, 1.1399) == "1.12x to 1.14x"
