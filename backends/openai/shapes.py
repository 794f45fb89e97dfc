"""Differences between OpenAI's embeddings API and its relatives, as data. Pure.

Source: OpenAI OpenAPI document 2.3.0; the API references of Cohere (v2), Jina and Voyage; perplexityai 0.36.
A shape contains only what differs in requests and vectors; errors, scores and token counts are read in any of
their forms.
"""

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias
from urllib.parse import urlsplit, urlunsplit

import msgspec

from backends.contract import Truncate
from backends.openai.settings import ApiKind

# Key of `input_type` for inputs whose role is not known.
DEFAULT_TYPE = "default"
Fields: TypeAlias = Mapping[str, Any]
# Fields that request each treatment of inputs that are too long.
Treatments: TypeAlias = Mapping[Truncate, Fields]
NO_FIELDS: Fields = {}


class ApiShape(msgspec.Struct, frozen=True):
    """Form of one API.

    version: its name for operators. prefix: path of a base URL that has none. embeddings, rerank, models:
    paths, as in `ApiSettings`; without `rerank` there is no such route. inputs, type_field: names of the
    fields of texts and of their type. input_type: its word for each role, and for `DEFAULT_TYPE`. numbers:
    fields that request vectors. base64: the same for vectors in base64, None if the API has none.
    typed_reply: replies have the vectors under the name of their type. truncation, rerank_truncation: fields
    for each treatment of inputs that are too long; empty if the API has no such field, otherwise a missing
    treatment is not offered. rerank_fields: constant fields of a rerank. metered: every request costs money,
    so that few probes are sent. media: form of inputs with images, None without them: `objects` (Jina),
    `cohere`, `strings` (NIM), or `content` (Voyage), which texts have, too. chunks: form of documents whose
    chunks are embedded in their context, None without them: `lists` of chunks, which texts have, too, or
    Jina's `field`, with a request for each document. rerank_media: form of pairs with images, None without
    them: `objects`, a text or an image each (Jina), or `passages`, whose query is a text (NIM). dtype: of
    numbers in base64. embed_inputs, rerank_inputs: the most inputs of one request. request_tokens: the most
    tokens of all its inputs. rerank_form: of the texts of a rerank: a query for each document (`pairs`,
    DeepInfra), or `ranking` (NIM).
    """

    version: str = "OpenAI API"
    prefix: str = "/v1"
    embeddings: str = "embeddings"
    rerank: str | None = None
    models: str = "models"
    inputs: str = "input"
    type_field: str = "input_type"
    input_type: Mapping[str, str] = {}
    numbers: Fields = NO_FIELDS
    base64: Fields | None = None
    typed_reply: bool = False
    truncation: Treatments = {}
    rerank_truncation: Treatments = {}
    rerank_fields: Fields = NO_FIELDS
    metered: bool = False
    media: Literal["objects", "cohere", "content", "strings"] | None = None
    chunks: Literal["lists", "field"] | None = None
    rerank_media: Literal["objects", "passages"] | None = None
    dtype: Literal["<f4", "i1"] = "<f4"
    embed_inputs: int | None = None
    rerank_inputs: int | None = None
    request_tokens: int | None = None
    rerank_form: Literal["documents", "pairs", "ranking"] = "documents"

    @property
    def own_fields(self) -> frozenset[str]:
        """Fields that the gateway sets itself, so that `extra_body` may not."""
        groups = (self.numbers, self.base64 or {}, self.rerank_fields)
        cuts = (*self.truncation.values(), *self.rerank_truncation.values())
        names = {name for fields in (*groups, *cuts) for name in fields}
        return frozenset(
            {"model", "query", "queries", "documents", "passages", self.inputs, self.type_field, *names}
        )


