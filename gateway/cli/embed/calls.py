"""Calls of an embeddings API, repeated until the server answers or the deadline passes, and their replies.

A server is asked for the cheapest form of vectors first: Arrow, then base64, then the numbers of JSON. The
sizes that a stream of Arrow states are checked before pyarrow reads it, which decompresses without a bound.
"""

import asyncio
import math
import random
import re
import ssl
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeAlias

import httpx
import msgspec
import numpy as np
import pyarrow as pa
import pybase64

from gateway.arrow import batch_sizes
from gateway.cli.embed.plan import EmbedFailed, EmbedStopped, Plan, Request
from gateway.cli.printable import printable

ARROW = "application/vnd.apache.arrow.stream"
JSON = "application/json"
EMBED_PATH = "/embed"
# Of one reply, as it arrives and as it is decompressed.
REPLY_BYTES_MAX = 256 * 1024 * 1024
# Of one reply; a call has a few MiB of text at most.
TOKENS_MAX = 2**31
# Statuses that say that the same call may succeed later.
RETRIED = frozenset({408, 425, 429, 500, 502, 503, 504})
# Statuses that a part of the texts may have caused.
REFUSALS = frozenset({400, 413, 422})
# Statuses with which a server without Arrow, or without base64, may refuse to be asked for it.
FORM_REFUSALS = {"arrow": frozenset({406, 415}), "base64": REFUSALS}
# In the gateway's error for a call that is not done by the deadline of its model.
FEWER = "send fewer inputs"
# The gateway's messages about one input begin with its index.
INPUT = re.compile(r"input ([0-9]{1,9}): ")
BACKOFF_FIRST_S, BACKOFF_MAX_S = 0.25, 30.0
NOTICE_S = 30.0
SIDES = {"error": "NONE", "left": "START", "right": "END"}
HINTS = {
    401: "; set the key in GATEWAY_API_KEY, or pass a file with --key-file",
    404: "; see --model, and the models of the server at /v1/models",
}
NO_VECTORS = "its vectors are no lists of numbers of a fixed size"
NOT_JSON = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
# pyarrow raises the last two for damaged streams.
UNREADABLE = (*NOT_JSON, ValueError, TypeError, LookupError, OSError, pa.ArrowException)

Vectors: TypeAlias = np.ndarray[tuple[int, int], np.dtype[np.float32]]


class Refused(Exception):
    """The server refuses these texts or options. The message is the server's, with its status.

    place: index of the text at fault, as the server reports it; None if it does not.
    """

    def __init__(self, message: str, place: int | None = None) -> None:
        super().__init__(message)
        self.place = place


class TooSlow(Refused):
    """The server's own deadline for a call passed, and it wants fewer inputs. The message is the server's."""


class Unreadable(Exception):
    """A reply with status 200 that is not one of an embeddings API."""


class HttpReply(NamedTuple):
    """A reply."""

    status: int
    headers: httpx.Headers
    body: bytes

    @property
    def words(self) -> str:
        """The server's error in words."""
        hint = HINTS.get(self.status, "")
        return f"the server returned {self.status}: {problem_of(self.body)}{hint}"

    @property
    def is_too_slow(self) -> bool:
        """The deadline of the server's model passed, and a smaller call may meet it."""
        return self.status == 504 and FEWER in problem_of(self.body)

    @property
    def is_spent(self) -> bool:
        """A limit is spent for so long that the call is not worth repeating.

        The gateway sends `x-should-retry: false` with a wait above 60 s, and never a longer `retry-after`. A
        limit of an hour has such waits too, but passes single calls meanwhile; its code differs.
        """
        if self.status != 429 or self.headers.get("x-should-retry", "").lower() != "false":
            return False
        error = (_fields_of(self.body) or {}).get("error")
        return not (isinstance(error, dict) and error.get("code") == "rate_limit_exceeded")


class Reply(NamedTuple):
    """Vectors of a call, (texts, dim). tokens: 0 if unknown. truncated: indices, None if unknown."""

    vectors: Vectors
    tokens: int = 0
    model: str | None = None
    fingerprint: str | None = None
    truncated: tuple[int, ...] | None = ()


class _Item(msgspec.Struct):
    embedding: str | list[float]
    index: int | None = None


class _Usage(msgspec.Struct):
    total_tokens: Annotated[int, msgspec.Meta(ge=0, le=TOKENS_MAX)] = 0


class _OpenAIReply(msgspec.Struct):
    data: list[_Item]
    model: str | None = None
    usage: _Usage | None = None


