"""Configurations of transformers for checkpoints that have the network under other names."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import transformers

from backends.recipe.files import CheckpointFiles, Json
from backends.recipe.native_forms import JINA_V3, JINA_V5, native_form

# Keys that XLM-RoBERTa and Jina's third model share.
XLM_ROBERTA_KEYS = (
    "attention_probs_dropout_prob",
    "bos_token_id",
    "eos_token_id",
    "hidden_act",
    "hidden_dropout_prob",
    "hidden_size",
    "initializer_range",
    "intermediate_size",
    "layer_norm_eps",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "pad_token_id",
    "type_vocab_size",
    "vocab_size",
)
# The default of its own code.
ROTARY_BASE = 10000.0
OWN_KEYS = frozenset({"architectures", "auto_map", "model_type", "transformers_version"})


def read_config(checkpoint: Path) -> Any:
    """Return a checkpoint's configuration as transformers' class for it."""
    files = CheckpointFiles(checkpoint)
    form = native_form(files.config)
    if form is not None:
        return CONFIGS[form.architecture](files.config)
    return transformers.AutoConfig.from_pretrained(checkpoint, local_files_only=True, trust_remote_code=False)


def _jina_v3_config(config: Json) -> Any:
    positions = config.get("position_embedding_type")
    if positions != "rotary":
        raise ValueError(f"`position_embedding_type` is {positions!r}, and its network has 'rotary' only")
    values = {key: config[key] for key in XLM_ROBERTA_KEYS if key in config}
    rotation = {"rope_type": "default", "rope_theta": float(config.get("rotary_emb_base", ROTARY_BASE))}
    return transformers.JinaEmbeddingsV3Config(**values, rope_parameters=rotation)


def _jina_v5_config(config: Json) -> Any:
    values = {key: value for key, value in config.items() if key not in OWN_KEYS}
    # The small model is a decoder, the nano model an encoder.
    network = transformers.Qwen3Config if config.get("is_decoder", True) else transformers.EuroBertConfig
    return network(**values)


CONFIGS: dict[str, Callable[[Json], Any]] = {JINA_V3: _jina_v3_config, JINA_V5: _jina_v5_config}
