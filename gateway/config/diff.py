"""What differs between the config that runs and one that is to take its place. Pure.

Rule: no value that could be a secret is told: numbers and switches are, texts are not; keys go by their ids.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import msgspec

from gateway.config.load import Problem
from gateway.config.schema import Config, Key, Section, digest_of

# What is taken over while the gateway runs. All else was given to sockets, processes and exporters at start.
LIVE = ("upstreams", "engine", "models", "defaults", "tenants", "admin.keys", "admin.files", "limits.inputs")

How = Literal["added", "removed", "changed"]
# What a key is called, and how it is written.
Listed = tuple[str, str | Key]


class Change(msgspec.Struct, frozen=True):
    """One thing that differs, by its path in the file. detail: was → is, where that is no secret."""

    path: str
    how: How
    detail: str = ""

    def __str__(self) -> str:
        """One line of a log."""
        return f"{self.path} {self.how}" + (f" ({self.detail})" if self.detail else "")


class Outcome(msgspec.Struct, frozen=True):
    """How a reload ended. problems: why nothing has changed. needs_restart: what was left as it was.

    kind: of the problems: what was asked for is wrong, or names what is not there, or cannot be stored now.
    """

    changes: tuple[Change, ...] = ()
    needs_restart: tuple[Change, ...] = ()
    problems: tuple[Problem, ...] = ()
    kind: Literal["invalid", "unknown", "away"] = "invalid"


def live_parts(running: Config, wanted: Config) -> Config:
    """The config that runs, with all that can change live as the other one has it."""
    admin = msgspec.structs.replace(running.admin, keys=wanted.admin.keys, files=wanted.admin.files)
    limits = msgspec.structs.replace(running.limits, inputs=wanted.limits.inputs)
    return msgspec.structs.replace(
        running,
        upstreams=wanted.upstreams,
        engine=wanted.engine,
        models=wanted.models,
        defaults=wanted.defaults,
        tenants=wanted.tenants,
        admin=admin,
        limits=limits,
    )


def changed(running: Config, wanted: Config) -> Outcome:
    """What another config changes, and what of it needs a restart."""
    found = list(_differences(running, wanted, ""))
    return Outcome(
        tuple(one for one in found if _is_live(one.path)),
        tuple(one for one in found if not _is_live(one.path)),
    )


def _is_live(path: str) -> bool:
    return any(path == one or path.startswith((f"{one}.", f"{one}[")) for one in LIVE)


def _differences(old: Any, new: Any, path: str) -> Iterator[Change]:
    if old == new:
        return
    if path.endswith(".keys"):
        yield from _of_keys(_by_digest(old), _by_digest(new), path)
    elif isinstance(old, Section) and type(old) is type(new):
        for name in old.__struct_fields__:
            yield from _differences(getattr(old, name), getattr(new, name), _join(path, name))
    elif isinstance(old, Mapping) and isinstance(new, Mapping):
        yield from _of_entries(old, new, path)
    else:
        yield Change(path, "changed", _told(old, new))


def _of_entries(old: Mapping[str, Any], new: Mapping[str, Any], path: str) -> Iterator[Change]:
    for name in {**old, **new}:
        place = _join(path, name)
        if name not in new:
            yield Change(place, "removed")
        elif name not in old:
            yield Change(place, "added")
        else:
            yield from _differences(old[name], new[name], place)


def _of_keys(old: Mapping[str, Listed], new: Mapping[str, Listed], path: str) -> Iterator[Change]:
    for digest in {**old, **new}:
        id_, _ = old.get(digest) or new[digest]
        if digest not in new:
            yield Change(f"{path}[{id_}]", "removed")
        elif digest not in old:
            yield Change(f"{path}[{id_}]", "added")
        elif old[digest][1] != new[digest][1]:
            yield Change(f"{path}[{id_}]", "changed")


def _by_digest(keys: tuple[str | Key, ...]) -> dict[str, Listed]:
    """Each key with what it is called: its id, or its place in the list."""
    return {
        digest_of(key): ((isinstance(key, Key) and key.id) or str(index), key)
        for index, key in enumerate(keys)
    }


def _told(old: Any, new: Any) -> str:
    harmless = all(one is None or isinstance(one, int | float) for one in (old, new))
    return f"{_as_written(old)} → {_as_written(new)}" if harmless else ""


def _as_written(value: Any) -> str:
    """As router.yaml writes it."""
    if value is None:
        return "absent"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
