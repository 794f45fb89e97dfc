"""The history of a gateway outlives it, whether it is stopped or killed."""

import os
import signal
from pathlib import Path

import httpx
import pytest

from gateway.tenants.keyring import key_digest
from tests.processes.conftest import KEY, Served
from tests.quotas.redis_server import RedisServer
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.slow

OPERATOR = "key-of-an-operator"
CONFIG = """
listen: 127.0.0.1:0
workers: {workers}
state_dir: {state}
quotas: {{store: "{store}"}}
admin: {{keys: ["{operator}"]}}
upstreams: {{one: {{backend: tei, replicas: ["http://127.0.0.1:9"]}}}}
models: {{bge: {{upstream: one}}}}
tenants: {{acme: {{keys: ["{caller}"]}}}}
"""
CALLS = 12


@pytest.mark.parametrize("kept", ["state_dir", "redis"])
def test_calls_of_all_workers_are_there_after_a_stop_and_a_kill(  # noqa: PLR0915 - three gateways
    tmp_path: Path, kept: str
) -> None:
    redis = RedisServer(tmp_path) if kept == "redis" else None
    config = tmp_path / "router.yaml"
    config.write_text(
        CONFIG.format(
            workers=1 if redis is None else 2,
            state=tmp_path / "kept",
            store="memory" if redis is None else redis.url,
            operator=key_digest(OPERATOR),
            caller=key_digest(KEY),
        )
    )

    def calls_shown(served: Served) -> int:
        with served.client() as client:
            answered = client.get("/usage/history?range=24h")
        assert answered.status_code == 200, answered.text
        assert answered.json()["kept"] == kept
        return sum(point["calls"] or 0 for point in answered.json()["points"])

    served = Served(config).wait_until_up()
    try:
        for _ in range(CALLS):
            # A connection of its own, so that all workers get calls.
            httpx.post(
                f"{served.url}/v1/embeddings",
                json={"input": "x", "model": "bge"},
                headers={"authorization": f"Bearer {KEY}"},
                timeout=PATIENCE_S,
            )
    finally:
        assert served.stop() == 0
    again = Served(config).wait_until_up()
    try:
        assert calls_shown(again) == CALLS
        headers = {"authorization": f"Bearer {OPERATOR}"}
        found = httpx.get(f"{again.url}/admin/history/replicas?range=1h", headers=headers, timeout=PATIENCE_S)
        assert [each["upstream"] for each in found.json()["data"]] == ["one"], found.text
        for pid in (*again.children(), again.process.pid):
            os.kill(pid, signal.SIGKILL)
        again.process.wait(PATIENCE_S)
    finally:
        again.stop()
    third = Served(config).wait_until_up()
    try:
        assert calls_shown(third) == CALLS
    finally:
        third.stop()
        if redis is not None:
            redis.stop()
