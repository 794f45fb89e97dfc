"""APIs of vendors in OpenAI's form as an ASGI app, which refuses fields that are not theirs.

Source: the vendors' API references and the request types of their clients; see `docs/backends-cloud.md` for
what was tried against these only.
"""

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np

from backends.openai.settings import VendorName
from tests.fakes.openai import rerank_tokens, scores_of
from tests.fakes.server import ErrorReply, FakeServer, Route, encode_vector
from tests.fakes.tei import tokens_of, vector_of

EMBED = frozenset({"model", "input", "encoding_format", "dimensions"})
RERANK = frozenset({"model", "query", "documents", "top_n", "return_documents"})
PREFIXES: dict[VendorName, str] = {
    "deepinfra": "/v1",
    "fireworks": "/inference/v1",
    "openrouter": "/api/v1",
}
RERANKS = frozenset({"deepinfra", "fireworks", "openrouter", "siliconflow", "together"})
INPUTS_MAX = {"mistral": 256, "openai": 2048, "perplexity": 512, "deepinfra": 1024}


class FakeVendor(FakeServer):
    """One vendor's API. reranks: its model is a reranker."""

    def __init__(self, name: VendorName, *, reranks: bool = False) -> None:
        super().__init__(prefix=PREFIXES.get(name, "/v1"))
        self.name = name
        self.reranks = reranks

    def routes(self) -> Mapping[str, Route]:
        """Return the routes by path without the prefix."""
        embeddings = "/openai/embeddings" if self.name == "deepinfra" else "/embeddings"
        found: dict[str, Route] = {embeddings: self._embed}
        if self.name == "deepinfra":
            found["/inference/m/ranker"] = self._rerank_pairs
        elif self.name in RERANKS:
            found["/rerank"] = self._rerank
        return found

    def _embed(self, body: dict[str, Any]) -> Any:
        if self.reranks:
            raise ErrorReply(400, {"error": {"message": "not an embedding model", "code": "invalid_model"}})
        allowed = EMBED - {"dimensions"} | {"output_dimension"} if self.name == "mistral" else EMBED
        if body.keys() - allowed:
            raise ErrorReply(422, {"detail": [{"msg": f"extra fields: {sorted(body)}"}]})
        texts = body["input"]
        if len(texts) > INPUTS_MAX.get(self.name, len(texts)):
            raise ErrorReply(400, {"object": "error", "message": "Too many inputs in request"})
        form = body.get("encoding_format", "float")
        data = [
            {"object": "embedding", "index": i, "embedding": self._encoded(t, form)}
            for i, t in enumerate(texts)
        ]
        tokens = sum(map(tokens_of, texts))
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return {"object": "list", "data": data, "model": body["model"], "usage": usage}

    def _encoded(self, text: str, form: str) -> Any:
        if self.name != "perplexity":
            return encode_vector(vector_of(text), form)
        if form not in {"base64_int8", "base64_binary"}:
            raise ErrorReply(400, {"error": {"message": f"encoding_format {form}"}})
        vector = vector_of(text)
        levels = np.round(vector / np.abs(vector).max() * 127).astype(np.int8)
        return base64.b64encode(levels.tobytes()).decode()

    def _check_rerank(self, body: dict[str, Any], fields: frozenset[str]) -> None:
        if not self.reranks:
            raise ErrorReply(400, {"error": {"message": "not a reranker", "code": "invalid_model"}})
        if body.keys() - fields:
            raise ErrorReply(422, {"detail": [{"msg": f"extra fields: {sorted(body)}"}]})

    def _rerank(self, body: dict[str, Any]) -> Any:
        self._check_rerank(body, RERANK)
        results, tokens = scores_of(body), rerank_tokens(body)
        if self.name == "fireworks":
            data = [item | {"document": body["documents"][item["index"]]} for item in results]
            usage = {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0}
            return {"object": "list", "model": "accounts/fireworks/models/m", "data": data, "usage": usage}
        if self.name == "siliconflow":
            counted = {"input_tokens": tokens, "output_tokens": 0}
            return {"id": "1", "results": results, "meta": {"billed_units": counted, "tokens": counted}}
        return {"id": "1", "results": results, "usage": {"prompt_tokens": tokens, "total_tokens": tokens}}

    def _rerank_pairs(self, body: dict[str, Any]) -> Any:
        """Score each document with its own query, in the order of the request (DeepInfra)."""
        self._check_rerank(
            body, frozenset({"queries", "documents", "instruction", "service_tier", "webhook"})
        )
        queries, documents = body["queries"], body["documents"]
        if len(queries) != len(documents):
            raise ErrorReply(422, {"detail": {"error": "the number of queries is not that of documents"}})
        whole = {"query": queries[0], "documents": documents}
        scores = {item["index"]: item["relevance_score"] for item in scores_of(whole)}
        return {
            "scores": [scores[index] for index in range(len(documents))],
            "input_tokens": rerank_tokens(whole),
            "request_id": None,
            "inference_status": {"status": "unknown", "runtime_ms": 0, "cost": 0.0, "tokens_input": 0},
        }
