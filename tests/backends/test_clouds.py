"""Azure OpenAI, NVIDIA NIM and watsonx.ai: requests, replies and credentials, against stubs of their wire."""

import time
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest

from backends.azure.entra import scope_of
from backends.contract import (
    Backend,
    Embed,
    EmbedParts,
    EmbedReply,
    Image,
    Operation,
    Part,
    ReplicaSpec,
    Rerank,
    RerankReply,
    ScoreParts,
    Truncate,
)
from backends.contract.errors import (
    AttemptTimedOut,
    BackendError,
    CredentialMissing,
    CredentialRefused,
    InvalidWork,
    ModelNotServed,
    ReplicaFailed,
    ReplicaOverloaded,
    ReplicaUnavailable,
    RequestTooLarge,
    UnsupportedWork,
)
from backends.contract.vectors import sigmoid
from backends.http.client import UpstreamResponse
from backends.http.media import data_uri
from backends.openai.api import failure as openai_failure
from gateway.config.schema import UpstreamSettings
from gateway.upstreams.factory import ReplicaAddress, ReplicaOpener, create_replica
from tests.conftest import remote_backend
from tests.fakes.clouds import FakeAzure, FakeNim, FakeWatsonx
from tests.fakes.hooks import respond_with
from tests.fakes.server import FakeServer, logit_of
from tests.fakes.tei import vector_of
from tests.fakes.threaded import serve_in_thread
from tests.pictures import encoded, noise
from tests.waiting import PATIENCE_S

LONG = " ".join(["word"] * 20)
RERANK = Rerank("a", ("a", "b", "c"))


async def opened(server: FakeServer, written: dict[str, Any], *, joins: bool = True) -> Backend:
    """Return the backend of the first replica of settings as router.yaml has them."""
    settings = msgspec.convert(written, UpstreamSettings)
    specs: list[ReplicaSpec] = []

    def keep(kind: Any, spec: ReplicaSpec) -> Backend:
        specs.append(spec)
        return remote_backend(kind, spec, httpx.ASGITransport(server))

    address = settings.replicas[0]
    replica = create_replica(settings, ReplicaAddress(address, address), ReplicaOpener("u", keep))
    if joins:
        await replica.backend.describe(5.0)
    return replica.backend


async def embedded(backend: Backend, work: Embed) -> EmbedReply:
    reply = await backend.run(work, 5.0)
    assert isinstance(reply, EmbedReply)
    return reply


async def reranked(backend: Backend, work: Rerank = RERANK) -> RerankReply:
    reply = await backend.run(work, 5.0)
    assert isinstance(reply, RerankReply)
    return reply


# --- Azure


AZURE = {"backend": "azure", "replicas": ["https://name.openai.azure.com"], "model": "small"}
AZURE_KEY = {"api_key": "azure-key-1234"}


@pytest.mark.parametrize(
    ("section", "path", "query"),
    [
        ({"api_version": "2024-10-21"}, "/openai/deployments/small/embeddings", b"api-version=2024-10-21"),
        ({}, "/openai/v1/embeddings", b""),
    ],
)
async def test_azure_embeds_with_a_deployment(section: dict[str, Any], path: str, query: bytes) -> None:
    server = FakeAzure()
    backend = await opened(server, {**AZURE, **AZURE_KEY, "azure": section})
    reply = await embedded(backend, Embed(("a", "b c")))

    assert np.allclose(reply.vectors, [vector_of("a"), vector_of("b c")])
    assert path == server.requests[-1][0]
    assert "small" == server.requests[-1][1]["model"]
    assert query == server.queries[-1]
    assert "azure-key-1234" == server.headers[-1]["api-key"]
    assert "authorization" not in server.headers[-1]


async def test_a_deployment_that_does_not_exist_is_no_fault_of_a_caller() -> None:
    written = {**AZURE, **AZURE_KEY, "model": "none", "azure": {"api_version": "2024-10-21"}}
    with pytest.raises(ReplicaFailed, match="does not serve this model"):
        await opened(FakeAzure(), written)


