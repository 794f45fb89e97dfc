"""Module files of sentence-transformers as its versions write them."""

from typing import Any

from tests.engine.families.family import Json

# Sizes of every made network. Head dimensions are even, which rotary embeddings need.
HIDDEN, LAYERS, HEADS, INTERMEDIATE = 32, 2, 4, 48
SIZES: Json = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": INTERMEDIATE,
}
POOLING_FLAGS = {
    "cls": "pooling_mode_cls_token",
    "mean": "pooling_mode_mean_tokens",
    "max": "pooling_mode_max_tokens",
    "mean_sqrt_len_tokens": "pooling_mode_mean_sqrt_len_tokens",
    "weightedmean": "pooling_mode_weightedmean_tokens",
    "lasttoken": "pooling_mode_lasttoken",
}
PACKAGE = "sentence_transformers.models"
TANH = "torch.nn.modules.activation.Tanh"
IDENTITY = "torch.nn.modules.linear.Identity"

Files = dict[str, Json | list[Json]]


def pooling_config(mode: str, **options: Any) -> Json:
    """Return 1_Pooling/config.json as sentence-transformers 2 to 5 wrote it."""
    flags = {flag: mode == name for name, flag in POOLING_FLAGS.items()}
    return {"word_embedding_dimension": HIDDEN, **flags, **options}


def dense_config(out_features: int, activation: str = IDENTITY, *, bias: bool = True) -> Json:
    """Return the config of a `Dense` module after pooling."""
    return {
        "in_features": HIDDEN,
        "out_features": out_features,
        "bias": bias,
        "activation_function": activation,
    }


def modules(*kinds: str) -> list[Json]:
    """Return modules.json: the network at the top, and a numbered folder for each other module."""
    return [
        {
            "idx": i,
            "name": str(i),
            "path": f"{i}_{kind}" if i else "",
            "type": f"{PACKAGE}.{kind}",
        }
        for i, kind in enumerate(kinds)
    ]


def sentence_files(
    mode: str,
    *,
    normalize: bool = True,
    max_seq_length: int | None = 512,
    prompts: dict[str, str] | None = None,
    dense: Json | None = None,
    pooling: Json | None = None,
) -> Files:
    """Return the files of a model with pooling, an optional `Dense` layer and optional scaling.

    max_seq_length: None for a checkpoint without sentence_bert_config.json.
    """
    after = [*(["Dense"] if dense else []), *(["Normalize"] if normalize else [])]
    files: Files = {
        "modules.json": modules("Transformer", "Pooling", *after),
        "1_Pooling/config.json": pooling_config(mode, **(pooling or {})),
        "config_sentence_transformers.json": {
            "__version__": {"sentence_transformers": "2.7.0", "transformers": "4.39.3", "pytorch": "2.1.0"},
            **({"prompts": prompts, "default_prompt_name": None} if prompts else {}),
        },
    }
    if max_seq_length is not None:
        files["sentence_bert_config.json"] = {"max_seq_length": max_seq_length, "do_lower_case": False}
    if dense:
        files["2_Dense/config.json"] = dense
    return files
