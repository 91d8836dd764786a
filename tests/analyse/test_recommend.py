from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from length_factory import GPU, LENGTHS, along, out_of_memory
from record_factory import incorrect, noisy, ok, workload

from attnbench.analyse.advice import Figure, Recommendation, listed, tokens
from attnbench.analyse.ranking import is_timed, label
from attnbench.analyse.recommend import recommend
from attnbench.spec import Memory, Record
from attnbench.store.runfile import read_run
from attnbench.workloads import masks

RESULTS = sorted((Path(__file__).parents[2] / "results").rglob("*.jsonl"))


def only(records: Sequence[Record], kind: str) -> Recommendation:
    (found,) = [one for one in recommend(records) if one.kind == kind]
    return found


def kinds(records: Sequence[Record]) -> set[str]:
    return {one.kind for one in recommend(records)}


def test_the_winner_of_a_family_with_its_figures():
    records = [
        *along("torch.eager", lambda n: 4.0 * n * n, seed=1),
        *along("torch.sdpa", lambda n: 1.0 * n * n, seed=2),
        *along("torch.flex", lambda n: 2.0 * n * n, seed=3),
    ]
    found = only(records, "winner")
    assert found.text.startswith("PyTorch · 4 heads of 32 · causal · float32 · forward: use torch.sdpa, 2.00x (")
    assert "as fast as torch.flex, the next; torch.sdpa is 4.00x (" in found.text
    assert "(in front on 5 of 5 workloads)" in found.text
    assert found.device == "Test GPU"
    assert len(found.workloads) == len(LENGTHS)
    against, plain = found.figures
    assert (against.name, plain.name) == ("time of torch.flex / torch.sdpa", "time of torch.eager / torch.sdpa")
    assert against.value == pytest.approx(2, rel=0.02)
    assert against.low < against.value < against.high
    assert "time of torch.flex / torch.sdpa 2.00x" in found.basis
    assert found.basis.endswith("from 5 workloads on Test GPU")


def test_what_is_approximate_wrong_or_an_anchor_is_never_recommended():
    records = [
        *along("torch.eager", lambda n: 4.0 * n, seed=1),
        *along("torch.sdpa", lambda n: 2.0 * n, seed=2),
        *along("torch.rough", lambda n: 1.0 * n, seed=3, approximate=True),
        *along("anchor.matmul", lambda n: 0.1 * n, seed=4),
        *[incorrect("torch.wrong", "wrong", workload(n)) for n in LENGTHS],
    ]
    told = " ".join(one.text for one in recommend(records))
    assert "use torch.sdpa" in told
    for name in ("torch.rough", "anchor", "torch.wrong"):
        assert name not in told


def test_of_two_as_fast_the_one_with_less_memory():
    records = [
        *along("torch.a", lambda n: 1e3 * n, seed=1, peak=lambda n: 20_000 * n),
        *along("torch.b", lambda n: 1e3 * n, seed=2, peak=lambda n: 10_000 * n),
    ]
    found = only(records, "tie")
    assert "no significant difference between torch." in found.text
    assert "take torch.b, which needs less memory (torch.a 2.00x as much)" in found.text
    assert any("peak memory" in str(figure) for figure in found.figures)


@pytest.mark.parametrize(
    ("peak", "told"),
    [(lambda n: 100.0 * n, "take either, they need the same memory"), (None, "): take either (in front")],
)
def test_of_two_alike_in_everything_either(peak, told):
    records = [record for seed in (1, 2) for record in along(f"torch.{seed}", lambda n: 1e3 * n, seed=seed, peak=peak)]
    assert told in only(records, "tie").text


def test_two_that_lead_in_different_places_are_no_tie():
    """Over all shapes the mean says nothing, but on each of them the answer is clear."""
    slow_at = {"torch.a": (1, 4), "torch.b": (2, 8)}
    records = []
    for seed, (name, slow) in enumerate(slow_at.items(), start=9):
        for batch in (1, 2, 4, 8):
            ns = 2e6 if batch in slow else 1e6
            records += along(name, lambda n, ns=ns: ns, [512], seed, shape={"batch": batch})
    found = only(records, "mixed")
    assert "no one is fastest everywhere, choose by shape" in found.text
    assert "in front on 2 of 4 workloads" in found.text
    assert "leads at " in found.text


def test_families_are_answered_for_themselves():
    fast, slow = ("torch.a", "torch.b"), ("torch.b", "torch.a")
    other = msgspec.structs.replace(GPU, device_name="Other GPU")
    cases = [
        ({"mask": masks.causal()}, GPU, fast),
        ({"mask": masks.full()}, GPU, slow),
        ({"mask": masks.causal(), "dtype": "bfloat16"}, GPU, slow),
        ({"mask": masks.causal(), "pass_": "train"}, GPU, slow),
        ({"mask": masks.causal(), "kv_heads": 1}, GPU, slow),
        ({"mask": masks.causal(), "head_dim": 64}, GPU, slow),
        ({"mask": masks.causal()}, other, slow),
    ]
    records = []
    for seed, (shape, environment, order) in enumerate(cases):
        for place, name in enumerate(order, start=1):
            records += along(
                name, lambda n, k=place: k * 1e6, [512], 2 * seed + place, shape=shape, environment=environment
            )
    found = [one for one in recommend(records) if one.kind == "winner"]
    assert len(found) == len(cases)
    assert ["use torch.a" in one.text for one in found] == [order is fast for _, _, order in cases]


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


def test_a_lead_that_goes_to_and_fro_is_no_rule():
    def zigzag(n: int) -> float:
        return 2e6 if LENGTHS.index(n) % 2 else 1e6

    records = [*along("torch.a", zigzag, seed=1), *along("torch.b", lambda n: 3e6 - zigzag(n), seed=2)]
    assert "threshold" not in kinds(records)


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
    assert any(one.kind in ("winner", "tie", "mixed") for one in found)
    known = {record.workload.id for record in records}
    for one in found:
        assert set(one.workloads) <= known
        assert one.figures
        assert any(name in f"{one.text} {one.basis}" for name in exact) or one.kind in ("launch-bound", "memory")
