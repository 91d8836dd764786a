"""`attnbench report` on the command line: what it writes, where, and what it says."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest
from page_factory import two_frameworks

from attnbench.cli import execute
from attnbench.store.runfile import RunWriter, new_header

pytest.importorskip("altair")
pytest.importorskip("jinja2")
pytest.importorskip("vl_convert")


pytestmark = pytest.mark.usefixtures("no_bundle")


class TestCommand:
    @pytest.fixture
    def run_file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.chdir(tmp_path)
        writer = RunWriter(tmp_path / "runs/machine/first.jsonl", new_header("0", "quick"))
        writer.write(two_frameworks())
        writer.close()
        return writer.path

    def test_the_page_lies_beside_the_run(self, run_file: Path, capsys: pytest.CaptureFixture[str]):
        assert execute(["report"]) == 0
        path = run_file.with_suffix(".html")
        assert capsys.readouterr().out.strip().endswith("first.html")
        assert "torch.sdpa" in path.read_text()

    def test_another_place_and_markdown(self, run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
        assert execute(["report", str(run_file), "-o", "out/page.html", "--markdown"]) == 0
        printed = capsys.readouterr()
        assert (tmp_path / "out/page.html").is_file()
        assert printed.out.startswith("### Test CPU 9000")
        assert "page.html" in printed.err

    def test_json_names_what_was_written(self, run_file: Path, capsys: pytest.CaptureFixture[str]):
        assert execute(["report", "latest", "--json"]) == 0
        document = msgspec.json.decode(capsys.readouterr().out)
        assert document["report"].endswith("first.html")
        assert "torch.sdpa" in document["closing"][0]

    def test_a_run_of_nothing_is_one_sentence(self, run_file: Path, capsys: pytest.CaptureFixture[str]):
        RunWriter(Path("empty.jsonl"), new_header("0", "quick")).close()
        assert execute(["report", "empty.jsonl"]) == 2
        assert "empty.jsonl holds no records" in capsys.readouterr().err

    def test_an_unwritable_place_is_one_sentence(self, run_file: Path, capsys: pytest.CaptureFixture[str]):
        Path("file").touch()
        assert execute(["report", "-o", "file/page.html"]) == 2
        assert "Choose another place with -o" in capsys.readouterr().err

    def test_a_missing_package_says_what_to_install(
        self, run_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ):
        monkeypatch.setattr(sys.modules["attnbench.cli.report"], "find_spec", lambda name: None)
        assert execute(["report"]) == 2
        assert "attnbench[report]" in capsys.readouterr().err
