"""How the engine of torch upstreams is started: by the parent for as long as the gateway runs, and by a
command for as long as it has questions.
"""

import asyncio
import re
import signal
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

import msgspec

from backends.torch import wire
from gateway.config.schema import EngineSettings, UpstreamSettings
from gateway.events import EndReason
from gateway.processes.child import Child

# What Python, the Hub's tools and the numeric libraries read.
CHILD_VARIABLES = re.compile(
    r"(PATH|HOME|USER|LANG|LC_\w+|TZ|TMPDIR|TERM|LD_LIBRARY_PATH|VIRTUAL_ENV|PYTHON\w*|SSL_CERT_\w+|XDG_\w+"
    r"|HF_\w+|HUGGINGFACE_\w+|TRANSFORMERS_\w+|TOKENIZERS_\w+|TORCH\w*|CUDA_\w+|NVIDIA_\w+|OMP_\w+|GOMP_\w+|KMP_\w+"
    r"|MKL_\w+|ONEDNN_\w+|https?_proxy|HTTPS?_PROXY|no_proxy|NO_PROXY)$"
)
# How long a thread of the engine spins at a barrier before it sleeps: some 30 µs, enough to span the gap to
# the next operation. OpenMP's own default is milliseconds, which it takes from the HTTP worker beside it.
ENGINE_VARIABLES = {"GOMP_SPINCOUNT": "10000"}
# How long a child may take to end before it is killed.
KILL_AFTER_S = 5.0


class EngineFailed(Exception):
    """The engine cannot load its model; the message says why."""


def child_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Keys of upstreams and callers stay out of it: a child's environment can be read from outside."""
    return {name: value for name, value in environment.items() if CHILD_VARIABLES.match(name)}


class Group(msgspec.Struct, frozen=True):
    """The torch upstreams of one process, by their names, and where its socket is."""

    name: str
    socket_path: str
    upstreams: Mapping[str, UpstreamSettings]

    @property
    def addresses(self) -> dict[str, str]:
        """Where each upstream's model is."""
        return {name: wire.address_of(self.socket_path, name) for name in self.upstreams}


def engine_child(
    group: Group,
    bounds: EngineSettings,
    environment: Mapping[str, str],
    report: Callable[[wire.State], None],
    ended: Callable[[EndReason, str], None] = lambda _, __: None,
) -> Child:
    """The process of some upstreams' engine, not started yet. environment: as `child_environment` gives it.

    Started again, it loads what was loaded when it died.
    """
    wanted = {name: one.preload for name, one in group.upstreams.items()}

    def boot(status_fd: int) -> bytes:
        return msgspec.json.encode(
            wire.Boot(
                group.socket_path,
                status_fd,
                tuple(_model_boot(name, one, preload=wanted[name]) for name, one in group.upstreams.items()),
                bounds.memory_bytes,
                bounds.idle_s,
            )
        )

    def said(line: bytes) -> None:
        told = msgspec.json.decode(line, type=wire.State)
        if told.state in {"loaded", "unloaded"}:
            wanted[told.model] = told.state == "loaded"
        report(told)

    variables = {**ENGINE_VARIABLES, **environment}
    return Child(group.name, "backends.torch.server", boot, said, (), variables, ended)


def model_boots(upstreams: Mapping[str, UpstreamSettings]) -> dict[str, wire.ModelBoot]:
    """What an engine is told of each upstream's model; all else of an upstream concerns its lane."""
    return {name: _model_boot(name, one, preload=one.preload) for name, one in upstreams.items()}


def _model_boot(name: str, settings: UpstreamSettings, *, preload: bool) -> wire.ModelBoot:
    assert settings.model is not None
    return wire.ModelBoot(
        name=name,
        model=settings.model,
        revision=settings.revision,
        dtype=settings.dtype,
        device=settings.device,
        compiled=settings.compile,
        task=settings.task,
        pooling=settings.pooling,
        trust_remote_code=settings.trust_remote_code,
        batch_tokens=settings.batch_tokens,
        preload=preload,
        waits=settings.when_loading == "wait",
    )


@asynccontextmanager
async def running_engine(
    name: str, settings: UpstreamSettings, environment: Mapping[str, str]
) -> AsyncIterator[str]:
    """An engine that has loaded an upstream's model, by the model's address; it ends with the block.

    Raises: EngineFailed. Who enters bounds how long it may load.
    """
    ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def report(said: wire.State) -> None:
        if ready.done():
            return
        if said.state == "loaded":
            ready.set_result(None)
        elif said.state == "failed":
            ready.set_exception(EngineFailed(said.detail))

    with tempfile.TemporaryDirectory(prefix="gateway-", ignore_cleanup_errors=True) as folder:
        loaded = msgspec.structs.replace(settings, preload=True)
        group = Group(f"engine {name}", f"{folder}/engine.sock", {name: loaded})
        child = engine_child(group, EngineSettings(), child_environment(environment), report)
        running = asyncio.create_task(child.keep_running())
        try:
            await ready
            yield group.addresses[name]
        finally:
            await child.stop(signal.SIGTERM, KILL_AFTER_S)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
