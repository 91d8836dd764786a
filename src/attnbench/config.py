"""Settings, read once by the command line and the API: command line > environment > file > default.

The file is the nearest `attnbench.toml`, or `pyproject.toml` with a `[tool.attnbench]` table, from the working folder
up to the root of its git repository; outside of one, up to the user's home folder, or in the working folder alone if
that is not in it. A file of another user does not count, because its `build` would be run. A variable is the setting's
name in capitals after ATTNBENCH_: ATTNBENCH_RUNS_DIR=/data/runs. A list in a variable is separated by spaces, one of
folders as PATH is.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from difflib import get_close_matches
from functools import cache
from math import isfinite
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

import msgspec
from msgspec import Struct

from attnbench.errors import BrokenFile, UnknownName, UsageError
from attnbench.files import line_of, read_toml

PREFIX = "ATTNBENCH_"
FILE_RELATIVE = ("runs_dir", "baselines_dir", "thresholds", "policy")
"""Paths that a settings file gives relative to itself."""
SEPARATORS = {"implementations": None, "pythonpath": os.pathsep}
"""Separator between the words of a variable, for each setting that is a list; None for spaces."""

LARGEST_SEED = 1 << 62
MOST_THREADS = 1 << 16

OnMiss = Literal["warn", "error", "quiet"]


class Settings(Struct, frozen=True, kw_only=True):
    """Settings that a user may want to make once for a project or a machine."""

    runs_dir: str = "runs"
    """Folder of run files; in a file, relative to that file."""
    device: str | None = None
    """cpu, cuda, ...; None takes the best that each framework has."""
    framework: str | None = None
    """Only implementations of this one; None for all."""
    threads: int | None = None
    """CPU threads of every framework; None for the cores this process may use."""
    budget_s: float = 1.0
    """Seconds of sampling per implementation and workload."""
    timeout_s: float = 300.0
    """Seconds after which a cell is given up."""
    seed: int | None = None
    """Seed of the order of cells and of the inputs; drawn anew if not given."""
    implementations: tuple[str, ...] = ()
    """Implementations that a gate measures: names or module:function references; none for all installed."""
    build: str | None = None
    """Shell command run inside the worktree of each git ref before it is measured; from a file of the repository."""
    pythonpath: tuple[str, ...] = ()
    """Folders of a worktree, relative to its root, that its workers import from; none for src (if any) and the root."""
    thresholds: str | None = None
    """TOML file of floors per case; in a file, relative to that file."""
    baselines_dir: str = "baselines"
    """Folder of baselines; in a file, relative to that file."""
    policy: str | None = None
    """Policy file that `attention` asks before those that come with attnbench; in a file, relative to that file."""
    on_miss: OnMiss = "warn"
    """Action of `attention` if no measured policy covers a call: warn (once a class of problems), error, or quiet."""

    def __post_init__(self) -> None:
        for name in ("threads", "budget_s", "timeout_s"):
            value = getattr(self, name)
            if value is not None and not (value > 0 and isfinite(value)):
                raise ValueError(f"{name} must be more than 0 and finite, not {value:g}")
        if self.threads is not None and self.threads > MOST_THREADS:
            raise ValueError(f"threads must be at most {MOST_THREADS}, not {self.threads}")
        if self.seed is not None and not 0 <= self.seed <= LARGEST_SEED:
            raise ValueError(f"seed must be between 0 and {LARGEST_SEED}, not {self.seed}")


NAMES = Settings.__struct_fields__


def load_settings(
    overrides: Mapping[str, Any] | None = None, environ: Mapping[str, str] | None = None, cwd: Path | None = None
) -> Settings:
    """Return the settings in force; an override that is None was not given. A variable with our prefix whose name looks
    misspelt is refused."""
    given = {name: value for name, value in (overrides or {}).items() if value is not None}
    from_file = _file_settings((cwd or Path.cwd()).resolve())
    variables = os.environ if environ is None else environ
    found = {key.removeprefix(PREFIX).lower(): value for key, value in variables.items() if key.startswith(PREFIX)}
    for name in found:
        if name not in NAMES and get_close_matches(name, NAMES, cutoff=0.8):
            raise UnknownName("variable", f"{PREFIX}{name.upper()}", [f"{PREFIX}{one.upper()}" for one in NAMES], "")
    known: dict[str, Any] = {name: value for name, value in found.items() if name in NAMES and value != ""}
    known |= {name: known[name].split(separator) for name, separator in SEPARATORS.items() if name in known}
    from_environment = _converted(known, "the environment", strict=False)
    for name in given:
        if name not in NAMES:
            raise UnknownName("option", name, NAMES, "")
    return Settings(**(from_file | from_environment | _converted(given, "the command line")))


def _converted(values: Mapping[str, Any], where: str, strict: bool = True) -> dict[str, Any]:
    """Convert values to their types; a UsageError names the source of a wrong value."""
    converted: dict[str, Any] = {}
    for name, value in values.items():
        try:
            converted[name] = getattr(msgspec.convert({name: value}, Settings, strict=strict), name)
        except msgspec.ValidationError as error:
            why = str(error).partition(" - at")[0]
            choices = get_args(get_type_hints(Settings)[name])
            if all(isinstance(one, str) for one in choices) and choices:
                why = f"it is one of {', '.join(choices)}"
            raise UsageError(f"setting {name} = {value!r} in {where} is wrong: {why}.") from error
    return converted


def _file_settings(folder: Path) -> dict[str, Any]:
    above = (folder, *folder.parents)
    root = next((place for place in above if (place / ".git").exists()), None)
    last = root or next((place for place in above if place == _home()), folder)
    for place in above[: above.index(last) + 1]:
        for path in (place / "attnbench.toml", place / "pyproject.toml"):
            if not path.is_file() or not _is_trusted(path, root) or (found := _read(path)) is None:
                continue
            if root is None and found.pop("build", None) is not None:
                _warn_once(f"build in {path} is ignored: the file is not in a git repository.")
            return found
    return {}


def _home() -> Path | None:
    try:
        return Path.home().resolve()
    except RuntimeError:  # this user has none
        return None


def _is_trusted(path: Path, root: Path | None) -> bool:
    """Return whether a file belongs to this user, to root, or to the owner of its repository."""
    if not hasattr(os, "getuid"):
        return True
    trusted = {os.getuid(), 0} | (set() if root is None else {(root / ".git").stat().st_uid})
    owner = path.stat().st_uid
    if owner not in trusted and path.name == "attnbench.toml":
        _warn_once(f"{path} is ignored: it belongs to another user (uid {owner}).")
    return owner in trusted


@cache
def _warn_once(text: str) -> None:
    logging.getLogger("attnbench").warning(text)


def _read(path: Path) -> dict[str, Any] | None:
    """Read the settings of one file; None for a pyproject.toml that has no table of ours."""
    table, text = read_toml(path)
    header = None
    if path.name == "pyproject.toml":
        tools = table.get("tool")
        table = tools.get("attnbench") if isinstance(tools, dict) else None
        if table is None:
            return None
        header = line_of(text, "tool.attnbench")
        if not isinstance(table, dict):
            raise BrokenFile(path, header, "write the settings under [tool.attnbench].")
    settings: dict[str, Any] = {}
    for name, value in table.items():
        line = line_of(text, name, after=header or 0)
        if name not in NAMES:
            raise BrokenFile(path, line, str(UnknownName("setting", name, NAMES, "")))
        try:
            settings |= _converted({name: value}, "this file")
        except UsageError as error:
            raise BrokenFile(path, line, str(error)) from error
    return settings | {name: str(path.parent / settings[name]) for name in FILE_RELATIVE if settings.get(name)}
