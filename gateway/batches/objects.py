"""Store of objects by name: the protocol that a folder and a bucket share, and the folder.

An object appears whole or not at all, and is never changed. `create` lets the first of several writers win.
Everything that a job needs to go on is in objects: records elsewhere can be built from them again.

In a folder each object is a file. It is written in `unfinished/` under a random name, synced to the disk, and
then moved to its name; `create` links it there, because a link fails if the name exists, where a move would
replace the file. Gateways that share jobs share the folder.
"""

import asyncio
import errno
import os
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from functools import partial, wraps
from pathlib import Path
from typing import Any, ParamSpec, Protocol, TypeAlias, TypeVar

import msgspec

from gateway.config.state_folder import make_private_folder

BLOCK_BYTES = 256 * 1024
FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
# Unfinished objects, on the same file system.
UNFINISHED = "unfinished"
Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
# Appends bytes to an object.
Write: TypeAlias = Callable[[bytes], Awaitable[None]]


class ObjectsUnavailable(Exception):
    """Objects cannot be read or written now. is_full: for want of space. The message is safe to show."""

    def __init__(self, reason: str, *, is_full: bool = False) -> None:
        super().__init__(reason)
        self.is_full = is_full


class ObjectLost(ObjectsUnavailable):
    """An object that must be there is missing, or a part of it."""

    def __init__(self) -> None:
        super().__init__("a file is missing, or a part of it")


class Objects(Protocol):
    """Store of objects by name. Every method raises ObjectsUnavailable, unless it says otherwise."""

    def writing(self, name: str) -> AbstractAsyncContextManager[Write]:
        """Add an object whose name no other has, and which appears when the block ends without an error."""

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


def _in_thread(
    work: Callable[Parameters, Result],
) -> Callable[Parameters, Coroutine[Any, Any, Result]]:
    """Return a function that blocks as one that runs in a thread, with an error that has no path."""

    @wraps(work)
    async def run(*arguments: Parameters.args, **options: Parameters.kwargs) -> Result:
        try:
            return await asyncio.to_thread(work, *arguments, **options)
        except FileNotFoundError as error:
            raise ObjectLost from error
        except OSError as error:
            reason = error.strerror or type(error).__name__
            raise ObjectsUnavailable(reason, is_full=error.errno in FULL) from error

    return run


_open = _in_thread(os.open)
_read = _in_thread(os.pread)


class FolderObjects:
    """Objects as files below a folder, with modes that keep other users out. Raises: OSError."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._unfinished = folder / UNFINISHED
        make_private_folder(self._unfinished)

    @asynccontextmanager
    async def writing(self, name: str) -> AsyncIterator[Write]:
        """Add an object, once its bytes are on the disk."""
        path = self._new_path()
        file = await _open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            yield partial(_write, file)
            await _sync(file)
            await _place(path, self._folder / name)
        finally:
            _drop(file, path)

    @_in_thread
    def add(self, name: str, path: Path) -> None:
        """Move a local file to its name."""
        with path.open("rb") as file:
            os.fsync(file.fileno())
        _move(path, self._folder / name)

    @_in_thread
    def create(self, name: str, data: bytes) -> bool:
        """Add an object, unless there is one."""
        path, target = self._new_path(), self._folder / name
        if target.exists():
            return False
        try:
            with path.open("xb", buffering=0) as file:
                _write_all(file.fileno(), data)
                os.fsync(file.fileno())
            make_private_folder(target.parent)
            target.hardlink_to(path)
        except FileExistsError:
            return False
        finally:
            path.unlink(missing_ok=True)
        _sync_folder(target.parent)
        return True

    @_in_thread
    def read(self, name: str) -> bytes | None:
        """Return an object, None if there is none."""
        try:
            return (self._folder / name).read_bytes()
        except FileNotFoundError:
            return None

    async def stream(
        self, name: str, offset: int = 0, length: int | None = None
    ) -> AsyncGenerator[bytes, None]:
        """Yield the blocks of an object."""
        file = await _open(self._folder / name, os.O_RDONLY)
        try:
            end = None if length is None else offset + length
            while end is None or offset < end:
                block = await _read(
                    file, BLOCK_BYTES if end is None else min(BLOCK_BYTES, end - offset), offset
                )
                if not block:
                    break
                offset += len(block)
                yield block
            if end is not None and offset < end:
                raise ObjectLost
        finally:
            os.close(file)

    @_in_thread
    def names(self, prefix: str) -> list[str]:
        """Return the names below a prefix."""
        files = (self._folder / prefix).rglob("*")
        return sorted(str(path.relative_to(self._folder)) for path in files if path.is_file())

    @_in_thread
    def folders(self, prefix: str) -> list[str]:
        """Return the folders directly below a prefix."""
        folder = self._folder / prefix
        return sorted(path.name for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []

    @_in_thread
    def remove(self, names: Sequence[str]) -> None:
        """Remove objects, and the folders that become empty, but for those of all files and all jobs."""
        for name in names:
            (self._folder / name).unlink(missing_ok=True)
        for name in {str(Path(name).parent) for name in names}:
            folder = self._folder / name
            # Until one is not empty. Others may be about to create something in a folder of all.
            with suppress(OSError):
                while self._folder not in (folder, folder.parent):
                    folder.rmdir()
                    folder = folder.parent

    @_in_thread
    def sweep(self, older_s: float) -> None:
        """Remove unfinished objects that are this old."""
        remove_older(self._unfinished, time.time() - older_s)

    def _new_path(self) -> Path:
        return self._unfinished / secrets.token_hex(12)


async def create_record(objects: Objects, name: str, record: msgspec.Struct) -> bool:
    """Create an object from a record; return False if another writer was first."""
    return await objects.create(name, msgspec.json.encode(record))


async def read_record(objects: Objects, name: str, kind: type[Result]) -> Result | None:
    """Return the record of an object, None if there is no such object."""
    data = await objects.read(name)
    return None if data is None else msgspec.json.decode(data, type=kind)


def remove_older(folder: Path, before_s: float) -> None:
    """Remove the files of a folder that have not changed since a time, in seconds since 1970."""
    for path in folder.iterdir():
        with suppress(FileNotFoundError):
            if path.stat().st_mtime < before_s:
                path.unlink()


def _write_all(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]


def _move(path: Path, target: Path) -> None:
    make_private_folder(target.parent)
    path.replace(target)
    _sync_folder(target.parent)


def _drop(file: int, path: Path) -> None:
    """Close a file, and remove it unless it was moved. Never raises."""
    with suppress(OSError):
        os.close(file)
    with suppress(OSError):
        path.unlink(missing_ok=True)


_write = _in_thread(_write_all)
_sync = _in_thread(os.fsync)
_place = _in_thread(_move)


def _sync_folder(folder: Path) -> None:
    """Write the names in a folder to the disk, so that they outlast a power failure."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
