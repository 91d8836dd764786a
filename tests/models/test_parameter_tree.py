"""Names and shapes of parameters are openpi's: a table of them, so that its checkpoints load."""

from __future__ import annotations

import pytest

jax = pytest.importorskip("jax")
pytest.importorskip("flax")

import jax.numpy as jnp
from gemma_cases import shapes

from attnbench.models import gemma, gemma_fast, pi0, pi0_fast

pytestmark = pytest.mark.jax
VOCABULARY = 257_152


def expert(suffix, width, mlp, adarms=False):
    """One expert of a model of 18 layers with 8 query heads, 1 key head, head_dim 256."""
    stacked = {
        f"attn/q_einsum{suffix}/w": (18, 8, width, 256),
        f"attn/kv_einsum{suffix}/w": (18, 2, 1, width, 256),
        f"attn/attn_vec_einsum{suffix}/w": (18, 8, 256, width),
        f"mlp{suffix}/gating_einsum": (18, 2, width, mlp),
        f"mlp{suffix}/linear": (18, mlp, width),
    }
    norms = {}
    for name in (f"pre_attention_norm{suffix}", f"pre_ffw_norm{suffix}"):
        if adarms:
            norms |= {f"{name}/Dense_0/kernel": (18, width, 3 * width), f"{name}/Dense_0/bias": (18, 3 * width)}
        else:
            norms |= {f"{name}/scale": (18, width)}
    last = (
        {f"final_norm{suffix}/Dense_0/kernel": (width, 3 * width), f"final_norm{suffix}/Dense_0/bias": (3 * width,)}
        if adarms
        else {f"final_norm{suffix}/scale": (width,)}
    )
    return {f"layers/{name}": shape for name, shape in (stacked | norms).items()} | last


TABLE = {"embedder/input_embedding": (VOCABULARY, 2048)} | expert("", 2048, 16_384)


def tree(module, *args, **words):
    return shapes(jax.eval_shape(lambda key: module.init(key, *args, **words), jax.random.key(0))["params"])


def configs(*variants):
    return [gemma.get_config(variant) for variant in variants]


def test_gemma_of_pi0():
    module = gemma.Module(configs("gemma_2b", "gemma_300m"), "bfloat16")
    assert tree(module, method="init_all") == TABLE | expert("_1", 1024, 4096)


def test_gemma_of_pi05():
    module = gemma.Module(configs("gemma_2b", "gemma_300m"), "bfloat16", adarms=True)
    found = tree(module, use_adarms=[False, True], method="init_all")
    assert found == TABLE | expert("_1", 1024, 4096, adarms=True)


def test_gemma_fast():
    module = gemma_fast.Module(**gemma_fast.get_config("gemma_2b"), embed_dtype="bfloat16", cache_dtype="bfloat16")
    assert tree(module, jnp.zeros((1, 1), jnp.int32)) == TABLE


def test_low_rank_updates():
    found = tree(gemma.Module(configs("gemma_2b_lora", "gemma_300m_lora"), "bfloat16"), method="init_all")
    lora = {name: shape for name, shape in found.items() if "lora" in name}
    wanted = {}
    for suffix, width, mlp, rank in (("", 2048, 16_384, 16), ("_1", 1024, 4096, 32)):
        wanted |= {
            f"attn/q_einsum{suffix}/lora_a": (18, 8, width, rank),
            f"attn/q_einsum{suffix}/lora_b": (18, 8, rank, 256),
            f"attn/kv_einsum{suffix}/lora_a": (18, 2, 1, width, rank),
            f"attn/kv_einsum{suffix}/lora_b": (18, 2, 1, rank, 256),
            f"attn/attn_vec_einsum{suffix}/lora_a": (18, 8, 256, rank),
            f"attn/attn_vec_einsum{suffix}/lora_b": (18, 8, rank, width),
            f"mlp{suffix}/gating_einsum_lora_a": (18, 2, width, rank),
            f"mlp{suffix}/gating_einsum_lora_b": (18, 2, rank, mlp),
            f"mlp{suffix}/linear_lora_a": (18, mlp, rank),
            f"mlp{suffix}/linear_lora_b": (18, rank, width),
        }
    assert lora == {f"layers/{name}": shape for name, shape in wanted.items()}
    assert set(found) - set(lora) == set(TABLE | expert("_1", 1024, 4096))


@pytest.mark.parametrize("pi05", [False, True], ids=["pi0", "pi0.5"])
def test_pi0(pi05):
    config = pi0.Pi0Config(pi05=pi05)
    observation = pi0.random_observation(config, jax.random.key(0), image_tokens=4, text_tokens=3)
    actions = jnp.zeros((1, 50, 32))
    found = tree(pi0.Pi0(config), jax.random.key(1), observation, actions, method="compute_loss")
    dense = {
        "action_in_proj": (32, 1024),
        "action_out_proj": (1024, 32),
        **(
            {"time_mlp_in": (1024, 1024), "time_mlp_out": (1024, 1024)}
            if pi05
            else {
                "state_proj": (32, 1024),
                "action_time_mlp_in": (2048, 1024),
                "action_time_mlp_out": (1024, 1024),
            }
        ),
    }
    wanted = {f"{name}/kernel": shape for name, shape in dense.items()}
    wanted |= {f"{name}/bias": shape[1:] for name, shape in dense.items()}
    llm = TABLE | expert("_1", 1024, 4096, adarms=pi05)
    assert found == wanted | {f"PaliGemma/llm/{name}": shape for name, shape in llm.items()}


def test_pi0_fast():
    observation = pi0_fast.Observation(image_tokens=jnp.zeros((1, 4, 2048)), tokens=jnp.zeros((1, 3), jnp.int32))
    found = tree(pi0_fast.Pi0Fast(pi0_fast.Pi0FastConfig()), observation, method="logits")
    assert found == {f"PaliGemma/llm/{name}": shape for name, shape in TABLE.items()}
