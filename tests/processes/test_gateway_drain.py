"""A drained gateway is not ready and serves; the fleet and the command line show and change it."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.fakes.tei import FakeTei
from tests.fakes.threaded import serve_in_thread
from tests.processes.callers import is_logged, status
from tests.processes.conftest import KEY, Served, wait_until
from tests.quotas.redis_server import RedisServer, free_port
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.slow

CONFIG = """
listen: 127.0.0.1:0
workers: 2
grpc: {{listen: "127.0.0.1:{grpc}"}}
quotas: {{store: "{store}"}}
reload: {{watch: false}}
upstreams: {{pair: {{backend: tei, replicas: ["{one}", "{two}"]}}}}
models: {{m: {{upstream: pair}}}}
"""


class Stand(NamedTuple):
    """Two gateways with two workers each, the second with another setting; the first one's port of gRPC."""

    first: Served
    second: Served
    grpc_port: int
    replicas: tuple[str, str]
    second_file: Path


@pytest.fixture(scope="module")
def stand(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    folder = tmp_path_factory.mktemp("drain")
    with ExitStack() as resources:
        one, two = (resources.enter_context(serve_in_thread(FakeTei())) for _ in range(2))
        redis = RedisServer(folder)
        resources.callback(redis.stop)
        gateways, ports = [], []
        for extra in ("", "drain_s: 3\n"):
            ports.append(free_port())
            path = folder / f"router{len(ports)}.yaml"
            path.write_text(CONFIG.format(store=redis.url, one=one, two=two, grpc=ports[-1]) + extra)
            gateways.append(Served(path).wait_until_up())
            resources.callback(gateways[-1].stop)
        yield Stand(gateways[0], gateways[1], ports[0], (one, two), folder / "router2.yaml")


def run(gateway: Served, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gateway", *words, "--url", gateway.url],
        env={**os.environ, "GATEWAY_API_KEY": KEY},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


def fleet(gateway: Served) -> list[dict[str, Any]]:
    ended = run(gateway, "status", "--fleet", "--json")
    assert 0 == ended.returncode, ended.stderr
    members: list[dict[str, Any]] = json.loads(ended.stdout)["members"]
    return members


def states(gateway: Served) -> dict[str, str]:
    return {member["address"]: member["state"] for member in fleet(gateway)}


def readiness(gateway: Served) -> set[str]:
    """Return how /readyz answers over new connections, which either worker may accept."""
    found = set()
    for _ in range(12):
        with gateway.client() as client:
            try:
                reply = client.get("/readyz")
            except httpx.TransportError:
                found.add("gone")
            else:
                found.add("drained" if "is drained" in reply.text else str(reply.status_code))
    return found


def health(port: int) -> int:
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        reply = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE_S)
        return int(reply.status)


def address(gateway: Served) -> str:
    return gateway.url.rpartition("/")[2]


def test_a_drained_gateway_is_out_and_serves_until_it_is_put_back(stand: Stand) -> None:
    gateway, other = stand.first, stand.second
    assert wait_until(lambda: {"ready"} == set(states(other).values()) and 2 == len(states(other)))
    drained = run(gateway, "drain", "--json")
    assert 0 == drained.returncode, drained.stderr
    assert json.loads(drained.stdout)["drained_since_s"] > 0

    assert {"drained"} == readiness(gateway)
    assert {"200"} == readiness(other)
    assert health_pb2.HealthCheckResponse.NOT_SERVING == health(stand.grpc_port)
    assert {200} == {status(gateway) for _ in range(12)}
    assert wait_until(lambda: {address(gateway): "drained", address(other): "ready"} == states(other))
    assert is_logged(gateway, "this gateway is drained")
    shown = run(gateway, "status", "--once").stdout
    assert "`gateway drain --undo` puts it back" in shown

    # The parent keeps a drain, not the worker that took the request.
    workers = {pid for pid, line in gateway.children().items() if "gateway.processes.worker" in line}
    for pid in workers:
        os.kill(pid, signal.SIGKILL)
    assert wait_until(lambda: len(set(gateway.children()) - workers) >= 2)
    assert wait_until(lambda: {"drained"} == readiness(gateway))
    assert wait_until(lambda: 200 == status(gateway))

    assert 0 == run(gateway, "drain", "--undo").returncode
    assert wait_until(lambda: {"200"} == readiness(gateway))
    assert wait_until(lambda: health_pb2.HealthCheckResponse.SERVING == health(stand.grpc_port))
    assert wait_until(lambda: {address(gateway): "ready", address(other): "ready"} == states(other))


def test_the_fleet_names_the_setting_that_differs(stand: Stand) -> None:
    members = {member["address"]: member for member in fleet(stand.first)}

    assert [] == members[address(stand.first)]["differs"]
    assert ["drain_s"] == members[address(stand.second)]["differs"]
    assert members[address(stand.first)]["is_this"]
    assert 2 == members[address(stand.second)]["workers"]
    table = run(stand.first, "status", "--fleet").stdout
    assert "2 configurations" in table
    assert "differs in drain_s" in table

    stand.second_file.write_text(stand.second_file.read_text() + "currency: EUR\n")
    with stand.second.client() as client:
        assert 200 == client.post("/admin/reload").status_code
    assert wait_until(lambda: ["currency", "drain_s"] in [each["differs"] for each in fleet(stand.first)])


def test_recent_calls_are_those_of_all_gateways(stand: Stand) -> None:
    assert {200} == {status(stand.first), status(stand.second)}

    def gateways() -> set[str]:
        with stand.second.client() as client:
            reply = client.get("/admin/calls?fleet=true").json()
            assert ([], "") == (reply["missing"], reply["problem"])
            return {call["gateway"].rpartition(":")[2] for call in reply["calls"]}

    ports = {address(gateway).rpartition(":")[2] for gateway in (stand.first, stand.second)}
    # Calls of another worker are read from its file, which it writes every second.
    assert wait_until(lambda: gateways() == ports)


def test_a_replica_is_drained_by_its_url_alone(stand: Stand) -> None:
    replica = stand.replicas[0]
    ended = run(stand.first, "replicas", "drain", replica)
    assert (0, True) == (ended.returncode, "its state is drained" in ended.stdout), ended.stderr
    assert wait_until(
        lambda: all(f"pair {replica}" in member["drained_replicas"] for member in fleet(stand.second))
    )
    listed = json.loads(run(stand.first, "replicas", "list", "--json").stdout)
    assert {replica: True, stand.replicas[1]: False} == {each["name"]: each["is_drained"] for each in listed}

    last = run(stand.first, "replicas", "drain", stand.replicas[1], "--upstream", "pair")
    unknown = run(stand.first, "replicas", "drain", "http://nowhere:1")
    assert (1, True) == (last.returncode, "last replica" in last.stderr)
    assert (1, True) == (unknown.returncode, "no upstream has the replica" in unknown.stderr)
    back = run(stand.first, "replicas", "undrain", replica, "--json")
    assert (0, True) == (back.returncode, "changes" in json.loads(back.stdout)), back.stderr
