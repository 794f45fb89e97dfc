"""Objects of files and jobs: the protocol that a folder and a bucket share.

Rule: an object appears whole or not at all, and is never changed. `create` lets the first of several writers
win. Everything that a job needs to go on is in objects: records elsewhere can be built from them again.
"""

import errno
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Protocol

BLOCK_BYTES = 256 * 1024
FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class ObjectsUnavailable(Exception):
    """Objects cannot be read or written now. is_full: for want of space. The message is safe to show."""

    def __init__(self, reason: str, *, is_full: bool = False) -> None:
        super().__init__(reason)
        self.is_full = is_full


class ObjectLost(ObjectsUnavailable):
    """An object that must be there is missing, or a part of it."""

    def __init__(self) -> None:
        super().__init__("a file is missing, or a part of it")


class Upload(Protocol):
    """An object that is being written."""

    async def write(self, data: bytes) -> None:
        """Append bytes. Raises: ObjectsUnavailable."""

    async def commit(self) -> None:
        """Let the object appear. Raises: ObjectsUnavailable."""

    async def abort(self) -> None:
        """Drop what was written. Never raises."""


class Objects(Protocol):
    """Store of objects by name. Every method raises ObjectsUnavailable, unless it says otherwise."""

    async def start(self, name: str) -> Upload:
        """Begin an object whose name no other has."""

    async def add(self, name: str, path: Path) -> None:
        """Add a local file as an object whose name no other has. The file is gone afterwards."""

    async def create(self, name: str, data: bytes) -> bool:
        """Add a small object; return False, with nothing changed, if there is one of that name."""

    async def read(self, name: str) -> bytes | None:
        """Return a small object, None if there is none."""

    def stream(self, name: str, offset: int = 0, length: int | None = None) -> AsyncGenerator[bytes, None]:
        """Yield the blocks of an object, or of a part of it."""

    async def names(self, prefix: str) -> list[str]:
        """Return the names of the objects below a prefix, which ends in a slash."""

    async def folders(self, prefix: str) -> list[str]:
        """Return the parts of names up to the next slash after a prefix, which ends in a slash itself."""

    async def remove(self, names: Sequence[str]) -> None:
        """Remove objects; a missing one is no error."""

    async def sweep(self, older_s: float) -> None:
        """Remove what was left unfinished so long ago by gateways that were killed."""


def failure_of(error: OSError) -> ObjectsUnavailable:
    """Return the error for a failure of a file system, without any path."""
    if error.errno == errno.ENOENT:
        return ObjectLost()
    is_full = error.errno in FULL
    return ObjectsUnavailable(error.strerror or type(error).__name__, is_full=is_full)
