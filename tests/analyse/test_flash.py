"""From which length fused attention pays, on tracks with a known answer."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
from length_factory import LENGTHS, along, timed
from record_factory import timing

from attnbench import masks
from attnbench.analyse.advice import Recommendation
from attnbench.analyse.flash import stores_scores
from attnbench.analyse.recommend import recommend
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
