"""Several HTTP workers behind one address share its callers, its metrics and its shutdown."""

import os
import re
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.processes.conftest import (
    KEY,
    ON_A_MACHINE_OF_ONE,
    TLS_CONTEXT,
    Served,
    alive,
    run_serve,
    wait_until,
)
from tests.processes.holding_server import HELD, HoldingServer
from tests.quotas.redis_server import RedisServer
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.slow

CONFIG = """
listen: {listen}
workers: {workers}
drain_s: 25
quotas: {{store: "{store}"}}
upstreams: {{stub: {{backend: tei, replicas: ["{url}"], in_flight_batches: 64}}}}
models: {{m: {{upstream: stub}}}}
"""
OPENAI = "/v1/embeddings"


class Stand(NamedTuple):
    """Gateway of two workers, what it runs on, and the folder of its temporary files."""

    gateway: Served
    stub: HoldingServer
    redis: RedisServer
    config: Path
    left: Path

    def write(self, listen: str, workers: int) -> None:
        """Write the configuration of a gateway on the same servers."""
        urls = {"store": self.redis.url, "url": self.stub.url}
        self.config.write_text(CONFIG.format(listen=listen, workers=workers, **urls))


@contextmanager
def running(folder: Path) -> Iterator[Stand]:
    stub, redis = HoldingServer(), RedisServer(folder)
    path, left = folder / "router.yaml", folder / "left"
    left.mkdir()
    path.write_text(CONFIG.format(listen="127.0.0.1:0", workers=2, store=redis.url, url=stub.url))
    gateway = Served(path, {"TMPDIR": str(left)}).wait_until_up()
    yield Stand(gateway, stub, redis, path, left)
    gateway.stop()
    redis.stop()
    stub.stop()


@pytest.fixture
def stand(tmp_path: Path) -> Iterator[Stand]:
    """Serve a gateway to one test, which stops it or counts exactly."""
    with running(tmp_path) as own:
        yield own


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    """Serve a gateway to the tests that leave it running, in order."""
    with running(tmp_path_factory.mktemp("shared")) as everyones:
        yield everyones


def workers(gateway: Served) -> list[int]:
    return [pid for pid, line in gateway.children().items() if "gateway.processes.worker" in line]


def call(gateway: Served, text: str = "a") -> int:
    """Return the status of a request on its own connection, or 0 if the connection broke."""
    headers = {"authorization": f"Bearer {KEY}"}
    try:
        reply = httpx.post(
            f"{gateway.url}{OPENAI}",
            json={"input": text},
            headers=headers,
            timeout=PATIENCE_S,
            trust_env=False,
            verify=TLS_CONTEXT,
        )
    except httpx.TransportError:
        return 0
    return reply.status_code


def value(gateway: Served, sample: str, **labels: str) -> float:
    """Return the sum of a metric's samples, as reported by any worker."""
    text = httpx.get(f"{gateway.url}/metrics", timeout=PATIENCE_S, trust_env=False, verify=TLS_CONTEXT).text
    return sum(
        sample_value.value
        for family in text_string_to_metric_families(text)
        for sample_value in family.samples
        if sample_value.name == sample and labels.items() <= sample_value.labels.items()
    )


def connections(pid: int) -> int:
    """Count the open sockets of a process."""
    return sum(target.startswith("socket:") for target in opened(pid))


def opened(pid: int) -> Iterator[str]:
    """Yield the targets of a process' file descriptors."""
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            yield str(link.readlink())


def test_workers_share_connections_and_each_reports_all_metrics(shared: Stand) -> None:
    gateway = shared.gateway
    before = {pid: connections(pid) for pid in workers(gateway)}
    with ExitStack() as held:
        clients = [held.enter_context(gateway.client()) for _ in range(32)]
        statuses = [client.post(OPENAI, json={"input": ["a b", "c"]}).status_code for client in clients]
        grown = [connections(pid) - sockets for pid, sockets in before.items()]

    assert statuses == [200] * 32
    assert len(grown) == 2
    # Each has some of the callers' connections, in addition to those that it opens itself.
    assert min(grown) >= 4
    # The other worker's last requests are counted within milliseconds.
    assert wait_until(lambda: 32 == value(gateway, "gateway_calls_total", route=OPENAI, status="200"))
    for _ in range(6):
        assert 32 == value(gateway, "gateway_calls_total", route=OPENAI, status="200")
        assert 64 == value(gateway, "gateway_inputs_total")
        assert 32 == value(gateway, "gateway_call_duration_seconds_count", route=OPENAI)
        assert 1 == value(gateway, "gateway_replica_up", upstream="stub")
    resident = [int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 for pid in workers(gateway)]
    assert value(gateway, "process_resident_memory_bytes") > 1.5 * min(resident)


