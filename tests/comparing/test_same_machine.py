"""Which records may be held against each other: hard keys pair by pair, anchors included, and nothing unknown."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace
from record_factory import CPU, incorrect, noisy, ok, unsupported, workload

from attnbench.comparing.baselines import save
from attnbench.comparing.stored import check_comparable, gate_stored
from attnbench.errors import UsageError
from attnbench.results.run_file import RunWriter, new_header
from attnbench.spec import Environment, Ok, Record

JAX = Environment(device="cpu", device_name="Test CPU 9000", framework="jax", packages={"jax": "0.10"})
OTHER = replace(CPU, device_name="Other CPU")
CELL = f"torch.x/{workload().id}"


def record(name: str = "torch.x", environment: Environment | None = CPU) -> Ok:
    return ok(name, noisy(1e6, 3), environment=environment)


def run(environment: Environment | None = CPU, anchors: Environment | None = CPU) -> list[Record]:
    return [record(environment=environment), *(record(f"anchor.{name}", anchors) for name in ("matmul", "copy"))]


def refusal(baseline: list[Record], current: list[Record]) -> str:
    with pytest.raises(UsageError) as error:
        check_comparable(baseline, current)
    assert "attnbench baseline save" in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    "changed, told",
    [
        ({"cpu": "Other CPU"}, "cpu is unknown in the baseline and Other CPU in the current run"),
        (
            {"harness": "0.1.0 (estimator 2)"},
            "harness is unknown in the baseline and 0.1.0 (estimator 2) in the current",
        ),
        ({"threads": 1}, "threads is 2 in the baseline and 1 in the current run"),
        ({"capability": (9, 0)}, "capability is unknown in the baseline and 9.0 in the current run"),
        ({"packages": {"torch": "2.12.0"}}, "package torch is 2.13.0 in the baseline and 2.12.0 in the current run"),
        ({"packages": {"torch": "2.13.0", "x": "1"}}, "package x is absent in the baseline and 1 in the current run"),
    ],
)
def test_other_machines_are_refused_by_name(changed: dict[str, object], told: str):
    there = replace(CPU, **changed)
    message = refusal(run(), run(there, there))
    assert f"of {CELL} {told}" in message
    assert "device_name" not in message


def test_soft_facts_and_other_frameworks_do_not_matter():
    busy = replace(CPU, clocks={"load": 4.0}, commit="abc", variables={"OMP_NUM_THREADS": "2"})
    check_comparable(run(), run(busy, busy))
    check_comparable(run(anchors=JAX), run(anchors=JAX))
    check_comparable(run(), [record("jax.x", JAX)])


def test_one_record_of_another_machine_is_enough():
    sound = [record("torch.y"), *run()]
    moved = [record("torch.y"), record(environment=OTHER)]
    assert f"of {CELL} device_name is Test CPU 9000 in the baseline and Other CPU" in refusal(sound, moved)
    assert f"of {CELL} device_name is Other CPU in the baseline" in refusal(moved, sound)


def test_anchors_are_of_the_machine_they_stand_for():
    assert "the current run mixes machines: device_name of torch.x" in refusal(run(), run(anchors=OTHER))
    mixed = run(OTHER, CPU)
    assert "is Other CPU and of anchor.matmul beside it Test CPU 9000" in refusal(mixed, mixed)
    slow_copy = [*run()[:2], record("anchor.copy", replace(CPU, threads=1))]
    assert "of anchor.copy/" in refusal(run(), slow_copy)


def test_what_nobody_knows_the_machine_of_is_refused():
    assert f"the environment of {CELL} in the baseline run is not known" in refusal(run(None, None), run(None, None))
    assert f"the environment of {CELL} in the current run is not known" in refusal(run(), run(None))
    assert "the environment of anchor.matmul" in refusal(run(), run(anchors=None))
    nameless = replace(CPU, device_name="")
    assert f"the device_name of {CELL}" in refusal(run(nameless, nameless), run(nameless, nameless))


def test_what_is_not_judged_need_not_be_known():
    check_comparable(run(), [replace(incorrect("torch.x", "no worker"), environment=None)])
    check_comparable(run(), [replace(unsupported("torch.x", "no"), environment=OTHER)])
    check_comparable(run(), [record("torch.new", None)])
    assert "device_name" in refusal(run(), [replace(incorrect("torch.x", "off"), environment=OTHER)])


def test_files_and_folders_are_checked_alike(tmp_path: Path):
    paths = {}
    for name, records in {"here": run(), "unknown": run(None, None), "mixed": run(CPU, OTHER)}.items():
        paths[name] = tmp_path / f"{name}.jsonl"
        RunWriter(paths[name], new_header("0", "s")).write(records)
    save(run(), tmp_path / "kept")
    for baseline in (paths["here"], tmp_path / "kept"):
        assert gate_stored(baseline, paths["here"], lambda *case: 0.05, "inconclusive").outcome == "pass"
        for name, told in {"unknown": f"environment of {CELL}", "mixed": "mixes machines"}.items():
            with pytest.raises(UsageError, match=told):
                gate_stored(baseline, paths[name], lambda *case: 0.05, "inconclusive")
