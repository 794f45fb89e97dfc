"""Failover: the results callers get while replicas are unreachable, lost, full or slow."""

import asyncio
from typing import Any

import httpx
import pytest

from gateway.events import AttemptFinished, ReplicaChanged
from gateway.routing.checks import PLAIN_TEXT
from gateway.tenants.keyring import key_digest
from tests.backends.invalid_replies import body_of, packed
from tests.conftest import CONFIG, KEY, Boots, Running
from tests.fakes.hooks import Gate, fail_with, respond_with, tei_with_hook, until
from tests.fakes.tei import FakeTei, assert_vectors
from tests.socket_gateway import socket_gateway
from tests.waiting import PATIENCE_S

OPENAI = "/v1/embeddings"
INVALID = b'{"error":"Input validation error: no","error_type":"Validation"}'


async def embed(gateway: Running, *texts: str, **headers: str) -> httpx.Response:
    return await gateway.post(OPENAI, {"input": list(texts or ("a",))}, **headers)


def sizes(server: FakeTei) -> list[int]:
    """Return the number of inputs of each request that a server received."""
    return [len(body["input"]) for _, body in server.requests]


def attempts(gateway: Running) -> list[tuple[str, str]]:
    return [(event.replica, event.outcome) for event in gateway.events if isinstance(event, AttemptFinished)]


def narrow(settings: str) -> str:
    """Return the configuration with more settings of the embedding upstream."""
    return CONFIG.replace("embedder: {", f"embedder: {{{settings}, ")


@pytest.mark.parametrize("alive", ["tei-0", "tei-1"])
async def test_does_not_wait_for_an_unreachable_replica(boot: Boots, alive: str) -> None:
    async with boot({alive: FakeTei()}) as gateway:
        assert_vectors(await embed(gateway, "a", "b"), "a", "b")

    assert [(f"http://{alive}", "ok")] == attempts(gateway)


async def test_replica_that_rejects_the_api_key_does_not_join(boot: Boots) -> None:
    locked = FakeTei()
    locked.api_key = "k"
    async with boot({"tei-0": locked, "tei-1": FakeTei()}) as gateway:
        for _ in range(4):
            assert_vectors(await embed(gateway), "a")

    assert [] == locked.requests


@pytest.mark.parametrize(
    "error", [httpx.ConnectError("refused"), httpx.ReadError("reset"), httpx.RemoteProtocolError("half")]
)
async def test_no_call_fails_when_a_replica_dies_under_load(boot: Boots, error: Exception) -> None:
    dying, other = FakeTei(), FakeTei()
    texts = [f"text {i}" for i in range(40)]
    async with boot({"tei-0": dying, "tei-1": other}) as gateway:
        await embed(gateway, *texts)
        dying.hook = fail_with(error)
        replies = await asyncio.gather(*(embed(gateway, *texts) for _ in range(5)))

    for reply in replies:
        assert_vectors(reply, *texts)
    assert ("embedder", "http://tei-0", "down") in [
        (event.upstream, event.replica, event.state)
        for event in gateway.events
        if isinstance(event, ReplicaChanged)
    ]


async def test_ejected_replica_gets_no_work(boot: Boots) -> None:
    dying = tei_with_hook(fail_with(httpx.ConnectError("refused")))
    async with boot({"tei-0": dying, "tei-1": FakeTei()}) as gateway:
        await asyncio.gather(*(embed(gateway) for _ in range(4)))
        requests_before = len(dying.requests)
        await asyncio.gather(*(embed(gateway) for _ in range(8)))

    assert requests_before == len(dying.requests)


async def test_rejoined_replica_gets_work_again(boot: Boots) -> None:
    server = FakeTei()
    async with boot({"tei-0": server}) as gateway:
        server.hook = fail_with(httpx.ConnectError("refused"))
        while_down = await embed(gateway)
        server.hook = None
        async with asyncio.timeout(PATIENCE_S):
            while (await gateway.client.get("/health")).status_code != 200:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        after_rejoin = await embed(gateway)

    assert (503, 200) == (while_down.status_code, after_rejoin.status_code)


