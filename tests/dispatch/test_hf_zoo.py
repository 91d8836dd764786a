"""Many Transformers models: each computes what it computes with eager attention, or is refused in words."""

from __future__ import annotations

import importlib
import inspect
import re
import weakref
from collections import Counter
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from transformers import masking_utils

from attnbench.dispatch import hf, hf_masks, hf_models
from attnbench.errors import Unsupported

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]
TIGHT = {"rtol": 1e-4, "atol": 1e-4}
MODELS = Path(transformers.__file__).parent / "models"

TOKENS = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
BASE = {
    **TOKENS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 80, "initializer_range": 0.3,
}  # fmt: skip
GROUPED = {**BASE, "num_key_value_heads": 2}
NARROW = {**GROUPED, "head_dim": 8}
GPT = {**TOKENS, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
SEQ2SEQ = {
    **TOKENS, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 64,
    "decoder_start_token_id": 1, "init_std": 0.3,
}  # fmt: skip
BOTH = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1}

OWN = {  # class: its config; each has attention of its own, for the masks of "eager"
    "BloomForCausalLM": {**TOKENS, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    "CodeGenForCausalLM": {**GPT, "rotary_dim": 4},
    "XGLMForCausalLM": {**TOKENS, "d_model": 32, "ffn_dim": 48, "num_layers": 2, "attention_heads": 4},
    "MptForCausalLM": {**TOKENS, "d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64},
    "TrOCRForCausalLM": {
        **TOKENS, "d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48,
    },
    "GPTNeoXJapaneseForCausalLM": {**BASE, "intermediate_multiple_size": 2},
    "GPTJForCausalLM": {**GPT, "rotary_dim": 4},
    "GPTNeoForCausalLM": {
        **TOKENS, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "attention_types": [[["global"], 2]],
    },
    "FalconForCausalLM": BASE,
    "RoFormerModel": BASE,
    "MegatronBertModel": BASE,
    "MPNetModel": BASE,
    "LukeModel": {**BASE, "entity_vocab_size": 8, "entity_emb_size": 16},
    "RemBertModel": {**BASE, "input_embedding_size": 16, "output_embedding_size": 16},
    "ConvBertModel": {**BASE, "embedding_size": 32},
    "SqueezeBertModel": {
        **BASE, "embedding_size": 32, "q_groups": 1, "k_groups": 1, "v_groups": 1, "post_attention_groups": 1,
        "intermediate_groups": 1, "output_groups": 1,
    },
    "GitModel": {**BASE, "vision_config": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
                                           "num_attention_heads": 4, "image_size": 16, "patch_size": 8}},
    "TapasModel": BASE,
    "LayoutLMv3Model": {**BASE, "input_size": 16, "patch_size": 8, "visual_embed": False},
    "NystromformerModel": {**BASE, "num_landmarks": 4, "segment_means_seq_len": 16},
    "MvpModel": SEQ2SEQ,
    "LEDModel": {
        **SEQ2SEQ, "max_encoder_position_embeddings": 64, "max_decoder_position_embeddings": 64, "attention_window": 4,
    },
    "SpeechT5Model": {"hidden_size": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
                      "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48},
}  # fmt: skip
DECODERS = {
    "MistralForCausalLM": {**NARROW, "sliding_window": 5},
    "MixtralForCausalLM": {**GROUPED, "sliding_window": 5, "num_local_experts": 2, "num_experts_per_tok": 1},
    "Phi3ForCausalLM": {**GROUPED, "sliding_window": 5},
    "Cohere2ForCausalLM": {**NARROW, **BOTH},
    "Olmo3ForCausalLM": {**GROUPED, **BOTH},
    "GPT2LMHeadModel": {**GPT, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "initializer_range": 0.3},
    "GPTNeoXForCausalLM": BASE,
    "OPTForCausalLM": {**BASE, "ffn_dim": 48, "word_embed_proj_dim": 32},
    "StableLmForCausalLM": GROUPED,
    "Glm4ForCausalLM": NARROW,
    "Exaone4ForCausalLM": {**GROUPED, **BOTH},
    "Qwen3MoeForCausalLM": {**NARROW, **EXPERTS, "moe_intermediate_size": 32},
    "DeepseekV3ForCausalLM": {
        **BASE, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "v_head_dim": 8,
        "qk_nope_head_dim": 8, "first_k_dense_replace": 2, "n_routed_experts": 4, "n_group": 1, "topk_group": 1,
        "num_experts_per_tok": 1,
    },
    "Gemma3ForCausalLM": {**NARROW, **BOTH},
    "Llama4ForCausalLM": {
        **NARROW, "attention_chunk_size": 6, "intermediate_size_mlp": 48, "num_local_experts": 2,
        "layer_types": ["chunked_attention", "full_attention"], "interleave_moe_layer_step": 2,
    },
    "DogeForCausalLM": GROUPED,
    "Lfm2ForCausalLM": {**GROUPED, "layer_types": ["conv", "full_attention"]},
    "GraniteSWAForCausalLM": {**GROUPED, "sliding_window": 5},
    "GraniteMoeSWAForCausalLM": {**GROUPED, "sliding_window": 5, "num_local_experts": 2, "num_experts_per_tok": 1},
    "FlintForCausalLM": {**NARROW, **BOTH},
    "MiMoV2FlashForCausalLM": {
        **NARROW, **BOTH, "v_head_dim": 8, "mlp_layer_types": ["dense", "dense"], "swa_num_key_value_heads": 2,
        "swa_num_attention_heads": 4, "swa_head_dim": 8, "swa_v_head_dim": 8, "n_routed_experts": 2,
    },
    "PersimmonForCausalLM": BASE,
    "PhiForCausalLM": GROUPED,
    "BioGptForCausalLM": BASE,
    "GPTBigCodeForCausalLM": GPT,
}  # fmt: skip
ENCODERS = {
    "BertModel": BASE,
    "RobertaModel": BASE,
    "DistilBertModel": {**TOKENS, "dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4},
    "ElectraModel": {**BASE, "embedding_size": 32},
    "ModernBertModel": {
        **BASE, "local_attention": 6, "global_attn_every_n_layers": 2, "cls_token_id": 1, "sep_token_id": 2,
    },
    "AlbertModel": {**BASE, "embedding_size": 16},
    "EsmModel": {**BASE, "position_embedding_type": "rotary", "mask_token_id": 1},
    "CLIPTextModel": BASE,
    "SiglipTextModel": BASE,
    "ErnieModel": BASE,
    "XLMRobertaModel": BASE,
    "DebertaV2Model": BASE,
    "FunnelModel": {"vocab_size": 64, "d_model": 32, "n_head": 4, "d_head": 8, "d_inner": 48, "block_sizes": [1, 1]},
}  # fmt: skip
BOTH_ENDS = {
    "BartForConditionalGeneration": SEQ2SEQ,
    "MarianMTModel": SEQ2SEQ,
    "M2M100ForConditionalGeneration": SEQ2SEQ,
    "BigBirdPegasusForConditionalGeneration": {**SEQ2SEQ, "attention_type": "original_full"},
    "PegasusXForConditionalGeneration": {**SEQ2SEQ, "block_size": 4, "num_global_tokens": 4},
    "ProphetNetForConditionalGeneration": {
        **TOKENS, "hidden_size": 32, "encoder_ffn_dim": 48, "num_encoder_layers": 1, "num_encoder_attention_heads": 4,
        "decoder_ffn_dim": 48, "num_decoder_layers": 1, "num_decoder_attention_heads": 4, "max_position_embeddings": 64,
    },
    "T5ForConditionalGeneration": {
        "vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "pad_token_id": 0,
        "eos_token_id": 2, "decoder_start_token_id": 0,
    },
    "LongT5ForConditionalGeneration": {
        "vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4, "pad_token_id": 0,
        "eos_token_id": 2, "decoder_start_token_id": 0, "local_radius": 4,
    },
}  # fmt: skip
TOLD = r"computes attention by itself|computes with the mask|does not support a position bias"


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    monkeypatch.setenv("ATTNBENCH_ON_MISS", "quiet")
    hf.register()
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def config_of(name, fields):
    return getattr(transformers, name).config_class(**fields)


def built(name, fields, attention):
    torch.manual_seed(0)
    made = getattr(transformers, name)._from_config(config_of(name, fields), attn_implementation=attention)
    return made.eval()


def inputs(side):
    ids = torch.randint(3, 64, (2, 13), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    if side == "left":
        mask[0, :4] = 0
    elif side == "right":
        mask[0, -4:] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


@pytest.mark.parametrize("name", OWN)
def test_attention_of_its_own_is_refused_when_a_model_is_loaded(name):
    with pytest.raises(Unsupported, match=r"computes attention by itself \(\w+.*attn_implementation=\"eager\""):
        built(name, OWN[name], "attnbench")


@pytest.mark.parametrize("name", OWN)
def test_and_when_its_config_says_so(name):
    config = config_of(name, OWN[name])
    config._attn_implementation = "attnbench"
    with pytest.raises(Unsupported, match="computes attention by itself"):
        getattr(transformers, name)(config)


@pytest.mark.parametrize("name", OWN)
def test_and_when_it_is_set_on_a_model(name):
    model = built(name, OWN[name], "eager")
    with pytest.raises(Unsupported, match="computes attention by itself"):
        model.set_attn_implementation("attnbench")
    assert model.config._attn_implementation == "eager", "nothing was changed"


def test_and_when_it_is_read_from_a_folder(tmp_path):
    built("BloomForCausalLM", OWN["BloomForCausalLM"], "eager").save_pretrained(tmp_path)
    with pytest.raises(Unsupported, match="BloomForCausalLM computes attention by itself"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="attnbench")


TEXT = [name for name in OWN if name not in ("GitModel", "SpeechT5Model", "LayoutLMv3Model", "LEDModel", "MvpModel")]


@pytest.mark.parametrize("name", TEXT)
@torch.no_grad()
def test_and_when_the_config_is_changed_after_that(name):
    """It is seen when a mask is asked for."""
    model = built(name, OWN[name], "eager")
    model.config._attn_implementation = "attnbench"
    for given in (inputs("right"), {"input_ids": inputs(None)["input_ids"]}):
        with pytest.raises(Unsupported, match="computes attention by itself"):
            model(**given)


@pytest.mark.parametrize(("name", "side"), [("BloomForCausalLM", None), ("RoFormerModel", "right")])
@torch.no_grad()
def test_and_in_a_compiled_model(name, side):
    model = built(name, OWN[name], "eager")
    model.config._attn_implementation = "attnbench"
    given = inputs(side) if side else {"input_ids": inputs(None)["input_ids"]}
    with pytest.raises(Unsupported, match="computes attention by itself"):
        torch.compile(model, backend="eager")(**given)


def test_a_decoding_step_over_a_static_cache_is_refused_too():
    model = built("BloomForCausalLM", OWN["BloomForCausalLM"], "eager")
    model.config._attn_implementation = "attnbench"
    with pytest.raises(Unsupported, match="computes attention by itself"):
        model.generate(**inputs("left"), max_new_tokens=2, cache_implementation="static", disable_compile=True)


@pytest.mark.parametrize("training", [False, True])
def test_training_changes_nothing(training):
    model = built("RoFormerModel", OWN["RoFormerModel"], "eager").train(training)
    model.config._attn_implementation = "attnbench"
    with pytest.raises(Unsupported, match="RoFormerModel computes attention by itself"):
        model(**inputs("right"))


def test_a_part_of_a_model_is_refused_and_may_be_left_out():
    """A vision tower that calls the interface, a decoder that does not."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    vision = transformers.ViTConfig(**sizes, image_size=16, patch_size=8)
    decoder = config_of("TrOCRForCausalLM", OWN["TrOCRForCausalLM"])
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(vision, decoder)
    with pytest.raises(Unsupported, match=r"TrOCR\w+ computes attention by itself"):
        transformers.VisionEncoderDecoderModel._from_config(config, attn_implementation="attnbench")
    parts = {"encoder": "attnbench", "decoder": "eager", "": "eager"}
    model = transformers.VisionEncoderDecoderModel._from_config(config, attn_implementation=parts).eval()
    checked = hf.check(model)
    assert [one.ours for one in checked.modules if one.path.startswith("encoder.")] == [True]
    assert {one.ours for one in checked.modules if one.kind == "TrOCRAttention"} == {False}
    with pytest.raises(Unsupported, match=r"TrOCR\w+ computes attention by itself"):
        model.set_attn_implementation({"decoder": "attnbench"})
    with pytest.raises(Unsupported, match=r"TrOCR\w+ computes attention by itself"):
        model.set_attn_implementation("attnbench")
    model.set_attn_implementation(parts)


def same_or_refused(name, fields, call):
    """What eager attention gives, or a refusal in words; nothing else."""
    theirs = call(built(name, fields, "eager"))
    try:
        ours = call(built(name, fields, "attnbench"))
    except Unsupported as error:
        return "refused" if re.search(TOLD, str(error)) else f"refused in other words: {error}"
    torch.testing.assert_close(ours, theirs, **TIGHT)
    return "same"


@pytest.mark.parametrize("side", [None, "left", "right"], ids=str)
@pytest.mark.parametrize("name", DECODERS)
@torch.no_grad()
def test_decoders(name, side):
    given = inputs(side)
    real = given["attention_mask"].bool()
    assert same_or_refused(name, DECODERS[name], lambda m: m(**given, use_cache=False).logits[real]) == "same"


@pytest.mark.slow
@pytest.mark.parametrize("cache", [None, "static"], ids=["dynamic", "static"])
@pytest.mark.parametrize("name", DECODERS)
def test_decoders_generate(name, cache):
    how = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "disable_compile": True}

    def call(model):
        if cache == "static" and not model._can_compile_fullgraph:
            pytest.skip("has no static cache")
        return model.generate(**inputs("left"), **how, cache_implementation=cache)

    assert same_or_refused(name, DECODERS[name], call) == "same"


@pytest.mark.parametrize("name", ENCODERS)
@torch.no_grad()
def test_encoders(name):
    given = inputs("right")
    real = given["attention_mask"].bool()
    assert same_or_refused(name, ENCODERS[name], lambda m: m(**given).last_hidden_state[real]) == "same"


@pytest.mark.parametrize("name", BOTH_ENDS)
@torch.no_grad()
def test_encoders_with_decoders(name):
    given = {**inputs("right"), "decoder_input_ids": torch.arange(3, 17).reshape(2, 7), "use_cache": False}
    found = same_or_refused(name, BOTH_ENDS[name], lambda m: m(**given).logits)
    refused = ("T5", "LongT5", "BigBirdPegasus")
    assert found == ("refused" if name.startswith(refused) else "same")


@torch.no_grad()
def test_speech():
    sizes = {key: value for key, value in SEQ2SEQ.items() if key != "max_position_embeddings"}
    sizes |= {"num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 32}
    heard = torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(0))
    given = {"input_features": heard, "decoder_input_ids": torch.arange(3, 17).reshape(2, 7)}
    found = same_or_refused("WhisperForConditionalGeneration", sizes, lambda m: m(**given, use_cache=False).logits)
    assert found == "same"


@pytest.mark.parametrize("name", ["ViTModel", "Dinov2Model", "CLIPVisionModel", "SiglipVisionModel", "SwinModel"])
@torch.no_grad()
def test_vision(name):
    fields = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 16,
        "patch_size": 4,
    }  # fmt: skip
    if name == "SwinModel":
        fields = {
            "embed_dim": 16,
            "depths": [1, 1],
            "num_heads": [2, 2],
            "window_size": 2,
            "image_size": 16,
            "patch_size": 4,
        }
    pixels = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    assert same_or_refused(name, fields, lambda m: m(pixel_values=pixels).last_hidden_state) == "same"


def modelling_files():
    makers = "|".join(name for name in vars(masking_utils) if name.startswith("create_"))
    for path in sorted(MODELS.glob("*/modeling_*.py")):
        text = path.read_text()
        if re.search(rf"\b({makers})\(", text) and "ALL_ATTENTION_FUNCTIONS" not in text:
            yield f"transformers.models.{path.parent.name}.{path.stem}"


FILES = list(modelling_files())
assert len(FILES) > 20
WITHOUT_ATTENTION = {  # none at all, or they hand the masks to models whose attention calls the interface
    "modeling_paligemma", "modeling_pi0", "modeling_gemma4_assistant", "modeling_gemma4_unified_assistant",
    "modeling_mamba2",
}  # fmt: skip


def asks_for_masks(kind):
    forward = inspect.getsource(kind.forward) if "forward" in vars(kind) else ""
    return any(f"{name}(" in forward for name in vars(masking_utils) if name.startswith("create_"))


@pytest.mark.parametrize("name", FILES, ids=lambda name: name.rpartition(".")[2])
def test_every_model_that_asks_for_masks_and_does_not_call_the_interface_is_refused(name):
    module = importlib.import_module(name)
    attention = hf_models.attention_in_modules(name)
    assert attention.loses_masks == (name.rpartition(".")[2] not in WITHOUT_ATTENTION), attention
    if attention.loses_masks:
        kinds = [one for one in vars(module).values() if isinstance(one, type) and one.__module__ == name]
        refused = {
            one: hf_models.attention_of_class(one).loses_masks
            for one in kinds
            if issubclass(one, transformers.PreTrainedModel)
        }
        assert any(refused.values())
        assert all(refused[one] for one in refused if asks_for_masks(one))


def test_check_tells_who_calls():
    model = built("MistralForCausalLM", DECODERS["MistralForCausalLM"], "attnbench")
    checked = hf.check(model)
    assert [one.ours for one in checked.modules] == [True, True]
    assert checked.modules[0].path == "model.layers.0.self_attn"
    assert str(checked) == "2 of 2 attention modules call attnbench."
    model.set_attn_implementation("sdpa")
    assert not any(one.ours for one in hf.check(model).modules)
    own = built("BloomForCausalLM", OWN["BloomForCausalLM"], "eager")
    own.config._attn_implementation = "attnbench"
    assert "BloomForCausalLM computes attention by itself" in hf.check(own).refusal
    assert str(hf.check(own)).count("BloomAttention") == 3


NO_ATTENTION = {  # they take a softmax and something called a mask
    "nllb_moe": ["NllbMoeTop2Router"],
    "wav2vec2": ["Wav2Vec2GumbelVectorQuantizer"],
    "vits": ["VitsConvFlow"],
    "maskformer": ["MaskFormerHungarianMatcher"],
    "xlm": ["XLMSQuADHead"],
}


@pytest.mark.parametrize("family", NO_ATTENTION)
def test_routers_quantizers_matchers_and_heads_are_no_attention(family):
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    for name in NO_ATTENTION[family]:
        assert not hf_models.own_attention(getattr(module, name))
    assert NO_ATTENTION[family][0] not in hf_models.attention_in_modules(module.__name__).own


def test_attention_under_another_name_is_attention():
    assert hf_models.own_attention(_Own)
    indexer = importlib.import_module("transformers.models.deepseek_v32.modeling_deepseek_v32").DeepseekV32Indexer
    assert hf_models.own_attention(indexer)  # it adds the mask to its scores


def test_a_quantizer_does_not_change_the_form_of_the_masks():
    small = {"conv_dim": [8, 8], "conv_stride": [2, 2], "conv_kernel": [3, 3], "num_feat_extract_layers": 2}
    small |= {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "hidden_size": 32}
    small |= {"intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "codevector_dim": 16}
    model = built("Wav2Vec2ForPreTraining", {**small, "proj_codevector_dim": 16}, "attnbench")
    assert str(hf.check(model)) == "2 of 2 attention modules call attnbench."
    assert not hf_models.attention_for(model, model.config).own


def test_a_config_in_the_place_of_another_is_looked_at():
    """Ids are given again: what was found for one config must not be told of the next with its id."""
    model = built("MistralForCausalLM", DECODERS["MistralForCausalLM"], "attnbench")
    ours, other = hf_models.attention_for(model, model.config), type(model.config)()
    gone = type(model.config)()
    hf_models._SEEN[model][id(other)] = (
        weakref.ref(gone),
        hf_models.AttentionGroup(Counter(), Counter(x=1), True, False),
    )
    del gone
    assert hf_models.attention_for(model, other) == ours
    assert not hf_models.attention_for(model, other).loses_masks


def compiled_at(model, path):
    model.get_submodule(path).compile(backend="eager")
    return model


@pytest.mark.parametrize("path", ["model.layers.1", "model.layers.1.self_attn", "model.layers.1.mlp", "model", ""])
def test_a_compiled_module_is_found_wherever_it_is(path):
    model = built("MistralForCausalLM", DECODERS["MistralForCausalLM"], "attnbench")
    assert not hf_models.compiled_layers(model)
    assert hf_models.compiled_layers(compiled_at(model, path))


@pytest.mark.parametrize("part", ["encoder", "decoder"])
def test_compiled_layers_of_an_encoder_and_a_decoder(part):
    model = built("BartModel", SEQ2SEQ, "attnbench")
    compiled_at(model, f"{part}.layers.1")
    assert hf_models.compiled_layers(model)
    assert hf_models.compiled_layers(getattr(model, part))
    other = {"encoder": "decoder", "decoder": "encoder"}[part]
    assert not hf_models.compiled_layers(getattr(model, other))


def test_compiled_layers_in_lists_of_lists_and_in_other_places():
    def tree():
        inner = torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.Sequential(torch.nn.Linear(2, 2))])
        return torch.nn.ModuleDict({"parts": torch.nn.ModuleList([torch.nn.ModuleList([]), inner]), "none": None})

    assert not hf_models.compiled_layers(tree())
    replaced = tree()
    replaced["parts"][1][1][0] = torch.compile(replaced["parts"][1][1][0], backend="eager")
    assert hf_models.compiled_layers(replaced)
    by_forward = tree()
    layer = by_forward["parts"][1][0]
    layer.forward = torch.compile(layer.forward, backend="eager")
    assert hf_models.compiled_layers(by_forward)


WATCHED = ("get_correct_attn_implementation", "post_init", "set_attn_implementation")


def test_registering_again_wraps_nothing_again():
    before = [getattr(transformers.PreTrainedModel, name) for name in WATCHED]
    hf.register()
    hf.register("attnbench-eager", impl="torch.eager")
    assert [getattr(transformers.PreTrainedModel, name) for name in WATCHED] == before
    assert all(not hasattr(inspect.unwrap(one), "__wrapped__") for one in before)
    assert all(one.__wrapped__ is inspect.unwrap(one) for one in before)


def test_models_that_do_not_use_attnbench_are_left_alone(monkeypatch):
    """Not looked at when they are loaded or set to another implementation, however large they are."""

    def looked(*_):
        raise AssertionError("a model without attnbench was looked at")

    for name in ("by_config", "remember", "attention_of", "attention_of_class"):
        monkeypatch.setattr(hf_models, name, looked)
    for attention in ("eager", "sdpa"):
        model = built("MistralForCausalLM", DECODERS["MistralForCausalLM"], attention)
        model.set_attn_implementation("eager")
        model.set_attn_implementation({"": "sdpa"})
        model(torch.tensor([[5, 6, 7]]))
    built("BloomForCausalLM", OWN["BloomForCausalLM"], "eager")


@pytest.mark.filterwarnings("error::UserWarning")
def test_attention_that_goes_on_as_before_is_told_of():
    hf._warned.clear()
    with pytest.warns(
        UserWarning, match=r"DebertaV2Model computes attention by itself .*attnbench is not called there"
    ):
        built("DebertaV2Model", ENCODERS["DebertaV2Model"], "attnbench")


class _Own(torch.nn.Module):
    """Attention that adds the mask to its scores, in the place of one that calls the interface."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.mix = torch.nn.Linear(32, 32)

    def forward(self, hidden_states, attention_mask=None, **more):
        scores = hidden_states @ hidden_states.mT
        scores = scores[:, None] + attention_mask[:, :, :, : scores.shape[-1]]
        return self.mix(scores.softmax(-1)[:, 0] @ hidden_states), None


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@torch.no_grad()
def test_a_layer_with_attention_of_its_own_among_others_is_right(compiled):
    """The masks take the form that serves both."""

    def call(attention):
        model = built("MistralForCausalLM", DECODERS["MistralForCausalLM"], attention)
        torch.manual_seed(1)
        model.model.layers[0].self_attn = _Own(None)
        given = inputs("right")
        call = torch.compile(model, backend="eager") if compiled else model
        found = [call(**given, use_cache=False).logits[given["attention_mask"].bool()]]
        found.append(call(given["input_ids"], use_cache=False).logits.flatten(0, 1))
        return torch.cat(found)

    torch.testing.assert_close(call("attnbench"), call("eager"), **TIGHT)


@pytest.mark.parametrize(
    "misuse",
    [
        lambda mask, x: x + mask,
        lambda mask, x: mask[:, :, 1:] + x[:, :, 1:],
        lambda mask, x: x.masked_fill(mask, -1e9),
        lambda mask, x: x.masked_fill(mask.bool(), -1e9),
        lambda mask, x: mask.to(x.dtype),
        lambda mask, x: mask.clone().float() * x,
        lambda mask, x: x * mask,
        lambda mask, x: x - mask.long(),
        lambda mask, x: mask < 0,
        lambda mask, x: mask == 0,
        lambda mask, x: x.add_(mask),
        lambda mask, x: torch.cat([mask, x]),
        lambda mask, x: torch.nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=mask),
        lambda mask, x: torch.baddbmm(mask[:, 0], x[:, 0], x[:, 0].mT),
    ],
)
@pytest.mark.parametrize("kind", ["described", "array"])
def test_no_code_but_ours_computes_with_a_mask(kind, misuse):
    """The last line of defence, should a class be misread."""
    mask = hf_masks.describe(batch_size=2, q_length=5, kv_length=5, device="cpu")
    mask = mask if kind == "described" else mask[:, :, :5].contiguous() & torch.ones(5, dtype=torch.bool)
    mask = mask.array() if kind == "array" and isinstance(mask, hf_masks.DescribedMask) else mask
    with pytest.raises(Unsupported, match="computes with the mask"):
        misuse(mask, torch.randn(2, 1, 5, 5))


def test_the_words_name_the_module_that_misreads_a_mask():
    mask = hf_masks.describe(batch_size=2, q_length=5, kv_length=5, device="cpu")
    with pytest.raises(Unsupported, match=r"_Own of Sequential computes with the mask"):
        torch.nn.Sequential(_Passing(_Own(None), mask))(torch.randn(2, 5, 32))


class _Passing(torch.nn.Module):
    def __init__(self, inner, mask):
        super().__init__()
        self.inner, self.mask = inner, mask

    def forward(self, x):
        return self.inner(x, attention_mask=self.mask)
