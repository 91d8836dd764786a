"""Where a section was measured, as lines of a table."""

from __future__ import annotations

from attnbench.report.html.sections import Section
from attnbench.report.units import size
from attnbench.spec import Environment

Facts = list[tuple[str, list[str]]]


def environment_facts(section: Section) -> Facts:
    """Name of a fact -> its value in each framework's environment; facts that nobody knows are left out."""
    told = [_facts(environment) for environment in section.environments.values()]
    names = dict.fromkeys(name for facts in told for name in facts)
    rows = [(name, [facts.get(name, "") for facts in told]) for name in names]
    return [(name, values) for name, values in rows if any(values)]


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
