"""Transformed inputs: no two calls get the same logits, unless the answer is to be known bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

from attnbench import frameworks, masks, registry
from attnbench.frameworks import OUTPUTS
from attnbench.spec import Workload
from attnbench.verifying.draws import Draws
from attnbench.verifying.input_transforms import CallInputs, Transforms

SUBJECTS = [
    "numpy.float32",
    pytest.param("torch.eager", marks=pytest.mark.torch),
    pytest.param("torch.sdpa-flash", marks=pytest.mark.torch),
    pytest.param("jax.einsum", marks=pytest.mark.jax),
]
CASES = {
    "grouped causal": {"mask": masks.causal()},
    "softcap and scale": {"softcap": 5.0, "scale": 0.3},
    "weighted": {"mask": masks.dilated((8, 16), (1, 2))},
    "rows that see nothing": {"mask": masks.lengths([0, 9])},
}


def programs_of(name, workload):
    implementation = registry.get(name)
    framework = frameworks.get(implementation.framework)
    if (reason := implementation.supports(workload, framework.environment("cpu"))) is not None:
        pytest.skip(reason)
    draws = Draws(framework, "cpu", workload, 5)
    inputs = draws.inputs(implementation.layout)
    programs = framework.programs(implementation.build(workload, {}), workload.pass_, inputs[0])
    transforms = Transforms(framework, "cpu", workload, implementation.layout, np.random.default_rng(1))
    return framework, programs.main, inputs, transforms


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", SUBJECTS)
def test_results_of_known_transforms_are_the_same_bits_once_undone(name, case):
    workload = Workload(batch=2, q_len=16, heads=4, kv_heads=2, head_dim=16, pass_="train", **CASES[case])
    framework, program, inputs, transforms = programs_of(name, workload)
    for one in (inputs[1], inputs[0], inputs[1]):
        transform = transforms.known()
        plain = program.run(program.prepare(one))
        changed = program.run(program.prepare(transforms.apply(one, transform)))
        for output, expected, found in zip(OUTPUTS["train"], plain, changed):
            assert framework.same_bits(transforms.undo(output, found, transform) + 0.0, expected + 0.0), output


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.torch
def test_sixteen_bits_too(dtype):
    workload = Workload(batch=2, q_len=32, heads=4, head_dim=16, dtype=dtype)
    framework, program, inputs, transforms = programs_of("torch.sdpa-flash", workload)
    transform = transforms.known()
    (plain,), (changed,) = program.run(inputs[0]), program.run(transforms.apply(inputs[0], transform))
    assert framework.same_bits(transforms.undo("out", changed, transform) + 0.0, plain + 0.0)


def test_every_preparation_is_new_and_the_inputs_stay():
    workload = Workload(batch=2, q_len=8, heads=4, kv_heads=2, head_dim=16, pass_="train")
    framework, program, inputs, transforms = programs_of("numpy.float32", workload)
    before = framework.snapshot(tuple(inputs[0]))
    made = CallInputs(inputs, transforms, 20, 0)
    prepared = [program.prepare(made[call]) for call in range(20)]
    for which in range(4):
        assert len({one[which].tobytes() for one in prepared}) == 20
    assert [which for which, _ in made.used.values()] == [0, 1] * 10
    assert all(framework.same_bits(a, b) for a, b in zip(before, inputs[0]))


@pytest.mark.parametrize("kind", ["normal", "structured"])
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_no_two_calls_have_logits_that_are_the_same_but_for_a_factor(kind, layout):
    """Nor P = softmax(QK^T), so that keeping them is of no use; and Q, K, V and dO stay as large as they were."""
    workload = Workload(batch=1, q_len=8, heads=4, kv_heads=2, head_dim=64, pass_="train", inputs=kind)
    framework = frameworks.get("numpy")
    inputs = Draws(framework, "cpu", workload, 5).inputs(layout)[:1]
    made = CallInputs(inputs, Transforms(framework, "cpu", workload, layout, np.random.default_rng(2)), 12, 0)
    calls = [made[call].settled() for call in range(12)]
    logits = []
    for one in calls:
        q, k = (x if layout == "bhsd" else x.transpose(0, 2, 1, 3) for x in (one.q, one.k))
        logits.append((q @ np.repeat(k, 2, axis=1).transpose(0, 1, 3, 2))[0])
        for name, changed in one._asdict().items():
            if name == "q" and kind == "structured":
                assert 1 < np.linalg.norm(changed) / np.linalg.norm(inputs[0].q) < 1.1
            else:
                assert np.array_equal(
                    np.sort(np.abs(changed), axis=None), np.sort(np.abs(inputs[0]._asdict()[name]), axis=None)
                )
    most = 0.7 if kind == "normal" else 0.9999
    for n, a in enumerate(logits):
        for b in logits[:n]:
            for head in range(4):
                alike = np.sum(a[head] * b[head]) / np.linalg.norm(a[head]) / np.linalg.norm(b[head])
                assert abs(alike) < most


def test_the_cotangent_is_made_only_after_the_forward_pass_and_differs_by_more_than_signs():
    workload = Workload(batch=1, q_len=64, heads=2, head_dim=8, pass_="backward")
    framework = frameworks.get("numpy")
    inputs = Draws(framework, "cpu", workload, 5).inputs("bshd")
    made = CallInputs(inputs, Transforms(framework, "cpu", workload, "bshd", np.random.default_rng(3)), 8, 0)
    douts = [made[call] for call in range(0, 8, 2)]
    assert all(callable(one.dout) for one in douts), "nothing exists of it that could be read"
    sizes = {np.abs(one.cotangent()).tobytes() for one in douts}
    assert len(sizes) == 4, "what was summed up for |dO| is of no use for the next call"
