"""The steps of Gemma, pi0 and pi0-FAST in JAX, by attnbench.models: openpi's einsum attention or a flash one."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from attnbench.models.gemma_config import check_flash_choice
from attnbench.spec import Array, Config, Environment, Workload
from attnbench.steps import StepImplementation, kind_of
from attnbench.steps.gemma import EXPERTS, FEED_FORWARD, NORMS, PROJECTIONS, why_no_stack
from attnbench.steps.pi0 import DENSE, TABLE, unsupported, whole
from attnbench.workloads import steps

if TYPE_CHECKING:
    from attnbench.models.gemma_config import Config as Sizes


class JaxModelStep(StepImplementation):
    """A step of the JAX models: `jax.STEP` with standard attention, `jax.STEP-flash[impl=auto]` with a flash path."""

    framework = "jax"
    untested = ("rocm", "tpu")

    def __init__(self, step: str, flash: bool) -> None:
        self.name, self.step = f"jax.{step}{'-flash' if flash else ''}", step
        way = "attention by a flash path" if flash else "attention by an einsum that stores the scores"
        self.description = f"Step {step} in JAX: {steps.STEPS[step].description}; {way}."
        self._flash, self.materialises_scores = flash, not flash
        self.tunables = {"impl": "auto"} if flash else {}

    def configured(self, config: Config) -> Self:
        check_flash_choice(config.get("impl", "auto"))
        return self

    def available(self, environment: Environment) -> str | None:
        """Return the missing packages: the models need flax, their reference torch."""
        missing = [name for name in ("flax", "torch") if importlib.util.find_spec(name) is None]
        return f'needs {" and ".join(missing)}: pip install "attnbench[models,torch]"' if missing else None

    def supports(self, workload: Workload, environment: Environment) -> str | None:
        return unsupported(workload)

    def path(self, config: Config) -> dict[str, Any]:
        """Return the models' fields that choose the attention."""
        if not self._flash:
            return {}
        return {"use_flash_attention": True, "flash_attention_impl": str(config.get("impl", "auto"))}

    def differentiated(
        self, workload: Workload, forward: Callable[[Any, list[Array]], Any], products: Callable[[Any], Sequence[Array]]
    ) -> Callable[[Any], tuple[Array, ...]]:
        """Return the function of (tree, inputs, cotangents) that computes `forward` and, if asked for, its gradients.

        `products` picks the gradients of weights from those of the tree.
        """
        import jax

        def run(state: Any) -> tuple[Array, ...]:
            tree, xs, douts = state
            if not workload.needs_gradients:
                return tuple(forward(tree, xs))
            outs, pull_back = jax.vjp(forward, tree, xs)
            d_tree, dxs = pull_back(douts)
            results = (*outs, *dxs, *products(d_tree))
            return results[-len(kind_of(self.step).outputs(workload)) :]

        return run


ONE = ("",)
"""Suffix of the names of a single expert."""


def attention_tree(arrays: Mapping[str, Array], suffixes: Sequence[str]) -> dict[str, Any]:
    """Return the parameters of `gemma.Attention`."""
    return {name + end: {"w": arrays[name + end]} for end in suffixes for name in PROJECTIONS}


def block_tree(arrays: Mapping[str, Array], suffixes: Sequence[str]) -> dict[str, Any]:
    """Return the parameters of `gemma.Block`; with an axis of layers, those of the scan over blocks."""
    feed_forward = {f"mlp{end}": {name: arrays[name + end] for name in FEED_FORWARD} for end in suffixes}
    norms = {name + end: {"scale": arrays[name + end]} for end in suffixes for name in NORMS}
    return {"attn": attention_tree(arrays, suffixes), **feed_forward, **norms}


def model_tree(arrays: Mapping[str, Array], suffixes: Sequence[str]) -> dict[str, Any]:
    """Return the parameters of `gemma.Module` without its embedding."""
    norms = {f"final_norm{end}": {"scale": arrays[f"final_norm{end}"]} for end in suffixes}
    return {"layers": block_tree(arrays, suffixes), **norms}


def projections_of(tree: Mapping[str, Any], suffixes: Sequence[str]) -> tuple[Array, ...]:
    """Return the products of an attention's tree, expert by expert."""
    return tuple(tree[name + end]["w"] for end in suffixes for name in PROJECTIONS)


