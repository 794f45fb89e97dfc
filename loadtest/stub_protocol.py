"""Requests and replies of the stub upstream: TEI's wire, and OpenAI's for peers that speak no other; pure.

Source: text-embeddings-inference 1.9.3, as `backends/tei/adapter.py` cites it. This module knows nothing of
time or sockets.
"""

import struct
import zlib
from collections.abc import Sequence
from functools import cache

import msgspec
import numpy as np
import orjson
import pybase64

# Number of leading components that identify a vector's text; 12 bytes are 16 characters of base64, unpadded.
MARK_COMPONENTS = 3
_MAX_INPUT_TOKENS = 512
# The constant part of GET /info.
_INFO = msgspec.json.decode(
    b"""{"model_sha": null, "model_dtype": "float16", "max_input_length": 512, "max_batch_tokens": 16384,
    "max_batch_requests": null, "auto_truncate": true, "tokenization_workers": 1, "version": "1.9.3",
    "sha": null, "docker_label": null}"""
)


class StubSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Behaviour of the stub; each field is a flag, and can be changed while it runs.

    A request takes (base_ms + input_ms × inputs + token_ms × tokens) × slowdown. parallel: number of requests
    served at once, 0 for any number. items, payload_bytes, permits: TEI's limits; permits count inputs.
    hang: no request gets a reply. error_share: share of requests that get error_status. refused_word: a
    request with a text that contains this word is refused whole, as TEI does. crash_word: such a text breaks
    every connection, and no request gets a reply for down_ms, as if an engine had crashed. hang_word: such a
    text gets no reply. bad_word: such a text has bad_effect: a status, `null`, `nan`, `width`, `lost` for a
    connection that breaks, or `hang`.
    """

    model: str = "stub"
    kind: str = "embedding"
    dimensions: int = 1024
    base_ms: float = 0.0
    input_ms: float = 0.0
    token_ms: float = 0.0
    parallel: int = 0
    items: int = 32
    payload_bytes: int = 2_000_000
    permits: int = 512
    hang: bool = False
    slowdown: float = 1.0
    error_share: float = 0.0
    error_status: int = 500
    refused_word: str = ""
    crash_word: str = ""
    hang_word: str = ""
    bad_word: str = ""
    bad_effect: str = "500"
    down_ms: float = 0.0


class StubError(Exception):
    """Reply with another status than 200."""

    def __init__(self, status: int, body: bytes, content_type: bytes = b"application/json") -> None:
        super().__init__(status)
        self.status = status
        self.body = body
        self.content_type = content_type


class OpenAIBody(msgspec.Struct, frozen=True):
    """Body of POST /v1/embeddings; TEI does not accept null as `encoding_format`."""

    input: str | list[str | list[int]]
    encoding_format: str = "float"
    dimensions: int | None = None


class EmbedBody(msgspec.Struct, frozen=True):
    """Body of POST /embed."""

    inputs: str | list[str | list[int]]
    dimensions: int | None = None


class RerankBody(msgspec.Struct, frozen=True):
    """Body of POST /rerank."""

    query: str
    texts: list[str]


class StubRequest(msgspec.Struct, frozen=True):
    """One parsed request."""

    path: str
    texts: Sequence[str]
    tokens: int
    base64: bool = False
    dimensions: int = 0
    query: str = ""


_OPENAI = msgspec.json.Decoder(OpenAIBody)
_EMBED = msgspec.json.Decoder(EmbedBody)
_RERANK = msgspec.json.Decoder(RerankBody)


def parse_request(path: str, body: bytes, settings: StubSettings) -> StubRequest:
    """Parse and validate a body.

    Raises: StubError with the status that TEI would send.
    """
    try:
        request = _parse(path, body, settings)
    except msgspec.ValidationError as error:
        raise StubError(422, str(error).encode(), b"text/plain") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise StubError(400, str(error).encode(), b"text/plain") from error
    if not request.texts or "" in request.texts:
        raise error_reply(path, 400, "Input validation error: `inputs` cannot be empty", "Empty")
    if len(request.texts) > settings.items:
        message = f"batch size {len(request.texts)} > maximum allowed batch size {settings.items}"
        raise error_reply(path, 422, message, "Validation")
    if request.dimensions > settings.dimensions:
        raise error_reply(path, 422, "Input validation error: `dimensions` is too large", "Validation")
    if contains(settings.refused_word, request):
        raise error_reply(path, 422, "Input validation error: a refused word", "Validation")
    return request


def contains(word: str, request: "StubRequest") -> bool:
    """Return True if one of the request's texts contains this word; the empty word is in none."""
    return bool(word) and any(word in text for text in request.texts)


