"""From what the parent says of a model to the model, on a thread that ends with it."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from threading import Thread
from typing import TypeAlias, TypeVar

import torch

from backends.checkpoints import locate_tokenizer
from backends.contract import Capabilities
from backends.torch import wire
from backends.torch.kinds import Said
from backends.torch.loader import Loaded, describe, load

T = TypeVar("T")
There: TypeAlias = Callable[[Callable[[], int]], int]
Opens: TypeAlias = Callable[[wire.ModelBoot, Path, Callable[[str], None], There], Loaded]


def described(boot: wire.ModelBoot) -> Capabilities:
    """What a model will be able to do, told without its weights. Raises: ModelUnavailable."""
    folder = locate_tokenizer(boot.model, boot.revision)
    return describe(folder, boot.model, boot.dtype, boot.device, Said(boot.task, boot.pooling))


def opened(boot: wire.ModelBoot, folder: Path, report: Callable[[str], None], there: There) -> Loaded:
    """A model with its network. there: where its first batches run. Raises: ModelUnavailable."""
    return load(
        folder,
        boot.model,
        dtype=boot.dtype,
        device=boot.device,
        compiled=boot.compiled,
        said=Said(boot.task, boot.pooling),
        trusted=boot.trust_remote_code,
        report=report,
        there=there,
    )


async def in_a_thread_of_its_own(function: Callable[[], T]) -> T:
    """Run there what is done once: OpenMP keeps a team for every thread that computes until it ends.

    Here it gets none: one beside that of the forward passes makes both slow, and reading weights gains
    little by it.
    """
    future: Future[T] = Future()

    def run() -> None:
        every = torch.get_num_threads()
        try:
            torch.set_num_threads(1)
            future.set_result(function())
        except BaseException as error:  # noqa: BLE001 - it is raised where the result is asked for
            future.set_exception(error)
        finally:
            torch.set_num_threads(every)

    Thread(target=run, name="load", daemon=True).start()
    return await asyncio.wrap_future(future)
