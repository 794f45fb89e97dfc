"""Several upstreams behind one model: shares, failover, refused vectors, reloads under load."""

import asyncio
from collections import Counter
from typing import Any

import httpx
import pytest

from gateway.events import UpstreamJudged, UpstreamTried
from tests.conftest import KEY, Boots, Running
from tests.fakes.hooks import RERANKER, Gate, fail_with, respond_with, tei_with_hook, until
from tests.fakes.tei import FakeTei, assert_vectors

UPSTREAMS = """
upstreams:
  a: {backend: tei, replicas: ["http://a"]}
  b: {backend: tei, replicas: ["http://b"]}
  c: {backend: tei, replicas: ["http://c"]}
"""
EVEN = UPSTREAMS + "models: {m: {upstreams: [{name: a}, {name: b}]}}\n"
PRIORITY = UPSTREAMS + "models: {m: {upstreams: [{name: a}, {name: b, priority: 1}]}}\n"
LIMITED = """
tenants:
  acme:
    keys: ["sha256:DIGEST"]
    limits: {tokens_per_day: 1000, requests_per_day: 100}
"""


async def embed(gateway: Running, *texts: str, **headers: str) -> httpx.Response:
    return await gateway.post("/v1/embeddings", {"model": "m", "input": list(texts or ("a",))}, **headers)


async def embed_each(gateway: Running, count: int) -> None:
    """Embed so many texts one after the other, and check their vectors."""
    for number in range(count):
        assert_vectors(await embed(gateway, f"text {number}"), f"text {number}")


def standings(gateway: Running) -> dict[str, str]:
    judgements = gateway.application.gateway.serving.groups["m"].judge.judgements
    return {name: judgement.standing for name, judgement in judgements.items()}


def tried(gateway: Running) -> list[tuple[str, str]]:
    return [(event.upstream, event.outcome) for event in gateway.events if isinstance(event, UpstreamTried)]


async def until_standing(gateway: Running, name: str, standing: str) -> None:
    await until(lambda: standings(gateway)[name] == standing)


async def test_calls_follow_the_weights(boot: Boots) -> None:
    servers = {"a": FakeTei(), "b": FakeTei()}
    config = UPSTREAMS + "models: {m: {upstreams: [{name: a, weight: 3}, {name: b, weight: 1}]}}\n"
    async with boot(servers, config) as gateway:
        await embed_each(gateway, 40)

    counts = Counter(tried(gateway))
    assert abs(counts["a", "ok"] - 30) <= 2
    assert 40 == counts.total()
    assert len(servers["a"].requests) + len(servers["b"].requests) == 40


async def test_a_tenant_stays_at_one_upstream(boot: Boots) -> None:
    config = EVEN.replace("m: {", "m: {split_by: tenant, ")
    async with boot({"a": FakeTei(), "b": FakeTei()}, config) as gateway:
        for _ in range(8):
            await embed(gateway)

    assert 1 == len(set(tried(gateway)))


async def test_every_form_of_a_call_may_use_any_upstream(boot: Boots) -> None:
    """All dialects pass through one request path; each of these calls is made with both upstreams."""
    async with boot({"a": FakeTei(), "b": FakeTei()}, EVEN) as gateway:
        for _ in range(2):
            replies = [
                await gateway.post("/v1/embeddings", {"model": "m", "input": ["x"]}),
                await gateway.post("/embed", {"model": "m", "inputs": ["x"]}),
                await gateway.post("/v2/embed", {"model": "m", "texts": ["x"], "input_type": "search_query"}),
                await gateway.post("/v1/rerank", {"model": "m", "query": "q", "documents": ["x", "y"]}),
                await gateway.post(
                    "/similarity", {"model": "m", "inputs": {"source_sentence": "x", "sentences": ["y"]}}
                ),
                await gateway.post("/tokenize", {"model": "m", "inputs": "x"}),
                await gateway.post("/api/embed", {"model": "m", "input": "x"}),
                await gateway.post("/infinity/embeddings", {"model": "m", "input": ["x"]}),
            ]
            assert [200] * len(replies) == [reply.status_code for reply in replies], [
                reply.text for reply in replies if reply.status_code != 200
            ]

    assert {("a", "ok"), ("b", "ok")} == set(tried(gateway))


