"""Counting of tokens before the reserve: refused in time, and right for each call."""

import asyncio
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from backends.tokens.tokenizer import TextCounter
from gateway.quotas.ledger import MemoryLedger
from gateway.tenants.keyring import key_digest
from gateway.upstreams import token_ids
from tests.conftest import KEY, Boots
from tests.fakes.checkpoint import write_small_files
from tests.fakes.hooks import Gate, until
from tests.fakes.tei import FakeTei
from tests.waiting import PATIENCE_S

OPENAI = "/v1/embeddings"
# Above the length that is counted without a thread, and above the length for which the ledger is asked first.
MEDIUM, LARGE = "w " * 300, "w " * 40_000


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Return the texts that are tokenized to be counted."""
    texts: list[str] = []
    count = TextCounter.count

    def record(self: TextCounter, given: Sequence[str]) -> list[int]:
        texts.extend(given)
        return count(self, given)

    monkeypatch.setattr(TextCounter, "count", record)
    return texts


def config_of(folder: Path, limits: str, **settings: str) -> str:
    """Return a config of one upstream whose tokens are counted."""
    more = "".join(f", {name}: {value}" for name, value in settings.items())
    return f"""
upstreams: {{up: {{backend: tei, replicas: ["http://tei"], tokenizer: {write_small_files(folder)}{more}}}}}
models: {{m: {{upstream: up}}}}
tenants:
  acme: {{keys: ["{key_digest(KEY)}"], limits: {{{limits}}}}}
"""


@pytest.mark.parametrize("path", [OPENAI, "/embed"])
async def test_nothing_is_tokenized_if_special_tokens_alone_exceed_a_limit(
    boot: Boots, tmp_path: Path, counted: list[str], path: str
) -> None:
    field = "input" if path == OPENAI else "inputs"
    async with boot({"tei": FakeTei()}, config_of(tmp_path, "tokens_per_minute: 50")) as gateway:
        reply = await gateway.post(path, {field: [MEDIUM] * 30})

    assert (400 if path == OPENAI else 422) == reply.status_code
    assert "this call costs at least 60 tokens, and tokens_per_minute is 50" in reply.text
    assert [] == counted


async def test_counting_stops_when_a_limit_is_exceeded(
    boot: Boots, tmp_path: Path, counted: list[str]
) -> None:
    async with boot({"tei": FakeTei()}, config_of(tmp_path, "tokens_per_minute: 200")) as gateway:
        reply = await gateway.post(OPENAI, {"input": [f"{number} {LARGE}" for number in range(60)]})

    assert 400 == reply.status_code
    assert "costs at least 232 tokens" in reply.json()["error"]["message"]
    # A chunk is 32 KiB, and a model of 16 tokens reads 4,000 characters of a text.
    assert 8 == len(counted)


@pytest.mark.parametrize("limits", ["requests_per_minute: 1", "tokens_per_minute: 70"])
async def test_nothing_large_is_tokenized_for_a_spent_limit(
    boot: Boots, tmp_path: Path, counted: list[str], limits: str
) -> None:
    now_us = 1_700_000_000_000_000
    ledger = MemoryLedger(lambda: now_us)
    async with boot({"tei": FakeTei()}, config_of(tmp_path, limits), ledger=ledger) as gateway:
        first = await gateway.post(OPENAI, {"input": [MEDIUM] * 4})
        counted.clear()
        second = await gateway.post(OPENAI, {"input": [f"{number} {LARGE}" for number in range(30)]})

    assert (200, 429) == (first.status_code, second.status_code)
    assert "retry-after" in second.headers
    assert [] == counted


@pytest.fixture
def cut(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Return the texts that are tokenized to be cut."""
    texts: list[str] = []
    original = TextCounter.cut

    def record(self: TextCounter, given: Sequence[str], **options: Any) -> list[str]:
        texts.extend(given)
        return original(self, given, **options)

    monkeypatch.setattr(TextCounter, "cut", record)
    return texts


async def test_nothing_large_is_cut_for_a_spent_limit(boot: Boots, tmp_path: Path, cut: list[str]) -> None:
    now_us = 1_700_000_000_000_000
    ledger = MemoryLedger(lambda: now_us)
    async with boot(
        {"tei": FakeTei()}, config_of(tmp_path, "requests_per_minute: 1"), ledger=ledger
    ) as gateway:
        await gateway.post(OPENAI, {"input": "a"})
        body = {"texts": [f"{number} {LARGE}" for number in range(30)], "max_tokens": 4}
        reply = await gateway.post("/v2/embed", body | {"input_type": "search_document"})

    assert 429 == reply.status_code, reply.text
    assert [] == cut


