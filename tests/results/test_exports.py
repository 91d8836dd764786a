"""Every export, read back by its own consumer where that is a Python package."""

from __future__ import annotations

import csv
import io
import json
import sqlite3
import statistics
import subprocess
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import msgspec
import numpy as np
import pytest
from record_factory import CPU, incorrect, noisy, ok, timing, unsupported, workload

from attnbench import masks
from attnbench.errors import UsageError
from attnbench.printable import printable
from attnbench.results.exports.benchmark_tools import timed
from attnbench.results.exports.formats import BINARY, COLUMNS, JSON, export_file, export_text, rows
from attnbench.results.run_file import NamedRun, Run, new_header, read_run
from attnbench.spec import Cost, Errors, Memory, Ok

RESULTS = Path(__file__).parents[2] / "results"
HOSTILE = [
    '=cmd|" /C calc"!A0',
    "+1+1",
    "-2+3",
    "@SUM(A1)",
    " =1+1",
    "\t=1",
    "＝1+1",
    'a "quoted", name',
    "two\nlines\r\nand more",
    "'; DROP TABLE records; --",
    "<script>alert(1)</script>",
    "\x1b[31mred\x1b[0m",
    "nul\x00byte",
    "naïve ✓ 注意",
]
HEADER = msgspec.structs.replace(new_header("0.1.0", "quick"), created="2026-01-02T03:04:05+00:00")
TIMED = ok(
    "torch.sdpa",
    time=timing(noisy(2e6, 1, rounds=12), rounds=(3,) * 4, clock="wall"),
    on=workload(scale=0.5, tags=("decode",), source="a paper"),
    memory=Memory(peak_bytes=12345, theory_bytes=1000, method="counter"),
    compile_ns=7,
    also={"forward": timing([9.0, 9.0])},
    kernels=("k1", "k2"),
    notes=("unstable",),
)
RECORDS = (
    TIMED,
    ok("torch.eager"),
    unsupported("torch.fa3", "needs cuda, this is cpu"),
    incorrect("mine", "wrong from row 7 on", workload(64), errors=Errors(forward=0.5, forward_allowed=1e-6)),
    ok("anchor.matmul", [1e5, 1e5]),
)


def source(records: Sequence[object] = RECORDS, name: str = "run") -> list[NamedRun]:
    return [NamedRun(name, Run(HEADER, {}, tuple(records)))]  # type: ignore[arg-type]


def test_a_row_has_the_date_of_its_record():
    [made] = source()
    dates = tuple(f"2026-06-0{n}" for n in range(1, 6))
    dated = msgspec.structs.replace(made, run=msgspec.structs.replace(made.run, dates=dates))
    assert [row["created"] for row in rows([dated])] == list(dates)
    assert {row["created"] for row in rows(source())} == {HEADER.created}


@pytest.mark.parametrize("form", sorted(JSON))
def test_a_time_that_a_newer_run_found_incorrect_is_not_exported(form: str):
    newer = msgspec.structs.replace(HEADER, created="2026-06-01T00:00:00+00:00")
    found = NamedRun("new", Run(newer, {}, (incorrect("torch.sdpa", "wrong", TIMED.workload),)))
    other = ok("torch.eager", [3e6] * 4)
    texts = [export_text([*source([TIMED, other]), *more], form) for more in ([], [found])]
    assert [TIMED.cell.id in text for text in texts] == [True, False]
    assert all(other.cell.id in text for text in texts)


def hostile() -> list[NamedRun]:
    """Hostile implementation names, reasons and notes."""
    bad = [ok(text, [1e6, 2e6], notes=(text,)) for text in HOSTILE]
    return source([*bad, *(unsupported("torch.fa3", text, workload(8 + i)) for i, text in enumerate(HOSTILE))])


# ---- the table


