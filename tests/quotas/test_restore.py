"""`gateway export` and `gateway restore`: everything declared at run time, merged and never lowered."""

import asyncio
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from gateway.audit.query import AuditQuery
from gateway.audit.records import AuditRecord
from gateway.audit.trail import AuditTrail
from gateway.config.schema import AuditSettings
from gateway.quotas.stored_counts import Counter, is_current
from gateway.store.redis_client import RedisClient
from gateway.tenants.keyring import key_digest
from gateway.tenants.store import KEYS
from tests.conftest import KEY, Boots, Running
from tests.fakes.tei import FakeTei
from tests.quotas.conftest import Commands, Ended
from tests.quotas.redis_server import RedisServer
from tests.waiting import PATIENCE_S

CONFIG = """
quotas: {{store: "{store}", timeout_ms: 2000}}
state_dir: {folder}
currency: EUR
upstreams: {{one: {{backend: tei, replicas: ["http://tei-0"]}}}}
models: {{bge: {{upstream: one, price_per_million_tokens: 10000}}}}
tenants: {{ops: {{keys: [{{digest: "{ops}", scopes: [embed, admin]}}], limits: {{tokens_per_day: 900}}}}}}
"""
ADDED = {"backend": "openai", "replicas": ["https://api.example.com"], "api_key": "${UPSTREAM_KEY}"}
DAY = f"{datetime.now(UTC).date()}"


class Place(NamedTuple):
    """A store, and the commands on it."""

    config: Path
    folder: Path
    redis: RedisServer | None
    command: Commands

    async def run(self, *words: str) -> Ended:
        return await asyncio.to_thread(self.command, *words, "-c", str(self.config))

    async def done(self, *words: str) -> str:
        ended = await self.run(*words)
        assert 0 == ended.status, ended
        return ended.out

    async def export(self, name: str = "backup.jsonl") -> list[dict[str, Any]]:
        """Export, and return the lines apart from the header."""
        path = self.folder.parent / name
        await self.done("export", str(path))
        header, *lines = [json.loads(line) for line in path.read_text().splitlines()]
        assert ("header", 1) == (header["record"], header["version"])
        return lines

    async def restore(self, *options: str, name: str = "backup.jsonl") -> list[str]:
        return (await self.done("restore", str(self.folder.parent / name), *options)).splitlines()

    async def records(self, object_: str) -> list[AuditRecord]:
        redis = None if self.redis is None else RedisClient(self.redis.url, 5)
        trail = AuditTrail(redis, self.folder, AuditSettings(), lambda _: None)
        try:
            return (await trail.page(AuditQuery(object=object_))).data
        finally:
            await trail.aclose()

    def empty(self) -> None:
        if self.redis is not None:
            self.redis.command("FLUSHALL")
        else:
            for path in sorted(self.folder.rglob("*"), reverse=True):
                path.rmdir() if path.is_dir() else path.unlink()


@pytest.fixture(params=["redis", "file"])
def place(request: pytest.FixtureRequest, own_redis: RedisServer, tmp_path: Path, command: Commands) -> Place:
    """Prepare each of the stores."""
    return place_of(tmp_path, own_redis if request.param == "redis" else None, command)


def place_of(tmp_path: Path, redis: RedisServer | None, command: Commands) -> Place:
    folder, config = tmp_path / "state", tmp_path / "router.yaml"
    folder.mkdir(mode=0o700)
    store = "memory" if redis is None else redis.url
    config.write_text(CONFIG.format(store=store, folder=folder, ops=key_digest(KEY)))
    return Place(config, folder, redis, command)


def booted(boot: Boots, place: Place) -> Any:
    file = None if place.redis is not None else place.folder / "tenants.json"
    return boot({"tei-0": FakeTei()}, place.config.read_text(), tenants_file=file)


async def called(gateway: Running, key: str, texts: str = "a") -> int:
    headers = {"authorization": f"Bearer {key}"}
    body = {"input": texts, "model": "bge"}
    return (await gateway.client.post("/v1/embeddings", json=body, headers=headers)).status_code