def _parse(path: str, body: bytes, settings: StubSettings) -> StubRequest:
    if path == "/v1/embeddings":
        openai = _OPENAI.decode(body)
        texts = _texts(openai.input)
        base64 = openai.encoding_format == "base64"
        return StubRequest(path, texts, _tokens(texts), base64, openai.dimensions or settings.dimensions)
    if path == "/embed":
        embed = _EMBED.decode(body)
        texts = _texts(embed.inputs)
        return StubRequest(path, texts, _tokens(texts), dimensions=embed.dimensions or settings.dimensions)
    rerank = _RERANK.decode(body)
    tokens = _tokens(rerank.texts) + len(rerank.texts) * (len(rerank.query) // 4)
    return StubRequest(path, rerank.texts, tokens, query=rerank.query)


def _texts(inputs: str | list[str | list[int]]) -> list[str]:
    if isinstance(inputs, str):
        return [inputs]
    return [text if isinstance(text, str) else str(text) for text in inputs]


def _tokens(texts: Sequence[str]) -> int:
    """Count four characters as a token plus two special tokens, cut at the model's length."""
    return sum(min(len(text) // 4 + 2, _MAX_INPUT_TOKENS) for text in texts)


def error_reply(path: str, status: int, message: str, kind: str) -> StubError:
    """Return an error in TEI's envelope, which differs on its OpenAI route."""
    if path == "/v1/embeddings":
        return StubError(status, msgspec.json.encode({"message": message, "code": status, "type": kind}))
    return StubError(status, msgspec.json.encode({"error": message, "error_type": kind}))


def overloaded(path: str) -> StubError:
    """Return the error of a request that finds too few permits."""
    return error_reply(path, 429, "Model is overloaded", "Overloaded")


def mark_of(text: str) -> tuple[float, float, float]:
    """Return the first components of a text's vector: its checksum, in numbers that float32 holds exactly."""
    checksum = zlib.crc32(text.encode())
    return (checksum >> 16) / 65536, (checksum & 65535) / 65536, 0.5


@cache
def _tail(dimensions: int) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """Return the components that all vectors have in common."""
    raw = np.random.default_rng(1).standard_normal(dimensions - MARK_COMPONENTS).astype(np.float32)
    return raw / np.float32(2 * np.linalg.norm(raw))


@cache
def _base64_tail(dimensions: int) -> bytes:
    encoded: bytes = pybase64.b64encode(_tail(dimensions).astype("<f4").tobytes())
    return encoded


@cache
def _json_tail(dimensions: int) -> bytes:
    rendered: bytes = orjson.dumps(_tail(dimensions), option=orjson.OPT_SERIALIZE_NUMPY)
    return rendered[1:]


def render(request: StubRequest, settings: StubSettings) -> bytes:
    """Render the body of a successful reply."""
    if request.path == "/v1/embeddings":
        return _render_openai(request, settings)
    if request.path == "/embed":
        return b"[" + b",".join(_floats(text, request.dimensions) for text in request.texts) + b"]"
    scores = [(zlib.crc32(text.encode()) / 2**32, index) for index, text in enumerate(request.texts)]
    scores.sort(reverse=True)
    return msgspec.json.encode([{"index": index, "score": score} for score, index in scores])


def _render_openai(request: StubRequest, settings: StubSettings) -> bytes:
    tail = _base64_tail(request.dimensions) if request.base64 else b""
    items: list[bytes] = []
    for index, text in enumerate(request.texts):
        start = b'{"object":"embedding","index":%d,"embedding":' % index
        if request.base64:
            items += (start, b'"', pybase64.b64encode(struct.pack("<3f", *mark_of(text))), tail, b'"},')
        else:
            items += (start, _floats(text, request.dimensions), b"},")
    items[-1] = items[-1][:-1]
    end = b'],"model":"%b","usage":{"prompt_tokens":%d,"total_tokens":%d}}'
    name = settings.model.encode()
    return b"".join((b'{"object":"list","data":[', *items, end % (name, request.tokens, request.tokens)))


def _floats(text: str, dimensions: int) -> bytes:
    return b"[%b,%b,%b," % tuple(repr(part).encode() for part in mark_of(text)) + _json_tail(dimensions)


def render_wrong(request: StubRequest, settings: StubSettings, effect: str) -> bytes:
    """Render a reply of OpenAI's API with vectors that are `null`, not finite, or of a wrong width."""
    row = {
        "null": None,
        "nan": pybase64.b64encode(b"\0\0\xc0\x7f" * settings.dimensions).decode(),
        "width": pybase64.b64encode(b"\0\0\x80\x3f" * (settings.dimensions - 1)).decode(),
    }[effect]
    data = [{"object": "embedding", "index": index, "embedding": row} for index in range(len(request.texts))]
    usage = {"prompt_tokens": request.tokens, "total_tokens": request.tokens}
    return msgspec.json.encode({"object": "list", "data": data, "model": settings.model, "usage": usage})


def info(settings: StubSettings) -> bytes:
    """Render the reply to GET /info."""
    inner = (
        {"pooling": "cls"} if settings.kind == "embedding" else {"id2label": {"0": "x"}, "label2id": {"x": 0}}
    )
    limits = {"max_concurrent_requests": settings.permits, "max_client_batch_size": settings.items}
    own = {
        "model_id": settings.model,
        "served_model_name": settings.model,
        "model_type": {settings.kind: inner},
    }
    return msgspec.json.encode(own | limits | _INFO)


def models(settings: StubSettings) -> bytes:
    """Render the reply to GET /v1/models, which TEI does not serve but peers request."""
    card = {"id": settings.model, "object": "model", "created": 1, "owned_by": "stub"}
    return msgspec.json.encode({"object": "list", "data": [card]})
