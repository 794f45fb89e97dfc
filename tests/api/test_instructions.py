"""Instructions of calls, through every dialect that has them: applied in the model's template, or refused."""

import asyncio
from typing import Any

import httpx
import numpy as np
import pytest

from backends.contract.vectors import sigmoid
from gateway.tenants.keyring import key_digest
from tests.conftest import KEY, Boots, posted
from tests.fakes.hooks import CLASSIFIER, RERANKER, Gate, until
from tests.fakes.server import logit_of
from tests.fakes.tei import FakeTei, vector_of
from tests.fakes.vllm import FakeVllm

CONFIG = """
upstreams:
  plain: {backend: tei, replicas: ["http://plain"]}
  instruct:
    backend: tei
    replicas: ["http://instruct"]
    in_flight_batches: 1
    instruction_template: "Instruct: {instruction}\\nQuery: {text}"
  published: {backend: tei, replicas: ["http://published"]}
  cross: {backend: vllm, replicas: ["http://cross"]}
  old: {backend: vllm, replicas: ["http://old"]}
  tei-cross: {backend: tei, replicas: ["http://tei-cross"]}
  moods: {backend: tei, replicas: ["http://moods"]}
models:
  plain: {upstream: plain}
  instruct: {upstream: instruct, prompts: {query: "default: ", document: "d: "}}
  published: {upstream: published}
  cross: {upstream: cross}
  old: {upstream: old}
  tei-cross: {upstream: tei-cross}
  moods: {upstream: moods}
"""
TASK = "find colours"
PROMPT = f"Instruct: {TASK}\nQuery: "


def fakes() -> dict[str, Any]:
    """Return a server for each upstream of the config."""
    return {
        "plain": FakeTei(),
        "instruct": FakeTei(max_input_length=512),
        "published": FakeTei(model_id="Qwen/Qwen3-Embedding-0.6B"),
        "cross": FakeVllm(task="classify", max_tokens=64, instructed=True),
        "old": FakeVllm(task="classify", max_tokens=64),
        "tei-cross": FakeTei(model_type=RERANKER),
        "moods": FakeTei(model_type=CLASSIFIER),
    }


def vectors_of(reply: httpx.Response) -> Any:
    """Return the vectors of a reply of any dialect that embeds."""
    assert 200 == reply.status_code, reply.text
    body = reply.json()
    if "items" in body:
        return np.array([item["dense"]["values"] for item in body["items"]], np.float32)
    return np.array([item.get("embedding", item.get("data")) for item in body["data"]], np.float32)


def sie_encode(model: str, **params: Any) -> tuple[str, Any]:
    """Return path and body of SIE's encode."""
    return f"/v1/encode/{model}", {"items": [{"text": "red"}, {"text": "blue"}], "params": params}


def with_input(path: str, model: str, **fields: Any) -> tuple[str, Any]:
    """Return path and body of a request with `input`."""
    return path, {"model": model, "input": ["red", "blue"], **fields}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        sie_encode("instruct", instruction=TASK),
        sie_encode("instruct", instruction=TASK, options={"is_query": True}),
        with_input("/v1/embeddings", "instruct", instruction=TASK),
        with_input("/v1/embeddings", "instruct", instruction=TASK, input_type="query"),
        with_input("/v1/embeddings", "instruct", chat_template_kwargs={"instruction": TASK}),
        with_input("/v1/embeddings", "instruct", instruction="x", chat_template_kwargs={"instruction": TASK}),
        with_input("/pooling", "instruct", instruction=TASK),
    ],
    ids=str,
)
async def test_an_instruction_is_written_before_each_text_in_the_models_template(
    boot: Boots, path: str, body: Any
) -> None:
    vectors = vectors_of(await posted(boot(fakes(), CONFIG), path, body))

    np.testing.assert_array_equal([vector_of(PROMPT + text) for text in ("red", "blue")], vectors)


@pytest.mark.parametrize("fields", [{}, {"instruction": None}, {"instruction": ""}], ids=str)
async def test_without_an_instruction_the_models_own_prompt_stays(
    boot: Boots, fields: dict[str, Any]
) -> None:
    path, body = with_input("/v1/embeddings", "instruct", input_type="query", **fields)
    vectors = vectors_of(await posted(boot(fakes(), CONFIG), path, body))

    np.testing.assert_array_equal([vector_of("default: " + text) for text in ("red", "blue")], vectors)


async def test_a_published_model_is_known_by_its_id(boot: Boots) -> None:
    path, body = with_input("/v1/embeddings", "published", instruction=TASK)
    vectors = vectors_of(await posted(boot(fakes(), CONFIG), path, body))

    np.testing.assert_array_equal(vector_of(f"Instruct: {TASK}\nQuery:red"), vectors[0])


async def test_a_rerank_by_cosine_instructs_its_query_only(boot: Boots) -> None:
    body = {"model": "instruct", "query": "q", "documents": ["red"], "instruction": TASK}
    results = (await posted(boot(fakes(), CONFIG), "/v1/rerank", body)).json()["results"]

    cosine = float(vector_of(PROMPT + "q") @ vector_of("d: red"))
    assert cosine == pytest.approx(results[0]["relevance_score"], abs=1e-6)


