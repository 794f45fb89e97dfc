"""Checks of upstreams, and of the models that refer to them. Reads no files."""

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any
from urllib.parse import SplitResult, parse_qsl, urlsplit

import msgspec

from backends.contract import NO_PROXY, PROXY_SCHEMES, TokenizerSettings
from backends.contract.errors import ModelUnavailable
from backends.infinity.kind import INFINITY
from backends.instructions import template_problem
from backends.kinds import KINDS
from backends.openai.settings import ApiSettings
from backends.openai.vendors import shape_of
from backends.recipe.options import RerankPrompt
from backends.recipe.rerank_template import written_template
from backends.tei.kind import GRPC_SCHEMES, TEI
from gateway.config.access_checks import CURRENCY_MEANING
from gateway.config.money import is_budget, token_price
from gateway.config.problems import Problem, unknown_name
from gateway.config.schema import (
    COMMIT,
    KINDS_OF_KEYS,
    OPERATION_SEGMENTS,
    OWN_VOCABULARY,
    Config,
    LimitAmount,
    ModelSettings,
    UpstreamSettings,
    foreign_keys,
    limit_problems,
    shared_limit_problems,
)

# Keys that are wrong for other kinds of server. Those that are not here have no effect there.
OF_ONE_KIND: dict[str, str] = {
    kind.name: f"is for `backend: {kind.name}`" for kind in KINDS.values() if kind.settings is not None
}
FOREIGN = {
    **{
        key: f"is for `backend: {', '.join(KINDS_OF_KEYS[key])}`"
        for key in ("embeddings", "rerank", "input_type", "extra_body")
    },
    **dict.fromkeys(("adapter", "rerank_template"), "the remote server has its own; this is for torch"),
    "vendor": "is for `backend: openai`",
    **OF_ONE_KIND,
    "proxy": "is for APIs of vendors: servers in the cluster, and the built-in engine, are called directly",
    "api_key_header": "torch runs here; it is for remote backends",
    "replicas": "torch runs here; replicas are for remote backends",
    "drained": "torch runs here and is not drained; this is for remote backends",
}
# Headers that belong to the framing of a request.
FRAMING = frozenset({"host", "content-length", "transfer-encoding", "connection", "upgrade", "te", "trailer"})
HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
METADATA_KEY = re.compile(r"[0-9a-z_.-]+")
UNSENDABLE = "has a line break or another character that a header cannot hold; printable ASCII is sent"
# Names of query parameters whose values are secrets, as providers call them.
SECRET_PARAMETER = re.compile(r"key|token|secret|password|sig|auth|credential|^code$", re.IGNORECASE)
DEVICE = re.compile(r"(cpu|cuda|mps|xpu)(:[0-9]+)?")
NOT_LOADED = (
    "its vectors are compared before it serves a model that has several upstreams; remove `preload: false`"
)
# Text that an upstream's server puts before inputs by itself.
OWN_PROMPTS = "puts its own prompts before texts, by `input_type`"


def upstream_problems(upstream: UpstreamSettings, path: str) -> Iterator[Problem]:
    """Yield the problems of one upstream whose types are right."""
    template = upstream.instruction_template
    if template is not None and (problem := template_problem(template)):
        yield Problem(f"{path}.instruction_template", problem)
    yield from _limit_problems(upstream.limits, f"{path}.limits")
    for key in foreign_keys(upstream):
        if key in FOREIGN:
            yield Problem(f"{path}.{key}", FOREIGN[key])
    if upstream.is_local:
        yield from _engine_problems(upstream, path)
        return
    yield from _key_header_problems(upstream, path)
    yield from _vendor_problems(upstream, path)
    if (api := upstream.api) is not None:
        yield from _api_problems(upstream, api, path)
    yield from _remote_problems(upstream, path)


def _limit_problems(limits: Mapping[str, LimitAmount], path: str) -> Iterator[Problem]:
    """Yield the problems of the limits of an upstream's account."""
    budgets = {name: "prices are those of models: limit tokens" for name in limits if is_budget(name)}
    problems = limit_problems(limits) | shared_limit_problems(limits, "upstreams") | budgets
    return (Problem(f"{path}.{name}", message) for name, message in problems.items())