async def test_models_are_listed_with_their_common_facts(boot: Boots) -> None:
    async with boot({"a": FakeTei(), "b": FakeTei()}, EVEN) as gateway:
        (item,) = (await gateway.client.get("/v1/models")).json()["data"]
        info = (await gateway.client.get("/models/m/info")).json()
        reply = await embed(gateway)
        status = (await gateway.client.get("/admin/status")).json()

    assert ("ready", 16) == (item["state"], item["max_model_len"])
    assert 16 == info["max_input_length"]
    assert item["fingerprint"] == reply.headers["x-embedding-fingerprint"]
    (model,) = status["models"]
    assert ["a", "b"] == [each["name"] for each in model["upstreams"]]
    assert {"serving"} == {each["standing"] for each in model["upstreams"]}
    assert 1 == sum(each["calls"] for each in model["upstreams"])


@pytest.mark.parametrize(
    "hook",
    [
        fail_with(httpx.ConnectError("refused")),
        fail_with(httpx.ReadError("reset")),
        respond_with(500),
        respond_with(429),
        respond_with(503),
    ],
    ids=["unreachable", "connection lost", "failed", "overloaded", "unhealthy"],
)
async def test_the_next_priority_takes_over(boot: Boots, hook: Any) -> None:
    first, second = FakeTei(), FakeTei()
    async with boot({"a": first, "b": second}, PRIORITY) as gateway:
        assert_vectors(await embed(gateway, "x"), "x")
        assert not second.requests
        first.hook = hook
        await embed_each(gateway, 6)

    assert {("b", "ok")} <= set(tried(gateway))


async def test_an_upstream_of_the_next_priority_serves_while_the_first_cannot_be_reached(boot: Boots) -> None:
    async with boot({"b": FakeTei()}, PRIORITY) as gateway:
        assert_vectors(await embed(gateway, "x"), "x")
        assert {"a": "waiting", "b": "serving"} == standings(gateway)
        assert 200 == (await gateway.client.get("/models/m/health")).status_code


async def test_an_upstream_that_hangs_leaves_time_for_the_next(boot: Boots) -> None:
    first = FakeTei()
    async with boot({"a": first, "b": FakeTei()}, PRIORITY) as gateway:
        first.hook = Gate()
        assert_vectors(await embed(gateway, "x", x_timeout_s="0.4"), "x")

    assert [("a", "deadline_exceeded"), ("b", "ok")] == tried(gateway)


async def test_calls_do_not_wait_for_an_upstream_while_another_can_serve(boot: Boots) -> None:
    """The first upstream holds calls until it returns, as an engine that restarts does."""
    config = PRIORITY.replace("a: {", "a: {when_unavailable: wait, ")
    first = FakeTei()
    async with boot({"a": first, "b": FakeTei()}, config) as gateway:
        assert_vectors(await embed(gateway, "x"), "x")
        first.hook = fail_with(httpx.ConnectError("refused"))
        await embed_each(gateway, 8)
        # Without another upstream, calls wait for it.
        gateway.follow(config.replace("{name: b, priority: 1}", "{name: c, priority: 1}"))
        waiting = asyncio.create_task(embed(gateway, "later"))
        lane = gateway.application.gateway.upstreams["a"].lanes["texts"]
        await until(lambda: lane.queued_tokens > 0)
        first.hook = None
        assert_vectors(await waiting, "later")

    assert {"a", "b"} == {upstream for upstream, outcome in tried(gateway) if outcome == "ok"}


async def test_a_fault_of_the_caller_is_not_tried_elsewhere(boot: Boots) -> None:
    first = FakeTei()
    async with boot({"a": first, "b": FakeTei()}, PRIORITY) as gateway:
        first.hook = respond_with(422, b'{"error":"Input validation error: no","error_type":"Validation"}')
        reply = await embed(gateway)

    assert 400 == reply.status_code
    assert {"a"} == {upstream for upstream, _ in tried(gateway)}


async def test_no_upstream_is_an_error_of_the_model(boot: Boots) -> None:
    async with boot({}, PRIORITY) as gateway:
        reply = await embed(gateway)

    assert (503, "no_replica") == (reply.status_code, reply.json()["error"]["code"])
    assert "retry-after" in reply.headers


