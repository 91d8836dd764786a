"""Sentences that must read as sentences, whatever was measured."""

from __future__ import annotations

import msgspec
import pytest
from length_factory import GPU, along
from record_factory import ok, timing, workload

from attnbench.analyse.recommend import recommend
from attnbench.analyse.summary import closing
from attnbench.analyse.wording import all_of, counted, format_ratio, format_span, slightly_apart
from attnbench.results.ratios import Ratio
from attnbench.spec import Record


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
