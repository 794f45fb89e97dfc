"""Reader of a checkpoint's recipe: kind, pooling, prompts, length and labels from its own files.

Does not need torch and loads no weights. Nothing is guessed: a missing value is sentence-transformers'
documented default, and a module that this engine does not have is an error.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from backends.contract import Output
from backends.contract.errors import ModelUnavailable
from backends.instructions import PUBLISHED_UNPOOLED
from backends.recipe.chat_template import read_chat_template
from backends.recipe.files import CheckpointFiles
from backends.recipe.kinds import recognize
from backends.recipe.late import read_late_interaction
from backends.recipe.lengths import longest_input, within_network
from backends.recipe.media_encoders import (
    dual_encoder,
    dual_width,
    query_form,
    require_processor,
    text_padding,
)
from backends.recipe.modules import layer_weights, projections, refuse_settings, token_projections
from backends.recipe.native_forms import native_form
from backends.recipe.notes import norms_before_cut
from backends.recipe.options import TaskSettings
from backends.recipe.recipe import (
    COLBERT_FILE,
    LEXICAL_FILE,
    InputRules,
    ModelKind,
    PoolingMode,
    Projection,
    Recipe,
    Splade,
)

# sentence-transformers before 6 wrote one flag per mode; several true flags concatenate in this order.
LEGACY_POOLING_FLAGS: dict[str, PoolingMode] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
# Modes of the operator's `pooling`; "splade" is none of them.
CONFIGURED_POOLINGS: dict[str, PoolingMode] = {
    "cls": "cls",
    "max": "max",
    "mean": "mean",
    "weighted_mean": "weightedmean",
    "last_token": "lasttoken",
}
# In the order in which sentence-transformers' encode_document looks them up.
DOCUMENT_PROMPTS = ("document", "passage", "corpus")
# Main output of each kind of model.
MAIN_OUTPUTS: dict[ModelKind, Output] = {
    "dense": Output.DENSE,
    "sparse": Output.SPARSE,
    "multivector": Output.MULTIVECTOR,
    "static": Output.DENSE,
    "dual": Output.DENSE,
    "pages": Output.MULTIVECTOR,
}
# Names that architectures use for the number of components of a token's vector.
WIDTH_KEYS = ("word_embed_proj_dim", "hidden_size", "dim", "d_model", "n_embd", "emb_dim")


def read_input_rules(checkpoint: Path) -> InputRules:
    """Read the part of a recipe that holds for any server, also for a model that this engine does not have.

    Raises: ModelUnavailable.
    """
    files = CheckpointFiles(checkpoint)
    default_prompt = files.sentence_config.get("default_prompt_name")
    return InputRules(longest_input(files), _prompts(files), default_prompt)


def read_recipe(checkpoint: Path, settings: TaskSettings) -> Recipe:
    """Read config.json and the sentence-transformers files next to it.

    Raises: ModelUnavailable.
    """
    files = CheckpointFiles(checkpoint)
    kind = recognize(files, settings)
    refuse_settings(files, kind, settings)
    common = Recipe(
        kind=kind,
        model_type=str(files.config.get("model_type", "")),
        max_tokens=longest_input(files),
        projections=projections(files),
        prompts=_with_document_role(_prompts(files)),
        default_prompt=files.sentence_config.get("default_prompt_name"),
        chat=read_chat_template(files),
    )
    recipe = COMPLETIONS[kind](_with_stated_by_code(common, files), files, settings)
    recipe = _with_adapter_prompt(recipe, settings.adapter)
    if recipe.default_prompt and recipe.default_prompt not in recipe.prompts:
        raise ModelUnavailable(
            f"{checkpoint}/config_sentence_transformers.json: `default_prompt_name` is "
            f"{recipe.default_prompt!r}, which is none of its prompts"
        )
    return recipe


def _with_stated_by_code(common: Recipe, files: CheckpointFiles) -> Recipe:
    """Add what only a checkpoint's own code states, where the engine knows the code."""
    form = native_form(files.config)
    if form is None:
        return common
    return replace(
        common,
        pooling=form.pooling or common.pooling,
        prompts={**form.prompts, **common.prompts},
        default_prompt=form.default_prompt or common.default_prompt,
    )


