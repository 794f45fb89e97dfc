"""Prices and budgets through the booted gateway: what calls cost, what is refused, and what operators see."""

import asyncio
import unicodedata
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from gateway.events import BudgetAlert
from gateway.quotas.ledger import MemoryLedger
from gateway.quotas.limits import parse_limit
from gateway.tenants.keyring import key_digest
from tests.conftest import KEY, Boots, Running
from tests.fakes.engines import FakeEngine, tokens_of
from tests.fakes.hooks import Gate, fail_with, tei_with_hook, until
from tests.fakes.tei import Computed, FakeTei

# Most tokens of one text at FakeTei.
MOST_TOKENS = 16
START_US = 1_700_000_000_000_000
DAY = "2023-11-14"
# `dear` and `cheap` are two names of one upstream, and `free` is a third.
CONFIG = f"""
currency: EUR
upstreams: {{only: {{backend: tei, replicas: ["http://tei-0"]}}}}
models:
  dear: {{upstream: only, price_per_million_tokens: 1000, truncate: right}}
  cheap: {{upstream: only, price_per_million_tokens: 2.5}}
  free: {{upstream: only}}
defaults: {{embed: dear}}
tenants:
  acme:
    keys:
      - "{key_digest(KEY)}"
      - {{digest: "{key_digest("ci-key")}", id: ci, limits: {{budget_per_day: 0.005}}}}
    limits: {{budget_per_month: BUDGET}}
  ops: {{keys: [{{digest: "{key_digest("ops-key")}", scopes: [admin]}}]}}
"""


@asynccontextmanager
async def gateway_of(
    boot: Boots, budget: float = 1, server: FakeTei | None = None, config: str = CONFIG
) -> AsyncIterator[Running]:
    """Yield a gateway whose tenant has a budget, with a clock that stands still."""
    ledger = MemoryLedger(lambda: START_US)
    text = config.replace("BUDGET", str(budget))
    async with boot({"tei-0": server or FakeTei()}, text, ledger=ledger) as gateway:
        yield gateway


async def embed(gateway: Running, text: str = "a", model: str = "dear", key: str = KEY) -> httpx.Response:
    """Embed one text, of which FakeTei counts each word and two special tokens."""
    body = {"model": model, "input": text}
    return await gateway.post("/v1/embeddings", body, authorization=f"Bearer {key}")


async def costs(gateway: Running) -> dict[str, tuple[int, float]]:
    """Return tokens and cost of each model on the day of the clock."""
    reply = await gateway.client.get(
        "/admin/usage",
        params={"tenant": "acme", "since": DAY, "until": DAY},
        headers={"authorization": "Bearer ops-key"},
    )
    assert "EUR" == reply.json()["currency"]
    return {row["model"]: (row["tokens"], row["cost"]) for row in reply.json()["data"]}


async def test_each_name_of_a_model_has_its_own_price(boot: Boots) -> None:
    async with gateway_of(boot) as gateway:
        for model in ("dear", "cheap", "cheap", "free"):
            assert 200 == (await embed(gateway, "one two", model)).status_code
        found = await costs(gateway)

    tokens = found["dear"][0]
    assert {
        "dear": (tokens, tokens * 1000 / 10**6),
        "cheap": (2 * tokens, 2 * tokens * 2.5 / 10**6),
        "free": (tokens, 0.0),
    } == found


async def test_spent_budget_refuses_and_says_which_one_it_is(boot: Boots) -> None:
    async with gateway_of(boot, 0.012) as gateway:
        assert 200 == (await embed(gateway)).status_code
        by_key = await embed(gateway, "abc", key="ci-key")
        served = [await embed(gateway) for _ in range(4)]
        free = await embed(gateway, model="free")

    assert [200, 200, 429, 429] == [reply.status_code for reply in served]
    error = served[2].json()["error"]
    assert ("insufficient_quota", "insufficient_quota") == (error["type"], error["code"])
    assert error["message"].startswith(
        "limit budget_per_month (0.012 EUR), the budget of tenant acme: 0.009 EUR is spent or reserved, "
        "0.003 EUR is left, and this call may cost up to 0.005 EUR, by its length; "
    )
    assert "it starts again on 2023-12-01 (UTC)" in error["message"]
    assert "false" == served[2].headers["x-should-retry"]
    assert 400 == by_key.status_code
    assert "and key ci budget_per_day is 0.005 EUR: it can never pass" in by_key.json()["error"]["message"]
    # The budget is not for a model without a price.
    assert 200 == free.status_code


