"""Checks between values: references that exist, and settings that fit each other. Reads no files."""

import re
from collections.abc import Iterator, Mapping
from urllib.parse import urlsplit

import msgspec

from backends.contract import TokenizerSettings
from backends.contract.errors import ModelUnavailable
from backends.infinity.kind import INFINITY
from backends.instructions import template_problem
from backends.recipe.options import RerankPrompt
from backends.recipe.rerank_template import written_template
from gateway.config.api_checks import (
    address_problem,
    api_problems,
    header_problems,
    key_header_problems,
    sent_problems,
)
from gateway.config.batch_checks import batch_problems
from gateway.config.command_checks import command_problems
from gateway.config.key_checks import key_problems, named_limit_problems
from gateway.config.listener_checks import listener_problems
from gateway.config.media_checks import media_problems
from gateway.config.money import is_budget
from gateway.config.problems import Problem, unknown_models, unknown_name
from gateway.config.schema import (
    COMMIT,
    OWN_VOCABULARY,
    Config,
    Key,
    LimitAmount,
    ModelSettings,
    UpstreamSettings,
)
from gateway.config.sign_on_checks import limits_of_users, sign_on_problems

STORE = re.compile(r"(rediss?|redis\+cluster)://[^/]|redis\+sentinel://[^/]+/[^/]+")
DEVICE = re.compile(r"(cpu|cuda|mps|xpu)(:[0-9]+)?")
STORES_ALLOWED = "memory, redis://host:port/db, rediss://host:port/db, redis+sentinel://h1,h2/name/db, redis+cluster://h1,h2"

CURRENCY_MEANING = "the name of the money in which prices and budgets are written, such as EUR"


class EntryNames(msgspec.Struct, frozen=True):
    """Names in the file, including those of entries that have a mistake of their own."""

    upstreams: frozenset[str]
    models: frozenset[str]


def cross_problems(config: Config, names: EntryNames) -> Iterator[Problem]:
    """Yield the problems that no value shows by itself."""
    yield from listener_problems(config)
    yield from media_problems(config)
    yield from batch_problems(config)
    yield from command_problems(config)
    yield from _quota_problems(config)
    yield from _cache_problems(config)
    yield from _currency_problems(config)
    if config.tracing is not None:
        yield from header_problems(config.tracing.headers, "tracing.headers")
    for name, upstream in config.upstreams.items():
        yield from upstream_problems(upstream, f"upstreams.{name}")
    for operation in ("embed", "rerank", "classify"):
        default = getattr(config.defaults, operation)
        if default is not None and default not in names.models:
            yield Problem(f"defaults.{operation}", unknown_name("model", default, names.models))
    if config.defaults.any_name and len(names.models) > 1:
        message = f"needs a file with one model, which serves every name; this one has {len(names.models)}"
        yield Problem("defaults.any_name", message)
    yield from _tenant_problems(config, names)
    yield from sign_on_problems(config.sign_on, names.models)


def upstream_problems(upstream: UpstreamSettings, path: str) -> Iterator[Problem]:
    """Yield the problems of one upstream whose types are right."""
    template = upstream.instruction_template
    if template is not None and (problem := template_problem(template)):
        yield Problem(f"{path}.instruction_template", problem)
    yield from key_header_problems(upstream, path)
    yield from api_problems(upstream, path)
    if upstream.is_hosted:
        if not upstream.model:
            yield Problem(f"{path}.model", "is missing; a hub id or the path of a checkpoint")
        if upstream.replicas:
            yield Problem(f"{path}.replicas", "torch runs here; replicas are for remote backends")
        if upstream.drained:
            yield Problem(
                f"{path}.drained", "torch runs here and is not drained; this is for remote backends"
            )
        if not upstream.devices:
            yield Problem(f"{path}.device", "is an empty list; name a device such as cuda:0, or leave it out")
        yield from (
            Problem(f"{path}.device", f"{device!r} is not a device; write cpu, mps, cuda or cuda:0")
            for device in sorted(set(filter(None, upstream.devices.values())))
            if not DEVICE.fullmatch(device)
        )
        yield from _runtime_problems(upstream, path)
        yield from _prompt_problems(upstream, path)
        yield from _code_problems(upstream, path)
        return
    yield from _remote_problems(upstream, path)


def _runtime_problems(upstream: UpstreamSettings, path: str) -> Iterator[Problem]:
    if upstream.runtime != "openvino":
        return
    if upstream.dtype not in {None, "float32", "bfloat16"}:
        yield Problem(f"{path}.runtime", f"openvino computes in float32 or bfloat16, not {upstream.dtype}")
    others = {device for device in upstream.devices.values() if device and not device.startswith("cpu")}
    if others:
        yield Problem(f"{path}.runtime", f"openvino computes on a CPU, not on {', '.join(sorted(others))}")


def _prompt_problems(upstream: UpstreamSettings, path: str) -> Iterator[Problem]:
    if isinstance(upstream.rerank_template, RerankPrompt):
        try:
            written_template(upstream.rerank_template)
        except ModelUnavailable as error:
            yield Problem(f"{path}.rerank_template", str(error))


def currency_problem(name: str, model: ModelSettings, currency: str | None) -> Problem | None:
    """Return the problem of a model with a price in no currency."""
    if not model.price_per_million_tokens or currency is not None:
        return None
    return Problem(f"models.{name}.price_per_million_tokens", f"needs `currency`, {CURRENCY_MEANING}")


def _code_problems(upstream: UpstreamSettings, path: str) -> Iterator[Problem]:
    if upstream.code_revision is None:
        return
    if not COMMIT.fullmatch(upstream.code_revision):
        # A branch or a tag can move to other code.
        yield Problem(f"{path}.code_revision", "is no commit; write its 40 hexadecimal digits")
    elif not upstream.trust_remote_code:
        yield Problem(f"{path}.code_revision", "needs `trust_remote_code: true`")


