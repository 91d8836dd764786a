"""Gemma and pi0 with the flash path on and off: `python benchmarks/gemma_models.py [-o FILE] [--impl NAME]`, on a GPU.

Attention, one block, a full training step, the 10-step sampler and pi0-FAST's decode at openpi's sizes in bfloat16, and
a training step of a Gemma stack at 1k to 8k tokens in JAX and PyTorch. Every pair is compared before it is timed;
memory is what the compiled program keeps beside arguments and results (`temp_size_in_bytes`), in torch the peak above
what was there. Times are medians of interleaved calls. `--smoke` runs the dummy sizes on a CPU: the form, no figures.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch is on the same device

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import optax
from gemma_stack_torch import torch_stack

from attnbench import frameworks, masks
from attnbench.models import gemma, pi0, pi0_fast
from attnbench.models.masks import in_blocks, known

ALLOWED = {"bfloat16": 5e-2, "float32": 1e-4}
"""Relative difference between flash on and off at which they are no longer the same model."""


class Scale(NamedTuple):
    """The sizes of a run."""

    large: str
    small: str
    dtype: str
    batch: int
    prefix: tuple[int, int]
    horizon: int
    decode_steps: int
    vocabulary: int
    stack_tokens: tuple[int, ...]
    stack_depth: int
    rounds: int


REAL = Scale("gemma_2b", "gemma_300m", "bfloat16", 32, (768, 48), 50, 32, 257_152, (1024, 2048, 4096, 8192), 4, 15)
SMOKE = Scale("dummy", "dummy", "float32", 2, (12, 4), 5, 3, 50, (32, 64), 2, 3)


class Case(NamedTuple):
    """A function of arrays for a given path, and its arrays."""

    make: Callable[[dict[str, Any]], Callable[..., Any]]
    arrays: tuple[Any, ...]


def draw(*shape: int, seed: int, dtype: str = "float32") -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32).astype(dtype)


def start(module: Any, *args: Any, **words: Any) -> Any:
    return jax.jit(lambda key: module.init(key, *args, **words))(jax.random.key(0))["params"]


def with_gradient(function: Callable[..., Any]) -> Callable[..., Any]:
    return jax.value_and_grad(lambda *given: jnp.sum(jnp.square(function(*given).astype(jnp.float32))))


def attention_cases(scale: Scale) -> Iterator[tuple[str, Case]]:
    """pi0's attention module: train (one pass), prefill, denoise; a camera is missing in every second row."""
    configs = [gemma.get_config(scale.large), gemma.get_config(scale.small)]
    prefix, suffix = sum(scale.prefix), 1 + scale.horizon
    xs = [draw(scale.batch, n, c.width, seed=n, dtype=scale.dtype) for n, c in zip((prefix, suffix), configs)]
    third = scale.prefix[0] // 3
    valid = jnp.ones((scale.batch, prefix + suffix), bool).at[::2, prefix - third : prefix].set(False)
    at = jnp.cumsum(valid, axis=1) - 1
    whole = in_blocks((prefix, 1, scale.horizon), valid, packed=prefix)
    params = start(gemma.Attention(configs), xs, at, whole, None)

    def call(flash: dict[str, Any], params: Any, xs: list[Any], at: Any, mask: Any, cache: Any) -> Any:
        outs, _ = gemma.Attention(configs, **flash).apply({"params": params}, xs, at, mask, cache)
        return jnp.concatenate([x.reshape(-1) for x in outs if x is not None])

    everything = (params, xs, at, whole, None)
    yield "attention forward", Case(lambda flash: partial(call, flash), everything)
    yield "attention train", Case(lambda flash: with_gradient(partial(call, flash)), everything)
    one = [x[:1] for x in xs]
    first = in_blocks((prefix,))
    yield "attention prefill", Case(lambda f: partial(call, f), (params, [one[0], None], at[1:2, :prefix], first, None))
    cache = tuple(draw(1, prefix, 1, configs[0].head_dim, seed=i, dtype=scale.dtype) for i in (1, 2))
    later = in_blocks((prefix, 1, scale.horizon), queries_from=prefix)
    yield (
        "attention denoise",
        Case(lambda f: partial(call, f), (params, [None, one[1]], at[1:2, prefix:], later, cache)),
    )
    block = start(gemma.Block(configs), xs, None, at, whole, [None, None])

    def layer(flash: dict[str, Any], params: Any, xs: list[Any]) -> Any:
        outs, _ = gemma.Block(configs, **flash).apply({"params": params}, xs, None, at, whole, [None, None])
        return jnp.concatenate([x.reshape(-1) for x in outs])

    yield "block forward", Case(lambda flash: partial(layer, flash), (block, xs))
    yield "block train", Case(lambda flash: with_gradient(partial(layer, flash)), (block, xs))


