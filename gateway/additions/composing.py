"""Composition of a file's config with the additions, and the reasons why the rest cannot be served.

Rule: an addition can never keep a gateway from serving its file. One that cannot be used is rejected together
with the models that use it, and its problems are reported.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from gateway.additions.entries import DEFINED, AdditionEntry, Additions, Listing, Part
from gateway.additions.reading import SecretSources, read_model, read_upstream, redact
from gateway.config.problems import ConfigError, Problem
from gateway.config.schema import Config, ModelSettings, UpstreamSettings
from gateway.config.upstream_checks import currency_problem

_Settings = TypeVar("_Settings", UpstreamSettings, ModelSettings)
LATER = "its model is loaded once the gateway is up"
# Otherwise an addition could take the name that callers of the file's model happen to send.
EVERY_NAME = "`defaults.any_name` gives every name to the model of router.yaml; set it to false there first"

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
        return _in_own_process(upstream) if upstream.is_local else upstream

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
    drained = _with_drains(upstreams, additions.drained)
    config = msgspec.structs.replace(file, upstreams=drained, models=file.models | models)
    return ComposedConfig(config, frozenset(added), rejected)


def _with_drains(
    upstreams: Mapping[str, UpstreamSettings], drained: Mapping[str, tuple[str, ...]]
) -> dict[str, UpstreamSettings]:
    """Return the upstreams with the replicas that operators drain, in addition to their own settings."""

    def union(settings: UpstreamSettings, names: tuple[str, ...]) -> UpstreamSettings:
        return msgspec.structs.replace(settings, drained=tuple(dict.fromkeys((*settings.drained, *names))))

    return {
        name: union(settings, drained[name]) if name in drained else settings
        for name, settings in upstreams.items()
    }


def _in_own_process(upstream: UpstreamSettings) -> UpstreamSettings:
    """Move it to a process for additions: adding or removing one does not restart the file's engines."""
    return msgspec.structs.replace(upstream, process=f"{upstream.process} (added)")


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

    def entries(part: Part, written: Mapping[str, Any]) -> tuple[AdditionEntry, ...]:
        return tuple(
            AdditionEntry(name, redact(entry), _problem_text(rejected.get((part, name))))
            for name, entry in sorted(written.items())
        )

    return Listing(entries("upstreams", additions.upstreams), entries("models", additions.models))


def _problem_text(problems: tuple[Problem, ...] | None) -> str | None:
    return "; ".join(f"{problem.path}: {problem.message}" for problem in problems) if problems else None
