"""TEI server as an ASGI app, as strict as the real one, with hooks for the test.

Source: text-embeddings-inference 1.9.3, as cited in `backends/tei/adapter.py`, and what such a server
answered (`tests/golden/tei/http.jsonl`, to which `tests/backends/test_fake_tei.py` holds
this one). It knows nothing of the gateway. Vectors are a pure function of the text, so that a test can
identify the text of a vector.
"""

import base64
import hashlib
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

import httpx
import numpy as np

from backends.reference_texts import REFERENCE_TEXTS, SCORED

DIMENSIONS = 8
PAYLOAD_LIMIT = 2_000_000
SPECIALS = {101: "[CLS]", 102: "[SEP]"}
# Paths that compute, and report it in headers.
COMPUTES = {
    "/embed",
    "/embed_all",
    "/embed_sparse",
    "/predict",
    "/rerank",
    "/similarity",
    "/v1/embeddings",
}
POSTED = COMPUTES | {"/tokenize", "/decode"}
# Replies of the paths that are read without a body.
UNPOSTED = {"/": b"", "/ping": b"", "/health": b"", "/metrics": b"te_queue_size 0\n"}
TIMES = ("x-compute-time", "x-inference-time", "x-queue-time", "x-tokenization-time", "x-total-time")
# One text, by its words or by its token ids.
Text = str | list[int]


def vector_of(text: str) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return (8,) float32 of length 1, different for each text."""
    digest = hashlib.sha256(text.encode()).digest()
    raw = np.frombuffer(digest, dtype=np.uint8)[:DIMENSIONS].astype(np.float32) - 127.5
    return (raw / np.linalg.norm(raw)).astype(np.float32)


def is_reference_texts(texts: Any) -> bool:
    """Return True if the texts are the reference texts sent to replicas when they join."""
    return isinstance(texts, list) and bool(texts) and all(text in REFERENCE_TEXTS for text in texts)


def is_probe(body: dict[str, Any]) -> bool:
    """Return True for the reference texts, and for the pairs that a reranker is sent when it joins."""
    texts = body.get("inputs", body.get("input", body.get("texts")))
    return body.get("query", body.get("text_1")) == SCORED.query or is_reference_texts(texts)


def score_of(query: str, text: str) -> float:
    """Return a score between 0 and 1, different for each pair; the best for the answer in `SCORED`."""
    if (query, text) == (SCORED.query, SCORED.documents[0]):
        return 1.0
    return hashlib.sha256(f"{query}\n{text}".encode()).digest()[0] / 255


def tokens_of(text: Text, max_tokens: int = 10**9) -> int:
    """Count words and two special tokens, up to the model's maximum length; token ids count as they are."""
    count = len(text.split()) + 2 if isinstance(text, str) else len(text)
    return min(count, max_tokens)


def assert_vectors(reply: httpx.Response, *texts: str) -> None:
    """Check that each text of a call to OpenAI's dialect got its own vector."""
    assert 200 == reply.status_code, reply.text
    vectors = [item["embedding"] for item in reply.json()["data"]]
    np.testing.assert_array_equal([vector_of(text) for text in texts], np.array(vectors, np.float32))


def weights_of(text: str) -> dict[int, float]:
    """Return a weight per word, different for each text, with the terms out of order."""
    digest = hashlib.sha256(text.encode()).digest()
    return {900 - 100 * i: (digest[i] + 1) / 64 for i in range(len(text.split()))}


def logits_of(item: tuple[str, ...], labels: int) -> list[float]:
    """Return a logit per label, different for each text or pair."""
    return [float(vector_of("\n".join(item))[i % DIMENSIONS] * 4) for i in range(labels)]


def _label_scores(item: tuple[str, ...], id2label: dict[str, str], *, raw: bool) -> list[dict[str, Any]]:
    scores = np.array(logits_of(item, len(id2label)))
    if not raw:
        is_single = len(id2label) == 1
        scores = 1 / (1 + np.exp(-scores)) if is_single else np.exp(scores) / np.exp(scores).sum()
    items = [{"score": float(scores[int(i)]), "label": label} for i, label in id2label.items()]
    return sorted(items, key=lambda item: -item["score"])


