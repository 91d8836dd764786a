"""Baselines: small, per machine, never replaced by accident, and one sentence for everything wrong."""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec
import pytest
from record_factory import CPU, incorrect, ok, timing, unsupported, workload

from attnbench.comparing.baselines import find, list_baselines, read_baseline, save, update, why_missing
from attnbench.errors import BrokenFile, UsageError
from attnbench.spec import Cell

HERE = msgspec.structs.replace(CPU, commit="abc123abc123")
OTHER = msgspec.structs.replace(HERE, cores=64, threads=8)


def records(median: float = 5e6, environment=HERE, on=None):
    rounds = [median * (1 + 0.001 * n) for n in range(-4, 5)]
    anchors = [ok(f"anchor.{name}", [1e5, 1e5], on, environment=environment) for name in ("matmul", "copy")]
    return [ok("torch.sdpa", rounds, on, environment=environment), *anchors]


def test_a_baseline_has_the_date_of_its_record(tmp_path):
    found = save(records(), tmp_path, dates={one.cell.id: "2026-06-01" for one in records()[:1]}, created="2026-01-01")
    assert {one.created for one in found.written if one.record.cell.id == records()[0].cell.id} == {"2026-06-01"}


def test_what_is_saved_is_found_again(tmp_path: Path):
    done = save(records(), tmp_path, note="before the rewrite", created="2026-01-02T03:04:05+00:00")
    assert [one.id for one in done.written] == [f"{HERE.fingerprint}/torch.sdpa/{workload().id}"]
    found = find(tmp_path, HERE, "torch.sdpa", workload())
    assert found == done.written[0]
    assert found is not None
    assert (found.commit, found.note, found.created) == (
        "abc123abc123",
        "before the rewrite",
        "2026-01-02T03:04:05+00:00",
    )
    assert [one.implementation for one in found.records] == ["torch.sdpa", "anchor.matmul", "anchor.copy"]
    assert all(one.environment == HERE for one in found.records)
    assert list_baselines(tmp_path) == [found]


def test_samples_shrink_to_round_medians_and_figures_stay(tmp_path: Path):
    samples = [1.0, 2.0, 30.0, 4.0, 5.0, 6.0, 7.0]
    time = timing(samples, rounds=[3, 0, 4])
    record = ok("torch.sdpa", None, environment=HERE, time=time, also={"events": time})
    (one,) = save([record, *records()[1:]], tmp_path).written
    for kept in (one.record.time, one.record.also["events"]):
        assert kept is not None
        assert kept.samples_ns == (2.0, 5.5)
        assert kept.rounds == (1, 1)
        assert (kept.median_ns, kept.max_ns, kept.ci95_ns) == (time.median_ns, time.max_ns, time.ci95_ns)
    assert one.record.environment is None
    assert read_baseline(next(tmp_path.rglob("*.json"))) == one


def test_anchors_of_another_worker_keep_their_environment(tmp_path: Path):
    elsewhere = msgspec.structs.replace(HERE, framework="jax")
    cell, *anchors = records()
    (one,) = save([cell, *(msgspec.structs.replace(a, environment=elsewhere) for a in anchors)], tmp_path).written
    assert [r.environment.framework for r in one.records if r.environment] == ["torch", "jax", "jax"]


def test_only_update_replaces(tmp_path: Path):
    save(records(5e6), tmp_path)
    again = save(records(9e6), tmp_path)
    assert again.written == ()
    ((cell, reason),) = again.skipped
    assert cell == f"torch.sdpa/{workload().id}"
    assert reason == "already has a baseline (abc123abc123): `attnbench baseline update` replaces it"
    found = find(tmp_path, HERE, "torch.sdpa", workload())
    assert found is not None
    assert found.record.time is not None
    assert found.record.time.median_ns == 5e6
    update(records(9e6), tmp_path, commit="fedcba")
    (found,) = list_baselines(tmp_path)
    assert found.record.time is not None
    assert (found.record.time.median_ns, found.commit) == (9e6, "fedcba")
    assert not list(tmp_path.rglob("*.tmp"))


def test_one_file_per_machine_workload_and_tunables(tmp_path: Path):
    save(records(), tmp_path)
    save(records(environment=OTHER), tmp_path)
    save(records(on=workload(256)), tmp_path)
    tuned = ok("torch.sdpa", [1e6], environment=HERE, config={"block": 64})
    save([tuned, *records()[1:]], tmp_path)
    assert len(list_baselines(tmp_path)) == 4
    assert find(tmp_path, HERE, "torch.sdpa", workload(), {"block": 64}) is not None
    assert find(tmp_path, HERE, "torch.sdpa", workload(), {"block": 65}) is None
    assert find(tmp_path, OTHER, "torch.sdpa", workload(256)) is None


def test_names_that_read_alike_are_kept_apart(tmp_path: Path):
    first, second = workload(heads=8, kv_heads=2), workload(head_dim=64, v_head_dim=32)
    for one in (first, second):
        save(records(on=one), tmp_path)
        assert find(tmp_path, HERE, "torch.sdpa", one) is not None
        assert Cell("torch.sdpa", one).id in {found.record.cell.id for found in list_baselines(tmp_path)}


def test_what_has_no_time_is_skipped_with_the_reason(tmp_path: Path):
    given = [
        unsupported("torch.fa3", "needs cuda"),
        incorrect("mine", "off by 3"),
        ok("torch.eager", environment=HERE),
        ok("torch.sdpa", [1e6], workload(256), environment=HERE),
        *records()[1:],
    ]
    done = save(given, tmp_path)
    assert done.written == ()
    assert [reason for _, reason in done.skipped] == [
        "unsupported: needs cuda",
        "incorrect: off by 3",
        "verified but not timed",
        "its run has no anchors (a matrix product and a copy) for this workload",
    ]
    assert list(tmp_path.iterdir()) == []


