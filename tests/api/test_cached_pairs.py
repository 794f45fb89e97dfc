"""The cache of scores: which rerankers have one, what is found, who finds it, and what it costs."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backends.contract import Capabilities, Operation, Reply, Rerank, RerankReply, Score, ScoreKind, Work
from backends.reference_texts import SCORED
from gateway.cache.call_cache import NO_SCORES_IDENTITY
from gateway.tenants.keyring import key_digest
from tests.conftest import Boots, Running
from tests.fakes.checkpoint import write_small_files
from tests.fakes.tei import vector_of

COMMIT = "0123456789abcdef0123456789abcdef01234567"
CONFIG = f"""
currency: EUR
upstreams: {{only: {{backend: torch, model: org/reranker, revision: "{COMMIT}"}}}}
models:
  m: {{upstream: only, cache: true, price_per_million_tokens: 1000}}
  plain: {{upstream: only}}
cache: {{charge: CHARGE}}
tenants:
  acme:
    keys: ["{key_digest("key-of-acme")}", {{digest: "{key_digest("key-of-ops")}", scopes: [admin]}}]
    limits: {{budget_per_month: 1}}
  zeta: {{keys: ["{key_digest("key-of-zeta")}"]}}
"""


class FakeReranker:
    """Reranker whose scores depend on the pair and the instruction. pairs: scored since it joined."""

    def __init__(self, checkpoint: Path | None) -> None:
        self.pairs: list[tuple[str, str]] = []
        self._checkpoint = checkpoint

    async def describe(self, timeout_s: float) -> Capabilities:  # noqa: ARG002
        """Return the capabilities."""
        return Capabilities(
            "org/reranker",
            frozenset({Operation.RERANK}),
            max_input_tokens=64,
            request_inputs=3,
            checkpoint=None if self._checkpoint is None else str(self._checkpoint),
            score_kind=ScoreKind.LOGIT,
            takes_instruction=True,
        )

    async def run(self, work: Work, timeout_s: float) -> Reply:  # noqa: ARG002
        """Return a score for each pair; a text has a token for each word."""
        assert isinstance(work, Rerank | Score)
        pairs = tuple(work.model_inputs)
        if work != SCORED:
            self.pairs += pairs
        scores = [vector_of(f"{query}|{document}|{work.instruction}")[0] for query, document in pairs]
        tokens = sum(len(query.split()) + len(document.split()) + 3 for query, document in pairs)
        return RerankReply(np.array(scores, np.float32), tokens)

    async def aclose(self) -> None:
        """Do nothing."""


@asynccontextmanager
async def gateway_of(
    boot: Boots, tmp_path: Path, *, charge: str = "full", counts: bool = True, config: str = CONFIG
) -> AsyncIterator[tuple[Running, FakeReranker]]:
    """Yield a gateway with a cache and its reranker. counts: the gateway has the model's tokenizer."""
    engine: Any = FakeReranker(write_small_files(tmp_path, 64) if counts else None)
    async with boot({}, config.replace("CHARGE", charge), engines={"only": engine}) as gateway:
        yield gateway, engine


async def rerank(
    gateway: Running, documents: list[str], query: str = "q", tenant: str = "acme", **body: Any
) -> Any:
    sent = {"model": "m", "query": query, "documents": documents} | body
    return await gateway.post("/v1/rerank", sent, authorization=f"Bearer key-of-{tenant}")


def scores_of(reply: Any) -> dict[int, float]:
    return {found["index"]: found["relevance_score"] for found in reply.json()["results"]}


async def test_only_pairs_that_are_not_found_are_scored(boot: Boots, tmp_path: Path) -> None:
    async with gateway_of(boot, tmp_path) as (gateway, engine):
        first = await rerank(gateway, ["a", "b b", "a", "c", "d"])
        engine.pairs.clear()
        second = await rerank(gateway, ["c", "e", "b b", "a"])
        computed = list(engine.pairs)
        plain = await rerank(gateway, ["c", "e", "b b", "a"], model="plain")
        other = await rerank(gateway, ["a"], query="other")

    assert "hit=0, miss=5" == first.headers["x-cache"]
    assert ("hit=3, miss=1", [("q", "e")]) == (second.headers["x-cache"], computed)
    assert scores_of(plain) == scores_of(second)
    assert "hit=0, miss=1" == other.headers["x-cache"]
    assert "x-cache" not in plain.headers


async def test_pairs_of_scores_are_their_own_entries(boot: Boots, tmp_path: Path) -> None:
    body = {"model": "m", "text_1": ["q", "r"], "text_2": ["a", "b"]}
    async with gateway_of(boot, tmp_path) as (gateway, _):
        await rerank(gateway, ["a"])
        replies = [await gateway.post("/score", body, authorization="Bearer key-of-acme") for _ in range(2)]

    assert ["hit=0, miss=2", "hit=2, miss=0"] == [reply.headers["x-cache"] for reply in replies]
    assert replies[0].json()["data"] == replies[1].json()["data"]


async def test_an_instruction_and_the_tenant_keep_pairs_apart(boot: Boots, tmp_path: Path) -> None:
    async with gateway_of(boot, tmp_path) as (gateway, _):
        await rerank(gateway, ["a"])
        uses = [
            (await rerank(gateway, ["a"], **changed)).headers["x-cache"]
            for changed in ({"tenant": "zeta"}, {"instruction": "task"}, {})
        ]

    assert ["hit=0, miss=1", "hit=0, miss=1", "hit=1, miss=0"] == uses


@pytest.mark.parametrize("charge", ["full", "none"])
async def test_pairs_that_are_found_cost_what_the_configuration_says(
    boot: Boots, tmp_path: Path, charge: str
) -> None:
    async with gateway_of(boot, tmp_path, charge=charge) as (gateway, _):
        # Five tokens for q and a, six for q and b b.
        await rerank(gateway, ["a", "b b"])
        last = await rerank(gateway, ["b b", "a"])

    spent = 2 * 11 if charge == "full" else 11
    assert f"{1 - spent / 1000:.3f}" == last.headers["x-ratelimit-remaining-budget"]


async def test_without_own_counts_only_single_pairs_are_kept(boot: Boots, tmp_path: Path) -> None:
    async with gateway_of(boot, tmp_path, counts=False) as (gateway, _):
        await rerank(gateway, ["a", "b"])
        await rerank(gateway, ["c"])
        uses = [(await rerank(gateway, [text])).headers["x-cache"] for text in "abc"]

    assert ["hit=0, miss=1", "hit=0, miss=1", "hit=1, miss=0"] == uses


@pytest.mark.parametrize(
    "setting", ["", "revision: main", f'revision: "{COMMIT[:-1]}"'], ids=["none", "branch", "short"]
)
async def test_scores_of_a_model_that_may_change_are_not_cached(
    boot: Boots, tmp_path: Path, setting: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = CONFIG.replace(f', revision: "{COMMIT}"', f", {setting}" if setting else "")
    async with gateway_of(boot, tmp_path, config=config) as (gateway, engine):
        replies = [await rerank(gateway, ["a"]) for _ in range(2)]
        status = await gateway.client.get("/admin/status", headers={"authorization": "Bearer key-of-ops"})

    assert ["bypass", "bypass"] == [reply.headers["x-cache"] for reply in replies]
    assert 2 == len(engine.pairs)
    assert NO_SCORES_IDENTITY == {found["name"]: found["cache"] for found in status.json()["models"]}["m"]
    assert 1 == sum("its scores are not cached" in record.getMessage() for record in caplog.records)
