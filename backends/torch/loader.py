"""Loading of a checkpoint folder into a model that the engine can run."""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeAlias

import msgspec
import torch

from backends.checkpoints import locate_code
from backends.contract import Capabilities, Operation, Output, ScoreKind, TokenizerSettings
from backends.errors import ModelUnavailable
from backends.texts import SPECIAL_TOKENS
from backends.tokens import TextTokenizer, open_tokenizer, tokenizer_notes
from backends.torch.adapter_choice import choose_adapter
from backends.torch.checkpoint import dense_width, outputs_of, read_recipe
from backends.torch.files import CheckpointFiles
from backends.torch.int8 import require_int8
from backends.torch.kinds import recognize
from backends.torch.loaded_model import (
    CPU_BATCH_TOKENS,
    GPU_BATCH_TOKENS,
    STATIC_BATCH_TOKENS,
    LoadedModel,
)
from backends.torch.networks import open_network
from backends.torch.options import DTypeName, TaskSettings
from backends.torch.own_code import OwnCode, require_permission
from backends.torch.own_network import TrustedCode
from backends.torch.pairs import PairEncoder, answer_ids
from backends.torch.precision import best_dtype, dtype_name
from backends.torch.preparing import Preparer
from backends.torch.recipe import ModelKind, Recipe
from backends.torch.refusals import refuse_on_error
from backends.torch.rerank_template import RerankTemplate
from backends.torch.sequences import LOGITS, Head, InputSequence
from backends.torch.static_files import table_dtype, table_width
from backends.torch.template import read_template
from backends.torch.weights import NetworkSource, Placement

# Reports a step of a load.
ReportStep: TypeAlias = Callable[[str], None]
# Runs a function on a thread that computes, and returns its result.
RunOnDevice: TypeAlias = Callable[[Callable[[], int]], int]
# A later slice of a larger request must not wait long behind an earlier one.
BATCH_INPUTS = 32
# Those of a static model take less time than their way to the engine.
STATIC_BATCH_INPUTS = 256


class LoadOptions(msgspec.Struct, frozen=True):
    """Options of loading a checkpoint.

    dtype: None is bfloat16 if the processor multiplies it in hardware, else float32; for a static model it is
    the number format of its file. int8 is that of an encoder's linear layers, on a processor.
    device: None is cuda if there is one, else mps on Apple hardware, else cpu.
    compiled: True to run torch.compile. trust_remote_code: True if code that comes with the weights may run.
    code_revision: commit of that code, if it lies in another repository.
    """

    dtype: DTypeName | None = None
    device: str | None = None
    compiled: bool = False
    trust_remote_code: bool = False
    code_revision: str | None = None
    settings: TaskSettings = TaskSettings()
    tokenizer: TokenizerSettings = TokenizerSettings()


def load(
    checkpoint: Path,
    model_id: str,
    options: LoadOptions,
    report: ReportStep = lambda _: None,
    run_on_device: RunOnDevice = lambda warm_up: warm_up(),
) -> LoadedModel:
    """Read a checkpoint and put its network on a device.

    report: called with each step. run_on_device: runs the first batches where later batches run.
    Raises: ModelUnavailable.
    """
    recipe = read_recipe(checkpoint, options.settings)
    files = CheckpointFiles(checkpoint)
    template = read_template(files, recipe, options.settings)
    adapter = choose_adapter(files, options.settings.adapter)
    code = _trusted_code(checkpoint, options)
    device = best_device(options.device)
    dtype = _dtype(checkpoint, options)
    report(f"loading weights as {dtype_name(dtype)} on {device}")
    tokenizer = open_tokenizer(checkpoint, recipe.max_tokens, options.tokenizer)
    network = open_network(
        NetworkSource(checkpoint, recipe, tokenizer, template, code, adapter),
        Placement(dtype, device, options.compiled),
    )
    report("compiling; this takes a minute or two" if options.compiled else "warming up")
    started_s = time.perf_counter()
    with refuse_on_error(f"the first passes through {checkpoint} failed"):
        width = run_on_device(partial(_warm_up, network.head, tokenizer, recipe, network.outputs or LOGITS))
    if options.compiled:
        report(f"compiled in {time.perf_counter() - started_s:.0f} s")
    capabilities = msgspec.structs.replace(
        _capabilities(recipe, template, network.outputs, width),
        model_id=model_id,
        dtype=dtype_name(dtype),
        checkpoint=str(checkpoint),
        overhead_tokens=_overhead_tokens(recipe, tokenizer, template),
        notes=tokenizer_notes(checkpoint, options.tokenizer),
    )
    return LoadedModel(
        recipe,
        Preparer(recipe, tokenizer, network.outputs, width, template),
        network.head,
        capabilities,
        packed=network.packed,
        batch_tokens=_batch_tokens(recipe, device),
        reentrant=network.reentrant,
    )


