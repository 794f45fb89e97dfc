"""The composition root: config and collaborators in, an ASGI application out."""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import lru_cache, partial
from threading import Thread
from typing import TYPE_CHECKING, Any, cast

import msgspec
from litestar import Litestar
from litestar.config.cors import CORSConfig
from litestar.connection import ASGIConnection
from litestar.di import Provide
from litestar.handlers import BaseRouteHandler
from litestar.openapi import OpenAPIConfig
from litestar.openapi.plugins import JsonRenderPlugin
from litestar.plugins import PluginProtocol
from litestar.plugins.core import MsgspecDIPlugin
from litestar.types import Scope

from backends.registry import open_replica
from gateway import __version__
from gateway.admission import Admission
from gateway.api.dialects import (
    cohere,
    infinity,
    openai,
    openai_models,
    rerank,
    sie,
    tei,
    tei_default,
    tei_outputs,
    tei_predict,
    tokenize,
    vllm,
    vllm_pooling,
)
from gateway.api.operators import added_models, admin, keys, probes, status, tenants, ui
from gateway.api.operators.added_models import AdditionsApi, AdditionsClient
from gateway.api.operators.admin import Admin, Reload
from gateway.api.operators.docs_page import ReferenceRenderPlugin
from gateway.api.operators.status import StatusSource
from gateway.api.server import error_bodies
from gateway.api.server.authentication import Authenticator
from gateway.api.server.middleware import ASGIApp, Middleware
from gateway.api.server.request_context import context_of_request
from gateway.api.server.responses import Api
from gateway.api.server.router import Router
from gateway.config.schema import Config, Cors, host_and_port, is_loopback
from gateway.dispatch import Dispatcher
from gateway.events import Event, Observe
from gateway.in_flight import InFlight
from gateway.processes.messages import AppBoot
from gateway.processes.worker_reload import WorkerReload, serving_of, sources_of
from gateway.quotas.ledger import Ledger, MemoryLedger
from gateway.quotas.redis_ledger import OutagePolicy, RedisLedger
from gateway.routing.discovery import Resolver, resolve
from gateway.serve import Gateway
from gateway.store.redis_client import RedisClient
from gateway.telemetry.access_log import log_event
from gateway.telemetry.change_history import Recent
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.process import keep_measuring
from gateway.tenants.keyring import FirstKey, Keyring
from gateway.tenants.store import TenantStore, keep_up_to_date
from gateway.upstreams.factory import Dependencies, OpenReplica
from gateway.upstreams.registry import UpstreamRegistry, log_failure
from gateway.vector_spaces.store import FingerprintStore

FINGERPRINTS_TIMEOUT_S = 1.0
if TYPE_CHECKING:
    # OpenTelemetry is loaded only where calls are traced.
    from gateway.telemetry.tracing import CallTraces

# Serve another config, with the engines that its upstreams have; ends when all left out is closed.
Follow = Callable[[Config, Mapping[str, str]], "asyncio.Task[None]"]

# How long a stopping worker waits for its last spans to leave.
LAST_SPANS_S = 2.5
# Where in a request's state stands what handlers are given of the gateway that it came to, by name.
SHARED_KEY = "shared"
SHARED = ("api", "in_flight", "exporter", "watched", "admin", "adding")

HANDLERS = [
    one
    for dialect in (
        openai,
        tei,
        tei_outputs,
        tei_predict,
        tokenize,
        tei_default,
        vllm,
        vllm_pooling,
        infinity,
        rerank,
        cohere,
        sie,
        openai_models,
        probes,
        keys,
        tenants,
        admin,
        added_models,
        status,
        ui,
    )
    for one in dialect.HANDLERS
]


class Collaborators(msgspec.Struct, frozen=True):
    """What touches the world outside; tests swap these and nothing else.

    reload: has the file read again, adding: something added to it, wherever that is done.
    """

    open_replica: OpenReplica = open_replica
    resolver: Resolver = resolve
    ledger: Ledger | None = None
    observe: Observe = log_event
    traces: "CallTraces | None" = None
    reload: Reload | None = None
    adding: AdditionsClient | None = None


