"""Limits of an upstream's account: calls wait, move or get 429; failures are free, and eject no replica."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.config.load import parse_config
from gateway.config.problems import ConfigError
from gateway.events import AttemptFinished, CallFinished, ReplicaChanged, UpstreamLimited
from gateway.lane.upstream_limits import ACCOUNT
from gateway.quotas.ledger import MemoryLedger
from gateway.quotas.limits import parse_limit
from gateway.tenants.keyring import key_digest
from tests.conftest import KEY, Boots, Running
from tests.fakes.hooks import respond_with, until
from tests.fakes.tei import FakeTei, is_probe

CONFIG = f"""
upstreams:
  one: {{backend: tei, replicas: ["http://tei-0"], limits: {{LIMITS}}}}
models:
  bge: {{upstream: one}}
tenants:
  acme: {{keys: [{{digest: "{key_digest(KEY)}", scopes: [embed, rerank, admin, metrics]}}]}}
"""
GROUP = CONFIG.replace(
    "models:\n  bge: {upstream: one}",
    '  two: {backend: tei, replicas: ["http://tei-1"]}\n'
    "models:\n  bge: {upstreams: [{name: one}, {name: two, priority: 1}]}",
)
AMOUNTS = "requests_per_hour: 10, tokens_per_hour: 1000"
REFUSED = b'{"error": "no", "error_type": "Validation"}'
SERVING = {"/embed", "/v1/embeddings"}
START_US = 1_700_000_000_000_000


def limited(limits: str, text: str = CONFIG) -> str:
    return text.replace("LIMITS", limits)


async def embed(gateway: Running, text: Any = "a", **headers: str) -> httpx.Response:
    return await gateway.post("/v1/embeddings", {"input": text}, **headers)


def sent(server: FakeTei) -> int:
    """Return the number of requests of callers."""
    return sum(path in SERVING and not is_probe(body) for path, body in server.requests)


def remaining(ledger: MemoryLedger, upstream: str, name: str, amount: int) -> int:
    share = ledger.spent_share(f"{ACCOUNT}{upstream}", parse_limit(name, amount))
    assert share is not None
    return round(amount * (1 - share))


async def test_a_call_over_it_waits_in_the_lane(boot: Boots) -> None:
    server, calls = FakeTei(), 30
    text = limited("requests_per_second: 20").replace("limits:", "request_inputs: 1, limits:")
    async with boot({"tei-0": server}, text) as gateway:
        replies = await asyncio.gather(*(embed(gateway, f"text {number}") for number in range(calls)))

    assert {200} == {reply.status_code for reply in replies}
    assert calls == sent(server)
    assert [event for event in gateway.events if isinstance(event, UpstreamLimited)]
    assert {"up"} == {event.state for event in gateway.events if isinstance(event, ReplicaChanged)}
    # What was not sent is no attempt.
    ended = [event for event in gateway.events if isinstance(event, AttemptFinished)]
    assert calls == len(ended)
    assert {"ok"} == {event.outcome for event in ended}
    finished = [event for event in gateway.events if isinstance(event, CallFinished) and event.model == "bge"]
    assert {1} == {event.attempts for event in finished}


async def test_one_that_would_wait_too_long_gets_429(boot: Boots) -> None:
    server, ledger = FakeTei(), MemoryLedger(lambda: START_US)
    async with boot({"tei-0": server}, limited("requests_per_hour: 2"), ledger=ledger) as gateway:
        replies = [await embed(gateway, f"text {number}") for number in range(4)]
        status = (await gateway.client.get("/admin/status")).json()
        metrics = (await gateway.client.get("/metrics")).text

    assert [200, 200, 429, 429] == [reply.status_code for reply in replies]
    assert {"60"} == {reply.headers["retry-after"] for reply in replies[2:]}
    assert ["overloaded"] * 2 == [reply.json()["error"]["code"] for reply in replies[2:]]
    assert "the rate that the upstream of this model allows to all callers is used up" in replies[2].text
    assert 2 == sent(server)
    [lane] = status["lanes"]
    assert [{"name": "requests_per_hour", "amount": 2, "used_ratio": 1.0}] == lane["limits"]
    # The second refusal came without another look at the ledger.
    assert 1 == lane["limited"]
    assert "up" == status["replicas"][0]["state"]
    assert 'gateway_upstream_limit_used_ratio{limit="requests_per_hour",upstream="one"} 1.0' in metrics
    assert 'gateway_upstream_limited_total{upstream="one"} 1.0' in metrics


async def test_a_call_moves_to_the_next_upstream(boot: Boots) -> None:
    servers = {"tei-0": FakeTei(), "tei-1": FakeTei()}
    text = limited("requests_per_hour: 1", GROUP)
    async with boot(servers, text, ledger=MemoryLedger(lambda: START_US)) as gateway:
        replies = [await embed(gateway, f"text {number}") for number in range(4)]

    assert [200] * 4 == [reply.status_code for reply in replies]
    assert [1, 3] == [sent(server) for server in servers.values()]


@pytest.mark.parametrize(
    ("status", "left"), [(500, 9), (429, 9), (422, 8)], ids=["failed", "overloaded", "refused"]
)
async def test_a_failed_request_is_refunded(boot: Boots, status: int, left: int) -> None:
    server, ledger = FakeTei(), MemoryLedger(lambda: START_US)
    async with boot({"tei-0": server}, limited(AMOUNTS), ledger=ledger) as gateway:
        assert 200 == (await embed(gateway)).status_code
        server.hook = respond_with(status, REFUSED)
        failed = await embed(gateway, "b")
        await until(lambda: remaining(ledger, "one", "requests_per_hour", 10) == left)

    assert failed.status_code not in {200, 503}
    assert {"ok"} < {event.outcome for event in gateway.events if isinstance(event, AttemptFinished)}
    assert 997 == remaining(ledger, "one", "tokens_per_hour", 1000)


async def test_tokens_are_settled_to_those_of_the_reply(boot: Boots) -> None:
    ledger = MemoryLedger(lambda: START_US)
    async with boot({"tei-0": FakeTei()}, limited("tokens_per_hour: 1000"), ledger=ledger) as gateway:
        await embed(gateway, "one two three")

    # Three words and two special tokens, of many more bytes.
    assert 995 == remaining(ledger, "one", "tokens_per_hour", 1000)


async def test_requests_are_cut_to_what_the_limits_can_admit(boot: Boots) -> None:
    server, ledger = FakeTei(), MemoryLedger(lambda: START_US)
    text = limited("inputs_per_hour: 4, tokens_per_hour: 100000")
    async with boot({"tei-0": server}, text, ledger=ledger) as gateway:
        reply = await embed(gateway, [f"text {number}" for number in range(4)])
        over = await embed(gateway, ["a", "b"])

    assert (200, 429) == (reply.status_code, over.status_code)


async def test_an_input_that_never_fits_is_refused(boot: Boots) -> None:
    async with boot({"tei-0": FakeTei()}, limited("tokens_per_minute: 5")) as gateway:
        reply = await embed(gateway, "a text of more than five bytes, the most that its tokens may be")

    assert (400, "request_exceeds_limit") == (reply.status_code, reply.json()["error"]["code"])


async def test_a_tenant_can_have_no_account_of_an_upstream() -> None:
    with pytest.raises(ConfigError) as error:
        parse_config(limited("tokens_per_minute: 5") + '  "\\x1fupstream one": {}\n', {}, Path.cwd())
    assert "has no control characters" in str(error.value.problems[0])


@pytest.mark.parametrize(
    "limit", ["requests_in_flight", "batch_tokens_per_day", "budget_per_day", "cats_per_day"]
)
def test_other_limits_are_refused(limit: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_config(limited(f"{limit}: 5"), {}, Path.cwd())
    assert f"upstreams.one.limits.{limit}" == error.value.problems[0].path
