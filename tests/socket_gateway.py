"""A gateway in this process that is called over real sockets, so that tests can inspect its state."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import msgspec
import uvicorn

from gateway.api.server.http_protocol import BoundedProtocol
from gateway.app import Application, Collaborators, build
from gateway.config.boot import AppBoot
from gateway.config.load import parse_config
from gateway.events import Event
from tests.conftest import KEY, remote_backend
from tests.fakes.tei import FakeTei


class Serving:
    """A running gateway. events: everything that it has observed."""

    def __init__(self, application: Application, port: int, events: Sequence[Event]) -> None:
        self.application = application
        self.port = port
        self.events = events

    async def answered(self) -> httpx.Response:
        """Send a call on a connection of its own, and return the reply."""
        headers = {"authorization": f"Bearer {KEY}"}
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{self.port}", trust_env=False) as client:
            return await client.post("/v1/embeddings", json={"input": "a"}, headers=headers)

    async def ask(self, given: object, take_bytes: int = 65536) -> socket.socket:
        """Send a call and read nothing. take_bytes: size of the kernel's receive buffer."""
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, take_bytes)
        client.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(client, ("127.0.0.1", self.port))
        body = msgspec.json.encode({"input": given, "encoding_format": "float"})
        head = (
            f"POST /v1/embeddings HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\n"
            f"content-length: {len(body)}\r\n\r\n"
        )
        await loop.sock_sendall(client, head.encode() + body)
        return client


@asynccontextmanager
async def serving(server: FakeTei, config: str, send_bytes: int = 0) -> AsyncIterator[Serving]:
    """Run a gateway in front of one replica, the host tei-0. send_bytes: the kernel's send buffer."""
    events: list[Event] = []
    outside = Collaborators(
        open_replica=lambda kind, spec: remote_backend(kind, spec, httpx.ASGITransport(server)),
        observe=events.append,
    )
    application = build(AppBoot(parse_config(config, {}, Path.cwd()), None), outside)
    web = uvicorn.Server(
        uvicorn.Config(application.asgi, http=BoundedProtocol, lifespan="off", log_config=None)
    )
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    if send_bytes:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_bytes)
    async with application.lifespan():
        running = asyncio.create_task(web.serve([listener]))
        try:
            (upstream,) = application.gateway.upstreams.values()
            await comes_to(1, lambda: len(upstream.lane._pool.usable()))
            await comes_to(True, lambda: web.started)
            yield Serving(application, listener.getsockname()[1], events)
        finally:
            web.should_exit = True
            await running


async def comes_to(expected: object, look: Callable[[], object]) -> None:
    """Poll until a value is the expected one."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(20):
            while look() != expected:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    assert expected == look()
