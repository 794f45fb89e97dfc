"""Objects in a folder. Gateways that share jobs share the folder."""

import asyncio
import os
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from gateway.batches.objects import BLOCK_BYTES, ObjectLost, failure_of

# Unfinished objects, on the same file system.
UNFINISHED = "unfinished"
Result = TypeVar("Result")


class FolderUpload:
    """An object that is being written to a file of its own."""

    def __init__(self, path: Path, target: Path) -> None:
        self._path = path
        self._target = target
        self._file = path.open("xb", buffering=0)

    async def write(self, data: bytes) -> None:
        """Append bytes. Raises: ObjectsUnavailable."""
        await _in_thread(lambda: _write_all(self._file.fileno(), data))

    async def commit(self) -> None:
        """Let the object appear, once its bytes are on the disk. Raises: ObjectsUnavailable."""
        await _in_thread(self._commit)

    def _commit(self) -> None:
        os.fsync(self._file.fileno())
        self._file.close()
        _move(self._path, self._target)

    async def abort(self) -> None:
        """Drop what was written."""
        with suppress(OSError):
            self._file.close()
        with suppress(OSError):
            self._path.unlink(missing_ok=True)


class FolderObjects:
    """Objects as files below a folder, with modes that keep other users out. Raises: OSError."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._unfinished = folder / UNFINISHED
        make_private(self._unfinished)

    async def start(self, name: str) -> FolderUpload:
        """Begin an object. Raises: ObjectsUnavailable."""
        return await _in_thread(lambda: FolderUpload(self._new_path(), self._folder / name))

    async def add(self, name: str, path: Path) -> None:
        """Move a local file to its name. Raises: ObjectsUnavailable."""

        def move() -> None:
            with path.open("rb") as file:
                os.fsync(file.fileno())
            _move(path, self._folder / name)

        await _in_thread(move)

    async def create(self, name: str, data: bytes) -> bool:
        """Add an object, unless there is one. Raises: ObjectsUnavailable."""
        return await _in_thread(lambda: self._create(name, data))

    def _create(self, name: str, data: bytes) -> bool:
        path, target = self._new_path(), self._folder / name
        if target.exists():
            return False
        try:
            with path.open("xb", buffering=0) as file:
                _write_all(file.fileno(), data)
                os.fsync(file.fileno())
            make_private(target.parent)
            # A link fails if the name exists, where a rename would replace the file.
            target.hardlink_to(path)
        except FileExistsError:
            return False
        finally:
            path.unlink(missing_ok=True)
        _sync_folder(target.parent)
        return True

    async def read(self, name: str) -> bytes | None:
        """Return an object, None if there is none. Raises: ObjectsUnavailable."""

        def read() -> bytes | None:
            try:
                return (self._folder / name).read_bytes()
            except FileNotFoundError:
                return None

        return await _in_thread(read)

    async def stream(
        self, name: str, offset: int = 0, length: int | None = None
    ) -> AsyncGenerator[bytes, None]:
        """Yield the blocks of an object. Raises: ObjectsUnavailable."""
        file = await _in_thread((self._folder / name).open, "rb", buffering=0)
        try:
            end = None if length is None else offset + length
            while end is None or offset < end:
                size = BLOCK_BYTES if end is None else min(BLOCK_BYTES, end - offset)
                block = await _in_thread(os.pread, file.fileno(), size, offset)
                if not block:
                    break
                offset += len(block)
                yield block
            if end is not None and offset < end:
                raise ObjectLost
        finally:
            file.close()

    async def names(self, prefix: str) -> list[str]:
        """Return the names below a prefix. Raises: ObjectsUnavailable."""

        def names() -> list[str]:
            files = (self._folder / prefix).rglob("*")
            return sorted(str(path.relative_to(self._folder)) for path in files if path.is_file())

        return await _in_thread(names)

    async def folders(self, prefix: str) -> list[str]:
        """Return the folders directly below a prefix. Raises: ObjectsUnavailable."""

        def folders() -> list[str]:
            folder = self._folder / prefix
            return sorted(path.name for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []

        return await _in_thread(folders)

    async def remove(self, names: Sequence[str]) -> None:
        """Remove objects, and the folders that become empty. Raises: ObjectsUnavailable."""
        await _in_thread(self._remove, names)

    def _remove(self, names: Sequence[str]) -> None:
        for name in names:
            (self._folder / name).unlink(missing_ok=True)
        for name in {str(Path(name).parent) for name in names}:
            folder = self._folder / name
            while folder != self._folder:
                try:
                    folder.rmdir()
                except OSError:
                    break
                folder = folder.parent

    async def sweep(self, older_s: float) -> None:
        """Remove unfinished objects that are this old. Raises: ObjectsUnavailable."""

        def sweep() -> None:
            before = time.time() - older_s
            for path in self._unfinished.iterdir():
                with suppress(FileNotFoundError):
                    if path.stat().st_mtime < before:
                        path.unlink()

        await _in_thread(sweep)

    def _new_path(self) -> Path:
        return self._unfinished / secrets.token_hex(12)


def make_private(folder: Path) -> None:
    """Create a folder and the missing ones above it, which other users cannot enter. Raises: OSError."""
    if not folder.is_dir():
        make_private(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)


def _write_all(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]


def _move(path: Path, target: Path) -> None:
    make_private(target.parent)
    path.replace(target)
    _sync_folder(target.parent)


def _sync_folder(folder: Path) -> None:
    """Write the names in a folder to the disk, so that they outlast a power failure."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


async def _in_thread(function: Callable[..., Result], *arguments: object, **options: object) -> Result:
    try:
        return await asyncio.to_thread(function, *arguments, **options)
    except OSError as error:
        raise failure_of(error) from error
