"""`attnbench doctor`: where we are, which libraries are really loaded, and what can run, or why not."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from attnbench.report import units
from attnbench.run.environment import Diagnosis, ImplementationState
from attnbench.spec import Environment


def print_diagnosis(console: Console, diagnosis: Diagnosis) -> None:
    """Environments, then implementations, then one sentence."""
    for framework, environment in diagnosis.environments.items():
        print_environment(console, framework, environment)
    for framework, reason in diagnosis.frameworks.items():
        if reason is not None:
            console.print(f"[bold]{framework}[/bold]  [red]not usable[/red]: {escape(reason)}", highlight=False)
    console.print()
    console.print(implementation_table(diagnosis.implementations))
    console.print()
    console.print(verdict(diagnosis.implementations), highlight=False, markup=False)


def print_environment(console: Console, framework: str, environment: Environment) -> None:
    """Device, memory, versions and libraries as one framework sees them."""
    console.print(
        f"[bold]{framework}[/bold]  {escape(f'{environment.device_name} ({environment.device})')}", highlight=False
    )
    for name, value in environment_facts(environment):
        console.print(f"  [dim]{name:12}[/dim] {escape(value)}", highlight=False)


def environment_facts(environment: Environment) -> list[tuple[str, str]]:
    """Name and text of every fact that is known."""
    memory = units.size(environment.memory_bytes)
    free = f", {units.size(environment.free_bytes)} free" if environment.free_bytes is not None else ""
    capability = ".".join(map(str, environment.capability)) if environment.capability else ""
    cores = f"{environment.cores} cores, {environment.threads} threads used" if environment.cores else ""
    facts = [
        ("memory", memory + free if environment.memory_bytes is not None else ""),
        ("capability", capability),
        ("cpu", ", ".join(part for part in (environment.cpu, cores) if part)),
        ("system", ", ".join(part for part in (environment.system, f"Python {environment.python}") if part)),
        ("driver", environment.driver),
        ("packages", ", ".join(f"{name} {version}" for name, version in sorted(environment.packages.items()))),
        ("clocks", ", ".join(f"{name} {value:g}" for name, value in environment.clocks.items())),
        ("variables", ", ".join(f"{name}={value}" for name, value in environment.variables.items())),
    ]
    for library in environment.libraries:
        hidden = f"; hides {', '.join(library.shadowed)}" if library.shadowed else ""
        facts.append(("loaded", f"{library.name} {library.version} from {library.path}{hidden}"))
    return [(name, value) for name, value in facts if value]


def implementation_table(states: Sequence[ImplementationState]) -> Table:
    """One row each: can it run here, and if not, why and what would help."""
    table = Table(box=None, header_style="bold", pad_edge=True)
    for heading in ("implementation", "runs here"):
        table.add_column(heading, no_wrap=True)
    table.add_column("why not, or what to know", overflow="fold")
    for state in states:
        table.add_row(escape(state.name), _answer(state), escape(remark(state)))
    return table


def _answer(state: ImplementationState) -> str:
    if state.reason is not None:
        return "[red]no[/red]"
    return "[green]yes[/green]" if state.timed else "[yellow]verify only[/yellow]"


def remark(state: ImplementationState) -> str:
    """The reason it cannot run, and whatever else a reader should know about it."""
    parts = [state.reason or "", state.note]
    if state.approximate:
        parts.append("approximate: has an error of its own, never ranked among exact ones")
    if state.untested:
        parts.append(f"untested on {', '.join(state.untested)}")
    if state.origin not in ("", "attnbench"):
        parts.append(f"from {state.origin}")
    return "; ".join(part for part in parts if part)


def verdict(states: Sequence[ImplementationState]) -> str:
    """The count, last, because it is the answer."""
    able = [state for state in states if state.reason is None]
    frameworks = sorted({state.framework for state in able})
    if not able:
        return "No implementation can run here: install a framework, pip install 'attnbench[torch,jax]'."
    return (
        f"{len(able)} of {len(states)} implementations run here ({', '.join(frameworks)}). Next: attnbench run --quick"
    )
