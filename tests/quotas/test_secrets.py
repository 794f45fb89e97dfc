"""Search for secrets in everything that a run with every kind of secret leaves behind.

Each search has a control: a word that must be there, so that an empty haystack cannot pass.
"""

import base64
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

import httpx
import pytest
import redis
import uvicorn

from gateway.tenants.keyring import key_digest
from tests.fakes.hooks import respond_with
from tests.fakes.tei import FakeTei
from tests.processes.conftest import KEY, Served, wait_until
from tests.quotas.redis_server import RedisServer
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.slow

SECRETS = {
    "caller's key": "gw_caller_0a1b2c3d4e5f",
    "operator's key": "gw_operator_1f2e3d4c5b6a",
    "wrong key": "gw_nobody_77665544",
    "upstream's key": "sk-upstream-9988/77+66",
    "upstream's header": "header-secret-4711",
    "Redis' password": "redis:pass/word@1",
    "key of the environment": KEY,
}
CONFIG = """
listen: 127.0.0.1:0
quotas: {store: "redis://:${REDIS_PASSWORD}@127.0.0.1:${REDIS_PORT}/0"}
upstreams:
  good: {backend: tei, replicas: ["${TEI}"], api_key: "${TEI_KEY}", headers: {x-token: "${file:token}"}}
models: {bge: {upstream: good}}
tenants:
  acme:
    keys: ["${CALLER_DIGEST}"]
    limits: {requests_per_minute: 1000, tokens_per_day: 100000, requests_in_flight: 10}
  ops: {keys: [{digest: "${OPERATOR_DIGEST}", scopes: [admin, metrics]}]}
"""


@contextmanager
def upstream() -> Iterator[tuple[str, FakeTei]]:
    """Start a real server that requires a key."""
    fake = FakeTei()
    fake.api_key = SECRETS["upstream's key"]
    server = uvicorn.Server(uvicorn.Config(fake, port=0, lifespan="off", log_config=None))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    assert wait_until(lambda: server.started)
    port = server.servers[0].sockets[0].getsockname()[1]
    yield f"http://127.0.0.1:{port}", fake
    server.should_exit = True
    thread.join(PATIENCE_S)


