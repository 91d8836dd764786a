"""Tiny Transformers models with random weights, and batches for them; nothing is downloaded."""

from __future__ import annotations

import torch
import transformers

SHAPE = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 64, "max_position_embeddings": 64, "pad_token_id": 0,
    "initializer_range": 0.3,
}  # fmt: skip
WINDOW = 5
BOTH_LAYERS = ["sliding_attention", "full_attention"]
MODELS = {
    "llama": ("Llama", {}),
    "gemma2": (
        "Gemma2",
        {
            "sliding_window": WINDOW,
            "layer_types": BOTH_LAYERS,
            "attn_logit_softcapping": 2.0,
            "query_pre_attn_scalar": 5,
        },
    ),
    "gemma3": ("Gemma3", {"sliding_window": WINDOW, "layer_types": BOTH_LAYERS, "query_pre_attn_scalar": 5}),
    "qwen3": ("Qwen3", {}),
    "gpt-oss": (  # attention sinks
        "GptOss",
        {
            "sliding_window": WINDOW,
            "layer_types": BOTH_LAYERS,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "qwen2-sliding": ("Qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}),
}


def model(name: str, dtype: torch.dtype = torch.float32, **more):
    family, own = MODELS[name]
    config_name = f"{family}TextConfig" if family == "Gemma3" else f"{family}Config"
    fields = {key: value for key, value in SHAPE.items() if family != "Qwen2" or key != "head_dim"}
    config = getattr(transformers, config_name)(**(fields | own | more))
    torch.manual_seed(0)
    return getattr(transformers, f"{family}ForCausalLM")(config).to(dtype).eval()


def batch(side: str | None, length: int = 13):
    """Token ids and attention mask; the first row has padding on the side."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, SHAPE["vocab_size"], (2, length), generator=generator)
    mask = torch.ones_like(ids)
    if side == "left":
        mask[0, :4] = 0
    elif side == "right":
        mask[0, -4:] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def with_attention(model, name, call):
    """What the call of the model gives with one attention implementation."""
    model.set_attn_implementation(name)
    return call(model)
