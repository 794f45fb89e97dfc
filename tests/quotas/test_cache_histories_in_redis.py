"""Random histories of two gateways, of which one has a cache in Redis, which stops and continues."""

from collections.abc import Iterator

import pytest
from hypothesis import settings
from hypothesis.stateful import precondition, rule, run_state_machine_as_test

from tests.api.test_cache_histories import TwoGateways
from tests.quotas.redis_server import RedisServer


class TwoGatewaysWithRedis(TwoGateways):
    """The same with a cache in Redis, which may be frozen."""

    is_frozen = False

    @rule()
    def toggle_redis(self) -> None:
        """Freeze Redis, or let it continue."""
        if self.is_frozen:
            self.server.thaw()
        else:
            self.server.freeze()
        self.is_frozen = not self.is_frozen

    @precondition(lambda self: not self.is_frozen)
    @rule()
    def end_pause(self) -> None:
        """Ask Redis again at once after it was frozen."""
        self.cached_store._breaker.record_success()

    def teardown(self) -> None:
        if self.is_frozen:
            self.server.thaw()
        super().teardown()


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """Start a server that histories freeze."""
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.stop()


def test_replies_are_the_same_with_redis(redis_server: RedisServer) -> None:
    class Machine(TwoGatewaysWithRedis):
        url = redis_server.url
        server = redis_server

    run_state_machine_as_test(Machine, settings=settings(max_examples=10, stateful_step_count=15))
