"""The file of the first key: the only secret that the gateway keeps at rest."""

import logging
import os
import secrets
from contextlib import suppress
from pathlib import Path

from gateway.config.state_folder import create_private, make_private_folder

FILE_NAME = "first-key"
# Longer than any header may be.
FILE_BYTES_MAX = 64 * 1024

logger = logging.getLogger("gateway")


class FirstKeyFileError(Exception):
    """The file cannot be used; the message gives the reason and a way out."""


def read_first_key(path: Path) -> str | None:
    """Return the key in a file, or None if there is no file. Raises: FirstKeyFileError."""
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            content = file.read(FILE_BYTES_MAX)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise FirstKeyFileError(f"{path} cannot be read: {error.strerror}; make it readable") from error
    key = content.decode("ascii", "replace").strip()
    if not key.isascii() or not key.isprintable() or not key or " " in key:
        raise FirstKeyFileError(f"{path} contains no key; remove it")
    if mode & 0o077:
        logger.warning("%s can be read by other users: run chmod 600 %s", path, path)
    return key


def keep_first_key(path: Path, key: str) -> str:
    """Write a key to a file that only this user can read, and return the key in the file.

    The key of another process that was faster stays. Raises: FirstKeyFileError.
    """
    draft = path.with_name(f".{FILE_NAME}-{secrets.token_hex(8)}")
    try:
        make_private_folder(path.parent)
        try:
            create_private(draft, f"{key}\n".encode("ascii"))
            # A link appears whole, and fails where there is a file.
            with suppress(FileExistsError):
                os.link(draft, path)
        finally:
            draft.unlink(missing_ok=True)
    except OSError as error:
        raise FirstKeyFileError(f"{path} cannot be written: {error.strerror}; set `state_dir`") from error
    return read_first_key(path) or key
