"""Records of the models of this host, in one file of `state_dir`."""

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import msgspec

from gateway.config.state_folder import make_private_folder, open_private, replace_private

State = Literal["available", "downloading", "downloaded", "loading", "verified", "failed"]
FILE_NAME = "registry.json"
FILE_BYTES_MAX = 16 * 1024 * 1024
ERROR_CHARACTERS_MAX = 2000


class RegistryBusy(Exception):
    """Another process works on the model."""


class Record(msgspec.Struct, frozen=True, omit_defaults=True):
    """One model.

    commit: of its snapshot. error: why the last download or check failed. done_bytes, total_bytes,
    bytes_per_s: of a download. dimensions, tokens_max, load_s: found by a check. at_s: of the last change,
    in seconds since 1970.
    """

    state: State
    commit: str | None = None
    error: str | None = None
    done_bytes: int | None = None
    total_bytes: int | None = None
    bytes_per_s: float | None = None
    operations: tuple[str, ...] = ()
    dimensions: int | None = None
    tokens_max: int | None = None
    load_s: float | None = None
    at_s: float = 0.0


class Records:
    """Records in a folder, which several processes share."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = folder / FILE_NAME

    def read(self) -> dict[str, Record]:
        """Return all records by model. A damaged file counts as none: what it has can be found out again."""
        with suppress(OSError, msgspec.DecodeError):
            if self._path.stat().st_size <= FILE_BYTES_MAX:
                return msgspec.json.decode(self._path.read_bytes(), type=dict[str, Record])
        return {}

    def write(self, model: str, record: Record | None) -> None:
        """Replace the record of a model, or remove it. Raises: OSError."""
        with self._locked("registry"):
            records = self.read()
            records.pop(model, None)
            if record is not None:
                error = None if record.error is None else record.error[:ERROR_CHARACTERS_MAX]
                records[model] = msgspec.structs.replace(record, error=error, at_s=time.time())
            self._replace(msgspec.json.encode(records))

    def change(self, model: str, **changes: Any) -> None:
        """Change fields of a model's record. Raises: OSError."""
        known = self.read().get(model, Record("downloading"))
        self.write(model, msgspec.structs.replace(known, **changes))

    @contextmanager
    def working_on(self, model: str) -> Iterator[None]:
        """Keep other processes from working on a model. Raises: RegistryBusy, OSError."""
        name = f"registry-{model.replace('/', '--')}"
        with self._locked(name, wait=False):
            yield

    @contextmanager
    def dividing_space(self) -> Iterator[None]:
        """Keep other processes from reserving space on the disk. Raises: OSError."""
        with self._locked("registry-space"):
            yield

    def is_worked_on(self, model: str) -> bool:
        """Return whether a process works on a model."""
        try:
            with self.working_on(model):
                return False
        except RegistryBusy:
            return True

    @contextmanager
    def _locked(self, name: str, *, wait: bool = True) -> Iterator[None]:
        make_private_folder(self._folder)
        with open_private(self._folder / f".{name}.lock") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError as error:
                raise RegistryBusy("another process works on this model; try again later") from error
            yield

    def _replace(self, content: bytes) -> None:
        replace_private(self._path, content)
