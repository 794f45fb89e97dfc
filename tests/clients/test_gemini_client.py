"""Google's own client for the Gemini API, sync and async."""

import json
import math
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from google import genai
from google.auth.credentials import Credentials
from google.genai import errors, types

from tests.clients.conftest import Gateway

TEXTS = ["a car", "an apple", "the sea"]
DIMENSIONS = 384


def client_of(gateway: Gateway, key: str | None = None, version: str | None = None) -> genai.Client:
    """Return a client whose base URL is the gateway. version: of the API; None for the client's own."""
    options = types.HttpOptions(base_url=gateway.url, api_version=version)
    return genai.Client(api_key=key or gateway.key, http_options=options)


@pytest.mark.parametrize("version", [None, "v1", "v1beta"])
def test_embeds_texts_in_order(gateway: Gateway, version: str | None) -> None:
    client = client_of(gateway, version=version)
    reply = client.models.embed_content(model=gateway.model, contents=TEXTS)

    assert [DIMENSIONS] * 3 == [len(item.values) for item in reply.embeddings]
    assert 12 == reply.usage_metadata.prompt_token_count
    (single,) = client.models.embed_content(model=f"models/{gateway.model}", contents=TEXTS[1]).embeddings
    assert reply.embeddings[1].values == pytest.approx(single.values, abs=1e-6)


def test_a_task_and_a_width_are_applied(gateway: Gateway) -> None:
    client = client_of(gateway)

    def embed(**config: object) -> list[float]:
        options = types.EmbedContentConfig(output_dimensionality=64, **config)
        reply = client.models.embed_content(model=gateway.prompted, contents="a car", config=options)
        return reply.embeddings[0].values

    query, document = embed(task_type="RETRIEVAL_QUERY"), embed(task_type="RETRIEVAL_DOCUMENT")
    assert (64, pytest.approx(1.0, abs=1e-5)) == (len(query), math.hypot(*query))
    assert query != pytest.approx(document, abs=1e-3)


async def test_the_async_client_gets_the_same_vectors(gateway: Gateway) -> None:
    client = client_of(gateway)
    reply = await client.aio.models.embed_content(model=gateway.model, contents="a car")
    expected = client.models.embed_content(model=gateway.model, contents="a car")

    assert expected.embeddings[0].values == pytest.approx(reply.embeddings[0].values, abs=1e-6)


def test_lists_and_describes_models(gateway: Gateway) -> None:
    client = client_of(gateway, version="v1beta")
    names = [model.name for model in client.models.list()]

    assert f"models/{gateway.prompted}" in names
    assert f"models/{gateway.labels}" not in names
    assert "embedContent" in client.models.get(model=gateway.prompted).supported_actions


@pytest.mark.parametrize(
    ("key", "model", "code", "status"),
    [("wrong", "a", 401, "UNAUTHENTICATED"), (None, "nowhere", 404, "NOT_FOUND")],
)
def test_errors_are_its_own(gateway: Gateway, key: str | None, model: str, code: int, status: str) -> None:
    client = client_of(gateway, key)
    with pytest.raises(errors.ClientError) as raised:
        client.models.embed_content(model=model, contents="a")

    assert (code, status) == (raised.value.code, raised.value.status)


def test_a_title_is_refused_with_the_reason(gateway: Gateway) -> None:
    client = client_of(gateway)
    with pytest.raises(errors.ClientError, match="title"):
        client.models.embed_content(model=gateway.model, contents="a", config={"title": "b"})


def test_counts_tokens(gateway: Gateway) -> None:
    client = client_of(gateway)
    contents = [types.UserContent(text) for text in TEXTS]

    assert 12 == client.models.count_tokens(model=gateway.model, contents=contents).total_tokens
    assert 4 == client.models.count_tokens(model=gateway.model, contents=TEXTS[0]).total_tokens


# --- the client's own requests, to which tests/backends/test_google.py holds those of upstreams

RECORDED = Path(__file__).parents[1] / "fakes/google_genai_requests.json"
PICTURE = types.Part.from_bytes(data=b"png", mime_type="image/png")


class AccessToken(Credentials):
    """Credentials with a token that needs no server."""

    def __init__(self) -> None:
        super().__init__()
        self.token = "token"

    def refresh(self, request: object) -> None:
        """Keep the token."""


class Recorder(BaseHTTPRequestHandler):
    """Server that notes each request and answers with a vector for each input."""

    seen: list[tuple[str, Any]]

    def do_POST(self) -> None:
        """Answer a request."""
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.seen.append((self.path, body))
        values, statistics = [1.0], {"token_count": 1.0, "truncated": False}
        if "instances" in body:
            prediction = {"embeddings": {"values": values, "statistics": statistics}}
            answer: dict[str, Any] = {"predictions": [prediction] * len(body["instances"])}
        elif "requests" in body:
            answer = {"embeddings": [{"values": values}] * len(body["requests"])}
        else:
            answer = {"embedding": {"values": values}}
        reply = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@contextmanager
def recording() -> Iterator[tuple[str, list[tuple[str, Any]]]]:
    """Yield the address of a recorder, and what it received."""
    seen: list[tuple[str, Any]] = []
    server = HTTPServer(("127.0.0.1", 0), type("Recorder", (Recorder,), {"seen": seen}))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", seen
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_requests_to_google_are_as_recorded() -> None:
    """Compare with the recorded requests; with RECORD=1 write them."""
    both = types.Content(parts=[types.Part(text="a"), PICTURE])
    calls: dict[str, tuple[str, Any, dict[str, Any]]] = {
        "gemini": ("gemini-embedding-001", ["a", "b"], {"task_type": "RETRIEVAL_QUERY"}),
        "gemini picture": ("gemini-embedding-2", [both], {}),
        "vertex text": (
            "text-embedding-005",
            ["a", "b"],
            {"task_type": "RETRIEVAL_DOCUMENT", "auto_truncate": False},
        ),
        "vertex": (
            "gemini-embedding-001",
            ["a"],
            {"task_type": "RETRIEVAL_DOCUMENT", "auto_truncate": True},
        ),
        "vertex picture": ("gemini-embedding-2", [both], {"auto_truncate": True}),
    }
    with recording() as (url, seen):
        options = types.HttpOptions(base_url=url)
        clients = {
            "gemini": genai.Client(api_key="key", http_options=options),
            "vertex": genai.Client(
                vertexai=True,
                project="a-project",
                location="europe-west4",
                credentials=AccessToken(),
                http_options=options,
            ),
        }
        for name, (model, contents, config) in calls.items():
            client = clients[name.partition(" ")[0]]
            found = types.EmbedContentConfig(**config)
            client.models.embed_content(model=model, contents=contents, config=found)
    requests = dict(zip(calls, [list(request) for request in seen], strict=True))
    if os.environ.get("RECORD"):
        RECORDED.write_text(json.dumps(requests, indent=1) + "\n")

    assert json.loads(RECORDED.read_text()) == requests
