"""Gemini API, Vertex AI and the ranking API: bodies, replies, errors and access tokens."""

import asyncio
import base64
import json
import re
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import httpx
import jwt
import msgspec
import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from backends.contract import (
    Audio,
    Backend,
    Embed,
    EmbedParts,
    EmbedReply,
    Image,
    Operation,
    ReplicaSpec,
    Rerank,
    RerankReply,
    Truncate,
)
from backends.contract.errors import (
    AttemptTimedOut,
    BackendError,
    CredentialRefused,
    InvalidWork,
    ModelNotServed,
    ReplicaFailed,
    ReplicaOverloaded,
    ReplicaUnavailable,
    UnsupportedWork,
)
from backends.google.errors import failure
from backends.google.kind import GEMINI, GeminiSettings, VertexSettings
from backends.google.models import gemini_model, vertex_model
from backends.google.vertex import open_replica as open_vertex
from backends.hosted.adapter import requests_of
from backends.hosted.models import HostedModel
from backends.http.client import UpstreamResponse
from tests.conftest import remote_backend
from tests.fakes.google import (
    LOCATION,
    PROJECT,
    FakeGemini,
    FakeVertex,
    error_info,
    refusal,
    retry_info,
)
from tests.fakes.tei import score_of, vector_of
from tests.fakes.threaded import serve_in_thread
from tests.pictures import encoded, noise

FIRST, NEW, TEXT, RANKER = (
    "gemini-embedding-001",
    "gemini-embedding-2",
    "text-embedding-005",
    "semantic-ranker-default@latest",
)
PICTURE = Image(encoded(noise(9, 7, 1)), "image/png", 9, 7)
PICTURE_BASE64 = base64.b64encode(PICTURE.data).decode()
LONG = "w " * 20
# Written by tests/clients/test_gemini_client.py.
RECORDED = Path(__file__).parents[1] / "fakes/google_genai_requests.json"
DOCUMENTS = ("red", "green and blue", "cyan")

OpensGemini = Callable[..., tuple[Backend, FakeGemini]]
OpensVertex = Callable[..., tuple[Backend, FakeVertex]]


@pytest.fixture
async def gemini() -> AsyncIterator[OpensGemini]:
    """Return a function that opens a model of the Gemini API at a server of its own."""
    async with AsyncExitStack() as stack:

        def open_model(model: str, key: str = "a-google-key", **settings: Any) -> tuple[Backend, FakeGemini]:
            server = FakeGemini(model)
            headers = {"x-goog-api-key": key}
            spec = ReplicaSpec("http://api/v1beta", model, headers, settings=GeminiSettings(**settings))
            backend = remote_backend("gemini", spec, httpx.ASGITransport(server))
            stack.push_async_callback(backend.aclose)
            return backend, server

        yield open_model


@pytest.fixture
async def vertex() -> AsyncIterator[OpensVertex]:
    """Return a function that opens a model of Vertex AI at a server of its own."""
    async with AsyncExitStack() as stack:

        def open_model(
            model: str, token: str | None = "an-access-token", **settings: Any
        ) -> tuple[Backend, FakeVertex]:
            server = FakeVertex(model)
            headers = {} if token is None else {"authorization": f"Bearer {token}"}
            found = VertexSettings(project=PROJECT, location=LOCATION, **settings)
            spec = ReplicaSpec("http://api", model, headers, settings=found)
            backend = remote_backend("vertex", spec, httpx.ASGITransport(server))
            stack.push_async_callback(backend.aclose)
            return backend, server

        yield open_model


def assert_rows(reply: Any, *texts: str) -> None:
    assert isinstance(reply, EmbedReply)
    np.testing.assert_allclose([vector_of(text) for text in texts], reply.vectors, rtol=1e-5)