class Application(msgspec.Struct, frozen=True):
    """The ASGI application, and what its process needs to have it follow another config, and end it well.

    observe: takes what only the process hears of.
    """

    asgi: Middleware
    lifespan: Callable[[], AbstractAsyncContextManager[None]]
    in_flight: InFlight
    gateway: Gateway
    follow: Follow
    observe: Observe


def build(boot: AppBoot, collaborators: Collaborators | None = None) -> Application:
    """Wire everything together; needs a running event loop. Nothing is contacted before the lifespan."""
    outside = collaborators or Collaborators()
    config = boot.config
    is_open = is_loopback(host_and_port(config.admin.listen or config.listen)[0])
    exporter, recent = Metrics(is_open=is_open, worker=boot.worker), Recent()

    def observe(event: Event) -> None:
        exporter.observe(event)
        recent.observe(event)
        outside.observe(event)

    fingerprints = None if config.quotas.store == "memory" else _fingerprints(config)
    fleet = UpstreamRegistry(Dependencies(outside.open_replica, outside.resolver, observe, fingerprints))
    fleet.apply(config.upstreams, boot.engines)
    ledger = outside.ledger or _ledger(config, observe)
    gateway = Gateway(
        Keyring(
            config.tenants,
            FirstKey(boot.first_key_digest, boot.first_key_waits) if boot.first_key_digest else None,
            operators=config.admin.keys,
            has_store=config.quotas.store != "memory",
        ),
        serving_of(config, fleet.upstreams),
        Admission(ledger, observe, shadow=config.quotas.shadow),
        Dispatcher(),
    )
    in_flight = InFlight(config.limits.in_flight_bytes)
    exporter.watch(sources_of(gateway.upstreams, in_flight))
    api = Api(gateway, Authenticator(gateway.keyring, config.trusted_proxies), config.limits.inputs)
    store = None if config.quotas.store == "memory" else TenantStore(_door(config))
    beside = [ledger.maintain(), keep_measuring(exporter.late)]
    if boot.worker is not None:
        beside.append(exporter.keep())
    if store is not None:
        beside.append(_follow_keys(gateway.keyring, store, config.quotas.key_grace_s))
    closing = [ledger.aclose, *([fingerprints.aclose] if fingerprints else [])]
    operators = Admin(config, ledger, store, api.authenticator, outside.reload)
    shared = {
        "api": api,
        "in_flight": in_flight,
        "exporter": exporter,
        "watched": StatusSource(gateway, exporter, recent, config, boot.worker or 0, time.time()),
        "admin": operators,
        "adding": AdditionsApi(outside.adding),
    }
    cors, body_bytes = config.cors, config.limits.body_bytes
    traces = outside.traces or _traces(config)
    straight = Router(_of_gateway(_litestar(body_bytes, cors), shared), HANDLERS, api, body_bytes)
    return Application(
        Middleware(straight, in_flight, body_bytes, observe, boot.admin_port, _cors(cors), traces),
        partial(_running, fleet, closing, beside, traces),
        in_flight,
        gateway,
        WorkerReload(fleet, api, operators, exporter, recent, in_flight).follow,
        observe,
    )


def _given(name: str) -> Provide:
    """A collaborator of the gateway that a request came to, as Litestar hands it to handlers."""

    def given(scope: Scope) -> Any:
        return _shared(scope)[name]

    return Provide(given, sync_to_thread=False)


def _shared(scope: Any) -> Mapping[str, Any]:
    shared: Mapping[str, Any] = scope["state"][SHARED_KEY]
    return shared


async def _guard(connection: ASGIConnection[Any, Any, Any, Any], handler: BaseRouteHandler) -> None:
    """Whatever the gateway asks of who calls a handler for operators."""
    await _shared(connection.scope)["admin"].guard(connection, handler)


