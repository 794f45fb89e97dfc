"""Loading of a model from its settings, on a thread that ends with the load."""

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from threading import Thread
from typing import TypeAlias, TypeVar

import msgspec
import torch

from backends.checkpoints.locations import locate_checkpoint, locate_code, locate_tokenizer
from backends.checkpoints.model_names import is_path
from backends.checkpoints.network_folder import network_folder
from backends.contract import Capabilities
from backends.recipe.files import CheckpointFiles
from backends.recipe.kinds import recognize
from backends.recipe.options import TaskSettings
from backends.torch import wire
from backends.torch.load.load_plan import LoadOptions, permitted_code
from backends.torch.load.loader import ReportStep, RunOnDevice, best_device, describe, load, served_dtype
from backends.torch.load.weight_sizes import sizes_of
from backends.torch.networks.own_code import OwnCode
from backends.torch.passes.loaded_model import LoadedModel
from backends.torch.refusals import refuse_on_error

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
    return permitted_code(network_folder(folder), options_of(boot))


def settings_of(boot: wire.ModelBoot) -> TaskSettings:
    """Return the settings of a model that override its files."""
    return TaskSettings(boot.task, boot.pooling, boot.rerank_template, boot.model, boot.adapter)


def estimate_bytes(boot: wire.ModelBoot, folder: Path) -> int:
    """Return the bytes of a model's weights once they are loaded. Raises: ModelUnavailable."""
    with refuse_on_error(f"the sizes of the weights in {folder} could not be read"):
        options, files = options_of(boot), CheckpointFiles(network_folder(folder))
        kind = recognize(files, options.settings)
        # Code of a checkpoint holds float32 before its layers are cast.
        runs_code = permitted_code(files.checkpoint, options) is not None
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
