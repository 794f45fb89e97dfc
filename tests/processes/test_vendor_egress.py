"""A whole gateway behind a proxy: vendors are called through it, servers in the cluster are not."""

from pathlib import Path

import pytest

from tests.fakes.hosted_api import FakeHostedApi
from tests.fakes.proxies import (
    KINDS,
    PASSWORD,
    TUNNEL_WORDS,
    USER,
    ProxyKind,
    program_of,
    running_proxy,
)
from tests.fakes.tei import FakeTei
from tests.fakes.threaded import serve_in_thread
from tests.processes.conftest import Served, wait_until
from tests.processes.tls_files import Authority

pytestmark = pytest.mark.slow

CONFIG = """
listen: 127.0.0.1:0
upstreams:
  vendor:
    backend: voyage
    model: voyage-3
    replicas: ["{vendor}/v1"]
    api_key: ${{file:key}}
    task: embed
    tls: {{ca: {ca}}}
  own: {{backend: tei, replicas: ["{own}"]}}
models: {{v: {{upstream: vendor}}, t: {{upstream: own}}}}
"""


def status(gateway: Served, model: str) -> int:
    with gateway.client() as client:
        return client.post("/v1/embeddings", json={"model": model, "input": "a"}).status_code


@pytest.mark.parametrize("kind", KINDS)
def test_vendors_are_called_through_the_proxy_of_the_environment(kind: ProxyKind, tmp_path: Path) -> None:
    if program_of(kind) is None:
        pytest.skip(f"no {kind} here")
    authority, api = Authority(tmp_path / "tls"), FakeHostedApi("voyage")
    api.api_key = "vendor-key-1"
    key, path = tmp_path / "key", tmp_path / "router.yaml"
    key.write_text("vendor-key-1\n")
    with (
        serve_in_thread(api, authority.sign("vendor")) as vendor,
        serve_in_thread(FakeTei()) as own,
        running_proxy(kind, has_users=True, authority=authority) as (proxy, log),
    ):
        path.write_text(CONFIG.format(vendor=vendor, own=own, ca=authority.ca))
        url = proxy.replace("://", f"://{USER}:{PASSWORD}@")
        variables = {"HTTPS_PROXY": url, "HTTP_PROXY": url, "NO_PROXY": ""}
        gateway = Served(path, variables | {name.lower(): value for name, value in variables.items()})
        try:
            gateway.wait_until_up()
            assert wait_until(lambda: status(gateway, "v") == 200)
            assert wait_until(lambda: status(gateway, "t") == 200)

            # The vendor takes the new key only, which the file has now: no reload, and no restart.
            api.api_key = "vendor-key-2"
            key.write_text("vendor-key-2\n")
            assert wait_until(lambda: status(gateway, "v") == 200)
            assert 200 == status(gateway, "t")
        finally:
            gateway.stop()
        # Some of them log a tunnel when it ends.
        assert wait_until(lambda: TUNNEL_WORDS.get(kind, "CONNECT") in log.read_text())
        assert own.rpartition(":")[2] not in log.read_text()
    shown = "".join(gateway.log)
    assert PASSWORD not in shown
    assert "vendor-key" not in shown
