"""GET /usage/calls: a tenant's recent calls without what is for operators; other lists of calls."""

import json
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from gateway.api.operators.own_calls import ADVICE
from gateway.config.schema import Tracing
from gateway.errors import FACTS
from gateway.telemetry.history import CALLS_MAX
from gateway.telemetry.tracing import create_traces
from gateway.tenants.keyring import key_digest
from tests.conftest import KEY, Boots
from tests.fakes.checkpoint import write_small_files
from tests.fakes.tei import FakeTei

LINK = "https://jaeger.example/trace/{trace_id}"
SECOND = {"authorization": "Bearer second"}
OTHER = {"authorization": "Bearer other"}
OPS = {"authorization": "Bearer ops"}
CONFIG = f"""
currency: EUR
admin: {{keys: [{{digest: "{key_digest("ops")}", id: ops}}]}}
upstreams:
  one: {{backend: tei, replicas: ["http://tei-0"]}}
  gone: {{backend: tei, replicas: ["http://secret-host"]}}
models:
  bge: {{upstream: one, price_per_million_tokens: 2}}
  free: {{upstream: one}}
  away: {{upstream: gone, deadline_s: 1}}
tenants:
  acme:
    keys: [{{digest: "{key_digest(KEY)}", id: first}}, {{digest: "{key_digest("second")}", id: second}}]
  globex: {{keys: [{{digest: "{key_digest("other")}", id: theirs}}]}}
"""
TRACED = CONFIG + f'tracing: {{sample: 1, link: "{LINK}"}}\n'


async def calls_of(gateway: Any, query: str = "", headers: Any = None) -> list[dict[str, Any]]:
    reply = await gateway.client.get(f"/usage/calls{query}", headers=headers)
    assert 200 == reply.status_code, reply.text
    assert CALLS_MAX == reply.json()["kept"]
    found: list[dict[str, Any]] = reply.json()["calls"]
    return found


async def test_a_tenant_sees_its_own_calls_only(boot: Boots) -> None:
    body = {"model": "bge", "input": "one two"}
    async with boot({"tei-0": FakeTei()}, CONFIG, wait=False) as gateway:
        await gateway.post("/v1/embeddings", body, x_request_id="a-1")
        await gateway.post("/v1/embeddings", body, x_request_id="a-2", **SECOND)
        await gateway.post("/v1/embeddings", body, x_request_id="g-1", **OTHER)
        await gateway.post("/v1/embeddings", {"model": "none", "input": "x"}, x_request_id="a-3")
        await gateway.post("/v1/embeddings", {"model": "away", "input": "x"}, x_request_id="a-4")
        own = await calls_of(gateway)
        by_second = await calls_of(gateway, headers=SECOND)
        theirs = await calls_of(gateway, headers=OTHER)
        failed = await calls_of(gateway, "?failed=true")
        succeeded = await calls_of(gateway, "?failed=false&limit=2")
        fleet = await calls_of(gateway, "?fleet=true")
        text = json.dumps(await calls_of(gateway))

    assert ["a-4", "a-3", "a-2", "a-1"] == [call["request_id"] for call in own]
    assert own == by_second == fleet
    assert ["g-1"] == [call["request_id"] for call in theirs]
    assert ["a-4", "a-3"] == [call["request_id"] for call in failed]
    assert ["a-4", "a-3"] == [call["request_id"] for call in succeeded]
    assert ["first", "first", "second", "first"] == [call["key_id"] for call in own]
    assert ["no_replica", "model_not_found", "ok", "ok"] == [call["outcome"] for call in own]
    assert [ADVICE["no_replica"], ADVICE["model_not_found"], None, None] == [call["advice"] for call in own]
    assert "secret-host" not in text
    assert {"replicas", "upstream_words", "tenant", "gateway"}.isdisjoint(own[0])
    first = own[-1]
    assert ("bge", "embed", 200, 4) == tuple(
        first[name] for name in ("model", "operation", "status", "tokens")
    )
    assert first["stages"]["upstream"] > 0


async def test_a_failed_call_keeps_its_message_but_no_text_of_its_body(boot: Boots) -> None:
    limits = "  globex: {limits: {requests_per_minute: 2}, keys: ["
    config = CONFIG.replace("  globex: {keys: [", limits)
    secret = "a secret text"
    async with boot({"tei-0": FakeTei()}, config, wait=False) as gateway:
        for _ in range(3):
            refused = await gateway.post("/v1/embeddings", {"model": "bge", "input": "one"}, **OTHER)
        for body in (
            {"model": "none", "input": "x"},
            {"model": "bge", "input": "one", "encoding_format": secret},
            {"model": "away", "input": "x"},
        ):
            await gateway.post("/v1/embeddings", body)
        theirs = await calls_of(gateway, "?failed=true", headers=OTHER)
        own = await calls_of(gateway, "?failed=true")
        listed = (await gateway.client.get("/admin/calls?failed=true", headers=OPS)).json()["calls"]

    to_tenants = {call["outcome"]: call["message"] for call in theirs + own}
    to_operators = {call["outcome"]: call["message"] for call in listed}
    assert "requests_per_minute (2)" in to_tenants["quota_exceeded"]
    assert refused.json()["error"]["message"] == to_tenants["quota_exceeded"]
    assert to_tenants["quota_exceeded"] == to_operators["quota_exceeded"]
    assert to_tenants["invalid_input"] is to_operators["invalid_input"] is None
    assert "'none'" in to_tenants["model_not_found"]
    # Replicas are for operators.
    assert to_tenants["no_replica"] is None
    assert to_operators["no_replica"]
    assert secret not in json.dumps([theirs, own, listed])