def _engine_problems(upstream: UpstreamSettings, path: str) -> Iterator[Problem]:
    """Yield the problems of an upstream of the built-in engine."""
    if not upstream.model:
        yield Problem(f"{path}.model", "is missing; a hub id or the path of a checkpoint")
    if not upstream.devices:
        yield Problem(f"{path}.device", "is an empty list; name a device such as cuda:0, or leave it out")
    yield from (
        Problem(f"{path}.device", f"{device!r} is not a device; write cpu, mps, cuda or cuda:0")
        for device in sorted(set(filter(None, upstream.devices.values())))
        if not DEVICE.fullmatch(device)
    )
    yield from _runtime_problems(upstream, path)
    if isinstance(upstream.rerank_template, RerankPrompt):
        try:
            written_template(upstream.rerank_template)
        except ModelUnavailable as error:
            yield Problem(f"{path}.rerank_template", str(error))
    if upstream.code_revision is not None and not COMMIT.fullmatch(upstream.code_revision):
        # A branch or a tag can move to other code.
        yield Problem(f"{path}.code_revision", "is no commit; write its 40 hexadecimal digits")
    elif upstream.code_revision is not None and not upstream.trust_remote_code:
        yield Problem(f"{path}.code_revision", "needs `trust_remote_code: true`")


def _runtime_problems(upstream: UpstreamSettings, path: str) -> Iterator[Problem]:
    if upstream.runtime != "openvino":
        return
    if upstream.dtype not in {None, "float32", "bfloat16"}:
        yield Problem(f"{path}.runtime", f"openvino computes in float32 or bfloat16, not {upstream.dtype}")
    others = {device for device in upstream.devices.values() if device and not device.startswith("cpu")}
    if others:
        yield Problem(f"{path}.runtime", f"openvino computes on a CPU, not on {', '.join(sorted(others))}")


def _remote_problems(upstream: UpstreamSettings, path: str) -> Iterator[Problem]:
    if not upstream.replicas:
        kind = KINDS[upstream.backend]
        yield Problem(f"{path}.{kind.address_key}", f"is missing; {kind.address_hint}")
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


def address_problem(url: str, upstream: UpstreamSettings) -> str | None:
    """Return the problem of one base URL, None if it is valid."""
    # The URL parser leaves such characters out, and a request would not.
    if not url.isprintable() or " " in url:
        return "a line break, a space or another character that no URL has"
    # Not left to the URL parser: a / or # inside a password would make it a different URL. Logs, metrics and
    # events name a replica by its URL, and would show the password.
    if "@" in url:
        return "a user or password; write them as `api_key` or `headers`"
    if has_secret_parameter(url):
        return "a secret in the query string; write it as `api_key`, and its header as `api_key_header`"
    try:
        parts = urlsplit(url)
        if url.startswith(GRPC_SCHEMES):
            return _grpc_address_problem(parts, upstream)
        is_base = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        is_whole = not parts.fragment and not (parts.query and upstream.api is None)
    except ValueError:
        is_base = is_whole = False
    return None if is_base and is_whole else "not a base URL, http://host:port"


def _grpc_address_problem(parts: SplitResult, upstream: UpstreamSettings) -> str | None:
    """Return the problem of an address for gRPC. Raises: ValueError, if its port is none."""
    if upstream.backend != TEI.name:
        return "gRPC is for `backend: tei`; write the server's base URL, http://host:port"
    is_whole = bool(parts.hostname) and bool(parts.port) and not (parts.path or parts.query or parts.fragment)
    return None if is_whole else f"not an address for gRPC, {parts.scheme}://host:port"


def header_problems(headers: Mapping[str, str], path: str) -> Iterator[Problem]:
    """Yield the problems of headers that a request cannot have. The messages leave the values out."""
    for name, value in headers.items():
        if not HEADER_NAME.fullmatch(name):
            yield Problem(path, f"{name!r}: a header's name has letters, digits and dashes")
        elif not _is_sendable(value):
            yield Problem(f"{path}.{name}", UNSENDABLE)