def test_each_worker_registers_as_a_gateway_for_quotas(shared: Stand) -> None:
    assert wait_until(lambda: shared.redis.command("ZCARD", "gw:gateways").strip() == ":2")


def test_killed_worker_loses_only_its_own_requests_and_no_counts(stand: Stand) -> None:
    gateway, stub = stand.gateway, stand.stub
    assert [call(gateway) for _ in range(20)] == [200] * 20
    pids = workers(gateway)
    with ThreadPoolExecutor(32) as callers:
        held = [callers.submit(call, gateway, f"{HELD} {number}") for number in range(24)]
        assert wait_until(lambda: stub.waiting == 24)
        os.kill(pids[0], signal.SIGKILL)
        assert wait_until(lambda: any(future.done() for future in held))
        statuses_without_it = [call(gateway) for _ in range(10)]
        # The counts of another worker are visible about 20 ms later.
        assert wait_until(lambda: answered(gateway) == 30)
        stub.release()
        ends = [future.result() for future in held]
    assert wait_until(lambda: len(workers(gateway)) == 2)

    assert statuses_without_it == [200] * 10
    assert set(ends) == {0, 200}
    assert pids[1] in workers(gateway)
    assert pids[0] not in workers(gateway)
    assert wait_until(lambda: answered(gateway) == 30 + ends.count(200))
    assert 1 == value(gateway, "gateway_process_restarts_total")
    assert 1 == value(gateway, "gateway_process_restarts_total", reason="ended", process=ended(gateway))
    # The new worker serves again, and continues the counts of the killed one.
    new = next(pid for pid in workers(gateway) if pid not in pids)
    assert wait_until(lambda: listens(gateway, new))
    assert [call(gateway) for _ in range(32)] == [200] * 32
    assert wait_until(lambda: answered(gateway) == 62 + ends.count(200))


def answered(gateway: Served) -> float:
    """Return the number of successful requests of all workers, as reported by any of them."""
    return value(gateway, "gateway_calls_total", route=OPENAI, status="200")


def ended(gateway: Served) -> str:
    """Return the name of the process that was restarted, from the log."""
    (name,) = re.findall(r"(worker \d) exited \(signal SIGKILL\); restarting it", "".join(gateway.log))
    return str(name)


@ON_A_MACHINE_OF_ONE
def test_hung_worker_is_restarted_and_every_worker_reports_it(shared: Stand) -> None:
    gateway = shared.gateway
    pids = workers(gateway)
    os.kill(pids[0], signal.SIGSTOP)
    assert wait_until(lambda: pids[0] not in workers(gateway) and len(workers(gateway)) == 2)
    new = next(pid for pid in workers(gateway) if pid not in pids)
    assert wait_until(lambda: listens(gateway, new))
    name = ended(gateway)
    reporting_workers = set()
    for _ in range(200):
        reply = httpx.get(
            f"{gateway.url}/admin/status", timeout=PATIENCE_S, trust_env=False, verify=TLS_CONTEXT
        )
        assert reply.status_code == 200, reply.text
        status = reply.json()
        (change,) = [change for change in status["changes"] if change["subject"].startswith("worker")]
        assert (name, "hung, started again", "signal SIGKILL") == (
            change["subject"],
            change["what"],
            change["reason"],
        )
        reporting_workers.add(status["worker"])

    assert {0, 1} == reporting_workers
    assert pids[1] in workers(gateway)
    assert any(f"{name} does not respond; killing it" in line for line in gateway.log)
    assert 1 == value(gateway, "gateway_process_restarts_total", reason="hung", process=name)
    assert 0 == value(gateway, "gateway_process_restarts_total", reason="ended")
    assert [call(gateway) for _ in range(16)] == [200] * 16


