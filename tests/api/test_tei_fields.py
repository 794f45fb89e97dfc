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
