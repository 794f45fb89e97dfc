"""Calls in progress, the bytes of their bodies and replies, and whether new calls are accepted.

The one owner of the work that a stopping process still has to finish. Bodies count as they arrive
(`HeldBody`), replies while their clients have not taken them (`Backlog`).
docs/decisions/040-bodies-share-the-memory.md has the reasons for the shares of tenants.
"""

import asyncio
import contextlib
import fcntl
import logging
import math
import struct
import termios
from collections import Counter
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Protocol

from gateway.errors import GatewayFull, ShuttingDown
from gateway.events import GatewayDrained

logger = logging.getLogger("gateway")

# Long enough that a client does not return to a process that is stopping.
RETRY_AFTER_DRAIN_S = 5
# Parts of `limits.in_flight_bytes` that replies may take while their clients read them: an eighth for slow
# readers, a half for all.
SLOW_REPLIES_DIVISOR = 8
REPLIES_DIVISOR = 2
SLOW_BYTES_PER_S = 1024 * 1024
# Bodies of one tenant take at most so many times the bytes that stay free: n busy tenants take equal shares,
# and a third of a share stays free for the next tenant.
SHARE_OF_FREE = 3
# Part that only bodies up to this size may take.
RESERVE_DIVISOR = 16
SMALL_BODY_BYTES = 64 * 1024


class HeldBody:
    """Bytes of one request's body in memory, as far as it has arrived.

    tenant: whose share it takes; fixed before its first byte is held.
    """

    def __init__(self, in_flight: "InFlight", tenant: str = "") -> None:
        self._in_flight = in_flight
        self.tenant = tenant
        self.held_bytes = 0

    def hold(self, size: int) -> None:
        """Count bytes that have arrived. Raises: GatewayFull; the body then holds nothing any more."""
        self._in_flight.take(self, size)
        self.held_bytes += size

    def hold_decoded(self, size: int) -> None:
        """Count a body as large as its decoded form, which stays in memory in its place.

        Raises: GatewayFull.
        """
        if size > self.held_bytes:
            self.hold(size - self.held_bytes)

    def release(self) -> None:
        """Return the bytes of a body that is no longer in memory."""
        if size := self.held_bytes:
            self.held_bytes = 0
            self._in_flight.give_back(self.tenant, size)

    def evict(self) -> None:
        """Refuse the request, of whose body more is to arrive: another tenant needs the memory."""


class ReplyReader(Protocol):
    """Client with bytes of a reply that it has not taken yet. tenant: whose reply it is."""

    tenant: str
    held_bytes: int

    def bytes_per_s(self) -> float:
        """Return how fast the client has read so far."""

    def disconnect(self) -> None:
        """Drop the connection, and release the bytes of its replies."""


