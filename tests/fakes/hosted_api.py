"""Hosted APIs of Cohere, Jina, Voyage and Perplexity as ASGI apps, which refuse fields that are not theirs.

Source: the providers' API references. Error bodies have their forms.
"""

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from backends.openai.settings import ApiKind, ApiSettings
from tests.fakes.openai import rerank_tokens, scores_of
from tests.fakes.server import ErrorReply, FakeServer, Route, encode_vector
from tests.fakes.tei import tokens_of, vector_of

COHERE = ApiSettings("cohere")
TOKENS_MAX = 16
# Field of documents, and the models that read them.
DOCUMENTS = {"voyage": ("inputs", "voyage-context"), "perplexity": ("input", "pplx-embed-context")}
# Longest list of texts or documents.
INPUTS_MAX = {"cohere": 96, "jina": 2048, "voyage": 1000, "perplexity": 512}


class Provider(msgspec.Struct, frozen=True):
    """Fields and words of one API; required fields of embeddings are in `required`."""

    prefix: str
    embeddings: str
    required: frozenset[str]
    optional: frozenset[str]
    rerank: frozenset[str]
    types: frozenset[str]


RERANK = frozenset({"model", "query", "documents"})
PROVIDERS: dict[str, Provider] = {
    "cohere": Provider(
        "/v2",
        "/embed",
        frozenset({"model", "texts", "input_type", "embedding_types"}),
        frozenset({"truncate", "max_tokens", "output_dimension", "images", "inputs", "priority"}),
        RERANK | {"top_n", "max_tokens_per_doc", "priority"},
        frozenset({"search_document", "search_query", "classification", "clustering"}),
    ),
    "jina": Provider(
        "/v1",
        "/embeddings",
        frozenset({"model", "input"}),
        frozenset({"embedding_type", "task", "dimensions", "normalized", "truncate", "late_chunking"}),
        RERANK | {"top_n", "return_documents", "truncation", "max_doc_length"},
        frozenset({"retrieval.query", "retrieval.passage", "text-matching", "classification", "separation"}),
    ),
    "voyage": Provider(
        "/v1",
        "/embeddings",
        frozenset({"model", "input"}),
        frozenset({"input_type", "truncation", "output_dimension", "output_dtype", "encoding_format"}),
        RERANK | {"top_k", "return_documents", "truncation"},
        frozenset({"query", "document"}),
    ),
    "perplexity": Provider(
        "/v1",
        "/embeddings",
        frozenset({"model", "input", "encoding_format"}),
        frozenset({"dimensions"}),
        frozenset(),
        frozenset(),
    ),
}


