"""Hugging Face models with `attn_implementation="attnbench"` compute what they compute with eager attention."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from hf_models import MODELS, SHAPE, batch, model, with_attention

import attnbench as ab
from attnbench.dispatch import hf
from attnbench.errors import Unsupported, UsageError

pytestmark = pytest.mark.torch
SIDES = [None, "left", "right"]
TIGHT = {"rtol": 1e-4, "atol": 2e-5}
LOOSE = {"rtol": 0.1, "atol": 0.15}
"""bfloat16 keeps 8 bits, and the logits of these models are of the order of 1 to 10."""


@pytest.fixture(autouse=True)
def _registered():
    """No graph of another test, nor what it set of torch.compile: there are 8 graphs for one function at most."""
    hf.register()
    torch._dynamo.reset()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=False, suppress_errors=False):
        yield
    torch._dynamo.reset()


def close(ours, theirs, mask, tolerance):
    assert not ours.isnan().any()
    real = mask.bool()
    torch.testing.assert_close(ours[real], theirs[real], **tolerance)


@pytest.mark.parametrize("side", SIDES, ids=str)
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_logits(name, side):
    lm, inputs = model(name), batch(side)
    theirs = with_attention(lm, "eager", lambda m: m(**inputs).logits)
    ours = with_attention(lm, "attnbench", lambda m: m(**inputs).logits)
    close(ours, theirs, inputs["attention_mask"], TIGHT)


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_these_tests_would_notice_a_lost_mask(name, monkeypatch):
    lm, inputs = model(name), batch("left")
    theirs = with_attention(lm, "eager", lambda m: m(**inputs).logits)
    right = hf.dispatch.attention
    monkeypatch.setattr(hf.dispatch, "attention", lambda *a, mask, **k: right(*a, mask=ab.masks.causal(), **k))
    ours = with_attention(lm, "attnbench", lambda m: m(**inputs).logits)
    real = inputs["attention_mask"].bool()
    assert (ours - theirs)[real].abs().max() > 100 * TIGHT["atol"]


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_logits_in_bfloat16(name):
    lm, inputs = model(name, torch.bfloat16), batch("left")
    theirs = with_attention(lm, "eager", lambda m: m(**inputs).logits)
    ours = with_attention(lm, "attnbench", lambda m: m(**inputs).logits)
    close(ours.float(), theirs.float(), inputs["attention_mask"], LOOSE)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_of_parameters(name, side):
    lm, inputs = model(name).train(), batch(side)
    real = inputs["attention_mask"].bool()
    predicted_by_real = torch.nn.functional.pad(real[:, :-1], (1, 0))
    labels = inputs["input_ids"].masked_fill(~(real & predicted_by_real), -100)

    def gradients(m):
        m.zero_grad()
        m(**inputs, labels=labels).loss.backward()
        return {key: value.grad.clone() for key, value in m.named_parameters()}

    theirs = with_attention(lm, "eager", gradients)
    ours = with_attention(lm, "attnbench", gradients)
    for key, expected in theirs.items():
        torch.testing.assert_close(
            ours[key], expected, rtol=1e-3, atol=1e-4, msg=lambda told, key=key: f"{key}: {told}"
        )


@pytest.mark.parametrize("cache", [None, "static"], ids=["dynamic", "static"])
@pytest.mark.parametrize("name", MODELS)
def test_generation_with_a_cache_and_left_padding(name, cache):
    lm, inputs = model(name), batch("left")
    how = {"max_new_tokens": 8, "do_sample": False, "cache_implementation": cache, "eos_token_id": None}
    how |= {"return_dict_in_generate": True, "output_logits": True}
    theirs = with_attention(lm, "eager", lambda m: m.generate(**inputs, **how))
    ours = with_attention(lm, "attnbench", lambda m: m.generate(**inputs, **how))
    assert ours.sequences.tolist() == theirs.sequences.tolist()
    torch.testing.assert_close(torch.stack(ours.logits), torch.stack(theirs.logits), **TIGHT)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_a_prompt_in_parts(name, cache):
    """More than one query over a cache that is partly filled: neither square nor one token."""
    from transformers import DynamicCache, StaticCache

    lm, inputs = model(name), batch("left")
    ids, mask = inputs["input_ids"], inputs["attention_mask"]

    def in_parts(m):
        past = DynamicCache(config=m.config) if cache == "dynamic" else StaticCache(config=m.config, max_cache_len=20)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        found = []
        for start, end in ((0, 6), (6, 11), (11, 13)):
            part = {"attention_mask": mask[:, :end], "position_ids": positions[:, start:end]}
            found.append(m(ids[:, start:end], past_key_values=past, use_cache=True, **part).logits)
        return torch.cat(found, 1)

    theirs = with_attention(lm, "eager", in_parts)
    ours = with_attention(lm, "attnbench", in_parts)
    close(ours, theirs, mask, TIGHT)


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_packed_sequences_do_not_see_each_other(name):
    lm, ids = model(name), batch(None)["input_ids"]
    positions = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 0, 1, 2]]).expand(2, -1)
    inputs = {"input_ids": ids, "position_ids": positions, "use_cache": False}
    theirs = with_attention(lm, "eager", lambda m: m(**inputs).logits)
    ours = with_attention(lm, "attnbench", lambda m: m(**inputs).logits)
    torch.testing.assert_close(ours, theirs, **TIGHT)
    if name == "gpt-oss":  # its code gives the mask functions no position_ids
        return
    alone = lm(ids[:, 7:10], use_cache=False).logits
    torch.testing.assert_close(ours[:, 7:10], alone, **TIGHT)


@pytest.mark.parametrize("kind", ["boolean", "additive"])
@torch.no_grad()
def test_a_mask_of_ones_own(kind):
    lm, ids = model("llama"), batch(None)["input_ids"]
    seen = torch.rand(2, 1, 13, 13, generator=torch.Generator().manual_seed(2)) < 0.5
    seen |= torch.eye(13, dtype=torch.bool)
    bias = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    mask = seen if kind == "boolean" else bias
    theirs = with_attention(lm, "eager", lambda m: m(ids, attention_mask=bias).logits)
    ours = with_attention(lm, "attnbench", lambda m: m(ids, attention_mask=mask).logits)
    torch.testing.assert_close(ours, theirs, **TIGHT)


@torch.no_grad()
def test_a_layer_without_a_mask_says_itself_whether_it_is_causal():
    from transformers import SiglipVisionConfig, SiglipVisionModel

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4, "image_size": 16, "patch_size": 4}
    vision = SiglipVisionModel(SiglipVisionConfig(num_hidden_layers=2, **sizes)).eval()
    pixels = torch.randn(2, 3, 16, 16)
    theirs = with_attention(vision, "eager", lambda m: m(pixels).last_hidden_state)
    ours = with_attention(vision, "attnbench", lambda m: m(pixels).last_hidden_state)
    torch.testing.assert_close(ours, theirs, **TIGHT)


@torch.no_grad()
def test_autocast_is_as_with_sdpa():
    lm, inputs = model("llama"), batch("left")
    with torch.autocast("cpu", torch.bfloat16):
        theirs = with_attention(lm, "sdpa", lambda m: m(**inputs).logits)
        ours = with_attention(lm, "attnbench", lambda m: m(**inputs).logits)
    close(ours.float(), theirs.float(), inputs["attention_mask"], LOOSE)


@pytest.mark.parametrize("impl", ["torch.eager", "torch.sdpa-math"])
@torch.no_grad()
def test_a_named_implementation_is_used(impl, monkeypatch):
    assert hf.register(f"attnbench-{impl}", impl) == f"attnbench-{impl}"
    asked, right = [], hf.dispatch.attention
    monkeypatch.setattr(hf.dispatch, "attention", lambda *a, **k: asked.append(k["impl"]) or right(*a, **k))
    lm, inputs = model("llama"), batch("left")
    theirs = with_attention(lm, "eager", lambda m: m(**inputs).logits)
    ours = with_attention(lm, f"attnbench-{impl}", lambda m: m(**inputs).logits)
    close(ours, theirs, inputs["attention_mask"], TIGHT)
    assert asked == [impl, impl]


@torch.no_grad()
def test_a_named_implementation_refuses_what_it_cannot_do():
    hf.register("attnbench-math", "torch.sdpa-math")
    lm = model("gemma2")
    lm.set_attn_implementation("attnbench-math")
    with pytest.raises(Unsupported, match=r"torch\.sdpa-math cannot run .*soft"):
        lm(**batch(None))


@pytest.mark.parametrize(
    ("impl", "message"), [("torch.sdap", "Near: torch.sdpa"), ("jax.xla", "takes jax arrays")], ids=["typo", "jax"]
)
def test_a_wrong_name_is_an_error_at_once(impl, message):
    with pytest.raises(UsageError, match=message):
        hf.register("wrong", impl)


def test_dropout_is_refused_in_training_only():
    lm, inputs = model("llama", attention_dropout=0.1), batch(None)
    lm.set_attn_implementation("attnbench")
    lm(**inputs)
    with pytest.raises(
        Unsupported, match=r"support dropout, but this layer asks for 0\.1: set config\.attention_dropout"
    ):
        lm.train()(**inputs)


@pytest.mark.parametrize(
    ("keyword", "what"),
    [
        ("position_bias", "position bias: load the model with .*eager"),
        ("head_mask", "head mask"),
        ("novelty", "the keyword novelty"),
        ("cache", "paged"),
    ],
)
def test_what_changes_the_result_is_refused(keyword, what):
    q = torch.randn(1, 2, 4, 8)
    with pytest.raises(Unsupported, match=what):
        hf.attention_forward(torch.nn.Module(), q, q, q, None, **{keyword: torch.ones(2)})
    hf.attention_forward(torch.nn.Module(), q, q, q, None, **{keyword: None})


def test_attention_weights_are_refused():
    q = torch.randn(1, 2, 4, 8)
    with pytest.raises(Unsupported, match="eager"):
        hf.attention_forward(torch.nn.Module(), q, q, q, None, output_attentions=True)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_attention_weights_that_the_model_tells_no_layer_of_are_refused(compiled):
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=64, bos_token_id=1, eos_token_id=2)
    lm, ids = GPT2LMHeadModel(config).eval(), batch(None)["input_ids"]
    assert len(with_attention(lm, "eager", lambda m: m(ids, output_attentions=True).attentions)) == 2
    lm.set_attn_implementation("attnbench")
    torch._dynamo.reset()
    call = torch.compile(lm, backend="eager") if compiled else lm
    assert len(call(ids, output_hidden_states=True).hidden_states) == 3
    with pytest.raises(Unsupported, match="returns no attention weights"):
        call(ids, output_attentions=True)


@pytest.mark.parametrize("window", [None, 3])
def test_keys_without_a_mask_are_not_guessed(window):
    q, k = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 9, 8)
    with pytest.raises(Unsupported, match="which keys a query sees is unknown"):
        hf.attention_forward(torch.nn.Module(), q, k, k, None, sliding_window=window, is_causal=window is None)


def test_sequences_that_the_mask_does_not_keep_apart_are_refused():
    lm, inputs = model("llama"), batch(None)
    lm.set_attn_implementation("attnbench")
    with pytest.raises(Unsupported, match="cu_seq_lens packs several sequences"):
        lm(inputs["input_ids"], cu_seq_lens_q=torch.tensor([0, 7, 13]), use_cache=False)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
@torch.no_grad()
def test_compiled_with_padding_there_is_one_graph(name):
    lm, inputs = model(name), batch("left")
    theirs = with_attention(lm, "eager", lambda m: m(**inputs).logits)
    lm.set_attn_implementation("attnbench")
    torch._dynamo.reset()
    ours = torch.compile(lm, backend="eager", fullgraph=True)(**inputs).logits
    close(ours, theirs, inputs["attention_mask"], TIGHT)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_generation_over_a_static_cache_with_a_compiled_forward(name):
    lm = model(name)
    how = {"max_new_tokens": 4, "do_sample": False, "cache_implementation": "static", "eos_token_id": None}
    others = batch("left")
    others["attention_mask"][1, :6] = 0
    batches = [batch("left"), others, batch(None)]
    theirs = with_attention(lm, "eager", lambda m: [m.generate(**one, **how).tolist() for one in batches])
    lm.set_attn_implementation("attnbench")
    torch._dynamo.reset()
    lm.forward = torch.compile(lm.forward, backend="eager", fullgraph=True)
    assert [lm.generate(**one, **how).tolist() for one in batches] == theirs


@torch.no_grad()
def test_compiled_without_padding_the_mask_is_causal_and_no_array(monkeypatch):
    lm, ids = model("llama"), batch(None)["input_ids"]
    theirs = with_attention(lm, "eager", lambda m: m(ids).logits)
    monkeypatch.setattr(hf.array_masks, "attention_with_array", None)
    lm.set_attn_implementation("attnbench")
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(lm, backend="eager")(ids).logits, theirs, **TIGHT)


def each_layer(model):
    for layer in model.model.layers:
        layer.compile(backend="eager")


def each_attention(model):
    for layer in model.model.layers:
        layer.self_attn.compile(backend="eager")


def replaced(model):
    for at, layer in enumerate(model.model.layers):
        model.model.layers[at] = torch.compile(layer, backend="eager")


def each_forward(model):
    for layer in model.model.layers:
        layer.forward = torch.compile(layer.forward, backend="eager")


def the_last_layer(model):
    model.model.layers[-1].compile(backend="eager")


@pytest.mark.parametrize("how", [each_layer, each_attention, replaced, each_forward, the_last_layer])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
@torch.no_grad()
def test_layers_that_are_compiled_one_by_one(name, how):
    """Ten paddings, a mask of ones and none: a graph for masks and one without, not one for each mask."""
    from torch._dynamo.utils import counters

    lm, batches = model(name), [batch("right") for _ in range(10)]
    for hidden, one in enumerate(batches):
        one["attention_mask"][0, 13 - hidden :] = 0
    batches.append({"input_ids": batches[0]["input_ids"]})
    theirs = with_attention(lm, "eager", lambda m: [m(**one, use_cache=False).logits for one in batches])
    lm.set_attn_implementation("attnbench")
    how(lm)
    counters.clear()
    for one, expected in zip(batches, theirs):
        given = one.get("attention_mask", torch.ones_like(one["input_ids"]))
        close(lm(**one, use_cache=False).logits, expected, given, TIGHT)
    assert counters["stats"]["unique_graphs"] <= {"llama": 2, "gemma2": 4}[name]


@pytest.mark.parametrize("side", [None, "left"])
def test_generation_with_layers_that_are_compiled(side):
    lm, how = model("llama"), {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    theirs = with_attention(lm, "eager", lambda m: m.generate(**batch(side), **how).tolist())
    lm.set_attn_implementation("attnbench")
    each_layer(lm)
    assert lm.generate(**batch(side), **how).tolist() == theirs


@pytest.mark.parametrize("mask", [None, "ones", "padding"])
@torch.no_grad()
def test_a_compiled_layer_that_nobody_saw_takes_a_description(mask, monkeypatch):
    monkeypatch.setattr(hf.hf_models, "compiled_layers", lambda model: False)
    lm, given = model("llama"), batch("right" if mask == "padding" else None)
    if mask is None:
        del given["attention_mask"]
    theirs = with_attention(lm, "eager", lambda m: m(**given, use_cache=False).logits)
    lm.set_attn_implementation("attnbench")
    each_layer(lm)
    real = given.get("attention_mask", torch.ones_like(given["input_ids"]))
    close(lm(**given, use_cache=False).logits, theirs, real, TIGHT)


@torch.no_grad()
def test_a_mask_that_moves_with_each_layer_stays_a_description(monkeypatch):
    """As accelerate's hooks do, for models over several devices."""
    from transformers import masking_utils

    def moved(module, args, words):
        return args, {key: x.to("cpu") if isinstance(x, torch.Tensor) else x for key, x in words.items()}

    lm, given = model("llama"), batch("right")
    theirs = with_attention(lm, "eager", lambda m: m(**given, use_cache=False).logits)
    lm.set_attn_implementation("attnbench")
    for layer in lm.model.layers:
        layer.register_forward_pre_hook(moved, with_kwargs=True)
    monkeypatch.setattr(masking_utils, "sdpa_mask", None)
    close(lm(**given, use_cache=False).logits, theirs, given["attention_mask"], TIGHT)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.int32])
