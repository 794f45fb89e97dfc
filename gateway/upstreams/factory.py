"""Creation of upstreams and replicas from their settings, and the tasks that maintain them."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from backends.contract import (
    Backend,
    BackendKind,
    Capabilities,
    ConnectionFault,
    ReplicaSpec,
    ReportsResidence,
    TlsFiles,
    TokenizerSource,
)
from backends.kinds import KINDS
from backends.openai.vendors import vendor_at
from backends.torch.wire import socket_and_base
from gateway.config.schema import UpstreamSettings
from gateway.events import ConnectionFaulted, Observe, UpstreamServer
from gateway.lane.lane import Lane
from gateway.lane.retries import LaneSettings
from gateway.lane.slices import Bounds, ConfiguredBounds, bounds_of, tightest
from gateway.lane.upstream_limits import UpstreamLimits
from gateway.quotas.ledger import Ledger
from gateway.quotas.limits import parse_limit
from gateway.routing.discovery import Discovery, Resolver
from gateway.routing.pool import Pool
from gateway.routing.prober import ENGINE_PROBES, REMOTE_PROBES, ProbeIntervals, Prober, follow_model_state
from gateway.routing.replica import LOAD_KINDS, Replica
from gateway.routing.window import SIZE_START, Window
from gateway.upstreams.model_inputs import ModelInputs
from gateway.upstreams.upstream import Lanes, Upstream
from gateway.vector_spaces.space import VectorSpace
from gateway.vector_spaces.store import FingerprintStore

OpenReplica = Callable[[BackendKind, ReplicaSpec], Backend]

DEFAULT_PORTS = {"http": 80, "https": 443}
# OpenTelemetry's names of other hosted APIs in OpenAI's form, by the end of their host.
HOSTED_PROVIDERS = {
    ".openai.azure.com": "azure.ai.openai",
    "generativelanguage.googleapis.com": "gcp.gemini",
    "aiplatform.googleapis.com": "gcp.vertex_ai",
}
# One batch runs and one is ready, or two run. A third would wait in the engine, out of reach of the lane's
# priorities.
ENGINE_WINDOW = 2


class ReplicaAddress(msgspec.Struct, frozen=True):
    """Address of one replica.

    name: its label in logs and metrics. ip: the one address to connect to, None for any that the name
    resolves to.
    """

    name: str
    address: str
    ip: str | None = None


class ReplicaOpener(msgspec.Struct, frozen=True):
    """Opener of an upstream's replicas. observe: receives the faults of their connections."""

    upstream: str
    open_replica: OpenReplica
    observe: Observe = lambda _: None

    def open(self, kind: BackendKind, name: str, spec: ReplicaSpec) -> Backend:
        """Return a backend that has not connected yet."""
        report = partial(self._report, name)
        return self.open_replica(kind, msgspec.structs.replace(spec, report=report))

    def _report(self, name: str, fault: ConnectionFault) -> None:
        self.observe(ConnectionFaulted(self.upstream, name, fault.kind, fault.pause_s))


class BatchBounds:
    """Size of one upstream request: accepted by every replica, and restricted by the config.

    Computes them again only when what is known of a replica has changed.
    """

    def __init__(self, pool: Pool, settings: UpstreamSettings, limits: UpstreamLimits | None = None) -> None:
        self._pool = pool
        self._limits = limits
        # The engine cuts forward passes itself, by counts that it knows; here only upper bounds are known.
        tokens = None if settings.is_local else settings.request_tokens
        self._configured = ConfiguredBounds(settings.request_inputs, tokens, settings.request_bytes)
        # Of each replica: its capabilities, and the bytes learned from its refusals.
        self._known: list[tuple[Capabilities | None, int | None]] = []
        self._bounds = Bounds()

    def __call__(self) -> Bounds:
        """Return the maximum size of one upstream request."""
        known = [
            (replica.capabilities, replica.request_limits.learned_bytes) for replica in self._pool.replicas
        ]
        if known != self._known:
            self._known = known
            self._bounds = self._tightest()
        return self._bounds

    def _tightest(self) -> Bounds:
        bounds = [
            bounds_of(capabilities, self._configured, learned_bytes)
            for capabilities, learned_bytes in self._known
            if capabilities is not None
        ]
        found = tightest(bounds) if bounds else Bounds()
        return found if self._limits is None else self._limits.bounded(found)


