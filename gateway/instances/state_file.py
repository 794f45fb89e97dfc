"""The file that keeps instances over a restart of the gateway, and the lock that gives it one owner."""

import fcntl
from collections.abc import Iterable
from pathlib import Path
from typing import IO

import msgspec

from gateway.config.state_folder import make_private_folder, open_private, replace_private
from gateway.instances.records import Record

FILE_NAME = "instances.json"
# All records of INSTANCES_MAX instances are far smaller.
FILE_BYTES_MAX = 16 * 1024 * 1024


class StateFileError(Exception):
    """The file cannot be used; the message gives the reason and a way out."""


class StateFile:
    """File of the instances in a folder, for one process at a time. folder: as configured."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._path = folder / FILE_NAME
        self._lock: IO[str] | None = None

    def open(self) -> tuple[Record, ...]:
        """Lock the file and return its records. Raises: StateFileError."""
        try:
            self._take_lock()
            return self._read()
        except StateFileError:
            self.close()
            raise

    def _take_lock(self) -> None:
        try:
            make_private_folder(self._path.parent)
            self._lock = open_private(self._path.with_suffix(".lock"))
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            message = f"{self._path} is used by another gateway; give each its own `state_dir`"
            raise StateFileError(message) from error
        except OSError as error:
            raise StateFileError(f"{self._path.parent} cannot be written: {error.strerror}") from error

    def write(self, records: Iterable[Record]) -> None:
        """Replace the file in one step. Raises: OSError."""
        replace_private(self._path, msgspec.json.encode(tuple(records)))

    def close(self) -> None:
        """Release the lock."""
        if self._lock is not None:
            self._lock.close()

    def _read(self) -> tuple[Record, ...]:
        try:
            with self._path.open("rb") as file:
                content = file.read(FILE_BYTES_MAX)
            return msgspec.json.decode(content, type=tuple[Record, ...])
        except FileNotFoundError:
            return ()
        except OSError as error:
            raise StateFileError(f"{self._path} cannot be read: {error.strerror}") from error
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise StateFileError(
                f"{self._path} contains no instances: {error}; repair or remove it"
            ) from error
