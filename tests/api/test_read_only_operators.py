"""A key with the scope admin:read sees everything of operators, and changes nothing."""

import json
from pathlib import Path

import pytest

from gateway.api.server.paths import options_of
from gateway.app import HANDLERS
from gateway.tenants.keyring import SCOPE_OF, key_digest
from tests.conftest import CONFIG, Boots
from tests.fakes.tei import FakeTei

SCOPES = {"reader": ["admin:read"], "operator": ["admin"], "caller": ["embed"]}
KEYS = [{"digest": key_digest(name), "id": name, "scopes": scopes} for name, scopes in SCOPES.items()]
TENANTS = f"tenants: {json.dumps({'acme': {'keys': KEYS}})}\n"
ROUTES = sorted(
    (method, path)
    for handler in HANDLERS
    for path in handler.paths
    for method in handler.http_methods
    if options_of(handler).needs_admin and method != "OPTIONS"
)


async def test_reads_are_allowed_and_changes_name_the_missing_scope(boot: Boots) -> None:
    servers = {name: FakeTei() for name in ("tei-0", "tei-1", "rerank-0")}
    statuses: dict[tuple[str, str, str], tuple[int, str]] = {}
    async with boot(servers, CONFIG + TENANTS) as gateway:
        for method, declared in ROUTES:
            path = "/".join("x" if part.startswith("{") else part for part in declared.split("/"))
            for key in SCOPES:
                headers = {"authorization": f"Bearer {key}"}
                reply = await gateway.client.request(method, path, json={}, headers=headers)
                statuses[key, method, declared] = reply.status_code, reply.text

    reads = [route for route in ROUTES if route[0] in ("GET", "HEAD")]
    changes = [route for route in ROUTES if route not in reads]
    assert len(reads) > 10
    assert len(changes) > 10
    for route in reads:
        assert 403 != statuses["reader", *route][0], route
        status, text = statuses["caller", *route]
        assert (403, True) == (status, "admin:read" in text or not text), route
    for route in changes:
        for key in ("reader", "caller"):
            status, text = statuses[key, *route]
            assert (403, True) == (status, "not for admin" in text), route
    assert 403 not in {status for (key, *_), (status, _) in statuses.items() if key == "operator"}


@pytest.mark.parametrize("scope", sorted(set(SCOPE_OF.values())))
async def test_each_scope_of_an_operation_can_be_granted(boot: Boots, scope: str) -> None:
    keys = [{"digest": key_digest("k"), "scopes": [scope]}]
    config = CONFIG + f"tenants: {json.dumps({'acme': {'keys': keys}})}\n"
    servers = {name: FakeTei() for name in ("tei-0", "tei-1", "rerank-0")}
    async with boot(servers, config) as gateway:
        owner = gateway.application.gateway.keyring.identify("k")
    assert frozenset({scope}) == owner.scopes


async def test_the_reason_of_a_change_that_is_not_stored_is_in_the_log(
    boot: Boots, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "state").write_text("no folder")
    servers = {name: FakeTei() for name in ("tei-0", "tei-1", "rerank-0")}
    headers = {"authorization": "Bearer operator"}
    file = tmp_path / "state" / "tenants.json"
    async with boot(servers, CONFIG + TENANTS, tenants_file=file) as gateway:
        caplog.clear()
        reply = await gateway.client.put("/admin/tenants/new", json={}, headers=headers)

    assert (503, False) == (reply.status_code, str(tmp_path) in reply.text)
    assert f"the store of tenants and keys is unavailable: {file} cannot be used" in caplog.text