@pytest.mark.parametrize(
    ("status", "body"),
    [
        *((status, b"") for status in (429, 500, 502, 503, 404, 401, 424)),
        *((200, body) for body in (b"<html>", b"[[0.1", b"", b"[]")),
    ],
)
async def test_retries_an_error_or_a_malformed_reply_at_another_replica(
    boot: Boots, status: int, body: bytes
) -> None:
    servers = {"tei-0": tei_with_hook(respond_with(status, body)), "tei-1": FakeTei()}
    async with boot(servers) as gateway:
        for _ in range(3):
            assert_vectors(await embed(gateway, "a", "b"), "a", "b")


NARROW = body_of(packed([0.6, 0.8], [1.0, 0.0]))


async def test_never_returns_vectors_of_another_width(boot: Boots) -> None:
    servers = {"tei-0": tei_with_hook(respond_with(200, NARROW)), "tei-1": FakeTei()}
    async with boot(servers) as gateway:
        for _ in range(3):
            assert_vectors(await embed(gateway, "a", "b"), "a", "b")

    assert {("http://tei-0", "failed"), ("http://tei-1", "ok")} == set(attempts(gateway))


async def test_wrong_width_of_the_only_replica_is_502_unless_requested(boot: Boots) -> None:
    async with boot({"tei-0": tei_with_hook(respond_with(200, NARROW))}) as gateway:
        wrong = await embed(gateway, "a", "b")
        requested = await gateway.post("/v1/embeddings", {"input": ["a", "b"], "dimensions": 2})

    assert (502, 200) == (wrong.status_code, requested.status_code)
    assert [2, 2] == [len(item["embedding"]) for item in requested.json()["data"]]


async def test_does_not_retry_invalid_input(boot: Boots) -> None:
    servers = {name: tei_with_hook(respond_with(422, INVALID)) for name in ("tei-0", "tei-1")}
    async with boot(servers) as gateway:
        reply = await embed(gateway)

    assert 400 == reply.status_code
    assert 1 == sum(len(server.requests) for server in servers.values())


async def test_tries_each_replica_once_per_call(boot: Boots) -> None:
    servers = {name: tei_with_hook(respond_with(500)) for name in ("tei-0", "tei-1")}
    async with boot(servers) as gateway:
        await embed(gateway)

    texts = [[body["input"] for _, body in server.requests] for server in servers.values()]
    assert [[["a"], [PLAIN_TEXT]]] * 2 == texts


async def test_retries_a_hung_replicas_work_elsewhere_in_time(boot: Boots) -> None:
    servers = {"tei-0": tei_with_hook(Gate()), "tei-1": FakeTei()}
    async with boot(servers, narrow("policy: round_robin, attempt_timeout_s: 0.05")) as gateway:
        replies = [await embed(gateway) for _ in range(2)]

    for reply in replies:
        assert_vectors(reply, "a")
    assert ("http://tei-0", "timed_out") in attempts(gateway)


async def test_attempt_leaves_half_of_the_deadline_for_another_replica(boot: Boots) -> None:
    servers = {"tei-0": tei_with_hook(Gate()), "tei-1": FakeTei()}
    async with boot(servers, narrow("policy: round_robin")) as gateway:
        replies = [await embed(gateway, x_timeout_s="2") for _ in range(2)]

    assert [200, 200] == [reply.status_code for reply in replies]


@pytest.mark.parametrize("alive", [["tei-0"], ["tei-0", "tei-1"]])
async def test_splits_and_joins_200_inputs_in_order(boot: Boots, alive: list[str]) -> None:
    servers = {name: FakeTei() for name in alive}
    texts = [f"text {i}" for i in range(200)]
    async with boot(servers) as gateway:
        reply = await embed(gateway, *texts)

    assert_vectors(reply, *texts)
    assert list(range(200)) == [item["index"] for item in reply.json()["data"]]
    assert {"prompt_tokens": 800, "total_tokens": 800, "completion_tokens": 0} == reply.json()["usage"]
    assert [4] * 50 == [size for server in servers.values() for size in sizes(server)]
    assert all(server.requests for server in servers.values())