def describe(checkpoint: Path, model_id: str, options: LoadOptions) -> Capabilities:
    """Return the capabilities that a model will have, read from its small files only.

    Raises: ModelUnavailable.
    """
    files = CheckpointFiles(checkpoint)
    recipe = read_recipe(checkpoint, options.settings)
    template = read_template(files, recipe, options.settings)
    choose_adapter(files, options.settings.adapter)
    permitted_code(checkpoint, options)
    tokenizer = open_tokenizer(checkpoint, recipe.max_tokens, options.tokenizer)
    if recipe.kind == "language":
        answer_ids(tokenizer, template)
    return msgspec.structs.replace(
        _capabilities(recipe, template, outputs_of(recipe), _width(checkpoint, recipe)),
        model_id=model_id,
        dtype=dtype_name(_dtype(checkpoint, options)),
        checkpoint=str(checkpoint),
        overhead_tokens=_overhead_tokens(recipe, tokenizer, template),
        notes=tokenizer_notes(checkpoint, options.tokenizer),
        loaded=False,
    )


def permitted_code(checkpoint: Path, options: LoadOptions) -> OwnCode | None:
    """Return the checkpoint's own code if its network needs it; read from its small files only.

    Raises: ModelUnavailable if the operator did not permit and pin it.
    """
    files = CheckpointFiles(checkpoint)
    kind = recognize(files, options.settings)
    if kind == "static":
        return None
    return require_permission(
        files, kind, trusted=options.trust_remote_code, code_revision=options.code_revision
    )


def _trusted_code(checkpoint: Path, options: LoadOptions) -> TrustedCode | None:
    code = permitted_code(checkpoint, options)
    if code is None:
        return None
    return TrustedCode(code, locate_code(checkpoint, code.classes, options.code_revision))


def best_device(device: str | None) -> torch.device:
    """Return the configured device, by default the first of cuda, mps (Apple hardware) and cpu."""
    return torch.device(device or next(name for name, is_available in DEVICES if is_available()))


def _width(checkpoint: Path, recipe: Recipe) -> int | None:
    width, static = dense_width(checkpoint, recipe), CheckpointFiles(checkpoint).static
    return width if width is not None or static is None else table_width(static)


def _dtype(checkpoint: Path, options: LoadOptions) -> torch.dtype:
    """Return the number format. Raises: ModelUnavailable for int8 where it is no gain."""
    name, static = options.dtype, CheckpointFiles(checkpoint).static
    device = best_device(options.device)
    if name is None:
        return best_dtype(device) if static is None else table_dtype(static)
    if name == "int8":
        if static is not None:
            raise ModelUnavailable(
                "`dtype: int8` does not serve static models, which multiply nothing; leave `dtype` out"
            )
        if permitted_code(checkpoint, options) is not None:
            raise ModelUnavailable(
                "`dtype: int8` does not serve models with code of their own, whose layers may differ from "
                "transformers' layers; leave `dtype` out"
            )
        require_int8(device, compiled=options.compiled)
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _batch_tokens(recipe: Recipe, device: torch.device) -> int:
    if recipe.kind == "static":
        return STATIC_BATCH_TOKENS
    return CPU_BATCH_TOKENS if device.type == "cpu" else GPU_BATCH_TOKENS


