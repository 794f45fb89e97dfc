"""An upstream that costs next to nothing: TEI's wire on a bare socket, with settable time, limits and faults.

    .venv/bin/python -m loadtest.stub --port 16400 --base-ms 5 --parallel 8

`GET /stats` tells what it got, `POST /control` takes any setting, and {"die": true} or {"reset": true}.
Vectors are a function of the text (`stub_wire.mark_of`), so that a caller can tell whose vector it got.
"""

import argparse
import asyncio
import gc
import os
import random
import re
import time
from collections import deque
from functools import partial
from typing import Any, cast

import msgspec
import uvloop

from loadtest import stub_wire
from loadtest.stub_wire import Asked, Refused, Settings
from loadtest.timer import Timer

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_HEAD_BYTES = 64 * 1024
_POSTS = {b"POST " + path.encode(): path for path in ("/v1/embeddings", "/embed", "/rerank")}


class Stats(msgspec.Struct):
    """What it got since the start or the last reset; refused: by status. cpu_s: since its start.

    crashes: requests that it died of, and those that came while it was down.
    """

    requests: int = 0
    inputs: int = 0
    tokens: int = 0
    most_inputs: int = 0
    in_flight: int = 0
    most_in_flight: int = 0
    refused: dict[int, int] = {}
    crashes: int = 0
    abandoned: int = 0
    cpu_s: float = 0.0


class Waiting(msgspec.Struct):
    """A request on its way to an answer."""

    connection: "Connection"
    asked: Asked


class Stub:
    """Slots, permits, faults and counts; knows nothing of bytes on the wire."""

    def __init__(self, settings: Settings, timer: Timer) -> None:
        self.settings = settings
        self.stats = Stats(refused={})
        self._timer = timer
        self._queue: deque[Waiting] = deque()
        self._running = 0
        self._inputs_in_flight = 0
        self._dice = random.Random(1)  # noqa: S311 - seeded faults
        self._up_again_s = 0.0
        self.connections: set[Connection] = set()

    def ask(self, connection: "Connection", line: bytes, body: bytes) -> None:
        """Answer one request, now or later."""
        path = _POSTS.get(line)
        if path is None:
            connection.answer(*self._plain(line, body))
            return
        if time.monotonic() < self._up_again_s:
            self.stats.crashes += 1
            connection.drop()
            return
        try:
            asked = self._understood(path, body)
            if stub_wire.has(self.settings.dies_of, asked):
                self._crash()
            else:
                self._admit(Waiting(connection, asked))
        except Refused as refused:
            counts = self.stats.refused
            counts[refused.status] = counts.get(refused.status, 0) + 1
            connection.answer(refused.status, refused.body, refused.content_type)

    def _crash(self) -> None:
        """What was being served is lost; it ends without an answer, as it would have ended with one."""
        self.stats.crashes += 1
        self._up_again_s = time.monotonic() + self.settings.down_ms / 1000
        for connection in list(self.connections):
            connection.drop()

    def _understood(self, path: str, body: bytes) -> Asked:
        settings = self.settings
        asked = stub_wire.understand(path, body, settings)
        if self._inputs_in_flight + len(asked.texts) > settings.permits:
            raise stub_wire.overloaded(path)
        if settings.error_share and self._dice.random() < settings.error_share:
            raise stub_wire.failure(path, settings.error_status, "Backend error: told to fail", "Backend")
        return asked

    def _admit(self, waiting: Waiting) -> None:
        stats, inputs = self.stats, len(waiting.asked.texts)
        stats.requests += 1
        stats.inputs += inputs
        stats.tokens += waiting.asked.tokens
        stats.in_flight += 1
        stats.most_inputs = max(stats.most_inputs, inputs)
        stats.most_in_flight = max(stats.most_in_flight, stats.in_flight)
        self._inputs_in_flight += inputs
        if self.settings.hang or stub_wire.has(self.settings.hangs_on, waiting.asked):
            return
        if self.settings.parallel and self._running >= self.settings.parallel:
            self._queue.append(waiting)
        else:
            self._start(waiting, time.monotonic())

    def _start(self, waiting: Waiting, from_s: float) -> None:
        self._running += 1
        settings, asked = self.settings, waiting.asked
        took_ms = settings.base_ms + settings.input_ms * len(asked.texts) + settings.token_ms * asked.tokens
        if took_ms == 0:
            self._finish(waiting, from_s)
            return
        end_s = from_s + took_ms / 1000 * settings.slow
        self._timer.at(end_s, partial(self._finish, waiting, end_s))

    def _finish(self, waiting: Waiting, end_s: float) -> None:
        self._running -= 1
        asked = waiting.asked
        self._leave(asked)
        if not self.settings.hang:
            tokens = b"\r\nx-compute-tokens: %d" % asked.tokens
            waiting.connection.answer(200, stub_wire.render(asked, self.settings), extra=tokens)
        while self._queue and self._running < self.settings.parallel:
            following = self._queue.popleft()
            if following.connection.closed:
                # As TEI: nobody works for a caller that has gone.
                self.stats.abandoned += 1
                self._leave(following.asked)
            else:
                # From when the slot came free, not from when the timer fired: no slot loses time.
                self._start(following, end_s)

    def _leave(self, asked: Asked) -> None:
        self.stats.in_flight -= 1
        self._inputs_in_flight -= len(asked.texts)

    def _plain(self, line: bytes, body: bytes) -> tuple[int, bytes]:
        match line:
            case b"GET /health":
                return (503, b"") if self.settings.hang else (200, b"")
            case b"GET /info":
                return 200, stub_wire.info(self.settings)
            case b"GET /v1/models":
                return 200, stub_wire.models(self.settings)
            case b"GET /stats":
                self.stats.cpu_s = time.process_time()
                return 200, msgspec.json.encode(self.stats)
            case b"POST /control":
                return self._control(body)
        return 404, b""

    def _control(self, body: bytes) -> tuple[int, bytes]:
        try:
            wish: dict[str, Any] = msgspec.json.decode(body, type=dict[str, Any])
            if wish.pop("die", False):
                os._exit(1)
            if wish.pop("reset", False):
                self.stats = Stats(refused={}, in_flight=self.stats.in_flight)
            self.settings = msgspec.convert({**msgspec.to_builtins(self.settings), **wish}, Settings)
        except msgspec.DecodeError as error:
            return 400, str(error).encode()
        return 200, msgspec.json.encode(self.settings)


