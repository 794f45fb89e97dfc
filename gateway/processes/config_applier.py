"""The config that is served: its source, the queue of its reloads and edits, and their application.

Rule: one job runs at a time, in the order of requests. A request to read the file that arrives during a
reload is answered by the next one. Every step of a job that can fail comes first: reading the file, loading
the engines, and storing the additions. Only then is the config replaced and sent to the workers. A failure
has changed nothing.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec

from gateway.audit.records import AuditRecord
from gateway.config.diff import ReloadOutcome, compare_configs, with_live_settings
from gateway.config.load import load_config
from gateway.config.placeholders import files_in
from gateway.config.problems import ConfigError, Problem, count_of
from gateway.config.schema import Config
from gateway.declared.additions import Additions, Edit, Put, UnknownAddition
from gateway.declared.composition import AdditionsState
from gateway.declared.store import StoredAdditions
from gateway.processes.engine_pool import EnginePool, EngineProcess, load_problems
from gateway.store.errors import StoreUnavailable
from gateway.telemetry.log_lines import WRITE_ALWAYS

logger = logging.getLogger("gateway")

# Time between two looks at the file.
POLL_EVERY_S = 1.0
# The same for the files of secrets, of which a rotation leaves the old one valid for a while.
SECRETS_EVERY_S = 5.0


Fingerprint: TypeAlias = tuple[int, int, int]


class ConfigSource:
    """Path of router.yaml. environment: values of its placeholders."""

    def __init__(self, path: Path, environment: Mapping[str, str]) -> None:
        self.path = path
        self.environment = environment
        self._as_read = self.fingerprint()

    @property
    def is_edited(self) -> bool:
        """True if the file differs from when it was read."""
        return self.fingerprint() != self._as_read

    async def read(self) -> Config:
        """Load the file as `gateway check` does. Raises: ConfigError."""
        self._as_read = self.fingerprint()
        # In a thread: a file system may be slow, and the parent has children to watch.
        return await asyncio.to_thread(load_config, self.path, self.environment)

    def fingerprint(self) -> Fingerprint | None:
        """Return a value that differs for an edited or replaced file, or None if there is no file."""
        return _fingerprint(self.path)

    def secrets(self) -> dict[Path, Fingerprint | None]:
        """Return a fingerprint of each file that a placeholder names."""
        try:
            text = self.path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            return {}
        return {file: _fingerprint(file) for file in files_in(text, self.path.parent)}


def _fingerprint(file: Path) -> Fingerprint | None:
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


async def watch_file(source: ConfigSource, on_change: Callable[[], None]) -> None:
    """Call back after each change of the file; runs until cancelled."""
    reported = previous = source.fingerprint()
    while True:
        await asyncio.sleep(POLL_EVERY_S)
        current = source.fingerprint()
        # A change counts once two polls agree, so that a file that is still being written is not read.
        if current is not None and current == previous and current != reported:
            reported = current
            on_change()
        previous = current


async def watch_secrets(source: ConfigSource, on_change: Callable[[], None]) -> None:
    """Call back after each change of a file that a placeholder names; runs until cancelled.

    A file that is edited is left to its operator, who applies it whole.
    """
    reported = previous = source.secrets()
    while True:
        await asyncio.sleep(SECRETS_EVERY_S)
        current = source.secrets()
        is_whole = current == previous and None not in current.values()
        if is_whole and current != reported and not source.is_edited:
            reported = current
            on_change()
        previous = current


# Read the file again, apply the additions of other gateways, apply the instances of this host, or apply an
# edit of our own.
ReloadJob: TypeAlias = Literal["file", "added", "instances"] | Edit
OnOutcome: TypeAlias = Callable[[ReloadOutcome], None]


class ReloadQueue:
    """Queue that runs one job at a time. reload: runs a job."""

    def __init__(self, reload: Callable[[ReloadJob], Awaitable[ReloadOutcome]]) -> None:
        self._reload = reload
        self._has_jobs = asyncio.Event()
        self._waiting: list[tuple[ReloadJob, OnOutcome]] = []

    def enqueue(self, job: ReloadJob = "file", on_outcome: OnOutcome = lambda _: None) -> None:
        """Add a job to the queue. on_outcome: called when it has finished."""
        self._waiting.append((job, on_outcome))
        self._has_jobs.set()

    async def run(self, job: ReloadJob) -> ReloadOutcome:
        """Add a job to the queue and wait for its outcome."""
        ended: asyncio.Future[ReloadOutcome] = asyncio.get_running_loop().create_future()
        self.enqueue(job, lambda outcome: None if ended.done() else ended.set_result(outcome))
        return await ended

    async def run_jobs(self) -> None:
        """Run jobs as they arrive, until cancelled."""
        while True:
            await self._has_jobs.wait()
            self._has_jobs.clear()
            waiting, self._waiting = self._waiting, []
            for job, callbacks in _merge_equal_jobs(waiting):
                outcome = await self._reload(job)
                for on_outcome in callbacks:
                    on_outcome(outcome)


def _merge_equal_jobs(
    waiting: Iterable[tuple[ReloadJob, OnOutcome]],
) -> list[tuple[ReloadJob, list[OnOutcome]]]:
    """Run equal reloads once and report to every requester; each edit is run by itself."""
    jobs: list[tuple[ReloadJob, list[OnOutcome]]] = []
    reloads: dict[str, list[OnOutcome]] = {}
    for job, on_outcome in waiting:
        if isinstance(job, str) and job in reloads:
            reloads[job].append(on_outcome)
            continue
        jobs.append((job, [on_outcome]))
        if isinstance(job, str):
            reloads[job] = jobs[-1][1]
    return jobs


# Log lines for success and failure, by kind of job. An edit's failure is reported to its operator as well; a
# file's only here.
LOG_LINES = {
    "file": ("%s was reloaded: %s", "%s was not reloaded: %s; nothing has changed"),
    "added": ("%s: applied additions from other gateways: %s", "%s: additions not applied: %s"),
    "instances": ("%s: instances joined or left: %s", "%s: instances not applied: %s"),
    "edit": ("%s was done: %s", "%s was not done: %s; nothing has changed"),
}


def log_outcome(path: Path, job: ReloadJob, outcome: ReloadOutcome) -> None:
    """Log the outcome of a job, with each difference but no text values. path: of router.yaml."""
    kind, subject = (job, path) if isinstance(job, str) else ("edit", job)
    success, failure = LOG_LINES[kind]
    if kind in ("added", "instances") and (outcome.kind == "unavailable" or outcome == ReloadOutcome()):
        # Repeated every second; the store itself logs unreadable additions.
        return
    if outcome.problems:
        level = logging.INFO if kind == "edit" else logging.ERROR
        logger.log(level, failure, subject, count_of(outcome.problems, "problem"), extra=WRITE_ALWAYS)
        for problem in outcome.problems:
            logger.log(level, "%s", problem, extra=WRITE_ALWAYS)
        return
    logger.info(success, subject, count_of(outcome.changes, "change"), extra=WRITE_ALWAYS)
    for change in outcome.changes:
        logger.info("%s", change, extra=WRITE_ALWAYS)
    for change in outcome.needs_restart:
        logger.warning("%s: needs a restart; it was not applied", change, extra=WRITE_ALWAYS)


# Time for the models of new engines to load.
LOAD_TIMEOUT_S = 550.0
# How often an edit is retried when other gateways change the additions first.
EDIT_ATTEMPTS_MAX = 20
LOST_RACE = ReloadOutcome(
    problems=(Problem("additions", "other writers keep changing them; try again"),), kind="unavailable"
)


# Send the served config to the workers, given the previous config and the engines that it no longer needs.
UpdateWorkers = Callable[[Config, Sequence[EngineProcess]], Awaitable[None]]
# Return the models of a config whose upstreams are known to be of different vector spaces.
DifferingSpaces = Callable[[Config], Awaitable[tuple[Problem, ...]]]


class ConfigApplier:
    """The config that is served, and the only way to replace it. Runs one job at a time.

    file: router.yaml as it was read at start. has_first_key: at start there was a key that is used instead
    of tenants. config: the served config, namely the live settings of the file and the additions, with the
    settings that sockets and processes were started with. with_instances: adds the instances of this host,
    which have processes of their own. differing_spaces: asks the workers. restored: models whose withdrawn
    canary the current update puts back; None, all of them.
    """

    def __init__(
        self,
        file: Config,
        source: ConfigSource,
        additions: AdditionsState,
        update_workers: UpdateWorkers,
        differing_spaces: DifferingSpaces,
        with_instances: Callable[[Config], Config],
        *,
        has_first_key: bool,
    ) -> None:
        self._file = file
        self._source = source
        self._additions = additions
        self._update_workers = update_workers
        self._has_first_key = has_first_key
        self._differing_spaces = differing_spaces
        self._with_instances = with_instances
        self.restored: frozenset[str] | None = None
        self.config = file

    @property
    def added_models(self) -> frozenset[str]:
        """The served models that are not in the file."""
        return frozenset(self.config.models.keys() - self._file.models.keys())

    async def start(self, engines: EnginePool) -> None:
        """Serve the file and the stored additions.

        Additions that need an engine follow once the gateway is up, because at start the gateway
        exits if a model does not load.
        """
        self._engines = engines
        try:
            stored = await self._additions.load()
        except StoreUnavailable as error:
            logger.warning("additions are unknown until Redis is available: %s", error)
        else:
            composed = await self._additions.compose(self._file, stored.additions, with_engines=False)
            self.config = composed.config
            self._additions.adopt(stored, composed)
        engines.replace_running(engines.engines_for(self.config))

    async def apply(self, job: ReloadJob) -> ReloadOutcome:
        """Run a job and return its outcome, which lists the problems if nothing has changed."""
        try:
            outcome = await self._run(job)
        except ConfigError as error:
            outcome = ReloadOutcome(problems=tuple(error.problems))
        except UnknownAddition as error:
            outcome = ReloadOutcome(problems=(error.problem,), kind="unknown")
        except StoreUnavailable as error:
            problem = Problem("quotas.store", f"it is unavailable: {error}")
            outcome = ReloadOutcome(problems=(problem,), kind="unavailable")
        log_outcome(self._source.path, job, outcome)
        return outcome

    async def _run(self, job: ReloadJob) -> ReloadOutcome:
        """Run a job. Raises: ConfigError, UnknownAddition, StoreUnavailable."""
        self.restored = frozenset()
        match job:
            case "file":
                file = await self._source.read()
                self._require_key(file)
                self._additions.forget_unusable()
                await self._require_one_space(file, file.models)
                self.restored = None
                return await self._serve(file, self._additions.current)
            case "instances":
                return await self._serve(self._file, self._additions.current)
            case "added":
                return await self._serve(self._file, await self._additions.load())
            case _:
                return await self._edit(job)

    def _require_key(self, wanted: Config) -> None:
        """Reject a config that leaves no valid key: a first key takes effect at start, and only then.

        Raises: ConfigError.
        """
        if wanted.tenants or self._has_first_key or wanted.quotas.store != "memory":
            return
        message = "without tenants a first key is needed; it takes effect only at start: restart the gateway"
        raise ConfigError([Problem("tenants", message)])

    async def _edit(self, edit: Edit) -> ReloadOutcome:
        self._additions.forget_unusable(edit.name)
        outcome, attempts = LOST_RACE, 0
        while outcome is LOST_RACE and attempts < EDIT_ATTEMPTS_MAX:
            wanted, record = await self._additions.preview(self._file, edit)
            outcome = await self._serve(self._file, wanted, edit, record)
            attempts += 1
        return outcome

    async def _serve(
        self,
        file: Config,
        wanted: StoredAdditions,
        edit: Edit | None = None,
        record: AuditRecord | None = None,
    ) -> ReloadOutcome:
        """Serve a file together with additions.

        edit: the change in `wanted` that is not stored yet. If it causes a problem, nothing changes. record:
        of the edit.
        Raises: ConfigError, StoreUnavailable.
        """
        composed = await self._additions.compose(file, wanted.additions)
        if isinstance(edit, Put):
            if problems := composed.rejected.get((edit.part, edit.name)):
                raise ConfigError(list(problems))
            if edit.part == "models":
                await self._require_one_space(composed.config, {edit.name})
                self.restored = frozenset({edit.name})
        wanted_config = self._with_instances(composed.config)
        outcome = compare_configs(self.config, wanted_config)
        needed = self._engines.engines_for(composed.config)
        started = self._engines.started_among(needed)
        if reasons := await load_problems(started, LOAD_TIMEOUT_S):
            await self._engines.stop(started)
            self._exclude_unusable(reasons, composed.added, edit, wanted.additions)
            return await self._serve(file, wanted, edit, record)
        stored = wanted if record is None else await self._store(wanted, record, started)
        if stored is None:
            return LOST_RACE
        added_models = self.added_models
        before, self.config = self.config, with_live_settings(self.config, wanted_config)
        self._file = file
        self._additions.adopt(stored, composed)
        # A model that the file now defines too may decide other requests than the same addition did.
        if outcome.changes or added_models != self.added_models or self._restores(wanted_config):
            await self._update_workers(before, self._engines.replace_running(needed))
        return outcome

    async def _require_one_space(self, config: Config, models: Collection[str]) -> None:
        """Reject models whose upstreams are known to be of different vector spaces. Raises: ConfigError."""
        groups = {name: model for name, model in config.models.items() if name in models and model.is_group}
        if not groups:
            return
        asked = msgspec.structs.replace(config, models=groups)
        if problems := await self._differing_spaces(asked):
            raise ConfigError(list(problems))

    def _restores(self, config: Config) -> bool:
        """Return whether the current update may put a canary back."""
        restored = self.restored
        return any(
            model.canary is not None and (restored is None or name in restored)
            for name, model in config.models.items()
        )

    def _exclude_unusable(
        self, reasons: Mapping[str, str], added: Collection[str], edit: Edit | None, additions: Additions
    ) -> None:
        """Exclude additions whose models cannot be loaded. reasons: by upstream.

        Raises: ConfigError if such an upstream is in the file, or is the one being added now.
        """
        edited = {edit.name} if isinstance(edit, Put) and edit.part == "upstreams" else set()
        fatal = {name: reason for name, reason in reasons.items() if name not in added or name in edited}
        if fatal:
            raise ConfigError([Problem(f"upstreams.{name}", reason) for name, reason in fatal.items()])
        self._additions.mark_unusable(additions, reasons)

    async def _store(
        self, wanted: StoredAdditions, record: AuditRecord, started: Sequence[EngineProcess]
    ) -> StoredAdditions | None:
        """Store an edit; return None, with its engines stopped, if another gateway was faster.

        Raises: StoreUnavailable.
        """
        stored = None
        try:
            stored = await self._additions.store(wanted, record)
        finally:
            if stored is None:
                await self._engines.stop(started)
        return stored
