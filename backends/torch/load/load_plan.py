"""Plan of a load: all that a checkpoint's small files decide, for a load and for an inspection alike.

Among that are the inputs of a network: those that its tokenizer gives for a text, and those that no text
gives. Of a network that the engine does not have itself, it imports transformers' class, and reads its
signature.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from backends.checkpoints.auto_map import read_auto_map
from backends.contract import ModelInput, TokenizerSettings, Truncate
from backends.contract.errors import ModelUnavailable
from backends.recipe.adapter_choice import Adapter, choose_adapter
from backends.recipe.bert_config import read_bert
from backends.recipe.checkpoint import read_recipe
from backends.recipe.files import CheckpointFiles
from backends.recipe.kinds import recognize
from backends.recipe.modules import refuse_folders
from backends.recipe.notes import cut_notes, pooling_notes, score_notes
from backends.recipe.options import DTypeName, Runtime, TaskSettings
from backends.recipe.recipe import Recipe
from backends.recipe.rerank_template import RerankTemplate
from backends.tokens.tokenizer import TextTokenizer, open_tokenizer
from backends.torch.inputs.pairs import answer_ids
from backends.torch.inputs.preparing import filler_id, missing_words
from backends.torch.load.template import read_template, template_notes
from backends.torch.networks.opening import OwnCode, reads_type_ids
from backends.torch.networks.projection import check_projections

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
PROBE_TEXT = "a b"


def refuse_network(files: CheckpointFiles, recipe: Recipe) -> None:
    """Raise ModelUnavailable if texts alone give the network nothing that the engine can read."""
    if recipe.kind in {"static", "dual", "pages"} or read_bert(files.config) is not None:
        return
    from backends.torch.stock.architectures import input_names

    model_type = recipe.model_type
    names = input_names(recipe.kind, model_type)
    found = next((OTHER_INPUTS[name] for name in OTHER_INPUTS if name in names), None)
    reason = REFUSED_TYPES.get(model_type) or _unknown_rotation(files)
    if recipe.kind == "classifier" and model_type in SPLIT_CLASSIFIERS:
        reason = "an encoder-decoder, whose classifier the built-in engine does not serve"
    if found is not None:
        reason = f"whose network reads {found} next to the text; the built-in engine has text only"
    if reason is not None:
        raise ModelUnavailable(f"{files.checkpoint} has `model_type` {model_type!r}, {reason}")


def _unknown_rotation(files: CheckpointFiles) -> str | None:
    """Return the reason against a checkpoint whose rotary positions transformers does not have."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    from backends.torch.stock.architectures import read_config

    try:
        stated = getattr(read_config(files.checkpoint), "rope_parameters", None)
    except Exception:  # noqa: BLE001 - a load gives the reason
        return None
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


def table_rows(files: CheckpointFiles, recipe: Recipe) -> int | None:
    """Return the number of tokens that a network has vectors for, None if no file states it."""
    if recipe.kind == "static":
        # Its table is compared with the tokenizer when it is read.
        return None
    config: Any = read_bert(files.config) or _text_config(files)
    rows = getattr(config, "vocab_size", files.config.get("vocab_size"))
    return rows if isinstance(rows, int) and rows > 0 else None


def _text_config(files: CheckpointFiles) -> Any:
    from backends.torch.stock.architectures import read_config

    try:
        return read_config(files.checkpoint).get_text_config()
    except Exception:  # noqa: BLE001 - a load gives the reason, and code of the checkpoint may read what this cannot
        return None


def type_id_notes(files: CheckpointFiles, recipe: Recipe, tokenizer: TextTokenizer) -> Iterator[str]:
    """Yield a note if versions of transformers differ in the type ids that they give a network.

    Raises: ModelUnavailable if an id is beyond the network's types.
    """
    if recipe.kind in {"static", "dual", "pages"}:
        return
    type_ids = tokenizer.traits.type_ids
    if not type_ids.given or not _takes_type_ids(files, recipe):
        return
    types = _types_of(files, recipe)
    probe: ModelInput = (PROBE_TEXT, PROBE_TEXT) if recipe.kind == "classifier" else PROBE_TEXT
    (ids,) = tokenizer.encode([probe], Truncate.RIGHT).type_ids
    if types is not None and reads_type_ids(types) and max(ids, default=0) >= types:
        raise ModelUnavailable(
            f"the tokenizer of {files.checkpoint} gives a token the type {max(ids)}, and the network has "
            f"{types} types; list `model_input_names` without `token_type_ids` in its tokenizer_config.json"
        )
    if type_ids.differs and (types is None or (any(ids) and types > 1)):
        version = type_ids.library
        origin = f"made with transformers {version}" if version else "that names no version of transformers"
        yield (
            f"the network gets `token_type_ids`, as transformers 4 gave them to a checkpoint {origin}; "
            "transformers 5 gives none. `model_input_names` in its tokenizer_config.json decides otherwise"
        )


def _takes_type_ids(files: CheckpointFiles, recipe: Recipe) -> bool:
    if read_bert(files.config) is not None:
        return True
    from backends.torch.stock.architectures import input_names

    names = input_names(recipe.kind, recipe.model_type)
    # The inputs of a checkpoint's own code are not known here.
    return not names or "token_type_ids" in names


