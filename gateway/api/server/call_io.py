"""Input and output of one request: bounded reading, replies, and its permits."""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from typing import Any, TypeAlias

from gateway.api.server.http_protocol import CONNECTION, ConnectionHandle
from gateway.api.server.in_flight import SMALL_BODY_BYTES, HeldBody, InFlight
from gateway.api.server.responses import HttpReply
from gateway.errors import BodyTooLarge, GatewayFull, Overloaded
from gateway.tenants.client_certificate import ClientCertificate

# ASGI's own types: plain mappings, which every server and framework agree on.
Message: TypeAlias = MutableMapping[str, Any]
Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
ASGIApp: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

# uvicorn buffers this much. The call of a larger reply ends only when the client has read the reply.
AT_ONCE_BYTES = 64 * 1024
LENGTH_DIGITS_MAX = 18
BAD_REQUEST, TOO_MANY_REQUESTS, INTERNAL = 400, 429, 500
# The status that nginx logs where a client hung up first. It is never sent.
CALLER_GONE = 499
# Pace of refusals that cost their caller nothing, such as those of wrong keys.
REFUSALS_PER_S = 100
# A pause of this length earns as many refusals at once.
BURST_S = 1.0
# A client that repeats at once is slowed to one call in this time on each of its connections.
WAIT_MAX_S = 5.0
# More owners than these evict the oldest; memory stays bounded.
OWNERS_MAX = 10_000


class RefusalPace:
    """Times of replies to refused requests. Rule: a loop of refused requests takes no time from calls.

    An owner is a tenant, or the address of a client without a valid key.
    """

    def __init__(self) -> None:
        self._free_at_s: OrderedDict[str, float] = OrderedDict()

    def wait_s(self, owner: str, now_s: float) -> float:
        """Count one refusal, and return the time until its reply."""
        before_s = max(self._free_at_s.pop(owner, 0.0), now_s - BURST_S)
        reply_s = min(before_s + 1 / REFUSALS_PER_S, now_s + WAIT_MAX_S)
        self._free_at_s[owner] = reply_s
        if len(self._free_at_s) > OWNERS_MAX:
            self._free_at_s.popitem(last=False)
        return max(0.0, reply_s - now_s)


