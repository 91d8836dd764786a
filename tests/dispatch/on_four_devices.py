"""Run by test_jax_shards.py in a process of its own, where a CPU is four devices: prints one JSON document."""

from __future__ import annotations

import json
import warnings

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import attnbench as ab
from attnbench import registry
from attnbench.errors import Unsupported
from attnbench.spec import Implementation

warnings.simplefilter("ignore")
BATCH, TOKENS, HEADS, DIM = 4, 12, 4, 8
built = []


class Kernel(Implementation):
    """Notes what it is built for, and computes as jax.einsum does; XLA cannot partition it."""

    name, framework, lse_gradient = "jax.kernel", "jax", True

    def supports(self, workload, environment):
        return None

    def build(self, workload, config):
        built.append([workload.batch, workload.heads, workload.kv_heads])
        return registry.get("jax.einsum").build(workload, config)

    def build_lse(self, workload, config):
        built.append([workload.batch, workload.heads, workload.kv_heads])
        return registry.get("jax.einsum").build_lse(workload, config)


registry.register(Kernel())


def arrays(kv_heads=HEADS):
    keys = jax.random.split(jax.random.key(0), 3)
    return [jax.random.normal(key, (BATCH, TOKENS, n, DIM)) for key, n in zip(keys, (HEADS, kv_heads, kv_heads))]


def apart(found, wanted):
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(wanted))
    return max(float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in pairs)


def spread(mesh, some, *specs):
    return [jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec))) for x, spec in zip(some, specs)]


def mesh_of(kind):
    return Mesh(np.array(jax.devices()).reshape(2, 2), ("data", "model"), axis_types=(kind, kind))


def separate(kind):
    """Each device computes its own batch rows and heads: outside jit, in a program, and its gradients."""
    said = {}
    for name, kv_heads, of_q, of_k in (
        ("batch and heads", 4, ("data", None, "model"), ("data", None, "model")),
        ("grouped heads", 2, ("data", None, "model"), ("data", None, "model")),
        ("one key head", 1, ("data", None, "model"), ("data",)),
        ("batch over both", 4, (("data", "model"),), (("data", "model"),)),
    ):
        plain, mesh = arrays(kv_heads), mesh_of(kind)

        def call(q, k, v):
            return ab.attention(q, k, v, mask=ab.masks.causal(), impl="jax.kernel", return_lse=True)

        def loss(q, k, v):
            return (call(q, k, v)[0] ** 2).sum()

        wanted, gradients = call(*plain), jax.grad(loss, (0, 1, 2))(*plain)
        built.clear()
        with jax.sharding.set_mesh(mesh):
            some = spread(mesh, plain, of_q, of_k, of_k)
            errors = [apart(call(*some), wanted)]
            explained = ab.explain(*some, mask=ab.masks.causal(), impl="jax.kernel").workload
            if kind is AxisType.Explicit:
                errors.append(apart(jax.jit(call)(*some), wanted))
                errors.append(apart(jax.jit(jax.grad(loss, (0, 1, 2)))(*some), gradients))
        sizes = [explained.batch, explained.heads, explained.kv_heads]
        said[name] = {"errors": errors, "built": sorted(map(list, {*map(tuple, built)})), "asked": sizes}
    return said


def other():
    """Shardings that devices cannot compute apart: XLA partitions what it can, and the rest is refused."""
    mesh, plain = mesh_of(AxisType.Auto), arrays()
    said = {}
    lengths = ab.masks.lengths([3, 12, 7, 1])
    for name, mask, specs in (
        ("tokens", ab.masks.causal(), [(None, "data")] * 3),
        ("q alone", ab.masks.causal(), [("data",), (), ()]),
        ("a mask per sequence", lengths, [("data",)] * 3),
    ):
        some = spread(mesh, plain, *specs)
        error = apart(ab.attention(*some, mask=mask), ab.attention(*plain, mask=mask))
        pick = ab.explain(*some, mask=mask).pick
        try:
            ab.attention(*some, mask=mask, impl="jax.kernel")
            refused = None
        except Unsupported as why:
            refused = str(why)
        said[name] = {"error": error, "pick": pick, "refused": refused}
    try:
        ab.attention(*spread(mesh, plain, *[("data",)] * 3), impl="jax.ring")
    except Unsupported as why:
        said["ring"] = str(why)
    whole = spread(mesh, plain, (), (), ())
    said["replicated"] = apart(ab.attention(*whole, impl="jax.kernel"), ab.attention(*plain))
    return said


print(json.dumps({"auto": separate(AxisType.Auto), "explicit": separate(AxisType.Explicit), "other": other()}))
