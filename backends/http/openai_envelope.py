"""OpenAI's usage object and error envelope, which many servers implement.

Source: OpenAI OpenAPI document 2.3.0. Decoding is lenient about differences between servers: usage with or
without prompt_tokens, an error code that is a number or a word.
"""

import re
from typing import Any, TypeAlias

import msgspec

from backends.contract.errors import InvalidWork
from backends.http.answers import unreadable_value
from backends.http.client import UpstreamResponse

# OpenAI's and vLLM's sentence. A number reveals nothing of another tenant's text in a shared request.
CONTEXT_LENGTH = re.compile(r"context length (?:is|of) (?:only )?(\d{1,9})\b", re.IGNORECASE)

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
    """Decode an error in `error`, or flat in `message` or `detail`; an unreadable body gives an empty one."""
    try:
        body = msgspec.json.decode(response.body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ErrorDetail()
    detail: Any = body.get("error", body) if isinstance(body, dict) else None
    if isinstance(detail, dict) and "message" not in detail:
        # Jina's and Voyage's form.
        detail = detail | {"message": detail.get("detail", "")}
    try:
        return msgspec.convert(detail, ErrorDetail)
    except msgspec.ValidationError:
        return ErrorDetail()


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
