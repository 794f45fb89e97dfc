"""Status and envelope of every kind of error, provoked in every dialect."""

import asyncio
import re
from typing import Any

import httpx
import msgspec
import pytest

from gateway.api.dialects.infinity.dialect import FastAPIError, InfinityError
from gateway.app import ROUTES
from gateway.errors import FACTS
from gateway.events import CallFinished
from gateway.tenants.keyring import key_digest
from tests.conftest import CONFIG, KEY, Boots, Running
from tests.fakes.hooks import RERANKER, Gate, respond_with, tei_with_hook
from tests.fakes.hooks import embedder_and_reranker as fakes
from tests.waiting import PATIENCE_S

LIMITED = f"""
limits: {{body_bytes: 10000}}
tenants:
  acme: {{keys: ["{key_digest(KEY)}"], models: [bge, cross], limits: {{requests_per_day: 1}}}}
  closed: {{keys: [{{digest: "{key_digest("closed")}", scopes: [metrics]}}]}}
"""
# Path, valid body and empty input of each dialect. The model is part of the path, except for Infinity and
# Ollama, whose paths have no place for it.
PATHS: dict[str, str] = {
    "openai": "/models/{}/v1/embeddings",
    "tei": "/models/{}/embed",
    "cohere": "/models/{}/v2/embed",
    "rerank": "/models/{}/v1/rerank",
    "vllm": "/models/{}/pooling",
    "infinity": "/infinity/embeddings",
    "sie": "/v1/encode/{}",
    "ollama": "/api/embed",
    "gemini": "/v1beta/models/{}:batchEmbedContents",
}
BODIES: dict[str, dict[str, Any]] = {
    "openai": {"input": "a"},
    "tei": {"inputs": "a"},
    "cohere": {"texts": ["a"], "input_type": "search_query"},
    "rerank": {"query": "q", "documents": ["a"]},
    "vllm": {"input": "a", "task": "embed"},
    "infinity": {"input": "a"},
    "sie": {"items": [{"text": "a"}]},
    "ollama": {"input": "a"},
    "gemini": {"requests": [{"content": {"parts": [{"text": "a"}]}}]},
}
EMPTY: dict[str, dict[str, Any]] = {
    "openai": {"input": []},
    "tei": {"inputs": []},
    "cohere": {"texts": []},
    "rerank": {"documents": []},
    "vllm": {"input": []},
    "infinity": {"input": []},
    "sie": {"items": []},
    "gemini": {"requests": []},
}
DIALECTS = pytest.mark.parametrize("dialect", PATHS)
ENVELOPES = {dialect.name: dialect.envelope for dialect in ROUTES.dialects}


def assert_reported(gateway: Running, reply: httpx.Response, kind: str, dialect: str) -> None:
    """Assert the status and the envelope of the dialect, as its clients read them."""
    facts = FACTS[kind]
    status = {"tei": facts.tei_status, "infinity": facts.infinity_status}.get(dialect, facts.status)
    assert status == reply.status_code, reply.text
    assert "application/json" == reply.headers["content-type"]
    envelope = msgspec.json.decode(reply.content, type=envelope_of(dialect, status))
    assert reply.json() == msgspec.to_builtins(envelope)
    assert (status in (429, 503)) is (1 <= int(reply.headers.get("retry-after", 0)) <= 60)
    assert (status == 401) is ("Bearer" in reply.headers.get("www-authenticate", ""))
    (*_, finished) = (event for event in gateway.events if isinstance(event, CallFinished))
    assert kind == finished.outcome


def envelope_of(dialect: str, status: int) -> Any:
    """Return the envelope of a status. Infinity also has FastAPI's."""
    if dialect == "infinity":
        return FastAPIError if status in (401, 404, 405, 422) else InfinityError
    return ENVELOPES[dialect]


def path_of(dialect: str, model: str | None = None) -> str:
    """Return the path of a call in this dialect, to its default model or to `model`."""
    return PATHS[dialect].format(model or ("cross" if dialect == "rerank" else "bge"))


def body_of(dialect: str, model: str | None = None) -> dict[str, Any]:
    """Return the body of a call in this dialect, which names the model if the path does not."""
    return BODIES[dialect] | ({"model": model} if model and "{}" not in PATHS[dialect] else {})


@DIALECTS
@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"{", "malformed_body"),
        (b"\xff\xfe", "malformed_body"),
        (b'{"unknown_field": ' + b"[" * 3000 + b"]" * 3000 + b"}", "malformed_body"),
        (b"[]", "invalid_input"),
        (b"{}", "invalid_input"),
        (b"x" * 20_000, "body_too_large"),
    ],
    ids=lambda value: str(value)[:20],
)
async def test_a_malformed_body_is_refused(boot: Boots, dialect: str, content: bytes, kind: str) -> None:
    async with boot(fakes(), CONFIG + LIMITED) as gateway:
        reply = await gateway.client.post(path_of(dialect), content=content)

        assert_reported(gateway, reply, kind, dialect)


# A field with an invalid value, and one of its allowed values.
CHOICES: dict[str, tuple[dict[str, Any], str]] = {
    "openai": ({"task": "x"}, "retrieval.query"),
    "tei": ({"truncation_direction": "x"}, "left"),
    "cohere": ({"embedding_types": ["float", "x"]}, "ubinary"),
    "rerank": ({"truncation_side": "x"}, "left"),
    "vllm": ({"task": "x"}, "token_embed"),
    "infinity": ({"modality": "x"}, "audio"),
    "sie": ({"params": {"output_types": ["dense", "x"]}}, "multivector"),
}


