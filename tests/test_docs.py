"""The pages are true: links lead somewhere, commands are understood, code runs, and what is shown is what comes out."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
import unicodedata
from importlib.metadata import version
from pathlib import Path

import documented
import pytest
from cli_in_process import attnbench, script
from documented import DOCS, README, ROOT

import attnbench as ab

PAGES = sorted(DOCS.glob("*.md"))
LINKED = [*PAGES, README, ROOT / "CONTRIBUTING.md", ROOT / "results" / "README.md"]
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
SIGNATURE = re.compile(r"^### ab\.(\w+)\n\n`ab\.\1(\(.*\))`$", re.MULTILINE)
MASK = re.compile(r"^\| `ab\.masks\.(\w+)(\(.*?\))` \|", re.MULTILINE)
SHOWN = re.compile(r"\$ (attnbench (?:show|choose) [^\n]+)\n(.*)", re.DOTALL)


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def anchors(page: Path) -> set[str]:
    """Of every heading, as the site makes them."""
    text = documented.FENCE.sub("", page.read_text())
    return {_slug(title) for title in re.findall(r"^#+ (.+)$", text, re.MULTILINE)}


def _slug(title: str) -> str:
    plain = unicodedata.normalize("NFKD", title).encode("ascii", "ignore").decode()
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower())


@pytest.mark.parametrize("page", LINKED, ids=name_of)
def test_every_link_leads_somewhere(page: Path):
    for link in LINK.findall(documented.FENCE.sub("", page.read_text())):
        if re.match(r"https?://", link):
            continue
        where, _, anchor = link.partition("#")
        target = (page.parent / where).resolve() if where else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_every_page_is_in_the_navigation():
    listed = re.findall(r"^  - .+: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(listed) == [page.name for page in PAGES]


def test_the_reference_of_the_command_line_is_what_the_code_says():
    (pinned,) = re.findall(r"^cyclopts==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    if version("cyclopts") != pinned:
        pytest.skip(f"cyclopts {pinned} writes the reference, {version('cyclopts')} is installed")
    done = subprocess.run([sys.executable, DOCS / "generate_cli.py", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_stale_reference_would_be_noticed(tmp_path: Path):
    (tmp_path / "generate_cli.py").write_text((DOCS / "generate_cli.py").read_text())
    (tmp_path / "cli.md").write_text((DOCS / "cli.md").read_text().replace("--seq-len", "--length", 1))
    done = subprocess.run([sys.executable, tmp_path / "generate_cli.py", "--check"], capture_output=True, text=True)
    assert done.returncode == 1
    assert "make docs/cli.md" in done.stderr


def test_every_command_of_the_pages_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """But those of adding.md, whose names exist only once its examples are in place: test_docs_adding.py."""
    lab = documented.Lab(monkeypatch, tmp_path)
    (suite,) = documented.titled(DOCS / "tutorial.md")["mine.toml"]
    Path(suite.title).write_text(suite.text)
    known = set(documented.commands(README))
    pages = [page for page in PAGES if page.name != "adding.md"]
    new = [command for page in pages for command in documented.commands(page) if command not in known]
    assert len(new) > 20
    for command in dict.fromkeys(new):
        lab.must_run(command)


def shown() -> list[tuple[str, str]]:
    """Commands that read a published run, each with the lines that a page shows of its output."""
    found = (SHOWN.fullmatch(block.text) for page in PAGES for block in documented.blocks(page))
    return [(match[1], match[2]) for match in found if match]


def test_output_is_shown():
    assert len(shown()) >= 4


@pytest.mark.parametrize("command", sorted({command for command, _ in shown()}))
def test_what_is_shown_is_what_comes_out(command: str):
    printed = [line.rstrip() for line in attnbench(ROOT, *documented.words(command)).stdout.splitlines()]
    for other, lines in shown():
        if other == command:
            missing = [line for line in lines.splitlines() if line != "[...]" and line not in printed]
            assert not missing, f"{command} does not print {missing[0]}"


def run_script(text: str, folder: Path) -> list[str]:
    (folder / "script.py").write_text(text)
    return script(folder / "script.py")


def test_the_script_of_the_python_page_runs(tmp_path: Path):
    text = "\n".join(block.text for block in documented.blocks(DOCS / "python.md", "python"))
    lines = run_script(text, tmp_path)
    assert lines[0] == "b2-t128-h8:2-d64-causal-float32-forward"
    assert lines[2].startswith("ok ")
    assert "numpy.float32" in lines
    assert lines[-1].startswith("attention takes about ")


@pytest.mark.torch
def test_the_script_of_the_attention_page_runs(tmp_path: Path):
    text = "\n".join(block.text for block in documented.blocks(DOCS / "attention.md", "python"))
    assert "2 x 128 tokens" in "\n".join(run_script(text, tmp_path))


@pytest.mark.torch
def test_the_python_of_the_tutorial_runs(tmp_path: Path):
    (block,) = documented.blocks(DOCS / "tutorial.md", "python")
    assert "torch.sdpa-flash" in "\n".join(run_script(block.text, tmp_path))


PACKAGE = """
from torch.nn.functional import scaled_dot_product_attention


def my_attention(q, k, v):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


old_attention = my_attention
"""


@pytest.mark.torch
def test_the_tests_of_the_ci_page_pass(tmp_path: Path):
    (block,) = documented.blocks(DOCS / "ci.md", "python")
    (tmp_path / "my_package.py").write_text(PACKAGE)
    (tmp_path / "test_mine.py").write_text(block.text)
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--attnbench-disable", "test_mine.py"]
    done = subprocess.run([sys.executable, *words], cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert "3 passed" in done.stdout, done.stdout + done.stderr


@pytest.mark.torch
def test_the_run_of_the_tutorial_runs(tmp_path: Path):
    """On fewer tokens, for the sake of time."""
    (command,) = (one for one in documented.commands(DOCS / "tutorial.md") if one.startswith("attnbench run --seq-len"))
    done = attnbench(tmp_path, *documented.words(command.replace("512", "64")), "--budget", "0.05")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("torch.sdpa-flash") >= 2


def test_every_public_name_is_on_the_python_page():
    text = (DOCS / "python.md").read_text()
    missing = [name for name in ab.__all__ if not re.search(rf"\bab\.{name}\b", text)]
    assert not missing


def written(signature: inspect.Signature) -> str:
    """Without annotations, which a reader does not type."""
    bare = [one.replace(annotation=inspect.Parameter.empty) for one in signature.parameters.values()]
    return str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty)).replace("'", '"')


def test_signatures_on_the_python_page_are_true():
    found = dict(SIGNATURE.findall((DOCS / "python.md").read_text()))
    assert len(found) > 8
    for name, signature in found.items():
        assert signature == written(inspect.signature(getattr(ab, name))), name


def test_masks_on_the_python_page_are_all_and_true():
    found = dict(MASK.findall((DOCS / "python.md").read_text()))
    assert set(found) == {name for name in ab.masks.__all__ if name.islower()}
    for name, signature in found.items():
        assert signature == written(inspect.signature(getattr(ab.masks, name))), name


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/architecture.md"])
def test_files_that_a_map_names_exist(page: str):
    named = re.findall(r"`((?:\w+/)*\w+\.(?:py|md))`", (ROOT / page).read_text())
    assert len(named) > 8
    places = (ROOT, ROOT / "src" / "attnbench", *(ROOT / "src" / "attnbench").rglob("*"))
    assert not [path for path in named if not any((place / path).exists() for place in places)]