async def test_joins_replies_in_the_callers_order(boot: Boots) -> None:
    gate = Gate()
    server = FakeTei()

    async def hook(path: str, body: dict[str, Any]) -> None:
        if "text 0" in body["input"]:
            await gate(path, body)

    server.hook = hook
    texts = [f"text {i}" for i in range(12)]
    async with boot({"tei-0": server}) as gateway:
        call = asyncio.create_task(embed(gateway, *texts))
        await until(lambda: [outcome for _, outcome in attempts(gateway)] == ["ok", "ok"])
        gate.opened.set()
        reply = await call

    assert_vectors(reply, *texts)


async def test_configuration_only_lowers_the_batch_size(boot: Boots) -> None:
    servers = [FakeTei(), FakeTei()]
    for server, bound in zip(servers, (3, 100), strict=True):
        async with boot({"tei-0": server}, narrow(f"request_inputs: {bound}")) as gateway:
            assert 200 == (await embed(gateway, *(f"text {i}" for i in range(12)))).status_code

    assert [[3, 3, 3, 3], [4, 4, 4]] == [sizes(server) for server in servers]


@pytest.mark.parametrize(("first", "second"), [(4, 2), (2, 4)])
async def test_batches_fit_the_smallest_bound_of_all_replicas(boot: Boots, first: int, second: int) -> None:
    servers = {"tei-0": FakeTei(max_client_batch_size=first), "tei-1": FakeTei(max_client_batch_size=second)}
    texts = [f"text {i}" for i in range(16)]
    async with boot(servers) as gateway:
        reply = await embed(gateway, *texts)

    assert_vectors(reply, *texts)
    # Cut for the smallest bound, so that either replica takes each of the requests.
    assert [2] * 8 == [size for server in servers.values() for size in sizes(server)]
    assert all(server.requests for server in servers.values())


async def test_inputs_wait_for_the_replicas_permits(boot: Boots) -> None:
    gate = Gate()
    server = tei_with_hook(gate, max_concurrent_requests=8)
    async with boot({"tei-0": server}) as gateway:
        call = asyncio.create_task(embed(gateway, *(f"text {i}" for i in range(20))))
        await until(lambda: gate.waiting == 2)
        at_once = sum(sizes(server))
        gate.opened.set()
        reply = await call

    assert (8, 200) == (at_once, reply.status_code)


async def test_failed_slice_fails_the_call_and_cancels_the_rest(boot: Boots) -> None:
    gate = Gate()
    server = FakeTei()

    async def hook(path: str, body: dict[str, Any]) -> tuple[int, bytes] | None:
        if "bad" in body["input"]:
            return 422, INVALID
        return None if "text 8" in body["input"] or "text 10" in body["input"] else await gate(path, body)

    server.hook = hook
    async with boot({"tei-0": server}) as gateway:
        reply = await embed(gateway, *(f"text {i}" for i in range(11)), "bad")
        await until(lambda: gate.waiting == 0)

    assert 400 == reply.status_code
    assert reply.json()["error"]["message"].startswith("input 11: ")


class Odd(FakeTei):
    """A server whose vectors have four dimensions."""

    def _vector(self, text: str, body: dict[str, Any]) -> Any:
        return super()._vector(text, body | {"dimensions": 4})


async def test_vectors_of_two_widths_are_502(boot: Boots) -> None:
    allowed = narrow("vector_space: {on_mismatch: warn}")
    async with boot({"tei-0": FakeTei(), "tei-1": Odd()}, allowed) as gateway:
        reply = await embed(gateway, *(f"text {i}" for i in range(16)))

    assert (502, "upstream_failed") == (reply.status_code, reply.json()["error"]["code"])


