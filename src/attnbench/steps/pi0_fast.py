"""The steps `pi0-fast-prefill` and `pi0-fast-decode`: a prompt to a cache, and given tokens one by one behind one."""

from __future__ import annotations

from typing import Any

import numpy as np

from attnbench.spec import Workload
from attnbench.steps import Outputs, Rounded, StepKind, Values
from attnbench.steps.gemma import (
    Normal,
    Store,
    drawn,
    joint_block,
    normals,
    normed,
    of_layer,
    storing,
    tensors,
    visible,
)
from attnbench.steps.pi0 import DRAWN_LAYERS, TABLE, drawn_rows, small_decode, small_prompt, whole
from attnbench.workloads.steps import depth, experts, text_tokens, vocabulary


class Prefill(StepKind):
    """Prompt of q_len tokens that all see each other, images first, in a cache of kv_len slots."""

    name = "pi0-fast-prefill"

    def outputs(self, workload: Workload) -> tuple[str, ...]:
        """Return the names of the last token's logits [b, 1, vocabulary] and of the caches [layers, b, kv_len,
        kv_heads, head_dim]."""
        return ("logits", "keys", "values")

    def small(self, workload: Workload) -> Workload:
        """Return the workload with fewer heads and tokens, two layers, a small vocabulary and the same head_dim."""
        return small_prompt(workload)

    def draw(self, workload: Workload, seed: int) -> Values:
        """Return weights, image tokens as embeddings, and text tokens."""
        w, normal, text = workload, normals(seed), text_tokens(workload.q_len)
        images = normal(w.batch, w.q_len - text, experts(w)[0].width)
        return {**_weights(normal, w), "images": images, "tokens": _tokens(w, text, seed)}

    def reference(self, workload: Workload, values: Values, rounded: Rounded) -> Outputs:
        """Compute the outputs from one pass over the prompt."""
        import torch

        arrays, store = tensors(whole(values, workload, np.tile)), storing(rounded)
        xs, caches = [torch.cat([arrays["images"], _embedded(arrays, rounded, store)], 1)], []
        for layer in range(depth(workload)):
            xs, cache = joint_block(xs, [of_layer(arrays, layer)], torch.ones(1, dtype=torch.bool), store)
            caches.append(cache)
        room = (0, 0, 0, 0, 0, workload.kv_len - workload.q_len)
        keys, kept = (torch.nn.functional.pad(torch.stack(parts), room).numpy() for parts in zip(*caches))
        return {"logits": _logits(arrays, xs[0][:, -1:], store), "keys": keys, "values": kept}


class Decode(StepKind):
    """q_len given tokens after a prompt of kv_len - q_len tokens, whose cache is drawn."""

    name = "pi0-fast-decode"

    def outputs(self, workload: Workload) -> tuple[str, ...]:
        """Return the name of every step's logits, [b, q_len, vocabulary]."""
        return ("logits",)

    def small(self, workload: Workload) -> Workload:
        """Return the workload with fewer heads, steps and tokens, two layers, a small vocabulary and the same
        head_dim."""
        return small_decode(workload)

    def draw(self, workload: Workload, seed: int) -> Values:
        """Return weights, tokens, and keys and values of variance 1."""
        w, normal = workload, normals(seed)
        cache = DRAWN_LAYERS, w.batch, w.kv_len - w.q_len, w.kv_heads, w.head_dim
        found = {**_weights(normal, w), "keys": normal(*cache), "values": normal(*cache)}
        return found | {"tokens": _tokens(w, w.q_len, seed)}

    def reference(self, workload: Workload, values: Values, rounded: Rounded) -> Outputs:
        """Compute all tokens in one causal pass after the cache, whose result step-by-step decoding must match."""
        arrays, store, w = tensors(whole(values, workload, np.tile)), storing(rounded), workload
        xs = [_embedded(arrays, rounded, store)]
        for layer in range(depth(w)):
            cache = arrays["keys"][layer], arrays["values"][layer]
            weights = [of_layer(arrays, layer)]
            xs, _ = joint_block(xs, weights, visible(w), store, first=w.kv_len - w.q_len, cache=cache)
        return {"logits": _logits(arrays, xs[0], store)}


def _weights(normal: Normal, w: Workload) -> dict[str, np.ndarray]:
    expert = experts(w)[0]
    return {
        **drawn(normal, w, *expert, (DRAWN_LAYERS,)),
        "final_norm": normal(expert.width, fan_in=100),
        TABLE: normal(*drawn_rows(w), fan_in=expert.width),
    }


def _tokens(w: Workload, length: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, vocabulary(w), (w.batch, length), dtype=np.int32)


def _embedded(arrays: dict[str, Any], rounded: Rounded, store: Store) -> Any:
    table = arrays[TABLE]
    return store(table[arrays["tokens"]] * float(rounded(np.full(1, table.shape[1] ** 0.5))[0]))


def _logits(arrays: dict[str, Any], x: Any, store: Store) -> np.ndarray:
    return store(store(normed(x, arrays["final_norm"])) @ arrays[TABLE].T).numpy()


PREFILL, DECODE = Prefill(), Decode()
