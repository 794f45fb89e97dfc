"""One worker's part of what is bounded for the whole gateway. Pure."""

import msgspec

from gateway.config.schema import Config, Upstream


def worker_share(config: Config) -> Config:
    """The config as each of its workers is given it: bounds are divided and rounded up.

    Quotas stay whole, because workers count them together, each as a gateway of its own; so does what one
    tenant may have waiting, because its calls may all come by one connection.
    """
    workers = config.workers

    def upstream(one: Upstream) -> Upstream:
        return msgspec.structs.replace(
            one,
            # A window that is learnt is learnt beside the other workers'.
            in_flight_batches=one.in_flight_batches and _share(one.in_flight_batches, workers),
            queue_tokens=_share(one.queue_tokens, workers),
        )

    return msgspec.structs.replace(
        config,
        quotas=msgspec.structs.replace(config.quotas, gateways=config.quotas.gateways * workers),
        limits=msgspec.structs.replace(
            config.limits, in_flight_bytes=_share(config.limits.in_flight_bytes, workers)
        ),
        upstreams={name: upstream(one) for name, one in config.upstreams.items()},
    )


def _share(bound: int, workers: int) -> int:
    return -(-bound // workers)