async def test_a_failover_keeps_the_reserved_quota_and_charges_once(boot: Boots) -> None:
    from gateway.tenants.keyring import key_digest

    config = PRIORITY + LIMITED.replace("sha256:DIGEST", key_digest(KEY))
    first, second = FakeTei(), FakeTei()
    async with boot({"a": first, "b": second}, config) as gateway:
        before = await embed(gateway, "one two")
        first.hook = respond_with(500)
        moved = await embed(gateway, "one two", "three")
        after = await embed(gateway, "four")

    spent = [int(each.headers["x-ratelimit-remaining-tokens"]) for each in (before, moved, after)]
    assert [200] * 3 == [each.status_code for each in (before, moved, after)]
    # A reply shows the limits after its own reserve, which is a bound, and the next one the settled amounts.
    total = sum(each.json()["usage"]["total_tokens"] for each in (before, moved))
    assert 1000 - total > spent[2] >= 1000 - total - 40
    assert moved.json()["usage"]["total_tokens"] == 7


async def test_no_call_is_lost_in_a_failover_under_load(boot: Boots) -> None:
    first, second = FakeTei(), FakeTei()
    async with boot({"a": first, "b": second}, PRIORITY) as gateway:
        answered = Counter[int]()

        async def caller(name: int) -> None:
            for number in range(30):
                text = f"caller {name} text {number}"
                reply = await embed(gateway, text)
                assert_vectors(reply, text)
                answered[reply.status_code] += 1

        callers = [asyncio.create_task(caller(name)) for name in range(16)]
        await until(lambda: answered.total() > 40)
        first.hook = fail_with(httpx.ReadError("reset"))
        await until(lambda: answered.total() > 240)
        first.hook = None
        await asyncio.gather(*callers)

    assert {200: 480} == dict(answered)
    assert {"a", "b"} == {upstream for upstream, outcome in tried(gateway) if outcome == "ok"}


async def test_vectors_of_another_model_are_refused_with_both_cosines(boot: Boots) -> None:
    other = FakeTei()
    other.space = "other"
    async with boot({"a": FakeTei(), "b": other}, EVEN) as gateway:
        await until_standing(gateway, "b", "refused")
        await embed_each(gateway, 8)
        (refused,) = [
            event
            for event in gateway.events
            if isinstance(event, UpstreamJudged) and event.standing == "refused"
        ]

    assert not other.requests
    assert "cosine " in refused.reason
    assert "0.999 needed" in refused.reason


async def test_an_upstream_that_appears_later_with_other_vectors_never_serves(boot: Boots) -> None:
    servers: dict[str, Any] = {"a": FakeTei()}
    late = FakeTei()
    late.space = "other"
    async with boot(servers, EVEN) as gateway:
        assert_vectors(await embed(gateway, "x"), "x")
        assert "waiting" == standings(gateway)["b"]
        gateway.follow(EVEN.replace("http://b", "http://c"))
        await embed_each(gateway, 10)
        assert {"a"} == {upstream for upstream, _ in tried(gateway)}


async def test_an_upstream_is_compared_before_its_first_call(boot: Boots) -> None:
    """The second upstream starts while the first serves, and waits until its reference texts are embedded."""
    gate = Gate()
    first, second = FakeTei(), FakeTei()
    second.hook = gate
    other = FakeTei()
    other.space = "other"
    async with boot(
        {"a": first, "b": second, "c": other}, UPSTREAMS + "models: {m: {upstream: a}}\n"
    ) as gateway:
        assert_vectors(await embed(gateway, "x"), "x")
        gateway.follow(UPSTREAMS + "models: {m: {upstreams: [{name: c}, {name: a}]}}\n")
        await until_standing(gateway, "c", "refused")
        # Although it is listed first: the model was served by the other one until now.
        assert_vectors(await embed(gateway, "y"), "y")

    assert not other.requests


async def test_a_replica_that_changes_its_model_serves_no_call(boot: Boots) -> None:
    changing = FakeTei()
    async with boot({"a": FakeTei(), "b": changing}, EVEN) as gateway:
        for number in range(4):
            await embed(gateway, f"text {number}")
        assert changing.requests
        # The server is restarted with another model: its connections break, and it joins again.
        changing.hook = fail_with(httpx.ConnectError("refused"))
        while (
            standings(gateway)["b"] == "serving" and gateway.application.gateway.upstreams["b"].pool.usable()
        ):
            assert_vectors(await embed(gateway, "x"), "x")
        changing.hook, changing.space = None, "other"
        await until_standing(gateway, "b", "refused")
        changing.requests.clear()
        await embed_each(gateway, 6)

    assert not changing.requests


