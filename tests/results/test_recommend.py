from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from length_factory import GPU, LENGTHS, along, out_of_memory
from record_factory import noisy, ok, recommend, workload

from attnbench import masks
from attnbench.results.advice import Figure, Recommendation, listed, tokens
from attnbench.results.records import is_timed, label
from attnbench.results.run_file import read_run
from attnbench.spec import Memory, Record

RESULTS = sorted((Path(__file__).parents[2] / "results").rglob("*.jsonl"))


def only(records: Sequence[Record], kind: str) -> Recommendation:
    (found,) = [one for one in recommend(records) if one.kind == kind]
    return found


def kinds(records: Sequence[Record]) -> set[str]:
    return {one.kind for one in recommend(records)}


def test_one_implementation_is_no_choice():
    assert recommend(along("torch.sdpa", float)) == []
    assert recommend([]) == []


def test_from_which_length_on():
    records = [
        *along("torch.flash", lambda n: 1e6 + n, seed=1),
        *along("torch.eager", lambda n: 1001.0 * n, seed=2),
    ]
    found = only(records, "threshold")
    assert "batch 1: use torch.eager up to 512 tokens, torch.flash from about 1,000 (" in found.text
    (figure,) = found.figures
    assert figure.name == "torch.flash instead of torch.eager from"
    assert figure.low < 1000 < figure.high
    assert figure.unit == "tokens"


def test_a_threshold_without_an_overlap_is_a_bracket():
    records = [
        *along("torch.short", lambda n: 1e3 * n, LENGTHS[:2], seed=1),
        *along("torch.long", lambda n: 1e3 * n, LENGTHS[3:], seed=2),
    ]
    text = only(records, "threshold").text
    assert text.endswith("use torch.short up to 512 tokens, torch.long from 2,048 (nothing was measured after 512).")


def test_a_mask_aligned_to_the_top_left_is_a_family_of_its_own():
    """Where the lengths differ it shows other pairs, and other kernels may lead."""
    leaders = {"top-left": "torch.a", "bottom-right": "torch.b"}
    records = [
        ok(name, noisy(1e6 if name == leader else 2e6, seed=n), workload(64, kv_len=256, mask=masks.causal(align)))
        for align, leader in leaders.items()
        for n, name in enumerate(leaders.values())
    ]
    told = [one.text for one in recommend(records) if one.kind == "winner"]
    assert len(told) == 2
    assert "· causal (top-left) · float32 · forward: use torch.a" in told[0]
    assert "· causal · float32 · forward: use torch.b" in told[1]
    square = [
        ok(name, noisy(t, seed=1), workload(64, mask=masks.causal("top-left")))
        for name, t in (("torch.a", 1e6), ("torch.b", 2e6))
    ]
    assert "· causal · float32" in only(square, "winner").text


def test_a_lead_that_goes_to_and_fro_is_no_rule():
    def zigzag(n: int) -> float:
        return 2e6 if LENGTHS.index(n) % 2 else 1e6

    records = [*along("torch.a", zigzag, seed=1), *along("torch.b", lambda n: 3e6 - zigzag(n), seed=2)]
    assert "threshold" not in kinds(records)


def test_where_a_path_stops_fitting():
    records = [
        *along("torch.eager", lambda n: 1e3 * n, (4096, 8192, 16384), seed=1, peak=lambda n: 16 * n * n),
        *along("torch.sdpa", lambda n: 1e2 * n, (4096, 8192, 16384), seed=2, peak=lambda n: 600 * n),
    ]
    found = only(records, "memory")
    assert "batch 1: torch.eager stops fitting 80 GB at about 71,000 tokens" in found.text
    assert "71,000-71,000" not in found.text + found.basis
    assert "peak memory ~ n^2.00" in found.text
    assert "torch.sdpa" not in found.text
    seen = only([*records, out_of_memory("torch.eager", 32768)], "memory")
    assert "and ran out at 32,768" in seen.text


def test_the_memory_that_several_stop_fitting_is_said_once():
    names = {"torch.eager": 16, "torch.hf-eager": 32, "torch.sdpa-math": 48}
    records = [
        record
        for seed, (name, bytes_) in enumerate(names.items())
        for record in along(name, float, (4096, 8192, 16384), seed=seed, peak=lambda n, b=bytes_: b * n * n)
    ]
    text = only(records, "memory").text
    assert text.count("80 GB") == text.count("peak memory") == 1
    assert "torch.hf-eager at about 50,000 tokens (~ n^2.00) and torch.sdpa-math at about 41,000 tokens" in text


def test_an_end_of_memory_is_told_though_nothing_can_be_fitted():
    records = [*along("torch.eager", lambda n: 1e6, [512]), out_of_memory("torch.eager", 2048)]
    assert only(records, "memory").text.endswith("torch.eager ran out of memory at 2,048 tokens.")


def test_the_last_record_of_a_cell_counts():
    slow, fast = (along("torch.a", lambda n, k=k: k * n, seed=k) for k in (9000, 1000))
    records = [*slow, *along("torch.b", lambda n: 3000 * n, seed=3), *fast]
    assert "use torch.a" in only(records, "winner").text


def test_decoding_is_a_family_of_its_own_along_the_keys():
    shape = {"mask": masks.full()}
    records = []
    for seed, name in enumerate(("torch.a", "torch.b"), start=1):
        for index, n in enumerate((1024, 4096, 65536)):
            on = workload(1, kv_len=n, **shape)
            peak = Memory(peak_bytes=n * n, theory_bytes=n)
            samples = noisy(seed * 1e3 * n, 10 * seed + index)
            records.append(ok(name, samples, on, environment=GPU, memory=peak))
    assert "PyTorch · decode · 4 heads of 32 · full" in only(records, "winner").text
    assert "batch 1: torch.a stops fitting" in only(records, "memory").text


def test_words():
    assert [tokens(n) for n in (7, 93.4, 104.9, 3270, 61_400)] == ["7", "93", "100", "3,300", "61,000"]
    assert listed(["a"]) == "a"
    assert listed(["a", "b", "c"]) == "a, b and c"
    assert str(Figure(name="exponent", value=1.987)) == "exponent 1.99"
    assert str(Figure(name="from", value=1000, low=900, high=1200, unit="tokens")) == "from 1,000 tokens (900-1,200)"


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_published_runs_give_sentences_that_they_carry(path: Path):
    if not path.read_text().startswith('{"line":"header"'):
        pytest.skip("no run file")
    records = read_run(path).records
    exact = {label(r) for r in records if is_timed(r) and not r.approximate}
    found = recommend(records)
    assert any(one.kind in ("winner", "tie", "mixed") for one in found) or path.stem == "million", (
        "one alone beats nobody"
    )
    known = {record.workload.id for record in records}
    for one in found:
        assert set(one.workloads) <= known
        assert one.figures
        assert any(name in f"{one.text} {one.basis}" for name in exact) or one.kind in ("launch-bound", "memory")
