"""Recognition of a checkpoint's kind: one table of rules over its files, read from the top.

Pure. docs/engine-models.md shows the same table to users.
"""

from collections.abc import Callable
from typing import TypeAlias

from backends.contract.errors import ModelUnavailable
from backends.recipe.files import CheckpointFiles
from backends.recipe.media_encoders import dual_encoder, page_encoder
from backends.recipe.modules import check_order
from backends.recipe.native_forms import native_form
from backends.recipe.options import TaskSettings
from backends.recipe.recipe import ModelKind
from backends.recipe.rerank_template import REFUSED, published_family

Condition: TypeAlias = Callable[[CheckpointFiles, TaskSettings], bool]


def _has_architecture(ending: str) -> Condition:
    return lambda files, _: any(
        str(name).endswith(ending) for name in files.config.get("architectures") or []
    )


def _lists_module(kind: str) -> Condition:
    return lambda files, _: files.module_folder(kind) is not None


def _is_reranker(_: CheckpointFiles, settings: TaskSettings) -> bool:
    """Return True if the settings name the task, a template, or a published reranker."""
    return (
        settings.task == "rerank"
        or settings.rerank_template is not None
        or published_family(settings.model) is not None
    )


def _is_encoder(files: CheckpointFiles, settings: TaskSettings) -> bool:
    return not _is_language_model(files, settings)


def _all_of(*conditions: Condition) -> Condition:
    return lambda files, settings: all(condition(files, settings) for condition in conditions)


_is_language_model = _has_architecture("ForCausalLM")

# The first rule whose condition holds decides. A language model whose purpose nothing states meets none.
KIND_RULES: tuple[tuple[Condition, ModelKind], ...] = (
    (lambda files, _: files.static is not None, "static"),
    (lambda files, _: dual_encoder(files) is not None, "dual"),
    (lambda files, _: page_encoder(files) is not None, "pages"),
    (lambda _, settings: settings.pooling == "splade", "sparse"),
    (lambda _, settings: settings.pooling is not None or settings.task == "embed", "dense"),
    (_lists_module("LogitScore"), "language"),
    (_all_of(_is_reranker, _is_language_model), "language"),
    (_lists_module("SpladePooling"), "sparse"),
    # PyLate writes ColBERT, sentence-transformers MultiVectorEncoder; the original has no such file.
    (
        lambda files, _: files.sentence_config.get("model_type") in {"ColBERT", "MultiVectorEncoder"},
        "multivector",
    ),
    (_has_architecture("HF_ColBERT"), "multivector"),
    (_lists_module("Pooling"), "dense"),
    (_has_architecture("ForSequenceClassification"), "classifier"),
    (_is_encoder, "dense"),
)

# Parts of config.json that a network for other media than text has.
MEDIA_KEYS = frozenset({"vision_config", "audio_config"})
# Modules of sentence-transformers that the engine implements for each kind.
SUPPORTED_MODULES: dict[ModelKind, set[str]] = {
    "dense": {
        "Transformer",
        "WeightedLayerPooling",
        "Pooling",
        "Dense",
        "LayerNorm",
        "Dropout",
        "Normalize",
    },
    "sparse": {"Transformer", "MLMTransformer", "SpladePooling"},
    "multivector": {"Transformer", "Dense", "Normalize", "MultiVectorMask"},
    "classifier": {"Transformer"},
    "language": {"Transformer", "LogitScore"},
    "static": {"StaticEmbedding", "Dense", "LayerNorm", "Dropout", "Normalize"},
    "dual": {"Transformer", "Normalize"},
    "pages": {"Transformer", "Normalize", "MultiVectorMask"},
}


def recognize(files: CheckpointFiles, settings: TaskSettings) -> ModelKind:
    """Return the kind of a checkpoint.

    Raises: ModelUnavailable if a module is not supported, or the files contradict the operator's settings.
    """
    _refuse_architecture(files)
    kind = next((kind for condition, kind in KIND_RULES if condition(files, settings)), None)
    if kind is None:
        raise ModelUnavailable(
            f"{files.checkpoint} is a language model whose files do not state its purpose; set `task: embed` "
            "and `pooling`, usually `last_token`, if it embeds, or `rerank_template` if it reranks"
        )
    is_cross_encoder = files.sentence_config.get("model_type") == "CrossEncoder"
    if kind == "dense" and is_cross_encoder and settings.task != "embed" and settings.pooling is None:
        raise ModelUnavailable(
            f"{files.checkpoint} is a CrossEncoder without a classifier or `LogitScore`, which the built-in "
            "engine does not have; serve it with Infinity behind this gateway"
        )
    if kind == "static" and settings.pooling not in {None, "mean"}:
        raise ModelUnavailable(
            f"{files.checkpoint} is a static model: the mean of token vectors; leave out `pooling`"
        )
    if kind in {"dual", "pages"} and settings.pooling is not None:
        raise ModelUnavailable(f"{files.checkpoint} has pooling of its own; leave out `pooling`")
    if files.own_modules and native_form(files.config) is None:
        raise ModelUnavailable(
            f"{files.checkpoint} names the module {', '.join(files.own_modules)}. The built-in engine "
            "runs no code for sentence-transformers, with `trust_remote_code` neither; serve the model with "
            "Infinity behind this gateway"
        )
    if files.routes.tables and kind != "sparse":
        raise ModelUnavailable(
            f"{files.checkpoint} has routes for sparse vectors, which `task` and `pooling` cannot change"
        )
    _require_modules(files, kind, settings)
    check_order(files)
    _require_pooling(files, kind, settings)
    if settings.task == "rerank" and kind not in {"classifier", "language", "multivector"}:
        raise ModelUnavailable(
            f"{files.checkpoint} is no reranker, though `task: rerank` is set: it has no classifier, no "
            "language model and no vectors of late interaction"
        )
    return kind


def _require_modules(files: CheckpointFiles, kind: ModelKind, settings: TaskSettings) -> None:
    unknown = {module.kind for module in files.modules} - SUPPORTED_MODULES[kind]
    if unknown and settings.pooling is not None:
        raise ModelUnavailable(
            f"{files.checkpoint} has the sentence-transformers module {', '.join(sorted(unknown))}, which "
            f"`pooling: {settings.pooling}` does not go with; leave out `pooling`"
        )
    if unknown:
        raise ModelUnavailable(
            f"{files.checkpoint} uses the sentence-transformers module {', '.join(sorted(unknown))}, which "
            "the built-in engine does not have; serve it with TEI or Infinity behind this gateway"
        )


def _require_pooling(files: CheckpointFiles, kind: ModelKind, settings: TaskSettings) -> None:
    is_stated = settings.pooling is not None or native_form(files.config) is not None
    if kind == "dense" and files.modules and not is_stated and files.module_folder("Pooling") is None:
        raise ModelUnavailable(
            f"{files.checkpoint} lists no Pooling in modules.json; set `pooling` of its upstream to the one "
            "that it was trained with"
        )


def _refuse_architecture(files: CheckpointFiles) -> None:
    media = MEDIA_KEYS & files.config.keys()
    reads_media = dual_encoder(files) is not None or page_encoder(files) is not None
    if media and "auto_map" not in files.config and not reads_media:
        raise ModelUnavailable(
            f"{files.checkpoint} reads images or sound as well as text ({', '.join(sorted(media))} in "
            "config.json), which the built-in engine does not serve; serve it with vLLM"
        )
    for name in files.config.get("architectures") or []:
        if name in REFUSED:
            raise ModelUnavailable(
                f"{files.checkpoint} is a {name}, which the built-in engine does not serve: {REFUSED[name]}"
            )
