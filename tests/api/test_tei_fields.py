"""Every field that TEI documents is taken by the body of the same route.

Source: TEI 1.9.3, docs/openapi.json and router/src/http/types.rs.
"""

from typing import Any

import pytest
from msgspec.structs import fields

from gateway.api.dialects.cohere import rerank
from gateway.api.dialects.openai.embeddings import OpenAIEmbeddingsRequest
from gateway.api.dialects.tei import operations
from gateway.api.dialects.tei import tokens as tokenize
from gateway.api.dialects.tei.info import InfoResponse
from gateway.api.wire import tei
from tests.conftest import Boots
from tests.fakes.hooks import SPLADE
from tests.fakes.tei import FakeTei

TRUNCATION = {"truncate", "truncation_direction"}
EMBED = {"inputs", "prompt_name", "normalize", "dimensions", *TRUNCATION}
ENCODE = {"inputs", "prompt_name", *TRUNCATION}
PREDICT = {"inputs", "raw_scores", *TRUNCATION}
RERANK = {"query", "texts", "raw_scores", "return_text", *TRUNCATION}
SIMILARITY = {"inputs", "parameters"}
INFO = {
    "model_id",
    "model_sha",
    "model_dtype",
    "served_model_name",
    "model_type",
    "max_concurrent_requests",
    "max_input_length",
    "max_batch_tokens",
    "max_batch_requests",
    "max_client_batch_size",
    "auto_truncate",
    "tokenization_workers",
    "version",
    "sha",
    "docker_label",
}
# Struct → the fields that TEI has there.
DOCUMENTED: dict[Any, set[str]] = {
    tei.EmbedRequest: EMBED,
    tei.TeiEncodeRequest: ENCODE,
    tei.PredictRequest: PREDICT,
    tei.TeiRerankRequest: RERANK,
    rerank.EitherRerankRequest: RERANK,
    tei.SimilarityRequest: SIMILARITY,
    tei.SimilarityInputs: {"source_sentence", "sentences"},
    tei.SimilarityParameters: {"prompt_name", *TRUNCATION},
    tokenize.TokenizeRequest: {"inputs", "add_special_tokens", "prompt_name"},
    tokenize.DecodeRequest: {"ids", "skip_special_tokens"},
    operations.DefaultRequest: EMBED | ENCODE | PREDICT | RERANK | SIMILARITY,
    operations.VertexRequest: {"instances"},
    OpenAIEmbeddingsRequest: {"input", "model", "user", "encoding_format", "dimensions"},
    InfoResponse: INFO,
}


@pytest.mark.parametrize("struct", DOCUMENTED, ids=lambda struct: struct.__name__)
def test_every_documented_field_is_taken(struct: Any) -> None:
    assert set() == DOCUMENTED[struct] - {field.encode_name for field in fields(struct)}


@pytest.mark.parametrize(
    "struct",
    [struct for struct in vars(tei).values() if isinstance(struct, type) and struct in DOCUMENTED],
    ids=str,
)
def test_a_field_of_the_gateways_own_is_the_model_only(struct: Any) -> None:
    own = {field.encode_name for field in fields(struct)} - DOCUMENTED[struct]

    assert own <= {"model"}


@pytest.mark.parametrize("path", ["/embed", "/embed_sparse", "/embed_all", "/similarity", "/tokenize", "/"])
async def test_an_empty_name_of_a_prompt_is_refused(boot: Boots, path: str) -> None:
    inputs = {"source_sentence": "a", "sentences": ["b"]} if path == "/similarity" else "a"
    named = {"prompt_name": ""}
    body = {"inputs": inputs} | ({"parameters": named} if path == "/similarity" else named)
    async with boot({"tei-0": FakeTei()}) as gateway:
        reply = await gateway.post(path, body)

    assert (422, "Validation") == (reply.status_code, reply.json()["error_type"])
    assert "prompt_name" in reply.json()["error"]


async def test_the_table_of_differences_from_tei_is_true(boot: Boots) -> None:
    sparse = {"tei-0": FakeTei(model_type=SPLADE), "tei-1": FakeTei(model_type=SPLADE)}
    async with boot({"tei-0": FakeTei()}) as gateway:
        plain = await gateway.client.post(
            "/embed", content=b'{"inputs": "a"}', headers={"content-type": "text/plain"}
        )
        nothing = await gateway.post("/vertex", {"instances": []})
        info = (await gateway.client.get("/info")).json()
    async with boot(sparse) as gateway:
        similarity = await gateway.post(
            "/similarity", {"inputs": {"source_sentence": "a", "sentences": ["b"]}}
        )

    assert [200, 400, 424] == [reply.status_code for reply in (plain, nothing, similarity)]
    assert "Empty" == nothing.json()["error_type"]
    assert (None, None, 1) == (info["max_batch_requests"], info["sha"], info["tokenization_workers"])
