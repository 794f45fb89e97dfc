"""What the outermost layer and a handler share about one HTTP call; typed, owned by that call alone."""

import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from litestar import Request

from gateway.api.server.paths import Dialect
from gateway.tenants.keyring import Tenant
from gateway.timeline import Timeline

REQUEST_ID_CHARACTERS_MAX = 128
# No spaces: a log line's next field begins after one.
REQUEST_ID = re.compile(r"[!-~]+")
STATE_KEY = "context"


class RequestContext:
    """Filled while the call is answered, read when it is over.

    headers: of the request, names in lower case. address: of whoever holds the connection. http_version: as
    the request says it. dialect: whose errors the caller reads; on a path of several dialects the body may
    tell another than the path.
    """

    def __init__(
        self,
        request_id: str,
        route: str,
        headers: Sequence[tuple[bytes, bytes]] = (),
        address: str = "unknown",
        dialect: Dialect = "tei",
        http_version: str = "1.1",
    ) -> None:
        self.http_version = http_version
        self.dialect = dialect
        self.request_id = request_id
        self.route = route
        self.headers = headers
        self.address = address
        # What lets a web page of another origin read the answer.
        self.readable_by: list[tuple[bytes, bytes]] = []
        self._by_name = dict(headers)
        self.timeline = Timeline()
        # Whose key it carries, once that is known.
        self.tenant: Tenant | None = None
        self.status = 500
        self.outcome = "ok"
        self.inputs = 0
        self.tokens = 0

    def header(self, name: bytes, missing: str = "") -> str:
        """A header's value, of several lines the last, or what stands for none."""
        value = self._by_name.get(name)
        return missing if value is None else value.decode("latin-1")


def context_of(scope: Mapping[str, Any]) -> RequestContext:
    """The context that the outermost layer has put there."""
    # The scope is an untyped dict by ASGI's definition; this is the one read of it.
    state: Any = scope["state"]
    context: RequestContext = state[STATE_KEY]
    return context


def context_of_request(request: Request[Any, Any, Any]) -> RequestContext:
    """For handlers that Litestar calls itself."""
    return context_of(request.scope)


def request_id_from(sent: str | None) -> str:
    """The caller's own id if it is fit for headers and logs, else a new one."""
    if sent and len(sent) <= REQUEST_ID_CHARACTERS_MAX and REQUEST_ID.fullmatch(sent):
        return sent
    return secrets.token_hex(16)