@pytest.mark.parametrize("dialect", CHOICES)
async def test_an_invalid_value_error_lists_the_allowed_values(boot: Boots, dialect: str) -> None:
    wrong, allowed = CHOICES[dialect]
    async with boot(fakes()) as gateway:
        reply = await gateway.client.post(path_of(dialect), json=body_of(dialect) | wrong)

        assert_reported(gateway, reply, "invalid_input", dialect)
        assert re.search(rf"'x'; allowed: .*\b{re.escape(allowed)}\b", reply.text)


@pytest.mark.parametrize("kind", ["application/json", "application/msgpack"])
async def test_allowed_values_are_listed_after_a_long_value(boot: Boots, kind: str) -> None:
    body = body_of("sie") | {"params": {"output_dtype": "x" * 5000}}
    encode = msgspec.json.encode if kind == "application/json" else msgspec.msgpack.encode
    async with boot(fakes()) as gateway:
        reply = await gateway.client.post(
            path_of("sie"), content=encode(body), headers={"content-type": kind}
        )

    assert "allowed: binary, float16, float32, int8, ubinary, uint8 (at params.output_dtype)" in reply.text
    assert len(reply.text) < 600


@pytest.mark.parametrize("dialect", EMPTY)
async def test_an_empty_input_is_refused(boot: Boots, dialect: str) -> None:
    async with boot(fakes()) as gateway:
        reply = await gateway.post(path_of(dialect), BODIES[dialect] | EMPTY[dialect])

        assert_reported(gateway, reply, "empty_input", dialect)


@DIALECTS
@pytest.mark.parametrize(("model", "kind"), [("no/where", "model_not_found"), ("strict", "model_forbidden")])
async def test_an_unusable_model_is_refused(boot: Boots, dialect: str, model: str, kind: str) -> None:
    async with boot(fakes(), CONFIG + LIMITED) as gateway:
        reply = await gateway.post(path_of(dialect, model), body_of(dialect, model))

        assert_reported(gateway, reply, kind, dialect)


@DIALECTS
async def test_a_model_without_the_operation_is_refused(boot: Boots, dialect: str) -> None:
    model = "no-rerank" if dialect == "rerank" else "cross"
    async with boot(fakes()) as gateway:
        reply = await gateway.post(path_of(dialect, model), body_of(dialect, model))

        assert_reported(gateway, reply, "operation_unsupported", dialect)


@DIALECTS
@pytest.mark.parametrize(
    ("headers", "kind"),
    [
        ({"authorization": ""}, "unauthenticated"),
        ({"authorization": "Bearer closed"}, "scope_forbidden"),
        ({"content-encoding": "gzip"}, "unsupported_media"),
        ({"x-timeout-s": "never"}, "invalid_input"),
        ({"x-priority": "first"}, "invalid_input"),
    ],
    ids=str,
)
async def test_invalid_headers_are_refused(
    boot: Boots, dialect: str, headers: dict[str, str], kind: str
) -> None:
    async with boot(fakes(), CONFIG + LIMITED) as gateway:
        reply = await gateway.client.post(path_of(dialect), json=BODIES[dialect], headers=headers)

        assert_reported(gateway, reply, kind, dialect)


@DIALECTS
async def test_a_wrong_method_is_refused(boot: Boots, dialect: str) -> None:
    async with boot(fakes()) as gateway:
        reply = await gateway.client.get(path_of(dialect))

        assert_reported(gateway, reply, "method_not_allowed", dialect)


@DIALECTS
async def test_an_exceeded_limit_is_refused(boot: Boots, dialect: str) -> None:
    async with boot(fakes(), CONFIG + LIMITED) as gateway:
        first = await gateway.post(path_of(dialect), BODIES[dialect])
        reply = await gateway.post(path_of(dialect), BODIES[dialect])

        assert 200 == first.status_code
        assert_reported(gateway, reply, "quota_exceeded", dialect)


@DIALECTS
@pytest.mark.parametrize(
    ("status", "kind"),
    [(500, "upstream_failed"), (401, "upstream_failed"), (429, "overloaded"), (503, "no_replica")],
)
async def test_an_error_of_every_replica_is_reported(
    boot: Boots, dialect: str, status: int, kind: str
) -> None:
    hook = respond_with(status, b'{"error": "no", "error_type": "Backend"}')
    servers = {name: tei_with_hook(hook) for name in ("tei-0", "tei-1")}
    servers["rerank-0"] = tei_with_hook(hook, model_type=RERANKER)
    async with boot(servers) as gateway:
        reply = await gateway.post(path_of(dialect), BODIES[dialect])

        assert_reported(gateway, reply, kind, dialect)


@DIALECTS
async def test_a_missing_replica_is_reported(boot: Boots, dialect: str) -> None:
    async with boot({}) as gateway:
        reply = await gateway.post(path_of(dialect), BODIES[dialect])

        assert_reported(gateway, reply, "no_replica", dialect)


@DIALECTS
async def test_an_expired_deadline_is_reported(boot: Boots, dialect: str) -> None:
    gate = Gate()
    servers = {"tei-0": tei_with_hook(gate), "rerank-0": tei_with_hook(gate, model_type=RERANKER)}
    async with boot(servers) as gateway, asyncio.timeout(PATIENCE_S):
        reply = await gateway.post(path_of(dialect), BODIES[dialect], x_timeout_s="0.05")

        assert_reported(gateway, reply, "deadline_exceeded", dialect)
