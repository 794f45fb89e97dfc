"""LlamaIndex's classes for OpenAI and TEI, those for pictures, and those for other vendors."""

from typing import Any

import openai
import pytest
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.embeddings import MultiModalEmbedding
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
from llama_index.embeddings.cohere import CohereEmbedding
from llama_index.embeddings.google_genai import GoogleGenAIEmbedding
from llama_index.embeddings.jinaai import JinaEmbedding
from llama_index.embeddings.nvidia import NVIDIAEmbedding
from llama_index.embeddings.ollama import OllamaEmbedding
from llama_index.embeddings.openai import OpenAIEmbedding
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.embeddings.siliconflow import SiliconFlowEmbedding
from llama_index.embeddings.text_embeddings_inference import TextEmbeddingsInference
from llama_index.embeddings.voyageai import VoyageEmbedding
from llama_index.postprocessor.cohere_rerank import CohereRerank
from llama_index.postprocessor.jinaai_rerank import JinaRerank
from llama_index.postprocessor.nvidia_rerank import NVIDIARerank
from llama_index.postprocessor.siliconflow_rerank import SiliconFlowRerank
from llama_index.postprocessor.tei_rerank import TextEmbeddingInference

from tests.clients.conftest import (
    FRUIT,
    FRUIT_QUESTION,
    Expected,
    Gateway,
    Pictures,
    assert_ranks,
    assert_vectors,
    run_documented,
)

TEXTS = [f"text number {i}" for i in range(50)]
FOOD = ["car", "apple", "sea", "pear"]
DIMENSIONS = 384


def openai_embedding(gateway: Gateway, **options: Any) -> OpenAIEmbedding:
    """Return LlamaIndex's class for OpenAI, with a model of this gateway."""
    return OpenAIEmbedding(
        model_name=gateway.model, api_key=gateway.key, api_base=f"{gateway.url}/v1", **options
    )


def openai_like_embedding(gateway: Gateway, **options: Any) -> OpenAILikeEmbedding:
    """Return LlamaIndex's class for servers with OpenAI's API."""
    return OpenAILikeEmbedding(
        model_name=gateway.model, api_key=gateway.key, api_base=f"{gateway.url}/v1", **options
    )


def tei_embedding(gateway: Gateway) -> TextEmbeddingsInference:
    """Return LlamaIndex's class for TEI, with the model in the URL."""
    url = f"{gateway.url}/models/{gateway.model}"
    return TextEmbeddingsInference(
        model_name="any", base_url=url, auth_token=gateway.key, text_instruction="", query_instruction=""
    )


@pytest.fixture(params=[openai_embedding, openai_like_embedding, tei_embedding])
def embedding(request: pytest.FixtureRequest, gateway: Gateway) -> BaseEmbedding:
    """Return each of the classes."""
    embedding: BaseEmbedding = request.param(gateway)
    return embedding


def test_batches_come_back_in_order(embedding: BaseEmbedding) -> None:
    vectors = embedding.get_text_embedding_batch(TEXTS)

    assert len(TEXTS) == len(vectors)
    for i in (0, 9, 10, 49):
        assert embedding.get_query_embedding(TEXTS[i]) == pytest.approx(vectors[i], abs=1e-3)


async def test_async_batch_returns_the_same_vectors(embedding: BaseEmbedding) -> None:
    vectors = await embedding.aget_text_embedding_batch(TEXTS[:12])

    for single, async_single in zip(embedding.get_text_embedding_batch(TEXTS[:12]), vectors, strict=True):
        assert single == pytest.approx(async_single, abs=1e-6)


@pytest.mark.parametrize("make", [openai_embedding, openai_like_embedding])
def test_cuts_and_normalizes_fewer_dimensions(gateway: Gateway, make: Any) -> None:
    whole = make(gateway).get_text_embedding("an apple")
    short = make(gateway, dimensions=64).get_text_embedding("an apple")

    length = sum(component * component for component in whole[:64]) ** 0.5
    assert DIMENSIONS == len(whole)
    assert [component / length for component in whole[:64]] == pytest.approx(short, abs=1e-5)


def test_openais_errors_pass_through(gateway: Gateway) -> None:
    embedding = OpenAILikeEmbedding(
        model_name="nowhere", api_key=gateway.key, api_base=f"{gateway.url}/v1", max_retries=0
    )

    with pytest.raises(openai.NotFoundError, match="there is no model 'nowhere' here"):
        embedding.get_text_embedding("a")


@pytest.mark.parametrize("prefix", ["", "Bearer "])
@pytest.mark.parametrize("model", ["all-minilm-l6-v2", "cross"])
def test_tei_rerank_scores_every_node(gateway: Gateway, model: str, prefix: str) -> None:
    # The client sends the token unchanged, with or without the scheme.
    rerank = TextEmbeddingInference(
        base_url=f"{gateway.url}/models/{model}", auth_token=prefix + gateway.key, top_n=3
    )
    nodes = [NodeWithScore(node=TextNode(text=text), score=0.0) for text in FOOD]
    ranked = rerank.postprocess_nodes(nodes, query_bundle=QueryBundle("fruit to eat"))

    scores = [node.score for node in ranked]
    assert 3 == len(ranked)
    assert sorted(scores, reverse=True) == scores
    assert all(scores)
    if model == gateway.model:
        assert {"apple", "pear"} == {node.node.get_content() for node in ranked[:2]}


def cohere_pictures(gateway: Gateway) -> CohereEmbedding:
    """Return LlamaIndex's class for Cohere, with the one model name that it sends images to."""
    return CohereEmbedding(model_name="embed-v4.0", cohere_api_key=gateway.key, base_url=gateway.url)