class FakeHostedApi(FakeServer):
    """One provider's API.

    embeds: its model has embeddings. images: also of pictures. usage_of_rerank: a rerank reports tokens.
    """

    def __init__(
        self, kind: ApiKind, *, embeds: bool = True, images: bool = False, usage_of_rerank: bool | None = None
    ) -> None:
        self.kind = kind
        self.provider = PROVIDERS[kind]
        super().__init__(prefix=self.provider.prefix)
        self.embeds = embeds
        self.images = images
        self.usage_of_rerank = kind != "cohere" or embeds if usage_of_rerank is None else usage_of_rerank

    def routes(self) -> Mapping[str, Route]:
        """Return the routes by path without the prefix."""
        routes: dict[str, Route] = {self.provider.embeddings: self._embed_any, "/rerank": self._rerank}
        if self.kind == "voyage":
            routes["/multimodalembeddings"] = self._embed_contents
        if self.kind in DOCUMENTS:
            routes["/contextualizedembeddings"] = self._embed_documents
        return routes

    def _embed_any(self, body: dict[str, Any]) -> Any:
        return self._embed_late(body) if body.get("late_chunking") else self._embed(body)

    def _embed(self, body: dict[str, Any]) -> Any:
        provider = self.provider
        if not self.embeds:
            raise self._error(400, "model does not support the embed endpoint")
        if self.kind == "cohere" and not {"images", "inputs"}.isdisjoint(body):
            return self._embed_pictures(body)
        self._check(body, provider.required, provider.optional)
        if self.kind == "jina":
            body = body | {"input": [self._source(item) for item in body["input"]]}
        kind = body.get("task" if self.kind == "jina" else "input_type")
        if kind is not None and kind not in provider.types:
            raise self._error(422, "invalid type of the inputs")
        texts = body["texts" if self.kind == "cohere" else "input"]
        if len(texts) > INPUTS_MAX[self.kind]:
            raise self._error(400, f"at most {INPUTS_MAX[self.kind]} inputs")
        if max(map(tokens_of, texts)) > TOKENS_MAX and not self._cuts(body):
            raise self._error(400, "too many tokens: an input has more than 16")
        rows = [vector_of(" ".join(text.split()[: TOKENS_MAX - 2])) for text in texts]
        tokens = sum(tokens_of(text, TOKENS_MAX) for text in texts)
        if self.kind == "cohere":
            return {
                "id": "1",
                "embeddings": {"float": [row.tolist() for row in rows]},
                "texts": texts,
                "meta": {"api_version": {"version": "2"}, "billed_units": {"input_tokens": float(tokens)}},
            }
        form = body.get("encoding_format", "float")
        data = [{"index": i, "embedding": encoded(row, form)} for i, row in enumerate(rows)]
        return {"object": "list", "data": data, "model": body["model"], "usage": {"total_tokens": tokens}}

    def _embed_late(self, body: dict[str, Any]) -> Any:
        """Embed the texts of a request as the chunks of one document."""
        self._check(body, self.provider.required, self.provider.optional)
        if "v3" not in body["model"]:
            raise self._error(422, "this model has no late chunking")
        texts = body["input"]
        tokens = sum(map(tokens_of, texts))
        if tokens > TOKENS_MAX:
            raise self._error(400, "too many tokens: the document has more than 16")
        data = [{"index": i, "embedding": row.tolist()} for i, row in enumerate(chunk_vectors(texts))]
        return {"object": "list", "data": data, "model": body["model"], "usage": {"total_tokens": tokens}}

    def _embed_documents(self, body: dict[str, Any]) -> Any:
        """Embed the chunks of documents, listed in the wrong order."""
        field, model = DOCUMENTS[self.kind]
        optional = self.provider.optional - {"truncation"} | {"encoding_format"}
        self._check(body, frozenset({"model", field}), optional)
        if not body["model"].startswith(model):
            raise self._error(400, "the model does not support contextualized embeddings")
        form = body.get("encoding_format") or "float"
        data = []
        for index, chunks in enumerate(body[field]):
            if sum(map(tokens_of, chunks)) > TOKENS_MAX:
                raise self._error(400, "too many tokens: a document has more than 16")
            items = [
                {"object": "embedding", "index": i, "embedding": encoded(row, form)}
                for i, row in enumerate(chunk_vectors(chunks))
            ]
            data.append({"object": "list", "index": index, "data": items[::-1]})
        tokens = sum(tokens_of(text) for chunks in body[field] for text in chunks)
        usage = {"total_tokens": tokens}
        return {"object": "list", "data": data[::-1], "model": body["model"], "usage": usage}

    def _source(self, item: Any) -> str:
        """Return the text of an input of Jina's; that of a picture is its base64."""
        if isinstance(item, str):
            return item
        if "image" in item and not self.images:
            raise self._error(422, "this model takes text only")
        return str(item.get("text") or item["image"])

    def _embed_pictures(self, body: dict[str, Any]) -> Any:
        """Embed one image, or texts and images together, as Cohere's older and newer models do."""
        required = frozenset({"model", "input_type", "embedding_types"})
        if not self.images:
            raise self._error(400, "model does not support images")
        if "images" in body:
            self._check(body, required | {"images"}, frozenset({"truncate"}))
            if body["input_type"] != "image" or len(body["images"]) != 1:
                raise self._error(400, "one image of the input type image")
            sources = body["images"]
        else:
            self._check(body, required | {"inputs"}, frozenset({"truncate"}))
            sources = [_source_of(item["content"]) for item in body["inputs"]]
        vectors = [vector_of(source).tolist() for source in sources]
        meta = {"api_version": {"version": "2"}, "billed_units": {"images": 1}}
        return {"id": "1", "embeddings": {"float": vectors}, "images": [], "meta": meta}

    def _embed_contents(self, body: dict[str, Any]) -> Any:
        """Embed the inputs of Voyage's multimodal models, texts or images."""
        optional = frozenset({"input_type", "truncation", "output_encoding"})
        self._check(body, frozenset({"model", "inputs"}), optional)
        sources = [_source_of(item["content"]) for item in body["inputs"]]
        form = "base64" if body.get("output_encoding") else "float"
        data = [
            {"object": "embedding", "index": i, "embedding": encode_vector(vector_of(source), form)}
            for i, source in enumerate(sources)
        ]
        usage = {"text_tokens": 3, "image_pixels": 9, "total_tokens": 3 * len(data)}
        return {"object": "list", "data": data, "model": body["model"], "usage": usage}

    def _cuts(self, body: dict[str, Any]) -> bool:
        """Return whether long inputs are cut; the providers have different defaults."""
        match self.kind:
            case "cohere":
                return str(body.get("truncate", "END")) != "NONE"
            case "jina":
                return bool(body.get("truncate", False))
        return bool(body.get("truncation", True))

    def _rerank(self, body: dict[str, Any]) -> Any:
        self._check(body, RERANK, self.provider.rerank)
        sources = [self._ranked(item, body["model"]) for item in (body["query"], *body["documents"])]
        pairs = {"query": sources[0], "documents": sources[1:]}
        results, tokens = scores_of(pairs), rerank_tokens(pairs)
        units = {"search_units": 1}
        if self.kind == "cohere":
            counted = {"tokens": {"input_tokens": tokens}} if self.usage_of_rerank else {}
            return {"id": "1", "results": results, "meta": {"billed_units": units} | counted}
        if self.kind == "voyage":
            return {"object": "list", "data": results, "model": "m", "usage": {"total_tokens": tokens}}
        if body.get("return_documents", True):
            results = [item | {"document": {"text": body["documents"][item["index"]]}} for item in results]
        return {"model": "m", "object": "list", "usage": {"total_tokens": tokens}, "results": results}

    def _ranked(self, item: Any, model: str) -> str:
        """Return the text of a query or document; that of an image, which one model of Jina's reads."""
        if isinstance(item, str):
            return item
        if (self.kind, model, list(item)) != ("jina", "jina-reranker-m0", ["image"]):
            raise self._error(422, "a query or document is a string")
        return str(item["image"])

    def _check(self, body: dict[str, Any], required: frozenset[str], optional: frozenset[str]) -> None:
        if required - body.keys() or body.keys() - required - optional:
            raise self._error(422, f"fields: {sorted(body)}")

    def _error(self, status: int, message: str) -> ErrorReply:
        return ErrorReply(status, {"message" if self.kind == "cohere" else "detail": message})


def encoded(row: Any, form: str) -> Any:
    """Return a vector in a format of an API."""
    if form != "base64_int8":
        return encode_vector(row, form)
    return base64.b64encode(np.rint(row / np.abs(row).max() * 127).astype(np.int8).tobytes()).decode()


def chunk_vectors(chunks: Sequence[str]) -> list[Any]:
    """Return the vector of each chunk of a document, which depends on all of them."""
    whole = " ".join(chunks)
    return [vector_of(text if len(chunks) == 1 else f"{text}: {whole}") for text in chunks]


def _source_of(content: list[dict[str, Any]]) -> str:
    """Return the parts of an input as one text; that of a picture is its address."""
    sources = []
    for part in content:
        source = part[part["type"]]
        sources.append(source["url"] if isinstance(source, dict) else source)
    return " ".join(sources)
