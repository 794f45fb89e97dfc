"""Files next to an output: only what a run has made is replaced or deleted, and no link is followed."""

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO

import msgspec

from gateway.cli.embed.manifest import Manifest
from gateway.cli.embed.plan import EmbedFailed, Output

MANIFEST = "manifest.json"
LOCK = "lock"
UNFINISHED = "output.tmp"
REPLACED = "replaced.tmp"
# Outputs may be folders.
OUTPUTS = frozenset({UNFINISHED, REPLACED})
PART = re.compile(r"part-\d{6,}\.(arrow|tmp)")
# What a run has made before it has a manifest, and leaves if it is killed then.
BEGINNINGS = frozenset({LOCK, f"{MANIFEST}.tmp"})


def check_folder(folder: Path) -> None:
    """Check that the parts of a run may be kept in a folder. Raises: EmbedFailed, OSError."""
    if folder.is_symlink():
        raise EmbedFailed(f"{folder} is a symbolic link, and parts are kept in a folder; move it away")
    if not folder.exists():
        return
    if not folder.is_dir():
        raise EmbedFailed(f"{folder} is no folder, and parts are kept there; move it away")
    if read_manifest(folder) is None and not _names(folder) <= BEGINNINGS:
        raise EmbedFailed(
            f"{folder} has files, and none is the manifest of a run: the folder is left as it is; "
            "move it away, or give --to another name"
        )


def is_of_run(folder: Path) -> bool:
    """Return whether a run has left the folder. Raises: OSError."""
    try:
        check_folder(folder)
    except EmbedFailed:
        return False
    return folder.exists() and bool(_names(folder))


def has_parts(folder: Path) -> bool:
    """Return whether a run has left rows in the folder."""
    try:
        return any(name.endswith(".arrow") and PART.fullmatch(name) for name in _names(folder))
    except OSError:
        return False


def read_manifest(folder: Path) -> Manifest | None:
    """Return the manifest in a folder, None if it has none. Raises: EmbedFailed."""
    try:
        return msgspec.json.decode(read_plain(folder / MANIFEST), type=Manifest)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise EmbedFailed(
            f"{folder}: {MANIFEST} cannot be read: {error}; move the folder away to start from the beginning"
        ) from error


def read_plain(path: Path) -> bytes:
    """Return the content of a file that is no link. Raises: OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        return file.read()


def delete_unfinished(folder: Path) -> None:
    """Delete what a killed run has not completed. Raises: OSError."""
    for path in _own_files(folder):
        if path.suffix == ".tmp":
            _delete(path)


def clear_folder(folder: Path) -> None:
    """Delete all parts and the manifest. Raises: OSError."""
    # The last part first, and the manifest behind all of them: what remains after an interruption is the
    # beginning of the same run.
    for path in sorted(_own_files(folder), reverse=True):
        _delete(path)


def remove_folder(folder: Path) -> None:
    """Delete what a run has made, and the folder if nothing else is in it. Raises: OSError."""
    clear_folder(folder)
    (folder / LOCK).unlink(missing_ok=True)
    if not _names(folder):
        folder.rmdir()


def new_file(path: Path) -> IO[bytes]:
    """Open a new file in place of one that a killed run left. Raises: OSError."""
    with suppress(FileNotFoundError):
        path.unlink()
    return path.open("xb")


def check_replaced(output: Output) -> None:
    """Check that an output can be written without the loss of anything else. Raises: EmbedFailed, OSError."""
    path = output.path
    if path.is_symlink():
        raise EmbedFailed(f"{path} is a symbolic link; give --to the place that it points to")
    if not path.exists():
        return
    if path.is_dir():
        if output.format != "lance" or not _is_dataset(path):
            raise EmbedFailed(f"{path} is a folder, and no dataset of Lance; move it away")
    elif not path.is_file():
        raise EmbedFailed(f"{path} is no file, and is not replaced")
    if not output.overwrite:
        raise EmbedFailed(f"{path} exists; --overwrite replaces it")


def _is_dataset(folder: Path) -> bool:
    """Return whether a folder has what a dataset of Lance consists of, and nothing else."""
    names = _names(folder)
    return not names or ("_versions" in names and all(name == "data" or name[0] == "_" for name in names))


def _own_files(folder: Path) -> Iterator[Path]:
    for path in list(folder.iterdir()):
        name = path.name
        if name in OUTPUTS or name in (MANIFEST, f"{MANIFEST}.tmp") or PART.fullmatch(name):
            yield path


def _delete(path: Path) -> None:
    if path.name in OUTPUTS and path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}
