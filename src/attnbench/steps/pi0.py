"""The steps of pi0 and pi0-FAST, with their references.

pi0's are attention and block of two experts, the flow-matching loss, and the sampler; pi0-FAST's are the prefill of a
cache by a prompt, and the decoding of given tokens one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from msgspec.structs import replace

from attnbench import masks
from attnbench.spec import Workload
from attnbench.steps import Outputs, Rounded, StepKind, Values
from attnbench.steps.gemma import (
    EXPERTS,
    NORMS,
    PROJECTIONS,
    WEIGHTS,
    Normal,
    Store,
    draw_expert,
    in_float32,
    joint_attention,
    joint_block,
    normals,
    of_layer,
    rms_norm,
    storing,
    tensors,
    visible,
    with_gradients,
)
from attnbench.workloads import steps

BLOCKS = "a block_causal mask of the blocks (prefix, 1, actions)"
FORMS = {
    **dict.fromkeys(("pi0-attention", "pi0-block", "pi0-model"), f"{BLOCKS}, with all tokens as queries"),
    "pi0-sampler": f"{BLOCKS}, with state and actions as queries",
    "pi0-fast-prefill": (
        "a prompt of q_len tokens in a cache of kv_len: lengths of q_len in every row, or a full square"
    ),
    "pi0-fast-decode": "a causal mask with q_len tokens to decode behind a prompt of kv_len - q_len",
}
"""Mask and lengths that each step takes."""
FORWARD_ONLY = ("pi0-sampler", "pi0-fast-prefill", "pi0-fast-decode")
CHECKED_BATCH, CHECKED_GROUP, CHECKED_ACTIONS, CHECKED_STEPS = 2, 2, 5, 4
CHECKED_PROMPT = 144
"""Tokens of a checked prompt: enough that a flash path treats them like more (it leaves short blocks to XLA)."""


def unsupported(w: Workload) -> str | None:
    """Return why the step cannot be computed on this workload; None if it can."""
    if w.value_dim != w.head_dim or w.softcap or w.scale is not None:
        return "takes values as wide as keys, the usual scale and no softcap"
    if w.dtype not in ("float32", "bfloat16"):
        return f"takes float32 or bfloat16, not {w.dtype}"
    if w.kv_heads == w.heads:
        return "takes grouped heads, as Gemma has them"
    if w.head_dim % 2 or w.heads * w.head_dim % 4:
        return "needs an even head_dim, and heads x head_dim divisible by 4: the action expert has half that width"
    form = FORMS[w.step]
    if not _has_form(w):
        return f"takes {form}"
    return "runs forward only" if w.step in FORWARD_ONLY and w.needs_gradients else None


def _has_form(w: Workload) -> bool:
    """Return whether the workload has the mask and the lengths of FORMS."""
    mask, blocks = w.visible_mask, steps.block_sizes(w)
    if w.step == "pi0-fast-prefill":
        in_cache = isinstance(mask, masks.Lengths) and bool((mask.kv_lengths.array == w.q_len).all())
        return in_cache or (isinstance(mask, masks.Full) and w.q_len == w.kv_len)
    if w.step == "pi0-fast-decode":
        return mask == masks.causal() and w.q_len < w.kv_len
    if blocks is None or len(blocks) != 3 or blocks[1] != 1:
        return False
    return w.q_len == (w.kv_len - blocks[0] if w.step == "pi0-sampler" else w.kv_len)


def small(w: Workload) -> Workload:
    """Return the workload with fewer heads, rows and tokens (and thus less depth and vocabulary) and the same
    head_dim."""
    heads = min(w.group, CHECKED_GROUP)
    return replace(w, heads=heads, kv_heads=1, batch=min(w.batch, CHECKED_BATCH), mask=masks.full())


DRAWN_LAYERS = steps.SMALL_DEPTH
LAYERED = (*(f"{name}{end}" for end in EXPERTS for name in (*WEIGHTS, *NORMS)), "keys", "values")
TABLE = "input_embedding"
TABLE_REPEATS = {steps.WHOLE_VOCABULARY: 41}


def drawn_rows(w: Workload) -> tuple[int, int]:
    """Return the number of drawn rows of the embedding table, and their width."""
    return steps.vocabulary(w) // TABLE_REPEATS.get(steps.vocabulary(w), 1), steps.experts(w)[0].width


def repeats(name: str, w: Workload) -> int:
    """Return how often a drawn array is repeated in the model."""
    if name in LAYERED:
        return steps.depth(w) // DRAWN_LAYERS
    return TABLE_REPEATS.get(steps.vocabulary(w), 1) if name == TABLE else 1


def whole(arrays: Mapping[str, Any], w: Workload, tile: Callable[..., Any]) -> dict[str, Any]:
    """Return all layers and the whole table, by NumPy's or JAX's `tile`."""
    times = {name: repeats(name, w) for name in arrays}
    return {n: x if times[n] == 1 else tile(x, (times[n],) + (1,) * (x.ndim - 1)) for n, x in arrays.items()}


class Pi0Kind(StepKind):
    """Step on a mask in pi0's blocks."""

    def small(self, workload: Workload) -> Workload:
        w, (prefix, state, actions) = workload, steps.parts(workload)
        blocks = min(prefix, CHECKED_PROMPT), state, min(actions, CHECKED_ACTIONS)
        tokens = sum(blocks)
        q_len = tokens if w.q_len == w.kv_len else tokens - blocks[0]
        return replace(small(w), q_len=q_len, kv_len=tokens, mask=steps.in_blocks(*blocks))


