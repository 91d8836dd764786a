"""Find what is tested without saying in which file it is: the command line, entry points, functions by name."""

from __future__ import annotations

import io
import json
import re
import tomllib
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SOURCE = ROOT / "src" / "attnbench"
WRITTEN = HERE / "written"
"""Files as version 0.2.0 writes them."""


@cache
def project() -> dict[str, Any]:
    """Return the [project] table of pyproject.toml, which declares every entry point."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def target(declared: str) -> Any:
    """Return the object that an entry point such as `attnbench.cli:main` declares, or its module."""
    module, _, attribute = declared.partition(":")
    found = import_module(module)
    return getattr(found, attribute) if attribute else found


def command_line() -> ModuleType:
    """Return the module of the console script."""
    return import_module(project()["scripts"]["attnbench"].partition(":")[0])


def run(*words: object) -> tuple[int, str, str]:
    """Run a command in this process, and return its exit code, stdout and stderr."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            target(project()["scripts"]["attnbench"])([str(word) for word in words])
        except SystemExit as end:
            return int(end.code or 0), out.getvalue(), err.getvalue()
    raise AssertionError("a command must end with an exit code")


def document(*words: object, codes: tuple[int, ...] = (0,)) -> Any:
    """Return the document that a command prints with `--json`."""
    code, out, err = run(*words, "--json")
    assert code in codes, f"attnbench {' '.join(map(str, words))}: exit code {code}: {err}"
    return json.loads(out)


@cache
def sources() -> dict[str, str]:
    """Return the text of every module of the package, by its dotted name."""
    texts = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE.parent).with_suffix("").parts
        texts[".".join(parts).removesuffix(".__init__")] = path.read_text(encoding="utf-8")
    return texts


def home(name: str) -> ModuleType:
    """Return the module that defines a function or class, wherever it is."""
    found = [module for module, text in sources().items() if re.search(rf"^(def|class) {name}\b", text, re.MULTILINE)]
    assert len(found) == 1, f"{name} must be defined once in src, not in {found or 'no file'}"
    return import_module(found[0])


def defined(name: str) -> Any:
    """Return a function or class of the package by its name."""
    return getattr(home(name), name)