def test_missing_says_what_makes_one(tmp_path: Path):
    told = why_missing(tmp_path, HERE, "torch.sdpa", workload())
    assert told.startswith(f"there is no baseline for torch.sdpa/{workload().id}")
    assert (
        "make one with `attnbench run --impl torch.sdpa` at this shape, then `attnbench baseline save latest`" in told
    )
    save(records(environment=OTHER), tmp_path)
    told = why_missing(tmp_path, HERE, "torch.sdpa", workload())
    assert "from another machine (cores, threads differ)" in told
    assert (
        "make one with `attnbench run --impl torch.sdpa` at this shape, then `attnbench baseline save latest`" in told
    )


def test_a_newer_schema_asks_for_an_upgrade(tmp_path: Path):
    save(records(), tmp_path)
    (path,) = tmp_path.rglob("*.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"schema": 3, "record": "of another shape"}))
    with pytest.raises(BrokenFile, match=r"made by a newer attnbench \(schema 3, this one reads 1\): upgrade"):
        find(tmp_path, HERE, "torch.sdpa", workload())


@pytest.mark.parametrize("text", ["", "[]", "{}", "{", '{"schema": 1}'])
def test_other_files_are_no_baselines(tmp_path: Path, text: str):
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(BrokenFile, match="not a baseline"):
        read_baseline(path)


def test_an_unwritable_folder(tmp_path: Path):
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(UsageError, match=r"cannot write .*--dir"):
        save(records(), tmp_path / "taken")


def test_a_baseline_of_another_attnbench_is_told_apart_from_one_of_another_machine(tmp_path: Path):
    old, new = (msgspec.structs.replace(HERE, harness=harness) for harness in ("0.1.0", "0.1.0 (estimator 2)"))
    save(records(environment=old), tmp_path)
    assert find(tmp_path, new, "torch.sdpa", workload()) is None
    told = why_missing(tmp_path, new, "torch.sdpa", workload())
    assert "was measured by attnbench 0.1.0, the run by 0.1.0 (estimator 2): make one with `attnbench run" in told
    assert "another machine" not in told


def test_folders_named_by_an_older_version_still_hold_their_baselines(tmp_path: Path):
    """Its fingerprints did not cover the version of attnbench, so that the same facts had another name."""
    save(records(), tmp_path)
    (folder,) = tmp_path.iterdir()
    folder.rename(tmp_path / "test-cpu-9000-0123456789ab")
    assert find(tmp_path, HERE, "torch.sdpa", workload()) is not None
    assert find(tmp_path, OTHER, "torch.sdpa", workload()) is None
    assert save(records(6e6), tmp_path).written == ()
    assert len(update(records(6e6), tmp_path).written) == 1
    (only,) = tmp_path.rglob("*.json")
    assert only.parent.name == "test-cpu-9000-0123456789ab"


OLDER, NEWER = (msgspec.structs.replace(HERE, processor=kind) for kind in ("GenuineIntel 6-85", "GenuineIntel 6-207"))


def test_two_kinds_of_processor_have_two_baselines(tmp_path: Path):
    save(records(5e6, OLDER), tmp_path)
    assert find(tmp_path, NEWER, "torch.sdpa", workload()) is None
    assert save(records(9e6, NEWER), tmp_path).skipped == ()
    found = [find(tmp_path, kind, "torch.sdpa", workload()) for kind in (OLDER, NEWER)]
    assert [one.environment if one else None for one in found] == [OLDER, NEWER]
    assert len({one.id for one in list_baselines(tmp_path)}) == 2


def test_a_folder_that_was_named_without_the_processor_is_found_and_updated(tmp_path: Path):
    save(records(5e6, OLDER), tmp_path)
    (folder,) = tmp_path.iterdir()
    before = folder.rename(tmp_path / folder.name.replace(OLDER.storage_key, OLDER.fingerprint))
    for kind, is_found in ((OLDER, True), (NEWER, False), (HERE, True)):
        assert (find(tmp_path, kind, "torch.sdpa", workload()) is not None) == is_found
    assert [reason[:22] for _, reason in save(records(9e6, OLDER), tmp_path).skipped] == ["already has a baseline"]
    update(records(9e6, OLDER), tmp_path)
    assert list(tmp_path.iterdir()) == [before]


@pytest.mark.parametrize("elsewhere", ["cell", "machine"])
def test_a_file_with_the_name_of_another_baseline_is_broken_until_it_is_updated(tmp_path: Path, elsewhere: str):
    eager = msgspec.structs.replace(records(6e6)[0], implementation="torch.eager")
    save([eager, *records()], tmp_path)
    save(records(environment=OTHER), tmp_path)
    (asked,) = tmp_path.glob(f"*{HERE.fingerprint}/torch.sdpa*")
    (copied,) = tmp_path.glob(f"*{HERE.fingerprint}/torch.eager*" if elsewhere == "cell" else f"*{OTHER.fingerprint}/*")
    asked.write_bytes(copied.read_bytes())
    told = f"holds the baseline {read_baseline(copied).id}, but is named after {HERE.fingerprint}/torch.sdpa"
    for read in (lambda: find(tmp_path, HERE, "torch.sdpa", workload()), lambda: save(records(), tmp_path)):
        with pytest.raises(BrokenFile, match=re.escape(f"{asked}: {told}")):
            read()
    update(records(), tmp_path)
    assert find(tmp_path, HERE, "torch.sdpa", workload()) is not None