def jina_pictures(gateway: Gateway) -> JinaEmbedding:
    """Return LlamaIndex's class for Jina; its constructor has no address."""
    embedding = JinaEmbedding(model=gateway.clip, api_key=gateway.key)
    embedding._api.api_url = f"{gateway.url}/v1/embeddings"
    return embedding


def voyage_pictures(gateway: Gateway) -> VoyageEmbedding:
    """Return LlamaIndex's class for Voyage; its constructor has no address."""
    embedding = VoyageEmbedding(model_name="voyage-multimodal-3", voyage_api_key=gateway.key)
    for client in (embedding._client, embedding._aclient):
        client._params["base_url"] = f"{gateway.url}/v1"
    return embedding


@pytest.fixture(params=[cohere_pictures, jina_pictures, voyage_pictures])
def reader(request: pytest.FixtureRequest, gateway: Gateway) -> MultiModalEmbedding:
    """Return each of the classes that read pictures."""
    reader: MultiModalEmbedding = request.param(gateway)
    return reader


async def test_pictures_have_the_vectors_of_the_model(
    reader: MultiModalEmbedding, pictures: Pictures
) -> None:
    pictures.assert_equal([reader.get_image_embedding(str(file)) for file in pictures.files])
    # The asynchronous method of Jina's class does not await its own request (0.7.0).
    if not isinstance(reader, JinaEmbedding):
        found = [await reader.aget_image_embedding(str(file)) for file in pictures.files]
        pictures.assert_equal(found)


def test_jinas_bits_are_those_of_the_vectors(gateway: Gateway) -> None:
    embedding = jina_pictures(gateway)
    embedding._encoding_documents = "ubinary"
    bits = embedding.get_text_embedding("a car")
    embedding._encoding_documents = "float"

    assert [component > 0 for component in embedding.get_text_embedding("a car")] == [
        bit == 1 for bit in bits
    ]


def test_the_documented_lines_embed_and_rank(gateway: Gateway) -> None:
    made = run_documented(gateway, "connect-libraries", "LlamaIndex")
    nodes = [NodeWithScore(node=TextNode(text=text)) for text in TEXTS[:3]]

    assert 384 == len(made["embeddings"].get_text_embedding("a text"))
    assert 3 == len(made["reranker"].postprocess_nodes(nodes, QueryBundle("a text")))


def ranked(reranker: BaseNodePostprocessor) -> list[tuple[int, float | None]]:
    """Return the (index, score) of each text of `FRUIT`, as a reranker returns them."""
    nodes = [NodeWithScore(node=TextNode(text=text), score=0.0) for text in FRUIT]
    found = reranker.postprocess_nodes(nodes, query_bundle=QueryBundle(FRUIT_QUESTION))
    return [(FRUIT.index(node.node.get_content()), node.score) for node in found]


def vendors_reranker(vendor: str, gateway: Gateway, model: str) -> BaseNodePostprocessor:
    """Return the class for a vendor, by the lines of docs/connect-classes.md."""
    options: dict[str, Any] = {"api_key": gateway.key, "model": model, "top_n": len(FRUIT)}
    if vendor == "cohere":
        return CohereRerank(base_url=gateway.url, **options)
    if vendor == "jina":
        return JinaRerank(base_url=f"{gateway.url}/v1", **options)
    return SiliconFlowRerank(base_url=f"{gateway.url}/v1/rerank", **options)


@pytest.mark.parametrize("vendor", ["cohere", "jina", "siliconflow"])
def test_vendors_rerankers_return_the_gateways_scores(
    vendor: str, gateway: Gateway, expected: Expected
) -> None:
    assert_ranks(expected.ranks, ranked(vendors_reranker(vendor, gateway, gateway.model)))
    with pytest.raises(Exception, match="there is no model 'missing'"):
        ranked(vendors_reranker(vendor, gateway, "missing"))


def test_nvidias_reranker_returns_logits(gateway: Gateway, expected: Expected) -> None:
    reranker = NVIDIARerank(base_url=f"{gateway.url}/v1", api_key=gateway.key, model=gateway.cross)

    assert_ranks(expected.logits, ranked(reranker))


def vendors_embedding(vendor: str, gateway: Gateway) -> BaseEmbedding:
    """Return the class for a vendor, by the lines of docs/connect-classes.md, with prompts for roles."""
    if vendor == "google":
        return GoogleGenAIEmbedding(gateway.prompted, gateway.key, http_options={"base_url": gateway.url})
    if vendor == "nvidia":
        return NVIDIAEmbedding(base_url=f"{gateway.url}/v1", model=gateway.prompted, api_key=gateway.key)
    if vendor == "ollama":
        headers = {"Authorization": f"Bearer {gateway.key}"}
        return OllamaEmbedding(gateway.model, gateway.url, client_kwargs={"headers": headers})
    address = f"{gateway.url}/v1/embeddings"
    return SiliconFlowEmbedding(model=gateway.model, api_key=gateway.key, base_url=address)


@pytest.mark.parametrize(
    ("vendor", "has_roles"), [("google", True), ("nvidia", True), ("ollama", False), ("siliconflow", False)]
)
async def test_vendors_embeddings_are_the_gateways(
    vendor: str, has_roles: bool, gateway: Gateway, expected: Expected
) -> None:
    embedding = vendors_embedding(vendor, gateway)
    documents, query = expected.plain, expected.plain[0]
    if has_roles:
        documents, query = expected.documents, expected.query

    assert_vectors(documents, embedding.get_text_embedding_batch(FRUIT))
    assert_vectors(documents, await embedding.aget_text_embedding_batch(FRUIT))
    # NVIDIA's class states a query's role only here.
    assert_vectors([query], [await embedding.aget_query_embedding(FRUIT[0])])
