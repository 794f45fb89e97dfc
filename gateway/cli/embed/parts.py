"""Files next to an output: the parts of a run in progress, its manifest, and the note on a complete output.

A part is an Arrow IPC stream: the columns of the input, and the vector of each row as its bytes. Its facts
are in its schema, so that one rename is all that makes a part count. Every file appears whole or not at all.
Only what a run has made is replaced or deleted, and no link is followed.
"""

import fcntl
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import msgspec
import pyarrow as pa

from gateway.cli.embed.plan import DType, EmbedFailed, PartFacts, Plan, Settings

MANIFEST, LOCK = "manifest.json", "lock"
# An output that is being written, and one that is being replaced; both may be folders.
UNFINISHED, REPLACED = "output.tmp", "replaced.tmp"
OWN_NAMES = frozenset({MANIFEST, f"{MANIFEST}.tmp", UNFINISHED, REPLACED})
# What a run has made before it has a manifest, and leaves if it is killed then.
BEGINNINGS = frozenset({LOCK, f"{MANIFEST}.tmp"})
PART = re.compile(r"part-\d{6,}\.(arrow|tmp)")
PARTS = "part-*.arrow"
FACTS = b"embed"
# Lance refuses decimals whose buffers are aligned as the format of a stream allows.
ALIGNED = pa.ipc.IpcReadOptions(ensure_alignment=pa.ipc.Alignment.At64Byte)
DAMAGED = (OSError, msgspec.MsgspecError, UnicodeDecodeError)


class Note(msgspec.Struct, frozen=True):
    """Note next to an output: how it was made.

    inode, size, mtime_ns: of the output; the last two are 0 for a folder. dtype: of its vectors.
    """

    inode: int
    size: int
    mtime_ns: int
    manifest: Settings
    facts: PartFacts
    as_json: tuple[str, ...] = ()
    dtype: DType = "float32"

    def difference(self, settings: Settings, dtype: DType) -> str:
        """Return why the output is not the one that a run would make; empty if it is."""
        reason = self.manifest.difference(settings)
        if not reason and self.dtype != dtype:
            reason = f"--dtype was {self.dtype!r} and is {dtype!r}"
        return reason


def note_path(output: Path) -> Path:
    """Return the place of the note on an output. Its name begins with a dot: readers of a folder skip it."""
    return output.with_name(f".{output.name}.embedded")


def read_note(output: Path) -> Note | None:
    """Return the note on an output that is complete; None if it is another file, or has none."""
    try:
        note = msgspec.json.decode(_read(note_path(output)), type=Note)
        identity = identity_of(output)
    except DAMAGED:
        return None
    return note if identity == (note.inode, note.size, note.mtime_ns) else None


def delete_note(output: Path) -> None:
    """Delete the note on an output. Raises: EmbedFailed if a file of its name is something else; OSError."""
    path = note_path(output)
    if not (path.exists() or path.is_symlink()):
        return
    try:
        msgspec.json.decode(_read(path), type=Note)
    except DAMAGED as error:
        raise EmbedFailed(
            f"{path} is no note of a run, and notes on outputs have such names; move it away"
        ) from error
    path.unlink()


def identity_of(output: Path) -> tuple[int, int, int]:
    """Return the identity of an output, which a rename keeps. Raises: OSError."""
    found = output.stat()
    return (found.st_ino, 0, 0) if output.is_dir() else (found.st_ino, found.st_size, found.st_mtime_ns)


def check_replaced(plan: Plan) -> None:
    """Check that an output can be written without the loss of anything else. Raises: EmbedFailed, OSError."""
    path = plan.output
    if path.is_symlink():
        raise EmbedFailed(f"{path} is a symbolic link; give --to the place that it points to")
    if not path.exists():
        return
    if path.is_dir():
        # A dataset of Lance, and nothing else.
        names = _names(path)
        is_dataset = "_versions" in names and all(name == "data" or name[0] == "_" for name in names)
        if plan.output_format != "lance" or (names and not is_dataset):
            raise EmbedFailed(f"{path} is a folder, and no dataset of Lance; move it away")
    elif not path.is_file():
        raise EmbedFailed(f"{path} is no file, and is not replaced")
    if not plan.overwrite:
        raise EmbedFailed(f"{path} exists; --overwrite replaces it")


