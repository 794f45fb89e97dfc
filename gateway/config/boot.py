"""Settings that the application of one worker is built from, and its share of the gateway's bounds. Pure."""

from collections.abc import Mapping
from typing import Literal, TypeAlias

import msgspec

from gateway.config.identity import Identity
from gateway.config.schema import CacheSettings, Config, UpstreamSettings

# Names of the GenAI metrics of embeddings: of OpenTelemetry's last conventions, of v1.41.0, or of both.
MetricNames: TypeAlias = Literal["latest", "v1.41", "both"]


class AppBoot(msgspec.Struct, frozen=True):
    """Settings that one worker's application is built from.

    first_key_digest: digest of the key that is valid while no tenant is configured; empty until a gateway has
    created it. first_key_waits: Redis was unavailable at start and may hold tenants, in which case the first
    key is not valid. first_key_is_kept: all gateways of the store agree on it by its digest there. engines:
    upstream name → addresses of its model in engines, by `UpstreamSettings.devices`. added_models: models
    that are not in the file. admin_port, manager_port: ports of these listeners, if they exist.
    listener_ports: those of `listeners`, in their order. worker: index
    of this worker; None if there is only one. tenants_file: of tenants and keys where there is no Redis, None
    if no folder for it is known. jobs_file: of the table of batches where there is no Redis; None puts it
    into `batches.dir`. metric_names: of metrics for a collector. identity: of the gateway, the same for all
    its workers; None makes one. is_shared_host: several people can log in to this machine.
    configuration: digests of the sections, None computes them from `config`.
    """

    config: Config
    first_key_digest: str | None = None
    first_key_waits: bool = False
    first_key_is_kept: bool = False
    engines: Mapping[str, Mapping[str, str]] = {}
    added_models: frozenset[str] = frozenset()
    admin_port: int | None = None
    manager_port: int | None = None
    listener_ports: tuple[int, ...] = ()
    worker: int | None = None
    tenants_file: str | None = None
    jobs_file: str | None = None
    metric_names: MetricNames = "latest"
    identity: Identity | None = None
    is_shared_host: bool = False
    configuration: Mapping[str, str] | None = None


def worker_share(config: Config) -> Config:
    """Return the config of one worker, with the bounds divided by the number of workers and rounded up.

    Quotas stay whole, because workers count them together, each as a gateway of its own. A tenant's
    `queue_tokens` stays whole too, because all its requests may arrive on one connection.
    """
    workers = config.workers

    def upstream_share(upstream: UpstreamSettings) -> UpstreamSettings:
        return msgspec.structs.replace(
            upstream,
            # An absent window is learned by each worker, from the replica that all of them load.
            in_flight_batches=upstream.in_flight_batches and _divide(upstream.in_flight_batches, workers),
            queue_tokens=_divide(upstream.queue_tokens, workers),
        )

    return msgspec.structs.replace(
        config,
        quotas=msgspec.structs.replace(config.quotas, gateways=config.quotas.gateways * workers),
        limits=msgspec.structs.replace(
            config.limits, in_flight_bytes=_divide(config.limits.in_flight_bytes, workers)
        ),
        cache=cache_share(config),
        upstreams={name: upstream_share(upstream) for name, upstream in config.upstreams.items()},
    )


def cache_share(config: Config) -> CacheSettings | None:
    """Return the cache of one worker. All workers share the one in Redis, and its bound."""
    cache = config.cache
    if cache is None or cache.store != "memory":
        return cache
    return msgspec.structs.replace(cache, bytes=_divide(cache.bytes, config.workers))


def _divide(bound: int, workers: int) -> int:
    """Divide, rounded up, so that no worker is left without a share."""
    return -(-bound // workers)
