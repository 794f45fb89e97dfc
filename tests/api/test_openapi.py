"""The OpenAPI document: bodies, replies and errors of each path."""

import asyncio
import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import fields

from gateway.api.dialects.batches import batches as openai_batches
from gateway.api.dialects.cohere import embed as cohere
from gateway.api.dialects.cohere import rerank
from gateway.api.dialects.gemini import dialect as gemini
from gateway.api.dialects.huggingface import dialect as huggingface
from gateway.api.dialects.infinity import dialect as infinity
from gateway.api.dialects.nim import dialect as nim
from gateway.api.dialects.ollama import dialect as ollama
from gateway.api.dialects.openai import embeddings as openai
from gateway.api.dialects.qdrant.body import QdrantRequest
from gateway.api.dialects.sie import dialect as sie
from gateway.api.dialects.tei import operations
from gateway.api.dialects.tei import tokens as tokenize
from gateway.api.dialects.vllm import dialect as vllm
from gateway.api.dialects.vllm import pooling as vllm_pooling
from gateway.api.dialects.voyage import dialect as voyage
from gateway.api.dialects.weaviate import dialect as weaviate
from gateway.api.document.complete import texts_of
from gateway.api.document.fields import MEANINGS
from gateway.api.operators import keys, manager, replicas
from gateway.api.operators.admin import EndUserName
from gateway.api.operators.sign_in import SignInCode
from gateway.api.wire import tei
from gateway.app import ROUTES, SERVED
from gateway.declared.host import CreateInstance
from tests.conftest import CONFIG, KEY, Boots, running_gateway
from tests.fakes.tei import FakeTei

TEXTS = texts_of(SERVED)
# Path of each POST → struct that it decodes. Paths below /models/{name} decode the same as at the root.
BODIES: dict[str, type[msgspec.Struct]] = {
    "/admin/keys": keys.KeyRequest,
    "/admin/keys/{key_id}/rotate": keys.RotateRequest,
    "/admin/usage/forget": EndUserName,
    "/admin/instances": CreateInstance,
    "/ui/sign-on": SignInCode,
    "/admin/registry": manager.RegisterModel,
    "/admin/replicas/drain": replicas.ReplicaBody,
    "/admin/replicas/undrain": replicas.ReplicaBody,
    "/admin/replicas/verify": replicas.VerifyBody,
    "/v1/batches": openai_batches.BatchRequest,
    "/v1/embeddings": openai.OpenAIEmbeddingsRequest,
    "/v1/multi-vector": openai.OpenAIEmbeddingsRequest,
    "/perplexity/v1/embeddings": openai.OpenAIEmbeddingsRequest,
    "/embeddings": openai.OpenAIEmbeddingsRequest,
    "/embed": tei.EmbedRequest,
    "/rerank": rerank.EitherRerankRequest,
    "/v1/rerank": rerank.RerankRequest,
    "/v2/rerank": rerank.RerankRequest,
    "/v1/embed": cohere.EmbedV1Request,
    "/v2/embed": cohere.EmbedV2Request,
    "/v1/encode/{name}": sie.SieEncodeRequest,
    "/v1/score/{name}": sie.SieScoreRequest,
    "/similarity": tei.SimilarityRequest,
    "/tokenize": tokenize.TokenizeRequest,
    "/decode": tokenize.DecodeRequest,
    "/detokenize": vllm.DetokenizeRequest,
    "/embed_all": tei.TeiEncodeRequest,
    "/embed_sparse": tei.TeiSparseRequest,
    "/predict": tei.PredictRequest,
    "/": operations.DefaultRequest,
    "/invocations": operations.DefaultRequest,
    "/endpoints/{name}/invocations": operations.DefaultRequest,
    **{
        f"{prefix}/pipeline/{task}": body
        for prefix in ("", "/hf-inference/models/{name}")
        for task, body in (
            ("feature-extraction", huggingface.FeatureExtractionRequest),
            ("sentence-similarity", huggingface.SentenceSimilarityRequest),
        )
    },
    "/vertex": operations.VertexRequest,
    "": operations.DefaultRequest,
    "/score": vllm.VllmScoreRequest,
    "/v1/score": vllm.VllmScoreRequest,
    "/classify": vllm.VllmClassifyRequest,
    "/pooling": vllm_pooling.PoolingRequest,
    "/infinity/embeddings": infinity.InfinityEmbeddingsRequest,
    "/infinity/embeddings_audio": infinity.InfinityEmbeddingsRequest,
    "/infinity/embeddings_image": infinity.InfinityEmbeddingsRequest,
    "/infinity/rerank": infinity.InfinityRerankRequest,
    "/infinity/classify": infinity.InfinityClassifyRequest,
    "/api/embed": ollama.OllamaEmbedRequest,
    "/qdrant": QdrantRequest,
    "/vectors": weaviate.VectorsRequest,
    "/vectorize": weaviate.VectorizeRequest,
    "/api/embeddings": ollama.OllamaEmbeddingsRequest,
    "/api/show": ollama.OllamaShowRequest,
    "/openai/v1/embeddings": openai.OpenAIEmbeddingsRequest,
    "/openai/embeddings": openai.OpenAIEmbeddingsRequest,
    "/openai/deployments/{name}/embeddings": openai.OpenAIEmbeddingsRequest,
    "/v1/models/{name}:embedContent": gemini.EmbedContentRequest,
    "/v1/models/{name}:batchEmbedContents": gemini.BatchEmbedContentsRequest,
    "/v1beta/models/{name}:embedContent": gemini.EmbedContentRequest,
    "/v1beta/{name}:embedContent": gemini.EmbedContentRequest,
    "/v1beta/{name}:batchEmbedContents": gemini.BatchEmbedContentsRequest,
    "/v1beta/{name}:countTokens": gemini.CountTokensRequest,
    "/v1/models/{name}:countTokens": gemini.CountTokensRequest,
    "/v1beta/models/{name}:countTokens": gemini.CountTokensRequest,
    "/v1/ranking": nim.RankingRequest,
    "/v1/retrieval/{name}/reranking": nim.RankingRequest,
    "/v1/multimodalembeddings": voyage.MultimodalRequest,
    "/v1/contextualizedembeddings": voyage.ContextualizedRequest,
    "/contextualizedembeddings": voyage.ContextualizedRequest,
    "/perplexity/v1/contextualizedembeddings": voyage.ContextualizedRequest,
    "/v1beta/models/{name}:batchEmbedContents": gemini.BatchEmbedContentsRequest,
}
WITHOUT_BODY = [
    "/admin/reload",
    "/admin/drain",
    "/admin/undrain",
    "/admin/batches/{batch_id}/cancel",
    "/v1/batches/{batch_id}/cancel",
    "/v1/check-api-key",
    *(f"/admin/instances/{{name}}/{action}" for action in ("start", "stop", "restart")),
    *(f"/admin/registry/{{name}}/{action}" for action in ("download", "load")),
]
# TEI Manager's statuses; every other operation answers 200.
OTHER_STATUSES = {
    ("post", "/admin/instances"): "201",
    ("post", "/admin/registry"): "201",
    ("delete", "/admin/instances/{name}"): "204",
}


