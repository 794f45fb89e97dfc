"""Checksums of the files in the Hub's cache, which stores each file under the hash of its content.

Source: huggingface_hub's cache: the name of a blob is the SHA-256 of a large file, or git's SHA-1 of another.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path

SHA256_DIGITS, GIT_DIGITS = 64, 40
READ_BYTES = 1024 * 1024


def damaged_files(snapshot: Path) -> list[str]:
    """Return the files of a snapshot whose content is not that of the Hub, or that are missing, by path.

    A link that leads out of the repository's folder in the cache is none of the Hub's.
    """
    repository = snapshot.parent.parent.resolve()
    return [str(path.relative_to(snapshot)) for path in _files(snapshot) if not _is_whole(path, repository)]


def _files(snapshot: Path) -> Iterator[Path]:
    for path in sorted(snapshot.rglob("*")):
        # A link whose blob is gone is no file, and no folder either.
        if path.is_symlink() or path.is_file():
            yield path


def _is_whole(path: Path, repository: Path) -> bool:
    if not path.is_file() or (path.is_symlink() and repository not in path.resolve().parents):
        return False
    name = path.resolve().name
    # On a disk without links the cache has the files themselves, without their hashes.
    if len(name) not in (SHA256_DIGITS, GIT_DIGITS) or not path.is_symlink():
        return True
    return name == digest_of(path, len(name))


def digest_of(path: Path, digits: int) -> str:
    """Return the hash under which the cache stores a file. digits: 64 for SHA-256, 40 for git's SHA-1."""
    if digits == SHA256_DIGITS:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    digest = hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)
    with path.open("rb") as file:
        while block := file.read(READ_BYTES):
            digest.update(block)
    return digest.hexdigest()
