"""Plan of a load: all that a checkpoint's small files decide, for a load and for an inspection alike.

Of a network that the engine does not have itself, it imports transformers' class.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

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
from backends.torch.networks.opening import NetworkFacts, OwnCode, reads_type_ids
from backends.torch.networks.projection import check_projections

PROBE_TEXT = "a b"


def network_facts(files: CheckpointFiles, recipe: Recipe, code: OwnCode | None) -> NetworkFacts:
    """Return what a plan needs of a network. code: the checkpoint's own, None if it runs none.

    Raises: ModelUnavailable if texts alone give the network nothing that the engine can read.
    """
    own = read_bert(files.config)
    if recipe.kind == "static":
        # Its table is compared with the tokenizer when it is read.
        return NetworkFacts(takes_type_ids=False)
    if own is not None:
        return NetworkFacts(own.vocab_size, own.type_vocab_size)
    from backends.torch.stock.architectures import read_facts

    return read_facts(files, recipe, runs_own_code=code is not None)


def type_id_notes(
    files: CheckpointFiles, recipe: Recipe, tokenizer: TextTokenizer, facts: NetworkFacts
) -> Iterator[str]:
    """Yield a note if versions of transformers differ in the type ids that they give a network.

    Raises: ModelUnavailable if an id is beyond the network's types.
    """
    type_ids, types = tokenizer.traits.type_ids, facts.types
    if not type_ids.given or not facts.takes_type_ids:
        return
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
    facts = network_facts(files, recipe, code)
    check_projections(checkpoint, recipe)
    tokenizer = open_tokenizer(checkpoint, recipe.max_tokens, options.tokenizer)
    if recipe.kind == "language":
        answer_ids(tokenizer, template)
    if recipe.kind == "multivector":
        filler_id(recipe.late.expansion, tokenizer.token_id)
    notes = (
        *(() if facts.words is None else missing_words(tokenizer, facts.words)),
        *tokenizer.traits.notes,
        *type_id_notes(files, recipe, tokenizer, facts),
        *pooling_notes(files, recipe, options.settings),
        *score_notes(files, recipe),
        *cut_notes(files, recipe),
        *template_notes(files, recipe, options.settings),
    )
    return LoadPlan(recipe, template, tokenizer, adapter, code, notes, facts.words)


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
