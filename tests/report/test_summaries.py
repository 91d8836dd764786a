from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from length_factory import along, out_of_memory
from record_factory import incorrect, ok, recommend, unsupported, workload

from attnbench.errors import UsageError
from attnbench.report.summaries import MOST_LINES, WIDTH, MachineStandings, write_summaries
from attnbench.results.run_file import read_run
from attnbench.results.sentences import closing
from attnbench.results.standings import Standings
from attnbench.spec import Record

RESULTS = Path(__file__).parents[2] / "results"
RECORDS = [
    *along("torch.eager", lambda n: 1e3 * n * n, seed=1, peak=lambda n: 16 * n * n),
    *along("torch.sdpa", lambda n: 2e8 + 1e2 * n * n, seed=2, peak=lambda n: 600 * n),
    out_of_memory("torch.eager", 8192),
    unsupported("torch.fa3", "needs cuda"),
    incorrect("mine", "gradient of K is wrong", workload(64)),
    ok("anchor.matmul", [1e5, 1e5]),
]


def measured(*runs: Sequence[Record], title: str = "here") -> MachineStandings:
    return MachineStandings(title, Standings(runs), [closing(runs[-1])], recommend(*runs))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("out") / "summaries"
    written = write_summaries([measured(RECORDS)], folder)
    assert {path.name for path in written} == {"summary.txt", "performance.json", "memory.json", "correctness.json"}
    assert {path.name for path in folder.iterdir()} == {path.name for path in written}
    return folder


def read(folder: Path, name: str) -> dict:
    return json.loads((folder / f"{name}.json").read_text())


def test_performance(folder: Path):
    found = read(folder, "performance")
    assert found["baseline"] == "torch.eager"
    assert len(found["cells"]) == 10
    assert "samples_ns" not in found["cells"][0]["time"]
    assert {one["category"] for one in found["speedups"]} >= {"excellent", "investigate"}
    (fit,) = [one["time"] for one in found["scaling"] if one["implementation"] == "torch.eager"]
    assert fit["overall"]["exponent"] == pytest.approx(2, abs=0.05)
    (crossing,) = found["crossovers"]
    assert crossing["implementation"] == "torch.sdpa"
    assert crossing["against"] == "torch.eager"
    assert crossing["crossover"]["kind"] == "from"
    assert {one["kind"] for one in found["recommendations"]} >= {"threshold", "memory"}


def test_memory(folder: Path):
    found = read(folder, "memory")
    growth = {one["implementation"]: one for one in found["growth"]}
    assert growth["torch.eager"]["growth"] == "O(n^2)"
    assert growth["torch.sdpa"]["growth"] == "O(n)"
    assert growth["torch.eager"]["growth_in_theory"] == "O(n^2)"
    assert growth["torch.eager"]["fits_until"]["out_of_memory_at"] == 8192
    lost = [one for one in found["cells"] if one["status"] == "out_of_memory"]
    assert lost[0]["memory"] is None
    assert lost[0]["reason"] == "did not fit"


def test_correctness(folder: Path):
    found = read(folder, "correctness")
    assert found["statuses"] == {"ok": 10, "out_of_memory": 1, "unsupported": 1, "incorrect": 1}
    assert found["cells"][0]["errors"]["forward_allowed"] == 1e-6
    (wrong,) = [one for one in found["cells"] if one["status"] == "incorrect"]
    assert wrong["reason"] == "gradient of K is wrong"


def test_summary_answers_first_and_names_what_is_missing(folder: Path):
    text = (folder / "summary.txt").read_text()
    parts = [
        "Test GPU · torch",
        "13 cells: 10 ok, 1 out of memory, 1 unsupported, 1 incorrect",
        "Wrong: mine is not ranked: gradient of K is wrong.",
        "Which one",
        "4 heads of 32 · causal · float32 · forward: PyTorch: by shape, most often torch.",
        "From which length",
        "use torch.eager up to 256 tokens",
        "What to do next",
        "torch.eager stops fitting 80 GB",
        "Without a result",
        "unsupported: torch.fa3: needs cuda",
        "Speed-up against torch.eager",
        "performance.json, memory.json and correctness.json, which `attnbench report` writes with this file.",
    ]
    places = [" ".join(text.split()).index(part) for part in parts]
    assert places == sorted(places)
    assert "anchor" not in text


