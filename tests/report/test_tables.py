from __future__ import annotations

import io

import pytest
from record_factory import incorrect, noisy, ok, timing, unsupported, workload
from rich.console import Console

from attnbench.report import units
from attnbench.report.terminal import print_cell, print_rankings, print_verification, verification_verdict
from attnbench.spec import Cost, Failed, Memory, OutOfMemory, Ranks


def text_of(show, *arguments, **options) -> str:
    stream = io.StringIO()
    show(Console(file=stream, width=200), *arguments, **options)
    return stream.getvalue()


def test_ranked_table_says_everything_a_reader_asks():
    records = [
        ok("torch.eager", noisy(4e6, 1)),
        ok("torch.sdpa", noisy(1e6, 2), memory=Memory(peak_bytes=97_000_000), notes=("unstable: +-3 %",)),
        incorrect("mine", "gradient of K: 14.2 x the error allowed"),
        unsupported("torch.fa3", "needs cuda, this is cpu"),
        unsupported("torch.fa4", "needs cuda, this is cpu"),
        ok("anchor.matmul", noisy(1e5, 3)),
    ]
    lines = text_of(print_rankings, records).splitlines()
    first = next(line for line in lines if "torch.sdpa " in line)
    assert first.split()[0] == "1"
    assert "97.0 MB" in first
    assert "42 %" in first
    assert "unstable" in first
    assert "x (" in first
    eager = next(line for line in lines if " torch.eager " in line and "ms" in line)
    assert units.DASH in eager  # its memory was not measured: no 0
    assert any("mine" in line and "14.2 x" in line and "ms" not in line for line in lines)
    assert any(line.startswith("Not run: torch.fa3, torch.fa4 (needs cuda") for line in lines)
    assert not any("anchor" in line for line in lines)


def test_train_shows_its_parts():
    on = workload(pass_="train")
    record = ok("torch.sdpa", noisy(3e6, 1), on, also={"forward": timing([1e6] * 5), "backward": timing([2e6] * 5)})
    text = text_of(print_rankings, [record])
    heading = next(line for line in text.splitlines() if "implementation" in line)
    assert heading.split()[:5] == ["#", "implementation", "train", "forward", "backward"]
    assert "1.00 ms" in text
    assert "2.00 ms" in text


@pytest.mark.parametrize("pass_", ["forward", "backward", "train"])
def test_a_narrow_screen_keeps_the_time(pass_: str):
    parts = {"forward": timing([1e6] * 5), "backward": timing([2e6] * 5)} if pass_ == "train" else {}
    records = [
        ok(name, noisy(3e6, 1), workload(pass_=pass_), also=parts, memory=Memory(peak_bytes=97_000_000))
        for name in ("torch.sdpa", "torch.eager")
    ]
    stream = io.StringIO()
    print_rankings(Console(file=stream, width=50), records)
    heading = next(line for line in stream.getvalue().splitlines() if "implementation" in line).split()
    assert heading[:3] == ["#", "implementation", pass_]
    assert not {"TFLOP/s", "roofline", *parts} & set(heading)
    assert "torch.eager     3.17 ms" in stream.getvalue()


def test_ties_and_approximate_ones_are_marked():
    same = noisy(1e6, 1)
    records = [ok("a", same), ok("b", same * 1.001), ok("c", same * 0.5, approximate=True)]
    marks = [
        line.split()[0] for line in text_of(print_rankings, records).splitlines() if " us " in line or " ms " in line
    ]
    assert marks == ["1", "=", "~"]


def test_one_that_shares_a_rank_without_being_as_fast_as_its_first_is_marked():
    same = noisy(1e6, 1)
    records = [ok(name, same * factor) for name, factor in (("aa", 1), ("bb", 1.008), ("cc", 1.016), ("dd", 1.5))]
    words = [line.split() for line in text_of(print_rankings, records).splitlines()]
    assert [line[:2] for line in words if line[1:2] and len(line[1]) == 2 and line[1] in "aabbccdd"] == [
        ["1", "aa"],
        ["=", "bb"],
        [">=", "cc"],
        ["4", "dd"],
    ]


def test_markup_in_reasons_is_printed_as_it_is():
    text = text_of(print_rankings, [incorrect("mine", "bad [red]index[/red] [0]"), unsupported("x[y]", "no [bold]")])
    assert "bad [red]index[/red] [0]" in text
    assert "x[y] (no [bold])" in text


def test_mixed_clocks_are_said():
    records = [ok("a", time=timing([1e6] * 8, clock="events")), ok("b", time=timing([1e6] * 8, clock="wall"))]
    lines = [line.rstrip() for line in text_of(print_rankings, records).splitlines()]
    assert "  –  b  timed by another clock (wall; the others by events): not compared" in lines
    assert next(line.split()[:2] for line in lines if " b  " in line) == ["–", "b"], "~ is for approximate ones"


def test_a_baseline_that_was_timed_under_tunables_is_called_by_them():
    records = [ok("torch.ring", noisy(2e6, 1), config={"world": 2}), ok("torch.sdpa", noisy(1e6, 2))]
    text = text_of(print_rankings, records)
    assert "against torch.ring[world=2]" in text
    (line,) = [line.split() for line in text.splitlines() if line.lstrip().startswith("2  torch.ring[world=2]")]
    assert line[-1] == "1", "the baseline itself has no ratio"


def test_every_step_has_a_baseline_of_its_own():
    records = []
    for step in ("pi0-attention", "pi0-block"):
        shape = workload(step=step)
        records += [ok(f"jax.{step}", noisy(2e6, 1), shape), ok(f"jax.{step}-flash", noisy(1e6, 2), shape)]
    text = text_of(print_rankings, records)
    for step in ("pi0-attention", "pi0-block"):
        assert f"against jax.{step} " in text
        assert any(f"1  jax.{step}-flash" in line and "2.0" in line and "x (" in line for line in text.splitlines())


