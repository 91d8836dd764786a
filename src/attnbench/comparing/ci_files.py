"""What `attnbench gate --ci FOLDER` leaves behind: three files, and what GitHub Actions shows of them."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec

from attnbench.comparing.annotations import workflow_commands
from attnbench.comparing.gate_markdown import markdown
from attnbench.comparing.junit import junit
from attnbench.comparison import GateReport
from attnbench.drafts import write_texts
from attnbench.errors import UsageError

FILES = ("gate.json", "gate.md", "gate.xml")


def remove_files(folder: Path) -> None:
    """Remove what an earlier gate has left in a folder; raises UsageError if that cannot be."""
    for name in FILES:
        try:
            (folder / name).unlink(missing_ok=True)
        except (NotADirectoryError, IsADirectoryError):
            continue  # writing will say so
        except OSError as error:
            raise UsageError(f"cannot remove {folder / name}: {error.strerror or error}.") from error


def write_ci(report: GateReport, folder: Path, environ: Mapping[str, str] = os.environ) -> None:
    """Write gate.json, gate.md and gate.xml; on GitHub, add to the job's summary and annotate.

    Annotations go to stderr, where GitHub reads them as well, so that `--json` keeps stdout to itself.
    """
    page = write_files(report, folder)
    if summary := environ.get("GITHUB_STEP_SUMMARY"):
        try:
            with Path(summary).open("a", encoding="utf-8") as file:
                file.write(page)
        except OSError as error:
            print(f"warning: cannot write the job's summary: {error.strerror or error}", file=sys.stderr)
    if environ.get("GITHUB_ACTIONS") == "true":
        for line in workflow_commands(report):
            print(line, file=sys.stderr)


def write_files(report: GateReport, folder: Path) -> str:
    """Write the three files, all of them or none; returns the Markdown."""
    page = markdown(report)
    texts = (msgspec.json.format(msgspec.json.encode(report), indent=2).decode(), page, junit(report))
    try:
        write_texts({folder / name: text for name, text in zip(FILES, texts)})
    except OSError as error:
        raise UsageError(f"cannot write to {folder}: {error.strerror or error}. Give --ci another folder.") from error
    return page
