"""Whether two runs come from machines alike enough for their times to be compared at all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from attnbench.errors import UsageError
from attnbench.spec import Environment


def check_comparable(environments_a: Iterable[Environment], environments_b: Iterable[Environment]) -> None:
    """Refuse runs of different hard keys, naming what differs; environments of one framework are held together."""
    baseline = list(environments_a)
    for current in environments_b:
        alike = [one for one in baseline if one.framework == current.framework]
        found = min((differences(one, current) for one in alike), key=len, default=[])
        if found:
            raise UsageError(
                f"the two runs are not comparable: {'; '.join(found)}. Measure both on one machine with the same "
                "packages, or make a new baseline here with `attnbench baseline save RUN`."
            )


def differences(a: Environment, b: Environment) -> list[str]:
    """Fields of the hard key in which b, the current one, is not what a was, each with both values."""
    old, new = a.hard_key, b.hard_key
    told = [
        f"{name} is {_shown(old[name])} in the baseline and {_shown(new[name])} in the current run"
        for name in old
        if name != "packages" and old[name] != new[name]
    ]
    return told + _package_differences(a.packages, b.packages)


def _package_differences(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    return [
        f"package {name} is {old.get(name, 'absent')} in the baseline and {new.get(name, 'absent')} in the current run"
        for name in sorted({*old, *new})
        if old.get(name) != new.get(name)
    ]


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return ".".join(str(part) for part in value)
    return "unknown" if value in ("", None) else str(value)
