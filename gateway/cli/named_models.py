"""Configuration of `gateway serve MODEL|URL ...`: a router.yaml from names alone.

The kind of a server behind a URL is found by the paths that only it answers.
"""

import argparse
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import cache, partial
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from socket import gaierror
from threading import Thread
from typing import Any, NamedTuple
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import ProxyHandler, Request, build_opener

import msgspec.yaml

from backends.contract import BackendKind
from backends.kinds import KINDS
from backends.tei.kind import GRPC_SCHEMES, TEI
from backends.torch.kind import ENGINE
from gateway.cli.gateway_client import RequestRefused
from gateway.cli.operator_options import checked_key

PROBE_TIMEOUT_S = 5.0
REPLY_BYTES_MAX, READ_BYTES = 4 * 1024 * 1024, 64 * 1024
# Statuses of a server that wants a key, or another one.
KEY_STATUSES = (401, 403)
# No hub id has a colon.
HOST_AND_PORT = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9.-]+):\d{1,5}(/.*)?")
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
HEADING = """\
# Written by `gateway serve`. Save it as router.yaml and change it; docs/configuration.md describes all keys.
"""


class UnusableModel(Exception):
    """A name or an address that cannot be served. The message is for a person."""


class Server(NamedTuple):
    """Server behind a URL. models: the names that it serves, none if it does not name its only one."""

    backend: BackendKind
    models: tuple[str, ...]


class FoundModels(NamedTuple):
    """Models of a server. models: None if it is of another kind. refusals: paths that want another key."""

    models: tuple[str, ...] | None
    refusals: list[str]


class ServerKey(NamedTuple):
    """Key of the servers behind the URLs, in a variable of the environment."""

    variable: str
    value: str


Probe = Callable[[str], Server]

# Directly, as the gateway itself connects to its upstreams.
_open = build_opener(ProxyHandler({})).open


def add_server_key_option(parser: argparse.ArgumentParser) -> None:
    """Add the option of the key that the named servers want."""
    parser.add_argument(
        "--upstream-key-env",
        metavar="NAME",
        help="variable with the key of the servers; it is sent to each URL, and the configuration has "
        "`api_key: ${NAME}`",
    )


def server_key(options: argparse.Namespace, environment: Mapping[str, str]) -> ServerKey | None:
    """Return the key of the servers, None if no variable is named. Raises: UnusableModel."""
    variable: str | None = options.upstream_key_env
    if variable is None:
        return None
    if not VARIABLE.fullmatch(variable):
        raise UnusableModel("--upstream-key-env: give the name of a variable, and not the key itself")
    try:
        value = checked_key(environment.get(variable, ""), variable)
    except RequestRefused as error:
        raise UnusableModel(f"--upstream-key-env: {error}") from error
    if value is None:
        raise UnusableModel(f"--upstream-key-env: the variable {variable} is not set")
    return ServerKey(variable, value)


def is_url(name: str) -> bool:
    """Return whether a name is the address of a server."""
    return name.startswith(("http://", "https://", *GRPC_SCHEMES))


def config_of(
    names: Sequence[str], listen: str, probe: Probe | None = None, key: ServerKey | None = None
) -> str:
    """Return the text of a router.yaml that serves hub ids, folders and servers. listen: HOST:PORT.

    Raises: UnusableModel.
    """
    return HEADING + msgspec.yaml.encode({"listen": listen, **sections_of(names, probe, key)}).decode()


def sections_of(
    names: Sequence[str], probe: Probe | None = None, key: ServerKey | None = None
) -> dict[str, dict[str, Any]]:
    """Return the sections `upstreams`, `models` and, for one upstream, `defaults`.

    key: of the servers behind URLs, which is sent to each. Raises: UnusableModel.
    """
    ask = probe or partial(probe_server, key=key)
    upstreams: dict[str, dict[str, Any]] = {}
    models: dict[str, dict[str, Any]] = {}
    for name in names:
        for public, settings in _upstreams_of(name, ask, key):
            upstream = re.sub(r"[^A-Za-z0-9._-]+", "-", public.rsplit("/", 1)[-1]) or "model"
            if next(iter(_names_of(upstream, models)), None) == public and _joins(
                upstreams[upstream], settings
            ):
                continue
            if upstream in upstreams or public in models:
                raise UnusableModel(f"two models are called {public!r}: write a router.yaml with other names")
            upstreams[upstream] = settings
            models[public] = {"upstream": upstream}
            models.setdefault(public.rsplit("/", 1)[-1], {"upstream": upstream})
    sections: dict[str, dict[str, Any]] = {"upstreams": upstreams, "models": models}
    if len(upstreams) == 1:
        # For requests that name no model, as those of TEI's clients.
        sections["defaults"] = dict.fromkeys(("embed", "rerank"), next(iter(models)))
    return sections