def listens(gateway: Served, pid: int) -> bool:
    """Return True if a process listens on the gateway's port."""
    port = int(gateway.url.rpartition(":")[2])
    rows = [row.split() for row in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    listening = {f"socket:[{row[9]}]" for row in rows if row[1].endswith(f":{port:04X}") and row[3] == "0A"}
    return any(target in listening for target in opened(pid))


def hold(gateway: Served, stub: HoldingServer, callers: ThreadPoolExecutor) -> list[Future[int]]:
    """Send sixteen requests, to both workers, that the stub holds."""
    held = [callers.submit(call, gateway, f"{HELD} {number}") for number in range(16)]
    assert wait_until(lambda: stub.waiting == 16)
    return held


def test_removed_upstream_leaves_no_gauges(shared: Stand) -> None:
    gateway, config = shared.gateway, shared.config
    assert 200 == call(gateway)
    assert {"replica_up", "lane_queued_tokens"} <= gauges_of(gateway, "stub")
    attempts = value(gateway, "gateway_attempts_total", upstream="stub")
    config.write_text(config.read_text().replace("upstreams: {stub:", "upstreams: {other:"))
    config.write_text(config.read_text().replace("upstream: stub", "upstream: other"))
    gateway.process.send_signal(signal.SIGHUP)
    assert wait_until(lambda: value(gateway, "gateway_replica_up", upstream="other") == 1)
    assert 200 == call(gateway)

    assert wait_until(lambda: all(not gauges_of(gateway, "stub") for _ in range(16)))
    assert {"replica_up", "lane_queued_tokens"} <= gauges_of(gateway, "other")
    # Counters keep their values.
    assert 0 < attempts <= value(gateway, "gateway_attempts_total", upstream="stub")


def gauges_of(gateway: Served, upstream: str) -> set[str]:
    """Return the names of an upstream's gauges, as reported by any worker."""
    text = httpx.get(f"{gateway.url}/metrics", timeout=PATIENCE_S, trust_env=False, verify=TLS_CONTEXT).text
    return {
        family.name.removeprefix("gateway_")
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if family.type == "gauge" and sample.labels.get("upstream") == upstream
    }


def test_drains_all_workers_together_and_leaves_nothing_behind(stand: Stand) -> None:
    gateway, stub = stand.gateway, stand.stub
    children = gateway.children()
    with ThreadPoolExecutor(16) as callers, ExitStack() as clients:
        late = [clients.enter_context(gateway.client()) for _ in range(16)]
        assert {client.get("/readyz").status_code for client in late} == {200}
        held = hold(gateway, stub, callers)
        gateway.process.send_signal(signal.SIGTERM)
        assert wait_until(lambda: {client.get("/readyz").status_code for client in late} == {503})
        assert not any(future.done() for future in held)
        stub.release()
        ends = [future.result() for future in held]

    assert ends == [200] * 16
    assert gateway.stop() == 0
    assert not any(alive(pid) for pid in children)
    assert [] == list(stand.left.iterdir())


def test_second_interrupt_does_not_wait_for_requests_in_flight(stand: Stand) -> None:
    gateway, stub = stand.gateway, stand.stub
    with ThreadPoolExecutor(16) as callers:
        held = hold(gateway, stub, callers)
        gateway.process.send_signal(signal.SIGINT)
        assert wait_until(lambda: any("stopping" in line for line in gateway.log))
        assert not any(future.done() for future in held)
        gateway.process.send_signal(signal.SIGINT)
        ends = [future.result() for future in held]

    assert ends == [0] * 16
    assert gateway.process.wait(PATIENCE_S) == 0


def test_killing_the_parent_leaves_no_worker_and_no_file(stand: Stand) -> None:
    gateway = stand.gateway
    children = gateway.children()

    gateway.process.kill()

    assert len(children) == 2
    assert wait_until(lambda: not any(alive(pid) for pid in children))
    assert [] == list(stand.left.iterdir())


def test_reports_another_gateway_on_the_same_port(shared: Stand) -> None:
    gateway = shared.gateway
    address = gateway.url.removeprefix("http://")
    for count in (1, 2):
        shared.write(address, count)
        ended = run_serve(shared.config)

        assert ended.returncode == 1
        assert f"cannot listen on {address}" in ended.stderr
    assert call(gateway) == 200


def test_reports_another_process_on_the_same_port(shared: Stand) -> None:
    with socket.create_server(("127.0.0.1", 0)) as occupied:
        address = f"127.0.0.1:{occupied.getsockname()[1]}"
        shared.write(address, 2)
        ended = run_serve(shared.config)

    assert ended.returncode == 1
    assert f"cannot listen on {address}" in ended.stderr


def test_several_workers_need_redis(tmp_path: Path) -> None:
    path = tmp_path / "router.yaml"
    path.write_text(CONFIG.format(listen="127.0.0.1:0", workers=2, store="memory", url="http://tei:8080"))
    ended = run_serve(path)

    assert ended.returncode == 1
    assert "workers: more than 1 need" in ended.stderr