async def test_gemini_takes_many_contents_and_the_key_in_its_header(gemini: OpensGemini) -> None:
    backend, server = gemini(FIRST)
    found = await backend.describe(5.0)
    reply = await backend.run(Embed(("a", "b c"), prompt_name="query"), 5.0)

    assert_rows(reply, "a", "b c")
    content = {"model": f"models/{FIRST}", "taskType": "RETRIEVAL_QUERY"}
    expected = [content | {"content": {"parts": [{"text": text}]}} for text in ("a", "b c")]
    assert {"requests": expected} == server.requests[-1][1]
    assert all("authorization" not in headers for headers in server.headers)
    # Nothing in its replies counts tokens.
    assert 2 == reply.tokens
    assert ("tokens are estimated: its replies have no counts",) == found.notes
    assert (100, 2048, True) == (found.request_inputs, found.max_input_tokens, found.typed_inputs)


async def test_newer_models_read_the_task_in_the_text(gemini: OpensGemini) -> None:
    backend, server = gemini(NEW)
    found = await backend.describe(5.0)
    parts = EmbedParts((("a", PICTURE), ("b",)), prompt_name="document")
    reply = await backend.run(parts, 5.0)
    plain = await backend.run(Embed(("a",), prompt_name="query"), 5.0)

    first, second = server.requests[-2][1]["requests"]
    inline = {"inlineData": {"mimeType": "image/png", "data": PICTURE_BASE64}}
    assert [{"text": "a"}, inline] == first["content"]["parts"]
    assert [{"text": "title: none | text: b"}] == second["content"]["parts"]
    assert_rows(reply, f"a {PICTURE_BASE64}", "title: none | text: b")
    assert_rows(plain, "task: search result | query: a")
    assert {Operation.EMBED_IMAGE, Operation.EMBED_AUDIO} <= found.operations
    assert not found.typed_inputs


async def test_configured_tasks_replace_those_of_roles(gemini: OpensGemini, vertex: OpensVertex) -> None:
    types = {"query": "CODE_RETRIEVAL_QUERY"}
    backend, server = gemini(FIRST, input_type=types)
    await backend.describe(5.0)
    await backend.run(Embed(("a",), prompt_name="query"), 5.0)
    assert "CODE_RETRIEVAL_QUERY" == server.requests[-1][1]["requests"][0]["taskType"]

    other, second = vertex(TEXT, input_type=types)
    await other.describe(5.0)
    await other.run(Embed(("a",), prompt_name="query"), 5.0)
    assert "CODE_RETRIEVAL_QUERY" == second.requests[-1][1]["instances"][0]["task_type"]


@pytest.mark.parametrize(
    ("model", "work", "error", "words"),
    [
        (FIRST, Embed(("w " * 2000,), truncate=Truncate.ERROR), UnsupportedWork, "no `tokenizer`"),
        (FIRST, Embed(("a",), truncate=Truncate.LEFT), None, ""),
        (FIRST, Embed(("w " * 2000,), truncate=Truncate.LEFT), UnsupportedWork, "left end"),
        (FIRST, EmbedParts(((PICTURE,),)), UnsupportedWork, "neither images nor sound"),
        (FIRST, Embed(("a",), normalize=False), UnsupportedWork, "not normalized"),
        (FIRST, Embed(("a",), prompt_name="separation"), InvalidWork, "known here: classification"),
        (FIRST, Rerank("q", ("a",)), UnsupportedWork, "embeds only"),
        (NEW, EmbedParts(((Audio(b"x", "audio/flac"),),)), InvalidWork, "audio/flac"),
    ],
    ids=str,
)
async def test_gemini_serves_or_refuses(
    gemini: OpensGemini, model: str, work: Any, error: type[BackendError] | None, words: str
) -> None:
    backend, _ = gemini(model)
    await backend.describe(5.0)
    if error is None:
        assert_rows(await backend.run(work, 5.0), *work.inputs)
        return
    with pytest.raises(error, match=words) as caught:
        await backend.run(work, 5.0)
    assert "caller" == caught.value.source


