from __future__ import annotations

import msgspec
import pytest
from record_factory import CPU, noisy, ok, timing, unsupported, workload

from attnbench.analyse.speedup import category, speedups
from attnbench.results.ratios import Ratio


@pytest.mark.parametrize(
    ("ratio", "expected"),
    [
        (Ratio(1.6, 1.55, 1.7), "excellent"),
        (Ratio(1.5, 1.4, 1.6), "good"),
        (Ratio(1.3, 1.2, 1.4), "good"),
        (Ratio(1.6, 1.1, 2.3), "measured"),
        (Ratio(1.19, 1.1, 1.3), "measured"),
        (Ratio(1.01, 1.005, 1.02), "measured"),
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
    found = {one.implementation: one for one in speedups(records, "torch.eager")}
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
    assert speedups(records, "torch.eager") == []
    assert speedups(records, "nobody") == []