class InFlight:
    """Permits for calls and bytes.

    bytes_max: `limits.in_flight_bytes`. cancels: one callback for each call in progress, which cancels it.
    readers: clients that have not taken their replies yet. receiving: bodies of which more is to arrive.

    Rule: a tenant cannot keep another one out by the bodies that it sends. See
    docs/decisions/040-bodies-share-the-memory.md.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0
        self._bytes_by_tenant: dict[str, int] = {}
        self._reply_bytes = 0
        self._calls = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self.draining = False
        self._is_lame_duck = False
        # When an operator drained this gateway, in seconds since 1970.
        self.drained_since_s: float | None = None
        # A reply is the last one of its connection: the next request would be refused.
        self.closes_connections = False
        # gRPC takes no new connections: a proxy cannot repeat an RPC that was refused, but tries another
        # gateway where it cannot connect.
        self.takes_no_connections = False
        self.abandoned = False
        self.cancels: set[Callable[[], object]] = set()
        self.readers: set[ReplyReader] = set()
        self.receiving: set[HeldBody] = set()

    @property
    def calls(self) -> int:
        """Number of calls whose answer is not yet sent to the last byte."""
        return self._calls

    @property
    def bytes(self) -> int:
        """Bytes of request bodies, and of replies that wait for their clients, in memory."""
        return self._bytes

    @property
    def leaving(self) -> bool:
        """True from the signal to stop on: new work belongs elsewhere, although it may still be accepted."""
        return self._is_lame_duck or self.draining

    @property
    def departure(self) -> str:
        """Why load balancers should send nothing here, nothing if they should."""
        if self.leaving:
            return "this gateway is stopping"
        if self.drained_since_s is not None:
            return "this gateway is drained; `gateway drain --undo` puts it back"
        return ""

    def follow_drain(self, event: GatewayDrained) -> None:
        """Take an operator's drain of this gateway, or its end; calls are accepted as before."""
        self.drained_since_s = event.since_s

    async def serve_on(self, seconds: float) -> None:
        """Report that this process is leaving, and accept calls for a time until balancers have noticed."""
        self._is_lame_duck = True
        await asyncio.sleep(seconds / 2)
        # Clients that keep a connection open, and ask no probe, have the other half to go elsewhere.
        self.closes_connections = True
        await asyncio.sleep(seconds / 4)
        # Long enough before the end that what was accepted until now has sent its requests.
        self.takes_no_connections = True
        await asyncio.sleep(seconds / 4)

    def enter(self) -> None:
        """Take a permit for one call.

        Raises: ShuttingDown.
        """
        if self.draining:
            raise ShuttingDown("this gateway is stopping", retry_after_s=RETRY_AFTER_DRAIN_S)
        self._calls += 1
        self._idle.clear()

    def leave(self) -> None:
        """Return the permit of a call that is answered, or whose caller has disconnected."""
        self._calls -= 1
        if self._calls == 0:
            self._idle.set()

    def take(self, body: HeldBody, size: int) -> None:
        """Take a permit for bytes of a body that has arrived; larger tenants make room if they can.

        Raises: GatewayFull. The body then holds nothing any more.
        """
        in_use = self._bytes_by_tenant.get(body.tenant, 0)
        if in_use + size > SHARE_OF_FREE * (self._bytes_max - self._bytes - size) and not self._has_room(
            body, size
        ):
            rivals = self._rivals_to_evict(body, size)
            if not rivals:
                # At once: otherwise all bodies of a tenant that grow together are refused.
                body.release()
                raise GatewayFull(
                    "the bodies and replies in flight use all of `limits.in_flight_bytes`; try again"
                )
            for rival in rivals:
                self.receiving.remove(rival)
                rival.release()
                rival.evict()
        self._bytes += size
        self._bytes_by_tenant[body.tenant] = self._bytes_by_tenant.get(body.tenant, 0) + size

    def give_back(self, tenant: str, size: int) -> None:
        """Return the permit for bytes of a tenant's bodies."""
        self._bytes -= size
        left = self._bytes_by_tenant.pop(tenant) - size
        if left:
            self._bytes_by_tenant[tenant] = left

    def _has_room(self, body: HeldBody, size: int, freed: int = 0) -> bool:
        """Return whether more of a body fits into the share of its tenant after others have freed bytes."""
        free = self._bytes_max - self._bytes + freed - size
        tenant_bytes = self._bytes_by_tenant.get(body.tenant, 0)
        if free >= 0 and tenant_bytes + size <= SHARE_OF_FREE * free:
            return True
        if tenant_bytes > body.held_bytes:
            return False
        # The only body of its tenant may be larger than a share, and a single one always fits:
        # `limits.body_bytes` bounds it.
        is_small = body.held_bytes + size <= SMALL_BODY_BYTES
        reserve = 0 if is_small else self._bytes_max // RESERVE_DIVISOR
        return free >= reserve or self._bytes - freed == body.held_bytes

    def _rivals_to_evict(self, body: HeldBody, size: int) -> list[HeldBody]:
        """Return unfinished bodies of larger tenants that make room together; none if they cannot."""
        left, freed, evicted = self._bytes_by_tenant.copy(), 0, []
        least = left.get(body.tenant, 0) + size
        rivals = [rival for rival in self.receiving if rival.held_bytes and left[rival.tenant] > least]
        # Sorted once, not after each of them: there may be thousands.
        rivals.sort(key=lambda rival: (left[rival.tenant], rival.held_bytes), reverse=True)
        for rival in rivals:
            if left[rival.tenant] > least:
                left[rival.tenant] -= rival.held_bytes
                freed += rival.held_bytes
                evicted.append(rival)
                if self._has_room(body, size, freed):
                    return evicted
        return []

    def hold_reply(self, size: int) -> None:
        """Count bytes of a reply that waits for its client; over a bound, disconnect readers."""
        self._bytes += size
        self._reply_bytes += size
        if self._reply_bytes > self._bytes_max // SLOW_REPLIES_DIVISOR:
            self._disconnect_readers()

    def release_reply(self, size: int) -> None:
        """Count bytes of a reply no more."""
        self._bytes -= size
        self._reply_bytes -= size

    def _disconnect_readers(self) -> None:
        by_rate = sorted(
            [(reader.bytes_per_s(), reader) for reader in self.readers], key=itemgetter(0), reverse=True
        )
        slow = [reader for rate, reader in by_rate if rate < SLOW_BYTES_PER_S]
        slow_bytes = sum(reader.held_bytes for reader in slow)
        chosen = _choose(slow, slow_bytes - self._bytes_max // SLOW_REPLIES_DIVISOR)
        excess = self._reply_bytes - self._bytes_max // REPLIES_DIVISOR
        excess -= sum(reader.held_bytes for reader in chosen)
        disconnected = set(chosen)
        rest = [reader for _, reader in by_rate if reader not in disconnected]
        chosen += _choose(rest, excess)
        for reader in chosen:
            reader.disconnect()
        if chosen:
            logger.warning("disconnected %d clients that read their replies too slowly", len(chosen))

    def abandon(self) -> None:
        """Cancel all calls that are still in progress."""
        self.abandoned = True
        for cancel in list(self.cancels):
            cancel()

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new calls and wait for those in progress; return False if the timeout came first."""
        self.draining = self.closes_connections = True
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True


def _choose(readers: Sequence[ReplyReader], excess: int) -> list[ReplyReader]:
    """Return readers with so many bytes in all: each time the slowest of the tenant that holds most.

    readers: the slowest last.
    """
    by_tenant: dict[str, list[ReplyReader]] = {}
    held: Counter[str] = Counter()
    for reader in readers:
        by_tenant.setdefault(reader.tenant, []).append(reader)
        held[reader.tenant] += reader.held_bytes
    chosen: list[ReplyReader] = []
    while excess > 0 and held:
        tenant = max(held, key=held.__getitem__)
        reader = by_tenant[tenant].pop()
        chosen.append(reader)
        excess -= reader.held_bytes
        held[tenant] -= reader.held_bytes
        if not by_tenant[tenant]:
            del held[tenant]
    return chosen


# A reply that has just been written has no rate yet.
GRACE_S = 2.0


class Backlog:
    """Bytes that wait on one connection for its client, which has not taken its replies.

    in_flight: counts them. tenant: of the last call on the connection. count: returns how many wait; those of
    replies if it is None.
    """

    def __init__(
        self,
        transport: asyncio.Transport,
        loop: asyncio.AbstractEventLoop,
        in_flight: InFlight,
        count: Callable[[], int] | None = None,
    ) -> None:
        self._transport = transport
        self._count = count or transport.get_write_buffer_size
        self._loop = loop
        self._in_flight = in_flight
        self.tenant = ""
        self.held_bytes = 0
        self._since_s = 0.0

    def set_tenant(self, tenant: str) -> None:
        """Record whose call is the last one."""
        self.tenant = tenant

    def start(self) -> None:
        """Count what waits, until all of it is taken."""
        self.end()
        self.held_bytes = self._count()
        self._since_s = self._loop.time()
        # This reply is not among the readers yet: a single one always fits.
        self._in_flight.hold_reply(self.held_bytes)
        self._in_flight.readers.add(self)

    def end(self) -> None:
        """Count nothing more: the client has taken everything, or has disconnected."""
        if self in self._in_flight.readers:
            self._in_flight.readers.remove(self)
            self._in_flight.release_reply(self.held_bytes)

    def bytes_per_s(self) -> float:
        """Return the rate since the backlog began; infinite for a young one."""
        age_s = self._loop.time() - self._since_s
        if age_s < GRACE_S:
            return math.inf
        return (self.held_bytes - self._count()) / age_s

    def disconnect(self) -> None:
        """Drop the connection with what it buffers."""
        self.end()
        self._transport.abort()


class StalledReplyTimer:
    """Ends a connection whose client takes nothing of its replies for a time. A slow client may go on."""

    # The number of checks in this time.
    checks = 6

    def __init__(
        self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, timeout_s: float
    ) -> None:
        self._transport = transport
        self._loop = loop
        self._timeout_s = timeout_s
        self._timer: asyncio.TimerHandle | None = None
        self._unacknowledged_bytes = 0
        self._stalled_checks = 0

    def start(self) -> None:
        """Check from now on, until everything is taken."""
        if self._timer is None:
            self._unacknowledged_bytes, self._stalled_checks = self._count_unacknowledged(), 0
            self._schedule()

    def cancel(self) -> None:
        """Check no more."""
        if self._timer is not None:
            self._timer.cancel()

    def _schedule(self) -> None:
        self._timer = self._loop.call_later(self._timeout_s / self.checks, self._check)

    def _check(self) -> None:
        self._timer = None
        if self._transport.get_write_buffer_size() == 0:
            return
        before, self._unacknowledged_bytes = self._unacknowledged_bytes, self._count_unacknowledged()
        self._stalled_checks = 0 if self._unacknowledged_bytes < before else self._stalled_checks + 1
        if self._stalled_checks == self.checks:
            self._transport.abort()
        else:
            self._schedule()

    def _count_unacknowledged(self) -> int:
        """Return the bytes written and not acknowledged, here and in the kernel, which takes large pieces."""
        waiting = self._transport.get_write_buffer_size()
        with contextlib.suppress(OSError):
            sock = self._transport.get_extra_info("socket")
            queued = fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(4))
            waiting += struct.unpack("i", queued)[0]
        return waiting
