"""Tenants in Redis: set, followed by every gateway and removed; unreadable ones affect no other."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
import pytest

from gateway.config import schema as config
from gateway.declared.store import ADDED
from gateway.errors import Unauthenticated
from gateway.quotas.limits import UNITS
from gateway.tenants.client_certificate import UNVERIFIED_NOTE, ClientCertificate, client_certificate
from gateway.tenants.file_store import FileTenantStore
from gateway.tenants.follower import KeyFollower
from gateway.tenants.keyring import Keyring, StoredKey, key_digest
from gateway.tenants.store import KEYS, TENANTS, TenantStore, merged
from tests.actors import TESTER
from tests.conftest import KEY, Boots, Running
from tests.fakes.hooks import until
from tests.fakes.tei import FakeTei
from tests.quotas.conftest import Commands, Ended
from tests.quotas.redis_server import RedisServer, opened
from tests.quotas.test_keys_command import gateway as process
from tests.waiting import PATIENCE_S

OPENAI = "/v1/embeddings"
CONFIG = """
quotas: {{store: "{store}", timeout_ms: 2000}}
upstreams: {{one: {{backend: tei, replicas: ["http://tei-0"]}}}}
models: {{bge: {{upstream: one}}, other: {{upstream: one}}}}
tenants:
  ops: {{keys: [{{digest: "{ops}", scopes: [embed, admin]}}]}}
  listed: {{keys: ["{listed}"], limits: {{requests_per_hour: 2}}}}
