"""Loading of a model from its settings and its folder into what the engine can run."""

import asyncio
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from itertools import chain
from pathlib import Path
from threading import Thread
from typing import TypeAlias, TypeVar

import msgspec
import torch

from backends.checkpoints.locations import locate_checkpoint, locate_code, locate_tokenizer
from backends.checkpoints.needed_files import is_path
from backends.checkpoints.small_files import network_folder
from backends.checkpoints.static_models import StaticModel
from backends.contract import Capabilities, Operation, Output, ScoreKind
from backends.contract.errors import ModelUnavailable
from backends.contract.texts import SPECIAL_TOKENS
from backends.recipe.checkpoint import MAIN_OUTPUTS, dense_width, outputs_of
from backends.recipe.files import CheckpointFiles
from backends.recipe.kinds import recognize
from backends.recipe.options import TaskSettings
from backends.recipe.recipe import ModelKind, Recipe, takes_late_chunking
from backends.recipe.rerank_template import RerankTemplate
from backends.tokens.tokenizer import TextTokenizer
from backends.torch import wire
from backends.torch.inputs.chat import ChatRenderer
from backends.torch.inputs.pairs import PairEncoder
from backends.torch.inputs.preparing import Preparer, Templates
from backends.torch.load.load_plan import LoadOptions, LoadPlan, plan_load, trusted_code
from backends.torch.load.weight_sizes import sizes_of
from backends.torch.media.preparing import MediaPreparer
from backends.torch.media.reading import ProcessReader
from backends.torch.media.reading_wire import ReaderKind, ReadsMedium
from backends.torch.networks.bert import open_bert
from backends.torch.networks.heads import run_first_passes, run_media_passes
from backends.torch.networks.int8 import require_int8
from backends.torch.networks.opening import (
    Choose,
    NetworkSource,
    OpenedNetwork,
    OwnCode,
    Placement,
    TrustedCode,
)
from backends.torch.networks.openvino_passes import require_openvino
from backends.torch.networks.precision import best_dtype, dtype_name
from backends.torch.networks.projection import read_sentence_projections
from backends.torch.networks.static import StaticHead, read_table, table_dtype, table_width
from backends.torch.passes.loaded_model import (
    CPU_BATCH_TOKENS,
    GPU_BATCH_TOKENS,
    MEDIA_CPU_BATCH_TOKENS,
    STATIC_BATCH_TOKENS,
    LoadedModel,
)
from backends.torch.refusals import refuse_on_error

# Reports a step of a load.
ReportStep: TypeAlias = Callable[[str], None]
# Runs a function on a thread that computes, and returns its result.
RunOnDevice: TypeAlias = Callable[[Callable[[], int]], int]
# A later slice of a larger request must not wait long behind an earlier one.
REQUEST_INPUTS = 32
# Those of a static model take less time than their way to the engine.
STATIC_REQUEST_INPUTS = 256


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
    checkpoint = network_folder(checkpoint)
    plan = plan_load(checkpoint, options)
    recipe, template, tokenizer = plan.recipe, plan.template, plan.tokenizer
    device = best_device(options.device)
    dtype = served_dtype(checkpoint, options)
    reader = _open_reader(checkpoint, recipe)
    report(f"loading weights as {dtype_name(dtype)} on {device}")
    code = _trusted_code(checkpoint, plan, options)
    network = open_network(
        NetworkSource(checkpoint, recipe, tokenizer, template, code, plan.adapter),
        Placement(dtype, device, options.compiled, options.runtime),
    )
    report("compiling; this takes a minute or two" if options.compiled else "warming up")
    started_s = time.perf_counter()
    with refuse_on_error(f"the first passes through {checkpoint} failed"):
        width = run_on_device(partial(_warm_up, network, plan, reader))
    notes = network.notes
    if network.choose is not None:
        report("measuring the runtimes" if device.type == "cpu" else "recording passes")
        with refuse_on_error(f"the trial of passes through {checkpoint} failed"):
            notes += (_chosen(network.choose, run_on_device),)
    if options.compiled:
        report(f"compiled in {time.perf_counter() - started_s:.0f} s")
    capabilities = _capabilities(checkpoint, model_id, options, plan, network.outputs, width, reader)
    capabilities = msgspec.structs.replace(capabilities, loaded=True, notes=(*plan.notes, *notes))
    templates = Templates(template, ChatRenderer(recipe.chat, recipe.max_tokens))
    preparer = Preparer(recipe, tokenizer, network.outputs, width, templates, plan.words)
    return LoadedModel(
        recipe,
        preparer,
        network.head,
        capabilities,
        packed=network.packed,
        batch_tokens=_batch_tokens(recipe, device),
        reentrant=network.reentrant,
        media=_media_preparer(reader, checkpoint, recipe, preparer),
    )


