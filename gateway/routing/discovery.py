"""Replicas behind one name: each address that the name has is one, for as long as it has it.

Rule: a name that answers nothing changes nothing; an address that has gone is given no more work, and its
connections are closed once what it has is done.
"""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Sequence
from urllib.parse import urlsplit

from gateway.routing.health import ReplicaEvent
from gateway.routing.pool import Pool, Replica

LOOK_EVERY_S = 5.0
# A resolver that does not answer in this time has nothing to say.
RESOLVE_TIMEOUT_S = 5.0
DRAIN_POLL_S = 0.2

# A host and a port → its addresses, of one family.
Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
# A name for logs and metrics, and an address → a replica that nobody has spoken to yet.
OpenAt = Callable[[str, str], Replica]
# Look after a replica until cancelled.
Watch = Callable[[Replica], Awaitable[None]]


async def resolve(host: str, port: int) -> Sequence[str]:
    """The addresses of a name: IPv4 where it has any, else IPv6. One family, or a server counts twice.

    Raises: OSError.
    """
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    families = {family for family, *_ in found}
    wanted = socket.AF_INET if socket.AF_INET in families else socket.AF_INET6
    return sorted({str(address[0]) for family, _, _, _, address in found if family == wanted})


class Discovery:
    """The replicas behind one base URL, and who looks after each."""

    def __init__(self, pool: Pool, url: str, open_at: OpenAt, watch: Watch, look_up: Resolve) -> None:
        parts = urlsplit(url)
        self._pool = pool
        self._url = url
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._open_at = open_at
        self._watch = watch
        self._look_up = look_up
        self._here: dict[str, Replica] = {}
        self._watching: dict[Replica, asyncio.Task[None]] = {}
        self._leaving: set[asyncio.Task[None]] = set()

    async def keep(self) -> None:
        """Look again and again; runs until cancelled."""
        try:
            while True:
                await self.look()
                await asyncio.sleep(LOOK_EVERY_S)
        finally:
            tasks = [*self._watching.values(), *self._leaving]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def look(self) -> None:
        """Once: who is new is opened, who has gone is let go."""
        try:
            async with asyncio.timeout(RESOLVE_TIMEOUT_S):
                addresses = set(await self._look_up(self._host, self._port))
        except (OSError, TimeoutError):
            addresses = set()
        if addresses:
            for address in sorted(addresses - self._here.keys()):
                self._came(address)
            for address in sorted(self._here.keys() - addresses):
                self._went(address)
        self._pool.discovered(self._url)

    def _came(self, address: str) -> None:
        replica = self._here[address] = self._open_at(self._free_name(), address)
        self._pool.add(replica)
        self._watching[replica] = asyncio.ensure_future(self._watch(replica))

    def _went(self, address: str) -> None:
        replica = self._here.pop(address)
        self._watching.pop(replica).cancel()
        self._pool.transition(
            replica, ReplicaEvent.VANISHED, f"{self._host} no longer has the address {address}"
        )
        task = asyncio.create_task(let_go(self._pool, replica))
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    def _free_name(self) -> str:
        """The URL and the lowest number that is free: names are labels, and addresses come and go."""
        taken = {replica.name for replica in self._pool.replicas}
        return next(
            name for number in range(len(taken) + 1) if (name := f"{self._url}#{number}") not in taken
        )


async def let_go(pool: Pool, replica: Replica) -> None:
    """Close a replica that is given no more work once what it has is done."""
    # What it is doing ends by itself, at its attempt's timeout at the latest.
    while replica.batches:  # noqa: ASYNC110 - a batch that ends tells the lane, not who waits here
        await asyncio.sleep(DRAIN_POLL_S)
    pool.remove(replica)
    await replica.backend.aclose()
