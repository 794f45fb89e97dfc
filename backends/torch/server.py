"""The engine's process: reads its boot message, loads the model, serves it on a Unix socket.

Rule: it lives as long as the parent's pipe; end of file on standard input ends it at once.
"""

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import msgspec
import uvicorn
import uvloop

from backends.checkpoints import locate
from backends.errors import BackendError, Failed, ModelUnavailable, Overloaded, TimedOut
from backends.torch import wire
from backends.torch.engine import Engine, ForwardThread
from backends.torch.kinds import Said
from backends.torch.loader import Loaded, load
from backends.torch.stats import Watch
from backends.tracing import PHASES_HEADER, is_recorded

Message = Mapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Report = Callable[[wire.State], None]
Headers = Sequence[tuple[bytes, bytes]]


class EngineApp:
    """ASGI: POST /run takes a `wire.Request`, GET /info its capabilities, GET /stats its counts."""

    def __init__(self, engine: Engine, loaded: Loaded) -> None:
        self._engine = engine
        self._info = wire.encoder.encode(loaded.capabilities)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["path"] == "/info":
            await _answer(send, 200, self._info)
        elif scope["path"] == "/run":
            body = await _body(receive)
            await _answer(send, *await self._run(body, receive, recorded=_is_recorded(scope)))
        elif scope["path"] == "/stats":
            stats = self._engine.recorder.snapshot(self._engine.waiting_inputs)
            await _answer(send, 200, wire.encoder.encode(stats))
        else:
            await _answer(send, 404, b"")

    async def _run(self, body: bytes, receive: Receive, *, recorded: bool) -> tuple[int, bytes, Headers]:
        try:
            request = wire.request_decoder.decode(body)
            return await self._answered(request, receive, recorded=recorded)
        except BackendError as error:
            refusal = error
        except TimeoutError:
            refusal = TimedOut("the engine did not finish in time")
        except msgspec.DecodeError as error:
            refusal = Failed(f"the engine could not read the request: {error}")
        self._engine.recorder.failed(refusal.kind)
        return *_refused(refusal), ()

    async def _answered(
        self, request: wire.Request, receive: Receive, *, recorded: bool
    ) -> tuple[int, bytes, Headers]:
        recorder, watch = self._engine.recorder, Watch()
        recorder.began(request.work)
        async with asyncio.timeout(request.timeout_s):
            reply = await _while_connected(self._engine.run(request.work, watch), receive)
        recorder.finished(request.work, watch)
        phases = watch.phases
        told: Headers = ()
        if recorded and phases is not None:
            told = ((PHASES_HEADER.encode(), msgspec.json.encode(phases)),)
        return 200, wire.encoder.encode(reply), told


def _is_recorded(scope: Message) -> bool:
    return any(name == b"traceparent" and is_recorded(value) for name, value in scope["headers"])


async def _while_connected(work: Awaitable[Any], receive: Receive) -> Any:
    """Wait for the reply, or stop when the gateway hangs up: nobody would read it."""
    running = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(receive())
    try:
        await asyncio.wait({running, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            raise Overloaded("the caller has gone")
        return running.result()
    finally:
        running.cancel()
        gone.cancel()


def _refused(error: BackendError) -> tuple[int, bytes]:
    status = 400 if error.source == "caller" else 503
    return status, wire.encoder.encode(wire.Refusal(error.kind, error.message))


async def _body(receive: Receive) -> bytes:
    chunks = []
    while True:
        message = await receive()
        chunks.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(chunks)


async def _answer(send: Send, status: int, body: bytes, told: Headers = ()) -> None:
    headers = [(b"content-type", wire.MEDIA_TYPE.encode()), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": [*headers, *told]})
    await send({"type": "http.response.body", "body": body})


def main() -> None:
    """Entry point of the child process."""
    # The terminal's Ctrl-C is the parent's to handle; it stops its children itself, last.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    boot = msgspec.json.decode(sys.stdin.buffer.readline(), type=wire.Boot)
    Thread(target=_end_with_parent, args=(boot.socket_path,), daemon=True).start()

    def report(state: wire.State) -> None:
        # A parent that has just gone hears nothing any more; this process ends with its pipe.
        with contextlib.suppress(OSError):
            os.write(boot.status_fd, msgspec.json.encode(state) + b"\n")

    try:
        report(wire.State("loading", f"looking for {boot.model}"))
        thread = ForwardThread()
        loaded = thread.submit(partial(_load, boot, report)).result()
    except ModelUnavailable as error:
        report(wire.State("failed", error.message))
        sys.exit(1)
    engine = Engine(
        loaded,
        batch_tokens=boot.batch_tokens or loaded.batch_tokens,
        queue_tokens=boot.queue_tokens,
        thread=thread,
    )
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(boot, EngineApp(engine, loaded), loaded, report))


def _load(boot: wire.Boot, report: Report) -> Loaded:
    return load(
        locate(boot.model, boot.revision, with_code=boot.trust_remote_code),
        boot.model,
        dtype=boot.dtype,
        device=boot.device,
        compiled=boot.compiled,
        said=Said(boot.task, boot.pooling),
        trusted=boot.trust_remote_code,
        report=lambda detail: report(wire.State("loading", detail)),
    )


async def _serve(boot: wire.Boot, app: EngineApp, loaded: Loaded, report: Report) -> None:
    config = uvicorn.Config(
        app,
        uds=boot.socket_path,
        lifespan="off",
        access_log=False,
        log_config=None,
        timeout_keep_alive=3600,
        timeout_graceful_shutdown=5,
    )
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve())
    # uvicorn tells nobody when it listens; this loop ends within milliseconds.
    while not server.started and not serving.done():  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    report(wire.State("ready", f"{loaded.capabilities.dtype}"))
    await serving


def _end_with_parent(socket_path: str) -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    socket = Path(socket_path)
    socket.unlink(missing_ok=True)
    # Another engine's socket may still be there: the last one out removes the folder.
    with contextlib.suppress(OSError):
        socket.parent.rmdir()
    os._exit(0)


if __name__ == "__main__":
    main()