def test_a_row_has_every_column_and_says_what_the_record_says():
    row, verified, refused, wrong, anchor = rows(source())
    assert list(row) == list(COLUMNS)
    told = {
        "run": "run", "created": HEADER.created, "suite": "quick", "attnbench": "0.1.0", "status": "ok",
        "reason": None, "implementation": "torch.sdpa", "framework": "torch", "batch": 1, "q_len": 128,
        "mask": "causal",
        "pass": "forward", "scale": 0.5, "softcap": None, "inputs": "normal", "tags": "decode", "clock": "wall",
        "samples": 12, "forward_median_ns": 9.0, "peak_bytes": 12345, "kernels": "k1; k2", "forward_error": 1e-7,
        "forward_error_allowed": 1e-6, "fingerprint": CPU.fingerprint, "device_name": "Test CPU 9000",
        "framework_version": "2.13.0", "rounds": [3, 3, 3, 3], "flops": 10**9, "least_bytes": 10**6,
    }  # fmt: skip
    assert {name: row[name] for name in told} == told
    assert row["median_ns"] == TIMED.time.median_ns
    assert (row["ci95_low_ns"], row["ci95_high_ns"]) == TIMED.time.ci95_ns
    assert row["samples_ns"] == list(TIMED.time.samples_ns)
    assert json.loads(row["packages"]) == {"torch": "2.13.0"}
    assert (verified["status"], verified["median_ns"]) == ("ok", None)
    assert (refused["status"], refused["reason"]) == ("unsupported", "needs cuda, this is cpu")
    assert (wrong["status"], wrong["forward_error"], wrong["median_ns"]) == ("incorrect", 0.5, None)
    assert anchor["implementation"] == "anchor.matmul"


def test_values_have_the_types_of_their_columns():
    kinds = {"text": str, "integer": int, "real": float | int, "boolean": bool, "reals": list, "integers": list}
    for row in rows(source()):
        for name, value in row.items():
            assert value is None or isinstance(value, kinds[COLUMNS[name]]), name


# ---- CSV


def read_csv(sources: list[NamedRun]) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(export_text(sources, "csv"), newline="")))


def test_csv_is_read_back():
    row, verified, *_ = read_csv(source())
    assert float(row["median_ns"]) == TIMED.time.median_ns
    assert row["deterministic"] == "true"
    assert verified["median_ns"] == ""
    assert "samples_ns" not in row
    assert len(read_csv(source())) == len(RECORDS)


def test_csv_holds_no_formula_and_no_torn_line():
    found = read_csv(hostile())
    assert len(found) == 2 * len(HOSTILE)
    for row in found:
        for value in row.values():
            assert not value.startswith(("=", "+", "-", "@", "\t", "\r", "＝")), value
            assert not value.lstrip(" ").startswith(("=", "+", "-", "@"))
    for row, text in zip(found, HOSTILE):
        assert row["implementation"] in (printable(text), f"'{printable(text)}")


def test_numbers_below_zero_stay_numbers():
    row = read_csv(source([msgspec.structs.replace(TIMED, compile_ns=-5)]))[0]
    assert row["compile_ns"] == "-5"


# ---- SQLite


def query(path: Path, sql: str) -> list[tuple]:
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute(sql).fetchall()


def test_sqlite_is_read_back(tmp_path: Path):
    path = tmp_path / "out.sqlite"
    export_file(source(), "sqlite", path)
    assert query(path, "SELECT status, count(*) FROM records GROUP BY 1 ORDER BY 1") == [
        ("incorrect", 1),
        ("ok", 3),
        ("unsupported", 1),
    ]
    (values,) = query(path, "SELECT avg(value) FROM records, json_each(samples_ns) WHERE implementation = 'torch.sdpa'")
    assert values[0] == pytest.approx(TIMED.time.mean_ns)
    assert query(path, "SELECT typeof(median_ns), typeof(q_len), typeof(mask) FROM records LIMIT 1") == [
        ("real", "integer", "text")
    ]


def test_sqlite_keeps_hostile_text_as_text(tmp_path: Path):
    path = tmp_path / "out.sqlite"
    export_file(hostile(), "sqlite", path)
    assert [row[0] for row in query(path, "SELECT implementation FROM records")][: len(HOSTILE)] == HOSTILE


def test_a_file_that_is_there_is_replaced(tmp_path: Path):
    path = tmp_path / "out.sqlite"
    for _ in range(2):
        export_file(source(), "sqlite", path)
    assert query(path, "SELECT count(*) FROM records") == [(len(RECORDS),)]
    assert list(tmp_path.iterdir()) == [path]


# ---- Parquet


def test_parquet_is_read_back(tmp_path: Path):
    duckdb = pytest.importorskip("duckdb")
    path = tmp_path / "it's [odd].parquet"
    export_file(source(), "parquet", path)
    with duckdb.connect() as connection:
        table = connection.from_query(f"SELECT * FROM read_parquet('{path.parent}/*.parquet')")
        assert table.columns == list(COLUMNS)
        types = dict(zip(table.columns, map(str, table.types)))
        assert (types["samples_ns"], types["q_len"], types["median_ns"], types["status"]) == (
            "DOUBLE[]",
            "BIGINT",
            "DOUBLE",
            "VARCHAR",
        )
        first = dict(zip(table.columns, table.limit(1).fetchall()[0]))
    assert first == next(rows(source()))
    assert first["samples_ns"] == list(TIMED.time.samples_ns)


