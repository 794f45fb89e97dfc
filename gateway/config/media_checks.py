"""Checks of the addresses that the gateway may fetch pictures from."""

import re
from collections.abc import Iterator
from ipaddress import ip_address, ip_network

from gateway.config.problems import Problem
from gateway.config.schema import Config

HOST = re.compile(r"\*|(\*\.)?[a-z0-9_]([a-z0-9_.-]*[a-z0-9_])?\.?", re.IGNORECASE)


def media_problems(config: Config) -> Iterator[Problem]:
    """Yield the problems of `media.fetch`."""
    fetch = config.media.fetch
    if fetch is None:
        return
    for index, host in enumerate(fetch.hosts):
        if not (HOST.fullmatch(host) or _is_ip(host)):
            message = f"{host!r} is not a name, an IP address, *.example.org or *"
            yield Problem(f"media.fetch.hosts[{index}]", message)
    for index, network in enumerate(fetch.private):
        try:
            ip_network(network)
        except ValueError:
            yield Problem(f"media.fetch.private[{index}]", "not an address or a network, such as 10.0.0.0/8")
    if fetch.request_bytes < fetch.item_bytes:
        yield Problem(
            "media.fetch.request_bytes", "less than `media.fetch.item_bytes`; raise it, or lower that"
        )


def _is_ip(text: str) -> bool:
    try:
        ip_address(text)
    except ValueError:
        return False
    return True
