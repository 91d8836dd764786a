"""pi0's steps by `attnbench.models`: what they share, and the attention and the block of two experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from attnbench.spec import Array, Config, Environment, Workload
from attnbench.steps.gemma_weights import EXPERTS
from attnbench.steps.jax_models import JaxModelStep
from attnbench.steps.jax_trees import attention_tree, block_tree, products_of, projections_of
from attnbench.steps.pi0_support import unsupported
from attnbench.workloads.pi0_sizes import depth, experts, parts

if TYPE_CHECKING:
    from attnbench.models.gemma_config import Config as Sizes


class JaxPi0(JaxModelStep):
    """One of pi0's or pi0-FAST's steps."""

    def supports(self, workload: Workload, environment: Environment) -> str | None:
        """The form of mask that the step has in openpi."""
        return unsupported(workload)


def sizes(w: Workload) -> list[Sizes]:
    """Both experts as the models take them."""
    from attnbench.models.gemma_config import Config as Sizes

    return [Sizes(one.width, depth(w), one.wide, w.heads, w.kv_heads, w.head_dim) for one in experts(w)]


class JaxPi0Attention(JaxPi0):
    """`gemma.Attention`; of a block, `gemma.Block`."""

    def state(self, workload: Workload, config: Config, arrays: Mapping[str, Array]) -> Any:
        """(openpi's tree, tokens of each expert, their cotangents)"""
        tree = attention_tree if self.step == "pi0-attention" else block_tree
        xs, douts = ([arrays[f"{name}{end}"] for end in EXPERTS] for name in ("x", "dout"))
        return tree(arrays, EXPERTS), xs, douts

    def function(self, workload: Workload, config: Config) -> Callable[[Any], tuple[Array, ...]]:
        """One pass of the module."""
        import jax
        import jax.numpy as jnp

        from attnbench.models import gemma
        from attnbench.models.masks import in_blocks

        alone = self.step == "pi0-attention"
        module: Any = (gemma.Attention if alone else gemma.Block)(configs=sizes(workload), **self.path(config))
        products = projections_of if alone else products_of
        mask = in_blocks(parts(workload))

        def forward(tree: Any, xs: Any) -> Any:
            positions = jnp.broadcast_to(jnp.arange(workload.q_len), (workload.batch, workload.q_len))
            given = (xs, positions, mask, None) if alone else (xs, None, positions, mask, [None, None])
            return module.apply({"params": tree}, *given)[0]

        def run(state: Any) -> tuple[Array, ...]:
            tree, xs, douts = state
            if not workload.needs_gradients:
                return tuple(forward(tree, xs))
            outs, pull_back = jax.vjp(forward, tree, xs)
            d_tree, dxs = pull_back(douts)
            return (*outs, *dxs, *products(d_tree, EXPERTS))

        return run


ATTENTION, ATTENTION_FLASH = (JaxPi0Attention("pi0-attention", flash) for flash in (False, True))
BLOCK, BLOCK_FLASH = (JaxPi0Attention("pi0-block", flash) for flash in (False, True))
