"""`admin.listen`: operators' paths exist only there, and its own address decides how open they are."""

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from gateway.tenants.keyring import key_digest
from tests.conftest import KEY, Boots
from tests.fakes.tei import FakeTei
from tests.processes.conftest import TLS_CONTEXT, Served, run_serve

OPERATOR = "operator-key"
CONFIG = """
listen: {listen}
admin: {{listen: "{admin}", keys: ["{operator}"]}}
upstreams: {{one: {{backend: tei, replicas: ["http://tei-0"]}}}}
models: {{bge: {{upstream: one}}}}
tenants: {{acme: {{keys: ["{acme}"]}}}}
"""


def config(admin: str, listen: str = "0.0.0.0:0") -> str:
    return CONFIG.format(
        listen=listen, admin=admin, operator=key_digest(OPERATOR), acme=key_digest(KEY)
    ).replace("http://tei-0", "http://127.0.0.1:1" if listen.endswith(":0") else "http://tei-0")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


class Sides(NamedTuple):
    """Base URLs of one gateway."""

    callers: str
    operators: str

    def get(self, side: str, path: str, **headers: str) -> httpx.Response:
        return httpx.get(
            getattr(self, side) + path, headers=headers, timeout=10, trust_env=False, verify=TLS_CONTEXT
        )


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sides]:
    """Serve callers on every interface, and operators on the loopback interface."""
    path = tmp_path_factory.mktemp("admin") / "router.yaml"
    operators = f"127.0.0.1:{free_port()}"
    path.write_text(config(operators))
    gateway = Served(path).wait_until_up()
    yield Sides(gateway.url, f"http://{operators}")
    gateway.stop()


OPERATORS_PATHS = ["/metrics", "/admin/usage?tenant=acme", "/admin/status", "/ui"]
# On the loopback interface, counters and the empty page need no key; everything else does.
OPEN_HERE = {"/metrics", "/ui"}
# The router ignores these slashes, and the guard of the listener must ignore them too.
DISGUISED = [
    "//metrics",
    "/metrics/",
    "//admin/usage?tenant=acme",
    "/admin//usage?tenant=acme",
    "/admin%2Fusage",
]


@pytest.mark.parametrize("path", OPERATORS_PATHS)
def test_operators_listener_accepts_admin_keys(sides: Sides, path: str) -> None:
    assert 200 == sides.get("operators", path, authorization=f"Bearer {OPERATOR}").status_code
    assert (200 if path in OPEN_HERE else 401) == sides.get("operators", path).status_code


@pytest.mark.parametrize(
    "path", [*OPERATORS_PATHS, *DISGUISED, "/admin/keys", "/admin/nowhere", "/ui/page.js"]
)
@pytest.mark.parametrize("key", [KEY, OPERATOR])
def test_callers_listener_has_no_operator_paths(sides: Sides, path: str, key: str) -> None:
    reply = sides.get("callers", path, authorization=f"Bearer {key}")

    assert (404, "NotFound") == (reply.status_code, reply.json()["error_type"])
    assert "x-request-id" in reply.headers


@pytest.mark.parametrize("path", ["/v1/models/bge", "/info", "/models/bge/info", "/health", "/embed"])
def test_operators_listener_has_no_caller_paths(sides: Sides, path: str) -> None:
    reply = sides.get("operators", path, authorization=f"Bearer {KEY}")

    assert 404 == reply.status_code
    assert (
        ("not_found" == reply.json()["error"]["code"])
        if path.startswith("/v1")
        else reply.json()["error_type"]
    )


def test_the_consoles_playground_needs_a_key_with_the_scope_on_the_operators_listener(
    sides: Sides,
) -> None:
    body = {"model": "bge", "input": "a", "query": "a", "documents": ["a"]}
    statuses = {
        key: [
            httpx.post(
                sides.operators + path,
                json=body,
                headers={"authorization": f"Bearer {key}"},
                timeout=10,
                trust_env=False,
            ).status_code
            for path in ("/v1/embeddings", "/v1/multi-vector", "/v1/rerank")
        ]
        for key in (KEY, OPERATOR, "sk-unknown")
    }

    # The upstream's server does not answer: the call was admitted.
    assert {KEY: [503] * 3, OPERATOR: [403] * 3, "sk-unknown": [401] * 3} == statuses
    assert [200, 200] == [
        sides.get("operators", path, authorization=f"Bearer {KEY}").status_code
        for path in ("/v1/models", "/usage")
    ]
    assert 401 == sides.get("operators", "/v1/models").status_code
    assert 200 == sides.get("operators", "/docs").status_code


@pytest.mark.parametrize("side", ["callers", "operators"])
@pytest.mark.parametrize("path", ["/livez", "/readyz"])
def test_both_listeners_answer_probes(sides: Sides, side: str, path: str) -> None:
    assert 200 == sides.get(side, path).status_code


def test_callers_listener_serves_callers(sides: Sides) -> None:
    assert 200 == sides.get("callers", "/v1/models", authorization=f"Bearer {KEY}").status_code
    assert 401 == sides.get("callers", "/v1/models").status_code


async def test_admin_keys_beyond_loopback_permit_admin_and_metrics_only(boot: Boots) -> None:
    text = config("0.0.0.0:9090", "127.0.0.1:8080")
    paths = [path for path in OPERATORS_PATHS if path != "/ui"]
    as_operator = {"authorization": f"Bearer {OPERATOR}"}
    async with boot({"tei-0": FakeTei()}, text) as gateway:
        get = gateway.client.get
        of_operator = [(await get(path, headers=as_operator)).status_code for path in paths]
        of_tenant = [(await get(path)).status_code for path in paths]
        called = [
            await gateway.client.post(path, json={"input": "a", "inputs": "a"}, headers=as_operator)
            for path in ("/v1/embeddings", "/embed", "/tokenize")
        ]
        gateway.client.headers.pop("authorization")
        without_key = [(await get(path)).status_code for path in paths]

    assert ([200] * 3, [403] * 3, [401] * 3) == (of_operator, of_tenant, without_key)
    assert [403, 403, 403] == [reply.status_code for reply in called]
    assert "scope_forbidden" == called[0].json()["error"]["code"]


@pytest.mark.parametrize(("side", "page"), [("callers", "/docs"), ("operators", "/ui")])
def test_a_browser_is_sent_to_a_page_of_the_same_listener(sides: Sides, side: str, page: str) -> None:
    browser = sides.get(side, "/", accept="text/html,application/xhtml+xml,*/*;q=0.8")
    followed = sides.get(side, page)

    assert (303, page) == (browser.status_code, browser.headers["location"])
    assert (200, "text/html; charset=utf-8") == (followed.status_code, followed.headers["content-type"])
    # The upstream's server does not answer.
    assert 503 == sides.get(side, "/").status_code


def test_reports_admin_port_in_use(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as occupied:
        port = occupied.getsockname()[1]
        path = tmp_path / "router.yaml"
        path.write_text(config(f"127.0.0.1:{port}"))
        ended = run_serve(path)

    assert 1 == ended.returncode
    assert f"cannot listen on 127.0.0.1:{port}" in ended.stderr
    assert "`admin.listen:` in router.yaml" in ended.stderr
    assert "Traceback" not in ended.stderr
