"""A JAX model: which attention should its layer call, and does the model still compute the same?

    python examples/jax_model.py --quick

The layer calls `ab.attention` with the name of an implementation. The choice is made while JAX traces the function, so
the compiled model holds nothing but the one that was chosen.
"""

import argparse

import jax
import jax.numpy as jnp

import attnbench as ab
from attnbench.analyse.summary import closing, rank

HEADS, KV_HEADS, DIM = 8, 2, 32


def layer(weights, x, impl):
    """Pre-normalised self-attention with grouped heads and a residual; x is [batch, tokens, HEADS * DIM]."""
    normal = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)
    q, k, v = (normal @ weights[name] for name in "qkv")
    out = ab.attention(q, k, v, mask=ab.masks.causal(), layout="packed", heads=(HEADS, KV_HEADS), impl=impl)
    return x + out @ weights["o"]


def make_weights(key):
    """Random projections of one layer."""
    width, kv_width = HEADS * DIM, KV_HEADS * DIM
    shapes = {"q": (width, width), "k": (width, kv_width), "v": (width, kv_width), "o": (width, width)}
    keys = jax.random.split(key, len(shapes))
    return {name: jax.random.normal(k, shape) * shape[0] ** -0.5 for k, (name, shape) in zip(keys, shapes.items())}


def main(quick: bool) -> None:
    """Measure on the layer's shape, then run the layer with the fastest and with the plain one."""
    length = 128 if quick else 1024
    shape = {"batch": 2, "q_len": length, "heads": HEADS, "kv_heads": KV_HEADS, "head_dim": DIM, "causal": True}
    names = ["jax.einsum", "jax.xla"]
    records = ab.compare_implementations(names, shape, framework="jax", trials=10 if quick else None)
    rows = rank(records)
    for row in rows:
        told = row.reason if row.record.time is None else f"{row.record.time.median_ns / 1e6:.3f} ms"
        print(f"{'=' if row.tied else row.rank or '-':>2}  {row.implementation:12} {told}")

    best, other = rows[0].implementation, rows[-1].implementation
    step = jax.jit(layer, static_argnames="impl")
    weights, x = make_weights(jax.random.key(0)), jax.random.normal(jax.random.key(1), (2, length, HEADS * DIM))
    apart = jnp.abs(step(weights, x, impl=best) - step(weights, x, impl=other)).max()
    print(f"the layer's output differs by at most {apart:.0e} between the two")
    print(f'Call ab.attention(..., impl="{best}"): {closing(records)}')


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small shape and few samples")
    main(parser.parse_args().quick)