def products_of(tree: Mapping[str, Any], suffixes: Sequence[str]) -> tuple[Array, ...]:
    """Return the products of a block's tree, expert by expert."""
    return tuple(
        product
        for end in suffixes
        for product in (*projections_of(tree["attn"], (end,)), *(tree[f"mlp{end}"][name] for name in FEED_FORWARD))
    )


class JaxGemmaStack(JaxModelStep):
    """Gemma blocks in a scan, each recomputed in the backward pass."""

    untested = ("cuda", "rocm", "tpu")

    def supports(self, workload: Workload, environment: Environment) -> str | None:
        return why_no_stack(workload)

    def state(self, workload: Workload, config: Config, arrays: Mapping[str, Array]) -> Any:
        """Return (openpi's tree, [x], [the cotangent])."""
        return model_tree(arrays, ONE), [arrays["x"]], [arrays["dout"]]

    def function(self, workload: Workload, config: Config) -> Callable[[Any], tuple[Array, ...]]:
        import jax.numpy as jnp

        from attnbench.models import gemma
        from attnbench.models.masks import known

        width = steps.gemma_width(workload)
        sizes = gemma.Config(width, steps.GEMMA_DEPTH, 8 * width, workload.heads, workload.kv_heads, workload.head_dim)
        model: Any = gemma.Module([sizes], workload.dtype, **self.path(config))
        mask = known(workload.visible_mask, workload.q_len)

        def forward(tree: Any, xs: list[Array]) -> Any:
            positions = jnp.broadcast_to(jnp.arange(xs[0].shape[1]), xs[0].shape[:2])
            return model.apply({"params": tree}, xs, positions, mask)[0]

        return self.differentiated(workload, forward, lambda tree: products_of(tree["layers"], ONE))


STANDARD = JaxGemmaStack("gemma-stack", flash=False)
FLASH = JaxGemmaStack("gemma-stack", flash=True)


def sizes(w: Workload) -> list[Sizes]:
    """Return the configurations of both experts."""
    from attnbench.models.gemma_config import Config as Sizes

    return [
        Sizes(expert.width, steps.depth(w), expert.wide, w.heads, w.kv_heads, w.head_dim) for expert in steps.experts(w)
    ]


class JaxPi0Attention(JaxModelStep):
    """`gemma.Attention` or `gemma.Block` with pi0's two experts."""

    def state(self, workload: Workload, config: Config, arrays: Mapping[str, Array]) -> Any:
        """Return (openpi's tree, tokens of each expert, their cotangents)."""
        tree = attention_tree if self.step == "pi0-attention" else block_tree
        xs, douts = ([arrays[f"{name}{end}"] for end in EXPERTS] for name in ("x", "dout"))
        return tree(arrays, EXPERTS), xs, douts

    def function(self, workload: Workload, config: Config) -> Callable[[Any], tuple[Array, ...]]:
        import jax.numpy as jnp

        from attnbench.models import gemma
        from attnbench.models.masks import in_blocks

        alone = self.step == "pi0-attention"
        module: Any = (gemma.Attention if alone else gemma.Block)(configs=sizes(workload), **self.path(config))
        products = projections_of if alone else products_of
        mask = in_blocks(steps.parts(workload))

        def forward(tree: Any, xs: Any) -> Any:
            positions = jnp.broadcast_to(jnp.arange(workload.q_len), (workload.batch, workload.q_len))
            given = (xs, positions, mask, None) if alone else (xs, None, positions, mask, [None, None])
            return module.apply({"params": tree}, *given)[0]

        return self.differentiated(workload, forward, lambda tree: products(tree, EXPERTS))


ATTENTION, ATTENTION_FLASH = (JaxPi0Attention("pi0-attention", flash) for flash in (False, True))
BLOCK, BLOCK_FLASH = (JaxPi0Attention("pi0-block", flash) for flash in (False, True))


class JaxPi0Model(JaxModelStep):
    """pi0's velocity and loss: blocks in a scan, each recomputed in the backward pass; layers around actions in
    float32."""

    def state(self, workload: Workload, config: Config, arrays: Mapping[str, Array]) -> Any:
        """Return (openpi's tree, the observation, the other inputs of the step)."""
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
        from attnbench.models import pi0

        large, small = sizes(workload)
        return pi0.Pi0(
            pi0.Pi0Config(
                dtype=workload.dtype,
                paligemma_variant=large,
                action_expert_variant=small,
                action_dim=steps.ACTION_DIM,
                action_horizon=steps.parts(workload)[2],
                **self.path(config),
            )
        )

    def function(self, workload: Workload, config: Config) -> Callable[[Any], tuple[Array, ...]]:
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
    """pi0's sampling of actions, `pi0.sample_actions`."""

    def function(self, workload: Workload, config: Config) -> Callable[[Any], tuple[Array, ...]]:
        import jax

        from attnbench.models import pi0

        model = self.model(workload, config)

        def run(state: Any) -> tuple[Array, ...]:
            tree, observation, given = state
            unused = jax.random.key(0)
            options = {"num_steps": steps.SAMPLER_STEPS, "noise": given["noise"]}
            return (pi0.sample_actions(model, tree, unused, observation, **options),)

        return run


