"""Classes of transformers by a checkpoint's `model_type`, and configurations for networks under other names.

Reads names only; a class is imported where its inputs are asked for.
"""

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import transformers
from transformers.models.auto.auto_mappings import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    MODEL_MAPPING_NAMES,
)

from backends.recipe.files import CheckpointFiles, Json
from backends.recipe.native_forms import JINA_V3, JINA_V5, native_form
from backends.recipe.recipe import ModelKind
from backends.torch.stock.llama_bidirectional import CLASS_NAMES, LlamaBidirectionalConfig

# Class of transformers that builds each kind of network.
AUTO_CLASSES: dict[ModelKind, str] = {
    "dense": "AutoModel",
    "sparse": "AutoModelForMaskedLM",
    "multivector": "AutoModel",
    "classifier": "AutoModelForSequenceClassification",
    "language": "AutoModelForCausalLM",
    "dual": "AutoModel",
    "pages": "AutoModel",
}
NATIVE_CLASSES: dict[str, Mapping[str, Any]] = {
    "AutoConfig": CONFIG_MAPPING_NAMES,
    "AutoModel": MODEL_MAPPING_NAMES,
    "AutoModelForMaskedLM": MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "AutoModelForSequenceClassification": MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    "AutoModelForCausalLM": MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
}
# Classes that the engine registers with transformers, by `model_type`.
ENGINE_CLASSES: dict[str, Mapping[str, str]] = {LlamaBidirectionalConfig.model_type: CLASS_NAMES}


def native_names(auto_class: str, model_type: str) -> tuple[str, ...]:
    """Return the names of the classes that an auto class builds for a type, the first by default."""
    if model_type in ENGINE_CLASSES:
        return (ENGINE_CLASSES[model_type].get(auto_class, ""),)
    names = NATIVE_CLASSES[auto_class].get(model_type, ())
    return (names,) if isinstance(names, str) else tuple(names)


def is_decoder(model_type: str) -> bool:
    """Return True for a network of a language model, in which a token attends to those before it."""
    return model_type in ENGINE_CLASSES or (
        model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        and model_type not in MODEL_FOR_MASKED_LM_MAPPING_NAMES
    )


def input_names(kind: ModelKind, model_type: str) -> frozenset[str]:
    """Return the inputs that transformers' network takes by name, none for a type that it does not have."""
    auto_class = AUTO_CLASSES.get(kind)
    names = native_names(auto_class, model_type) if auto_class else ()
    network = getattr(transformers, names[0], None) if names else None
    return frozenset() if network is None else frozenset(inspect.signature(network.forward).parameters)


def default_of(model_type: str, key: str) -> Any:
    """Return the value of a key that a config.json of this type leaves out, None if it has no such key."""
    names = native_names("AutoConfig", model_type)
    return getattr(getattr(transformers, names[0], None), key, None) if names else None


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
