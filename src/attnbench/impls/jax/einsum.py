"""jax.einsum: grouped einsum as openpi's Gemma does it, float32 logits and softmax, probabilities in the input dtype.

Unlike openpi's, a row that sees no key is 0 and not the mean of V. Stores the T x S scores.
"""

from __future__ import annotations

from attnbench.frameworks.jax.plain import plain_call
from attnbench.spec import Call, Config, Environment, Implementation, Partial, Workload


class Einsum(Implementation):
    """Grouped einsum as in openpi's Gemma: any mask and dtype on any device; stores all scores."""

    name = "jax.einsum"
    framework = "jax"
    lse_gradient = True
    materialises_scores = True
    untested = ("rocm", "tpu")

    def supports(self, workload: Workload, environment: Environment) -> str | None:
        return None

    def build(self, workload: Workload, config: Config) -> Call:
        return plain_call(workload)

    def build_lse(self, workload: Workload, config: Config) -> Call:
        return plain_call(workload, with_lse=True)

    def partial(self, workload: Workload, config: Config) -> Partial | None:
        from attnbench.impls.partial.jax_passes import plain_passes

        return plain_passes(workload)


EINSUM = Einsum()
