"""TEI server as an ASGI app, as strict as the real one, with hooks for the test.

Source: text-embeddings-inference 1.9.3, as cited in `backends/tei.py`. It knows nothing of the gateway.
Vectors are a pure function of the text, so that a test can identify the text of a vector.
"""

import base64
import hashlib
import json
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np

from backends.canaries import CANARIES

DIMENSIONS = 8
PAYLOAD_LIMIT = 2_000_000
SPECIAL_IDS = {101, 102}


def vector_of(text: str) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return (8,) float32 of length 1, different for each text."""
    digest = hashlib.sha256(text.encode()).digest()
    raw = np.frombuffer(digest, dtype=np.uint8)[:DIMENSIONS].astype(np.float32) - 127.5
    return (raw / np.linalg.norm(raw)).astype(np.float32)


def is_canaries(texts: Any) -> bool:
    """Return True if the texts are the canaries sent to replicas when they join."""
    return isinstance(texts, list) and bool(texts) and all(text in CANARIES for text in texts)


def score_of(query: str, text: str) -> float:
    """Return a score between 0 and 1, different for each pair."""
    return hashlib.sha256(f"{query}\n{text}".encode()).digest()[0] / 255


def tokens_of(text: str, max_tokens: int = 10**9) -> int:
    """Count words and two special tokens, up to the model's maximum length."""
    return min(len(text.split()) + 2, max_tokens)


def weights_of(text: str) -> dict[int, float]:
    """Return a weight per word, different for each text, with the terms out of order."""
    digest = hashlib.sha256(text.encode()).digest()
    return {900 - 100 * i: (digest[i] + 1) / 64 for i in range(len(text.split()))}


def logits_of(item: tuple[str, ...], labels: int) -> list[float]:
    """Return a logit per label, different for each text or pair."""
    return [float(vector_of("\n".join(item))[i % DIMENSIONS] * 4) for i in range(labels)]


def _item(entry: Any) -> tuple[str, ...]:
    """Convert an entry of /predict's `inputs` to a tuple of one or two texts."""
    parts = (entry,) if isinstance(entry, str) else tuple(entry)
    if not 1 <= len(parts) <= 2 or not all(isinstance(part, str) for part in parts):
        raise TeiError(422, "data did not match any variant of untagged enum PredictInput", None)
    return parts


def _label_scores(item: tuple[str, ...], id2label: dict[str, str], *, raw: bool) -> list[dict[str, Any]]:
    scores = np.array(logits_of(item, len(id2label)))
    if not raw:
        is_single = len(id2label) == 1
        scores = 1 / (1 + np.exp(-scores)) if is_single else np.exp(scores) / np.exp(scores).sum()
    items = [{"score": float(scores[int(i)]), "label": label} for i, label in id2label.items()]
    return sorted(items, key=lambda item: -item["score"])


class TeiError(Exception):
    """Response of another status than 200."""

    def __init__(self, status: int, error: str, error_type: str | None) -> None:
        super().__init__(error)
        self.status = status
        self.body = (
            error.encode()
            if error_type is None
            else json.dumps({"error": error, "error_type": error_type}).encode()
        )


# Replacement for the server's reply; None lets the request pass.
Hook = Callable[[str, dict[str, Any]], Awaitable[tuple[int, bytes] | None]]


