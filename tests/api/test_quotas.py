"""Limits of tenants, through the booted gateway and with a fake clock."""

import asyncio
import re
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.admission import UNPAID_MAX
from gateway.events import QuotaDecided
from gateway.quotas.ledger import MemoryLedger
from gateway.tenants.keyring import key_digest
from tests.conftest import CONFIG, KEY, Boots, Running
from tests.fakes.checkpoint import write_small_files
from tests.fakes.hooks import Gate, fail_with, respond_with, tei_with_hook, until
from tests.fakes.hooks import embedder_and_reranker as fakes
from tests.fakes.tei import FakeTei

OPENAI = "/v1/embeddings"
SECOND_US = 1_000_000
# A Tuesday, 22:13:20 UTC.
START_US = 1_700_000_000 * SECOND_US


class Clock:
    """Wall clock that stands still until a test moves it."""

    def __init__(self) -> None:
        self.now_us = START_US

    def __call__(self) -> int:
        return self.now_us

    def move(self, seconds: float) -> None:
        """Advance the clock."""
        self.now_us += round(seconds * SECOND_US)


def tenants(limits: str, models: str = "") -> str:
    """Return the config with a limited tenant, whose key the client sends, and a tenant without limits."""
    return f"""{CONFIG}
tenants:
  acme: {{keys: ["{key_digest(KEY)}"], limits: {{{limits}}}{models}}}
  other: {{keys: ["{key_digest("other-key")}"]}}
"""


def limited(boot: Boots, limits: str, clock: Clock | None = None) -> AbstractAsyncContextManager[Running]:
    """Boot a gateway with one replica and these limits of the tenant. clock: stands still by default."""
    return boot({"tei-0": FakeTei()}, tenants(limits), ledger=MemoryLedger(clock or Clock()))


async def embed(gateway: Running, text: str = "a", **options: Any) -> httpx.Response:
    return await gateway.post(OPENAI, {"input": text, **options})


async def statuses(gateway: Running, count: int) -> list[int]:
    return [(await embed(gateway)).status_code for _ in range(count)]


@pytest.mark.parametrize(
    ("limits", "admitted", "wait_s"),
    [
        ("requests_per_second: 2", 2, 1),
        ("requests_per_minute: 3", 3, 20),
        ("requests_per_minute: 7", 7, 9),
        ("requests_per_hour: 120", 120, 30),
        ("inputs_per_minute: 4", 4, 15),
        # 27 of the 30 tokens are used, and one letter is reserved at 5.
        ("tokens_per_minute: 30", 9, 4),
    ],
)
async def test_retry_after_is_exact(boot: Boots, limits: str, admitted: int, wait_s: int) -> None:
    clock = Clock()
    async with limited(boot, limits, clock) as gateway:
        assert [200] * admitted == await statuses(gateway, admitted)
        denied = await embed(gateway)
        assert (429, str(wait_s)) == (denied.status_code, denied.headers["retry-after"])
        clock.move(wait_s - 1)
        assert 429 == (await embed(gateway)).status_code
        clock.move(1)
        assert 200 == (await embed(gateway)).status_code


@pytest.mark.parametrize(
    ("limits", "unit"), [("requests_per_minute: 1", "requests"), ("tokens_per_minute: 17", "tokens")]
)
async def test_openai_error_names_the_exhausted_unit(boot: Boots, limits: str, unit: str) -> None:
    async with limited(boot, limits) as gateway:
        await embed(gateway, "w " * 20)
        error = (await embed(gateway)).json()["error"]

    assert (unit, "rate_limit_exceeded") == (error["type"], error["code"])


async def test_tei_error_type_is_overloaded(boot: Boots) -> None:
    async with limited(boot, "requests_per_minute: 1") as gateway:
        await embed(gateway)
        reply = await gateway.post("/embed", {"inputs": "a"})

    assert (429, "Overloaded", "60") == (
        reply.status_code,
        reply.json()["error_type"],
        reply.headers["retry-after"],
    )


