"""A key with the scope admin:read sees everything of operators, and changes nothing."""

import json

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
