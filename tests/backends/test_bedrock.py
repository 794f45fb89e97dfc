"""Amazon Bedrock: signatures, bodies of each family, replies, errors and credentials."""

import base64
import io
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import botocore.session
import httpx
import numpy as np
import pytest
from botocore.parsers import create_parser

from backends.bedrock.adapter import region_of
from backends.bedrock.errors import error_type, failure
from backends.bedrock.kind import BedrockSettings
from backends.bedrock.models import AGENT_HOST, FAMILIES, model_of
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
    Score,
    Truncate,
)
from backends.contract.errors import (
    AttemptTimedOut,
    BackendError,
    CredentialRefused,
    InvalidWork,
    ModelNotLoaded,
    ModelNotServed,
    ReplicaFailed,
    ReplicaOverloaded,
    ReplicaUnavailable,
    UnsupportedWork,
)
from backends.http.client import UpstreamResponse
from tests.conftest import remote_backend
from tests.fakes.bedrock import (
    ACCESS_KEY,
    REGION,
    SECRET_KEY,
    SESSION_TOKEN,
    FakeBedrock,
    model_in,
    service_model,
    wide_vector,
)
from tests.fakes.tei import score_of
from tests.pictures import encoded, noise

TITAN = "amazon.titan-embed-text-v2:0"
TITAN_1 = "amazon.titan-embed-text-v1"
TITAN_IMAGE = "amazon.titan-embed-image-v1"
NOVA = "amazon.nova-2-multimodal-embeddings-v1:0"
COHERE_3 = "cohere.embed-multilingual-v3"
COHERE_4 = "us.cohere.embed-v4:0"
COHERE_RERANK = "cohere.rerank-v3-5:0"
AMAZON_RERANK = "amazon.rerank-v1:0"
PROFILE = "arn:aws:bedrock:us-east-1:123456789012:application-inference-profile/abcdef"
EMBEDDERS = (TITAN, TITAN_1, TITAN_IMAGE, NOVA, COHERE_3, COHERE_4)
PICTURE = Image(encoded(noise(9, 7, 1)), "image/png", 9, 7)
SOUND = Audio(b"RIFF", "audio/wav", 0.1)
LONG = "w " * 20
RUNTIME = service_model("bedrock-runtime")

