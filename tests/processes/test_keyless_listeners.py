"""`listeners`: a caller that sends no key is a tenant there, and there are no operators' paths."""

import json
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.tenants.keyring import key_digest
from tests.conftest import KEY
from tests.processes.conftest import Served, run_serve, wait_until
from tests.processes.test_admin_listener import DISGUISED, OPERATORS_PATHS, free_port

CONFIG = """
listen: 127.0.0.1:0
workers: {workers}
quotas: {{store: "{store}"}}
logs: {{format: json}}
listeners:
  - {{address: "127.0.0.1:{weaviate}", tenant: weaviate}}
  - {{address: "127.0.0.1:{nobody}", tenant: nobody}}
upstreams: {{one: {{backend: tei, replicas: ["http://127.0.0.1:1"]}}}}
models: {{bge: {{upstream: one}}, other: {{upstream: one}}}}
tenants:
  acme: {{keys: ["{acme}"]}}
  weaviate: {{models: [bge]{networks}}}
"""
CALL = {"model": "bge", "input": "a"}


def _config(**changes: object) -> str:
    fields = {"workers": 1, "store": "memory", "networks": "", "acme": key_digest(KEY)}
    return CONFIG.format(**fields | changes)


class Gateway:
    """A running gateway with a listener for a tenant, and one for a tenant that is not defined."""

    def __init__(self, folder: Path, **changes: object) -> None:
        self.path = folder / "router.yaml"
        self.ports = {"weaviate": free_port(), "nobody": free_port()}
        self.changes = self.ports | changes
        self.path.write_text(_config(**self.changes))
        self.served = Served(self.path).wait_until_up()

    def url(self, side: str) -> str:
        return self.served.url if side == "main" else f"http://127.0.0.1:{self.ports[side]}"

    def ask(self, side: str, path: str, body: Any = None, **headers: str) -> httpx.Response:
        method = "GET" if body is None else "POST"
        return httpx.request(
            method, self.url(side) + path, json=body, headers=headers, timeout=10, trust_env=False
        )


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    started = Gateway(tmp_path_factory.mktemp("listeners"))
    yield started
    started.served.stop()


def test_a_caller_without_a_key_is_the_listeners_tenant(gateway: Gateway) -> None:
    models = gateway.ask("weaviate", "/v1/models")
    # The upstream's server does not answer: the call was admitted.
    called = gateway.ask("weaviate", "/v1/embeddings", CALL)
    foreign = gateway.ask("weaviate", "/v1/embeddings", CALL | {"model": "other"})

    assert ["bge"] == [model["id"] for model in models.json()["data"]]
    assert (503, 403) == (called.status_code, foreign.status_code)
    assert "model_forbidden" == foreign.json()["error"]["code"]
    assert 401 == gateway.ask("main", "/v1/embeddings", CALL).status_code


def test_a_key_that_is_sent_counts_and_a_wrong_one_is_refused(gateway: Gateway) -> None:
    own = gateway.ask("weaviate", "/v1/models", authorization=f"Bearer {KEY}")
    wrong = gateway.ask("weaviate", "/v1/models", authorization="Bearer wrong")
    empty = gateway.ask("weaviate", "/v1/models", authorization="")

    assert ["bge", "other"] == [model["id"] for model in own.json()["data"]]
    assert (401, 200) == (wrong.status_code, empty.status_code)


def test_a_tenant_that_is_not_defined_is_refused(gateway: Gateway) -> None:
    reply = gateway.ask("nobody", "/v1/embeddings", CALL)

    assert (403, "tenant_unknown") == (reply.status_code, reply.json()["error"]["code"])
    assert 200 == gateway.ask("nobody", "/livez").status_code


@pytest.mark.parametrize("path", [*OPERATORS_PATHS, *DISGUISED, "/load", "/admin/keys", "/admin/nowhere"])
@pytest.mark.parametrize("key", [None, KEY])
def test_it_has_no_operators_paths(gateway: Gateway, path: str, key: str | None) -> None:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}

    assert 404 == gateway.ask("weaviate", path, **headers).status_code


@pytest.mark.parametrize("path", ["/usage", "/usage/calls", "/usage/history", "/v1/files", "/v1/batches"])
def test_what_a_tenant_has_stored_needs_a_key(gateway: Gateway, path: str) -> None:
    assert 401 == gateway.ask("weaviate", path).status_code


@pytest.mark.parametrize(
    "header",
    [{"origin": "https://evil.example"}, {"sec-fetch-site": "cross-site"}, {"referer": "http://x.example/"}],
)
def test_a_web_page_needs_a_key(gateway: Gateway, header: dict[str, str]) -> None:
    assert 401 == gateway.ask("weaviate", "/v1/embeddings", CALL, **header).status_code


def test_it_is_reported_at_the_start_and_in_the_log_of_its_calls(gateway: Gateway) -> None:
    gateway.ask("weaviate", "/v1/models", **{"x-request-id": "without-a-key"})
    assert wait_until(lambda: any("without-a-key" in line for line in gateway.served.log))
    lines = [json.loads(line) for line in gateway.served.log if line.startswith("{")]
    (call,) = [line for line in lines if line.get("request_id") == "without-a-key"]
    address = f"127.0.0.1:{gateway.ports['weaviate']}"

    assert any(f"a caller at {address} needs no key" in str(line) for line in lines)
    assert ("weaviate", f"listener/{address}") == (call["tenant"], call["key"])


def test_a_reload_applies_networks_and_keeps_listeners(gateway: Gateway) -> None:
    before = gateway.ask("main", "/v1/models")
    gateway.path.write_text(_config(**gateway.changes | {"networks": ", networks: [127.0.0.1/32]"}))
    gateway.served.process.send_signal(signal.SIGHUP)
    assert wait_until(lambda: gateway.ask("main", "/v1/models").status_code == 200)
    through_proxy = gateway.ask("main", "/v1/models", **{"x-forwarded-for": "127.0.0.1"})
    operators = gateway.ask("main", "/admin/keys", via="1.1 proxy")
    gateway.path.write_text(_config(**gateway.changes))
    gateway.served.process.send_signal(signal.SIGHUP)
    assert wait_until(lambda: gateway.ask("main", "/v1/models").status_code == 401)

    assert (401, 401, 401) == (before.status_code, through_proxy.status_code, operators.status_code)
    assert 200 == gateway.ask("weaviate", "/v1/models").status_code


@pytest.mark.skipif(shutil.which("redis-server") is None, reason="there is no redis-server")
def test_every_worker_accepts_at_every_listener(tmp_path: Path) -> None:
    port = free_port()
    arguments = ["redis-server", "--port", str(port), "--save", "", "--dir", str(tmp_path)]
    with subprocess.Popen(arguments, stdout=subprocess.DEVNULL) as redis:
        try:
            started = Gateway(tmp_path, workers=2, store=f"redis://127.0.0.1:{port}/0")
            try:
                statuses = {started.ask("weaviate", "/v1/models").status_code for _ in range(20)}
            finally:
                started.served.stop()
        finally:
            redis.terminate()

    assert {200} == statuses


def test_reports_a_port_in_use(tmp_path: Path, gateway: Gateway) -> None:
    path = tmp_path / "router.yaml"
    path.write_text(_config(weaviate=gateway.ports["weaviate"], nobody=free_port()))
    ended = run_serve(path)

    assert 1 == ended.returncode
    assert "`listeners[0].address:` in router.yaml" in ended.stderr
