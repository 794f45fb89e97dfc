"""Comparison of the running configuration with one that is to replace it. Pure.

Rule: a value that could be a secret is never shown. Numbers and switches are shown, texts are not, and a key
is identified by its id.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import msgspec

from gateway.config.problems import Problem, join_path
from gateway.config.schema import Config, Key, digest_of

# The parts that a reload applies. Everything else was handed to sockets, processes and exporters at start.
LIVE = (
    "upstreams",
    "engine",
    "models",
    "defaults",
    "tenants",
    "sign_on",
    "currency",
    "end_users",
    "admin.keys",
    "admin.certificates",
    "admin.files",
    "limits.inputs",
    "limits.unknown_fields",
    "quotas.unlimited_headers",
)

How = Literal["added", "removed", "changed"]
# A key's label (its id, or its index in the list) and the key as it is written.
LabelledKey = tuple[str, str | Key]


class ConfigChange(msgspec.Struct, frozen=True):
    """One difference, by its path in the file. detail: old → new value, where neither can be a secret.

    was, now: the values then.
    """

    path: str
    how: How
    detail: str = ""
    was: int | float | None = None
    now: int | float | None = None

    def __str__(self) -> str:
        """Format the change as one log line."""
        return f"{self.path} {self.how}" + (f" ({self.detail})" if self.detail else "")


class ReloadOutcome(msgspec.Struct, frozen=True, tag="reload"):
    """Result of a reload or an edit.

    changes: differences that were applied. needs_restart: differences that were not applied, because they
    need a restart. problems: reasons why nothing was applied. kind: class of the problems, where `unknown`
    means that the edit names something that does not exist, and `unavailable` that it cannot be stored now.
    """

    changes: tuple[ConfigChange, ...] = ()
    needs_restart: tuple[ConfigChange, ...] = ()
    problems: tuple[Problem, ...] = ()
    kind: Literal["invalid", "unknown", "unavailable"] = "invalid"


def with_live_settings(running: Config, wanted: Config) -> Config:
    """Return the running config with every setting that can change live taken from the wanted one."""
    config = running
    for path in LIVE:
        section, _, key = path.partition(".")
        value = getattr(wanted, section)
        if key:
            value = msgspec.structs.replace(getattr(config, section), **{key: getattr(value, key)})
        config = msgspec.structs.replace(config, **{section: value})
    return config


def compare_configs(running: Config, wanted: Config) -> ReloadOutcome:
    """Return the differences of the wanted config, split into live changes and those that need a restart."""
    found = list(_differences(running, wanted, ""))
    return ReloadOutcome(
        tuple(change for change in found if _is_live(change.path)),
        tuple(change for change in found if not _is_live(change.path)),
    )


def _is_live(path: str) -> bool:
    return any(path == prefix or path.startswith((f"{prefix}.", f"{prefix}[")) for prefix in LIVE)


def _differences(old: Any, new: Any, path: str) -> Iterator[ConfigChange]:
    if old == new:
        return
    if path.endswith(".keys"):
        yield from _compare_keys(_by_digest(old), _by_digest(new), path)
    elif isinstance(old, msgspec.Struct) and type(old) is type(new):
        for name, written in zip(old.__struct_fields__, old.__struct_encode_fields__, strict=True):
            yield from _differences(getattr(old, name), getattr(new, name), join_path(path, written))
    elif isinstance(old, Mapping) and isinstance(new, Mapping):
        yield from _compare_entries(old, new, path)
    else:
        detail = _detail(old, new)
        yield ConfigChange(path, "changed", detail, *((old, new) if detail else ()))


def _compare_entries(old: Mapping[str, Any], new: Mapping[str, Any], path: str) -> Iterator[ConfigChange]:
    for name in {**old, **new}:
        entry_path = join_path(path, name)
        if name not in new:
            yield ConfigChange(entry_path, "removed")
        elif name not in old:
            yield ConfigChange(entry_path, "added")
        else:
            yield from _differences(old[name], new[name], entry_path)


def _compare_keys(
    old: Mapping[str, LabelledKey], new: Mapping[str, LabelledKey], path: str
) -> Iterator[ConfigChange]:
    for digest in {**old, **new}:
        label, _ = old.get(digest) or new[digest]
        if digest not in new:
            yield ConfigChange(f"{path}[{label}]", "removed")
        elif digest not in old:
            yield ConfigChange(f"{path}[{label}]", "added")
        elif old[digest][1] != new[digest][1]:
            yield ConfigChange(f"{path}[{label}]", "changed")


def _by_digest(keys: tuple[str | Key, ...]) -> dict[str, LabelledKey]:
    return {
        digest_of(key): ((isinstance(key, Key) and key.id) or str(index), key)
        for index, key in enumerate(keys)
    }


def _detail(old: Any, new: Any) -> str:
    """Return "old → new", or nothing if either value is a text, which could be a secret."""
    is_harmless = all(value is None or isinstance(value, int | float) for value in (old, new))
    return f"{_as_yaml(old)} → {_as_yaml(new)}" if is_harmless else ""


def _as_yaml(value: Any) -> str:
    if value is None:
        return "absent"
    return str(value).lower() if isinstance(value, bool) else str(value)