class Pi0Joint(Pi0Kind):
    """Layer of two experts with openpi's weights by name and shape; names of the action expert's end in _1."""

    forward_outputs = ("out", "out_1")

    def __init__(self, name: str, products: Sequence[str], norms: Sequence[str], compute: Any) -> None:
        self.name, self._drawn, self._compute = name, (*products, *norms), compute
        weights = [f"{product}{end}" for end in EXPERTS for product in products]
        self._leaves = ("x", "x_1", *weights)
        self.gradient_outputs = ("dx", "dx_1", *(f"d_{name}" for name in weights))

    def draw(self, workload: Workload, seed: int) -> Values:
        """Return tokens of variance 1 and weights of variance 1 / fan-in."""
        w, normal = workload, normals(seed)
        prefix, state, actions = steps.parts(w)
        values = {}
        for end, tokens, expert in zip(EXPERTS, (prefix, state + actions), steps.experts(w)):
            values[f"x{end}"] = normal(w.batch, tokens, expert.width)
            values[f"dout{end}"] = normal(w.batch, tokens, expert.width)
            values |= draw_expert(normal, w, *expert, (), end, self._drawn)
        return values

    def reference(self, workload: Workload, values: Values, rounded: Rounded) -> Outputs:
        """Compute the outputs in float64, with both experts' tokens in one attention."""
        arrays = tensors(values, self._leaves if workload.needs_gradients else ())
        xs, weights = [arrays[f"x{end}"] for end in EXPERTS], [of_layer(arrays, suffix=end) for end in EXPERTS]
        outs, _ = self._compute(xs, weights, visible(workload), storing(rounded))
        leaves, douts = [arrays[name] for name in self._leaves], [arrays.get(f"dout{end}") for end in EXPERTS]
        return with_gradients(self, workload, outs, outs, leaves, rounded, douts)


PI0_ATTENTION = Pi0Joint("pi0-attention", PROJECTIONS, (), joint_attention)
PI0_BLOCK = Pi0Joint("pi0-block", WEIGHTS, NORMS, joint_block)


PRODUCTS = tuple(f"{name}{end}" for end in EXPERTS for name in WEIGHTS)
DENSE = ("state_proj", "action_in_proj", "action_time_mlp_in", "action_time_mlp_out", "action_out_proj")
SHORTEST, LONGEST = 4e-3, 4.0


class Pi0Model(Pi0Kind):
    """Velocity [b, horizon, 32] that the action expert predicts and its squared error [b, horizon]; gradients of all
    products by the mean error."""

    name = "pi0-model"
    forward_outputs = ("velocity", "loss")
    gradient_outputs = tuple(f"d_{name}" for name in (*PRODUCTS, *DENSE))

    def draw(self, workload: Workload, seed: int) -> Values:
        """Return an observation, actions, noise, and times as openpi draws them."""
        w, normal = workload, normals(seed)
        times = np.random.default_rng(seed).beta(1.5, 1, w.batch) * 0.999 + 0.001
        values = draw_model(normal, w)
        actions = normal(w.batch, steps.parts(w)[2], steps.ACTION_DIM)
        return {**values, "actions": actions, "time": times.astype(np.float32)}

    def reference(self, workload: Workload, values: Values, rounded: Rounded) -> Outputs:
        arrays = tensors(whole(values, workload, np.tile), (*PRODUCTS, *DENSE) if workload.needs_gradients else ())
        store, hold = storing(rounded), storing(in_float32(rounded))
        share = arrays["time"][:, None, None]
        noisy = hold(share * arrays["noise"] + (1 - share) * arrays["actions"])
        xs = [arrays["prefix"], store(suffix_tokens(arrays, noisy, values["time"], rounded))]
        for layer in range(steps.depth(workload)):
            weights = [of_layer(arrays, layer, end) for end in EXPERTS]
            xs, _ = joint_block(xs, weights, visible(workload), store)
        velocity = to_actions(arrays, xs[1], store, hold)
        loss = hold((velocity - (arrays["noise"] - arrays["actions"])).square().mean(-1))
        leaves = [arrays[name] for name in (*PRODUCTS, *DENSE)]
        return with_gradients(self, workload, [velocity, loss], loss.mean(), leaves, rounded)