def test_a_mask_of_integers_is_refused(dtype):
    lm, ids = model("llama"), batch(None)["input_ids"]
    mask = torch.ones(2, 1, 13, 13).tril()
    with pytest.raises(Unsupported, match=r"pass booleans \(True is visible\), as in mask != 0"):
        with_attention(lm, "attnbench", lambda m: m(ids, attention_mask=mask.to(dtype), use_cache=False))


@pytest.mark.parametrize("mask", [torch.ones(4, 4, dtype=torch.bool), torch.ones(2, 4, 4), [[True]]])
def test_a_mask_with_other_axes_is_refused(mask):
    q = torch.randn(1, 2, 4, 8)
    with pytest.raises(Unsupported, match=r"4 axes|the mask has [23] axes"):
        hf.attention_forward(torch.nn.Module(), q, q, q, mask)


def test_the_shapes_are_grouped_heads():
    assert SHAPE["num_attention_heads"] > SHAPE["num_key_value_heads"]


@pytest.mark.gpu
@pytest.mark.parametrize("cache", [None, "static"], ids=["dynamic", "static"])
@pytest.mark.parametrize("name", MODELS)
def test_generation_on_a_gpu(name, cache):
    """Transformers compiles the decoding steps over a static cache there by itself."""
    lm = model(name).cuda()
    inputs = {key: value.cuda() for key, value in batch("left").items()}
    how = {"max_new_tokens": 8, "do_sample": False, "cache_implementation": cache, "eos_token_id": None}
    theirs = with_attention(lm, "eager", lambda m: m.generate(**inputs, **how))
    ours = with_attention(lm, "attnbench", lambda m: m.generate(**inputs, **how))
    assert ours.tolist() == theirs.tolist()


