"""One worker's share of the bounds of the whole gateway."""

from hypothesis import given
from hypothesis import strategies as st

from gateway.config.boot import worker_share
from gateway.config.schema import Config
from tests.config_texts import parsed

CONFIG = """
workers: {workers}
quotas: {{store: "redis://localhost", gateways: 3}}
limits: {{in_flight_bytes: {bound}}}
upstreams:
  tei: {{backend: tei, replicas: ["http://tei"], in_flight_batches: {bound}, queue_tokens: {bound}}}
models: {{m: {{upstream: tei}}}}
tenants: {{acme: {{queue_tokens: {bound}, limits: {{tokens_per_minute: {bound}}}}}}}
"""


def bounds(config: Config) -> tuple[int, int, int]:
    upstream = config.upstreams["tei"]
    return config.limits.in_flight_bytes, upstream.in_flight_batches, upstream.queue_tokens


def config_of(workers: int, bound: int) -> Config:
    return parsed(CONFIG.format(workers=workers, bound=bound))


@given(st.integers(1, 64), st.integers(1, 10**12))
def test_shares_add_up_and_none_is_zero(workers: int, bound: int) -> None:
    for share in bounds(worker_share(config_of(workers, bound))):
        assert share >= 1
        assert bound <= share * workers < bound + workers


def test_single_worker_has_the_whole_bound() -> None:
    assert config_of(1, 7) == worker_share(config_of(1, 7))


def test_tenant_limits_are_whole_and_workers_count_as_gateways() -> None:
    whole, share = config_of(4, 100), worker_share(config_of(4, 100))

    assert whole.tenants == share.tenants
    assert 12 == share.quotas.gateways
