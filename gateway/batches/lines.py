"""Lines of a job: validation of the input and its division into chunks, and results in OpenAI's format. Pure.

The input arrives in blocks of any size. Only the unfinished last line of a block is kept, and 24 bytes for
each line, by which repeated ids are found. Blank lines are no requests: many files end with one. A valid
line is read again from its chunk when it runs, as a call of the gateway's own request path (`LineServer`),
and ends with one result. Everything is decoded once for what is needed then, and never re-encoded.
"""

import hashlib
import re
import secrets
from array import array
from collections.abc import Callable
from typing import Annotated, Protocol

import msgspec
import numpy as np

from gateway.batches.records import Chunk, Job, LineProblem, Part, Plan

# A caller mends a file by its first problems; a list of a million helps no one.
PROBLEMS_MAX = 100
CUSTOM_ID_CHARACTERS_MAX = 512
MESSAGE_CHARACTERS_MAX = 200
DIGEST_BYTES = 16
# Arrays and objects inside each other in a line. Decoders recurse, and the rest of the stack is not theirs.
NESTING_MAX = 100
TEXTS = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"')
NO_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]{}")
ID = re.compile(rb'"custom_id"\s*:\s*"([^"\\]*(?:\\.[^"\\]*)*)"')
# First bytes of files that are no JSON Lines, and their names.
FOREIGN = (
    (b"\x1f\x8b", "is compressed with gzip: upload it uncompressed"),
    (b"PK\x03\x04", "is a zip archive: upload the file inside it"),
    (b"\x28\xb5\x2f\xfd", "is compressed with zstd: upload it uncompressed"),
    (b"BZh", "is compressed with bzip2: upload it uncompressed"),
    (b"PAR1", "is a Parquet file: write one JSON object in each line"),
    (b"\xef\xbb\xbf", "begins with a byte order mark: save it as UTF-8 without one"),
    (b"\xff\xfe", "is UTF-16: save it as UTF-8"),
    (b"\xfe\xff", "is UTF-16: save it as UTF-8"),
    (b"[", "is a JSON array: write one JSON object in each line"),
)
LONGEST_MARK = 4
# Fields of a line that may have several inputs, in any of the endpoints.
INPUTS = ("input", "documents", "items", "queries", "data_1", "data_2", "text_1", "text_2")
# Codes and messages of lines without a reply.
EXPIRED = "batch_expired"
CANCELLED = "batch_cancelled"
FAILED = "internal_error"
MESSAGES = {
    EXPIRED: "This request could not be executed before the completion window expired.",
    CANCELLED: "This request was not executed, because its batch was cancelled.",
    FAILED: "The gateway failed to run this request; its log has the reason.",
}

# Returns why lines with this model cannot be served, None if they can.
CheckModel = Callable[[str | None], LineProblem | None]


class BodyHead(msgspec.Struct):
    """The part of a request's body that is checked before the job begins."""

    model: Annotated[str, msgspec.Meta(max_length=512)] | None = None


class InputLine(msgspec.Struct):
    """One line of the input."""

    custom_id: str
    method: str
    url: str
    body: BodyHead


class RunLine(msgspec.Struct):
    """The part of a valid line that is needed to run it. body: empty if it cannot be read."""

    custom_id: str
    body: msgspec.Raw


class LineRules(msgspec.Struct, frozen=True):
    """Bounds on an input and on a chunk. endpoint: `url` of every line."""

    endpoint: str
    lines_max: int
    line_bytes: int
    chunk_lines: int = 128
    chunk_bytes: int = 1024 * 1024


