"""Upstreams and models that operators add at run time, as written, and the replicas that they drain. Pure.

Rule: they are stored as written, with references in place of secrets. Each gateway reads them for itself,
in addition to its own file, which takes precedence.
"""

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import msgspec

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


class Put(msgspec.Struct, frozen=True, tag="put"):
    """Edit that adds an entry or replaces the one of that name. settings: as in router.yaml, typed."""

    part: Part
    name: str
    settings: dict[str, Any]

    def __str__(self) -> str:
        return f"PUT of {self.part}.{self.name}"


class Remove(msgspec.Struct, frozen=True, tag="remove"):
    """Edit that removes an entry."""

    part: Part
    name: str

    def __str__(self) -> str:
        return f"DELETE of {self.part}.{self.name}"


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """Edit that keeps work away from a replica, or ends that. name: of its upstream. replica: its address."""

    name: str
    replica: str
    is_drained: bool

    def __str__(self) -> str:
        return f"{'drain' if self.is_drained else 'return'} of {self.replica} of upstreams.{self.name}"


Edit: TypeAlias = Put | Remove | Drain


class AdditionEntry(msgspec.Struct, frozen=True):
    """One addition as operators see it. problem: why this gateway does not serve it, or None."""

    name: str
    settings: Any
    problem: str | None


class Listing(msgspec.Struct, frozen=True):
    """All additions, by name."""

    upstreams: tuple[AdditionEntry, ...] = ()
    models: tuple[AdditionEntry, ...] = ()


class UnknownAddition(Exception):
    """An edit names something that does not exist."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(str(problem))
        self.problem = problem


def apply_edit(file: Config, additions: Additions, edit: Edit) -> Additions:
    """Return the additions after an edit.

    Raises: ConfigError if the edit is not allowed; UnknownAddition.
    """
    if isinstance(edit, Drain):
        return _with_drain(file, additions, edit)
    entries = _entries(additions, edit.part)
    if isinstance(edit, Put):
        if edit.name in _entries(file, edit.part):
            raise _rejection(edit, f"{DEFINED}: change it there")
        return _within_bounds(
            msgspec.structs.replace(additions, **{edit.part: {**entries, edit.name: edit.settings}})
        )
    if edit.name not in entries:
        if edit.name in _entries(file, edit.part):
            raise _rejection(edit, "router.yaml defines it: remove it there")
        raise UnknownAddition(Problem(f"{edit.part}.{edit.name}", "nothing was added by that name"))
    if edit.part == "upstreams" and (users := _users(file, additions, edit.name)):
        raise _rejection(edit, f"it serves models, which go first: {', '.join(users)}")
    remaining = {name: settings for name, settings in entries.items() if name != edit.name}
    removed = msgspec.structs.replace(additions, **{edit.part: remaining})
    return _with_drained(removed, edit.name, ()) if edit.part == "upstreams" else removed


def _with_drain(file: Config, additions: Additions, edit: Drain) -> Additions:
    """Return the additions after an edit of a replica.

    Raises: ConfigError if the additions become too large; UnknownAddition.
    """
    path, drained = f"upstreams.{edit.name}", additions.drained.get(edit.name, ())
    others = tuple(name for name in drained if name != edit.replica)
    if edit.is_drained:
        if edit.name not in file.upstreams and edit.name not in additions.upstreams:
            raise UnknownAddition(Problem(path, "neither router.yaml nor an addition has this upstream"))
        return _within_bounds(_with_drained(additions, edit.name, (*others, edit.replica)))
    if edit.replica not in drained:
        message = f"{edit.replica} was not drained here; a `drained` in settings is changed there"
        raise UnknownAddition(Problem(path, message))
    return _with_drained(additions, edit.name, others)


def _with_drained(additions: Additions, upstream: str, replicas: tuple[str, ...]) -> Additions:
    drained = {name: names for name, names in additions.drained.items() if name != upstream}
    return msgspec.structs.replace(
        additions, drained={**drained, upstream: replicas} if replicas else drained
    )


def _entries(source: Config | Additions, part: Part) -> Mapping[str, Any]:
    return source.upstreams if part == "upstreams" else source.models


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


def _rejection(edit: Put | Remove, reason: str) -> ConfigError:
    return ConfigError([Problem(f"{edit.part}.{edit.name}", reason)])
