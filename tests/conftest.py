"""The one way to boot: the production application with its collaborators swapped."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from backends.contract import Backend, BackendKind, ReplicaSpec
from backends.http import UpstreamClient
from backends.infinity import InfinityBackend
from backends.openai import OpenAIBackend
from backends.registry import open_replica as open_real_replica
from backends.tei import TeiBackend
from backends.vllm import VllmBackend
from gateway.api.operators.added_models import AdditionsClient
from gateway.api.operators.admin import Reload
from gateway.app import Application, Collaborators, build
from gateway.config.boot import AppBoot
from gateway.config.load import parse_config
from gateway.events import Event
from gateway.quotas.ledger import Ledger
from gateway.routing.discovery import Resolver, resolve
from gateway.telemetry.tracing import CallTraces
from gateway.tenants.keyring import key_digest

KEY = "test-key"

# Two replicas of one embedding model, one of a reranker; the hosts are names of fakes.
CONFIG = """
upstreams:
  embedder: {backend: tei, replicas: ["http://tei-0", "http://tei-1"]}
  reranker: {backend: tei, replicas: ["http://rerank-0"]}
models:
  bge: {upstream: embedder}
  org/bge: {upstream: embedder}
  strict: {upstream: embedder, truncate: error}
  no-rerank: {upstream: embedder, rerank: false}
  cross: {upstream: reranker}
defaults: {embed: bge, rerank: cross}
"""


class Running:
    """A booted gateway: client speaks to it with a valid key; events is all that it has observed."""

    def __init__(self, client: httpx.AsyncClient, events: list[Event], application: Application) -> None:
        self.client = client
        self.events = events
        self.application = application

    def follow(self, config: str) -> "asyncio.Task[None]":
        """Serve another config from now on; the task ends when what it left out is closed."""
        return self.application.follow(parse_config(config, {}, Path.cwd()), {})

    async def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        """POST plain values as JSON."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return await self.client.post(path, json=body, headers=named)


Boots = Callable[..., AbstractAsyncContextManager[Running]]


@asynccontextmanager
async def running_gateway(
    servers: Mapping[str, Any],
    config: str = CONFIG,
    *,
    ledger: Ledger | None = None,
    wait: bool = True,
    sockets: bool = False,
    resolver: Resolver = resolve,
    traces: CallTraces | None = None,
    reload: Reload | None = None,
    adding: AdditionsClient | None = None,
) -> AsyncIterator[Running]:
    """Boot on a config whose replicas are ASGI apps, by host name; a host that is missing is dead.

    wait: until every replica has had its attempt to join. sockets: replicas are servers on ports. resolver:
    names to addresses, where a config discovers replicas; they are ASGI apps by address then. traces: what is
    told of each call. reload: has the file read again. adding: has something added to it.
    """
    events: list[Event] = []

    def open_replica(kind: BackendKind, spec: ReplicaSpec) -> Backend:
        host = spec.ip or urlsplit(spec.address).hostname or ""
        if kind == "torch" or sockets:
            return open_real_replica(kind, spec)
        transport = httpx.ASGITransport(servers[host]) if host in servers else httpx.MockTransport(_refuse)
        return remote_backend(kind, spec, transport)

    parsed = parse_config(config, {}, Path.cwd())
    first = None if parsed.tenants else key_digest(KEY)
    outside = Collaborators(open_replica, resolver, ledger, events.append, traces, reload, adding)
    application = build(AppBoot(parsed, first), outside)
    async with (
        application.lifespan(),
        httpx.AsyncClient(
            transport=httpx.ASGITransport(application.asgi),
            base_url="http://gateway",
            headers={"authorization": f"Bearer {KEY}"},
        ) as client,
    ):
        if wait:
            async with asyncio.timeout(10):
                while (await client.get("/readyz")).status_code != 200:  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
        yield Running(client, events, application)


def remote_backend(kind: BackendKind, spec: ReplicaSpec, transport: httpx.AsyncBaseTransport) -> Backend:
    """A remote replica's backend, as its module opens it, over a transport of the test's."""
    door = UpstreamClient(spec.address, spec.headers, transport=transport)
    match kind:
        case "infinity":
            return InfinityBackend(door, spec.model, spec.tokenizer)
        case "vllm":
            return VllmBackend(door, spec.model, spec.tokenizer)
        case "openai":
            return OpenAIBackend(door, spec.model, spec.tokenizer)
    return TeiBackend(door)


def _refuse(request: httpx.Request) -> httpx.Response:
    raise httpx.ConnectError("refused", request=request)


@pytest.fixture
def boot() -> Boots:
    """Boot a gateway on fakes, by host name."""
    return running_gateway