async def test_cutting_stops_when_a_limit_is_exceeded(boot: Boots, tmp_path: Path, cut: list[str]) -> None:
    async with boot({"tei": FakeTei()}, config_of(tmp_path, "tokens_per_minute: 200")) as gateway:
        body = {"texts": [f"{number} {LARGE}" for number in range(60)], "max_tokens": 10}
        reply = await gateway.post("/v2/embed", body | {"input_type": "search_document"})

    assert 400 == reply.status_code, reply.text
    assert "tokens_per_minute is 200" in reply.text
    assert 10 < len(cut) < 20


async def test_a_count_that_outlasts_the_deadline_costs_a_request(
    boot: Boots, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = threading.Event()

    def count(_: TextCounter, texts: Sequence[str]) -> list[int]:
        released.wait(PATIENCE_S)
        return [1] * len(texts)

    limits = "requests_per_day: 3, tokens_per_day: 1000000"
    async with boot({"tei": FakeTei()}, config_of(tmp_path, limits)) as gateway:
        with monkeypatch.context() as patches:
            patches.setattr(TextCounter, "count", count)
            late = await gateway.post(OPENAI, {"input": MEDIUM}, x_timeout_s="0.05")
            released.set()
        served = await gateway.post(OPENAI, {"input": "a"})

    assert 504 == late.status_code
    assert "1" == served.headers["x-ratelimit-remaining-requests"]


async def test_asking_takes_nothing(boot: Boots, tmp_path: Path) -> None:
    limits = "requests_per_minute: 2, tokens_per_minute: 1000, inputs_per_minute: 100"
    now_us = 1_700_000_000_000_000
    ledger = MemoryLedger(lambda: now_us)
    async with boot({"tei": FakeTei()}, config_of(tmp_path, limits), ledger=ledger) as gateway:
        reply = await gateway.post(OPENAI, {"input": [f"{number} {LARGE}" for number in range(30)]})
        rows = await ledger.usage("acme", ["2023-11-14"])

    assert 200 == reply.status_code
    remaining = [reply.headers[f"x-ratelimit-remaining-{unit}"] for unit in ("requests", "tokens", "inputs")]
    assert ["1", str(1000 - 30 * 16), "70"] == remaining
    assert [(1, 480, 30)] == [(row.requests, row.tokens, row.inputs) for row in rows]


async def test_a_shadow_limit_refuses_nothing(boot: Boots, tmp_path: Path) -> None:
    config = config_of(tmp_path, "tokens_per_minute: 50") + "quotas: {shadow: true}\n"
    async with boot({"tei": FakeTei()}, config) as gateway:
        reply = await gateway.post(OPENAI, {"input": [f"{number} {LARGE}" for number in range(30)]})

    assert 200 == reply.status_code


async def test_calls_that_waited_for_the_first_replica_pay_for_their_own_tokens(
    boot: Boots, tmp_path: Path
) -> None:
    gate, joined, server = Gate(), Gate(), FakeTei(max_client_batch_size=32)
    server.hook = gate
    config = config_of(tmp_path, "requests_per_minute: 100", in_flight_batches="1", when_unavailable="wait")
    texts = ["a", "internationalization " * 3, "b c d e f", "x" * 60]

    async def late(scope: Any, receive: Any, send: Any) -> None:
        await joined()
        await server(scope, receive, send)

    async with boot({"tei": late}, config, wait=False) as gateway:
        calls = [asyncio.create_task(gateway.post(OPENAI, {"input": text})) for text in texts]
        upstream = gateway.application.gateway.upstreams["up"]
        await until(lambda: upstream.lanes["texts"].queued_tokens == len(texts))
        joined.opened.set()
        await until(lambda: gate.waiting == 1)
        gate.opened.set()
        replies = await asyncio.gather(*calls)

    assert [3, 5, 7, 3] == [reply.json()["usage"]["total_tokens"] for reply in replies]
    # Some shared a batch.
    assert len(server.requests) < len(texts)


def config_with_ids(folder: Path) -> str:
    """Return a config whose model accepts token ids."""
    ids = folder / "ids"
    ids.mkdir()
    return config_of(folder, "requests_per_minute: 100", token_encoding=str(write_small_files(ids)))


async def test_token_ids_of_a_call_are_bounded(
    boot: Boots, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_ids, "IDS_MAX", 5)
    config = config_with_ids(tmp_path)
    async with boot({"tei": FakeTei()}, config) as gateway:
        allowed = await gateway.post(OPENAI, {"input": [[0, 0], [0, 0, 0]]})
        refused = await gateway.post(OPENAI, {"input": [[0, 0, 0], [0, 0, 0]]})

    assert (200, 400) == (allowed.status_code, refused.status_code)
    assert "more than 5 token ids" in refused.text


async def test_an_unknown_token_id_is_named_by_its_input(
    boot: Boots, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_ids, "CHUNK_CHARACTERS", 4)
    config = config_with_ids(tmp_path)
    async with boot({"tei": FakeTei()}, config) as gateway:
        reply = await gateway.post(OPENAI, {"input": [[0], [0], [77]]})

    assert 400 == reply.status_code
    assert "input 2 contains 77" in reply.text
