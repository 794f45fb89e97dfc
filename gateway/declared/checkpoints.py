"""Checkpoints on this host: list, download, check, remove. All actions block.

The files are in the Hub's cache, and a record of each model in a file of `state_dir`. Commands and the parent
process of a gateway share both: a lock for each model keeps two from working on it. A bound on the disk is
kept by removing the models that were not used for the longest time and that no upstream needs.
"""

import hashlib
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from backends.checkpoints import hub
from backends.checkpoints.locations import downloaded_bytes, locate_checkpoint, packaged_bytes
from backends.checkpoints.needed_files import is_path
from backends.contract.errors import ModelUnavailable
from backends.torch.wire import SmokeLoad
from gateway.config.schema import OWN_VOCABULARY, UpstreamSettings
from gateway.config.state_folder import lock_private
from gateway.declared.host import CheckpointRecord, CheckpointState
from gateway.declared.store import StateFile

POLL_S = 0.5
ERROR_CHARACTERS_MAX = 2000
# The cache names a blob by the SHA-256 of a large file, or by git's SHA-1 of another.
SHA256_DIGITS, GIT_DIGITS = 64, 40
READ_BYTES = 1024 * 1024
# States of a model that a process works on.
RUNNING = ("downloading", "loading")
# States of a model that is not in the cache.
WITHOUT_FILES = ("available", "downloading", "failed")

# Called with the done and the total bytes, and the rate, while a model is downloaded.
Report = Callable[[int, int | None, float], None]
# Loads a model of a commit in a process of its own, and computes one text.
LoadOnce = Callable[[str, str | None], SmokeLoad]


class ListedModel(msgspec.Struct, frozen=True):
    """A model of this host.

    stored_bytes: in the cache. configured: upstreams of the configuration that serve it. packaged_bytes: in
    an installed package, from which the engine loads a model that the cache lacks.
    """

    model: str
    state: CheckpointState
    stored_bytes: int = 0
    used_s: float | None = None
    configured: tuple[str, ...] = ()
    record: CheckpointRecord | None = None
    packaged_bytes: int = 0


class DamagedFiles(Exception):
    """Files of a model are not those of the Hub; the message names them."""


class NoSpace(Exception):
    """A download does not fit below the bound; the message has the sizes."""


class RegistryError(Exception):
    """The action cannot be done; the message gives the cause and the way out."""


class RegistryBusy(Exception):
    """Another process works on the model."""


class Records:
    """Records in a folder, which several processes share."""

    def __init__(self, folder: Path) -> None:
        self._file: StateFile[dict[str, CheckpointRecord]] = StateFile(
            folder, "registry.json", dict[str, CheckpointRecord]
        )

    def read(self) -> dict[str, CheckpointRecord]:
        """Return all records by model. A damaged file counts as none: what it has can be found out again."""
        with suppress(OSError, msgspec.DecodeError, UnicodeDecodeError):
            return self._file.read() or {}
        return {}

    def write(self, model: str, record: CheckpointRecord | None) -> None:
        """Replace the record of a model, or remove it. Raises: OSError."""
        with lock_private(self._file.folder / ".registry.lock"):
            records = self.read()
            records.pop(model, None)
            if record is not None:
                error = None if record.error is None else record.error[:ERROR_CHARACTERS_MAX]
                records[model] = msgspec.structs.replace(record, error=error, at_s=time.time())
            self._file.write(records)

    def change(self, model: str, **changes: Any) -> None:
        """Change fields of a model's record. Raises: OSError."""
        known = self.read().get(model, CheckpointRecord("downloading"))
        self.write(model, msgspec.structs.replace(known, **changes))

    @contextmanager
    def working_on(self, model: str) -> Iterator[None]:
        """Keep other processes from working on a model. Raises: RegistryBusy, OSError."""
        try:
            lock = lock_private(self._file.folder / f".registry-{model.replace('/', '--')}.lock", wait=False)
        except BlockingIOError as error:
            raise RegistryBusy("another process works on this model; try again later") from error
        with lock:
            yield

    @contextmanager
    def dividing_space(self) -> Iterator[None]:
        """Keep other processes from reserving space on the disk. Raises: OSError."""
        with lock_private(self._file.folder / ".registry-space.lock"):
            yield

    def is_worked_on(self, model: str) -> bool:
        """Return whether a process works on a model."""
        try:
            with self.working_on(model):
                return False
        except RegistryBusy:
            return True