def _warm_up(head: Head, tokenizer: TextTokenizer, recipe: Recipe, outputs: frozenset[Output]) -> int:
    """Run a few batches, so that no caller pays for one-time costs; return the width of a dense row.

    They have several shapes: the compiler treats a size as variable only after it has changed.
    Raises: ModelUnavailable if a result is NaN or infinite.
    """
    (word,) = tokenizer.explain(["ready"], add_special_tokens=True)
    ids = [token.id for token in word][: recipe.max_tokens]
    width = 0
    for repeats in ((1,), (2, 1, 1), (3, 2)):
        batch = [(ids * times)[: recipe.max_tokens] for times in repeats]
        rows = head.run([InputSequence(text_ids, [0] * len(text_ids)) for text_ids in batch], outputs)
        if not all(row.is_finite() for row in rows):
            raise ModelUnavailable("its results are not finite numbers; set `dtype: float32`")
        width = 0 if rows[0].dense is None else len(rows[0].dense)
    return width


# In the order of preference. Looked up when called, as a test replaces them.
DEVICES: tuple[tuple[str, Callable[[], bool]], ...] = (
    ("cuda", lambda: torch.cuda.is_available()),  # noqa: PLW0108
    ("mps", lambda: torch.backends.mps.is_available()),  # noqa: PLW0108
    ("cpu", lambda: True),
)
OPERATIONS: dict[ModelKind, set[Operation]] = {
    "dense": {Operation.EMBED, Operation.ENCODE},
    "sparse": {Operation.ENCODE},
    "multivector": {Operation.ENCODE, Operation.RERANK},
    "classifier": {Operation.CLASSIFY},
    "language": {Operation.RERANK},
    "static": {Operation.EMBED, Operation.ENCODE},
}
SCORE_KINDS: dict[ModelKind, ScoreKind] = {
    "multivector": ScoreKind.COSINE,
    "classifier": ScoreKind.SIGMOID,
    "language": ScoreKind.SIGMOID,
}
# Pooling that the capabilities report for kinds whose recipe has none.
REPORTED_POOLINGS: dict[ModelKind, str] = {"sparse": "splade", "language": "last_token"}


def _capabilities(
    recipe: Recipe, template: RerankTemplate, outputs: frozenset[Output], width: int | None
) -> Capabilities:
    """Derive the capabilities that follow from a recipe and a template."""
    # In a prompt for pairs a single text has no label.
    own = OPERATIONS["language" if template.prompt else recipe.kind]
    operations = own | {Operation.TOKENIZE, Operation.DETOKENIZE}
    if len(recipe.labels) == 1:
        operations |= {Operation.RERANK}
    is_dense = recipe.kind in {"dense", "static"}
    return Capabilities(
        model_id="",
        operations=frozenset(operations),
        max_input_tokens=recipe.max_tokens,
        batch_inputs=STATIC_BATCH_INPUTS if recipe.kind == "static" else BATCH_INPUTS,
        dimensions=width if is_dense else None,
        pooling="+".join(recipe.pooling) if is_dense else REPORTED_POOLINGS.get(recipe.kind),
        prompts=recipe.prompts,
        default_prompt=recipe.default_prompt,
        pools_prompt=recipe.include_prompt,
        takes_instruction=bool(template.instructed),
        reports_input_tokens=True,
        outputs=outputs,
        labels=recipe.labels,
        score_kind=SCORE_KINDS.get(recipe.kind) if Operation.RERANK in operations else None,
    )


def _overhead_tokens(recipe: Recipe, tokenizer: TextTokenizer, template: RerankTemplate) -> int:
    """Return the tokens of a pair beyond those of its texts.

    For late interaction, a query is a sequence of its own.
    """
    if template.prompt or template.query_prefix:
        return PairEncoder(tokenizer, template).overhead_tokens
    if recipe.kind != "multivector":
        return 0
    prompts = tokenizer.ids([recipe.prompts["query"], recipe.prompts["document"]])
    # Together, query and document may be longer than one sequence.
    beyond_one = sum(recipe.late.lengths(recipe.max_tokens)) - recipe.max_tokens
    return SPECIAL_TOKENS * 2 + sum(len(ids) for ids in prompts) + max(0, beyond_one)