def pi0_config(scale: Scale, flash: dict[str, Any]) -> pi0.Pi0Config:
    return pi0.Pi0Config(
        dtype=scale.dtype, paligemma_variant=scale.large, action_expert_variant=scale.small,  # pyright: ignore[reportArgumentType]
        action_horizon=scale.horizon, vocab_size=scale.vocabulary, **flash,
    )  # fmt: skip


def pi0_cases(scale: Scale) -> Iterator[tuple[str, Case]]:
    """Loss and gradients of the whole model, and ten denoise steps for one observation."""
    config = pi0_config(scale, {})
    images, text = scale.prefix
    many = pi0.random_observation(config, jax.random.key(1), scale.batch, images, text)
    many = many.replace(image_mask=jnp.ones((scale.batch, images), bool).at[::2, -images // 3 :].set(False))
    actions = draw(scale.batch, scale.horizon, config.action_dim, seed=1)
    one = jax.tree.map(lambda x: x[1:2], many)
    params = start(pi0.Pi0(config), jax.random.key(2), one, actions[:1], method="compute_loss")

    def loss(flash: dict[str, Any], params: Any, observation: pi0.Observation, actions: Any) -> Any:
        model = pi0.Pi0(pi0_config(scale, flash))
        rng = jax.random.key(3)
        return model.apply({"params": params}, rng, observation, actions, method="compute_loss").mean()

    def sampled(flash: dict[str, Any], params: Any, observation: pi0.Observation) -> Any:
        return pi0.sample_actions(pi0.Pi0(pi0_config(scale, flash)), params, jax.random.key(4), observation)

    yield "pi0 loss", Case(lambda flash: partial(loss, flash), (params, many, actions))
    yield "pi0 train", Case(lambda flash: jax.value_and_grad(partial(loss, flash)), (params, many, actions))
    yield "pi0 sampler", Case(lambda flash: partial(sampled, flash), (params, one))


def fast_cases(scale: Scale) -> Iterator[tuple[str, Case]]:
    """pi0-FAST: prefill and greedy decode of some tokens for one observation."""
    width = gemma.get_config(scale.large).width
    images, text = scale.prefix[0], scale.prefix[1]
    prompt = pi0_fast.Observation(
        image_tokens=draw(1, images, width, seed=5), tokens=jnp.asarray(np.arange(text)[None] % scale.vocabulary)
    )

    def model(flash: dict[str, Any]) -> pi0_fast.Pi0Fast:
        sizes = {"dtype": scale.dtype, "paligemma_variant": scale.large, "vocab_size": scale.vocabulary}
        return pi0_fast.Pi0Fast(pi0_fast.Pi0FastConfig(**sizes, **flash))  # pyright: ignore[reportArgumentType]

    params = start(model({}), prompt, method="logits")
    table = params["PaliGemma"]["llm"]["embedder"]["input_embedding"]
    params["PaliGemma"]["llm"]["embedder"]["input_embedding"] = 0.05 * jax.random.normal(jax.random.key(6), table.shape)

    def prefill(flash: dict[str, Any], params: Any, prompt: pi0_fast.Observation) -> Any:
        return model(flash).apply({"params": params}, prompt, scale.decode_steps, method="prefill")[0]

    def decoded(flash: dict[str, Any], params: Any, prompt: pi0_fast.Observation) -> Any:
        return pi0_fast.sample_tokens(
            model(flash), params, jax.random.key(7), prompt, max_decoding_steps=scale.decode_steps
        )

    yield "pi0-FAST prefill", Case(lambda flash: partial(prefill, flash), (params, prompt))
    yield "pi0-FAST decode", Case(lambda flash: partial(decoded, flash), (params, prompt))


def stack_cases(scale: Scale) -> Iterator[tuple[str, Case]]:
    """A training step (gradients and SGD) of a causal stack of the small expert's blocks; 8k tokens in all."""
    config = replace(gemma.get_config(scale.small), depth=scale.stack_depth)
    optimizer = optax.sgd(1.0)  # a step that shows in the weights, which are what is compared
    for tokens in scale.stack_tokens:
        batch = max(scale.stack_tokens) // tokens
        x = draw(batch, tokens, config.width, seed=tokens, dtype=scale.dtype)
        at = jnp.broadcast_to(jnp.arange(tokens), (batch, tokens))
        mask = known(masks.causal(), tokens)
        params = start(gemma.Module([config], scale.dtype, vocab_size=1), [x], at, mask)

        def step(flash: dict[str, Any], params: Any, x: Any, at: Any = at, mask: Any = mask) -> Any:
            module = gemma.Module([config], scale.dtype, vocab_size=1, **flash)
            loss = with_gradient(lambda p: module.apply({"params": p}, [x], at, mask)[0][0])
            value, gradients = loss(params)
            updates, _ = optimizer.update(gradients, optimizer.init(params))
            return value, optax.apply_updates(params, updates)

        yield f"stack train {tokens}", Case(lambda flash, step=step: partial(step, flash), (params, x))


def duel(case: Case, scale: Scale, impl: str) -> dict[str, Any]:
    """Both paths compiled, compared, then timed in turns."""
    paths = {"off": {}, "on": {"use_flash_attention": True, "flash_attention_impl": impl}}
    compiled, found = {}, {}
    for name, flash in paths.items():
        begin = time.perf_counter()
        compiled[name] = jax.jit(case.make(flash)).lower(*case.arrays).compile()
        memory = compiled[name].memory_analysis()
        found[name] = {
            "compile_s": round(time.perf_counter() - begin, 2),
            "temp_bytes": None if memory is None else memory.temp_size_in_bytes,
        }
    results = {name: jax.block_until_ready(program(*case.arrays)) for name, program in compiled.items()}
    difference = distance(results["on"], results["off"])
    if not difference <= ALLOWED[scale.dtype]:
        return found | {"difference": difference, "wrong": "flash on and off differ: not timed"}
    del results
    times: dict[str, list[float]] = {name: [] for name in paths}
    for _ in range(scale.rounds):
        for name, program in compiled.items():
            begin = time.perf_counter()
            jax.block_until_ready(program(*case.arrays))
            times[name].append((time.perf_counter() - begin) * 1e3)
    for name, values in times.items():
        found[name] |= {"ms": round(median(values), 4), "samples_ms": [round(value, 4) for value in values]}
    found |= {"difference": difference, "speedup": round(found["off"]["ms"] / found["on"]["ms"], 3)}
    before, after = (found[name]["temp_bytes"] for name in paths)
    return found | {"memory_saved": round(1 - after / before, 3) if before else None}


def distance(a: Any, b: Any) -> float:
    """Relative Frobenius norm over the arrays; a loss beside gradients would drown them."""
    pairs = list(zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))
    pairs = [(x, y) for x, y in pairs if x.ndim] or pairs
    off = sum(float(jnp.sum(jnp.square(x.astype(jnp.float32) - y.astype(jnp.float32)))) for x, y in pairs)
    size = sum(float(jnp.sum(jnp.square(y.astype(jnp.float32)))) for _, y in pairs)
    return float(f"{(off / max(size, 1e-30)) ** 0.5:.3g}")


GROUPS = {"attention": attention_cases, "pi0": pi0_cases, "fast": fast_cases, "stack": stack_cases}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="dummy sizes, on a CPU")
    parser.add_argument("--impl", default="auto", help="flash_attention_impl")
    parser.add_argument("--only", nargs="+", choices=[*GROUPS, "torch"], default=[*GROUPS, "torch"])
    parser.add_argument("--batch", type=int, help="of pi0's training, 32 in openpi")
    parser.add_argument("-o", "--out", type=Path)
    options = parser.parse_args()
    scale = SMOKE if options.smoke else REAL
    scale = scale._replace(batch=options.batch or scale.batch)
    framework = frameworks.get("jax")
    device = framework.devices()[0]
    environment = msgspec.to_builtins(framework.environment(device))
    found: dict[str, Any] = {"smoke": options.smoke, "impl": options.impl, "environment": environment}
    found |= {"scale": scale._asdict(), "jax": {}, "torch": {}}

    def save() -> None:
        if options.out is not None:
            options.out.write_text(json.dumps(found, indent=1) + "\n")

    for group in options.only:
        if group == "torch":
            config = replace(gemma.get_config(scale.small), depth=scale.stack_depth)
            other = frameworks.get("torch")
            found["torch_environment"] = msgspec.to_builtins(other.environment(other.devices()[0]))
            found["torch"] = torch_stack(config, scale.stack_tokens, scale.dtype, scale.rounds)
            continue
        for name, case in GROUPS[group](scale):
            found["jax"][name] = duel(case, scale, options.impl)
            save()
    save()
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
