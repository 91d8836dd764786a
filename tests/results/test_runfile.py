from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import pytest
from record_factory import CPU, incorrect, ok, unsupported, workload

from attnbench import masks
from attnbench.errors import BrokenFile, UsageError
from attnbench.results.run_file import RunWriter, new_header, read_run, slug
from attnbench.spec import Errors

RECORDS = (
    ok("torch.eager", [3.0, 4.0, 5.0]),
    unsupported("torch.fa3", "needs cuda, this is cpu"),
    incorrect("mine", "wrong from row 7 on", workload(64), detail="a\ntraceback"),
)


@dataclass
class Written:
    path: Path
    content: bytes


@pytest.fixture
def written(tmp_path: Path) -> Written:
    writer = RunWriter.create(
        tmp_path / "runs", "NVIDIA H200 (SXM)", "quick", new_header("0.1.0", "quick", {"a": 1}, seed=3)
    )
    writer.write(RECORDS)
    writer.close()
    return Written(writer.path, writer.path.read_bytes())


def repair(path: Path) -> str | None:
    """What a writer says of the last line as it begins."""
    writer = RunWriter(path)
    writer.close()
    return writer.warning


def test_what_is_written_is_read_back(written: Written):
    run = read_run(written.path)
    assert run.records == RECORDS
    assert run.header.suite == "quick"
    assert run.header.request == {"a": 1}
    assert run.header.seed == 3
    assert run.warnings == ()
    assert run.done == {record.cell.id for record in RECORDS}


@pytest.mark.parametrize("quality", [{"recall": math.nan}, {"sparsity": math.inf}], ids=str)
def test_a_figure_that_json_does_not_have_loses_only_its_record(tmp_path: Path, quality: dict[str, float]):
    writer = RunWriter.create(tmp_path, "cpu", "quick")
    writer.write([RECORDS[0], msgspec.structs.replace(ok("torch.odd"), quality=quality), RECORDS[1]])
    writer.close()
    first, odd, last = read_run(writer.path).records
    assert (first, last) == (RECORDS[0], RECORDS[1])
    assert (odd.implementation, odd.status) == ("torch.odd", "failed")
    assert "cannot be kept" in odd.reason


def test_a_record_longer_than_a_line_may_be_loses_only_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("attnbench.results.run_file.LONGEST_LINE", 3000)
    writer = RunWriter.create(tmp_path, "cpu", "quick")
    writer.write([unsupported("torch.fa4", "x" * 5000), RECORDS[1]])
    writer.close()
    long, other = read_run(writer.path).records
    assert (long.status, other) == ("failed", RECORDS[1])
    assert "bytes, more than the 3,000" in long.reason


def test_a_resumed_sitting_dates_its_records(written: Written):
    """The sitting that began the file has the header's date, and its lines hold none."""
    writer = RunWriter(written.path, new_header("9", "other"))
    writer.write([unsupported("torch.fa3", "still needs cuda")])
    writer.close()
    lines = [msgspec.json.decode(line) for line in written.path.read_bytes().splitlines()]
    dates = [line.get("when") for line in lines if line["line"] == "record"]
    run = read_run(written.path)
    assert dates == [None, None, None, run.dates[-1]]
    assert run.dates[:2] == (run.header.created,) * 2
    assert run.dates[-1] >= run.header.created
    assert [record.implementation for _, record in run.dated] == ["torch.eager", "mine", "torch.fa3"]


def test_path_names_machine_and_suite(written: Written):
    assert written.path.parent.name == "nvidia-h200-sxm"
    assert written.path.name.endswith(".jsonl")
    assert "-quick-" in written.path.name


def test_environment_is_written_once(written: Written):
    lines = [msgspec.json.decode(line) for line in written.content.splitlines()]
    assert [line["line"] for line in lines] == ["header", "environment", "record", "record", "record"]
    assert lines[1]["fingerprint"] == CPU.fingerprint
    assert isinstance(lines[2]["environment"], str)