def _types_of(files: CheckpointFiles, recipe: Recipe) -> int | None:
    """Return the number of types of a network, None if neither file nor class states it."""
    found = read_bert(files.config)
    if found is not None:
        return found.type_vocab_size
    from backends.torch.stock.architectures import default_of

    types: int | None = files.config.get("type_vocab_size", default_of(recipe.model_type, "type_vocab_size"))
    return types


# Number formats of weights that the engine reads, by their names in config.json.
READ_FORMATS = frozenset({"float64", "float32", "float16", "bfloat16"})


class LoadOptions(msgspec.Struct, frozen=True):
    """Options of loading a checkpoint.

    dtype: None is bfloat16 if the processor multiplies it in hardware, else float32; for a static model it is
    the number format of its file. int8 is that of an encoder's linear layers, on a processor.
    device: None is cuda if there is one, else mps on Apple hardware, else cpu.
    compiled: True to run torch.compile. trust_remote_code: True if code that comes with the weights may run.
    code_revision: commit of that code, if it lies in another repository. runtime: what computes passes of one
    text.
    """

    dtype: DTypeName | None = None
    device: str | None = None
    compiled: bool = False
    trust_remote_code: bool = False
    code_revision: str | None = None
    settings: TaskSettings = TaskSettings()
    tokenizer: TokenizerSettings = TokenizerSettings()
    runtime: Runtime = "torch"


class LoadPlan(NamedTuple):
    """Recipe, template and tokenizer of a checkpoint, its chosen adapter, and the own code that it runs.

    notes: guesses and settled conflicts, for the operator. words: rows of the network's table of tokens, None
    if no file states them.
    """

    recipe: Recipe
    template: RerankTemplate
    tokenizer: TextTokenizer
    adapter: Adapter | None
    code: OwnCode | None
    notes: tuple[str, ...]
    words: int | None


def plan_load(checkpoint: Path, options: LoadOptions) -> LoadPlan:
    """Read a checkpoint's small files. Raises: ModelUnavailable if they show that it cannot be served."""
    files = CheckpointFiles(checkpoint)
    _require_config(files)
    _refuse_formats(files)
    recipe = read_recipe(checkpoint, options.settings)
    template = read_template(files, recipe, options.settings)
    adapter = choose_adapter(files, options.settings.adapter)
    code = trusted_code(checkpoint, options)
    if code is None:
        refuse_network(files, recipe)
    check_projections(checkpoint, recipe)
    tokenizer = open_tokenizer(checkpoint, recipe.max_tokens, options.tokenizer)
    if recipe.kind == "language":
        answer_ids(tokenizer, template)
    words = table_rows(files, recipe)
    if recipe.kind == "multivector":
        filler_id(recipe.late.expansion, tokenizer.token_id)
    notes = (
        *(() if words is None else missing_words(tokenizer, words)),
        *tokenizer.traits.notes,
        *type_id_notes(files, recipe, tokenizer),
        *pooling_notes(files, recipe, options.settings),
        *score_notes(files, recipe),
        *cut_notes(files, recipe),
        *template_notes(files, recipe, options.settings),
    )
    return LoadPlan(recipe, template, tokenizer, adapter, code, notes, words)


def trusted_code(checkpoint: Path, options: LoadOptions) -> OwnCode | None:
    """Return the checkpoint's own code if its network needs it; read from its small files only.

    Raises: ModelUnavailable if the operator did not permit and pin it.
    """
    files = CheckpointFiles(checkpoint)
    kind = recognize(files, options.settings)
    if kind == "static" or (read_bert(files.config) and not read_auto_map(files.tokenizer_config)):
        return None
    from backends.torch.stock.own_code import require_permission

    return require_permission(
        files, kind, trusted=options.trust_remote_code, code_revision=options.code_revision
    )


def _require_config(files: CheckpointFiles) -> None:
    """Raise ModelUnavailable for a folder that is no checkpoint."""
    if files.static is not None or files.has("config.json"):
        return
    refuse_folders(files)
    if files.has("adapter_config.json"):
        model = files.read_json("adapter_config.json").get("base_model_name_or_path")
        raise ModelUnavailable(
            f"{files.checkpoint} is an adapter of {model}: put its files into a folder of that checkpoint, "
            "give the checkpoint as `model`, and set `adapter` to the name of the folder"
        )
    # Modules of sentence-transformers have a config.json without a network.
    configs = sorted(files.checkpoint.glob("*/config.json"))
    inner = [path.parent.name for path in configs if not path.parent.name[0].isdigit()]
    hint = f"; there is one in {', '.join(inner[:3])}" if inner else ""
    raise ModelUnavailable(f"{files.checkpoint} is no checkpoint: it has no config.json{hint}")


def _refuse_formats(files: CheckpointFiles) -> None:
    """Raise ModelUnavailable for weights that are more than rounded numbers."""
    quantized = files.config.get("quantization_config")
    if quantized:
        method = quantized.get("quant_method", "an unknown method") if isinstance(quantized, dict) else ""
        raise ModelUnavailable(
            f"{files.checkpoint} has quantized weights ({method}), which the built-in engine does not read; "
            "give the checkpoint that they were made from"
        )
    stated = files.config.get("dtype") or files.config.get("torch_dtype")
    if isinstance(stated, str) and stated.removeprefix("torch.") not in READ_FORMATS:
        raise ModelUnavailable(
            f"{files.checkpoint} has weights in {stated} by its config.json; the built-in engine reads "
            f"{', '.join(sorted(READ_FORMATS))}"
        )
