"""Inputs that failed alone, and tenants whose inputs break replicas. Pure: time is an argument.

Inputs are remembered by a keyed digest, for some minutes and in a bounded number. They go alone while they
are remembered, so that an input that is sent again fails no other caller's batch.
"""

import hashlib
import secrets
from collections import OrderedDict
from collections.abc import Iterator
from enum import IntEnum
from typing import NamedTuple

import msgspec

from backends.contract import Work

KEPT_S = 300.0
INPUTS_MAX = 4096
# A tenant whose inputs broke this many servers within `CRASHES_KEPT_S` has all its slices sent one at a time,
# with a pause after each that breaks one more.
CRASHES_MAX = 3
CRASHES_KEPT_S = 60.0
PAUSE_MIN_S = 0.5
PAUSE_MAX_S = 8.0
TENANTS_MAX = 1024
# Fields of a work that hold its inputs, or something of each.
PER_INPUT = frozenset({"inputs", "documents", "pairs", "prompt_characters"})

_encode = msgspec.msgpack.Encoder().encode


class Isolation(IntEnum):
    """Company in which a slice may be sent.

    shared: batches with other slices. alone: by itself, because one of its batch made that fail. known: by
    itself and one at a time at a replica, because it failed alone, or its tenant's inputs break servers.
    """

    SHARED = 0
    ALONE = 1
    KNOWN = 2


class Suspicion(IntEnum):
    """Failure of a slice that was cut, because one of its inputs may be at fault. none: there was none.

    failed: an error or a broken connection. hung: no answer in time.
    """

    NONE = 0
    FAILED = 1
    HUNG = 2


class Remembered(NamedTuple):
    """Input that failed alone. has_hung: it got no answer. is_refused: its caller got an error."""

    is_refused: bool
    has_hung: bool
    until_s: float


class Suspects:
    """Table of inputs and tenants."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(16)
        # By digest, the oldest first.
        self._inputs: OrderedDict[bytes, Remembered] = OrderedDict()
        # By tenant: servers that its inputs broke in a row, and the moment of the last.
        self._crashes: OrderedDict[str, tuple[int, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._inputs)

    @property
    def is_empty(self) -> bool:
        """True if no input and no tenant is remembered."""
        return not (self._inputs or self._crashes)

    def add(self, work: Work, now_s: float, *, is_refused: bool, has_hung: bool = False) -> None:
        """Remember the only input of a work that failed alone; one that was refused stays so."""
        digest = next(self._digests(work))
        before = self._inputs.pop(digest, None)
        was_refused = before is not None and before.is_refused
        self._inputs[digest] = Remembered(is_refused or was_refused, has_hung, now_s + KEPT_S)
        while len(self._inputs) > INPUTS_MAX:
            self._inputs.popitem(last=False)

    def forget(self, work: Work) -> None:
        """Forget the only input of a work, which a replica has computed."""
        if self._inputs:
            self._inputs.pop(next(self._digests(work)), None)

    def places_in(self, work: Work, now_s: float) -> list[int]:
        """Return the places of the inputs of a work that are remembered."""
        while self._inputs and next(iter(self._inputs.values())).until_s <= now_s:
            self._inputs.popitem(last=False)
        if not self._inputs:
            return []
        return [place for place, digest in enumerate(self._digests(work)) if digest in self._inputs]

    def recall(self, work: Work) -> Remembered | None:
        """Return what is remembered of the only input of a work; None if it is not."""
        return self._inputs.get(next(self._digests(work))) if self._inputs else None

    def add_crash(self, tenant: str, now_s: float) -> None:
        """Record that a tenant's input broke a server."""
        crashes, last_s = self._crashes.pop(tenant, (0, now_s))
        crashes = crashes + 1 if now_s - last_s < CRASHES_KEPT_S else 1
        self._crashes[tenant] = (crashes, now_s)
        while len(self._crashes) > TENANTS_MAX:
            self._crashes.popitem(last=False)

    def paused_until_s(self, tenant: str) -> float:
        """Return until when a tenant's slices that go alone pause; 0 before its inputs break a second one."""
        crashes, last_s = self._crashes.get(tenant, (0, 0.0))
        if crashes < 2:
            return 0.0
        return last_s + min(PAUSE_MAX_S, PAUSE_MIN_S * 2.0 ** min(crashes - 2, 10))

    def breaks_servers(self, tenant: str, now_s: float) -> bool:
        """Return whether a tenant's inputs broke so many servers lately that all of them go one at a time."""
        if not self._crashes:
            return False
        crashes, last_s = self._crashes.get(tenant, (0, 0.0))
        if crashes and now_s - last_s >= CRASHES_KEPT_S:
            del self._crashes[tenant]
            return False
        return crashes >= CRASHES_MAX

    def _digests(self, work: Work) -> Iterator[bytes]:
        """Yield the digest of each input, together with the options of its work."""
        options = [getattr(work, name) for name in work.__struct_fields__ if name not in PER_INPUT]
        head = type(work).__name__.encode() + b"\0" + _encode(options)
        start = hashlib.blake2b(head, digest_size=16, key=self._key)
        for item in work.inputs:
            digest = start.copy()
            digest.update(_encode(item))
            yield digest.digest()
