"""Run by test_jax_mesh.py in a process of its own, where a CPU is eight devices: prints one JSON document.

Errors of out, lse, dq, dk and dv against float64 for each case, and what a whole cell's record says.
"""

from __future__ import annotations

import json

import jax
import numpy as np
from jax_oracle import draw, oracle

from attnbench import masks
from attnbench.errors import UsageError
from attnbench.kernels.ring.jax_ring import ALL_GATHER, RING
from attnbench.run import protocol as p
from attnbench.run.remote import Local
from attnbench.spec import Cell, Workload

WORK = {"batch": 2, "q_len": 61, "heads": 4, "kv_heads": 2, "head_dim": 16, "mask": masks.causal()}
CASES = {
    "zigzag on 8": (RING, {}, {}),
    "striped on 3, softcap": (RING, {"world": 3, "layout": "striped"}, {"softcap": 5.0}),
    "contiguous on 4, full, narrow values": (
        RING, {"world": 4, "layout": "contiguous"}, {"mask": masks.full(), "v_head_dim": 8},
    ),
    "gathered, fewer keys": (ALL_GATHER, {"world": 4}, {"q_len": 40, "kv_len": 21}),
}  # fmt: skip


def errors(implementation, config, given):
    """Largest absolute differences; -inf must meet -inf."""
    work = Workload(**{**WORK, **given})
    exact = draw(work)
    want = oracle(work, *exact)
    q, k, v, dout = (jax.numpy.asarray(x, "float32") for x in exact)
    call = implementation.build_lse(work, config)

    @jax.jit
    def both(q, k, v, dout):
        found, pull_back = jax.vjp(lambda *qkv: call(*qkv), q, k, v)
        return *found, *pull_back((dout, jax.numpy.zeros_like(found[1])))

    got = dict(zip(("out", "lse", "dq", "dk", "dv"), both(q, k, v, dout)))
    apart = {}
    for name, array in got.items():
        array, truth = np.asarray(array, np.float64), want[name]
        assert (np.isneginf(array) == np.isneginf(truth)).all(), name
        finite = np.isfinite(truth)
        apart[name] = float(np.abs(array[finite] - truth[finite]).max())
    return apart


def record(name):
    work = Workload(**WORK, pass_="backward")
    worker = Local("jax", "cpu")
    cell = Cell(name, work, {"world": 2})
    opened = worker.ask(p.Open(cell, False, True, None, 7), 60)
    assert isinstance(opened, p.Opened), opened
    warm = worker.ask(p.WarmUp(cell.id), 60)
    sampled = worker.ask(p.TakeSample(cell.id, "main", 2, 1), 60)
    ranks = opened.record.ranks
    facts = {"how": ranks.how, "world": ranks.world, "tokens": sum(ranks.tokens), "reason": ranks.reason}
    return facts | {"clock": warm.clock, "ns": min(sampled.ns), "peaks": len(ranks.peak_bytes)}


def float64():
    """A float64 cell is float64 all the way."""
    work = Workload(batch=1, q_len=9, heads=2, head_dim=8, dtype="float64")
    answer = Local("jax", "cpu").ask(p.Open(Cell("jax.all-gather", work, {"world": 2}), False, False, None, 7), 60)
    return answer.record.errors.forward


def refused():
    try:
        RING.build(Workload(**WORK), {"world": 9})(*(jax.numpy.ones((2, 61, 4, 16)),) * 3)
    except UsageError as error:
        return str(error)


def dilated_by_explicit_axes():
    """Largest differences of jax.dilated's gradients if batch, tokens or heads are sharded over an explicit axis."""
    from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

    import attnbench as ab

    arrays = [jax.random.normal(jax.random.key(n), (4, 16, 4, 8)) for n in range(3)]
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",), axis_types=(AxisType.Explicit,))

    def loss(q, k, v):
        return (ab.attention(q, k, v, mask=ab.masks.dilated([8, 16], [1, 2]), impl="jax.dilated") ** 2).sum()

    want, found = jax.grad(loss, (0, 1, 2))(*arrays), {}
    with jax.sharding.set_mesh(mesh):
        for name, spec in (("batch", ("x",)), ("tokens", (None, "x")), ("heads", (None, None, "x"))):
            sharded = [jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec))) for x in arrays]
            got = jax.jit(jax.grad(loss, (0, 1, 2)))(*sharded)
            pairs = [(np.asarray(a), np.asarray(b)) for a, b in zip(got, want)]
            found[name] = max(float(np.abs(a - b).max()) for a, b in pairs)
    return found


print(
    json.dumps(
        {
            "cases": {name: errors(*case) for name, case in CASES.items()},
            "record": record("jax.ring"),
            "float64": float64(),
            "refused": refused(),
            "dilated": dilated_by_explicit_axes(),
        }
    )
)
