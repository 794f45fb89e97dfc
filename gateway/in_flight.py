"""Calls in progress, the bytes of their bodies, and whether new calls are accepted.

The one owner of the work that a stopping process still has to finish.
"""

import asyncio
from collections.abc import Callable

from gateway.errors import GatewayFull, ShuttingDown

# Long enough that a client does not return to a process that is stopping.
RETRY_AFTER_DRAIN_S = 5


class InFlight:
    """Permits for calls and bytes.

    bytes_max: `limits.in_flight_bytes`. cancels: one callback for each call in progress, which cancels it.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0
        self._calls = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self.draining = False
        self.abandoned = False
        self.cancels: set[Callable[[], object]] = set()

    @property
    def calls(self) -> int:
        """Number of calls whose answer is not yet sent to the last byte."""
        return self._calls

    @property
    def bytes(self) -> int:
        """Bytes of request bodies in memory."""
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
            raise GatewayFull("the bodies in flight use all of `limits.in_flight_bytes`; try again")
        self._bytes += size

    def release(self, size: int) -> None:
        """Return the permit for bytes that are no longer in memory."""
        self._bytes -= size

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
