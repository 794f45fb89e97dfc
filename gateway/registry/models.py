"""Actions on the models of this host: list, download, check, remove. They block."""

import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec

from backends.checkpoints import hub
from backends.checkpoints.locations import downloaded_bytes, locate_checkpoint, packaged_bytes
from backends.checkpoints.needed_files import is_path
from backends.contract.errors import ModelUnavailable
from backends.torch.wire import SmokeLoad
from gateway.config.schema import OWN_VOCABULARY, UpstreamSettings
from gateway.registry.checksums import damaged_files
from gateway.registry.records import Record, Records, State
from gateway.registry.space import NoSpace, models_to_remove

POLL_S = 0.5
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
    state: State
    stored_bytes: int = 0
    used_s: float | None = None
    configured: tuple[str, ...] = ()
    record: Record | None = None
    packaged_bytes: int = 0


class DamagedFiles(Exception):
    """Files of a model are not those of the Hub; the message names them."""


class RegistryError(Exception):
    """The action cannot be done; the message gives the cause and the way out."""


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

    def _listed(self, name: str, cached: hub.CachedModel | None, record: Record | None) -> ListedModel:
        state: State = "available" if cached is None else "downloaded"
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
        self._records.write(model, Record("available"))

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
                    self._records.write(model, Record("downloading", total_bytes=total))
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
            self._records.write(model, known if is_verified else Record("downloaded", snapshot.name))
            return snapshot

    def _size_of(self, model: str, revision: str | None) -> int | None:
        """Return the bytes of a download, None if they are not known and not needed. Raises: NoSpace."""
        try:
            return downloaded_bytes(model, revision)
        except ModelUnavailable as error:
            is_cached = any(found.repository == model for found in hub.cached_models())
            if self._bound_bytes is not None and not is_cached:
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
            cached = next((found for found in hub.cached_models() if found.repository == model), None)
            if cached is None:
                raise RegistryError(f"{model} is not in the cache; pull it first")
            commit = self._commit_of(cached)
            self._records.write(model, Record("loading", commit))
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
                Record(
                    "verified",
                    commit,
                    operations=found.operations,
                    dimensions=found.dimensions,
                    tokens_max=found.tokens_max,
                    load_s=found.load_s,
                ),
            )
            return found

    def _commit_of(self, cached: hub.CachedModel) -> str:
        record = self._records.read().get(cached.repository)
        if record is not None and record.commit in cached.commits and record.commit is not None:
            return record.commit
        return cached.commits[0]

    def remove(self, model: str) -> int:
        """Remove a model from the cache; return its bytes. Raises: RegistryError, RegistryBusy."""
        _require_id(model)
        if upstreams := self._configured.get(model):
            raise RegistryError(f"{model} is in use by {', '.join(upstreams)}; remove the upstream first")
        with self._records.working_on(model):
            cached = next((found for found in hub.cached_models() if found.repository == model), None)
            if cached is None and model not in self._records.read():
                raise RegistryError(f"{model} is not in the cache")
            if cached is not None:
                hub.remove_cached(cached.repository, cached.commits)
            self._records.write(model, None)
        return 0 if cached is None else cached.stored_bytes

    def _fail(self, model: str, error: str) -> None:
        commit = known.commit if (known := self._records.read().get(model)) else None
        self._records.write(model, Record("failed", commit, error))


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


def _stored(folder: Path) -> int:
    """Return the bytes of a model's files on the disk, incomplete ones included."""
    blobs = folder / "blobs"
    sizes: Collection[int] = ()
    if blobs.is_dir():
        sizes = [_size(path) for path in blobs.iterdir()]
    return sum(sizes)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        # An incomplete file has its final name by now.
        return 0