class Parts:
    """Parts of one output, whose folder is locked while it is open. facts: behind the last part."""

    def __init__(self, output: Path) -> None:
        self.folder = output.with_name(f"{output.name}.parts")
        self.count = 0
        self.facts = PartFacts()
        self._lock: int | None = None

    def check(self) -> None:
        """Check that the parts of a run may be kept in the folder. Raises: EmbedFailed, OSError."""
        folder = self.folder
        if folder.is_symlink():
            raise EmbedFailed(f"{folder} is a symbolic link, and parts are kept in a folder; move it away")
        if not folder.exists():
            return
        if not folder.is_dir():
            raise EmbedFailed(f"{folder} is no folder, and parts are kept there; move it away")
        if self._manifest() is None and not _names(folder) <= BEGINNINGS:
            raise EmbedFailed(
                f"{folder} has files, and none is the manifest of a run: the folder is left as it is; "
                "move it away, or give --to another name"
            )

    def are_left(self) -> bool:
        """Return whether a run has left the folder. Raises: OSError."""
        try:
            self.check()
        except EmbedFailed:
            return False
        return self.folder.exists() and bool(_names(self.folder))

    def have_rows(self) -> bool:
        """Return whether a run has left rows in the folder."""
        try:
            return any(name.endswith(".arrow") and PART.fullmatch(name) for name in _names(self.folder))
        except OSError:
            return False

    def _manifest(self) -> Settings | None:
        """Return the manifest, None if there is none. Raises: EmbedFailed."""
        try:
            return msgspec.json.decode(_read(self.folder / MANIFEST), type=Settings)
        except FileNotFoundError:
            return None
        except DAMAGED as error:
            raise EmbedFailed(
                f"{self.folder}: {MANIFEST} cannot be read: {error}; move the folder away to start from the "
                "beginning"
            ) from error

    def open(self) -> Settings | None:
        """Create or open the folder and lock it; return its manifest, None if it has none.

        Raises: EmbedFailed if another process has it, it cannot be read, or it is not of a run.
        """
        try:
            self.check()
            self.folder.mkdir(exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            self._lock = os.open(self.folder / LOCK, flags, 0o644)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._unlock()
            if isinstance(error, BlockingIOError):
                raise EmbedFailed(f"{self.folder}: another process writes this output") from error
            raise EmbedFailed(f"{self.folder}: {error.strerror or error}") from error
        for path in self._own_files():
            if path.suffix == ".tmp":
                # A killed run has not completed it.
                _delete(path)
        manifest = self._manifest()
        self.count = len(list(self.folder.glob(PARTS)))
        if self.count:
            self._read_last()
        return manifest

    def close(self) -> None:
        """Release the lock; delete the folder if nothing is stored in it. Raises: OSError."""
        if self._lock is not None and self.folder.exists() and not any(self.folder.glob(PARTS)):
            self.remove()
        self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
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

    def write_manifest(self, settings: Settings) -> None:
        """Store the manifest in place of another. Raises: OSError."""
        write_whole(self.folder / MANIFEST, msgspec.json.format(msgspec.json.encode(settings)))

    def add(self, batches: Sequence[pa.RecordBatch], facts: PartFacts) -> None:
        """Store the next part. Blocks; for a thread. Raises: OSError."""
        schema = batches[0].schema.with_metadata({FACTS: msgspec.json.encode(facts)})
        path = self._path(self.count)
        with _written(path, path.with_suffix(".tmp")) as file, pa.ipc.new_stream(file, schema) as writer:
            for batch in batches:
                writer.write_batch(batch)
        self.count += 1
        self.facts = facts

    def batches(self) -> Iterator[pa.RecordBatch]:
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
        # The last part first, and the manifest behind all of them: what remains after an interruption is the
        # beginning of the same run.
        for path in sorted(self._own_files(), reverse=True):
            _delete(path)
        self.count, self.facts = 0, PartFacts()

    def remove(self) -> None:
        """Delete the parts, and the folder unless something else is in it. Raises: OSError."""
        self.clear()
        (self.folder / LOCK).unlink(missing_ok=True)
        if not _names(self.folder):
            self.folder.rmdir()

    def _own_files(self) -> list[Path]:
        files = self.folder.iterdir()
        return [path for path in files if path.name in OWN_NAMES or PART.fullmatch(path.name)]


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink() and path.name in (UNFINISHED, REPLACED):
        shutil.rmtree(path)
    else:
        path.unlink()


def _names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def _read(path: Path) -> bytes:
    """Return the content of a file that is no link. Raises: OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        return file.read()


@contextmanager
def _written(path: Path, unfinished: Path) -> Iterator[IO[bytes]]:
    """Yield a file that appears at a path, whole and durable, when the block ends. Raises: OSError."""
    # In place of one that a killed run left.
    unfinished.unlink(missing_ok=True)
    with unfinished.open("xb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    unfinished.rename(path)
    sync(path.parent)


def write_whole(path: Path, content: bytes) -> None:
    """Write a file that appears whole or not at all. Raises: OSError."""
    with _written(path, path.with_name(f"{path.name}.tmp")) as file:
        file.write(content)


def sync(path: Path) -> None:
    """Make a file durable, or the names in a folder. Raises: OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