BASE64: Fields = {"encoding_format": "base64"}
OPENAI = ApiShape(base64=BASE64)
NIM = ApiShape(
    version="NIM",
    input_type={"query": "query", "document": "passage", DEFAULT_TYPE: "passage"},
    numbers={"encoding_format": "float"},
    base64=BASE64,
    truncation={
        Truncate.ERROR: {"truncate": "NONE"},
        Truncate.LEFT: {"truncate": "START"},
        Truncate.RIGHT: {"truncate": "END"},
    },
    rerank_truncation={Truncate.ERROR: {"truncate": "NONE"}, Truncate.RIGHT: {"truncate": "END"}},
    rerank_inputs=512,
    rerank_form="ranking",
)
SHAPES: dict[ApiKind, ApiShape] = {
    "openai": OPENAI,
    "cohere": ApiShape(
        version="Cohere API",
        prefix="/v2",
        embeddings="embed",
        rerank="rerank",
        inputs="texts",
        # The API requires a type. Texts without a role are documents in most uses.
        input_type={
            "query": "search_query",
            "document": "search_document",
            "classification": "classification",
            "clustering": "clustering",
            DEFAULT_TYPE: "search_document",
        },
        numbers={"embedding_types": ("float",)},
        typed_reply=True,
        truncation={
            Truncate.ERROR: {"truncate": "NONE"},
            Truncate.LEFT: {"truncate": "START"},
            Truncate.RIGHT: {"truncate": "END"},
        },
        # Its rerank always cuts documents.
        rerank_truncation={Truncate.RIGHT: {}},
        metered=True,
        media="cohere",
        embed_inputs=96,
        rerank_inputs=1000,
    ),
    "jina": ApiShape(
        version="Jina API",
        rerank="rerank",
        type_field="task",
        input_type={
            "query": "retrieval.query",
            "document": "retrieval.passage",
            "classification": "classification",
            "similarity": "text-matching",
            "separation": "separation",
        },
        truncation={Truncate.ERROR: {"truncate": False}, Truncate.RIGHT: {"truncate": True}},
        rerank_truncation={Truncate.ERROR: {"truncation": False}, Truncate.RIGHT: {"truncation": True}},
        # By default it sends every document back.
        rerank_fields={"return_documents": False},
        metered=True,
        media="objects",
    ),
    "azure": ApiShape(
        version="Azure OpenAI API",
        prefix="/openai/v1",
        base64=BASE64,
        # Of Cohere's rerank, which always cuts documents.
        rerank_truncation={Truncate.RIGHT: {}},
        metered=True,
        embed_inputs=2048,
        request_tokens=300_000,
        rerank_inputs=1000,
    ),
    "nim": NIM,
    "voyage": ApiShape(
        version="Voyage API",
        rerank="rerank",
        input_type={"query": "query", "document": "document"},
        base64=BASE64,
        truncation={Truncate.ERROR: {"truncation": False}, Truncate.RIGHT: {"truncation": True}},
        rerank_truncation={Truncate.ERROR: {"truncation": False}, Truncate.RIGHT: {"truncation": True}},
        metered=True,
        embed_inputs=1000,
        rerank_inputs=1000,
    ),
    "perplexity": ApiShape(
        version="Perplexity API",
        # It has no numbers in JSON.
        numbers={"encoding_format": "base64_int8"},
        dtype="i1",
        metered=True,
        embed_inputs=512,
        request_tokens=120_000,
    ),
}


def origin_of(address: str) -> str:
    """Return the scheme, host and port of a base URL."""
    parts = urlsplit(address)
    return f"{parts.scheme}://{parts.netloc}"


def path_of(address: str, path: str, prefix: str) -> str:
    """Return the whole path of a route, with the query string of the base URL.

    path: from the root of the server with a leading slash, else below the base URL. prefix: path of a base
    URL that has none.
    """
    parts = urlsplit(address)
    whole = path if path.startswith("/") else f"{parts.path.rstrip('/') or prefix}/{path}"
    return urlunsplit(("", "", whole, parts.query, ""))
