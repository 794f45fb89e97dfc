"""All dialects decode the same request to the same call, and encode a reply to the same values. Pure."""

import base64
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from backends.contract import (
    Classify,
    Embed,
    EmbedReply,
    EncodeReply,
    PatchGrid,
    Rerank,
    RerankReply,
    Score,
    Truncate,
)
from gateway.api.dialects.cohere import embed as cohere
from gateway.api.dialects.cohere import rerank
from gateway.api.dialects.gemini import dialect as gemini
from gateway.api.dialects.infinity import dialect as infinity
from gateway.api.dialects.ollama import dialect as ollama
from gateway.api.dialects.openai import embeddings as openai
from gateway.api.dialects.openai.embeddings import body_of
from gateway.api.dialects.sie import dialect as sie
from gateway.api.dialects.vllm import dialect as vllm
from gateway.api.dialects.vllm import pooling as vllm_pooling
from gateway.api.server.encoding import Encoding, NumberFormat, json_bytes, msgpack_bytes
from gateway.api.server.inference_api import InferenceApi
from gateway.api.server.request import Request
from gateway.api.wire import tei
from gateway.api.wire.tei import rank_order
from gateway.calls import Call
from gateway.config.schema import Limits
from gateway.lane.slices import Slice, join

many = settings(max_examples=100, deadline=None)
UNUSED: Any = None
CONTEXT: Any = SimpleNamespace(tenant=None)
API = InferenceApi(UNUSED, UNUSED, UNUSED, UNUSED, Limits())

TEXTS = st.lists(st.text(min_size=1, max_size=20), min_size=1, max_size=8)
DIMENSIONS = st.none() | st.integers(1, 4096)
CUTS = st.sampled_from([(None, None), (False, None), (True, Truncate.LEFT), (True, Truncate.RIGHT)])
SIDES = {Truncate.LEFT: "START", Truncate.RIGHT: "END", None: "NONE"}
FLOATS = st.floats(-1, 1, width=32, allow_subnormal=False)
VECTORS = arrays(np.float32, array_shapes(min_dims=2, max_dims=2, max_side=16), elements=FLOATS)
SCORES = arrays(np.float32, st.integers(1, 40), elements=st.sampled_from([0.0, 0.25, 0.5, 1.0]) | FLOATS)


def decoded(body: dict[str, Any], kind: Any) -> Any:
    """Return a body after encoding and decoding. Fields that are None are not sent."""
    sent = {field: value for field, value in body.items() if value is not None}
    return msgspec.json.decode(msgspec.json.encode(sent), type=kind)


def asked(body: Any, name: str | None = "m", api: InferenceApi = API) -> Request[Any]:
    """Return a request whose path names a model."""
    return Request(body, CONTEXT, api, name)


def result_of(call: Coroutine[Any, Any, Call]) -> Call:
    """Return the result of a decoder that never waits, because texts need no vocabulary."""
    with pytest.raises(StopIteration) as ended:
        call.send(None)
    read: Call = ended.value.value
    return read


@many
@given(TEXTS)
def test_a_request_without_options_is_the_same_call_as_one_with_defaults(texts: list[str]) -> None:
    plain = decoded({"input": texts, "model": "m"}, openai.OpenAIEmbeddingsRequest)
    # The id changes nothing of the call, but its presence has all options checked.
    named = msgspec.structs.replace(plain, request_id="r")

    calls = [result_of(openai.decode_embeddings(asked(data, None))) for data in (plain, named)]
    assert [Call(Embed(tuple(texts)), "m")] * 2 == calls


