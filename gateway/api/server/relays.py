"""Signs in the head of a request that a proxy or a web page passed it on. Pure."""

from gateway.api.server.request_context import RequestContext

# Headers that proxies add, in any setup, in addition to all that begin with x-forwarded.
FORWARDING = frozenset((b"forwarded", b"via", b"x-real-ip", b"cf-connecting-ip", b"true-client-ip"))
# Headers that a browser adds to requests of a page.
OF_PAGES = frozenset((b"origin", b"referer"))


def is_forwarded(context: RequestContext) -> bool:
    """Return whether a proxy passed a request on.

    One that adds no header of its own uses HTTP/1.0 by default, as nginx does.
    """
    names = context.by_name
    is_marked = not FORWARDING.isdisjoint(names) or any(name.startswith(b"x-forwarded") for name in names)
    return is_marked or context.http_version == "1.0"


def is_of_page(context: RequestContext) -> bool:
    """Return whether a web page sent a request: any page can have a browser send one."""
    foreign = context.header(b"sec-fetch-site", "none") != "none"
    return foreign or not OF_PAGES.isdisjoint(context.by_name)
