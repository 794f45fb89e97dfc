"""Checks of an upstream's settings for OpenAI's API and its relatives, of addresses, headers and metadata."""

import re
from collections.abc import Iterator, Mapping
from urllib.parse import SplitResult, parse_qsl, urlsplit

import msgspec

from backends.openai.kind import OPENAI
from backends.openai.shapes import SHAPES, shape_of
from backends.tei.kind import GRPC_SCHEMES, TEI
from gateway.config.problems import Problem
from gateway.config.schema import Config, UpstreamSettings

API_KEYS = ("embeddings", "rerank", "input_type", "extra_body")
# Headers that belong to the framing of a request.
FRAMING = frozenset({"host", "content-length", "transfer-encoding", "connection", "upgrade", "te", "trailer"})
HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
METADATA_KEY = re.compile(r"[0-9a-z_.-]+")
UNSENDABLE = "has a line break or another character that a header cannot hold; printable ASCII is sent"
# Names of query parameters whose values are secrets, as providers call them.
SECRET_PARAMETER = re.compile(r"key|token|secret|password|sig|auth|credential|^code$", re.IGNORECASE)


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
    return msgspec.structs.replace(config, upstreams=upstreams, tracing=tracing)


def _trimmed(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: value.strip() for name, value in headers.items()}


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


def key_header_problems(upstream: UpstreamSettings, path: str) -> Iterator[Problem]:
    """Yield the problems of the header in which the key is sent."""
    name = upstream.api_key_header
    if name is None:
        return
    key_path = f"{path}.api_key_header"
    if upstream.is_hosted:
        yield Problem(key_path, "torch runs here; it is for remote backends")
    elif not HEADER_NAME.fullmatch(name):
        yield Problem(key_path, "a header's name has letters, digits and dashes")
    elif name.lower() in FRAMING:
        yield Problem(key_path, "belongs to the framing of a request; name another header")
    elif not upstream.api_key:
        yield Problem(key_path, "needs `api_key`, whose value is sent in this header")
    elif name.lower() in {header.lower() for header in upstream.headers}:
        yield Problem(key_path, "is in `headers` too; write it once")


def api_problems(upstream: UpstreamSettings, path: str) -> Iterator[Problem]:
    """Yield the problems of the settings for OpenAI's API and its relatives."""
    if (api := upstream.api) is None:
        for key in API_KEYS:
            if getattr(upstream, key) not in (None, {}):
                yield Problem(f"{path}.{key}", f"is for `backend: {', '.join(SHAPES)}`")
        return
    if upstream.backend != OPENAI.name and not upstream.model:
        yield Problem(f"{path}.model", "is missing; the API serves many models")
    yield from _route_problems(upstream, path)
    yield from _type_problems(upstream, path)
    shape = SHAPES[api.kind]
    for name in sorted(shape.own_fields.intersection(upstream.extra_body)):
        yield Problem(f"{path}.extra_body.{name}", "the gateway sets this field itself; remove it")


def _route_problems(upstream: UpstreamSettings, path: str) -> Iterator[Problem]:
    for key in ("embeddings", "rerank"):
        route = getattr(upstream, key)
        if route is not None and (not route.strip("/") or "://" in route or set("?# ").intersection(route)):
            yield Problem(f"{path}.{key}", "not a path, such as /v1/rerank")
    if upstream.backend == OPENAI.name and upstream.task == "rerank" and upstream.rerank is None:
        yield Problem(f"{path}.rerank", "is missing; `task: rerank` needs the path, such as /v1/rerank")


def _type_problems(upstream: UpstreamSettings, path: str) -> Iterator[Problem]:
    if not has_types(upstream):
        return
    for key in ("prompts", "instruction_template"):
        if getattr(upstream, key):
            message = "the server puts its own prompts before texts, by `input_type`; remove one of both"
            yield Problem(f"{path}.{key}", message)


def has_types(upstream: UpstreamSettings) -> bool:
    """Return True if the server is sent the type of its inputs."""
    return upstream.api is not None and bool(shape_of(upstream.api).input_type)
