"""Infinity server as an ASGI app, as strict as the real one.

Source: infinity_emb 0.0.78, observed running. Its usage counts characters, and it truncates silently.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from tests.fakes.hooks import LABELS
from tests.fakes.server import ErrorReply, FakeServer, Route, encode_vector, logit_of, token_rows
from tests.fakes.tei import DIMENSIONS, logits_of, vector_of

CHARACTERS_MAX = 122_880
ITEMS_MAX = 2048


class FakeInfinity(FakeServer):
    """Server of one or several models.

    late: a model with one vector per token (ColBERT). images: CLIP's. sound: CLAP's.
    """

    def __init__(
        self,
        *,
        capability: str = "embed",
        models: tuple[str, ...] = ("fake/model",),
        max_tokens: int = 16,
        prefix: str = "",
        late: bool = False,
        images: bool = False,
        sound: bool = False,
    ) -> None:
        super().__init__(prefix=prefix)
        self.images = images
        self.sound = sound
        self.late = late
        self.capability = capability
        self.models = models
        self.max_tokens = max_tokens
        self.batch_size = 4
        self.queued = 0

    def routes(self) -> Mapping[str, Route]:
        """Return the routes of the second command line, `v2`."""
        return {
            "/models": self._models,
            "/embeddings": self._embeddings,
            "/rerank": self._rerank,
            "/classify": self._classify,
        }

    def _models(self, _: dict[str, Any]) -> Any:
        stats = {
            "queue_fraction": self.queued / 32000,
            "queue_absolute": self.queued,
            "results_pending": 0,
            "batch_size": self.batch_size,
        }
        rest = {"object": "model", "owned_by": "infinity", "created": 1, "backend": "torch"}
        capabilities = [self.capability, *self._media()]
        data = [{"id": name, "stats": stats, "capabilities": capabilities} | rest for name in self.models]
        return {"data": data, "object": "list"}

    def _media(self) -> list[str]:
        offered = {"image_embed": self.images, "audio_embed": self.sound}
        return [name for name, is_offered in offered.items() if is_offered]

    def _embeddings(self, body: dict[str, Any]) -> Any:
        modality = body.get("modality", "text")
        if modality != "text":
            return self._encoded(body, modality)
        texts = _strings(body, "input")
        width = body.get("dimensions", 0)
        if not isinstance(width, int):
            raise _invalid("int_type", "dimensions")
        self._check(body, "embed")
        if not 0 <= width <= DIMENSIONS:
            raise _error(400, "<class 'infinity_emb.primitives.MatryoshkaDimError'> -> not a valid range")
        rows = [self._row(self._truncate(text))[: width or None] for text in texts]
        form = body.get("encoding_format", "float")
        data = [
            {"object": "embedding", "embedding": encode_vector(row, form), "index": i}
            for i, row in enumerate(rows)
        ]
        return {"object": "list", "data": data} | self._rest(sum(map(len, texts)))

    def _encoded(self, body: dict[str, Any], modality: str) -> Any:
        sources = body["input"]
        if not all(source.startswith(f"data:{modality}/") for source in sources):
            raise _invalid("value_error", "input")
        if f"{modality}_embed" not in self._media():
            raise _error(400, f"ModelNotDeployedError: model does not support `{modality}_embed`.")
        form = body.get("encoding_format", "float")
        data = [
            {"object": "embedding", "embedding": encode_vector(vector_of(source), form), "index": i}
            for i, source in enumerate(sources)
        ]
        return {"object": "list", "data": data} | self._rest(len(sources))

    def _rerank(self, body: dict[str, Any]) -> Any:
        documents = _strings(body, "documents")
        (query,) = _strings({"query": [body.get("query")]}, "query")
        if body.get("top_n", 1) is not None and body.get("top_n", 1) < 1:
            raise _invalid("greater_than", "top_n")
        self._check(body, "rerank")
        logits = np.array(
            [logit_of(self._truncate(query), self._truncate(document)) for document in documents]
        )
        scores = logits if body.get("raw_scores") else 1 / (1 + np.exp(-logits))
        order = np.argsort(-scores, kind="stable")
        results = [{"relevance_score": float(scores[i]), "index": int(i), "document": None} for i in order]
        return {"object": "rerank", "results": results} | self._rest(len(query) + sum(map(len, documents)))

    def _row(self, text: str) -> Any:
        """Return the vector, or token vectors, of a text."""
        return token_rows(text) if self.late else vector_of(text)

    def _classify(self, body: dict[str, Any]) -> Any:
        if isinstance(body.get("input"), str):
            raise _invalid("list_type", "input")
        texts = _strings(body, "input")
        self._check(body, "classify")
        data = []
        for text in texts:
            logits = np.array(logits_of((self._truncate(text),), len(LABELS)))
            shares = np.exp(logits) / np.exp(logits).sum()
            row = [
                {"score": float(share), "label": label} for share, label in zip(shares, LABELS, strict=True)
            ]
            data.append(sorted(row, key=lambda item: -item["score"]))
        return {"object": "classify", "data": data} | self._rest(sum(map(len, texts)))

    def _truncate(self, text: str) -> str:
        """Strip a text and cut its right end silently."""
        return " ".join(text.split()[: self.max_tokens - 2])

    def _check(self, body: dict[str, Any], capability: str) -> None:
        # A server of one model accepts any name.
        if len(self.models) > 1 and body.get("model") not in self.models:
            raise _error(400, f"Invalid model: {body.get('model')}")
        if capability != self.capability:
            raise _error(400, f"ModelNotDeployedError: model does not support `{capability}`.")

    def _rest(self, characters: int) -> dict[str, Any]:
        usage = {"prompt_tokens": characters, "total_tokens": characters}
        return {"model": self.models[0], "usage": usage, "id": "infinity-1", "created": 1}


def _strings(body: dict[str, Any], field: str) -> list[str]:
    texts = body.get(field)
    if isinstance(texts, str):
        texts = [texts]
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise _invalid("string_type", field)
    stripped = [text.strip() for text in texts]
    if not 1 <= len(stripped) <= ITEMS_MAX:
        raise _invalid("too_long" if stripped else "too_short", field)
    if max(map(len, stripped)) > CHARACTERS_MAX:
        raise _invalid("string_too_long", field)
    return stripped


def _invalid(kind: str, field: str) -> ErrorReply:
    return ErrorReply(422, {"detail": [{"type": kind, "loc": ["body", field], "msg": kind, "input": None}]})


def _error(status: int, message: str) -> ErrorReply:
    return ErrorReply(status, {"error": {"message": message, "type": None, "param": None, "code": status}})
