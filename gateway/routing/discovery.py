"""DNS discovery: each address that a name resolves to is one replica, for as long as the name has it.

Rule: a failed or empty resolution changes nothing. A replica whose address has disappeared is given no more
work, and its connections are closed once its batches are done.
"""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Sequence
from urllib.parse import urlsplit

from gateway.routing.health import ReplicaEvent
from gateway.routing.pool import Pool
from gateway.routing.replica import Replica

REFRESH_EVERY_S = 5.0
# A resolver that takes longer than this counts as failed.
RESOLVE_TIMEOUT_S = 5.0
DRAIN_POLL_S = 0.2

# A host and a port → its addresses, of one family.
Resolver = Callable[[str, int], Awaitable[Sequence[str]]]
# A name for logs and metrics, and an address → a replica that has not been contacted yet.
OpenReplicaAt = Callable[[str, str], Replica]
# Probes a replica until cancelled.
ProbeReplica = Callable[[Replica], Awaitable[None]]


async def resolve(host: str, port: int) -> Sequence[str]:
    """Return the addresses of a name: IPv4 if it has any, else IPv6.

    Only one family, because a server that has both would count twice. Raises: OSError.
    """
    loop = asyncio.get_running_loop()
    entries = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    families = {family for family, *_ in entries}
    preferred = socket.AF_INET if socket.AF_INET in families else socket.AF_INET6
    return sorted({str(address[0]) for family, _, _, _, address in entries if family == preferred})


class Discovery:
    """Replicas behind one base URL, each with the task that probes it."""

    def __init__(
        self, pool: Pool, url: str, open_at: OpenReplicaAt, probe: ProbeReplica, resolver: Resolver
    ) -> None:
        parts = urlsplit(url)
        self._pool = pool
        self._url = url
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._open_at = open_at
        self._probe = probe
        self._resolver = resolver
        self._replicas: dict[str, Replica] = {}
        self._probes: dict[Replica, asyncio.Task[None]] = {}
        self._drains: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Resolve the name every `REFRESH_EVERY_S`; runs until cancelled."""
        try:
            while True:
                await self.refresh()
                await asyncio.sleep(REFRESH_EVERY_S)
        finally:
            tasks = [*self._probes.values(), *self._drains]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def refresh(self) -> None:
        """Resolve the name once, open the new replicas and drain those whose address has disappeared."""
        try:
            async with asyncio.timeout(RESOLVE_TIMEOUT_S):
                addresses = set(await self._resolver(self._host, self._port))
        except (OSError, TimeoutError):
            addresses = set()
        if addresses:
            for address in sorted(addresses - self._replicas.keys()):
                self._add(address)
            for address in sorted(self._replicas.keys() - addresses):
                self._remove(address)
        self._pool.finish_discovery(self._url)

    def _add(self, address: str) -> None:
        replica = self._replicas[address] = self._open_at(self._free_name(), address)
        self._pool.add(replica)
        self._probes[replica] = asyncio.ensure_future(self._probe(replica))

    def _remove(self, address: str) -> None:
        replica = self._replicas.pop(address)
        self._probes.pop(replica).cancel()
        self._pool.transition(
            replica, ReplicaEvent.REMOVED, f"{self._host} no longer has the address {address}"
        )
        task = asyncio.create_task(drain_replica(self._pool, replica))
        self._drains.add(task)
        task.add_done_callback(self._drains.discard)

    def _free_name(self) -> str:
        """Return the URL with the lowest free number: names are metric labels, and addresses change."""
        used_names = {replica.name for replica in self._pool.replicas}
        return next(
            name
            for number in range(len(used_names) + 1)
            if (name := f"{self._url}#{number}") not in used_names
        )


async def drain_replica(pool: Pool, replica: Replica) -> None:
    """Wait until a replica that is given no more work has completed its batches, then close it."""
    # Each batch finishes by itself, at its attempt's timeout at the latest.
    while replica.batches:  # noqa: ASYNC110 - the outcome of a batch is reported only to the lane
        await asyncio.sleep(DRAIN_POLL_S)
    pool.remove(replica)
    await replica.backend.aclose()