@pytest.fixture(scope="module")
def openapi() -> Any:
    """Return the OpenAPI document as it is served."""

    async def read() -> Any:
        async with running_gateway({"tei-0": FakeTei()}) as gateway:
            replies = [
                await gateway.client.get("/docs/openapi.json", headers={"authorization": ""})
                for _ in range(2)
            ]
        assert [200] * 2 == [reply.status_code for reply in replies]
        # It is the same when it is asked for again.
        assert replies[0].json() == replies[1].json()
        return replies[0].json()

    return asyncio.run(read())


def resolve(schema: dict[str, Any], openapi: dict[str, Any]) -> dict[str, Any]:
    """Return a schema, with a reference replaced by the schema that it names."""
    name = schema.get("$ref", "").rpartition("/")[2]
    target: dict[str, Any] = openapi["components"]["schemas"][name] if name else schema
    return target


def test_every_post_documents_its_body_and_required_fields(openapi: Any) -> None:
    posts = {path: item["post"] for path, item in openapi["paths"].items() if "post" in item}
    for path in WITHOUT_BODY:
        assert "requestBody" not in posts.pop(path)
    form = resolve(posts.pop("/v1/files")["requestBody"]["content"]["multipart/form-data"]["schema"], openapi)
    assert {"purpose", "file"} == set(form["required"])

    assert BODIES.keys() == {path.removeprefix("/models/{name}") for path in posts}
    for path, post in posts.items():
        assert post["requestBody"]["required"] is True, path
        schema = resolve(post["requestBody"]["content"]["application/json"]["schema"], openapi)
        declared = fields(BODIES[path.removeprefix("/models/{name}")])
        assert {field.encode_name for field in declared} == schema["properties"].keys(), path
        assert {field.encode_name for field in declared if field.required} == set(
            schema.get("required", [])
        ), path


def test_every_operation_documents_200_and_not_201(openapi: Any) -> None:
    for path, item in openapi["paths"].items():
        for method, operation in item.items():
            successes = [status for status in operation["responses"] if status.startswith("2")]
            assert [OTHER_STATUSES.get((method, path), "200")] == successes, (method, path)


def test_usage_documents_csv_as_well(openapi: Any) -> None:
    content = openapi["paths"]["/admin/usage"]["get"]["responses"]["200"]["content"]

    assert {"application/json", "text/csv"} == content.keys()


