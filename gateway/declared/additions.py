"""Upstreams and models that operators add at run time, as written, and the replicas that they drain. Pure.

Rule: they are stored as written, with references in place of secrets. Each gateway reads them for itself,
in addition to its own file, which takes precedence. An edit is applied to all additions at once.
"""

from typing import Any, Literal, Self, TypeAlias

import msgspec

from gateway.audit.records import GATEWAY, Actor
from gateway.config.problems import ConfigError, Problem
from gateway.config.schema import Config

Part = Literal["upstreams", "models"]
DEFINED = "router.yaml defines it, and the file wins"
# More than a file written by hand would contain; every gateway keeps all of it in memory.
WRITTEN_BYTES_MAX = 1024 * 1024


class Additions(msgspec.Struct, frozen=True):
    """All additions, by name. drained: upstream → addresses of its replicas that get no work."""

    upstreams: dict[str, Any] = {}
    models: dict[str, Any] = {}
    drained: dict[str, tuple[str, ...]] = {}

    def with_drained(self, upstream: str, replicas: tuple[str, ...]) -> Self:
        """Return the additions with these replicas of an upstream drained, and no others of it."""
        drained = {name: names for name, names in self.drained.items() if name != upstream}
        return msgspec.structs.replace(self, drained={**drained, upstream: replicas} if replicas else drained)


class Put(msgspec.Struct, frozen=True, tag="put"):
    """Edit that adds an entry or replaces the one of that name. settings: as in router.yaml, typed."""

    part: Part
    name: str
    settings: dict[str, Any]
    by: Actor = GATEWAY

    def __str__(self) -> str:
        return f"PUT of {self.part}.{self.name}"

    def apply(self, file: Config, additions: Additions) -> Additions:
        """Return the additions with the entry. Raises: ConfigError."""
        path = f"{self.part}.{self.name}"
        if self.name in getattr(file, self.part):
            raise ConfigError([Problem(path, f"{DEFINED}: change it there")])
        entries = {**getattr(additions, self.part), self.name: self.settings}
        return _within_bounds(msgspec.structs.replace(additions, **{self.part: entries}))


class Remove(msgspec.Struct, frozen=True, tag="remove"):
    """Edit that removes an entry."""

    part: Part
    name: str
    by: Actor = GATEWAY

    def __str__(self) -> str:
        return f"DELETE of {self.part}.{self.name}"

    def apply(self, file: Config, additions: Additions) -> Additions:
        """Return the additions without the entry. Raises: ConfigError, UnknownAddition."""
        path = f"{self.part}.{self.name}"
        entries: dict[str, Any] = getattr(additions, self.part)
        if self.name not in entries:
            if self.name in getattr(file, self.part):
                raise ConfigError([Problem(path, "router.yaml defines it: remove it there")])
            raise UnknownAddition(Problem(path, "nothing was added by that name"))
        if self.part == "upstreams" and (users := _users(file, additions, self.name)):
            raise ConfigError([Problem(path, f"it serves models, which go first: {', '.join(users)}")])
        remaining = {name: settings for name, settings in entries.items() if name != self.name}
        removed = msgspec.structs.replace(additions, **{self.part: remaining})
        return removed.with_drained(self.name, ()) if self.part == "upstreams" else removed


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """Edit that keeps work away from a replica, or ends that. name: of its upstream. replica: its address."""

    name: str
    replica: str
    is_drained: bool
    by: Actor = GATEWAY

    def __str__(self) -> str:
        return f"{'drain' if self.is_drained else 'return'} of {self.replica} of upstreams.{self.name}"

    def apply(self, file: Config, additions: Additions) -> Additions:
        """Return the additions after the edit. Raises: ConfigError if they are too large; UnknownAddition."""
        path, drained = f"upstreams.{self.name}", additions.drained.get(self.name, ())
        others = tuple(name for name in drained if name != self.replica)
        if self.is_drained:
            if self.name not in file.upstreams and self.name not in additions.upstreams:
                raise UnknownAddition(Problem(path, "neither router.yaml nor an addition has this upstream"))
            return _within_bounds(additions.with_drained(self.name, (*others, self.replica)))
        if self.replica not in drained:
            message = f"{self.replica} was not drained here; a `drained` in settings is changed there"
            raise UnknownAddition(Problem(path, message))
        return additions.with_drained(self.name, others)


Edit: TypeAlias = Put | Remove | Drain


class AdditionInfo(msgspec.Struct, frozen=True):
    """An upstream or a model that operators added, with references in the place of secrets.

    problem: the reason why this gateway does not serve it, or null.
    """

    name: str
    settings: dict[str, Any]
    problem: str | None


class Listing(msgspec.Struct, frozen=True, tag="listing"):
    """All additions, by name."""

    upstreams: tuple[AdditionInfo, ...] = ()
    models: tuple[AdditionInfo, ...] = ()


class UnknownAddition(Exception):
    """An edit names something that does not exist."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(str(problem))
        self.problem = problem


def _users(file: Config, additions: Additions, upstream: str) -> list[str]:
    """Return the added models of an added upstream; models of the file use upstreams of the file."""
    if upstream in file.upstreams:
        return []
    return sorted(
        model
        for model, written in additions.models.items()
        if upstream in _upstreams_of(written) and model not in file.models
    )


def _upstreams_of(written: Any) -> set[Any]:
    """Return what a written model names as its upstreams."""
    if not isinstance(written, dict):
        return set()
    listed = written.get("upstreams")
    parts = [*(listed if isinstance(listed, list) else ()), written.get("canary"), written.get("mirror")]
    names = [written.get("upstream"), *(part.get("name") for part in parts if isinstance(part, dict))]
    return {name for name in names if isinstance(name, str)}


def _within_bounds(additions: Additions) -> Additions:
    if len(msgspec.json.encode(additions)) > WRITTEN_BYTES_MAX:
        raise ConfigError([Problem("additions", f"together they take more than {WRITTEN_BYTES_MAX} bytes")])
    return additions
