"""What the stub understands and says: TEI's wire, and OpenAI's for peers that know no other. Pure.

Source: text-embeddings-inference 1.9.3, as `backends/tei.py` cites it. Knows nothing of time or sockets.
"""

import struct
import zlib
from collections.abc import Sequence
from functools import cache

import msgspec
import numpy as np
import orjson
import pybase64

# The components that tell which text a vector is of; 12 bytes are 16 characters of base64, unpadded.
MARKED = 3
_MAX_INPUT_TOKENS = 512


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How the stub behaves; each field is a flag, and can be changed while it runs.

    A request takes (base_ms + input_ms × inputs + token_ms × tokens) × slow; parallel: how many are served
    at once, 0 is any number. items, payload_bytes, permits: TEI's limits, permits counted in inputs.
    hang: nothing is answered any more. error_share: of requests that get error_status. refuses: a request
    with a text that has this word in it is refused whole, as TEI does. dies_of: such a text breaks every
    connection, and no request is answered for down_ms, as if an engine had crashed. hangs_on: it has
    no answer.
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
    slow: float = 1.0
    error_share: float = 0.0
    error_status: int = 500
    refuses: str = ""
    dies_of: str = ""
    hangs_on: str = ""
    down_ms: float = 0.0


class Refused(Exception):
    """An answer of another status than 200."""

    def __init__(self, status: int, body: bytes, content_type: bytes = b"application/json") -> None:
        super().__init__(status)
        self.status = status
        self.body = body
        self.content_type = content_type


class OpenAIBody(msgspec.Struct, frozen=True):
    """POST /v1/embeddings. encoding_format is not nullable there."""

    input: str | list[str | list[int]]
    encoding_format: str = "float"
    dimensions: int | None = None


class EmbedBody(msgspec.Struct, frozen=True):
    """POST /embed."""

    inputs: str | list[str | list[int]]
    dimensions: int | None = None


class RerankBody(msgspec.Struct, frozen=True):
    """POST /rerank."""

    query: str
    texts: list[str]


class Asked(msgspec.Struct, frozen=True):
    """One understood request."""

    path: str
    texts: Sequence[str]
    tokens: int
    base64: bool = False
    dimensions: int = 0
    query: str = ""


_OPENAI = msgspec.json.Decoder(OpenAIBody)
_EMBED = msgspec.json.Decoder(EmbedBody)
_RERANK = msgspec.json.Decoder(RerankBody)


def understand(path: str, body: bytes, settings: Settings) -> Asked:
    """Raises: Refused, as TEI would."""
    try:
        asked = _parse(path, body, settings)
    except msgspec.ValidationError as error:
        raise Refused(422, str(error).encode(), b"text/plain") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Refused(400, str(error).encode(), b"text/plain") from error
    if not asked.texts or "" in asked.texts:
        raise failure(path, 400, "Input validation error: `inputs` cannot be empty", "Empty")
    if len(asked.texts) > settings.items:
        message = f"batch size {len(asked.texts)} > maximum allowed batch size {settings.items}"
        raise failure(path, 422, message, "Validation")
    if asked.dimensions > settings.dimensions:
        raise failure(path, 422, "Input validation error: `dimensions` is too large", "Validation")
    if has(settings.refuses, asked):
        raise failure(path, 422, "Input validation error: told to refuse this text", "Validation")
    return asked


def has(word: str, asked: "Asked") -> bool:
    """Whether one of its texts has this word in it; none has no word."""
    return bool(word) and any(word in text for text in asked.texts)