class TeiError(Exception):
    """Response of another status than 200: plain text without an error type."""

    def __init__(self, status: int, error: str, error_type: str | None) -> None:
        super().__init__(error)
        self.status = status
        self.error = error
        self.error_type = error_type

    def body(self, path: str) -> bytes:
        """Return the error body of a path's dialect."""
        if self.error_type is None:
            return self.error.encode()
        if path == "/v1/embeddings":
            openai = {"message": self.error, "code": self.status, "type": self.error_type}
            return json.dumps(openai).encode()
        return json.dumps({"error": self.error, "error_type": self.error_type}).encode()


def _unreadable(reason: str) -> TeiError:
    return TeiError(400, f"Failed to parse the request body as JSON: {reason}", None)


def _mistyped(reason: str) -> TeiError:
    return TeiError(422, f"Failed to deserialize the JSON body into the target type: {reason}", None)


def _invalid(reason: str) -> TeiError:
    return TeiError(422, f"Input validation error: {reason}", "Validation")


def _empty(message: str) -> TeiError:
    return TeiError(400, message, "Empty")


def _unavailable(reason: str) -> TeiError:
    return TeiError(424, f"Backend error: {reason}", "Backend")


def _parse(body: bytes) -> dict[str, Any]:
    """Decode a body as strictly as serde does: no duplicate field, no half of a surrogate pair."""
    try:
        parsed = json.loads(body, object_pairs_hook=_unique)
        json.dumps(parsed, ensure_ascii=False).encode()
    except ValueError as error:
        raise _unreadable(str(error)) from error
    if not isinstance(parsed, dict):
        raise _mistyped("invalid length 0, expected struct with 6 elements")
    return parsed


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({name for name, _ in pairs}) < len(pairs):
        raise _mistyped("duplicate field")
    return dict(pairs)


def _field(body: dict[str, Any], name: str) -> Any:
    if name not in body:
        raise _mistyped(f"missing field `{name}`")
    return body[name]


def _not_null(body: dict[str, Any], *fields: str) -> None:
    for field in fields:
        if field in body and body[field] is None:
            raise _mistyped(f"{field}: invalid type: null")


def _texts_of(value: Any) -> list[Text]:
    """Convert TEI's union of one or several texts, as strings or as token ids, to a list."""
    is_ids = isinstance(value, list) and bool(value) and all(isinstance(item, int) for item in value)
    texts = [value] if isinstance(value, str) or is_ids else value
    if not isinstance(texts, list) or not all(isinstance(text, str) or _is_ids(text) for text in texts):
        raise _mistyped("inputs: data did not match any variant of untagged enum Input")
    return texts


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, int) for item in value)


def _predict_items(value: Any) -> tuple[list[tuple[str, ...]], bool]:
    """Convert the union of /predict to its items, and report whether it is a batch: a list of lists."""
    is_batch = isinstance(value, list) and bool(value) and all(isinstance(entry, list) for entry in value)
    entries = value if is_batch else [value]
    items = [(entry,) if isinstance(entry, str) else tuple(entry) for entry in entries]
    for item in items:
        if not 1 <= len(item) <= 2 or not all(isinstance(part, str) for part in item):
            raise _mistyped(f"inputs: invalid length {len(item)}, expected a string, a pair or a batch")
    return items, is_batch


def _token(text: str, start: int, stop: int) -> dict[str, Any]:
    return {"id": 1000 + len(text), "text": text, "special": False, "start": start, "stop": stop}


def _special(id_: int) -> dict[str, Any]:
    return {"id": id_, "text": SPECIALS[id_], "special": True, "start": None, "stop": None}


def _words(text: str) -> list[dict[str, Any]]:
    """Return a token per word, with its place in bytes of UTF-8."""
    raw, tokens, stop = text.encode(), [], 0
    for word in text.split():
        start = raw.index(word.encode(), stop)
        stop = start + len(word.encode())
        tokens.append(_token(word, start, stop))
    return tokens


# Replacement for the server's reply; None lets the request pass.
Hook = Callable[[str, dict[str, Any]], Awaitable[tuple[int, bytes] | None]]


class Computed(NamedTuple):
    """Reply of a path that computes, with the amounts that its headers report."""

    reply: Any
    characters: int
    tokens: int


