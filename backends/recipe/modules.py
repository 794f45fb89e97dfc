"""Modules of sentence-transformers in a checkpoint: their order, and settings that the engine does not have.

Pure. Sources: sentence-transformers 6, whose modules pass named tensors on, and of 6.2 `Transformer`,
`MultiVectorMask`, `Normalize` and `LogitScore`. A module that stands where its tensor does not exist yet, or
is not read any more, is an error. A setting that changes vectors is refused by name; what is listed here
changes none.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NoReturn, get_args

from backends.checkpoints.small_files import SETTINGS_FILES
from backends.contract.errors import ModelUnavailable
from backends.recipe.files import ROUTERS, TABLE, CheckpointFiles, ListedModule, network_folders
from backends.recipe.options import TaskSettings
from backends.recipe.recipe import ModelKind, Projection, ProjectionKind

KINDS: dict[str, ProjectionKind] = {kind: kind for kind in get_args(ProjectionKind)}
# Modules that change nothing outside of training.
IDENTITIES = frozenset({"Dropout"})
LAYER_MIX = "WeightedLayerPooling"
NETWORKS = frozenset({"Transformer", "MLMTransformer", "StaticEmbedding"})
# Modules that may stand in several places. Of several poolings the last one counts, as each replaces the
# vector of the one before.
REPEATABLE = frozenset({*KINDS, *IDENTITIES, "Pooling"})


def check_order(files: CheckpointFiles) -> None:
    """Raise ModelUnavailable unless the modules begin with their only network, and it is at the top."""
    modules = files.modules
    if not modules:
        return
    kinds = [module.kind for module in modules]
    if kinds[0] not in NETWORKS or NETWORKS & set(kinds[1:]):
        raise ModelUnavailable(
            f"{files.checkpoint} lists the modules {', '.join(kinds)} in modules.json; the first, and "
            "no other, has to be its network"
        )
    repeated = sorted({kind for kind in kinds if kinds.count(kind) > 1} - REPEATABLE)
    if repeated:
        raise ModelUnavailable(
            f"{files.checkpoint} lists {', '.join(repeated)} more than once in modules.json; "
            "remove the entries that do not belong to the model"
        )
    if kinds[0] != "StaticEmbedding" and modules[0].folder:
        _refuse_folder(files, modules[0].folder)


def refuse_folders(files: CheckpointFiles) -> None:
    """Raise ModelUnavailable for modules without a network at the top, with what they are."""
    listed = files.listed
    if not listed:
        return
    first, kinds = listed[0], ", ".join(module.kind for module in listed)
    if first.kind in ROUTERS:
        folders = network_folders(first, files.read_json)
        raise ModelUnavailable(
            f"{files.checkpoint} is the module {first.kind} of sentence-transformers with networks in the "
            f"folders {', '.join(folders) or 'of its routes'}; the built-in engine serves one network, at "
            f"the top, next to routes of {TABLE}: serve the model with Infinity behind this gateway, or each "
            "folder of a network as an upstream of its own"
        )
    if first.kind == TABLE:
        raise ModelUnavailable(
            f"{files.checkpoint} is a {TABLE}, a table of token weights without a network; the built-in "
            "engine serves it as the route of queries next to a network for documents only"
        )
    if first.kind not in NETWORKS:
        raise ModelUnavailable(
            f"{files.checkpoint} begins with the module {first.kind} of sentence-transformers ({kinds}), "
            "which is no network of transformers; the built-in engine does not have it: serve the model with "
            "Infinity behind this gateway"
        )
    if first.folder:
        _refuse_folder(files, first.folder)


def _refuse_folder(files: CheckpointFiles, folder: str) -> NoReturn:
    raise ModelUnavailable(
        f"{files.checkpoint} has its network in {folder}; move the files of that folder to the top, and set "
        'its `path` in modules.json to ""'
    )


def projections(files: CheckpointFiles) -> tuple[Projection, ...]:
    """Return the modules behind pooling, or all if there is no pooling; the last scaling is left out."""
    found = [Projection(KINDS[kind], folder) for kind, folder in _behind(files.modules) if kind in KINDS]
    while found and found[-1].kind == "Normalize":
        found.pop()
    return tuple(found)


def is_scaled(files: CheckpointFiles) -> bool:
    """Return whether the last module that changes vectors scales them to length 1."""
    kinds = [module.kind for module in files.modules if module.kind in KINDS]
    return bool(kinds) and kinds[-1] == "Normalize"


def token_projections(files: CheckpointFiles) -> tuple[Projection, ...]:
    """Return the modules between network and pooling that project each token. Raises: ModelUnavailable."""
    before = [
        module for module in _before(files.modules) if module.kind in KINDS or module.kind in IDENTITIES
    ]
    for kind, folder in before:
        if kind != "Dense":
            raise ModelUnavailable(
                f"{files.checkpoint} lists {kind} before Pooling, where there is no vector of the text yet"
            )
        read = files.read_json(f"{folder}/config.json")
        name = read.get("module_input_name", "sentence_embedding")
        if {name, read.get("module_output_name") or name} != {"token_embeddings"}:
            raise ModelUnavailable(
                f"{files.checkpoint}/{folder} stands before Pooling and projects {name}, not token_embeddings"
            )
    return tuple(Projection("Dense", folder) for _, folder in before)


def layer_weights(files: CheckpointFiles) -> str | None:
    """Return the folder of the weights of layers, None if vectors are those of the last layer.

    Raises: ModelUnavailable.
    """
    places = [place for place, module in enumerate(files.modules) if module.kind == LAYER_MIX]
    if not places:
        return None
    if places != [1]:
        raise ModelUnavailable(f"{files.checkpoint} lists {LAYER_MIX} elsewhere than behind its network")
    if not files.config.get("output_hidden_states"):
        raise ModelUnavailable(
            f"{files.checkpoint} lists {LAYER_MIX}, which sentence-transformers skips without "
            "`output_hidden_states: true` in config.json; set that, or remove the module"
        )
    return files.modules[1].folder


def _pooling_place(modules: Sequence[ListedModule]) -> int | None:
    places = (place for place, module in enumerate(modules) if module.kind == "Pooling")
    return max(places, default=None)


def _before(modules: Sequence[ListedModule]) -> Sequence[ListedModule]:
    place = _pooling_place(modules)
    return () if place is None else modules[:place]


def _behind(modules: Sequence[ListedModule]) -> Sequence[ListedModule]:
    place = _pooling_place(modules)
    return modules if place is None else modules[place + 1 :]


Json = dict[str, Any]

# Keys that the engine follows, or that are checked below.
KNOWN_KEYS = frozenset(
    {
        *("max_seq_length", "do_lower_case", "query_length", "document_length", "query_expansion"),
        *("model_kwargs", "processor_kwargs", "config_kwargs", "processing_kwargs"),
        *("transformer_task", "modality_config", "module_output_name", "tokenizer_name_or_path"),
        # Batches without padding have the same vectors.
        "unpad_inputs",
    }
)
# Places of files and rights to load them, which the operator decides.
LOADING_KEYS = frozenset(
    {
        *("trust_remote_code", "code_revision", "revision", "token", "use_auth_token"),
        *("cache_dir", "cache_folder", "local_files_only", "force_download"),
    }
)
# Arguments that change speed, memory or precision; `dtype` of the upstream decides the last.
HARMLESS_ARGUMENTS: Mapping[str, frozenset[str]] = {
    "model_kwargs": LOADING_KEYS
    | {
        *("torch_dtype", "dtype", "attn_implementation", "device_map", "low_cpu_mem_usage"),
        *("use_safetensors", "add_pooling_layer", "use_cache", "weights_only", "max_memory"),
        *("unpad_inputs", "use_memory_efficient_attention", "use_flash_attn", "offload_folder"),
    },
    "config_kwargs": LOADING_KEYS
    | {
        *("use_cache", "attn_implementation", "torch_dtype", "dtype", "output_attentions", "return_dict"),
        *("unpad_inputs", "use_memory_efficient_attention", "use_flash_attn"),
    },
    # The side of padding does not reach a batch of one text. The engine follows the last four.
    "processor_kwargs": LOADING_KEYS
    | {
        *("padding_side", "use_fast", "clean_up_tokenization_spaces", "chat_template", "legacy"),
        *("model_max_length", "truncation_side", "model_input_names", "split_special_tokens"),
    },
}
# Files whose keys the arguments replace: an equal value changes nothing.
REPLACED_FILES = {"config_kwargs": "config.json", "processor_kwargs": "tokenizer_config.json"}
# Options of calling the tokenizer: form and padding of the result. `max_length` is followed.
CALL_OPTIONS = frozenset(
    {
        *("padding", "pad_to_multiple_of", "padding_side", "return_tensors", "return_attention_mask"),
        *("return_length", "verbose", "max_length", "logits_to_keep"),
    }
)
# Values of `truncation` that cut the longer text of a pair first.
TRUNCATIONS = (True, "longest_first")
# Tasks of the network, its output and the name of that, by kind.
TASKS: Mapping[ModelKind, tuple[str, str, str]] = {
    "dense": ("feature-extraction", "last_hidden_state", "token_embeddings"),
    "multivector": ("feature-extraction", "last_hidden_state", "token_embeddings"),
    "sparse": ("fill-mask", "logits", "token_embeddings"),
    "classifier": ("sequence-classification", "logits", "scores"),
    "language": ("text-generation", "logits", "causal_logits"),
}


# Kinds that read more than text, and the method of transformers for each medium.
MEDIA_KINDS: frozenset[ModelKind] = frozenset({"dual", "pages"})
MEDIA_METHODS = {
    "text": "get_text_features",
    "image": "get_image_features",
    "audio": "get_audio_features",
}


def refuse_settings(files: CheckpointFiles, kind: ModelKind, settings: TaskSettings) -> None:
    """Raise ModelUnavailable if a setting of the modules changes results in a way the engine does not.

    settings: of the operator, who may have chosen another use of the network.
    """
    if kind not in TASKS and kind not in MEDIA_KINDS:
        return
    _refuse_chat(files, kind)
    is_configured = settings.pooling is not None or settings.task == "embed"
    own = (
        _media_faults(files)
        if kind in MEDIA_KINDS
        else _text_faults(files, kind, is_configured=is_configured)
    )
    fault = next(chain(_network_faults(files, kind), own, _module_faults(files, kind)), None)
    if fault is not None:
        raise ModelUnavailable(
            f"{files.checkpoint}: the built-in engine does not have {fault}; serve the model with Infinity "
            "behind this gateway, or remove the key if the model does not need it"
        )


def _refuse_chat(files: CheckpointFiles, kind: ModelKind) -> None:
    """Raise ModelUnavailable if each text is a chat message; a reranker has its own template."""
    modalities = files.transformer_config.get("modality_config") or {}
    if "message" in modalities and kind not in {"language", "classifier"}:
        raise ModelUnavailable(
            f"{files.checkpoint}: by `message` of `modality_config`, sentence-transformers puts each text in "
            "the tokenizer's chat template, which the built-in engine does not do; remove `message` if the "
            "model was trained on plain texts, as Qwen3-Embedding was, or serve it with Infinity"
        )


def _network_faults(files: CheckpointFiles, kind: ModelKind) -> Iterator[str]:
    settings, name = files.transformer_config, _settings_name(files)
    unknown = sorted(settings.keys() - KNOWN_KEYS)
    if unknown:
        yield f"the key `{unknown[0]}` of {name}"
    if settings.get("tokenizer_name_or_path"):
        yield f"the tokenizer of `tokenizer_name_or_path` in {name}"
    for key in (*_lengths(settings, kind), *_arguments(files, settings), *_call_options(settings)):
        yield f"`{key}` of {name}"


def _settings_name(files: CheckpointFiles) -> str:
    return next((name for name in SETTINGS_FILES if files.has(name)), SETTINGS_FILES[0])


def _text_faults(files: CheckpointFiles, kind: ModelKind, *, is_configured: bool) -> Iterator[str]:
    """Yield the settings by which a text has another output than the engine's."""
    settings, name = files.transformer_config, _settings_name(files)
    outputs = () if is_configured else _outputs(settings, kind)
    for key in (*_modalities(settings), *outputs):
        yield f"`{key}` of {name} for a model of the kind {kind}"