@pytest.mark.parametrize("name", ["sdpa", "eager", "flash_attention_2", "", 3])
def test_names_that_are_not_ours_are_refused(name):
    from transformers import AttentionInterface

    before = dict(AttentionInterface().items())
    with pytest.raises(UsageError):
        hf.register(name)
    assert dict(AttentionInterface().items()) == before


def test_a_name_of_ours_may_be_registered_again():
    assert hf.register("attnbench-again") == hf.register("attnbench-again", impl="torch.eager")


@pytest.mark.parametrize("name", ["ab-torch.sdpa-flash", "flash", "owner/name", "paged|mine"])
def test_names_that_transformers_reads_as_something_else_are_refused(name):
    from transformers import AttentionInterface

    with pytest.raises(UsageError, match="no model would load"):
        hf.register(name)
    assert name not in AttentionInterface().valid_keys()


def test_a_model_loads_with_the_name_that_is_proposed():
    with pytest.raises(UsageError, match=r'as in "ab-torch\.sdpa-fa"'):
        hf.register("ab-torch.sdpa-flash", "torch.sdpa-math")
    lm = model("llama")
    lm.set_attn_implementation(hf.register("ab-torch.sdpa-fa", "torch.sdpa-math"))
    lm(**batch(None))


def test_a_mask_that_wants_gradients_gets_them_or_is_refused():
    q = torch.randn(1, 2, 4, 8)
    mask = torch.zeros(1, 1, 4, 4, requires_grad=True)
    hf.attention_forward(torch.nn.Module(), q, q, q, mask)[0].square().sum().backward()
    assert mask.grad.abs().sum() > 0
    with pytest.raises(UsageError, match="mask is a constant"):
        hf.attention_forward(torch.nn.Module(), q, q, q, mask, impl="torch.sdpa-math")
