"""Loopback HTTP servers of single connections, which a test scripts byte by byte."""

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from itertools import repeat
from typing import Self

from backends.contract import ConnectionFault
from backends.http.client import ConnectionOptions, UpstreamClient
from tests.fakes.hooks import until

ServerBehaviour = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

HEAD = b"HTTP/1.1 200 OK\r\n"
OK = HEAD + b"content-length: 2\r\n\r\nok"


@asynccontextmanager
async def listening(speak: ServerBehaviour) -> AsyncIterator[UpstreamClient]:
    """Yield a client of a loopback server that reads one request and then runs `speak`."""
    ended = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"\r\n\r\n")
            await speak(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()
            ended.set()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    client = UpstreamClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    try:
        yield client
    finally:
        await client.aclose()
        server.close()
        await ended.wait()


def send_and_close(*parts: bytes) -> ServerBehaviour:
    """Return a server behaviour: write these bytes and close the connection."""

    async def speak(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for part in parts:
            writer.write(part)
            await writer.drain()

    return speak


def send_and_wait(*parts: bytes) -> ServerBehaviour:
    """Return a server behaviour: write these bytes and wait until the client closes the connection."""

    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for part in parts:
            writer.write(part)
            await writer.drain()
        await reader.read()

    return speak


async def stay_silent(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
    """Send nothing until the client closes the connection."""
    await reader.read()


async def stall(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Send the beginning of a response and nothing more."""
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n[[0.1")
    await writer.drain()
    await reader.read()


async def reset(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Reset the connection, as a killed process does."""
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def close(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Close the connection without an answer, as at the end of its keep-alive time."""
    writer.close()


# The server's part for one request: bytes to send, or a behaviour.
Answer = bytes | ServerBehaviour


class ScriptedServer:
    """Loopback server with a script for each of its connections; the last one is for all further ones.

    A script is the answer to every request of its connection, or one answer for each, after which the server
    closes it. faults: those that the
    client reported. requests: number of request heads received. Bodies are not read.
    """

    def __init__(
        self, *scripts: Answer | tuple[Answer, ...], idle_s: float = 60.0, socket_path: str | None = None
    ) -> None:
        self.scripts = scripts
        self.writers: list[asyncio.StreamWriter] = []
        self.faults: list[ConnectionFault] = []
        self.requests = 0
        self.requested = asyncio.Event()
        self._socket_path = socket_path
        self._idle_s = idle_s

    async def __aenter__(self) -> Self:
        address = "http://engine"
        if self._socket_path is None:
            self.server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
            address = f"http://127.0.0.1:{self.server.sockets[0].getsockname()[1]}"
        else:
            self.server = await asyncio.start_unix_server(self._serve, self._socket_path)
        options = ConnectionOptions(self._socket_path, idle_s=self._idle_s, report=self.faults.append)
        self.client = UpstreamClient(address, options=options)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.client.aclose()
        self.server.close()
        for writer in self.writers:
            with suppress(ConnectionError):
                await writer.wait_closed()

    async def write(self, connection: int, data: bytes, *, ends: bool = False) -> None:
        """Send data that no request asked for, and wait until the client has read it."""
        writer, before = self.writers[connection], len(self.faults)
        writer.write(data)
        if ends:
            writer.close()
        await until(lambda: len(self.faults) > before)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        script = self.scripts[min(len(self.writers), len(self.scripts) - 1)]
        self.writers.append(writer)
        answers = iter(script) if isinstance(script, tuple) else repeat(script)
        # A body that is not read is no head either.
        with suppress(asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError):
            for answer in answers:
                await reader.readuntil(b"\r\n\r\n")
                self.requests += 1
                self.requested.set()
                if isinstance(answer, bytes):
                    writer.write(answer)
                else:
                    await answer(reader, writer)
        writer.close()
