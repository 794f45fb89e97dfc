"""Gateway in the test process that is called over real sockets, so that tests can inspect its state."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

import httpx
import msgspec
import uvicorn

from gateway.api.server.http_protocol import BoundedProtocol, bounded_protocol
from gateway.app import Application, Collaborators, build
from gateway.config.boot import AppBoot
from gateway.config.load import parse_config
from gateway.events import Event
from tests.conftest import KEY, remote_backend
from tests.fakes.tei import FakeTei
from tests.waiting import PATIENCE_S


class SocketGateway:
    """Running gateway.

    port: of its listener. connections: its open connections. events: all events that it has observed.
    """

    def __init__(
        self, application: Application, port: int, connections: set[BoundedProtocol], events: Sequence[Event]
    ) -> None:
        self.application = application
        self.connections = connections
        self.port = port
        self.events = events

    async def call(self) -> httpx.Response:
        """Send a call on a new connection, and return the reply."""
        headers = {"authorization": f"Bearer {KEY}"}
        async with self._client() as client:
            return await client.post("/v1/embeddings", json={"input": "a"}, headers=headers)

    async def probe(self) -> httpx.Response:
        """Send a liveness probe on a new connection, and return the reply."""
        async with self._client() as client:
            return await client.get("/livez")

    async def exchange(self, request: bytes) -> bytes:
        """Send a request that closes its connection, and return everything that the server sends."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(request)
            return await reader.read()
        finally:
            writer.close()

    async def send_call(self, inputs: object, receive_bytes: int = 65536) -> socket.socket:
        """Send a call and read nothing. receive_bytes: size of the kernel's receive buffer."""
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        client.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(client, ("127.0.0.1", self.port))
        body = msgspec.json.encode({"input": inputs, "encoding_format": "float"})
        head = (
            f"POST /v1/embeddings HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\n"
            f"content-length: {len(body)}\r\n\r\n"
        )
        await loop.sock_sendall(client, head.encode() + body)
        return client

    async def send_part(
        self, key: str, part: bytes, announced: int
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Send a head that announces a body, and a part of it; return the connection."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        head = (
            f"POST /v1/embeddings HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\n"
            f"content-length: {announced}\r\n\r\n"
        )
        writer.write(head.encode() + part)
        await writer.drain()
        return reader, writer

    def _client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=f"http://127.0.0.1:{self.port}", trust_env=False)


@asynccontextmanager
async def socket_gateway(
    server: FakeTei, config: str, send_bytes: int = 0, connections_max: int = 1000
) -> AsyncIterator[SocketGateway]:
    """Run a gateway with one replica, the host tei-0. send_bytes: size of the kernel's send buffer."""
    events: list[Event] = []
    collaborators = Collaborators(
        open_replica=lambda kind, spec: remote_backend(kind, spec, httpx.ASGITransport(server)),
        observe=events.append,
    )
    application = build(AppBoot(parse_config(config, {}, Path.cwd()), None), collaborators)
    web = uvicorn.Server(
        uvicorn.Config(
            application.asgi,
            http=bounded_protocol(application.in_flight, connections_max),
            lifespan="off",
            log_config=None,
            # On a slow machine idle connections would close while a test still counts them.
            timeout_keep_alive=int(PATIENCE_S),
        )
    )
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    if send_bytes:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_bytes)
    async with application.lifespan():
        serving = asyncio.create_task(web.serve([listener]))
        try:
            (upstream,) = application.gateway.upstreams.values()
            await wait_for_value(1, lambda: len(upstream.pool.usable()))
            await wait_for_value(True, lambda: web.started)
            port = listener.getsockname()[1]
            # Every connection of this server has the protocol of its configuration.
            connections = cast("set[BoundedProtocol]", web.server_state.connections)
            yield SocketGateway(application, port, connections, events)
        finally:
            web.should_exit = True
            await serving


async def wait_for_value(expected: object, read: Callable[[], object]) -> None:
    """Poll until a value equals the expected one, for at most 20 seconds."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(PATIENCE_S):
            while read() != expected:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    assert expected == read()
