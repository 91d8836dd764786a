"""Which implementation is recommended, family by family and in the headline."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
from length_factory import GPU, LENGTHS, along
from record_factory import incorrect, noisy, recommend, timing, workload

from attnbench import masks
from attnbench.results.advice import Recommendation
from attnbench.results.ratios import Ratio
from attnbench.results.recommend import _tie
from attnbench.spec import Record


def only(records: Sequence[Record], kind: str) -> Recommendation:
    (found,) = [one for one in recommend(records) if one.kind == kind]
    return found


def test_the_winner_of_a_family_with_its_figures():
    records = [
        *along("torch.eager", lambda n: 4.0 * n * n, seed=1),
        *along("torch.sdpa", lambda n: 1.0 * n * n, seed=2),
        *along("torch.flex", lambda n: 2.0 * n * n, seed=3),
    ]
    found = only(records, "winner")
    assert found.text.startswith("PyTorch · 4 heads of 32 · causal · float32 · forward: use torch.sdpa, 2.00x (")
    assert "as fast as torch.flex, the next; torch.sdpa is 4.00x (" in found.text
    assert "(unbeaten on 5 of 5 workloads)" in found.text
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
    [(lambda n: 100.0 * n, "take either, they need the same memory"), (None, "): take either (unbeaten")],
)
def test_of_two_alike_in_everything_either(peak, told):
    records = [record for seed in (1, 2) for record in along(f"torch.{seed}", lambda n: 1e3 * n, seed=seed, peak=peak)]
    assert told in only(records, "tie").text


def test_a_tie_that_is_apart_by_less_than_counts_says_so():
    records = [
        record
        for seed, (name, ns) in enumerate({"torch.eager": 1.005e6, "torch.sdpa": 1e6}.items())
        for record in along(name, lambda n: 1, [512], time=timing(noisy(ns, seed, spread=1e-4)))
    ]
    found = only(records, "tie")
    assert "torch.sdpa and torch.eager are certainly less than 1 % apart (1.00x (1.00-1.01))" in found.text
    assert "no significant difference" not in found.text


def test_a_tie_whose_interval_reaches_far_is_not_told_as_near():
    text, _ = _tie("a", "a", "b", Ratio(2.15, 1.002, 3.2), [])
    assert text == "a and b cannot be told apart (2.15x (1.00-3.20)): take either"


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
    assert "unbeaten on 2 of 4 workloads" in found.text
    assert "is first at " in found.text
    assert (found.pick.mixed, found.pick.certain) == (True, True)


def test_what_spans_ties_is_not_certain():
    slower = {256: 1.2, 512: 1.0, 1024: 1.3}
    records = [
        *along("torch.a", lambda n: 1e6, tuple(slower), seed=1),
        *along("torch.b", lambda n: slower[n] * 1e6, tuple(slower), seed=2),
    ]
    found = only(records, "mixed")
    assert (found.pick.mixed, found.pick.certain) == (False, False)


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


def test_a_mask_that_hides_nothing_is_another_family():
    """What a fast kernel takes as no mask at all says nothing about shapes whose mask it refuses."""
    some, none = np.repeat([[0, 1]], 256, axis=1), np.zeros((1, 512), int)
    records = [
        *along("torch.fast", lambda n: 1e6, [512], 1, shape={"mask": masks.block_causal(none)}),
        *along("torch.slow", lambda n: 2e6, [512], 2, shape={"mask": masks.block_causal(none)}),
        *along("torch.slow", lambda n: 2e6, [512], 3, shape={"mask": masks.block_causal(some)}),
        *along("torch.other", lambda n: 3e6, [512], 4, shape={"mask": masks.block_causal(some)}),
    ]
    idle, hiding = [one for one in recommend(records) if one.kind == "winner"]
    assert " · block_causal that hides nothing · float32" in idle.text
    assert "use torch.fast" in idle.text
    assert " · block_causal · float32" in hiding.text
    assert "use torch.slow" in hiding.text
    assert {one.kind for one in recommend(along("torch.a", float, shape={"mask": masks.full()}))} == set()
    plain = [r for n in ("torch.a", "torch.b") for r in along(n, lambda n: 1e6, [512], shape={"mask": masks.full()})]
    assert " · full · " in only(plain, "tie").text


CUDNN = ("cudnn_fprop", "Memset")


def test_two_names_of_one_kernel_are_one_answer():
    records = [
        *along("torch.sdpa-cudnn", lambda n: 1e3 * n, seed=1, kernels=CUDNN),
        *along("torch.sdpa", lambda n: 1e3 * n, seed=2, kernels=CUDNN[::-1]),
        *along("torch.fa3", lambda n: 1.5e3 * n, seed=3, kernels=("fa3",)),
        *along("torch.eager", lambda n: 9e3 * n, seed=4, kernels=("gemm",)),
    ]
    found = only(records, "winner")
    assert "use torch.sdpa (the same kernel as torch.sdpa-cudnn), 1.50x" in found.text
    assert "as fast as torch.fa3, the next; torch.sdpa is 9.0" in found.text
    assert found.pick.same == ("torch.sdpa-cudnn",)
    assert (found.pick.led, found.pick.of) == (5, 5)


@pytest.mark.parametrize(
    ("kernels", "factor", "kind"),
    [(("other",), 1.0, "tie"), (None, 1.0, "tie"), (CUDNN, 1.1, "winner")],
    ids=["other kernels", "no profile", "slower for certain"],
)
def test_names_with_other_kernels_or_other_times_are_two_answers(kernels, factor: float, kind: str):
    records = [
        *along("torch.sdpa", lambda n: 1e3 * n, seed=1, kernels=CUDNN),
        *along("torch.sdpa-cudnn", lambda n: factor * 1e3 * n, seed=2, kernels=kernels),
    ]
    found = only(records, kind)
    assert "same kernel" not in found.text
    assert found.pick.same == ()


def test_nothing_but_names_of_one_kernel():
    records = [r for seed, name in enumerate(("jax.a", "jax.b")) for r in along(name, float, seed=seed, kernels=CUDNN)]
    found = only(records, "tie")
    assert "take jax.a (the same kernel as jax.b): nothing else was timed (unbeaten on 5 of 5 workloads)." in found.text


def test_a_verdict_from_each_workload_rests_on_each_and_not_on_their_mean():
    """1.5 and 6 times: their mean is anything, but the same one wins both."""
    records = []
    for seed, (n, factor) in enumerate(((512, 1.5), (1024, 6))):
        records += along("torch.a", lambda n: 1e6, [n], 2 * seed)
        records += along("torch.b", lambda n, k=factor: k * 1e6, [n], 2 * seed + 1)
    found = only(records, "winner")
    assert [figure.name for figure in found.figures] == [
        "time of torch.b / torch.a at 1 x 512, 99 %",
        "time of torch.b / torch.a at 1 x 1024, 99 %",
    ]
    assert [figure.value for figure in found.figures] == pytest.approx([1.5, 6], rel=0.02)
    assert all(figure.low > 1 for figure in found.figures)
    assert found.pick.certain


JAX = msgspec.structs.replace(GPU, framework="jax")


def headline(*records: Record, **options) -> list[str]:
    return [one.text for one in recommend(records, **options) if one.kind == "overall"]


def both_passes(name: str, forward: float, train: float, seed: int, **fields) -> list[Record]:
    return [
        record
        for place, (pass_, ns) in enumerate((("train", train), ("forward", forward)))
        for record in along(name, lambda n, ns=ns: ns * n, seed=10 * seed + place, shape={"pass_": pass_}, **fields)
    ]


def test_each_framework_and_pass_has_its_own_answer():
    found = headline(
        *both_passes("torch.fa3", 1e3, 4e3, 1),
        *both_passes("torch.fa4", 2e3, 2e3, 2),
        *both_passes("torch.eager", 8e3, 8e3, 3),
        *both_passes("jax.xla", 3e3, 9e3, 4, environment=JAX),
        *both_passes("jax.einsum", 9e3, 3e3, 5, environment=JAX),
    )
    beginnings = [
        "PyTorch, forward: torch.fa3 leads on all 5 shapes, 8.0",
        "PyTorch, train: torch.fa4 leads on all 5 shapes, 3.9",
        "JAX, forward: jax.xla leads on all 5 shapes, 3.0",
        "JAX, train: jax.einsum leads on all 5 shapes, 3.0",
    ]
    assert [text[: len(start)] for text, start in zip(found, beginnings, strict=True)] == beginnings
    assert "as fast as jax.xla" in found[-1]


def test_it_holds_for_all_families_and_counts_where_others_lead():
    full = {"mask": masks.full()}
    (found,) = headline(
        *along("torch.fa3", lambda n: 1e3 * n, seed=1),
        *along("torch.sdpa", lambda n: 2e3 * n, seed=2),
        *along("torch.sdpa", lambda n: 2e3 * n, LENGTHS[:2], seed=3, shape=full),
        *along("torch.eager", lambda n: 4e3 * n, LENGTHS[:2], seed=4, shape=full),
    )
    assert found.startswith("PyTorch, forward: torch.fa3 leads on 5 of 7 shapes, 2.0")
    assert "as fast as torch.sdpa (both ran on 5)" in found
    assert found.endswith("; first elsewhere: torch.sdpa on 2.")


def test_what_was_asked_for_is_what_it_is_compared_with():
    records = [
        *along("torch.fa3", lambda n: 1e3 * n, seed=1),
        *along("torch.sdpa", lambda n: 2e3 * n, seed=2),
        *along("torch.eager", lambda n: 4e3 * n, seed=3),
    ]
    assert "as fast as torch.eager." in headline(*records)[0]
    assert "as fast as torch.sdpa." in headline(*records, against=["torch.sdpa"])[0]


def test_a_tie_is_not_told_as_a_lead():
    records = [record for seed in (1, 2) for record in along(f"torch.{seed}", lambda n: 1e3 * n, seed=seed)]
    (found,) = headline(*records)
    assert ": on all 5 shapes no other is significantly faster, not certainly faster than torch." in found
    assert "leads" not in found


def test_ties_are_counted_apart_from_leads():
    a = along("torch.a", lambda n: 1e3 * n, seed=1)
    b = along("torch.b", lambda n: (2e3 if n <= LENGTHS[1] else 1e3) * n, seed=2)
    c = along("torch.c", lambda n: 4e3 * n, seed=3)
    (found,) = headline(*a, *b, *c)
    assert "torch.a leads on 2 of 5 shapes, and on 3 more no other is significantly faster" in found


def test_names_of_one_kernel_lead_together():
    kernels = ("cudnn",)
    (found,) = headline(
        *along("torch.sdpa-cudnn", lambda n: 1e3 * n, seed=1, kernels=kernels),
        *along("torch.sdpa", lambda n: 1e3 * n, seed=2, kernels=kernels),
        *along("torch.eager", lambda n: 4e3 * n, seed=3),
    )
    assert "torch.sdpa (the same kernel as torch.sdpa-cudnn) leads on all 5 shapes, 4.0" in found


def test_one_of_several_frameworks_may_have_no_choice_but_not_all():
    alone = along("jax.xla", lambda n: 1e3 * n, environment=JAX)
    assert headline(*alone) == []
    *_, found = headline(*alone, *along("torch.a", float, seed=1), *along("torch.b", lambda n: 2.0 * n, seed=2))
    assert found == "JAX, forward: jax.xla is the only one that was timed, on all 5 shapes."
