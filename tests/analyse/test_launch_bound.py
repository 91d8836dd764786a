from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
from length_factory import GPU, along

from attnbench.analyse.advice import Recommendation
from attnbench.analyse.recommend import recommend
from attnbench.spec import Record


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
