"""Fixtures: real Redis servers, and the command line in this process."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from gateway.cli.main import main
from tests.quotas.redis_server import RedisServer, binary, wheel_binary


@pytest.fixture(scope="module", params=sorted({binary(), wheel_binary()}), ids=lambda path: path[-40:])
def redis(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """Start one server per module and available release: 6.2 from the wheel, another one from the path."""
    server = RedisServer(tmp_path_factory.mktemp("redis"), request.param)
    yield server
    server.stop()


class Ended(NamedTuple):
    """Result of a command."""

    status: object
    out: str
    err: str


Commands = Callable[..., Ended]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Commands:
    """Run `gateway …` in this process, which is faster than a new one."""

    def run(*words: str) -> Ended:
        monkeypatch.setattr("sys.argv", ["gateway", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        return Ended(ended.value.code, *capsys.readouterr())

    return run


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[RedisServer]:
    """Start a server that the test may freeze and kill."""
    server = RedisServer(tmp_path)
    yield server
    server.stop()
