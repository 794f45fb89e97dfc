"""Cache in the memory of one process: least recently used entries leave first. Pure but for the clock."""

from collections import OrderedDict
from collections.abc import Callable, Sequence

# Of one entry in addition to its bytes: the key, the tuple, the float, the headers of the objects, and the
# slot of the dictionary with its links. tracemalloc measures 283 bytes with 200,000 entries (CPython 3.11),
# and more right after the dictionary has grown.
ENTRY_OVERHEAD = 360


class MemoryStore:
    """Entries by key. bytes_max: of all entries with their overhead. clock: in seconds, never back."""

    def __init__(self, bytes_max: int, ttl_s: float, clock: Callable[[], float]) -> None:
        self.size_bytes = 0
        self.evictions = 0
        self._bytes_max = bytes_max
        self._ttl_s = ttl_s
        self._clock = clock
        self._entries: OrderedDict[bytes, tuple[float, bytes]] = OrderedDict()
        self._epochs: dict[str, int] = {}

    async def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Return the entry of each key, None where there is none or it has expired."""
        now_s = self._clock()
        return [self._get(key, now_s) for key in keys]

    def put(self, entries: Sequence[tuple[bytes, bytes]]) -> None:
        """Store entries; the least recently used ones leave if there is no room."""
        expires_s = self._clock() + self._ttl_s
        for key, entry in entries:
            self._remove(key)
            if len(entry) + ENTRY_OVERHEAD <= self._bytes_max:
                self._entries[key] = expires_s, entry
                self.size_bytes += len(entry) + ENTRY_OVERHEAD
        while self.size_bytes > self._bytes_max:
            self._remove(next(iter(self._entries)))
            self.evictions += 1

    def epoch_of(self, upstream: str) -> int | None:
        """Return the epoch of an upstream's entries."""
        return self._epochs.get(upstream, 0)

    def distrust(self, upstream: str) -> None:
        """Begin a new epoch: no entry of an upstream is found again, and all leave in time."""
        self._epochs[upstream] = self._epochs.get(upstream, 0) + 1

    async def maintain(self) -> None:
        """Do nothing: there is no background work."""

    async def aclose(self) -> None:
        """Do nothing: there are no connections."""

    def _get(self, key: bytes, now_s: float) -> bytes | None:
        found = self._entries.get(key)
        if found is None:
            return None
        expires_s, entry = found
        if expires_s <= now_s:
            self._remove(key)
            return None
        self._entries.move_to_end(key)
        return entry

    def _remove(self, key: bytes) -> None:
        removed = self._entries.pop(key, None)
        if removed is not None:
            self.size_bytes -= len(removed[1]) + ENTRY_OVERHEAD
