"""Who is first, who is next, and who is named in a chart: names of one kernel count once."""

from __future__ import annotations

import numpy as np
import pytest
from page_factory import page_of, timed
from record_factory import ok

from attnbench.report.html.cells import winner_rows
from attnbench.report.html.layout import featured
from attnbench.results.standings import Standings
from attnbench.results.tally import Tally
from attnbench.spec import Record

CUDNN = ("cudnn_fprop",)
NEAR = list(enumerate({"jax.xla": 21056.4, "jax.einsum": 21056.3}.items()))


def cells_of(*records: Record) -> list[dict]:
    return page_of(*records).parts[0].cells.rows


def test_names_of_one_kernel_are_one_and_the_next_is_another():
    (one,) = winner_rows(
        cells_of(
            timed("torch.sdpa-cudnn", 1e6, kernels=CUDNN),
            timed("torch.sdpa", 1.001e6, kernels=CUDNN),
            timed("torch.eager", 2e6, kernels=("gemm",)),
        )
    )
    assert one["label"] == "torch.sdpa"
    assert one["same"] == "torch.sdpa-cudnn"
    assert one["next_label"] == "torch.eager"
    assert not one["close"]


def test_without_a_profile_two_that_are_as_fast_are_close():
    (one,) = winner_rows(cells_of(timed("torch.sdpa-cudnn", 1e6), timed("torch.sdpa", 1.001e6)))
    assert one["same"] is None
    assert one["close"]


def test_the_same_names_at_another_speed_are_another_kernel():
    """XLA counts its fusions: equal names alone prove little."""
    fusions = ("fusion_1", "fusion_2")
    (one,) = winner_rows(cells_of(timed("jax.xla", 1e6, kernels=fusions), timed("jax.einsum", 2e6, kernels=fusions)))
    assert (one["label"], one["next_label"]) == ("jax.xla", "jax.einsum")


def test_places_decide_and_not_times_that_the_page_has_rounded():
    """The page holds five digits: who is first comes from the standing."""
    cells = [
        {"label": n, "workload": "w", "place": p, "framework": "jax", "kernel": p, "group": 0, "ns": ns, "ratio": 1.0}
        for p, (n, ns) in NEAR
    ]
    assert winner_rows(cells[::-1])[0]["label"] == "jax.xla"


def test_the_regret_is_what_the_ranking_goes_by():
    """The machine slowed down by a fifth when the second, 10 % slower in every round, had left the rounds: by medians
    over all rounds it would lose nothing."""
    calm, jitter = np.repeat((1e6, 1.2e6), 20), 1 + 0.001 * np.sin(np.arange(40))
    records = ok("torch.sdpa", calm * jitter), ok("torch.eager", 1.0999e6 * jitter[:20])
    (one,) = winner_rows(cells_of(*records))
    assert (one["label"], one["next_label"], one["certain"]) == ("torch.sdpa", "torch.eager", "yes")
    assert one["regret"] == pytest.approx(0.0999, abs=0.002)


def test_one_alone_has_nobody_next():
    (one,) = winner_rows(cells_of(timed("torch.sdpa", 1e6)))
    assert one["next_label"] is None
    assert not one["close"]


def test_plain_ones_and_the_best_are_named():
    names = ["torch.eager", "torch.a", "torch.b", "torch.c", "torch.d", "torch.e", "torch.f", "torch.slow"]
    speeds = dict(zip(names, (9e6, 1e6, 1.1e6, 1.2e6, 1.3e6, 1.4e6, 1.5e6, 8e6)))
    tally = Tally(Standings([[timed(name, ns) for name, ns in speeds.items()]]).overall)
    assert set(featured(names, tally)) == {"torch.eager", "torch.a", "torch.b", "torch.c", "torch.d", "torch.e"}
    assert set(featured(names, tally, most=20)) == set(names)


def test_two_names_of_one_kernel_take_one_place():
    speeds = {"torch.eager": 9e6, "torch.sdpa": 1e6, "torch.sdpa-cudnn": 1.001e6, "torch.slow": 5e6}
    kernels = {"torch.sdpa": CUDNN, "torch.sdpa-cudnn": CUDNN}
    records = [timed(name, ns, kernels=kernels.get(name)) for name, ns in speeds.items()]
    assert set(featured(list(speeds), Tally(Standings([records]).overall), most=3)) == {
        "torch.eager",
        "torch.sdpa",
        "torch.slow",
    }
