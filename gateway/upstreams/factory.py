"""From an upstream's settings to an upstream at work, and what goes on beside it."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import Any

import msgspec

from backends.contract import Backend, ReplicaSpec, ReportsResidence, TlsFiles
from backends.registry import Kind
from gateway.batching.lane import Lane, Rules
from gateway.config.schema import Upstream as UpstreamConfig
from gateway.events import Observe
from gateway.routing.discovery import Discovery, Resolve
from gateway.routing.model_state import keep_following
from gateway.routing.pool import Pool, Replica
from gateway.routing.prober import Waits, keep_watching
from gateway.routing.window import Window
from gateway.upstreams.batch_bounds import BatchBounds
from gateway.upstreams.upstream import Upstream
from gateway.vector_spaces.space import VectorSpace
from gateway.vector_spaces.store import FingerprintStore

OpenReplica = Callable[[Kind, ReplicaSpec], Backend]

# An engine restarts on this machine and is worth asking often; a remote server is not ours to hammer.
ENGINE_PROBES = Waits(0.05, 0.25, patient=True)
REMOTE_PROBES = Waits(0.5, 5.0)
# Two run, or one runs and one is ready: more in flight would only wait where nobody can be let past.
ENGINE_WINDOW = 2


def open_upstream(
    name: str,
    settings: UpstreamConfig,
    engines: Mapping[str, str],
    open_replica: OpenReplica,
    observe: Observe,
    fingerprints: FingerprintStore | None = None,
) -> Upstream:
    """Wired, with nobody contacted yet; needs a running event loop. engines: as in `Boot`.

    fingerprints: those that gateways share, if any.
    """
    pool = Pool(name, [], settings.policy, observe)
    if settings.discover is None:
        for address in settings.replicas or (engines[name],):
            # A socket's path says nothing to an operator.
            label = "engine" if settings.backend == "torch" else address
            pool.add(replica_of(settings, label, address, None, open_replica))
    else:
        for url in settings.replicas:
            pool.awaits(url)
    rules = Rules(
        settings.queue_tokens,
        settings.attempt_timeout_s,
        holds=settings.backend == "torch" or settings.when_unavailable == "wait",
        retry_share=settings.retry_share,
        hedge_share=settings.hedge_share,
        waits=settings.when_loading == "wait",
    )
    lane = Lane(pool, rules, observe, asyncio.get_running_loop().time, BatchBounds(pool, settings))
    space = VectorSpace(name, settings, fingerprints, observe)
    return Upstream(name, settings, pool, lane, space)


async def watching(observe: Observe, upstream: Upstream, replica: Replica) -> None:
    """Look after one replica for as long as it is the upstream's; runs until cancelled."""
    pool, space, clock = upstream.pool, upstream.space, asyncio.get_running_loop().time
    async with asyncio.TaskGroup() as both:
        both.create_task(keep_watching(pool, replica, _waits(upstream.settings), clock, space))
        if isinstance(replica.backend, ReportsResidence):
            both.create_task(keep_following(pool, replica, replica.backend, space, observe))


def background_tasks(
    upstream: Upstream, open_replica: OpenReplica, look_up: Resolve, observe: Observe
) -> list[Coroutine[Any, Any, None]]:
    """What runs for as long as the upstream does, beside its listed replicas: names are looked up."""
    settings, pool = upstream.settings, upstream.pool
    following = upstream.space.follow_store()
    if settings.discover is None:
        return [following]
    return [
        following,
        *(
            Discovery(
                pool,
                url,
                lambda label, ip, url=url: replica_of(settings, label, url, ip, open_replica),  # type: ignore[misc]
                partial(watching, observe, upstream),
                look_up,
            ).keep()
            for url in settings.replicas
        ),
    ]


def replica_of(
    settings: UpstreamConfig, label: str, address: str, ip: str | None, open_replica: OpenReplica
) -> Replica:
    """One that nobody has spoken to yet. label: what logs call it; ip: the one address to connect to."""
    headers = dict(settings.headers)
    if settings.api_key:
        headers["authorization"] = f"Bearer {settings.api_key}"
    tls = TlsFiles(settings.tls.ca, settings.tls.certificate, settings.tls.private_key)
    spec = ReplicaSpec(address, settings.model, headers, tls, settings.tokenizer, ip)
    window = settings.in_flight_batches or (ENGINE_WINDOW if settings.backend == "torch" else None)
    return Replica(label, open_replica(settings.backend, spec), Window(window))


def _waits(settings: UpstreamConfig) -> Waits:
    if settings.backend == "torch":
        # The parent watches over engines, and restarts them.
        return ENGINE_PROBES
    return msgspec.structs.replace(REMOTE_PROBES, stalled_s=settings.attempt_timeout_s)
