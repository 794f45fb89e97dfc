"""Calls of the webhook of `notify`: one sender for all workers of a gateway, in the parent.

A call is signed as Standard Webhooks has it (standardwebhooks.com): HMAC-SHA256 over its id, its timestamp
and its body. Calls wait in a bounded queue. A call that fails is repeated after a growing pause, with the
same id and a new timestamp, and given up after the last.
"""

import asyncio
import base64
import hmac
import logging
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from random import Random
from urllib.parse import urlsplit

import msgspec

from backends.contract.errors import BackendError
from backends.http.client import ConnectionOptions, UpstreamClient
from gateway.config.schema import NotifySettings
from gateway.processes.messages import Notice

QUEUE_MAX = 100
TIMEOUT_S = 5.0
# Of a reply, whose body is not used.
REPLY_BYTES_MAX = 64 * 1024
# Pauses before each repetition: some four minutes, in which a receiver is restarted.
PAUSES_S = (1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0)
# Several workers report the same event, and a replica may be slow again and again.
REPEAT_AFTER_S = 3600.0
# Keys of events that are remembered; the oldest are forgotten.
KEYS_MAX = 1000
# Other statuses below 500 stay the same if a call is repeated.
REPEATED_STATUSES = frozenset({408, 425, 429})

logger = logging.getLogger("gateway")


class Body(msgspec.Struct, frozen=True):
    """Body of a call. timestamp: of the event. gateway: name of the host."""

    type: str
    timestamp: str
    gateway: str
    text: str
    data: msgspec.Raw


class Notifier:
    """Sender of one gateway. clock: seconds since 1970. pauses_s: before each repetition."""

    def __init__(
        self,
        settings: NotifySettings,
        clock: Callable[[], float] = time.time,
        pauses_s: Sequence[float] = PAUSES_S,
    ) -> None:
        parts = urlsplit(settings.url)
        self._base_url = f"{parts.scheme}://{parts.netloc}"
        self._path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        self._secret = settings.secret.encode()
        self._clock = clock
        self._pauses_s = pauses_s
        self._host = socket.gethostname()
        self._queue: asyncio.Queue[tuple[Notice, bytes]] = asyncio.Queue(QUEUE_MAX)
        # When each event was last accepted.
        self._accepted_s: dict[tuple[str, str], float] = {}
        self._random = Random()  # noqa: S311 - it spreads load and protects no secret

    def enqueue(self, notice: Notice) -> None:
        """Queue a notice, unless the same event was accepted a while ago; drop it if the queue is full."""
        now_s, key = self._clock(), (notice.kind, notice.key)
        if now_s - self._accepted_s.get(key, 0.0) < REPEAT_AFTER_S:
            return
        if self._queue.full():
            logger.error("a notice of %s is dropped: %d wait for `notify.url`", notice.kind, QUEUE_MAX)
            return
        self._accepted_s.pop(key, None)
        self._accepted_s[key] = now_s
        if len(self._accepted_s) > KEYS_MAX:
            del self._accepted_s[next(iter(self._accepted_s))]
        moment = datetime.fromtimestamp(now_s, UTC).isoformat(timespec="seconds")
        data = msgspec.Raw(msgspec.json.encode(notice.data))
        body = Body(notice.kind, moment, self._host, notice.text, data)
        self._queue.put_nowait((notice, msgspec.json.encode(body)))

    async def run(self) -> None:
        """Send what is queued, one call at a time, until cancelled."""
        while True:
            notice, body = await self._queue.get()
            try:
                problem = await self._deliver(body)
            except Exception:
                # The sender must go on: the next event may matter more.
                logger.exception("a notice of %s could not be sent to `notify.url`", notice.kind)
                continue
            if problem:
                logger.error("a notice of %s could not be sent to `notify.url`: %s", notice.kind, problem)

    async def _deliver(self, body: bytes) -> str:
        """Send a call until it is accepted; return why it was given up, nothing if it was not."""
        id_ = f"msg_{secrets.token_hex(12)}"
        problem = ""
        for pause_s in (0.0, *self._pauses_s):
            # Gateways that failed together do not come back together.
            await asyncio.sleep(pause_s * self._random.uniform(0.5, 1.0))
            problem, is_final = await self._post(id_, body)
            if not problem or is_final:
                break
        return problem

    async def _post(self, id_: str, body: bytes) -> tuple[str, bool]:
        """Send a call once; return why it was not accepted, and whether a repetition is of no use."""
        timestamp = str(int(self._clock()))
        signature = sign(self._secret, id_, timestamp, body)
        headers = {
            "user-agent": "embedding-gateway",
            "webhook-id": id_,
            "webhook-timestamp": timestamp,
            "webhook-signature": signature,
        }
        client = UpstreamClient(self._base_url, headers, ConnectionOptions(reply_bytes_max=REPLY_BYTES_MAX))
        try:
            response = await client.post(self._path, body, TIMEOUT_S)
        except BackendError as error:
            # The client calls every server a replica.
            return str(error).replace("replica", "receiver"), False
        finally:
            await client.aclose()
        if 200 <= response.status < 300:
            return "", True
        is_final = response.status < 500 and response.status not in REPEATED_STATUSES
        return f"it answered with status {response.status}", is_final


def sign(secret: bytes, id_: str, timestamp: str, body: bytes) -> str:
    """Return the signature of a call."""
    signed = b".".join((id_.encode(), timestamp.encode(), body))
    digest = hmac.digest(secret, signed, "sha256")
    return f"v1,{base64.b64encode(digest).decode()}"