class Dependencies(msgspec.Struct, frozen=True):
    """Collaborators that upstreams are created with.

    fingerprints: store that gateways share, None without one. ledger: counts the limits of accounts, None
    where none are. shadow: they refuse nothing.
    """

    open_replica: OpenReplica
    resolver: Resolver
    observe: Observe
    fingerprints: FingerprintStore | None = None
    ledger: Ledger | None = None
    shadow: bool = False

    def opener(self, upstream: str) -> ReplicaOpener:
        """Return the opener of one upstream's replicas."""
        return ReplicaOpener(upstream, self.open_replica, self.observe)


def create_upstream(
    name: str, settings: UpstreamSettings, engines: Mapping[str, str], dependencies: Dependencies
) -> Upstream:
    """Return a wired upstream that has contacted no server yet; needs a running event loop.

    engines: addresses of its model in the gateway's own engines, by `UpstreamSettings.devices`.
    """
    observe, opener = dependencies.observe, dependencies.opener(name)
    holds = settings.is_local or settings.when_unavailable == "wait"
    pool = Pool(name, [], settings.policy, observe, holds=holds)
    if settings.discover is None:
        for place in replica_places(settings, engines):
            pool.add(create_replica(settings, place, opener))
    else:
        for url in settings.replicas:
            pool.expect_discovery(url)
    pool.apply_drains(settings.drained)
    inputs = ModelInputs(settings, pool.capabilities)
    lane_settings = LaneSettings(
        settings.queue_tokens,
        settings.attempt_timeout_s,
        holds=holds,
        retry_share=settings.retry_share,
        hedge_share=settings.hedge_share,
        waits_for_loading=settings.when_loading == "wait",
    )
    limits = _limits_of(name, settings, dependencies)
    clock, bounds = asyncio.get_running_loop().time, BatchBounds(pool, settings, limits)
    lanes: Lanes = {
        kind: Lane(
            pool,
            msgspec.structs.replace(lane_settings, kind=kind),
            observe,
            clock,
            bounds,
            inputs.count_few,
            limits,
        )
        for kind in LOAD_KINDS
    }
    space = VectorSpace(name, settings, dependencies.fingerprints, observe)
    return Upstream(name, settings, pool, lanes, space, inputs, limits)


def _limits_of(name: str, settings: UpstreamSettings, dependencies: Dependencies) -> UpstreamLimits | None:
    """Return the limits of an upstream's account, None if it has none."""
    if not settings.limits or dependencies.ledger is None:
        return None
    limits = [parse_limit(limit, amount) for limit, amount in settings.limits.items()]
    return UpstreamLimits(
        name, limits, dependencies.ledger, settings.attempt_timeout_s, shadow=dependencies.shadow
    )


def replica_places(settings: UpstreamSettings, engines: Mapping[str, str]) -> list[ReplicaAddress]:
    """Return the places of the listed replicas. engines: as in `create_upstream`."""
    own = [ReplicaAddress(f"engine {place}".rstrip(), address) for place, address in engines.items()]
    return own + [ReplicaAddress(_label(settings, address), address) for address in settings.replicas]


def _label(settings: UpstreamSettings, address: str) -> str:
    if not settings.is_local:
        return address
    # The path of a socket means nothing to an operator, but its file is named after the instance.
    return f"engine {Path(socket_and_base(address)[0]).stem}"


