"""Boot the production application with fakes in place of its collaborators."""

import asyncio
import gc
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any, get_args
from urllib.parse import urlsplit

import httpx
import hypothesis
import pytest

from backends.contract import Backend, BackendKind, ReplicaSpec
from backends.http.client import UpstreamClient
from backends.infinity.adapter import InfinityBackend
from backends.kinds import KINDS
from backends.kinds import open_replica as open_real_replica
from backends.openai.adapter import OpenAIBackend
from backends.openai.settings import ApiKind
from backends.openai.shapes import origin_of
from backends.tei.adapter import TeiBackend
from backends.vllm.adapter import VllmBackend
from gateway.api.operators.additions import AdditionsClient
from gateway.api.operators.admin import Reload
from gateway.api.operators.manager import AskParent
from gateway.api.server.in_flight import HeldBody, InFlight
from gateway.api.server.request_context import RequestContext
from gateway.app import ROUTES, Application, Collaborators, build
from gateway.config.boot import AppBoot
from gateway.config.load import parse_config
from gateway.config.schema import Config
from gateway.events import Event
from gateway.quotas.ledger import Ledger
from gateway.routing.discovery import Resolver, resolve
from gateway.telemetry.tracing import CallTraces
from gateway.tenants.keyring import key_digest
from tests.lowest import is_about_a_library
from tests.rooms import belongs, rooms
from tests.waiting import PATIENCE_S

# Every example of a test would otherwise fail after 200 ms, which a busy machine takes now and then.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")

KEY = "test-key"
MANAGER_PORT = 9000

# Two replicas of an embedding model and one replica of a reranker. The hosts are names of fakes.
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


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --room and --lowest, which select test files."""
    parser.addoption("--room", help="run only the test files of this room, such as lane or api/dialects")
    parser.addoption("--lowest", action="store_true", help="run only the test files of tests/lowest.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Spread the files with slow tests over the first two thirds of the other files.

    They mostly wait for gateways, while the other files compute. One at the end would leave the other
    processes idle.
    """
    slow = {item.path: 0 for item in items if item.get_closest_marker("slow")}
    others = {item.path: 0 for item in items if item.path not in slow}
    places: dict[Path, float] = {path: place for place, path in enumerate(others)}
    step = 2 / 3 * len(others) / max(1, len(slow))
    places |= {path: step * place for place, path in enumerate(slow)}
    items.sort(key=lambda item: places[item.path])