class FakeTei:
    """TEI server of one model.

    requests: every (path, body) received. hook: can answer instead of the server. reference_requests: number
    of requests with reference texts, which are not recorded and do not pass the hook. space: changes all
    vectors. prompts: names of its prompts, None for any name. payload_limit: most bytes of a body. in_flight:
    inputs that hold a permit, those of other clients included; most_in_flight: the most of them so far.
    refused, too_large: requests answered with 429 and 413. headers_sent: headers that replace the ones of the
    server, None to leave one out. default_prompt: as --default-prompt; it counts in texts without
    `prompt_name`.
    """

    def __init__(self, **info: Any) -> None:
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.headers: list[dict[str, str]] = []
        self.reference_requests = 0
        self.space = ""
        self.hook: Hook | None = None
        self.api_key: str | None = None
        self.prompts: frozenset[str] | None = None
        self.payload_limit = PAYLOAD_LIMIT
        self.in_flight = 0
        self.most_in_flight = 0
        self.refused = self.too_large = 0
        self.headers_sent: dict[str, str | None] = {}
        self.dimensions = DIMENSIONS
        self.default_prompt = ""
        self.info: dict[str, Any] = {
            "model_id": "fake/model",
            "model_sha": None,
            "model_dtype": "float16",
            "served_model_name": "fake/model",
            "model_type": {"embedding": {"pooling": "cls"}},
            "max_concurrent_requests": 512,
            "max_input_length": 16,
            "max_batch_tokens": 16384,
            "max_batch_requests": None,
            "max_client_batch_size": 4,
            "auto_truncate": True,
            "tokenization_workers": 1,
            "version": "1.9.3",
            "sha": "0d124dc",
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
        path = scope["path"]
        try:
            status, content = await self._answer(scope["method"], path, body, extra)
        except TeiError as error:
            status, content = error.status, error.body(path)
            if error.error:
                is_json = error.error_type is not None
                extra["content-type"] = "application/json" if is_json else "text/plain; charset=utf-8"
        raw = [(name.encode(), value.encode()) for name, value in extra.items()]
        await send({"type": "http.response.start", "status": status, "headers": raw})
        await send({"type": "http.response.body", "body": content})

    async def _answer(self, method: str, path: str, body: bytes, extra: dict[str, str]) -> tuple[int, bytes]:
        if self.api_key is not None and self.headers[-1].get("authorization") != f"Bearer {self.api_key}":
            return 401, b""
        if path in UNPOSTED:
            return 200, UNPOSTED[path]
        if path != "/info" and path not in POSTED:
            return 404, b""
        if method == "GET" and path in POSTED:
            return 405, b""
        extra["content-type"] = "application/json"
        if path == "/info":
            return 200, json.dumps(self.info).encode()
        if len(body) > self.payload_limit:
            self.too_large += 1
            raise TeiError(413, "Failed to buffer the request body: length limit exceeded", None)
        parsed = _parse(body)
        if is_probe(parsed):
            self.reference_requests += "query" not in parsed
        else:
            self.requests.append((path, parsed))
        return await self._serve(path, parsed, extra)

    async def _serve(self, path: str, parsed: dict[str, Any], extra: dict[str, str]) -> tuple[int, bytes]:
        """Answer a request as its permits allow."""
        permits = _inputs_in(parsed) if path in COMPUTES else 0
        self._take_permits(permits)
        try:
            if (
                self.hook is not None
                and not is_probe(parsed)
                and (answer := await self.hook(path, parsed)) is not None
            ):
                return answer
            return 200, self._reply(path, parsed, extra)
        finally:
            self.in_flight -= permits

    def _take_permits(self, permits: int) -> None:
        if self.in_flight + permits > self.info["max_concurrent_requests"]:
            self.refused += 1
            raise TeiError(429, "Model is overloaded", "Overloaded")
        self.in_flight += permits
        self.most_in_flight = max(self.most_in_flight, self.in_flight)

    def _reply(self, path: str, parsed: dict[str, Any], extra: dict[str, str]) -> bytes:
        answer = getattr(self, f"_{path.strip('/').replace('/', '_')}")(parsed)
        if isinstance(answer, Computed):
            amounts = {"x-compute-characters": str(answer.characters), "x-compute-tokens": str(answer.tokens)}
            computed: dict[str, str | None] = {
                "x-compute-type": "gpu+optimized",
                **dict.fromkeys(TIMES, "1"),
                **amounts,
                **self.headers_sent,
            }
            extra.update({name: value for name, value in computed.items() if value is not None})
            answer = answer.reply
        return json.dumps(answer).encode()

    def _computed(self, reply: Any, texts: Sequence[Text]) -> Computed:
        tokens = sum(min(self._tokens_of(text), self.info["max_input_length"]) for text in texts)
        return Computed(reply, sum(map(len, texts)), tokens)

    def _embed(self, body: dict[str, Any]) -> Computed:
        texts = _texts_of(_field(body, "inputs"))
        _not_null(body, "normalize", "truncation_direction")
        self._check_kind("embed")
        self._check(texts, body)
        return self._computed([self._vector(text, body).tolist() for text in texts], texts)

    def _similarity(self, body: dict[str, Any]) -> Computed:
        inputs, options = _field(body, "inputs"), body.get("parameters") or {}
        source, sentences = _field(inputs, "source_sentence"), _field(inputs, "sentences")
        self._check_kind("embed")
        if not sentences:
            raise _empty("`inputs.sentences` cannot be empty")
        self._check([source, *sentences], options)
        vectors = [self._vector(text, {}) for text in (source, *sentences)]
        scores = [float(vectors[0] @ vector) for vector in vectors[1:]]
        return self._computed(scores, [source, *sentences])

    def _v1_embeddings(self, body: dict[str, Any]) -> Computed:
        texts = _texts_of(_field(body, "input"))
        _not_null(body, "encoding_format")
        self._check_kind("embed")
        self._check(texts, {"truncate": self.info["auto_truncate"], "dimensions": body.get("dimensions")})
        data = []
        for index, text in enumerate(texts):
            vector = self._vector(text, body)
            packed = base64.b64encode(vector.tobytes()).decode()
            embedding = packed if body.get("encoding_format") == "base64" else vector.tolist()
            data.append({"object": "embedding", "index": index, "embedding": embedding})
        computed = self._computed(None, texts)
        usage = {"prompt_tokens": computed.tokens, "total_tokens": computed.tokens}
        reply = {"object": "list", "data": data, "model": self.info["served_model_name"], "usage": usage}
        return computed._replace(reply=reply)

    def _rerank(self, body: dict[str, Any]) -> Computed:
        query, texts = _field(body, "query"), _field(body, "texts")
        _not_null(body, "raw_scores", "return_text", "truncation_direction")
        self._check_kind("rerank")
        if not texts:
            raise _empty("`texts` cannot be empty")
        pairs = [(query, text) for text in texts]
        self._check_pairs(pairs, body)
        ranks: list[dict[str, Any]] = [
            {"index": i, "score": score_of(query, text)} | ({"text": text} if body.get("return_text") else {})
            for i, text in enumerate(texts)
        ]
        ranks.sort(key=lambda rank: (-rank["score"], -rank["index"]))
        return self._computed_pairs(ranks, pairs)

    def _predict(self, body: dict[str, Any]) -> Computed:
        items, is_batch = _predict_items(_field(body, "inputs"))
        _not_null(body, "raw_scores", "truncation_direction")
        labels = next((kind.get("id2label") for kind in self.info["model_type"].values()), None)
        if not labels:
            raise _unavailable("Model is not a classifier model")
        if not all("".join(item) for item in items):
            raise _empty("Input validation error: `inputs` cannot be empty")
        self._check_pairs(items, body)
        replies = [_label_scores(item, labels, raw=body.get("raw_scores", False)) for item in items]
        return self._computed_pairs(replies if is_batch else replies[0], items)

    def _embed_all(self, body: dict[str, Any]) -> Computed:
        texts = _texts_of(_field(body, "inputs"))
        self._check_kind("embed_all")
        self._check(texts, body)
        return self._computed([self._rows(str(text)) for text in texts], texts)

    def _rows(self, text: str) -> list[list[float]]:
        words = ["[CLS]", *text.split()[: self.info["max_input_length"] - 2], "[SEP]"]
        return [(vector_of(word) * 3).tolist() for word in words]

    def _embed_sparse(self, body: dict[str, Any]) -> Computed:
        texts = _texts_of(_field(body, "inputs"))
        self._check_kind("embed_sparse")
        self._check(texts, body)
        weights = [[{"index": i, "value": v} for i, v in weights_of(str(text)).items()] for text in texts]
        return self._computed(weights, texts)

    def _check_kind(self, operation: str) -> None:
        """Check that the type of model offers an operation."""
        embedding = self.info["model_type"].get("embedding")
        is_splade = bool(embedding) and embedding.get("pooling") == "splade"
        if operation == "rerank" and "reranker" not in self.info["model_type"]:
            raise _unavailable("model is not a re-ranker model")
        if operation == "embed_sparse" and not is_splade:
            raise _unavailable("Model is not an embedding model with SPLADE pooling")
        if operation in ("embed", "embed_all") and embedding is None:
            raise _unavailable("Model is not an embedding model")
        if operation == "embed" and is_splade:
            raise _unavailable("`normalize` is not available for SPLADE models")
        if operation == "embed_all" and is_splade:
            raise _unavailable("`embed_all` is not available for SPLADE models")

    def _decode(self, body: dict[str, Any]) -> list[str]:
        _not_null(body, "skip_special_tokens")
        ids = _field(body, "ids")
        if not ids:
            raise _empty("Input validation error: `input_ids` cannot be empty")
        lists = ids if isinstance(ids[0], list) else [ids]
        if not all(map(_is_ids, lists)):
            raise _mistyped("ids: data did not match any variant of untagged enum InputIds")
        skipped = SPECIALS if body.get("skip_special_tokens", True) else {}
        return [" ".join(f"t{id_}" for id_ in ids if id_ not in skipped) for ids in lists]

    def _tokenize(self, body: dict[str, Any]) -> list[list[dict[str, Any]]]:
        texts = [str(text) for text in _texts_of(_field(body, "inputs"))]
        if not texts:
            raise _empty("`inputs` cannot be empty")
        self._check(texts, {**body, "truncate": True})
        lists = [_words(text) for text in texts]
        if not body.get("add_special_tokens", True):
            return lists
        return [[_special(101), *tokens, _special(102)] for tokens in lists]

    def _vector(self, text: Text, body: dict[str, Any]) -> Any:
        vector = vector_of(self.space + str(text))
        if body.get("dimensions") is not None:
            vector = vector[: body["dimensions"]]
            vector = vector / np.linalg.norm(vector)
        return vector if body.get("normalize", True) else vector * 2

    def _check(self, texts: Sequence[Text], body: dict[str, Any]) -> None:
        """Check the texts and options that the routes for texts share."""
        if not texts or not all(texts):
            raise _empty("Input validation error: `inputs` cannot be empty")
        dimensions, prompt = body.get("dimensions"), body.get("prompt_name")
        if dimensions is not None and dimensions < 0:
            raise _mistyped(f"dimensions: invalid value: integer `{dimensions}`, expected usize")
        if dimensions == 0:
            raise _invalid("`dimensions` should be positive")
        if dimensions is not None and dimensions > self.dimensions:
            raise _invalid("`dimensions` should be smaller than the maximum embedding dimension.")
        if prompt is not None and self.prompts is not None and prompt not in self.prompts:
            raise _invalid(
                f"`default-prompt-name` is set to `{prompt}` but no prompts were found in the Sentence "
                "Transformers configuration"
            )
        self._check_batch(max(map(self._tokens_of, texts)), len(texts), body)

    def _tokens_of(self, text: Text) -> int:
        """Count the tokens of a text with the default prompt."""
        return tokens_of(text) + len(self.default_prompt.split())

    def _check_pairs(self, pairs: Sequence[tuple[str, ...]], body: dict[str, Any]) -> None:
        self._check_batch(max(map(_pair_tokens, pairs)), len(pairs), body)

    def _check_batch(self, longest: int, size: int, body: dict[str, Any]) -> None:
        most, truncate = self.info["max_client_batch_size"], body.get("truncate")
        if truncate not in (None, True, False):
            raise _mistyped("truncate: invalid type: expected a boolean")
        if size > most:
            raise TeiError(422, f"batch size {size} > maximum allowed batch size {most}", "Validation")
        truncates = self.info["auto_truncate"] if truncate is None else truncate
        if not truncates and longest > self.info["max_input_length"]:
            raise _invalid(
                f"`inputs` must have less than {self.info['max_input_length']} tokens. Given: {longest}"
            )

    def _computed_pairs(self, reply: Any, pairs: Sequence[tuple[str, ...]]) -> Computed:
        most = self.info["max_input_length"]
        characters = sum(len(part) for pair in pairs for part in pair)
        return Computed(reply, characters, sum(min(_pair_tokens(pair), most) for pair in pairs))


def _pair_tokens(pair: tuple[str, ...]) -> int:
    """Count the words of a text or pair, and a special token around each."""
    return sum(len(part.split()) + 1 for part in pair) + 1


def _inputs_in(body: dict[str, Any]) -> int:
    """Return the inputs of a request, each of which takes a permit."""
    value = body.get("texts", body.get("inputs", body.get("input")))
    if isinstance(value, dict):
        return len(value.get("sentences", ())) + 1
    return len(value) if isinstance(value, list) else 1
