"""Cohere's API, with the rerank paths that its clients share with Jina's, Voyage's and vLLM's."""

from typing import Any

import msgspec

from gateway.api.dialects.cohere import embed, keys, rerank
from gateway.api.dialects.cohere.embed import EmbedV1Request, EmbedV2Request
from gateway.api.dialects.cohere.rerank import EitherRerankRequest, RerankRequest
from gateway.api.document.fields import BULK, QUERY, SIDE, TEXTS, UNSUPPORTED, of_texts
from gateway.api.server.dialect import Dialect

EXAMPLES: dict[type[msgspec.Struct], Any] = {
    EitherRerankRequest: {"query": QUERY, "texts": TEXTS},
    EmbedV1Request: {"model": "bge", "texts": TEXTS, "input_type": "search_document"},
    EmbedV2Request: {
        "model": "bge",
        "texts": TEXTS,
        "input_type": "search_document",
        "embedding_types": ["float"],
    },
    RerankRequest: {"model": "reranker", "query": QUERY, "documents": TEXTS, "top_n": 1},
}
MEANINGS = of_texts("EitherRerankRequest", "RerankRequest") | {
    "embedding_types": "Number formats of the vectors; the reply has one list for each.",
    "images": "Images as `data:` URIs, instead of texts.",
    "kwargs": "Fields of the body once more, as JSON in a string; Xinference's client sends it.",
    "max_chunks_per_doc": "Accepted: documents are not split, as `meta.warnings` says.",
    "max_doc_length": "Number of tokens to which a document is cut.",
    "max_tokens": "Number of tokens to which an input is cut.",
    "overlap_tokens": "Accepted: documents are not split, as `meta.warnings` says.",
    "rank_fields": UNSUPPORTED,
    "return_len": "It changes nothing: `meta.tokens` is always there.",
    "return_embeddings": "Refused if true: a reranker returns scores only.",
    "top_k": "Number of results to return, as Voyage spells `top_n`.",
    "EmbedV1Request.truncate": SIDE,
    "EmbedV2Request.truncate": SIDE,
    "EmbedV2Request.inputs": "Inputs in parts, each of one text; instead of `texts`.",
    "EmbedV2Request.priority": BULK,
    "EitherRerankRequest.priority": BULK,
    "RerankRequest.priority": BULK,
    "CohereInput.content": "One text, or texts and images that the model reads together.",
    "Document.text": "The document.",
    "Document.content": "The document as parts: a text, or images.",
    "Document.image": "The document as an image: base64 or a `data:` URI.",
}
DIALECT = Dialect(
    handlers=[*rerank.HANDLERS, *embed.HANDLERS, *keys.HANDLERS],
    tags={"Cohere and Jina": "Embeddings and rerank as the clients of Cohere and Jina call them."},
    examples=EXAMPLES,
    meanings=MEANINGS,
)
