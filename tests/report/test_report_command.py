"""`attnbench report` on the command line: what it writes, where, and what it says."""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

import msgspec
import pytest
from git_repository import Repository
from page_factory import timed, two_frameworks
from record_factory import CPU, incorrect, unsupported, workload
from run_history import step_history

from attnbench import files
from attnbench.cli import execute
from attnbench.comparing.ci_files import record_commands
from attnbench.report.summaries import FILES
from attnbench.results.run_file import Header, RunWriter, new_header
from attnbench.spec import Failed, Record

pytest.importorskip("altair")
pytest.importorskip("jinja2")
pytest.importorskip("vl_convert")


pytestmark = pytest.mark.usefixtures("no_bundle")


@pytest.fixture
def run_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return write_run(tmp_path / "runs/machine/first.jsonl", two_frameworks())


def write_run(path: Path, records: Sequence[Record], header: Header | None = None) -> Path:
    writer = RunWriter(path, header or new_header("0", "quick"))
    writer.write(records)
    writer.close()
    return path


def refuse(monkeypatch: pytest.MonkeyPatch, word: str) -> None:
    """From now on no file with this word in its name can be written."""
    draft_of = files.draft_of

    @contextmanager
    def full(path: Path) -> Iterator[Path]:
        with draft_of(path) as draft:
            if word in path.name:
                raise OSError(errno.ENOSPC, "No space left on device")
            yield draft

    monkeypatch.setattr(files, "draft_of", full)


