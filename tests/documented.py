"""What the pages show: code blocks, commands and links, and a place where the commands can be run without workers."""

from __future__ import annotations

import re
import shlex
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import fake_lab
import gate_factory
import pytest
from git_repository import Repository

from attnbench import registry
from attnbench.cli import execute
from attnbench.report.html import images

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
DOCS = ROOT / "docs"
FENCE = re.compile(r'^```(\w*)(?: title="([^"]+)")?\n(.*?)^```$', re.DOTALL | re.MULTILINE)
INLINE = re.compile(r"(?<!`)`(attnbench [^`]+)`")
LINE = re.compile(r"^\s*(?:\$ |- )?(attnbench [^#\n]+?)\s*$", re.MULTILINE)
CONTINUED = re.compile(r"\\\n")
NO_COMMAND = re.compile(r"attnbench [A-Z]|\[(?:OPTIONS|ARGS)\]| · ")
"""The form of a command in the reference, and a headline that a command prints."""
SHELL_VALUE = re.compile(r'"\$\(.*\)"|"\$[^"]*"')
STEPS = ("torch.multihead-dilated", "torch.gemma-stack")
NEED_MORE = (["bisect"], ["compare"], ["export"], ["gate"])
SUITE = "[[workload]]\nbatch = 1\nq_len = 64\nheads = 4\nhead_dim = 16\n"


class Block(NamedTuple):
    """A fenced block: its language, its title and what is in it."""

    language: str
    title: str
    text: str


def blocks(page: Path, language: str | None = None) -> list[Block]:
    """Fenced blocks of a page, in order; all or those of one language."""
    found = [Block(*match.groups("")) for match in FENCE.finditer(page.read_text())]
    return found if language is None else [block for block in found if block.language == language]


def titled(page: Path) -> dict[str, list[Block]]:
    """Title -> blocks with that title."""
    found: dict[str, list[Block]] = {}
    for block in blocks(page):
        if block.title:
            found.setdefault(block.title, []).append(block)
    return found


def commands(page: Path) -> list[str]:
    """Every `attnbench ...` of a page, in text or on a line of a block, each once, in order."""
    text = page.read_text()
    places = [(match.start(), match[1]) for match in INLINE.finditer(FENCE.sub(_blank, text))]
    for block in FENCE.finditer(text):
        lines = CONTINUED.sub(_blank, block[3])
        places += [(block.start(3) + match.start(), match[1]) for match in LINE.finditer(lines)]
    return list(dict.fromkeys(command for _, command in sorted(places) if not NO_COMMAND.search(command)))


def _blank(match: re.Match[str]) -> str:
    return " " * len(match[0])


def words(command: str) -> list[str]:
    """The arguments of a command as a shell would make them, its variables replaced by a ref, no redirection."""
    return shlex.split(SHELL_VALUE.sub("main", command.partition(" >")[0]))[1:]


class Lab:
    """A git repository with runs, baselines and a kernel, and a command line whose workers are pretended."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        fake_lab.install(monkeypatch, folder)
        known = [*fake_lab.NAMES, "torch.sdpa-flash", "torch.ring", "torch.chunked", "torch.pair", *STEPS]
        monkeypatch.setattr(registry, "names", lambda: known)
        repository = Repository(folder)
        repository.commit("first")
        repository.git("tag", "v1.0")
        repository.commit("second")
        repository.git("checkout", "--quiet", "-b", "feature")
        repository.commit("third")
        found = gate_factory.comparison("slower", 1.1)
        for place in ("compare", "compare_refs"):
            monkeypatch.setattr(f"attnbench.comparing.compare.{place}", lambda *given, **named: found)
        monkeypatch.setattr(
            "attnbench.comparing.gate.gate_refs", lambda *given: gate_factory.report(gate_factory.case())
        )
        pictures = images._pictures
        monkeypatch.setattr(images, "_pictures", lambda part: islice(pictures(part), 2))  # a published run has dozens
        assert execute(["run", "--seq-len", "64", "--quiet"]) == 0
        (self.run,) = folder.glob("runs/*/*.jsonl")
        Path("baselines").mkdir()
        for name in ("mine.toml", "own.toml"):
            Path(name).write_text(SUITE)
        Path("results").symlink_to(ROOT / "results")
        Path("src").symlink_to(ROOT / "src")

    def execute(self, command: str) -> int:
        """The exit code; RUN stands for the run file that is there, a name that needs more is only a mention."""
        arguments = [str(self.run) if word == "RUN" else word for word in words(command)]
        return execute([*arguments, "--help"] if arguments in NEED_MORE else arguments)

    def must_run(self, command: str) -> None:
        """It is understood and does what it says; a gate may find no baseline to hold the pretended run against."""
        assert self.execute(command) in ((0, 1, 3) if command.startswith("attnbench gate") else (0, 1)), command
