"""Clients in Rust, which wheels carry: async-openai, liter-llm, edgequake-llm, aimux, Memvid, sqlite-rembed.

async-openai is the client within CocoIndex, and liter-llm the one within Kreuzberg. The HTTP libraries are
reqwest and ureq.
"""

import asyncio
import base64
import json
import os
import struct
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aimux
import apsw
import edgequake_litellm
import kreuzberg
import liter_llm
import pytest
import sqlite_rembed

from tests.clients.conftest import Gateway, documented, run_documented

TEXTS = ["an apple", "the sea"]
WIDTH = 384
CALL_S = 60.0
BATCH_S = 60.0


@pytest.fixture(scope="module")
def vectors(gateway: Gateway) -> list[list[float]]:
    """Return what the gateway answers without a client."""
    request = urllib.request.Request(
        f"{gateway.url}/embed",
        json.dumps({"inputs": TEXTS, "model": gateway.model}).encode(),
        {"authorization": f"Bearer {gateway.key}", "content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=CALL_S) as reply:
        found: list[list[float]] = json.load(reply)
    return found


def assert_near(expected: list[list[float]], found: list[list[float]]) -> None:
    """Check vectors that one engine has computed in batches of different sizes."""
    assert len(expected) == len(found)
    for row, other in zip(expected, found, strict=True):
        assert row == pytest.approx(list(other), abs=1e-5)


def with_key(gateway: Gateway) -> str:
    """Return the address with the key as a password, for clients that send no other."""
    return gateway.url.replace("://", f"://:{gateway.key}@")


# CocoIndex: async-openai for OpenAI's and Azure's API, and reqwest for Ollama's.


@pytest.fixture(scope="module")
def cocoindex() -> Any:
    """Return the library without its database and without reports of its use."""
    os.environ["COCOINDEX_DISABLE_USAGE_TRACKING"] = "1"
    import cocoindex as library

    library.init(library.Settings(database=None))
    return library


def embedded(cocoindex: Any, text: str, **spec: Any) -> list[float]:
    """Return the vector that a flow computes by `EmbedText`."""

    @cocoindex.transform_flow()
    def flow(
        texts: cocoindex.DataSlice[str],
    ) -> cocoindex.DataSlice[cocoindex.Vector[cocoindex.Float32]]:
        return texts.transform(cocoindex.functions.EmbedText(**spec))

    return [float(number) for number in flow.eval(text)]


def test_cocoindex_by_the_lines_of_the_page(
    gateway: Gateway, cocoindex: Any, vectors: list[list[float]]
) -> None:
    flow = run_documented(gateway, "connect-libraries", "CocoIndex")["vector_of"]

    assert_near(vectors, [flow.eval(text) for text in TEXTS])


@pytest.mark.parametrize("api", ["OPENAI", "OPEN_ROUTER", "AZURE_OPENAI", "OLLAMA"])
def test_cocoindex_embeds(gateway: Gateway, cocoindex: Any, vectors: list[list[float]], api: str) -> None:
    key = cocoindex.add_transient_auth_entry(gateway.key)
    azure = cocoindex.llm.AzureOpenAiConfig(deployment_id=gateway.model, api_version="2024-10-21")
    spec: dict[str, Any] = {
        "OPENAI": {"address": f"{gateway.url}/v1", "api_key": key},
        "OPEN_ROUTER": {"address": f"{gateway.url}/v1", "api_key": key},
        "AZURE_OPENAI": {"address": gateway.url, "api_key": key, "api_config": azure},
        "OLLAMA": {"address": with_key(gateway)},
    }[api]
    kind = getattr(cocoindex.LlmApiType, api)
    spec |= {"api_type": kind, "model": gateway.model, "expected_output_dimension": WIDTH}

    assert_near(vectors, [embedded(cocoindex, text, **spec) for text in TEXTS])


def test_cocoindex_reports_errors_and_widths(gateway: Gateway, cocoindex: Any) -> None:
    spec = {"api_type": cocoindex.LlmApiType.OPENAI, "address": f"{gateway.url}/v1"}
    right, wrong = (cocoindex.add_transient_auth_entry(key) for key in (gateway.key, "wrong"))

    cut = embedded(cocoindex, TEXTS[0], model=gateway.model, output_dimension=64, api_key=right, **spec)
    assert 64 == len(cut)
    widths = {"expected_output_dimension": WIDTH}
    with pytest.raises(Exception, match="model_not_found"):
        embedded(cocoindex, TEXTS[0], model="nowhere", api_key=right, **spec, **widths)
    with pytest.raises(Exception, match="invalid_api_key"):
        embedded(cocoindex, TEXTS[0], model=gateway.model, api_key=wrong, **spec, **widths)


# liter-llm: the prefix of a model selects the wire of a provider.


def caller(gateway: Gateway, base: str = "/v1", key: str | None = None, hint: str | None = None) -> Any:
    """Return a client without retries. hint: the model whose prefix selects the wire, and is cut off."""
    return liter_llm.create_client(
        key or gateway.key, base_url=gateway.url + base, max_retries=0, model_hint=hint
    )


async def test_liter_llm_embeds(gateway: Gateway, vectors: list[list[float]]) -> None:
    client = caller(gateway)
    asked = {"model": gateway.model, "input": TEXTS}
    for fields in ({}, {"encoding_format": "base64"}, {"encoding_format": "float"}):
        found = await liter_llm.embed(client, liter_llm.EmbeddingRequest(**asked, **fields))
        assert_near(vectors, [item.embedding for item in found.data])
        assert (gateway.model, True) == (found.model, found.usage.prompt_tokens > 0)
    cut = await liter_llm.embed(client, liter_llm.EmbeddingRequest(**asked, dimensions=64))
    assert [64, 64] == [len(item.embedding) for item in cut.data]
    models = await liter_llm.list_models(client)
    assert gateway.model in [model.id for model in models.data]


@pytest.mark.parametrize(
    ("provider", "base"),
    [
        ("openai", "/v1"),
        ("cohere", "/v1"),
        ("cohere", "/v2"),
        ("voyage", "/v1"),
        ("jina_ai", "/v1"),
        ("mistral", "/v1"),
        ("gemini", "/v1beta"),
        ("ollama", "/v1"),
        ("huggingface", "/v1"),
        ("together_ai", "/v1"),
        ("openrouter", "/v1"),
        ("azure", ""),
    ],
)
async def test_liter_llm_embeds_by_each_provider(
    gateway: Gateway, vectors: list[list[float]], provider: str, base: str
) -> None:
    model = f"{provider}/{gateway.model}"
    client = caller(gateway, base, hint=model)
    found = await liter_llm.embed(client, liter_llm.EmbeddingRequest(model=model, input=TEXTS))

    assert_near(vectors, [item.embedding for item in found.data])


@pytest.mark.parametrize(
    ("provider", "base"), [(None, "/v1"), ("cohere", "/v2"), ("jina_ai", "/v1"), ("voyage", "/v1")]
)
async def test_liter_llm_ranks(gateway: Gateway, provider: str | None, base: str) -> None:
    model = f"{provider}/{gateway.model}" if provider else gateway.model
    client = caller(gateway, base, hint=model if provider else None)
    asked = liter_llm.RerankRequest(model=model, query="fruit", documents=["the sea", "an apple", "a car"])
    found = await liter_llm.rerank(client, asked)

    assert (1, {0, 1, 2}) == (found.results[0].index, {item.index for item in found.results})
    scores = [item.relevance_score for item in found.results]
    assert sorted(scores, reverse=True) == scores


async def test_liter_llm_reports_errors(gateway: Gateway) -> None:
    asked, unknown = (
        liter_llm.EmbeddingRequest(model=model, input=TEXTS) for model in (gateway.model, "nowhere")
    )
    with pytest.raises(liter_llm.NotFoundError, match="nowhere"):
        await liter_llm.embed(caller(gateway), unknown)
    with pytest.raises(liter_llm.AuthenticationError):
        await liter_llm.embed(caller(gateway, key="wrong"), asked)
    limited = caller(gateway, key=gateway.slow)
    await liter_llm.embed(limited, asked)
    with pytest.raises(liter_llm.RateLimitedError):
        await liter_llm.embed(limited, asked)


async def test_liter_llm_runs_a_batch(gateway: Gateway, vectors: list[list[float]]) -> None:
    client = caller(gateway)
    lines = "".join(
        json.dumps(
            {
                "custom_id": f"id-{position}",
                "method": "POST",
                "url": "/v1/embeddings",
                "body": {"model": gateway.model, "input": text},
            }
        )
        + "\n"
        for position, text in enumerate(TEXTS)
    )
    content = base64.b64encode(lines.encode()).decode()
    file = await liter_llm.create_file(
        client, liter_llm.CreateFileRequest(file=content, purpose="batch", filename="input.jsonl")
    )
    batch = await liter_llm.create_batch(
        client,
        liter_llm.CreateBatchRequest(
            input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h"
        ),
    )
    async with asyncio.timeout(BATCH_S):
        while str(batch.status) in {"validating", "in_progress", "finalizing"}:
            await asyncio.sleep(0.1)
            batch = await liter_llm.retrieve_batch(client, batch.id)
    assert ("completed", 2) == (str(batch.status), batch.request_counts.completed)

    output = (await liter_llm.file_content(client, batch.output_file_id)).decode()
    rows = {row["custom_id"]: row["response"]["body"] for row in map(json.loads, output.splitlines())}
    assert_near(vectors, [rows[f"id-{position}"]["data"][0]["embedding"] for position in range(2)])
    assert (await liter_llm.delete_file(client, file.id)).deleted


# Kreuzberg: liter-llm.


def test_kreuzberg_embeds_the_chunks_of_a_document(gateway: Gateway) -> None:
    config = run_documented(gateway, "connect-libraries", "Kreuzberg")["config"]
    text = "An apple is a fruit. " * 200
    chunks = kreuzberg.extract_bytes_sync(text.encode(), "text/plain", config).chunks

    assert len(chunks) > 1
    embedding = config.chunking.embedding
    assert_near(
        kreuzberg.embed_sync([chunk.content for chunk in chunks], config=embedding),
        [chunk.embedding for chunk in chunks],
    )
    assert {WIDTH} == {len(chunk.embedding) for chunk in chunks}


def test_kreuzberg_reports_errors(gateway: Gateway) -> None:
    model = kreuzberg.LlmConfig("nowhere", gateway.key, f"{gateway.url}/v1", max_retries=0)
    config = kreuzberg.EmbeddingConfig(model=kreuzberg.EmbeddingModelType.llm(model))
    with pytest.raises(Exception, match="nowhere"):
        kreuzberg.embed_sync(TEXTS, config=config)


# Memvid: reqwest, and names of OpenAI's models only.


def test_memvid_embeds_and_searches(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MEMVID_TELEMETRY", "0")
    monkeypatch.setenv("OPENAI_BASE_URL", gateway.url)
    monkeypatch.setenv("OPENAI_API_KEY", gateway.key)
    import memvid_sdk

    memory = memvid_sdk.create(str(tmp_path / "memory.mv2"), enable_vec=True, enable_lex=True)
    for title in ("the sea is blue", "an apple is sweet", "cars drive"):
        memory.put(text=title, title=title, label="", enable_embedding=True, embedding_model="openai-small")
    found = memory.find("fruit", mode="sem", query_embedding_model="openai-small", k=3)["hits"]
    assert ("an apple is sweet", 3) == (found[0]["title"], len(found))


# edgequake-llm: addresses and keys in variables, async-openai for Azure's API, and reqwest for others.


@pytest.mark.parametrize(
    ("provider", "base"),
    [("mistral", "/v1"), ("azure", ""), ("jina", ""), ("ollama", "")],
)
def test_edgequake_embeds(
    gateway: Gateway,
    vectors: list[list[float]],
    monkeypatch: pytest.MonkeyPatch,
    provider: str,
    base: str,
) -> None:
    for name in ("MISTRAL", "JINA"):
        monkeypatch.setenv(f"{name}_API_KEY", gateway.key)
        monkeypatch.setenv(f"{name}_BASE_URL", gateway.url + base)
    monkeypatch.setenv("AZURE_OPENAI_ENDPOINT", gateway.url)
    monkeypatch.setenv("AZURE_OPENAI_API_KEY", gateway.key)
    monkeypatch.setenv("AZURE_OPENAI_DEPLOYMENT_NAME", gateway.model)
    monkeypatch.setenv("AZURE_OPENAI_EMBEDDING_DEPLOYMENT_NAME", gateway.model)
    # It sends 768 as `dimensions` to Ollama for each model that it does not know.
    monkeypatch.setenv("OLLAMA_HOST", with_key(gateway))
    found = edgequake_litellm.embedding(f"{provider}/{gateway.model}", TEXTS)

    assert_near(vectors, [item.embedding for item in found.data])


def test_edgequake_reports_errors(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MISTRAL_API_KEY", gateway.key)
    monkeypatch.setenv("MISTRAL_BASE_URL", f"{gateway.url}/v1")
    with pytest.raises(Exception, match="nowhere"):
        edgequake_litellm.embedding("mistral/nowhere", TEXTS)


# aimux: the providers of Vercel's AI SDK in Rust. Arguments and results are JSON.


@pytest.mark.parametrize(
    ("create", "base"),
    [
        (aimux.openai_embedding, ""),
        (aimux.openai_embedding, "/v1"),
        (aimux.cohere_embedding, "/v1"),
        (aimux.cohere_embedding, "/v2"),
        (aimux.google_embedding, "/v1beta"),
    ],
)
def test_aimux_embeds(
    gateway: Gateway, vectors: list[list[float]], create: Callable[..., Any], base: str
) -> None:
    found = create(gateway.key, gateway.model, gateway.url + base).embed(json.dumps(TEXTS))

    assert_near(vectors, json.loads(found)["embeddings"])


@pytest.mark.parametrize("base", ["", "/v1", "/v2"])
def test_aimux_ranks(gateway: Gateway, base: str) -> None:
    model = aimux.cohere_reranking(gateway.key, gateway.model, gateway.url + base)
    documents = {"Text": {"values": ["the sea", "an apple"]}}
    found = json.loads(model.rerank("fruit", json.dumps(documents)))["ranking"]

    assert [1, 0] == [item["index"] for item in found]
    assert found[0]["relevance_score"] > found[1]["relevance_score"]


def test_aimux_sends_widths_and_reports_errors(gateway: Gateway) -> None:
    model = aimux.openai_embedding(gateway.key, gateway.model, gateway.url)
    options = {"values": TEXTS, "provider_options": {"openai": {"dimensions": 64}}}
    found = json.loads(model.embed(json.dumps(TEXTS), json.dumps(options)))
    assert [64, 64] == [len(row) for row in found["embeddings"]]

    with pytest.raises(aimux.APICallError, match=r"404.*nowhere"):
        aimux.openai_embedding(gateway.key, "nowhere", gateway.url).embed(json.dumps(TEXTS))
    with pytest.raises(aimux.APICallError, match="401"):
        aimux.openai_embedding("wrong", gateway.model, gateway.url).embed(json.dumps(TEXTS))


# sqlite-rembed: ureq, one text for each call of `rembed`.


@pytest.fixture
def database() -> apsw.Connection:
    """Return a database in memory with the extension, which Python's own sqlite3 cannot load everywhere."""
    connection = apsw.Connection(":memory:")
    connection.enable_load_extension(True)
    connection.load_extension(sqlite_rembed.loadable_path())
    return connection


def rembed(database: apsw.Connection, client: str, text: str) -> list[float]:
    """Return the vector of a text, which the extension returns as float32."""
    (blob,) = database.execute("select rembed(?, ?)", (client, text)).fetchone()
    return list(struct.unpack(f"<{len(blob) // 4}f", blob))


@pytest.mark.parametrize("client", ["openai", "cohere", "ollama"])
def test_sqlite_rembed_by_the_lines_of_the_page(
    gateway: Gateway, database: apsw.Connection, vectors: list[list[float]], client: str
) -> None:
    database.execute(documented(gateway, "connect-databases", "sqlite-rembed", "text"))

    assert_near(vectors, [rembed(database, client, text) for text in TEXTS])


def test_sqlite_rembed_reports_errors(gateway: Gateway, database: apsw.Connection) -> None:
    url = f"{gateway.url}/v1/embeddings"
    for name, model, key in (("unknown", "nowhere", gateway.key), ("stranger", gateway.model, "wrong")):
        database.execute(
            "insert into temp.rembed_clients(name, options) values "
            "(?, rembed_client_options('format', 'openai', 'url', ?, 'model', ?, 'key', ?))",
            (name, url, model, key),
        )
    with pytest.raises(apsw.SQLError, match="404"):
        rembed(database, "unknown", TEXTS[0])
    with pytest.raises(apsw.SQLError, match="401"):
        rembed(database, "stranger", TEXTS[0])