class Registry:
    """Models of this host. configured: model → upstreams. bound_bytes: of the cache; None has no bound."""

    def __init__(
        self, records: Records, configured: Mapping[str, tuple[str, ...]], bound_bytes: int | None = None
    ) -> None:
        self._records = records
        self._configured = configured
        self._bound_bytes = bound_bytes

    def models(self) -> list[ListedModel]:
        """Return the configured models, those in the cache, and those with a record, by name."""
        cached = {model.repository: model for model in hub.cached_models()}
        records = self._records.read()
        names = sorted({*cached, *records, *self._configured})
        return [self._listed(name, cached.get(name), records.get(name)) for name in names]

    def _listed(
        self, name: str, cached: hub.CachedModel | None, record: CheckpointRecord | None
    ) -> ListedModel:
        state: CheckpointState = "available" if cached is None else "downloaded"
        if record is not None and record.state in RUNNING and not self._records.is_worked_on(name):
            # Its process was killed.
            record = msgspec.structs.replace(record, state="failed", error=f"it ended while {record.state}")
        if record is not None and (cached is not None or record.state in WITHOUT_FILES):
            state = record.state
        return ListedModel(
            name,
            state,
            0 if cached is None else cached.stored_bytes,
            None if cached is None else cached.used_s,
            self._configured.get(name, ()),
            record,
            packaged_bytes(name) if cached is None else 0,
        )

    def add(self, model: str) -> None:
        """List a model that is not in the cache. Raises: RegistryError, OSError."""
        _require_id(model)
        self._records.write(model, CheckpointRecord("available"))

    def pull(self, model: str, revision: str | None, report: Report) -> Path:
        """Download a model as far as it is missing, and return the folder of its snapshot.

        Unused models are removed first where the bound needs it. Raises: RegistryError, RegistryBusy.
        """
        _require_id(model)
        with self._records.working_on(model):
            known = self._records.read().get(model)
            try:
                total = self._size_of(model, revision)
                # Another download that begins now has to see the bytes that this one will need.
                with self._records.dividing_space():
                    self._make_space(model, total)
                    self._records.write(model, CheckpointRecord("downloading", total_bytes=total))
                with self._watched(model, total, report):
                    snapshot = locate_checkpoint(model, revision)
                _check_files(snapshot)
            except (ModelUnavailable, NoSpace, DamagedFiles, OSError) as error:
                self._fail(model, str(error))
                raise RegistryError(str(error)) from error
            except BaseException:
                self._fail(model, "the download was interrupted")
                raise
            is_verified = known is not None and (known.state, known.commit) == ("verified", snapshot.name)
            self._records.write(
                model, known if is_verified else CheckpointRecord("downloaded", snapshot.name)
            )
            return snapshot

    def _size_of(self, model: str, revision: str | None) -> int | None:
        """Return the bytes of a download, None if they are not known and not needed. Raises: NoSpace."""
        try:
            return downloaded_bytes(model, revision)
        except ModelUnavailable as error:
            if self._bound_bytes is not None and _cached(model) is None:
                raise NoSpace(f"`registry.disk_bytes` needs the model's size: {error}") from error
            return None

    def _make_space(self, model: str, total: int | None) -> None:
        """Remove unused models where the bound needs it. total: bytes of the download. Raises: NoSpace."""
        if self._bound_bytes is None:
            return
        cached = hub.cached_models()
        busy = {found.repository for found in cached if self._records.is_worked_on(found.repository)}
        used = {model, *self._configured, *busy}
        # A download that has not ended is no model of the cache: it counts in full.
        stored = {found.repository: found.stored_bytes for found in cached}
        totals = self._running_downloads() | {model: total or 0}
        needed = sum(max(0, size - stored.get(name, 0)) for name, size in totals.items())
        for old in models_to_remove(cached, used, needed, self._bound_bytes):
            with self._records.working_on(old.repository):
                hub.remove_cached(old.repository, old.commits)
                self._records.write(old.repository, None)

    def _running_downloads(self) -> dict[str, int]:
        """Return the bytes of the downloads that processes work on now, by model."""
        return {
            name: record.total_bytes or 0
            for name, record in self._records.read().items()
            if record.state == "downloading" and self._records.is_worked_on(name)
        }

    @contextmanager
    def _watched(self, model: str, total: int | None, report: Report) -> Iterator[None]:
        """Report the progress of a download, by the bytes on the disk."""
        folder, ended = hub.cache_folder(model), threading.Event()
        first, started_s = _stored(folder), time.monotonic()

        def watch() -> None:
            while not ended.wait(POLL_S):
                done = _stored(folder)
                rate = (done - first) / (time.monotonic() - started_s)
                self._records.change(model, done_bytes=done, bytes_per_s=round(rate, 1))
                report(done, total, rate)

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
        report(_stored(folder), total, (_stored(folder) - first) / (time.monotonic() - started_s))

    def verify(self, model: str, load_once: LoadOnce) -> SmokeLoad:
        """Compare the files of a model with their hashes, load it, and compute one text.

        Raises: RegistryError, RegistryBusy.
        """
        _require_id(model)
        with self._records.working_on(model):
            cached = _cached(model)
            if cached is None:
                raise RegistryError(f"{model} is not in the cache; pull it first")
            known = self._records.read().get(model)
            is_kept = known is not None and known.commit in cached.commits
            commit = (known.commit if known is not None and is_kept else None) or cached.commits[0]
            self._records.write(model, CheckpointRecord("loading", commit))
            try:
                _check_files(cached.folder / "snapshots" / commit)
                found = load_once(model, commit)
            except DamagedFiles as error:
                self._fail(model, str(error))
                raise RegistryError(str(error)) from error
            except BaseException:
                self._fail(model, "the check was interrupted")
                raise
            if found.error is not None:
                self._fail(model, found.error)
                raise RegistryError(found.error)
            self._records.write(
                model,
                CheckpointRecord(
                    "verified",
                    commit,
                    operations=found.operations,
                    dimensions=found.dimensions,
                    tokens_max=found.tokens_max,
                    load_s=found.load_s,
                ),
            )
            return found

    def remove(self, model: str) -> int:
        """Remove a model from the cache; return its bytes. Raises: RegistryError, RegistryBusy."""
        _require_id(model)
        if upstreams := self._configured.get(model):
            raise RegistryError(f"{model} is in use by {', '.join(upstreams)}; remove the upstream first")
        with self._records.working_on(model):
            cached = _cached(model)
            if cached is None and model not in self._records.read():
                raise RegistryError(f"{model} is not in the cache")
            if cached is not None:
                hub.remove_cached(cached.repository, cached.commits)
            self._records.write(model, None)
        return 0 if cached is None else cached.stored_bytes

    def _fail(self, model: str, error: str) -> None:
        commit = known.commit if (known := self._records.read().get(model)) else None
        self._records.write(model, CheckpointRecord("failed", commit, error))


