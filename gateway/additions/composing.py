"""A file's config with what was added beside it: what can be served of both, and why the rest cannot.

Rule: an addition can never keep a gateway from serving its file. One that cannot be used is left out, with
the models that go by it, and named.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from gateway.additions.entries import DEFINED, AdditionEntry, Additions, Listing, Part
from gateway.additions.reading import SecretSources, as_shown, read_model, read_upstream
from gateway.config.problems import ConfigError, Problem
from gateway.config.schema import Config, ModelSettings, UpstreamSettings

_Settings = TypeVar("_Settings", UpstreamSettings, ModelSettings)
LATER = "its model is loaded once the gateway is up"


class ComposedConfig(msgspec.Struct, frozen=True):
    """What can be served. added: of it, which upstreams are no part of the file. left_out: why, by part and
    name, what is not served.
    """

    config: Config
    added: frozenset[str]
    left_out: Mapping[tuple[Part, str], tuple[Problem, ...]]


def compose(
    file: Config,
    additions: Additions,
    environment: Mapping[str, str],
    unusable: Mapping[str, str],
    *,
    with_engines: bool = True,
) -> ComposedConfig:
    """Both together. environment: the gateway's. unusable: why upstreams, by name, cannot be used though
    their settings can be read. with_engines: whether those that need an engine are part of it. Reads files.
    """
    outside = SecretSources(environment, Path(file.admin.files) if file.admin.files else None)
    left_out: dict[tuple[Part, str], tuple[Problem, ...]] = {}

    def upstream(name: str, written: Any) -> UpstreamSettings:
        one = read_upstream(name, written, outside)
        why = unusable.get(name) or (LATER if one.is_hosted and not with_engines else None)
        if why is not None:
            raise ConfigError([Problem(f"upstreams.{name}", why)])
        return _apart(one) if one.is_hosted else one

    upstreams = _readable("upstreams", additions.upstreams, file.upstreams, upstream, left_out)
    known = file.upstreams | upstreams
    models = _readable(
        "models", additions.models, file.models, lambda name, one: read_model(name, one, known), left_out
    )
    config = msgspec.structs.replace(file, upstreams=known, models=file.models | models)
    return ComposedConfig(config, frozenset(upstreams), left_out)


def _apart(upstream: UpstreamSettings) -> UpstreamSettings:
    """In a process of additions: the file's engines are not started anew for one, nor end with one."""
    return msgspec.structs.replace(upstream, process=f"{upstream.process} (added)")


def _readable(
    part: Part,
    written: Mapping[str, Any],
    in_file: Mapping[str, _Settings],
    read: Callable[[str, Any], _Settings],
    left_out: dict[tuple[Part, str], tuple[Problem, ...]],
) -> dict[str, _Settings]:
    """Those that can be served, by name; why the others cannot is noted."""
    found = {}
    for name, one in written.items():
        if name in in_file:
            left_out[part, name] = (Problem(f"{part}.{name}", DEFINED),)
            continue
        try:
            found[name] = read(name, one)
        except ConfigError as error:
            left_out[part, name] = tuple(error.problems)
    return found


def listing_of(additions: Additions, left_out: Mapping[tuple[Part, str], tuple[Problem, ...]]) -> Listing:
    """All additions as operators see them."""

    def listed(part: Part, written: Mapping[str, Any]) -> tuple[AdditionEntry, ...]:
        return tuple(
            AdditionEntry(name, as_shown(one), _told(left_out.get((part, name))))
            for name, one in sorted(written.items())
        )

    return Listing(listed("upstreams", additions.upstreams), listed("models", additions.models))


def _told(problems: tuple[Problem, ...] | None) -> str | None:
    return "; ".join(f"{one.path}: {one.message}" for one in problems) if problems else None
