"""Rotary positions and low-rank updates against their definitions."""

from __future__ import annotations

import numpy as np
import pytest

jax = pytest.importorskip("jax")
pytest.importorskip("flax")

import jax.numpy as jnp
from gemma_cases import attention, error, positions, random_params, rotated, run, tokens

from attnbench.errors import UsageError
from attnbench.models import gemma, lora
from attnbench.models import masks as token_masks
from attnbench.models.rope import apply_rope

pytestmark = pytest.mark.jax
UPDATES = {"attn": lora.LoRAConfig(rank=4, alpha=6.0), "ffn": lora.LoRAConfig(rank=3, alpha=9.0)}
RS = {"attn": lora.LoRAConfig(rank=4, alpha=6.0, rslora=True), "ffn": lora.LoRAConfig(rank=3, alpha=9.0, rslora=True)}
SIZES = {"width": 32, "depth": 2, "mlp_dim": 48, "num_heads": 4, "num_kv_heads": 1, "head_dim": 8}


class TestRope:
    def test_halves_turn_as_complex_numbers(self):
        x = tokens(2, 9, 3, 16)
        at = jnp.asarray(np.random.default_rng(0).integers(-1, 1000, (2, 9)))
        found = apply_rope(x, at)
        np.testing.assert_allclose(found, rotated(np.asarray(x, np.float64), at), atol=2e-4)
        assert found.dtype == jnp.float32

    def test_bfloat16_comes_back_as_float32(self):
        assert apply_rope(tokens(1, 2, 1, 8, dtype=jnp.bfloat16), positions(1, 2)).dtype == jnp.float32

    def test_products_depend_on_distance_alone(self):
        q, k = tokens(1, 1, 1, 16, seed=1), tokens(1, 1, 1, 16, seed=2)
        at = [(5, 3), (105, 103), (1005, 1003)]
        found = [float((apply_rope(q, jnp.array([[i]])) * apply_rope(k, jnp.array([[j]]))).sum()) for i, j in at]
        np.testing.assert_allclose(found, found[0], rtol=1e-3)
        assert abs(found[0] - float((q * k).sum())) > 1e-3


@pytest.mark.parametrize("updates", [UPDATES, RS], ids=["alpha/rank", "alpha/sqrt(rank)"])
def test_a_merged_model_computes_the_same(updates):
    plain = gemma.Config(**SIZES)
    experts = [
        gemma.Config(**SIZES, lora_configs=updates),
        gemma.Config(**(SIZES | {"width": 16}), lora_configs=updates),
    ]
    model = gemma.Module(experts, "float32", vocab_size=11)
    params = random_params(model, method="init_all")
    names = [path for path, _ in jax.tree_util.tree_leaves_with_path(params) if "lora" in str(path)]
    assert len(names) == 2 * (3 * 2 + 4)
    merged = lora.merge(params, [updates, updates])
    assert not [path for path, _ in jax.tree_util.tree_leaves_with_path(merged) if "lora" in str(path)]
    other = gemma.Module([plain, gemma.Config(**(SIZES | {"width": 16}))], "float32", vocab_size=11)
    xs = [tokens(2, 5, 32, seed=1), tokens(2, 3, 16, seed=2)]
    mask = token_masks.in_blocks((5, 3))
    wanted, _ = run(model, params, xs, positions(2, 8), mask)
    found, _ = run(other, merged, xs, positions(2, 8), mask)
    assert error(found, wanted) < 1e-5
    without = jax.tree_util.tree_map_with_path(lambda p, x: x * ("lora" not in str(p)), params)
    bare, _ = run(model, without, xs, positions(2, 8), mask)
    assert error(bare, wanted) > 1e-2, "the updates do something"


def test_the_output_projection_sums_over_heads_on_both_sides():
    """Per head, A[n] @ B[n], is what one would expect and not what openpi computes."""
    config = gemma.Config(**SIZES, lora_configs=UPDATES)
    x, at, mask = tokens(1, 4, 32), positions(1, 4), token_masks.in_blocks((4,))
    params = random_params(attention((config,)), [x], at, mask, None)
    part = params["attn_vec_einsum"]
    update = (lora.merge(params, UPDATES)["attn_vec_einsum"]["w"] - part["w"]) / UPDATES["attn"].scaling_value
    for n in range(4):
        np.testing.assert_allclose(update[n], part["lora_a"][n] @ part["lora_b"].sum(0), atol=1e-6)
        assert np.abs(update[n] - part["lora_a"][n] @ part["lora_b"][n]).max() > 1e-3
    wanted, _ = run(attention((config,)), params, [x], at, mask, None)
    plain = attention((gemma.Config(**SIZES),))
    found, _ = run(plain, lora.merge(params, UPDATES), [x], at, mask, None)
    assert error(found, wanted) < 1e-5
    per_head = lora.merge(params, UPDATES)
    per_head["attn_vec_einsum"] = {"w": part["w"] + part["lora_a"] @ part["lora_b"] * UPDATES["attn"].scaling_value}
    assert error(run(plain, per_head, [x], at, mask, None)[0], wanted) > 1e-2


def test_equations_of_openpi():
    config = lora.LoRAConfig(rank=2)
    assert lora.low_rank_equations("BTD,NDH->BTNH", config) == ("BTD,NDL->BTNL", "BTNL,NLH->BTNH")
    assert lora.low_rank_equations("BTNH,NHD->BTD", config) == ("BTNH,NHL->BTL", "BTL,NLD->BTD")
    assert lora.low_rank_equations("BSD,2KDH->2BSKH", config) == ("BSD,2KDL->2BSKL", "2BSKL,2KLH->2BSKH")


def test_mistakes_are_named():
    config = lora.LoRAConfig(rank=2)
    with pytest.raises(UsageError, match="already in"):
        lora.low_rank_equations("BTL,NLH->BTNH", config)
    with pytest.raises(UsageError, match="equation"):
        lora.low_rank_equations("BTD->BTH", config)
    tree = {"q_einsum_1": {"w": np.ones((1, 2, 2)), "lora_a": np.ones((1, 2, 1)), "lora_b": np.ones((1, 1, 2))}}
    with pytest.raises(UsageError, match='expert 1 has no "attn"'):
        lora.merge(tree, [UPDATES])
