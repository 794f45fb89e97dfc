"""Calls of the embeddings API, repeated until the server answers or the deadline passes."""

import asyncio
import random
import ssl
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import NamedTuple

import httpx
import msgspec

from gateway.cli.embed.plan import EmbedFailed, EmbedStopped, Pace, Request
from gateway.cli.embed.replies import (
    ARROW,
    Reply,
    Unreadable,
    body_of,
    problem_of,
    read_reply,
    read_truncated,
)

# Statuses that say that the same call may succeed later.
RETRIED = frozenset({408, 425, 429, 500, 502, 503, 504})
# Statuses that a part of the texts may have caused.
REFUSALS = frozenset({400, 413, 422})
# A server without Arrow may refuse to be asked for it.
NOT_ARROW = frozenset({406, 415})
BACKOFF_FIRST_S, BACKOFF_MAX_S = 0.25, 30.0
REPLY_BYTES_MAX = 256 * 1024 * 1024
HINTS = {
    401: "; set the key in GATEWAY_API_KEY, or pass a file with --key-file",
    404: "; see --model, and the models of the server at /v1/models",
}


class Refused(Exception):
    """The server refuses these texts or options. The message is the server's, with its status."""


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


async def first_model(client: httpx.AsyncClient, request: Request) -> Request:
    """Return a request that names a model: the first that the server lists, if it lists any.

    Raises: EmbedFailed, EmbedStopped.
    """
    try:
        reply = await client.get(f"{request.base}/v1/models", headers={"accept": "application/json"})
    except httpx.HTTPError as error:
        raise EmbedStopped(f"{request.base}: {str(error) or type(error).__name__}") from error
    if reply.status_code in (401, 403):
        raise EmbedFailed(_words(reply.status_code, reply.content))
    try:
        listed = reply.json()["data"]
        chosen = next((model for model in listed if "embed" in (model.get("default_for") or ())), listed[0])
        return msgspec.structs.replace(request, model=str(chosen["id"]))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        if request.path.endswith("/embed"):
            return request
        raise EmbedFailed(f"{request.base}/v1/models lists no model; name it with --model") from error


class Caller:
    """Caller of one server. retries: calls that were repeated. is_packed: whether base64 is asked for."""

    def __init__(self, client: httpx.AsyncClient, request: Request, pace: Pace) -> None:
        self._client = client
        self._request = request
        self._pace = pace
        self._url = request.base + request.path
        self._chance = random.Random()  # noqa: S311 - no secret
        # Moment before which the server wants no call.
        self._resume_s = 0.0
        self.is_packed = False
        self.retries = 0

    async def embed(self, texts: Sequence[str]) -> Reply:
        """Return the vectors of texts. Raises: Refused, EmbedFailed, EmbedStopped."""
        packed = self.is_packed
        reply = await self._repeated(body_of(self._request, texts, packed=packed), packed=packed)
        if reply.status in NOT_ARROW and not packed:
            self.is_packed = True
            return await self.embed(texts)
        if reply.status in REFUSALS:
            raise Refused(_words(reply.status, reply.body))
        if reply.status != 200:
            raise EmbedFailed(f"{self._url}: {_words(reply.status, reply.body)}")
        media_type = reply.headers.get("content-type", "")
        # Further calls ask for numbers that are cheaper to read than those of JSON.
        self.is_packed = self.is_packed or not media_type.startswith(ARROW)
        try:
            found = read_reply(reply.body, media_type, len(texts))
            truncated = read_truncated(reply.headers.get("x-truncated-inputs"), len(texts))
            tokens = found.tokens or int(reply.headers.get("x-compute-tokens", 0))
        except (Unreadable, ValueError) as error:
            raise EmbedFailed(f"{self._url}: {error}") from error
        fingerprint = reply.headers.get("x-embedding-fingerprint")
        return found._replace(tokens=tokens, fingerprint=fingerprint, truncated=truncated)

    async def _repeated(self, body: bytes, *, packed: bool) -> HttpReply:
        """Return the first reply that is worth reading. Raises: EmbedFailed, EmbedStopped."""
        end_s = time.monotonic() + self._pace.deadline_s
        attempt = 0
        while True:
            await self._wait_for_turn()
            try:
                reply = await self._post(body, packed=packed)
            except (httpx.HTTPError, TimeoutError) as error:
                problem, asked_s = str(error) or type(error).__name__, None
            else:
                if reply.status not in RETRIED:
                    return reply
                problem, asked_s = _words(reply.status, reply.body), _retry_after_s(reply.headers)
            backoff_s = min(BACKOFF_MAX_S, BACKOFF_FIRST_S * 2**attempt) * self._chance.uniform(0.5, 1)
            wait_s = max(backoff_s, asked_s or 0.0)
            if time.monotonic() + wait_s > end_s:
                raise EmbedStopped(self._reason(problem, asked_s))
            if asked_s:
                self._resume_s = max(self._resume_s, time.monotonic() + asked_s)
            self.retries += 1
            attempt = min(attempt + 1, 16)
            await asyncio.sleep(backoff_s)

    async def _wait_for_turn(self) -> None:
        """Wait until the moment before which the server wants no call; another call may move it on."""
        wait_s = self._resume_s - time.monotonic()
        if wait_s > 0:
            await asyncio.sleep(wait_s)
            await self._wait_for_turn()

    def _reason(self, problem: str, asked_s: float | None) -> str:
        asked = "" if asked_s is None else f", and the server asks to wait {asked_s:,.0f} s"
        return f"{self._url}: {problem}; no success until --deadline ({self._pace.deadline_s:g} s){asked}"

    async def _post(self, body: bytes, *, packed: bool) -> HttpReply:
        """Return one reply. Raises: httpx.HTTPError, TimeoutError, EmbedFailed."""
        accept = "application/json" if packed else f"{ARROW}, application/json"
        async with asyncio.timeout(self._pace.timeout_s):
            async with self._client.stream(
                "POST", self._url, content=body, headers={"accept": accept}
            ) as reply:
                content = bytearray()
                async for part in reply.aiter_raw():
                    content += part
                    if len(content) > REPLY_BYTES_MAX:
                        raise EmbedFailed(f"{self._url}: a reply has more than {REPLY_BYTES_MAX} bytes")
        if "content-encoding" in reply.headers and reply.headers["content-encoding"] != "identity":
            raise EmbedFailed(f"{self._url}: the server compresses its replies, although it is asked not to")
        return HttpReply(reply.status_code, reply.headers, bytes(content))


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
    except ValueError:
        return None
    return max(0.0, (moment - datetime.now(UTC)).total_seconds())


def _words(status: int, body: bytes) -> str:
    return f"the server returned {status}: {problem_of(body)}{HINTS.get(status, '')}"
