"""Canary and mirror of a model: shares, comparisons, withdrawal, and that no caller notices."""

import asyncio
from collections import Counter
from typing import Any

import httpx
import pytest

from gateway.events import CanaryCompared, CopyFinished, UpstreamJudged, UpstreamTried
from gateway.tenants.keyring import key_digest
from gateway.upstreams import copies
from tests.api.test_upstream_groups import embed, embed_each
from tests.conftest import KEY, Boots, Running
from tests.fakes.hooks import Gate, fail_with, respond_with, tei_with_hook, until
from tests.fakes.openai import FakeOpenAI
from tests.fakes.tei import FakeTei, assert_vectors
from tests.waiting import PATIENCE_S

UPSTREAMS = """
upstreams:
  a: {backend: tei, replicas: ["http://a"]}
  b: {backend: tei, replicas: ["http://b"]}
"""
CANARY = UPSTREAMS + "models: {m: {upstream: a, canary: {name: b, share: 0.25, min_cosine: 0.999}}}\n"
MIRROR = UPSTREAMS + "models: {m: {upstream: a, mirror: {name: b, share: 0.5}}}\n"
TENANTS = f"""
tenants:
  acme:
    keys: [{{digest: "{key_digest(KEY)}", scopes: [embed, admin, metrics]}}]
    limits: {{tokens_per_day: 100000}}
"""


def of_kind(gateway: Running, kind: type) -> list[Any]:
    return [event for event in gateway.events if isinstance(event, kind)]


def served(gateway: Running) -> Counter[str]:
    return Counter(event.upstream for event in of_kind(gateway, UpstreamTried) if event.outcome == "ok")


async def test_a_canary_serves_its_share_and_is_compared(boot: Boots) -> None:
    async with boot({"a": FakeTei(), "b": FakeTei()}, CANARY) as gateway:
        await embed_each(gateway, 40)
        await until(lambda: len(of_kind(gateway, CanaryCompared)) >= 9)
        metrics = (await gateway.client.get("/metrics")).text
        (model,) = (await gateway.client.get("/admin/status")).json()["models"]

    counts = served(gateway)
    assert abs(counts["b"] - 10) <= 1
    assert {1.0} == {round(event.cosine, 6) for event in of_kind(gateway, CanaryCompared)}
    assert 'gateway_canary_cosine_count{model="m",upstream="b"}' in metrics
    canary = model["upstreams"][1]
    assert ("canary", "serving", 0.25, 0.999) == tuple(
        canary[key] for key in ("role", "standing", "share", "min_cosine")
    )
    assert canary["cosine"] == pytest.approx(1.0)


async def test_a_canary_with_other_vectors_withdraws_under_load_and_no_call_is_lost(boot: Boots) -> None:
    """Its reference texts fitted when it joined, as those of a server would that goes wrong later."""
    canary = FakeTei()
    async with boot({"a": FakeTei(), "b": canary}, CANARY) as gateway:
        statuses: Counter[int] = Counter()

        async def caller(name: int) -> None:
            for number in range(25):
                reply = await embed(gateway, f"caller {name} text {number}")
                statuses[reply.status_code] += 1

        callers = [asyncio.create_task(caller(name)) for name in range(16)]
        await until(lambda: statuses.total() > 100)
        canary.space = "other"
        await asyncio.gather(*callers)
        await until(lambda: any(e.standing == "withdrawn" for e in of_kind(gateway, UpstreamJudged)))
        canary.requests.clear()
        for number in range(20):
            assert_vectors(await embed(gateway, f"after {number}"), f"after {number}")
        metrics = (await gateway.client.get("/metrics")).text
        status = (await gateway.client.get("/admin/status")).json()

    assert {200: 400} == dict(statuses)
    assert not canary.requests
    (withdrawn,) = [e for e in of_kind(gateway, UpstreamJudged) if e.standing == "withdrawn"]
    assert "0.999 needed" in withdrawn.reason
    assert 'gateway_upstream_standing{model="m",standing="withdrawn",upstream="b"} 1.0' in metrics
    assert "withdrawn" == status["models"][0]["upstreams"][1]["standing"]
    assert ("m on b", "withdrawn") in [(each["subject"], each["what"]) for each in status["changes"]]


async def test_a_reload_puts_a_withdrawn_canary_back(boot: Boots) -> None:
    canary = FakeTei()
    async with boot({"a": FakeTei(), "b": canary}, CANARY) as gateway:
        group = gateway.application.gateway.serving.groups["m"]
        canary.space = "other"
        async with asyncio.timeout(PATIENCE_S):
            while not group.judge.canary.withdrawn:
                await embed(gateway, "x")
        canary.space = ""
        gateway.application.follow(gateway.application.gateway.serving.config, {}, (), ())
        assert gateway.application.gateway.serving.groups["m"].judge.canary.withdrawn
        gateway.follow(CANARY)
        assert not gateway.application.gateway.serving.groups["m"].judge.canary.withdrawn
        await embed_each(gateway, 12)

    assert served(gateway)["b"] >= 2


async def test_a_canary_of_another_space_serves_nothing(boot: Boots) -> None:
    other = FakeTei()
    other.space = "other"
    async with boot({"a": FakeTei(), "b": other}, CANARY) as gateway:
        await embed_each(gateway, 12)
        judgements = gateway.application.gateway.serving.groups["m"].judge.judgements

    assert "refused" == judgements["b"].standing
    assert not other.requests


async def test_calls_of_a_canary_that_fails_are_served_by_the_others(boot: Boots) -> None:
    failing = FakeTei()
    async with boot({"a": FakeTei(), "b": failing}, CANARY) as gateway:
        failing.hook = respond_with(500)
        await embed_each(gateway, 40)

    assert {"a"} == set(served(gateway))


