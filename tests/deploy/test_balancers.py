"""The examples of deploy/balancers with the real programs: a rolling restart behind each loses no call."""

import re
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import httpx
import pytest

from backends.tei_protos.tei_pb2 import EmbedRequest
from tests.fakes.tei import FakeTei
from tests.fakes.threaded import serve_in_thread
from tests.processes.conftest import KEY, Served, wait_until
from tests.quotas.redis_server import free_port
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parents[2] / "deploy" / "balancers"
CONFIG = """
listen: 127.0.0.1:{http}
grpc: {{listen: "127.0.0.1:{grpc}"}}
lame_duck_s: 3
upstreams: {{one: {{backend: tei, replicas: ["{replica}"]}}}}
models: {{m: {{upstream: one}}}}
"""
HTTP_CALLERS = 3
GRPC_CALLERS = 2
PAUSE_S = 0.02
CALLS_MIN = 300


class Ports(NamedTuple):
    """Ports of one gateway, or of the balancer."""

    http: int
    grpc: int


class Callers:
    """Threads that call through a balancer, over connections that stay open. outcomes: of all calls."""

    def __init__(self, balancer: Ports) -> None:
        self.http: list[str] = []
        self.grpc: list[str] = []
        self._balancer = balancer
        self._stop = threading.Event()
        calls = [self._call_http] * HTTP_CALLERS + [self._call_grpc] * GRPC_CALLERS
        self._threads = [threading.Thread(target=call) for call in calls]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(PATIENCE_S)

    def _call_http(self) -> None:
        with http_client(self._balancer.http) as client:
            while not self._stop.wait(PAUSE_S):
                try:
                    reply = client.post("/v1/embeddings", json={"model": "m", "input": "a"})
                    self.http.append(
                        "ok" if reply.status_code == 200 else f"{reply.status_code} {reply.text}"
                    )
                except httpx.TransportError as error:
                    self.http.append(repr(error))

    def _call_grpc(self) -> None:
        with grpc.insecure_channel(f"127.0.0.1:{self._balancer.grpc}") as channel:
            while not self._stop.wait(PAUSE_S):
                self.grpc.append(embed_by_grpc(channel))


def http_client(port: int) -> httpx.Client:
    return httpx.Client(
        base_url=f"http://127.0.0.1:{port}",
        headers={"authorization": f"Bearer {KEY}"},
        timeout=PATIENCE_S,
        trust_env=False,
        verify=False,
    )


def embed_by_grpc(channel: grpc.Channel) -> str:
    embed: Any = channel.unary_unary("/tei.v1.Embed/Embed")
    content = EmbedRequest(inputs="a").SerializeToString()
    metadata = (("authorization", f"Bearer {KEY}"), ("model", "m"))
    try:
        embed(content, metadata=metadata, timeout=PATIENCE_S)
    except grpc.RpcError as error:
        return f"{error.code()} {error.details()}"
    return "ok"


def shipped(name: str, balancer: Ports, gateways: list[Ports]) -> str:
    """Return a shipped file with the test's addresses."""
    text = (FOLDER / name).read_text()
    for number, gateway in enumerate(gateways, 11):
        for before, after in (
            (f"10.0.0.{number}:8080", gateway.http),
            (f"10.0.0.{number}:8090", gateway.grpc),
        ):
            assert before in text
            text = text.replace(before, f"127.0.0.1:{after}")
    for listener, port in (("80", balancer.http), ("8090", balancer.grpc)):
        text, count = re.subn(
            rf"^(\s+(?:bind :|listen )){listener}\b", rf"\g<1>{port}", text, flags=re.MULTILINE
        )
        assert 1 == count
    return text


def start_haproxy(folder: Path, balancer: Ports, gateways: list[Ports]) -> list[str]:
    file = folder / "haproxy.cfg"
    file.write_text(shipped("haproxy.cfg", balancer, gateways))
    return ["-db", "-f", str(file)]


def start_nginx(folder: Path, balancer: Ports, gateways: list[Ports]) -> list[str]:
    file = folder / "nginx.conf"
    file.write_text(shipped("nginx.conf", balancer, gateways))
    own = f"daemon off; pid {folder}/nginx.pid; error_log {folder}/error.log;"
    return ["-p", str(folder), "-c", str(file), "-g", own]


STARTS: dict[str, Callable[[Path, Ports, list[Ports]], list[str]]] = {
    "haproxy": start_haproxy,
    "nginx": start_nginx,
}


def program(name: str) -> str:
    found = shutil.which(name) or shutil.which(name, path="/usr/sbin:/usr/local/sbin")
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


@pytest.fixture(params=STARTS)
def stand(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator["Stand"]:
    path = program(request.param)
    with ExitStack() as resources:
        made = Stand(tmp_path, resources)
        words = STARTS[request.param](tmp_path, made.balancer, made.ports)
        log = resources.enter_context((tmp_path / "balancer.log").open("w"))
        process = subprocess.Popen([path, *words], stdout=log, stderr=log)
        resources.callback(process.wait, PATIENCE_S)
        resources.callback(process.terminate)
        yield made


class Stand:
    """Two gateways on fixed ports, and the ports of a balancer."""

    def __init__(self, folder: Path, resources: ExitStack) -> None:
        self.balancer = Ports(free_port(), free_port())
        self.ports = [Ports(free_port(), free_port()) for _ in range(2)]
        self._folder = folder
        self._resources = resources
        self._replica = resources.enter_context(serve_in_thread(FakeTei()))
        self.gateways = [self._start(number) for number in range(2)]

    def restart(self, number: int) -> None:
        """Stop a gateway as a service manager does, start it again, and wait until it gets calls."""
        assert 0 == self.gateways[number].stop()
        self.gateways[number] = self._start(number)
        assert wait_until(lambda: self.serves(number))

    def _start(self, number: int) -> Served:
        ports = self.ports[number]
        path = self._folder / f"router{number}.yaml"
        path.write_text(CONFIG.format(http=ports.http, grpc=ports.grpc, replica=self._replica))
        gateway = Served(path).wait_until_up()
        self._resources.callback(gateway.stop)
        return gateway

    def serves(self, number: int) -> bool:
        """Return whether a gateway has answered both kinds of calls since its start."""
        with self.gateways[number].client() as client:
            routes = {call["route"] for call in client.get("/admin/calls").json()["calls"]}
        return {"/v1/embeddings", "/tei.v1.Embed/Embed"} <= routes


def test_a_rolling_restart_loses_no_call(stand: Stand) -> None:
    def is_open() -> bool:
        with http_client(stand.balancer.http) as client, suppress(httpx.TransportError):
            return client.get("/v1/models").status_code == 200
        return False

    assert wait_until(is_open)
    callers = Callers(stand.balancer)
    try:
        assert wait_until(lambda: all(stand.serves(number) for number in range(2)))
        for number in range(2):
            stand.restart(number)
        assert wait_until(lambda: len(callers.http) + len(callers.grpc) >= CALLS_MIN)
    finally:
        callers.stop()

    assert [] == [outcome for outcome in callers.http if outcome != "ok"]
    assert [] == [outcome for outcome in callers.grpc if outcome != "ok"]
