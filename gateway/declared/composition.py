"""Composition of a file's config with what operators declare at run time.

Rule: the file wins. An addition can never keep a gateway from serving its file: one that cannot be used is
rejected together with the models that use it, and its problems are reported. An instance adds a replica to an
upstream of the file or of the additions, or an upstream and a model of its own name.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from gateway.audit.records import AuditRecord
from gateway.config.problems import ConfigError, Problem
from gateway.config.schema import Config, ModelSettings, UpstreamSettings
from gateway.config.upstream_checks import currency_problem
from gateway.declared.additions import DEFINED, AdditionInfo, Additions, Edit, Listing, Part
from gateway.declared.audited import edit_record
from gateway.declared.settings import SecretSources, read_model, read_upstream, redact
from gateway.declared.store import AdditionStore, StoredAdditions
from gateway.store.errors import StoreUnavailable

_Settings = TypeVar("_Settings", UpstreamSettings, ModelSettings)
LATER = "its model is loaded once the gateway is up"
# Otherwise an addition could take the name that callers of the file's model happen to send.
EVERY_NAME = "`defaults.any_name` gives every name to the model of router.yaml; set it to false there first"

# Every gateway follows the additions of others within about a second.
LOOK_EVERY_S = 1.0

logger = logging.getLogger("gateway")

# Problems of additions that are not served, by part and name.
Rejected = Mapping[tuple[Part, str], tuple[Problem, ...]]


class ComposedConfig(msgspec.Struct, frozen=True):
    """The config to serve. added: its upstreams that are not in the file. rejected: the others."""

    config: Config
    added: frozenset[str]
    rejected: Rejected


def compose(
    file: Config,
    additions: Additions,
    environment: Mapping[str, str],
    unusable: Mapping[str, str],
    *,
    with_engines: bool = True,
) -> ComposedConfig:
    """Compose the file with the additions. Reads files.

    environment: of the gateway. unusable: by upstream, why it cannot be used although its settings can be
    read. with_engines: include upstreams that need an engine.
    """
    sources = SecretSources(environment, Path(file.admin.files) if file.admin.files else None)
    rejected: dict[tuple[Part, str], tuple[Problem, ...]] = {}

    def upstream_of(name: str, written: Any) -> UpstreamSettings:
        upstream = read_upstream(name, written, sources)
        reason = unusable.get(name) or (LATER if upstream.is_local and not with_engines else None)
        if reason is not None:
            raise ConfigError([Problem(f"upstreams.{name}", reason)])
        if upstream.is_local:
            # In a process for additions, so that adding or removing one does not restart the file's engines.
            return msgspec.structs.replace(upstream, process=f"{upstream.process} (added)")
        return upstream

    added = _read_all("upstreams", additions.upstreams, file.upstreams, upstream_of, rejected)
    upstreams = file.upstreams | added

    def model_of(name: str, written: Any) -> ModelSettings:
        if file.defaults.any_name and len(file.models) == 1:
            raise ConfigError([Problem(f"models.{name}", EVERY_NAME)])
        model = read_model(name, written, upstreams)
        if problem := currency_problem(name, model, file.currency):
            raise ConfigError([problem])
        return model

    models = _read_all("models", additions.models, file.models, model_of, rejected)
    for name in additions.drained.keys() & upstreams.keys():
        # In addition to the replicas that the settings drain.
        drained = tuple(dict.fromkeys((*upstreams[name].drained, *additions.drained[name])))
        upstreams[name] = msgspec.structs.replace(upstreams[name], drained=drained)
    config = msgspec.structs.replace(file, upstreams=upstreams, models=file.models | models)
    return ComposedConfig(config, frozenset(added), rejected)


def _read_all(
    part: Part,
    written: Mapping[str, Any],
    in_file: Mapping[str, _Settings],
    read: Callable[[str, Any], _Settings],
    rejected: dict[tuple[Part, str], tuple[Problem, ...]],
) -> dict[str, _Settings]:
    """Return the settings that can be served, by name, and add the problems of the rest to rejected."""
    usable = {}
    for name, entry in written.items():
        if name in in_file:
            rejected[part, name] = (Problem(f"{part}.{name}", DEFINED),)
            continue
        try:
            usable[name] = read(name, entry)
        except ConfigError as error:
            rejected[part, name] = tuple(error.problems)
    return usable


def listing_of(additions: Additions, rejected: Rejected) -> Listing:
    """List all additions as operators see them."""

    def entries(part: Part, written: Mapping[str, Any]) -> tuple[AdditionInfo, ...]:
        return tuple(
            AdditionInfo(name, redact(entry), _problem_text(rejected.get((part, name), ())) or None)
            for name, entry in sorted(written.items())
        )

    return Listing(entries("upstreams", additions.upstreams), entries("models", additions.models))


def _problem_text(problems: Iterable[Problem]) -> str:
    return "; ".join(f"{problem.path}: {problem.message}" for problem in problems)


class Joined(msgspec.Struct, frozen=True):
    """An instance that calls are sent to. settings: of its upstream, if it has to be created."""

    upstream: str
    settings: UpstreamSettings
    address: str


def with_instances(config: Config, joined: tuple[Joined, ...]) -> Config:
    """Return the configuration with these instances as replicas of their upstreams."""
    upstreams, models = dict(config.upstreams), dict(config.models)
    for instance in joined:
        current = upstreams.get(instance.upstream)
        if current is not None and current.backend != instance.settings.backend:
            # The file has gained an upstream of that name since the instance was created.
            continue
        settings = current or instance.settings
        replicas = (*settings.replicas, instance.address)
        upstreams[instance.upstream] = msgspec.structs.replace(settings, replicas=replicas)
        if not any(instance.upstream in model.upstream_names for model in models.values()):
            models.setdefault(instance.upstream, ModelSettings(upstream=instance.upstream))
    return msgspec.structs.replace(config, upstreams=upstreams, models=models)


class AdditionsState:
    """State of the additions in one gateway. environment: for references to variables.

    Rule: a store without a version, after one with a version, was emptied. What it has lost stays as it is
    here until it is restored, and the next edit at any gateway stores it again.
    """

    def __init__(self, store: AdditionStore, environment: Mapping[str, str]) -> None:
        self._store = store
        self._environment = environment
        self._current = StoredAdditions()
        self._rejected: Rejected = {}
        # Upstreams whose models could not be loaded: their settings as written, and why.
        self._unusable: dict[str, tuple[Any, str]] = {}
        self._logged_loss = False

    @property
    def current(self) -> StoredAdditions:
        """The additions that this gateway has adopted."""
        return self._current

    @property
    def listing(self) -> Listing:
        """The adopted additions as operators see them."""
        return listing_of(self._current.additions, self._rejected)

    async def load(self) -> StoredAdditions:
        """Return the stored additions. Raises: StoreUnavailable."""
        return await self._store.load()

    async def preview(self, file: Config, edit: Edit) -> tuple[StoredAdditions, AuditRecord]:
        """Return the additions after an edit, with the version before it, and the record of the edit.

        Raises: StoreUnavailable, ConfigError, UnknownAddition.
        """
        before = await self._store.load()
        if self._is_lost(before.version):
            before = msgspec.structs.replace(self._current, version=before.version)
        after = edit.apply(file, before.additions)
        return StoredAdditions(before.version, after), edit_record(edit, before.additions, after)

    async def compose(
        self, file: Config, additions: Additions, *, with_engines: bool = True
    ) -> ComposedConfig:
        """Compose the file with the additions, in a thread.

        A file system may be slow, and the parent process has to look after its children.
        """
        unusable = {
            name: reason
            for name, (written, reason) in self._unusable.items()
            if additions.upstreams.get(name) == written
        }
        return await asyncio.to_thread(
            compose, file, additions, self._environment, unusable, with_engines=with_engines
        )

    async def store(self, wanted: StoredAdditions, record: AuditRecord) -> StoredAdditions | None:
        """Replace the stored additions and record that, or return None if others have changed them meanwhile.

        Raises: StoreUnavailable.
        """
        return await self._store.replace(wanted.version, wanted.additions, [record])

    def mark_unusable(self, additions: Additions, reasons: Mapping[str, str]) -> None:
        """Reject these upstreams until their settings change, or the file is read again."""
        for name, reason in reasons.items():
            self._unusable[name] = additions.upstreams[name], reason

    def forget_unusable(self, name: str | None = None) -> None:
        """Allow a new attempt with one upstream, or with all of them."""
        for upstream in [name] if name is not None else list(self._unusable):
            self._unusable.pop(upstream, None)

    def adopt(self, additions: StoredAdditions, composed: ComposedConfig) -> None:
        """Make these the current additions, and log the newly rejected ones."""
        for key, problems in composed.rejected.items():
            if problems != self._rejected.get(key):
                for problem in problems:
                    logger.warning("%s: addition is not served: %s", problem.path, problem.message)
        self._current, self._rejected = additions, composed.rejected

    async def follow(self, on_change: Callable[[], Awaitable[None]]) -> None:
        """Report changes by other gateways, repeatedly until they are adopted; runs until cancelled."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            try:
                version = await self._store.version()
            except StoreUnavailable:
                continue
            if self._is_lost(version):
                self._log_loss()
            elif version != self._current.version:
                self._logged_loss = False
                await on_change()

    def _is_lost(self, version: str) -> bool:
        return not version and bool(self._current.version)

    def _log_loss(self) -> None:
        if self._logged_loss:
            return
        self._logged_loss = True
        lost = self._current.additions
        logger.error(
            "Redis has lost the additions (upstreams: %d, models: %d, drained replicas: %d): they stay here "
            "until they are restored; see docs/restore.md",
            len(lost.upstreams),
            len(lost.models),
            sum(map(len, lost.drained.values())),
        )

    async def aclose(self) -> None:
        """Close the connections."""
        await self._store.aclose()