def open_network(source: NetworkSource, placement: Placement) -> OpenedNetwork:
    """Load a network with its readers. Raises: ModelUnavailable."""
    files = CheckpointFiles(source.checkpoint)
    if files.static is not None:
        return _open_static(files.static, source, placement)
    opened = open_bert(source, placement, files.config)
    if opened is not None:
        return opened
    from backends.torch.stock.construction import open_stock

    return open_stock(source, placement)


def _open_static(static: StaticModel, source: NetworkSource, placement: Placement) -> OpenedNetwork:
    if placement.compiled:
        raise ModelUnavailable("`compile` does not serve static models, which have nothing to compile")
    table = read_table(static, source.tokenizer, placement.dtype, placement.device)
    projections = read_sentence_projections(source.checkpoint, source.recipe)
    head = StaticHead(table, projections)
    return OpenedNetwork(head, packed=True, outputs=frozenset({Output.DENSE}))


def _media_preparer(
    reader: ReadsMedium | None, checkpoint: Path, recipe: Recipe, preparer: Preparer
) -> MediaPreparer | None:
    """Return the preparation of pictures or recordings, None for a network of texts."""
    kind = _reader_kind(recipe)
    if reader is None or kind is None:
        return None
    processes = ProcessReader(reader, kind, checkpoint)
    return MediaPreparer(processes, preparer, MAIN_OUTPUTS[recipe.kind])


def describe(checkpoint: Path, model_id: str, options: LoadOptions) -> Capabilities:
    """Return the capabilities that a model will have, read from its small files only.

    Raises: ModelUnavailable.
    """
    checkpoint = network_folder(checkpoint)
    plan = plan_load(checkpoint, options)
    reader, outputs = _open_reader(checkpoint, plan.recipe), outputs_of(plan.recipe)
    return _capabilities(
        checkpoint, model_id, options, plan, outputs, _width(checkpoint, plan.recipe), reader
    )


def _trusted_code(checkpoint: Path, plan: LoadPlan, options: LoadOptions) -> TrustedCode | None:
    if plan.code is None:
        return None
    return TrustedCode(plan.code, locate_code(checkpoint, plan.code.classes, options.code_revision))


def _reader_kind(recipe: Recipe) -> ReaderKind | None:
    """Return the kind of media that a network reads, None for a network of texts."""
    return "page" if recipe.kind == "pages" and recipe.medium is not None else recipe.medium


def _open_reader(checkpoint: Path, recipe: Recipe) -> ReadsMedium | None:
    """Return the reader of pictures or recordings, None for a network of texts. Raises: ModelUnavailable."""
    kind = _reader_kind(recipe)
    if kind is None:
        return None
    from backends.torch.media.features import open_reader

    return open_reader(kind, checkpoint)


def best_device(device: str | None) -> torch.device:
    """Return the configured device, by default the first of cuda, mps (Apple hardware) and cpu."""
    return torch.device(device or next(name for name, is_available in DEVICES if is_available()))


