"""Reader of the vectors that every replica of one upstream returns, for `gateway verify`."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import msgspec

from backends.contract.errors import BackendError
from backends.kinds import open_replica
from gateway.config.schema import UpstreamSettings
from gateway.processes.engine_process import EngineFailed, running_engine
from gateway.routing.discovery import resolve
from gateway.upstreams.factory import ReplicaAddress, ReplicaOpener, create_replica
from gateway.vector_spaces.comparison import ReplicaVectors, read_vectors


class CannotVerify(Exception):
    """There is nothing to report; the message gives the reason, for a person."""


class UpstreamReader:
    """Reader of the vectors of one upstream's replicas for some texts."""

    def __init__(
        self, name: str, settings: UpstreamSettings, texts: Sequence[str], environment: Mapping[str, str]
    ) -> None:
        self._name = name
        self._settings = settings
        self._texts = texts
        self._environment = environment
        # Of replicas that could not be read.
        self.problems: list[str] = []

    async def read(self) -> list[ReplicaVectors]:
        """Return the vectors of each replica that embeds; the problems of others are added to `problems`."""
        try:
            async with self._addresses() as addresses:
                vectors = [await self._embed_or_note(address) for address in addresses]
        except CannotVerify as error:
            self.problems.append(str(error))
            return []
        return [replica for replica in vectors if replica is not None]

    async def _embed_or_note(self, address: ReplicaAddress) -> ReplicaVectors | None:
        try:
            return await self._embed(address)
        except CannotVerify as error:
            self.problems.append(str(error))
            return None

    @asynccontextmanager
    async def _addresses(self) -> AsyncIterator[list[ReplicaAddress]]:
        if self._settings.is_local:
            try:
                async with running_engine(self._name, self._settings, self._environment) as address:
                    yield [ReplicaAddress(self._name, address)]
            except EngineFailed as error:
                raise CannotVerify(f"{self._name}: {error}") from error
            return
        addresses = [address for url in self._settings.replicas for address in await self._resolve(url)]
        if len(addresses) == 1:
            # An upstream with a single replica needs no URL to identify them.
            addresses = [msgspec.structs.replace(addresses[0], name=self._name)]
        yield addresses

    async def _resolve(self, url: str) -> list[ReplicaAddress]:
        label = f"{self._name} {url}"
        if self._settings.discover is None:
            return [ReplicaAddress(label, url)]
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        try:
            ips = await resolve(parts.hostname or "", port)
        except OSError as error:
            raise CannotVerify(f"{label}: the name has no address") from error
        return [ReplicaAddress(f"{label} {ip}", url, ip) for ip in ips]

    async def _embed(self, replica: ReplicaAddress) -> ReplicaVectors | None:
        settings = self._settings
        backend = create_replica(settings, replica, ReplicaOpener(self._name, open_replica)).backend
        try:
            return await read_vectors(replica.name, self._name, backend, settings, self._texts)
        except BackendError as error:
            raise CannotVerify(f"{replica.name}: {error.message}") from error
        finally:
            await backend.aclose()
