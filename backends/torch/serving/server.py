"""Engine process: reads its boot message, loads its models and serves them on a Unix socket.

Rule: it lives as long as the parent's pipe; end of file on standard input ends it at once.
"""

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from threading import Thread
from typing import Any

import msgspec
import torch
import uvicorn
import uvloop

from backends.contract.errors import (
    AttemptTimedOut,
    BackendError,
    ModelNotLoaded,
    ReplicaFailed,
    ReplicaOverloaded,
)
from backends.torch import wire
from backends.torch.memory import keep_freed
from backends.torch.serving.memory_budget import Report
from backends.torch.serving.model_host import ModelHost
from backends.torch.stats import Stopwatch
from backends.tracing import PHASES_HEADER, is_sampled

Message = Mapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = Sequence[tuple[bytes, bytes]]


class EngineApp:
    """ASGI application with four paths below each model's name.

    POST /run takes a `wire.Request`. GET /info returns the model's capabilities, GET /residence whether it is
    in memory, GET /stats its statistics.
    """

    def __init__(self, models: ModelHost) -> None:
        self._models = models

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer one request."""
        # Names may contain slashes; the last segment is the action.
        name, _, action = scope["path"].removeprefix("/").rpartition("/")
        if name not in self._models:
            await _answer(send, 404, b"")
        elif action == "run":
            body = await _body(receive)
            await _answer(send, *await self._run(name, body, receive, recorded=_is_recorded(scope)))
        elif action == "stats":
            await _answer(send, 200, wire.encoder.encode(self._models.stats(name)))
        elif action == "info":
            capabilities = self._models.capabilities(name)
            await _answer(send, 503 if capabilities is None else 200, wire.encoder.encode(capabilities))
        else:
            await _answer(send, 200, wire.encoder.encode(self._models.residence(name)))

    async def _run(
        self, name: str, body: bytes, receive: Receive, *, recorded: bool
    ) -> tuple[int, bytes, Headers]:
        try:
            request = wire.request_decoder.decode(body)
            return await self._run_request(name, request, receive, recorded=recorded)
        except BackendError as error:
            refusal = error
        except TimeoutError:
            is_loading = self._models.residence(name).state == "loading"
            late = AttemptTimedOut("the engine did not finish in time")
            refusal = ModelNotLoaded("the model is still loading") if is_loading else late
        except msgspec.DecodeError as error:
            refusal = ReplicaFailed(f"the engine could not read the request: {error}")
        self._models.recorder(name).failed(refusal.kind)
        return *_refusal_reply(refusal), ()

    async def _run_request(
        self, name: str, request: wire.Request, receive: Receive, *, recorded: bool
    ) -> tuple[int, bytes, Headers]:
        recorder, stopwatch = self._models.recorder(name), Stopwatch()
        recorder.began(request.work)
        async with asyncio.timeout(request.timeout_s):
            reply = await _while_connected(self._models.run(name, request.work, stopwatch), receive)
        recorder.finished(request.work, stopwatch)
        phases = stopwatch.phases
        headers: Headers = ()
        if recorded and phases is not None:
            headers = ((PHASES_HEADER.encode(), msgspec.json.encode(phases)),)
        return 200, wire.encoder.encode(reply), headers


def _is_recorded(scope: Message) -> bool:
    return any(name == b"traceparent" and is_sampled(value) for name, value in scope["headers"])


async def _while_connected(work: Awaitable[Any], receive: Receive) -> Any:
    """Wait for the reply, or stop when the gateway disconnects, because no one would read it."""
    running = asyncio.ensure_future(work)
    disconnect = asyncio.ensure_future(receive())
    try:
        await asyncio.wait({running, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            raise ReplicaOverloaded("the caller has disconnected")
        return running.result()
    finally:
        running.cancel()
        disconnect.cancel()


def _refusal_reply(error: BackendError) -> tuple[int, bytes]:
    status = 400 if error.source == "caller" else 503
    return status, wire.encoder.encode(wire.Refusal(error.kind, error.message, error.input_index))


async def _body(receive: Receive) -> bytes:
    chunks = []
    while True:
        message = await receive()
        chunks.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(chunks)


async def _answer(send: Send, status: int, body: bytes, extra: Headers = ()) -> None:
    headers = [(b"content-type", wire.MEDIA_TYPE.encode()), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": [*headers, *extra]})
    await send({"type": "http.response.body", "body": body})


def main() -> None:
    """Run the engine process."""
    if not torch.cuda.is_available():
        keep_freed()
    # The parent handles the terminal's Ctrl-C, and stops its children itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _write_warnings()
    boot = msgspec.json.decode(sys.stdin.buffer.readline(), type=wire.EngineBoot)
    Thread(target=_end_with_parent, args=(boot.socket_path,), daemon=True).start()

    def report(state: wire.State) -> None:
        # The parent may just have ended; then this process ends with its pipe.
        with contextlib.suppress(OSError):
            os.write(boot.status_fd, msgspec.json.encode(state) + b"\n")

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(boot, report))


class _JsonLines(logging.Formatter):
    """Lines in the gateway's form, for a log that programs read."""

    def format(self, record: logging.LogRecord) -> str:
        """Return one JSON object."""
        fields = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "event": "line",
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(fields).decode()


def _write_warnings() -> None:
    """Write warnings to standard error: as text on a terminal, and as JSON elsewhere."""
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    if not sys.stderr.isatty():
        for handler in logging.getLogger().handlers:
            handler.setFormatter(_JsonLines())
    logging.captureWarnings(capture=True)


async def _serve(boot: wire.EngineBoot, report: Report) -> None:
    models = ModelHost(boot, report)
    config = uvicorn.Config(
        EngineApp(models),
        uds=boot.socket_path,
        lifespan="off",
        access_log=False,
        log_config=None,
        timeout_keep_alive=3600,
        timeout_graceful_shutdown=5,
    )
    server = uvicorn.Server(config)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(models.start()), group.create_task(models.evict_idle_forever())]
        await server.serve()
        for task in tasks:
            task.cancel()


def _end_with_parent(socket_path: str) -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    socket = Path(socket_path)
    socket.unlink(missing_ok=True)
    # Another engine's socket may still be in the folder: the last engine removes it.
    with contextlib.suppress(OSError):
        socket.parent.rmdir()
    os._exit(0)


if __name__ == "__main__":
    main()
