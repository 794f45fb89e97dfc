"""GET /admin/audit: filters, and records from which the settings of a tenant are restored."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from gateway.audit.records import Actor, ChangedField, new_record
from gateway.config.schema import TenantConfig
from gateway.tenants.audited import restoring_patch, tenant_put
from gateway.tenants.keyring import key_digest
from tests.conftest import Running, running_gateway
from tests.fakes.tei import FakeTei
from tests.quotas.redis_server import RedisServer

OPS = {"authorization": "Bearer ops"}
SECOND = {"authorization": "Bearer second"}
BY = Actor("ops", "key")
FULL = {
    "models": ["bge", "org/bge.v1.5"],
    "limits": {"tokens_per_day": 1000, "requests_in_flight": 3},
    "model_limits": {"org/bge.v1.5": {"tokens_per_minute": 50}},
    "end_user_limits": {"tokens_per_day": 7},
    "weight": 3,
    "priority": "bulk",
    "queue_tokens": 5000,
    "join": False,
}


@pytest.fixture(params=["redis", "file"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, Path | None]]:
    if request.param == "file":
        yield "memory", tmp_path / "state" / "tenants.json"
        return
    server = RedisServer(tmp_path)
    try:
        yield server.url, None
    finally:
        server.stop()


def boot(place: tuple[str, Path | None]) -> Any:
    keys = [{"digest": key_digest(name), "id": name} for name in ("ops", "second")]
    text = f"""
quotas: {{store: "{place[0]}"}}
admin: {json.dumps({"keys": keys})}
upstreams: {{one: {{backend: tei, replicas: ["http://tei-0"]}}}}
models: {{bge: {{upstream: one}}}}
"""
    return running_gateway({"tei-0": FakeTei()}, text, tenants_file=place[1])


async def put(gateway: Running, name: str, body: Any, headers: Any = OPS) -> Any:
    reply = await gateway.client.put(f"/admin/tenants/{quote(name)}", json=body, headers=headers)
    assert 200 == reply.status_code, reply.text
    return reply.json()


async def records(gateway: Running, **query: Any) -> list[dict[str, Any]]:
    reply = await gateway.client.get("/admin/audit", params=query, headers=OPS)
    assert 200 == reply.status_code, reply.text
    found: list[dict[str, Any]] = reply.json()["data"]
    return found


async def test_each_filter_selects_records(place: tuple[str, Path | None]) -> None:
    async with boot(place) as gateway:
        await put(gateway, "acme", {"limits": {"tokens_per_day": 10}})
        await put(gateway, "acme", {"limits": {"tokens_per_day": 20}}, SECOND)
        await put(gateway, "Ünïted", {"weight": 2})
        await gateway.client.delete("/admin/tenants/acme", headers=OPS)

        async def found(**query: Any) -> list[tuple[str, str]]:
            return [(record["action"], record["object"]) for record in await records(gateway, **query)]

        everything = await found()
        assert [("change", "tenant/acme")] == await found(action="change")
        assert [("change", "tenant/acme")] == await found(actor="second")
        assert [("create", "tenant/Ünïted")] == await found(search="ÜNÏTED")
        assert 3 == len(await found(search="tokens_per_day"))
        assert [("change", "tenant/acme")] == await found(search="20", action="change", object="tenant")
        assert [] == await found(until="2020-01-01")
        first = await gateway.client.get("/admin/audit?limit=3", headers=OPS)
        rest = await records(gateway, limit=3, cursor=first.json()["next"])
    assert 4 == len(everything)
    assert ("remove", "tenant/acme") == everything[0]
    assert [("create", "tenant/acme")] == [(record["action"], record["object"]) for record in rest]


async def test_settings_are_restored_from_a_record(place: tuple[str, Path | None]) -> None:
    async with boot(place) as gateway:
        before = (await put(gateway, "acme", FULL))["settings"]
        changed = {
            "models": None,
            "limits": {"tokens_per_day": 1, "tokens_per_hour": 5, "requests_in_flight": None},
            "model_limits": {"org/bge.v1.5": {"tokens_per_minute": None, "tokens_per_day": 9}},
            "end_user_limits": None,
            "weight": 1,
            "priority": "interactive",
            "queue_tokens": None,
            "join": True,
        }
        await put(gateway, "acme", changed)
        patch = (await records(gateway, object="tenant/acme"))[0]["restore"]
        restored = await gateway.client.patch("/admin/tenants/acme", json=patch, headers=OPS)
        assert before == restored.json()["settings"]

        await gateway.client.delete("/admin/tenants/acme", headers=OPS)
        patch = (await records(gateway, object="tenant/acme", action="remove"))[0]["restore"]
        assert before == (await put(gateway, "acme", patch))["settings"]
        created = (await records(gateway, object="tenant/acme", action="create"))[0]
    assert created["restore"] is None


def test_a_record_that_was_cut_restores_nothing() -> None:
    many = TenantConfig(models=tuple(f"model-{number}" for number in range(3000)))
    [record] = tenant_put("acme", many, [ChangedField("models", list(many.models or ()), None)], BY)
    assert restoring_patch(record) is None
    limits = [ChangedField(f"limits.tokens_per_{number}" + "x" * 150, "y" * 180, 1) for number in range(90)]
    assert restoring_patch(new_record(BY, "change", "tenant/acme", limits)) is None


def test_records_of_other_things_restore_nothing() -> None:
    weight = [ChangedField("weight", 1, 2)]
    assert {"weight": 1} == restoring_patch(new_record(BY, "change", "tenant/acme", weight))
    for action, object_ in (("change", "key/k"), ("change", "upstream/one"), ("create", "tenant/acme")):
        assert restoring_patch(new_record(BY, action, object_, weight)) is None