def test_parquet_keeps_hostile_text_as_text(tmp_path: Path):
    duckdb = pytest.importorskip("duckdb")
    path = tmp_path / "out.parquet"
    export_file(hostile(), "parquet", path)
    found = duckdb.sql(f"SELECT implementation, reason FROM '{path}'").fetchall()
    assert [name for name, _ in found[: len(HOSTILE)]] == HOSTILE
    assert [reason for _, reason in found[len(HOSTILE) :]] == HOSTILE


def test_parquet_without_duckdb_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "duckdb", None)
    with pytest.raises(UsageError, match=r'pip install "attnbench\[report\]"'):
        export_file(source(), "parquet", tmp_path / "out.parquet")
    assert list(tmp_path.iterdir()) == []


# ---- other benchmark tools


def test_other_tools_get_timed_cells_once_and_no_anchors():
    again = msgspec.structs.replace(TIMED, time=timing([5.0, 5.0]))
    found = timed([*source(), *source([again], "later")])
    assert [one.name for one in found] == [TIMED.cell.id]
    assert found[0].time.median_ns == 5.0


def test_names_stay_on_their_line():
    assert printable("a\nb\x1b[31m\x00") == "a\\nb\\x1b[31m\\x00"
    assert printable("naïve ✓ 注意") == "naïve ✓ 注意"
    assert all(one.name.isprintable() for one in timed(hostile()))


