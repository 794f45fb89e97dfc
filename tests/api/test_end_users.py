"""End users: read where the configuration says, in log, trace, usage and limits, bounded, and forgotten."""

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from backends.tei_protos import tei_pb2 as pb
from gateway.config.load import parse_config
from gateway.config.problems import ConfigError
from gateway.errors import QuotaExceeded
from gateway.events import CallFinished
from gateway.quotas.end_users import EndUser
from gateway.quotas.kept_ledger import KeptLedger
from gateway.quotas.ledger import MemoryLedger, QuotaRequest
from gateway.quotas.limits import SECOND_US, Cost, Limit
from gateway.quotas.local_share import LocalShare
from gateway.telemetry.access_log import EventLine
from gateway.telemetry.tracing import _attributes
from gateway.tenants.end_users import digest_of_user, known_as, names_of
from gateway.tenants.keyring import key_digest
from tests.api.test_grpc import GRPC, grpc_gateway
from tests.batches import line, run, servers, with_batches
from tests.conftest import KEY, Boots, Running
from tests.fakes.tei import FakeTei

USERS = "end_users: {from: [user, x-end-user, X-OpenWebUI-User-Id], log: plain}"
CONFIG = f"""
{USERS}
upstreams: {{one: {{backend: tei, replicas: ["http://tei-0"]}}}}
models: {{bge: {{upstream: one}}}}
tenants:
  acme:
    keys: [{{digest: "{key_digest(KEY)}", scopes: [embed, rerank, admin]}}]
    limits: {{requests_per_minute: 1000}}
"""
LIMITED = CONFIG + "    end_user_limits: {requests_per_hour: 2, tokens_per_day: 1000}\n"
OPERATOR = {"authorization": f"Bearer {KEY}"}


def started(gateway: Running) -> list[CallFinished]:
    return [event for event in gateway.events if isinstance(event, CallFinished) and event.model == "bge"]


async def embed(gateway: Running, body: Mapping[str, Any] | None = None, **headers: str) -> int:
    reply = await gateway.post("/v1/embeddings", {"input": "a"} | dict(body or {}), **headers)
    return reply.status_code


def contents(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.rglob("*.json"))


async def usage(gateway: Running, **query: str) -> list[dict[str, Any]]:
    reply = await gateway.client.get("/admin/usage", params={"by": "end_user", **query}, headers=OPERATOR)
    return list(reply.json()["data"])


async def forget(gateway: Running, user: str) -> dict[str, Any]:
    body = {"tenant": "acme", "end_user": user}
    reply = await gateway.client.post("/admin/usage/forget", json=body, headers=OPERATOR)
    assert 200 == reply.status_code
    return dict(reply.json())


async def test_the_first_source_that_names_one_counts(boot: Boots) -> None:
    async with boot({"tei-0": FakeTei()}, CONFIG) as gateway:
        await embed(gateway, {"user": "ann"}, x_end_user="bob")
        await embed(gateway, {"user": "  "}, x_end_user=" bob ")
        await embed(gateway, x_openwebui_user_id="5f0e")
        await embed(gateway, {"user": None})
        rows = await usage(gateway)

    assert ["ann", "bob", "5f0e", None] == [event.end_user for event in started(gateway)]
    assert [("5f0e", 1), ("ann", 1), ("bob", 1)] == [(row["end_user"], row["requests"]) for row in rows]


async def test_nothing_is_read_unless_it_is_asked_for(boot: Boots) -> None:
    async with boot({"tei-0": FakeTei()}, CONFIG.replace(USERS, "")) as gateway:
        await embed(gateway, {"user": "ann"}, x_end_user="bob")
        assert [] == await usage(gateway)

    [event] = started(gateway)
    assert event.end_user is None
    assert "end_user" not in EventLine(event).fields()


async def test_log_and_trace_have_the_digest(boot: Boots) -> None:
    async with boot({"tei-0": FakeTei()}, CONFIG.replace("log: plain", "log: digest")) as gateway:
        await embed(gateway, {"user": "ann@acme.example"})
        [row] = await usage(gateway)
        recent = await gateway.client.get("/admin/calls", headers=OPERATOR)

    [event] = started(gateway)
    digest = digest_of_user("acme", "ann@acme.example")
    assert digest == event.end_user == row["end_user"] == EventLine(event).fields()["end_user"]
    assert f'end_user="{digest}"' in str(EventLine(event))
    assert digest == _attributes(event)["gateway.end_user"]
    assert digest in recent.text
    assert "ann@" not in recent.text + str(EventLine(event))


@pytest.mark.parametrize("name", ["x" * 65, "two\nlines", "other", "sha256:0", "\udc80"])
def test_plain_names_that_are_unfit_become_digests(name: str) -> None:
    assert known_as("acme", name, is_plain=True) == digest_of_user("acme", name)
    assert digest_of_user("acme", name) != digest_of_user("globex", name)


def test_a_digest_names_itself() -> None:
    digest = digest_of_user("acme", "ann")
    assert (digest,) == names_of("acme", digest)
    assert ("ann", digest) == names_of("acme", "ann")


async def test_limits_count_each_end_user(boot: Boots) -> None:
    async with boot({"tei-0": FakeTei()}, LIMITED) as gateway:
        by_ann = [await embed(gateway, {"user": "ann"}) for _ in range(3)]
        refused = await gateway.post("/v1/embeddings", {"input": "a", "user": "ann"})
        others = [await embed(gateway, {"user": name}) for name in ("bob", "bob", "eve")]
        unnamed = [await embed(gateway) for _ in range(4)]
        forgotten = await forget(gateway, "ann")
        again = await embed(gateway, {"user": "ann"})

    assert [200, 200, 429] == by_ann
    assert "limit end user ann requests_per_hour (2): nothing is left" in refused.json()["error"]["message"]
    assert [200] * 7 == others + unnamed
    assert ({"days": 1}, 200) == (forgotten, again)


