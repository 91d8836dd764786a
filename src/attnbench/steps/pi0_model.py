"""The steps `pi0-model` and `pi0-sampler`: pi0's flow-matching loss, and ten Euler steps on the prefix's cache.

All prefix tokens come as embeddings, noise and times as inputs. What openpi holds in float32 is held so here whatever
the workload's precision: actions, states, times and the layers between them and the action expert.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from attnbench.spec import Workload
from attnbench.steps.base import Outputs, Rounded, StepKind, Values
from attnbench.steps.gemma_math import in_float32, joint_block, normed, storing, tensors, visible
from attnbench.steps.gemma_weights import EXPERTS, WEIGHTS, Normal, drawn, normals, of_layer
from attnbench.steps.pi0_repeats import DRAWN_LAYERS, whole
from attnbench.steps.pi0_support import small_in_blocks
from attnbench.workloads.pi0_sizes import ACTION_DIM, SAMPLER_STEPS, depth, experts, parts

PRODUCTS = tuple(f"{name}{end}" for end in EXPERTS for name in WEIGHTS)
DENSE = ("state_proj", "action_in_proj", "action_time_mlp_in", "action_time_mlp_out", "action_out_proj")
FORWARD = ("velocity", "loss")
GRADIENTS = tuple(f"d_{name}" for name in (*PRODUCTS, *DENSE))
SHORTEST, LONGEST = 4e-3, 4.0


class Pi0Model(StepKind):
    """The velocity that the action expert predicts and its squared error; gradients of all products by its mean."""

    name = "pi0-model"

    def outputs(self, workload: Workload) -> tuple[str, ...]:
        """[b, horizon, 32] and [b, horizon]; gradients of both experts' products and of the layers around them."""
        return FORWARD + GRADIENTS if workload.needs_gradients else FORWARD

    def small(self, workload: Workload) -> Workload:
        """Fewer heads and tokens, two layers, the same head_dim."""
        return small_in_blocks(workload)

    def draw(self, workload: Workload, seed: int) -> Values:
        """An observation, actions, noise, and times as openpi draws them."""
        w, normal = workload, normals(seed)
        times = np.random.default_rng(seed).beta(1.5, 1, w.batch) * 0.999 + 0.001
        return {**drawn_model(normal, w), "actions": _actions(normal, w), "time": times.astype(np.float32)}

    def reference(self, workload: Workload, values: Values, rounded: Rounded) -> Outputs:
        """Prefix and suffix in one pass."""
        import torch

        arrays = tensors(whole(values, workload, np.tile), (*PRODUCTS, *DENSE) if workload.needs_gradients else ())
        store, hold = storing(rounded), storing(in_float32(rounded))
        share = arrays["time"][:, None, None]
        noisy = hold(share * arrays["noise"] + (1 - share) * arrays["actions"])
        xs = [arrays["prefix"], store(suffix_tokens(arrays, noisy, values["time"], rounded))]
        for layer in range(depth(workload)):
            weights = [of_layer(arrays, layer, end) for end in EXPERTS]
            xs, _ = joint_block(xs, weights, visible(workload), store)
        velocity = to_actions(arrays, xs[1], store, hold)
        loss = hold((velocity - (arrays["noise"] - arrays["actions"])).square().mean(-1))
        found = {"velocity": velocity.detach().numpy(), "loss": loss.detach().numpy()}
        if not workload.needs_gradients:
            return found
        gradients = torch.autograd.grad(loss.mean(), [arrays[name] for name in (*PRODUCTS, *DENSE)])
        return found | {name: rounded(one.numpy()) for name, one in zip(GRADIENTS, gradients)}