def found(haystacks: Mapping[str, bytes], secrets: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return which secret is where: in the clear, in base64, in a URL."""
    hits = []
    for name, secret in secrets.items():
        forms = {secret.encode(), base64.b64encode(secret.encode()).rstrip(b"="), quote(secret, "").encode()}
        hits += [(name, where) for where, hay in haystacks.items() if any(form in hay for form in forms)]
    return hits


def shown(name: str, reply: httpx.Response) -> dict[str, bytes]:
    """Return a reply as a caller sees it."""
    return {f"{name}: {reply.status_code}": f"{reply.headers}\n".encode() + reply.content}


def calls(gateway: Served, fake: FakeTei) -> dict[str, bytes]:
    """Send valid and invalid requests to each dialect and to operator endpoints, and return the replies."""
    replies: dict[str, bytes] = {}
    caller, operator, wrong = (SECRETS[name] for name in ("caller's key", "operator's key", "wrong key"))
    for key in (caller, operator, wrong):
        bearer = {"authorization": f"Bearer {key}"}
        with httpx.Client(base_url=gateway.url, headers=bearer, timeout=PATIENCE_S, trust_env=False) as web:
            for path, body in (
                ("/v1/embeddings", b'{"model": "bge", "input": "a text"}'),
                ("/v1/embeddings", b'{"model": "none", "input": "a text"}'),
                ("/v1/embeddings", b'{"input": '),
                ("/embed", b'{"inputs": "a text"}'),
                ("/embed", b'{"inputs": []}'),
                ("/nothing", b"{}"),
            ):
                replies |= shown(f"{key[:6]} POST {path} {body!r}", web.post(path, content=body))
            for path in ("/info", "/metrics", "/v1/models", "/readyz", "/admin/keys", "/docs/openapi.json"):
                replies |= shown(f"{key[:6]} GET {path}", web.get(path))
            replies |= shown("usage", web.get("/admin/usage", params={"tenant": "acme"}))
    # Providers often repeat a wrong key in their error.
    upstreams_key = SECRETS["upstream's key"]
    said = f'{{"error": "wrong key {upstreams_key}", "error_type": "Unauthorized"}}'.encode()
    with gateway.client() as web:
        web.headers["authorization"] = f"Bearer {caller}"
        for status in (401, 403, 500):
            fake.hook = respond_with(status, said)
            replies |= shown(f"upstream {status}", web.post("/embed", json={"inputs": "a text"}))
        fake.hook = None
    return replies


def processes(gateway: Served) -> dict[str, bytes]:
    """Return command lines, and the environments of child processes."""
    children = gateway.children()
    sources = {f"cmdline {pid}": Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children}
    sources |= {f"environ {pid}": Path(f"/proc/{pid}/environ").read_bytes() for pid in children}
    own = gateway.process.pid
    return sources | {f"cmdline {own}": Path(f"/proc/{own}/cmdline").read_bytes()}


def stored(server: RedisServer, folder: Path) -> dict[str, bytes]:
    """Return every key and value, the uncompressed dump on disk, and the slow log."""
    with redis.Redis(port=server.port, password=SECRETS["Redis' password"]) as client:
        client.config_set("rdbcompression", "no")
        sources = {f"key {name!r}": name + (client.dump(name) or b"") for name in client.scan_iter()}
        sources["slow log"] = repr(client.slowlog_get(10_000)).encode()
        sources["clients"] = repr(client.client_list()).encode()
        client.save()
    return sources | {"dump.rdb": (folder / "dump.rdb").read_bytes()}


def test_no_output_of_a_run_holds_a_secret(own_redis: RedisServer, tmp_path: Path) -> None:
    with redis.Redis(port=own_redis.port) as client:
        client.config_set("slowlog-log-slower-than", 0)
        client.config_set("slowlog-max-len", 100_000)
        client.config_set("requirepass", SECRETS["Redis' password"])
    (tmp_path / "token").write_text(SECRETS["upstream's header"])
    (tmp_path / "router.yaml").write_text(CONFIG)
    with upstream() as (url, fake):
        environment = {
            "REDIS_PASSWORD": quote(SECRETS["Redis' password"], ""),
            "REDIS_PORT": str(own_redis.port),
            "TEI": url,
            "TEI_KEY": SECRETS["upstream's key"],
            "CALLER_DIGEST": key_digest(SECRETS["caller's key"]),
            "OPERATOR_DIGEST": key_digest(SECRETS["operator's key"]),
        }
        gateway = Served(tmp_path / "router.yaml", environment).wait_until_up()
        try:
            replies = calls(gateway, fake)
            operator = SECRETS["operator's key"]
            with gateway.client() as web:
                web.headers["authorization"] = f"Bearer {operator}"
                new_key = web.post("/admin/keys", json={"tenant": "acme", "id": "new"}).json()["key"]
                web.headers["authorization"] = f"Bearer {new_key}"
                assert wait_until(lambda: web.get("/v1/models").status_code == 200)
                replies |= shown("keys", web.get("/admin/keys"))
            haystacks = replies | processes(gateway) | stored(own_redis, tmp_path)
            own_redis.kill()
            assert wait_until(lambda: any("store is unreachable" in line for line in gateway.log))
        finally:
            gateway.stop()
    haystacks |= {"log": "".join(gateway.log).encode(), "banner": gateway.banner.encode()}

    assert fake.headers[-1]["x-token"] == SECRETS["upstream's header"]
    assert key_digest(new_key).encode() in haystacks["dump.rdb"]
    assert b'"tenant":"acme"' in haystacks["log"]
    assert any(b"gateway_tokens_total" in reply for reply in replies.values())
    assert [] == found(haystacks, SECRETS | {"made key": new_key})


def test_first_key_appears_in_its_file_only(tmp_path: Path) -> None:
    (tmp_path / "router.yaml").write_text(
        'listen: 127.0.0.1:0\nupstreams: {one: {backend: tei, replicas: ["http://127.0.0.1:1"]}}\n'
        "models: {bge: {upstream: one}}\n"
    )
    gateway = Served(tmp_path / "router.yaml", {"GATEWAY_API_KEY": ""}).wait_until_up()
    try:
        file = tmp_path / "state" / "embedding-gateway" / "first-key"
        key = file.read_text().strip()
        assert re.fullmatch(r"gw_[0-9a-f]{8}_[0-9a-f]{40}", key)
        replies: dict[str, bytes] = {}
        with httpx.Client(base_url=gateway.url, headers={"authorization": key}, trust_env=False) as web:
            replies |= shown("models", web.get("/v1/models"))
            replies |= shown("metrics", web.get("/metrics"))
            replies |= shown("call", web.post("/v1/embeddings", json={"model": "bge", "input": "a"}))
        haystacks = replies | processes(gateway)
    finally:
        gateway.stop()
    haystacks |= {"log": "".join(gateway.log).encode(), "banner": gateway.banner.encode()}

    assert any(name.startswith("models: 200") for name in haystacks)
    assert b"/v1/embeddings" in haystacks["log"]
    assert [] == found(haystacks, {"first key": key})
    # Standard output is not a terminal here, and may be a container's log.
    assert str(file) in json.loads(gateway.banner)["key"]
