"""Small configurations of any type of network, by the names of their keys."""

import inspect
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import transformers
from transformers.models.auto import modeling_auto as auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from backends.torch.stock.architectures import OTHER_INPUTS

# Length of windows and chunks. Most texts are longer.
WINDOW = 24
LAYERS, HEADS, WIDTH, INNER, HEAD_WIDTH = 4, 4, 32, 48, 8
POSITIONS = 512
SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "emb_dim", "embedding_dim"), WIDTH),
    **dict.fromkeys(("embedding_size", "input_embedding_size", "output_embedding_size"), WIDTH),
    **dict.fromkeys(("attention_hidden_size", "lru_width", "d_embed", "rotary_value_width"), WIDTH),
    **dict.fromkeys(("intermediate_size", "n_inner", "d_ff", "ffn_dim", "hidden_dim", "d_inner"), INNER),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "ffn_hidden_size", "dim_ff"), INNER),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_size"), WIDTH),
    **dict.fromkeys(("intermediate_size_mlp", "shared_intermediate_size", "ffn_intermediate_size"), INNER),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "zero_expert_intermediate_size"), WIDTH),
    **dict.fromkeys(
        ("block_ffn_dim", "expert_dim", "mamba_ffn_dim", "prefix_dense_intermediate_size"), INNER
    ),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"), HEADS),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), HEADS),
    **dict.fromkeys(("num_encoder_attention_heads", "num_decoder_attention_heads"), HEADS),
    **dict.fromkeys(("num_key_value_heads", "num_attention_groups"), 2),
    **dict.fromkeys(("head_dim", "d_kv", "d_head", "kv_channels", "attention_head_size"), HEAD_WIDTH),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "qk_head_dim"), HEAD_WIDTH),
    **dict.fromkeys(("global_head_dim", "linear_key_head_dim", "linear_value_head_dim"), HEAD_WIDTH),
    **dict.fromkeys(("swa_head_dim", "swa_v_head_dim", "index_head_dim"), HEAD_WIDTH),
    **dict.fromkeys(("rotary_dim", "rotary_pct_dim"), 4),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "o_lora_rank"), 16),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers"), LAYERS),
    **dict.fromkeys(("decoder_layers", "num_encoder_layers", "num_decoder_layers"), LAYERS),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts", "num_selected_experts"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace"), 1),
    **dict.fromkeys(("moe_num_shared_experts", "num_shared_experts", "num_dense_layers"), 1),
    **dict.fromkeys(("linear_num_key_heads",), 2),
    **dict.fromkeys(("linear_num_value_heads",), 4),
    **dict.fromkeys(("sliding_window", "local_attention", "attention_chunk_size", "window_size"), WINDOW),
    **dict.fromkeys(("attention_window_size", "block_size", "local_window_size", "attention_window"), WINDOW),
    **dict.fromkeys(("local_block_size", "index_topk", "sliding_window_size", "attn_window_size"), WINDOW),
    "use_sliding_window": True,
    "max_window_layers": 1,
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), POSITIONS),
    **dict.fromkeys(("max_sequence_length", "context_length", "n_ctx", "max_seq_length"), POSITIONS),
    **dict.fromkeys(("mamba_d_state", "state_size", "ssm_state_size", "mamba_state_dim"), 16),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "n_mamba_heads"), 8),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "mamba_headdim"), 8),
    **dict.fromkeys(("mamba_n_groups", "n_groups", "mamba_ngroups"), 1),
    **dict.fromkeys(("mamba_chunk_size", "chunk_size"), 16),
    "mamba_d_ssm": 64,
    "time_step_rank": 8,
    **dict.fromkeys(("vocab_size_per_layer_input",), 700),
    "hidden_size_per_layer_input": 8,
    "laurel_rank": 8,
    "relative_attention_max_distance": 32,
}
# Stands for a key that is left out.
DEFAULT = object()
# Types whose code asks for more than names of keys show.
ROTARY = {"rope_type": "default", "rope_theta": 10000.0}
HYBRID = ["linear_attention", "full_attention"] * 2
SECTIONS = ROTARY | {"mrope_section": [1, 1, 2]}
OWN_SIZES: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"layer_group_size": 2},
    "bamba": {"attn_layer_indices": [1, 3]},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": dict.fromkeys(("sliding_attention", "full_attention"), ROTARY),
    },
    "cosmos3_edge_text": {"rope_parameters": SECTIONS},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0}},
    "dots3_note_text": {"num_key_value_heads": HEADS},
    "esm": {"token_dropout": True, "mask_token_id": 4, "emb_layer_norm_before": False},
    "esmc": {"num_key_value_heads": HEADS},
    "falcon": {"head_dim": DEFAULT},
    "funnel": {
        "num_hidden_layers": DEFAULT,
        "block_sizes": [2, 2],
        "block_repeats": [1, 1],
        "architectures": ["FunnelModel"],
    },
    "gemma3n_text": {"num_kv_shared_layers": 0, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "glm4v_moe_text": {"rope_parameters": SECTIONS | {"partial_rotary_factor": 1.0}},
    "glm4v_text": {"rope_parameters": SECTIONS | {"partial_rotary_factor": 1.0}},
    "glm5_next_text": {"num_key_value_heads": HEADS, "index_topk": 32},
    "glm_image_text": {"rope_parameters": SECTIONS | {"partial_rotary_factor": 1.0}},
    "glm_ocr_text": {"rope_parameters": SECTIONS | {"partial_rotary_factor": 1.0}},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": {"layer_types": HYBRID},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "hunyuan_vl_text": {"rope_parameters": ROTARY | {"mrope_section": [1, 1, 1, 1]}},
    "kimi_linear": {"layer_types": HYBRID[:2], "num_hidden_layers": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "longcat_flash": {"head_dim": HEAD_WIDTH},
    "luke": {"entity_vocab_size": 10, "entity_emb_size": WIDTH},
    "mamba2": {"num_heads": 8},
    "prophetnet": {"num_hidden_layers": DEFAULT},
    "qwen2_5_vl_text": {"rope_parameters": SECTIONS},
    "qwen2_vl_text": {"rope_parameters": SECTIONS},
    "reformer": {"axial_pos_embds_dim": [16, 16], "axial_pos_shape": [16, 32]},
    "xlnet": {"max_position_embeddings": DEFAULT},
    "xlstm": {"v_head_dim": DEFAULT, "qk_head_dim": DEFAULT, "hidden_size": 64, "embedding_dim": 64},
    "xmod": {"default_language": "en_XX"},
    "zamba2": {"num_hidden_layers": DEFAULT},
    "zaya": {"num_experts_per_tok": 1},
}
SPECIAL_IDS = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "cls_token_id": 0, "sep_token_id": 2}


