"""A drain reaches all workers and all gateways on a Redis, and lasts until it is undone."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fakes.tei import FakeTei
from tests.fakes.threaded import serve_in_thread
from tests.processes.conftest import Served, wait_until
from tests.quotas.redis_server import RedisServer

pytestmark = pytest.mark.slow

CONFIG = """
listen: 127.0.0.1:0
workers: 2
quotas: {{store: "{store}"}}
reload: {{watch: false}}
upstreams: {{pair: {{backend: tei, replicas: ["{one}", "{two}"]}}}}
models: {{m: {{upstream: pair}}}}
"""


class Stand:
    """Two servers, a Redis, and the file that gateways start with."""

    def __init__(self, folder: Path, resources: ExitStack) -> None:
        self.first, self.second = FakeTei(), FakeTei()
        self.one, self.two = (
            resources.enter_context(serve_in_thread(server)) for server in (self.first, self.second)
        )
        redis = RedisServer(folder)
        resources.callback(redis.stop)
        self.path = folder / "router.yaml"
        self.path.write_text(CONFIG.format(store=redis.url, one=self.one, two=self.two))
        self._resources = resources

    def gateway(self) -> Served:
        """Start a gateway, which is stopped with the rest."""
        running = Served(self.path).wait_until_up()
        self._resources.callback(running.stop)
        return running


@pytest.fixture
def stand(tmp_path: Path) -> Iterator[Stand]:
    with ExitStack() as resources:
        yield Stand(tmp_path, resources)


def embed(gateway: Served, name: str, times: int = 16) -> None:
    """Call over new connections, which either worker may accept."""
    for number in range(times):
        with gateway.client() as client:
            reply = client.post("/v1/embeddings", json={"model": "m", "input": f"{name} {number}"})
            assert 200 == reply.status_code, reply.text


def act(gateway: Served, action: str, **body: Any) -> httpx.Response:
    with gateway.client() as client:
        return client.post(f"/admin/replicas/{action}", json=body)


def state(gateway: Served, replica: str) -> str:
    with gateway.client() as client:
        replicas = client.get("/admin/status").json()["replicas"]
    return str(next(each["state"] for each in replicas if each["name"] == replica))


def is_never(gateway: Served, replica: str, unwanted: str) -> bool:
    """Return whether many replies, of either worker, have another state."""
    return all(state(gateway, replica) != unwanted for _ in range(12))


def test_a_drain_reaches_all_workers_and_gateways_and_outlasts_restarts(stand: Stand) -> None:
    gateway, other = stand.gateway(), stand.gateway()
    embed(gateway, "before")
    assert stand.first.requests
    reply = act(gateway, "drain", upstream="pair", replica=stand.one)
    assert 200 == reply.status_code, reply.text
    assert ["upstreams.pair.drained"] == [change["path"] for change in reply.json()["changes"]]
    # Both workers follow before the reply.
    count = len(stand.first.requests)
    embed(gateway, "drained")
    assert count == len(stand.first.requests)
    assert wait_until(lambda: is_never(other, stand.one, "up"))
    embed(other, "drained on the other")
    assert count == len(stand.first.requests)
    gateway.stop()
    again = stand.gateway()
    assert wait_until(lambda: is_never(again, stand.two, "joining"))
    embed(again, "restarted")
    assert (count, "drained") == (len(stand.first.requests), state(again, stand.one))
    refused = act(again, "drain", upstream="pair", replica=stand.two)
    assert (422, True) == (refused.status_code, "the last replica" in refused.text)

    assert 200 == act(other, "undrain", upstream="pair", replica=stand.one).status_code
    assert wait_until(lambda: is_never(again, stand.one, "drained"))
    embed(again, "put back", 32)
    assert len(stand.first.requests) > count
    unknown = act(again, "undrain", upstream="pair", replica=stand.one)
    assert (404, True) == (unknown.status_code, "was not drained here" in unknown.text)
