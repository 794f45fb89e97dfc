"""Requests of operators about the models of this host, as the parent process carries them out.

Downloads and loads run on threads of their own, which go on when a worker restarts, and end with the
gateway.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from threading import Thread

from backends.torch import wire
from gateway.config.schema import Config
from gateway.processes.engine_process import smoke_load
from gateway.registry.models import ListedModel, Registry, RegistryError, used_models
from gateway.registry.records import Record, Records, RegistryBusy
from gateway.registry.requests import (
    ActOnModel,
    AddModel,
    ListModels,
    ModelCommand,
    ModelInfo,
    ModelProblem,
    ModelResult,
)

logger = logging.getLogger("gateway")

# A request returns after this time, whether its download or load is done or not.
WAIT_S = 20.0
LOAD_TIMEOUT_S = 600.0
# Downloads and loads at a time.
JOBS_MAX = 2
RECORDS_MAX = 1000


class ModelRequests:
    """Requests about models. config: returns the served configuration. folder: of the records."""

    def __init__(self, config: Callable[[], Config], folder: Path, environment: Mapping[str, str]) -> None:
        self._config = config
        self._records = Records(folder)
        self._environment = environment
        # By model: the download or load that runs.
        self._jobs: dict[str, asyncio.Future[ModelProblem | None]] = {}

    def _registry(self) -> Registry:
        config = self._config()
        return Registry(self._records, used_models(config.upstreams), config.registry.disk_bytes)

    async def run(self, command: ModelCommand) -> ModelResult:
        """Carry out a request and return its result."""
        registry = self._registry()
        try:
            match command:
                case ListModels():
                    return ModelResult(models=tuple(await self._listed(registry)))
                case AddModel(model):
                    return await self._add(registry, model)
                case ActOnModel(model, "get"):
                    return await self._described(registry, model)
                case ActOnModel(model, "download"):
                    return await self._run_job(registry, model, self._download)
                case ActOnModel(model, _):
                    return await self._run_job(registry, model, self._load)
        except RegistryError as error:
            return ModelResult(ModelProblem("VALIDATION_ERROR", str(error)))
        except OSError as error:
            return ModelResult(ModelProblem("UNAVAILABLE", f"`state_dir` cannot be used: {error.strerror}"))

    async def _listed(self, registry: Registry) -> list[ModelInfo]:
        return [_info_of(model) for model in await asyncio.to_thread(registry.models)]

    async def _described(self, registry: Registry, model: str) -> ModelResult:
        found = [info for info in await self._listed(registry) if info.model_id == model]
        if not found:
            return ModelResult(ModelProblem("MODEL_NOT_FOUND", f"Model '{model}' not found"))
        return ModelResult(models=tuple(found))

    async def _add(self, registry: Registry, model: str) -> ModelResult:
        known = await self._described(registry, model)
        if known.models:
            return known
        if len(self._records.read()) >= RECORDS_MAX:
            return ModelResult(
                ModelProblem("VALIDATION_ERROR", f"more than {RECORDS_MAX} models; remove some")
            )
        await asyncio.to_thread(registry.add, model)
        described = await self._described(registry, model)
        return ModelResult(models=described.models, is_new=True)

    async def _run_job(
        self, registry: Registry, model: str, job: Callable[[Registry, str], ModelProblem | None]
    ) -> ModelResult:
        """Run a job, or wait for the one that runs for this model; return the model's state after a while."""
        future = self._jobs.get(model)
        if future is None:
            if len(self._jobs) >= JOBS_MAX:
                message = f"{JOBS_MAX} downloads or loads run already; try again later"
                return ModelResult(ModelProblem("UNAVAILABLE", message))
            future = self._start(model, lambda: job(registry, model))
        await asyncio.wait([future], timeout=WAIT_S)
        if future.done() and (problem := future.result()) is not None:
            return ModelResult(problem)
        return await self._described(registry, model)

    def _start(
        self, model: str, job: Callable[[], ModelProblem | None]
    ) -> "asyncio.Future[ModelProblem | None]":
        loop = asyncio.get_running_loop()
        future: asyncio.Future[ModelProblem | None] = loop.create_future()
        self._jobs[model] = future
        future.add_done_callback(lambda _: self._jobs.pop(model, None))

        def run() -> None:
            try:
                problem = job()
            except Exception as error:
                logger.exception("a request about the model %s failed", model)
                problem = ModelProblem("UNAVAILABLE", f"the request failed: {type(error).__name__}")
            # The loop is closed once the gateway has stopped.
            if not loop.is_closed():
                loop.call_soon_threadsafe(future.set_result, problem)

        # A thread of an executor would keep the process from ending.
        Thread(target=run, name=f"registry-{model}", daemon=True).start()
        return future

    def _download(self, registry: Registry, model: str) -> ModelProblem | None:
        try:
            registry.pull(model, None, lambda *_: None)
        except (RegistryError, RegistryBusy, OSError) as error:
            message = f"Failed to download model '{model}': {error}"
            return ModelProblem("MODEL_DOWNLOAD_FAILED", message)
        return None

    def _load(self, registry: Registry, model: str) -> ModelProblem | None:
        def load(name: str, commit: str | None) -> wire.SmokeLoad:
            return smoke_load(wire.ModelBoot("model", name, commit), LOAD_TIMEOUT_S, self._environment)

        try:
            registry.verify(model, load)
        except (RegistryError, RegistryBusy, OSError) as error:
            return ModelProblem("MODEL_LOAD_FAILED", f"Model '{model}' failed to load: {error}")
        return None


def _info_of(model: ListedModel) -> ModelInfo:
    record = model.record or Record(model.state)
    return ModelInfo(
        model.model,
        model.state,
        model.stored_bytes > 0,
        _time_text(record.at_s) if record.at_s else None,
        model.stored_bytes,
        record.error if model.state == "failed" else None,
        record.done_bytes if model.state == "downloading" else None,
        record.total_bytes if model.state == "downloading" else None,
        record.bytes_per_s if model.state == "downloading" else None,
        record.dimensions if model.state == "verified" else None,
        record.load_s if model.state == "verified" else None,
        model.configured,
    )


def _time_text(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")