async def test_exhausted_day_limit_tells_clients_not_to_retry(boot: Boots) -> None:
    clock = Clock()
    limits = "requests_per_day: 1"
    async with limited(boot, limits, clock) as gateway:
        await embed(gateway)
        reply = await embed(gateway)
        clock.move(24 * 3600 - (22 * 3600 + 13 * 60 + 20))
        next_day = await embed(gateway)

    assert ("insufficient_quota", "insufficient_quota") == tuple(
        reply.json()["error"][key] for key in ("type", "code")
    )
    assert ("60", "false") == (reply.headers["retry-after"], reply.headers["x-should-retry"])
    assert "1h46m40s" == reply.headers["x-ratelimit-reset-requests"]
    assert 200 == next_day.status_code


@pytest.mark.parametrize(
    ("limits", "body", "message"),
    [
        ("inputs_per_minute: 2", ["a"] * 3, "this call costs 3 inputs, and inputs_per_minute is 2: "),
        ("tokens_per_day: 10", "w " * 20, r"this call may cost up to \d\d tokens, by its length, and "),
    ],
)
async def test_request_beyond_the_limit_is_not_retryable(
    boot: Boots, limits: str, body: Any, message: str
) -> None:
    async with limited(boot, limits) as gateway:
        openai = await gateway.post(OPENAI, {"input": body})
        tei = await gateway.post("/embed", {"inputs": body})

    assert (400, "request_exceeds_limit") == (openai.status_code, openai.json()["error"]["code"])
    assert re.match(message, openai.json()["error"]["message"])
    assert (422, "Validation") == (tei.status_code, tei.json()["error_type"])
    assert "retry-after" not in openai.headers


async def test_error_names_the_exact_cost_if_tokens_are_counted(boot: Boots, tmp_path: Path) -> None:
    settings = f', tokenizer: "{write_small_files(tmp_path)}"}}'
    text = tenants("tokens_per_day: 10").replace('"http://tei-1"]}', f'"http://tei-1"]{settings}')
    async with boot({"tei-0": FakeTei()}, text, ledger=MemoryLedger(Clock())) as gateway:
        reply = await gateway.post(OPENAI, {"input": ["a b c d e f", "a"]})

    assert "this call costs 11 tokens, and tokens_per_day is 10: " in reply.json()["error"]["message"]


async def test_tenants_do_not_share_limits(boot: Boots) -> None:
    async with limited(boot, "requests_per_minute: 1") as gateway:
        assert [200, 429] == await statuses(gateway, 2)
        other_tenant = await gateway.post(OPENAI, {"input": "a"}, authorization="Bearer other-key")

    assert 200 == other_tenant.status_code
    assert [("acme", True), ("acme", False), ("other", True)] == [
        (event.tenant, event.decision == "admitted")
        for event in gateway.events
        if isinstance(event, QuotaDecided)
    ]


@pytest.mark.parametrize("model", ["bge", "strict"])
async def test_tenant_may_use_only_its_models(boot: Boots, model: str) -> None:
    config = tenants("requests_per_minute: 10", ", models: [org/bge]")
    async with boot({"tei-0": FakeTei()}, config, ledger=MemoryLedger(Clock())) as gateway:
        allowed = await embed(gateway, model="org/bge")
        forbidden = await embed(gateway, model=model)

    assert (200, "9") == (allowed.status_code, allowed.headers["x-ratelimit-remaining-requests"])
    assert (403, "8") == (forbidden.status_code, forbidden.headers["x-ratelimit-remaining-requests"])
    assert ("model_forbidden", "model") == tuple(
        forbidden.json()["error"][name] for name in ("code", "param")
    )


@pytest.mark.parametrize(
    ("path", "body", "tokens"),
    [
        (OPENAI, {"input": "abcdefghij"}, 3),
        (OPENAI, {"input": ["one two", "three"] * 3}, 21),
        ("/embed", {"inputs": "w " * 40}, 16),
        ("/rerank", {"query": "q", "texts": ["one two", "three"]}, 11),
        ("/models/bge/rerank", {"query": "q", "texts": ["one two", "three"]}, 10),
        ("/similarity", {"inputs": {"source_sentence": "a", "sentences": ["b", "c"]}}, 9),
        ("/tokenize", {"inputs": "one two three"}, 0),
    ],
)
async def test_a_call_settles_at_what_the_upstream_computed(
    boot: Boots, path: str, body: dict[str, Any], tokens: int
) -> None:
    ledger = MemoryLedger(Clock())
    async with boot(fakes(), tenants("tokens_per_minute: 1000"), ledger=ledger) as gateway:
        reply = await gateway.post(path, body)

    assert 200 == reply.status_code
    assert str(1000 - tokens) == reply.headers["x-ratelimit-remaining-tokens"]