async def test_refused_key_is_the_gateways_and_hidden(gemini: OpensGemini) -> None:
    backend, _ = gemini(FIRST, key="a-wrong-google-key")
    with pytest.raises(CredentialRefused) as caught:
        await backend.describe(5.0)
    assert "API key not valid" in caught.value.detail
    assert "a-wrong-google-key" not in caught.value.explanation


@pytest.mark.parametrize("model", [TEXT, FIRST, NEW])
async def test_vertex_counts_and_reports_cuts(vertex: OpensVertex, model: str) -> None:
    backend, server = vertex(model)
    found = await backend.describe(5.0)
    reply = await backend.run(Embed(("a", LONG, "b c")), 5.0)

    assert_rows(reply, "a", " ".join(LONG.split()[:14]), "b c")
    assert (3 + 16 + 4, (1,)) == (reply.tokens, reply.truncated)
    assert () == found.notes
    sent = [body for _, body in server.requests[1:]]
    assert (1 if model == TEXT else 3) == len(sent)
    assert (250 if model == TEXT else 1) == found.request_inputs
    assert (20_000 if model == TEXT else None) == found.request_tokens
    with pytest.raises(InvalidWork, match="maximum context length is 16 tokens"):
        await backend.run(Embed((LONG,), truncate=Truncate.ERROR), 5.0)
    with pytest.raises(UnsupportedWork, match="left end"):
        await backend.run(Embed((LONG * 999,), truncate=Truncate.LEFT), 5.0)


@pytest.mark.parametrize(
    ("model", "work", "count"),
    [
        (NEW, EmbedParts((("a", PICTURE),)), 1e30),
        (NEW, EmbedParts((("a", PICTURE),)), 8193),
        (NEW, EmbedParts((("a", PICTURE),)), -1),
        (NEW, Embed(("a",)), 1e30),
        (NEW, Embed(("a",)), 10**9),
        (FIRST, Embed(("a",)), 2049),
        (TEXT, Embed(("a",)), 1e30),
    ],
    ids=lambda value: str(value)[:20],
)
async def test_token_counts_that_cannot_be_are_refused(
    vertex: OpensVertex, model: str, work: Embed | EmbedParts, count: float
) -> None:
    backend, server = vertex(model)
    await backend.describe(5.0)
    server.token_count = count
    with pytest.raises(ReplicaFailed, match="tokens for 1 inputs"):
        await backend.run(work, 5.0)


async def test_counts_of_a_whole_input_that_was_cut_are_taken(vertex: OpensVertex) -> None:
    backend, server = vertex(FIRST)
    await backend.describe(5.0)
    server.token_count = 2100
    reply = await backend.run(Embed(("w " * 1500,), truncate=Truncate.RIGHT), 5.0)
    assert (2100, (0,)) == (reply.tokens, reply.truncated)


async def test_bodies_of_vertex(vertex: OpensVertex) -> None:
    backend, server = vertex(TEXT)
    await backend.describe(5.0)
    await backend.run(Embed(("a", "b"), prompt_name="document", truncate=Truncate.ERROR), 5.0)
    instances = [{"content": text, "task_type": "RETRIEVAL_DOCUMENT"} for text in ("a", "b")]
    assert {"instances": instances, "parameters": {"autoTruncate": False}} == server.requests[-1][1]

    backend, server = vertex(NEW)
    await backend.describe(5.0)
    await backend.run(EmbedParts((("a", PICTURE),)), 5.0)
    inline = {"inlineData": {"mimeType": "image/png", "data": PICTURE_BASE64}}
    expected = {"content": {"parts": [{"text": "a"}, inline]}, "embedContentConfig": {"autoTruncate": True}}
    assert expected == server.requests[-1][1]