@pytest.mark.parametrize(
    ("settings", "info", "reason"),
    [
        ("prompts: {query: 'q: '}", {}, "prompts differ"),
        ("", {"max_input_length": 8}, "at most 8 tokens"),
    ],
)
async def test_upstreams_that_contradict_each_other_are_refused(
    boot: Boots, settings: str, info: dict[str, Any], reason: str
) -> None:
    config = EVEN.replace("b: {", f"b: {{{settings}, ") if settings else EVEN
    other = FakeTei(**info)
    async with boot({"a": FakeTei(), "b": other}, config) as gateway:
        await until_standing(gateway, "b", "refused")
        assert reason in gateway.application.gateway.serving.groups["m"].judge.judgements["b"].reason
        assert_vectors(await embed(gateway, "x"), "x")

    assert not other.requests


async def test_the_first_upstream_of_a_name_says_what_kind_of_model_it_is(boot: Boots) -> None:
    gate = Gate()
    servers = {"a": tei_with_hook(gate), "b": FakeTei(model_type=RERANKER)}
    async with boot(servers, EVEN) as gateway:
        # The reranker could serve at once, and the vectors of the other are known later.
        await until_standing(gateway, "b", "refused")
        gate.opened.set()
        await until_standing(gateway, "a", "serving")
        judgements = gateway.application.gateway.serving.groups["m"].judge.judgements

    assert "it is a reranker, and the model's other upstreams are embedding models" == judgements["b"].reason


async def test_rerankers_need_no_vectors_in_common(boot: Boots) -> None:
    servers = {"a": FakeTei(model_type=RERANKER), "b": FakeTei(model_type=RERANKER)}
    async with boot(servers, EVEN) as gateway:
        replies = [
            await gateway.post("/v1/rerank", {"model": "m", "query": "q", "documents": ["x", "y"]})
            for _ in range(4)
        ]

    assert [200] * 4 == [reply.status_code for reply in replies]
    assert {("a", "ok"), ("b", "ok")} == set(tried(gateway))


async def test_reloads_under_load_lose_no_call(boot: Boots) -> None:
    configs = [
        EVEN,
        PRIORITY,
        UPSTREAMS + "models: {m: {upstreams: [{name: b, weight: 9}, {name: c}]}}\n",
        UPSTREAMS + "models: {m: {upstream: c}}\n",
        UPSTREAMS.replace("http://c", "http://d") + "models: {m: {upstreams: [{name: c}, {name: a}]}}\n",
        UPSTREAMS
        + "models: {m: {upstream: a, canary: {name: b, share: 0.5}, mirror: {name: c, share: 1}}}\n",
    ]
    async with boot({name: FakeTei() for name in "abcd"}, EVEN) as gateway:
        count, is_over = 0, asyncio.Event()

        async def caller(name: int) -> None:
            nonlocal count
            while not is_over.is_set():
                count += 1
                text = f"caller {name} text {count}"
                assert_vectors(await embed(gateway, text), text)

        callers = [asyncio.create_task(caller(name)) for name in range(12)]
        for config in configs * 3:
            gateway.follow(config)
            reached = count + 25
            await until(lambda reached=reached: count > reached or any(each.done() for each in callers))
        is_over.set()
        await asyncio.gather(*callers)

    assert count > 400


async def test_the_cache_keeps_the_vectors_of_upstreams_apart(boot: Boots) -> None:
    config = EVEN.replace("m: {", "m: {cache: true, ") + "cache: {ttl_s: 60}\n"
    async with boot({"a": FakeTei(), "b": FakeTei()}, config) as gateway:
        replies = []
        for _ in range(8):
            replies.append(await embed(gateway, "x"))
            assert_vectors(replies[-1], "x")

    uses = [reply.headers["x-cache"] for reply in replies]
    # Each upstream has computed the text once: their vectors are equal but for rounding, and are not mixed.
    assert {"hit=0, miss=1": 2, "hit=1, miss=0": 6} == Counter(uses)
