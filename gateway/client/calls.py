"""Calls of an embeddings API over HTTP, repeated until the server answers or the deadline passes.

A server is asked for the cheapest form of vectors first: Arrow, then base64, then the numbers of JSON.
"""

import asyncio
import math
import random
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import httpx
import msgspec

from gateway.client.errors import CallFailed, CallStopped, Refused, TooSlow, Unreadable
from gateway.client.replies import (
    ARROW,
    REPLY_BYTES_MAX,
    Reply,
    fields_of,
    kind_of,
    place_of,
    problem_of,
    read_reply,
    read_tokens,
    read_truncated,
)
from gateway.client.request import Request

JSON = "application/json"
# Statuses that say that the same call may succeed later.
RETRIED = frozenset({408, 425, 429, 500, 502, 503, 504})
# Statuses that a part of the texts may have caused.
REFUSALS = frozenset({400, 413, 422})
# Statuses with which a server without Arrow, or without base64, may refuse to be asked for it.
FORM_REFUSALS = {"arrow": frozenset({406, 415}), "base64": REFUSALS}
# In the gateway's error for a call that is not done by the deadline of its model.
FEWER = "send fewer inputs"
BACKOFF_FIRST_S, BACKOFF_MAX_S = 0.25, 30.0
NOTICE_S = 30.0
CLOSED = "the client was closed during the call"


class Bounds(NamedTuple):
    """Bounds of a caller. concurrency: calls at once. timeout_s: of one call. deadline_s: without success."""

    concurrency: int
    timeout_s: float
    deadline_s: float


class Words(NamedTuple):
    """Words of messages that differ by who reads them. hints: by status. deadline: name of the option."""

    hints: Mapping[int, str] = MappingProxyType({})
    deadline: str = "deadline_s"


FOR_PROGRAMS = Words()


class HttpReply(NamedTuple):
    """A reply."""

    status: int
    headers: httpx.Headers
    body: bytes

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
        error = (fields_of(self.body) or {}).get("error")
        return not (isinstance(error, dict) and error.get("code") == "rate_limit_exceeded")


def open_http(bounds: Bounds, key: str | None, ca: Path | str | None) -> httpx.AsyncClient:
    """Return a client that follows no redirect, so that a key goes only to the address that was given.

    ca: file of certificates to trust, None for those of the system. Raises: CallFailed if it cannot be used.
    """
    try:
        context = ssl.create_default_context(cafile=None if ca is None else str(ca))
    except (OSError, ssl.SSLError) as error:
        raise CallFailed(f"{ca} cannot be used: {error}") from error
    headers = {"content-type": JSON, "accept-encoding": "identity", "x-priority": "bulk"}
    if key:
        headers["authorization"] = f"Bearer {key}"
    limits = httpx.Limits(max_connections=bounds.concurrency, max_keepalive_connections=bounds.concurrency)
    timeout = httpx.Timeout(bounds.timeout_s, pool=None)
    return httpx.AsyncClient(headers=headers, timeout=timeout, limits=limits, verify=context, trust_env=False)