def _media_faults(files: CheckpointFiles) -> Iterator[str]:
    """Yield the settings by which a text, picture or recording is read in another way than the engine's."""
    settings, name = files.transformer_config, _settings_name(files)
    for group in sorted((settings.get("processing_kwargs") or {}).keys() - {"text", "common"}):
        yield f"`processing_kwargs.{group}` of {name}"
    for medium, entry in (settings.get("modality_config") or {}).items():
        if entry.get("method") != MEDIA_METHODS.get(medium):
            yield f"`modality_config.{medium}` of {name}"


def _lengths(settings: Json, kind: ModelKind) -> Iterator[str]:
    """Yield the lengths by role that only late interaction has."""
    if kind != "multivector":
        yield from (
            key for key in ("query_length", "document_length", "query_expansion") if settings.get(key)
        )


def _arguments(files: CheckpointFiles, settings: Json) -> Iterator[str]:
    for group, harmless in HARMLESS_ARGUMENTS.items():
        replaced = files.read_json(REPLACED_FILES[group]) if group in REPLACED_FILES else {}
        for key, value in (settings.get(group) or {}).items():
            if key not in harmless and (key not in replaced or replaced[key] != value):
                yield f"{group}.{key}"


def _call_options(settings: Json) -> Iterator[str]:
    options = settings.get("processing_kwargs") or {}
    for group in ("text", "common"):
        for key, value in (options.get(group) or {}).items():
            if key not in CALL_OPTIONS and not (key == "truncation" and value in TRUNCATIONS):
                yield f"processing_kwargs.{group}.{key}"