class LineChecker:
    """Checks one input. check_model: asked once for each model."""

    def __init__(self, rules: LineRules, check_model: CheckModel) -> None:
        self._rules = rules
        self._check_model = check_model
        self._decoder = msgspec.json.Decoder(InputLine)
        self._models: dict[str | None, LineProblem | None] = {}
        self._problems: list[LineProblem] = []
        # Of the id of each request, and its line.
        self._digests = bytearray()
        self._numbers = array("Q")
        self._chunks: list[Chunk] = []
        self._first = 0
        self._start = 0
        # Of a line that has not ended: its beginning, and the bytes behind that, which are too many to keep.
        self._rest = b""
        self._dropped = 0
        self._offset = 0
        # Lines of the file so far, for messages, and those of them that are requests.
        self._number = 0
        self._lines = 0
        self._is_foreign = False
        self._unexecuted_bytes = 0

    @property
    def is_hopeless(self) -> bool:
        """Return whether reading on would find nothing of use."""
        return self._is_foreign or self._has_too_many_lines or len(self._problems) >= PROBLEMS_MAX

    @property
    def _has_too_many_lines(self) -> bool:
        # Reading blank lines costs time, too.
        return max(self._lines, self._number - self._lines) > self._rules.lines_max

    def feed(self, block: bytes) -> None:
        """Check the lines that end in the next block."""
        *lines, rest = (self._rest + block).split(b"\n")
        for line in lines:
            if self.is_hopeless:
                return
            self._take(line, 1)
        is_long = self._dropped or len(rest) > self._rules.line_bytes
        self._rest = rest[:LONGEST_MARK] if is_long else rest
        self._dropped += len(rest) - len(self._rest)

    def finish(self, now_s: float) -> Plan:
        """Return the plan, which has problems if the input cannot be run."""
        if not self.is_hopeless and self._rest:
            self._take(self._rest, 0)
        self._close_chunk()
        if self._has_too_many_lines:
            message = f"the file has more than {self._rules.lines_max} lines"
            self._problems.append(LineProblem("too_many_lines", message))
        if not self._lines and not self._problems:
            self._problems.append(LineProblem("empty_file", "the file has no lines"))
        self._find_repeated_ids()
        if self._problems:
            ordered = sorted(self._problems, key=lambda problem: problem.line or 0)
            return Plan(now_s, problems=tuple(ordered[:PROBLEMS_MAX]))
        model = next(iter(self._models)) if len(self._models) == 1 else None
        chunks = tuple(self._chunks)
        return Plan(now_s, self._lines, chunks, model, unexecuted_bytes=self._unexecuted_bytes)

    def _take(self, line: bytes, newline: int) -> None:
        """Check one line, which has ended. newline: number of bytes after it."""
        length, self._dropped = len(line) + self._dropped, 0
        self._number += 1
        found = [problem for mark, problem in FOREIGN if line.startswith(mark)] if self._number == 1 else []
        if found:
            self._add("invalid_file", f"the file {found[0]}")
            # Everything else would be a consequence of that.
            self._is_foreign = True
        elif length == len(line) and not line.strip():
            self._skip_blank(length + newline)
        else:
            self._extend_chunk(length + newline)
            self._lines += 1
            if self._lines <= self._rules.lines_max:
                self._check(line, length)

    def _check(self, line: bytes, length: int) -> None:
        parsed = self._parsed(line, length)
        self._numbers.append(self._number)
        if parsed is None:
            # Of no other request.
            self._digests += self._number.to_bytes(DIGEST_BYTES)
            return
        text = parsed.custom_id.encode("utf-8", "surrogatepass")
        self._digests += hashlib.blake2b(text, digest_size=DIGEST_BYTES).digest()
        self._unexecuted_bytes += unexecuted_bytes(parsed.custom_id)
        self._check_fields(parsed)

    def _parsed(self, line: bytes, length: int) -> InputLine | None:
        """Return the line, or None after a problem was added. length: with what was dropped."""
        if length > self._rules.line_bytes:
            self._add("line_too_long", f"the line is longer than {self._rules.line_bytes} bytes")
            return None
        try:
            # The decoder does not look into the texts of fields that it skips.
            line.decode()
            parsed = self._decoder.decode(line)
            if _nesting(line) <= NESTING_MAX:
                return parsed
            self._too_deep()
        except msgspec.ValidationError as error:
            reason, _, place = str(error).partition(" - at `$")
            field = place.strip("`.") or None
            self._add("invalid_request", reason[:MESSAGE_CHARACTERS_MAX], field)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            reason = "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else str(error)
            self._add("invalid_json_line", f"the line is not valid JSON: {reason}"[:MESSAGE_CHARACTERS_MAX])
        except RecursionError:
            self._too_deep()
        return None

    def _too_deep(self) -> None:
        message = f"the line has more than {NESTING_MAX} arrays and objects inside each other"
        self._add("invalid_json_line", message)

    def _check_fields(self, line: InputLine) -> None:
        if not line.custom_id or len(line.custom_id) > CUSTOM_ID_CHARACTERS_MAX:
            message = f"`custom_id` must have 1 to {CUSTOM_ID_CHARACTERS_MAX} characters"
            self._add("invalid_custom_id", message, "custom_id")
        if line.method != "POST":
            self._add("invalid_method", "`method` must be POST", "method")
        if line.url != self._rules.endpoint:
            message = f"`url` must be {self._rules.endpoint}, the `endpoint` of the batch"
            self._add("mismatched_endpoint", message, "url")
        model = line.body.model
        if model not in self._models and len(self._models) < PROBLEMS_MAX:
            self._models[model] = self._check_model(model)
        problem = self._models.get(model)
        if problem is not None:
            self._problems.append(msgspec.structs.replace(problem, param="body.model", line=self._number))

    def _skip_blank(self, size: int) -> None:
        """Pass over a blank line: a chunk may have some in its middle, and begins with none."""
        if self._offset - self._start + size > self._rules.chunk_bytes:
            self._close_chunk()
        self._offset += size
        if self._lines == self._first:
            self._start = self._offset

    def _extend_chunk(self, size: int) -> None:
        """Add a request to the chunk, or to the next one if it is too large for this one."""
        lines, length = self._lines - self._first, self._offset - self._start
        if lines and (lines >= self._rules.chunk_lines or length + size > self._rules.chunk_bytes):
            self._close_chunk()
        self._offset += size

    def _close_chunk(self) -> None:
        lines = self._lines - self._first
        if lines:
            self._chunks.append(Chunk(self._first, lines, self._start, self._offset - self._start))
        self._first, self._start = self._lines, self._offset

    def _find_repeated_ids(self) -> None:
        halves = np.frombuffer(bytes(self._digests), np.uint64).reshape(-1, 2)
        order = np.lexsort((np.arange(len(halves)), halves[:, 1], halves[:, 0]))
        ordered = halves[order]
        same = np.flatnonzero((ordered[1:] == ordered[:-1]).all(axis=1))
        for index in same[:PROBLEMS_MAX].tolist():
            first, second = self._numbers[order[index]], self._numbers[order[index + 1]]
            self._add("duplicate_custom_id", f"line {first} has the same `custom_id`", "custom_id", second)

    def _add(self, code: str, message: str, param: str | None = None, line: int | None = None) -> None:
        """Add a problem of a line, which is the current one if no other is named."""
        self._problems.append(LineProblem(code, message, param, line or self._number))


