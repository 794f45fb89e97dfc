"""Parts that operator endpoints share: their mark, the check of local requests, errors of the store."""

import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import msgspec
from litestar.openapi.datastructures import ResponseSpec

from gateway.api.server.paths import route_options
from gateway.api.server.relays import OF_PAGES, is_forwarded
from gateway.api.server.request_context import HttpContext
from gateway.config.schema import LimitAmount, is_loopback, limit_problems
from gateway.errors import InvalidInput, QuotaUnavailable
from gateway.store.errors import StoreUnavailable

# The `opt` of operator handlers. The guard rejects other callers before their body is read.
OPERATORS = route_options(for_operators=True, needs_admin=True)
# A name or an address in brackets, and a port.
HOST = re.compile(r"(?:\[(?P<bracketed>[0-9A-Fa-f:.]+)\]|(?P<plain>[^:\[\]@]+))(?::\d{1,5})?")

logger = logging.getLogger("gateway")


def is_relayed(context: HttpContext) -> bool:
    """Return whether a proxy or a web page passed a request on.

    A proxy on this machine would let in the world.
    """
    hosts = [name for name, _ in context.headers if name == b"host"]
    foreign = context.header(b"sec-fetch-site", "none") not in ("none", "same-origin")
    has_page = foreign or not OF_PAGES.isdisjoint(context.by_name)
    return has_page or is_forwarded(context) or len(hosts) != 1


def is_local_request(context: HttpContext) -> bool:
    """Return whether a request was made on this machine, not by a web page and not through a proxy.

    The host name reveals a page whose own name was changed to resolve to this machine.
    """
    if is_relayed(context):
        return False
    host = HOST.fullmatch(context.header(b"host"))
    return host is not None and is_loopback((host["bracketed"] or host["plain"]).lower())


class EmptyObject(msgspec.Struct):
    """An empty object."""


REMOVED = {200: ResponseSpec(EmptyObject, generate_examples=False, description="It was removed")}


@contextmanager
def store_errors() -> Iterator[None]:
    """Translate an outage of the store.

    Raises: QuotaUnavailable.
    """
    try:
        yield
    except StoreUnavailable as error:
        # The reply, which tenants get too, names no path and no address.
        logger.warning("the store of tenants and keys is unavailable: %s", error)
        raise QuotaUnavailable("the store of tenants and keys is unavailable") from error


def check_limits(limits: Mapping[str, LimitAmount]) -> None:
    """Check the names and the amounts of limits.

    Raises: InvalidInput if one is unknown or wrong.
    """
    for name, problem in limit_problems(limits).items():
        raise InvalidInput(f"{name}: {problem}", param="limits")
