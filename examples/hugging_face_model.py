"""A Hugging Face model: which attention should this Llama use here, and what does the model gain?

    python examples/hugging_face_model.py --quick

The workloads are those that the model really makes, captured while it reads a prompt and decodes one token. The weights
are random and tiny; nothing is downloaded.
"""

import argparse
from math import prod

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import attnbench as ab
from attnbench.analyse.summary import closing, rank
from attnbench.dispatch import hf

CHOICES = ["torch.eager", "torch.sdpa-flash"]
SHAPE = ("batch", "q_len", "kv_len", "heads", "kv_heads", "head_dim", "dtype", "mask")


def main(quick: bool) -> None:
    """Capture what the model asks, measure the choices on it, then run the model with the better one."""
    config = LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=2,
        head_dim=32, vocab_size=128,
    )  # fmt: skip
    model, prompt = LlamaForCausalLM(config).eval(), torch.randint(3, 128, (1, 128 if quick else 1024))
    hf.register("attnbench", impl="torch.eager")
    model.set_attn_implementation("attnbench")
    two_tokens = {"min_new_tokens": 2, "max_new_tokens": 2, "do_sample": False, "pad_token_id": 0}
    model.generate(prompt, **two_tokens)
    with ab.capture() as calls:
        model.generate(prompt, **two_tokens)
    print(calls)

    records, times = [], {name: [] for name in CHOICES}
    for work in calls.workloads:
        shape = {field: getattr(work, field) for field in SHAPE}
        found = ab.compare_implementations(CHOICES, shape, trials=10 if quick else None)
        for row in rank(found):
            told = row.reason if row.record.time is None else f"{row.record.time.median_ns / 1e3:.1f} us"
            print(f"{work.title}  {row.implementation:16} {told}")
            times[row.implementation] += [] if row.record.time is None else [row.record.time.median_ns]
        records += found

    best = min(CHOICES, key=lambda name: (-len(times[name]), prod(times[name])))
    hf.register("attnbench", impl=best)
    tokens = model.generate(prompt, min_new_tokens=4, max_new_tokens=4, do_sample=False, pad_token_id=0)
    print(f"the model runs with it: {tokens.shape[1] - prompt.shape[1]} new tokens")
    print(f'Call hf.register(impl="{best}") for this model: {closing(records)}')


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small shape and few samples")
    main(parser.parse_args().quick)
