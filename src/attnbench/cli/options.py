"""Options that several commands share, and what they name: run files, workloads, implementations; and exit codes."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal, get_origin

from cyclopts import Group, Parameter, Token

from attnbench import registry
from attnbench.cli.output import warn
from attnbench.config import load_settings
from attnbench.errors import UnknownName, UsageError
from attnbench.files import files_in
from attnbench.results.records import is_anchor, is_timed, matches
from attnbench.results.run_file import Run, read_run
from attnbench.run.plan import shard
from attnbench.run.user_functions import told_apart
from attnbench.spec import Record, Workload
from attnbench.workloads import suites
from attnbench.workloads.suite_file import grid

NOTHING, INCONCLUSIVE, INTERRUPTED = 3, 4, 130
"""Exit codes that several commands have."""
DEFAULT_SUITE = "quick"
SHAPE = Group(
    "Shape",
    help="Without SUITE, these options make a grid of workloads; with SUITE, each replaces that axis of the suite.",
)
CHOICE = Group("What to run")
SAMPLING = Group("How to measure")

Many = Parameter(consume_multiple=1, negative="")
"""`--batch 1 4` and `--batch 1 --batch 4` mean the same; `--batch` alone means nothing."""
Names = Annotated[tuple[str, ...], Many]


def read_whole(kind: Any, tokens: Sequence[Token]) -> Any:
    """Convert words such as 64, 0x40, 64.0 or 1e3 to whole numbers without rounding."""

    def whole(token: Token) -> int:
        for read in (int, lambda text: int(text, 0), float):
            with suppress(ValueError, OverflowError):
                number = read(token.value)
                if number == int(number):
                    return int(number)
        raise UsageError(f'{token.keyword} takes whole numbers, not "{token.value}".')

    numbers = tuple(whole(token) for token in tokens)
    return numbers if get_origin(kind) is tuple else numbers[0]


Whole = Parameter(converter=read_whole)
Ints = Annotated[tuple[int, ...], Many, Whole]
Switch = Annotated[bool, Parameter(negative="")]
Runs = Annotated[str, Parameter(help="Run files, parts of their names, or `latest` (when none is given).")]
Suite = Annotated[str | None, Parameter(help="A suite by name or a TOML file; `quick` when no shape is given.")]
Words = Annotated[str, Parameter(name=["--filter", "-k"], help="Only cells whose id contains all these words.")]
Device = Annotated[str | None, Parameter(help="cpu, cuda, ...")]
Threads = Annotated[int | None, Whole, Parameter(help="CPU threads.")]
Budget = Annotated[float, Parameter(help="Seconds that one comparison may take at most.")]
Quick = Annotated[Switch, Parameter(help="Cap shapes and sampling time of the suite.")]
RunsFolder = Annotated[Path | None, Parameter(help="Folder of run files.")]
Json = Annotated[Switch, Parameter(name="--json", help="One JSON document on stdout and nothing else.")]
Quiet = Annotated[Switch, Parameter(name="--quiet", help="Print no progress on stderr.")]


@Parameter(name="*", group=SHAPE)
@dataclass(frozen=True, kw_only=True)
class ShapeOptions:
    """Axes of workloads; an empty one was not given."""

    seq_len: Annotated[Ints, Parameter(help="Query tokens.")] = ()
    kv_len: Annotated[Ints, Parameter(help="Key tokens, if they are not as many as query tokens.")] = ()
    batch: Annotated[Ints, Parameter(help="Sequences.")] = ()
    heads: Annotated[Names, Parameter(help="Query heads, or query:key/value heads such as 32:8.")] = ()
    head_dim: Annotated[Ints, Parameter(help="Width of a head.")] = ()
    v_head_dim: Annotated[Ints, Parameter(help="Width of the values, if it differs.")] = ()
    dtype: Annotated[Names, Parameter(help="float32, bfloat16, float16 or float64.")] = ()
    mask: Annotated[Names, Parameter(help="full, causal, window:128:0, prefix:816, lengths:512,300, A&B ...")] = ()
    causal: Annotated[Switch, Parameter(help="Short for --mask causal; with --mask, both.")] = False
    pass_: Annotated[
        tuple[Literal["forward", "backward", "train"], ...], Many, Parameter(name="--pass", help="Which pass is timed.")
    ] = ()
    scale: Annotated[tuple[float, ...], Many, Parameter(help="Softmax scale, if it is not head_dim ** -0.5.")] = ()
    softcap: Annotated[tuple[float, ...], Many, Parameter(help="Soft cap on the logits.")] = ()


OWN_SHAPE = ShapeOptions(seq_len=(512,))
"""Shape that a bare function is checked on if no other is given."""


@Parameter(name="*", group=CHOICE)
@dataclass(frozen=True, kw_only=True)
class Selection:
    """Which implementations and which of the workloads."""

    impl: Annotated[Names, Parameter(help="Names, a framework, file.py:function or package.module:function.")] = ()
    against: Annotated[Names, Parameter(help="What --impl is compared with: names or a framework.")] = ()
    framework: Annotated[
        str | None, Parameter(help="Framework of bare functions (torch); without --impl, only this framework runs.")
    ] = None
    device: Annotated[str | None, Parameter(help="cpu, cuda, ...; the best of each framework when not given.")] = None
    words: Annotated[
        str, Parameter(name=["--filter", "-k"], help="Words that implementation names or workload ids must contain.")
    ] = ""
    tag: Annotated[Names, Parameter(help="Only workloads that have one of these tags.")] = ()
    shard: Annotated[str | None, Parameter(help="i/n: the i-th of n parts of the workloads (from 1).")] = None


@Parameter(name="*", group=SAMPLING)
@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How long and how; None leaves it to the settings (attnbench.toml, ATTNBENCH_*)."""

    trials: Annotated[int | None, Whole, Parameter(help="Exactly this many samples instead of the stop rule.")] = None
    budget: Annotated[float | None, Parameter(help="Seconds of sampling per cell.")] = None
    precision: Annotated[
        float | None, Parameter(help="Stop when the 95 % interval is within this share of the median.")
    ] = None
    timeout: Annotated[float | None, Parameter(help="Seconds that a stage of a cell may take.")] = None
    threads: Threads = None
    seed: Annotated[int | None, Whole, Parameter(help="Seed of the order and the inputs.")] = None
    clock: Annotated[str | None, Parameter(help="Another clock of the device, such as graph.")] = None
    trace: Annotated[Path | None, Parameter(help="Folder for a profiler trace of one call per cell.")] = None