class Caller:
    """Caller of one server. notice: takes why a call is repeated, now and then."""

    def __init__(
        self,
        http: httpx.AsyncClient,
        bounds: Bounds,
        notice: Callable[[str], None],
        words: Words = FOR_PROGRAMS,
    ) -> None:
        self._http = http
        self._bounds = bounds
        self._notice = notice
        self._words = words
        self._noticed_s = -math.inf
        self._chance = random.Random()  # noqa: S311 - no secret
        # Moment before which the server wants no call.
        self._resume_s = 0.0
        # Forms of vectors that the server may write, the cheapest first.
        self._forms = ["arrow", "base64", "json"]

    async def first_model(self, request: Request) -> Request:
        """Return a request that names a model: the one that the server embeds with, or its first.

        Raises: CallFailed, CallStopped.
        """
        url = f"{request.base}/v1/models"
        reply = await self._repeated("GET", url, None, JSON, lambda: False)
        if reply.status in (401, 403):
            raise CallFailed(f"{url}: {self._problem_of(reply)}")
        try:
            listed = msgspec.json.decode(reply.body)["data"]
            chosen = next(
                (model for model in listed if "embed" in (model.get("default_for") or ())), listed[0]
            )
            return msgspec.structs.replace(request, model=str(chosen["id"]))
        except (msgspec.MsgspecError, UnicodeDecodeError, LookupError, TypeError, AttributeError) as error:
            if request.is_tei:
                return request
            raise CallFailed(f"{url} lists no model; name one") from error

    async def embed(
        self, request: Request, texts: Sequence[str], ends: Callable[[], bool] = lambda: True
    ) -> Reply:
        """Return the vectors of texts.

        ends: returns whether a call that is too slow for the server is not worth repeating. Raises: Refused,
        CallFailed, CallStopped.
        """
        form, url = self._forms[0], request.url
        body = request.body(texts, packed=form == "base64")
        accepted = f"{ARROW}, {JSON}" if form == "arrow" else JSON
        reply = await self._repeated("POST", url, body, accepted, ends)
        if reply.is_too_slow:
            if len(texts) > 1:
                self._report(f"{url}: {self._problem_of(reply)}; trying again with fewer")
            raise TooSlow(self._problem_of(reply), kind_of(reply.body, reply.status))
        if reply.status in FORM_REFUSALS.get(form, ()):
            self._drop_form(form)
            return await self.embed(request, texts, ends)
        if reply.status in REFUSALS:
            kind, place = kind_of(reply.body, reply.status), place_of(reply.body, len(texts))
            raise Refused(self._problem_of(reply), kind, place)
        if reply.status != 200:
            raise CallFailed(f"{url}: {self._problem_of(reply)}")
        try:
            return self._read(reply, len(texts))
        except Unreadable as error:
            raise CallFailed(f"{url}: {error}") from error

    def _problem_of(self, reply: HttpReply) -> str:
        hint = self._words.hints.get(reply.status, "")
        return f"the server returned {reply.status}: {problem_of(reply.body)}{hint}"

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
            tokens=found.tokens or read_tokens(headers.get("x-compute-tokens", "0")),
            fingerprint=headers.get("x-embedding-fingerprint"),
            truncated=read_truncated(headers.get("x-truncated-inputs"), count),
        )

    async def _repeated(
        self, method: str, url: str, body: bytes | None, accepted: str, ends: Callable[[], bool]
    ) -> HttpReply:
        """Return the first reply that is worth reading. ends: as of `embed`.

        Raises: CallFailed, CallStopped.
        """
        end_s = time.monotonic() + self._bounds.deadline_s
        attempt = 0
        while True:
            await self._wait_for_turn()
            if self._http.is_closed:
                raise CallStopped(f"{url}: {CLOSED}")
            try:
                reply = await self._send(method, url, body, accepted)
            except (httpx.HTTPError, TimeoutError) as error:
                problem, asked_s = str(error) or type(error).__name__, None
            else:
                if reply.status not in RETRIED or (reply.is_too_slow and ends()):
                    return reply
                if reply.is_spent:
                    raise CallStopped(f"{url}: {self._problem_of(reply)}")
                problem, asked_s = self._problem_of(reply), _retry_after_s(reply.headers)
            backoff_s = min(BACKOFF_MAX_S, BACKOFF_FIRST_S * 2**attempt) * self._chance.uniform(0.5, 1)
            if time.monotonic() + max(backoff_s, asked_s or 0.0) > end_s:
                asked = "" if asked_s is None else f", and the server asks to wait {asked_s:,.0f} s"
                passed = f"no success until {self._words.deadline} ({self._bounds.deadline_s:g} s){asked}"
                raise CallStopped(f"{url}: {problem}; {passed}")
            self._resume_s = max(self._resume_s, time.monotonic() + (asked_s or 0.0))
            self._report(f"{url}: {problem}; trying again")
            attempt = min(attempt + 1, 16)
            await asyncio.sleep(backoff_s)

    async def _wait_for_turn(self) -> None:
        """Wait until the moment before which the server wants no call; another call may move it on."""
        while (wait_s := self._resume_s - time.monotonic()) > 0:  # noqa: ASYNC110 - it waits for a moment
            await asyncio.sleep(wait_s)

    def _report(self, words: str) -> None:
        if time.monotonic() - self._noticed_s >= NOTICE_S:
            self._noticed_s = time.monotonic()
            self._notice(words)

    async def _send(self, method: str, url: str, body: bytes | None, accepted: str) -> HttpReply:
        """Return one reply. Raises: httpx.HTTPError, TimeoutError, CallFailed."""
        async with (
            asyncio.timeout(self._bounds.timeout_s),
            self._http.stream(method, url, content=body, headers={"accept": accepted}) as reply,
        ):
            content = bytearray()
            async for part in reply.aiter_raw():
                content += part
                if len(content) > REPLY_BYTES_MAX:
                    raise CallFailed(f"{url}: a reply has more than {REPLY_BYTES_MAX} bytes")
        if reply.headers.get("content-encoding", "identity") != "identity":
            raise CallFailed(f"{url}: the server compresses its replies, although it is asked not to")
        return HttpReply(reply.status_code, reply.headers, bytes(content))


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
