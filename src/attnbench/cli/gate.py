"""`attnbench gate`: did anything get slower, wrong or bigger between two refs or two runs?"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from attnbench import registry
from attnbench.cli.options import (
    Budget,
    Device,
    Json,
    Names,
    Quiet,
    Selection,
    ShapeOptions,
    Threads,
    expand,
    filter_words,
    find_run,
    select_workloads,
    swept_names,
)
from attnbench.cli.output import print_json, stderr_console, stdout_console
from attnbench.comparing import gate as gating
from attnbench.comparing.baselines import holds_baselines
from attnbench.comparing.ci_files import FILES, remove_files, write_ci, write_files
from attnbench.comparing.gate_cases import Floors, load_thresholds
from attnbench.comparing.gate_text import print_gate
from attnbench.comparing.stored import gate_stored
from attnbench.comparing.text import ExperimentProgress
from attnbench.comparison import EXIT_CODES, GateReport
from attnbench.config import Settings, load_settings
from attnbench.errors import UnknownName, UsageError
from attnbench.results.run_file import check_writable
from attnbench.results.sentences import some_of
from attnbench.run import git

SUITE = "ci"
OUTCOMES = {"exit": "inconclusive", "pass": "pass", "fail": "fail"}


def gate(
    *,
    baseline: Annotated[str | None, Parameter(help="Git ref, run file, or folder of baselines.")] = None,
    current: Annotated[str, Parameter(help='Git ref or run file that is judged; "." is the working tree.')] = "HEAD",
    suite: Annotated[str, Parameter(help="Workloads to measure, a name or a TOML file.")] = SUITE,
    impl: Annotated[
        Names, Parameter(help="What to measure; else `implementations` of [tool.attnbench], else all.")
    ] = (),
    words: Annotated[str, Parameter(name=["--filter", "-k"], help="Words that cases must contain.")] = "",
    device: Device = None,
    threads: Threads = None,
    budget: Budget = 60.0,
    thresholds: Annotated[
        Path | None, Parameter(help="TOML file that raises the floors of some cases; no floor can be lowered.")
    ] = None,
    on_inconclusive: Annotated[
        Literal["exit", "pass", "fail"], Parameter(help="What inconclusive cases mean: exit code 4, 0 or 1.")
    ] = "exit",
    ci: Annotated[Path | None, Parameter(help="Folder for gate.json, .md and .xml; annotates on GitHub.")] = None,
    json: Json = False,
    quiet: Quiet = False,
) -> int:
    """Compare many cases in two stages, with controls; correctness and peak memory count too.

    Exit codes: 0 pass · 1 slower, wrong or bigger · 2 usage · 3 nothing measured · 4 inconclusive · 5 untrusted
    """
    if ci is not None:
        remove_files(ci)  # whatever ends this gate, those of an earlier one must not pass for its own
    settings = load_settings({"device": device, "threads": threads, "thresholds": thresholds and str(thresholds)})
    if baseline is None:
        folder = Path(settings.baselines_dir)
        if not folder.is_dir():
            raise UsageError(
                "no baseline: give --baseline REF (a branch, tag or commit), or a run file, or save one with "
                "`attnbench run ci` and `attnbench baseline save RUN`."
            )
        baseline = str(folder) if folder.is_absolute() else f"./{folder}"
    if ci is not None:
        check_writable(ci, "--ci")
    means: Any = OUTCOMES[on_inconclusive]
    if stored := _stored(baseline, current):
        report = gate_stored(*stored, load_thresholds(settings.thresholds), means)
    else:
        name, workloads = select_workloads(suite, False, ShapeOptions(), Selection())
        floors = load_thresholds(settings.thresholds)
        workloads, names = filter_words(words, workloads, _names(impl, settings))

        def relaxed(then: Path) -> list[str]:
            cases = [(implementation, workload.id) for implementation in names for workload in workloads]
            return [*_not_measured(then, suite, impl, words, cases), *_raised(then, thresholds, floors, cases)]

        def keep(report: GateReport) -> None:
            if ci is not None:
                with suppress(UsageError):  # if the disk is still full at the end, that is told
                    write_files(report, ci)

        with ExperimentProgress(stderr_console(), quiet or json) as progress:
            order = gating.GateOrder(
                baseline=baseline,
                current=current,
                suite=name,
                workloads=workloads,
                implementations=names,
                folder=Path.cwd(),
                device=settings.device,
                threads=settings.threads,
                budget_s=budget,
                floors=floors,
                on_inconclusive=means,
                relaxed=relaxed,
                outputs=() if ci is None else tuple(ci / name for name in FILES),
                on_progress=keep,
            )
            report = gating.gate_refs(order, progress)
    with suppress(BrokenPipeError):  # the exit code counts, whoever reads
        if json:
            print_json(report)
        else:
            print_gate(stdout_console(), report)
    if ci is not None:
        write_ci(report, ci)
    return EXIT_CODES[report.outcome]


def _is_stored(what: str) -> bool:
    """Return whether a name means run files or a folder of baselines; an unrelated folder may share its name
    with a branch."""
    if what == "latest" or Path(what).suffix == ".jsonl":
        return True
    if what == "." or not Path(what).is_dir():
        return False
    is_path = what.startswith(("./", "../", "/")) or what.endswith("/") or Path(what).is_absolute()
    return is_path or holds_baselines(Path(what)) or not git.is_ref(what)


def _stored(baseline: str, current: str) -> tuple[Path, Path] | None:
    """Return the run file or folder of baselines, and the run file that is judged; None if both are git refs."""
    old, new = _is_stored(baseline), _is_stored(current)
    if not old and not new:
        return None
    if not old or not new:
        stored, option = (baseline, "--current") if old else (current, "--baseline")
        raise UsageError(
            f"{stored} holds measurements, so {option} must be a run file too (`attnbench run ci` makes one)."
        )
    return Path(baseline) if Path(baseline).is_dir() else find_run(baseline), find_run(current)


def _not_measured(then: Path, suite: str, impl: Names, words: str, cases: Sequence[tuple[str, str]]) -> list[str]:
    """Return a note on implementations and workloads that the settings and the suite of an earlier folder name, and
    that are not among the cases."""
    asked: list[str] = []
    with suppress(UsageError):  # files that cannot be read any more ask for nothing
        known = registry.names()
        for one in () if impl else load_settings(cwd=then).implementations:
            try:
                asked += expand(one, known)
            except UnknownName:
                asked.append(one)  # no longer registered
        path = then / suite
        if path.is_file():
            _, workloads = select_workloads(str(path), False, ShapeOptions(), Selection())
            asked += [workload.id for workload in workloads]
    here = {name for case in cases for name in case}
    gone = [one for one in dict.fromkeys(asked) if one not in here and all(word in one for word in words.split())]
    return [f"asked for {some_of(gone)}, which this gate does not measure"] if gone else []


def _raised(then: Path, thresholds: Path | None, floors: Floors, cases: Sequence[tuple[str, str]]) -> list[str]:
    """Return a note on the cases that an earlier folder gave a lower floor."""
    with suppress(UsageError):
        path = thresholds or load_settings(cwd=then).thresholds
        before = None if path is None or not (then / path).is_file() else then / path
        lower = load_thresholds(before)
        higher = [
            f"{name} on {workload} ({100 * lower(name, workload):g} %, here {100 * floors(name, workload):g} %)"
            for name, workload in cases
            if floors(name, workload) > lower(name, workload)
        ]
        return [f"has lower floors: {some_of(higher)}"] if higher else []
    return []


def _names(impl: tuple[str, ...], settings: Settings) -> tuple[str, ...]:
    """Return the names asked for; else those that belong to this repository: attnbench's own are the same in all refs
    of another one."""
    known = registry.names()
    named = tuple(dict.fromkeys(name for one in impl or settings.implementations for name in expand(one, known)))
    if named:
        return named
    swept = swept_names()
    if any((git.root() / folder / "attnbench").is_dir() for folder in ("src", ".")):
        return tuple(swept)
    mine = tuple(name for name in swept if registry.module_of(name).partition(".")[0] != "attnbench")
    if not mine:
        raise UsageError(
            "no implementation of this repository is registered, so none of its code would be measured: name functions "
            "with --impl file.py:function or package.module:function, or in `implementations` of [tool.attnbench]."
        )
    return mine