def test_pytest_benchmark_compares_it(tmp_path: Path):
    pytest.importorskip("pytest_benchmark")
    slower = msgspec.structs.replace(TIMED, time=timing(noisy(4e6, 2)))
    for name, records in {"one": [TIMED, *hostile()[0].run.records], "two": [slower]}.items():
        export_file(source(records), "pytest-benchmark", tmp_path / f"{name}.json")
    command = [sys.executable, "-m", "pytest_benchmark", "compare", "one.json", "two.json", "--csv=out.csv"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "Failed to load" not in done.stdout + done.stderr
    assert "\x1b" not in done.stdout
    table = list(csv.DictReader((tmp_path / "out.csv").open()))
    medians = sorted(float(row["median"]) for row in table if "torch.sdpa/" in row["name"])
    expected = sorted(one.time.median_ns * 1e-9 for one in (TIMED, slower))
    assert medians == pytest.approx(expected)
    assert len(table) == 2 + len(HOSTILE)


def test_pytest_benchmark_computes_the_same_figures():
    """Ours against those of the package itself, over the same samples."""
    stats_of = pytest.importorskip("pytest_benchmark.stats").Stats
    document = JSON["pytest-benchmark"](source([TIMED]))
    (bench,) = document["benchmarks"]
    theirs = stats_of()
    for sample in TIMED.time.samples_ns:
        theirs.update(sample * 1e-9)
    for name in ("min", "max", "mean", "stddev", "rounds", "median", "total", "ops", "stddev_outliers"):
        assert bench["stats"][name] == pytest.approx(getattr(theirs, name)), name
    assert set(theirs.fields) - {"outliers"} <= set(bench["stats"])
    assert set(bench) >= {"group", "name", "fullname", "params", "param", "extra_info", "options", "stats"}
    assert set(document) == {"machine_info", "commit_info", "benchmarks", "datetime", "version"}


def test_of_several_commits_none_is_named_for_all():
    def run(commit: str, created: str, *names: str) -> NamedRun:
        records = [ok(name, [1e6] * 5, environment=msgspec.structs.replace(CPU, commit=commit)) for name in names]
        return NamedRun(created, Run(HEADER, {}, tuple(records), dates=(created,) * len(records)))

    old, new = run("aaaa", "2026-01-02", "a", "b"), run("bbbb+dirty", "2026-02-03", "b")
    for sources in ([old, new], [new, old]):
        document = JSON["pytest-benchmark"](sources)
        assert document["commit_info"] == {"id": "", "dirty": True}
        assert document["datetime"] == JSON["google-benchmark"](sources)["context"]["date"] == "2026-02-03"
        commits = {one["name"][0]: one["extra_info"]["commit"] for one in document["benchmarks"]}
        assert commits == {"a": "aaaa", "b": "bbbb+dirty"}, "the newest counts"
    assert JSON["pytest-benchmark"]([old])["commit_info"] == {"id": "aaaa", "dirty": False}
    assert JSON["pytest-benchmark"]([new])["commit_info"] == {"id": "bbbb", "dirty": True}


def test_of_several_machines_only_what_they_share_is_named():
    here = msgspec.structs.replace(CPU, cpu="Test CPU 9000", system="Linux 6")
    there = msgspec.structs.replace(here, device="cuda", device_name="Test GPU", cpu="Other CPU", cores=16)
    both = source([ok("a", [1e6] * 5, environment=here), ok("b", [1e6] * 5, environment=there)])
    assert JSON["pytest-benchmark"](both)["machine_info"] == {"system": "Linux 6", "python_version": "3.11"}
    assert not {"num_cpus", "host_name"} & JSON["google-benchmark"](both)["context"].keys()
    one = JSON["pytest-benchmark"](source([ok("a", [1e6] * 5, environment=here)]))["machine_info"]
    assert (one["node"], one["cpu"]) == ("Test CPU 9000", {"brand_raw": "Test CPU 9000", "count": 2})
    assert JSON["pytest-benchmark"](source([ok("a", [1e6] * 5, environment=None)]))["machine_info"] == {}


def test_google_benchmark_has_a_repetition_per_round_and_aggregates():
    document = JSON["google-benchmark"](source([TIMED]))
    assert document["context"]["json_schema_version"] == 1
    runs = [run for run in document["benchmarks"] if run["run_type"] == "iteration"]
    assert {run["name"] for run in runs} == {TIMED.cell.id}
    assert [run["repetition_index"] for run in runs] == [0, 1, 2, 3]
    assert all(run["repetitions"] == 4 and run["iterations"] == 3 and run["time_unit"] == "ns" for run in runs)
    parts = np.array(TIMED.time.samples_ns).reshape(4, 3)
    assert [run["real_time"] for run in runs] == pytest.approx(list(np.median(parts, axis=1)))
    assert [run["cpu_time"] for run in runs] == [run["real_time"] for run in runs]
    aggregates = {run["aggregate_name"]: run for run in document["benchmarks"] if run["run_type"] == "aggregate"}
    assert set(aggregates) == {"mean", "median", "stddev", "cv"}
    assert aggregates["median"]["name"] == f"{TIMED.cell.id}_median"
    assert aggregates["median"]["run_name"] == TIMED.cell.id
    assert aggregates["median"]["real_time"] == statistics.median(run["real_time"] for run in runs)
    assert aggregates["cv"]["aggregate_unit"] == "percentage"


def test_google_benchmark_without_rounds_has_a_repetition_per_sample():
    bare = msgspec.structs.replace(TIMED, time=timing([3.0, 4.0], rounds=()))
    runs = JSON["google-benchmark"](source([bare]))["benchmarks"]
    assert [run["real_time"] for run in runs if run["run_type"] == "iteration"] == [3.0, 4.0]


def test_bencher_metric_format():
    document = JSON["bencher"](source())
    assert list(document) == [TIMED.cell.id]
    measures = document[TIMED.cell.id]
    low, high = TIMED.time.ci95_ns
    assert measures["latency"] == {"value": TIMED.time.median_ns, "lower_value": low, "upper_value": high}
    assert measures["throughput"]["value"] == pytest.approx(1e9 / TIMED.time.median_ns)
    assert (
        measures["throughput"]["lower_value"] < measures["throughput"]["value"] < measures["throughput"]["upper_value"]
    )
    assert measures["peak-memory"] == {"value": 12345.0}


def test_bencher_leaves_out_what_is_not_known():
    bare = ok("a", time=msgspec.structs.replace(timing([3.0]), ci95_ns=None))
    wide = ok("b", time=msgspec.structs.replace(timing([3.0]), ci95_ns=(-1.0, 7.0)))
    found = JSON["bencher"](source([bare, wide]))
    assert found[bare.cell.id] == {"latency": {"value": 3.0}, "throughput": {"value": pytest.approx(1e9 / 3)}}
    assert found[wide.cell.id]["latency"]["lower_value"] == 0
    assert "upper_value" not in found[wide.cell.id]["throughput"]


def test_bencher_names_are_short_enough_and_still_apart():
    long = [ok("x" * 2000 + end, [1.0, 2.0]) for end in ("a", "b")]
    found = JSON["bencher"](source(long))
    assert len(found) == 2
    assert all(len(name) <= 1024 for name in found)


def test_github_action_benchmark_entries():
    (entry,) = JSON["github-action-benchmark"](source())
    assert (entry["name"], entry["unit"], entry["value"]) == (TIMED.cell.id, "ns", TIMED.time.median_ns)
    low, high = TIMED.time.ci95_ns
    assert entry["range"] == f"± {(high - low) / 2:.0f}"
    assert "device: Test CPU 9000" in entry["extra"].splitlines()


# ---- all of them


@pytest.mark.parametrize("form", [*BINARY, "csv", *JSON])
@pytest.mark.parametrize("run", ["cpu/quick", "h200/grid-gpu"])
def test_published_runs_can_be_exported(form: str, run: str, tmp_path: Path):
    if form == "parquet":
        pytest.importorskip("duckdb")
    read = read_run(RESULTS / f"{run}.jsonl")
    sources = [NamedRun(run, read)]
    path = tmp_path / "out"
    export_file(sources, form, path)
    assert path.stat().st_size > 1000
    speeds = [r for r in read.records if isinstance(r, Ok) and r.time and not r.implementation.startswith("anchor.")]
    if form in JSON:
        document = json.loads(path.read_text())
        benchmarks = document.get("benchmarks", document) if isinstance(document, dict) else document
        assert len(benchmarks) >= len(speeds)


@pytest.mark.parametrize("form", ["csv", *JSON])
def test_hostile_text_is_sound_in_every_text_format(form: str):
    text = export_text(hostile(), form)
    if form != "csv":
        json.loads(text)
        assert "\x1b" not in text


def test_masks_that_are_arrays_have_short_ids():
    record = ok("a", [1.0, 2.0], workload(mask=masks.valid(np.arange(128) % 3 != 0)))
    (row,) = rows(source([record]))
    assert row["mask"].startswith("valid-")
    assert len(row["mask"]) < 40


@pytest.mark.parametrize("form", ["csv", *BINARY])
def test_an_unwritable_place_is_one_sentence(tmp_path: Path, form: str):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"^cannot write .*out.x: \w.*\. Choose another file with -o\.$"):
        export_file(source(), form, tmp_path / "file" / "out.x")


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="no folder that is there and takes no file")
@pytest.mark.parametrize("form", ["csv", *BINARY])
def test_a_folder_that_takes_no_file_is_one_sentence(form: str):
    with pytest.raises(UsageError, match=r"^cannot write /proc/out.x: No such file or directory\. Choose another"):
        export_file(source(), form, Path("/proc/out.x"))