async def remaining_after(
    boot: Boots, servers: dict[str, FakeTei], body: dict[str, Any], status: int
) -> tuple[int, int]:
    """Return the requests and tokens that a failed call has cost, from the headers of the next call."""
    limits = tenants("requests_per_minute: 100, tokens_per_minute: 1000")
    async with boot(servers, limits, ledger=MemoryLedger(Clock())) as gateway:
        failed = await gateway.post(OPENAI, body)
        assert status == failed.status_code
        for server in servers.values():
            server.hook = None
        headers = (await embed(gateway)).headers
    requests, tokens = (int(headers[f"x-ratelimit-remaining-{unit}"]) for unit in ("requests", "tokens"))
    return 100 - requests - 1, 1000 - tokens - 3


async def test_charges_errors_of_the_caller(boot: Boots) -> None:
    body = {"input": "w " * 20, "model": "strict"}

    assert (1, 0) == await remaining_after(boot, {"tei-0": FakeTei()}, body, 400)


@pytest.mark.parametrize(("status", "reply_status"), [(500, 502), (424, 502), (401, 502), (429, 429)])
async def test_refunds_errors_of_an_upstream(boot: Boots, status: int, reply_status: int) -> None:
    servers = {name: tei_with_hook(respond_with(status)) for name in ("tei-0", "tei-1")}

    assert (0, 0) == await remaining_after(boot, servers, {"input": "a"}, reply_status)


async def test_refunds_the_whole_call_if_one_batch_fails(boot: Boots) -> None:
    server = FakeTei()

    is_broken = False

    async def hook(path: str, sent: dict[str, Any]) -> tuple[int, bytes] | None:
        nonlocal is_broken
        is_broken = is_broken or "bad" in sent["input"]
        return (500, b"") if is_broken else None

    server.hook = hook
    body = {"input": ["a"] * 11 + ["bad"]}

    assert (0, 0) == await remaining_after(boot, {"tei-0": server}, body, 502)


async def test_call_that_fails_through_its_own_input_costs_what_was_computed(boot: Boots) -> None:
    server = FakeTei()

    async def hook(path: str, sent: dict[str, Any]) -> tuple[int, bytes] | None:
        return (500, b"") if "bad" in sent["input"] else None

    server.hook = hook
    body = {"input": ["a"] * 11 + ["bad"]}

    # The bad text is found among the last four after eight others and three of its slice were computed.
    assert (1, 33) == await remaining_after(boot, {"tei-0": server}, body, 400)


async def test_a_tenant_whose_calls_break_an_upstream_pays_requests_after_some_failures(boot: Boots) -> None:
    servers = {"tei-0": tei_with_hook(respond_with(500))}
    limits = tenants(f"requests_per_minute: {UNPAID_MAX}")
    async with boot(servers, limits, ledger=MemoryLedger(Clock())) as gateway:
        statuses = [(await embed(gateway)).status_code for _ in range(2 * UNPAID_MAX + 2)]

    assert [502] * (2 * UNPAID_MAX) + [429] * 2 == statuses


async def test_refunds_errors_of_the_gateway(boot: Boots) -> None:
    servers = {"tei-0": tei_with_hook(fail_with(RuntimeError("a bug")))}

    assert (0, 0) == await remaining_after(boot, servers, {"input": "a"}, 500)


@pytest.mark.parametrize(("timeouts", "remaining"), [({}, "99"), ({"x_timeout_s": "0.05"}, "98")])
async def test_refunds_a_timeout_unless_the_caller_set_it(
    boot: Boots, timeouts: dict[str, str], remaining: str
) -> None:
    server = tei_with_hook(Gate())
    limits = tenants("requests_per_minute: 100").replace("bge: {", "bge: {deadline_s: 0.1, ")
    async with boot({"tei-0": server}, limits, ledger=MemoryLedger(Clock())) as gateway:
        timed_out = await gateway.post(OPENAI, {"input": "a"}, **timeouts)
        server.hook = None
        next_reply = await embed(gateway)

    assert (504, remaining) == (timed_out.status_code, next_reply.headers["x-ratelimit-remaining-requests"])


