"""Tokens of a real issuer: accepted by several workers, and after the issuer has replaced its keys."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from gateway.tenants.keyring import key_digest
from tests.fakes.real_issuer import RealIssuer
from tests.fakes.tei import FakeTei
from tests.fakes.threaded import serve_in_thread
from tests.processes.conftest import Served, wait_until
from tests.quotas.redis_server import RedisServer

pytestmark = pytest.mark.slow

CONFIG = """
listen: 127.0.0.1:0
workers: 2
quotas: {{store: "{store}"}}
state_dir: {state}
upstreams: {{first: {{backend: tei, replicas: ["{url}"]}}}}
models: {{bge: {{upstream: first}}}}
tenants: {{acme: {{}}}}
admin: {{keys: ["{operator}"]}}
sign_on:
  real:
    issuer: {issuer}
    audience: [gateway-test]
    claims:
      tenant: {{claim: groups, values: {{search: acme}}}}
      scopes: {{claim: scope}}
"""


@pytest.fixture(scope="module")
def issuer() -> Iterator[RealIssuer]:
    issuer = RealIssuer()
    yield issuer
    issuer.stop()


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory, issuer: RealIssuer) -> Iterator[Served]:
    folder: Path = tmp_path_factory.mktemp("sign_on")
    redis = RedisServer(folder)
    with serve_in_thread(FakeTei()) as url:
        settings = {"store": redis.url, "state": folder, "url": url, "issuer": issuer.address}
        path = folder / "router.yaml"
        path.write_text(CONFIG.format(operator=key_digest("sk-operator"), **settings))
        process = Served(path).wait_until_up()
        yield process
        process.stop()
    redis.stop()


def embed(gateway: Served, token: str) -> httpx.Response:
    # A connection of its own, so that both workers are asked.
    headers = {"authorization": f"Bearer {token}", "connection": "close"}
    return httpx.post(f"{gateway.url}/v1/embeddings", json={"input": "a"}, headers=headers, timeout=10)


def test_a_real_issuers_tokens_are_accepted_also_after_its_keys_were_replaced(
    gateway: Served, issuer: RealIssuer
) -> None:
    token = issuer.machine_token()
    assert wait_until(lambda: embed(gateway, token).status_code == 200)
    headers = {"authorization": f"Bearer {token}"}
    own = httpx.get(f"{gateway.url}/usage?by=key", headers=headers, timeout=10).json()
    assert ("acme", "real:indexer", ["embed"]) == (own["tenant"], own["key"], own["scopes"])
    reranked = httpx.post(
        f"{gateway.url}/rerank", json={"query": "a", "texts": ["b"]}, headers=headers, timeout=10
    )
    assert (403, "this key is not for rerank") == (reranked.status_code, reranked.json()["error"])

    issuer.stop()
    assert 200 == embed(gateway, token).status_code
    issuer.start()
    replaced = issuer.machine_token()
    assert wait_until(lambda: [embed(gateway, replaced).status_code for _ in range(4)] == [200] * 4)