@many
@given(TEXTS, DIMENSIONS, st.sampled_from([None, "query", "document"]))
def test_an_embedding_is_the_same_call_in_every_dialect(
    texts: list[str], dimensions: int | None, role: Any
) -> None:
    call = Call(Embed(tuple(texts), dimensions=dimensions), "m", role=role)
    jina = decoded(
        {"input": [{"text": text} for text in texts], "dimensions": dimensions, "input_type": role},
        openai.OpenAIEmbeddingsRequest,
    )
    plain = decoded({"texts": texts, "output_dimension": dimensions}, dict)
    types = {"query": "search_query", "document": "search_document", None: None}

    assert call == result_of(openai.decode_embeddings(asked(jina)))
    if role is None:
        body = decoded(
            {"input": texts, "model": "m", "dimensions": dimensions}, infinity.InfinityEmbeddingsRequest
        )
        assert call == result_of(infinity.decode_embeddings(asked(body, None, API_WITHOUT_CAPABILITIES)))
        body = decoded({"input": texts, "model": "m", "dimensions": dimensions}, ollama.OllamaEmbedRequest)
        assert call == ollama.decode_embed(asked(body, None, API_WITHOUT_CAPABILITIES))
    tasks = {"query": "RETRIEVAL_QUERY", "document": "RETRIEVAL_DOCUMENT", None: None}
    options = {"outputDimensionality": dimensions, "taskType": tasks[role]}
    requests = [{"content": {"parts": [{"text": text}]}} | options for text in texts]
    batch = decoded({"requests": requests}, gemini.BatchEmbedContentsRequest)
    assert call == result_of(gemini.decode_requests(batch.requests, "m", API))
    if role is not None:
        v2 = decoded({**plain, "input_type": types[role]}, cohere.EmbedV2Request)
        assert call == result_of(cohere.decode_embed(asked(v2)))
    if dimensions is None:
        items = [{"text": text} for text in texts]
        options = {"is_query": None if role is None else role == "query"}
        body = decoded({"items": items, "params": {"options": options}}, sie.SieEncodeRequest)
        v1 = decoded({"texts": texts, "input_type": types[role]}, cohere.EmbedV1Request)
        assert call == result_of(sie.decode_encode(asked(body)))
        assert call == result_of(cohere.decode_embed(asked(v1)))


@many
@given(TEXTS, CUTS)
def test_truncation_is_the_same_call_in_tei_and_cohere(
    texts: list[str], cut: tuple[bool | None, Truncate | None]
) -> None:
    truncate, side = cut
    body = {"inputs": texts, "truncate": truncate, "truncation_direction": side and side.value}
    words = None if truncate is None else SIDES[side]
    v2 = decoded({"texts": texts, "input_type": "clustering", "truncate": words}, cohere.EmbedV2Request)

    call = result_of(cohere.decode_embed(asked(v2)))
    of_tei = result_of(tei.decode_embed(decoded(body, tei.EmbedRequest), "m", UNUSED, API))
    assert (of_tei.truncate, of_tei.side) == (call.truncate, call.side) == cut


@many
@given(st.text(min_size=1, max_size=20), st.lists(st.text(max_size=20), min_size=1, max_size=8))
def test_a_rerank_is_the_same_call_in_every_dialect(query: str, texts: list[str]) -> None:
    call = Call(Rerank(query, tuple(texts)), "m")
    documents = [{"text": text} if i % 2 else text for i, text in enumerate(texts)]
    data = decoded({"query": query, "documents": documents, "top_n": 1}, rerank.RerankRequest)
    items = decoded(
        {"query": {"text": query}, "items": [{"text": text} for text in texts]}, sie.SieScoreRequest
    )

    assert call == result_of(rerank.decode_documents(asked(data), data.documents))
    assert call == result_of(
        tei.decode_rerank(decoded({"query": query, "texts": texts}, tei.TeiRerankRequest), "m", UNUSED, API)
    )
    assert call == result_of(sie.decode_score(asked(items)))
    plain = decoded({"query": query, "documents": texts, "model": "m"}, infinity.InfinityRerankRequest)
    assert call == infinity.decode_rerank(plain, API)


class ApiWithoutCapabilities:
    """An `InferenceApi` without the capabilities of any model."""

    def __getattr__(self, name: str) -> Any:
        return getattr(API, name)

    def capabilities_of(self, *_: Any) -> None:
        """No capabilities."""

    def dimensions_of(self, *_: Any) -> None:
        """No width."""