def test_environments_of_one_fingerprint_are_kept_apart(tmp_path: Path):
    other = msgspec.structs.replace(CPU, framework="jax", clocks={"load": 0.5})
    assert other.fingerprint == CPU.fingerprint
    records = (ok("torch.eager", [1.0]), ok("jax.xla", [1.0], environment=other))
    writer = RunWriter(tmp_path / "r.jsonl", new_header("0", "s"))
    writer.write(records)
    assert [record.environment for record in read_run(writer.path).records] == [CPU, other]


def test_a_line_cut_at_any_byte_is_left_out_and_repaired(written: Written):
    body = written.content[:-1]
    start = body.rindex(b"\n") + 1
    for end in range(start + 1, len(body)):
        written.path.write_bytes(body[:end])
        run = read_run(written.path)
        assert run.records == RECORDS[:-1]
        assert len(run.warnings) == 1
        assert "line 5" in run.warnings[0]
    assert "line 5" in (repair(written.path) or "")
    assert written.path.read_bytes() == written.content[:start]
    writer = RunWriter(written.path)
    writer.write(RECORDS[2:])
    assert read_run(written.path).records == RECORDS


def test_a_whole_line_without_its_newline_is_kept_and_finished(written: Written):
    written.path.write_bytes(written.content[:-1])
    assert read_run(written.path).records == RECORDS
    assert repair(written.path) is None
    assert written.path.read_bytes() == written.content


def test_repair_leaves_a_sound_file_alone(written: Written):
    assert repair(written.path) is None
    assert written.path.read_bytes() == written.content


def test_garbage_with_a_newline_at_the_very_end_is_torn_too(written: Written):
    written.path.write_bytes(written.content + b'{"line":"rec\x00\x00\n')
    assert read_run(written.path).records == RECORDS
    assert repair(written.path) is not None
    assert written.path.read_bytes() == written.content


def test_a_broken_line_in_the_middle_is_named(written: Written):
    lines = written.content.splitlines(keepends=True)
    lines[2] = lines[2][:40] + b"\n"
    written.path.write_bytes(b"".join(lines))
    with pytest.raises(BrokenFile, match="line 3"):
        read_run(written.path)


def test_a_record_that_is_none_is_named(written: Written):
    lines = written.content.splitlines(keepends=True)
    lines[3] = b'{"line":"record","record":{"status":"fine"}}\n'
    written.path.write_bytes(b"".join(lines))
    with pytest.raises(BrokenFile, match="line 4"):
        read_run(written.path)


@pytest.mark.parametrize(
    "content",
    [b"", b"hello\n", b"[1, 2]\n", b'{"line":"record"}\n', pytest.param(bytes(range(256)), id="every byte"), b"\n\n"],
)
def test_another_file_is_refused(tmp_path: Path, content: bytes):
    path = tmp_path / "x.jsonl"
    path.write_bytes(content)
    with pytest.raises(BrokenFile, match="line 1"):
        read_run(path)


def test_a_newer_schema_says_who_wrote_it(written: Written):
    written.path.write_bytes(
        written.content.replace(b'"schema":1,"attnbench":"0.1.0"', b'"schema":9,"attnbench":"7.2"')
    )
    with pytest.raises(BrokenFile, match=r"7\.2.*schema 9"):
        read_run(written.path)


def test_missing_file_and_folder_are_one_sentence(tmp_path: Path):
    with pytest.raises(UsageError, match="cannot be read"):
        read_run(tmp_path / "none.jsonl")
    with pytest.raises(UsageError, match="cannot be read"):
        read_run(tmp_path)


def test_later_records_of_a_cell_win(written: Written):
    again = ok("torch.eager", [1.0])
    RunWriter(written.path).write([again])
    run = read_run(written.path)
    assert run.records == (*RECORDS[1:], again)


def test_unwritable_folder_is_one_sentence(tmp_path: Path):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    with pytest.raises(UsageError, match=r"cannot write .*--out"):
        RunWriter.create(blocked, "cpu", "quick")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_read_only_folder_is_one_sentence(tmp_path: Path):
    tmp_path.chmod(0o500)
    with pytest.raises(UsageError, match="cannot write"):
        RunWriter.create(tmp_path / "runs", "cpu", "quick")