def _with_adapter_prompt(recipe: Recipe, adapter: str | None) -> Recipe:
    """Leave the prompt of an adapter only, if each adapter has a prompt of its own, as the default."""
    if adapter is None or adapter not in recipe.prompts:
        return recipe
    return replace(recipe, prompts={adapter: recipe.prompts[adapter]}, default_prompt=adapter)


def _complete_dense(common: Recipe, files: CheckpointFiles, settings: TaskSettings) -> Recipe:
    pooling = files.module_config("Pooling")
    configured = CONFIGURED_POOLINGS.get(settings.pooling or "")
    return replace(
        common,
        pooling=(configured,) if configured else _pooling_modes(pooling) if pooling else common.pooling,
        width_max=_amount(files, "truncate_dim"),
        norm_before_cut=norms_before_cut(files, settings),
        include_prompt=bool(pooling.get("include_prompt", True)) and settings.model not in PUBLISHED_UNPOOLED,
        token_projections=token_projections(files),
        layer_weights=layer_weights(files),
        lexical=files.has(LEXICAL_FILE),
        colbert=files.has(COLBERT_FILE),
    )


def _complete_sparse(common: Recipe, files: CheckpointFiles, _: TaskSettings) -> Recipe:
    pooling = files.module_config("SpladePooling")
    twice = pooling.get("activation_function") == "log1p_relu"
    splade = Splade(pooling.get("pooling_strategy", "max"), twice, _amount(files, "max_active_dims"))
    routes = files.routes
    if routes.network is None:
        return replace(common, splade=splade)
    prompts = {**dict.fromkeys([*routes.tables, routes.network], ""), **common.prompts}
    return replace(
        common,
        splade=splade,
        prompts=prompts,
        tables=dict(routes.tables),
        network_route=routes.network,
        default_route=routes.default,
    )


def _complete_multivector(common: Recipe, files: CheckpointFiles, _: TaskSettings) -> Recipe:
    late = within_network(read_late_interaction(files), files)
    # A role without a length of its own has that of the tokenizer.
    late = replace(
        late,
        query_tokens=late.query_tokens or common.max_tokens,
        document_tokens=late.document_tokens or common.max_tokens,
    )
    prompts = {**common.prompts, "query": "", "document": "", **late.prompts}
    expanded = late.expansion.length if late.expansion else None
    lengths = (late.query_tokens, late.document_tokens, expanded)
    return replace(
        common,
        # A length of a role takes precedence over that of the tokenizer.
        max_tokens=max([common.max_tokens, *(length for length in lengths if length)]),
        late=late,
        prompts=prompts,
        # An input without a role is a document, as in sentence-transformers.
        default_prompt=common.default_prompt or "document",
    )


def _complete_classifier(common: Recipe, files: CheckpointFiles, _: TaskSettings) -> Recipe:
    names = files.config.get("id2label") or {}
    count = int(files.config.get("num_labels") or len(names) or 2)
    if count != len(names):
        # transformers keeps no name where the two disagree.
        names = {}
    multi_label = files.config.get("problem_type") == "multi_label_classification"
    labels = tuple(str(names.get(str(i), f"LABEL_{i}")) for i in range(count))
    return replace(common, labels=labels, multi_label=multi_label)


def _complete_dual(common: Recipe, files: CheckpointFiles, _: TaskSettings) -> Recipe:
    found = dual_encoder(files)
    assert found is not None
    require_processor(files)
    return replace(
        common,
        width_max=_amount(files, "truncate_dim"),
        padding=text_padding(files, common.max_tokens),
        medium=found.medium,
    )


def _complete_pages(common: Recipe, files: CheckpointFiles, _: TaskSettings) -> Recipe:
    require_processor(files)
    prompts = {"query": "", **common.prompts}
    return replace(common, medium="image", query=query_form(files), prompts=prompts)


