"""What the steps of `attnbench.models` in JAX share: openpi's einsum attention or a flash one, and what they need."""

from __future__ import annotations

import importlib.util
from typing import Any, Self

from attnbench.models.gemma_config import check_flash_choice
from attnbench.spec import Config, Environment
from attnbench.steps.base import StepImplementation


class JaxModelStep(StepImplementation):
    """`jax.STEP` by the einsum, `jax.STEP-flash[impl=auto]` by a flash path."""

    framework = "jax"
    untested = ("rocm", "tpu")

    def __init__(self, step: str, flash: bool) -> None:
        self.name, self.step = f"jax.{step}{'-flash' if flash else ''}", step
        self._flash, self.materialises_scores = flash, not flash
        self.tunables = {"impl": "auto"} if flash else {}

    def configured(self, config: Config) -> Self:
        """Itself; raises for a flash path that is none."""
        check_flash_choice(config.get("impl", "auto"))
        return self

    def available(self, environment: Environment) -> str | None:
        """The models need flax, their reference torch."""
        missing = [name for name in ("flax", "torch") if importlib.util.find_spec(name) is None]
        return f'needs {" and ".join(missing)}: pip install "attnbench[models,torch]"' if missing else None

    def path(self, config: Config) -> dict[str, Any]:
        """The models' fields that choose the attention."""
        if not self._flash:
            return {}
        return {"use_flash_attention": True, "flash_attention_impl": str(config.get("impl", "auto"))}
