"""Environments in words: one line, the facts of `attnbench doctor`, and the table of the page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from attnbench.report import units
from attnbench.results.sentences import capped
from attnbench.run.environment import Diagnosis, ImplementationState
from attnbench.spec import Environment, Record

Facts = list[tuple[str, list[str]]]
MOST_VALUES = 4


def environment_line(environment: Environment) -> str:
    """Return device, framework, threads and fingerprint of an environment in one line."""
    framework = f"{environment.framework} {environment.packages.get(environment.framework, '')}".strip()
    threads = f"{environment.threads} threads" if environment.threads else ""
    facts = [environment.device_name, framework, threads, f"fingerprint {environment.fingerprint}"]
    return " · ".join(fact for fact in facts if fact)


def print_diagnosis(console: Console, diagnosis: Diagnosis) -> None:
    """Print the environments, then whether each implementation runs here and if not, why, then one sentence."""
    for framework, environment in diagnosis.environments.items():
        where = escape(f"{environment.device_name} ({environment.device})")
        console.print(f"[bold]{framework}[/bold]  {where}")
        for name, value in environment_facts(environment):
            console.print(f"  [dim]{name:12}[/dim] {escape(value)}")
    for framework, reason in diagnosis.frameworks.items():
        if reason is not None:
            console.print(f"[bold]{framework}[/bold]  [red]not usable[/red]: {escape(reason)}")
    table = Table(box=None, header_style="bold", pad_edge=True)
    for heading in ("implementation", "runs here"):
        table.add_column(heading, no_wrap=True)
    table.add_column("why not, or what to know", overflow="fold")
    for state in diagnosis.implementations:
        runs = "[green]yes[/green]" if state.timed else "[yellow]verify only[/yellow]"
        answer = runs if state.reason is None else "[red]no[/red]"
        table.add_row(escape(state.name), answer, escape(remark(state)))
    console.print()
    console.print(table)
    console.print()
    console.print(diagnosis_verdict(diagnosis.implementations), markup=False)


def environment_facts(environment: Environment) -> list[tuple[str, str]]:
    """Return name and text of every fact of an environment that is known."""
    memory = units.size(environment.memory_bytes)
    free = f", {units.size(environment.free_bytes)} free" if environment.free_bytes is not None else ""
    cores = f"{environment.cores} cores, {environment.threads} threads used" if environment.cores else ""
    facts = [
        ("memory", memory + free if environment.memory_bytes is not None else ""),
        ("capability", ".".join(map(str, environment.capability or ()))),
        ("cpu", ", ".join(part for part in (environment.cpu, cores) if part)),
        ("system", ", ".join(part for part in (environment.system, f"Python {environment.python}") if part)),
        ("driver", environment.driver),
        ("packages", _listed(dict(sorted(environment.packages.items())))),
        ("clocks", _listed({name: f"{value:g}" for name, value in environment.clocks.items()})),
        ("variables", _listed(environment.variables, "=")),
    ]
    for library in environment.libraries:
        hidden = f"; hides {', '.join(library.shadowed)}" if library.shadowed else ""
        facts.append(("loaded", f"{library.name} {library.version} from {library.path}{hidden}"))
    return [(name, value) for name, value in facts if value]


def _listed(values: Mapping[str, object], between: str = " ") -> str:
    return ", ".join(f"{name}{between}{value}" for name, value in values.items())


def remark(state: ImplementationState) -> str:
    """Return the reason an implementation cannot run, and everything else that a reader should know about it."""
    parts = [state.reason or "", state.note]
    if state.approximate:
        parts.append("approximate: inexact by design, never ranked among exact ones")
    if state.untested:
        parts.append(f"untested on {', '.join(state.untested)}")
    if state.origin not in ("", "attnbench"):
        parts.append(f"from {state.origin}")
    return "; ".join(part for part in parts if part)


def diagnosis_verdict(states: Sequence[ImplementationState]) -> str:
    """Return how many implementations run here, and the next command to try."""
    able = [state for state in states if state.reason is None]
    frameworks = sorted({state.framework for state in able})
    if not able:
        return "No implementation can run here: install a framework, pip install 'attnbench[torch,jax]'."
    return (
        f"{len(able)} of {len(states)} implementations run here ({', '.join(frameworks)}). Next: attnbench run --quick"
    )


def section_facts(environments: dict[str, Environment], records: Iterable[Record]) -> Facts:
    """Return name of a fact -> its values in each framework's environments, without facts that are not known. The
    environments of one section have the same machine and packages; clocks, variables and commits may differ."""
    known: dict[str, list[Environment]] = {name: [one] for name, one in environments.items()}
    for one in {id(record.environment): record.environment for record in records}.values():
        if one is not None and one not in known.setdefault(one.framework, []):
            known[one.framework].append(one)
    facts_of = [[_page_facts(environment) for environment in group] for group in known.values()]
    names = dict.fromkeys(name for group in facts_of for facts in group for name in facts)

    def joined(values: Iterable[str]) -> str:
        return " | ".join(capped(list(dict.fromkeys(filter(None, values))), MOST_VALUES))

    rows = [(name, [joined(facts.get(name, "") for facts in group) for group in facts_of]) for name in names]
    return [(name, values) for name, values in rows if any(values)]


def _page_facts(environment: Environment) -> dict[str, str]:
    libraries = [
        f"{library.name} {library.version}".strip() + (" (hides another)" if library.shadowed else "")
        for library in environment.libraries
    ]
    cpu = f"{environment.cpu}, {environment.cores} cores, {environment.threads} threads"
    return {
        "framework": environment.framework,
        "device": f"{environment.device_name} ({environment.device})",
        "memory": units.size(environment.memory_bytes) if environment.memory_bytes else "",
        "driver": environment.driver,
        "CPU": cpu if environment.cpu else "",
        "system": environment.system,
        "Python": environment.python,
        "packages": _listed(dict(sorted(environment.packages.items()))),
        "libraries loaded": ", ".join(libraries),
        "at the start": _listed({name: f"{value:g}" for name, value in environment.clocks.items()}),
        "variables": _listed(environment.variables, "="),
        "attnbench": f"{environment.harness} {environment.commit}".strip(),
        "fingerprint": environment.fingerprint,
    }
