"""Configurations of the networks that the engine has itself: BERT, RoBERTa and their twins.

Pure. Source: `BertConfig` and `RobertaConfig` of transformers 5.
"""

from typing import Literal

import msgspec

from backends.recipe.files import Json
from backends.recipe.positions import ROTARY_KEYS


class BertConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Part of config.json that the network depends on, with the defaults of transformers' `BertConfig`."""

    model_type: Literal["bert", "roberta", "xlm-roberta", "camembert"]
    vocab_size: int = 30522
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    hidden_act: Literal["gelu", "relu", "silu", "swish", "tanh"] = "gelu"
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    layer_norm_eps: float = 1e-12
    pad_token_id: int | None = 0
    tie_word_embeddings: Literal[True] = True
    position_embedding_type: Literal["absolute"] | None = "absolute"
    is_decoder: Literal[False] = False
    add_cross_attention: Literal[False] = False
    output_hidden_states: Literal[False] = False

    @property
    def prefix(self) -> str:
        """Name of the encoder within a network with a head."""
        return "bert" if self.model_type == "bert" else "roberta"


# Defaults of the other types.
DEFAULTS: dict[str, Json] = {
    "bert": {},
    "roberta": {"vocab_size": 50265, "pad_token_id": 1},
    "xlm-roberta": {"pad_token_id": 1},
    "camembert": {"pad_token_id": 1},
}


def read_bert(config: Json) -> BertConfig | None:
    """Return the configuration of a network that this module has, None for any other.

    config: content of config.json.
    """
    model_type = config.get("model_type")
    if model_type not in DEFAULTS or ROTARY_KEYS & config.keys() or "auto_map" in config:
        return None
    try:
        found = msgspec.convert({**DEFAULTS[model_type], **config}, BertConfig)
    except msgspec.ValidationError:
        return None
    pad_id = found.pad_token_id
    has_padding = found.model_type == "bert" if pad_id is None else 0 <= pad_id < found.vocab_size
    return found if has_padding and found.hidden_size % found.num_attention_heads == 0 else None