def _modalities(settings: Json) -> Iterator[str]:
    modalities = settings.get("modality_config") or {"text": {}}
    if "text" not in modalities:
        yield f"modality_config ({', '.join(modalities)})"


def _outputs(settings: Json, kind: ModelKind) -> Iterator[str]:
    task, output, name = TASKS[kind]
    if settings.get("transformer_task", task) != task:
        yield "transformer_task"
    modalities = settings.get("modality_config")
    if modalities is None:
        return
    text = modalities.get("text", {})
    if (text.get("method"), text.get("method_output_name")) != ("forward", output):
        yield "modality_config.text"
    if settings.get("module_output_name") != name:
        yield "module_output_name"


def _module_faults(files: CheckpointFiles, kind: ModelKind) -> Iterator[str]:
    mask = files.module_config("MultiVectorMask")
    if mask.get("keep_only_token_ids") is not None:
        yield "`keep_only_token_ids` of MultiVectorMask"
    if mask.get("skiplist_tasks") not in (None, "document", ["document"]):
        yield "`skiplist_tasks` of MultiVectorMask"
    score = files.module_config("LogitScore").get("module_input_name", "causal_logits")
    if score != "causal_logits":
        yield f"`module_input_name: {score}` of LogitScore"
    vector = "token_embeddings" if kind == "multivector" else "sentence_embedding"
    for module in files.modules:
        config = files.read_json(f"{module.folder}/config.json") if module.kind == "Normalize" else {}
        if config.get("module_input_name", vector) != vector:
            yield f"`module_input_name: {config['module_input_name']}` of Normalize"