def test_detail_of_an_ok_cell():
    record = ok("torch.sdpa", noisy(1e6, 1), compile_ns=2_000_000_000, kernels=("aten::sdpa",))
    text = text_of(print_cell, record)
    for expected in (
        "p99",
        "compile",
        "2.00 s",
        "not asked for",
        "aten::sdpa",
        "verified at",
        "Test CPU 9000",
        "allowed 1.0e-06",
    ):
        assert expected in text


def test_detail_of_a_cell_over_ranks():
    ranks = Ranks(
        world=2, how="processes over gloo", layout="zigzag", inner=("torch.sdpa-flash",), tokens=(64, 64),
        pairs=(10, 10), shard_bytes=(2_000_000, 2_000_000), peak_bytes=(3_000_000, 4_000_000), compute_ns=(2e6, 3e6),
        waiting_ns=(1e5, 0.0), communication_ns=None, balance=0.83, reason="no link was used",
    )  # fmt: skip
    text = text_of(print_cell, ok("torch.ring", noisy(1e6, 1), ranks=ranks, config={"world": 2}))
    for expected in (
        "torch.ring[world=2]",
        "2, processes over gloo",
        "balance 83 %",
        "2.00 ms, 3.00 ms",
        "no link was used",
    ):
        assert expected in text
    assert "3.00 MB, 4.00 MB, beside inputs of 2.00 MB" in text


def test_detail_of_a_failed_cell():
    failed = Failed(implementation="a", workload=workload(), reason="fell back", detail="Traceback [line 3]")
    text = text_of(print_cell, failed)
    assert "fell back" in text
    assert "Traceback [line 3]" in text


def test_unmeasured_rates_are_dashes():
    record = ok("a", noisy(1e6, 1), cost=Cost(flops=1, bytes=1, reason="no ceiling known"))
    row = next(line for line in text_of(print_rankings, [record]).splitlines() if " a " in line and "ms" in line)
    assert row.count(units.DASH) == 3
    assert "no ceiling known" in text_of(print_cell, record)


@pytest.mark.parametrize(
    ("ns", "text"),
    [
        (None, "–"),
        (0.5, "0.50 ns"),
        (999, "999 ns"),
        (1234, "1.23 us"),
        (83_000, "83.0 us"),
        (2.51e6, "2.51 ms"),
        (1.2e11, "120 s"),
    ],
)
def test_durations(ns: float | None, text: str):
    assert units.duration(ns) == text


@pytest.mark.parametrize(
    ("count", "text"), [(None, "–"), (12, "12 B"), (97_000_000, "97.0 MB"), (38_000_000_000, "38.0 GB")]
)
def test_sizes(count: int | None, text: str):
    assert units.size(count) == text


def test_verification_names_the_broken():
    records = [
        ok("torch.eager"),
        ok("torch.sdpa"),
        unsupported("torch.fa3", "needs cuda"),
        incorrect("mine", "leaks the future", detail="row 3 differs"),
        OutOfMemory(implementation="torch.sdpa", workload=workload(64), reason="needs 9 GB"),
    ]
    assert verification_verdict(records) == "1 of 3 implementations is broken: mine."
    short, long = text_of(print_verification, records), text_of(print_verification, records, explain=True)
    assert "leaks the future" in short
    assert "row 3 differs" not in short
    assert "row 3 differs" in long
    assert "needs cuda" in short


def test_verification_tells_configurations_apart():
    pairs = [{"forward": one, "backward": other} for one, other in (("a", "b"), ("b", "a"))]
    right, left = "torch.pair[backward=b,forward=a]", "torch.pair[backward=a,forward=b]"
    records = [ok("torch.pair", config=config) for config in pairs]
    rows = [line.split()[:2] for line in text_of(print_verification, records).splitlines()]
    assert rows[1:3] == [[right, "1"], [left, "1"]]
    assert (
        verification_verdict(records)
        == "All 2 configurations that run here are right on everything they claim (2 cells)."
    )
    records[1] = incorrect("torch.pair", "its dQ is wrong", config=pairs[1])
    text = text_of(print_verification, records)
    assert f"incorrect  {left} · {records[1].workload.id}: its dQ is wrong" in text
    assert verification_verdict(records) == f"1 of 2 configurations is broken: {left}."


def test_verification_when_all_is_well_or_nothing_ran():
    assert verification_verdict([ok("a"), ok("b"), unsupported("c", "no")]).startswith("All 2 implementations")
    assert verification_verdict([ok("a"), unsupported("c", "no")]) == "a is right on everything it claims (1 cell)."
    assert verification_verdict([unsupported("c", "no")]).startswith("Nothing could be verified: no implementation")


def test_what_did_not_fit_is_not_called_right():
    lost = [OutOfMemory(implementation="b", workload=workload(n), reason="needs 9 GB") for n in (64, 128)]
    assert verification_verdict([ok("a"), *lost]) == "a is right on 1 cell; memory ran out on 2 cells (b)."
    assert verification_verdict(lost) == "Nothing could be verified: memory ran out on 2 cells (b)."
    whole = verification_verdict([ok("a"), ok("b"), lost[0]])
    assert whole == "All 2 implementations that run here are right on 2 cells; memory ran out on 1 cell (b)."
    (row,) = (line for line in text_of(print_verification, lost).splitlines() if line.startswith("b "))
    assert row.split(maxsplit=4)[1:4] == ["–"] * 3
    assert "out of memory: needs 9 GB (2)" in row