def _of_gateway(app: Litestar, shared: Mapping[str, Any]) -> ASGIApp:
    """The routes, in front of one gateway."""
    # Litestar's types of the same three things are TypedDicts, which no plain mapping matches.
    routes = cast("ASGIApp", app)

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        scope.setdefault("state", {})[SHARED_KEY] = shared
        await routes(scope, receive, send)

    return answer


class _Litestar(Litestar):
    """Without its plugins for pydantic and attrs, which nothing here speaks: they load 14 MB a worker."""

    @staticmethod
    def _get_default_plugins(plugins: list[PluginProtocol]) -> list[PluginProtocol]:
        return [*plugins, MsgspecDIPlugin()]


@lru_cache(maxsize=16)
def _litestar(body_bytes: int, cors: Cors | None) -> Litestar:
    """The routes. To register them takes longer than all else of building a gateway: done once a process,
    because they know nothing of whose they are.
    """
    return _Litestar(
        HANDLERS,
        dependencies={
            "context": Provide(context_of_request, sync_to_thread=False),
            **{name: _given(name) for name in SHARED},
        },
        guards=[_guard],
        exception_handlers=error_bodies.HANDLERS,
        cors_config=_cors(cors),
        request_max_body_size=body_bytes,
        # Litestar's own would turn on httpx's line for every upstream request.
        logging_config=None,
        openapi_config=OpenAPIConfig(
            title="Embedding gateway",
            version=__version__,
            path="/docs",
            use_handler_docstrings=True,
            render_plugins=[ReferenceRenderPlugin(), JsonRenderPlugin()],
        ),
    )


def _cors(cors: Cors | None) -> CORSConfig | None:
    if cors is None:
        return None
    return CORSConfig(
        allow_origins=list(cors.origins),
        allow_methods=["GET", "POST"],
        expose_headers=["*"],
        max_age=cors.max_age_s,
    )


@asynccontextmanager
async def _running(
    fleet: UpstreamRegistry,
    closing: Sequence[Callable[[], Coroutine[Any, Any, None]]],
    beside: Sequence[Coroutine[Any, Any, None]],
    traces: "CallTraces | None",
) -> AsyncIterator[None]:
    """What goes on beside the calls for as long as the application runs; connections are closed after."""
    fleet.start()
    tasks = [asyncio.create_task(one) for one in beside]
    for task in tasks:
        task.add_done_callback(log_failure)
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for close in closing:
            await close()
        await fleet.aclose()
        if traces is not None:
            await _sent(traces)


def _traces(config: Config) -> "CallTraces | None":
    if config.tracing is None:
        return None
    from gateway.telemetry.tracing import exported

    return exported(config.tracing)


async def _sent(traces: "CallTraces") -> None:
    """Send the last spans, for as long as an ending process may take; a dead collector does not hold it."""
    sending = Thread(target=traces.close, daemon=True)
    sending.start()
    await asyncio.to_thread(sending.join, LAST_SPANS_S)


def _ledger(config: Config, observe: Observe) -> Ledger:
    quotas = config.quotas
    if quotas.store == "memory":
        return MemoryLedger()
    rules = OutagePolicy(quotas.when_unavailable, quotas.gateways)
    return RedisLedger(_door(config), rules, secrets.token_hex(8), observe)


def _door(config: Config) -> RedisClient:
    return RedisClient(config.quotas.store, config.quotas.timeout_ms / 1000)


def _fingerprints(config: Config) -> FingerprintStore:
    # No caller waits for it: a connection has the time to be made.
    timeout_s = max(FINGERPRINTS_TIMEOUT_S, config.quotas.timeout_ms / 1000)
    return FingerprintStore(RedisClient(config.quotas.store, timeout_s))


async def _follow_keys(keyring: Keyring, store: TenantStore, grace_s: float) -> None:
    try:
        await keep_up_to_date(keyring, store, grace_s)
    finally:
        await store.aclose()
