"""Checks of the models: their names, and the upstreams that each of them refers to."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from gateway.config.api_checks import has_types
from gateway.config.key_checks import named_limit_problems
from gateway.config.money import token_price
from gateway.config.problems import Problem, unknown_name
from gateway.config.schema import OPERATION_SEGMENTS, Config, ModelSettings, UpstreamSettings

NOT_LOADED = (
    "its vectors are compared before it serves a model that has several upstreams; remove `preload: false`"
)


def models_problems(config: Config, upstreams: Collection[str]) -> Iterator[Problem]:
    """Yield the problems of all models whose types are right. upstreams: names that exist in the file."""
    for name, model in config.models.items():
        yield from model_problems(name, model, upstreams)
        yield from model_upstream_problems(name, model, config.upstreams)


def model_problems(name: str, model: ModelSettings, upstreams: Collection[str]) -> Iterator[Problem]:
    """Yield the problems of one model whose types are right. upstreams: names that exist."""
    path = f"models.{name}"
    yield from named_limit_problems(model.limits, f"{path}.limits")
    yield from _price_problems(model, path)
    yield from _reference_problems(model, path, upstreams)
    yield from _member_problems(model, path)
    if not name or name.strip("/") != name or "//" in name:
        yield Problem(path, "a name must not be empty, and must not begin or end with / or contain //")
    if name.rsplit("/", 1)[-1] in OPERATION_SEGMENTS | {"v1", "v2"}:
        yield Problem(
            path,
            "a name may not end in an operation, v1 or v2: /models/{name}/{operation} must be unambiguous",
        )


def _price_problems(model: ModelSettings, path: str) -> Iterator[Problem]:
    try:
        token_price(model.price_per_million_tokens or 0)
    except ValueError as error:
        yield Problem(f"{path}.price_per_million_tokens", str(error))


def model_upstream_problems(
    name: str, model: ModelSettings, upstreams: Mapping[str, UpstreamSettings]
) -> Iterator[Problem]:
    """Yield the problems of a model with the settings of its upstreams. upstreams: those that are sound."""
    for path, upstream in _references(model, f"models.{name}"):
        settings = upstreams.get(upstream)
        if settings is None:
            continue
        if model.prompts and has_types(settings):
            message = "the upstream's server puts its own prompts before texts, by `input_type`; remove them"
            yield Problem(f"models.{name}.prompts", message)
        if model.is_group and settings.is_hosted and not settings.preload:
            yield Problem(path, f"upstream {upstream!r}: {NOT_LOADED}")


def missing_upstream(name: str, written: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield the problem of a written model that names no upstream."""
    if not (written.get("upstream") or written.get("upstreams")):
        yield Problem(f"models.{name}.upstream", "is missing")


def _references(model: ModelSettings, path: str) -> Iterator[tuple[str, str]]:
    """Yield each upstream that a model refers to, with the path of the reference."""
    if not model.upstreams:
        yield f"{path}.upstream", model.upstream
    for index, member in enumerate(model.upstreams):
        yield f"{path}.upstreams[{index}].name", member.name
    if model.canary is not None:
        yield f"{path}.canary.name", model.canary.name
    if model.mirror is not None:
        yield f"{path}.mirror.name", model.mirror.name


def _reference_problems(model: ModelSettings, path: str, upstreams: Collection[str]) -> Iterator[Problem]:
    if not model.upstream:
        yield Problem(f"{path}.upstream", "is missing")
        return
    for place, upstream in _references(model, path):
        if upstream not in upstreams:
            yield Problem(place, unknown_name("upstream", upstream, upstreams))


def _member_problems(model: ModelSettings, path: str) -> Iterator[Problem]:
    """Yield the problems of the upstreams of one model with each other."""
    names = [member.name for member in model.upstreams]
    if names and model.upstream not in names:
        yield Problem(f"{path}.upstream", "`upstreams` has them all; remove it, or list it there")
    for index, name in enumerate(names):
        if name in names[:index]:
            yield Problem(f"{path}.upstreams[{index}].name", "is listed twice")
    for key in ("canary", "mirror"):
        part = getattr(model, key)
        if part is not None and model.upstream and part.name in (*names, model.upstream):
            yield Problem(f"{path}.{key}.name", "serves the model already; name another upstream")
