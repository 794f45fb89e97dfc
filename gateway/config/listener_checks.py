"""Checks of listeners and their surroundings: proxies, web origins, trace collectors."""

import re
from collections.abc import Iterable, Iterator
from ipaddress import ip_network

from gateway.config.problems import Problem
from gateway.config.schema import Config, host_and_port

# An origin as browsers send it, without a path or a trailing slash. A * may stand for a part of the host.
ORIGIN = re.compile(r"https?://[^/\s?#@]+")
ENDPOINT = re.compile(r"https?://[^/\s?#]+(/[^\s]*)?")


def listener_problems(config: Config) -> Iterator[Problem]:
    """Yield the problems of listeners, proxies, origins and tracing."""
    try:
        host_and_port(config.listen)
    except ValueError as error:
        yield Problem("listen", f"{config.listen!r}: {error}")
    yield from _admin_problems(config)
    yield from _grpc_problems(config)
    yield from _manager_problems(config)
    if config.tracing and not ENDPOINT.fullmatch(config.tracing.endpoint):
        yield Problem("tracing.endpoint", "not a URL, such as http://127.0.0.1:4318/v1/traces")
    for index, network in enumerate(config.trusted_proxies):
        if not _is_network(network):
            yield Problem(f"trusted_proxies[{index}]", "not an address or a network, such as 10.0.0.0/8")
    for index, origin in enumerate(config.cors.origins if config.cors else ()):
        if origin != "*" and not ORIGIN.fullmatch(origin):
            yield Problem(f"cors.origins[{index}]", "not an origin, such as https://app.example.org, or *")


def _admin_problems(config: Config) -> Iterator[Problem]:
    if config.admin.listen is None:
        return
    try:
        _, port = host_and_port(config.admin.listen)
    except ValueError as error:
        yield Problem("admin.listen", f"{config.admin.listen!r}: {error}")
        return
    if port and str(port) == config.listen.rpartition(":")[2].lstrip("0"):
        yield Problem("admin.listen", "needs a port of its own, other than that of `listen`")


def _grpc_problems(config: Config) -> Iterator[Problem]:
    if config.grpc is not None:
        others = (config.listen, config.admin.listen)
        names = "`listen` and `admin.listen`"
        yield from _own_port_problems("grpc.listen", config.grpc.listen, others, names)


def _manager_problems(config: Config) -> Iterator[Problem]:
    if config.manager is not None:
        grpc = None if config.grpc is None else config.grpc.listen
        others = (config.listen, config.admin.listen, grpc)
        names = "`listen`, `admin.listen` and `grpc.listen`"
        yield from _own_port_problems("manager.listen", config.manager.listen, others, names)


def _own_port_problems(path: str, listen: str, others: Iterable[str | None], names: str) -> Iterator[Problem]:
    """Yield the problems of an address whose port no other listener may have. names: of the others."""
    try:
        _, port = host_and_port(listen)
    except ValueError as error:
        yield Problem(path, f"{listen!r}: {error}")
        return
    if port and any(str(port) == other.rpartition(":")[2].lstrip("0") for other in others if other):
        yield Problem(path, f"needs a port of its own, other than those of {names}")


def _is_network(text: str) -> bool:
    try:
        ip_network(text)
    except ValueError:
        return False
    return True
