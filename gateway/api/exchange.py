"""What the outermost layer and a handler share about one HTTP call; typed, owned by that call alone."""

import re
import secrets
from collections.abc import Mapping
from typing import Any

from gateway.timeline import Timeline

REQUEST_ID_CHARACTERS_MAX = 128
# No spaces: a log line's next field begins after one.
REQUEST_ID = re.compile(r"[!-~]+")
STATE_KEY = "exchange"


class Exchange:
    """Filled while the call is answered, read when it is over."""

    def __init__(self, request_id: str, route: str) -> None:
        self.request_id = request_id
        self.route = route
        self.timeline = Timeline()
        self.status = 500
        self.outcome = "ok"
        self.inputs = 0
        self.tokens = 0


def exchange_of(scope: Mapping[str, Any]) -> Exchange:
    """The exchange that the outermost layer has put there."""
    # The scope is an untyped dict by ASGI's definition; this is the one read of it.
    state: Any = scope["state"]
    exchange: Exchange = state[STATE_KEY]
    return exchange


def request_id_from(sent: str | None) -> str:
    """The caller's own id if it is fit for headers and logs, else a new one."""
    if sent and len(sent) <= REQUEST_ID_CHARACTERS_MAX and REQUEST_ID.fullmatch(sent):
        return sent
    return secrets.token_hex(16)