MODEL, MODEL_FLASH = (JaxPi0Model("pi0-model", flash) for flash in (False, True))
SAMPLER, SAMPLER_FLASH = (JaxPi0Sampler("pi0-sampler", flash) for flash in (False, True))


class JaxPi0Fast(JaxModelStep):
    """Base of pi0-FAST's steps: the model and its tree."""

    def tree(self, arrays: Mapping[str, Array]) -> dict[str, Any]:
        return {"PaliGemma": {"llm": {**model_tree(arrays, ONE), "embedder": {TABLE: arrays[TABLE]}}}}

    def model(self, workload: Workload, config: Config) -> Any:
        from attnbench.models import pi0_fast

        words = {"paligemma_variant": sizes(workload)[0], "vocab_size": steps.vocabulary(workload)}
        return pi0_fast.Pi0Fast(pi0_fast.Pi0FastConfig(dtype=workload.dtype, **words, **self.path(config)))


class JaxPi0Prefill(JaxPi0Fast):
    """pi0-FAST's prompt, `Pi0Fast.prefill`."""

    def state(self, workload: Workload, config: Config, arrays: Mapping[str, Array]) -> Any:
        """Return (openpi's tree, the prompt)."""
        import jax.numpy as jnp

        from attnbench.models import pi0_fast

        prompt = pi0_fast.Observation(image_tokens=arrays["images"], tokens=arrays["tokens"])
        return self.tree(whole(arrays, workload, jnp.tile)), prompt

    def function(self, workload: Workload, config: Config) -> Callable[[Any], tuple[Array, ...]]:
        model = self.model(workload, config)

        def run(state: Any) -> tuple[Array, ...]:
            tree, prompt = state
            room = workload.kv_len - workload.q_len
            logits, (_, keys, values), _ = model.apply({"params": tree}, prompt, room, method="prefill")
            return logits, keys, values

        return run


class JaxPi0Decode(JaxPi0Fast):
    """pi0-FAST's decoding, `Pi0Fast.decode`, on given tokens."""

    def state(self, workload: Workload, config: Config, arrays: Mapping[str, Array]) -> Any:
        """Return (openpi's tree, the prompt's cache with room for the tokens, the tokens)."""
        import jax.numpy as jnp

        arrays = whole(arrays, workload, jnp.tile)
        room = ((0, 0), (0, 0), (0, workload.q_len), (0, 0), (0, 0))
        keys, values = (jnp.pad(arrays[name], room) for name in ("keys", "values"))
        slot = jnp.full(keys.shape[:2], workload.kv_len - workload.q_len, jnp.int32)
        return self.tree(arrays), (slot, keys, values), arrays["tokens"]

    def function(self, workload: Workload, config: Config) -> Callable[[Any], tuple[Array, ...]]:
        import jax
        import jax.numpy as jnp

        model, prompt = self.model(workload, config), workload.kv_len - workload.q_len

        def run(state: Any) -> tuple[Array, ...]:
            tree, cache, tokens = state

            def step(cache: Any, given: tuple[Array, Array]) -> tuple[Any, Array]:
                token, place = given
                valid = jnp.broadcast_to(jnp.arange(workload.kv_len) <= place, (workload.batch, workload.kv_len))
                places = jnp.full((workload.batch, 1), place)
                logits, cache = model.apply({"params": tree}, token[:, None], places, cache, valid, method="decode")
                return cache, logits[:, 0]

            places = prompt + jnp.arange(workload.q_len)
            _, logits = jax.lax.scan(step, cache, (tokens.T, places))
            return (logits.swapaxes(0, 1),)

        return run


PREFILL, PREFILL_FLASH = (JaxPi0Prefill("pi0-fast-prefill", flash) for flash in (False, True))
DECODE, DECODE_FLASH = (JaxPi0Decode("pi0-fast-decode", flash) for flash in (False, True))