async def test_ranks_in_the_order_of_the_documents(vertex: OpensVertex) -> None:
    backend, server = vertex(RANKER)
    found = await backend.describe(5.0)
    reply = await backend.run(Rerank("q", DOCUMENTS), 5.0)

    assert isinstance(reply, RerankReply)
    assert [score_of("q", text) for text in DOCUMENTS] == pytest.approx(reply.scores.tolist(), abs=1e-6)
    records = [{"id": str(i), "content": text} for i, text in enumerate(DOCUMENTS)]
    assert {"model": RANKER, "query": "q", "records": records, "topN": 3} == server.requests[-1][1]
    assert {Operation.RERANK} == found.operations
    assert 200 == found.request_inputs
    with pytest.raises(InvalidWork, match="no empty document") as caught:
        await backend.run(Rerank("q", ("a", "")), 5.0)
    assert 1 == caught.value.input_index


@pytest.mark.parametrize(
    ("name", "path"),
    [
        (TEXT, f"publishers/google/models/{TEXT}:predict"),
        (FIRST, f"publishers/google/models/{FIRST}:embedContent"),
        (NEW, f"publishers/google/models/{NEW}:embedContent"),
        ("publishers/intfloat/models/e5-maas", "publishers/intfloat/models/e5-maas:embedContent"),
    ],
)
def test_methods_are_those_of_googles_client(name: str, path: str) -> None:
    model = vertex_model(name, PROJECT, "global", {})
    (request,) = model.routes[Embed].encode(Embed(("a",)), model)
    assert f"/v1/projects/{PROJECT}/locations/global/{path}" == request.path


@pytest.mark.parametrize(
    ("location", "address"),
    [
        ("global", "https://aiplatform.googleapis.com"),
        (LOCATION, f"https://{LOCATION}-aiplatform.googleapis.com"),
        ("eu", "https://aiplatform.eu.rep.googleapis.com"),
        ("us", "https://aiplatform.us.rep.googleapis.com"),
    ],
)
def test_addresses(location: str, address: str) -> None:
    assert address == VertexSettings(project=PROJECT, location=location).address()
    assert "https://generativelanguage.googleapis.com/v1beta" == GEMINI.address


@pytest.mark.parametrize("location", ["global", LOCATION, "eu"])
async def test_ranking_has_a_host_of_its_own_whatever_the_location(location: str) -> None:
    settings = VertexSettings(project=PROJECT, location=location)
    opened: list[ReplicaSpec] = []

    def keep(spec: ReplicaSpec, authorizer: Any) -> Any:
        del authorizer
        opened.append(spec)

    headers = {"authorization": "Bearer an-access-token"}
    open_vertex(ReplicaSpec(settings.address(), RANKER, headers, settings=settings), keep)
    open_vertex(ReplicaSpec("https://ranking.example.org", RANKER, headers, settings=settings), keep)
    assert ["https://discoveryengine.googleapis.com", "https://ranking.example.org"] == [
        spec.address for spec in opened
    ]


def as_sent(value: Any) -> Any:
    """Return a body of Google's client without what means nothing, its names in one spelling."""
    if isinstance(value, list):
        return [as_sent(item) for item in value]
    if not isinstance(value, dict):
        return value
    names = {"inline_data": "inlineData", "mime_type": "mimeType"}
    return {names.get(name, name): as_sent(item) for name, item in value.items() if name != "role"}


def test_requests_are_those_of_googles_client() -> None:
    picture = Image(b"png", "image/png", 1, 1)
    works: dict[str, tuple[HostedModel, Any]] = {
        "gemini": (gemini_model(FIRST, {}), Embed(("a", "b"), prompt_name="query")),
        "gemini picture": (gemini_model(NEW, {}), EmbedParts((("a", picture),))),
        "vertex text": (
            vertex_model(TEXT, PROJECT, LOCATION, {}),
            Embed(("a", "b"), prompt_name="document", truncate=Truncate.ERROR),
        ),
        "vertex": (vertex_model(FIRST, PROJECT, LOCATION, {}), Embed(("a",), prompt_name="document")),
        "vertex picture": (vertex_model(NEW, PROJECT, LOCATION, {}), EmbedParts((("a", picture),))),
    }
    recorded = json.loads(RECORDED.read_text())
    assert recorded.keys() == works.keys()
    for name, (model, work) in works.items():
        (request,) = requests_of(work, model)
        path, body = recorded[name]
        # Google's client calls beta versions of the APIs, too.
        assert request.path.removeprefix("/v1") == re.sub("^/v1(beta1?)?", "", path), name
        assert json.loads(msgspec.json.encode(request.body)) == as_sent(body), name