async def until_called(gateway: Running, key: str, status: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while await called(gateway, key) != status:  # noqa: ASYNC110 - each check is a request
            await asyncio.sleep(0.02)


async def filled(boot: Boots, place: Place) -> str:
    """Declare something of each kind, spend a budget, and return the key."""
    async with booted(boot, place) as gateway:
        limits = {"budget_per_month": 0.31, "inputs_per_day": 1000}
        await gateway.client.put("/admin/tenants/acme", json={"limits": limits, "weight": 3})
        settings = {"tenant": "acme", "id": "k", "limits": {"requests_per_day": 900}}
        key: str = (await gateway.post("/admin/keys", settings)).json()["key"]
        while await called(gateway, key) == 200:
            pass
        assert 200 == await called(gateway, KEY)
        assert 429 == await called(gateway, key)
    if place.redis is not None:
        additions = {"upstreams": {"added": ADDED}, "models": {"more": {"upstream": "added"}}}
        additions["drained"] = {"one": ["http://tei-0"]}
        place.redis.command("HSET", "gw:{store}:added", "version", "v", "additions", json.dumps(additions))
    return key


async def test_what_was_exported_is_what_is_restored(boot: Boots, place: Place) -> None:
    key = await filled(boot, place)
    before = await place.export()
    assert before == await place.export("again.jsonl")
    assert key not in (place.folder.parent / "backup.jsonl").read_text()
    kinds = {line["record"] for line in before}
    assert {"tenant", "key", "counter", "usage", "end"} <= kinds
    if place.redis is not None:
        [upstream] = [line for line in before if line["record"] == "upstream"]
        assert ADDED == upstream["settings"]
        assert {"model", "drain"} <= kinds

    place.empty()
    warned = await place.run("restore", str(place.folder.parent / "backup.jsonl"), "--dry-run")
    assert ("revoked after the export is valid again" in warned.err) is (place.redis is not None)
    dry = await place.restore("--dry-run")
    assert "+ tenant acme" in dry
    assert any(line.startswith("+ used by acme of budget_per_month: 0 -> 0.") for line in dry)
    assert ["end"] == [line["record"] for line in await place.export("empty.jsonl")]
    printed = await place.restore()
    assert dry[:-2] == printed[:-2]
    assert printed[-2].startswith("restored: 1 tenant, 1 key, ")
    assert before == await place.export("restored.jsonl")
    [numbers] = map(json.loads, await place.restore("--json", "--dry-run"))
    assert (0, 0, [], True) == tuple(numbers[name] for name in ("keys", "usage", "differences", "dry_run"))
    assert numbers["unchanged"] > 0
    again = await place.restore()
    assert again[-2].startswith("restored: 0 tenants, 0 keys, 0 upstreams, 0 models, 0 drains, 0 counters")
    async with booted(boot, place) as gateway:
        await until_called(gateway, key, 429)
        usage = (await gateway.client.get("/admin/usage", params={"tenant": "acme"})).json()["data"]
    assert [line["units"]["tokens"] for line in before if line.get("key") == "k"] == [
        row["tokens"] for row in usage
    ]


async def test_a_restore_is_recorded(boot: Boots, place: Place) -> None:
    await filled(boot, place)
    exported = await place.export()
    place.empty()
    await place.restore()
    for object_ in ("tenant/acme", "key/k", *(("upstream/added", "model/more") if place.redis else ())):
        [record] = await place.records(object_)
        assert ("create", "command") == (record.action, record.actor_kind)
    [counted] = await place.records("usage/acme")
    assert "restore" == counted.action
    lines = [line for line in exported if line["record"] == "counter" and line["tenant"] == "acme"]
    spent = [msgspec.convert(line, Counter) for line in lines]
    assert {"budget_per_month", "inputs_per_day"} <= {counter.limit for counter in spent}
    # A day or month that ended before the restore is not counted again.
    assert {f"{counter.limit} of {counter.start}" for counter in spent if is_current(counter)} <= {
        change.field for change in counted.changes
    }


async def test_what_is_newer_stays_unless_it_is_to_be_replaced(boot: Boots, place: Place) -> None:
    await filled(boot, place)
    await place.done("tenants", "set", "gone")
    await place.done("keys", "create", "gone", "--id", "gone-1")
    await place.done("keys", "create", "acme", "--id", "revoked")
    await place.done("tenants", "set", "again")
    await place.done("keys", "create", "again", "--id", "again-1")
    before = await place.export()
    await place.done("tenants", "set", "acme", "--weight", "9")
    await place.done("tenants", "remove", "gone")
    await place.done("tenants", "remove", "again")
    await place.done("tenants", "set", "again")
    await place.done("keys", "revoke", "revoked")
    after = await place.export("after.jsonl")

    kept = await place.restore()
    assert {
        "! tenant acme differs; it stays as it is, and --replace overwrites it",
        "    weight: 9 -> 3",
        "! tenant gone: removed since the file was written; --replace restores it",
        "! key gone-1 of gone: removed since the file was written; --replace restores it",
        "! key again-1 of again: removed since the file was written; --replace restores it",
        "! key revoked of acme: removed since the file was written; --replace restores it",
    } <= set(kept)
    assert "kept although they differ: 5" in kept[-1]
    assert after == await place.export("kept.jsonl")
    replaced = await place.restore("--replace")
    assert {"~ tenant acme", "+ tenant gone", "+ key revoked of acme"} <= set(replaced)
    assert before == await place.export("replaced.jsonl")
    assert "change" == (await place.records("tenant/acme"))[0].action


async def test_a_client_certificate_identifies_one_tenant_after_a_restore_too(place: Place) -> None:
    entry = "dns:indexer.example"
    await place.done("tenants", "set", "acme", "--certificate", entry)
    [before, _] = await place.export()
    place.empty()
    await place.done("tenants", "set", "other", "--certificate", entry)
    line = f"! tenant acme: {entry} is listed by other too: a certificate identifies one tenant"
    assert line in await place.restore("--replace")
    await place.done("tenants", "remove", "other")
    await place.restore()
    assert before == (await place.export())[0]


async def test_a_gateway_moves_from_its_file_to_redis(
    boot: Boots, own_redis: RedisServer, tmp_path: Path, command: Commands
) -> None:
    place = place_of(tmp_path, None, command)
    key = await filled(boot, place)
    before = await place.export()
    place.config.write_text(CONFIG.format(store=own_redis.url, folder=place.folder, ops=key_digest(KEY)))
    place = place._replace(redis=own_redis)
    await place.restore()
    assert before == await place.export("moved.jsonl")
    async with booted(boot, place) as gateway:
        await until_called(gateway, key, 429)


async def test_an_export_for_scripts(place: Place) -> None:
    await place.done("tenants", "set", "acme")
    path = place.folder.parent / "backup.jsonl"
    numbers = json.loads(await place.done("export", str(path), "--json"))
    assert {"file": str(path), "tenants": 1, "keys": 0}.items() <= numbers.items()
    assert 2 == (await place.run("export", "-", "--json")).status


async def test_a_count_is_never_lowered(boot: Boots, place: Place) -> None:
    key = await filled(boot, place)
    before = await place.export()
    path = place.folder.parent / "backup.jsonl"
    lines = path.read_text().splitlines()
    lower, past = [], 0
    for line in lines:
        fields = json.loads(line)
        if fields["record"] == "counter":
            fields["used"] -= 1
            if fields["limit"] == "inputs_per_day":
                fields["start"], past = "2020-01-01", past + 1
        elif fields["record"] == "usage":
            fields["units"] = {unit: amount - 1 for unit, amount in fields["units"].items()}
        lower.append(json.dumps(fields))
    path.write_text("\n".join(lower) + "\n")
    printed = await place.restore("--replace")
    assert " 0 counters, 0 rows of usage" in printed[-2]
    assert printed[-1].endswith(f"of past periods: {past}")
    assert before == await place.export("unchanged.jsonl")

    higher = [line.replace('"tokens": ', '"tokens": 1') for line in lower]
    path.write_text("\n".join(higher) + "\n")
    assert any(line.startswith("+ usage of acme: 1 rows") for line in await place.restore())
    after = await place.export("raised.jsonl")
    [raised] = [line for line in after if line["record"] == "usage" and line["tenant"] == "acme"]
    [was] = [line for line in before if line["record"] == "usage" and line["tenant"] == "acme"]
    assert {name: amount for name, amount in was["units"].items() if name != "tokens"}.items() <= raised[
        "units"
    ].items()
    assert raised["units"]["tokens"] > was["units"]["tokens"]
    async with booted(boot, place) as gateway:
        await until_called(gateway, key, 429)


async def test_counts_of_a_running_gateway_without_redis_are_not_touched(
    boot: Boots, own_redis: RedisServer, tmp_path: Path, command: Commands
) -> None:
    place = place_of(tmp_path, None, command)
    await filled(boot, place)
    await place.export()
    place.empty()
    async with booted(boot, place):
        refused = await place.run("restore", str(tmp_path / "backup.jsonl"))
        assert ["end"] == [line["record"] for line in await place.export("nothing.jsonl")]
    assert 1 == refused.status
    assert refused.err.endswith("stop it first\n")
    assert 1 == refused.err.count("\n")
    await place.restore()
    assert "+ tenant acme" not in await place.restore()


async def test_secrets_in_the_clear_are_not_exported(own_redis: RedisServer, command: Commands) -> None:
    written = {"backend": "openai", "replicas": ["https://api.example.com"]}
    additions = {
        "upstreams": {
            "open": {**written, "api_key": "sk-clear"},
            "headed": {**written, "headers": {"x-key": "hunter2"}},
            "in-url": {**written, "replicas": ["https://user:hunter2@api.example.com"]},
            "good": {**written, "api_key": "Bearer ${UPSTREAM_KEY}"},
        }
    }
    own_redis.command("HSET", "gw:{store}:added", "version", "v", "additions", json.dumps(additions))
    own_redis.command("HSET", "gw:{store}:tenants", "odd", "{")
    ended = await asyncio.to_thread(command, "export", "-", "--store", own_redis.url)
    assert 0 == ended.status
    assert ["header", "upstream", "end"] == [json.loads(line)["record"] for line in ended.out.splitlines()]
    assert not {"sk-clear", "hunter2"} & set(ended.out.replace('"', " ").replace(":", " ").split())
    assert "hunter2" not in ended.out
    for name in ("upstream open", "upstream headed", "upstream in-url", "tenant odd"):
        assert f"{name} is not exported" in ended.err


LINES = (
    '{"record":"header","version":1,"created":"2026-11-28T00:00:00.000Z","gateway":"0.1.0"}',
    '{"record":"tenant","name":"acme","settings":{"weight":2}}',
    f'{{"record":"key","key":{{"id":"k","digest":"{key_digest("sk")}","tenant":"acme"}}}}',
    f'{{"record":"counter","tenant":"acme","limit":"tokens_per_day","amount":5,"start":"{DAY}","used":4}}',
    f'{{"record":"usage","tenant":"acme","day":"{DAY}","model":"bge","key":"k","units":{{"tokens":4}}}}',
    '{"record":"end","records":4}',
)
DAMAGED = [
    (0, LINES[0].replace('"version":1', '"version":2'), "line 1: the format has version 2"),
    (0, "{}", "line 1: no header"),
    (1, LINES[1][:-4], "line 2: "),
    (1, LINES[1].replace("weight", "weights"), "line 2: Object contains unknown field `weights`"),
    (1, LINES[1].replace('"weight":2', '"limits":{"tokens_per_eon":2}'), "line 2: tokens_per_eon"),
    (2, LINES[2].replace("sha256:", "sk-secret"), 'line 3: expected "sha256:"'),
    (2, LINES[2].replace('"tenant"', '"expires_s":1e308,"tenant"'), "line 3: 1e+308 is no moment"),
    (2, LINES[2].replace("}}", '},"last_used":"\\u001b[2J"}'), "line 3: expected a day"),
    (3, LINES[3].replace("acme", "\\u001fupstream one"), "line 4: a name has control characters"),
    (3, LINES[3].replace("tokens_per_day", "tokens_per_minute"), "line 4: no limit per day or month"),
    (3, LINES[3].replace('"used":4', '"used":-4'), "line 4: -4 is no amount"),
    (4, LINES[3], "line 5: the same as line 4"),
    (4, LINES[4].replace(DAY, "2026-02-30"), "line 5: "),
    (4, LINES[4].replace("acme", "a\\u001b[2K"), "line 5: a name has control characters"),
    (4, '{"record":"upstream","name":"a\\n+ key","settings":{}}', "line 5: a name has control"),
    (5, '{"record":"end","records":9}', "there are 4 records, and the last line says 9"),
    (5, "", "there is no line of the end: the file was cut off"),
]  # fmt: skip


async def test_a_damaged_file_is_refused_by_its_lines(
    own_redis: RedisServer, tmp_path: Path, command: Commands
) -> None:
    path = tmp_path / "backup.jsonl"
    for index, line, problem in DAMAGED:
        lines = list(LINES)
        lines[index] = line
        path.write_text("\n".join(lines) + "\n")
        ended = await asyncio.to_thread(command, "restore", str(path), "--store", own_redis.url)
        assert 1 == ended.status, line
        assert problem in ended.err
        assert "sk-secret" not in ended.err
        assert ":0" in own_redis.command("DBSIZE")
    path.write_text("\n".join(LINES))
    assert 0 == (await asyncio.to_thread(command, "restore", str(path), "--store", own_redis.url)).status
    assert "k" in own_redis.command("HKEYS", KEYS)


async def test_a_file_cannot_hide_lines_of_the_difference(
    own_redis: RedisServer, tmp_path: Path, command: Commands
) -> None:
    limit = "key \\u001b[1A\\u001b[2K\\n+ tenant false tokens_per_day"
    lines = [*LINES[:3], LINES[3].replace("tokens_per_day", limit), *LINES[4:]]
    path = tmp_path / "backup.jsonl"
    path.write_text("\n".join(lines))

    ended = await asyncio.to_thread(command, "restore", str(path), "--dry-run", "--store", own_redis.url)

    assert 0 == ended.status, ended.err
    assert "\x1b" not in ended.out
    assert "+ key k of acme" in ended.out.splitlines()
    assert not [line for line in ended.out.splitlines() if line.startswith("+ tenant false")]
