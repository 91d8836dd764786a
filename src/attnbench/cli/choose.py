"""`attnbench choose`: runs -> a policy file."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Annotated

from cyclopts import Group, Parameter

from attnbench import registry
from attnbench.choosing import choose as choosing
from attnbench.choosing.choose import Chosen, environment_of, policy_loss
from attnbench.choosing.text import closing, document, judgement, judgement_document, print_losses, print_policy
from attnbench.cli.options import NOTHING, Json, Names, Runs, read_together
from attnbench.cli.output import note, print_json, say, stdout_console, warn
from attnbench.errors import UsageError
from attnbench.files import refuse_run_file
from attnbench.policy import Constraints, load_policy, read_policy, save_policy
from attnbench.results.run_file import NamedRun

SIZE = re.compile(r"([\d.]+)\s*([kMGT]?i?B?)", re.IGNORECASE)
UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
WITHIN = Group("What may be chosen")
Output = Annotated[Path | None, Parameter(name=["--output", "-o"], help="The policy file; without it none is written.")]


@Parameter(name="*", group=WITHIN)
@dataclass(frozen=True, kw_only=True)
class Within:
    """Constraints on the choice."""

    max_memory: Annotated[str | None, Parameter(help="Most extra memory of a call, such as 2GB or 512MiB.")] = None
    deterministic: Annotated[
        bool, Parameter(negative="", help="Only implementations that give the same bits in every call.")
    ] = False
    max_error: Annotated[
        float | None, Parameter(help="Largest relative error against float64, of output and gradients.")
    ] = None
    only: Annotated[
        Names,
        Parameter(help="Only these: names with their variants (torch.sdpa is torch.sdpa-flash too), or a framework."),
    ] = ()
    forbid: Annotated[
        Names,
        Parameter(help="Never these: names with their variants (torch.sdpa is torch.sdpa-flash too), or a framework."),
    ] = ()


def choose(
    *runs: Runs,
    output: Output = None,
    judge: Annotated[
        Path | None, Parameter(help="Only evaluate this policy file on the runs, and print its regret.")
    ] = None,
    within: Within = Within(),  # noqa: B008 (frozen)
    json: Json = False,
) -> int:
    """Choose an implementation for every measured shape: the fastest, near ties by a rule that reruns agree on.

    `ab.attention(impl="auto")` asks the file when the setting `policy` (ATTNBENCH_POLICY) or `ab.use_policy` names it.

    Examples: `attnbench choose latest -o policy.json` · `attnbench choose RUN --deterministic --forbid torch.eager`
    """
    constraints = read_constraints(within)
    if judge is not None and output is not None:
        raise UsageError("--judge only evaluates a policy; it cannot be combined with -o.")
    chosen = choose_from(read_sources(runs or ("latest",)), constraints)
    if judge is not None:
        return _judge(judge, chosen, json)
    before = describe_replaced(output)
    code = write(chosen, output)
    if json:
        print_json(document(chosen, output if code == 0 else None))
        return code
    print_chosen(chosen)
    if output is not None and code == 0:
        note(f"wrote {output}{before}")
    return code


def choose_from(sources: Sequence[NamedRun], constraints: Constraints) -> Chosen:
    """Choose from runs, leaving out implementations that the registry offers by name only."""
    names = {record.implementation for source in sources for record in source.run.records}
    loadable, _ = registry.loadable()
    reasons = {name: registry.get(name).by_name_only for name in loadable if name in names}
    refused = {name: f"by name only: {why}" for name, why in reasons.items() if why}
    return choosing.choose(sources, constraints, refused, registry.names())


def describe_replaced(output: Path | None) -> str:
    """Return words about the file that a new policy replaces, empty if none; raises UsageError for a run file."""
    if output is None or not output.is_file():
        return ""
    refuse_run_file(output)
    try:
        count = len(read_policy(output.read_bytes(), str(output)).entries)
    except (OSError, UsageError):
        return ", replacing a file that was not a policy"
    return f", replacing a policy of {count} entr{'y' if count == 1 else 'ies'}"


def write(chosen: Chosen, output: Path | None) -> int:
    """Write the policy if it has entries, and return the exit code."""
    if not chosen.policy.entries:
        return NOTHING
    if output is not None:
        save_policy(chosen.policy, output)
    return 0


def _judge(path: Path, chosen: Chosen, json: bool) -> int:
    """Print what the policy of a file loses on the shapes of the runs; return the exit code."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        policy = load_policy(path)
    for one in caught:
        warn(one.message)
    stale = {ground.place.key: policy.stale(environment_of(ground)) for ground in chosen.grounds}
    grounds = [ground for ground in chosen.grounds if stale[ground.place.key] is None]
    for why in dict.fromkeys(why for why in stale.values() if why is not None):
        note(f"not evaluated: {why}")
    found = [(ground, policy_loss(policy, ground)) for ground in grounds]
    if json:
        print_json(judgement_document(policy, found, chosen.setbacks))
    else:
        console = stdout_console()
        for ground, loss in found:
            print_losses(console, ground, [loss])
        console.print()
        say(judgement(policy, [one for _, one in found], chosen.setbacks))
    return 0 if any(loss.regret is not None for _, loss in found) else NOTHING


def print_chosen(chosen: Chosen) -> None:
    """Print the tables and the closing sentence on stdout."""
    console = stdout_console()
    print_policy(console, chosen.policy, chosen.unchosen)
    for ground in chosen.grounds:
        if len(ground.standings) > 1:
            print_losses(console, ground)
    console.print()
    say(closing(chosen))


def read_constraints(within: Within) -> Constraints:
    """Check the options and return the constraints that they make."""
    if within.max_error is not None and not (within.max_error > 0 and isfinite(within.max_error)):
        raise UsageError(f"--max-error must be more than 0 and finite, not {within.max_error:g}.")
    return Constraints(
        max_memory=None if within.max_memory is None else read_size(within.max_memory),
        deterministic=within.deterministic,
        max_error=within.max_error,
        only=within.only,
        forbid=within.forbid,
    )


def read_size(text: str) -> int:
    """Convert a size such as 2GB, 512MiB or 1000000 to bytes."""
    found = SIZE.fullmatch(text.strip())
    try:
        size = float(found[1]) * UNITS[found[2].lower().removesuffix("b")] if found else 0.0
    except (KeyError, ValueError):
        size = 0.0
    if not 1 <= size < 2**63:
        raise UsageError(f'--max-memory takes a size such as 2GB or 512MiB, not "{text}".')
    return int(size)


def read_sources(names: Sequence[str]) -> list[NamedRun]:
    """Read every run named, each once."""
    found = [NamedRun(path.name, run) for path, run in read_together(names).items()]
    if not any(source.run.records for source in found):
        raise UsageError(f"{', '.join(source.name for source in found)}: no records to choose from.")
    return found