class CallIO(HeldBody):
    """The connection of one request, as far as this request uses it, and the bytes of its body.

    headers: added to every reply. status: of the reply, 500 until there is one. caller_gone: the client has
    closed the connection before it was answered. is_head: only the heads of replies are sent.
    """

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        in_flight: InFlight,
        body_bytes_max: int,
        address: str,
        refusals: RefusalPace,
    ) -> None:
        super().__init__(in_flight)
        self.headers: list[tuple[bytes, bytes]] = []
        self.status = 500
        self.replying = False
        self.caller_gone = False
        self.is_head: bool = scope["method"] == "HEAD"
        self.body_bytes_max = body_bytes_max
        self._address = address
        # None once a reply was paced.
        self._refusals: RefusalPace | None = refusals
        self._claimed = False
        self._receive = receive
        self._send = send
        self._connection: ConnectionHandle | None = scope.get("extensions", {}).get(CONNECTION)
        self._cancel: Callable[[], object] | None = None
        self._body_bytes = 0
        self._body_complete = False
        self._evicted = False

    @property
    def certificate(self) -> ClientCertificate | None:
        """Verified certificate of the client, None if it has shown none."""
        return None if self._connection is None else self._connection.protocol.certificate

    def enter(self) -> None:
        """Take the permit that each request needs.

        Raises: ShuttingDown.
        """
        self._in_flight.enter()
        task = asyncio.current_task()
        assert task is not None
        self._cancel = task.cancel
        self._in_flight.cancels.add(self._cancel)

    def set_tenant(self, tenant: str) -> None:
        """Record whose call it is, before a limit refuses it: the pace of refusals is by tenant."""
        self.tenant = tenant

    def set_body_bytes_max(self, bytes_max: int) -> None:
        """Take a larger body, such as a file."""
        self.body_bytes_max = bytes_max

    def claim_connection(self) -> None:
        """Count the connection as one of the tenant's. Raises: Overloaded."""
        if self._connection is None or self._claimed:
            return
        self._claimed = self._connection.protocol.claim(self.tenant)
        if not self._claimed:
            raise Overloaded("your calls take all the connections that one tenant may; try again")

    def leave_tenant(self) -> None:
        """Return the held bytes and the connection, which counted as the tenant's."""
        self.release()
        if self._claimed and self._connection is not None:
            self._claimed = False
            self._connection.protocol.limit.release(self.tenant)

    def check_length(self, announced: str) -> None:
        """Check the body's size before any of it is read. announced: the header `content-length`.

        Raises: BodyTooLarge.
        """
        digits = announced.lstrip("0")
        # As text first: Python refuses to parse a number of thousands of digits.
        if digits.isdigit() and (len(digits) > LENGTH_DIGITS_MAX or int(digits) > self.body_bytes_max):
            raise _too_large(self.body_bytes_max)

    async def receive(self) -> Message:
        """Receive the next ASGI message of the request, and count its bytes as held.

        Raises: BodyTooLarge, GatewayFull, and CancelledError if the client has closed the connection.
        """
        if self._connection is not None:
            # Cancel from here on. A request whose body is never read is answered in full.
            self._connection.watch(self._on_lost)
        try:
            message = await self._receive()
        except asyncio.CancelledError:
            if not self._evicted or self.caller_gone:
                raise
            _uncancel()
            raise GatewayFull("other tenants need the memory that this body takes; try again") from None
        if message["type"] == "http.disconnect":
            # In the middle of its body: there is no client to answer.
            self.caller_gone = True
            raise asyncio.CancelledError
        if message["type"] == "http.request":
            size = len(message["body"])
            self._body_bytes += size
            if self._body_bytes > self.body_bytes_max:
                raise _too_large(self.body_bytes_max)
            # Bytes that came, not bytes that were announced: an announcement costs a caller nothing.
            if size:
                self.hold(size)
        return message

    async def read_body(self) -> bytes | bytearray:
        """Return the whole body. Raises: the errors of `receive`."""
        message = await self.receive()
        body: bytes | bytearray = message["body"]
        if message.get("more_body", False):
            self._in_flight.receiving.add(self)
            try:
                body = await _read_rest(self, body)
            finally:
                self._in_flight.receiving.discard(self)
        self._body_complete = True
        return body

    @property
    def has_abandoned_body(self) -> bool:
        """True after the caller has left a large body unfinished, or has let the time of any body pass."""
        if not self.caller_gone or self._body_complete:
            return False
        timed_out = self._connection is not None and self._connection.timed_out
        return timed_out or self._body_bytes >= SMALL_BODY_BYTES

    def evict(self) -> None:
        """Refuse the request, whose body is being read: another tenant needs the memory."""
        self._evicted = True
        if self._cancel is not None:
            self._cancel()

    async def reply(self, reply: HttpReply) -> None:
        """Send a reply; a small one in one piece, at a fraction of the cost of ASGI's messages."""
        body = reply.body
        if self._connection is not None:
            self._connection.protocol.backlog.set_tenant(self.tenant)
        if reply.status >= BAD_REQUEST:
            await self._pace_refusal(reply.status)
        headers = [(name.encode(), value.encode()) for name, value in reply.headers.items()]
        if reply.status != 204:
            headers.append((b"content-type", reply.media_type.encode()))
            headers.append((b"content-length", b"%d" % len(body)))
        if self.is_head:
            body = b""
        if len(body) <= AT_ONCE_BYTES and self._reply_at_once(reply.status, headers, body):
            return
        if self._connection is not None and self._connection.protocol.flow.write_paused:
            await self._wait_until_writable(self._connection, len(body))
        await self.send({"type": "http.response.start", "status": reply.status, "headers": headers})
        if len(body) > AT_ONCE_BYTES:
            # uvicorn waits for a slow client before a message, never after the last one.
            await self.send({"type": "http.response.body", "body": body, "more_body": True})
            body = b""
        await self.send({"type": "http.response.body", "body": body, "more_body": False})

    async def _wait_until_writable(self, connection: ConnectionHandle, size: int) -> None:
        """Wait for a client that reads slowly; the reply counts as held meanwhile."""
        self._in_flight.hold_reply(size)
        try:
            await connection.protocol.flow.drain()
        finally:
            self._in_flight.release_reply(size)

    def _reply_at_once(
        self, status: int, headers: list[tuple[bytes, bytes]], body: bytes | memoryview
    ) -> bool:
        """Return whether the connection took the reply in one piece."""
        if self._connection is None or self._in_flight.closes_connections:
            return False
        if not self._connection.answer(status, headers + self.headers, body):
            return False
        self.replying, self.status = True, status
        self.release_connection()
        return True

    async def send(self, message: Message) -> None:
        """Send an ASGI message, with the headers of every reply."""
        if message["type"] == "http.response.start":
            if message["status"] >= BAD_REQUEST:
                await self._pace_refusal(message["status"])
            self.replying, self.status = True, message["status"]
            message["headers"] = [*message["headers"], *self.headers]
            if self._in_flight.closes_connections:
                # The next request here would be refused: have the client connect elsewhere.
                message["headers"].append((b"connection", b"close"))
        else:
            if self.is_head:
                message["body"] = b""
            if not message.get("more_body", False):
                self.release_connection()
        await self._send(message)

    async def _pace_refusal(self, status: int) -> None:
        """Wait before the reply to a refused request, if its owner has had many of them."""
        if status >= INTERNAL or (self.tenant and status != TOO_MANY_REQUESTS):
            # A refused request of a tenant, other than over its limits, is charged to these limits.
            return
        connection, refusals = self._connection, self._refusals
        if connection is None or refusals is None or self._in_flight.draining:
            return
        loop = asyncio.get_running_loop()
        # One reply is paced once.
        self._refusals = None
        wait_s = refusals.wait_s(self.tenant or f"address {self._address}", loop.time())
        if not wait_s:
            return
        lost = asyncio.Event()
        connection.watch(lost.set)
        connection.hold_back()
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await lost.wait()

    def release_connection(self) -> None:
        """Ignore the connection from here on: the reply is complete, and a disconnect cancels nothing."""
        if self._connection is not None:
            self._connection.watch(None)

    def note_cancelled(self) -> None:
        """Record that the client hung up before it was answered, for the event."""
        self.status = CALLER_GONE

    def close(self) -> None:
        """Return the permit, the held bytes, and the connection."""
        self.leave_tenant()
        if self._cancel is not None:
            self._in_flight.cancels.discard(self._cancel)
            self._in_flight.leave()

    def _on_lost(self) -> None:
        self.caller_gone = True
        if self._cancel is not None:
            self._cancel()


def _uncancel() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.uncancel()


async def _read_rest(io: CallIO, begun: bytes | bytearray) -> bytearray:
    # Grows in place. Pieces that are joined at the end take twice the memory.
    body_so_far = bytearray(begun)
    more = True
    try:
        while more:
            message = await io.receive()
            body_so_far += message["body"]
            more = message.get("more_body", False)
    except BaseException:
        # The traceback refers to it until the request has been answered and charged.
        body_so_far.clear()
        raise
    return body_so_far


def _too_large(bytes_max: int) -> BodyTooLarge:
    return BodyTooLarge(f"the body is larger than {bytes_max} bytes")
