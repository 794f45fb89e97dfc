"""OpenAI's embeddings reply, model list, usage and error envelope, which many servers implement.

Source: OpenAI OpenAPI document 2.3.0. Decoding is strict if a vector could be assigned to the wrong input. It
is lenient about harmless differences between servers: numbers or base64, with or without usage,
an error code that is a number or a word.
"""

import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeAlias

import msgspec
import numpy as np
import pybase64

from backends.contract import Vectors
from backends.contract.errors import InvalidWork, ReplicaFailed
from backends.http.answers import decode_json, in_order, unreadable_value, words_of_error
from backends.http.client import UpstreamResponse
from backends.http.replies import check_vectors, float32

# Most model names in an error message; a hosted server lists hundreds.
NAMES_SHOWN = 5
# Error texts for an input that is too long: OpenAI and vLLM, llama.cpp, Ollama, Cohere, NIM.
TOO_LONG = (
    "maximum context length",
    "maximum model length",
    "too large to process",
    "context size",
    "context length",
    "too long",
    "too many tokens",
    "maximum allowed token size",
)
# Statuses of a server that does not know an encoding.
UNKNOWN_ENCODING = frozenset({400, 415, 422})
# A list without a vector is shorter, with all other fields of a reply.
EMPTY_BYTES_MAX = 4096
# Numbers in base64, little-endian.
FLOAT32 = "<f4"
EMPTY_LIST = re.compile(rb"\[\s*\]")


# --- usage and errors

# Sentences of OpenAI, vLLM and NIM. A number reveals nothing of another tenant's text in a shared request.
CONTEXT_LENGTH = re.compile(
    r"(?:context length (?:is|of) (?:only )?|maximum allowed token size )(\d{1,9})\b", re.IGNORECASE
)

# At most 15 digits: a count beyond them is as invalid as none.
WHOLE_NUMBER = re.compile(r"-?\d{1,15}(?:\.0{1,6})?")
REFUSED_INPUT = "the upstream refused the input"
# The range of a field, in this gateway's and other servers' words. It has no word of an input.
NUMBER = r"-?\d{1,9}(?:\.\d{1,9})?"
RANGE_OF_FIELD = re.compile(
    rf"`?(?P<field>[a-z][a-z_]{{1,39}})`? (?P<rule>(?:must|should) be "
    rf"(?:between {NUMBER} and|at least|at most|greater than|less than) {NUMBER}"
    rf"(?:, (?:not|got) {NUMBER})?)\.?"
)
# A server's word for a refusal, such as content_policy_violation. Longer ones could be words of an input.
CODE = re.compile(r"[a-z0-9][a-z0-9_.-]{1,63}", re.IGNORECASE)
# Words that say no more than the status.
UNTELLING = frozenset({"BadRequestError", "invalid_request_error", "invalid_input", "400", "422"})
# vLLM's type of a refusal, and that of OpenAI, which a gateway in between sends.
REFUSAL_TYPES = frozenset({"BadRequestError", "invalid_request_error"})


# Counts of servers in languages without whole numbers, or with 64-bit numbers as strings (protobuf's JSON).
Count: TypeAlias = int | float | str | None


def whole_number(value: Count, path: str) -> int | None:
    """Return a count written as 7, 7.0 or "7". Raises: ReplicaFailed, if it is no whole number."""
    if value is None or isinstance(value, int):
        return value
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, str) and WHOLE_NUMBER.fullmatch(value):
        return int(value.partition(".")[0])
    raise unreadable_value(path, value)


class TokenCounts(msgspec.Struct, frozen=True):
    """Token counts with special tokens; older rerank routes report the total only."""

    prompt_tokens: Count = None
    total_tokens: Count = None

    @property
    def tokens(self) -> int | None:
        """Prompt tokens, or the total if they are missing. Raises: ReplicaFailed."""
        prompt = whole_number(self.prompt_tokens, "usage.prompt_tokens")
        return whole_number(self.total_tokens, "usage.total_tokens") if prompt is None else prompt


class CountedTokens(msgspec.Struct, frozen=True):
    """Token counts in Cohere's form; LiteLLM reports the total there."""

    input_tokens: Count = None
    total_tokens: Count = None

    @property
    def count(self) -> int | None:
        """Tokens of the inputs, or the total; None if neither is reported. Raises: ReplicaFailed."""
        tokens = whole_number(self.input_tokens, "meta.tokens.input_tokens")
        return whole_number(self.total_tokens, "meta.tokens.total_tokens") if tokens is None else tokens


class ApiMeta(msgspec.Struct, frozen=True):
    """Cohere's `meta`. Its `search_units` count requests, not tokens, and are not read."""

    tokens: CountedTokens | None = None
    billed_units: CountedTokens | None = None

    @property
    def token_count(self) -> int | None:
        """Tokens as counted, or as billed; None if neither is reported."""
        counts = [part.count for part in (self.tokens, self.billed_units) if part is not None]
        return next((count for count in counts if count is not None), None)


