"""The steps `pi0-fast-prefill` and `pi0-fast-decode` by `attnbench.models.pi0_fast`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from attnbench.spec import Array, Config, Workload
from attnbench.steps.jax_pi0_joint import JaxPi0, sizes
from attnbench.steps.jax_trees import ONE, model_tree
from attnbench.steps.pi0_repeats import TABLE, whole
from attnbench.workloads.pi0_sizes import vocabulary


class JaxPi0Fast(JaxPi0):
    """What both steps have: the model and its tree."""

    def tree(self, arrays: Mapping[str, Array]) -> dict[str, Any]:
        """openpi's."""
        return {"PaliGemma": {"llm": {**model_tree(arrays, ONE), "embedder": {TABLE: arrays[TABLE]}}}}

    def model(self, workload: Workload, config: Config) -> Any:
        """The whole pi0-FAST."""
        from attnbench.models import pi0_fast

        words = {"paligemma_variant": sizes(workload)[0], "vocab_size": vocabulary(workload)}
        return pi0_fast.Pi0Fast(pi0_fast.Pi0FastConfig(dtype=workload.dtype, **words, **self.path(config)))


class JaxPi0Prefill(JaxPi0Fast):
    """`Pi0Fast.prefill`"""

    def state(self, workload: Workload, config: Config, arrays: Mapping[str, Array]) -> Any:
        """(openpi's tree, the prompt)"""
        import jax.numpy as jnp

        from attnbench.models import pi0_fast

        prompt = pi0_fast.Observation(image_tokens=arrays["images"], tokens=arrays["tokens"])
        return self.tree(whole(arrays, workload, jnp.tile)), prompt

    def function(self, workload: Workload, config: Config) -> Callable[[Any], tuple[Array, ...]]:
        """Logits of the last token, and the cache."""
        model = self.model(workload, config)

        def run(state: Any) -> tuple[Array, ...]:
            tree, prompt = state
            room = workload.kv_len - workload.q_len
            logits, (_, keys, values), _ = model.apply({"params": tree}, prompt, room, method="prefill")
            return logits, keys, values

        return run


class JaxPi0Decode(JaxPi0Fast):
    """`Pi0Fast.decode`, the tokens being given instead of chosen."""

    def state(self, workload: Workload, config: Config, arrays: Mapping[str, Array]) -> Any:
        """(openpi's tree, the prompt's cache with room for the tokens, the tokens)"""
        import jax.numpy as jnp

        arrays = whole(arrays, workload, jnp.tile)
        room = ((0, 0), (0, 0), (0, workload.q_len), (0, 0), (0, 0))
        keys, values = (jnp.pad(arrays[name], room) for name in ("keys", "values"))
        slot = jnp.full(keys.shape[:2], workload.kv_len - workload.q_len, jnp.int32)
        return self.tree(arrays), (slot, keys, values), arrays["tokens"]

    def function(self, workload: Workload, config: Config) -> Callable[[Any], tuple[Array, ...]]:
        """One step after another."""
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
