"""How the engine of a torch upstream is started: by the parent for as long as the gateway runs, and by a
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
from gateway.child import Child
from gateway.config import Upstream

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


def engine_child(
    name: str,
    settings: Upstream,
    socket_path: str,
    environment: Mapping[str, str],
    report: Callable[[wire.State], None],
) -> Child:
    """The process of an upstream's engine, not started yet. environment: as `child_environment` gives it."""
    assert settings.model is not None
    model = settings.model

    def boot(status_fd: int) -> bytes:
        return msgspec.json.encode(
            wire.Boot(
                name=name,
                model=model,
                socket_path=socket_path,
                status_fd=status_fd,
                revision=settings.revision,
                dtype=settings.dtype,
                device=settings.device,
                compiled=settings.compile,
                task=settings.task,
                pooling=settings.pooling,
                trust_remote_code=settings.trust_remote_code,
                batch_tokens=settings.batch_tokens,
            )
        )

    def said(line: bytes) -> None:
        report(msgspec.json.decode(line, type=wire.State))

    return Child(
        f"engine {name}", "backends.torch.server", boot, said, (), {**ENGINE_VARIABLES, **environment}
    )


@asynccontextmanager
async def running_engine(name: str, settings: Upstream, environment: Mapping[str, str]) -> AsyncIterator[str]:
    """An engine that has loaded, by the path of its socket; it ends with the block.

    Raises: EngineFailed. Who enters bounds how long it may load.
    """
    ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def report(said: wire.State) -> None:
        if ready.done():
            return
        if said.state == "ready":
            ready.set_result(None)
        elif said.state == "failed":
            ready.set_exception(EngineFailed(said.detail))

    with tempfile.TemporaryDirectory(prefix="gateway-", ignore_cleanup_errors=True) as folder:
        path = f"{folder}/engine.sock"
        child = engine_child(name, settings, path, child_environment(environment), report)
        running = asyncio.create_task(child.keep_running())
        try:
            await ready
            yield path
        finally:
            await child.stop(signal.SIGTERM, KILL_AFTER_S)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
