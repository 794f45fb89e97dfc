"""Cohere's, Jina's, Voyage's and vLLM's rerank, which share their paths; TEI's and Weaviate's at /rerank.

Source: cohere-python 7.0.9, Jina's OpenAPI document 2026.04.02, Voyage's API reference and voyageai 0.5.0;
Xinference 4.1's client, SiliconFlow's reference.
Clients of all but Cohere's v2 call /v1/rerank, so its reply has the fields of each: Cohere's and Jina's
`results`, and Voyage's `data`.
"""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import UNSET, UnsetType

from backends.contract import Rerank, RerankReply, ScoreParts
from gateway.api.dialects.cohere.errors import COHERE, RERANK
from gateway.api.server.body import Integer, ModelName
from gateway.api.server.encoding import LazyList
from gateway.api.server.endpoints import inference
from gateway.api.server.error_bodies import TEI
from gateway.api.server.request import Request
from gateway.api.server.responses import HttpReply
from gateway.api.wire.conversations import ContentPart, is_media, text_of_parts
from gateway.api.wire.inputs import Flag, TopN, is_on
from gateway.api.wire.media import one_text, part_of, score_parts
from gateway.api.wire.replies import RerankUsage, rank_list, usage_of_ranks
from gateway.api.wire.tei import (
    Direction,
    TeiRank,
    TeiRerankRequest,
    compute_headers,
    decode_rerank,
    rank_items,
)
from gateway.api.wire.vllm import TextTokens, VllmOptions
from gateway.api.wire.weaviate import WEAVIATE, WeaviateRanking, serve_ranking
from gateway.calls import Call
from gateway.errors import EmptyInput, InvalidInput
from gateway.media.sources import PictureSource, SourcePart
from gateway.serve import Served

# Source: Jina's OpenAPI document.
DocumentLength = Annotated[int, msgspec.Meta(ge=1, le=8192)]
# JSON within JSON, which the bounds on a body's values do not see.
RepeatedFields = Annotated[str, msgspec.Meta(max_length=4096)]
# Source: Cohere's pricing: one search unit is a query with up to 100 documents.
DOCUMENTS_PER_SEARCH_UNIT = 100
NOT_CUT = (
    "documents were not cut to the requested number of tokens: the model's tokenizer is not known to the "
    "gateway; they are cut at the model's own length only"
)
NOT_SPLIT = (
    "documents were not split: `max_chunks_per_doc` and `overlap_tokens` have no effect, and each document "
    "is scored as one text"
)
# Why each of these is refused.
REFUSED = {
    "rank_fields": "join the fields to one text before",
    "return_embeddings": "embed the documents with another request",
}


class Document(msgspec.Struct):
    """A document or query as an object. Other keys are ignored. content: vLLM's form. image: Jina's.

    text and image together are OpenRouter's form of one document.
    """

    takes_other_fields: ClassVar[bool] = True

    text: str | UnsetType = UNSET
    content: list[ContentPart] | UnsetType = UNSET
    image: str | UnsetType = UNSET


# A single document is vLLM's.
Documents = str | Document | list[str | Document]


class RerankOptions(VllmOptions, kw_only=True):
    """Options of every rerank request, with vLLM's fields.

    top_k: Voyage's top_n. max_tokens_per_doc (Cohere, vLLM), max_doc_length (Jina): the most tokens of each
    document. max_tokens_per_query (vLLM): those of the query. truncation: Voyage's switch. priority: Cohere's
    one, of which 0, the highest and default, is interactive, and any other value bulk. max_chunks_per_doc
    (Cohere, Xinference) and overlap_tokens (SiliconFlow): documents are not split, as the reply's
    `meta.warnings` says. return_len (Xinference): the tokens, which every reply has. kwargs (Xinference):
    fields of the body once more, as JSON. The fields of `REFUSED` are refused.
    """

    query: str | Document
    model: ModelName | None = None
    top_n: TopN | None = None
    top_k: TopN | UnsetType | None = UNSET
    return_documents: Flag | None = None
    return_len: Flag | None = None
    max_tokens_per_doc: TextTokens | None = None
    max_doc_length: DocumentLength | None = None
    max_tokens_per_query: TextTokens | None = None
    truncation: bool | None = None
    rank_fields: list[str] | None = None
    max_chunks_per_doc: Integer | None = None
    overlap_tokens: Integer | None = None
    return_embeddings: bool | None = None
    kwargs: RepeatedFields | None = None


class RerankRequest(RerankOptions, kw_only=True):
    """Body of /v1/rerank and /v2/rerank. documents: strings, objects with `text`, or one of these."""

    documents: Documents