async def watch_replica(observe: Observe, upstream: Upstream, replica: Replica) -> None:
    """Probe one replica and follow its model's state until cancelled."""
    pool, space, clock = upstream.pool, upstream.space, asyncio.get_running_loop().time
    async with asyncio.TaskGroup() as group:
        group.create_task(Prober(pool, replica, _probe_intervals(upstream.settings), clock, space).run())
        if isinstance(replica.backend, ReportsResidence):
            group.create_task(follow_model_state(pool, replica, replica.backend, space, observe))


def background_tasks(upstream: Upstream, dependencies: Dependencies) -> list[Coroutine[Any, Any, None]]:
    """Return the upstream's background tasks: its fingerprint's upkeep, and discovery of its names."""
    settings, pool = upstream.settings, upstream.pool
    opener, fingerprint_upkeep = dependencies.opener(upstream.name), upstream.space.follow_store()
    if settings.discover is None:
        return [fingerprint_upkeep]
    return [
        fingerprint_upkeep,
        *(
            Discovery(
                pool,
                url,
                lambda name, ip, url=url: create_replica(settings, ReplicaAddress(name, url, ip), opener),  # type: ignore[misc]
                partial(watch_replica, dependencies.observe, upstream),
                dependencies.resolver,
            ).run()
            for url in settings.replicas
        ),
    ]


def create_replica(settings: UpstreamSettings, place: ReplicaAddress, opener: ReplicaOpener) -> Replica:
    """Return a replica that has not been contacted yet."""
    headers = _headers_of(settings)
    tls = TlsFiles(settings.tls.ca, settings.tls.certificate, settings.tls.private_key)
    spec = ReplicaSpec(
        place.address,
        settings.model,
        headers,
        tls,
        _tokenizer_source(settings),
        place.ip,
        settings=settings.api or settings.kind_settings,
        task=settings.task,
        extra_body=settings.extra_body,
        proxy=settings.proxy,
    )
    fixed = settings.in_flight_batches or (ENGINE_WINDOW if settings.is_local else None)
    start = KINDS[settings.backend].window or SIZE_START
    small_batch_slots = 1 if fixed else KINDS[settings.backend].small_batch_slots
    backend = opener.open(settings.backend, place.name, spec)
    window = Window(fixed, start=start)
    return Replica(place.name, backend, window, small_batch_slots, server_of(settings.backend, place.address))


def server_of(backend: BackendKind, address: str) -> UpstreamServer:
    """Return the server at the address of a replica, as OpenTelemetry names it."""
    if backend == "torch":
        return UpstreamServer(backend, socket_and_base(address)[0])
    parts = urlsplit(address)
    host = parts.hostname or ""
    provider = KINDS[backend].provider or backend
    if backend == "openai":
        vendor = vendor_at(address)
        own = vendor.provider if vendor is not None and vendor.provider else backend
        provider = next((name for end, name in HOSTED_PROVIDERS.items() if host.endswith(end)), own)
    return UpstreamServer(provider, host, parts.port or DEFAULT_PORTS.get(parts.scheme))


def _headers_of(settings: UpstreamSettings) -> dict[str, str]:
    if not settings.api_key:
        return dict(settings.headers)
    name = settings.api_key_header or KINDS[settings.backend].key_header or "authorization"
    # Other headers, such as Azure's api-key, carry the bare key.
    is_bearer = name.lower() == "authorization"
    return {**settings.headers, name: f"Bearer {settings.api_key}" if is_bearer else settings.api_key}


def _tokenizer_source(settings: UpstreamSettings) -> TokenizerSource | None:
    if settings.tokenizer is None:
        return None
    return TokenizerSource(settings.tokenizer, settings.tokenizer_settings)


def _probe_intervals(settings: UpstreamSettings) -> ProbeIntervals:
    if settings.is_local:
        # The supervisor checks engines for liveness, and restarts them.
        return ENGINE_PROBES
    return msgspec.structs.replace(REMOTE_PROBES, stall_timeout_s=settings.attempt_timeout_s)
