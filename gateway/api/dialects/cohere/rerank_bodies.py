"""Bodies and replies of Cohere's, Jina's, Voyage's and vLLM's rerank, which share their paths.

Source: cohere-python 7.0.9, Jina's OpenAPI document 2026.04.02, Voyage's API reference and voyageai 0.5.0.
Clients of all but Cohere's v2 call /v1/rerank, so its reply has the fields of Cohere and Jina. A body with
`top_k` is Voyage's, and so is its reply.
"""

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, UnsetType

from backends.contract import Rerank
from gateway.api.server.body import INTEGER_MAX, Integer, ModelName
from gateway.api.wire.conversations import ContentPart, is_media, text_of_parts
from gateway.api.wire.inputs import InputReader
from gateway.api.wire.media import part_of, score_parts
from gateway.api.wire.replies import RerankUsage
from gateway.api.wire.tei import Direction
from gateway.api.wire.vllm import (
    TextTokens,
    VllmOptions,
    check_options,
    instruction_of,
    is_raw,
    length_of,
    truncate_of,
    truncation_side,
)
from gateway.calls import Call, ScoreParts
from gateway.errors import EmptyInput, InvalidInput
from gateway.media.sources import Fetch, PictureSource, SourcePart
from gateway.serve import Served

# 0 means all documents for vLLM's clients. Cohere's and Jina's never send it.
TopN = Annotated[int, msgspec.Meta(ge=0, le=INTEGER_MAX)]
# Source: Jina's OpenAPI document.
DocumentLength = Annotated[int, msgspec.Meta(ge=1, le=8192)]
# Source: Cohere's pricing: one search unit is a query with up to 100 documents.
DOCUMENTS_PER_SEARCH_UNIT = 100
NOT_CUT = (
    "documents were not cut to the requested number of tokens: the model's tokenizer is not known to the "
    "gateway; they are cut at the model's own length only"
)
# Why each of these is refused.
REFUSED = {
    "rank_fields": "join the fields to one text before",
    "max_chunks_per_doc": "a document is not split; cut texts before",
    "return_embeddings": "embed the documents with another request",
}


class Document(msgspec.Struct):
    """A document or query as an object. Other keys are ignored. content: vLLM's form. image: Jina's."""

    text: str | UnsetType = UNSET
    content: list[ContentPart] | UnsetType = UNSET
    image: str | UnsetType = UNSET


# A single document is vLLM's.
Documents = str | Document | list[str | Document]


class RerankOptions(VllmOptions, kw_only=True):
    """Options of every rerank request, with vLLM's fields.

    top_k: Voyage's top_n. max_tokens_per_doc (Cohere, vLLM), max_doc_length (Jina): the most tokens of each
    document. max_tokens_per_query (vLLM): those of the query. truncation: Voyage's switch. priority: Cohere's
    one, of which 0, the highest and default, is interactive, and any other value bulk. The fields of
    `REFUSED` are refused.
    """

    query: str | Document
    model: ModelName | None = None
    top_n: TopN | None = None
    top_k: TopN | UnsetType | None = UNSET
    return_documents: bool | None = None
    max_tokens_per_doc: TextTokens | None = None
    max_doc_length: DocumentLength | None = None
    max_tokens_per_query: TextTokens | None = None
    truncation: bool | None = None
    rank_fields: list[str] | None = None
    max_chunks_per_doc: Integer | None = None
    return_embeddings: bool | None = None


class RerankRequest(RerankOptions, kw_only=True):
    """Body of /v1/rerank and /v2/rerank. documents: strings, objects with `text`, or one of these."""

    documents: Documents


class EitherRerankRequest(RerankOptions, kw_only=True):
    """Body of /rerank: `texts` with TEI's options, or `documents` with Cohere's and Jina's."""

    texts: list[str] | UnsetType = UNSET
    documents: Documents | UnsetType = UNSET
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


class RerankMeta(msgspec.Struct, omit_defaults=True):
    """Cohere's metadata: api_version {version}, billed_units {search_units}, tokens {input_tokens}."""

    api_version: dict[str, str]
    billed_units: dict[str, int]
    tokens: dict[str, int]
    warnings: list[str] | None = None


class RerankResponse(msgspec.Struct):
    """Results, best first. Equal scores are in the request's order."""

    id: str
    model: str
    results: list[RankedDocument]
    usage: RerankUsage
    meta: RerankMeta
    object: str = "list"


class RerankV2Response(msgspec.Struct):
    """Results, best first. Equal scores are in the request's order."""

    id: str
    results: list[RankedDocument]
    meta: RerankMeta


class VoyageResult(msgspec.Struct, omit_defaults=True):
    """Score of one document. index: its place in the request. document: only with `return_documents`."""

    index: int
    relevance_score: float
    document: str | None = None


class VoyageUsage(msgspec.Struct):
    """Tokens after truncation, with special tokens. The query counts with each document."""

    total_tokens: int


