"""Plan of a load: all that a checkpoint's small files decide, for a load and for an inspection alike."""

from pathlib import Path
from typing import NamedTuple

import msgspec

from backends.checkpoints.auto_map import read_auto_map
from backends.contract import TokenizerSettings
from backends.contract.errors import ModelUnavailable
from backends.recipe.adapter_choice import Adapter, choose_adapter
from backends.recipe.bert_config import read_bert
from backends.recipe.checkpoint import read_recipe
from backends.recipe.cut_rules import cut_notes
from backends.recipe.files import CheckpointFiles
from backends.recipe.kinds import recognize
from backends.recipe.module_order import refuse_folders
from backends.recipe.options import DTypeName, Runtime, TaskSettings
from backends.recipe.pooling_notes import pooling_notes
from backends.recipe.recipe import Recipe
from backends.recipe.rerank_template import RerankTemplate
from backends.recipe.score_notes import score_notes
from backends.tokens.tokenizer import TextTokenizer, open_tokenizer
from backends.torch.inputs.fillers import filler_id
from backends.torch.inputs.pairs import answer_ids
from backends.torch.inputs.word_table import missing_words
from backends.torch.load.template import read_template, template_notes
from backends.torch.load.text_inputs import refuse_network, table_rows, type_id_notes
from backends.torch.networks.opening import OwnCode
from backends.torch.networks.projection import check_projections

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
    code = permitted_code(checkpoint, options)
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


def permitted_code(checkpoint: Path, options: LoadOptions) -> OwnCode | None:
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