OWN_GRID = "own"
"""Name of the run when the shape options alone made the workloads."""
DEFAULTS: dict[str, Any] = {"batch": 1, "q_len": 512, "heads": "8", "head_dim": 64, "dtype": "float32"}
AXES = (
    "batch", "q_len", "heads", "head_dim", "dtype", "mask", "pass_", "scale", "softcap", "inputs", "step", "tags",
)  # fmt: skip
"""Fields of a workload that a shape option may replace, the last one varying fastest."""


def find_run(text: str) -> Path:
    """Return the file of that path, or the newest in the runs folder whose name contains the text."""
    if Path(text).is_file():
        return Path(text)
    folder = Path(load_settings().runs_dir)
    wanted = "" if text == "latest" else text
    found = sorted((p for p in files_in(folder, "*.jsonl") if wanted in str(p)), key=lambda p: p.stat().st_mtime)
    if not found:
        raise UsageError(
            f'there is no run file "{text}", and no file in {folder} has this in its name: '
            "`attnbench run --quick` makes one."
        )
    return found[-1]


def read_runs(names: Iterable[str]) -> dict[Path, Run]:
    """Read every run named, each once, and print the warnings about them."""
    runs = {path: read_run(path) for path in dict.fromkeys(map(find_run, names))}
    for run in runs.values():
        for warning in run.warnings:
            warn(warning)
    return runs


def read_together(names: Iterable[str]) -> dict[Path, Run]:
    """Read runs whose cells are compared: functions of one name from different files get names of their own."""
    runs, places = told_apart(read_runs(names))
    if places:
        told = ", ".join(f"{name} (from {place})" for name, place in sorted(places.items()))
        warn(f"these runs have different functions of one name; they are called {told}")
    return runs


