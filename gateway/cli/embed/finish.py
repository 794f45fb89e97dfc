"""End of a run: the output from the parts, by one rename, and the note that it is complete."""

import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from gateway.cli.embed.folder import REPLACED, UNFINISHED, check_replaced, read_plain
from gateway.cli.embed.manifest import Manifest, PartFacts, refusal
from gateway.cli.embed.outputs import Content, write_output
from gateway.cli.embed.parts import Parts, sync_folder, write_whole
from gateway.cli.embed.plan import DType, EmbedFailed, Plan


class Note(msgspec.Struct, frozen=True):
    """Note next to an output: how it was made.

    inode, size, mtime_ns: of the output; the last two are 0 for a folder. dtype: of its vectors.
    """

    inode: int
    size: int
    mtime_ns: int
    manifest: Manifest
    facts: PartFacts
    as_json: tuple[str, ...] = ()
    dtype: DType = "float32"

    def refusal(self, manifest: Manifest, dtype: DType) -> str:
        """Return why the output is not the one that a run would make; empty if it is."""
        reason = refusal(self.manifest, manifest)
        if not reason and self.dtype != dtype:
            reason = f"--dtype was {self.dtype!r} and is {dtype!r}"
        return reason


def note_path(output: Path) -> Path:
    """Return the place of the note on an output. Its name begins with a dot: readers of a folder skip it."""
    return output.with_name(f".{output.name}.embedded")


def read_note(output: Path) -> Note | None:
    """Return the note on an output that is complete; None if it is another file, or has none."""
    try:
        note = msgspec.json.decode(read_plain(note_path(output)), type=Note)
        identity = _identity(output)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return note if identity == (note.inode, note.size, note.mtime_ns) else None


def delete_note(output: Path) -> None:
    """Delete the note on an output. Raises: EmbedFailed if a file of its name is something else; OSError."""
    path = note_path(output)
    if not (path.exists() or path.is_symlink()):
        return
    try:
        msgspec.json.decode(read_plain(path), type=Note)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise EmbedFailed(
            f"{path} is no note of a run, and notes on outputs have such names; move it away"
        ) from error
    path.unlink()


def _identity(path: Path) -> tuple[int, int, int]:
    """Return the identity of an output, which a rename keeps. Raises: OSError."""
    found = path.stat()
    return (found.st_ino, 0, 0) if path.is_dir() else (found.st_ino, found.st_size, found.st_mtime_ns)


def finish(plan: Plan, parts: Parts, manifest: Manifest, written: Callable[[int], None]) -> Note:
    """Write the output and delete the parts. Blocks; for a thread. Raises: EmbedFailed, OSError."""
    facts, output = parts.facts, plan.output
    check_unchanged(plan)
    if facts.space is None:
        raise EmbedFailed("no row has a text, so there are no vectors to write")
    has_lines = plan.sources[0].format == "jsonl"
    content = Content(parts.batches, has_lines, facts.space.dimensions, written)
    described = msgspec.json.encode({"space": facts.space, "request": manifest.request}).decode()
    unfinished = parts.folder / UNFINISHED
    as_json = write_output(content, output, unfinished, {"gateway embed": described})
    _sync(unfinished)
    # Another program may have written there meanwhile.
    check_replaced(output)
    note = Note(*_identity(unfinished), manifest, facts, as_json, output.dtype)
    write_whole(note_path(output.path), msgspec.json.encode(note))
    if output.path.is_dir():
        # A folder cannot be replaced at once.
        aside = parts.folder / REPLACED
        output.path.rename(aside)
    unfinished.replace(output.path)
    sync_folder(output.path.parent)
    parts.remove()
    return note


def check_unchanged(plan: Plan) -> None:
    """Check that no input has changed since the start. Raises: EmbedFailed."""
    for source in plan.sources:
        try:
            found = os.stat(source.path)  # noqa: PTH116 - its path is a string
        except OSError as error:
            raise EmbedFailed(f"{source.path}: {error.strerror or error}") from error
        if (found.st_size, found.st_mtime_ns) != (source.size, source.mtime_ns):
            raise EmbedFailed(f"{source.path} has changed while it was read")


def _sync(path: Path) -> None:
    """Make a file durable, or all files of a folder."""
    for file in (path,) if path.is_file() else (item for item in path.rglob("*") if item.is_file()):
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