async def test_replica_that_changes_its_width_contributes_to_no_reply(boot: Boots) -> None:
    odd = FakeTei()

    async def hook(path: str, body: dict[str, Any]) -> None:
        body["dimensions"] = 4

    odd.hook = hook
    texts = [f"text {i}" for i in range(16)]
    async with boot({"tei-0": FakeTei(), "tei-1": odd}) as gateway:
        assert_vectors(await embed(gateway, *texts), *texts)

    assert odd.requests


async def test_cancelled_call_frees_its_slot(boot: Boots) -> None:
    gate = Gate()
    async with boot({"tei-0": tei_with_hook(gate)}, narrow("in_flight_batches: 1")) as gateway:
        cancelled = asyncio.create_task(embed(gateway, "gone"))
        await until(lambda: gate.waiting == 1)
        cancelled.cancel()
        await asyncio.gather(cancelled, return_exceptions=True)
        await until(lambda: gate.waiting == 0)
        gate.opened.set()
        reply = await embed(gateway)

    assert_vectors(reply, "a")


async def test_cancelled_waiting_call_is_never_sent(boot: Boots) -> None:
    gate = Gate()
    server = tei_with_hook(gate)
    async with boot({"tei-0": server}, narrow("in_flight_batches: 1")) as gateway:
        first = asyncio.create_task(embed(gateway, "first"))
        await until(lambda: gate.waiting == 1)
        cancelled = asyncio.create_task(embed(gateway, "gone"))
        await until(lambda: queued_tokens(gateway) == 8)
        cancelled.cancel()
        await asyncio.gather(cancelled, return_exceptions=True)
        still_queued = queued_tokens(gateway)
        gate.opened.set()
        await first

    assert 0 == still_queued
    assert [["first"]] == [body["input"] for _, body in server.requests]


async def test_disconnected_caller_frees_its_slot() -> None:
    gate = Gate()
    config = 'upstreams: {up: {backend: tei, replicas: ["http://tei-0"]}}\nmodels: {bge: {upstream: up}}\n'
    config += f'tenants: {{acme: {{keys: ["{key_digest(KEY)}"]}}}}\n'
    async with socket_gateway(tei_with_hook(gate), config) as gateway, asyncio.timeout(PATIENCE_S):
        with await gateway.send_call("a"):
            await until(lambda: gate.waiting == 1)
        await until(lambda: gate.waiting == 0)


def queued_tokens(gateway: Running) -> int:
    """Return the tokens that wait in front of the embedding upstream."""
    return gateway.application.gateway.upstreams["embedder"].lanes["texts"].queued_tokens


async def test_full_lane_is_429_with_retry_after(boot: Boots) -> None:
    gate = Gate()
    config = narrow("in_flight_batches: 1, queue_tokens: 14")
    async with boot({"tei-0": tei_with_hook(gate)}, config) as gateway:
        calls = [asyncio.create_task(embed(gateway, "b"))]
        await until(lambda: gate.waiting == 1)
        calls += [asyncio.create_task(embed(gateway, text)) for text in "cd"]
        await until(lambda: queued_tokens(gateway) == 10)
        openai = await embed(gateway)
        tei = await gateway.post("/embed", {"inputs": "a"})
        gate.opened.set()
        done = await asyncio.gather(*calls)

    assert (429, "server_error", "overloaded") == (
        openai.status_code,
        openai.json()["error"]["type"],
        openai.json()["error"]["code"],
    )
    assert (429, "Overloaded") == (tei.status_code, tei.json()["error_type"])
    assert all(1 <= int(reply.headers["retry-after"]) <= 60 for reply in (openai, tei))
    assert [200] * 3 == [reply.status_code for reply in done]


async def test_idle_lane_accepts_a_call_larger_than_its_bound(boot: Boots) -> None:
    texts = [f"text {i}" for i in range(16)]
    config = narrow("in_flight_batches: 1, queue_tokens: 20")
    async with boot({"tei-0": FakeTei()}, config) as gateway:
        reply = await embed(gateway, *texts)

    # If it were refused, every retry of it would be refused too.
    assert_vectors(reply, *texts)
