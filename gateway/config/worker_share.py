"""Division of the gateway's bounds among its HTTP workers. Pure."""

import msgspec

from gateway.config.schema import CacheSettings, Config, UpstreamSettings


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