async def test_a_refused_key_of_azure() -> None:
    with pytest.raises(CredentialRefused):
        await opened(FakeAzure(), AZURE | {"api_key": "another-key-1"})


@pytest.mark.parametrize(
    ("path", "requested"),
    [
        ("", "/providers/cohere/v2/rerank"),
        ("/providers/cohere/v2", "/providers/cohere/v2/rerank"),
        ("/v1", "/v1/rerank"),
    ],
)
async def test_coheres_reranker_of_foundry(path: str, requested: str, small_files: str) -> None:
    server = FakeAzure()
    settings = {
        "backend": "azure",
        "replicas": [f"https://name.services.ai.azure.com{path}"],
        "model": "ranker",
        "task": "rerank",
        "tokenizer": small_files,
        **AZURE_KEY,
    }
    reply = await reranked(await opened(server, settings))

    assert 3 == len(reply.scores)
    assert requested == server.requests[-1][0]
    assert "Bearer azure-key-1234" == server.headers[-1]["authorization"]
    assert "api-key" not in server.headers[-1]


@pytest.mark.parametrize(
    ("address", "scope"),
    [
        ("https://name.openai.azure.com", "https://cognitiveservices.azure.com/.default"),
        ("https://name.openai.azure.us/openai/v1", "https://cognitiveservices.azure.us/.default"),
        ("https://name.openai.azure.cn", "https://cognitiveservices.azure.cn/.default"),
        ("https://azure.us.example.org", "https://cognitiveservices.azure.com/.default"),
    ],
)
def test_scope_of_entra_is_that_of_the_cloud(address: str, scope: str) -> None:
    assert scope == scope_of(address)


class FakeIdentity(FakeServer):
    """Managed identity of a machine of Azure, as App Service has it."""

    issued = 0

    def routes(self) -> Any:
        return {"/token": self._token}

    def _token(self, _: dict[str, Any]) -> Any:
        self.issued += 1
        ends = int(time.time()) + 3600
        resource = "https://cognitiveservices.azure.com"
        return {
            "access_token": f"entra-token-{self.issued}",
            "expires_on": str(ends),
            "resource": resource,
            "token_type": "Bearer",
        }