def _parse(path: str, body: bytes, settings: Settings) -> Asked:
    if path == "/v1/embeddings":
        openai = _OPENAI.decode(body)
        texts = _texts(openai.input)
        base64 = openai.encoding_format == "base64"
        return Asked(path, texts, _tokens(texts), base64, openai.dimensions or settings.dimensions)
    if path == "/embed":
        embed = _EMBED.decode(body)
        texts = _texts(embed.inputs)
        return Asked(path, texts, _tokens(texts), dimensions=embed.dimensions or settings.dimensions)
    rerank = _RERANK.decode(body)
    tokens = _tokens(rerank.texts) + len(rerank.texts) * (len(rerank.query) // 4)
    return Asked(path, rerank.texts, tokens, query=rerank.query)


def _texts(given: str | list[str | list[int]]) -> list[str]:
    if isinstance(given, str):
        return [given]
    return [one if isinstance(one, str) else str(one) for one in given]


def _tokens(texts: Sequence[str]) -> int:
    """Four characters a token and two specials, cut at the model's length."""
    return sum(min(len(one) // 4 + 2, _MAX_INPUT_TOKENS) for one in texts)


def failure(path: str, status: int, message: str, kind: str) -> Refused:
    """TEI's envelope, which is another one on its OpenAI route."""
    if path == "/v1/embeddings":
        return Refused(status, msgspec.json.encode({"message": message, "code": status, "type": kind}))
    return Refused(status, msgspec.json.encode({"error": message, "error_type": kind}))


def overloaded(path: str) -> Refused:
    """What a request gets that finds too few permits."""
    return failure(path, 429, "Model is overloaded", "Overloaded")


def mark_of(text: str) -> tuple[float, float, float]:
    """The first components of a text's vector: its checksum, in numbers that float32 holds exactly."""
    checksum = zlib.crc32(text.encode())
    return (checksum >> 16) / 65536, (checksum & 65535) / 65536, 0.5


@cache
def _tail(dimensions: int) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """What all vectors have in common."""
    raw = np.random.default_rng(1).standard_normal(dimensions - MARKED).astype(np.float32)
    return raw / np.float32(2 * np.linalg.norm(raw))


@cache
def _base64_tail(dimensions: int) -> bytes:
    encoded: bytes = pybase64.b64encode(_tail(dimensions).astype("<f4").tobytes())
    return encoded


@cache
def _json_tail(dimensions: int) -> bytes:
    rendered: bytes = orjson.dumps(_tail(dimensions), option=orjson.OPT_SERIALIZE_NUMPY)
    return rendered[1:]


def render(asked: Asked, settings: Settings) -> bytes:
    """The body of a good answer."""
    if asked.path == "/v1/embeddings":
        return _render_openai(asked, settings)
    if asked.path == "/embed":
        return b"[" + b",".join(_floats(one, asked.dimensions) for one in asked.texts) + b"]"
    scores = [(zlib.crc32(one.encode()) / 2**32, index) for index, one in enumerate(asked.texts)]
    scores.sort(reverse=True)
    return msgspec.json.encode([{"index": index, "score": score} for score, index in scores])


def _render_openai(asked: Asked, settings: Settings) -> bytes:
    tail = _base64_tail(asked.dimensions) if asked.base64 else b""
    items: list[bytes] = []
    for index, text in enumerate(asked.texts):
        start = b'{"object":"embedding","index":%d,"embedding":' % index
        if asked.base64:
            items += (start, b'"', pybase64.b64encode(struct.pack("<3f", *mark_of(text))), tail, b'"},')
        else:
            items += (start, _floats(text, asked.dimensions), b"},")
    items[-1] = items[-1][:-1]
    end = b'],"model":"%b","usage":{"prompt_tokens":%d,"total_tokens":%d}}'
    name = settings.model.encode()
    return b"".join((b'{"object":"list","data":[', *items, end % (name, asked.tokens, asked.tokens)))


def _floats(text: str, dimensions: int) -> bytes:
    return b"[%b,%b,%b," % tuple(repr(one).encode() for one in mark_of(text)) + _json_tail(dimensions)


def info(settings: Settings) -> bytes:
    """GET /info."""
    inner = (
        {"pooling": "cls"} if settings.kind == "embedding" else {"id2label": {"0": "x"}, "label2id": {"x": 0}}
    )
    return msgspec.json.encode(
        {
            "model_id": settings.model,
            "model_sha": None,
            "model_dtype": "float16",
            "served_model_name": settings.model,
            "model_type": {settings.kind: inner},
            "max_concurrent_requests": settings.permits,
            "max_input_length": _MAX_INPUT_TOKENS,
            "max_batch_tokens": 16384,
            "max_batch_requests": None,
            "max_client_batch_size": settings.items,
            "auto_truncate": True,
            "tokenization_workers": 1,
            "version": "1.9.3",
            "sha": None,
            "docker_label": None,
        }
    )


def models(settings: Settings) -> bytes:
    """GET /v1/models, which TEI has not and peers ask for."""
    card = {"id": settings.model, "object": "model", "created": 1, "owned_by": "stub"}
    return msgspec.json.encode({"object": "list", "data": [card]})
