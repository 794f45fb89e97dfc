"""Requests of operators about the models of this host, as the parent process carries them out.

Downloads and loads run on threads of their own, which go on when a worker restarts, and end with the gateway.
A trial load has a process of its own.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from threading import Thread

from backends.torch import wire
from gateway.config.schema import Config
from gateway.declared.checkpoints import (
    ListedModel,
    Records,
    Registry,
    RegistryBusy,
    RegistryError,
    used_models,
)
from gateway.declared.host import (
    AddModel,
    CheckpointRecord,
    HostResult,
    ListModels,
    ModelCommand,
    ModelInfo,
    Refused,
    timestamp,
)
from gateway.processes.engine_process import NoResult, run_on_model

logger = logging.getLogger("gateway")

# A request returns after this time, whether its download or load is done or not.
WAIT_S = 20.0
LOAD_TIMEOUT_S = 600.0
# Downloads and loads at a time.
JOBS_MAX = 2
RECORDS_MAX = 1000
MODULE = "backends.torch.serving.smoke"


class ModelRequests:
    """Requests about models. config: returns the served configuration. folder: of the records."""

    def __init__(self, config: Callable[[], Config], folder: Path, environment: Mapping[str, str]) -> None:
        self._config = config
        self._records = Records(folder)
        self._environment = environment
        # By model: the download or load that runs.
        self._jobs: dict[str, asyncio.Future[Refused | None]] = {}

    async def run(self, command: ModelCommand) -> HostResult:
        """Carry out a request and return its result."""
        try:
            return await self._run(command)
        except Refused as refused:
            return refused.result
        except RegistryError as error:
            return Refused("VALIDATION_ERROR", str(error)).result
        except OSError as error:
            return Refused("UNAVAILABLE", f"`state_dir` cannot be used: {error.strerror}").result

    async def _run(self, command: ModelCommand) -> HostResult:
        config = self._config()
        registry = Registry(self._records, used_models(config.upstreams), config.registry.disk_bytes)
        if isinstance(command, ListModels):
            return HostResult(models=tuple(map(_info_of, await asyncio.to_thread(registry.models))))
        model, is_new = command.model_id, False
        if isinstance(command, AddModel):
            is_new = await self._add(registry, model)
        elif command.action == "load" and await self._find(registry, model) is None:
            raise _not_found(model)
        elif command.action != "get":
            await self._run_job(registry, model, command.action)
        found = await self._find(registry, model)
        if found is None:
            raise _not_found(model)
        return HostResult(models=(found,), is_new=is_new)

    async def _find(self, registry: Registry, model: str) -> ModelInfo | None:
        listed = await asyncio.to_thread(registry.models)
        return next((_info_of(found) for found in listed if found.model == model), None)

    async def _add(self, registry: Registry, model: str) -> bool:
        """List a model, and return whether it is new. Raises: Refused, RegistryError, OSError."""
        if await self._find(registry, model) is not None:
            return False
        if len(self._records.read()) >= RECORDS_MAX:
            raise Refused("VALIDATION_ERROR", f"more than {RECORDS_MAX} models; remove some")
        await asyncio.to_thread(registry.add, model)
        return True

    async def _run_job(self, registry: Registry, model: str, action: str) -> None:
        """Run a job, or wait a while for the one that runs for this model. Raises: Refused."""
        future = self._jobs.get(model)
        if future is None:
            if len(self._jobs) >= JOBS_MAX:
                raise Refused("UNAVAILABLE", f"{JOBS_MAX} downloads or loads run already; try again later")
            future = self._start(registry, model, action)
        await asyncio.wait([future], timeout=WAIT_S)
        if future.done() and (refused := future.result()) is not None:
            raise refused

    def _start(self, registry: Registry, model: str, action: str) -> "asyncio.Future[Refused | None]":
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Refused | None] = loop.create_future()
        self._jobs[model] = future
        future.add_done_callback(lambda _: self._jobs.pop(model, None))

        def run() -> None:
            refused = None
            try:
                self._work(registry, model, action)
            except Refused as error:
                refused = error
            except Exception as error:
                logger.exception("a request about the model %s failed", model)
                refused = Refused("UNAVAILABLE", f"the request failed: {type(error).__name__}")
            # The loop is closed once the gateway has stopped.
            if not loop.is_closed():
                loop.call_soon_threadsafe(future.set_result, refused)

        # A thread of an executor would keep the process from ending.
        Thread(target=run, name=f"registry-{model}", daemon=True).start()
        return future

    def _work(self, registry: Registry, model: str, action: str) -> None:
        """Download or load a model. Raises: Refused."""

        def load(name: str, commit: str | None) -> wire.SmokeLoad:
            return smoke_load(wire.ModelBoot("model", name, commit), LOAD_TIMEOUT_S, self._environment)

        try:
            if action == "download":
                registry.pull(model, None, lambda *_: None)
            else:
                registry.verify(model, load)
        except (RegistryError, RegistryBusy, OSError) as error:
            if action == "download":
                message = f"Failed to download model '{model}': {error}"
                raise Refused("MODEL_DOWNLOAD_FAILED", message) from error
            raise Refused("MODEL_LOAD_FAILED", f"Model '{model}' failed to load: {error}") from error


def _info_of(model: ListedModel) -> ModelInfo:
    record = model.record or CheckpointRecord(model.state)
    is_downloading, is_verified = model.state == "downloading", model.state == "verified"
    return ModelInfo(
        model.model,
        model.state,
        model.stored_bytes > 0,
        timestamp(record.at_s) if record.at_s else None,
        model.stored_bytes,
        record.error if model.state == "failed" else None,
        record.done_bytes if is_downloading else None,
        record.total_bytes if is_downloading else None,
        record.bytes_per_s if is_downloading else None,
        record.dimensions if is_verified else None,
        record.load_s if is_verified else None,
        model.configured,
    )


def _not_found(model: str) -> Refused:
    return Refused("MODEL_NOT_FOUND", f"Model '{model}' not found")


def smoke_load(boot: wire.ModelBoot, timeout_s: float, environment: Mapping[str, str]) -> wire.SmokeLoad:
    """Load a model in a process of its own."""
    try:
        return run_on_model(MODULE, boot, wire.SmokeLoad, timeout_s, {**environment, "HF_HUB_OFFLINE": "1"})
    except NoResult as error:
        return wire.SmokeLoad(str(error))
