"""Small Gemmas with weights that matter everywhere, and an attention in float64 to hold them against."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from attnbench.models import gemma, gemma_fast

DUMMY = gemma.get_config("dummy")
CHOICES = ("auto", "jax")
"""Both run on a CPU: "auto" hands short runs over as arrays, "jax" every run by itself with key lengths."""


def random_params(module, *args, seed=0, **words):
    """Weights of a sensible size everywhere, also where training starts at zero (norms, updates); made by NumPy, since
    initialisers take seconds to compile."""
    tree = jax.eval_shape(lambda key: module.init(key, *args, **words), jax.random.key(0))["params"]
    random = np.random.default_rng(seed)

    def draw(path, leaf):
        name = "/".join(str(key.key) for key in path)
        fan_in = np.prod(leaf.shape[-3:-1]) if "attn_vec_einsum" in name else leaf.shape[-2] if leaf.ndim > 1 else 25
        size = 1.0 if "embedding" in name else fan_in**-0.5
        return jnp.asarray(random.normal(scale=size, size=leaf.shape), jnp.float32)

    return jax.tree_util.tree_map_with_path(draw, tree)


def run(module, params, *args, **words):
    """`apply` in one program."""
    return jax.jit(lambda *arrays: module.apply({"params": arrays[0]}, *arrays[1:], **words))(params, *args)


def tokens(*shape, seed=0, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32).astype(dtype)


def positions(batch, length, start=0):
    return jnp.broadcast_to(jnp.arange(start, start + length), (batch, length))


def attention(configs=(DUMMY,), **words):
    return gemma.Attention(configs=configs, **words)


def fast_attention(config=DUMMY, **words):
    return gemma_fast.Attention(
        num_heads=config.num_heads, num_kv_heads=config.num_kv_heads, features=config.width, head_dim=config.head_dim,
        **words,
    )  # fmt: skip


def rotated(x, at):
    """Rotation of pairs (i, i + H/2) as complex numbers, in float64."""
    half = x.shape[-1] // 2
    angle = np.asarray(at, np.float64)[..., None] / 10_000.0 ** (2 * np.arange(half) / x.shape[-1])
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angle)[:, :, None]
    return np.concatenate([turned.real, turned.imag], axis=-1)


def in_float64(params, xs, at, mask):
    """Joint attention of experts, written with loops over heads; a row without keys is the mean of V."""
    params = jax.tree.map(lambda w: np.asarray(w, np.float64), params)
    parts = []
    for i, x in enumerate(xs):
        suffix = f"_{i}" if i else ""
        x = np.asarray(x, np.float64)
        q = np.stack([x @ w for w in params[f"q_einsum{suffix}"]["w"]], axis=2)
        k, v = (np.stack([x @ w for w in side], axis=2) for side in params[f"kv_einsum{suffix}"]["w"])
        parts.append((q, k, v))
    q, k, v = (np.concatenate(group, axis=1) for group in zip(*parts))
    q, k = rotated(q, at) * q.shape[-1] ** -0.5, rotated(k, at)
    out = np.zeros_like(q)
    group = q.shape[2] // k.shape[2]
    for h in range(q.shape[2]):
        scores = q[:, :, h] @ k[:, :, h // group].transpose(0, 2, 1)
        scores = np.where(mask, scores, -np.inf)
        blind = ~np.asarray(mask).any(-1)
        top = np.where(blind[..., None], 0, scores.max(-1, keepdims=True))
        weights = np.where(blind[..., None], 1.0, np.exp(scores - top))
        out[:, :, h] = (weights / weights.sum(-1, keepdims=True)) @ v[:, :, h // group]
    outs, start = [], 0
    for i, x in enumerate(xs):
        w = params["attn_vec_einsum" + (f"_{i}" if i else "")]["w"]
        outs.append(np.einsum("btnh,nhd->btd", out[:, start : start + x.shape[1]], w))
        start += x.shape[1]
    return outs


def error(found, wanted):
    """Relative Frobenius norm over a whole tree."""
    pairs = list(zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True))
    off = sum(float(np.square(np.asarray(a, np.float64) - np.asarray(b, np.float64)).sum()) for a, b in pairs)
    size = sum(float(np.square(np.asarray(b, np.float64)).sum()) for _, b in pairs)
    return (off / size) ** 0.5


def shapes(params):
    """Path -> shape of every parameter."""
    flat, _ = jax.tree_util.tree_flatten_with_path(params)
    return {"/".join(str(key.key) for key in path): tuple(leaf.shape) for path, leaf in flat}