RERANK_BODY = {"query": "q", "documents": ["red", "blue"]}


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/score/cross", {"query": {"text": "q"}, "items": [{"text": "red"}, {"text": "blue"}]}, "scores"),
        ("/score", {"model": "cross", "queries": "q", "documents": ["red", "blue"]}, "data"),
        ("/rerank", {"model": "cross", **RERANK_BODY}, "results"),
        ("/v1/rerank", {"model": "cross", **RERANK_BODY}, "results"),
        ("/v2/rerank", {"model": "cross", **RERANK_BODY}, "results"),
    ],
    ids=str,
)
async def test_a_reranker_receives_the_instruction_of_every_dialect(
    boot: Boots, path: str, body: Any, field: str
) -> None:
    servers = fakes()
    async with boot(servers, CONFIG) as gateway:
        plain = (await gateway.post(path, body)).json()[field]
        instructed = (await gateway.post(path, body | {"instruction": TASK})).json()[field]

    sent = [sent["instruction"] for sent_path, sent in servers["cross"].requests if "instruction" in sent]
    assert TASK == sent[-1]
    expected = sigmoid(np.array([logit_of(f"{TASK} q", text) for text in ("red", "blue")], np.float32))
    scores = [item.get("score", item.get("relevance_score")) for item in instructed]
    np.testing.assert_allclose(sorted(expected), sorted(scores), rtol=1e-5)
    assert plain != instructed


REFUSED = [
    # Models without a template, and servers that would ignore the field.
    (*with_input("/v1/embeddings", "plain", instruction=TASK), "error"),
    (*sie_encode("plain", instruction=TASK), "detail"),
    (
        "/v1/score/tei-cross",
        {"query": {"text": "q"}, "items": [{"text": "a"}], "instruction": TASK},
        "detail",
    ),
    ("/score", {"model": "old", "queries": "q", "documents": ["a"], "instruction": TASK}, "error"),
    ("/v1/rerank", {"model": "old", **RERANK_BODY, "instruction": TASK}, "detail"),
    ("/v2/rerank", {"model": "tei-cross", **RERANK_BODY, "instruction": TASK}, "message"),
    # Documents, pairs without roles, labels.
    (*with_input("/v1/embeddings", "instruct", instruction=TASK, input_type="document"), "error"),
    (*sie_encode("instruct", instruction=TASK, options={"is_query": False}), "detail"),
    ("/score", {"model": "instruct", "queries": "q", "documents": ["a"], "instruction": TASK}, "error"),
    ("/classify", {"model": "moods", "input": "a", "instruction": TASK}, "error"),
    # Values out of bounds.
    (*with_input("/v1/embeddings", "instruct", instruction="x" * 4097), "error"),
    (*sie_encode("instruct", instruction="x" * 4097), "detail"),
    (*with_input("/v1/embeddings", "instruct", chat_template_kwargs={"instruction": 3}), "error"),
    (*with_input("/v1/embeddings", "instruct", chat_template_kwargs={"other": "x"}), "error"),
]


@pytest.mark.parametrize(
    ("path", "body", "envelope"), REFUSED, ids=[f"{path}-{i}" for i, (path, *_) in enumerate(REFUSED)]
)
async def test_an_instruction_that_cannot_be_applied_is_refused_in_the_callers_dialect(
    boot: Boots, path: str, body: Any, envelope: str
) -> None:
    servers = fakes()
    async with boot(servers, CONFIG) as gateway:
        before = [len(server.requests) for server in servers.values()]
        reply = await gateway.post(path, body)
        after = [len(server.requests) for server in servers.values()]

    assert 400 == reply.status_code, reply.text
    assert envelope in reply.json()
    assert "instruction" in reply.text
    assert before == after


async def test_a_quota_of_tokens_counts_the_instruction(boot: Boots) -> None:
    limited = f"""{CONFIG}
tenants:
  acme: {{keys: ["{key_digest(KEY)}"], limits: {{tokens_per_minute: 60}}}}
"""
    async with boot(fakes(), limited) as gateway:
        plain = await gateway.post(*with_input("/v1/embeddings", "instruct"))
        instructed = await gateway.post(*with_input("/v1/embeddings", "instruct", instruction="w " * 40))
        pairs = await gateway.post("/v1/rerank", {"model": "cross", **RERANK_BODY, "instruction": "w " * 40})

    assert 200 == plain.status_code
    assert [400, 400] == [instructed.status_code, pairs.status_code]
    assert "tokens" in instructed.text
    assert "tokens" in pairs.text


async def test_calls_with_different_instructions_get_their_own_vectors_from_one_batch(boot: Boots) -> None:
    servers = fakes()
    gate = Gate()
    async with boot(servers, CONFIG) as gateway:
        servers["instruct"].hook = gate
        before = len(servers["instruct"].requests)
        calls = [
            asyncio.create_task(gateway.post(*with_input("/v1/embeddings", "instruct", instruction=task)))
            for task in ("a", "b", "c", "d")
        ]
        await until(lambda: gate.waiting > 0)
        gate.opened.set()
        replies = await asyncio.gather(*calls)
        batches = len(servers["instruct"].requests) - before

    assert batches < len(calls)
    for task, reply in zip("abcd", replies, strict=True):
        prompt = f"Instruct: {task}\nQuery: "
        np.testing.assert_array_equal(
            [vector_of(prompt + text) for text in ("red", "blue")], vectors_of(reply)
        )