class Connection(asyncio.Protocol):
    """HTTP/1.1 as far as a load test needs it: one request after the other, bodies with a length."""

    def __init__(self, stub: Stub) -> None:
        self.closed = False
        self._stub = stub
        self._busy = False
        self._need = 0
        self._kept = bytearray()
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client came."""
        # uvloop's transports are no subclasses of asyncio's.
        self._transport = cast("asyncio.Transport", transport)
        self._stub.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """It went."""
        del exc
        self.closed = True
        self._stub.connections.discard(self)

    def drop(self) -> None:
        """Without an answer."""
        self.closed = True
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        """Most requests come whole."""
        if self._kept or self._busy:
            self._kept += data
            if self._busy or len(self._kept) < self._need:
                return
            data = bytes(self._kept)
            self._kept.clear()
        self._take(data)

    def _take(self, data: bytes) -> None:
        end = data.find(b"\r\n\r\n") + 4
        if end < 4:
            self._kept += data
            self._need = len(data) + 1
            if len(data) > _HEAD_BYTES:
                self._transport.abort()
            return
        found = _LENGTH.search(data, 0, end)
        length = int(found[1]) if found else 0
        if length > self._stub.settings.payload_bytes:
            self.answer(413, b"length limit exceeded", b"text/plain", b"\r\nconnection: close")
            self._transport.close()
            return
        self._need = end + length
        if len(data) < self._need:
            self._kept += data
            return
        if len(data) > self._need:
            self._kept += data[self._need :]
        self._busy = True
        self._stub.ask(self, data[: data.find(b" HTTP/1.")], data[end : self._need])

    def answer(
        self, status: int, body: bytes, content_type: bytes = b"application/json", extra: bytes = b""
    ) -> None:
        """Write it, and go on with what came meanwhile."""
        if self.closed:
            return
        head = b"HTTP/1.1 %d X\r\ncontent-type: %b\r\ncontent-length: %d%b\r\n\r\n"
        self._transport.write(head % (status, content_type, len(body), extra) + body)
        self._busy = False
        self._need = 0
        if self._kept:
            data = bytes(self._kept)
            self._kept.clear()
            self._take(data)


async def serve(settings: Settings, port: int) -> None:
    """Until the process is ended."""
    stub = Stub(settings, Timer())
    server = await asyncio.get_running_loop().create_server(
        lambda: Connection(stub), "127.0.0.1", port, backlog=4096
    )
    # Nothing here makes cycles; a collection in the middle of a run would be the stub's own noise.
    gc.freeze()
    gc.disable()
    await server.serve_forever()


def main() -> None:
    """Flags are the settings' fields."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--port", type=int, required=True)
    for field in msgspec.structs.fields(Settings):
        parser.add_argument(f"--{field.encode_name.replace('_', '-')}", default=str(field.default))
    flags = vars(parser.parse_args())
    port = flags.pop("port")
    try:
        settings = msgspec.convert(flags, Settings, strict=False)
    except msgspec.ValidationError as error:
        parser.error(str(error))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(settings, port))


if __name__ == "__main__":
    main()
