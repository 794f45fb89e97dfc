"""Replica on a loopback port whose connections a test can break."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Self

from tests.fakes.http_servers import reset

# Called with the number of the request (from 1) and whether its connection has answered one before, before
# each answer. True resets the connection instead.
Breaks = Callable[[int, bool], bool]


class HostileReplica:
    """HTTP server in front of an ASGI app. requests: those received. connections: those accepted."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app = app
        self.breaks: Breaks = lambda _number, _reused: False
        # Closes a connection that is idle after an answer for this long.
        self.keep_alive_s = 60.0
        self.requests = 0
        self.writers: list[asyncio.StreamWriter] = []

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.address = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def stop(self) -> None:
        """Refuse new connections and close all others."""
        self._server.close()
        for writer in self.writers:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.append(writer)
        is_reused = False
        with suppress(asyncio.IncompleteReadError, ConnectionError, TimeoutError):
            while True:
                async with asyncio.timeout(self.keep_alive_s if is_reused else None):
                    head = await reader.readuntil(b"\r\n\r\n")
                self.requests += 1
                if self.breaks(self.requests, is_reused):
                    await reset(reader, writer)
                    return
                writer.write(await self._answer(head, reader))
                is_reused = True
        writer.close()

    async def _answer(self, head: bytes, reader: asyncio.StreamReader) -> bytes:
        request_line, *lines = head.decode().split("\r\n")
        headers = [
            (name.lower().encode(), value.encode())
            for name, _, value in (line.partition(": ") for line in lines if line)
        ]
        body = await reader.readexactly(int(dict(headers).get(b"content-length", b"0")))
        messages: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": body}

        async def send(message: dict[str, Any]) -> None:
            messages.append(message)

        method, target, _ = request_line.split()
        path, _, query = target.partition("?")
        scope = {"type": "http", "method": method, "path": path, "headers": headers}
        await self._app(scope | {"query_string": query.encode()}, receive, send)
        start, content = messages[0], messages[1]["body"]
        extra = b"".join(b"%b: %b\r\n" % header for header in start["headers"])
        return b"HTTP/1.1 %d X\r\n%bcontent-length: %d\r\n\r\n%b" % (
            start["status"],
            extra,
            len(content),
            content,
        )