class TestWhere:
    def test_page_and_summaries_lie_beside_the_run(self, run_file: Path, capsys: pytest.CaptureFixture[str]):
        assert execute(["report"]) == 0
        assert capsys.readouterr().out.split() == ["runs/machine/first.html", "runs/machine/first-summary/"]
        assert "torch.sdpa" in run_file.with_suffix(".html").read_text()
        folder = run_file.with_name("first-summary")
        assert sorted(path.name for path in folder.iterdir()) == sorted(FILES)
        assert "torch.sdpa leads" in (folder / "summary.txt").read_text()
        assert msgspec.json.decode((folder / "performance.json").read_bytes())["baseline"] == "torch.eager"

    def test_another_place_and_markdown(self, run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
        assert execute(["report", str(run_file), "-o", "out/page", "--markdown"]) == 0
        printed = capsys.readouterr()
        assert (tmp_path / "out/page").is_file()
        assert (tmp_path / "out/page-summary/memory.json").is_file()
        assert printed.out.startswith("### Test CPU 9000")
        assert printed.err.split() == ["out/page", "out/page-summary/"]

    def test_summaries_may_lie_elsewhere(self, run_file: Path, tmp_path: Path):
        assert execute(["report", "--summaries", "texts"]) == 0
        assert (tmp_path / "texts/correctness.json").is_file()
        assert not run_file.with_name("first-summary").exists()

    def test_json_names_what_was_written(self, run_file: Path, capsys: pytest.CaptureFixture[str]):
        assert execute(["report", "latest", "--json"]) == 0
        document = msgspec.json.decode(capsys.readouterr().out)
        assert document["report"] == "runs/machine/first.html"
        assert document["summaries"] == [f"runs/machine/first-summary/{name}" for name in FILES]
        assert "torch.sdpa" in document["closing"][0]
        assert document["images"] == []
        for path in [document["report"], *document["summaries"]]:
            assert Path(path).stat().st_size > 100

    def test_a_history_reads_past_them(self, run_file: Path, capsys: pytest.CaptureFixture[str]):
        assert execute(["report"]) == 0
        capsys.readouterr()
        assert execute(["history", "runs"]) == 0
        assert "warning" not in capsys.readouterr().err


class TestTrouble:
    def test_summaries_that_cannot_be_written_lose_nothing(
        self, run_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ):
        assert execute(["report"]) == 0
        before = {path: path.read_text() for path in run_file.with_name("first-summary").iterdir()}
        write_run(run_file, [two_frameworks()[0]])
        refuse(monkeypatch, "memory.json")
        assert execute(["report"]) == 2
        told = capsys.readouterr().err
        assert "the page was written to runs/machine/first.html, but its summaries were not: cannot write to" in told
        assert "No space left on device. Choose another folder with --summaries" in told
        assert {path: path.read_text() for path in run_file.with_name("first-summary").iterdir()} == before

    def test_a_page_that_cannot_be_written_loses_nothing(
        self, run_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ):
        assert execute(["report"]) == 0
        before = {path: path.read_bytes() for path in run_file.parent.rglob("*") if path.is_file()}
        refuse(monkeypatch, "first.html")
        assert execute(["report"]) == 2
        assert "No space left on device. Choose another place with -o" in capsys.readouterr().err
        assert {path: path.read_bytes() for path in run_file.parent.rglob("*") if path.is_file()} == before

    def test_charts_that_cannot_be_written_cost_neither_page_nor_summaries(
        self, run_file: Path, capsys: pytest.CaptureFixture[str]
    ):
        Path("file").touch()
        assert execute(["report", "--png", "file/charts"]) == 2
        assert "Give --png another folder" in capsys.readouterr().err
        assert run_file.with_suffix(".html").is_file()
        assert run_file.with_name("first-summary").is_dir()

    def test_a_run_of_nothing_is_one_sentence(self, run_file: Path, capsys: pytest.CaptureFixture[str]):
        RunWriter(Path("empty.jsonl"), new_header("0", "quick")).close()
        assert execute(["report", "empty.jsonl"]) == 2
        assert "empty.jsonl holds no records" in capsys.readouterr().err
        assert not Path("empty.html").exists()

    def test_an_unwritable_place_is_one_sentence(self, run_file: Path, capsys: pytest.CaptureFixture[str]):
        Path("file").touch()
        assert execute(["report", "-o", "file/page.html"]) == 2
        assert "Choose another place with -o" in capsys.readouterr().err

    def test_a_missing_package_says_what_to_install(
        self, run_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ):
        monkeypatch.setattr(import_module("attnbench.cli.report"), "find_spec", lambda name: None)
        assert execute(["report"]) == 2
        assert "attnbench[report]" in capsys.readouterr().err


class TestRefuses:
    @pytest.mark.parametrize(
        ("run", "options"),
        [
            ("copy.jsonl", ["-o", "copy.jsonl"]),
            ("copy.html", []),
            ("texts/summary.txt", ["-o", "page.html", "--summaries", "texts"]),
            ("charts/time.png", ["-o", "page.html", "--png", "charts"]),
        ],
    )
    def test_to_write_over_a_run(
        self, run: str, options: list[str], run_file: Path, capsys: pytest.CaptureFixture[str]
    ):
        copy = Path(run)
        copy.parent.mkdir(exist_ok=True)
        copy.write_bytes(run_file.read_bytes())
        assert execute(["report", str(run_file), run, *options] if options else ["report", run]) == 2
        assert f"{run} is one of the run files to read" in capsys.readouterr().err
        assert copy.read_bytes() == run_file.read_bytes()

    @pytest.mark.parametrize("command", ["report", "show"])
    @pytest.mark.parametrize(
        ("wanted", "told"),
        [
            ("torch.egaer", 'no implementation in these runs called "torch.egaer". Near: torch.eager'),
            ("nobody", "Known: jax.xla, mine, torch.eager, torch.fa3, torch.fa4, torch.sdpa."),
            ("torch.fa3", "nothing can be compared with torch.fa3: it was not timed on any shape in these runs."),
        ],
    )
    def test_a_baseline_that_is_not_there(
        self, command: str, wanted: str, told: str, run_file: Path, capsys: pytest.CaptureFixture[str]
    ):
        assert execute([command, str(run_file), "--against", wanted]) == 2
        assert told in capsys.readouterr().err
        assert not run_file.with_suffix(".html").exists()

    @pytest.mark.parametrize("word", ["--out", "--output", "-o"])
    def test_neither_word_for_where(self, word: str, run_file: Path):
        assert execute(["report", str(run_file), word, "page.html"]) == 0
        assert execute(["export", str(run_file), "--format", "csv", word, "run.csv"]) == 0
        assert Path("page.html").is_file()
        assert Path("run.csv").is_file()


class TestHistory:
    def test_commits_are_in_the_order_of_git(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ):
        """The later the commit, the earlier the run: only git knows the order, and what lies between."""
        pytest.importorskip("ruptures")
        repository = Repository(tmp_path / "project")
        monkeypatch.chdir(repository.path)
        for number, source in enumerate(step_history(8, 4)):
            repository.commit(f"step {number}", "step.py")
            commit = repository.git("rev-parse", "--short=12", "HEAD")
            moved = [
                msgspec.structs.replace(r, environment=msgspec.structs.replace(r.environment, commit=commit))
                for r in source.run.records
            ]
            header = Header(schema=1, attnbench="0", created=f"2026-01-{20 - number:02d}T12:00:00+00:00")
            write_run(repository.path / f"runs/{number}.jsonl", moved, header)
        assert execute(["report", *(f"runs/{n}.jsonl" for n in range(8)), "-o", "page.html"]) == 0
        page = Path("page.html").read_text()
        packed = page.partition('id="data">')[2].partition("</script>")[0]
        (section,) = msgspec.json.decode(packed)["sections"]
        (view,) = [one for one in section["views"] if one["name"] == "history"]
        assert "1 of 2 cells changed" in page
        told = view["table"]["rows"]["columns"]["changes"]["words"]
        assert len(told) == 1
        assert told[0].endswith('"step 4"')
        days = view["charts"][0]["rows"]["columns"]["when"]["words"]
        assert [day[:10] for day in days] == [f"2026-01-{20 - number:02d}" for number in range(8)]

    def test_one_run_says_why_there_is_none(self, run_file: Path):
        assert execute(["report"]) == 0
        assert "One run has no history" in run_file.with_suffix(".html").read_text()


class TestAnnotations:
    def test_github_is_told_what_is_wrong_and_what_was_lost(
        self, run_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ):
        monkeypatch.setenv("GITHUB_ACTIONS", "true")
        assert execute(["report", "--markdown"]) == 0
        lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("::")]
        assert lines == [f"::error title=mine%3A incorrect::{workload().title}. first wrong row 3"]

    def test_nobody_else_is(self, run_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
        monkeypatch.delenv("GITHUB_ACTIONS", raising=False)
        assert execute(["report", "--markdown"]) == 0
        assert "::error" not in capsys.readouterr().err

    def test_each_reason_once_and_no_more_than_github_shows(self):
        records: list[Record] = [incorrect("mine", "row 3\nis wrong", workload(n)) for n in (64, 128)]
        records += [
            Failed(implementation=f"torch.x{n}", workload=workload(), reason="crashed", environment=CPU)
            for n in range(15)
        ]
        lines = record_commands([*records, *two_frameworks()[:2], unsupported("torch.fa3", "needs a GPU")])
        first = workload(64).title
        assert lines[0] == f"::error title=mine%3A incorrect::{first} and 1 more. row 3%0Ais wrong"
        warnings = lines[1:]
        assert len(warnings) == 10
        assert warnings[-1] == "::warning title=attnbench report::6 more: see the report"


class TestPlaces:
    """Two machines, or two versions on one: the same cells, neither of which may hide the other."""

    @pytest.fixture(params=["machines", "versions"])
    def folder(self, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("GITHUB_ACTIONS", "true")
        changed = {"machines": {"device_name": "Other CPU"}, "versions": {"packages": {"torch": "2.12.0"}}}
        other = msgspec.structs.replace(CPU, **changed[request.param])
        for name, environment, fast in (("one", CPU, 1e6), ("two", other, 2e6)):
            cells = [timed("torch.eager", 4e6), timed("torch.sdpa", fast), incorrect("mine", "wrong row 3")]
            moved = [msgspec.structs.replace(cell, environment=environment) for cell in cells]
            write_run(tmp_path / f"{name}.jsonl", moved)
        return tmp_path

    def test_summaries_hold_both(self, folder: Path):
        assert execute(["report", "one.jsonl", "two.jsonl", "-o", "page.html", "--summaries", "out"]) == 0
        documents = {name: msgspec.json.decode((folder / f"out/{name}").read_bytes()) for name in FILES[:3]}
        for document in documents.values():
            assert len(document["sections"]) == 2
            rows = [
                row for value in document.values() if isinstance(value, list) for row in value if "title" not in row
            ]
            assert {row["section"] for row in rows} == {one["title"] for one in document["sections"]}
            counts = Counter((row["implementation"], row["section"]) for row in document["cells"])
            assert set(counts.values()) == {1}
        assert documents["correctness.json"]["statuses"] == {"ok": 4, "incorrect": 2}
        gains = sorted(one["ratio"]["value"] for one in documents["performance.json"]["speedups"])
        assert gains == pytest.approx([2, 4], rel=0.05)
        kinds = Counter(one["kind"] for one in documents["performance.json"]["recommendations"])
        assert kinds == {"overall": 2, "winner": 2}
        text = (folder / "out/summary.txt").read_text()
        for one in documents["performance.json"]["sections"]:
            assert text.count(f"{one['title']}\n===") == 1

    def test_annotations_name_the_place(self, folder: Path, capsys: pytest.CaptureFixture[str]):
        assert execute(["report", "one.jsonl", "two.jsonl", "-o", "page.html", "--markdown"]) == 0
        lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("::error")]
        assert len(set(lines)) == 2


class TestOlderTimes:
    """A newer run with another version of the library, which stands in a section of its own, finds torch.sdpa wrong."""

    TOLD = "torch.sdpa is left out on 1 shape: a newer run found it incorrect."

    def report(self, old: Sequence[Record], folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[str, str]:
        here = msgspec.structs.replace(CPU, packages={"torch": "9.0"})
        wrong = msgspec.structs.replace(incorrect("torch.sdpa", "row 3 is wrong"), environment=here)
        newer = [wrong, timed("torch.eager", 4e6, environment=here)]
        headers = [msgspec.structs.replace(new_header("0", "quick"), created=f"2026-01-0{day}") for day in (1, 2)]
        paths = [write_run(folder / f"{n}.jsonl", run, headers[n]) for n, run in enumerate((old, newer))]
        assert execute(["report", *map(str, paths), "--markdown", "-o", str(folder / "page.html")]) == 0
        return capsys.readouterr().out, (folder / "page-summary" / "summary.txt").read_text()

    def test_the_older_section_leaves_it_out_and_says_so(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
        old = [timed("torch.sdpa", 1e6), timed("torch.eager", 4e6), timed("torch.math", 5e6)]
        markdown, summary = self.report(old, tmp_path, capsys)
        assert "| 1 x 128 | torch.eager |" in markdown
        for text in (markdown, " ".join(summary.split())):
            assert text.count(self.TOLD) == 2
            assert "use torch.sdpa" not in text
            assert "torch.eager leads" in text
        assert "torch 2.13.0" in markdown

    def test_a_section_of_which_nothing_is_left_is_not_shown(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
        markdown, summary = self.report([timed("torch.sdpa", 1e6)], tmp_path, capsys)
        assert "torch 2.13.0" not in markdown
        assert markdown.count(self.TOLD) == " ".join(summary.split()).count(self.TOLD) == 1