class ErrorDetail(msgspec.Struct, frozen=True):
    """Content of an error envelope. code: a word, a status, or None."""

    message: str = ""
    type: str | None = None
    code: int | str | None = None


def error_of(response: UpstreamResponse) -> ErrorDetail:
    """Decode an error in `error`, or flat in `message` or `detail`; of others only the words."""
    try:
        body = msgspec.json.decode(response.body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ErrorDetail(words_of_error(response))
    detail: Any = body.get("error", body) if isinstance(body, dict) else None
    if isinstance(detail, dict) and "message" not in detail:
        # Jina's and Voyage's form.
        detail = detail | {"message": detail.get("detail", "")}
    try:
        return msgspec.convert(detail, ErrorDetail)
    except msgspec.ValidationError:
        # A text in `error`, a list of faults in `detail`, or a string as the whole body.
        return ErrorDetail(words_of_error(response))


def refused_input(error: ErrorDetail) -> InvalidWork:
    """Return the refusal of an input with the range of the field at fault, or the server's code in one word.

    Another message may quote the text of another caller of the same request, and is therefore not repeated.
    """
    if (found := RANGE_OF_FIELD.fullmatch(error.message)) is not None:
        return InvalidWork(f"`{found['field']}` {found['rule']}")
    words = [word for word in (error.code, error.type) if isinstance(word, str) and CODE.fullmatch(word)]
    word = next((word for word in words if word not in UNTELLING), None)
    return InvalidWork(REFUSED_INPUT if word is None else f"{REFUSED_INPUT}: {word}")


def context_length_in(message: str) -> int | None:
    """Return the model's length that the refusal of a long input names, None if it names none."""
    match = CONTEXT_LENGTH.search(message)
    return int(match[1]) if match else None


# --- vectors and models


class UnequalWidths(ReplicaFailed):
    """Rows of different widths, as a model with one vector per token returns them."""


class UpstreamEmbedding(msgspec.Struct, frozen=True):
    """One vector, as numbers or as base64 of little-endian float32."""

    embedding: str | list[float]
    index: int | None = None


class UpstreamEmbeddings(msgspec.Struct, frozen=True):
    """Body of POST /v1/embeddings."""

    data: list[UpstreamEmbedding]
    usage: TokenCounts | None = None


class UpstreamDocument(msgspec.Struct, frozen=True):
    """Vectors of the chunks of one document."""

    data: list[UpstreamEmbedding]
    index: int | None = None


class UpstreamDocuments(msgspec.Struct, frozen=True):
    """Body of POST /v1/contextualizedembeddings."""

    data: list[UpstreamDocument]
    usage: TokenCounts | None = None


class NumbersByType(msgspec.Struct, frozen=True, rename={"vectors": "float"}):
    """Cohere's vectors of each requested type; only numbers are requested."""

    vectors: list[list[float]]


class CohereEmbeddings(msgspec.Struct, frozen=True):
    """Body of Cohere's POST /v2/embed."""

    embeddings: NumbersByType
    meta: ApiMeta | None = None


class UpstreamModel(msgspec.Struct, frozen=True):
    """One entry of GET /v1/models; max_model_len is an extension of vLLM and SGLang."""

    id: str
    max_model_len: int | None = None


class UpstreamModels(msgspec.Struct, frozen=True):
    """Body of GET /v1/models."""

    data: list[UpstreamModel]


def decode_embeddings(body: bytes, expected: int, dtype: str = FLOAT32) -> tuple[Vectors, int | None]:
    """Decode the vectors in input order, (expected, dim) float32, and the tokens, or None if not reported.

    dtype: of numbers in base64. Raises: ReplicaFailed, if the body does not contain `expected` vectors.
    """
    reply = decode_json(body, UpstreamEmbeddings)
    if len(reply.data) != expected:
        raise ReplicaFailed(f"asked for {expected} vectors, got {len(reply.data)}")
    places = in_order([item.index for item in reply.data], "data", listed=True)
    embeddings = [reply.data[place].embedding for place in places]
    vectors = _rows(embeddings, [f"data[{place}]" for place in places], dtype)
    check_vectors(vectors, expected)
    return vectors, reply.usage.tokens if reply.usage else None


def decode_documents(body: bytes, counts: Sequence[int], dtype: str = FLOAT32) -> tuple[Vectors, int | None]:
    """Decode the vectors of the chunks of documents, in order, (sum(counts), dim) float32, and the tokens.

    counts: of the chunks of each document. dtype: of numbers in base64. Raises: ReplicaFailed, if the body
    does not contain a vector for each.
    """
    reply = decode_json(body, UpstreamDocuments)
    if len(reply.data) != len(counts):
        raise ReplicaFailed(f"asked for {len(counts)} documents, got {len(reply.data)}")
    embeddings: list[str | list[float]] = []
    paths: list[str] = []
    order = in_order([item.index for item in reply.data], "data", listed=True)
    for place, count in zip(order, counts, strict=True):
        items, path = reply.data[place].data, f"data[{place}].data"
        if len(items) != count:
            raise ReplicaFailed(f"asked for {count} vectors of a document, got {len(items)}")
        places = in_order([item.index for item in items], path, listed=True)
        embeddings += [items[at].embedding for at in places]
        paths += [f"{path}[{at}]" for at in places]
    vectors = _rows(embeddings, paths, dtype)
    check_vectors(vectors, len(embeddings))
    return vectors, reply.usage.tokens if reply.usage else None


def may_refuse_base64(response: UpstreamResponse) -> bool:
    """Return whether a reply to a request for base64 may be that of a server without it.

    Servers refuse it in many ways, or reply with no vector. Only the refusal of a long input is known.
    """
    if response.status == 200:
        return is_without_vectors(response.body)
    if response.status not in UNKNOWN_ENCODING:
        return False
    message = error_of(response).message.lower()
    return not any(phrase in message for phrase in TOO_LONG)


def as_numbers(body: dict[str, Any]) -> dict[str, Any]:
    """Return the body of a request that asks for numbers instead of base64."""
    fields = {name: value for name, value in body.items() if name != "endianness"}
    return fields | {"encoding_format": "float"}


def is_without_vectors(body: bytes) -> bool:
    """Return whether a body is a list without any vector, as of a server that does not know base64."""
    if len(body) > EMPTY_BYTES_MAX or EMPTY_LIST.search(body) is None:
        return False
    try:
        return not msgspec.json.decode(body, type=UpstreamEmbeddings).data
    except (msgspec.DecodeError, ValueError, RecursionError):
        return False


def decode_typed_embeddings(body: bytes, expected: int) -> tuple[Vectors, int | None]:
    """Decode Cohere's reply, which has the vectors in input order; the rest is as in `decode_embeddings`.

    Raises: ReplicaFailed, if the body does not contain `expected` vectors.
    """
    reply = decode_json(body, CohereEmbeddings)
    vectors = _rows(reply.embeddings.vectors, [])
    check_vectors(vectors, expected)
    return vectors, reply.meta.token_count if reply.meta else None


def _rows(embeddings: Sequence[str | list[float]], paths: Sequence[str], dtype: str = FLOAT32) -> Vectors:
    """Return the rows as one array. paths: of those that may be base64. dtype: of their numbers."""
    rows = [
        _row(embedding) if isinstance(embedding, list) else _unpacked(embedding, index, paths, dtype)
        for index, embedding in enumerate(embeddings)
    ]
    # Checked here, because numpy would convert unequal rows to an array of objects.
    if len({row.shape for row in rows}) > 1:
        index = next(index for index, row in enumerate(rows) if row.shape != rows[0].shape)
        raise UnequalWidths("the upstream's vectors differ in width").with_facts(
            detail=f"vector 0 has {rows[0].size} numbers, vector {index} has {rows[index].size}"
        )
    return np.array(rows, dtype=np.float32)


def _row(embedding: list[float]) -> Vectors:
    return float32(embedding)


def _unpacked(embedding: str, index: int, paths: Sequence[str], dtype: str) -> Vectors:
    try:
        numbers = np.frombuffer(pybase64.b64decode(embedding, validate=True), dtype)
        return numbers.astype(np.float32, copy=False)
    except ValueError as error:
        raise unreadable_value(f"{paths[index]}.embedding", embedding, index) from error


def decode_models(response: UpstreamResponse) -> list[UpstreamModel]:
    """Decode a list of models.

    Raises: ReplicaFailed.
    """
    try:
        return decode_json(response.body, UpstreamModels).data
    except ReplicaFailed as error:
        raise ReplicaFailed("the upstream's list of models could not be read").with_facts(
            detail=error.detail
        ) from error


def choose_model(models: Sequence[str], configured: str | None) -> str:
    """Return the configured model name, or the only model that the server lists.

    Raises: ReplicaFailed.
    """
    names = ", ".join(models[:NAMES_SHOWN]) or "nothing"
    if configured is not None:
        if configured not in models:
            raise ReplicaFailed(f"the server serves {names}, and not {configured!r}")
        return configured
    if len(models) != 1:
        raise ReplicaFailed(f"the server serves {names}: select one with `model`")
    return models[0]


class Base64Switch:
    """Requests for embeddings in base64, and in numbers once the server has refused base64."""

    def __init__(self) -> None:
        self._is_on = True

    async def send(
        self, body: dict[str, Any], post: Callable[[dict[str, Any]], Awaitable[UpstreamResponse]]
    ) -> UpstreamResponse:
        """Send a body that asks for base64, and again without if need be. Raises: BackendError."""
        if not self._is_on:
            return await post(as_numbers(body))
        response = await post(body)
        if may_refuse_base64(response):
            second = await post(as_numbers(body))
            if second.status == 200:
                response, self._is_on = second, False
        return response
