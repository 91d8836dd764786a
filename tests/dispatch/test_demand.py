"""The workload read off live arrays is the one that a suite or a file would name."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

import attnbench as ab
from attnbench import frameworks, masks
from attnbench.dispatch.demand import device_of, framework_of, to_layout
from attnbench.errors import InvalidWorkload
from attnbench.impls._arguments import dtype_name, workload_of
from attnbench.spec import Workload

FRAMEWORKS = ["numpy", *(pytest.param(name, marks=getattr(pytest.mark, name)) for name in ("torch", "jax"))]
MASKS = [
    None,
    masks.causal("top-left"),
    masks.causal() & masks.lengths([3, 9]),
    masks.documents(np.arange(9) // 4),
    masks.dense(np.linspace(-1, 1, 45, dtype=np.float32).reshape(5, 9)),
]


def arrays(framework, layout="bshd", dtype="float32"):
    shapes = [(2, 5, 4, 8), (2, 9, 2, 8), (2, 9, 2, 6)]
    if layout == "bhsd":
        shapes = [(b, h, s, d) for b, s, h, d in shapes]
    if layout == "packed":
        shapes = [(b, s, h * d) for b, s, h, d in shapes]
    return [frameworks.get(framework).array(np.ones(shape, np.float32), dtype, "cpu") for shape in shapes]


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("layout", ["bshd", "bhsd", "packed"])
@pytest.mark.parametrize("mask", MASKS, ids=lambda mask: mask.id if mask else "none")
def test_the_id_is_the_same_by_hand_from_arrays_and_from_a_file(framework, layout, mask):
    fields = {"scale": 0.5, "softcap": 30.0, "mask": mask}
    by_hand = Workload(batch=2, q_len=5, kv_len=9, heads=4, kv_heads=2, head_dim=8, v_head_dim=6, **fields)
    live = workload_of(
        *arrays(framework, layout), layout=layout, heads=(4, 2) if layout == "packed" else None, **fields
    )
    stored = msgspec.json.decode(msgspec.json.encode(by_hand), type=Workload)
    assert live.id == by_hand.id == stored.id
    assert live == by_hand == stored
    assert hash(live) == hash(stored)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_dtypes_have_one_name_everywhere(framework, dtype):
    if framework == "numpy" and dtype == "bfloat16":
        pytest.skip("NumPy has no bfloat16")
    assert workload_of(*arrays(framework, dtype=dtype)).dtype == dtype
    assert dtype_name(arrays(framework, dtype=dtype)[0]) == dtype


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_framework_and_device(framework):
    found = arrays(framework)
    assert framework_of(*found) == framework
    if framework != "jax":
        assert device_of(found[0], framework) == "cpu"
    else:
        assert device_of(found[0], framework) in frameworks.get("jax").devices()


@pytest.mark.jax
def test_a_traced_array_is_a_jax_array():
    import jax

    kinds = []
    jax.jit(lambda x: (kinds.append((framework_of(x), dtype_name(x), device_of(x, "jax"))), x)[1])(arrays("jax")[0])
    assert kinds == [("jax", "float32", frameworks.get("jax").devices()[0])]


@pytest.mark.jax
def test_explain_needs_shapes_only():
    import jax

    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays("jax")]
    assert ab.explain(*shapes).pick == ab.explain(*arrays("jax")).pick


@pytest.mark.torch
def test_a_parameter_is_a_torch_array():
    import torch

    assert framework_of(torch.nn.Parameter(torch.ones(2))) == "torch"


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("source", ["bshd", "bhsd", "packed"])
@pytest.mark.parametrize("target", ["bshd", "bhsd", "packed"])
def test_layouts_convert_into_each_other(framework, source, target):
    values = np.arange(2 * 5 * 4 * 8, dtype=np.float32).reshape(2, 5, 4, 8)
    forms = {"bshd": values, "bhsd": values.transpose(0, 2, 1, 3), "packed": values.reshape(2, 5, 32)}
    adapter = frameworks.get(framework)
    array = adapter.array(np.ascontiguousarray(forms[source]), "float32", "cpu")
    np.testing.assert_array_equal(adapter.numpy(to_layout(array, source, target, heads=4)), forms[target])


@pytest.mark.parametrize("heads", [0, (0, 0), [4, 2], "4:2", "4", (4,), (4, 2, 2), (4, -2), True, 4.0], ids=repr)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_heads_of_packed_arrays_are_numbers(framework, heads):
    with pytest.raises(InvalidWorkload, match="heads= must be a number of heads"):
        ab.attention(*arrays(framework, "packed"), layout="packed", heads=heads)
