"""Start of engine processes for torch upstreams, and their liveness.

The parent runs engines for as long as the gateway runs, and commands run one for as long as they need it.
"""

import asyncio
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from importlib.util import find_spec
from typing import TypeVar

import msgspec

from backends.kinds import KINDS
from backends.torch import wire
from gateway.config.schema import Config, EngineSettings, UpstreamSettings
from gateway.config.state_folder import home_for_libraries
from gateway.events import EndReason
from gateway.processes.child import Child, ChildSpec

# Variables that Python, the Hub's tools and the numeric libraries read.
CHILD_VARIABLES = re.compile(
    r"(PATH|HOME|USER|LANG|LC_\w+|TZ|TMPDIR|TERM|LD_LIBRARY_PATH|VIRTUAL_ENV|PYTHON\w*|SSL_CERT_\w+|XDG_\w+"
    r"|HF_\w+|HUGGINGFACE_\w+|TRANSFORMERS_\w+|TOKENIZERS_\w+|TORCH\w*|CUDA_\w+|NVIDIA_\w+|OMP_\w+|GOMP_\w+"
    r"|KMP_\w+|MKL_\w+|ONEDNN_\w+|GLIBC_TUNABLES|https?_proxy|HTTPS?_PROXY|no_proxy|NO_PROXY|all_proxy|ALL_PROXY)$"
)
# How long a thread of the engine spins at a barrier before it sleeps: about 30 µs, enough to span the gap to
# the next operation. OpenMP's default is milliseconds, during which the HTTP worker lacks that core.
# From version 2.35, glibc asks the kernel for pages of 2 MiB, which make reading the weights cheaper:
# loadtest/measurements/passes.md.
# Processes that torch starts import nothing from the current folder either.
ENGINE_VARIABLES = {
    "GOMP_SPINCOUNT": "10000",
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    "PYTHONSAFEPATH": "1",
}
# Time for a child to exit after a signal before it is killed.
KILL_AFTER_S = 5.0
NO_ENGINE = (
    "the built-in engine is not installed: it needs torch and transformers. `make install` installs them; "
    "see requirements/torch.txt"
)
Result = TypeVar("Result")


class NoResult(Exception):
    """A process that should have examined a model ended without a result; the message says why."""


class EngineFailed(Exception):
    """The engine cannot load its model; the message gives the reason."""


def child_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Select the variables that a child inherits.

    Keys of upstreams and callers are left out, because other processes can read a child's environment.
    """
    inherited = {name: value for name, value in environment.items() if CHILD_VARIABLES.match(name)}
    return inherited | home_for_libraries(environment)


def worker_environment(environment: Mapping[str, str], config: Config) -> dict[str, str]:
    """Select the variables that a worker inherits: also those with the credentials of its clouds.

    Others are left out, because libraries read them too: that of a bucket would sign with AWS' session token.
    """
    starts = tuple(
        start for upstream in config.upstreams.values() for start in KINDS[upstream.backend].variables
    )
    own = {name: value for name, value in environment.items() if name.startswith(starts)} if starts else {}
    return child_environment(environment) | own


def run_on_model(
    module: str, boot: wire.ModelBoot, kind: type[Result], timeout_s: float, environment: Mapping[str, str]
) -> Result:
    """Return the result of a module of the engine for a model, in a process of its own. Raises: NoResult."""
    if find_spec("torch") is None or find_spec("transformers") is None:
        raise NoResult(NO_ENGINE)
    try:
        ended = subprocess.run(
            [sys.executable, "-P", "-m", module],
            input=msgspec.json.encode(boot),
            capture_output=True,
            timeout=timeout_s,
            env=child_environment(environment),
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise NoResult(f"no result within {timeout_s:.0f} s; give more with --timeout") from error
    if ended.returncode:
        reasons = ended.stderr.decode(errors="replace").splitlines() or [f"exit status {ended.returncode}"]
        raise NoResult(f"the process for it failed: {reasons[-1]}")
    # Code of a model may print before the result, which is the last line.
    lines = ended.stdout.splitlines()
    try:
        return msgspec.json.decode(lines[-1] if lines else b"", type=kind)
    except msgspec.DecodeError as error:
        raise NoResult("the process for it ended without a result") from error


class EngineGroup(msgspec.Struct, frozen=True):
    """The upstreams of one engine process, by name, and the path of its socket."""

    name: str
    socket_path: str
    upstreams: Mapping[str, UpstreamSettings]

    @property
    def addresses(self) -> dict[str, str]:
        """Upstream name → address of its model."""
        return {name: wire.address_of(self.socket_path, name) for name in self.upstreams}

    def child(
        self,
        bounds: EngineSettings,
        environment: Mapping[str, str],
        on_state: Callable[[wire.State], None],
        on_exit: Callable[[EndReason, str], None] = lambda _, __: None,
    ) -> Child:
        """Create the engine process without starting it. environment: from `child_environment`.

        After a restart it loads the models that were loaded when it exited.
        """
        preload = {name: settings.preload for name, settings in self.upstreams.items()}

        def boot(status_fd: int) -> bytes:
            models = tuple(
                _model_boot(name, settings, preload=preload[name])
                for name, settings in self.upstreams.items()
            )
            return msgspec.json.encode(
                wire.EngineBoot(self.socket_path, status_fd, models, bounds.memory_bytes, bounds.idle_s)
            )

        def on_line(line: bytes) -> None:
            state = msgspec.json.decode(line, type=wire.State)
            if state.state in {"loaded", "unloaded"}:
                preload[state.model] = state.state == "loaded"
            on_state(state)

        spec = ChildSpec(self.name, "backends.torch.serving.server", {**ENGINE_VARIABLES, **environment})
        return Child(spec, boot, on_line, on_exit)


def model_boots(upstreams: Mapping[str, UpstreamSettings]) -> dict[str, wire.ModelBoot]:
    """Return the settings of each upstream's model; all other settings concern only its lane."""
    return {
        name: _model_boot(name, settings, preload=settings.preload) for name, settings in upstreams.items()
    }


