"""Addresses of pictures: which of them may be fetched. Pure; a refusal is a ValueError with its reason.

Rule: an address has one meaning here, at resolvers and at servers. What some of them read differently, such
as octal IPv4, backslashes or user names, is refused.
"""

import re
from collections.abc import Collection, Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import TypeAlias
from urllib.parse import urljoin, urlsplit

import msgspec

from gateway.config.schema import FetchSettings

IpAddress: TypeAlias = IPv4Address | IPv6Address
IpNetwork: TypeAlias = IPv4Network | IPv6Network

ADDRESS_CHARACTERS_MAX = 2048
PORTS = {"https": 443, "http": 80}
# Printable ASCII without the characters that RFC 3986 has no place for.
WRITTEN = re.compile(r"[!#-;=?@A-Z\[\]_a-z~]+")
NAME = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?<!-)(\.(?!-)[a-z0-9_-]{1,63}(?<!-))*")
# A last label that resolvers may read as a number makes the whole name an IPv4 address.
NUMBER = re.compile(r"(.*\.)?([0-9]+|0x[0-9a-f]*)")

# Source: IANA's registries of special-purpose addresses, 2025, and Azure's metadata server at 168.63.129.16.
IPV4_REFUSED = tuple(
    map(
        IPv4Network,
        (
            "0.0.0.0/8",
            "10.0.0.0/8",
            "100.64.0.0/10",
            "127.0.0.0/8",
            "168.63.129.16/32",
            "169.254.0.0/16",
            "172.16.0.0/12",
            "192.0.0.0/24",
            "192.0.2.0/24",
            "192.88.99.0/24",
            "192.168.0.0/16",
            "198.18.0.0/15",
            "198.51.100.0/24",
            "203.0.113.0/24",
            "224.0.0.0/3",
        ),
    )
)
# The one block of public addresses, and its parts that are none: Teredo, documentation, 6to4.
IPV6_PUBLIC = IPv6Network("2000::/3")
IPV6_REFUSED = tuple(map(IPv6Network, ("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20")))