def open_client(plan: Plan, key: str | None, ca: Path | None) -> httpx.AsyncClient:
    """Return a client that follows no redirect, so that a key goes only to the address that was given.

    Raises: EmbedFailed if `ca` cannot be used.
    """
    try:
        context = ssl.create_default_context(cafile=None if ca is None else str(ca))
    except (OSError, ssl.SSLError) as error:
        raise EmbedFailed(f"{ca} cannot be used: {error}") from error
    headers = {"content-type": JSON, "accept-encoding": "identity", "x-priority": "bulk"}
    if key:
        headers["authorization"] = f"Bearer {key}"
    limits = httpx.Limits(max_connections=plan.concurrency, max_keepalive_connections=plan.concurrency)
    timeout = httpx.Timeout(plan.timeout_s, pool=None)
    return httpx.AsyncClient(headers=headers, timeout=timeout, limits=limits, verify=context, trust_env=False)


class Caller:
    """Caller of one server. notice: takes why a call is repeated, now and then."""

    def __init__(self, client: httpx.AsyncClient, plan: Plan, notice: Callable[[str], None]) -> None:
        self._client = client
        self._timeout_s, self._deadline_s = plan.timeout_s, plan.deadline_s
        self._notice = notice
        self._noticed_s = -math.inf
        self._chance = random.Random()  # noqa: S311 - no secret
        # Moment before which the server wants no call.
        self._resume_s = 0.0
        # Forms of vectors that the server may write, the cheapest first.
        self._forms = ["arrow", "base64", "json"]

    async def first_model(self, request: Request) -> Request:
        """Return a request that names a model: the one that the server embeds with, or its first.

        Raises: EmbedFailed, EmbedStopped.
        """
        url = f"{request.base}/v1/models"
        reply = await self._repeated("GET", url, None, JSON, lambda: False)
        if reply.status in (401, 403):
            raise EmbedFailed(f"{url}: {reply.words}")
        try:
            listed = msgspec.json.decode(reply.body)["data"]
            chosen = next(
                (model for model in listed if "embed" in (model.get("default_for") or ())), listed[0]
            )
            return msgspec.structs.replace(request, model=str(chosen["id"]))
        except (msgspec.MsgspecError, UnicodeDecodeError, LookupError, TypeError, AttributeError) as error:
            if request.path.endswith(EMBED_PATH):
                return request
            raise EmbedFailed(f"{url} lists no model; name it with --model") from error

    async def embed(
        self, request: Request, texts: Sequence[str], ends: Callable[[], bool] = lambda: True
    ) -> Reply:
        """Return the vectors of texts.

        ends: returns whether a call that is too slow for the server is not worth repeating. Raises: Refused,
        EmbedFailed, EmbedStopped.
        """
        form, url = self._forms[0], request.base + request.path
        body = body_of(request, texts, packed=form == "base64")
        accepted = f"{ARROW}, {JSON}" if form == "arrow" else JSON
        reply = await self._repeated("POST", url, body, accepted, ends)
        if reply.is_too_slow:
            if len(texts) > 1:
                self._report(f"{url}: {reply.words}; trying again with fewer")
            raise TooSlow(reply.words)
        if reply.status in FORM_REFUSALS.get(form, ()):
            self._drop_form(form)
            return await self.embed(request, texts, ends)
        if reply.status in REFUSALS:
            raise Refused(reply.words, place_of(reply.body, len(texts)))
        if reply.status != 200:
            raise EmbedFailed(f"{url}: {reply.words}")
        try:
            return self._read(reply, len(texts))
        except Unreadable as error:
            raise EmbedFailed(f"{url}: {error}") from error

    def _drop_form(self, form: str) -> None:
        # Another call may have dropped it meanwhile.
        with suppress(ValueError):
            self._forms.remove(form)

    def _read(self, reply: HttpReply, count: int) -> Reply:
        """Return the vectors of a reply. Raises: Unreadable."""
        headers = reply.headers
        media_type = headers.get("content-type", "")
        if not media_type.startswith(ARROW):
            # Further calls ask for numbers that are cheaper to read than those of JSON.
            self._drop_form("arrow")
        found = read_reply(reply.body, media_type, count)
        return found._replace(
            tokens=found.tokens or _read_tokens(headers.get("x-compute-tokens", "0")),
            fingerprint=headers.get("x-embedding-fingerprint"),
            truncated=read_truncated(headers.get("x-truncated-inputs"), count),
        )

    async def _repeated(
        self, method: str, url: str, body: bytes | None, accepted: str, ends: Callable[[], bool]
    ) -> HttpReply:
        """Return the first reply that is worth reading. ends: as of `embed`.

        Raises: EmbedFailed, EmbedStopped.
        """
        end_s = time.monotonic() + self._deadline_s
        attempt = 0
        while True:
            await self._wait_for_turn()
            try:
                reply = await self._send(method, url, body, accepted)
            except (httpx.HTTPError, TimeoutError) as error:
                problem, asked_s = str(error) or type(error).__name__, None
            else:
                if reply.status not in RETRIED or (reply.is_too_slow and ends()):
                    return reply
                if reply.is_spent:
                    raise EmbedStopped(f"{url}: {reply.words}")
                problem, asked_s = reply.words, _retry_after_s(reply.headers)
            backoff_s = min(BACKOFF_MAX_S, BACKOFF_FIRST_S * 2**attempt) * self._chance.uniform(0.5, 1)
            if time.monotonic() + max(backoff_s, asked_s or 0.0) > end_s:
                asked = "" if asked_s is None else f", and the server asks to wait {asked_s:,.0f} s"
                passed = f"no success until --deadline ({self._deadline_s:g} s){asked}"
                raise EmbedStopped(f"{url}: {problem}; {passed}")
            self._resume_s = max(self._resume_s, time.monotonic() + (asked_s or 0.0))
            self._report(f"{url}: {problem}; trying again")
            attempt = min(attempt + 1, 16)
            await asyncio.sleep(backoff_s)

    async def _wait_for_turn(self) -> None:
        """Wait until the moment before which the server wants no call; another call may move it on."""
        wait_s = self._resume_s - time.monotonic()
        if wait_s > 0:
            await asyncio.sleep(wait_s)
            await self._wait_for_turn()

    def _report(self, words: str) -> None:
        if time.monotonic() - self._noticed_s >= NOTICE_S:
            self._noticed_s = time.monotonic()
            self._notice(words)

    async def _send(self, method: str, url: str, body: bytes | None, accepted: str) -> HttpReply:
        """Return one reply. Raises: httpx.HTTPError, TimeoutError, EmbedFailed."""
        async with (
            asyncio.timeout(self._timeout_s),
            self._client.stream(method, url, content=body, headers={"accept": accepted}) as reply,
        ):
            content = bytearray()
            async for part in reply.aiter_raw():
                content += part
                if len(content) > REPLY_BYTES_MAX:
                    raise EmbedFailed(f"{url}: a reply has more than {REPLY_BYTES_MAX} bytes")
        if reply.headers.get("content-encoding", "identity") != "identity":
            raise EmbedFailed(f"{url}: the server compresses its replies, although it is asked not to")
        return HttpReply(reply.status_code, reply.headers, bytes(content))


