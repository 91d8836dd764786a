"""Where a section was measured, as lines of a table."""

from __future__ import annotations

from collections.abc import Iterable

from attnbench.report.html.sections import Section
from attnbench.report.units import size
from attnbench.spec import Environment

Facts = list[tuple[str, list[str]]]
MOST_VALUES = 4


def environment_facts(section: Section) -> Facts:
    """Name of a fact -> its values in each framework's environments; facts that nobody knows are left out.

    Environments of one section have the same machine and packages; clocks, variables and commits may differ.
    """
    seen: dict[str, list[Environment]] = {name: [one] for name, one in section.environments.items()}
    for one in {id(record.environment): record.environment for record in section.records}.values():
        if one is not None and one not in seen.setdefault(one.framework, []):
            seen[one.framework].append(one)
    told = [[_facts(environment) for environment in environments] for environments in seen.values()]
    names = dict.fromkeys(name for group in told for facts in group for name in facts)
    rows = [(name, [_joined(facts.get(name, "") for facts in group) for group in told]) for name in names]
    return [(name, values) for name, values in rows if any(values)]


def _joined(values: Iterable[str]) -> str:
    each = list(dict.fromkeys(value for value in values if value))
    left = len(each) - MOST_VALUES
    return " | ".join(each if left <= 0 else [*each[:MOST_VALUES], f"and {left} more"])


def _facts(environment: Environment) -> dict[str, str]:
    packages = [f"{name} {version}" for name, version in sorted(environment.packages.items())]
    libraries = [
        f"{library.name} {library.version}".strip() + (" (hides another)" if library.shadowed else "")
        for library in environment.libraries
    ]
    soft = [f"{name} {value:g}" for name, value in environment.clocks.items()]
    variables = [f"{name}={value}" for name, value in environment.variables.items()]
    return {
        "framework": environment.framework,
        "device": f"{environment.device_name} ({environment.device})",
        "memory": size(environment.memory_bytes) if environment.memory_bytes else "",
        "driver": environment.driver,
        "CPU": f"{environment.cpu}, {environment.cores} cores, {environment.threads} threads"
        if environment.cpu
        else "",
        "system": environment.system,
        "Python": environment.python,
        "packages": ", ".join(packages),
        "libraries loaded": ", ".join(libraries),
        "at the start": ", ".join(soft),
        "variables": ", ".join(variables),
        "attnbench": f"{environment.harness} {environment.commit}".strip(),
        "fingerprint": environment.fingerprint,
    }
