"""Real servers, and ledgers on them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.quotas.redis_server import RedisServer, binary, wheel_binary


@pytest.fixture(scope="module", params=sorted({binary(), wheel_binary()}), ids=lambda path: path[-40:])
def redis(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """One server a module for each release that is here: 6.2 from the wheel, another from the path."""
    server = RedisServer(tmp_path_factory.mktemp("redis"), request.param)
    yield server
    server.stop()


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[RedisServer]:
    """A server that the test may freeze and kill."""
    server = RedisServer(tmp_path)
    yield server
    server.stop()
