"""The step `gemma-stack` by `attnbench.models.gemma`: openpi's einsum attention, or a flash one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from attnbench.spec import Array, Config, Environment, Workload
from attnbench.steps.jax_models import JaxModelStep
from attnbench.steps.jax_trees import ONE, model_tree, products_of
from attnbench.workloads.steps import GEMMA_DEPTH, gemma_width


class JaxGemmaStack(JaxModelStep):
    """Blocks in a scan, each recomputed in the backward pass."""

    untested = ("cuda", "rocm", "tpu")

    def supports(self, workload: Workload, environment: Environment) -> str | None:
        """Causal or full self-attention."""
        return unsupported(workload)

    def state(self, workload: Workload, config: Config, arrays: Mapping[str, Array]) -> Any:
        """(openpi's tree, x, the cotangent)"""
        return model_tree(arrays, ONE), arrays["x"], arrays["dout"]

    def function(self, workload: Workload, config: Config) -> Callable[[Any], tuple[Array, ...]]:
        """One pass of the stack."""
        import jax
        import jax.numpy as jnp

        from attnbench.models import gemma
        from attnbench.models.masks import known

        width = gemma_width(workload)
        sizes = gemma.Config(width, GEMMA_DEPTH, 8 * width, workload.heads, workload.kv_heads, workload.head_dim)
        model: Any = gemma.Module([sizes], workload.dtype, **self.path(config))
        mask = known(workload.visible_mask, workload.q_len)

        def forward(tree: Any, x: Array) -> Array:
            positions = jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape[:2])
            return model.apply({"params": tree}, [x], positions, mask)[0][0]

        def run(state: Any) -> tuple[Array, ...]:
            tree, x, dout = state
            if not workload.needs_gradients:
                return (forward(tree, x),)
            out, pull_back = jax.vjp(forward, tree, x)
            d_tree, dx = pull_back(dout)
            gradients = (dx, *products_of(d_tree["layers"], ONE))
            return gradients if workload.pass_ == "backward" else (out, *gradients)

        return run


def unsupported(workload: Workload) -> str | None:
    """Why a stack cannot be made of this workload."""
    if workload.q_len != workload.kv_len or workload.value_dim != workload.head_dim:
        return "takes self-attention with values as wide as keys"
    if workload.visible_mask.kinds not in (("causal",), ("full",)) or workload.softcap or workload.scale is not None:
        return "takes a causal or full mask, the usual scale and no softcap"
    return None if workload.kv_heads < workload.heads else "takes grouped heads, as Gemma has them"


STANDARD = JaxGemmaStack("gemma-stack", flash=False)
FLASH = JaxGemmaStack("gemma-stack", flash=True)