def _nesting(line: bytes) -> int:
    """Return how many arrays and objects of valid JSON are inside each other, or that they are few."""
    count = line.count(b"[") + line.count(b"{")
    if count <= NESTING_MAX:
        return count
    brackets = np.frombuffer(TEXTS.sub(b"", line).translate(None, NO_BRACKETS), np.uint8)
    opening = (brackets == ord("[")) | (brackets == ord("{"))
    return int(np.cumsum(np.where(opening, 1, -1)).max(initial=0))


def split_chunk(data: bytes) -> list[RunLine]:
    """Return the lines of a chunk; one that cannot be read, though validation could, ends no other."""
    return [_run_line(line) for line in data.split(b"\n") if line.strip()]


def _run_line(line: bytes) -> RunLine:
    try:
        return _decode_line(line)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        found = ID.search(line)
        return RunLine("" if found is None else found[1].decode(errors="replace"), msgspec.Raw())


def count_inputs(body: bytes) -> int:
    """Return at least the number of inputs in a line: each has a vector or a score."""
    try:
        fields = _decode_fields(body)
        return 1 + sum(_count(fields[name]) for name in INPUTS if name in fields)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return 1 + body.count(b",")


def _count(field: msgspec.Raw) -> int:
    """Return the number of inputs in a field: a text and a list of token ids are one."""
    text = bytes(field)
    parts = _decode_list(text) if text.startswith(b"[") else []
    is_ids = bool(parts) and bytes(parts[0])[:1].isdigit()
    return 0 if is_ids else len(parts)


