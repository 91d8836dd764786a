"""Where two implementations change places along the length, when fused attention pays, and what is launch-bound."""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec
import pytest
from length_factory import GPU, LENGTHS, along, timed
from record_factory import ok, recommend, timing

from attnbench import masks
from attnbench.results.advice import Recommendation
from attnbench.results.by_length import crossover
from attnbench.results.growth import stores_scores
from attnbench.spec import Record


def fused_bytes(n: int) -> float:
    """The output of four heads of 32 in float32."""
    return 512 * n


def plain_bytes(n: int) -> float:
    """The output and the scores of four heads."""
    return 512 * n + 16 * n * n


def plain(ns, seed: int = 1, **fields) -> list[Record]:
    return along(f"torch.plain-{seed}", ns, seed=seed, peak=plain_bytes, **fields)


def fused(ns, seed: int = 2, **fields) -> list[Record]:
    return along(f"torch.fused-{seed}", ns, seed=seed, peak=fused_bytes, **fields)


def flash(records: Sequence[Record]) -> list[Recommendation]:
    return [one for one in recommend(records) if one.kind == "flash"]


def test_what_stores_scores_is_read_from_the_record():
    assert all(stores_scores(timed(record)) for record in plain(lambda n: n))
    assert not any(stores_scores(timed(record)) for record in fused(lambda n: n))


def test_the_threshold_is_where_the_best_of_both_sides_take_as_long():
    """Plain: 100 n^2; fused: 50 n^2 + 25e6, equal at 707; a slower one on each side changes nothing."""
    records = [
        *plain(lambda n: 100 * n * n),
        *plain(lambda n: 300 * n * n, seed=3),
        *fused(lambda n: 50 * n * n + 25e6),
        *fused(lambda n: 90 * n * n + 50e6, seed=4),
    ]
    (found,) = flash(records)
    (at,) = [figure for figure in found.figures if figure.unit == "tokens"]
    assert at.value == pytest.approx(707, rel=0.1)
    assert at.low is not None
    assert at.high is not None
    assert at.low <= at.value <= at.high
    assert "with batch 1, fused attention (flash) pays from about " in found.text
    assert found.text.startswith("PyTorch · 4 heads of 32 · causal · float32 · forward: ")
    assert len(found.workloads) == len(LENGTHS)


@pytest.mark.parametrize(
    ("factor", "told"),
    [
        (0.5, "use fused attention (flash) instead of plain attention at every length"),
        (2, "use plain attention instead of fused attention (flash) at every length"),
    ],
)
def test_one_side_that_always_leads_says_by_how_much(factor: float, told: str):
    (found,) = flash([*plain(lambda n: 100 * n), *fused(lambda n: factor * 100 * n)])
    assert f"{told} measured, 256 to 4,096 tokens: " in found.text
    names = ["torch.fused-2", "torch.plain-1"]
    assert f"({' against '.join(names if factor < 1 else names[::-1])}) to " in found.text
    gains = [float(gain) for gain in re.findall(r"([\d.]+)x \(", found.text)]
    assert gains == pytest.approx([2, 2], rel=0.02)
    assert len(found.figures) == len(LENGTHS)


def certain_at_512(n: int) -> float:
    """As fast as 100 n, and half of that at 512."""
    return (50 if n == 512 else 100) * n


def test_lengths_that_do_not_differ_for_certain_are_no_place_to_use_the_leader():
    (found,) = flash([*plain(lambda n: 100 * n), *fused(certain_at_512)])
    told = "use fused attention (flash) instead of plain attention at 512 tokens: "
    assert told in found.text
    assert "every length" not in found.text
    assert found.text.count("as fast at") == 1
    assert "; no certain difference at 256, 1,024, 2,048 and 4,096 tokens." in found.text


def test_of_several_batches_the_shapes_are_named():
    lengths = LENGTHS[:2]
    records = [
        record
        for batch in (1, 8)
        for record in (
            *plain(lambda n: 100 * n, lengths=lengths, shape={"batch": batch}),
            *fused(certain_at_512, lengths=lengths, shape={"batch": batch}),
        )
    ]
    (found,) = flash(records)
    assert "instead of plain attention at 1 x 512 and 8 x 512: " in found.text
    assert "; no certain difference at 1 x 256 and 8 x 256." in found.text


def test_a_gain_without_a_figure_is_none():
    """Three rounds that vary thirtyfold: faster for certain, nobody knows how much."""
    wild = timing([1e6, 30e6, 900e6])
    records = [*plain(lambda n: 1, time=wild), *fused(lambda n: 1, time=timing([1.0, 1.1, 1.2]))]
    (found,) = flash(records)
    assert "how much faster cannot be told, times vary too much" in found.text
    for words in ("cannot tell", "more than"):
        assert f"{words} as fast at" not in found.text


