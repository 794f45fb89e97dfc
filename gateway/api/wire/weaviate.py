"""Weaviate's containers: the form of their errors, and rerank, whose path they share with other dialects.

Source: weaviate 1.33, module reranker-transformers; weaviate/reranker-transformers 1.3.
"""

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from backends.contract import Rerank, RerankReply
from gateway.api.server.error_bodies import ErrorFormat
from gateway.api.server.request import Request
from gateway.api.server.responses import HttpReply
from gateway.calls import Call
from gateway.errors import EmptyInput, InvalidInput


class WeaviateError(msgspec.Struct):
    """Error of a container: one sentence. kind: as in `FACTS`."""

    error: str
    kind: str


WEAVIATE = ErrorFormat("weaviate", WeaviateError, lambda error: WeaviateError(error.message, error.kind))


class WeaviateScore(msgspec.Struct):
    """Score of one document, which is repeated."""

    document: str
    score: float


class WeaviateRanking(msgspec.Struct):
    """Scores in the order of the documents; or the one score of `property` in a request without them."""

    query: str
    scores: list[WeaviateScore] | UnsetType = UNSET
    property: str | UnsetType = UNSET
    score: float | UnsetType = UNSET


# Of a body of /rerank with `property`. Fields of other dialects have no meaning there.
FIELDS = ("query", "documents", "property", "model")


async def serve_ranking(request: Request[Any]) -> HttpReply:
    """Serve a body of /rerank with `property`: Weaviate's clients send it empty, next to the documents.

    Raises: EmptyInput, InvalidInput, GatewayError.
    """
    data = request.body
    for field in msgspec.structs.fields(data):
        if field.name not in FIELDS and getattr(data, field.name) != field.default:
            raise InvalidInput(f"`{field.name}` has no meaning next to `property`", param=field.name)
    if not isinstance(data.query, str) or not data.query:
        raise EmptyInput("`query` is a text that is not empty where `property` is sent", param="query")
    has_documents = data.documents is not UNSET
    documents = data.documents if has_documents else [data.property or ""]
    if not isinstance(documents, list) or not all(isinstance(document, str) for document in documents):
        raise InvalidInput("`documents` are texts where `property` is sent", param="documents")
    work = Rerank(data.query, request.api.texts(documents, "documents"))
    served, reply = await request.serve(Call(work, request.model), RerankReply)
    scores = reply.scores
    body: dict[str, Any] = {"query": data.query}
    if not has_documents:
        return await request.reply(served, body | {"property": documents[0], "score": scores[0]})
    ranks = [{"document": text, "score": scores[index]} for index, text in enumerate(documents)]
    return await request.reply(served, body | {"scores": ranks})