def used_models(upstreams: Mapping[str, UpstreamSettings]) -> dict[str, tuple[str, ...]]:
    """Return the repositories that upstreams read, each with its upstreams: models and tokenizers."""
    found: dict[str, tuple[str, ...]] = {}
    for name, upstream in upstreams.items():
        model = upstream.model if upstream.is_local else None
        for repository in dict.fromkeys((model, upstream.tokenizer, upstream.token_encoding)):
            if repository and repository != OWN_VOCABULARY and not is_path(repository):
                found[repository] = (*found.get(repository, ()), name)
    return found


def _check_files(snapshot: Path) -> None:
    """Compare the files of a snapshot with their hashes. Raises: DamagedFiles."""
    if damaged := damaged_files(snapshot):
        names = ", ".join(damaged[:5])
        raise DamagedFiles(f"files differ from the Hub's: {names}; remove the model and pull it again")


def _require_id(model: str) -> None:
    """Raise RegistryError unless a model can be a repository of the Hub."""
    try:
        hub.cache_folder(model)
    except ModelUnavailable as error:
        raise RegistryError(str(error)) from error


def _cached(model: str) -> hub.CachedModel | None:
    return next((found for found in hub.cached_models() if found.repository == model), None)


def _stored(folder: Path) -> int:
    """Return the bytes of a model's files on the disk, incomplete ones included."""
    total = 0
    # An incomplete file may have its final name by now.
    with suppress(FileNotFoundError):
        for path in (folder / "blobs").iterdir():
            with suppress(OSError):
                total += path.stat().st_size
    return total


def models_to_remove(
    cached: Sequence[hub.CachedModel], used: Collection[str], needed_bytes: int, bound_bytes: int
) -> list[hub.CachedModel]:
    """Return the models to remove before a download, those first that were not used for the longest time.

    used: models that must stay. needed_bytes: of the download. Raises: NoSpace, if that is not enough.
    """
    over = sum(model.stored_bytes for model in cached) + needed_bytes - bound_bytes
    removed: list[hub.CachedModel] = []
    for model in sorted(cached, key=lambda found: found.used_s):
        if over <= 0:
            break
        if model.repository not in used:
            removed.append(model)
            over -= model.stored_bytes
    if over > 0:
        raise NoSpace(
            f"the download has {_megabytes(needed_bytes)}, and {_megabytes(over)} too many for "
            f"`registry.disk_bytes` of {_megabytes(bound_bytes)}; the other models are in use"
        )
    return removed


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"


def damaged_files(snapshot: Path) -> list[str]:
    """Return the files of a snapshot whose content is not that of the Hub, or that are missing, by path.

    A link that leads out of the repository's folder in the cache is none of the Hub's.
    """
    repository = snapshot.parent.parent.resolve()
    # A link whose blob is gone is no file, and no folder either.
    files = (path for path in sorted(snapshot.rglob("*")) if path.is_symlink() or path.is_file())
    return [str(path.relative_to(snapshot)) for path in files if not _is_whole(path, repository)]


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