# Inputs of networks that read pictures, videos or sound next to a text.
MEDIA_INPUTS = frozenset(
    {
        *(
            "pixel_values_videos",
            "pixel_values_images",
            "image_embeds",
            "image_features",
            "pixel_attention_mask",
        ),
        *("input_audio_embeds", "image_pixel_values", "speech_input_ids", "audio_codes", "flattened_patches"),
    }
)


def model_types() -> list[str]:
    """Return the types of networks that may read texts, sorted; without an import of their code."""
    heads = (
        auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
        auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
        auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        auto.MODEL_FOR_PRETRAINING_MAPPING_NAMES,
    )
    named = {name for mapping in heads for name in mapping}
    return sorted(name for name in auto.MODEL_MAPPING_NAMES if name in named or "text" in name)


def reads_text(model_type: str) -> bool:
    """Return True if a network of this type takes texts, and no pictures or sound with them."""
    names = auto.MODEL_MAPPING_NAMES[model_type]
    network = getattr(transformers, names if isinstance(names, str) else names[0], None)
    if network is None or getattr(network, "_backends", None):
        return False
    parameters = set(inspect.signature(network.forward).parameters)
    return "input_ids" in parameters and not parameters & (set(OTHER_INPUTS) | MEDIA_INPUTS)


def small_config(model_type: str, vocabulary: int, keys: Mapping[str, Any]) -> Any:
    """Return a configuration with small sizes, and other keys. Raises: whatever the class raises."""
    kind = CONFIG_MAPPING[model_type]
    own = OWN_SIZES.get(model_type, {})
    own_names = _keys(model_type)
    sizes = {key: value for key, value in SIZES.items() if key in own_names and own.get(key) is not DEFAULT}
    if "qk_rope_head_dim" in own_names:
        # Its code adds up the width of a head, and each head has keys of its own.
        sizes = {key: value for key, value in sizes.items() if key not in {"head_dim", "qk_head_dim"}}
        sizes["num_key_value_heads"] = HEADS
    sizes |= SPECIAL_IDS | {"vocab_size": vocabulary}
    sizes |= {key: value for key, value in own.items() if value is not DEFAULT}
    mapped = getattr(kind, "attribute_map", {})
    return kind(**{mapped.get(key, key): value for key, value in sizes.items()} | keys)


@cache
def _keys(model_type: str) -> frozenset[str]:
    kind = CONFIG_MAPPING[model_type]
    return frozenset(_own_keys(kind))


def _own_keys(kind: type) -> Iterator[str]:
    yield from inspect.signature(kind.__init__).parameters
    yield from getattr(kind, "attribute_map", {})
    yield from (key for key in vars(kind) if not key.startswith("_"))
