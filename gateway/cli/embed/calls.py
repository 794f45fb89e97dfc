"""Calls of the embeddings API, repeated until the server answers or the deadline passes."""

import asyncio
import math
import random
import ssl
import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

import httpx
import msgspec

from gateway.cli.embed.plan import EmbedFailed, EmbedStopped, Pace, Request
from gateway.cli.embed.replies import (
    ARROW,
    EMBED_PATH,
    REPLY_BYTES_MAX,
    Reply,
    Unreadable,
    body_of,
    code_of,
    problem_of,
    read_reply,
    read_tokens,
    read_truncated,
)

# Statuses that say that the same call may succeed later.
RETRIED = frozenset({408, 425, 429, 500, 502, 503, 504})
# Statuses that a part of the texts may have caused.
REFUSALS = frozenset({400, 413, 422})
# In the gateway's error for a call that is not done by the deadline of its model.
FEWER = "send fewer inputs"
# A server without Arrow may refuse to be asked for it.
NOT_ARROW = frozenset({406, 415})
BACKOFF_FIRST_S, BACKOFF_MAX_S = 0.25, 30.0
NOTICE_S = 30.0
# Form of the vectors in a reply, the cheapest first.
Form: TypeAlias = Literal["arrow", "base64", "json"]
HINTS = {
    401: "; set the key in GATEWAY_API_KEY, or pass a file with --key-file",
    404: "; see --model, and the models of the server at /v1/models",
}


class Refused(Exception):
    """The server refuses these texts or options. The message is the server's, with its status."""


class TooSlow(Exception):
    """The server's own deadline for a call passed, and it wants fewer inputs. The message is the server's."""


class HttpReply(NamedTuple):
    """A reply."""

    status: int
    headers: httpx.Headers
    body: bytes


def open_client(pace: Pace, key: str | None, ca: Path | None) -> httpx.AsyncClient:
    """Return a client that follows no redirect, so that a key goes only to the address that was given.

    Raises: EmbedFailed if `ca` cannot be used.
    """
    try:
        context = ssl.create_default_context(cafile=None if ca is None else str(ca))
    except (OSError, ssl.SSLError) as error:
        raise EmbedFailed(f"{ca} cannot be used: {error}") from error
    headers = {"content-type": "application/json", "accept-encoding": "identity", "x-priority": "bulk"}
    if key:
        headers["authorization"] = f"Bearer {key}"
    limits = httpx.Limits(max_connections=pace.concurrency, max_keepalive_connections=pace.concurrency)
    timeout = httpx.Timeout(pace.timeout_s, pool=None)
    return httpx.AsyncClient(headers=headers, timeout=timeout, limits=limits, verify=context, trust_env=False)