API_WITHOUT_CAPABILITIES: Any = ApiWithoutCapabilities()


@many
@given(TEXTS)
def test_a_classification_is_the_same_call_in_every_dialect(texts: list[str]) -> None:
    call = Call(Classify(tuple(texts)), "m")
    batch = decoded({"inputs": [[text] for text in texts]}, tei.PredictRequest)
    of_vllm = decoded({"input": texts, "model": "m"}, vllm.VllmClassifyRequest)
    of_pooling = decoded({"input": texts, "task": "classify"}, vllm_pooling.PoolingRequest)
    of_infinity = decoded({"input": texts, "model": "m"}, infinity.InfinityClassifyRequest)

    assert call == result_of(tei.decode_predict(batch, "m", CONTEXT, API_WITHOUT_CAPABILITIES))
    assert call == result_of(vllm.decode_classify(asked(of_vllm, None, API_WITHOUT_CAPABILITIES)))
    assert call == result_of(vllm_pooling.decode_pooling(asked(of_pooling, "m", API_WITHOUT_CAPABILITIES)))
    assert call == infinity.decode_classify(of_infinity, API)


@many
@given(st.text(min_size=1, max_size=20), st.lists(st.text(max_size=20), min_size=1, max_size=8))
def test_pairs_are_the_same_call_under_every_name_and_in_every_shape(query: str, texts: list[str]) -> None:
    call = Call(Score(tuple((query, text) for text in texts)), "m")
    parts = [{"content": [{"type": "text", "text": text}]} for text in texts]
    for body in (
        {"queries": query, "documents": texts},
        {"queries": [query], "items": texts},
        {"data_1": [query] * len(texts), "data_2": texts},
        {"text_1": query, "text_2": parts},
    ):
        data = decoded(body, vllm.VllmScoreRequest)
        assert call == result_of(vllm.decode_score(asked(data, "m", API_WITHOUT_CAPABILITIES)))


@many
@given(TEXTS)
def test_pooling_for_vectors_is_an_embedding(texts: list[str]) -> None:
    body = decoded({"input": texts, "task": "embed"}, vllm_pooling.PoolingRequest)
    raw = decoded({"input": texts, "use_activation": False}, vllm_pooling.PoolingRequest)

    assert Call(Embed(tuple(texts)), "m") == result_of(
        vllm_pooling.decode_pooling(asked(body, "m", API_WITHOUT_CAPABILITIES))
    )
    read = result_of(vllm_pooling.decode_pooling(asked(raw, "m", API_WITHOUT_CAPABILITIES)))
    assert Call(Embed(tuple(texts), normalize=False), "m") == read


def test_only_pages_have_a_grid_of_patches() -> None:
    rows = np.ones((5, 2), np.float32)
    grids = (None, PatchGrid(1, 2, 2))
    reply = EncodeReply(10, multivector=(rows, rows), grids=grids)
    whole = json_bytes(body_of(reply, "m", Encoding(("float",)), reply_id="x"))
    text, page = msgspec.json.decode(whole)["data"]

    assert "patch_grid" not in text
    assert {"first": 1, "rows": 2, "columns": 2} == page["patch_grid"]