def _names_of(upstream: str, models: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Return the public names of an upstream, that of its server first."""
    return [name for name, model in models.items() if model["upstream"] == upstream]


def _joins(upstream: dict[str, Any], settings: Mapping[str, Any]) -> bool:
    """Add the server of some settings to an upstream; return False if these differ in anything else."""
    replicas = upstream.get("replicas", [])
    if not replicas or upstream != {**settings, "replicas": replicas}:
        return False
    replicas += [url for url in settings["replicas"] if url not in replicas]
    return True


def _upstreams_of(name: str, probe: Probe, key: ServerKey | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the public name of each model and the settings of its upstream. Raises: UnusableModel."""
    if not is_url(name):
        yield _engine_of(name)
        return
    url = name.rstrip("/")
    if url.startswith(GRPC_SCHEMES):
        yield urlsplit(url).hostname or TEI.name, {"backend": TEI.name, "replicas": [url]}
        return
    server = probe(url)
    _check_names(url, server.models)
    base = url.removesuffix("/v1")
    for model in server.models or (urlsplit(url).hostname or "model",):
        settings: dict[str, Any] = {"backend": server.backend, "replicas": [base]}
        if key is not None:
            settings["api_key"] = f"${{{key.variable}}}"
        kind = KINDS[server.backend]
        # Other names of the one model of a server are no settings.
        if server.models and kind.is_multiple:
            settings["model"] = model
        if kind.needs_tokenizer:
            # Its name of a model is usually the hub id.
            settings["tokenizer"] = model
        yield model, settings


def _engine_of(name: str) -> tuple[str, dict[str, Any]]:
    """Return the public name and the upstream of a model for the engine. Raises: UnusableModel."""
    if HOST_AND_PORT.fullmatch(name):
        raise UnusableModel(f"{name}: did you mean http://{name}?")
    path = Path(name).expanduser()
    is_folder = path.is_dir()
    if not is_folder and (name.startswith((".", "/", "~")) or name.count("/") > 1):
        raise UnusableModel(f"{name}: there is no such folder")
    public = path.resolve().name if is_folder else name
    return public, {"backend": ENGINE.name, "model": str(path.resolve()) if is_folder else name}


def _check_names(url: str, models: Sequence[str]) -> None:
    """Check the names that a server has given. Raises: UnusableModel.

    A placeholder would become a secret of this machine, which the gateway would send to that server.
    """
    for model in models:
        if not model.isprintable() or "${" in model:
            raise UnusableModel(f"{url}: its name of a model, {model[:80]!r}, cannot be used")


def probe_server(url: str, key: ServerKey | None = None) -> Server:
    """Return the kind of a server and its models. Raises: UnusableModel with what was asked."""
    base = url.rstrip("/").removesuffix("/v1")
    refused: list[str] = []

    # Several kinds ask for the same path.
    answer = cache(partial(_answer, base, key, refused))
    for kind in KINDS.values():
        if kind.recognize is not None and (models := kind.recognize(answer)) is not None:
            return Server(kind.name, models)
    if refused:
        raise UnusableModel(f"{url}: {_key_words(key)} ({', '.join(refused)})")
    raise UnusableModel(
        f"{url}: no TEI, vLLM, Infinity or OpenAI-compatible server answers there (asked: /info, /v1/models, "
        "/version, /models)"
    )


def models_at(url: str, backend: BackendKind, key: ServerKey | None = None) -> FoundModels:
    """Return the models of a server if it is of that kind. Raises: UnusableModel if none answers."""
    recognize, refusals = KINDS[backend].recognize, list[str]()
    answer = cache(partial(_answer, url.rstrip("/").removesuffix("/v1"), key, refusals))
    return FoundModels(None if recognize is None else recognize(answer), refusals)


def is_grpc(url: str) -> bool:
    """Return whether a server is called over gRPC."""
    return url.startswith(GRPC_SCHEMES)


def _answer(base: str, key: ServerKey | None, refused: list[str], path: str) -> Any:
    """Return the JSON at a path, None if there is none; add a path that wants a key to `refused`.

    Raises: UnusableModel if no server answers.
    """
    try:
        return json.loads(_fetched(base + path, key))
    except HTTPError as error:
        if error.code in KEY_STATUSES:
            refused.append(f"{error.code} at {path}")
        return None
    except (RecursionError, ValueError):
        return None
    except (HTTPException, OSError) as error:
        raise UnusableModel(f"{base}: {_reason(getattr(error, 'reason', error))}") from error


def _key_words(key: ServerKey | None) -> str:
    if key is not None:
        return f"the server refuses the key in {key.variable}"
    return (
        "the server wants a key; put the key into a variable and pass the name of the variable with "
        "--upstream-key-env"
    )


def _fetched(url: str, key: ServerKey | None) -> bytes:
    """Return the body at a URL.

    The thread is given up when a probe's time is over: the socket's timeout bounds each read alone, and a
    server may send its headers byte by byte. Raises: TimeoutError; HTTPError if the status is an error's.
    """
    exchange: Future[bytes] = Future()
    request = Request(url)  # noqa: S310 - the caller has checked the scheme
    if key is not None:
        # Not sent again where a server redirects to.
        request.add_unredirected_header("Authorization", f"Bearer {key.value}")

    def fetch() -> None:
        try:
            with _open(request, timeout=PROBE_TIMEOUT_S) as reply:
                exchange.set_result(_body_of(reply))
        except HTTPError as error:
            error.close()
            exchange.set_exception(error)
        except Exception as error:  # noqa: BLE001 - it is raised again in the caller's thread
            exchange.set_exception(error)

    Thread(target=fetch, name="probe", daemon=True).start()
    return exchange.result(PROBE_TIMEOUT_S)


def _body_of(reply: HTTPResponse) -> bytes:
    """Read a body as it arrives, up to a bound. Raises: TimeoutError if it takes longer than a probe may."""
    body, end_s = bytearray(), time.monotonic() + PROBE_TIMEOUT_S
    while len(body) < REPLY_BYTES_MAX and (chunk := reply.read1(READ_BYTES)):
        body += chunk
        if time.monotonic() > end_s:
            raise TimeoutError
    return bytes(body)


def _reason(cause: object) -> str:
    match cause:
        case HTTPException():
            return "no HTTP server answers there"
        case ConnectionRefusedError():
            return "nothing listens at its port; start the server first, or correct the address"
        case gaierror():
            return "its host name cannot be resolved; correct the address"
        case TimeoutError():
            return f"no answer within {PROBE_TIMEOUT_S:.0f} s"
        case _:
            return str(cause) or type(cause).__name__
