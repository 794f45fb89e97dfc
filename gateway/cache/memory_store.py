"""Cache in the memory of one process: least recently used entries leave first. Pure but for the clock."""

from collections import OrderedDict
from collections.abc import Callable, Sequence

# Of one entry in addition to its bytes: the key, the tuple, the float, the headers of the objects, and the
# slot of the dictionary with its links. tracemalloc measures 283 bytes with 200,000 entries (CPython 3.11),
# and more right after the dictionary has grown.
ENTRY_OVERHEAD = 360


class _OwnedEntries:
    """Entries of one owner, the least recently used first, with their bytes."""

    def __init__(self) -> None:
        self.entries: OrderedDict[bytes, tuple[float, bytes]] = OrderedDict()
        self.bytes = 0


class MemoryStore:
    """Entries by owner and key. bytes_max: of all entries with their overhead. clock: in seconds, never back.

    Rule: an owner loses entries to another one only while it holds more than an equal share.
    """

    def __init__(self, bytes_max: int, ttl_s: float, clock: Callable[[], float]) -> None:
        self.size_bytes = 0
        self.evictions = 0
        self._bytes_max = bytes_max
        self._ttl_s = ttl_s
        self._clock = clock
        self._owned: dict[str, _OwnedEntries] = {}
        self._epochs: dict[str, int] = {}

    async def get(self, keys: Sequence[bytes], owner: str) -> list[bytes | None]:
        """Return the entry of each key, None where there is none or it has expired."""
        now_s = self._clock()
        return [self._get(owner, key, now_s) for key in keys]

    def put(self, entries: Sequence[tuple[bytes, bytes]], owner: str) -> None:
        """Store entries; the least recently used ones leave if there is no room."""
        now_s = self._clock()
        for key, entry in entries:
            self._remove(owner, key)
            size = len(entry) + ENTRY_OVERHEAD
            if size > self._bytes_max:
                continue
            own = self._owned.setdefault(owner, _OwnedEntries())
            own.entries[key] = now_s + self._ttl_s, entry
            own.bytes += size
            self.size_bytes += size
            while self.size_bytes > self._bytes_max:
                victim = self._victim(owner, now_s)
                self._remove(victim, next(iter(self._owned[victim].entries)))
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

    def _victim(self, owner: str, now_s: float) -> str:
        """Return the owner whose least recently used entry leaves for a new one of `owner`."""
        if self._owned[owner].bytes * len(self._owned) > self._bytes_max:
            return owner
        for name, owned in self._owned.items():
            expires_s, _ = next(iter(owned.entries.values()))
            if expires_s <= now_s:
                return name
        return max(self._owned, key=lambda name: self._owned[name].bytes)

    def _get(self, owner: str, key: bytes, now_s: float) -> bytes | None:
        owned = self._owned.get(owner)
        found = None if owned is None else owned.entries.get(key)
        if owned is None or found is None:
            return None
        expires_s, entry = found
        if expires_s <= now_s:
            self._remove(owner, key)
            return None
        owned.entries.move_to_end(key)
        return entry

    def _remove(self, owner: str, key: bytes) -> None:
        owned = self._owned.get(owner)
        removed = None if owned is None else owned.entries.pop(key, None)
        if owned is None or removed is None:
            return
        size = len(removed[1]) + ENTRY_OVERHEAD
        owned.bytes -= size
        self.size_bytes -= size
        if not owned.entries:
            del self._owned[owner]
