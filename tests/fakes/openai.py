"""Server of OpenAI's embeddings API as an ASGI app, as strict as OpenAI's own, with options for others.

Source: OpenAI OpenAPI document 2.3.0. Unknown fields are refused, and no input is ever truncated.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from tests.fakes.server import ErrorReply, FakeServer, Route, encode_vector, logit_of
from tests.fakes.tei import DIMENSIONS, tokens_of, vector_of

FIELDS = frozenset({"model", "input", "encoding_format", "dimensions", "user"})


class FakeOpenAI(FakeServer):
    """Server of the embeddings API.

    models: the model list; None if the server has none. base64: it accepts that encoding_format. usage: its
    replies contain usage. cuts: it truncates long inputs silently. embeds: its model has embeddings. reranks:
    it scores documents at /rerank; logits: as logits. fields: those of a request for embeddings.
    """

    def __init__(
        self,
        *,
        models: tuple[str, ...] | None = ("fake-model",),
        prefix: str = "/v1",
        max_tokens: int = 16,
        base64: bool = True,
        usage: bool = True,
        cuts: bool = False,
        embeds: bool = True,
        reranks: bool = False,
        logits: bool = False,
        fields: frozenset[str] = FIELDS,
    ) -> None:
        super().__init__(prefix=prefix)
        self.models = models
        self.max_tokens = max_tokens
        self.base64 = base64
        self.usage = usage
        self.cuts = cuts
        self.embeds = embeds
        self.reranks = reranks
        self.logits = logits
        self.fields = fields

    def routes(self) -> Mapping[str, Route]:
        """Return the routes; some servers have no model list."""
        posts: dict[str, Route] = {"/embeddings": self._embeddings}
        if self.reranks:
            posts["/rerank"] = self._rerank
        return posts if self.models is None else posts | {"/models": self._models}

    def _rerank(self, body: dict[str, Any]) -> Any:
        if body.keys() - {"model", "query", "documents", "top_n"}:
            raise _error(400, f"Unrecognized request arguments: {body.keys()}")
        reply: dict[str, Any] = {"model": body["model"], "results": scores_of(body, logits=self.logits)}
        tokens = rerank_tokens(body)
        return reply | ({"usage": {"prompt_tokens": tokens, "total_tokens": tokens}} if self.usage else {})

    def _models(self, _: dict[str, Any]) -> Any:
        data = [{"id": name, "object": "model", "created": 1, "owned_by": "o"} for name in self.models or ()]
        return {"object": "list", "data": data}

    def _embeddings(self, body: dict[str, Any]) -> Any:
        if not self.embeds:
            raise _error(400, "This model does not support embeddings.")
        if body.keys() - self.fields:
            raise _error(400, f"Unrecognized request arguments: {body.keys() - self.fields}")
        if self.models is not None and body.get("model") not in self.models:
            raise _error(404, "The model does not exist.", code="model_not_found")
        form = body.get("encoding_format", "float")
        if form not in (("float", "base64") if self.base64 else ("float",)):
            raise _error(400, "encoding_format: unknown")
        texts = self._texts(body.get("input"))
        rows = [vector_of(" ".join(text.split()[: self.max_tokens - 2])) for text in texts]
        if "dimensions" in body and not 1 <= body["dimensions"] <= DIMENSIONS:
            raise _error(400, "dimensions: out of range")
        data = [
            {"object": "embedding", "index": i, "embedding": encode_vector(r, form)}
            for i, r in enumerate(rows)
        ]
        tokens = sum(tokens_of(text, self.max_tokens) for text in texts)
        usage = {"usage": {"prompt_tokens": tokens, "total_tokens": tokens}} if self.usage else {}
        return {"object": "list", "data": data, "model": "fake-model"} | usage

    def _texts(self, texts: Any) -> list[str]:
        texts = [texts] if isinstance(texts, str) else texts
        if not isinstance(texts, list) or not 1 <= len(texts) <= 2048:
            raise _error(400, "'$.input' is invalid.", param="input")
        if not all(isinstance(text, str) and text for text in texts):
            raise _error(400, "'$.input' is invalid.", param="input")
        longest = max(map(tokens_of, texts))
        if longest > self.max_tokens and not self.cuts:
            raise _error(
                400,
                f"This model's maximum context length is {self.max_tokens} tokens, however you requested "
                f"{longest} tokens.",
            )
        return texts


def scores_of(body: dict[str, Any], *, logits: bool = False) -> list[dict[str, Any]]:
    """Return the results of a rerank, the best first."""
    values = np.array([logit_of(body["query"], document) for document in body["documents"]])
    scores = (values if logits else 1 / (1 + np.exp(-values))).tolist()
    results = [{"index": index, "relevance_score": score} for index, score in enumerate(scores)]
    return sorted(results, key=lambda result: -result["relevance_score"])


def rerank_tokens(body: dict[str, Any]) -> int:
    """Return the tokens of all pairs: their words and three special tokens each."""
    return sum(len(f"{body['query']} {document}".split()) + 3 for document in body["documents"])


def _error(status: int, message: str, *, param: str | None = None, code: str | None = None) -> ErrorReply:
    error = {"message": message, "type": "invalid_request_error", "param": param, "code": code}
    return ErrorReply(status, {"error": error})
