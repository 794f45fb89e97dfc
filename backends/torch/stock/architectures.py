"""Classes of transformers by a checkpoint's `model_type`, and configurations for networks under other names.

Reads names only; a class is imported where its inputs are asked for.
"""

import inspect
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto.auto_mappings import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    MODEL_MAPPING_NAMES,
)

from backends.contract.errors import ModelUnavailable
from backends.recipe.files import CheckpointFiles, Json
from backends.recipe.native_forms import JINA_V3, JINA_V5, native_form
from backends.recipe.recipe import ModelKind, Recipe
from backends.torch.networks.opening import NetworkFacts
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


# Inputs of networks that read more than text.
OTHER_INPUTS = {
    "bbox": "the place of each word on a page",
    "xpath_tags_seq": "the place of each word in a page's markup",
    "visual_embeds": "vectors of an image",
    "visual_feats": "vectors of an image",
    "pixel_values": "an image",
    "input_features": "sound",
    "input_values": "sound",
    "input_shape_ids": "the shape of each Chinese character",
}
HALVES = "an encoder-decoder, of which the built-in engine serves the encoders of t5, mt5 and umt5 only"
# Networks of which the engine serves nothing, by `model_type`.
REFUSED_TYPES = {
    **dict.fromkeys(
        (
            *("blenderbot", "blenderbot-small", "fsmt", "longt5", "m2m_100", "marian", "nllb-moe", "pegasus"),
            *("pegasus_x", "prophetnet", "switch_transformers", "t5gemma", "t5gemma2", "xlm-prophetnet"),
        ),
        HALVES,
    ),
    **dict.fromkeys(("canine", "perceiver"), "which reads characters and has no tokenizer.json"),
    "dpr": "whose network gives a vector of a text and none of its tokens; give the model as "
    "sentence-transformers publishes it, under sentence-transformers/facebook-dpr-…",
    "reformer": "whose attention chooses keys at random, so that a text has another vector each time",
    "tapas": "whose network reads a table next to the text; the built-in engine has text only",
}
# Networks whose classifier reads a text at an end token, which a text may contain.
SPLIT_CLASSIFIERS = frozenset(
    {"bart", "bigbird_pegasus", "led", "mbart", "mt5", "mvp", "plbart", "t5", "umt5"}
)


def read_facts(files: CheckpointFiles, recipe: Recipe, *, runs_own_code: bool) -> NetworkFacts:
    """Return what a plan needs of a network of transformers, or of own code, whose inputs are not known.

    Raises: ModelUnavailable if texts alone give the network nothing that the engine can read.
    """
    try:
        config = read_config(files.checkpoint)
        text_config = config.get_text_config()
    except Exception:  # noqa: BLE001 - a load gives the reason, and own code may read what this cannot
        config = text_config = None
    words = getattr(text_config, "vocab_size", files.config.get("vocab_size"))
    words = words if isinstance(words, int) and words > 0 else None
    if recipe.kind in {"dual", "pages"}:
        return NetworkFacts(words, takes_type_ids=False)
    names = input_names(recipe.kind, recipe.model_type)
    if not runs_own_code:
        _refuse_network(files, recipe, names, config)
    types = files.config.get("type_vocab_size", default_of(recipe.model_type, "type_vocab_size"))
    return NetworkFacts(words, types, takes_type_ids=not names or "token_type_ids" in names)


def _refuse_network(files: CheckpointFiles, recipe: Recipe, names: Collection[str], config: Any) -> None:
    model_type = recipe.model_type
    found = next((OTHER_INPUTS[name] for name in OTHER_INPUTS if name in names), None)
    reason = REFUSED_TYPES.get(model_type) or _unknown_rotation(config)
    if recipe.kind == "classifier" and model_type in SPLIT_CLASSIFIERS:
        reason = "an encoder-decoder, whose classifier the built-in engine does not serve"
    if found is not None:
        reason = f"whose network reads {found} next to the text; the built-in engine has text only"
    if reason is not None:
        raise ModelUnavailable(f"{files.checkpoint} has `model_type` {model_type!r}, {reason}")


def _unknown_rotation(config: Any) -> str | None:
    """Return the reason against a checkpoint whose rotary positions transformers does not have."""
    stated = getattr(config, "rope_parameters", None)
    parameters = stated if isinstance(stated, dict) else {}
    layers = [part for part in parameters.values() if isinstance(part, dict)]
    kinds = [part["rope_type"] for part in (layers or [parameters]) if isinstance(part.get("rope_type"), str)]
    unknown = next((kind for kind in kinds if kind not in {"default", *ROPE_INIT_FUNCTIONS}), None)
    if unknown is None:
        return None
    known = ", ".join(sorted(ROPE_INIT_FUNCTIONS))
    return (
        f"and rotary positions of the type {unknown!r} in `rope_scaling` of its config.json, which "
        f"transformers does not have (it has: {known}); they are those of other code: serve it with a "
        "backend that runs this code, or state the type that computes the same"
    )
