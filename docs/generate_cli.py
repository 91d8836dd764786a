"""Writes docs/cli.md from the commands themselves: `make docs/cli.md`. With `--check` it only says if that is stale."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from pathlib import Path

from attnbench import cli, config

PAGE = Path(__file__).with_name("cli.md")
EMPTY = re.compile(r' \*\[default: (?:\(\)|False|"")\]\*')
"""What an option is when it is not given goes without saying where that is nothing."""
HEAD = """# Command line

<!-- Written by docs/generate_cli.py from the code: change the help texts there, then run `make docs/cli.md`. -->

{purpose} `python -m attnbench` is the same. `attnbench COMMAND --help` prints what is below.

Data goes to stdout, progress and warnings to stderr. `--json` prints one document on stdout and nothing else.

Exit codes: {codes} · {bug} a bug of ours
"""
SETTINGS = """
## Settings

The command line goes before the environment, the environment before the file, the file before the default. The file is
the nearest `attnbench.toml`, or `pyproject.toml` with a `[tool.attnbench]` table, from the working folder upwards. A
list in a variable is separated by spaces, one of folders as `PATH` is.

| in the file | in the environment | default | |
| --- | --- | --- | --- |
"""


def commands() -> str:
    """Every command as cyclopts describes it, without its title and its table of contents."""
    text = cli.app.generate_docs(output_format="markdown")
    first = text.index("\n**Commands**")
    return EMPTY.sub("", text[first:]).rstrip() + "\n"


def settings() -> str:
    """A row per setting: its names, its default, and the docstring below it in the code."""
    (found,) = (
        node
        for node in ast.parse(inspect.getsource(config)).body
        if isinstance(node, ast.ClassDef) and node.name == config.Settings.__name__
    )
    defaults = config.Settings()
    rows = []
    for field, told in zip(found.body, found.body[1:]):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(told, ast.Expr):
            name, meaning = field.target.id, ast.literal_eval(told.value)
            default = getattr(defaults, name)
            value = "" if default in (None, ()) else f"`{default}`"
            rows.append(f"| `{name}` | `{config.PREFIX}{name.upper()}` | {value} | {meaning} |")
    return "\n".join(rows) + "\n"


def page() -> str:
    """The whole page."""
    codes = inspect.cleandoc(cli.__doc__ or "").splitlines()[-1]
    head = HEAD.format(purpose=cli.app.help, codes=codes, bug=cli.BUG)
    return head + commands() + SETTINGS + settings()


def main(arguments: list[str]) -> None:
    """Write the page, or only look at it."""
    fresh = page()
    if arguments == ["--check"]:
        stale = not PAGE.exists() or PAGE.read_text(encoding="utf-8") != fresh
        sys.exit(f"{PAGE.name} is not what the code says: run `make docs/cli.md` and commit it." if stale else 0)
    PAGE.write_text(fresh, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
