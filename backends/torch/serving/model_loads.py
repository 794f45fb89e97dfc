"""Loads of the models of one engine process, one at a time.

Rule: only the event loop's thread touches it; reading weights happens on a thread that ends with the load.
"""

import asyncio
import logging
from functools import partial
from pathlib import Path

import torch

from backends.contract.errors import ModelUnavailable
from backends.torch import memory, wire
from backends.torch.load.loader import RunOnDevice, best_device, require_device
from backends.torch.load.loading import (
    LoadModel,
    describe_model,
    estimate_bytes,
    locate_model,
    run_in_new_thread,
)
from backends.torch.passes.engine import Engine
from backends.torch.passes.loaded_model import LoadedModel
from backends.torch.passes.threads import ForwardThreads
from backends.torch.refusals import describe_error
from backends.torch.serving.hosted_model import HostedModel, PendingLoad
from backends.torch.serving.memory_budget import MemoryBudget, megabytes

logger = logging.getLogger(__name__)


class ModelLoads:
    """Loads models into a memory budget. load_model: creates one, on a thread of its own."""

    def __init__(self, budget: MemoryBudget, load_model: LoadModel) -> None:
        self._budget = budget
        self._load_model = load_model
        self._loop = asyncio.get_running_loop()
        self._threads: dict[torch.device, ForwardThreads] = {}
        self._one_load = asyncio.Lock()

    async def has_room(self, model: HostedModel) -> bool:
        """Return whether a model could be loaded without evicting another."""
        try:
            needed_bytes = await self._needed_bytes(model, await self._folder(model))
        except ModelUnavailable as error:
            self._fail(model, error.message)
            return False
        # A model that does not fit even alone is to be loaded: the load reports why it cannot be.
        return not self._budget.to_evict(needed_bytes)

    async def describe(self, model: HostedModel) -> None:
        """Read the capabilities of a model that is not loaded."""
        try:
            model.capabilities = await asyncio.to_thread(describe_model, model.boot)
        except ModelUnavailable as error:
            if model.error is None:
                self._fail(model, error.message)
        else:
            if model.error is None:
                self._budget.report(model, "unloaded", "it is loaded when it is asked for")

    async def load(self, model: HostedModel, pending: PendingLoad) -> None:
        """Load a model; the work that waits holds it when this returns. Raises: ModelUnavailable."""
        try:
            # Before a download that would be in vain.
            require_device(model.boot.device)
            self._budget.report(model, "loading", f"looking for {model.boot.model}")
            # Outside the lock: other models need not wait for a download.
            folder = await self._folder(model)
            async with self._one_load:
                # A model that was about to be evicted may still be loaded.
                if model.engine is None:
                    await self._budget.make_room(await self._needed_bytes(model, folder))
                    await self._install(model, await self._open(model, folder))
                model.in_flight += pending.waiting
                pending.granted = True
        except ModelUnavailable as error:
            self._fail(model, error.message)
            raise
        except Exception as error:
            logger.exception("loading %s failed", model.boot.name)
            message = f"loading the model failed: {describe_error(error)}"
            self._fail(model, message)
            raise ModelUnavailable(message) from error
        finally:
            model.pending = None
            # A load leaves as much garbage behind as the model itself holds.
            await asyncio.to_thread(memory.release_to_system)

    async def _folder(self, model: HostedModel) -> Path:
        if model.folder is None:
            model.folder = await asyncio.to_thread(locate_model, model.boot)
        return model.folder

    async def _needed_bytes(self, model: HostedModel, folder: Path) -> int:
        """Return the memory that a load may take: its weights as they are held, or what it held last time."""
        return max(model.memory_bytes, await asyncio.to_thread(estimate_bytes, model.boot, folder))

    async def _open(self, model: HostedModel, folder: Path) -> LoadedModel:
        """Open the checkpoint, a second time after other models made room. Raises: ModelUnavailable."""

        def report(detail: str) -> None:
            self._budget.report(model, "loading", detail)

        opening = partial(self._load_model, model.boot, folder, report, self._run_on_device(model.boot))
        try:
            return await run_in_new_thread(opening)
        except Exception as error:
            if not memory.is_exhausted(error):
                raise
        await self._budget.relieve(model)
        try:
            return await run_in_new_thread(opening)
        except Exception as error:
            if not memory.is_exhausted(error):
                raise
            raise ModelUnavailable("there is not enough memory to load it") from error

    async def _install(self, model: HostedModel, loaded: LoadedModel) -> None:
        """Put an engine in front of the loaded model. Raises: ModelUnavailable if it is too large."""
        words = loaded.preparer.tokenizer.vocabulary_size
        model.memory_bytes = memory.held_bytes(loaded.head) + words * memory.TOKENIZER_BYTES_PER_WORD
        await self._budget.make_room(model.memory_bytes)
        model.engine = Engine(
            loaded,
            batch_tokens=model.batch_tokens(loaded),
            queue_tokens=model.boot.queue_tokens,
            threads=self._threads_of(model.boot),
            relieve=partial(self._budget.relieve_from_thread, model),
            recorder=model.recorder,
        )
        model.capabilities = loaded.capabilities
        model.used_s = self._loop.time()
        model.error = None
        model.loads += 1
        detail = f"{loaded.capabilities.dtype}, {megabytes(model.memory_bytes)}"
        self._budget.report(model, "loaded", detail)

    def _fail(self, model: HostedModel, message: str) -> None:
        model.failed(message, self._loop.time())
        self._budget.report(model, "failed", message)

    def _threads_of(self, boot: wire.ModelBoot) -> ForwardThreads:
        device = best_device(boot.device)
        if device not in self._threads:
            self._threads[device] = ForwardThreads(device)
        return self._threads[device]

    def _run_on_device(self, boot: wire.ModelBoot) -> RunOnDevice:
        """Return what runs a model's first batches, and compiles them."""
        threads = self._threads_of(boot)
        return lambda warm_up: threads.warm_up(warm_up).result()