async def test_azure_takes_tokens_of_entra(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("azure.identity")
    server, identity = FakeAzure(), FakeIdentity()
    server.token = "entra-token-1"
    with serve_in_thread(identity) as address:
        monkeypatch.setenv("IDENTITY_ENDPOINT", f"{address}/token")
        monkeypatch.setenv("IDENTITY_HEADER", "header-of-the-machine")
        backend = await opened(server, {**AZURE, "azure": {"entra": True}})
        await embedded(backend, Embed(("a",)))
        await backend.aclose()

    assert 1 == identity.issued
    assert b"resource=https://cognitiveservices.azure.com" in identity.queries[0]
    assert "Bearer entra-token-1" == server.headers[-1]["authorization"]


@pytest.mark.parametrize(
    ("variables", "error", "words"),
    [
        ({}, CredentialMissing, "no credentials for Microsoft Entra ID were found"),
        (
            {
                "AZURE_TENANT_ID": "00000000-0000-0000-0000-000000000001",
                "AZURE_CLIENT_ID": "00000000-0000-0000-0000-000000000002",
                "AZURE_CLIENT_SECRET": "secret-of-the-test",
                "AZURE_AUTHORITY_HOST": "https://127.0.0.1:1",
            },
            CredentialRefused,
            "gives no access token for the gateway's identity: EnvironmentCredential: Authentication failed",
        ),
    ],
    ids=["none", "failed"],
)
async def test_credentials_of_entra_that_fail_have_one_short_line(
    variables: dict[str, str],
    error: type[CredentialRefused],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    pytest.importorskip("azure.identity")
    for name in ("AZURE_TENANT_ID", "AZURE_CLIENT_ID", "AZURE_CLIENT_SECRET", "IDENTITY_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"AZURE_TOKEN_CREDENTIALS": "EnvironmentCredential", **variables}.items():
        monkeypatch.setenv(name, value)
    backend = await opened(FakeAzure(), {**AZURE, "azure": {"entra": True}}, joins=False)
    with caplog.at_level("INFO"), pytest.raises(error) as caught:
        await backend.describe(PATIENCE_S)
    await backend.aclose()

    assert error is type(caught.value)
    assert words in caught.value.explanation
    assert len(caught.value.explanation) <= 300
    assert not [record for record in caplog.records if record.name.startswith(("azure", "msal"))]


async def test_words_of_entra_are_shown_without_the_machines_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    identity = pytest.importorskip("azure.identity")
    core = pytest.importorskip("azure.core.exceptions")

    def refuse(*_: Any) -> None:
        raise core.ClientAuthenticationError("EnvironmentCredential: was sent client-secret-1234")

    monkeypatch.setenv("AZURE_CLIENT_SECRET", "client-secret-1234")
    # Its service is called by https alone.
    monkeypatch.setattr(identity.DefaultAzureCredential, "get_token", refuse)
    with pytest.raises(CredentialRefused) as caught:
        await opened(FakeAzure(), {**AZURE, "azure": {"entra": True}})
    assert "EnvironmentCredential: was sent ..." == caught.value.detail


# --- NIM


NIM = {"backend": "nim", "replicas": ["http://nim:8000"]}
RANKER = "nvidia/llama-3.2-nv-rerankqa-1b-v2"


async def test_nim_embeds_by_role() -> None:
    server = FakeNim()
    backend = await opened(server, NIM)
    passages = await embedded(backend, Embed(("a", "b")))
    queries = await embedded(backend, Embed(("a",), prompt_name="query"))

    assert np.allclose(passages.vectors, [vector_of("a"), vector_of("b")])
    assert np.allclose(queries.vectors, [vector_of("query: a")])
    assert "query" == server.requests[-1][1]["input_type"]
    assert "nvidia/llama-nemotron-embed-1b-v2" == server.requests[-1][1]["model"]


@pytest.mark.parametrize(
    ("truncate", "word"), [(Truncate.ERROR, "NONE"), (Truncate.LEFT, "START"), (Truncate.RIGHT, "END")]
)
async def test_nim_cuts_as_it_is_told(truncate: Truncate, word: str) -> None:
    server = FakeNim()
    backend = await opened(server, NIM)
    await embedded(backend, Embed(("a",), truncate=truncate))
    assert word == server.requests[-1][1]["truncate"]


async def test_nim_refuses_a_long_input_by_its_length() -> None:
    backend = await opened(FakeNim(), NIM)
    with pytest.raises(InvalidWork, match="maximum context length is 16 tokens"):
        await embedded(backend, Embed((LONG,), truncate=Truncate.ERROR))


@pytest.mark.parametrize("hosted", [False, True])
async def test_nim_ranks_by_logits(hosted: bool) -> None:
    server = FakeNim(reranks=True, hosted=hosted)
    written = {"backend": "nim", "model": RANKER, "task": "rerank"}
    backend = await opened(server, written | ({"nim": {"hosted": True}} if hosted else NIM))
    scores = await reranked(backend)
    raw = await reranked(backend, msgspec.structs.replace(RERANK, raw_scores=True))

    logits = np.array([logit_of("a", text) for text in RERANK.documents], np.float32)
    assert np.allclose(raw.scores, logits)
    assert np.allclose(scores.scores, sigmoid(logits))
    assert {"text": "a"} == server.requests[-1][1]["query"]
    assert "END" == server.requests[-1][1]["truncate"]
    path = "/v1/retrieval/nvidia/llama-3_2-nv-rerankqa-1b-v2/reranking" if hosted else "/v1/ranking"
    assert path == server.requests[-1][0]


PICTURE = Image(encoded(noise(9, 7, 1)), "image/png", 9, 7)


async def test_nim_embeds_images_as_documents() -> None:
    server = FakeNim()
    backend = await opened(server, NIM | {"model": "nvidia/llama-nemotron-embed-vl-1b-v2"})
    assert Operation.EMBED_IMAGE in (await backend.describe(5.0)).operations
    reply = await backend.run(EmbedParts((("a",), (PICTURE,))), 5.0)

    assert isinstance(reply, EmbedReply)
    assert np.allclose(reply.vectors, [vector_of("a"), vector_of(data_uri(PICTURE))])
    assert ["a", data_uri(PICTURE)] == server.requests[-1][1]["input"]
    with pytest.raises(InvalidWork, match="as documents only"):
        await backend.run(EmbedParts(((PICTURE,),), prompt_name="query"), 5.0)
    with pytest.raises(InvalidWork, match="input 0 is more"):
        await backend.run(EmbedParts((("a", PICTURE),)), 5.0)


async def test_other_nims_are_sent_no_images() -> None:
    server = FakeNim()
    backend = await opened(server, NIM)
    assert Operation.EMBED_IMAGE not in (await backend.describe(5.0)).operations
    with pytest.raises(UnsupportedWork):
        await backend.run(EmbedParts(((PICTURE,),)), 5.0)
    assert "data:" not in str(server.requests)


async def test_nim_ranks_documents_with_images() -> None:
    server = FakeNim(reranks=True)
    written = NIM | {"model": "nvidia/llama-nemotron-rerank-vl-1b-v2", "task": "rerank"}
    backend = await opened(server, written)
    uri = data_uri(PICTURE)
    documents: list[tuple[Part, ...]] = [("a",), (PICTURE,), ("b", PICTURE)]
    pairs = tuple([((query,), document) for document in documents for query in ("q", "r")])
    reply = await backend.run(ScoreParts(pairs), 5.0)

    assert isinstance(reply, RerankReply)
    sources = ["a", uri, f"b {uri}"]
    logits = np.array([logit_of(query, text) for text in sources for query in ("q", "r")], np.float32)
    assert np.allclose(reply.scores, sigmoid(logits))
    assert reply.logits is not None
    assert np.allclose(reply.logits, logits)
    passages = [{"text": "a"}, {"image": uri}, {"text": "b", "image": uri}]
    sent = [body for _, body in server.requests if body.get("passages") == passages]
    assert ["q", "r"] == [body["query"]["text"] for body in sent]
    with pytest.raises(InvalidWork, match="query is a text"):
        await backend.run(ScoreParts((((PICTURE,), ("a",)),)), 5.0)
    with pytest.raises(InvalidWork, match="one text, one image or both") as caught:
        await backend.run(ScoreParts(((("q",), ("a",)), (("q",), (PICTURE, PICTURE)))), 5.0)
    assert 1 == caught.value.input_index


async def test_other_nims_refuse_documents_with_images() -> None:
    backend = await opened(FakeNim(reranks=True), NIM | {"model": RANKER, "task": "rerank"})
    assert Operation.RERANK_IMAGE not in (await backend.describe(5.0)).operations
    with pytest.raises(UnsupportedWork, match="none with images"):
        await backend.run(ScoreParts(((("q",), (PICTURE,)),)), 5.0)


async def test_a_nim_on_own_machines_costs_nothing_and_a_hosted_one_does() -> None:
    own = await opened(FakeNim(), NIM)
    hosted = await opened(
        FakeNim(hosted=True),
        {"backend": "nim", "model": "nvidia/llama-nemotron-embed-1b-v2", "nim": {"hosted": True}},
    )
    assert not (await own.describe(5.0)).metered
    assert (await hosted.describe(5.0)).metered


HOSTED_NIM = {"backend": "nim", "model": "nvidia/llama-nemotron-embed-1b-v2", "nim": {"hosted": True}}


async def test_a_reply_is_fetched_from_nvidias_queue() -> None:
    server = FakeNim(hosted=True)
    server.api_key = "nvidia-key-1"
    server.queued = 3
    backend = await opened(server, HOSTED_NIM | {"api_key": "nvidia-key-1"})
    reply = await embedded(backend, Embed(("a", "b")))
    await backend.aclose()

    assert np.allclose(reply.vectors, [vector_of("a"), vector_of("b")])
    # One of the check of the model, and one of the call; each was asked for until it was ready.
    assert [-1, -1] == [pending for _, pending in server.accepted.values()]


async def test_a_queue_is_followed_for_the_time_of_the_attempt_only() -> None:
    server = FakeNim(hosted=True)
    backend = await opened(server, HOSTED_NIM)
    server.queued = 10**6
    with pytest.raises(AttemptTimedOut, match="still has the request in its queue"):
        await backend.run(Embed(("a",)), 0.5)


async def test_an_error_of_a_queued_request_is_that_of_the_request() -> None:
    server = FakeNim(hosted=True)
    backend = await opened(server, HOSTED_NIM)
    server.queued = 1
    server.hook = respond_with(
        400, b'{"object": "error", "message": "Input length 9 exceeds maximum allowed token size 8"}'
    )
    with pytest.raises(InvalidWork, match="maximum context length is 8 tokens"):
        await embedded(backend, Embed(("a",)))


async def test_a_key_for_another_address_is_not_sent_to_nvidias_queue() -> None:
    server = FakeNim(hosted=True)
    server.queued = 1
    with pytest.raises(ReplicaUnavailable, match="a queue, which is not followed here"):
        await opened(server, HOSTED_NIM | {"replicas": ["https://nim.example.org"]})
    # Nothing has asked for the replies.
    assert {0} == {pending for _, pending in server.accepted.values()}


@pytest.mark.parametrize(
    ("status", "body", "expected"),
    [
        (202, b"", ReplicaUnavailable),
        (402, b'{"detail": "Cloud credits expired"}', ReplicaOverloaded),
        (429, b'{"status": 429, "title": "Too Many Requests"}', ReplicaOverloaded),
        (401, b"{}", CredentialRefused),
        (400, b'{"object": "error", "message": "bad"}', InvalidWork),
        (422, b'{"detail": [{"msg": "field required"}]}', InvalidWork),
        (529, b'{"error": {"code": 529, "message": "Provider returned error"}}', ReplicaOverloaded),
    ],
)
def test_errors_of_nim(status: int, body: bytes, expected: type[Exception]) -> None:
    error = openai_failure(UpstreamResponse(status, {}, body))
    assert expected is type(error)
    # A spent account is asked again after a while, and its replica is not ejected.
    assert (60.0 if status == 402 else None) == error.retry_after_s


@pytest.mark.parametrize(
    "body",
    [
        b'{"error": "%b"}',
        b'{"detail": "%b"}',
        b'{"detail": {"error": "%b"}}',
        b'{"detail": [{"msg": "%b"}]}',
        b'{"object": "error", "message": "%b", "detail": {}, "type": "invalid_request_error"}',
        b'"%b"',
    ],
)
def test_a_long_input_is_known_in_every_form_of_an_error(body: bytes) -> None:
    words = b"Input length 523 exceeds maximum allowed token size 512"
    error = openai_failure(UpstreamResponse(400, {}, body % words))
    assert "maximum context length is 512 tokens" in error.message


@pytest.mark.parametrize(
    ("status", "code", "expected", "pause_s"),
    [
        (403, "AUTHZ_INSUFFICIENT_BALANCE", ReplicaOverloaded, 60.0),
        (403, "AUTHZ_RESOURCE_LIMIT_EXCEEDED", ReplicaOverloaded, 60.0),
        (429, "RATE_TOKEN_LIMIT_EXCEEDED", ReplicaOverloaded, None),
        (401, "AUTH_INVALID_API_KEY", CredentialRefused, None),
        (403, "AUTHZ_OTHER", CredentialRefused, None),
        (400, "INPUT_MODEL_NOT_FOUND", ModelNotServed, None),
    ],
)
def test_errors_of_jina(status: int, code: str, expected: type[Exception], pause_s: float | None) -> None:
    body = msgspec.json.encode({"detail": "words", "code": code, "request_id": "1"})
    error = openai_failure(UpstreamResponse(status, {}, body))
    assert (expected, pause_s) == (type(error), error.retry_after_s)


@pytest.mark.parametrize(
    "message",
    [
        "Too many inputs in request, split into more batches.",
        "Requested 341772 tokens, max 300000 tokens per request",
    ],
)
def test_inputs_that_are_too_many_together_are_sent_in_smaller_requests(message: str) -> None:
    body = msgspec.json.encode({"object": "error", "message": message})
    assert RequestTooLarge is type(openai_failure(UpstreamResponse(400, {}, body)))


# --- watsonx


WATSONX = {
    "backend": "watsonx",
    "model": "ibm/slate",
    "api_key": "ibm-key-1234",
    "watsonx": {"project_id": "p-1", "input_tokens": 16},
}


async def test_watsonx_embeds_with_tokens_of_ibm_cloud() -> None:
    server = FakeWatsonx()
    backend = await opened(server, WATSONX)
    reply = await embedded(backend, Embed(("a", "b c")))

    assert np.allclose(reply.vectors, [vector_of("a"), vector_of("b c")])
    assert 7 == reply.tokens
    body = {"model_id": "ibm/slate", "project_id": "p-1", "inputs": ["a", "b c"]}
    assert body | {"parameters": {"truncate_input_tokens": 16}} == server.requests[-1][1]
    assert b"version=2024-10-25" == server.queries[-1]
    assert 1 == server.issued


async def test_watsonx_fetches_a_token_again_if_it_is_refused() -> None:
    server = FakeWatsonx()
    backend = await opened(server, WATSONX)
    # The one that the gateway has is no longer valid.
    server.issued += 1
    with pytest.raises(CredentialRefused):
        await embedded(backend, Embed(("a",)))
    await embedded(backend, Embed(("a",)))


async def test_watsonx_reranks_in_a_space() -> None:
    server = FakeWatsonx()
    backend = await opened(server, WATSONX | {"task": "rerank", "watsonx": {"space_id": "s-1"}})
    reply = await reranked(backend)

    assert 3 == len(reply.scores)
    assert "s-1" == server.requests[-1][1]["space_id"]
    assert [{"text": "a"}, {"text": "b"}, {"text": "c"}] == server.requests[-1][1]["inputs"]
    with pytest.raises(UnsupportedWork):
        await backend.run(Embed(("a",)), 5.0)


async def test_watsonx_cuts_or_refuses_a_long_input() -> None:
    cutting = await opened(FakeWatsonx(), WATSONX)
    refusing = await opened(FakeWatsonx(), WATSONX | {"watsonx": {"project_id": "p-1"}})
    assert 1 == len((await embedded(cutting, Embed((LONG,)))).vectors)
    for backend, truncate in ((cutting, Truncate.ERROR), (refusing, Truncate.RIGHT)):
        with pytest.raises(InvalidWork, match="maximum context length"):
            await embedded(backend, Embed((LONG,), truncate=truncate))


async def test_a_key_that_ibm_cloud_refuses() -> None:
    with pytest.raises(CredentialRefused, match="IBM Cloud gives no access token") as caught:
        await opened(FakeWatsonx(), WATSONX | {"api_key": "wrong-key-5678"})
    assert "wrong-key-5678" not in caught.value.explanation


async def test_an_unreadable_answer_of_ibm_clouds_identity_service_is_not_repeated() -> None:
    server = FakeWatsonx()
    server.identity_status = 200
    with pytest.raises(ReplicaFailed, match="could not be read") as caught:
        await opened(server, WATSONX)
    assert "was sent" not in caught.value.explanation


@pytest.mark.parametrize("status", [402, 429, 500, 503])
async def test_words_of_ibm_clouds_identity_service_are_shown_without_the_key(status: int) -> None:
    server = FakeWatsonx()
    server.identity_status = status
    with pytest.raises(BackendError) as caught:
        await opened(server, WATSONX | {"api_key": "ibm/key+12 34"})
    assert "was sent" in caught.value.explanation
    assert "..." in caught.value.explanation
    for secret in ("ibm/key+12 34", "ibm%2Fkey%2B12+34"):
        assert secret not in caught.value.explanation
