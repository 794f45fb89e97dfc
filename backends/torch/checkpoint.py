"""What a checkpoint's own files say about how to use it: its kind, pooling, prompts, length, labels.

Knows nothing of torch and loads no weights. Nothing here is guessed: what a file does not say is
sentence-transformers' documented default, and a module that this engine does not have is an error.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from backends.contract import Output
from backends.errors import ModelUnavailable
from backends.torch.files import Files
from backends.torch.kinds import ModelKind, Said, recognize
from backends.torch.late import LateInteraction, read_late_interaction

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
POOLINGS_SAID: dict[str, PoolingMode] = {
    "cls": "cls",
    "max": "max",
    "mean": "mean",
    "weighted_mean": "weightedmean",
    "last_token": "lasttoken",
}
# In the order in which sentence-transformers' encode_document looks.
DOCUMENT_PROMPTS = ("document", "passage", "corpus")
# BGE-M3's weights beside its dense model.
LEXICAL_FILE = "sparse_linear.pt"
COLBERT_FILE = "colbert_linear.pt"
# What a kind of model gives of its own.
OWN_OUTPUTS: dict[ModelKind, Output] = {
    "dense": Output.DENSE,
    "sparse": Output.SPARSE,
    "multivector": Output.MULTIVECTOR,
}
# What architectures call the components of a token's vector.
WIDTHS = ("hidden_size", "dim", "d_model", "n_embd")
# transformers writes this huge number where a tokenizer has no maximum.
NO_MAXIMUM = 10**9


class Projection(msgspec.Struct, frozen=True):
    """What sentence-transformers does to a pooled vector: a `Dense` layer, or scaling to length 1."""

    kind: Literal["Dense", "Normalize"]
    folder: str = ""


class Splade(msgspec.Struct, frozen=True):
    """How a masked language model's logits become weights of terms: log(1 + relu), once or twice."""

    strategy: Literal["max", "sum"] = "max"
    twice: bool = False


class YesNo(msgspec.Struct, frozen=True):
    """Which next tokens speak for a document and which against it; None are "yes" and "no"."""

    true_id: int | None = None
    false_id: int | None = None


class Recipe(msgspec.Struct, frozen=True):
    """How texts become vectors, weights or scores with this checkpoint.

    projections: what follows pooling, in order; scaling at the end is left to whoever asks for it. For
    multivector they are applied to each token.
    prompts: name → text that is put before an input.
    include_prompt: whether the prompt's tokens take part in pooling.
    lexical, colbert: whether BGE-M3's weights for terms and for token vectors lie beside a dense model.
    has_code: whether it names code of its own.
    """

    kind: ModelKind
    model_type: str
    max_tokens: int
    pooling: tuple[PoolingMode, ...] = ("mean",)
    projections: tuple[Projection, ...] = ()
    include_prompt: bool = True
    lower_case: bool = False
    prompts: dict[str, str] = {}
    default_prompt: str | None = None
    labels: tuple[str, ...] = ()
    multi_label: bool = False
    splade: Splade = Splade()
    late: LateInteraction = LateInteraction()
    yes_no: YesNo = YesNo()
    lexical: bool = False
    colbert: bool = False
    has_code: bool = False


class InputRules(msgspec.Struct, frozen=True):
    """What a server does to inputs before its model sees them: how much it keeps, what it puts before."""

    max_tokens: int
    prompts: dict[str, str] = {}
    default_prompt: str | None = None


def read_input_rules(checkpoint: Path) -> InputRules:
    """The part of a recipe that holds for any server, also of a model that this engine does not have.

    Raises: ModelUnavailable.
    """
    files = Files(checkpoint)
    return InputRules(_max_tokens(files), _prompts(files), files.sentence.get("default_prompt_name"))


def read_recipe(checkpoint: Path, said: Said) -> Recipe:
    """Read config.json and the sentence-transformers files beside it.

    Raises: ModelUnavailable.
    """
    files = Files(checkpoint)
    kind = recognize(files, said)
    common = Recipe(
        kind=kind,
        model_type=str(files.config.get("model_type", "")),
        max_tokens=_max_tokens(files),
        projections=_projections(files),
        lower_case=bool(files.transformer.get("do_lower_case", False)),
        prompts=_roles(_prompts(files)),
        default_prompt=files.sentence.get("default_prompt_name"),
        has_code="auto_map" in files.config,
    )
    return READERS[kind](common, files, said)