async def test_a_mirror_gets_copies_that_nobody_pays_for(boot: Boots) -> None:
    mirror = FakeTei()
    async with boot({"a": FakeTei(), "b": mirror}, MIRROR + TENANTS) as gateway:
        replies = [await embed(gateway, f"text {number}", "more") for number in range(20)]
        await until(lambda: len(of_kind(gateway, CopyFinished)) >= 9)
        last = await embed(gateway, "last")

    assert {200} == {reply.status_code for reply in replies}
    assert {"ok"} == {event.outcome for event in of_kind(gateway, CopyFinished)}
    assert abs(len(mirror.requests) - 10) <= 2
    assert {"a"} == set(served(gateway))
    tokens = sum(reply.json()["usage"]["total_tokens"] for reply in replies)
    # Reserved for the last call: a bound on its own tokens.
    reserved = 100_000 - tokens - int(last.headers["x-ratelimit-remaining-tokens"])
    assert 0 < reserved < 40


@pytest.mark.parametrize(
    ("hook", "outcome"),
    [
        (respond_with(500), "upstream_failed"),
        (fail_with(httpx.ConnectError("refused")), "no_replica"),
    ],
)
async def test_errors_of_a_mirror_are_counted_and_reach_no_caller(
    boot: Boots, hook: Any, outcome: str
) -> None:
    mirror = tei_with_hook(hook)
    async with boot({"a": FakeTei(), "b": mirror}, MIRROR) as gateway:
        await embed_each(gateway, 4)
        await until(lambda: bool(of_kind(gateway, CopyFinished)))

    assert outcome in {event.outcome for event in of_kind(gateway, CopyFinished)}


async def test_a_mirror_that_hangs_holds_a_bounded_number_of_copies(
    boot: Boots, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies, "COPIES_MAX", 12)
    gate = Gate()
    mirror = tei_with_hook(gate)
    config = MIRROR.replace("share: 0.5", "share: 1")
    async with boot({"a": FakeTei(), "b": mirror}, config) as gateway:
        await embed_each(gateway, 40)
        dropped = [event for event in of_kind(gateway, CopyFinished) if event.outcome == "dropped"]
        assert 28 == len(dropped)
        gate.opened.set()


async def test_a_comparison_is_dropped_while_callers_wait(boot: Boots) -> None:
    gate = Gate()
    busy = FakeTei()
    config = CANARY.replace("share: 0.25", "share: 0.5").replace(
        'a: {backend: tei, replicas: ["http://a"]}',
        'a: {backend: tei, replicas: ["http://a"], in_flight_batches: 1}',
    )
    async with boot({"a": busy, "b": FakeTei()}, config) as gateway:
        busy.hook = gate
        calls = [asyncio.create_task(embed(gateway, f"text {number}")) for number in range(24)]
        await until(lambda: bool(of_kind(gateway, CopyFinished)))
        assert {"dropped"} == {event.outcome for event in of_kind(gateway, CopyFinished)}
        gate.opened.set()
        replies = await asyncio.gather(*calls)

    assert {200} == {reply.status_code for reply in replies}


async def test_a_canary_does_not_take_over(boot: Boots) -> None:
    """Calls beyond its share fail while no other upstream serves, and every view says so."""
    main = FakeTei()
    config = CANARY.replace("share: 0.25", "share: 0.5")
    async with boot({"a": main, "b": FakeTei()}, config) as gateway:
        await embed(gateway, "before")
        main.hook = fail_with(httpx.ConnectError("refused"))
        group = gateway.application.gateway.serving.groups["m"]
        async with asyncio.timeout(PATIENCE_S):
            while group.main.health != "out":
                await embed(gateway, "while it goes away")
        replies = [await embed(gateway, f"text {number}") for number in range(12)]
        status = (await gateway.client.get("/admin/status")).json()
        (item,) = (await gateway.client.get("/v1/models")).json()["data"]
    (model,) = status["models"]

    assert {200, 503} == {reply.status_code for reply in replies}
    assert all("its canary takes its share only" in each.text for each in replies if each.status_code == 503)
    assert ("canary_only", "canary_only") == (model["state"], item["state"])
    assert [("serving", "unavailable"), ("serving", "ready")] == [
        (each["standing"], each["state"]) for each in model["upstreams"]
    ]


async def test_a_canary_of_another_kind_gets_what_it_offers(boot: Boots) -> None:
    """The API of the canary embeds only; the model tokenizes and encodes too, and goes on doing so."""
    canary = FakeOpenAI(models=("fake/model",))
    config = """
upstreams:
  a: {backend: tei, replicas: ["http://a"]}
  b: {backend: openai, model: fake/model, replicas: ["http://b"]}
models: {m: {upstream: a, truncate: right, canary: {name: b, share: 0.5}}}
"""
    async with boot({"a": FakeTei(), "b": canary}, config) as gateway:
        group = gateway.application.gateway.serving.groups["m"]
        await until(lambda: group.judge.usable() == ["a", "b"])
        # A split begins at a random point. From two of three points it divides six calls 3:3, as from 0,
        # and from the others 2:4: a run of calls is close to the shares, and not equal to them.
        group.point = 0.0
        for number in range(6):
            assert 200 == (await embed(gateway, f"text {number}")).status_code
        counts = served(gateway)
        body = {"model": "m", "inputs": ["one", "two"]}
        others = [await gateway.post(path, body) for path in ("/tokenize", "/embed_all") for _ in range(4)]
        (model,) = (await gateway.client.get("/admin/status")).json()["models"]

    assert {"a": 3, "b": 3} == counts
    assert [200] * 8 == [reply.status_code for reply in others], [reply.text for reply in others]
    assert {"a": 11, "b": 3} == served(gateway)
    assert {"embed", "encode", "tokenize"} <= set(model["operations"])