def sent_problems(upstream: UpstreamSettings, path: str) -> Iterator[Problem]:
    """Yield the problems of the key and of headers that are sent to a server."""
    if is_grpc(upstream):
        yield from _metadata_problems(upstream, path)
        return
    if not _is_sendable(upstream.api_key):
        yield Problem(f"{path}.api_key", UNSENDABLE)
    yield from header_problems(upstream.headers, f"{path}.headers")


def _metadata_problems(upstream: UpstreamSettings, path: str) -> Iterator[Problem]:
    """Yield the problems of headers and names that gRPC cannot send as metadata."""
    for name, value in upstream.headers.items():
        lower = name.lower()
        if not METADATA_KEY.fullmatch(lower) or lower.startswith("grpc-") or lower.endswith("-bin"):
            message = (
                "gRPC's metadata cannot have this name; use letters, digits, dashes, no `grpc-` or `-bin`"
            )
            yield Problem(f"{path}.headers.{name}", message)
        elif not _is_sendable(value):
            yield Problem(f"{path}.headers.{name}", "gRPC sends printable ASCII only")
    for key in ("model", "api_key"):
        if not _is_sendable(getattr(upstream, key) or ""):
            yield Problem(f"{path}.{key}", "gRPC sends printable ASCII only")


def is_grpc(upstream: UpstreamSettings) -> bool:
    """Return True if a replica is called over gRPC."""
    return any(url.startswith(GRPC_SCHEMES) for url in upstream.replicas)


def _is_sendable(value: str) -> bool:
    return value.isascii() and value.isprintable()


def has_secret_parameter(url: str) -> bool:
    """Return True if the name of a query parameter says that its value is a secret."""
    _, _, query = url.partition("?")
    return any(SECRET_PARAMETER.search(name) for name, _ in parse_qsl(query, keep_blank_values=True))


def _key_header_problems(upstream: UpstreamSettings, path: str) -> Iterator[Problem]:
    """Yield the problems of the header in which the key is sent."""
    name = upstream.api_key_header
    if name is None:
        return
    key_path = f"{path}.api_key_header"
    if not HEADER_NAME.fullmatch(name):
        yield Problem(key_path, "a header's name has letters, digits and dashes")
    elif name.lower() in FRAMING:
        yield Problem(key_path, "belongs to the framing of a request; name another header")
    elif not upstream.api_key:
        yield Problem(key_path, "needs `api_key`, whose value is sent in this header")
    elif name.lower() in {header.lower() for header in upstream.headers}:
        yield Problem(key_path, "is in `headers` too; write it once")


def _vendor_problems(upstream: UpstreamSettings, path: str) -> Iterator[Problem]:
    """Yield the problems of the settings for APIs of vendors, and of the proxy to them."""
    kind = KINDS[upstream.backend]
    if upstream.is_vendor and not upstream.model:
        yield Problem(f"{path}.model", f"is missing; {kind.model_hint}")
    if (settings := upstream.kind_settings) is not None:
        for key, message in settings.problems():
            yield Problem(f"{path}.{kind.name}.{key}", message)
    if upstream.discover is not None and (upstream.is_vendor or upstream.proxy not in {None, NO_PROXY}):
        yield Problem(f"{path}.discover", "is for servers that are called directly; remove it")
    if upstream.proxy is not None and (problem := proxy_problem(upstream.proxy)):
        yield Problem(f"{path}.proxy", problem)


def proxy_problem(url: str) -> str | None:
    """Return the problem of a proxy's URL, None if it is valid. The message leaves out the URL."""
    if url == NO_PROXY:
        return None
    try:
        parts = urlsplit(url)
        is_proxy = parts.scheme in PROXY_SCHEMES and bool(parts.hostname) and parts.port != 0
        is_whole = parts.path in {"", "/"} and not (parts.query or parts.fragment)
    except ValueError:
        is_proxy = is_whole = False
    if is_proxy and is_whole and url.isprintable() and " " not in url:
        return None
    return (
        f"not the address of a proxy, http://host:port, or {NO_PROXY}; schemes: {', '.join(PROXY_SCHEMES)}; "
        "a password with other characters than letters and digits is written `${url:NAME}`"
    )