def test_operation_ids_are_unique(openapi: Any) -> None:
    ids = [operation["operationId"] for item in openapi["paths"].values() for operation in item.values()]

    assert len(ids) == len(set(ids))


def test_every_reference_resolves(openapi: Any) -> None:

    def references(value: Any) -> list[str]:
        if isinstance(value, list):
            return [reference for item in value for reference in references(item)]
        if isinstance(value, dict):
            own = [value["$ref"]] if "$ref" in value else []
            return own + [reference for item in value.values() for reference in references(item)]
        return []

    names = {reference.rpartition("/")[2] for reference in references(openapi)}
    assert names
    assert names <= openapi["components"]["schemas"].keys()


def test_documented_errors_have_the_envelopes_that_are_sent(openapi: Any) -> None:
    for path, item in openapi["paths"].items():
        for status, response in item.get("post", {}).get("responses", {}).items():
            if status.startswith("2"):
                continue
            schema = response["content"]["application/json"]["schema"]
            for variant in schema.get("oneOf", [schema]):
                # Litestar documents its own error body by default, which the gateway never sends.
                properties = resolve(variant, openapi)["properties"].keys()
                assert properties & {"error", "message", "detail"}, (path, status)
                assert "status_code" not in properties, (path, status)


async def test_every_declared_path_is_served(boot: Boots, tmp_path: Path) -> None:
    async with boot({"tei-0": FakeTei()}, f"{CONFIG}batches: {{dir: {tmp_path}}}\n") as gateway:
        for path in ROUTES.plain_paths:
            statuses = {
                (await gateway.client.request(method, path)).status_code for method in ("GET", "POST")
            }
            assert statuses not in ({404}, {405}), path


def test_every_declared_path_is_documented_and_every_documented_one_has_its_own_label(openapi: Any) -> None:
    plain = {path for path in openapi["paths"] if "{" not in path}

    assert plain == ROUTES.plain_paths == {ROUTES.parse(path).label for path in plain}


async def test_every_way_to_send_a_key_is_documented_and_taken(boot: Boots, openapi: Any) -> None:
    schemes = openapi["components"]["securitySchemes"]
    assert {"bearer", "basic", None} == {scheme.get("scheme") for scheme in schemes.values()}
    assert [{name: []} for name in schemes] == openapi["security"]
    basic = base64.b64encode(f"any:{KEY}".encode()).decode()
    async with boot({"tei-0": FakeTei()}) as gateway:
        for value in (f"Bearer {KEY}", f"Basic {basic}", KEY):
            reply = await gateway.client.get("/v1/models", headers={"authorization": value})
            assert 200 == reply.status_code, value
        names = {scheme["name"] for scheme in schemes.values() if "name" in scheme}
        assert {"authorization", "api-key", "x-goog-api-key"} == names
        for name in names:
            for key, status in ((KEY, 200), ("wrong", 401)):
                reply = await gateway.client.get("/v1/models", headers={"authorization": "", name: key})
                assert status == reply.status_code, name


def objects(value: Any) -> Iterator[dict[str, Any]]:
    """Yield every object in a JSON value."""
    if isinstance(value, dict):
        yield value
        value = list(value.values())
    for member in value if isinstance(value, list) else ():
        yield from objects(member)


def schemas_of_bodies(openapi: dict[str, Any]) -> dict[str, Any]:
    """Return the schemas of all bodies, and of the objects inside them, by name."""
    schemas = openapi["components"]["schemas"]
    pending = [
        operation["requestBody"]
        for item in openapi["paths"].values()
        for operation in item.values()
        if "requestBody" in operation
    ]
    found: dict[str, Any] = {}
    while pending:
        for member in objects(pending.pop()):
            name = str(member.get("$ref", "")).rpartition("/")[2]
            if name and name not in found:
                found[name] = schemas[name]
                pending.append(schemas[name])
    return found


def test_every_field_of_a_body_has_a_meaning(openapi: Any) -> None:
    found = schemas_of_bodies(openapi)
    assert {body.__name__ for body in BODIES.values()} <= found.keys()
    missing = [
        f"{name}.{field}"
        for name, schema in found.items()
        for field, member in schema.get("properties", {}).items()
        if member.get("description", "Default:").startswith("Default:")
    ]
    assert [] == missing, "describe them in `meanings` of their dialect"


def test_every_number_of_a_body_has_a_bound(openapi: Any) -> None:
    bounds = {"minimum", "maximum", "exclusiveMinimum"}
    unbound = []
    for name, schema in schemas_of_bodies(openapi).items():
        for field, member in schema.get("properties", {}).items():
            kinds = [member, *member.get("oneOf", ())]
            is_number = any(kind.get("type") in {"integer", "number"} for kind in kinds)
            if is_number and not any(bounds & kind.keys() for kind in kinds):
                unbound.append(f"{name}.{field}")
    # Ollama's duration may be any number, and changes nothing.
    assert {"OllamaEmbedRequest.keep_alive", "OllamaEmbeddingsRequest.keep_alive"} == set(unbound)