Opens = Callable[..., tuple[Backend, FakeBedrock]]


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """Leave AWS' credentials of the test in the environment, and no others."""
    for name in ("AWS_PROFILE", "AWS_BEARER_TOKEN_BEDROCK", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    return monkeypatch


@pytest.fixture
async def opened(environment: pytest.MonkeyPatch) -> AsyncIterator[Opens]:
    """Return a function that opens the replica of a model at a server of its own."""
    async with AsyncExitStack() as stack:

        def open_model(model: str, key: str | None = None, **settings: Any) -> tuple[Backend, FakeBedrock]:
            server = FakeBedrock(model)
            server.api_key = "a-bedrock-key"
            headers = {} if key is None else {"authorization": f"Bearer {key}"}
            spec = ReplicaSpec(
                "http://api", model, headers, settings=BedrockSettings(region=REGION, **settings)
            )
            backend = remote_backend("bedrock", spec, httpx.ASGITransport(server))
            stack.push_async_callback(backend.aclose)
            return backend, server

        yield open_model


def last_body(server: FakeBedrock) -> dict[str, Any]:
    return server.requests[-1][1]


@pytest.mark.parametrize("model", EMBEDDERS)
async def test_embeds_texts_in_order_with_signed_requests(opened: Opens, model: str) -> None:
    backend, server = opened(model)
    found = await backend.describe(5.0)
    reply = await backend.run(Embed(("a", "b c", "d")), 5.0)

    assert isinstance(reply, EmbedReply)
    prefix = {NOVA: "GENERIC_INDEX", TITAN_IMAGE: ""}.get(model, "")
    suffix = "1024" if model == TITAN_IMAGE else ""
    width = found.dimensions
    assert width is not None
    expected = np.stack([wide_vector(f"{prefix}{text}{suffix}", width) for text in ("a", "b c", "d")])
    np.testing.assert_allclose(
        expected / np.linalg.norm(expected, axis=1, keepdims=True), reply.vectors, rtol=1e-5
    )
    assert 3 + 4 + 3 == reply.tokens
    assert found.metered
    assert {1} if model in {TITAN, TITAN_1, TITAN_IMAGE, NOVA} else {96} == {found.request_inputs}
    assert all({"host", "content-type", "x-amz-date"} <= names for names in server.signed_names)
    assert {model} == set(map(model_in, server.raw_paths))


async def test_asks_a_model_once_whatever_is_described_again(opened: Opens) -> None:
    backend, server = opened(TITAN)
    first = await backend.describe(5.0)
    assert first == await backend.describe(5.0)

    assert 1 == len(server.requests)


@pytest.mark.parametrize("model", [COHERE_RERANK, AMAZON_RERANK])
async def test_scores_every_document_in_its_order(opened: Opens, model: str) -> None:
    backend, server = opened(model)
    found = await backend.describe(5.0)
    documents = ("red", "green and blue", "cyan", "a", "b")
    reply = await backend.run(Rerank("q", documents), 5.0)
    pairs = await backend.run(Score((("q", "red"), ("r", "red"), ("q", "a"))), 5.0)

    assert isinstance(reply, RerankReply)
    assert [score_of("q", text) for text in documents] == pytest.approx(reply.scores.tolist(), abs=1e-6)
    assert isinstance(pairs, RerankReply)
    expected = [score_of("q", "red"), score_of("r", "red"), score_of("q", "a")]
    assert expected == pytest.approx(pairs.scores.tolist(), abs=1e-6)
    # Of five documents the agents' runtime gives three pages.
    pages = [body for path, body in server.requests if path == "/rerank" and len(body["sources"]) == 5]
    assert (3 if model == AMAZON_RERANK else 0) == len(pages)
    # A token for each four bytes of a pair.
    assert 1 + 4 + 2 + 1 + 1 == reply.tokens
    assert any("estimated" in note for note in found.notes)


@pytest.mark.parametrize(
    ("model", "work", "expected"),
    [
        (TITAN, Embed(("a",), dimensions=256), {"inputText": "a", "dimensions": 256, "normalize": True}),
        (TITAN, Embed(("a",), dimensions=100, normalize=False), {"inputText": "a", "normalize": False}),
        (TITAN_1, Embed(("a",), dimensions=256), {"inputText": "a"}),
        (
            TITAN_IMAGE,
            EmbedParts((("a", PICTURE),), dimensions=384),
            {
                "inputText": "a",
                "inputImage": base64.b64encode(PICTURE.data).decode(),
                "embeddingConfig": {"outputEmbeddingLength": 384},
            },
        ),
        (
            NOVA,
            Embed(("a",), prompt_name="query", truncate=Truncate.LEFT),
            {
                "taskType": "SINGLE_EMBEDDING",
                "singleEmbeddingParams": {
                    "embeddingPurpose": "GENERIC_RETRIEVAL",
                    "embeddingDimension": 3072,
                    "text": {"truncationMode": "START", "value": "a"},
                },
            },
        ),
        (
            NOVA,
            EmbedParts(((SOUND,),), dimensions=384),
            {
                "taskType": "SINGLE_EMBEDDING",
                "singleEmbeddingParams": {
                    "embeddingPurpose": "GENERIC_INDEX",
                    "embeddingDimension": 384,
                    "audio": {"format": "wav", "source": {"bytes": base64.b64encode(b"RIFF").decode()}},
                },
            },
        ),
        (
            COHERE_3,
            Embed(("a", "b"), prompt_name="query", truncate=Truncate.LEFT),
            {"texts": ["a", "b"], "input_type": "search_query", "truncate": "START"},
        ),
        (
            COHERE_4,
            Embed(("a",), prompt_name="clustering", truncate=Truncate.LEFT, dimensions=512),
            {
                "texts": ["a"],
                "input_type": "clustering",
                "truncate": "LEFT",
                "embedding_types": ["float"],
                "output_dimension": 512,
            },
        ),
        (
            COHERE_RERANK,
            Rerank("q", ("a", "b")),
            {"api_version": 2, "query": "q", "documents": ["a", "b"], "top_n": 2},
        ),
    ],
    ids=str,
)
async def test_sends_the_fields_of_each_family(
    opened: Opens, model: str, work: Any, expected: dict[str, Any]
) -> None:
    backend, server = opened(model)
    await backend.describe(5.0)
    reply = await backend.run(work, 5.0)

    assert expected == last_body(server)
    if isinstance(reply, EmbedReply) and work.dimensions is not None:
        assert work.dimensions == reply.vectors.shape[1]


async def test_pictures_reach_each_family_in_its_form(opened: Opens) -> None:
    uri = f"data:image/png;base64,{base64.b64encode(PICTURE.data).decode()}"
    backend, server = opened(COHERE_4)
    found = await backend.describe(5.0)
    await backend.run(EmbedParts((("a", PICTURE), ("b",))), 5.0)
    parts = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": uri}]
    assert [{"content": parts}, {"content": [{"type": "text", "text": "b"}]}] == last_body(server)["inputs"]
    assert Operation.EMBED_IMAGE in found.operations

    backend, server = opened(COHERE_3)
    await backend.describe(5.0)
    reply = await backend.run(EmbedParts((("a",), (PICTURE,), ("b",)), prompt_name="query"), 5.0)
    sent = [body for _, body in server.requests[1:]]
    assert {"images": [uri], "input_type": "image"} in sent
    assert {"texts": ["a", "b"], "input_type": "search_query", "truncate": "END"} in sent
    assert isinstance(reply, EmbedReply)
    expected = np.stack([wide_vector(text, 1024) for text in ("a", uri, "b")])
    np.testing.assert_allclose(expected / np.linalg.norm(expected, axis=1)[:, None], reply.vectors, rtol=1e-5)


@pytest.mark.parametrize(
    ("model", "work", "error", "words"),
    [
        (TITAN, Embed(("a",), truncate=Truncate.LEFT), UnsupportedWork, "left end"),
        (TITAN, Embed((LONG,)), InvalidWork, "maximum context length"),
        (TITAN, Embed(("",)), InvalidWork, "refused the input"),
        (TITAN, Embed(("a",), prompt_name="query"), InvalidWork, "no prompt 'query'"),
        (TITAN, Embed(("a",), dimensions=2000), InvalidWork, "`dimensions` is 2000"),
        (TITAN_1, Embed(("a",), normalize=False), UnsupportedWork, "not normalized"),
        (TITAN_1, EmbedParts(((PICTURE,),)), UnsupportedWork, "neither images nor sound"),
        (TITAN_IMAGE, Embed(("a",), dimensions=300), InvalidWork, "256, 384, 1024"),
        (TITAN_IMAGE, EmbedParts((("a", "b"),)), InvalidWork, "one image or both"),
        (TITAN_IMAGE, EmbedParts(((SOUND,),)), UnsupportedWork, "does not embed_audio"),
        (NOVA, Embed((LONG,), truncate=Truncate.ERROR), InvalidWork, "maximum context length"),
        (NOVA, Embed(("a",), prompt_name="similarity"), InvalidWork, "known here: classification"),
        (NOVA, EmbedParts(((Audio(b"x", "audio/flac"),),)), InvalidWork, "audio/flac"),
        (COHERE_4, Embed((LONG,), truncate=Truncate.ERROR), InvalidWork, "maximum context length"),
        (COHERE_4, Rerank("q", ("a",)), UnsupportedWork, "embeds only"),
        (COHERE_RERANK, Embed(("a",)), UnsupportedWork, "does not do that"),
        (COHERE_RERANK, Rerank("q", ("a",), raw_scores=True), UnsupportedWork, "no raw scores"),
        (COHERE_RERANK, Rerank("q", ("a",), truncate=Truncate.ERROR), UnsupportedWork, "no `tokenizer`"),
        (COHERE_RERANK, Rerank("q", ("a",), instruction="i"), UnsupportedWork, "no instruction"),
        (AMAZON_RERANK, Rerank("q", ("a", "")), InvalidWork, "no empty text"),
    ],
    ids=str,
)
async def test_refuses_what_a_family_cannot_do(
    opened: Opens, model: str, work: Any, error: type[BackendError], words: str
) -> None:
    backend, _ = opened(model)
    await backend.describe(5.0)
    with pytest.raises(error, match=words) as caught:
        await backend.run(work, 5.0)

    assert "caller" == caught.value.source


async def test_nova_reports_inputs_that_it_cut(opened: Opens) -> None:
    backend, _ = opened(NOVA)
    await backend.describe(5.0)
    reply = await backend.run(Embed(("a", LONG, "b")), 5.0)

    assert (1,) == reply.truncated


async def test_long_documents_are_cut_at_the_bound_of_rerank(opened: Opens) -> None:
    backend, server = opened(AMAZON_RERANK)
    await backend.describe(5.0)
    await backend.run(Rerank("q", ("x" * 40_000,)), 5.0)

    (source,) = last_body(server)["sources"]
    assert 32_000 == len(source["inlineDocumentSource"]["textDocument"]["text"])


@pytest.mark.parametrize(
    ("truncate", "sent"),
    [(Truncate.RIGHT, "a" * 2048), (Truncate.LEFT, "a" * 2047 + "b"), (Truncate.ERROR, None)],
)
async def test_texts_are_cut_at_the_bound_of_older_models_of_cohere(
    opened: Opens, truncate: Truncate, sent: str | None
) -> None:
    backend, server = opened(COHERE_3)
    await backend.describe(5.0)
    work = Embed(("short", "a" * 3000 + "b"), truncate=truncate)
    if sent is None:
        with pytest.raises(InvalidWork, match="maximum context length") as caught:
            await backend.run(work, 5.0)
        assert 1 == caught.value.input_index
        return
    await backend.run(work, 5.0)
    assert ["short", sent] == last_body(server)["texts"]


# --- names of models


@pytest.mark.parametrize(
    ("name", "family", "path"),
    [
        (TITAN, None, "/model/amazon.titan-embed-text-v2%3A0/invoke"),
        (COHERE_4, None, "/model/us.cohere.embed-v4%3A0/invoke"),
        (
            f"arn:aws:bedrock:us-east-1::foundation-model/{TITAN}",
            None,
            "/model/arn%3Aaws%3Abedrock%3Aus-east-1%3A%3Afoundation-model%2Famazon.titan-embed-text-v2%3A0/invoke",
        ),
        (
            PROFILE,
            "cohere.embed-v4",
            "/model/arn%3Aaws%3Abedrock%3Aus-east-1%3A123456789012%3Aapplication-inference-profile%2Fabcdef/invoke",
        ),
        (AMAZON_RERANK, None, "/rerank"),
    ],
)
def test_paths_are_those_of_botocore(name: str, family: str | None, path: str) -> None:
    model = model_of(name, REGION, BedrockSettings(family=family), is_agent=False)
    assert path == model.path
    if path != "/rerank":
        assert path == botocore_path(name)


def botocore_path(name: str) -> str:
    """Return the path that botocore's own client requests."""
    client = botocore.session.Session().create_client(
        "bedrock-runtime", REGION, aws_access_key_id="a", aws_secret_access_key="b"
    )
    sent: list[str] = []

    def answer(request: Any, **_: Any) -> Any:
        sent.append(request.url)
        from botocore.awsrequest import AWSResponse

        return AWSResponse(request.url, 200, {}, RawBody(b"{}"))

    client.meta.events.register("before-send", answer)
    client.invoke_model(modelId=name, body=b"{}")
    return sent[0].partition("amazonaws.com")[2]


class RawBody(io.BytesIO):
    """Body of a reply as botocore reads it."""

    def stream(self, **_: Any) -> Iterator[bytes]:
        yield self.read()


def test_unknown_models_are_named_with_the_way_out() -> None:
    with pytest.raises(ReplicaFailed, match=r"set `bedrock.family`.*cohere.embed-v4"):
        model_of(PROFILE, REGION, BedrockSettings(), is_agent=False)
    with pytest.raises(ReplicaFailed, match="reranks only"):
        model_of(TITAN, REGION, BedrockSettings(), is_agent=True)


def test_agents_runtime_reranks_with_models_of_cohere() -> None:
    model = model_of(COHERE_RERANK, "eu-central-1", BedrockSettings(), is_agent=True)
    assert f"arn:aws:bedrock:eu-central-1::foundation-model/{COHERE_RERANK}" == model.name
    assert "/rerank" == model.path


@pytest.mark.parametrize(
    ("region", "partition"), [("us-gov-west-1", "aws-us-gov"), ("cn-north-1", "aws-cn"), ("eu-west-1", "aws")]
)
def test_arn_of_a_reranker_is_of_the_partition_of_its_region(region: str, partition: str) -> None:
    model = model_of(AMAZON_RERANK, region, BedrockSettings(), is_agent=True)
    assert f"arn:{partition}:bedrock:{region}::foundation-model/{AMAZON_RERANK}" == model.name
    assert partition == botocore.session.Session().get_partition_for_region(region)


@pytest.mark.parametrize(
    ("address", "region"),
    [
        ("https://bedrock-runtime.us-east-1.amazonaws.com", "us-east-1"),
        (f"https://{AGENT_HOST}.eu-west-3.amazonaws.com", "eu-west-3"),
        ("https://bedrock-runtime-fips.us-gov-west-1.amazonaws.com", "us-gov-west-1"),
        ("https://vpce-0a-1.bedrock-runtime.ap-south-1.vpce.amazonaws.com", "ap-south-1"),
        ("http://127.0.0.1:8000", None),
    ],
)
def test_region_is_read_from_the_address(address: str, region: str | None) -> None:
    assert region == region_of(address)


def test_families_are_in_order_of_length() -> None:
    names = list(FAMILIES)
    for i, name in enumerate(names):
        assert not any(later.startswith(name) for later in names[i + 1 :]), name


# --- credentials


async def test_session_token_is_signed_and_hidden(opened: Opens, environment: pytest.MonkeyPatch) -> None:
    environment.setenv("AWS_SESSION_TOKEN", SESSION_TOKEN)
    backend, server = opened(TITAN)
    await backend.describe(5.0)
    assert all("x-amz-security-token" in names for names in server.signed_names)

    environment.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    backend, _ = opened(TITAN)
    with pytest.raises(CredentialRefused) as caught:
        await backend.describe(5.0)
    shown = caught.value.explanation
    assert "signature does not match" in shown
    assert SESSION_TOKEN not in shown


async def test_key_of_the_environment_goes_before_signatures(
    opened: Opens, environment: pytest.MonkeyPatch
) -> None:
    environment.setenv("AWS_BEARER_TOKEN_BEDROCK", "a-bedrock-key")
    backend, server = opened(TITAN)
    await backend.describe(5.0)
    assert {"Bearer a-bedrock-key"} == {headers["authorization"] for headers in server.headers}

    # The agents' runtime takes signatures only.
    backend, server = opened(AMAZON_RERANK)
    await backend.describe(5.0)
    assert all(headers["authorization"].startswith("AWS4") for headers in server.headers)


async def test_configured_key_is_sent_and_a_wrong_one_hidden(opened: Opens) -> None:
    backend, server = opened(TITAN, key="a-bedrock-key")
    await backend.describe(5.0)
    assert [] == server.signed_names

    backend, _ = opened(TITAN, key="a-wrong-bedrock-key")
    with pytest.raises(CredentialRefused) as caught:
        await backend.describe(5.0)
    assert "Authentication failed" in caught.value.detail
    assert "a-wrong-bedrock-key" not in caught.value.explanation


async def test_credentials_of_a_profile_are_read_again_after_a_refusal(
    opened: Opens, environment: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        environment.delenv(name)
    file = tmp_path / "AWS_SHARED_CREDENTIALS_FILE"
    form = "[prod]\naws_access_key_id = {}\naws_secret_access_key = {}\n"
    file.write_text(form.format("AKIDOLD", "old"))
    backend, _ = opened(TITAN, profile="prod")
    with pytest.raises(CredentialRefused):
        await backend.describe(5.0)
    file.write_text(form.format(ACCESS_KEY, SECRET_KEY))
    assert 1024 == (await backend.describe(5.0)).dimensions


@pytest.mark.parametrize(
    ("profile", "words"), [(None, "no credentials for AWS were found"), ("missing", "cannot be read")]
)
async def test_missing_credentials_are_explained(
    opened: Opens, environment: pytest.MonkeyPatch, profile: str | None, words: str
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        environment.delenv(name)
    backend, server = opened(TITAN, profile=profile)
    with pytest.raises(CredentialRefused, match=words):
        await backend.describe(5.0)
    assert [] == server.headers


# --- errors

INVOKE = RUNTIME.operation_model("InvokeModel")
KINDS: dict[str, type[BackendError]] = {
    "AccessDeniedException": CredentialRefused,
    "ResourceNotFoundException": ModelNotServed,
    "ThrottlingException": ReplicaOverloaded,
    "ModelTimeoutException": AttemptTimedOut,
    "InternalServerException": ReplicaFailed,
    "ServiceUnavailableException": ReplicaUnavailable,
    "ValidationException": InvalidWork,
    "ServiceQuotaExceededException": ReplicaOverloaded,
    "ModelNotReadyException": ModelNotLoaded,
    "ModelErrorException": ReplicaFailed,
}


@pytest.mark.parametrize("place", ["header", "body"])
def test_every_error_of_the_service_model_is_known(place: str) -> None:
    assert {shape.name for shape in INVOKE.error_shapes} == set(KINDS)
    for shape in INVOKE.error_shapes:
        status = shape.metadata["error"]["httpStatusCode"]
        body = {"message": "words"} | ({"__type": f"com.amazon#{shape.name}"} if place == "body" else {})
        headers = {"x-amzn-errortype": f"{shape.name}:http://internal"} if place == "header" else {}
        response = UpstreamResponse(status, headers, json.dumps(body).encode())
        # botocore's parser reads the same type.
        parsed = create_parser("rest-json").parse(
            {"status_code": status, "headers": headers, "body": response.body}, INVOKE.output_shape
        )
        assert shape.name == parsed["Error"]["Code"] == error_type(response)
        error = failure(response)
        assert KINDS[shape.name] is type(error), shape.name
        assert "words" == error.detail
        assert "words" not in error.message


def test_quotas_are_pauses() -> None:
    def error(status: int, kind: str, **headers: str) -> BackendError:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return failure(UpstreamResponse(status, {"x-amzn-errortype": kind, **named}, b'{"message": "m"}'))

    assert 30.0 == error(400, "ServiceQuotaExceededException").retry_after_s
    assert 5.0 == error(429, "ModelNotReadyException").retry_after_s
    assert 7.0 == error(429, "ModelNotReadyException", retry_after="7").retry_after_s
    assert 7.0 == error(429, "ThrottlingException", retry_after="7").retry_after_s
    assert error(429, "ThrottlingException").retry_after_s is None


@pytest.mark.parametrize(
    "message",
    [
        "The provided model identifier is invalid.",
        "Invocation of model ID amazon.x with on-demand throughput isn’t supported.",
    ],
)
def test_refused_model_is_not_the_callers_fault(message: str) -> None:
    body = json.dumps({"message": message}).encode()
    error = failure(UpstreamResponse(400, {"x-amzn-errortype": "ValidationException"}, body))
    assert "upstream" == error.source
