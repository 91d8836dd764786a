"""A user's implementation as it was when its worker first looked at it.

What an implementation declares decides how it is checked and whether it is ranked, so that it must not change between
the check and the record, nor may a clock that it brings decide how fast it is.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from attnbench.frameworks.base import Untrusted
from attnbench.spec import Array, Call, Config, Environment, Implementation, Partial, Pass, Passes, Workload
from attnbench.steps import StepImplementation

DECLARED = (
    "name", "framework", "layout", "approximate", "declared_error", "declared_recall", "verify_only", "by_name_only",
    "materialises_scores", "step", "process", "expects", "forbids", "untested", "traceable", "any_kv_len",
    "lse_gradient", "tunables", "every_config", "compiles_each_plan", "not_deterministic", "switches",
)  # fmt: skip
PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"


class Frozen(Implementation):
    """Declares what another implementation declared once, and leaves the work to it."""

    def __init__(self, inner: Implementation) -> None:
        self._inner = inner
        for name in DECLARED:
            setattr(self, name, getattr(inner, name))

    def available(self, environment: Environment) -> str | None:
        """As the implementation says."""
        return self._inner.available(environment)

    def supports(self, workload: Workload, environment: Environment) -> str | None:
        """As the implementation says."""
        return self._inner.supports(workload, environment)

    def configs(self, workload: Workload) -> Sequence[Config]:
        """As the implementation says."""
        return self._inner.configs(workload)

    def configs_here(self, workload: Workload, environment: Environment) -> Sequence[Config]:
        """As the implementation says."""
        return self._inner.configs_here(workload, environment)

    def configured(self, config: Config) -> Implementation:
        """Return the implementation as set to `config`, frozen too; itself if settings change nothing."""
        found = self._inner.configured(config)
        return self if found is self._inner else frozen(found)

    def proofs(self, pass_: Pass) -> tuple[tuple[str, ...], ...]:
        """As the implementation says."""
        return self._inner.proofs(pass_)

    def build(self, workload: Workload, config: Config) -> Call:
        """Build the implementation's call."""
        return self._inner.build(workload, config)

    def build_lse(self, workload: Workload, config: Config) -> Call | None:
        """Build the implementation's call that returns the LSE too."""
        return self._inner.build_lse(workload, config)

    def partial(self, workload: Workload, config: Config) -> Partial | None:
        """As the implementation has it."""
        return self._inner.partial(workload, config)

    def passes(self, workload: Workload, config: Config) -> Passes:
        """As the implementation has them."""
        return self._inner.passes(workload, config)

    def quality(self, workload: Workload, config: Config) -> Callable[[Array, Array, Array], dict[str, float]] | None:
        """As the implementation says."""
        return self._inner.quality(workload, config)

    def apparatus(self, framework: Any, config: Config) -> Any:
        """Return attnbench's own way to time calls; raises Untrusted if the implementation brings another."""
        found = self._inner.apparatus
        code = getattr(getattr(found, "__func__", found), "__code__", None)
        if code is None or not code.co_filename.startswith(PACKAGE):
            raise Untrusted(f"{self.name} times itself (apparatus): only attnbench's own implementations may")
        return found(framework, config)


class FrozenStep(Frozen, StepImplementation):
    """The same of an implementation of a step."""

    _inner: StepImplementation

    def state(self, workload: Workload, config: Config, arrays: Mapping[str, Array]) -> Any:
        """Make the implementation's weights and inputs."""
        return self._inner.state(workload, config, arrays)

    def function(self, workload: Workload, config: Config) -> Callable[[Any], tuple[Array, ...]]:
        """Build the implementation's step."""
        return self._inner.function(workload, config)


def frozen(implementation: Implementation) -> Implementation:
    """Return an implementation whose declarations no longer change; reads each of them once."""
    return FrozenStep(implementation) if isinstance(implementation, StepImplementation) else Frozen(implementation)
