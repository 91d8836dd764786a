"""torch's autocast, by the name that the hooks of models import."""

from attnbench.frameworks.torch_autocast import under_autocast, without_autocast

__all__ = ["under_autocast", "without_autocast"]
