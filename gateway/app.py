"""The composition root: from a configuration and collaborators to an ASGI application."""

import asyncio
import logging
import secrets
import time
from collections import defaultdict
from collections.abc import (
    AsyncIterator,
    Callable,
    Collection,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any, cast
from uuid import uuid4

import msgspec

from backends.contract import Operation
from backends.kinds import open_replica
from backends.torch.serving.client import TorchBackend
from backends.torch.stats import EngineStats, joined_stats
from gateway.admission import Admission
from gateway.api.dialects.manager.dialect import move_path as move_to_manager
from gateway.api.dialects.registry import DIALECTS
from gateway.api.operators import (
    additions,
    admin,
    audit,
    fleet,
    history,
    jobs,
    keys,
    manager,
    own_calls,
    own_usage,
    probes,
    replicas,
    sign_in,
    status,
    summary,
    tenants,
    texts,
    ui,
)
from gateway.api.operators.additions import AdditionsApi, AdditionsClient
from gateway.api.operators.admin import Admin, Reload
from gateway.api.operators.application import Services, litestar_application
from gateway.api.operators.directory import TenantDirectory
from gateway.api.operators.fleet import Description, FleetApi, SetDrain
from gateway.api.operators.history import HistoryApi
from gateway.api.operators.manager import AskParent, HostApi
from gateway.api.operators.replicas import ReplicasApi
from gateway.api.operators.status import StatusSource
from gateway.api.server.authentication import Authenticator
from gateway.api.server.batches_api import BatchesApi
from gateway.api.server.call_io import ASGIApp
from gateway.api.server.dialect import Dialect
from gateway.api.server.endpoints import endpoint_at
from gateway.api.server.in_flight import InFlight
from gateway.api.server.inference_api import InferenceApi
from gateway.api.server.line_server import GatewayLineServer
from gateway.api.server.middleware import CorsPolicy, Middleware, ServerParts
from gateway.api.server.paths import RouteTable, options_of
from gateway.api.wire.batch_objects import OPERATIONS as BATCH_ENDPOINTS
from gateway.audit.trail import AuditTrail
from gateway.batches.records import Job
from gateway.batches.service import Batches, open_batches
from gateway.cache.call_cache import ItemCache
from gateway.cache.memory_store import MemoryStore
from gateway.cache.redis_store import RedisBounds, RedisStore, open_redis_clients
from gateway.config.boot import AppBoot
from gateway.config.certificates import Certificates
from gateway.config.digest import hash_of, section_digests
from gateway.config.identity import new_identity
from gateway.config.money import in_currency, token_price
from gateway.config.notes import lasting_limits
from gateway.config.schema import CacheSettings, Config, NotifySettings, host_and_port, is_loopback
from gateway.declared.host import InstanceTable
from gateway.dispatch import Dispatcher
from gateway.events import (
    AttemptFinished,
    BatchChanged,
    CallFinished,
    GatewayDrained,
    Observe,
    Observers,
    QuotaDecided,
    ReplicaChanged,
    ReplicaSlow,
    SpaceChecked,
)
from gateway.fleet.fleet import Fleet
from gateway.fleet.store import FleetStore
from gateway.history.keeper import HistoryKeeper
from gateway.history.opening import open_history
from gateway.history.spans import SpanRecorder
from gateway.media.fetch import Fetcher
from gateway.prepare import Preparer
from gateway.quotas.kept_ledger import KeptLedger
from gateway.quotas.ledger import Ledger, MemoryLedger
from gateway.quotas.redis_ledger import OutagePolicy, RedisLedger
from gateway.quotas.refusals import FILE_NAME as REFUSALS_FILE
from gateway.quotas.refusals import Refusals
from gateway.routing.discovery import Resolver, resolve
from gateway.routing.routes import Routes
from gateway.routing.slowness import SlowWatch
from gateway.serve import Gateway, Serving
from gateway.store.memory_use import StoreMemory
from gateway.store.redis_client import RedisClient
from gateway.telemetry.access_log import log_event
from gateway.telemetry.call_metrics import BatchCounts, BudgetShare, StoredCounts
from gateway.telemetry.config_metrics import Configured
from gateway.telemetry.history import History, RecentCalls
from gateway.telemetry.metrics import Metrics, measure_lag
from gateway.telemetry.totals import Totals
from gateway.telemetry.upstream_metrics import LimitShare, ReplicaLoad, Sources
from gateway.tenants.file_store import FileTenantStore
from gateway.tenants.follower import KeyFollower, StoredState
from gateway.tenants.keyring import FirstKey, Keyring
from gateway.tenants.sign_on.sign_in import SignIns
from gateway.tenants.sign_on.sign_on import SignOn
from gateway.tenants.snapshot import FILE_NAME as SNAPSHOT_FILE
from gateway.tenants.snapshot import SnapshotFile
from gateway.tenants.store import TenantStore
from gateway.upstreams.copies import Copies
from gateway.upstreams.factory import Dependencies, OpenReplica
from gateway.upstreams.fair_threads import FairThreads
from gateway.upstreams.group import UpstreamGroup
from gateway.upstreams.groups import Groups
from gateway.upstreams.upstream import Upstream
from gateway.upstreams.upstreams import Upstreams, log_failure
from gateway.vector_spaces.store import FingerprintStore, ModelSpaceStore

if TYPE_CHECKING:
    # Loaded only where gRPC is served, and OpenTelemetry only where a collector is configured.
    from gateway.api.grpc.server import GrpcServer
    from gateway.telemetry.otlp_metrics import CollectorMetrics
    from gateway.telemetry.tracing import CallTraces

# Serves a new configuration, whose engines are given by upstream, with the names of its added models. The
# task completes when everything that it replaced is closed.
Follow = Callable[..., "asyncio.Task[None]"]

FINGERPRINTS_TIMEOUT_S = 1.0
# Replicas that stay slow are logged without a webhook too.
SLOW = NotifySettings(url="", secret="")
SLOWNESS_EVERY_S = 1.0
# No caller waits for keys and tenants: an operator does, who must not repeat a change on a busy machine.
TENANTS_TIMEOUT_S = 2.0
logger = logging.getLogger("gateway")

# A stopping worker waits this long for its last spans and metrics to be sent.
LAST_EXPORT_S = 2.5

OPERATOR_MODULES = (
    probes,
    keys,
    tenants,
    summary,
    admin,
    additions,
    manager,
    status,
    replicas,
    jobs,
    own_usage,
    own_calls,
    audit,
    ui,
    sign_in,
    fleet,
    history,
)
OPERATORS = Dialect(
    handlers=[handler for module in OPERATOR_MODULES for handler in module.HANDLERS],
    tags=texts.TAGS,
    examples=texts.EXAMPLES,
    meanings=texts.MEANINGS,
)
SERVED = (*DIALECTS, OPERATORS)
HANDLERS = [handler for dialect in SERVED for handler in dialect.handlers]
KEY_HEADERS = [dialect.key_header.name.encode() for dialect in DIALECTS if dialect.key_header is not None]
# By the formats of errors, of which each belongs to one dialect.
KEY_PARAMETERS = {
    format_: dialect.key_parameter
    for dialect in DIALECTS
    for format_ in {options_of(handler).errors for handler in dialect.handlers}
    if dialect.key_parameter is not None and format_ is not None
}
MOVES = [dialect.move for dialect in DIALECTS if dialect.move is not None]
ROUTES = RouteTable(HANDLERS)


class Collaborators(msgspec.Struct, frozen=True):
    """Everything that touches the world outside. Tests replace these and nothing else.

    observed: types of events that `observe` takes; all if none is named. reload: reads the file again.
    adding: changes the additions. manager: carries out requests about the instances and the models of this
    host. drain: drains this gateway. None if the process cannot do it.
    """

    open_replica: OpenReplica = open_replica
    resolver: Resolver = resolve
    ledger: Ledger | None = None
    observe: Observe = log_event
    traces: "CallTraces | None" = None
    reload: Reload | None = None
    adding: AdditionsClient | None = None
    manager: AskParent | None = None
    drain: SetDrain | None = None
    observed: tuple[type, ...] = ()


class Application(msgspec.Struct, frozen=True):
    """The ASGI application, with the parts that its process needs to run, reload and stop it.

    observe: takes events that only the process learns of. instances: of this host. sign_on: its issuers.
    describe: takes the digests of a new configuration, for the fleet.
    added_models: at start, as in `AppBoot`. create_grpc: returns the gRPC server, which is not started; None
    without `grpc.listen`.
    """

    asgi: Middleware
    lifespan: Callable[[], AbstractAsyncContextManager[None]]
    in_flight: InFlight
    gateway: Gateway
    follow: Follow
    observe: Observe
    instances: InstanceTable
    sign_on: SignOn
    groups: Groups
    describe: Callable[[Mapping[str, str]], None]
    added_models: Collection[str]
    create_grpc: "Callable[[], GrpcServer] | None"


@dataclass(frozen=True, slots=True)
class Stores:
    """Clients of the shared state, and the audit trail. fingerprints: None if the configuration has no Redis.

    tenants: in Redis, or in a file; None where there is neither. cache: of vectors, None if the configuration
    has none. model_spaces, memory, fleet: use the client of `fingerprints`.
    """

    ledger: Ledger
    audit: AuditTrail
    tenants: TenantStore | FileTenantStore | None = None
    fingerprints: FingerprintStore | None = None
    cache: ItemCache | None = None
    model_spaces: ModelSpaceStore | None = None
    memory: StoreMemory | None = None
    fleet: FleetStore | None = None
    refusals: Refusals = field(default_factory=Refusals)

    async def aclose(self) -> None:
        """Close the connections, but not those of `tenants`, which are closed by the task that uses them."""
        await self.ledger.aclose()
        await self.audit.aclose()
        if self.fingerprints is not None:
            await self.fingerprints.aclose()
        if self.cache is not None:
            await self.cache.store.aclose()


@dataclass(frozen=True, slots=True)
class WorkerReload:
    """Switches a running application to a new configuration, in one step between two calls.

    Rule: nothing here waits. New upstreams are opened first, so that a failure has changed nothing; then the
    one reference to the `Serving` is replaced. Calls in flight finish with the `Serving` that they started
    with.
    """

    upstreams: Upstreams
    api: InferenceApi
    admin: Admin
    metrics: Metrics
    history: History
    sources: Callable[[], Sources]
    groups: Groups
    spans: SpanRecorder | None

    def follow(
        self,
        config: Config,
        engines: Mapping[str, Mapping[str, str]],
        added_models: Collection[str],
        restored: Collection[str] | None = None,
    ) -> "asyncio.Task[None]":
        """Serve this configuration from now on. The task completes when everything replaced is closed.

        engines, added_models: as in `AppBoot`. restored: models whose withdrawn canary is put back; None, all
        of them. Raises: OSError, with nothing changed.
        """
        retired = self.upstreams.apply(config.upstreams, engines)
        upstreams = self.upstreams.by_name
        self.groups.apply(config.models, upstreams, restored)
        self.api.gateway.serving = serving_of(
            config, upstreams, self.groups.groups, added_models, self.api.instances
        )
        keyring = self.api.gateway.keyring
        tenants = keyring.tenant_settings
        keyring.replace_configured(
            config.tenants, config.admin.keys, config.admin.certificates, config.networks
        )
        if removed := tenants.keys() - keyring.tenant_settings.keys():
            self.history.calls.forget(removed)
        self.api.authenticator.sign_on.apply(config.sign_on)
        self.api.follow(config)
        self.admin.apply(config)
        for running in retired:
            self.history.changes.forget(running.upstream.name)
            if self.spans is not None:
                self.spans.forget(running.upstream.name)
        self.metrics.watch(self.sources())
        return self.upstreams.retire(retired)


def build(boot: AppBoot, collaborators: Collaborators | None = None) -> Application:
    """Wire everything together. Needs a running event loop; contacts nothing before the lifespan begins."""
    outside, config = collaborators or Collaborators(), boot.config
    observe = Observers()
    stores = _open_stores(config, boot.tenants_file, outside.ledger, observe)
    upstreams, groups = _create_upstreams(boot, outside, stores, observe)
    traces, collected = _create_exports(boot, outside, observe)
    metrics, history = _metrics(boot, has_traces=traces is not None), History(boot.worker)
    _connect(observe, outside, metrics, history, stores, groups)

    table, in_flight = InstanceTable(), InFlight(config.limits.in_flight_bytes)
    serving = serving_of(config, upstreams.by_name, groups.groups, boot.added_models, table)
    admission = Admission(stores.ledger, observe, shadow=config.quotas.shadow)
    preparer = Preparer(FairThreads(), admission.ask)
    gateway = Gateway(_keyring(boot), serving, preparer, admission, Dispatcher(preparer, stores.cache))
    sign_on = SignOn(gateway.keyring, config.sign_on)
    authenticator = Authenticator(
        gateway.keyring,
        config.trusted_proxies,
        sign_on=sign_on,
        key_headers=KEY_HEADERS,
        key_parameters=KEY_PARAMETERS,
        reads_queries=config.key_in_query,
    )
    jobs = open_batches(boot, lambda job: observe(_change_of(job)))
    batches = BatchesApi(authenticator, jobs)
    api = InferenceApi(
        gateway, authenticator, batches, table, config.limits, _fetcher(config), config.end_users
    )

    follower = _key_follower(boot, stores, authenticator, gateway.keyring, observe, history.calls)
    admin = Admin(
        config,
        stores.ledger,
        follower,
        authenticator,
        outside.reload,
        _name_of(boot),
        is_shared_host=boot.is_shared_host,
    )
    sources = partial(sources_of, gateway, in_flight, stores, admin.stored_state, Certificates())
    metrics.watch(sources())
    watched = StatusSource(
        gateway, in_flight, metrics, history, config, boot.worker or 0, time.time(), table, admin.stored_state
    )
    adding = AdditionsApi(outside.adding)
    keeper, kept_history = _join_history(boot, gateway, observe)
    fleet_api = _join_fleet(
        boot,
        outside,
        watched,
        probes.Readiness(gateway, in_flight, partial(_store_problem, config, stores.ledger, follower, admin)),
        stores.fleet,
        observe,
        metrics,
    )
    services = Services(
        api=api,
        in_flight=in_flight,
        exporter=metrics,
        watched=watched,
        readiness=fleet_api.description.readiness,
        admin=admin,
        directory=TenantDirectory(gateway, follower, stores.ledger, stores.refusals, admin),
        adding=adding,
        replicas=ReplicasApi(gateway, adding),
        fleet_api=fleet_api,
        host=HostApi(outside.manager),
        sign_ins=SignIns(sign_on),
        batches=batches,
        audit=stores.audit,
        history=kept_history,
    )
    parts = ServerParts(
        routes=ROUTES,
        api=api,
        services=services,
        in_flight=in_flight,
        body_bytes_max=config.limits.body_bytes,
        observe=observe,
        address_of=authenticator.address_of,
        admin_port=boot.admin_port,
        manager_port=boot.manager_port,
        listeners=dict(zip(boot.listener_ports, config.listeners, strict=False)),
        moves=MOVES,
        move_to_manager=move_to_manager,
        cors=None if config.cors is None else CorsPolicy(config.cors),
        traces=traces,
    )
    lines = GatewayLineServer(
        api, {path: endpoint_at(ROUTES, path) for path in BATCH_ENDPOINTS}, in_flight, observe
    )
    tasks = [
        *_background_tasks(boot, stores, follower, metrics, history),
        *_batch_tasks(jobs, lines, metrics),
        sign_on.run(),
        groups.maintain(),
        watch_slow_replicas(gateway, config.notify or SLOW, observe),
        keeper.run(),
        *([] if collected is None else [collected.run()]),
        # One worker of a gateway speaks for it.
        *([] if boot.worker else [fleet_api.fleet.run()]),
    ]
    return Application(
        asgi=Middleware(_litestar(), parts),
        lifespan=partial(
            _run, upstreams, stores, gateway.copies, tasks, partial(_send_last, traces, collected)
        ),
        in_flight=in_flight,
        gateway=gateway,
        follow=WorkerReload(upstreams, api, admin, metrics, history, sources, groups, keeper.recorder).follow,
        observe=observe,
        instances=table,
        sign_on=sign_on,
        groups=groups,
        describe=partial(setattr, fleet_api.description, "configuration"),
        added_models=boot.added_models,
        create_grpc=None if config.grpc is None else partial(_create_grpc, config, parts),
    )


def _join_fleet(
    boot: AppBoot,
    outside: Collaborators,
    watched: StatusSource,
    readiness: probes.Readiness,
    store: FleetStore | None,
    observe: Observers,
    metrics: Metrics,
) -> FleetApi:
    """Return the part of this gateway in its fleet, which contacts no store yet."""
    configuration = section_digests(boot.config) if boot.configuration is None else boot.configuration
    description = Description(
        boot.identity or new_identity(boot.config.listen), watched, readiness, configuration
    )
    metrics.watch_configuration(lambda: hash_of(description.configuration))
    members = Fleet(description.identity, store, description, watched.history.calls.calls)
    observe.add(readiness.in_flight.follow_drain, GatewayDrained)
    observe.add(lambda _: members.renew(), GatewayDrained)
    return FleetApi(description, members, outside.drain)


def _join_history(boot: AppBoot, gateway: Gateway, observe: Observers) -> tuple[HistoryKeeper, HistoryApi]:
    """Return the keeper of this process's history, which counts from now on, and what operators see of it.

    No store is contacted yet.
    """
    quotas = boot.config.quotas

    def price(model: str) -> int:
        settings = gateway.serving.config.models.get(model)
        return token_price((settings and settings.price_per_million_tokens) or 0)

    keeper = open_history(
        None if quotas.store == "memory" else quotas.store,
        None if boot.tenants_file is None else Path(boot.tenants_file).parent,
        price,
        records_replicas=not boot.worker,
    )
    observe.add(keeper.counter.observe, CallFinished)
    if keeper.recorder is not None:
        observe.add(keeper.recorder.observe, ReplicaChanged)

    def known_name(name: str) -> str:
        return gateway.routes.known_name(name)

    is_alone = boot.worker is None and quotas.store == "memory"
    return keeper, HistoryApi(
        keeper,
        lambda: gateway.serving.config.currency,
        known_name,
        lambda name: name in gateway.keyring.tenant_settings,
        is_alone=is_alone,
    )


def _name_of(boot: AppBoot) -> str:
    """Return the name of this gateway in the records of changes."""
    return (boot.identity or new_identity(boot.config.listen)).name


def _create_upstreams(
    boot: AppBoot, outside: Collaborators, stores: Stores, observe: Observe
) -> tuple[Upstreams, Groups]:
    """Return the upstreams of a configuration, which contact no server yet, and the groups of its models."""
    dependencies = Dependencies(
        outside.open_replica,
        outside.resolver,
        observe,
        stores.fingerprints,
        stores.ledger,
        shadow=boot.config.quotas.shadow,
    )
    upstreams, groups = Upstreams(dependencies), Groups(observe, stores.model_spaces)
    upstreams.apply(boot.config.upstreams, boot.engines)
    groups.apply(boot.config.models, upstreams.by_name)
    return upstreams, groups


def _fetcher(config: Config) -> Fetcher | None:
    return None if config.media.fetch is None else Fetcher(config.media.fetch)


def _metrics(boot: AppBoot, *, has_traces: bool) -> Metrics:
    listen = boot.config.admin.listen or boot.config.listen
    return Metrics(is_open=is_loopback(host_and_port(listen)[0]), worker=boot.worker, links_traces=has_traces)


def _connect(
    observers: Observers,
    outside: Collaborators,
    metrics: Metrics,
    history: History,
    stores: Stores,
    groups: Groups,
) -> None:
    """Have each part take the events that it needs."""
    for kind, count in metrics.handlers.items():
        observers.add(count, kind)
    history.join(observers)
    observers.add(outside.observe, *outside.observed)
    observers.add(stores.refusals.observe, QuotaDecided)
    if stores.cache is not None:
        observers.add(partial(_distrust, stores.cache), SpaceChecked)
    observers.add(groups.observe, ReplicaChanged, SpaceChecked)


def _distrust(cache: ItemCache, event: SpaceChecked) -> None:
    """Forget a replica's vectors: it may have computed other ones before the check that found them."""
    if event.outcome == "differs" and event.changed:
        cache.store.distrust(event.upstream)


def _create_grpc(config: Config, parts: ServerParts) -> "GrpcServer":
    """Return the gRPC server, which shares everything with HTTP's."""
    from gateway.api.grpc.server import GrpcServer

    return GrpcServer(parts, config.limits, config.tls)


@cache
def _litestar() -> ASGIApp:
    """Return the Litestar application, which all gateways of a process share."""
    # Litestar's types of scope and messages are TypedDicts, which no plain mapping matches.
    return cast("ASGIApp", litestar_application(SERVED))


def serving_of(
    config: Config,
    upstreams: Mapping[str, Upstream],
    groups: Mapping[str, UpstreamGroup],
    added_models: Collection[str],
    table: InstanceTable,
) -> Serving:
    """Return the `Serving` of a configuration. upstreams, groups: those in the configuration."""
    models = config.models

    def offered(name: str) -> frozenset[Operation] | None:
        group = groups.get(name)
        if group is None:
            capabilities = upstreams[models[name].upstream].capabilities
        else:
            capabilities = group.judge.common_capabilities
        return None if capabilities is None else capabilities.operations

    routes = Routes(models, config.defaults, offered, added_models, table.status_of_model)
    routes.currency = config.currency or ""
    return Serving(config, routes, upstreams, groups)


def sources_of(
    gateway: Gateway,
    in_flight: InFlight,
    stores: Stores,
    stored: Callable[[], StoredState],
    certificates: Certificates,
) -> Sources:
    """Return the values that metrics read at each scrape."""
    upstreams, cache = gateway.upstreams, gateway.cache

    def stored_counts() -> StoredCounts:
        state = stored()
        return StoredCounts(state.keys, state.tenants, state.kept_keys, state.kept_tenants)

    def replicas() -> Iterator[ReplicaLoad]:
        for name, upstream in upstreams.items():
            slowness = upstream.pool.slowness()
            for replica in upstream.pool.replicas:
                yield ReplicaLoad(
                    name, replica.name, replica.batches, replica.slots, slowness.get(replica, 1.0)
                )

    engines: defaultdict[str, list[TorchBackend]] = defaultdict(list)
    for name, upstream in upstreams.items():
        for replica in upstream.pool.replicas:
            if isinstance(replica.backend, TorchBackend):
                engines[name].append(replica.backend)
    return Sources(
        {name: upstream.backlog for name, upstream in upstreams.items()},
        replicas,
        lambda: (in_flight.calls, in_flight.bytes),
        {name: partial(_joined_stats, backends) for name, backends in engines.items()},
        lambda: (cache.store.size_bytes, cache.store.evictions) if cache else (0, 0),
        partial(_spent_shares, gateway.keyring, stores.ledger),
        frozenset(
            (model, name) for model, group in gateway.serving.groups.items() for name in group.judge.judged
        ),
        stored_counts,
        configured_facts(gateway.serving.config, certificates),
        lambda: (0, 0) if stores.memory is None else stores.memory.use,
        partial(_used_shares, upstreams),
    )


def configured_facts(config: Config, certificates: Certificates) -> Configured:
    """Return the facts of a configuration that metrics show."""
    prices = {
        name: in_currency(token_price(model.price_per_million_tokens))
        for name, model in config.models.items()
        if model.price_per_million_tokens
    }
    return Configured(config.currency or "", prices, certificates.ends(config))


def _spent_shares(keyring: Keyring, ledger: Ledger) -> Iterator[BudgetShare]:
    """Yield the spent share of each budget that has been used."""
    for tenant, limit in keyring.budgets:
        share = ledger.spent_share(tenant, limit)
        if share is not None:
            yield BudgetShare(tenant, "key" if limit.scope else "tenant", share)


def _used_shares(upstreams: Mapping[str, Upstream]) -> Iterator[LimitShare]:
    """Yield the used share of each limit of an upstream's account."""
    for name, upstream in upstreams.items():
        if upstream.limits is not None:
            for limit, share in upstream.limits.used_shares().items():
                yield LimitShare(name, limit, share)


async def _joined_stats(engines: Sequence[TorchBackend], timeout_s: float) -> EngineStats | None:
    """Return the statistics of an upstream's engines together, None if none of them responds."""
    found = await asyncio.gather(*(engine.stats(timeout_s) for engine in engines))
    return joined_stats([stats for stats in found if stats is not None])


def _keyring(boot: AppBoot) -> Keyring:
    config = boot.config
    return Keyring(
        config.tenants,
        _first_key(boot),
        operators=config.admin.keys,
        operator_certificates=config.admin.certificates,
        networks=config.networks,
        has_store=config.quotas.store != "memory" or boot.tenants_file is not None,
    )


def _first_key(boot: AppBoot) -> FirstKey | None:
    if boot.first_key_digest is None:
        return None
    return FirstKey(
        boot.first_key_digest,
        boot.first_key_waits,
        boot.first_key_is_kept,
        # Without Redis the operator would lose the only key for /admin.
        outlives_tenants=boot.config.quotas.store == "memory",
    )


def _key_follower(
    boot: AppBoot,
    stores: Stores,
    authenticator: Authenticator,
    keyring: Keyring,
    observe: Observe,
    calls: RecentCalls,
) -> KeyFollower | None:
    if stores.tenants is None:
        return None
    quotas = boot.config.quotas
    snapshot = None
    if quotas.store != "memory" and boot.tenants_file is not None:
        snapshot = SnapshotFile(Path(boot.tenants_file).with_name(SNAPSHOT_FILE), quotas.store)
    return KeyFollower(
        keyring,
        stores.tenants,
        quotas.key_grace_s,
        authenticator.forgive_known_keys,
        observe=observe,
        snapshot=snapshot,
        on_removed=calls.forget,
    )


def _store_problem(config: Config, ledger: Ledger, follower: KeyFollower | None, operators: Admin) -> str:
    """Return why this gateway cannot serve the callers of its store, or nothing if it can.

    A store that refuses it is a mistake in its settings, which must not be rolled out further. Without a
    store that answers, the tenants in the file are served, and those of the snapshot.
    """
    if config.quotas.store == "memory" or follower is None:
        return ""
    shared = ledger if isinstance(ledger, RedisLedger) else None
    if refusal := follower.refusal or (shared.refusal if shared is not None else ""):
        return f"Redis refuses this gateway ({refusal}); check `quotas.store`"
    if config.quotas.when_unavailable == "refuse" and shared is not None and not shared.has_answered:
        return "Redis has not answered yet, and `quotas.when_unavailable` is refuse"
    if follower.unserved and not operators.file_tenants:
        return f"the keys and tenants in Redis are not known ({follower.unserved})"
    return ""


def _open_stores(config: Config, tenants_file: str | None, ledger: Ledger | None, observe: Observe) -> Stores:
    """Return the clients that the configuration asks for. ledger: used in place of its own."""
    quotas = config.quotas
    folder = None if tenants_file is None else Path(tenants_file).parent
    cache = None if config.cache is None else _open_cache(config.cache, quotas.store, observe)
    if quotas.store == "memory":
        tenants = None if tenants_file is None else FileTenantStore(Path(tenants_file), config.audit, observe)
        trail = AuditTrail(None, folder, config.audit, observe)
        return Stores(
            ledger or _open_memory_ledger(config, tenants_file, observe),
            trail,
            tenants,
            cache=cache,
            refusals=Refusals(file=None if folder is None else folder / REFUSALS_FILE),
        )
    timeout_s = quotas.timeout_ms / 1000
    operators_s = max(TENANTS_TIMEOUT_S, timeout_s)
    trail = AuditTrail(RedisClient(quotas.store, operators_s), folder, config.audit, observe)
    if ledger is None:
        rules = OutagePolicy(quotas.when_unavailable, quotas.gateways)
        ledger = RedisLedger(RedisClient(quotas.store, timeout_s), rules, secrets.token_hex(8), observe)
    # No caller waits for a fingerprint: there is time to connect.
    fingerprints = RedisClient(quotas.store, max(FINGERPRINTS_TIMEOUT_S, timeout_s))
    stored = TenantStore(RedisClient(quotas.store, operators_s), config.audit, observe)
    return Stores(
        ledger,
        trail,
        stored,
        FingerprintStore(fingerprints),
        cache,
        ModelSpaceStore(fingerprints),
        StoreMemory(fingerprints),
        FleetStore(fingerprints),
        Refusals(fingerprints),
    )


def _open_memory_ledger(config: Config, tenants_file: str | None, observe: Observe) -> Ledger:
    """Return a ledger without Redis. tenants_file: in the folder that keeps its counts, if there is one."""
    if tenants_file is None:
        if place := next(lasting_limits(config), None):
            logger.warning("%s is lost at the next start: there is no folder for it; set `state_dir`", place)
        return MemoryLedger(observe=observe)
    return KeptLedger(Path(tenants_file).parent, observe=observe)


def _open_cache(settings: CacheSettings, quota_store: str, observe: Observe) -> ItemCache:
    """Return a cache that has contacted no store yet. quota_store: `quotas.store` of the configuration."""
    store: MemoryStore | RedisStore
    if settings.store == "memory":
        store = MemoryStore(settings.bytes, settings.ttl_s, time.monotonic)
    else:
        url = quota_store if settings.store == "redis" else settings.store
        clients = open_redis_clients(url, settings.timeout_ms / 1000)
        store = RedisStore(clients, RedisBounds(settings.bytes, settings.ttl_s), time.monotonic)
    return ItemCache(store, observe, shared=settings.shared, is_charged=settings.charge == "full")


def _background_tasks(
    boot: AppBoot, stores: Stores, follower: KeyFollower | None, metrics: Metrics, history: History
) -> list[Coroutine[Any, Any, None]]:
    """Return the background tasks, which run for as long as the application does."""
    tasks = [stores.ledger.maintain(), stores.refusals.run(), measure_lag(metrics.observe_lag)]
    tasks += history.tasks(lambda: Totals(metrics.collected()))
    if stores.cache is not None:
        tasks.append(stores.cache.store.maintain())
    if stores.memory is not None:
        tasks.append(stores.memory.follow())
    if boot.worker is not None:
        tasks.append(metrics.refresh_forever())
    if follower is not None:
        tasks.append(follower.run())
    return tasks


async def watch_slow_replicas(gateway: Gateway, settings: NotifySettings, observe: Observe) -> None:
    """Report replicas that stay slower than their peers, until cancelled."""
    watch = SlowWatch(settings.slow_factor, settings.slow_for_s)
    while True:
        slowness = {
            (name, replica.name): times
            for name, upstream in gateway.upstreams.items()
            for replica, times in upstream.pool.slowness().items()
        }
        for upstream, replica in watch.look(slowness, time.monotonic()):
            observe(ReplicaSlow(upstream, replica, slowness[upstream, replica], settings.slow_for_s))
        await asyncio.sleep(SLOWNESS_EVERY_S)


def _change_of(job: Job) -> BatchChanged:
    return BatchChanged(job.id, job.tenant, job.status, job.counts.completed, job.counts.failed)


def _batch_tasks(
    batches: Batches | None, lines: GatewayLineServer, metrics: Metrics
) -> list[Coroutine[Any, Any, None]]:
    """Return the background tasks of files and jobs, if there are any."""
    if batches is None:
        return []
    metrics.watch_batches(lambda: BatchCounts(*batches.state))
    return [batches.run(lines)]


def start_tasks(coroutines: Iterable[Coroutine[Any, Any, None]]) -> list["asyncio.Task[None]"]:
    """Start background tasks; one that fails is logged."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    for task in tasks:
        task.add_done_callback(log_failure)
    return tasks


@asynccontextmanager
async def _run(
    upstreams: Upstreams,
    stores: Stores,
    copies: Copies,
    coroutines: Sequence[Coroutine[Any, Any, None]],
    send_last: Callable[[], Coroutine[Any, Any, None]],
) -> AsyncIterator[None]:
    """Run the upstreams and the background tasks; close every connection at the end.

    send_last: sends what a collector lacks.
    """
    upstreams.start()
    tasks = start_tasks(coroutines)
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await copies.aclose()
        await stores.aclose()
        await upstreams.aclose()
        await send_last()


def _create_exports(
    boot: AppBoot, outside: Collaborators, observers: Observers
) -> "tuple[CallTraces | None, CollectorMetrics | None]":
    """Return what is sent to collectors: spans and metrics, each None if the configuration has none."""
    config, traces, collected = boot.config, outside.traces, None
    # Workers and starts differ in it, so that a collector adds their counts up.
    instance = str(uuid4())
    if traces is None and config.tracing is not None:
        from gateway.telemetry.tracing import create_exporting_traces

        traces = create_exporting_traces(config.tracing, instance)
    if config.metrics is not None:
        from gateway.telemetry.otlp_metrics import create_collector_metrics

        scheme = "http" if config.tls is None else "https"
        collected = create_collector_metrics(config.metrics, boot.metric_names, scheme, instance)
        observers.add(collected.observe_attempt, AttemptFinished)
        observers.add(collected.observe_call, CallFinished)
    return traces, collected


async def _send_last(traces: "CallTraces | None", collected: "CollectorMetrics | None") -> None:
    """Send the last spans and metrics within the time that a stopping process has.

    A dead collector does not delay it.
    """
    sending = [] if collected is None else [collected.begin_close()]
    if traces is not None:
        closing = Thread(target=traces.close, daemon=True)
        closing.start()
        sending.append(closing)
    deadline_s = time.monotonic() + LAST_EXPORT_S
    for thread in sending:
        await asyncio.to_thread(thread.join, max(0.0, deadline_s - time.monotonic()))