async def test_early_refusal_needs_a_price_of_every_model(boot: Boots) -> None:
    # A model without a price may be named in the body, which is not read before the early refusal.
    every = CONFIG.replace("  free: {upstream: only}\n", "")
    # As many tokens as the model reads: the upper bound is the count, and nothing is left of the budget.
    longest = "w " * 2 * MOST_TOKENS
    for config, status in ((CONFIG, 400), (every, 429)):
        async with gateway_of(boot, MOST_TOKENS / 1000, config=config) as gateway:
            assert [200, 429] == [(await embed(gateway, longest)).status_code for _ in range(2)]
            # An invalid body is found only by reading it.
            assert status == (await gateway.post("/v1/embeddings", {"input": 1})).status_code


async def test_reserved_work_settles_at_its_old_price(boot: Boots) -> None:
    gate = Gate()
    async with gateway_of(boot, 1, tei_with_hook(gate)) as gateway:
        running = asyncio.create_task(embed(gateway, "held"))
        await until(lambda: gate.waiting == 1)
        text = CONFIG.replace("BUDGET", "1").replace("tokens: 1000", "tokens: 7")
        gateway.follow(text)
        gate.opened.set()
        assert 200 == (await running).status_code
        old = (await costs(gateway))["dear"]
        await embed(gateway, "held")
        tokens, cost = (await costs(gateway))["dear"]

    assert old[1] == old[0] * 1000 / 10**6
    assert (2 * old[0], old[1] + old[0] * 7 / 10**6) == (tokens, pytest.approx(cost, abs=1e-12))


async def test_failure_of_an_upstream_costs_nothing(boot: Boots) -> None:
    async with gateway_of(boot, 0.01, tei_with_hook(fail_with(httpx.ConnectError("refused")))) as gateway:
        replies = [(await embed(gateway)).status_code for _ in range(9)]
        found = await costs(gateway)

    assert {503} == set(replies)
    assert not any(cost for _, cost in found.values())


@pytest.mark.parametrize("charge", ["full", "none"])
async def test_texts_that_are_found_in_the_cache_cost_what_the_configuration_says(
    boot: Boots, charge: str
) -> None:
    config = f"""
currency: EUR
upstreams: {{only: {{backend: torch, model: org/model}}}}
models: {{m: {{upstream: only, cache: true, price_per_million_tokens: 1}}}}
cache: {{charge: {charge}}}
tenants: {{acme: {{keys: ["{key_digest(KEY)}"], limits: {{budget_per_month: 1}}}}}}
"""
    async with boot({}, config, engines={"only": FakeEngine()}) as gateway:
        for text in ("aa", "aa", "b"):
            await gateway.post("/v1/embeddings", {"model": "m", "input": text})
        last = await gateway.post("/v1/embeddings", {"model": "m", "input": "b"})

    computed = tokens_of("aa") + tokens_of("b")
    charged = computed * (2 if charge == "full" else 1)
    assert f"{1 - charged / 10**6:.6f}" == last.headers["x-ratelimit-remaining-budget"]


async def test_own_usage_shows_budget_and_cost(boot: Boots) -> None:
    async with gateway_of(boot, 250.5) as gateway:
        await embed(gateway, key="ci-key")
        own = await gateway.client.get(
            "/usage",
            params={"since": DAY, "until": DAY, "by": "key"},
            headers={"authorization": "Bearer ci-key"},
        )

    assert {"budget_per_month": 250.5, "key ci budget_per_day": 0.005} == own.json()["limits"]
    assert {"budget_per_month": 250.497, "key ci budget_per_day": 0.002} == own.json()["remaining"]
    assert [("budget_per_month", 0.003, 250.5, 0.0), ("key ci budget_per_day", 0.003, 0.005, 0.6)] == [
        (each["limit"], each["used"], each["of"], each["share"]) for each in own.json()["used"]
    ]
    assert ("EUR", [("ci", 0.003)]) == (
        own.json()["currency"],
        [(row["key"], row["cost"]) for row in own.json()["data"]],
    )


