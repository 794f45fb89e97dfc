"""Results of lines in OpenAI's format. Pure."""

import secrets

import msgspec

from gateway.batches.records import Part

EXPIRED = "batch_expired"
CANCELLED = "batch_cancelled"
FAILED = "internal_error"
MESSAGES = {
    EXPIRED: "This request could not be executed before the completion window expired.",
    CANCELLED: "This request was not executed, because its batch was cancelled.",
    FAILED: "The gateway failed to run this request; its log has the reason.",
}


class LineResult(msgspec.Struct, frozen=True):
    """Result of one line. text: as it stands in the file of results, with its newline."""

    part: Part
    text: bytes
    tokens: int = 0
    cached_tokens: int = 0
    is_executed: bool = True


class LineReply(msgspec.Struct, frozen=True):
    """Reply to a line that was run. status: HTTP's. body: JSON. tokens: as they were settled."""

    status: int
    body: bytes
    request_id: str
    tokens: int = 0
    cached_tokens: int = 0


class _Response(msgspec.Struct):
    status_code: int
    request_id: str
    body: msgspec.Raw


class _Error(msgspec.Struct):
    code: str
    message: str


class _Line(msgspec.Struct):
    id: str
    custom_id: str
    response: _Response | None
    error: _Error | None


_encode = msgspec.json.Encoder().encode


def result_of(custom_id: str, reply: LineReply) -> LineResult:
    """Return the result of a line that got a reply."""
    part: Part = "out" if reply.status == 200 else "err"
    response = _Response(reply.status, reply.request_id, msgspec.Raw(reply.body))
    return LineResult(part, _text(custom_id, response, None), reply.tokens, reply.cached_tokens)


def unexecuted(custom_id: str, code: str) -> LineResult:
    """Return the result of a line that was never run."""
    return LineResult("err", _text(custom_id, None, _Error(code, MESSAGES[code])), is_executed=False)


def unexecuted_bytes(custom_id: str) -> int:
    """Return how long the result of a line is at most that was never run."""
    return UNEXECUTED_BYTES + len(_encode(custom_id))


def failed(custom_id: str) -> LineResult:
    """Return the result of a line that the gateway cannot run."""
    return LineResult("err", _text(custom_id, None, _Error(FAILED, MESSAGES[FAILED])))


def _text(custom_id: str, response: _Response | None, error: _Error | None) -> bytes:
    return _encode(_Line(f"batch_req_{secrets.token_hex(12)}", custom_id, response, error)) + b"\n"


UNEXECUTED_BYTES = max(len(unexecuted("", code).text) for code in MESSAGES)
