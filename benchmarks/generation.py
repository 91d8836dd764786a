"""Tokens per second of Hugging Face models: `python benchmarks/generation.py [--quick] [--budget SECONDS] [-o FILE]`.

A decoder of the shape of Llama 3.2 1B with random weights and a tiny vocabulary, so that attention and its surroundings
take the time and nothing is downloaded. One model switches between attn_implementations, which take turns in an order
drawn anew each round. For each batch and prompt: seconds of the prompt alone (one new token) and of the whole
generation, the tokens per second of the tokens after the first, and the share of generated tokens that equal those of
sdpa (with random weights in 16 bits they part at the first rounding that tips a token). The claim is that attnbench is
never slower than the fastest of the others. The file is written after each case, so a run that is cut short keeps what
it has.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from dispatch_overhead import interval

from attnbench import frameworks

OURS, BASE = "attnbench", "sdpa"
OTHERS = (BASE, "flash_attention_2", "flash_attention_3", "eager")
LLAMA = {
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 64, "rope_theta": 500000.0, "max_position_embeddings": 131072,
}  # fmt: skip
TINY = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 4096,
}  # fmt: skip
VOCABULARY = 1024


def model_of(shape: dict[str, Any], device: str) -> Any:
    """A model with random weights, in bfloat16 on a GPU."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
    config = LlamaConfig(vocab_size=VOCABULARY, tie_word_embeddings=True, **tokens, **shape)
    kind = torch.float32 if device == "cpu" else torch.bfloat16
    model: Any = LlamaForCausalLM(config)
    return model.eval().to(device, kind)


def generate(model: Any, name: str, prompt: Any, new: int, cache: str | None) -> tuple[float, Any]:
    """Seconds of a generation, and the new tokens."""
    if model.config._attn_implementation != name:
        model.set_attn_implementation(name)
    words = {} if cache is None else {"cache_implementation": cache}
    wait = torch.cuda.synchronize if prompt.is_cuda else lambda: None
    wait()
    start = time.perf_counter()
    tokens = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), min_new_tokens=new, max_new_tokens=new, do_sample=False, **words
    )
    wait()
    return time.perf_counter() - start, tokens[:, prompt.shape[1] :]


def warmed_up(model: Any, names: list[str], prompt: Any, new: int, cache: str | None) -> tuple[dict[str, Any], Any]:
    """The tokens of each implementation that runs, and why others do not."""
    tokens: dict[str, Any] = {}
    not_run: dict[str, str] = {}
    for name in names:
        try:
            tokens[name] = generate(model, name, prompt, new, cache)[1].cpu()
        except Exception as error:
            not_run[name] = f"{type(error).__name__}: {str(error)[:300]}"
    return tokens, not_run


def measure(model: Any, case: dict[str, int], options: argparse.Namespace, until: float) -> dict[str, Any]:
    """What a case took, by implementation."""
    torch.manual_seed(1)
    prompt = torch.randint(3, VOCABULARY, (case["batch"], case["prompt"]), device=options.device)
    new, cache = case["new_tokens"], options.cache
    tokens, not_run = warmed_up(model, options.impl, prompt, new, cache)
    seconds: dict[str, dict[str, list[float]]] = {name: {"prompt": [], "whole": []} for name in tokens}
    for number in range(options.rounds):
        if number >= 3 and time.monotonic() > until:
            break
        for name in random.sample(list(tokens), len(tokens)):
            seconds[name]["prompt"].append(generate(model, name, prompt, 1, cache)[0])
            seconds[name]["whole"].append(generate(model, name, prompt, new, cache)[0])
    found: dict[str, Any] = {}
    for name, took in seconds.items():
        prompts, wholes = np.array(took["prompt"]), np.array(took["whole"])
        rates = case["batch"] * (new - 1) / (wholes - prompts)
        same = float((tokens[name] == tokens[BASE]).float().mean()) if BASE in tokens else None
        found[name] = {
            "prompt_s": round(float(np.median(prompts)), 5), "whole_s": round(float(np.median(wholes)), 5),
            "tokens_per_s": round(float(np.median(rates)), 1), "ci95": interval(rates), "rounds": len(wholes),
            "tokens_as_sdpa": same,
        }  # fmt: skip
    ratios = {}
    for name in seconds:
        if name != OURS and OURS in seconds:
            each = np.array(seconds[OURS]["whole"]) / np.array(seconds[name]["whole"])
            ratios[f"{OURS} / {name}"] = {"ratio": round(float(np.median(each)), 4), "ci95": interval(each)}
    return {**case, "implementations": found, "not_run": not_run, "ratios": ratios}


def main() -> None:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--out", type=Path)
    parser.add_argument("--device", default="cuda" if on_gpu else "cpu")
    parser.add_argument("--quick", action="store_true", help="a tiny model and short prompts; runs anywhere")
    parser.add_argument("--budget", type=float, default=900.0, help="seconds for everything")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--prompt", type=int, nargs="+", default=[512, 8192])
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument(
        "--cache", choices=["static", "offloaded", "quantized"], help="Transformers' default if not given"
    )
    parser.add_argument("--impl", nargs="+", default=[OURS, *OTHERS[:3]])
    options = parser.parse_args()
    if options.quick:
        options.batch, options.prompt, options.new_tokens = [1, 2], [16, 40], 6
        options.rounds, options.budget = min(options.rounds, 3), min(options.budget, 120.0)
    from attnbench.dispatch import hf

    hf.register(OURS)
    model = model_of(TINY if options.quick else LLAMA, options.device)
    cases = [
        {"batch": batch, "prompt": prompt, "new_tokens": options.new_tokens}
        for prompt in options.prompt
        for batch in options.batch
    ]
    environment = msgspec.to_builtins(frameworks.get("torch").environment(options.device))
    found: dict[str, Any] = {"quick": options.quick, "cache": options.cache, "environment": environment, "cases": []}
    end = time.monotonic() + options.budget
    for number, case in enumerate(cases):
        left = end - time.monotonic()
        found["not_reached"] = cases[number:]
        if left <= 0:
            break
        with torch.no_grad():
            result = measure(model, case, options, time.monotonic() + left / (len(cases) - number))
        found["cases"].append(result)
        found["not_reached"] = cases[number + 1 :]
        show(result)
        if options.out is not None:
            options.out.write_text(json.dumps(found, indent=1) + "\n")
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=1) + "\n")


def show(result: dict[str, Any]) -> None:
    """Print a case, fastest implementation first."""
    print(f"batch {result['batch']}, prompt {result['prompt']}, {result['new_tokens']} new tokens", flush=True)
    for name, one in sorted(result["implementations"].items(), key=lambda item: item[1]["whole_s"]):
        print(
            f"  {one['whole_s']:9.4f} s, prompt {one['prompt_s']:9.4f} s, {one['tokens_per_s']:9.1f} tokens/s  {name}"
        )
    for name, one in result["ratios"].items():
        print(f"  {one['ratio']:6.3f} {one['ci95']}  {name}")
    for name, reason in result["not_run"].items():
        print(f"  not run: {name}: {reason}")


if __name__ == "__main__":
    main()