def has_words(record: Record, words: str) -> bool:
    """Return whether the id of a cell contains all these words."""
    return all(word in record.cell.id for word in words.split())


def spare_runs(targets: Iterable[Path], runs: Iterable[Path], option: str) -> None:
    """Raise UsageError if a target is one of the run files to read; `option` is the one that names the target."""
    read = {path.resolve() for path in runs}
    for target in targets:
        if target.resolve() in read:
            raise UsageError(f"{target} is one of the run files to read: choose another path with {option}.")


def check_against(against: Sequence[str], records: Iterable[Record]) -> None:
    """Raise UsageError for a name without any timed, exact record in these runs to compare others with."""
    known = [record for record in records if not is_anchor(record)]
    for wanted in against:
        mine = [record for record in known if matches(record.implementation, wanted)]
        if not mine:
            raise UnknownName("implementation in these runs", wanted, sorted({r.implementation for r in known}), "")
        if not any(is_timed(record) and not record.approximate for record in mine):
            why = "it is approximate" if any(map(is_timed, mine)) else "it was not timed on any shape"
            raise UsageError(f"nothing can be compared with {wanted}: {why} in these runs.")


def select_workloads(
    suite: str | None, quick: bool, shape: ShapeOptions, choice: Selection
) -> tuple[str, tuple[Workload, ...]]:
    """Return the name of the suite, and its workloads that the options leave."""
    given = {one.name: list(getattr(shape, one.name)) for one in fields(shape) if one.name != "causal"}
    if shape.causal:
        given["mask"] = [f"{mask}&causal" for mask in shape.mask] or ["causal"]
    axes = {"q_len" if name == "seq_len" else name: values for name, values in given.items() if values}
    if suite is None and axes:
        name, workloads = OWN_GRID, grid(**(DEFAULTS | axes))
    else:
        name, workloads = load_suite(suite or DEFAULT_SUITE, quick)
    if suite is not None and axes:  # in place of the axes of each workload
        changed = [one for workload in workloads for one in grid(**(_fields(workload) | axes))]
        workloads = {one.id: one for one in changed}.values()
    if choice.tag:
        known = sorted({tag for workload in workloads for tag in workload.tags})
        workloads = [w for w in workloads if set(w.tags) & set(choice.tag)]
        if not workloads:
            raise UsageError(
                f"no workload of {name} is tagged {' or '.join(choice.tag)}; it has: {', '.join(known) or 'none'}."
            )
    if choice.shard is not None:
        part, slash, parts = choice.shard.partition("/")
        whole = slash and len(choice.shard) < 40 and part.isdecimal() and parts.isdecimal()
        if not (whole and 1 <= int(part) <= int(parts)):
            raise UsageError(f'--shard takes i/n with 1 <= i <= n, such as 1/4, not "{choice.shard}".')
        workloads = shard(list(workloads), int(part), int(parts))
    return name, tuple(workloads)


def load_suite(name: str, quick: bool) -> tuple[str, tuple[Workload, ...]]:
    """Return name and workloads of a suite (a name or a TOML path); `quick` caps its shapes."""
    suite = suites.load(name)
    suite = suites.quicken(suite) if quick else suite
    return suite.name, tuple(suite.workloads)


def _fields(w: Workload) -> dict[str, Any]:
    """Return a workload as axes, without those that only follow another one (kv_len = q_len)."""
    axes = {name: getattr(w, name) for name in AXES} | {"heads": (w.heads, w.kv_heads), "mask": w.visible_mask}
    if w.kv_len != w.q_len:
        axes["kv_len"] = w.kv_len
    if w.value_dim != w.head_dim:
        axes["v_head_dim"] = w.value_dim
    return axes