class Caller:
    """Caller of one server. notice: takes why a call is repeated, now and then. retries: repeated calls."""

    def __init__(self, client: httpx.AsyncClient, pace: Pace, notice: Callable[[str], None]) -> None:
        self._client = client
        self._pace = pace
        self._notice = notice
        self._noticed_s = -math.inf
        self._chance = random.Random()  # noqa: S311 - no secret
        # Moment before which the server wants no call.
        self._resume_s = 0.0
        self._form: Form = "arrow"
        self._has_base64 = True
        self.retries = 0

    async def first_model(self, request: Request) -> Request:
        """Return a request that names a model: the one that the server embeds with, or its first.

        Raises: EmbedFailed, EmbedStopped.
        """
        url = f"{request.base}/v1/models"
        reply = await self._repeated(url, partial(self._send, "GET", url, None, "application/json"))
        if reply.status in (401, 403):
            raise EmbedFailed(f"{url}: {_words(reply.status, reply.body)}")
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
        TooSlow, EmbedFailed, EmbedStopped.
        """
        form, url = self._form, request.base + request.path
        body = body_of(request, texts, packed=form == "base64")
        accepted = f"{ARROW}, application/json" if form == "arrow" else "application/json"
        reply = await self._repeated(url, partial(self._send, "POST", url, body, accepted), ends)
        if _is_too_slow(reply):
            words = _words(reply.status, reply.body)
            if len(texts) > 1:
                self._report(f"{url}: {words}; trying again with fewer")
            raise TooSlow(words)
        if reply.status != 200:
            if self._is_other_form_left(form, reply.status):
                return await self.embed(request, texts, ends)
            if reply.status in REFUSALS:
                raise Refused(_words(reply.status, reply.body))
            raise EmbedFailed(f"{url}: {_words(reply.status, reply.body)}")
        return self._read(url, reply, len(texts))

    def _is_other_form_left(self, form: Form, status: int) -> bool:
        """Return whether a refusal may be due to the form of the reply, and choose another form."""
        if form == "arrow" and status in NOT_ARROW:
            self._form = "base64"
            return True
        if form == "base64" and status in REFUSALS and self._has_base64:
            self._form, self._has_base64 = "json", False
            return True
        return False

    def _read(self, url: str, reply: HttpReply, count: int) -> Reply:
        """Return the vectors of a reply. Raises: EmbedFailed."""
        media_type = reply.headers.get("content-type", "")
        if self._form == "arrow" and not media_type.startswith(ARROW):
            # Further calls ask for numbers that are cheaper to read than those of JSON.
            self._form = "base64" if self._has_base64 else "json"
        try:
            found = read_reply(reply.body, media_type, count)
            truncated = read_truncated(reply.headers.get("x-truncated-inputs"), count)
            tokens = found.tokens or read_tokens(reply.headers.get("x-compute-tokens", "0"))
        except Unreadable as error:
            raise EmbedFailed(f"{url}: {error}") from error
        fingerprint = reply.headers.get("x-embedding-fingerprint")
        return found._replace(tokens=tokens, fingerprint=fingerprint, truncated=truncated)

    async def _repeated(
        self,
        url: str,
        send: Callable[[], Awaitable[HttpReply]],
        ends: Callable[[], bool] = lambda: False,
    ) -> HttpReply:
        """Return the first reply that is worth reading. ends: as of `embed`.

        Raises: EmbedFailed, EmbedStopped.
        """
        end_s = time.monotonic() + self._pace.deadline_s
        attempt = 0
        while True:
            await self._wait_for_turn()
            try:
                reply = await send()
            except (httpx.HTTPError, TimeoutError) as error:
                problem, asked_s = str(error) or type(error).__name__, None
            else:
                if reply.status not in RETRIED or (_is_too_slow(reply) and ends()):
                    return reply
                if _is_spent(reply):
                    raise EmbedStopped(f"{url}: {_words(reply.status, reply.body)}")
                problem, asked_s = _words(reply.status, reply.body), _retry_after_s(reply.headers)
            backoff_s = min(BACKOFF_MAX_S, BACKOFF_FIRST_S * 2**attempt) * self._chance.uniform(0.5, 1)
            wait_s = max(backoff_s, asked_s or 0.0)
            if time.monotonic() + wait_s > end_s:
                raise EmbedStopped(f"{url}: {problem}; {self._reason(asked_s)}")
            self._resume_s = max(self._resume_s, time.monotonic() + (asked_s or 0.0))
            self._report(f"{url}: {problem}; trying again")
            attempt = min(attempt + 1, 16)
            await asyncio.sleep(backoff_s)

    def _report(self, words: str) -> None:
        self.retries += 1
        if time.monotonic() - self._noticed_s >= NOTICE_S:
            self._noticed_s = time.monotonic()
            self._notice(words)

    async def _wait_for_turn(self) -> None:
        """Wait until the moment before which the server wants no call; another call may move it on."""
        wait_s = self._resume_s - time.monotonic()
        if wait_s > 0:
            await asyncio.sleep(wait_s)
            await self._wait_for_turn()

    def _reason(self, asked_s: float | None) -> str:
        asked = "" if asked_s is None else f", and the server asks to wait {asked_s:,.0f} s"
        return f"no success until --deadline ({self._pace.deadline_s:g} s){asked}"

    async def _send(self, method: str, url: str, body: bytes | None, accepted: str) -> HttpReply:
        """Return one reply. Raises: httpx.HTTPError, TimeoutError, EmbedFailed."""
        headers = {"accept": accepted}
        async with (
            asyncio.timeout(self._pace.timeout_s),
            self._client.stream(method, url, content=body, headers=headers) as reply,
        ):
            content = bytearray()
            async for part in reply.aiter_raw():
                content += part
                if len(content) > REPLY_BYTES_MAX:
                    raise EmbedFailed(f"{url}: a reply has more than {REPLY_BYTES_MAX} bytes")
        if reply.headers.get("content-encoding", "identity") != "identity":
            raise EmbedFailed(f"{url}: the server compresses its replies, although it is asked not to")
        return HttpReply(reply.status_code, reply.headers, bytes(content))


def _is_too_slow(reply: HttpReply) -> bool:
    """Return whether the deadline of the server's model passed, which a smaller call may meet."""
    return reply.status == 504 and FEWER in problem_of(reply.body)


def _is_spent(reply: HttpReply) -> bool:
    """Return whether a limit is spent for so long that the call is not worth repeating.

    The gateway sends `x-should-retry: false` with a wait above 60 s, and never a longer `retry-after`. A
    limit of an hour has such waits too, but passes single calls meanwhile: its code is `rate_limit_exceeded`.
    """
    if reply.status != 429 or reply.headers.get("x-should-retry", "").lower() != "false":
        return False
    return code_of(reply.body) != "rate_limit_exceeded"


def _retry_after_s(headers: httpx.Headers) -> float | None:
    """Return the seconds of `retry-after`, which may be a date; None if it is absent or unreadable."""
    value = headers.get("retry-after")
    if value is None:
        return None
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


def _words(status: int, body: bytes) -> str:
    return f"the server returned {status}: {problem_of(body)}{HINTS.get(status, '')}"