async def test_metric_and_alert_of_a_spent_budget(boot: Boots) -> None:
    async with boot({"tei-0": FakeTei()}, CONFIG.replace("BUDGET", "0.02")) as gateway:
        await embed(gateway, key="ci-key")
        before = await spent_ratios(gateway)
        for _ in range(5):
            assert 200 == (await embed(gateway)).status_code
        after = await spent_ratios(gateway)
        await gateway.follow(CONFIG.replace("limits: {budget_per_month: BUDGET}", "weight: 1"))
        without = await spent_ratios(gateway)
        alerts = [event for event in gateway.events if isinstance(event, BudgetAlert)]

    assert {"tenant": 0.15, "key": 0.6} == before
    assert {"tenant": 0.9, "key": 0.6} == after
    assert {"key": 0.6} == without
    assert [BudgetAlert("acme", "budget_per_month", 0.018, 0.02)] == alerts


async def test_the_budget_of_a_tenant_without_keys_has_a_metric(boot: Boots) -> None:
    """Its users may have tokens of an issuer only."""
    config = CONFIG.replace("  ops: {", "  staff: {limits: {budget_per_month: 3}}\n  ops: {")
    async with boot({"tei-0": FakeTei()}, config.replace("BUDGET", "1")) as gateway:
        keyring = gateway.application.gateway.keyring
        assert ("staff", parse_limit("budget_per_month", 3)) in keyring.budgets


async def spent_ratios(gateway: Running) -> dict[str, float]:
    """Return the value of the gauge for each owner of a budget."""
    text = (await gateway.client.get("/metrics", headers={"host": "localhost"})).text
    prefix = 'gateway_budget_spent_ratio{owner="'
    found = [line.removeprefix(prefix) for line in text.splitlines() if line.startswith(prefix)]
    assert all('tenant="acme"' in line for line in found)
    return {line.partition('"')[0]: round(float(line.split()[-1]), 9) for line in found}


class ExpandingTei(FakeTei):
    """Server whose tokenizer normalizes texts and has a token for each so many of their bytes."""

    def __init__(self, bytes_per_token: int, **info: Any) -> None:
        super().__init__(**info)
        self.bytes_per_token = bytes_per_token
        self.tokens = 0

    def _computed(self, reply: Any, texts: Sequence[Any]) -> Computed:
        lengths = [len(unicodedata.normalize("NFKC", str(text)).encode()) for text in texts]
        counted = sum(-(-length // self.bytes_per_token) + 2 for length in lengths)
        self.tokens += counted
        return Computed(reply, sum(lengths), counted)


EXPANDING_TEXT = "\ufdfa" * 20


@pytest.mark.parametrize("bytes_per_token", [1, 2, 7])
async def test_texts_that_tokenizers_expand_keep_the_budget(boot: Boots, bytes_per_token: int) -> None:
    server = ExpandingTei(bytes_per_token, max_input_length=8192)
    async with gateway_of(boot, 4, server) as gateway:
        # Without those of its reference texts.
        server.tokens = 0
        # Equal texts would be computed once.
        texts = [f"{EXPANDING_TEXT} {number}" for number in range(60)]
        replies = await asyncio.gather(*(embed(gateway, text) for text in texts))
        spent = sum(cost for _, cost in (await costs(gateway)).values())

    served = sum(reply.status_code == 200 for reply in replies)
    assert 0 < served
    assert {429} == {reply.status_code for reply in replies} - {200} or served == 60
    # What the upstream has computed, and not only what was recorded.
    assert server.tokens * 1000 / 10**6 <= 4
    assert spent == pytest.approx(server.tokens * 1000 / 10**6)


async def test_an_upstream_that_counts_beyond_any_bound_exceeds_no_budget(
    boot: Boots, caplog: pytest.LogCaptureFixture
) -> None:
    class Wrong(FakeTei):
        def _computed(self, reply: Any, texts: Sequence[Any]) -> Computed:
            return Computed(reply, 1, 12 * len(texts))

    async with gateway_of(boot, 0.01, Wrong()) as gateway:
        statuses = [(await embed(gateway)).status_code for _ in range(4)]
        spent = sum(cost for _, cost in (await costs(gateway)).values())

    # A letter is reserved at five tokens, of which a budget for ten has room for two calls.
    assert [200, 200, 429, 429] == statuses
    assert spent == pytest.approx(0.01)
    assert any("12 in place of at most 5" in line for line in caplog.messages)