"""


def text(store: str) -> str:
    return CONFIG.format(store=store, ops=key_digest(KEY), listed=key_digest("listed"))


NO_TENANT = "tenant acme is in neither router.yaml nor Redis: the key is refused until that tenant is defined"


@pytest.fixture
def file(own_redis: RedisServer, tmp_path: Path) -> Path:
    path = tmp_path / "router.yaml"
    path.write_text(text(own_redis.url))
    return path


async def called(gateway: Running, key: str, model: str = "bge") -> int:
    headers = {"authorization": f"Bearer {key}"}
    reply = await gateway.client.post(OPENAI, json={"input": "a", "model": model}, headers=headers)
    return reply.status_code


async def until_called(gateway: Running, key: str, status: int, model: str = "bge") -> None:
    async with asyncio.timeout(PATIENCE_S):
        while await called(gateway, key, model) != status:  # noqa: ASYNC110 - each check is a request
            await asyncio.sleep(0.02)


@pytest.mark.slow
async def test_gateways_follow_tenants_set_by_command(
    boot: Boots, file: Path, own_redis: RedisServer
) -> None:
    async def done(*words: str, said: str = "") -> str:
        ended = await asyncio.to_thread(process, *words, "-c", str(file))
        assert (0, said) == (ended.returncode, ended.stderr)
        return ended.stdout

    servers = {"tei-0": FakeTei()}
    # A key that comes before its tenant: without the file, which may have it.
    there = ("--store", own_redis.url)
    async with (
        boot(servers, text(own_redis.url)) as first,
        boot(servers, text(own_redis.url)) as second_gateway,
    ):
        key = (await done("keys", "create", "acme", "--id", "k", *there, said=f"{NO_TENANT}\n")).strip()
        await until_called(first, key, 403)
        limits = ("--limit", "inputs_per_hour=2", "--model-limit", "other:inputs_per_day=1")
        await done("tenants", "set", "acme", "--model", "bge", "--weight", "3", *limits)
        listed = json.loads(await done("tenants", "list", "--json"))
        table = await done("tenants", "list")
        for gateway in (first, second_gateway):
            await until_called(gateway, key, 403, "other")
        assert [200, 200, 429] == [await called(gateway, key) for gateway in (first, second_gateway, first)]
        await done("tenants", "set", "acme", "--replace")
        for gateway in (first, second_gateway):
            await until_called(gateway, key, 200, "other")
        await done("tenants", "remove", "acme")
        for gateway in (first, second_gateway):
            await until_called(gateway, key, 401)
        assert "[]" == (await done("keys", "list", "--json")).strip()

    assert (["bge"], 3, {"inputs_per_hour": 2}, {"other": {"inputs_per_day": 1}}) == tuple(
        listed["acme"][name] for name in ("models", "weight", "limits", "model_limits")
    )
    assert {"acme", "bge", "inputs_per_hour=2", "other:inputs_per_day=1"} <= set(table.split())


@pytest.mark.slow
async def test_certificates_of_stored_tenants_are_set_and_checked(
    boot: Boots, file: Path, own_redis: RedisServer
) -> None:
    async def set_(*words: str) -> tuple[int, str, str]:
        ended = await asyncio.to_thread(process, "tenants", "set", *words, "-c", str(file))
        return ended.returncode, ended.stdout, ended.stderr

    shown = client_certificate(b"der", [("DNS", "a.example")], expires_s=1e11)
    async with boot({"tei-0": FakeTei()}, text(own_redis.url)) as gateway:
        keyring = gateway.application.gateway.keyring
        code, said, noted = await set_("acme", "--certificate", "dns:a.example")
        assert (0, f"{UNVERIFIED_NOTE}\n") == (code, noted)
        assert "certificates: not set -> dns:a.example" in said
        await until(lambda: owner_of(keyring, shown) == "acme")
        path = "/admin/tenants/beta"
        replies = [
            await gateway.client.put(path, json={"certificates": [entry]})
            for entry in ("dns:A.example", "dns:*.example", "dns:b.example")
        ]
        replies.append(await gateway.client.patch(path, json={"certificates": ["dns:a.example"]}))
        refused = await set_("beta", "--certificate", "dns:A.example")
        broken = await set_("beta", "--certificate", "a.example")
        removed = await set_("acme", "--unset", "certificates")
        await until(lambda: owner_of(keyring, shown) is None)
        listed = (await gateway.client.get("/admin/tenants")).json()

    assert [422, 422, 200, 422] == [reply.status_code for reply in replies]
    assert "listed by acme too" in replies[0].text
    assert [UNVERIFIED_NOTE] == replies[2].json()["notes"]
    assert (1, 1, 0) == (refused[0], broken[0], removed[0])
    assert "listed by acme too" in refused[2]
    assert "--certificate a.example: expected dns:" in broken[2]
    assert [[], ["dns:b.example"]] == [tenant["settings"]["certificates"] for tenant in listed]


def owner_of(keyring: Keyring, certificate: ClientCertificate) -> str | None:
    """Return the tenant of a client certificate, None if it identifies nobody."""
    try:
        return keyring.identify_certificate(certificate).name
    except Unauthenticated:
        return None


async def test_stores_tenants_set_over_http_until_deleted(boot: Boots, own_redis: RedisServer) -> None:
    settings = {"limits": {"requests_per_hour": 1}, "model_limits": {"bge": {"tokens_per_day": 50}}}
    async with boot({"tei-0": FakeTei()}, text(own_redis.url)) as gateway:
        client = gateway.client
        put = await client.put("/admin/tenants/acme", json=settings)
        listed = (await client.get("/admin/tenants")).json()
        key = (await gateway.post("/admin/keys", {"tenant": "acme"})).json()["key"]
        await until_called(gateway, key, 200)
        refused = await called(gateway, key)
        replaced = await client.put("/admin/tenants/acme?replace=true", json={})
        await until_called(gateway, key, 200)
        removed = [await client.delete("/admin/tenants/acme") for _ in range(2)]
        await until_called(gateway, key, 401)
        left = [(await client.get(path)).json() for path in ("/admin/tenants", "/admin/keys")]

    assert [200, 429, 200] == [put.status_code, refused, replaced.status_code]
    assert settings.items() <= put.json()["settings"].items()
    assert [{name: value for name, value in put.json().items() if name != "changes"}] == listed
    assert ("acme", False) == (listed[0]["name"], listed[0]["in_file"])
    assert {} == replaced.json()["settings"]["limits"]
    assert [200, 404] == [reply.status_code for reply in removed]
    assert [[], []] == left


BEFORE = {
    "models": ["bge"],
    "limits": {"budget_per_month": 250.5, "tokens_per_minute": 1000},
    "model_limits": {"bge": {"tokens_per_day": 50, "inputs_per_day": 7}, "other": {"tokens_per_day": 1}},
    "weight": 3,
    "priority": "bulk",
    "queue_tokens": 900,
    "join": False,
}


def change(field: str, was: object, now: object) -> dict[str, object]:
    return {"field": field, "was": was, "is": now}


PATCHES: list[tuple[dict[str, Any], list[dict[str, object]]]] = [
    ({}, []),
    ({"weight": 3}, []),
    ({"limits": {"tokens_per_minute": 2000}}, [change("limits.tokens_per_minute", 1000, 2000)]),
    ({"limits": {"budget_per_month": None}}, [change("limits.budget_per_month", 250.5, None)]),
    ({"limits": {"inputs_per_hour": 5}, "models": None}, [
        change("models", ["bge"], None), change("limits.inputs_per_hour", None, 5),
    ]),
    ({"model_limits": {"bge": {"tokens_per_day": None}, "other": None}}, [
        change("model_limits.bge.tokens_per_day", 50, None),
        change("model_limits.other.tokens_per_day", 1, None),
    ]),
    ({"weight": None, "priority": None, "queue_tokens": None, "join": None}, [
        change("weight", 3, 1), change("priority", "bulk", "interactive"),
        change("queue_tokens", 900, None), change("join", False, True),
    ]),
]  # fmt: skip


async def test_settings_that_a_put_does_not_name_stay(boot: Boots, own_redis: RedisServer) -> None:
    async with boot({"tei-0": FakeTei()}, text(own_redis.url)) as gateway:
        for patch, changes in PATCHES:
            await gateway.client.put("/admin/tenants/acme?replace=true", json=BEFORE)
            put = (await gateway.client.put("/admin/tenants/acme", json=patch)).json()
            [listed] = (await gateway.client.get("/admin/tenants")).json()
            assert sorted(changes, key=str) == sorted(put["changes"], key=str), patch
            assert listed["settings"] == put["settings"]
            fields = {name.partition(".")[0] for name in (found["field"] for found in changes)}
            for name, value in BEFORE.items():
                if name not in fields:
                    assert value == put["settings"][name], (patch, name)
        assert {"bge": BEFORE["model_limits"]["bge"]} != put["settings"]["model_limits"]  # type: ignore[index]
        emptied = await gateway.client.put("/admin/tenants/acme?replace=true", json={"weight": 2})
        assert {"limits": {}, "weight": 2, "models": None}.items() <= emptied.json()["settings"].items()
        assert change("limits.budget_per_month", 250.5, None) in emptied.json()["changes"]


async def test_changes_of_two_operators_are_both_kept(own_redis: RedisServer, tmp_path: Path) -> None:
    names = [f"{unit}_per_{period}" for unit in ("tokens", "inputs") for period in ("minute", "hour", "day")]
    async with opened(own_redis) as first, opened(own_redis) as second:
        file = FileTenantStore(tmp_path / "tenants.json")
        for stores in ((first, second), (file, file)):
            await asyncio.gather(
                *(
                    stores[index % 2].change_tenant(
                        "acme", lambda before, name=name: merged(before, {"limits": {name: 5}}), by=TESTER
                    )
                    for index, name in enumerate(names)
                )
            )
            assert dict.fromkeys(sorted(names), 5) == dict(
                sorted((await stores[0].tenants())["acme"].limits.items())
            )


def test_settings_that_a_command_does_not_name_stay(
    file: Path, own_redis: RedisServer, command: Commands
) -> None:
    def done(*words: str) -> list[str]:
        ended = command("tenants", "set", "team02", *words, "-c", str(file))
        assert 0 == ended.status, ended.err
        return ended.out.splitlines()[1:]

    def stored() -> dict[str, Any]:
        found: dict[str, Any] = json.loads(command("tenants", "list", "--json", "-c", str(file)).out)[
            "team02"
        ]
        return found

    done("--limit", "budget_per_month=250", "--limit", "tokens_per_minute=1000", "--weight", "3", "--no-join")
    assert ["  limits.tokens_per_minute: 1000 -> 2000"] == done("--limit", "tokens_per_minute=2000")
    assert {"budget_per_month": 250, "tokens_per_minute": 2000} == stored()["limits"]
    assert (3, False) == (stored()["weight"], stored()["join"])
    assert ["  nothing has changed"] == done("--weight", "3")
    assert ["  join: false -> true"] == done("--join")
    done("--model", "bge", "--model-limit", "bge:tokens_per_day=5", "--model-limit", "bge:inputs_per_day=6")
    assert ["  model_limits.bge.tokens_per_day: 5 -> not set"] == done("--unset", "bge:tokens_per_day")
    shown = done("--unset", "budget_per_month", "--unset", "models", "--unset", "weight")
    assert [
        "  models: bge -> not set",
        "  limits.budget_per_month: 250 -> not set",
        "  weight: 3 -> 1",
    ] == shown
    assert {"tokens_per_minute": 2000} == stored()["limits"]
    assert {"bge": {"inputs_per_day": 6}} == stored()["model_limits"]
    done("--replace", "--weight", "2")
    assert ({}, {}, 2) == tuple(stored()[name] for name in ("limits", "model_limits", "weight"))


def test_what_is_not_set_can_be_unset_again(file: Path, command: Commands) -> None:
    def ended(*words: str) -> Ended:
        return command("tenants", "set", "acme", "--limit", "tokens_per_day=9", *words, "-c", str(file))

    absent = ("budget_per_day", "limits.inputs_per_day", "bge:tokens_per_day", "models")
    options = [word for name in absent for word in ("--unset", name)]
    ended("--limit", "budget_per_day=5")
    first, second = ended(*options), ended(*options)
    wrong = ended("--unset", "tokens_per_moon")

    assert [0, 0] == [first.status, second.status]
    assert "  limits.budget_per_day: 5 -> not set" in first.out
    assert "  nothing has changed" in second.out
    assert [f"--unset {name}: it was not set" for name in absent] == second.err.splitlines()
    assert (1, "") == (wrong.status, wrong.out)
    assert wrong.err.strip().endswith("; set is: tokens_per_day, limits")


async def test_removing_a_tenant_removes_its_keys(own_redis: RedisServer) -> None:
    async with opened(own_redis) as store:
        await store.create_key(StoredKey("k", key_digest("secret"), "acme"), by=TESTER)

        assert await store.remove_tenant("acme", by=TESTER)
        assert [] == await store.keys()
        assert not await store.remove_tenant("acme", by=TESTER)


async def test_router_yaml_takes_precedence_over_redis(boot: Boots, own_redis: RedisServer) -> None:
    settings = {"limits": {"requests_per_hour": 1, "inputs_per_hour": 1}, "models": ["other"]}
    async with boot({"tei-0": FakeTei()}, text(own_redis.url)) as gateway:
        put = await gateway.client.put("/admin/tenants/listed", json=settings)
        created = (await gateway.post("/admin/keys", {"tenant": "listed"})).json()["key"]
        await until_called(gateway, created, 200)
        second = [await called(gateway, key) for key in ("listed", created)]
        await gateway.client.delete("/admin/tenants/listed")
        await until_called(gateway, created, 401)

        assert put.json()["in_file"]
        assert [200, 429] == second
        assert 429 == await called(gateway, "listed")


ODD = ["a b", "ä", "t:{x}", "*", "?", "#", "%", "'; --", "x" * 300]


@pytest.mark.parametrize("name", ["..", "a" * 1001, "a\u200bb", "\x00", " a", "a\r\nX: y"])
async def test_rejects_unprintable_and_ambiguous_names(
    boot: Boots, own_redis: RedisServer, name: str
) -> None:
    async with boot({"tei-0": FakeTei()}, text(own_redis.url)) as gateway:
        path = f"/admin/tenants/{quote(name, safe='').replace('.', '%2E')}"
        put = await gateway.client.put(path, json={})
        created = [
            await gateway.post("/admin/keys", {"tenant": name}),
            await gateway.post("/admin/keys", {"tenant": "acme", "id": name}),
        ]

    assert {422} == {reply.status_code for reply in (put, *created)}


async def test_accepts_unusual_characters_in_names(boot: Boots, own_redis: RedisServer) -> None:
    paths = {name: f"/admin/tenants/{quote(name, safe='').replace('.', '%2E')}" for name in ODD}
    async with boot({"tei-0": FakeTei()}, text(own_redis.url)) as gateway:
        client, settings = gateway.client, {"limits": {"requests_per_hour": 2}}
        put = [await client.put(path, json=settings) for path in paths.values()]
        created = [(await gateway.post("/admin/keys", {"tenant": name})).json()["key"] for name in ODD]
        listed = [tenant["name"] for tenant in (await client.get("/admin/tenants")).json()]
        await until_called(gateway, created[-1], 200)
        statuses = [[await called(gateway, key) for _ in range(3)] for key in created[:-1]]
        usage = [(await client.get("/admin/usage", params={"tenant": name})).json()["data"] for name in ODD]
        removed = [await client.delete(path) for path in paths.values()]
        left = (await client.get("/admin/tenants")).json()

    assert {200} == {reply.status_code for reply in (*put, *removed)}
    assert (sorted(ODD), []) == (listed, left)
    assert [[200, 200, 429]] * len(created[:-1]) == statuses
    assert [(name, 2) for name in ODD[:-1]] == [(row["tenant"], row["requests"]) for (row,) in usage[:-1]]


@pytest.mark.parametrize("name", ["", "a/b"])
async def test_rejects_paths_without_a_tenant(boot: Boots, own_redis: RedisServer, name: str) -> None:
    async with boot({"tei-0": FakeTei()}, text(own_redis.url)) as gateway:
        reply = await gateway.client.put(f"/admin/tenants/{quote(name, safe='')}", json={})

        assert reply.status_code in {404, 405}
        assert reply.json()["error"]
        assert [] == (await gateway.client.get("/admin/tenants")).json()


BAD: list[Any] = [
    {"limits": {"requests_per_fortnight": 5}},
    {"limits": {"requests_per_hour": 0}},
    {"limits": {"requests_per_hour": -1}},
    {"limits": {"requests_per_hour": 1.5}},
    {"limits": {"requests_per_hour": 10**15 + 1}},
    {"limits": []},
    {"model_limits": {"bge": {"bytes_per_day": 5}}},
    {"model_limits": {"bge": 5}},
    {"weight": 0},
    {"priority": "first"},
    {"queue_tokens": 0},
    {"models": "bge"},
    {"keys": ["sha256:" + "0" * 64]},
    {"unheard_of": 1},
    [],
]


async def test_rejects_invalid_settings_without_storing_them(boot: Boots, own_redis: RedisServer) -> None:
    async with boot({"tei-0": FakeTei()}, text(own_redis.url)) as gateway:
        for body in BAD:
            reply = await gateway.client.put("/admin/tenants/acme", json=body)
            shown = (body, reply.status_code, reply.json()["error_type"])
            assert (body, 422, "Validation") == shown
            assert reply.json()["error"]
        named = await gateway.client.put("/admin/tenants/acme", json={"limit": {}})
        allowed = "models, limits, model_limits, end_user_limits, weight, priority, queue_tokens, join"
        allowed += ", certificates"
        assert f"Object contains unknown field `limit`; allowed: {allowed}" == named.json()["error"]
        assert 400 == (await gateway.client.put("/admin/tenants/acme", content=b"{")).status_code
        assert [] == (await gateway.client.get("/admin/tenants")).json()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("set", "acme", "--limit", "tokens_per_minute"), "NAME=AMOUNT"),
        (("set", "acme", "--limit", "tokens_per_minute=many"), "NAME=AMOUNT"),
        (("set", "acme", "--limit", "tokens_per_minute=-1"), "NAME=AMOUNT"),
        (("set", "acme", "--limit", "tokens_per_minute=0"), "tokens_per_minute=0: Expected `int` >= 1"),
        (("set", "acme", "--limit", f"tokens_per_minute={10**15 + 1}"), f"<= {10**15}"),
        (("set", "acme", "--limit", "tokens_per_fortnight=5"), "unknown limit"),
        (("set", "acme", "--model-limit", "tokens_per_day=5"), "MODEL:NAME=AMOUNT"),
        (("set", "acme", "--model-limit", "bge:bytes_per_day=5"), "unknown limit"),
        (("set", "acme", "--weight", "0"), "weight"),
        (("set", "acme", "--queue-tokens", "0"), "queue_tokens"),
        (("set", "acme", "--unset", "budget_per_moon"), "--unset budget_per_moon: there is no such setting"),
        (("set", "acme", "--unset", "bge:bytes_per_day"), "or limit; set is: nothing"),
        (("set", ""), "name"),
        (("remove", "nobody"), "no tenant nobody"),
    ],
)
def test_tenants_command_reports_failures_in_one_line(
    file: Path, own_redis: RedisServer, command: Commands, words: tuple[str, ...], expected: str
) -> None:
    ended = command("tenants", *words, "-c", str(file))

    assert (1, "") == (ended.status, ended.out)
    assert 1 == len(ended.err.strip().splitlines())
    assert expected in ended.err
    assert ":0\r\n" == own_redis.command("HLEN", TENANTS)


def test_removing_a_tenant_of_router_yaml_notes_that_it_stays(
    file: Path, own_redis: RedisServer, command: Commands
) -> None:
    none = command("tenants", "remove", "listed", "-c", str(file))
    command("tenants", "set", "listed", "-c", str(file))
    removed = command("tenants", "remove", "listed", "-c", str(file))

    assert (1, "") == (none.status, none.out)
    assert "no tenant listed in Redis; router.yaml defines it" in none.err
    assert (0, ":0\r\n") == (removed.status, own_redis.command("HLEN", TENANTS))
    assert "removed listed" in removed.out
    assert "router.yaml also defines listed; it stays valid there" in removed.err


@pytest.mark.parametrize("width", [40, None], ids=["terminal", "pipe"])
def test_tables_are_not_truncated(
    file: Path,
    own_redis: RedisServer,
    command: Commands,
    monkeypatch: pytest.MonkeyPatch,
    width: int | None,
) -> None:
    limits = {f"{unit}_per_{period}": 7777 for unit in UNITS[:4] for period in ("minute", "hour", "day")}
    own_redis.command("HSET", TENANTS, f"[b]{'z' * 60}:x:", json.dumps({"limits": limits}))
    if width:
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("COLUMNS", str(width))
    ended = command("tenants", "list", "-c", str(file))

    assert (0, "") == (ended.status, ended.err)
    assert (60, 4 * len(limits)) == (ended.out.count("z"), ended.out.count("7"))
    if width is None:
        assert f"[b]{'z' * 60}:x:" in ended.out
        assert 2 == len(ended.out.splitlines())


NO_MODEL = "model {} is neither in router.yaml nor added: there may be nothing to call by that name"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("keys", "create", "acme", "--new-tenant"), []),
        (("keys", "create", "listed", "--model", "bge"), []),
        (("keys", "create", "listed", "--model", "bgee", "--model", "added"), [NO_MODEL.format("bgee")]),
        (("tenants", "set", "acme", "--model", "org/[b]x"), [NO_MODEL.format("org/[b]x")]),
        (("tenants", "set", "acme", "--model-limit", "x:inputs_per_day=1"), [NO_MODEL.format("x")]),
        (("tenants", "set", "acme", "--model", "added", "--model-limit", "bge:inputs_per_day=1"), []),
    ],
)
def test_notes_unknown_names_and_continues(
    file: Path, own_redis: RedisServer, command: Commands, words: tuple[str, ...], expected: list[str]
) -> None:
    own_redis.command("HSET", ADDED, "version", "1", "additions", '{"models": {"added": {}}}')
    ended = command(*words, "-c", str(file))

    assert (0, expected) == (ended.status, ended.err.splitlines())
    assert ":1\r\n" == own_redis.command("HLEN", KEYS if words[0] == "keys" else TENANTS)


@pytest.mark.parametrize(
    "words", [("set", "acme"), ("list",), ("remove", "acme")], ids=lambda words: words[0]
)
def test_tenants_command_reports_a_missing_store_in_one_line(
    file: Path,
    own_redis: RedisServer,
    command: Commands,
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(file.parent / "no state"))
    own_redis.kill()
    away = command("tenants", *words, "-c", str(file))
    file.write_text(text("memory"))
    none = command("tenants", *words, "-c", str(file))

    assert [(1, ""), (1, "")] == [(result.status, result.out) for result in (away, none)]
    assert "unavailable" in away.err
    assert "router.yaml" in none.err
    assert [1, 1] == [len(result.err.strip().splitlines()) for result in (away, none)]


@pytest.mark.parametrize("is_away", [True, False], ids=["away", "memory"])
async def test_returns_503_for_an_outage_and_404_without_a_store(
    boot: Boots, own_redis: RedisServer, is_away: bool
) -> None:
    async with boot({"tei-0": FakeTei()}, text(own_redis.url if is_away else "memory")) as gateway:
        own_redis.kill()
        replies = [
            await gateway.client.get("/admin/tenants"),
            await gateway.client.put("/admin/tenants/acme", json={}),
            await gateway.client.delete("/admin/tenants/acme"),
        ]

    assert [503 if is_away else 404] * 3 == [reply.status_code for reply in replies]
    assert all(("retry-after" in reply.headers) is is_away for reply in replies)
    assert all(("unavailable" if is_away else "router.yaml") in reply.json()["error"] for reply in replies)


async def test_tenants_require_the_admin_scope(boot: Boots, own_redis: RedisServer) -> None:
    everywhere = "listen: 0.0.0.0:8080\n" + text(own_redis.url)
    plain = {"authorization": "Bearer listed"}
    async with boot({"tei-0": FakeTei()}, everywhere) as gateway:
        replies = [
            await gateway.client.get("/admin/tenants", headers=plain),
            await gateway.client.put("/admin/tenants/acme", json={}, headers=plain),
            await gateway.client.delete("/admin/tenants/acme", headers=plain),
        ]
        as_operator = await gateway.client.get("/admin/tenants")

    assert [403, 403, 403] == [reply.status_code for reply in replies]
    assert [] == as_operator.json()


@asynccontextmanager
async def followed(store: TenantStore) -> AsyncIterator[Keyring]:
    """Return a keyring that follows the store."""
    keyring = Keyring({}, None)
    keeper = asyncio.create_task(KeyFollower(keyring, store, 60, lambda: None).run())
    try:
        yield keyring
        assert not keeper.done()
    finally:
        keeper.cancel()
        await asyncio.gather(keeper, return_exceptions=True)


async def until_known(keyring: Keyring, key: str) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                keyring.identify(key)
            except Unauthenticated:
                await asyncio.sleep(0.02)
            else:
                return


RUBBISH = {
    "no_json": "rubbish",
    "nothing": "",
    "list": "[]",
    "wrong_type": '{"limits": 5, "tenant": 5}',
    "unknown_limit": '{"limits": {"requests_per_fortnight": 5}, "id": "k", "digest": "d", "tenant": "t"}',
    "no_amount": '{"limits": {"requests_per_hour": 0}, "id": "k", "digest": "d", "tenant": "t"}',
}


async def test_unreadable_entries_affect_no_other_key_or_tenant(
    own_redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(own_redis) as store, followed(store) as keyring:
        for name, value in RUBBISH.items():
            own_redis.command("HSET", "gw:{store}:tenants", name, value)
            own_redis.command("HSET", "gw:{store}:keys", name, value)
        for name in RUBBISH:
            await store.create_key(StoredKey(f"of {name}", key_digest(name), name), by=TESTER)
        await store.put_tenant("good", config.TenantConfig(), by=TESTER)
        await store.create_key(StoredKey("first", key_digest("first"), "good"), by=TESTER)
        await until_known(keyring, "first")
        own_redis.command("HSET", "gw:{store}:keys", "another", "rubbish")
        await store.put_tenant(
            "good", config.TenantConfig(models=("bge",), limits={"requests_per_hour": 5}), by=TESTER
        )
        await store.create_key(StoredKey("second", key_digest("second"), "good"), by=TESTER)
        await until_known(keyring, "second")
        tenant = keyring.identify("second")

        assert (frozenset({"bge"}), 1) == (tenant.models, len(tenant.limits))
        # Without its limits a tenant could use everything: it may use nothing until it is set again.
        assert not any(keyring.identify(name).may_use("bge") for name in RUBBISH)
        assert {"good", *RUBBISH} == (await store.tenants()).keys()
        sound = sorted(["first", "second", *(f"of {name}" for name in RUBBISH)])
        assert sound == [key.id for key in await store.keys()]
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    for name in RUBBISH:
        assert any(f"tenant '{name}'" in line for line in warnings)
        assert any(f"key '{name}'" in line for line in warnings)


async def test_ignores_fields_of_a_newer_release(own_redis: RedisServer) -> None:
    tenant = config.TenantConfig(
        limits={"requests_per_hour": 5}, weight=3, model_limits={"bge": {"inputs_per_day": 1}}
    )
    newer = {**msgspec.to_builtins(tenant), "colour": "blue"}
    key = {**msgspec.to_builtins(StoredKey("k", key_digest("secret"), "acme")), "colour": "blue"}
    own_redis.command("HSET", "gw:{store}:tenants", "acme", json.dumps(newer))
    own_redis.command("HSET", "gw:{store}:keys", "k", json.dumps(key))
    async with opened(own_redis) as store, followed(store) as keyring:
        await until_known(keyring, "secret")
        owner = keyring.identify("secret")

        assert {"acme": tenant} == await store.tenants()
        assert (3, 1, ["bge"]) == (owner.weight, len(owner.limits), list(owner.model_limits))


async def test_follows_a_version_that_is_not_a_number(own_redis: RedisServer) -> None:
    own_redis.command("HSET", "gw:{store}:tenants", b"\xff".decode("latin-1"), "{}")
    async with opened(own_redis) as store, followed(store) as keyring:
        await store.put_tenant("acme", config.TenantConfig(), by=TESTER)
        await store.create_key(StoredKey("k", key_digest("secret"), "acme"), by=TESTER)
        await until_known(keyring, "secret")
        await store.create_key(StoredKey("l", key_digest("later"), "acme"), by=TESTER)
        own_redis.command("SET", "gw:{store}:version", "rubbish")
        await until_known(keyring, "later")