def _model_boot(name: str, settings: UpstreamSettings, *, preload: bool) -> wire.ModelBoot:
    assert settings.model is not None
    return wire.ModelBoot(
        name=name,
        model=settings.model,
        revision=settings.revision,
        dtype=settings.dtype,
        # Where several processes share the work, each has settings with one device.
        device=settings.first_device,
        compiled=settings.compile,
        runtime=settings.runtime,
        task=settings.task,
        pooling=settings.pooling,
        rerank_template=settings.rerank_template,
        adapter=settings.adapter,
        trust_remote_code=settings.trust_remote_code,
        code_revision=settings.code_revision,
        tokenizer=settings.tokenizer_settings,
        batch_tokens=settings.request_tokens,
        preload=preload,
        waits=settings.when_loading == "wait",
    )


@asynccontextmanager
async def running_engine(
    name: str, settings: UpstreamSettings, environment: Mapping[str, str]
) -> AsyncIterator[str]:
    """Run an engine for one upstream and yield the address of its loaded model.

    The caller bounds the time that loading may take. Raises: EngineFailed.
    """
    loaded: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def on_state(state: wire.State) -> None:
        if loaded.done():
            return
        if state.state == "loaded":
            loaded.set_result(None)
        elif state.state == "failed":
            loaded.set_exception(EngineFailed(state.detail))

    with tempfile.TemporaryDirectory(prefix="gateway-", ignore_cleanup_errors=True) as folder:
        preloaded = msgspec.structs.replace(settings, preload=True)
        group = EngineGroup(f"engine {name}", f"{folder}/engine.sock", {name: preloaded})
        child = group.child(EngineSettings(), child_environment(environment), on_state)
        running = asyncio.create_task(child.keep_running())
        try:
            await loaded
            yield group.addresses[name]
        finally:
            await child.stop(signal.SIGTERM, KILL_AFTER_S)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


# An engine's event loop shares its process with threads that compute and load, and may respond slowly.
CHECK_EVERY_S = 5.0


async def responds(socket_path: str) -> bool:
    """Return True if the engine's event loop answers a request."""
    try:
        async with asyncio.timeout(CHECK_EVERY_S):
            reader, writer = await asyncio.open_unix_connection(socket_path)
            writer.write(b"GET /info HTTP/1.1\r\nhost: engine\r\nconnection: close\r\n\r\n")
            has_response = bool(await reader.read(1))
            writer.close()
            return has_response
    except (OSError, TimeoutError):
        return False