class Target(msgspec.Struct, frozen=True):
    """Address of one request, in parts. path: with its query, without a fragment."""

    scheme: str
    host: str
    port: int
    path: str

    @property
    def authority(self) -> str:
        """Value of the `host` header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == PORTS[self.scheme] else f"{host}:{self.port}"

    @property
    def url(self) -> str:
        """The whole address, which a redirect may be relative to."""
        return f"{self.scheme}://{self.authority}{self.path}"


class FetchRules(msgspec.Struct, frozen=True):
    """Addresses that may be fetched, from `media.fetch`. private: networks allowed besides public ones."""

    schemes: frozenset[str]
    hosts: tuple[str, ...]
    ports: frozenset[int]
    private: tuple[IpNetwork, ...] = ()


def rules_of(settings: FetchSettings) -> FetchRules:
    """Return the rules of checked settings. Raises: ValueError, if a network is none."""
    ports = settings.ports or tuple(PORTS[scheme] for scheme in settings.schemes)
    hosts = tuple(host.lower().rstrip(".") for host in settings.hosts)
    private = tuple(ip_network(network) for network in settings.private)
    return FetchRules(frozenset(settings.schemes), hosts, frozenset(ports), private)


def target_of(url: str, rules: FetchRules) -> Target:
    """Return the parts of an address that may be fetched. Raises: ValueError with the reason."""
    if len(url) > ADDRESS_CHARACTERS_MAX:
        raise ValueError(f"its address has more than {ADDRESS_CHARACTERS_MAX} characters")
    if not WRITTEN.fullmatch(url):
        raise ValueError("its address has characters that a URL has not; percent-encode them")
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise ValueError("its address is not a URL") from error
    if parts.scheme not in rules.schemes:
        raise ValueError(f"its address is not of {_listed(rules.schemes)}; `media.fetch.schemes` lists these")
    if "@" in parts.netloc:
        raise ValueError("its address has a user name; send an address without credentials")
    host, port = _origin_of(parts.netloc, parts.scheme)
    if port not in rules.ports:
        raise ValueError("its address has a port that `media.fetch.ports` does not list")
    if not is_listed(host, rules.hosts):
        raise ValueError("its address has a host that `media.fetch.hosts` does not list")
    query = f"?{parts.query}" if parts.query else ""
    return Target(parts.scheme, host, port, (parts.path or "/") + query)


def redirected(target: Target, location: str, rules: FetchRules) -> Target:
    """Return where a redirect leads. Raises: ValueError with the reason."""
    if not location:
        raise ValueError("it was moved, and the reply has no location")
    try:
        following = target_of(_joined(target.url, location), rules)
    except ValueError as error:
        raise ValueError(f"it was moved, and {error}") from error
    if target.scheme == "https" and following.scheme != "https":
        raise ValueError("it was moved from https to http, which is not followed")
    return following


def _joined(base: str, location: str) -> str:
    try:
        return urljoin(base, location)
    except ValueError as error:
        raise ValueError("its address is not a URL") from error


def is_listed(host: str, listed: Collection[str]) -> bool:
    """Return whether a host is in a list of names, of IP addresses, and of `*.example.org` for all below.

    A single * stands for every name, and for no IP address.
    """
    if host in listed:
        return True
    if _ip_of(host) is not None:
        return False
    return any(name == "*" or (name.startswith("*.") and host.endswith(name[1:])) for name in listed)


def check_ips(found: Sequence[str], private: Sequence[IpNetwork]) -> None:
    """Check every address that a host's name stands for. Raises: ValueError.

    The message contains no address: what a name stands for inside a network is nothing for callers.
    """
    if not found:
        raise ValueError("its host has no IP address")
    for text in found:
        ip = _ip_of(text)
        if ip is None or not (is_public(ip) or any(ip in network for network in private)):
            raise ValueError("its host is not public; `media.fetch.private` lists the networks besides")


def is_public(ip: IpAddress) -> bool:
    """Return whether an address is public.

    IPv6 addresses that contain an IPv4 one (mapped, NAT64, 6to4, Teredo) are not: they lead where that leads.
    """
    if isinstance(ip, IPv4Address):
        return not any(ip in network for network in IPV4_REFUSED)
    return ip in IPV6_PUBLIC and not any(ip in network for network in IPV6_REFUSED)


def _origin_of(netloc: str, scheme: str) -> tuple[str, int]:
    """Return the host in lower case, and the port. Raises: ValueError."""
    matched = re.fullmatch(r"(?:\[([^\[\]]*)\]|([^\[\]:]*))(?::([0-9]{1,5}))?", netloc.lower())
    if matched is None:
        raise ValueError("its address has no valid host and port")
    ipv6, name, port = matched.groups()
    host = _name_of(name) if ipv6 is None else _ipv6_of(ipv6)
    return host, PORTS[scheme] if port is None else int(port)


def _ipv6_of(text: str) -> str:
    """Return an IPv6 address in its usual form. Raises: ValueError."""
    ip = _ip_of(text)
    if not isinstance(ip, IPv6Address) or "%" in text:
        raise ValueError("its address has an invalid IPv6 address")
    return str(ip)


def _name_of(text: str) -> str:
    """Return a name or an IPv4 address, without a final dot. Raises: ValueError."""
    host = text.removesuffix(".")
    if NUMBER.fullmatch(host) and _ip_of(host) is None:
        raise ValueError("its address has an IPv4 address in an unusual form; write four decimal numbers")
    if len(host) > 253 or not NAME.fullmatch(host):
        raise ValueError("its address has no valid host")
    return host


def is_ip(host: str) -> bool:
    """Return whether a host is an IP address."""
    return _ip_of(host) is not None


def _ip_of(text: str) -> IpAddress | None:
    try:
        return ip_address(text)
    except ValueError:
        return None


def _listed(words: Collection[str]) -> str:
    return " or ".join(sorted(words))