# --- access tokens


class TokenServer:
    """Google's token endpoint: checks the assertion of a service account, and gives a token."""

    def __init__(self, public_key: Any, *tokens: str) -> None:
        self.public_key = public_key
        self.tokens = list(tokens)
        self.given: list[str] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve one request."""
        assert "/token" == scope["path"]
        body = (await receive())["body"]
        form = parse_qs(body.decode())
        claims = jwt.decode(
            form["assertion"][0],
            self.public_key,
            ["RS256"],
            options={"verify_aud": False, "verify_iat": False},
        )
        assert "https://www.googleapis.com/auth/cloud-platform" == claims["scope"]
        if not self.tokens:
            words = {"error": "invalid_grant", "error_description": f"was sent {form}"}
            await respond(send, 400, words)
            return
        self.given.append(self.tokens.pop(0))
        reply = {"access_token": self.given[-1], "expires_in": 3600, "token_type": "Bearer"}
        await respond(send, 200, reply)


async def respond(send: Any, status: int, reply: Any) -> None:
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(reply).encode()})


@contextmanager
def service_account(folder: Path, *tokens: str) -> Iterator[tuple[str, TokenServer]]:
    """Yield the file of a service account, and the server of its tokens."""
    key = rsa.generate_private_key(65537, 2048)
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()
    server = TokenServer(key.public_key(), *tokens)
    with serve_in_thread(server) as url:
        fields = {
            "type": "service_account",
            "project_id": PROJECT,
            "private_key_id": "1",
            "private_key": pem,
            "client_email": "gateway@a-project.iam.gserviceaccount.com",
            "token_uri": f"{url}/token",
        }
        file = folder / "account.json"
        file.write_text(json.dumps(fields))
        yield str(file), server


async def test_service_account_gets_one_token_for_many_requests(vertex: OpensVertex, tmp_path: Path) -> None:
    with service_account(tmp_path, "an-access-token") as (file, server):
        backend, upstream = vertex(TEXT, None, credentials=file)
        await backend.describe(5.0)
        await asyncio.gather(*[backend.run(Embed((text,)), 5.0) for text in "abc"])
        await backend.aclose()

    assert ["an-access-token"] == server.given
    assert {"Bearer an-access-token"} == {headers["authorization"] for headers in upstream.headers}


async def test_refused_token_is_fetched_again(vertex: OpensVertex, tmp_path: Path) -> None:
    with service_account(tmp_path, "a-revoked-token", "an-access-token") as (file, server):
        backend, _ = vertex(TEXT, None, credentials=file)
        with pytest.raises(CredentialRefused) as caught:
            await backend.describe(5.0)
        assert "a-revoked-token" not in caught.value.explanation
        await backend.describe(5.0)
        await backend.aclose()

    assert 2 == len(server.given)


async def test_words_of_googles_token_service_are_shown_without_the_assertion(
    vertex: OpensVertex, tmp_path: Path
) -> None:
    with service_account(tmp_path) as (file, _):
        backend, _ = vertex(TEXT, None, credentials=file)
        with pytest.raises(CredentialRefused) as caught:
            await backend.describe(5.0)
        await backend.aclose()

    assert "was sent" in caught.value.explanation
    assert re.search(r"[\w-]+\.[\w-]+\.[\w-]{20,}", caught.value.explanation) is None


async def test_a_refresh_token_of_the_machine_is_hidden(
    vertex: OpensVertex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def echo(_: Any, receive: Any, send: Any) -> None:
        form = parse_qs((await receive())["body"].decode())
        await respond(send, 400, {"error": "invalid_grant", "error_description": f"was sent {form}"})

    secrets = {"client_secret": "a-client-secret", "refresh_token": "a-refresh-token"}
    file = tmp_path / "default.json"
    file.write_text(json.dumps({"type": "authorized_user", "client_id": "i", **secrets}))
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(file))
    with serve_in_thread(echo) as url:
        monkeypatch.setattr("google.oauth2.credentials._GOOGLE_OAUTH2_TOKEN_ENDPOINT", f"{url}/token")
        backend, _ = vertex(TEXT, None)
        with pytest.raises(CredentialRefused) as caught:
            await backend.describe(5.0)
        await backend.aclose()

    assert "was sent" in caught.value.explanation
    assert not [secret for secret in secrets.values() if secret in caught.value.explanation]


async def test_default_credentials_are_those_of_the_machine(
    vertex: OpensVertex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with service_account(tmp_path, "an-access-token") as (file, server):
        monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", file)
        backend, _ = vertex(TEXT, None)
        await backend.describe(5.0)
        await backend.aclose()

    assert 1 == len(server.given)


@pytest.mark.parametrize("content", [None, "{}", "no JSON"])
async def test_unusable_credentials_are_explained(
    vertex: OpensVertex, tmp_path: Path, content: str | None
) -> None:
    file = tmp_path / "account.json"
    if content is not None:
        file.write_text(content)
    backend, server = vertex(TEXT, None, credentials=str(file))
    with pytest.raises(CredentialRefused, match=r"set `vertex.credentials`"):
        await backend.describe(5.0)
    assert [] == server.headers


# --- errors


@pytest.mark.parametrize(
    ("code", "status", "error"),
    [
        (429, "RESOURCE_EXHAUSTED", ReplicaOverloaded),
        (401, "UNAUTHENTICATED", CredentialRefused),
        (403, "PERMISSION_DENIED", CredentialRefused),
        (404, "NOT_FOUND", ModelNotServed),
        (503, "UNAVAILABLE", ReplicaUnavailable),
        (504, "DEADLINE_EXCEEDED", AttemptTimedOut),
        (400, "INVALID_ARGUMENT", InvalidWork),
        (500, "INTERNAL", ReplicaFailed),
    ],
)
@pytest.mark.parametrize("in_list", [False, True])
def test_errors_are_known_by_their_status(
    code: int, status: str, error: type[BackendError], in_list: bool
) -> None:
    body = refusal(code, status, "words").body
    found = failure(UpstreamResponse(code, {}, b"[%s]" % body if in_list else body))
    assert error is type(found)
    assert "words" not in found.message
    if not in_list:
        assert "words" == found.detail


def test_quota_errors_pause_as_long_as_they_say() -> None:
    def pause(*details: Any, **headers: str) -> float | None:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        body = refusal(429, "RESOURCE_EXHAUSTED", "quota", *details).body
        return failure(UpstreamResponse(429, named, body)).retry_after_s

    assert 3.5 == pause(error_info("RATE_LIMIT_EXCEEDED"), retry_info("3.5s"))
    assert 60.0 == pause(retry_info("600s"))
    assert 7.0 == pause(retry_info("3s"), retry_after="7")
    assert pause() is None
    assert pause("odd", {"retryDelay": 3}, {"retryDelay": "soon"}) is None


@pytest.mark.parametrize("body", [b"", b"[]", b"<html>", b'{"error": "text"}', b"[" * 3000, b"\xff"])
def test_errors_without_the_form_are_read_by_their_http_status(body: bytes) -> None:
    assert ReplicaOverloaded is type(failure(UpstreamResponse(429, {}, body)))
