"""Checks between values: references that exist, and settings that fit each other. Reads no files."""

import re
from collections.abc import Collection, Iterable, Iterator
from urllib.parse import urlsplit

import msgspec

from backends.contract import TokenizerSettings
from backends.errors import ModelUnavailable
from backends.instructions import template_problem
from backends.torch.options import RerankPrompt
from backends.torch.rerank_template import written_template
from gateway.config.api_checks import (
    address_problem,
    api_problems,
    has_types,
    key_header_problems,
    metadata_problems,
)
from gateway.config.batch_checks import batch_problems
from gateway.config.command_checks import command_problems
from gateway.config.key_checks import key_problems, named_limit_problems
from gateway.config.listener_checks import listener_problems
from gateway.config.media_checks import media_problems
from gateway.config.problems import Problem, unknown_name
from gateway.config.schema import OPERATION_SEGMENTS, OWN_VOCABULARY, Config, ModelSettings, UpstreamSettings

STORE = re.compile(r"(rediss?|redis\+cluster)://[^/]|redis\+sentinel://[^/]+/[^/]+")
COMMIT = re.compile(r"[0-9a-f]{40}")
DEVICE = re.compile(r"(cpu|cuda|mps|xpu)(:[0-9]+)?")
STORES_ALLOWED = "memory, redis://host:port/db, rediss://host:port/db, redis+sentinel://h1,h2/name/db, redis+cluster://h1,h2"


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
    for name, upstream in config.upstreams.items():
        yield from upstream_problems(upstream, f"upstreams.{name}")
    for name, model in config.models.items():
        yield from model_problems(name, model, names.upstreams)
        upstream_of_model = config.upstreams.get(model.upstream)
        if model.prompts and upstream_of_model is not None and has_types(upstream_of_model):
            message = "the upstream's server puts its own prompts before texts, by `input_type`; remove them"
            yield Problem(f"models.{name}.prompts", message)
    for operation in ("embed", "rerank", "classify"):
        default = getattr(config.defaults, operation)
        if default is not None and default not in names.models:
            yield Problem(f"defaults.{operation}", unknown_name("model", default, names.models))
    if config.defaults.any_name and len(names.models) > 1:
        message = f"needs a file with one model, which serves every name; this one has {len(names.models)}"
        yield Problem("defaults.any_name", message)
    yield from _tenant_problems(config, names)


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
        if not upstream.devices:
            yield Problem(f"{path}.device", "is an empty list; name a device such as cuda:0, or leave it out")
        yield from (
            Problem(f"{path}.device", f"{device!r} is not a device; write cpu, mps, cuda or cuda:0")
            for device in sorted(set(filter(None, upstream.devices.values())))
            if not DEVICE.fullmatch(device)
        )
        yield from _prompt_problems(upstream, path)
        yield from _code_problems(upstream, path)
        return
    yield from _remote_problems(upstream, path)


def _prompt_problems(upstream: UpstreamSettings, path: str) -> Iterator[Problem]:
    if isinstance(upstream.rerank_template, RerankPrompt):
        try:
            written_template(upstream.rerank_template)
        except ModelUnavailable as error:
            yield Problem(f"{path}.rerank_template", str(error))


def model_problems(name: str, model: ModelSettings, upstreams: Collection[str]) -> Iterator[Problem]:
    """Yield the problems of one model whose types are right. upstreams: names that exist."""
    path = f"models.{name}"
    yield from named_limit_problems(model.limits, f"{path}.limits")
    if model.upstream not in upstreams:
        yield Problem(f"{path}.upstream", unknown_name("upstream", model.upstream, upstreams))
    if not name or name.strip("/") != name or "//" in name:
        yield Problem(path, "a name must not be empty, and must not begin or end with / or contain //")
    if name.rsplit("/", 1)[-1] in OPERATION_SEGMENTS | {"v1", "v2"}:
        yield Problem(
            path,
            "a name may not end in an operation, v1 or v2: /models/{name}/{operation} must be unambiguous",
        )


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
    yield from metadata_problems(upstream, path)


def _tokenizer_problems(upstream: UpstreamSettings, path: str) -> Iterator[Problem]:
    if upstream.tokenizer:
        return
    if upstream.token_encoding == OWN_VOCABULARY:
        yield Problem(path, "is missing; `token_encoding: model` decodes ids with it")
    if upstream.backend == "infinity":
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
        yield from _unknown_models(tenant.models or (), f"{path}.models", names.models)
        yield from named_limit_problems(tenant.limits, f"{path}.limits")
        for model, limits in tenant.model_limits.items():
            model_path = f"{path}.model_limits.{model}"
            if model not in names.models:
                yield Problem(model_path, unknown_name("model", model, names.models))
            yield from named_limit_problems(limits, model_path)


def _unknown_models(models: Iterable[str], path: str, known: Collection[str]) -> Iterator[Problem]:
    for index, model in enumerate(models):
        if model not in known:
            yield Problem(f"{path}[{index}]", unknown_name("model", model, known))