@pytest.mark.parametrize("form", BINARY)
def test_what_a_library_cannot_write_is_an_error_of_the_system(tmp_path: Path, form: str):
    if form == "parquet":
        pytest.importorskip("duckdb")
    with pytest.raises(OSError, match=r"^[^\n]+$"):
        BINARY[form](source(), tmp_path / "missing" / "out.x")


def test_a_failed_export_leaves_the_old_file_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "out.parquet"
    path.write_text("precious")
    monkeypatch.setitem(sys.modules, "duckdb", None)
    with pytest.raises(UsageError):
        export_file(source(), "parquet", path)
    assert path.read_text() == "precious"


@pytest.mark.parametrize("form", BINARY)
def test_integers_that_no_column_holds_are_refused(form: str, tmp_path: Path):
    record = ok("torch.sdpa", noisy(1e6, 1), cost=Cost(flops=1 << 70, bytes=1))
    with pytest.raises(UsageError, match=r"flops of torch.sdpa on .* in a needs 71 bits, .* --format csv"):
        export_file([NamedRun("a", Run(new_header("0", "quick"), {}, (record,)))], form, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
    assert str(1 << 70) in export_text([NamedRun("a", Run(new_header("0", "quick"), {}, (record,)))], "csv")


def test_a_row_of_many_megabytes_in_parquet(tmp_path: Path):
    duckdb = pytest.importorskip("duckdb")
    record = unsupported("torch.fa3", "x" * 20_000_000)
    export_file([NamedRun("a", Run(new_header("0", "quick"), {}, (record,)))], "parquet", tmp_path / "out.parquet")
    found = duckdb.sql(f"SELECT length(reason) FROM '{tmp_path / 'out.parquet'}'").fetchall()
    assert found == [(20_000_000,)]
