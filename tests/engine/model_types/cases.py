"""Cases of the differential run: every type, and configurations of some types that its defaults leave out."""

from pathlib import Path
from typing import Any

from tests.engine.model_types.comparison import Outcome, compare
from tests.engine.model_types.small_configs import model_types

# Shorter than most texts.
SHORT = 64
ROTARY = {"rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": SHORT}
FACTORS = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 2.0, 3.0, 4.0]}
FREQUENCIES = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, linear": ("llama", {"rope_parameters": ROTARY | {"rope_type": "linear"}}),
    "llama, dynamic": ("llama", {"rope_parameters": DYNAMIC, "max_position_embeddings": SHORT}),
    "gte, dynamic": ("gte", {"rope_parameters": DYNAMIC, "max_position_embeddings": SHORT}),
    "llama, yarn": ("llama", {"rope_parameters": ROTARY | {"rope_type": "yarn"}}),
    "llama, llama3": ("llama", {"rope_parameters": ROTARY | FREQUENCIES | {"rope_type": "llama3"}}),
    "phi3, longrope": (
        "phi3",
        {
            "original_max_position_embeddings": SHORT,
            "rope_parameters": ROTARY | FACTORS | {"rope_type": "longrope"},
        },
    ),
    "ministral3, scaled by position": (
        "ministral3",
        {
            "rope_parameters": ROTARY
            | {"rope_type": "yarn", "llama_4_scaling_beta": 0.1, "max_position_embeddings": SHORT}
        },
    ),
    "esm, rotary": ("esm", {"position_embedding_type": "rotary"}),
    "esm, without token dropout": ("esm", {"position_embedding_type": "rotary", "token_dropout": False}),
    "qwen2, both directions": ("qwen2", {"is_causal": False}),
    "gemma3_text, both directions": ("gemma3_text", {"use_bidirectional_attention": True}),
    "deberta-v2, relative": (
        "deberta-v2",
        {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_biased_input": False},
    ),
}


def case_names() -> list[str]:
    """Return the names of all cases: types, then variants."""
    return [*model_types(), *VARIANTS]


def outcome_of(name: str, folder: Path) -> Outcome:
    """Return the outcome of a case under its name. folder: for its checkpoint."""
    model_type, keys = VARIANTS.get(name, (name, {}))
    return compare(model_type, folder, **keys)._replace(model_type=name)
