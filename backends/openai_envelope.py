"""OpenAI's usage object and error envelope, which many servers implement.

Source: OpenAI OpenAPI document 2.3.0. Decoding is lenient about differences between servers: usage with or
without prompt_tokens, an error code that is a number or a word.
"""

import re
from typing import Any

import msgspec

from backends.http import UpstreamResponse

# OpenAI's and vLLM's sentence. A number reveals nothing of another tenant's text in a shared request.
CONTEXT_LENGTH = re.compile(r"context length (?:is|of) (?:only )?(\d{1,9})\b", re.IGNORECASE)


class TokenUsage(msgspec.Struct, frozen=True):
    """Token counts with special tokens; older rerank routes report the total only."""

    prompt_tokens: int | None = None
    total_tokens: int | None = None

    @property
    def tokens(self) -> int | None:
        """Prompt tokens, or the total if they are missing."""
        return self.total_tokens if self.prompt_tokens is None else self.prompt_tokens


class CountedTokens(msgspec.Struct, frozen=True):
    """Token counts in Cohere's form, whole numbers written as 3 or 3.0; LiteLLM reports the total there."""

    input_tokens: int | float | None = None
    total_tokens: int | float | None = None

    @property
    def count(self) -> int | None:
        """Tokens of the inputs, or the total; None if neither is reported."""
        tokens = self.total_tokens if self.input_tokens is None else self.input_tokens
        return None if tokens is None else int(tokens)


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


def context_length_in(message: str) -> int | None:
    """Return the model's length that the refusal of a long input names, None if it names none."""
    match = CONTEXT_LENGTH.search(message)
    return int(match[1]) if match else None