def test_nothing_to_say_is_no_error(tmp_path: Path):
    write_summaries([measured([unsupported("torch.fa3", "needs \x1b[31mcuda")])], tmp_path)
    text = (tmp_path / "summary.txt").read_text()
    assert "Nothing could be measured (1 unsupported)." in text
    assert "Which one" not in text
    assert "Speed-up" not in text
    assert "\x1b" not in text


def test_a_folder_that_cannot_be_is_one_sentence(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot write to"):
        write_summaries([measured(RECORDS[:1])], tmp_path / "file")


def many(kinds: int, reasons: int) -> list[Record]:
    records: list[Record] = []
    for heads in range(1, kinds + 1):
        for seed, name in enumerate(("torch.eager", "torch.sdpa", "torch.flex")):
            shape = {"heads": heads, "kv_heads": heads}
            records += along(name, lambda n, k=seed: (1 + k) * 1e3 * n, [256, 512], 9 * heads + seed, shape=shape)
    return [*records, *(unsupported(f"torch.{n}", f"reason {n} " * 30) for n in range(reasons))]


@pytest.mark.parametrize("machines", [1, 2, 3, 9])
def test_no_more_lines_than_a_person_reads(machines: int, tmp_path: Path):
    records = many(kinds=30, reasons=30)
    parts = [measured(records, title=f"machine {n}") for n in range(machines)]
    write_summaries(parts, tmp_path, left=["run.jsonl ended early"] * 5)
    lines = (tmp_path / "summary.txt").read_text().splitlines()
    assert len(lines) <= MOST_LINES
    assert max(map(len, lines)) <= WIDTH
    text = "\n".join(lines)
    assert "run.jsonl ended early. 4 more ended early" in text
    assert text.count("torch.eager is ") >= min(machines, 7)
    if machines == 1:
        assert "more are in performance.json" in text
        assert "more are in correctness.json" in text
    if machines > 7:
        assert "more machines or sets of packages are in performance.json." in text


@pytest.mark.parametrize("machines", [1, 2, 9])
@pytest.mark.parametrize("wrong", [2, 12])
def test_what_is_wrong_is_always_told(machines: int, wrong: int, tmp_path: Path):
    bad = [incorrect(f"torch.bad-{n}", "gradient of Q " * 30, workload(256)) for n in range(wrong)]
    parts = [measured([*many(kinds=30, reasons=30), *bad], title=f"machine {n}") for n in range(machines)]
    write_summaries(parts, tmp_path, left=["run.jsonl ended early"] * 5)
    text = (tmp_path / "summary.txt").read_text()
    assert len(text.splitlines()) <= MOST_LINES
    for one in bad:
        assert one.implementation in text.partition("Which one")[0]


def test_the_published_summary_tells_what_is_wrong_and_claims_no_file_that_is_not_kept():
    text = (RESULTS / "h200/report-summary/summary.txt").read_text()
    assert text.startswith("Wrong, and not ranked there: jax.tokamax-triton (13 shapes), ")
    assert "torch.fa4 (1 shape)" in text.partition("Which one")[0]
    assert "beside this file" not in text


@pytest.mark.parametrize("run", ["cpu/quick", "h200/grid-gpu", "h200/gemma"])
def test_published_runs(run: str, tmp_path: Path):
    for path in write_summaries([measured(read_run(RESULTS / f"{run}.jsonl").records)], tmp_path):
        assert path.stat().st_size > 1000
    assert len((tmp_path / "summary.txt").read_text().splitlines()) <= MOST_LINES