class Pi0Sampler(Pi0Kind):
    """Actions [b, horizon, 32] from noise: the prefix once, state and actions ten times against its cache."""

    name = "pi0-sampler"
    forward_outputs = ("actions",)

    def draw(self, workload: Workload, seed: int) -> Values:
        return draw_model(normals(seed), workload)

    def reference(self, workload: Workload, values: Values, rounded: Rounded) -> Outputs:
        """Compute the actions by Euler's rule, time running from 1 to 0."""
        arrays, prefix = tensors(whole(values, workload, np.tile)), steps.parts(workload)[0]
        store, hold = storing(rounded), storing(in_float32(rounded))
        seen, xs, caches = visible(workload), [arrays["prefix"]], []
        for layer in range(steps.depth(workload)):
            xs, cache = joint_block(xs, [of_layer(arrays, layer)], seen.new_ones(1), store)
            caches.append(cache)
        actions, times = arrays["noise"], np.ones(workload.batch)
        for _ in range(steps.SAMPLER_STEPS):
            xs = [store(suffix_tokens(arrays, actions, times, rounded))]
            for layer, cache in enumerate(caches):
                weights = [of_layer(arrays, layer, EXPERTS[1])]
                xs, _ = joint_block(xs, weights, seen, store, first=prefix, cache=cache)
            actions = hold(actions - to_actions(arrays, xs[0], store, hold) / steps.SAMPLER_STEPS)
            times = in_float32(rounded)(times - 1 / steps.SAMPLER_STEPS)
        return {"actions": actions.numpy()}


def draw_model(normal: Normal, w: Workload) -> dict[str, np.ndarray]:
    """Return weights of variance 1 / fan-in, and prefix, state and noise of variance 1."""
    (prefix, _, actions), (large, small) = steps.parts(w), steps.experts(w)
    fan_ins = (steps.ACTION_DIM, steps.ACTION_DIM, 2 * small.width, small.width, small.width)
    values = {"prefix": normal(w.batch, prefix, large.width), "state": normal(w.batch, steps.ACTION_DIM)}
    values["noise"] = normal(w.batch, actions, steps.ACTION_DIM)
    for end, expert in zip(EXPERTS, (large, small)):
        values |= draw_expert(normal, w, *expert, (DRAWN_LAYERS,), end)
        values[f"final_norm{end}"] = normal(expert.width, fan_in=100)
    for name, fan_in in zip(DENSE, fan_ins):
        width = steps.ACTION_DIM if name == "action_out_proj" else small.width
        values |= {name: normal(fan_in, width, fan_in=fan_in), f"{name}_bias": normal(width, fan_in=100)}
    return values