class Pi0Sampler(StepKind):
    """From noise to actions: the prefix once, state and actions ten times against its cache."""

    name = "pi0-sampler"

    def outputs(self, workload: Workload) -> tuple[str, ...]:
        """[b, horizon, 32]"""
        return ("actions",)

    def small(self, workload: Workload) -> Workload:
        """Fewer heads and tokens, two layers, the same head_dim."""
        return small_in_blocks(workload)

    def draw(self, workload: Workload, seed: int) -> Values:
        """An observation and noise."""
        return drawn_model(normals(seed), workload)

    def reference(self, workload: Workload, values: Values, rounded: Rounded) -> Outputs:
        """Euler's rule, time running from 1 to 0."""
        arrays, prefix = tensors(whole(values, workload, np.tile)), parts(workload)[0]
        store, hold = storing(rounded), storing(in_float32(rounded))
        seen, xs, caches = visible(workload), [arrays["prefix"]], []
        for layer in range(depth(workload)):
            xs, cache = joint_block(xs, [of_layer(arrays, layer)], seen.new_ones(1), store)
            caches.append(cache)
        actions, times = arrays["noise"], np.ones(workload.batch)
        for _ in range(SAMPLER_STEPS):
            xs = [store(suffix_tokens(arrays, actions, times, rounded))]
            for layer, cache in enumerate(caches):
                weights = [of_layer(arrays, layer, EXPERTS[1])]
                xs, _ = joint_block(xs, weights, seen, store, first=prefix, cache=cache)
            actions = hold(actions - to_actions(arrays, xs[0], store, hold) / SAMPLER_STEPS)
            times = in_float32(rounded)(times - 1 / SAMPLER_STEPS)
        return {"actions": actions.numpy()}


def drawn_model(normal: Normal, w: Workload) -> dict[str, np.ndarray]:
    """Weights of variance 1 / fan-in, prefix, state and noise of variance 1."""
    prefix, (large, small) = parts(w)[0], experts(w)
    fan_ins = (ACTION_DIM, ACTION_DIM, 2 * small.width, small.width, small.width)
    values = {"prefix": normal(w.batch, prefix, large.width), "state": normal(w.batch, ACTION_DIM)}
    values["noise"] = _actions(normal, w)
    for end, expert in zip(EXPERTS, (large, small)):
        values |= drawn(normal, w, *expert, (DRAWN_LAYERS,), end)
        values[f"final_norm{end}"] = normal(expert.width, fan_in=100)
    for name, fan_in in zip(DENSE, fan_ins):
        width = ACTION_DIM if name == "action_out_proj" else small.width
        values |= {name: normal(fan_in, width, fan_in=fan_in), f"{name}_bias": normal(width, fan_in=100)}
    return values


def _actions(normal: Normal, w: Workload) -> np.ndarray:
    return normal(w.batch, parts(w)[2], ACTION_DIM)


def suffix_tokens(arrays: dict[str, Any], noisy: Any, times: np.ndarray, rounded: Rounded) -> Any:
    """State, and actions mixed with the time: [b, 1 + horizon, width]."""
    import torch

    hold = storing(in_float32(rounded))

    def dense(name: str, x: Any) -> Any:
        return hold(x @ arrays[name] + arrays[f"{name}_bias"])

    actions = dense("action_in_proj", noisy)
    when = torch.tensor(time_embedding(times, actions.shape[-1], in_float32(rounded)))
    mixed = dense("action_time_mlp_in", torch.cat([actions, when[:, None].expand_as(actions)], -1))
    mixed = dense("action_time_mlp_out", hold(torch.nn.functional.silu(mixed)))
    return torch.cat([dense("state_proj", arrays["state"])[:, None], mixed], 1)


def time_embedding(times: np.ndarray, width: int, held: Rounded) -> np.ndarray:
    """Sines and cosines with periods from 0.004 to 4, powers being exponentials of products.

    Angles reach 1570, so what float32 makes of them shows: it is most of the error that float32 is allowed here.
    """
    exponents = held(held(np.linspace(0.0, 1.0, width // 2)) * held(np.log(LONGEST / SHORTEST)))
    periods = held(SHORTEST * held(np.exp(exponents)))
    angles = held(np.asarray(times, np.float64)[:, None] * held(held(1 / periods) * 2 * np.pi))
    return held(np.concatenate([np.sin(angles), np.cos(angles)], -1))


def to_actions(arrays: dict[str, Any], x: Any, store: Any, hold: Any) -> Any:
    """The action expert's tokens, without the state's, to velocities."""
    out = store(normed(x, arrays["final_norm_1"]))[:, 1:]
    return hold(out @ arrays["action_out_proj"] + arrays["action_out_proj_bias"])


PI0_MODEL, PI0_SAMPLER = Pi0Model(), Pi0Sampler()
