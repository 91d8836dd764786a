"""The steps `pi0-model` and `pi0-sampler` by `attnbench.models.pi0`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from attnbench.spec import Array, Config, Workload
from attnbench.steps.gemma_weights import EXPERTS
from attnbench.steps.jax_pi0_joint import JaxPi0, sizes
from attnbench.steps.jax_trees import model_tree, products_of
from attnbench.steps.pi0_model import DENSE
from attnbench.steps.pi0_repeats import whole
from attnbench.workloads.pi0_sizes import ACTION_DIM, SAMPLER_STEPS, parts


class JaxPi0Model(JaxPi0):
    """Blocks in a scan, each recomputed in the backward pass; actions and what is around them in float32."""

    def state(self, workload: Workload, config: Config, arrays: Mapping[str, Array]) -> Any:
        """(openpi's tree, the observation, what else the step is given)"""
        import jax.numpy as jnp

        from attnbench.models import pi0

        arrays = whole(arrays, workload, jnp.tile)

        def wide(name: str) -> Array:
            return arrays[name].astype(jnp.float32)

        around = {name: {"kernel": wide(name), "bias": wide(f"{name}_bias")} for name in DENSE}
        tree = {"PaliGemma": {"llm": model_tree(arrays, EXPERTS)}, **around}
        given = {name: wide(name) for name in ("noise", "actions", "time") if name in arrays}
        return tree, pi0.Observation(image_tokens=arrays["prefix"], state=wide("state")), given

    def model(self, workload: Workload, config: Config) -> Any:
        """The whole pi0."""
        from attnbench.models import pi0

        large, small = sizes(workload)
        return pi0.Pi0(
            pi0.Pi0Config(
                dtype=workload.dtype,
                paligemma_variant=large,
                action_expert_variant=small,
                action_dim=ACTION_DIM,
                action_horizon=parts(workload)[2],
                **self.path(config),
            )
        )

    def function(self, workload: Workload, config: Config) -> Callable[[Any], tuple[Array, ...]]:
        """Velocity and loss, and the gradients of its mean."""
        import jax
        import jax.numpy as jnp

        model = self.model(workload, config)

        def losses(tree: Any, observation: Any, given: Any) -> tuple[Array, tuple[Array, Array]]:
            noise, actions, share = given["noise"], given["actions"], given["time"][:, None, None]
            noisy = share * noise + (1 - share) * actions
            velocity = model.apply({"params": tree}, observation, noisy, given["time"], method="velocity")
            loss = jnp.mean(jnp.square(velocity - (noise - actions)), axis=-1)
            return loss.mean(), (velocity, loss)

        def run(state: Any) -> tuple[Array, ...]:
            if not workload.needs_gradients:
                return losses(*state)[1]
            d_tree, forward = jax.grad(losses, has_aux=True)(*state)
            around = (d_tree[name]["kernel"] for name in DENSE)
            return (*forward, *products_of(d_tree["PaliGemma"]["llm"]["layers"], EXPERTS), *around)

        return run


class JaxPi0Sampler(JaxPi0Model):
    """`pi0.sample_actions`."""

    def function(self, workload: Workload, config: Config) -> Callable[[Any], tuple[Array, ...]]:
        """Ten Euler steps."""
        import jax

        from attnbench.models import pi0

        model = self.model(workload, config)

        def run(state: Any) -> tuple[Array, ...]:
            tree, observation, given = state
            unused = jax.random.key(0)
            steps = {"num_steps": SAMPLER_STEPS, "noise": given["noise"]}
            return (pi0.sample_actions(model, tree, unused, observation, **steps),)

        return run


MODEL, MODEL_FLASH = (JaxPi0Model("pi0-model", flash) for flash in (False, True))
SAMPLER, SAMPLER_FLASH = (JaxPi0Sampler("pi0-sampler", flash) for flash in (False, True))
