"""jax.pair: the forward pass of one library followed by the backward pass of another, as one custom_vjp.

Few libraries expose both passes in JAX: cuDNN through JAX's private module, plain passes, tokamax's Mosaic kernel the
forward pass only; anything that returns an exact LSE can be the forward pass. See docs/pairs.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

from attnbench import frameworks
from attnbench.frameworks.jax.plain import kind_of_device
from attnbench.impls._pairing import Pairing, Role
from attnbench.spec import Array, Call, Config, Environment, Implementation, Workload

FORWARDS = ("jax.tokamax-mosaic", "jax.cudnn", "jax.xla", "jax.einsum")
BACKWARDS = ("jax.cudnn", "jax.einsum")
SWAP = (0, 2, 1, 3)


class JaxPair(Pairing):
    """Forward pass of one JAX library, backward of another: `[forward=jax.tokamax-mosaic,backward=jax.cudnn]`; by
    default the first that run."""

    name = "jax.pair"
    framework = "jax"

    def order(self, role: Role, workload: Workload) -> Sequence[str]:
        del workload
        return FORWARDS if role == "forward" else BACKWARDS

    def lse_call(self, part: Implementation, workload: Workload) -> Callable[..., tuple[Array, Array]] | None:
        call = part.build_lse(workload, {})
        if call is None or part.layout == "bshd":
            return call

        def forward(q: Array, k: Array, v: Array) -> tuple[Array, Array]:
            out, lse = call(*(x.transpose(SWAP) for x in (q, k, v)))
            return out.transpose(SWAP), lse

        return forward

    def build(self, workload: Workload, config: Config) -> Call:
        return self._call(workload, config, with_lse=False)

    def build_lse(self, workload: Workload, config: Config) -> Call:
        call = self._call(workload, config, with_lse=True)

        def with_lse(q: Array, k: Array, v: Array) -> tuple[Array, Array]:
            out, lse = call(q, k, v)
            return out, lse.astype("float32")

        return with_lse

    def _call(self, workload: Workload, config: Config, with_lse: bool) -> Call:
        from attnbench.impls.partial.jax_passes import differentiable

        pair = self.configured(config)
        calls = lru_cache(lambda device: differentiable(pair.chosen(workload, environment_of(device)), with_lse))
        return lambda q, k, v: calls(kind_of_device(q))(q, k, v)


@lru_cache(maxsize=8)
def environment_of(device: str) -> Environment:
    """Return facts about a device, cached."""
    return frameworks.get("jax").environment(device)


PAIR = JaxPair()
