"""Stub TEI server on a bare socket, with negligible CPU cost and configurable latency, limits and faults.

    .venv/bin/python -m loadtest.stub --port 16400 --base-ms 5 --parallel 8

`GET /stats` returns counts of the requests received. `POST /control` accepts any setting, and {"die": true}
or {"reset": true}. Each vector is derived from its text (`stub_protocol.mark_of`), so that a caller can
verify that it received the right one.
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

from loadtest import stub_protocol
from loadtest.stub_protocol import StubError, StubRequest, StubSettings
from loadtest.timer import Timer

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_HEAD_BYTES = 64 * 1024
_POSTS = {b"POST " + path.encode(): path for path in ("/v1/embeddings", "/embed", "/rerank")}


class StubStats(msgspec.Struct):
    """Counts since the start or the last reset; `refused` by status, cpu_s since the start.

    crashes: requests that crashed it, and those that came while it was down.
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


class PendingRequest(msgspec.Struct):
    """A request without its reply."""

    connection: "StubConnection"
    request: StubRequest


class Stub:
    """Slots, permits, faults and counts; knows nothing of bytes on the wire."""

    def __init__(self, settings: StubSettings, timer: Timer) -> None:
        self.settings = settings
        self.stats = StubStats(refused={})
        self._timer = timer
        self._queue: deque[PendingRequest] = deque()
        self._running = 0
        self._inputs_in_flight = 0
        self._dice = random.Random(1)  # noqa: S311 - seeded faults
        self._down_until_s = 0.0
        self.connections: set[StubConnection] = set()

    def handle(self, connection: "StubConnection", line: bytes, body: bytes) -> None:
        """Reply to one request, now or later."""
        path = _POSTS.get(line)
        if path is None:
            connection.reply(*self._plain(line, body))
            return
        if time.monotonic() < self._down_until_s:
            self.stats.crashes += 1
            connection.drop()
            return
        try:
            request = self._accepted(path, body)
            if stub_protocol.contains(self.settings.crash_word, request):
                self._crash()
            else:
                self._admit(PendingRequest(connection, request))
        except StubError as error:
            counts = self.stats.refused
            counts[error.status] = counts.get(error.status, 0) + 1
            connection.reply(error.status, error.body, error.content_type)

    def _crash(self) -> None:
        """Drop all connections; requests being served end without a reply at their usual time."""
        self.stats.crashes += 1
        self._down_until_s = time.monotonic() + self.settings.down_ms / 1000
        for connection in list(self.connections):
            connection.drop()

    def _accepted(self, path: str, body: bytes) -> StubRequest:
        settings = self.settings
        request = stub_protocol.parse_request(path, body, settings)
        if self._inputs_in_flight + len(request.texts) > settings.permits:
            raise stub_protocol.overloaded(path)
        if settings.error_share and self._dice.random() < settings.error_share:
            raise stub_protocol.error_reply(path, settings.error_status, "Backend error: injected", "Backend")
        return request

    def _admit(self, pending: PendingRequest) -> None:
        stats, inputs = self.stats, len(pending.request.texts)
        stats.requests += 1
        stats.inputs += inputs
        stats.tokens += pending.request.tokens
        stats.in_flight += 1
        stats.most_inputs = max(stats.most_inputs, inputs)
        stats.most_in_flight = max(stats.most_in_flight, stats.in_flight)
        self._inputs_in_flight += inputs
        if self.settings.hang or stub_protocol.contains(self.settings.hang_word, pending.request):
            return
        if self.settings.bad_effect == "hang" and self._is_bad(pending.request):
            return
        if self.settings.parallel and self._running >= self.settings.parallel:
            self._queue.append(pending)
        else:
            self._start(pending, time.monotonic())

    def _start(self, pending: PendingRequest, from_s: float) -> None:
        self._running += 1
        settings, request = self.settings, pending.request
        took_ms = (
            settings.base_ms + settings.input_ms * len(request.texts) + settings.token_ms * request.tokens
        )
        if took_ms == 0:
            self._finish(pending, from_s)
            return
        end_s = from_s + took_ms / 1000 * settings.slowdown
        self._timer.at(end_s, partial(self._finish, pending, end_s))

    def _finish(self, pending: PendingRequest, end_s: float) -> None:
        self._running -= 1
        request = pending.request
        self._release(request)
        if self._is_bad(request):
            self._fail(pending)
        elif not self.settings.hang:
            tokens = b"\r\nx-compute-tokens: %d" % request.tokens
            pending.connection.reply(200, stub_protocol.render(request, self.settings), extra=tokens)
        while self._queue and self._running < self.settings.parallel:
            following = self._queue.popleft()
            if following.connection.closed:
                # As TEI: it does not compute for a caller that has disconnected.
                self.stats.abandoned += 1
                self._release(following.request)
            else:
                # From the end of the previous request, not from the timer's tick: no slot loses time.
                self._start(following, end_s)

    def _is_bad(self, request: StubRequest) -> bool:
        return stub_protocol.contains(self.settings.bad_word, request)

    def _fail(self, pending: PendingRequest) -> None:
        """Answer a request that contains the bad word as the setting says."""
        effect = self.settings.bad_effect
        if effect == "lost":
            pending.connection.drop()
        elif effect.isdigit():
            pending.connection.reply(int(effect), b'{"error":"bad word","error_type":"Validation"}')
        else:
            pending.connection.reply(200, stub_protocol.render_wrong(pending.request, self.settings, effect))

    def _release(self, request: StubRequest) -> None:
        self.stats.in_flight -= 1
        self._inputs_in_flight -= len(request.texts)

    def _plain(self, line: bytes, body: bytes) -> tuple[int, bytes]:
        match line:
            case b"GET /health":
                return (503, b"") if self.settings.hang else (200, b"")
            case b"GET /info":
                return 200, stub_protocol.info(self.settings)
            case b"GET /v1/models":
                return 200, stub_protocol.models(self.settings)
            case b"GET /stats":
                self.stats.cpu_s = time.process_time()
                return 200, msgspec.json.encode(self.stats)
            case b"POST /v1/traces":
                # As an OpenTelemetry collector that keeps nothing.
                return 200, b""
            case b"POST /control":
                return self._control(body)
        return 404, b""

    def _control(self, body: bytes) -> tuple[int, bytes]:
        try:
            changes: dict[str, Any] = msgspec.json.decode(body, type=dict[str, Any])
            if changes.pop("die", False):
                os._exit(1)
            if changes.pop("reset", False):
                self.stats = StubStats(refused={}, in_flight=self.stats.in_flight)
            self.settings = msgspec.convert({**msgspec.to_builtins(self.settings), **changes}, StubSettings)
        except msgspec.DecodeError as error:
            return 400, str(error).encode()
        return 200, msgspec.json.encode(self.settings)


