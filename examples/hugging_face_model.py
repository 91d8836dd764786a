"""A Hugging Face model: which `attn_implementation` should this Llama use here?

    python examples/hugging_face_model.py --quick

The workloads are read from the model's config (heads, key/value heads, width): a prompt, and one decoding step with
the prompt in the cache. The weights are random and tiny; nothing is downloaded.
"""

import argparse

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import attnbench as ab
from attnbench.analyse.summary import closing, rank

CHOICES = {"torch.hf-eager": "eager", "torch.hf-sdpa": "sdpa"}


def workloads(config: LlamaConfig, prompt: int) -> dict[str, ab.Workload]:
    """What one forward pass of every layer asks: all tokens of the prompt at once, then one token at a time."""
    shape = {"heads": config.num_attention_heads, "kv_heads": config.num_key_value_heads, "head_dim": config.head_dim}
    return {
        "prompt": ab.Workload(batch=1, q_len=prompt, mask=ab.masks.causal(), **shape),
        "decode": ab.Workload(batch=1, q_len=1, kv_len=prompt + 1, mask=ab.masks.causal(), **shape),
    }


def main(quick: bool) -> None:
    """Measure both attentions of transformers on what the model asks, then run the model with the better one."""
    config = LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=2,
        head_dim=32, vocab_size=128,
    )  # fmt: skip
    records, wins = [], dict.fromkeys(CHOICES, 0)
    for name, work in workloads(config, prompt=128 if quick else 1024).items():
        shape = {field: getattr(work, field) for field in ("batch", "q_len", "kv_len", "heads", "kv_heads", "head_dim")}
        found = ab.compare_implementations(list(CHOICES), {**shape, "mask": work.mask}, trials=10 if quick else None)
        for row in rank(found):
            told = row.reason if row.record.time is None else f"{row.record.time.median_ns / 1e3:.1f} us"
            print(f"{name}  {work.title}  {row.implementation:14} {told}")
            wins[row.implementation] += row.rank == 1
        records += found

    best = max(wins, key=lambda name: wins[name])
    model = LlamaForCausalLM(config).eval()
    model.set_attn_implementation(CHOICES[best])
    tokens = model.generate(torch.randint(3, 128, (1, 8)), max_new_tokens=4, do_sample=False, pad_token_id=0)
    print(f"the model runs with it: {tokens.shape[1]} tokens")
    print(f'Load this model with attn_implementation="{CHOICES[best]}": {closing(records)}')


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small shape and few samples")
    main(parser.parse_args().quick)