def pytest_collection_finish(session: pytest.Session) -> None:
    """Exclude imported modules from garbage collection, as the gateway's own processes do.

    The engine collects garbage when it unloads a model, in 0.2 s with the modules of torch.
    """
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_configure(config: pytest.Config) -> None:
    """Refuse a room that does not exist, and collect no garbage while modules are imported."""
    gc.disable()
    room = config.getoption("room")
    if room and room not in rooms():
        raise pytest.UsageError(f"there is no room {room!r}; the rooms are: {', '.join(rooms())}")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files that were not selected before they are imported, which would take most of the time."""
    if not collection_path.match("test_*.py"):
        return None
    room = config.getoption("room")
    is_left_out = (room and not belongs(collection_path, room)) or (
        config.getoption("lowest") and not is_about_a_library(collection_path)
    )
    return True if is_left_out else None


class Running:
    """Booted gateway. client: sends a valid key. events: all events that the gateway has observed."""

    def __init__(self, client: httpx.AsyncClient, events: list[Event], application: Application) -> None:
        self.client = client
        self.events = events
        self.application = application

    def follow(self, config: str, added_models: Collection[str] = ()) -> "asyncio.Task[None]":
        """Apply another config. The returned task ends when everything that it removes is closed.

        added_models: those of its models that are not in the file.
        """
        return self.application.follow(parse_config(config, {}, Path.cwd()), {}, added_models)

    async def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        """Send a POST with a JSON body. headers: underscores in names stand for hyphens."""
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
    is_shared_host: bool = False,
    reload: Reload | None = None,
    adding: AdditionsClient | None = None,
    engines: Mapping[str, Backend] | None = None,
    manager: AskParent | None = None,
    tenants_file: Path | None = None,
) -> AsyncIterator[Running]:
    """Boot with a config whose replicas are ASGI apps.

    servers: app of each replica by host name, or by address if the config discovers replicas. A missing host
    is unreachable. wait: return only once `/readyz` answers 200. sockets: replicas are servers on real ports.
    resolver: resolves host names for discovery. traces: records traces of calls. reload: reads the
    configuration file again. adding: changes the added models. engines: those in this process, by upstream.
    manager: carries out requests about instances and models, also at the port `MANAGER_PORT`.
    tenants_file: in the folder of the gateway's state, None if it has none.
    """
    events: list[Event] = []
    hosted = engines or {}

    def open_replica(kind: BackendKind, spec: ReplicaSpec) -> Backend:
        if kind == "torch" and spec.address in hosted:
            return hosted[spec.address]
        host = spec.ip or urlsplit(spec.address).hostname or ""
        if kind == "torch" or sockets:
            return open_real_replica(kind, spec)
        transport = httpx.ASGITransport(servers[host]) if host in servers else httpx.MockTransport(_refuse)
        return remote_backend(kind, spec, transport)

    parsed = _parse(config, Path.cwd())
    bootstrap_digest = None if parsed.tenants else key_digest(KEY)
    collaborators = Collaborators(
        open_replica, resolver, ledger, events.append, traces, reload, adding, manager
    )
    boot = AppBoot(
        parsed,
        bootstrap_digest,
        engines={name: {"": name} for name in hosted},
        manager_port=None if manager is None else MANAGER_PORT,
        tenants_file=None if tenants_file is None else str(tenants_file),
        is_shared_host=is_shared_host,
    )
    application = build(boot, collaborators)
    async with (
        application.lifespan(),
        httpx.AsyncClient(
            transport=httpx.ASGITransport(application.asgi),
            base_url="http://gateway",
            headers={"authorization": f"Bearer {KEY}"},
        ) as client,
    ):
        if wait:
            async with asyncio.timeout(PATIENCE_S):
                while (await client.get("/readyz")).status_code != 200:  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
        yield Running(client, events, application)


async def posted(
    booting: AbstractAsyncContextManager[Running], path: str, body: Any, **headers: str
) -> httpx.Response:
    """Return the reply to one POST of a gateway that runs for it only. headers: as in `Running.post`."""
    async with booting as gateway:
        return await gateway.post(path, body, **headers)


def remote_backend(kind: BackendKind, spec: ReplicaSpec, transport: httpx.AsyncBaseTransport) -> Backend:
    """Return the backend of a remote replica, over the transport of a test."""
    if KINDS[kind].settings is not None:
        module = import_module(KINDS[kind].adapter)
        opened: Backend = module.open_replica(
            spec,
            lambda spec, authorizer: UpstreamClient(
                spec.address, spec.headers, transport=transport, authorizer=authorizer
            ),
        )
        return opened
    address = origin_of(spec.address) if kind in get_args(ApiKind) else spec.address
    client = UpstreamClient(address, spec.headers, transport=transport)
    match kind:
        case "infinity":
            return InfinityBackend(client, spec.model, spec.tokenizer)
        case "vllm":
            return VllmBackend(client, spec.model, spec.tokenizer)
        case "openai" | "cohere" | "jina" | "voyage":
            return OpenAIBackend(client, spec)
    return TeiBackend(client)


@lru_cache(maxsize=64)
def _parse(config: str, folder: Path) -> Config:
    """Parse each text once: PyYAML took a quarter of the time of the API tests, which share their configs."""
    return parse_config(config, {}, folder)


def _refuse(request: httpx.Request) -> httpx.Response:
    raise httpx.ConnectError("refused", request=request)


@pytest.fixture
def boot() -> Boots:
    """Return the function that boots a gateway on fakes."""
    return running_gateway


def request_with(name: bytes, value: str, address: str = "10.0.0.1") -> RequestContext:
    """Return a request for /embed with one header."""
    return RequestContext(
        ROUTES.parse("/embed"), [(name, value.encode())], address, HeldBody(InFlight(0)), lambda _: None
    )