class StubConnection(asyncio.Protocol):
    """HTTP/1.1 as far as a load test needs it: one request after the other, bodies with a length."""

    def __init__(self, stub: Stub) -> None:
        self.closed = False
        self._stub = stub
        self._busy = False
        self._need = 0
        self._buffer = bytearray()
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Register with the stub."""
        # uvloop's transports are no subclasses of asyncio's.
        self._transport = cast("asyncio.Transport", transport)
        self._stub.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Unregister from the stub."""
        del exc
        self.closed = True
        self._stub.connections.discard(self)

    def drop(self) -> None:
        """Close without a reply."""
        self.closed = True
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        """Collect a request; most arrive whole."""
        if self._buffer or self._busy:
            self._buffer += data
            if self._busy or len(self._buffer) < self._need:
                return
            data = bytes(self._buffer)
            self._buffer.clear()
        self._take(data)

    def _take(self, data: bytes) -> None:
        end = data.find(b"\r\n\r\n") + 4
        if end < 4:
            self._buffer += data
            self._need = len(data) + 1
            if len(data) > _HEAD_BYTES:
                self._transport.abort()
            return
        length_line = _LENGTH.search(data, 0, end)
        length = int(length_line[1]) if length_line else 0
        if length > self._stub.settings.payload_bytes:
            self.reply(413, b"length limit exceeded", b"text/plain", b"\r\nconnection: close")
            self._transport.close()
            return
        self._need = end + length
        if len(data) < self._need:
            self._buffer += data
            return
        if len(data) > self._need:
            self._buffer += data[self._need :]
        self._busy = True
        self._stub.handle(self, data[: data.find(b" HTTP/1.")], data[end : self._need])

    def reply(
        self, status: int, body: bytes, content_type: bytes = b"application/json", extra: bytes = b""
    ) -> None:
        """Write the reply, then handle a request that arrived meanwhile."""
        if self.closed:
            return
        head = b"HTTP/1.1 %d X\r\ncontent-type: %b\r\ncontent-length: %d%b\r\n\r\n"
        self._transport.write(head % (status, content_type, len(body), extra) + body)
        self._busy = False
        self._need = 0
        if self._buffer:
            data = bytes(self._buffer)
            self._buffer.clear()
            self._take(data)


async def serve(settings: StubSettings, port: int) -> None:
    """Serve until the process ends."""
    stub = Stub(settings, Timer())
    server = await asyncio.get_running_loop().create_server(
        lambda: StubConnection(stub), "127.0.0.1", port, backlog=4096
    )
    # No cycles are made here; a garbage collection in the middle of a run would be noise of the stub.
    gc.freeze()
    gc.disable()
    await server.serve_forever()


def main() -> None:
    """Serve with the settings of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--port", type=int, required=True)
    for field in msgspec.structs.fields(StubSettings):
        parser.add_argument(f"--{field.encode_name.replace('_', '-')}", default=str(field.default))
    flags = vars(parser.parse_args())
    port = flags.pop("port")
    try:
        settings = msgspec.convert(flags, StubSettings, strict=False)
    except msgspec.ValidationError as error:
        parser.error(str(error))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(settings, port))


if __name__ == "__main__":
    main()