def _dense(common: Recipe, files: Files, said: Said) -> Recipe:
    pooling = files.of_module("Pooling")
    named = POOLINGS_SAID.get(said.pooling or "")
    return replace(
        common,
        pooling=(named,) if named else _pooling_modes(pooling),
        include_prompt=bool(pooling.get("include_prompt", True)),
        lexical=files.has(LEXICAL_FILE),
        colbert=files.has(COLBERT_FILE),
    )


def _sparse(common: Recipe, files: Files, _: Said) -> Recipe:
    told = files.of_module("SpladePooling")
    twice = told.get("activation_function") == "log1p_relu"
    return replace(common, splade=Splade(told.get("pooling_strategy", "max"), twice))


def _multivector(common: Recipe, files: Files, _: Said) -> Recipe:
    late = read_late_interaction(files)
    prompts = {**common.prompts, "query": "", "document": "", **late.prompts}
    # What is not said to be a query is a document, as sentence-transformers takes it.
    return replace(common, late=late, prompts=prompts, default_prompt=common.default_prompt or "document")


def _classifier(common: Recipe, files: Files, _: Said) -> Recipe:
    named = files.config.get("id2label") or {}
    count = len(named) or int(files.config.get("num_labels", 2))
    multi_label = files.config.get("problem_type") == "multi_label_classification"
    labels = tuple(str(named.get(str(i), f"LABEL_{i}")) for i in range(count))
    return replace(common, labels=labels, multi_label=multi_label)


def _language(common: Recipe, files: Files, _: Said) -> Recipe:
    told = files.of_module("LogitScore")
    return replace(common, yes_no=YesNo(told.get("true_token_id"), told.get("false_token_id")))


READERS: dict[ModelKind, Callable[[Recipe, Files, Said], Recipe]] = {
    "dense": _dense,
    "sparse": _sparse,
    "multivector": _multivector,
    "classifier": _classifier,
    "language": _language,
}


def outputs_of(recipe: Recipe) -> frozenset[Output]:
    """What `Encode` may ask this model for."""
    if recipe.kind in {"classifier", "language"}:
        return frozenset()
    beside = {Output.SPARSE} if recipe.lexical else set()
    beside |= {Output.MULTIVECTOR} if recipe.colbert else set()
    return frozenset({OWN_OUTPUTS[recipe.kind], Output.TOKENS, *beside})


def dense_width(checkpoint: Path, recipe: Recipe) -> int | None:
    """The components of a dense vector, as far as the files tell."""
    files = Files(checkpoint)
    projected = [one.folder for one in recipe.projections if one.kind == "Dense"]
    if projected:
        width: int | None = files.json(f"{projected[-1]}/config.json").get("out_features")
        return width
    told = next((files.config[name] for name in WIDTHS if name in files.config), None)
    return int(told) * len(recipe.pooling) if told else None


def _prompts(files: Files) -> dict[str, str]:
    return {name: text for name, text in files.sentence.get("prompts", {}).items() if text is not None}


def _roles(prompts: dict[str, str]) -> dict[str, str]:
    """The prompts, one of them also under the role's own name, as sentence-transformers looks for it."""
    found = next((prompts[name] for name in DOCUMENT_PROMPTS if name in prompts), None)
    return prompts if found is None else {**prompts, "document": found}


def _projections(files: Files) -> tuple[Projection, ...]:
    found = [
        Projection("Dense" if kind == "Dense" else "Normalize", folder)
        for kind, folder in files.modules
        if kind in {"Dense", "Normalize"}
    ]
    while found and found[-1].kind == "Normalize":
        found.pop()
    return tuple(found)


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


def _max_tokens(files: Files) -> int:
    """The shortest of what the files allow, as sentence-transformers reads them."""
    positions = files.config.get("max_position_embeddings")
    offset = OFFSET_POSITIONS.get(str(files.config.get("model_type", "")), 0)
    limits = [
        files.transformer.get("max_seq_length"),
        files.tokenizer.get("model_max_length"),
        positions - offset if positions else None,
    ]
    stated = [int(limit) for limit in limits if limit and limit < NO_MAXIMUM]
    if not stated:
        raise ModelUnavailable("no file of the checkpoint says how many tokens the model takes")
    return min(stated)
