"""Clients of vendors' APIs: through the proxy of the network, over HTTP/2 if it is installed.

Servers in the cluster are called by the own pool, to which the environment's proxy never applies.
"""

import importlib.util
from collections.abc import Callable
from ipaddress import ip_address, ip_network
from typing import TypeAlias
from urllib.request import getproxies, proxy_bypass

import httpx

from backends.contract import NO_PROXY, PROXY_SCHEMES, ReplicaSpec
from backends.contract.errors import ReplicaUnavailable
from backends.http.client import IDLE_S, Authorizer, ConnectionOptions, UpstreamClient
from backends.http.faults import CONNECT_TIMEOUT_S
from backends.http.httpx_transport import HttpxTransport
from backends.http.tls import tls_context

# Returns the client of a replica, with the credentials of each request, if they are not in its headers.
OpenClient: TypeAlias = Callable[[ReplicaSpec, Authorizer | None], UpstreamClient]
# Ports of addresses that name none, as NO_PROXY may name them.
PORTS = {"http": 80, "https": 443}
NO_ADDRESS = (
    "the environment's proxy for it is no address such as http://host:3128: set HTTPS_PROXY, HTTP_PROXY or "
    "ALL_PROXY, or `proxy` of the upstream"
)
# h2 is in the extra `egress`.
HAS_HTTP2 = importlib.util.find_spec("h2") is not None


def proxy_of(address: str, configured: str | None = None) -> str | None:
    """Return the URL of the proxy for an address, None for a direct connection.

    configured: `upstreams.<name>.proxy`. Without it HTTPS_PROXY, HTTP_PROXY, ALL_PROXY and NO_PROXY
    decide, as for httpx, curl and most programs.
    """
    if configured is not None:
        return None if configured == NO_PROXY else configured
    url, proxies = httpx.URL(address), getproxies()
    found = proxies.get(url.scheme) or proxies.get("all")
    host = url.host if url.port is None else f"{url.host}:{url.port}"
    if not found or proxy_bypass(host) or _is_exempt(url, proxies.get("no", "")):
        return None
    return found if "://" in found else f"http://{found}"


def identity_proxy(address: str, configured: str | None) -> str | None:
    """Return the proxy for an identity service, as `proxy_of`.

    Raises: ReplicaUnavailable, if it is no address.
    """
    proxy = proxy_of(address, configured)
    if proxy is not None and not _is_proxy(proxy):
        raise ReplicaUnavailable(NO_ADDRESS)
    return proxy


def proxy_passwords(configured: str | None) -> list[str]:
    """Return the passwords of the proxies that a library may use. configured: as in `proxy_of`."""
    urls = [configured] if configured is not None else getproxies().values()
    return [httpx.URL(url).password for url in urls if "@" in url and _is_proxy(url)]


def _is_exempt(url: httpx.URL, entries: str) -> bool:
    """Return True if NO_PROXY exempts an address in a form that urllib does not know.

    These are networks, addresses of IPv6 in brackets, `*` in a list, `*.example.com`, and the port that a
    scheme implies.
    """
    port = url.port or PORTS.get(url.scheme)
    return any(_exempts(entry.strip().lower(), url.host, port) for entry in entries.split(","))


def _exempts(entry: str, host: str, port: int | None) -> bool:
    name, _, named_port = entry.rpartition(":")
    if named_port.isdecimal() and (name.endswith("]") or ":" not in name):
        if named_port != str(port):
            return False
        entry = name
    if entry == "*":
        return True
    entry = entry.strip("[]")
    try:
        network = ip_network(entry, strict=False)
    except ValueError:
        suffix = entry.removeprefix("*").lstrip(".")
        return bool(suffix) and (host == suffix or host.endswith(f".{suffix}"))
    try:
        return ip_address(host) in network
    except ValueError:
        return False


def open_egress(
    spec: ReplicaSpec, authorizer: Authorizer | None = None, idle_s: float = IDLE_S
) -> UpstreamClient:
    """Return a client of a vendor's API; it connects on its first request.

    authorizer: adds the credentials of each request, None if they are in `spec.headers`.
    """
    proxy = proxy_of(spec.address, spec.proxy)
    is_usable = proxy is None or _is_proxy(proxy)
    used = proxy if is_usable else None
    options = ConnectionOptions(tls=spec.tls, idle_s=idle_s, report=spec.report, proxy=used)

    def open_transport() -> httpx.AsyncBaseTransport:
        if not is_usable:
            raise ReplicaUnavailable(NO_ADDRESS)
        limits = httpx.Limits(keepalive_expiry=idle_s)
        return httpx.AsyncHTTPTransport(
            tls_context(spec.tls, "httpx"),
            http2=HAS_HTTP2,
            limits=limits,
            proxy=None if used is None else _proxy(used, spec),
        )

    transport = HttpxTransport(open_transport, CONNECT_TIMEOUT_S, spec.report)
    return UpstreamClient(spec.address, spec.headers, options, transport=transport, authorizer=authorizer)


def _is_proxy(url: str) -> bool:
    """Return whether a URL could be that of a proxy; the environment may have any text in its place."""
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL:
        return False
    return parsed.scheme in PROXY_SCHEMES and bool(parsed.host)


def _proxy(url: str, spec: ReplicaSpec) -> httpx.Proxy:
    is_tls = httpx.URL(url).scheme == "https"
    return httpx.Proxy(url, ssl_context=tls_context(spec.tls, "proxy") if is_tls else None)