async def test_lists_of_calls_have_their_cost(boot: Boots) -> None:
    async with boot({"tei-0": FakeTei()}, CONFIG, wait=False) as gateway:
        for model in ("bge", "free", "none"):
            await gateway.post("/v1/embeddings", {"model": model, "input": ["one two", "one"]})
        own = await calls_of(gateway)
        usage = (await gateway.client.get("/usage")).json()["data"]
    costs = {call["model"]: call["cost"] for call in own}
    assert {"bge": 0.000014, "free": None, None: None} == costs
    assert [0.000014, 0.0] == [row["cost"] for row in usage]


@pytest.mark.parametrize(("counts", "expected"), [(True, 1), (False, None)])
async def test_calls_count_inputs_that_were_cut(
    boot: Boots, tmp_path: Path, counts: bool, expected: int | None
) -> None:
    tokenizer = f"backend: tei, tokenizer: {write_small_files(tmp_path)}" if counts else "backend: tei"
    cut = {"query": "q", "documents": ["a", "one two three"] if counts else ["a", "w " * 20], "model": "bge"}
    if counts:
        cut["max_tokens_per_doc"] = 2
    whole = {"query": "q", "documents": ["a", "b"], "model": "bge"}
    # A gateway is ready once its upstreams are.
    lines = [line for line in CONFIG.splitlines(keepends=True) if "gone" not in line]
    config = "".join(lines).replace("backend: tei", tokenizer)
    async with boot({"tei-0": FakeTei()}, config) as gateway:
        assert 200 == (await gateway.post("/v2/rerank", cut)).status_code
        assert 200 == (await gateway.post("/v2/rerank", whole)).status_code
        second, first = await calls_of(gateway)
    assert (expected, 0) == (first["truncated_inputs"], second["truncated_inputs"])


async def test_only_recorded_calls_have_a_trace(boot: Boots) -> None:
    exporter = InMemorySpanExporter()
    traces = create_traces(Tracing(sample=0), SimpleSpanProcessor(exporter))
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    async with boot({"tei-0": FakeTei()}, TRACED, wait=False, traces=traces) as gateway:
        body = {"model": "bge", "input": "one"}
        await gateway.post("/v1/embeddings", body, traceparent=f"00-{trace_id}-b7ad6b7169203331-01")
        await gateway.post("/v1/embeddings", body)
        own = await calls_of(gateway)
        listed = (await gateway.client.get("/admin/calls", headers=OPS)).json()["calls"]
        status = (await gateway.client.get("/admin/status", headers=OPS)).json()
    assert [None, trace_id] == [call["trace_id"] for call in own]
    assert [None, trace_id] == [call["trace_id"] for call in listed]
    assert LINK == status["trace_link"]


async def test_operators_filter_calls(boot: Boots) -> None:
    body = {"model": "bge", "input": "one"}
    async with boot({"tei-0": FakeTei()}, CONFIG, wait=False) as gateway:
        for number in range(4):
            await gateway.post("/v1/embeddings", body, x_request_id=f"call-{number}")

        async def listed(query: str) -> list[str]:
            reply = await gateway.client.get(f"/admin/calls?{query}", headers=OPS)
            return [call["request_id"] for call in reply.json()["calls"]]

        assert ["call-2"] == await listed("request_id=all-2")
        assert ["call-3", "call-2"] == await listed("limit=2")
        assert 4 == len(await listed("since=5m&key=first&model=bge&tenant=acme"))
        assert [] == await listed("since=2035-01-01")
        assert ["call-1"] == await listed("request_id=call-1&fleet=true")
        without_link = (await gateway.client.get("/admin/status", headers=OPS)).json()["trace_link"]
    assert without_link is None


def test_each_kind_of_error_has_advice() -> None:
    assert {*FACTS, "cancelled"} == set(ADVICE)
    assert all(text.endswith(".") and len(text) < 120 for text in ADVICE.values())


@pytest.mark.parametrize("headers", [{"authorization": ""}, {"authorization": "Bearer wrong"}])
async def test_a_key_is_required(boot: Boots, headers: dict[str, str]) -> None:
    async with boot({"tei-0": FakeTei()}, CONFIG, wait=False) as gateway:
        reply = await gateway.client.get("/usage/calls", headers=headers)
    assert 401 == reply.status_code
