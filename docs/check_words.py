"""Check the words of the source: docstrings that a stranger understands, names without riddles.

    python docs/check_words.py [PATH ...]

A function's docstring begins with a verb and has four words at least; a docstring of a class, module, property or
attribute begins with a noun. Some words are used nowhere, since the field has others for what they meant here. No two
public classes have one name.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "attnbench"
FEWEST_WORDS = 4
VERBS = frozenset((Path(__file__).parent / "verbs.txt").read_text().split())
"""Verbs that a function's docstring may begin with; add the one that fits if it is missing."""
NOT_FIRST = re.compile(
    r"(Of|As|Likewise|Where|What|So many|The same|Its|It|Those|They|Both|Else|Otherwise|Same|Ditto)\b"
)
DOUBLED = frozenset(("Attention", "Block", "Module", "Observation", "Unsupported"))
"""Class names that stand more than once: openpi's code fixes those of models, a schema or a user's code the others."""
RIDDLES = (
    r"nurser|fledgling|duel|fighter|\bcrew|travell?er|enlist|wardrobe|disguise|podium|champion|compass|whereabouts"
)
NAMES = re.compile(RIDDLES, re.IGNORECASE)
UNUSED = re.compile(
    rf"({RIDDLES})|\b(autops(y|ies)|founding documents?|speaks? for|for certain|likewise|(is|are) told)\b",
    re.IGNORECASE,
)


def faults(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and words of everything in a file that breaks a rule."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if NAMES.search(node.name):
                yield node.lineno, f"the name {node.name}: another word of the field, please"
            yield from _of_docstring(node)
        elif isinstance(node, ast.Module):
            yield from _of_docstring(node)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and (found := UNUSED.search(node.value)):
            yield node.lineno, f"'{found.group(0)}' is a word that is not used here"
        for body in (getattr(node, "body", ()),):
            yield from _of_attributes(body if isinstance(body, list) else ())


def _of_docstring(
    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module,
) -> Iterator[tuple[int, str]]:
    text = ast.get_docstring(node)
    if not text:
        return
    line = getattr(node, "lineno", 1)
    function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    if function and not _is_property(node):
        first = re.match(r"[\w-]*", text).group(0)  # pyright: ignore[reportOptionalMemberAccess]
        if first not in VERBS:
            yield line, f"the docstring of {node.name} begins with '{text[:24]}', not with a verb"
        if len(text.split()) < FEWEST_WORDS:
            yield line, f"the docstring of {node.name} has fewer than {FEWEST_WORDS} words"
    elif found := NOT_FIRST.match(text):
        yield line, f"a docstring begins with '{found.group(0)}', not with a noun"


def _is_property(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(ast.unparse(one).endswith(("property", ".setter", "fixture")) for one in node.decorator_list)


def _of_attributes(body: list[ast.stmt]) -> Iterator[tuple[int, str]]:
    """Yield the faults of strings that stand below an assignment."""
    for before, after in pairwise(body):
        if isinstance(before, ast.Assign | ast.AnnAssign) and isinstance(after, ast.Expr):
            value = after.value
            if (
                isinstance(value, ast.Constant)
                and isinstance(value.value, str)
                and (found := NOT_FIRST.match(value.value))
            ):
                yield after.lineno, f"a docstring begins with '{found.group(0)}', not with a noun"


def doubled_classes(paths: Iterable[Path]) -> Iterator[tuple[Path, int, str]]:
    """Yield file, line and words of every public class whose name another file has already given to one."""
    known: dict[str, Path] = {}
    for path in paths:
        for node in ast.parse(path.read_text()).body:
            if not isinstance(node, ast.ClassDef) or node.name.startswith("_") or node.name in DOUBLED:
                continue
            if (first := known.setdefault(node.name, path)) != path:
                yield path, node.lineno, f"a class {node.name} is in {first} too: one of them needs another name"


def main(arguments: list[str]) -> int:
    """Print every fault of the files named, of the whole source if none is; return the exit code."""
    paths = [Path(one) for one in arguments] or [SOURCE]
    files = sorted(file for path in paths for file in (path.rglob("*.py") if path.is_dir() else [path]))
    found = [(file, *fault) for file in files for fault in faults(file)] + list(doubled_classes(files))
    for file, line, words in found:
        print(f"{file}:{line}: {words}")
    print(f"{len(found)} faults in {len(files)} files", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