class LineResult(msgspec.Struct, frozen=True):
    """Result of one line. text: as it stands in the file of results, with its newline."""

    part: Part
    text: bytes
    tokens: int = 0
    cached_tokens: int = 0
    is_executed: bool = True


class LineReply(msgspec.Struct, frozen=True):
    """Reply to a line that was run. status: HTTP's. body: JSON. tokens: as they were settled.

    ignored_fields: of the line, as in the header of a reply.
    """

    status: int
    body: bytes
    request_id: str
    tokens: int = 0
    cached_tokens: int = 0
    ignored_fields: str = ""


class LineServer(Protocol):
    """Runs lines as calls of class bulk, with the permissions and limits that their key has now."""

    async def serve(self, job: Job, id_: str, body: bytes) -> LineReply:
        """Return the reply to a line, also one that reports an error. id_: the same for a try after a kill.

        Raises: GatewayError if another try might succeed.
        """

    async def settle(self) -> None:
        """Wait until the quota store has what all lines so far have cost. Raises: QuotaUnavailable."""

    def check_model(self, job: Job, model: str | None) -> LineProblem | None:
        """Return why lines of a job with this model cannot be served, None if they can."""

    def calls(self) -> int:
        """Return the number of interactive calls so far."""

    def is_draining(self) -> bool:
        """Return whether the process is about to stop."""


class _Response(msgspec.Struct, omit_defaults=True):
    status_code: int
    request_id: str
    body: msgspec.Raw
    ignored_fields: str = ""


class _Error(msgspec.Struct):
    code: str
    message: str


class _ResultLine(msgspec.Struct):
    id: str
    custom_id: str
    response: _Response | None
    error: _Error | None


_decode_line = msgspec.json.Decoder(RunLine).decode
_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_list = msgspec.json.Decoder(list[msgspec.Raw]).decode
_encode = msgspec.json.Encoder().encode


def result_of(custom_id: str, reply: LineReply) -> LineResult:
    """Return the result of a line that got a reply."""
    part: Part = "out" if reply.status == 200 else "err"
    response = _Response(reply.status, reply.request_id, msgspec.Raw(reply.body), reply.ignored_fields)
    return LineResult(part, _text(custom_id, response, None), reply.tokens, reply.cached_tokens)


def without_reply(custom_id: str, code: str) -> LineResult:
    """Return the result of a line that was never run, or that the gateway cannot run."""
    text = _text(custom_id, None, _Error(code, MESSAGES[code]))
    return LineResult("err", text, is_executed=code == FAILED)


def unexecuted_bytes(custom_id: str) -> int:
    """Return how long the result of a line is at most that was never run."""
    return UNEXECUTED_BYTES + len(_encode(custom_id))


def _text(custom_id: str, response: _Response | None, error: _Error | None) -> bytes:
    return _encode(_ResultLine(f"batch_req_{secrets.token_hex(12)}", custom_id, response, error)) + b"\n"


UNEXECUTED_BYTES = max(len(without_reply("", code).text) for code in MESSAGES)