def select_implementations(
    choice: Selection, framework: str | None = None, steps: Collection[str] = ("",)
) -> tuple[str, ...]:
    """Return names and references to run: those asked for and their rivals; if none was asked for, all (of the
    framework) that compute one of the steps."""
    known = registry.names()
    asked = [name for one in choice.impl for name in expand(one, known)]
    rivals = [name for one in choice.against for name in expand(one, known)]
    only_functions = bool(asked) and all(registry.is_reference(name) for name in asked)
    if not rivals and (not asked or only_functions):
        swept = swept_names(steps)
        rivals = swept if asked else of_framework(framework, swept)
    return tuple(dict.fromkeys([*asked, *rivals]))


def of_framework(framework: str | None, names: Sequence[str]) -> list[str]:
    """Return the names of one framework, all if it is None; raises UnknownName if there are none."""
    found = [name for name in names if framework is None or name.startswith(f"{framework}.")]
    if framework is not None and not found:
        known = {name.partition(".")[0] for name in registry.names()}
        raise UnknownName("framework", framework, known, "attnbench doctor")
    return found


def loadable_names() -> list[str]:
    """Return every name that loads; a warning on stderr names the others."""
    good, broken = registry.loadable()
    for reason in broken.values():
        warn(reason)
    return good


def swept_names(steps: Collection[str] = ("",)) -> list[str]:
    """Return the names that a sweep over everything takes: not those by name only, nor those of another step."""
    known = [registry.get(name) for name in loadable_names()]
    return [one.name for one in known if not one.by_name_only and one.step in steps]


def expand(wanted: str, known: Sequence[str]) -> list[str]:
    """Return the names a word means: an exact name (settings in brackets), a reference, a framework or a family."""
    if registry.is_reference(wanted) or wanted.partition("[")[0] in known:
        return [wanted]
    found = [name for name in known if matches(name, wanted)]
    if not found:
        raise UnknownName("implementation", wanted, known, "attnbench list implementations")
    return found


def filter_words(
    words: str, workloads: Sequence[Workload], implementations: Sequence[str]
) -> tuple[tuple[Workload, ...], tuple[str, ...]]:
    """Keep what `-k "sdpa causal"` names: each word narrows the implementations, the workloads, or both."""
    for word in words.split():
        names = [name for name in implementations if word in name]
        shapes = [w for w in workloads if word in w.id]
        if not names and not shapes:
            raise UsageError(
                f'-k "{word}" matches neither an implementation name nor a workload id: see `attnbench run --list`.'
            )
        implementations, workloads = names or implementations, shapes or workloads
    return tuple(workloads), tuple(implementations)


def spell_workload(workload: Workload) -> list[str] | None:
    """Return the options that make exactly this workload; None if there are none (a mask that is an array)."""
    # The id of a mask, such as window128:0-topleft, is window:128:0:top-left as an option.
    sized = re.sub(r"(^|&)(window|prefix|dilated)(?=\d|all)", r"\1\2:", workload.visible_mask.id)
    mask = sized.replace("-topleft", ":top-left").replace("-group", ":group")
    heads = f"{workload.heads}" if workload.heads == workload.kv_heads else f"{workload.heads}:{workload.kv_heads}"
    shape = ShapeOptions(
        seq_len=(workload.q_len,),
        kv_len=(workload.kv_len,) if workload.kv_len != workload.q_len else (),
        batch=(workload.batch,),
        heads=(heads,),
        head_dim=(workload.head_dim,),
        v_head_dim=(workload.value_dim,) if workload.value_dim != workload.head_dim else (),
        dtype=(workload.dtype,),
        mask=(mask,),
        pass_=(workload.pass_,),
        scale=() if workload.scale is None else (workload.scale,),
        softcap=() if workload.softcap is None else (workload.softcap,),
    )
    try:
        _, made = select_workloads(None, False, shape, Selection())
    except UsageError:
        return None
    return spell(shape) if [one.id for one in made] == [workload.id] else None


def spell(shape: ShapeOptions) -> list[str]:
    """Return the options as words again, for a command that we suggest."""
    words: list[str] = []
    for one in fields(shape):
        value = getattr(shape, one.name)
        if value:
            words.append(f"--{one.name.rstrip('_').replace('_', '-')}")
            words += [] if value is True else [str(item) for item in value]
    return words
