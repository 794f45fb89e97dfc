"""Which calls are being answered, how many bytes they brought, and whether new ones are taken.

The one owner of what a stopping process still has to finish.
"""

import asyncio
from collections.abc import Callable

from gateway.errors import GatewayFull, ShuttingDown

# Long enough that a client does not come straight back to a process that is ending.
COME_BACK_S = 5


class InFlight:
    """Permits for calls and bytes. bytes_max: `limits.in_flight_bytes`."""

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
        """Calls begun and not yet answered to the last byte."""
        return self._calls

    @property
    def bytes(self) -> int:
        """Held by bodies in memory."""
        return self._bytes

    def enter(self) -> None:
        """A call begins.

        Raises: ShuttingDown.
        """
        if self.draining:
            raise ShuttingDown("this gateway is stopping", retry_after_s=COME_BACK_S)
        self._calls += 1
        self._idle.clear()

    def leave(self) -> None:
        """A call has been answered, or its caller has gone."""
        self._calls -= 1
        if self._calls == 0:
            self._idle.set()

    def hold(self, size: int) -> None:
        """Bytes of a body are about to be read.

        Raises: GatewayFull.
        """
        # A lone body always fits: its own bound is `limits.body_bytes`.
        if self._bytes and self._bytes + size > self._bytes_max:
            raise GatewayFull("the gateway holds as many bytes as it may; try again")
        self._bytes += size

    def release(self, size: int) -> None:
        """Bytes are done with."""
        self._bytes -= size

    def abandon(self) -> None:
        """Call off what is still unfinished: each call's own `cancels` entry."""
        self.abandoned = True
        for cancel in list(self.cancels):
            cancel()

    async def drain(self, timeout_s: float) -> bool:
        """Take nothing new and wait for what there is; False where time ran out first."""
        self.draining = True
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True