class FakeTei:
    """TEI server of one model.

    requests: every (path, body) received. hook: can answer instead of the server. canaries: the number of
    canary requests, which are not recorded and do not pass the hook. space: changes all vectors.
    """

    def __init__(self, **info: Any) -> None:
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.headers: list[dict[str, str]] = []
        self.canaries = 0
        self.space = ""
        self.hook: Hook | None = None
        self.api_key: str | None = None
        self.info: dict[str, Any] = {
            "model_id": "fake/model",
            "model_sha": None,
            "model_dtype": "float16",
            "model_type": {"embedding": {"pooling": "cls"}},
            "max_concurrent_requests": 512,
            "max_input_length": 16,
            "max_batch_tokens": 16384,
            "max_batch_requests": None,
            "max_client_batch_size": 4,
            "auto_truncate": True,
            "tokenization_workers": 1,
            "version": "1.9.3",
            "sha": None,
            "docker_label": None,
            **info,
        }

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve one ASGI request."""
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        self.headers.append(headers)
        extra: dict[str, str] = {}
        try:
            status, content = await self._answer(scope["path"], headers, body, extra)
        except TeiError as error:
            status, content = error.status, error.body
        raw = [(name.encode(), value.encode()) for name, value in extra.items()]
        await send({"type": "http.response.start", "status": status, "headers": raw})
        await send({"type": "http.response.body", "body": content})

    async def _answer(
        self, path: str, headers: dict[str, str], body: bytes, extra: dict[str, str]
    ) -> tuple[int, bytes]:
        if self.api_key is not None and headers.get("authorization") != f"Bearer {self.api_key}":
            return 401, b""
        if path == "/info":
            return 200, json.dumps(self.info).encode()
        if path == "/metrics":
            return 200, b"te_queue_size 0\n"
        if len(body) > PAYLOAD_LIMIT:
            raise TeiError(413, "length limit exceeded", None)
        parsed = json.loads(body)
        texts = parsed.get("inputs", parsed.get("input"))
        if is_canaries(texts):
            self.canaries += 1
        else:
            self.requests.append((path, parsed))
        if (
            self.hook is not None
            and not is_canaries(texts)
            and (answer := await self.hook(path, parsed)) is not None
        ):
            return answer
        reply, tokens = getattr(self, f"_{path.strip('/').replace('/', '_')}")(parsed)
        extra["x-compute-tokens"] = str(tokens)
        return 200, json.dumps(reply).encode()

    def _embed(self, body: dict[str, Any]) -> tuple[Any, int]:
        if self._is_splade():
            raise TeiError(424, "Backend error: `normalize` is not available for SPLADE models", "Backend")
        texts = self._checked(body["inputs"], body)
        _not_null(body, "normalize", "truncation_direction")
        return [self._vector(text, body).tolist() for text in texts], self._tokens(texts)

    def _v1_embeddings(self, body: dict[str, Any]) -> tuple[Any, int]:
        texts = self._checked(body["input"], {"truncate": self.info["auto_truncate"]})
        _not_null(body, "encoding_format")
        data = []
        for index, text in enumerate(texts):
            vector = self._vector(text, body)
            packed = base64.b64encode(vector.tobytes()).decode()
            embedding = packed if body.get("encoding_format") == "base64" else vector.tolist()
            data.append({"object": "embedding", "index": index, "embedding": embedding})
        tokens = self._tokens(texts)
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return {"object": "list", "data": data, "model": "fake", "usage": usage}, tokens

    def _rerank(self, body: dict[str, Any]) -> tuple[Any, int]:
        if "reranker" not in self.info["model_type"]:
            raise TeiError(424, "Backend error: model is not a re-ranker model", "Backend")
        _not_null(body, "raw_scores", "return_text", "truncation_direction")
        texts = self._checked(body["texts"], {"truncate": True}, empty_allowed=True)
        query = body["query"]
        ranks = [{"index": i, "score": score_of(query, text)} for i, text in enumerate(texts)]
        ranks.sort(key=lambda rank: -rank["score"])
        return ranks, self._tokens([f"{query} {text}" for text in texts])

    def _predict(self, body: dict[str, Any]) -> tuple[Any, int]:
        labels = next((kind.get("id2label") for kind in self.info["model_type"].values()), None)
        if not labels:
            raise TeiError(424, "Backend error: model is not a classifier model", "Backend")
        _not_null(body, "raw_scores", "truncation_direction")
        batch = isinstance(body["inputs"], list) and all(isinstance(entry, list) for entry in body["inputs"])
        items = [_item(entry) for entry in (body["inputs"] if batch else [body["inputs"]])]
        texts = self._checked([" ".join(item) for item in items], body, empty_allowed=True)
        replies = [_label_scores(item, labels, raw=body.get("raw_scores", False)) for item in items]
        return replies if batch else replies[0], self._tokens(texts)

    def _embed_all(self, body: dict[str, Any]) -> tuple[Any, int]:
        if "embedding" not in self.info["model_type"] or self._is_splade():
            raise TeiError(424, "Backend error: model has no token vectors", "Backend")
        texts = self._checked(body["inputs"], body)
        return [self._rows(text) for text in texts], self._tokens(texts)

    def _rows(self, text: str) -> list[list[float]]:
        words = ["[CLS]", *text.split()[: self.info["max_input_length"] - 2], "[SEP]"]
        return [(vector_of(word) * 3).tolist() for word in words]

    def _embed_sparse(self, body: dict[str, Any]) -> tuple[Any, int]:
        if not self._is_splade():
            raise TeiError(
                424, "Backend error: model is not an embedding model with SPLADE pooling", "Backend"
            )
        texts = self._checked(body["inputs"], body)
        weights = [[{"index": i, "value": v} for i, v in weights_of(text).items()] for text in texts]
        return weights, self._tokens(texts)

    def _is_splade(self) -> bool:
        embedding = self.info["model_type"].get("embedding") or {}
        return bool(embedding.get("pooling") == "splade")

    def _decode(self, body: dict[str, Any]) -> tuple[Any, int]:
        _not_null(body, "skip_special_tokens")
        lists = body["ids"]
        if not lists or not all(isinstance(ids, list) for ids in lists):
            raise TeiError(422, "data did not match any variant of untagged enum InputIds", None)
        skipped = SPECIAL_IDS if body.get("skip_special_tokens", True) else set()
        return [" ".join(f"t{id_}" for id_ in ids if id_ not in skipped) for ids in lists], 0

    def _tokenize(self, body: dict[str, Any]) -> tuple[Any, int]:
        texts = self._checked(body["inputs"], {"truncate": True})
        return [
            [{"id": i, "text": word, "special": False, "start": 0, "stop": len(word)}]
            for i, text in enumerate(texts)
            for word in [(text.split() or [text])[0]]
        ], 0

    def _vector(self, text: str, body: dict[str, Any]) -> Any:
        vector = vector_of(self.space + text)
        if body.get("dimensions") is not None:
            if body["dimensions"] > DIMENSIONS:
                raise TeiError(422, "Input validation error: `dimensions` is too large", "Validation")
            vector = vector[: body["dimensions"]]
            vector = vector / np.linalg.norm(vector)
        return vector if body.get("normalize", True) else vector * 2

    def _tokens(self, texts: list[str]) -> int:
        return sum(tokens_of(text, self.info["max_input_length"]) for text in texts)

    def _checked(self, texts: Any, body: dict[str, Any], *, empty_allowed: bool = False) -> list[str]:
        batch_limit = self.info["max_client_batch_size"]
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise TeiError(422, "data did not match any variant", None)
        if not texts or (not empty_allowed and not all(texts)):
            raise TeiError(400, "Input validation error: `inputs` cannot be empty", "Empty")
        if len(texts) > batch_limit:
            raise TeiError(
                422, f"batch size {len(texts)} > maximum allowed batch size {batch_limit}", "Validation"
            )
        truncates = body.get("truncate") is not False
        longest = max(tokens_of(text) for text in texts)
        if not truncates and longest > self.info["max_input_length"]:
            raise TeiError(
                422,
                f"Input validation error: `inputs` must have less than {self.info['max_input_length']} "
                f"tokens. Given: {longest}",
                "Validation",
            )
        return texts


def _not_null(body: dict[str, Any], *fields: str) -> None:
    for field in fields:
        if field in body and body[field] is None:
            raise TeiError(422, f"{field}: invalid type: null", None)
