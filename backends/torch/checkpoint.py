"""What a checkpoint's own files say about how to use it: pooling, prompts, length, labels.

Knows nothing of torch and loads no weights. Nothing here is guessed: what a file does not say is
sentence-transformers' documented default, and a module that this engine does not have is an error.
"""

from pathlib import Path
from typing import Any, Literal

import msgspec

from backends.errors import ModelUnavailable

PoolingMode = Literal["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]

# sentence-transformers before 6 wrote one flag a mode; several true flags concatenate in this order.
LEGACY_POOLING_FLAGS: dict[str, PoolingMode] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
# RoBERTa's family starts positions after the padding index, so two of its positions hold no token.
OFFSET_POSITIONS = {"roberta": 2, "xlm-roberta": 2, "camembert": 2, "mpnet": 2, "longformer": 2}
# transformers writes this huge number where a tokenizer has no maximum.
NO_MAXIMUM = 10**9


class Projection(msgspec.Struct, frozen=True):
    """What sentence-transformers does to a pooled vector: a `Dense` layer, or scaling to length 1."""

    kind: Literal["Dense", "Normalize"]
    folder: str = ""


class Recipe(msgspec.Struct, frozen=True):
    """How texts become vectors or scores with this checkpoint.

    task: embed, or rerank for a sequence classifier with one label.
    projections: what follows pooling, in order; scaling at the end is left to whoever asks for it.
    prompts: name → text that is put before an input.
    include_prompt: whether the prompt's tokens take part in pooling.
    """

    task: Literal["embed", "rerank"]
    model_type: str
    max_tokens: int
    pooling: tuple[PoolingMode, ...] = ("mean",)
    projections: tuple[Projection, ...] = ()
    include_prompt: bool = True
    lower_case: bool = False
    prompts: dict[str, str] = {}
    default_prompt: str | None = None


class InputRules(msgspec.Struct, frozen=True):
    """What a server does to inputs before its model sees them: how much it keeps, what it puts before."""

    max_tokens: int
    prompts: dict[str, str] = {}
    default_prompt: str | None = None


def read_input_rules(checkpoint: Path) -> InputRules:
    """The part of a recipe that holds for any server, also of a model that this engine does not have.

    Raises: ModelUnavailable.
    """
    transformer = checkpoint / dict(_listed_modules(checkpoint)).get("Transformer", "")
    sentence = _json(checkpoint / "config_sentence_transformers.json")
    maximum = _max_tokens(
        _json(checkpoint / "config.json"),
        _json(transformer / "sentence_bert_config.json"),
        _json(transformer / "tokenizer_config.json"),
    )
    return InputRules(maximum, _prompts(sentence), sentence.get("default_prompt_name"))


def read_recipe(checkpoint: Path) -> Recipe:
    """Read config.json and the sentence-transformers files beside it.

    Raises: ModelUnavailable.
    """
    config = _json(checkpoint / "config.json")
    modules = _modules(checkpoint)
    folders = dict(modules)
    transformer = checkpoint / folders.get("Transformer", "")
    sentence_config = _json(transformer / "sentence_bert_config.json")
    maximum = _max_tokens(config, sentence_config, _json(transformer / "tokenizer_config.json"))
    if _is_classifier(config):
        return Recipe("rerank", config["model_type"], maximum)
    pooling = _json(checkpoint / folders["Pooling"] / "config.json") if "Pooling" in folders else {}
    sentence = _json(checkpoint / "config_sentence_transformers.json")
    return Recipe(
        task="embed",
        model_type=str(config.get("model_type", "")),
        max_tokens=maximum,
        pooling=_pooling_modes(pooling),
        projections=_projections(modules),
        include_prompt=bool(pooling.get("include_prompt", True)),
        lower_case=bool(sentence_config.get("do_lower_case", False)),
        prompts=_prompts(sentence),
        default_prompt=sentence.get("default_prompt_name"),
    )


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ModelUnavailable(f"{path} is not valid JSON: {error}") from error


def _prompts(sentence: dict[str, Any]) -> dict[str, str]:
    return {name: text for name, text in sentence.get("prompts", {}).items() if text is not None}


def _listed_modules(checkpoint: Path) -> list[tuple[str, str]]:
    """(module kind, its folder) in order, from modules.json; empty for a plain transformers checkpoint."""
    path = checkpoint / "modules.json"
    if not path.is_file():
        return []
    listed = msgspec.json.decode(path.read_bytes(), type=list[dict[str, Any]])
    return [(str(one["type"]).rsplit(".", 1)[-1], str(one.get("path", ""))) for one in listed]


def _modules(checkpoint: Path) -> list[tuple[str, str]]:
    """The same, all of them known here."""
    modules = _listed_modules(checkpoint)
    unknown = {kind for kind, _ in modules} - {"Transformer", "Pooling", "Dense", "Normalize"}
    if unknown:
        raise ModelUnavailable(
            f"{checkpoint} uses the sentence-transformers module {', '.join(sorted(unknown))}, which "
            "the built-in engine does not have; serve it with TEI or Infinity behind this gateway"
        )
    return modules


def _projections(modules: list[tuple[str, str]]) -> tuple[Projection, ...]:
    found = [
        Projection("Dense" if kind == "Dense" else "Normalize", folder)
        for kind, folder in modules
        if kind in {"Dense", "Normalize"}
    ]
    while found and found[-1].kind == "Normalize":
        found.pop()
    return tuple(found)


def _is_classifier(config: dict[str, Any]) -> bool:
    architectures = config.get("architectures") or []
    if not any(str(name).endswith("ForSequenceClassification") for name in architectures):
        return False
    labels = len(config.get("id2label") or {}) or int(config.get("num_labels", 2))
    if labels != 1:
        raise ModelUnavailable(
            f"the checkpoint is a classifier with {labels} labels; the built-in engine reranks with "
            "classifiers of one label"
        )
    return True


def _pooling_modes(pooling: dict[str, Any]) -> tuple[PoolingMode, ...]:
    named = pooling.get("pooling_mode")
    if named is None:
        found = [mode for flag, mode in LEGACY_POOLING_FLAGS.items() if pooling.get(flag)]
        return tuple(found) or ("mean",)
    try:
        modes = (named,) if isinstance(named, str) else tuple(named)
        return msgspec.convert(modes, tuple[PoolingMode, ...])
    except msgspec.ValidationError as error:
        raise ModelUnavailable(f"the checkpoint asks for pooling {named!r}: {error}") from error


def _max_tokens(
    config: dict[str, Any], sentence_config: dict[str, Any], tokenizer_config: dict[str, Any]
) -> int:
    """The shortest of what the files allow, as sentence-transformers reads them."""
    positions = config.get("max_position_embeddings")
    offset = OFFSET_POSITIONS.get(str(config.get("model_type", "")), 0)
    limits = [
        sentence_config.get("max_seq_length"),
        tokenizer_config.get("model_max_length"),
        positions - offset if positions else None,
    ]
    stated = [int(limit) for limit in limits if limit and limit < NO_MAXIMUM]
    if not stated:
        raise ModelUnavailable("no file of the checkpoint says how many tokens the model takes")
    return min(stated)
