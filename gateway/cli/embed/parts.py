"""Folder of a run in progress: the manifest and the parts, each of which appears whole or not at all.

A part is an Arrow IPC stream: the columns of the input, and the vector of each row as its bytes. The facts of
a part are in its schema, so that one rename is all that makes a part count.
"""

import fcntl
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa

from gateway.cli.embed.folder import (
    LOCK,
    MANIFEST,
    check_folder,
    clear_folder,
    delete_unfinished,
    new_file,
    read_manifest,
    remove_folder,
)
from gateway.cli.embed.manifest import Manifest, PartFacts
from gateway.cli.embed.plan import EmbedFailed

FACTS = b"embed"
VECTOR = "vector"
PARTS = "part-*.arrow"
# Lance refuses decimals whose buffers are aligned as the format of a stream allows.
ALIGNED = pa.ipc.IpcReadOptions(ensure_alignment=pa.ipc.Alignment.At64Byte)


class Parts:
    """Parts of one output, whose folder is locked while it is open. facts: behind the last part."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.count = 0
        self.facts = PartFacts()
        self._lock: int | None = None

    def open(self) -> Manifest | None:
        """Create or open the folder and lock it; return its manifest, None if it has none.

        Raises: EmbedFailed if another process has it, it cannot be read, or it is not of a run.
        """
        try:
            check_folder(self.folder)
            self.folder.mkdir(exist_ok=True)
            self._lock = _locked(self.folder / LOCK)
        except BlockingIOError as error:
            raise EmbedFailed(f"{self.folder}: another process writes this output") from error
        except OSError as error:
            raise EmbedFailed(f"{self.folder}: {error.strerror or error}") from error
        delete_unfinished(self.folder)
        manifest = read_manifest(self.folder)
        self.count = len(list(self.folder.glob(PARTS)))
        if self.count:
            self._read_last()
        return manifest

    def close(self) -> None:
        """Release the lock; delete the folder if nothing is stored in it. Raises: OSError."""
        if self._lock is not None:
            if self.folder.exists() and not any(self.folder.glob(PARTS)):
                self.remove()
            os.close(self._lock)
            self._lock = None

    def _read_last(self) -> None:
        last = self._path(self.count - 1)
        if not last.exists():
            raise self._damaged("a part is missing")
        try:
            with pa.OSFile(str(last)) as file:
                metadata = pa.ipc.open_stream(file).schema.metadata
            self.facts = msgspec.json.decode(metadata[FACTS], type=PartFacts)
        except (OSError, pa.ArrowException, LookupError, TypeError, msgspec.MsgspecError) as error:
            raise self._damaged(f"{last.name} cannot be read: {error}") from error

    def _damaged(self, problem: str) -> EmbedFailed:
        return EmbedFailed(f"{self.folder}: {problem}; delete the folder to start from the beginning")

    def _path(self, number: int) -> Path:
        return self.folder / f"part-{number:06d}.arrow"

    def write_manifest(self, manifest: Manifest) -> None:
        """Store the manifest in place of another. Raises: OSError."""
        write_whole(self.folder / MANIFEST, msgspec.json.format(msgspec.json.encode(manifest)))

    def add(self, batches: Sequence[Any], facts: PartFacts) -> None:
        """Store the next part. Blocks; for a thread. Raises: OSError."""
        path = self._path(self.count)
        schema = batches[0].schema.with_metadata({FACTS: msgspec.json.encode(facts)})
        unfinished = path.with_suffix(".tmp")
        with new_file(unfinished) as file:
            with pa.ipc.new_stream(file, schema) as writer:
                for batch in batches:
                    writer.write_batch(batch)
            file.flush()
            os.fsync(file.fileno())
        unfinished.rename(path)
        sync_folder(self.folder)
        self.count += 1
        self.facts = facts

    def batches(self) -> Iterator[Any]:
        """Yield the record batches of all parts. Raises: EmbedFailed."""
        for number in range(self.count):
            path = self._path(number)
            try:
                with pa.OSFile(str(path)) as file:
                    yield from pa.ipc.open_stream(file, options=ALIGNED)
            except (OSError, pa.ArrowException) as error:
                raise self._damaged(f"{path.name} cannot be read: {error}") from error

    def clear(self) -> None:
        """Delete all parts and the manifest. Raises: OSError."""
        clear_folder(self.folder)
        self.count, self.facts = 0, PartFacts()

    def remove(self) -> None:
        """Delete the parts, and the folder unless something else is in it. Raises: OSError."""
        remove_folder(self.folder)
        self.count, self.facts = 0, PartFacts()


def _locked(path: Path) -> int:
    """Return the descriptor of a file that is locked. Raises: BlockingIOError, OSError."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def write_whole(path: Path, content: bytes) -> None:
    """Write a file that appears whole or not at all. Raises: OSError."""
    unfinished = path.with_name(f"{path.name}.tmp")
    with new_file(unfinished) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    unfinished.rename(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable. Raises: OSError."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