COMPLETIONS: dict[ModelKind, Callable[[Recipe, CheckpointFiles, TaskSettings], Recipe]] = {
    "dense": _complete_dense,
    "sparse": _complete_sparse,
    "multivector": _complete_multivector,
    "classifier": _complete_classifier,
    "language": lambda common, *_: common,
    "static": lambda common, files, _: replace(common, width_max=_amount(files, "truncate_dim")),
    "dual": _complete_dual,
    "pages": _complete_pages,
}


def outputs_of(recipe: Recipe) -> frozenset[Output]:
    """Return the outputs that `Encode` may request from this model."""
    if recipe.kind in {"classifier", "language"}:
        return frozenset()
    if recipe.kind in {"static", "dual"}:
        return frozenset({Output.DENSE})
    if recipe.kind == "pages":
        return frozenset({Output.MULTIVECTOR})
    outputs = {MAIN_OUTPUTS[recipe.kind], Output.TOKENS}
    if recipe.lexical:
        outputs.add(Output.SPARSE)
    if recipe.colbert:
        outputs.add(Output.MULTIVECTOR)
    return frozenset(outputs)


def dense_width(checkpoint: Path, recipe: Recipe) -> int | None:
    """Return the components of a dense vector before `width_max`, None if the files do not state them."""
    files = CheckpointFiles(checkpoint)
    if recipe.kind == "dual":
        return dual_width(files)
    projected = _out_features(files, recipe.projections)
    if projected:
        return projected
    width = _out_features(files, recipe.token_projections)
    width = width or next((files.config[key] for key in WIDTH_KEYS if key in files.config), None)
    return int(width) * len(recipe.pooling) if width else None


def _out_features(files: CheckpointFiles, projections: Sequence[Projection]) -> int | None:
    folders = [projection.folder for projection in projections if projection.kind == "Dense"]
    out_features: int | None = (
        files.read_json(f"{folders[-1]}/config.json").get("out_features") if folders else None
    )
    return out_features


def _amount(files: CheckpointFiles, key: str) -> int | None:
    """Return a number of components of config_sentence_transformers.json. Raises: ModelUnavailable."""
    stated = files.sentence_config.get(key)
    if stated is None or (type(stated) is int and stated > 0):
        return stated
    raise ModelUnavailable(
        f"{files.checkpoint}/config_sentence_transformers.json: `{key}` is {stated!r}, not a number above 0"
    )


def _prompts(files: CheckpointFiles) -> dict[str, str]:
    try:
        prompts = msgspec.convert(files.sentence_config.get("prompts", {}), dict[str, str | None])
    except msgspec.ValidationError as error:
        raise ModelUnavailable(
            f"{files.checkpoint}/config_sentence_transformers.json: `prompts` maps no names to texts: {error}"
        ) from error
    return {name: text for name, text in prompts.items() if text is not None}


def _with_document_role(prompts: dict[str, str]) -> dict[str, str]:
    """Add the document prompt under the role's own name, as sentence-transformers looks it up."""
    document = next((prompts[name] for name in DOCUMENT_PROMPTS if name in prompts), None)
    return prompts if document is None else {**prompts, "document": document}


def _pooling_modes(pooling: dict[str, Any]) -> tuple[PoolingMode, ...]:
    declared = pooling.get("pooling_mode")
    if declared is None:
        legacy = [mode for flag, mode in LEGACY_POOLING_FLAGS.items() if pooling.get(flag)]
        return tuple(legacy) or ("mean",)
    if not declared:
        raise ModelUnavailable("the checkpoint's Pooling has an empty `pooling_mode`")
    try:
        modes = (declared,) if isinstance(declared, str) else tuple(declared)
        return msgspec.convert(modes, tuple[PoolingMode, ...])
    except msgspec.ValidationError as error:
        raise ModelUnavailable(f"the checkpoint asks for pooling {declared!r}: {error}") from error