def body_of(request: Request, texts: Sequence[str], *, packed: bool) -> bytes:
    """Return the body of a call. packed: ask for base64, where the server does not return Arrow."""
    content: dict[str, Any] = {"model": request.model, "dimensions": request.dimensions}
    if request.path.endswith(EMBED_PATH):
        content["prompt_name"] = request.prompt_name
        if request.truncate is not None:
            content["truncate"] = request.truncate != "error"
            if request.truncate != "error":
                content["truncation_direction"] = request.truncate.capitalize()
    else:
        content["input_type"] = request.input_type
        content["truncate"] = SIDES.get(request.truncate or "")
        content["encoding_format"] = "base64" if packed else None
    given = {name: value for name, value in content.items() if value is not None}
    return msgspec.json.encode(given | {"inputs" if request.path.endswith(EMBED_PATH) else "input": texts})


def read_reply(body: bytes, media_type: str, count: int) -> Reply:
    """Return the vectors of a reply to so many texts. Raises: Unreadable."""
    try:
        reply = _read_arrow(body, count) if media_type.startswith(ARROW) else _read_json(body)
    except UNREADABLE as error:
        raise Unreadable(f"not a reply of an embeddings API: {error}") from error
    vectors = reply.vectors
    if vectors.ndim != 2 or len(vectors) != count or not vectors.shape[1]:
        raise Unreadable(f"{len(vectors)} vectors for {count} texts")
    if not np.isfinite(vectors).all():
        raise Unreadable("a vector has numbers that are not finite")
    return reply