def _api_problems(upstream: UpstreamSettings, api: ApiSettings, path: str) -> Iterator[Problem]:
    """Yield the problems of the settings for OpenAI's API and its relatives."""
    shape = shape_of(api, upstream.model, next(iter(upstream.replicas), ""))
    for key in ("embeddings", "rerank"):
        route = getattr(upstream, key)
        if route is not None and (not route.strip("/") or "://" in route or set("?# ").intersection(route)):
            yield Problem(f"{path}.{key}", "not a path, such as /v1/rerank")
    if upstream.task == "rerank" and shape.rerank is None:
        yield Problem(f"{path}.rerank", "is missing; `task: rerank` needs the path, such as /v1/rerank")
    for key in ("prompts", "instruction_template"):
        if getattr(upstream, key) and _has_types(upstream):
            yield Problem(f"{path}.{key}", f"the server {OWN_PROMPTS}; remove one of both")
    for name in sorted(shape.own_fields.intersection(upstream.extra_body)):
        yield Problem(f"{path}.extra_body.{name}", "the gateway sets this field itself; remove it")


def _has_types(upstream: UpstreamSettings) -> bool:
    """Return True if the server is sent the type of its inputs."""
    return upstream.api is not None and bool(shape_of(upstream.api).input_type)


def trim_headers(config: Config) -> Config:
    """Return the config without space around the keys and the values of headers that it sends."""
    upstreams = {
        name: msgspec.structs.replace(
            upstream, api_key=upstream.api_key.strip(), headers=_trimmed(upstream.headers)
        )
        for name, upstream in config.upstreams.items()
    }
    tracing = config.tracing and msgspec.structs.replace(
        config.tracing, headers=_trimmed(config.tracing.headers)
    )
    metrics = config.metrics and msgspec.structs.replace(
        config.metrics, headers=_trimmed(config.metrics.headers)
    )
    return msgspec.structs.replace(config, upstreams=upstreams, tracing=tracing, metrics=metrics)


def _trimmed(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: value.strip() for name, value in headers.items()}


def currency_problem(name: str, model: ModelSettings, currency: str | None) -> Problem | None:
    """Return the problem of a model with a price in no currency."""
    if not model.price_per_million_tokens or currency is not None:
        return None
    return Problem(f"models.{name}.price_per_million_tokens", f"needs `currency`, {CURRENCY_MEANING}")


def model_problems(name: str, model: ModelSettings, upstreams: Collection[str]) -> Iterator[Problem]:
    """Yield the problems of one model whose types are right, but for its limits. upstreams: that exist."""
    path = f"models.{name}"
    try:
        token_price(model.price_per_million_tokens or 0)
    except ValueError as error:
        yield Problem(f"{path}.price_per_million_tokens", str(error))
    yield from _reference_problems(model, path, upstreams)
    yield from _member_problems(model, path)
    if not name or name.strip("/") != name or "//" in name:
        yield Problem(path, "a name must not be empty, and must not begin or end with / or contain //")
    if name.rsplit("/", 1)[-1] in OPERATION_SEGMENTS | {"v1", "v2"}:
        yield Problem(
            path,
            "a name may not end in an operation, v1 or v2: /models/{name}/{operation} must be unambiguous",
        )


def model_upstream_problems(
    name: str, model: ModelSettings, upstreams: Mapping[str, UpstreamSettings]
) -> Iterator[Problem]:
    """Yield the problems of a model with the settings of its upstreams. upstreams: those that are sound."""
    for path, upstream in _references(model, f"models.{name}"):
        settings = upstreams.get(upstream)
        if settings is None:
            continue
        if model.prompts and _has_types(settings):
            yield Problem(f"models.{name}.prompts", f"the upstream's server {OWN_PROMPTS}; remove them")
        if model.is_group and settings.is_local and not settings.preload:
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