class VoyageRerankResponse(msgspec.Struct):
    """Voyage's results, to a request with `top_k`."""

    data: list[VoyageResult]
    model: str
    usage: VoyageUsage
    object: str = "list"


def decode_documents(data: RerankOptions, documents: Documents, name: str | None, api: InputReader) -> Call:
    """Decode a body with `documents`. name: the model in the path.

    An empty document is scored like any other. An empty query is an error.
    Raises: EmptyInput, InvalidInput.
    """
    _check_refused(data)
    query = _text_of(data.query, "query")
    if not query:
        raise EmptyInput("`query` is an empty string", param="query")
    items = items_of(documents)
    api.check_count(len(items), "documents")
    texts = [_text_of(document, f"documents` {index}") for index, document in enumerate(items)]
    return _call_of(data, Rerank(query, api.texts(texts, "documents"), raw_scores=is_raw(data)), name)


async def decode_images(
    data: RerankOptions, documents: Documents, name: str | None, fetch: Fetch, api: InputReader
) -> Call | None:
    """Decode a body whose query or documents have images, None if none has. fetch: as in `fetch_sources`.

    Raises: EmptyInput, InvalidInput, and the errors of `fetch`.
    """
    items = items_of(documents)
    if not any(isinstance(item, Document) and _has_image(item) for item in (data.query, *items)):
        return None
    _check_refused(data)
    for field in ("max_tokens_per_doc", "max_doc_length", "max_tokens_per_query", "top_k"):
        if getattr(data, field) not in (None, 0, UNSET):
            raise InvalidInput(f"`{field}` is for texts: leave it out of a request with images", param=field)
    api.check_count(len(items), "documents")
    query = parts_of_side(data.query, "query")
    sides = [parts_of_side(item, "documents") for item in items]
    work = await score_parts(("query", [query]), ("documents", sides), fetch, raw=is_raw(data))
    return _call_of(data, work, name)


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
    present = [part for part in (item.text, item.image, item.content) if part is not UNSET]
    if len(present) != 1:
        raise InvalidInput(f"an object in `{field}` has one of `text`, `image`, `content`", param=field)
    if not isinstance(item.image, UnsetType):
        return [PictureSource(item.image)]
    if not isinstance(item.content, UnsetType):
        return [part_of(part, field) for part in item.content]
    return [str(item.text)]


def shown_documents(documents: Documents) -> list[Any]:
    """Return the documents of a request with images as a reply shows them."""
    return [_shown(item) for item in items_of(documents)]


def _shown(item: str | Document) -> dict[str, Any]:
    if isinstance(item, str):
        return {"text": item}
    if not isinstance(item.content, UnsetType):
        return {"multi_modal": {"content": msgspec.to_builtins(item.content)}}
    return {"text": item.text} if item.image is UNSET else {"image": item.image}


def _check_refused(data: RerankOptions) -> None:
    """Check that a body has no field that the gateway does not serve. Raises: InvalidInput."""
    for field, way_out in REFUSED.items():
        if getattr(data, field):
            raise InvalidInput(f"`{field}` is not supported: {way_out}", param=field)
    check_options(data, own={"priority"})


def _call_of(data: RerankOptions, work: Rerank | ScoreParts, name: str | None) -> Call:
    """Return the call of a body. Raises: InvalidInput."""
    truncate = data.truncation
    if data.truncate_prompt_tokens is not None:
        truncate = truncate_of(data)
    return Call(
        work,
        name or data.model,
        truncate,
        truncation_side(data),
        bulk=bool(data.priority),
        instruction=instruction_of(data),
        text_tokens=_one_of(data, "max_tokens_per_doc", "max_doc_length"),
        query_tokens=data.max_tokens_per_query or None,
        prompt_tokens=length_of(data),
    )


def _text_of(document: str | Document, place: str) -> str:
    """Return the text of a query or document. place: its field, with its index. Raises: InvalidInput."""
    if isinstance(document, str):
        return document
    field = place.partition("`")[0]
    if not isinstance(document.content, UnsetType) and isinstance(document.text, UnsetType):
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


def with_documents(results: list[dict[str, Any]], documents: Sequence[Any]) -> list[dict[str, Any]]:
    """Return the results with their documents. documents: as they are written, in the request's order."""
    return [result | {"document": documents[result["index"]]} for result in results]


def meta_of(served: Served, documents: int, version: str) -> dict[str, Any]:
    """Return Cohere's metadata of a reply. documents: their number."""
    meta: dict[str, Any] = {
        "api_version": {"version": version},
        "billed_units": {"search_units": -(-documents // DOCUMENTS_PER_SEARCH_UNIT)},
        "tokens": {"input_tokens": served.reply.tokens},
    }
    if not served.is_cut:
        meta["warnings"] = [NOT_CUT]
    return meta