def _remote_problems(upstream: UpstreamSettings, path: str) -> Iterator[Problem]:
    for key in [key for key in ("adapter", "rerank_template") if getattr(upstream, key) is not None]:
        yield Problem(f"{path}.{key}", "the remote server has its own; this is for torch")
    if not upstream.replicas:
        yield Problem(f"{path}.replicas", "is missing; a list of base URLs, http://host:port")
    yield from _tokenizer_problems(upstream, f"{path}.tokenizer")
    for index, url in enumerate(upstream.replicas):
        if problem := address_problem(url, upstream):
            yield Problem(f"{path}.replicas[{index}]", problem)
        elif url in upstream.replicas[:index]:
            yield Problem(f"{path}.replicas[{index}]", "is listed twice")
    yield from _drain_problems(upstream, path)
    yield from sent_problems(upstream, path)


def _drain_problems(upstream: UpstreamSettings, path: str) -> Iterator[Problem]:
    if upstream.drained and upstream.discover is not None:
        yield Problem(f"{path}.drained", "the replicas of `discover` are those that its name resolves to")
        return
    for index, url in enumerate(upstream.drained):
        if url not in upstream.replicas:
            yield Problem(f"{path}.drained[{index}]", "is not one of `replicas`")


def _tokenizer_problems(upstream: UpstreamSettings, path: str) -> Iterator[Problem]:
    if upstream.tokenizer:
        return
    if upstream.token_encoding == OWN_VOCABULARY:
        yield Problem(path, "is missing; `token_encoding: model` decodes ids with it")
    if upstream.backend == INFINITY.name:
        yield Problem(
            path,
            "is missing; Infinity counts characters, so its tokens are counted here: a hub id, or the path "
            "of a checkpoint's tokenizer.json and config files",
        )
    elif upstream.tokenizer_settings != TokenizerSettings():
        yield Problem(
            path, "is missing; `add_bos_token` and `add_eos_token` say how the gateway counts with it"
        )


def _quota_problems(config: Config) -> Iterator[Problem]:
    if message := _store_problem(config.quotas.store):
        yield Problem("quotas.store", message)
    if config.workers > 1 and config.quotas.store == "memory":
        yield Problem(
            "workers", "more than 1 need quotas that they count together: a Redis in `quotas.store`"
        )


def _cache_problems(config: Config) -> Iterator[Problem]:
    if config.cache is None:
        for name, model in config.models.items():
            if model.cache:
                yield Problem(f"models.{name}.cache", "needs the section `cache`, which says where")
        return
    if config.cache.store == "redis":
        if config.quotas.store == "memory":
            yield Problem("cache.store", "needs a Redis in `quotas.store`, or a URL of its own")
    elif message := _store_problem(config.cache.store):
        yield Problem("cache.store", message.replace("memory,", "memory, redis,", 1))


def _currency_problems(config: Config) -> Iterator[Problem]:
    """Yield a problem for each price and budget in no currency."""
    for name, model in config.models.items():
        if problem := currency_problem(name, model, config.currency):
            yield problem
    if config.currency is None:
        yield from (
            Problem(f"{path}.{limit}", f"needs `currency`, {CURRENCY_MEANING}")
            for path, limits in _limits_of(config)
            for limit in limits
            if is_budget(limit)
        )


def _limits_of(config: Config) -> Iterator[tuple[str, Mapping[str, LimitAmount]]]:
    """Yield the limits of the file, with their paths."""
    for name, model in config.models.items():
        yield f"models.{name}.limits", model.limits
    for name, tenant in config.tenants.items():
        yield f"tenants.{name}.limits", tenant.limits
        for model_name, limits in tenant.model_limits.items():
            yield f"tenants.{name}.model_limits.{model_name}", limits
    lists = {f"tenants.{name}": tenant.keys for name, tenant in config.tenants.items()}
    for owner, keys in (lists | {"admin": config.admin.keys}).items():
        for index, key in enumerate(keys):
            if isinstance(key, Key):
                yield f"{owner}.keys[{index}].limits", key.limits
    for name, issuer in config.sign_on.items():
        yield from limits_of_users(issuer.claims, f"sign_on.{name}.claims")


def _store_problem(store: str) -> str | None:
    """Return the problem of a store's URL without any part of it, because it may contain a password."""
    if store == "memory":
        return None
    if not STORE.match(store):
        return f"not one of: {STORES_ALLOWED}"
    try:
        parts = urlsplit(store)
        hosts = parts.netloc.rpartition("@")[2].split(",")
        ports = [urlsplit(f"//{host}").port for host in hosts]
        if (
            all(urlsplit(f"//{host}").hostname for host in hosts)
            and 0 not in ports
            and "@" not in (parts.path + parts.query + parts.fragment)
        ):
            return None
    except ValueError:
        pass
    return "its host or port cannot be read; in a password / # ? @ and % are written %2F %23 %3F %40 and %25"


def _tenant_problems(config: Config, names: EntryNames) -> Iterator[Problem]:
    first_use: dict[str, str] = {}
    yield from key_problems(config.admin.keys, "admin", first_use)
    for name, tenant in config.tenants.items():
        path = f"tenants.{name}"
        yield from key_problems(tenant.keys, path, first_use)
        yield from unknown_models(tenant.models or (), f"{path}.models", names.models)
        yield from named_limit_problems(tenant.limits, f"{path}.limits")
        for model, limits in tenant.model_limits.items():
            model_path = f"{path}.model_limits.{model}"
            if model not in names.models:
                yield Problem(model_path, unknown_name("model", model, names.models))
            yield from named_limit_problems(limits, model_path)
