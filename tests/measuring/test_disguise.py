"""Disguised inputs: new to everybody, and their answers follow from the plain ones bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

from attnbench import frameworks, registry
from attnbench.frameworks import OUTPUTS
from attnbench.measuring.disguise import Wardrobe
from attnbench.measuring.draws import Draws
from attnbench.spec import Workload
from attnbench.workloads import masks

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
    return (
        framework,
        programs.main,
        inputs,
        Wardrobe(framework, workload, implementation.layout, np.random.default_rng(1)),
    )


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", SUBJECTS)
def test_results_are_the_same_bits_once_undressed(name, case):
    workload = Workload(batch=2, q_len=16, heads=4, kv_heads=2, head_dim=16, pass_="train", **CASES[case])
    framework, program, inputs, wardrobe = programs_of(name, workload)
    disguised = wardrobe.disguised(program)
    for one in (inputs[1], inputs[0], inputs[1]):
        plain = program.run(program.prepare(one))
        dressed = disguised.run(disguised.prepare(one))
        for output, expected, found in zip(OUTPUTS["train"], plain, dressed):
            undressed = wardrobe.undressed(output, found, one)
            assert framework.same_bits(undressed + 0.0, expected + 0.0), output


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.torch
def test_sixteen_bits_too(dtype):
    workload = Workload(batch=2, q_len=32, heads=4, head_dim=16, dtype=dtype)
    framework, program, inputs, wardrobe = programs_of("torch.sdpa-flash", workload)
    disguised = wardrobe.disguised(program)
    (plain,), (dressed,) = program.run(inputs[0]), disguised.run(disguised.prepare(inputs[0]))
    assert framework.same_bits(wardrobe.undressed("out", dressed, inputs[0]) + 0.0, plain + 0.0)


def test_every_preparation_is_new_and_the_inputs_stay():
    workload = Workload(batch=2, q_len=8, heads=4, kv_heads=2, head_dim=16, pass_="train")
    framework, program, inputs, wardrobe = programs_of("numpy.float32", workload)
    before = framework.snapshot(tuple(inputs[0]))
    disguised = wardrobe.disguised(program)
    worn = [disguised.prepare(inputs[0]) for _ in range(20)]
    for which in (0, 1):
        assert len({one[which].tobytes() for one in worn}) == 20
    for which in (2, 3):
        assert len({one[which].tobytes() for one in worn}) > 10, "V and dO have few factors, Q and K have many signs"
    assert all(framework.same_bits(a, b) for a, b in zip(before, inputs[0]))
