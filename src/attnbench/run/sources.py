"""The files that functions given by reference lie in, and what they held: a run must not go on with other code."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from attnbench.errors import UsageError
from attnbench.results.run_file import Run
from attnbench.results.unreached import asked_references
from attnbench.run.naming import is_reference, name_references


def fingerprint_sources(implementations: Iterable[Any]) -> dict[str, str]:
    """File or module of each reference, as it was written -> hash of its file, where there is one."""
    found = {where: source_file(where) for where in _places(implementations)}
    return {where: _hash(file) for where, file in found.items() if file is not None}


def refuse_changed_sources(run: Path, before: Mapping[str, str], implementations: Iterable[Any]) -> None:
    """Times of two versions of a function must not pass for those of one."""
    asked = {source_file(where) for where in _places(implementations)} - {None}
    for where, then in before.items():
        file = source_file(where)
        if file in asked and file is not None and _hash(file) != then:
            raise UsageError(
                f"{where} has changed since {run} was begun, which holds times of the older version: "
                "start a new run, or undo the change and resume again."
            )


def sources_of(run: Run) -> dict[str, str]:
    """Return the file or module of each function that a run was given by reference, as it was written, by its name."""
    return {
        name: reference.rpartition(":")[0]
        for header in run.headers
        for reference, name in name_references(asked_references(header.request)).items()
    }


def source_file(where: str) -> Path | None:
    """The file of `file.py` or `package.module`, found without importing anything; None where there is none."""
    if where.endswith(".py"):
        file = Path(where).resolve()
        return file if file.is_file() else None
    *packages, module = where.split(".")
    folders = [Path(folder, *packages) for folder in (*sys.path, "")]
    files = (file for folder in folders for file in (folder / module / "__init__.py", folder / f"{module}.py"))
    return next((file.resolve() for file in files if file.is_file()), None)


def _places(implementations: Iterable[Any]) -> list[str]:
    return list(dict.fromkeys(what.rpartition(":")[0] for what in implementations if is_reference(what)))


def _hash(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