def _read_arrow(body: bytes, count: int) -> Reply:
    size = 0
    # All messages are checked first: a kilobyte of compressed buffers can stand for gigabytes.
    for found in batch_sizes(body):
        if found.is_delta:
            raise ValueError("a delta of a dictionary")
        size += found.decoded_bytes
        if size > REPLY_BYTES_MAX:
            raise ValueError(f"more than {REPLY_BYTES_MAX} bytes once it is decompressed")
    schema = pa.ipc.open_stream(body).schema
    place = schema.get_field_index("embeddings")
    if place < 0:
        raise ValueError("it has no column `embeddings`, or several")
    kind = schema.field(place).type
    if not pa.types.is_fixed_size_list(kind) or not pa.types.is_floating(kind.value_type):
        raise ValueError(NO_VECTORS)
    # The other columns would take memory, and are of no use.
    options = pa.ipc.IpcReadOptions(included_fields=[place])
    column = pa.ipc.open_stream(body, options=options).read_all().column(0).combine_chunks()
    column.validate(full=True)
    if column.null_count:
        raise ValueError(NO_VECTORS)
    if len(column) != count:
        raise ValueError(f"{len(column)} vectors for {count} texts")
    values = column.flatten().to_numpy(zero_copy_only=False).astype(np.float32, copy=False)
    facts = schema.metadata or {}
    model = facts.get(b"model")
    return Reply(
        values.reshape(len(column), kind.list_size),
        _read_tokens(facts.get(b"tokens", b"0").decode()),
        None if model is None else model.decode(),
    )


def _read_json(body: bytes) -> Reply:
    if body.lstrip()[:1] == b"[":
        # TEI's reply has vectors only.
        return Reply(_stacked(msgspec.json.decode(body, type=list[list[float]])))
    reply = msgspec.json.decode(body, type=_OpenAIReply)
    items = reply.data
    if all(item.index is not None for item in items):
        items = sorted(items, key=lambda item: item.index or 0)
        if [item.index for item in items] != list(range(len(items))):
            raise ValueError("its vectors are not numbered from 0")
    vectors = _stacked([_numbers(item.embedding) for item in items])
    return Reply(vectors, reply.usage.total_tokens if reply.usage else 0, reply.model)


def _numbers(embedding: str | list[float]) -> Any:
    if isinstance(embedding, list):
        return embedding
    return np.frombuffer(pybase64.b64decode(embedding, validate=True), "<f4")


def _stacked(rows: Sequence[Any]) -> Vectors:
    if len({len(row) for row in rows}) > 1:
        raise ValueError("its vectors have different widths")
    return np.asarray(rows, np.float32).reshape(len(rows), len(rows[0]) if rows else 0)


def _read_tokens(text: str) -> int:
    """Return a count of tokens. Raises: Unreadable if it is none, or more than any reply can have."""
    if text.isascii() and text.isdigit() and len(text) <= len(str(TOKENS_MAX)) and int(text) <= TOKENS_MAX:
        return int(text)
    raise Unreadable(f"the reply counts {text[:80]!r} tokens")


def read_truncated(header: str | None, count: int) -> tuple[int, ...] | None:
    """Return the indices in a header such as 0-3,7; None if they are unknown. Raises: Unreadable."""
    if not header:
        return ()
    if header == "unknown":
        return None
    indices: list[int] = []
    for part in header.split(","):
        first, _, last = part.strip().partition("-")
        try:
            start, end = int(first), int(last or first)
        except ValueError as error:
            raise Unreadable(f"the header x-truncated-inputs is {header[:80]!r}") from error
        if not 0 <= start <= end < count:
            raise Unreadable(f"the header x-truncated-inputs names input {end} of {count}")
        indices += range(start, end + 1)
    return tuple(indices)


def problem_of(body: bytes) -> str:
    """Return the message of an error body in words, without what a terminal would obey."""
    return printable(_message_of(body))


def place_of(body: bytes, count: int) -> int | None:
    """Return the index that the message of an error begins with; None if it names none of so many texts."""
    found = INPUT.match(_message_of(body))
    return int(found[1]) if found is not None and int(found[1]) < count else None


def _message_of(body: bytes) -> str:
    fields = _fields_of(body)
    if fields is None:
        return body[:300].decode(errors="replace").strip() or "no message"
    error = fields.get("error", fields.get("message", fields.get("detail")))
    if isinstance(error, dict):
        error = error.get("message", error)
    return str(error if error is not None else fields)[:300]


def _fields_of(body: bytes) -> dict[str, Any] | None:
    try:
        return msgspec.json.decode(body, type=dict[str, Any])
    except NOT_JSON:
        return None


def _retry_after_s(headers: httpx.Headers) -> float | None:
    """Return the seconds of `retry-after`, which may be a date; None if it is absent or unreadable."""
    value = headers.get("retry-after", "")
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        moment = parsedate_to_datetime(value)
    except (ValueError, OverflowError):
        return None
    if moment.tzinfo is None:
        # The zone -0000 says that the time is UTC, and not where the server is.
        moment = moment.replace(tzinfo=UTC)
    return max(0.0, (moment - datetime.now(UTC)).total_seconds())
