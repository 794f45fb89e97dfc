"""Upstreams and models that operators add beside router.yaml, as they wrote them. Pure.

Rule: kept as written, with references in the place of secrets; each gateway reads them by itself, beside its
own file, which wins.
"""

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import msgspec

from gateway.config.problems import ConfigError, Problem
from gateway.config.schema import Config

Part = Literal["upstreams", "models"]
DEFINED = "router.yaml defines it, and the file wins"
# So much as a file written by hand would hardly hold; every gateway has it in memory, whole.
WRITTEN_BYTES_MAX = 1024 * 1024


class Additions(msgspec.Struct, frozen=True):
    """All of them, by name."""

    upstreams: dict[str, Any] = {}
    models: dict[str, Any] = {}


class Put(msgspec.Struct, frozen=True, tag="put"):
    """Add one, or replace what stands by that name. settings: as router.yaml would say them, typed."""

    part: Part
    name: str
    settings: dict[str, Any]

    def __str__(self) -> str:
        return f"PUT of {self.part}.{self.name}"


class Remove(msgspec.Struct, frozen=True, tag="remove"):
    """Take one away."""

    part: Part
    name: str

    def __str__(self) -> str:
        return f"DELETE of {self.part}.{self.name}"


Edit: TypeAlias = Put | Remove


class AdditionEntry(msgspec.Struct, frozen=True):
    """One addition as operators see it. problem: why this gateway does not serve it."""

    name: str
    settings: Any
    problem: str | None


class Listing(msgspec.Struct, frozen=True):
    """All additions, by name."""

    upstreams: tuple[AdditionEntry, ...] = ()
    models: tuple[AdditionEntry, ...] = ()


class UnknownAddition(Exception):
    """Nothing of that name was added."""

    def __init__(self, edit: Remove) -> None:
        super().__init__(f"{edit.part}.{edit.name}: nothing was added by that name")
        self.problem = Problem(f"{edit.part}.{edit.name}", "nothing was added by that name")


def apply_edit(file: Config, standing: Additions, edit: Edit) -> Additions:
    """What stands after an edit.

    Raises: ConfigError where it may not be; UnknownAddition.
    """
    entries = _entries(standing, edit.part)
    if isinstance(edit, Put):
        if edit.name in _entries(file, edit.part):
            raise _refused(edit, f"{DEFINED}: change it there")
        return _bounded(
            msgspec.structs.replace(standing, **{edit.part: {**entries, edit.name: edit.settings}})
        )
    if edit.name not in entries:
        if edit.name in _entries(file, edit.part):
            raise _refused(edit, "router.yaml defines it: remove it there")
        raise UnknownAddition(edit)
    if edit.part == "upstreams" and (users := _users(file, standing, edit.name)):
        raise _refused(edit, f"it serves models, which go first: {', '.join(users)}")
    left = {name: one for name, one in entries.items() if name != edit.name}
    return msgspec.structs.replace(standing, **{edit.part: left})


def _entries(of: Config | Additions, part: Part) -> Mapping[str, Any]:
    return of.upstreams if part == "upstreams" else of.models


def _users(file: Config, standing: Additions, upstream: str) -> list[str]:
    """The added models that go by an added upstream; those of the file go by the file's."""
    if upstream in file.upstreams:
        return []
    named = {name: one.get("upstream") for name, one in standing.models.items() if isinstance(one, dict)}
    return sorted(name for name, one in named.items() if one == upstream and name not in file.models)


def _bounded(additions: Additions) -> Additions:
    if len(msgspec.json.encode(additions)) > WRITTEN_BYTES_MAX:
        raise ConfigError([Problem("additions", f"they hold more than {WRITTEN_BYTES_MAX} bytes together")])
    return additions


def _refused(edit: Edit, why: str) -> ConfigError:
    return ConfigError([Problem(f"{edit.part}.{edit.name}", why)])