def require_device(device: str | None) -> None:
    """Raise ModelUnavailable if this machine lacks the configured device, or torch cannot use it."""
    if device is None or device.startswith("cpu"):
        return
    present = [name for name, is_available in DEVICES if is_available()]
    if "cuda" in present:
        present[:1] = ["cuda", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    if device in present:
        return
    reason = "" if torch.version.cuda or "cuda" not in device else "; the installed PyTorch has no CUDA"
    raise ModelUnavailable(
        f"there is no device {device!r} for PyTorch on this machine, only {', '.join(present)}{reason}; "
        "name one that exists, or leave `device` out"
    )


def _width(checkpoint: Path, recipe: Recipe) -> int | None:
    width, static = dense_width(checkpoint, recipe), CheckpointFiles(checkpoint).static
    if width is None and static is not None:
        width = table_width(static)
    return width if width is None or recipe.width_max is None else min(width, recipe.width_max)


def served_dtype(checkpoint: Path, options: LoadOptions) -> torch.dtype:
    """Return the number format of matrix products, or of the table of a static model.

    Raises: ModelUnavailable for int8 where it is no gain, and for what the runtime cannot compute.
    """
    name, static = options.dtype, CheckpointFiles(checkpoint).static
    device = best_device(options.device)
    if options.runtime == "openvino":
        require_openvino(device, name)
    if name is None:
        return best_dtype(device) if static is None else table_dtype(static)
    if name == "int8":
        if static is not None:
            raise ModelUnavailable(
                "`dtype: int8` does not serve static models, which multiply nothing; leave `dtype` out"
            )
        if trusted_code(checkpoint, options) is not None:
            raise ModelUnavailable(
                "`dtype: int8` does not serve models with code of their own, whose layers may differ from "
                "transformers' layers; leave `dtype` out"
            )
        if recognize(CheckpointFiles(checkpoint), options.settings) in {"dual", "pages"}:
            raise ModelUnavailable(
                "`dtype: int8` does not serve models of images or sound; leave `dtype` out"
            )
        require_int8(device, compiled=options.compiled)
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _batch_tokens(recipe: Recipe, device: torch.device) -> int:
    if recipe.kind == "static":
        return STATIC_BATCH_TOKENS
    if device.type != "cpu":
        return GPU_BATCH_TOKENS
    return CPU_BATCH_TOKENS if recipe.medium is None else MEDIA_CPU_BATCH_TOKENS


def _chosen(choose: Choose, run_on_device: RunOnDevice) -> str:
    """Choose between runtimes where batches run, and return the note."""
    notes: list[str] = []

    def measure() -> int:
        # Of several runs, with teams of different sizes, the last one counts.
        notes[:] = [choose()]
        return 0

    run_on_device(measure)
    return notes[0]


def _warm_up(network: OpenedNetwork, plan: LoadPlan, reader: ReadsMedium | None) -> int:
    """Run a few batches, so that no caller pays for one-time costs; return the width of a dense row.

    Raises: ModelUnavailable if a result is NaN or infinite.
    """
    width = 0
    passes = run_first_passes(network.head, plan.tokenizer, plan.recipe.max_tokens, network.outputs)
    media = () if reader is None else run_media_passes(network.head, reader.probe(), network.outputs)
    for rows in chain(passes, media):
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
    "dual": {Operation.EMBED, Operation.ENCODE},
    "pages": {Operation.ENCODE},
}
SCORE_KINDS: dict[ModelKind, ScoreKind] = {
    "multivector": ScoreKind.COSINE,
    "classifier": ScoreKind.SIGMOID,
    "language": ScoreKind.SIGMOID,
}
MEDIA_OPERATIONS = {"image": Operation.EMBED_IMAGE, "audio": Operation.EMBED_AUDIO}
# Pooling that the capabilities report for kinds whose recipe has none.
REPORTED_POOLINGS: dict[ModelKind, str] = {"sparse": "splade", "language": "last_token"}


def _capabilities(
    checkpoint: Path,
    model_id: str,
    options: LoadOptions,
    plan: LoadPlan,
    outputs: frozenset[Output],
    width: int | None,
    reader: ReadsMedium | None,
) -> Capabilities:
    """Derive the capabilities of a model that is not loaded."""
    recipe, template = plan.recipe, plan.template
    # In a prompt for pairs a single text has no label.
    own = OPERATIONS["language" if template.prompt else recipe.kind]
    operations = own | {Operation.TOKENIZE, Operation.DETOKENIZE}
    if recipe.medium is not None:
        operations |= {MEDIA_OPERATIONS[recipe.medium]}
    if len(recipe.labels) == 1:
        operations |= {Operation.RERANK}
    has_width = recipe.kind in {"dense", "static", "dual"}
    is_pooled = recipe.kind in {"dense", "static"}
    return Capabilities(
        model_id=model_id,
        dtype=dtype_name(served_dtype(checkpoint, options)),
        checkpoint=str(checkpoint),
        notes=plan.notes,
        overhead_tokens=_overhead_tokens(recipe, plan.tokenizer, template),
        truncation_side=plan.tokenizer.traits.truncation_side,
        media_tokens=None if reader is None else reader.tokens_max,
        loaded=False,
        operations=frozenset(operations),
        max_input_tokens=recipe.max_tokens,
        request_inputs=STATIC_REQUEST_INPUTS if recipe.kind == "static" else REQUEST_INPUTS,
        dimensions=width if has_width else None,
        pooling="+".join(recipe.pooling) if is_pooled else REPORTED_POOLINGS.get(recipe.kind),
        prompts=recipe.prompts,
        default_prompt=recipe.default_prompt,
        pools_prompt=recipe.include_prompt,
        norm_before_cut=recipe.norm_before_cut,
        late_chunking=Operation.EMBED in operations and takes_late_chunking(recipe),
        takes_instruction=bool(template.instructed),
        reports_input_tokens=True,
        outputs=outputs,
        labels=recipe.labels,
        score_kind=_score_kind(recipe) if Operation.RERANK in operations else None,
    )


def _score_kind(recipe: Recipe) -> ScoreKind | None:
    """Return the scale of scores; products of vectors of any length have none."""
    if recipe.kind == "multivector" and not recipe.late.scaled:
        return ScoreKind.LOGIT
    return SCORE_KINDS.get(recipe.kind)


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


T = TypeVar("T")
LoadModel: TypeAlias = Callable[[wire.ModelBoot, Path, ReportStep, RunOnDevice], LoadedModel]