def test_every_part_belongs_to_a_body(openapi: Any) -> None:
    found = schemas_of_bodies(openapi)
    for place in TEXTS.meanings:
        name, _, field = place.partition(".")
        assert not field or field in found[name]["properties"], place


def test_meanings_and_examples_belong_to_bodies() -> None:
    structs = {body.__name__: {field.encode_name for field in fields(body)} for body in BODIES.values()}

    assert structs.keys() == TEXTS.examples.keys()
    plain = {field for field in TEXTS.meanings if "." not in field}
    assert plain <= set().union(*structs.values())


def test_no_two_dialects_describe_the_same() -> None:
    """A field without its struct is everybody's: two meanings of it are those of `Struct.field`."""
    meanings = [MEANINGS, *(dialect.meanings for dialect in SERVED)]
    tables = (meanings, [dialect.tags for dialect in SERVED], [dialect.examples for dialect in SERVED])
    for table in tables:
        names = [name for of_dialect in table for name in of_dialect]
        assert len(names) == len(set(names))


def test_every_example_is_a_valid_body(openapi: Any) -> None:
    for path, body in BODIES.items():
        below = path.startswith("/pipeline/") or not path
        operation = openapi["paths"]["/models/{name}" * below + path]["post"]
        example = operation["requestBody"]["content"]["application/json"]["example"]
        assert msgspec.convert(example, body) is not None, path


async def test_the_examples_of_the_fake_are_answered(boot: Boots) -> None:
    async with boot({"tei-0": FakeTei()}) as gateway:
        for path in ("/v1/embeddings", "/embed", "/similarity", "/tokenize"):
            example = TEXTS.examples[BODIES[path].__name__]
            body = {name: value for name, value in example.items() if name != "model"}
            reply = await gateway.client.post(path, json=body)
            assert 200 == reply.status_code, (path, reply.text)


def test_the_document_has_no_random_examples(openapi: Any) -> None:
    text = msgspec.json.encode(openapi).decode()

    assert '"example":' in text
    assert '"examples":' not in text


def test_enums_have_names_for_generated_clients(openapi: Any) -> None:
    text = msgspec.json.encode(openapi)
    enums: list[list[Any]] = []

    def collect(members: dict[str, Any]) -> dict[str, Any]:
        enums.append(members.get("enum", []))
        return members

    json.loads(text, object_hook=collect)
    assert any(enums)
    for values in filter(None, enums):
        # Generators name a value by its letters, and take null for a type.
        assert len(values) == len({str(value).lower() for value in values}), values
        assert None not in values


def test_names_in_a_path_are_texts(openapi: Any) -> None:
    operations = [operation for item in openapi["paths"].values() for operation in item.values()]
    parameters = [parameter for operation in operations for parameter in operation.get("parameters", ())]

    assert all(
        {"type": "string"} == parameter["schema"] for parameter in parameters if parameter["in"] == "path"
    )


def test_tags_are_described_and_stand_in_the_order_of_their_use(openapi: Any) -> None:
    names = [tag["name"] for tag in openapi["tags"]]
    operations = [operation for item in openapi["paths"].values() for operation in item.values()]

    dialects = ["OpenAI", "TEI", "Hugging Face", "Cohere and Jina", "vLLM", "Infinity", "Azure", "Gemini"]
    databases = ["Ollama", "Qdrant", "Weaviate"]
    assert [*dialects, *databases, "Batches", "SIE", "Probes", "Instances", "Operators"] == names
    assert "/v1/embeddings" == next(iter(openapi["paths"]))
    assert {tag for operation in operations for tag in operation["tags"]} <= TEXTS.tags.keys()
    assert all(operation["summary"] for operation in operations)


async def test_the_document_tells_which_paths_need_a_key(boot: Boots, openapi: Any) -> None:
    plain = [path for path, item in openapi["paths"].items() if "get" in item and "{" not in path]
    needs = {
        path for path in plain if openapi["paths"][path]["get"].get("security", openapi["security"]) != [{}]
    }
    async with boot({"tei-0": FakeTei()}) as gateway:
        # Through a proxy: programs on the gateway's own machine need no key for the operators' paths.
        headers = {"authorization": "", "x-forwarded-for": "192.0.2.1"}
        replies = [await gateway.client.get(path, headers=headers) for path in plain]

    assert needs == {path for path, reply in zip(plain, replies, strict=True) if reply.status_code == 401}