@pytest.mark.parametrize("limits", ["tokens_per_day: 1000", "requests_per_day: 1000"])
@pytest.mark.parametrize("hangs_up", [True, False], ids=["hangs up", "own deadline"])
async def test_charges_a_caller_who_leaves_for_dispatched_batches(
    boot: Boots, limits: str, *, hangs_up: bool
) -> None:
    gate = Gate()
    ledger = MemoryLedger(Clock())
    # The replica takes one batch of four inputs at a time. The others wait in the queue.
    config = tenants(limits).replace("backend: tei,", "backend: tei, in_flight_batches: 1,")
    async with boot({"tei-0": tei_with_hook(gate)}, config, ledger=ledger) as gateway:
        options = {} if hangs_up else {"x_timeout_s": "0.2"}
        call = asyncio.create_task(
            gateway.post(OPENAI, {"input": [f"{n:03}" for n in range(100)]}, **options)
        )
        await until(lambda: gate.waiting == 1)
        if hangs_up:
            call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        gate.opened.set()
        rows = await ledger.usage("acme", ["2023-11-14"])

    # Three digits with special tokens are at most seven tokens, and four inputs are a batch.
    assert [(1, 28)] == [(row.requests, row.tokens) for row in rows]


def tei_that_hangs(gate: Gate) -> FakeTei:
    """Return a server that holds the second batch of four inputs at a gate."""

    async def hook(path: str, sent: dict[str, Any]) -> None:
        if "004" in sent["input"]:
            await gate()

    return tei_with_hook(hook)


async def test_models_deadline_charges_what_replicas_computed(boot: Boots) -> None:
    """The caller chose the size of the call, so a call that outlasts the deadline is not free."""
    gate, ledger = Gate(), MemoryLedger(Clock())
    server = tei_that_hangs(gate)
    config = tenants("requests_per_minute: 3, tokens_per_day: 1000").replace(
        "backend: tei,", "backend: tei, in_flight_batches: 1,"
    )
    config = config.replace("bge: {", "bge: {deadline_s: 0.5, ")
    async with boot({"tei-0": server}, config, ledger=ledger) as gateway:
        reply = await gateway.post(OPENAI, {"input": [f"{n:03}" for n in range(12)]})
        rows = await ledger.usage("acme", ["2023-11-14"])
        gate.opened.set()
        following = await embed(gateway)

    # The first batch of four inputs was computed, the second hung, and the third was never sent.
    assert 504 == reply.status_code
    assert [(1, 12, 12)] == [(row.requests, row.tokens, row.inputs) for row in rows]
    assert "1" == following.headers["x-ratelimit-remaining-requests"]


async def test_refunds_the_whole_call_if_a_replica_hangs(boot: Boots) -> None:
    """A hung replica is no fault of the caller, even if the replica answered a part of the call."""
    gate, ledger = Gate(), MemoryLedger(Clock())
    is_hung = False

    async def hook(path: str, sent: dict[str, Any]) -> None:
        nonlocal is_hung
        is_hung = is_hung or "004" in sent["input"]
        if is_hung:
            await gate()

    server = tei_with_hook(hook)
    config = tenants("requests_per_minute: 3, tokens_per_day: 1000").replace(
        "backend: tei,", "backend: tei, attempt_timeout_s: 0.2,"
    )
    async with boot({"tei-0": server}, config, ledger=ledger) as gateway:
        reply = await gateway.post(OPENAI, {"input": [f"{n:03}" for n in range(12)]})
        rows = await ledger.usage("acme", ["2023-11-14"])
        gate.opened.set()

    assert 504 == reply.status_code
    assert [] == [row for row in rows if row.requests or row.tokens or row.inputs]


async def test_charges_a_call_whose_own_input_hangs(boot: Boots) -> None:
    gate, ledger = Gate(), MemoryLedger(Clock())
    config = tenants("requests_per_minute: 3, tokens_per_day: 1000").replace(
        "backend: tei,", "backend: tei, attempt_timeout_s: 0.2,"
    )
    async with boot({"tei-0": tei_that_hangs(gate)}, config, ledger=ledger) as gateway:
        reply = await gateway.post(OPENAI, {"input": [f"{n:03}" for n in range(12)]})
        rows = await ledger.usage("acme", ["2023-11-14"])
        gate.opened.set()

    assert 400 == reply.status_code
    assert reply.json()["error"]["message"].startswith("input 4: ")
    assert [(1, 12)] == [(row.requests, row.inputs) for row in rows]
    # At most what was reserved: the length of each text and its special tokens.
    assert 0 < rows[0].tokens <= 84