def locate_model(boot: wire.ModelBoot) -> Path:
    """Return the folder of a model, after downloading what its load needs: weights, and code if permitted.

    Raises: ModelUnavailable, before it downloads weights if the small files suffice to refuse them.
    """

    def approve(folder: Path) -> None:
        own_code_of(boot, folder)

    folder = locate_checkpoint(boot.model, boot.revision, with_code=boot.trust_remote_code, approve=approve)
    code = own_code_of(boot, folder)
    if code is not None:
        locate_code(folder, code.classes, boot.code_revision)
    return folder


def describe_model(boot: wire.ModelBoot) -> Capabilities:
    """Return the capabilities of a model, read without its weights. Raises: ModelUnavailable."""
    return describe_folder(boot, locate_tokenizer(boot.model, boot.revision))


def describe_folder(boot: wire.ModelBoot, folder: Path) -> Capabilities:
    """Return the capabilities of a model whose small files are in a folder. Raises: ModelUnavailable."""
    found = describe(folder, boot.model, options_of(boot))
    return msgspec.structs.replace(found, notes=(*found.notes, *_ignored_settings(boot)))


def own_code_of(boot: wire.ModelBoot, folder: Path) -> OwnCode | None:
    """Return the code of its own that a model runs, None if it runs none. Raises: ModelUnavailable."""
    return trusted_code(network_folder(folder), options_of(boot))


def settings_of(boot: wire.ModelBoot) -> TaskSettings:
    """Return the settings of a model that override its files."""
    return TaskSettings(boot.task, boot.pooling, boot.rerank_template, boot.model, boot.adapter)


def estimate_bytes(boot: wire.ModelBoot, folder: Path) -> int:
    """Return the bytes of a model's weights once they are loaded. Raises: ModelUnavailable."""
    with refuse_on_error(f"the sizes of the weights in {folder} could not be read"):
        options, files = options_of(boot), CheckpointFiles(network_folder(folder))
        kind = recognize(files, options.settings)
        # Code of a checkpoint holds float32 before its layers are cast.
        runs_code = trusted_code(files.checkpoint, options) is not None
        dtype = torch.float32 if runs_code else served_dtype(files.checkpoint, options)
        sizes = sizes_of(files, kind, dtype)
        # Weights of 8 bits are made of those in the files, which are read first.
        held_first = sizes.file_bytes if dtype == torch.int8 else None
        found = max(sizes.memory_bytes or 0, held_first or 0) or sizes.file_bytes or 0
        # The other runtime holds float32, and its compiled form.
        return found + (2 * (sizes.file_bytes or 0) if options.runtime == "openvino" else 0)


def load_model(
    boot: wire.ModelBoot, folder: Path, report: ReportStep, run_on_device: RunOnDevice
) -> LoadedModel:
    """Load a model with its network.

    report: called with each step. run_on_device: runs its first batches. Raises: ModelUnavailable.
    """
    loaded = load(folder, boot.model, options_of(boot), report, run_on_device)
    found = loaded.capabilities
    found = msgspec.structs.replace(found, notes=(*found.notes, *_ignored_settings(boot)))
    return msgspec.structs.replace(loaded, capabilities=found)


def _ignored_settings(boot: wire.ModelBoot) -> Iterator[str]:
    """Yield a note for each setting that has no effect."""
    if boot.revision is not None and is_path(boot.model):
        yield "`revision` has no effect: the model is a folder, whose files are read as they are"
    if boot.compiled and not _may_compile(boot):
        yield "`compile` has no effect on a processor, where the engine is faster without it"


def _may_compile(boot: wire.ModelBoot) -> bool:
    """Return False on a processor, where compiled networks are 1.02 to 1.35 times as slow."""
    return best_device(boot.device).type != "cpu"


def options_of(boot: wire.ModelBoot) -> LoadOptions:
    """Return the settings of a model that its load takes."""
    return LoadOptions(
        boot.dtype,
        boot.device,
        boot.compiled and _may_compile(boot),
        boot.trust_remote_code,
        boot.code_revision,
        settings_of(boot),
        boot.tokenizer,
        boot.runtime,
    )


async def run_in_new_thread(function: Callable[[], T]) -> T:
    """Run a function once, on a thread that ends with it and has no OpenMP team.

    OpenMP keeps a team for every thread that computes, as long as the thread lives. A second team next to
    that of the forward passes makes both slow, and reading weights gains little from one.
    """
    future: Future[T] = Future()

    def run() -> None:
        threads_before = torch.get_num_threads()
        try:
            torch.set_num_threads(1)
            future.set_result(function())
        except BaseException as error:  # noqa: BLE001 - raised again where the result is awaited
            future.set_exception(error)
        finally:
            torch.set_num_threads(threads_before)

    Thread(target=run, name="load", daemon=True).start()
    return await asyncio.wrap_future(future)