class EitherRerankRequest(RerankOptions, kw_only=True):
    """Body of /rerank: `texts` with TEI's options, or `documents` with Cohere's and Jina's.

    property: only Weaviate's clients send it, with `documents` or as the one document.
    """

    texts: list[str] | UnsetType = UNSET
    documents: Documents | UnsetType = UNSET
    property: str | UnsetType | None = UNSET
    truncate: bool | None = None
    truncation_direction: Direction = "right"
    raw_scores: bool = False
    return_text: bool = False


class RankedContent(msgspec.Struct):
    """The parts of a document."""

    content: list[ContentPart]


class ShownDocument(msgspec.Struct, omit_defaults=True):
    """A document in the reply, in the form of the request."""

    text: str | None = None
    image: str | None = None
    multi_modal: RankedContent | None = None


class RankedDocument(msgspec.Struct, omit_defaults=True):
    """Score of one document. index: its place in the request. document: as `return_documents` asks."""

    index: int
    relevance_score: float
    document: ShownDocument | None = None


class VoyageResult(msgspec.Struct, omit_defaults=True):
    """The same in Voyage's form. document: its text, or an image as in `results`; only if it is asked for."""

    index: int
    relevance_score: float
    document: str | ShownDocument | None = None


class RerankMeta(msgspec.Struct, omit_defaults=True):
    """Cohere's metadata: api_version {version}, billed_units {search_units}, tokens {input_tokens}."""

    api_version: dict[str, str]
    billed_units: dict[str, int]
    tokens: dict[str, int]
    warnings: list[str] | None = None


class RerankResponse(msgspec.Struct):
    """Results, best first. Equal scores are in the request's order.

    data: the same for Voyage's clients. object: "rerank" at /rerank, where Infinity's server ranks, and whose
    client accepts no other; "list", as Jina's, at the other paths.
    """

    id: str
    model: str
    results: list[RankedDocument]
    data: list[VoyageResult]
    usage: RerankUsage
    meta: RerankMeta
    object: str = "list"


async def decode_documents(request: Request[Any], documents: Documents) -> Call:
    """Decode a body with `documents`, which may have images.

    An empty document is scored like any other. An empty query is an error.
    Raises: EmptyInput, InvalidInput, and the errors of `Request.fetch`.
    """
    data: RerankOptions = request.body
    items = items_of(documents)
    if any(isinstance(item, Document) and _has_image(item) for item in (data.query, *items)):
        return await _decode_images(request, items)
    _check_refused(data)
    query = _text_of(data.query, "query")
    if not query:
        raise EmptyInput("`query` is an empty string", param="query")
    request.api.check_count(len(items), "documents")
    texts = [_text_of(document, f"documents` {index}") for index, document in enumerate(items)]
    work = Rerank(query, request.api.texts(texts, "documents"), raw_scores=data.is_raw())
    return _call_of(data, work, request.model)


async def _decode_images(request: Request[Any], items: Sequence[str | Document]) -> Call:
    """Decode a body whose query or documents have images. Raises: as `decode_documents`."""
    data: RerankOptions = request.body
    _check_refused(data)
    for field in ("max_tokens_per_doc", "max_doc_length", "max_tokens_per_query"):
        if getattr(data, field) not in (None, 0):
            raise InvalidInput(f"`{field}` is for texts: leave it out of a request with images", param=field)
    request.api.check_count(len(items), "documents")
    query = parts_of_side(data.query, "query")
    sides = [parts_of_side(item, "documents") for item in items]
    work = await score_parts(("query", [query]), ("documents", sides), request.fetch, raw=data.is_raw())
    return _call_of(data, work, request.model)


def items_of(documents: Documents) -> Sequence[str | Document]:
    """Return the documents of a body, which may have one without a list."""
    return documents if isinstance(documents, list) else [documents]


def _has_image(item: Document) -> bool:
    """Return whether a document is an image, or has parts other than texts."""
    return item.image is not UNSET or (not isinstance(item.content, UnsetType) and is_media(item.content))


def parts_of_side(item: str | Document, field: str) -> list[SourcePart]:
    """Return the parts of a query or a document. Raises: InvalidInput."""
    if isinstance(item, str):
        return [item]
    plain = [part for part in (item.text, item.image) if part is not UNSET]
    if bool(plain) is (item.content is not UNSET):
        raise _two_forms(field)
    if not isinstance(item.content, UnsetType):
        return one_text([part_of(part, field) for part in item.content])
    text: list[SourcePart] = [] if isinstance(item.text, UnsetType) else [item.text]
    return text if isinstance(item.image, UnsetType) else [*text, PictureSource(item.image)]


