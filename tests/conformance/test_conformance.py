"""Every registered implementation, third parties' included, on the edges: right, or refused with a reason."""

from __future__ import annotations

import msgspec
import pytest

from attnbench import frameworks, masks, registry
from attnbench.run import protocol as p
from attnbench.run.remote import Local
from attnbench.spec import Cell, Workload
from attnbench.workloads.catalogue import edge

EDGES = {
    "one key": "b2-t64x1-h4-d32-full-float32-forward",
    "primes": "b3-t61x127-h5-d32-causal-float32-forward",
    "grouped heads, gradients": "b2-t64-h6:2-d32-causal-float32-train",
    "bfloat16, gradients": "b2-t64-h4-d32-causal-bfloat16-train",
    "rows that see nothing, gradients": "b2-t96x40-h4-d32-causal-float32-train",
    "top-left": "b2-t40x96-h4-d32-causal-topleft-float32-forward",
    "narrow values": "b2-t64-h4-d48/32-causal-float32-forward",
    "an empty batch row": "b2-t64-h4-d32-lengths-f96b0713-float32-forward",
    "left padding": "b2-t64-h4-d32-causal&valid-9b97ab12-float32-forward",
    "window": "b2-t64-h4-d32-window7:3-float32-forward",
    "bias with -inf": "b2-t64-h4-d32-bias-e6471880-float32-forward",
    "dilated": "b2-t64-h4-d32-causal&dilated16r1+32r2+64r4-float32-forward",
    "softcap": "b2-t64-h4-d32-causal-float32-forward-softcap=5",
    "blocks and causal, gradients": "b2-t64-h4:2-d32-causal&blocks16-d091576c-float32-train",
}
BLOCKS = {  # kernels that are interpreted here take whole blocks, and their time
    "whole blocks": Workload(batch=1, q_len=128, heads=2, head_dim=32, mask=masks.causal()),
    "whole blocks, grouped": Workload(batch=1, q_len=128, heads=2, kv_heads=1, head_dim=32),
}
DILATED = {
    "dilated": "b2-t64-h4-d32-causal&dilated16r1+32r2+64r4-float32-train",
    "dilated, skipped rows": "b2-t64-h4-d32-dilated32r2-float32-forward",
    "dilated, group offsets": "b2-t64-h4-d32-dilated16r1+32r3+64r6-group-float32-forward",
    "dilated, no rate divides a segment": "b2-t61-h12-d32-dilated16r1+32r6+61r12-float32-train",
    "dilated, grouped heads": "b2-t64-h6:2-d32-causal&dilated16r1+64r4-float32-train",
    "dilated, an empty batch row": "b2-t64-h4-d32-dilated16r1+64r3&lengths-aab9928a-float32-train",
    "dilated, 16 bits": "b2-t64-h4-d32-causal&dilated16r1+64r4-bfloat16-train",
    "another mask": EDGES["window"],
}
INTERPRETED = ("jax.pallas-triton", "jax.splash")
COMPILED = {"torch.compiled": "softcap", "torch.flex": "window"}
FOR_JAX = ("primes", "grouped heads, gradients", "an empty batch row", "bias with -inf", "dilated")
"""XLA compiles each in seconds; the tests of impls/ and dispatch/ have the rest."""
FOR_RINGS = ("primes", "grouped heads, gradients", "rows that see nothing, gradients", "window", "dilated")
"""Every call goes to other processes and back; tests/kernels/ring has the rest."""
PAIRS = (
    "torch.pair[forward=torch.sdpa-flash,backward=torch.eager]",
    "torch.pair[forward=torch.eager,backward=torch.sdpa-flash]",
    "torch.pair[forward=torch.block-sparse,backward=torch.eager]",
    "torch.pair[forward=torch.eager,backward=torch.block-sparse]",
)
COMPUTE_ALL = ("torch.eager", "jax.einsum")
BY_ID = {workload.id: workload for workload in edge()}


def cases_of(name):
    """Case -> workload."""
    if name in PAIRS:
        # The gradients of one key are 0: what rounding leaves of them has no bound to be held to.
        cases = {case: BY_ID[workload] for case, workload in EDGES.items() if case != "one key"}
        return {case: msgspec.structs.replace(workload, pass_="train") for case, workload in cases.items()}
    if name in INTERPRETED:
        return BLOCKS
    if name.startswith("torch.dilated"):
        return {case: BY_ID[workload] for case, workload in DILATED.items()}
    if name.startswith("torch.ring"):
        return {case: BY_ID[EDGES[case]] for case in FOR_RINGS}
    chosen = [COMPILED[name]] if name in COMPILED else FOR_JAX if name.startswith("jax.") else EDGES
    return {case: BY_ID[EDGES[case]] for case in chosen}


def cells():
    for name in (*registry.names(), *PAIRS):
        marks = [getattr(pytest.mark, name.partition(".")[0])] if name.startswith(("torch.", "jax.")) else []
        marks += [pytest.mark.slow(reason="compiles with the C++ compiler")] if name in COMPILED else []
        for case, workload in cases_of(name).items():
            yield pytest.param(name, workload, id=f"{name}-{case}", marks=marks)


@pytest.fixture(scope="module")
def workers():
    """One per framework, here; all implementations of a workload are then judged by the same draws."""
    started: dict[str, Local] = {}

    def worker(framework):
        if framework not in started:
            started[framework] = Local(framework, "cpu")
        return started[framework]

    yield worker
    for one in started.values():
        one.kill()


@pytest.mark.parametrize("name, workload", list(cells()))
def test_it_is_right_or_refuses_with_a_reason(name, workload, workers):
    name, config = registry.asked(name)
    implementation = registry.get(name)
    if not frameworks.installed(implementation.framework):
        pytest.skip(f"{implementation.framework} is not installed")
    question = p.Open(Cell(name, workload, config), thorough=True, measure=False, clock=None, seed=11)
    record = workers(implementation.framework).ask(question, 60).record
    assert record.status in ("ok", "unsupported"), f"{record.status}: {record.reason}\n{record.detail}"
    if record.status == "unsupported":
        assert len(record.reason) > 10, "a refusal says why"
        assert name not in (*COMPUTE_ALL, *INTERPRETED), f"the one that computes everything refused: {record.reason}"
    else:
        assert record.errors.properties or workload.pass_ == "backward"
        assert record.verified_at.share == 1.0
        assert (record.errors.backward is not None) == workload.needs_gradients


def test_the_edges_are_edges_of_the_suite():
    assert {*EDGES.values(), *DILATED.values()} <= set(BY_ID)
    assert len(set(EDGES.values())) == len(EDGES) >= 12