@many
@given(VECTORS)
def test_vectors_decode_the_same_from_every_dialect(vectors: np.ndarray) -> None:
    reply = EmbedReply(vectors, 7)
    numbers, packed = [
        msgspec.json.decode(json_bytes(body_of(reply, "m", Encoding((kind,)), reply_id="x")))
        for kind in ("float", "base64")
    ]
    kinds = msgspec.json.decode(json_bytes(cohere.encode_by_type(reply, ["float", "base64"])))
    ids = [None] * len(vectors)
    items = msgspec.json.decode(json_bytes(sie.encode_items(reply, ids, "float32")))
    pooled, pooled64 = [
        msgspec.json.decode(
            json_bytes(vllm_pooling.pooling_items(vllm_pooling.pooled_rows(reply, raw=False), numbers))
        )
        for numbers in (None, NumberFormat())
    ]
    arrays = msgspec.msgpack.decode(msgpack_bytes(sie.encode_items(reply, ids, "float32")))

    for read in (
        [item["embedding"] for item in numbers["data"]],
        [np.frombuffer(base64.b64decode(item["embedding"]), "<f4") for item in packed["data"]],
        [item["data"] for item in pooled],
        [np.frombuffer(base64.b64decode(item["data"]), "<f4") for item in pooled64],
        kinds["float"],
        [np.frombuffer(base64.b64decode(item), "<f4") for item in kinds["base64"]],
        [item["dense"]["values"] for item in items],
        [np.frombuffer(item["dense"]["values"][b"data"], "<f4") for item in arrays],
    ):
        np.testing.assert_array_equal(vectors, np.array(read, np.float32))


@many
@given(SCORES, st.none() | st.integers(0, 50))
def test_scores_decode_the_same_best_first_with_ties_in_order(scores: np.ndarray, top_n: int | None) -> None:
    reply = RerankReply(scores, 7)
    ranks = list(rerank.ranked(reply, top_n, None))
    items = list(sie.score_items(reply, [None] * len(scores)))

    assert (min(top_n or len(scores), len(scores))) == len(ranks)
    assert [float(scores[item["index"]]) for item in ranks] == [
        float(item["relevance_score"]) for item in ranks
    ]
    order = [(-float(item["relevance_score"]), item["index"]) for item in ranks]
    assert sorted(order) == order
    assert len(ranks) == len({item["index"] for item in ranks})
    assert [item["item_id"] for item in items][: len(ranks)] == [f"item-{item['index']}" for item in ranks]
    assert list(range(len(scores))) == [item["rank"] for item in items]


def test_saturated_scores_are_ordered_by_their_logits() -> None:
    # In float32 the sigmoid of each of them is 1.
    logits = np.array([17.0, 40.0, 18.0, 90.0], np.float32)
    reply = RerankReply(np.ones(4, np.float32), 7, (), logits)

    assert [3, 1] == [item["index"] for item in rerank.ranked(reply, 2, None)]
    assert [3, 1, 2, 0] == [item["index"] for item in rerank.ranked(reply, None, None)]
    assert [3, 1, 2, 0] == rank_order(reply)
    names = ["item-3", "item-1", "item-2", "item-0"]
    assert names == [item["item_id"] for item in sie.score_items(reply, [None] * 4)]
    request = infinity.InfinityRerankRequest("q", ["a", "b", "c", "d"], top_n=3)
    ranked = infinity.rank_items(reply, request)
    assert [(3, 1.0), (1, 1.0), (2, 1.0)] == [(item["index"], item["relevance_score"]) for item in ranked]
    # Both parts of a call know their logits, or the scores are all there is.
    parts = [Slice(0, Rerank("q", ("a", "b")), 2, 8), Slice(2, Rerank("q", ("c", "d")), 2, 8)]
    halves = [
        RerankReply(reply.scores[:2], 3, (), logits[:2]),
        RerankReply(reply.scores[2:], 4, (), logits[2:]),
    ]
    joined = join(parts, halves)
    assert isinstance(joined, RerankReply)
    assert [3, 1, 2, 0] == rank_order(joined)
    mixed = join(parts, [halves[0], RerankReply(reply.scores[2:], 4)])
    assert isinstance(mixed, RerankReply)
    assert mixed.logits is None


@pytest.mark.parametrize("packs", [True, False])
@many
@given(TEXTS)
def test_sies_bodies_are_the_same_call_in_json_and_msgpack(packs: bool, texts: list[str]) -> None:
    body = {"items": [{"id": f"{i}", "text": text} for i, text in enumerate(texts)]}
    codec = msgspec.msgpack if packs else msgspec.json

    read = codec.decode(codec.encode(body), type=sie.SieEncodeRequest)
    assert Call(Embed(tuple(texts)), "m") == result_of(sie.decode_encode(asked(read)))
