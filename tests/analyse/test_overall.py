from __future__ import annotations

import msgspec
from length_factory import GPU, LENGTHS, along

from attnbench import masks
from attnbench.analyse.recommend import recommend
from attnbench.spec import Record

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
    assert ": on all 5 shapes nobody is faster for certain, not certainly faster than torch." in found
    assert "leads" not in found


def test_ties_are_counted_apart_from_leads():
    a = along("torch.a", lambda n: 1e3 * n, seed=1)
    b = along("torch.b", lambda n: (2e3 if n <= LENGTHS[1] else 1e3) * n, seed=2)
    c = along("torch.c", lambda n: 4e3 * n, seed=3)
    (found,) = headline(*a, *b, *c)
    assert "torch.a leads on 2 of 5 shapes, and on 3 more nobody is faster for certain" in found


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
