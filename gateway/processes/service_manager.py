"""Messages to the service manager that started the gateway, such as systemd with `Type=notify`.

They are datagrams to the socket that NOTIFY_SOCKET names; without one nothing is sent. Callers must not
suffer from a manager that does not read: nothing here waits or fails.
"""

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable, Mapping

logger = logging.getLogger("gateway")

MICROSECONDS = 1_000_000
# Messages in one time of the watchdog, so that a late one does no harm.
PER_WATCHDOG = 3


class ServiceManager:
    """Connection to the service manager. environment: with its socket and its watchdog, if it has them."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        address = environment.get("NOTIFY_SOCKET", "")
        # A name in the abstract namespace begins with @ there, and with a zero for the kernel.
        self._address = f"\0{address[1:]}" if address.startswith("@") else address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) if address else None
        if self._socket is not None:
            self._socket.settimeout(0)
        self._has_failed = False
        self.watchdog_s = _watchdog_s(environment)

    def send(self, *lines: str) -> None:
        """Send some assignments together, such as READY=1."""
        if self._socket is None:
            return
        try:
            self._socket.sendto("\n".join(lines).encode(errors="replace"), self._address)
        except OSError as error:
            if not self._has_failed:
                logger.warning("the service manager at NOTIFY_SOCKET cannot be reached: %s", error)
            self._has_failed = True

    def show(self, status: str) -> None:
        """Report the state in words, of which the manager shows one line."""
        self.send(f"STATUS={_line(status)}")

    def ready(self, status: str) -> None:
        """Report that the start or a reload has ended."""
        self.send("READY=1", f"STATUS={_line(status)}")

    def reloading(self) -> None:
        """Report that a reload begins."""
        now_us = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        self.send("RELOADING=1", f"MONOTONIC_USEC={now_us}", "STATUS=reading router.yaml again")

    def stopping(self, status: str, patience_s: float) -> None:
        """Report that the stop begins, which may take so long."""
        extension = f"EXTEND_TIMEOUT_USEC={int(patience_s * MICROSECONDS)}"
        self.send("STOPPING=1", extension, f"STATUS={_line(status)}")

    async def feed_watchdog(self, is_alive: Callable[[float], bool]) -> None:
        """Send signs of life, as often as the watchdog asks for, while the gateway is alive; until cancelled.

        is_alive: returns whether a worker has responded within that time.
        """
        if self._socket is None or self.watchdog_s is None:
            return
        while True:
            if is_alive(self.watchdog_s / 2):
                self.send("WATCHDOG=1")
            await asyncio.sleep(self.watchdog_s / PER_WATCHDOG)

    def close(self) -> None:
        """Close the socket."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def _watchdog_s(environment: Mapping[str, str]) -> float | None:
    """Return the time within which the manager expects a sign of life from this process, None without one."""
    microseconds = environment.get("WATCHDOG_USEC", "")
    if environment.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return None
    return int(microseconds) / MICROSECONDS if microseconds.isdecimal() and int(microseconds) else None


def _line(text: str) -> str:
    return " ".join(text.split())
