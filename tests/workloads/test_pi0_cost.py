"""FLOPs and bytes of pi0's steps, by hand and by XLA's own count."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from attnbench import masks
from attnbench.spec import Workload
from attnbench.workloads.cost import demand
from attnbench.workloads.steps import in_blocks, text_tokens

PREFIX, ACTIONS, BATCH = 12, 5, 2
HEADS, DIM, WIDTH, LAYERS, WORDS = 4, 16, 64, 2, 512
PROJECTIONS = [2 * width * (HEADS + 1) * DIM for width in (WIDTH, WIDTH // 2)]
BLOCKS = [PROJECTIONS[0] + 3 * WIDTH * 8 * WIDTH, PROJECTIONS[1] + 3 * (WIDTH // 2) * 2 * WIDTH]
PAIR = 4 * DIM * HEADS
DENSE = (WIDTH // 2) * (2 * 32 + 3 * WIDTH // 2)
"""Of one action: in, mixed with the time, out."""


def step(name: str, **fields) -> Workload:
    shape = {"batch": BATCH, "heads": HEADS, "kv_heads": 1, "head_dim": DIM, "step": name}
    blocks = {"q_len": PREFIX + 1 + ACTIONS, "mask": in_blocks(PREFIX, 1, ACTIONS)}
    return Workload(**(shape | blocks | fields))


def seen_pairs() -> int:
    return PREFIX * PREFIX + (PREFIX + 1) + ACTIONS * (PREFIX + 1 + ACTIONS)


@pytest.mark.parametrize(("name", "weights"), [("pi0-attention", PROJECTIONS), ("pi0-block", BLOCKS)])
def test_each_expert_is_counted_with_its_own_width(name: str, weights: list[int]):
    products = BATCH * (PREFIX * weights[0] + (1 + ACTIONS) * weights[1])
    assert demand(step(name)).flops == 2 * products + BATCH * PAIR * seen_pairs()
    trained = demand(step(name, pass_="train"))
    assert trained.flops == 6 * products + 3.5 * BATCH * PAIR * seen_pairs()
    tokens = BATCH * (PREFIX * WIDTH + (1 + ACTIONS) * WIDTH // 2)
    assert trained.output_bytes == 4 * (2 * tokens + sum(weights))


def test_the_model_has_all_layers_and_what_is_around_the_actions():
    products = LAYERS * (PREFIX * BLOCKS[0] + (1 + ACTIONS) * BLOCKS[1]) + ACTIONS * DENSE + 32 * WIDTH // 2
    found = demand(step("pi0-model"))
    assert found.flops == BATCH * (2 * products + LAYERS * PAIR * seen_pairs())
    assert found.output_bytes == 4 * BATCH * ACTIONS * 33
    weights = LAYERS * sum(BLOCKS) + DENSE + 32 * WIDTH // 2
    trained = demand(step("pi0-model", pass_="train"))
    assert trained.output_bytes == found.output_bytes + 4 * weights


def test_the_sampler_goes_once_over_the_prefix_and_ten_times_over_the_actions():
    found = demand(step("pi0-sampler", q_len=1 + ACTIONS, kv_len=PREFIX + 1 + ACTIONS))
    prefill = 2 * LAYERS * PREFIX * BLOCKS[0] + LAYERS * PAIR * PREFIX**2
    suffix = LAYERS * (1 + ACTIONS) * BLOCKS[1] + ACTIONS * DENSE + 32 * WIDTH // 2
    pairs = (PREFIX + 1) + ACTIONS * (PREFIX + 1 + ACTIONS)
    assert found.flops == BATCH * (prefill + 10 * (2 * suffix + LAYERS * PAIR * pairs))
    weights = LAYERS * sum(BLOCKS) + DENSE + 32 * WIDTH // 2
    assert found.bytes > 4 * (weights + 9 * (weights - LAYERS * BLOCKS[0]))


def test_prefill_makes_logits_of_one_token_only():
    w = step("pi0-fast-prefill", q_len=PREFIX, kv_len=16, mask=masks.lengths([PREFIX] * BATCH))
    found = demand(w)
    products = LAYERS * PREFIX * BLOCKS[0] + WORDS * WIDTH
    assert found.flops == BATCH * (2 * products + LAYERS * PAIR * PREFIX**2)
    assert found.output_bytes == 4 * BATCH * (WORDS + LAYERS * 16 * 2 * DIM)


def test_decoding_reads_weights_and_a_growing_cache_in_every_step():
    w = step("pi0-fast-decode", q_len=4, kv_len=16, mask=masks.causal())
    found, weights = demand(w), LAYERS * BLOCKS[0] + WORDS * WIDTH
    assert found.flops == BATCH * (2 * 4 * weights + LAYERS * PAIR * (13 + 14 + 15 + 16))
    cache = LAYERS * BATCH * 2 * DIM * (13 + 14 + 15 + 16)
    assert 4 * (4 * weights + cache) < found.bytes < 4 * (4 * weights + cache) * 1.2


def test_a_prompt_of_openpi_has_250_tokens_of_text():
    assert (text_tokens(1018), text_tokens(12), text_tokens(1)) == (250, 3, 1)


@pytest.mark.jax
@pytest.mark.parametrize("name", ["pi0-attention", "pi0-block"])
@pytest.mark.parametrize("pass_", ["forward", "train"])
def test_xla_counts_about_the_same(name: str, pass_: str):
    """The standard path multiplies hidden pairs too, so its mask hides few; its backward pass has stored the scores."""
    jax = pytest.importorskip("jax")
    pytest.importorskip("flax")
    from attnbench import frameworks, registry
    from attnbench.steps import kind_of

    w = step(name, q_len=116, mask=in_blocks(110, 1, 5), pass_=pass_, head_dim=64)
    put = frameworks.get("jax").array
    arrays = {key: put(one, "float32", "cpu") for key, one in kind_of(name).draw(w, 0).items()}
    implementation = registry.get(f"jax.{name}")
    state = implementation.state(w, {}, arrays)
    found = jax.jit(implementation.function(w, {})).lower(state).cost_analysis()["flops"]
    alone = demand(replace(w, step="")).flops
    mine = demand(w).flops - (alone / 7 if pass_ == "train" else 0)  # the logits once more, by 7 products of 2
    assert np.isclose(found, mine, rtol=0.05), found / mine