def _two_forms(field: str) -> InvalidInput:
    """Return the refusal of a query or a document with the fields of two forms, or of none."""
    return InvalidInput(f"an object in `{field}` has `text`, `image` or both, or `content`", param=field)


def _shown_document(item: str | Document) -> dict[str, Any]:
    if isinstance(item, str):
        return {"text": item}
    if not isinstance(item.content, UnsetType):
        return {"multi_modal": {"content": msgspec.to_builtins(item.content)}}
    pair = {"text": item.text, "image": item.image}
    return {name: value for name, value in pair.items() if value is not UNSET}


def _check_refused(data: RerankOptions) -> None:
    """Check that a body has no field that the gateway does not serve. Raises: InvalidInput."""
    for field, way_out in REFUSED.items():
        if getattr(data, field):
            raise InvalidInput(f"`{field}` is not supported: {way_out}", param=field)
    _check_kwargs(data)
    data.check(own={"priority"})


def _check_kwargs(data: RerankOptions) -> None:
    """Check that Xinference's `kwargs` only repeats fields of the body. Raises: InvalidInput."""
    try:
        repeated = msgspec.json.decode(data.kwargs or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        raise InvalidInput("`kwargs` is not an object of JSON in a string", param="kwargs") from None
    body = msgspec.to_builtins(data) if repeated else {}
    if any(body.get(field) != value for field, value in repeated.items()):
        raise InvalidInput("`kwargs` has what the body has not: send its fields in the body", param="kwargs")


def _call_of(data: RerankOptions, work: Rerank | ScoreParts, model: str | None) -> Call:
    """Return the call of a body. Raises: InvalidInput."""
    truncate = data.truncation
    if data.truncate_prompt_tokens is not None:
        truncate = data.cuts
    return Call(
        work,
        model,
        truncate,
        data.side,
        bulk=bool(data.priority),
        instruction=data.checked_instruction(),
        text_tokens=_one_of(data, "max_tokens_per_doc", "max_doc_length"),
        query_tokens=data.max_tokens_per_query or None,
        prompt_tokens=data.length,
    )


def _text_of(document: str | Document, place: str) -> str:
    """Return the text of a query or document. place: its field, with its index. Raises: InvalidInput."""
    if isinstance(document, str):
        return document
    field = place.partition("`")[0]
    if not isinstance(document.content, UnsetType):
        if not isinstance(document.text, UnsetType):
            raise _two_forms(field)
        return text_of_parts(document.content, field)
    if isinstance(document.text, UnsetType):
        closed = place if "`" in place else f"{place}`"
        raise InvalidInput(f"`{closed} is an object without `text`", param=field)
    return document.text


def count_of(data: RerankOptions) -> int | None:
    """Return how many results the request asks for, None for all. Raises: InvalidInput."""
    return _one_of(data, "top_n", "top_k")


def _one_of(data: RerankOptions, name: str, other: str) -> int | None:
    """Return the one of two fields of the same meaning that is sent and not 0. Raises: InvalidInput."""
    values: set[int] = {getattr(data, name) or 0, getattr(data, other) or 0} - {0}
    if len(values) > 1:
        raise InvalidInput(f"send `{name}` or `{other}`, one of them", param=other)
    return next(iter(values), None)


def is_voyages(data: RerankOptions) -> bool:
    """Return whether a body is certainly Voyage's, whose clients send `top_k` even without a value."""
    return data.top_k is not UNSET


def ranked(reply: RerankReply, count: int | None, documents: Sequence[Any] | None) -> LazyList:
    """Return at most `count` results, best first; 0 and None: all.

    documents: as they are written, in the request's order; None: they are left out.
    """
    if documents is None:
        return rank_list(reply, count, lambda index, score: {"index": index, "relevance_score": score})
    return rank_list(
        reply,
        count,
        lambda index, score: {"index": index, "relevance_score": score, "document": documents[index]},
    )


def meta_of(served: Served, data: RerankOptions, documents: int, version: str) -> dict[str, Any]:
    """Return Cohere's metadata of a reply. documents: their number."""
    meta: dict[str, Any] = {
        "api_version": {"version": version},
        "billed_units": {"search_units": -(-documents // DOCUMENTS_PER_SEARCH_UNIT)},
        "tokens": {"input_tokens": served.reply.tokens},
    }
    asks_to_split = bool(data.max_chunks_per_doc or data.overlap_tokens)
    if warnings := [NOT_CUT] * (not served.is_cut) + [NOT_SPLIT] * asks_to_split:
        meta["warnings"] = warnings
    return meta


# Litestar's annotation of a response does not accept unions.
ANY_RESPONSE: Any = list[TeiRank] | RerankResponse | WeaviateRanking


def _shown(call: Call, documents: Documents) -> list[Any]:
    """Return the documents of a request as a reply shows them."""
    if isinstance(call.work, Rerank):
        return [{"text": text} for text in call.work.documents]
    return [_shown_document(item) for item in items_of(documents)]


def _shows_documents(data: RerankOptions, version: str) -> bool:
    """Return whether the results have their documents: Jina's do unless the caller asks for none."""
    if data.return_documents is not None:
        return is_on(data.return_documents)
    return version == "1" and not is_voyages(data)


async def _serve(request: Request[Any], documents: Documents, version: str, kind: str = "list") -> HttpReply:
    """Serve a body and reply with the fields that Cohere's, Jina's and Voyage's clients read.

    version: of Cohere's API. kind: the reply's `object`.
    """
    data: RerankOptions = request.body
    call, count = await decode_documents(request, documents), count_of(data)
    served, reply = await request.serve(call, RerankReply)
    shown = texts = None
    if is_on(data.return_documents):
        shown = _shown(call, documents)
        # Only a lone text is a document of Voyage's.
        texts = [document["text"] if document.keys() == {"text"} else document for document in shown]
    elif _shows_documents(data, version):
        # Images are large: without a word from the caller they are not sent back.
        shown = [
            {"text": document["text"]} if "text" in document else {} for document in _shown(call, documents)
        ]
    body = {
        "id": data.request_id or request.context.request_id,
        "object": kind,
        "model": served.route.model,
        "results": ranked(reply, count, shown),
        "data": ranked(reply, count, texts),
        "usage": usage_of_ranks(reply),
        "meta": meta_of(served, data, len(call.work.inputs), version),
    }
    return await request.reply(served, body)


@inference(
    "/v1/rerank",
    errors=RERANK,
    reply=RerankResponse,
    description="Documents, best first",
    tags=["Cohere and Jina"],
)
async def rerank_v1(request: Request[RerankRequest]) -> HttpReply:
    """Rank documents by their relevance to a query.

    Returns the best `top_n` documents, best first, with the fields that Cohere's, Jina's and Voyage's clients
    read.
    """
    return await _serve(request, request.body.documents, "1")


@inference(
    "/v2/rerank",
    errors=COHERE,
    reply=RerankResponse,
    description="Documents, best first",
    tags=["Cohere and Jina"],
)
async def rerank_v2(request: Request[RerankRequest]) -> HttpReply:
    """Rank documents by relevance to a query, using Cohere's v2 API.

    Returns the best `top_n` documents, best first, and the documents themselves only if they are asked for.
    """
    return await _serve(request, request.body.documents, "2")


@inference(
    "/rerank",
    errors={"texts": TEI, "documents": RERANK},
    marks={"property": WEAVIATE},
    reply=ANY_RESPONSE,
    description="To `texts` every text, best first; to `documents` as /v1/rerank; with `property` Weaviate's",
    tags=["TEI"],
)
async def rerank(request: Request[EitherRerankRequest]) -> HttpReply:
    """Rank `texts` (TEI) or `documents` (Cohere, Jina) by their relevance to a query.

    The reply and its errors are in the dialect of the field that the body has: a body with `property` is
    Weaviate's.
    """
    data = request.body
    if not isinstance(data.property, UnsetType):
        return await serve_ranking(request)
    if not isinstance(data.documents, UnsetType):
        if data.raw_scores:
            raise InvalidInput(
                "`raw_scores` belongs to `texts`: with `documents` send `use_activation: false`",
                param="raw_scores",
            )
        return await _serve(request, data.documents, "1", "rerank")
    assert not isinstance(data.texts, UnsetType)
    if not isinstance(data.query, str):
        raise InvalidInput("`query` is a text where `texts` are sent", param="query")
    work = TeiRerankRequest(
        data.query,
        data.texts,
        data.truncate,
        data.truncation_direction,
        raw_scores=data.raw_scores,
        model=data.model,
    )
    call = await decode_rerank(work, request.name, request.context, request.api)
    served, reply = await request.serve(call, RerankReply)
    ranks = rank_items(reply, data.texts if data.return_text else None)
    return await request.reply(served, ranks, compute_headers(request.context, reply, call))


HANDLERS = [rerank_v1, rerank_v2, rerank]
