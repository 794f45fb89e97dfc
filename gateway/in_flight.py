"""Calls in progress, the bytes of their bodies and replies, and whether new calls are accepted.

The one owner of the work that a stopping process still has to finish.
"""

import asyncio
import logging
from collections.abc import Callable
from operator import itemgetter
from typing import Protocol

from gateway.errors import GatewayFull, ShuttingDown

logger = logging.getLogger("gateway")

# Long enough that a client does not return to a process that is stopping.
RETRY_AFTER_DRAIN_S = 5
# Parts of `limits.in_flight_bytes` that replies may take while their clients read them: over an eighth slow
# readers are disconnected, and over a half any, the slowest first.
SLOW_REPLIES_DIVISOR = 8
REPLIES_DIVISOR = 2
SLOW_BYTES_PER_S = 1024 * 1024


class ReplyReader(Protocol):
    """Client with bytes of a reply that it has not taken yet."""

    def bytes_per_s(self) -> float:
        """Return how fast the client has read so far."""

    def disconnect(self) -> None:
        """Drop the connection, and release the bytes of its replies."""


class InFlight:
    """Permits for calls and bytes.

    bytes_max: `limits.in_flight_bytes`. cancels: one callback for each call in progress, which cancels it.
    readers: clients that have not taken their replies yet.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0
        self._reply_bytes = 0
        self._calls = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self.draining = False
        self.abandoned = False
        self.cancels: set[Callable[[], object]] = set()
        self.readers: set[ReplyReader] = set()

    @property
    def calls(self) -> int:
        """Number of calls whose answer is not yet sent to the last byte."""
        return self._calls

    @property
    def bytes(self) -> int:
        """Bytes of request bodies, and of replies that wait for their clients, in memory."""
        return self._bytes

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

    def hold(self, size: int) -> None:
        """Take a permit for bytes of a body that has arrived.

        Raises: GatewayFull.
        """
        # A single body always fits: `limits.body_bytes` bounds it.
        if self._bytes and self._bytes + size > self._bytes_max:
            raise GatewayFull(
                "the bodies and replies in flight use all of `limits.in_flight_bytes`; try again"
            )
        self._bytes += size

    def release(self, size: int) -> None:
        """Return the permit for bytes that are no longer in memory."""
        self._bytes -= size

    def hold_reply(self, size: int) -> None:
        """Count bytes of a reply that waits for its client; over the bound, disconnect slow readers."""
        self._bytes += size
        self._reply_bytes += size
        if self._reply_bytes > self._bytes_max // SLOW_REPLIES_DIVISOR:
            self._disconnect_slowest()

    def release_reply(self, size: int) -> None:
        """Count bytes of a reply no more."""
        self._bytes -= size
        self._reply_bytes -= size

    def _disconnect_slowest(self) -> None:
        disconnected = 0
        for rate, reader in sorted(
            [(reader.bytes_per_s(), reader) for reader in self.readers], key=itemgetter(0)
        ):
            divisor = SLOW_REPLIES_DIVISOR if rate < SLOW_BYTES_PER_S else REPLIES_DIVISOR
            if self._reply_bytes <= self._bytes_max // divisor:
                break
            reader.disconnect()
            disconnected += 1
        if disconnected:
            logger.warning("disconnected %d clients that read their replies too slowly", disconnected)

    def abandon(self) -> None:
        """Cancel all calls that are still in progress."""
        self.abandoned = True
        for cancel in list(self.cancels):
            cancel()

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new calls and wait for those in progress; return False if the timeout came first."""
        self.draining = True
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True