async def test_charges_a_call_that_outlasts_the_deadline_while_its_input_is_sought(boot: Boots) -> None:
    gate, ledger = Gate(), MemoryLedger(Clock())
    config = tenants("requests_per_minute: 3, tokens_per_day: 1000").replace(
        "backend: tei,", "backend: tei, attempt_timeout_s: 0.4,"
    )
    config = config.replace("bge: {", "bge: {deadline_s: 0.6, ")
    async with boot({"tei-0": tei_that_hangs(gate)}, config, ledger=ledger) as gateway:
        reply = await gateway.post(OPENAI, {"input": [f"{n:03}" for n in range(4, 8)]})
        rows = await ledger.usage("acme", ["2023-11-14"])
        gate.opened.set()

    assert 504 == reply.status_code
    assert [(1, 4)] == [(row.requests, row.inputs) for row in rows]
    assert 0 < rows[0].tokens <= 28


async def test_charges_no_tokens_if_the_caller_hangs_up_before_dispatch(boot: Boots) -> None:
    gate = Gate()
    ledger = MemoryLedger(Clock())
    config = tenants("tokens_per_day: 1000").replace("backend: tei,", "backend: tei, in_flight_batches: 1,")
    async with boot({"tei-0": tei_with_hook(gate)}, config, ledger=ledger) as gateway:
        first = asyncio.create_task(gateway.post(OPENAI, {"input": "one"}))
        await until(lambda: gate.waiting == 1)
        second = asyncio.create_task(gateway.post(OPENAI, {"input": "two"}))
        await until(lambda: 2 == sum(isinstance(event, QuotaDecided) for event in gateway.events))
        second.cancel()
        await asyncio.gather(second, return_exceptions=True)
        gate.opened.set()
        assert 200 == (await first).status_code
        rows = await ledger.usage("acme", ["2023-11-14"])

    assert [(2, 3)] == [(row.requests, row.tokens) for row in rows]


async def test_denied_call_takes_nothing_from_other_limits(boot: Boots) -> None:
    clock = Clock()
    limits = tenants("requests_per_second: 1, inputs_per_day: 100")
    async with boot({"tei-0": FakeTei()}, limits, ledger=MemoryLedger(clock)) as gateway:
        assert [200, 429, 429, 429] == await statuses(gateway, 4)
        clock.move(1)
        reply = await embed(gateway)

    assert "98" == reply.headers["x-ratelimit-remaining-inputs"]


async def test_counts_calls_in_flight_and_releases_their_slots(boot: Boots) -> None:
    gate = Gate()
    async with boot({"tei-0": tei_with_hook(gate)}, tenants("requests_in_flight: 2")) as gateway:
        running = [asyncio.create_task(embed(gateway, text)) for text in ("one", "two")]
        await until(lambda: gate.waiting == 2)
        denied = await embed(gateway)
        gate.opened.set()
        replies = await asyncio.gather(*running)
        after = await embed(gateway)

    assert (429, "1") == (denied.status_code, denied.headers["retry-after"])
    assert [200, 200, 200] == [reply.status_code for reply in (*replies, after)]


async def test_cancelled_call_releases_its_slot(boot: Boots) -> None:
    gate = Gate()
    async with boot({"tei-0": tei_with_hook(gate)}, tenants("requests_in_flight: 1")) as gateway:
        cancelled = asyncio.create_task(embed(gateway))
        await until(lambda: gate.waiting == 1)
        cancelled.cancel()
        await asyncio.gather(cancelled, return_exceptions=True)
        gate.opened.set()
        reply = await embed(gateway)

    assert 200 == reply.status_code


@pytest.mark.parametrize("status", [500, 429, 422])
async def test_failed_call_releases_its_slot(boot: Boots, status: int) -> None:
    server = tei_with_hook(respond_with(status))
    async with boot({"tei-0": server}, tenants("requests_in_flight: 1")) as gateway:
        await embed(gateway)
        server.hook = None

        assert 200 == (await embed(gateway)).status_code