def suffix_tokens(arrays: dict[str, Any], noisy: Any, times: np.ndarray, rounded: Rounded) -> Any:
    """Return the state and the actions mixed with the time, [b, 1 + horizon, width]."""
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
    """Return sines and cosines with periods from 0.004 to 4, with powers as exponentials of products.

    Angles reach 1570, so float32 rounding of angles matters: it is most of the error that float32 is allowed here.
    """
    exponents = held(held(np.linspace(0.0, 1.0, width // 2)) * held(np.log(LONGEST / SHORTEST)))
    periods = held(SHORTEST * held(np.exp(exponents)))
    angles = held(np.asarray(times, np.float64)[:, None] * held(held(1 / periods) * 2 * np.pi))
    return held(np.concatenate([np.sin(angles), np.cos(angles)], -1))


def to_actions(arrays: dict[str, Any], x: Any, store: Any, hold: Any) -> Any:
    """Return velocities from the action expert's tokens without the state's token."""
    out = store(rms_norm(x, arrays["final_norm_1"]))[:, 1:]
    return hold(out @ arrays["action_out_proj"] + arrays["action_out_proj_bias"])


PI0_MODEL, PI0_SAMPLER = Pi0Model(), Pi0Sampler()


class Pi0FastPrefill(StepKind):
    """Prompt of q_len tokens that all see each other, images first, in a cache of kv_len slots.

    Logits [b, 1, vocabulary] are those of the last token; the caches are [layers, b, kv_len, kv_heads, head_dim].
    """

    name = "pi0-fast-prefill"
    forward_outputs = ("logits", "keys", "values")

    def small(self, workload: Workload) -> Workload:
        w = workload
        prompt, room = min(w.q_len, CHECKED_PROMPT), min(w.kv_len - w.q_len, CHECKED_STEPS)
        few = replace(small(w), q_len=prompt, kv_len=prompt + room)
        return replace(few, mask=masks.lengths([prompt] * few.batch)) if room else few

    def draw(self, workload: Workload, seed: int) -> Values:
        """Return weights, image tokens as embeddings, and text tokens."""
        w, normal, text = workload, normals(seed), steps.text_tokens(workload.q_len)
        images = normal(w.batch, w.q_len - text, steps.experts(w)[0].width)
        return {**_weights(normal, w), "images": images, "tokens": _tokens(w, text, seed)}

    def reference(self, workload: Workload, values: Values, rounded: Rounded) -> Outputs:
        import torch

        arrays, store = tensors(whole(values, workload, np.tile)), storing(rounded)
        xs, caches = [torch.cat([arrays["images"], _embedded(arrays, rounded, store)], 1)], []
        for layer in range(steps.depth(workload)):
            xs, cache = joint_block(xs, [of_layer(arrays, layer)], torch.ones(1, dtype=torch.bool), store)
            caches.append(cache)
        room = (0, 0, 0, 0, 0, workload.kv_len - workload.q_len)
        keys, kept = (torch.nn.functional.pad(torch.stack(parts), room).numpy() for parts in zip(*caches))
        return {"logits": _logits(arrays, xs[0][:, -1:], store), "keys": keys, "values": kept}


class Pi0FastDecode(StepKind):
    """Given tokens, q_len of them, after a prompt of kv_len - q_len tokens whose cache is drawn; logits [b, q_len,
    vocabulary] of every token."""

    name = "pi0-fast-decode"
    forward_outputs = ("logits",)

    def small(self, workload: Workload) -> Workload:
        steps, prompt = min(workload.q_len, CHECKED_STEPS), min(workload.kv_len - workload.q_len, CHECKED_PROMPT)
        return replace(small(workload), q_len=steps, kv_len=prompt + steps, mask=masks.causal())

    def draw(self, workload: Workload, seed: int) -> Values:
        """Return weights, tokens, and keys and values of variance 1."""
        w, normal = workload, normals(seed)
        cache = DRAWN_LAYERS, w.batch, w.kv_len - w.q_len, w.kv_heads, w.head_dim
        values = {**_weights(normal, w), "keys": normal(*cache), "values": normal(*cache)}
        return values | {"tokens": _tokens(w, w.q_len, seed)}

    def reference(self, workload: Workload, values: Values, rounded: Rounded) -> Outputs:
        """Compute all tokens in one causal pass after the cache, whose result step-by-step decoding must match."""
        arrays, store, w = tensors(whole(values, workload, np.tile)), storing(rounded), workload
        xs = [_embedded(arrays, rounded, store)]
        for layer in range(steps.depth(w)):
            cache = arrays["keys"][layer], arrays["values"][layer]
            weights = [of_layer(arrays, layer)]
            xs, _ = joint_block(xs, weights, visible(w), store, first=w.kv_len - w.q_len, cache=cache)
        return {"logits": _logits(arrays, xs[0], store)}


def _weights(normal: Normal, w: Workload) -> dict[str, np.ndarray]:
    expert = steps.experts(w)[0]
    return {
        **draw_expert(normal, w, *expert, (DRAWN_LAYERS,)),
        "final_norm": normal(expert.width, fan_in=100),
        TABLE: normal(*drawn_rows(w), fan_in=expert.width),
    }


def _tokens(w: Workload, length: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, steps.vocabulary(w), (w.batch, length), dtype=np.int32)


def _embedded(arrays: dict[str, Any], rounded: Rounded, store: Store) -> Any:
    table = arrays[TABLE]
    return store(table[arrays["tokens"]] * float(rounded(np.full(1, table.shape[1] ** 0.5))[0]))


def _logits(arrays: dict[str, Any], x: Any, store: Store) -> np.ndarray:
    return store(store(rms_norm(x, arrays["final_norm"])) @ arrays[TABLE].T).numpy()


PI0_FAST_PREFILL, PI0_FAST_DECODE = Pi0FastPrefill(), Pi0FastDecode()
