"""Hugging Face's hosted inference: two tasks of a model, at the root and below /hf-inference.

Source: huggingface_hub 1.28.0, inference/_providers/hf_inference.py. Milvus and LangChain4j send the same.
Servers for these tasks are Text Embeddings Inference, whose replies and errors these are.
"""

from functools import partial
from typing import Any

from backends.contract import EmbedReply, RerankReply
from gateway.api.document.fields import QUERY, TEXTS
from gateway.api.server.dialect import Dialect
from gateway.api.server.endpoints import inference
from gateway.api.server.error_bodies import TEI
from gateway.api.server.paths import BELOW_MODEL
from gateway.api.server.request import Request
from gateway.api.server.responses import HttpReply
from gateway.api.wire.tei import (
    EmbedRequest,
    SimilarityRequest,
    compute_headers,
    decode_embed,
    decode_similarity,
)

endpoint = partial(inference, errors=TEI, tags=["Hugging Face"], below_models=False)


class FeatureExtractionRequest(EmbedRequest):
    """Texts to embed, with TEI's fields. options: how a hosted model is called; they change nothing here."""

    options: dict[str, Any] | None = None


class SentenceSimilarityRequest(SimilarityRequest):
    """Sentences to compare with one. options: how a hosted model is called; they change nothing here."""

    options: dict[str, Any] | None = None


def _paths(task: str) -> tuple[str, str]:
    path = f"{BELOW_MODEL}/pipeline/{task}"
    return path, f"/hf-inference{path}"


@endpoint(
    *_paths("feature-extraction"), reply=list[list[float]], description="One vector for each input, in order"
)
async def feature_extraction(request: Request[FeatureExtractionRequest]) -> HttpReply:
    """Turn texts into vectors.

    Returns one vector for each input, also for a single text, as TEI's `/embed` does.
    """
    call = await decode_embed(request.body, request.model, request.context, request.api)
    served, reply = await request.serve(call, EmbedReply)
    return await request.reply(served, reply.vectors, compute_headers(request.context, reply, call))


@endpoint(
    *_paths("sentence-similarity"), reply=list[float], description="A cosine for each sentence, in order"
)
async def sentence_similarity(request: Request[SentenceSimilarityRequest]) -> HttpReply:
    """Compare one sentence with others.

    Returns the cosine of the source sentence with each sentence, as TEI's `/similarity` does.
    """
    call = await decode_similarity(request.body, request.model, request.context, request.api)
    served, reply = await request.serve(call, RerankReply)
    return await request.reply(served, reply.scores, compute_headers(request.context, reply, call))


DIALECT = Dialect(
    handlers=[feature_extraction, sentence_similarity],
    tags={"Hugging Face": "Tasks of hosted models, by the paths of the Hub's inference."},
    examples={
        FeatureExtractionRequest: {"inputs": TEXTS},
        SentenceSimilarityRequest: {"inputs": {"source_sentence": QUERY, "sentences": TEXTS}},
    },
    meanings={
        "FeatureExtractionRequest.options": "`use_cache` and `wait_for_model` change nothing.",
        "SentenceSimilarityRequest.options": "`use_cache` and `wait_for_model` change nothing.",
        "SentenceSimilarityRequest.inputs": "One sentence, and the sentences to compare it with.",
    },
)