def test_batches_that_disagree_are_told_one_by_one():
    records = [
        *plain(lambda n: 100 * n),
        *fused(lambda n: 200 * n),
        *plain(lambda n: 100 * n, shape={"batch": 8}),
        *fused(lambda n: 50 * n, shape={"batch": 8}),
    ]
    (found,) = flash(records)
    assert (
        "with batch 1, fused attention (flash) does not pay at 256, 512, 1,024, 2,048 and 4,096 tokens;" in found.text
    )
    assert "; with batch 8, it pays at 256, 512, 1,024, 2,048 and 4,096 tokens." in found.text


def test_no_difference_is_no_gain():
    (found,) = flash([*plain(lambda n: 100 * n), *fused(lambda n: 100 * n)])
    assert "fused attention (flash) makes no certain difference at 256" in found.text


def test_a_batch_that_pays_somewhere_does_not_pay_everywhere():
    records = [
        *plain(lambda n: 100 * n),
        *fused(lambda n: 100 * n),
        *plain(lambda n: 100 * n, shape={"batch": 8}),
        *fused(certain_at_512, shape={"batch": 8}),
    ]
    (found,) = flash(records)
    assert "with batch 8, it pays at 512 tokens, no certain difference at 256, 1,024" in found.text


def test_few_queries_are_part_of_the_shape():
    shape = {"kv_len": 4096, "mask": masks.full()}
    records = [
        *along("torch.plain", lambda n: 2e5, [64, 128], 1, peak=lambda n: 512 * n + 16 * n * 4096, shape=shape),
        *along("torch.fused", lambda n: 1e5, [64, 128], 2, peak=lambda n: 512 * n, shape=shape),
    ]
    assert flash(records) == []


@pytest.mark.parametrize(
    "records",
    [
        [*plain(lambda n: n), *plain(lambda n: 2 * n, seed=3)],
        [*fused(lambda n: n), *fused(lambda n: 2 * n, seed=3)],
        [*plain(lambda n: n, lengths=[512]), *fused(lambda n: n, lengths=[512])],
        [*plain(lambda n: n, lengths=[512]), *fused(lambda n: n, lengths=[1024])],
    ],
)
def test_one_side_or_one_length_gives_no_threshold(records: list[Record]):
    assert flash(records) == []


def fixed_cost(n: int) -> float:
    """Return a large fixed cost and little per pair: passes `per_length` at 1000."""
    return 1e6 + n


def per_length(n: int) -> float:
    return 1001.0 * n


def test_a_crossing_is_found_between_the_measured_lengths():
    found = crossover(along("flash", fixed_cost, seed=1), along("eager", per_length, seed=2))
    assert found.kind == "from"
    low, high = found.interval
    assert 900 < found.length < 1100
    assert {low, high} <= set(LENGTHS)
    assert low < found.length < high
    assert found.lengths == LENGTHS
    assert found.ratios[0].value < 1 < found.ratios[-1].value


def test_the_other_way_round_is_the_mirror():
    there = crossover(along("flash", fixed_cost, seed=1), along("eager", per_length, seed=2))
    back = crossover(along("eager", per_length, seed=2), along("flash", fixed_cost, seed=1))
    assert back.kind == "until"
    assert back.length == pytest.approx(there.length, rel=0.01)


def test_the_interval_covers_the_truth_as_often_as_it_says():
    """Both curves are power laws, so that interpolating in logarithms adds no error of its own."""
    hits = 0
    for seed in range(100):
        a, b = along("a", lambda n: 1000.0**0.5 * n**0.5, seed=2 * seed), along("b", float, seed=2 * seed + 1)
        low, high = crossover(a, b).interval
        hits += low <= 1000 <= high
    assert hits >= 88


def test_a_tie_between_the_certain_lengths_is_within_the_interval():
    def near(n: int) -> float:
        return {256: 2.0, 512: 1.2, 1024: 1.0, 2048: 0.8, 4096: 0.5}[n] * 1e6

    found = crossover(along("a", near, seed=1), along("b", lambda n: 1e6, seed=2))
    low, high = found.interval
    assert (low, high) == (512, 2048)
    assert found.point is None


def test_near_neighbours_give_a_point():
    found = crossover(
        along("flash", fixed_cost, (512, 768, 1280), seed=1),
        along("eager", per_length, (512, 768, 1280), seed=2),
    )
    assert found.interval == (768, 1280)
    assert found.point == found.length


@pytest.mark.parametrize("truth", [600, 1000, 3000, 7000])
def test_what_was_not_measured_may_hide_the_crossing_anywhere(truth):
    """Both curves bend between the two measured lengths, so a straight line through them misses the crossing."""
    lengths = (256, 512, 8192)

    def bent(n: int) -> float:
        return 1e6 if n < truth else 1e5

    found = crossover(along("a", bent, lengths, seed=1), along("b", lambda n: 3e5, lengths, seed=2))
    low, high = found.interval
    assert (low, high) == (512, 8192)
    assert low <= truth <= high
    assert found.point is None


