"""The webhook of a gateway with two workers: each event once, whatever workers see of it."""

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from gateway.tenants.keyring import key_digest
from loadtest.processes import free_port
from tests.fakes.webhook_receiver import Receiver, receiving
from tests.processes.conftest import KEY, Served, wait_until
from tests.processes.test_observability import running
from tests.quotas.redis_server import RedisServer

pytestmark = pytest.mark.slow

SECRET = "a secret of the receiver"
CONFIG = """
listen: 127.0.0.1:0
workers: 2
currency: EUR
quotas: {{store: "{store}", timeout_ms: 2000}}
notify: {{url: "{url}", secret: "{secret}", slow_for_s: 1}}
upstreams:
  one: {{backend: tei, hedge_share: 0, replicas: ["http://127.0.0.1:{fast}", "http://127.0.0.1:{slow}"]}}
models: {{bge: {{upstream: one, price_per_million_tokens: 1000}}}}
tenants:
  ops: {{keys: [{{digest: "{digest}", scopes: [embed, admin]}}], limits: {{budget_per_month: 2}}}}
"""


@pytest.fixture
def stubs() -> Iterator[tuple[int, int]]:
    """Run a TEI stub, and one that takes a hundred times as long."""
    with ExitStack() as stack:
        ports = []
        for base_ms in ("4", "400"):
            ports.append(free_port())
            command = (sys.executable, "-m", "loadtest.stub", "--port", str(ports[-1]), "--base-ms", base_ms)
            stack.enter_context(running(*command, port=ports[-1]))
        yield ports[0], ports[1]


def test_each_event_is_sent_once_and_again_after_a_failure(
    own_redis: RedisServer, stubs: tuple[int, int], tmp_path: Path
) -> None:
    with receiving(SECRET, 503) as receiver:
        fast, slow = stubs
        file = tmp_path / "router.yaml"
        values = {"store": own_redis.url, "url": receiver.url, "secret": SECRET, "digest": key_digest(KEY)}
        file.write_text(CONFIG.format(fast=fast, slow=slow, **values))
        served = Served(file).wait_until_up()
        try:
            _check_events(served, own_redis, receiver, slow)
        finally:
            served.stop()
    log = "".join(served.log)
    assert SECRET not in log
    assert "team=search" not in log


def _check_events(served: Served, redis: RedisServer, receiver: Receiver, slow: int) -> None:
    def call(number: int) -> None:
        with served.client() as client:
            client.post("/v1/embeddings", json={"input": f"text {number}", "model": "bge"})

    def has(kind: str) -> bool:
        """Call until the receiver has accepted a call of this kind."""
        with ThreadPoolExecutor(8) as callers:
            list(callers.map(call, range(24)))
        return kind in receiver.kinds()

    assert wait_until(lambda: has("replica_slow"))
    assert wait_until(lambda: has("budget"))
    with served.client() as client:
        client.put("/admin/tenants/acme", json={}).raise_for_status()
        key = client.post("/admin/keys", json={"tenant": "acme"}).raise_for_status().json()["key"]

    def knows_key(_: int) -> bool:
        with served.client() as client:
            return client.get("/usage", headers={"authorization": f"Bearer {key}"}).status_code == 200

    # New connections reach either worker. Both must know the key, so that both notice its loss.
    assert wait_until(lambda: all(map(knows_key, range(16))))
    redis.command("FLUSHALL")
    assert wait_until(lambda: sum('"event":"store_lost"' in line for line in served.log) == 2)
    assert wait_until(lambda: "store_loss" in receiver.kinds())
    events = {call.id: call.body for call in receiver.calls}

    assert all(call.is_signed for call in receiver.calls)
    # The first call was refused once with 503, and repeated with its id.
    assert len(receiver.calls) == len(events) + 1
    assert sorted({body["type"] for body in events.values()}) == sorted(
        body["type"] for body in events.values()
    )
    slowness = next(body for body in events.values() if body["type"] == "replica_slow")["data"]
    assert f"http://127.0.0.1:{slow}" == slowness["replica"]
    assert slowness["slowness"] >= 3
    budget = next(body for body in events.values() if body["type"] == "budget")["data"]
    assert ("ops", 2.0) == (budget["tenant"], budget["amount"])