def test_infinite_errors_survive(tmp_path: Path):
    record = incorrect("nan", "writes NaN", errors=Errors(forward=math.nan, max_abs=math.inf, forward_allowed=1e-6))
    writer = RunWriter(tmp_path / "r.jsonl", new_header("0", "s"))
    writer.write([record])
    errors = read_run(writer.path).records[0].errors
    assert errors is not None
    assert errors.forward > 1e300
    assert errors.max_abs > 1e300


def test_masks_with_arrays_survive(tmp_path: Path):
    mask = masks.causal() & masks.valid(np.arange(128) % 3 != 0)
    record = ok("torch.eager", [1.0], workload(mask=mask))
    writer = RunWriter(tmp_path / "r.jsonl", new_header("0", "s"))
    writer.write([record])
    assert read_run(writer.path).records == (record,)


def test_slug():
    assert slug("NVIDIA H200 (SXM)") == "nvidia-h200-sxm"
    assert slug("///") == "unknown"


def test_long_names_still_make_a_file(tmp_path: Path):
    writer = RunWriter.create(tmp_path, "NVIDIA " * 100, "quick " * 100)
    writer.close()
    assert read_run(writer.path).records == ()


def test_one_flipped_byte_is_told_with_its_line(written: Written):
    written.path.write_bytes(written.content.replace(b"torch.eager", b"torch.\xffager"))
    with pytest.raises(BrokenFile, match=r"line 3: not a line of a run file \(not UTF-8"):
        read_run(written.path)
    written.path.write_bytes(written.content.replace(b'"header"', b'"hea\xffer"', 1))
    with pytest.raises(BrokenFile, match="line 1: not an attnbench run file"):
        read_run(written.path)


@pytest.mark.parametrize(
    ("framework", "device", "harness", "clock"),
    [
        ("jax", "cuda", "0.1.0", "kernels only"),
        ("jax", "cuda", "", "kernels only"),
        ("jax", "cuda", "0.1.0 (estimator 2)", "kernel"),
        ("torch", "cuda", "0.1.0", "kernel"),
    ],
)
def test_device_times_that_left_out_copies_are_another_clock(tmp_path, framework, device, harness, clock):
    record = ok(f"{framework}.cudnn", [1e5, 1.1e5])
    environment = msgspec.structs.replace(CPU, framework=framework, device=device, harness=harness)
    time = msgspec.structs.replace(record.time, clock="kernel")
    record = msgspec.structs.replace(record, time=time, environment=environment)
    writer = RunWriter(tmp_path / "run.jsonl", new_header("0.1.0", "quick"))
    writer.write([record])
    writer.close()
    (found,) = read_run(tmp_path / "run.jsonl").records
    assert found.time.clock == clock


def test_a_workload_that_was_cut_before_its_anchors_is_not_done(tmp_path: Path):
    """Its times can be compared with no other run, and resuming must heal it."""
    names = ("torch.sdpa", "anchor.matmul", "anchor.copy")
    whole = [ok(name, [1e6, 1e6], workload(64)) for name in names]
    torn = [ok(name, [1e6, 1e6], workload(128)) for name in names[:2]]
    path = tmp_path / "r.jsonl"
    for records, cell in ((torn, False), ([*torn, unsupported(names[2], "no room", workload(128))], True)):
        path.unlink(missing_ok=True)
        writer = RunWriter(path, new_header("0", "own"))
        writer.write([*whole, *records])
        writer.close()
        done = read_run(path).done
        assert {whole[0].cell.id, torn[1].cell.id} <= done
        assert (torn[0].cell.id in done) == cell
    plain = tmp_path / "plain.jsonl"
    RunWriter(plain, new_header("0", "own")).write([whole[0]])
    assert read_run(plain).done == {whole[0].cell.id}, "a run that never had any"