@pytest.mark.parametrize(
    ("factors", "kind"),
    [
        ((0.5, 0.5, 0.5, 0.5, 0.5), "always"),
        ((1.0, 1.0, 0.5, 1.0, 0.5), "always"),
        ((2.0, 2.0, 1.0, 2.0, 2.0), "never"),
        ((1.0, 1.0, 1.0, 1.0, 1.0), "same"),
        ((0.5, 2.0, 0.5, 0.5, 0.5), "mixed"),
        ((0.5, 0.5, 0.5, 0.5, 2.0), "until"),
    ],
)
def test_what_there_is_no_length_for_has_a_name(factors, kind):
    table = dict(zip(LENGTHS, factors))
    found = crossover(along("a", lambda n: 1e6 * table[n], seed=1), along("b", lambda n: 1e6, seed=2))
    assert found.kind == kind
    assert (found.length is not None) == (kind == "until")
    assert found.signs == tuple((factor < 1) - (factor > 1) for factor in factors)


def test_only_lengths_that_both_have_count():
    found = crossover(along("a", fixed_cost, LENGTHS[:3]), along("b", per_length, LENGTHS[2:], seed=1))
    assert found.lengths == (1024,)
    assert crossover(along("a", fixed_cost, LENGTHS[:2]), along("b", per_length, LENGTHS[2:])) is None
    assert crossover([ok("a")], [ok("b")]) is None


def only(records: Sequence[Record], kind: str) -> Recommendation:
    (found,) = [one for one in recommend(records) if one.kind == kind]
    return found


def kinds(records: Sequence[Record]) -> set[str]:
    return {one.kind for one in recommend(records)}


def test_launch_bound_needs_both_clocks_and_a_device():
    def made(**fields) -> list[Record]:
        return along("torch.sdpa", lambda n: 30.0 * n, seed=1, **fields)

    wall = {"wall": lambda n: 60e3 + 30 * n}
    found = only(made(clock="kernel", also=wall), "launch-bound")
    assert "launch-bound with batch 1 up to 1,024 tokens (torch.sdpa: 30" in found.text
    assert "; no longer at 2,048): capture a CUDA graph." in found.text
    assert {figure.unit for figure in found.figures} == {"ns"}
    assert "launch-bound" not in kinds(made(clock="kernel"))
    assert "launch-bound" not in kinds(made(clock="kernel", also={"wall": lambda n: 31 * n}))
    assert "launch-bound" not in kinds(made(clock="wall", also={"kernel": lambda n: 29 * n}))
    cpu = msgspec.structs.replace(GPU, device="cpu")
    assert "launch-bound" not in kinds(made(clock="kernel", also=wall, environment=cpu))


@pytest.mark.parametrize(
    ("call", "told"),
    [
        ({"wall": lambda n: 5e6}, "torch.dilated: 2 ms of kernels in 5 ms"),
        ({"events": lambda n: 3.2e6}, "torch.dilated: 2 ms of kernels in 3.2 ms by events"),
        ({"events": lambda n: 2.3e6}, ""),
        ({"wall": lambda n: 3.5e6}, ""),
    ],
)
def test_a_long_call_that_waits_for_its_host_is_launch_bound_too(call, told):
    records = along("torch.dilated", lambda n: 2e6, [512, 1024], clock="kernel", also=call, shape={"pass_": "train"})
    found = [one.text for one in recommend(records) if one.kind == "launch-bound"]
    assert [told in text for text in found] == [True] * bool(told)


def test_the_call_is_that_of_the_fastest_and_lengths_that_are_not_bound_are_left_out():
    records = [
        *along("torch.fast", lambda n: 1e6, (512, 1024), 1, clock="events", also={"kernel": lambda n: 0.9e6}),
        *along("torch.fast", lambda n: 1e6, (2048,), 2, clock="events", also={"kernel": lambda n: 0.5e6}),
        *along("torch.slow", lambda n: 3e6, (512, 1024, 2048), 3, clock="events", also={"kernel": lambda n: 0.4e6}),
    ]
    assert (
        "batch 1 at 2,048 tokens (torch.fast: 500 us of kernels in 999 us by events)"
        in only(records, "launch-bound").text
    )


def test_what_to_do_about_launches_depends_on_the_framework():
    jax = msgspec.structs.replace(GPU, framework="jax")
    records = along("jax.xla", lambda n: 2e4, [512], clock="kernel", also={"wall": lambda n: 2e5}, environment=jax)
    assert (
        "batch 1 at 512 tokens (jax.xla: 20 us of kernels in 200 us): put the whole step"
        in only(records, "launch-bound").text
    )