async def test_users_beyond_the_most_are_counted_together(boot: Boots) -> None:
    text = LIMITED.replace("log: plain", "log: plain, most: 2")
    async with boot({"tei-0": FakeTei()}, text) as gateway:
        replies = [await embed(gateway, {"user": f"user {number}"}) for number in range(8)]
        rows = await usage(gateway)
        [whole] = await usage(gateway, by="model")
        ledger = gateway.application.gateway.charges._admission.ledger

    # Two by name; the limit of all others has room for two.
    assert [200] * 4 + [429] * 4 == replies
    assert {"user 0": 1, "user 1": 1, "other": 2} == {row["end_user"]: row["requests"] for row in rows}
    assert whole["requests"] == sum(row["requests"] for row in rows)
    assert isinstance(ledger, MemoryLedger)
    assert 6 == sum(limit.is_end_users for _, limit in ledger._meters)


async def test_forgetting_keeps_the_totals(boot: Boots, tmp_path: Path) -> None:
    now_us = round(datetime.now(UTC).timestamp() * 1_000_000)
    clock = [now_us - 3 * 86_400_000_000]
    ledger = KeptLedger(tmp_path, lambda: clock[0])
    async with boot({"tei-0": FakeTei()}, CONFIG, ledger=ledger) as gateway:
        await embed(gateway, {"user": "ann"})
        await embed(gateway, {"user": "bob"})
    await ledger.aclose()
    clock[0] = now_us
    ledger = KeptLedger(tmp_path, lambda: clock[0])
    days = {"since": datetime.fromtimestamp(now_us / 1e6 - 3 * 86400, UTC).date().isoformat()}
    async with boot({"tei-0": FakeTei()}, CONFIG, ledger=ledger) as gateway:
        await embed(gateway, {"user": "ann"})
        before = await usage(gateway, **days)
        total = await usage(gateway, by="model", **days)
        assert {"days": 2} == await forget(gateway, "ann")
        assert {"days": 0} == await forget(gateway, "ann")
        after = await usage(gateway, **days)
        assert total == await usage(gateway, by="model", **days)
    await ledger.aclose()

    assert ["ann", "bob", "ann"] == [row["end_user"] for row in before]
    assert ["bob", "other", "other"] == [row["end_user"] for row in after]
    assert sum(row["tokens"] for row in before) == sum(row["tokens"] for row in after)
    assert b"ann" not in await asyncio.to_thread(contents, tmp_path)


async def test_metadata_of_an_rpc_names_its_end_user() -> None:
    async with grpc_gateway(f"{GRPC}{USERS}\n") as client:
        await client.call(
            "/tei.v1.Embed/Embed", pb.EmbedRequest(inputs="a"), pb.EmbedResponse, **{"x-end-user": "ann"}
        )
        [event] = client.finished()
    assert "ann" == event.end_user


async def test_a_line_of_a_batch_names_its_end_user(boot: Boots, tmp_path: Path) -> None:
    async with boot(servers(), with_batches(tmp_path) + USERS) as gateway:
        await run(gateway, line("1", "a", user="ann") + "\n" + line("2", "b"))
        lines = [event for event in gateway.events if isinstance(event, CallFinished) and event.tokens]

    assert {"ann", None} == {event.end_user for event in lines}


async def test_a_share_of_an_outage_bounds_the_end_users() -> None:
    local = LocalShare()
    limit = Limit("requests", "hour", 2)
    for number in range(20):
        user = EndUser(f"user {number}", 3)
        request = QuotaRequest(
            str(number), "acme", (limit.for_end_user(user.name),), Cost(), SECOND_US, "bge", end_user=user
        )
        with suppress(QuotaExceeded):
            local.settle(await local.reserve(request, 1), Cost(), "2026-11-28")
    usage = local.take_usage()

    # Three by name, and two of all others.
    assert 5 == sum(each.cost.requests for each in usage)
    assert {"user 0", "user 1", "user 2", "other"} == {
        each.end_user.name for each in usage if each.end_user is not None
    }
    assert all(each.limits == () for each in usage)
    assert 4 == len(local._ledger._meters)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (CONFIG.replace("[user,", "[authorization,"), "end_users.from[0]: is the header of a secret"),
        (CONFIG.replace("[user,", '["no header",'), "end_users.from[0]: expected `user`"),
        (CONFIG.replace("from: [user, x-end-user, X-OpenWebUI-User-Id], ", ""), "end_users.from: is missing"),
        (LIMITED.replace(USERS, ""), "tenants.acme.end_user_limits: needs `end_users`"),
        (LIMITED.replace("requests_per_hour", "requests_in_flight"), "end users have no such limit"),
    ],
)
def test_mistakes_are_reported(text: str, problem: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_config(text, {}, Path.cwd())
    assert problem in "; ".join(map(str, error.value.problems))


async def test_a_reload_applies_the_names(boot: Boots) -> None:
    async with boot({"tei-0": FakeTei()}, CONFIG.replace(USERS, "")) as gateway:
        await gateway.follow(LIMITED)
        await embed(gateway, {"user": "ann"})
    assert "ann" == started(gateway)[-1].end_user


async def test_a_keys_holder_does_not_see_end_users(boot: Boots) -> None:
    async with boot({"tei-0": FakeTei()}, CONFIG) as gateway:
        assert 422 == (await gateway.client.get("/usage?by=end_user")).status_code
