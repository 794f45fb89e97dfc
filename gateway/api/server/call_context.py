"""State of one request that does not depend on its transport: headers, caller, times and outcome."""

import re
import secrets
from collections.abc import Sequence

from gateway.calls import CacheMode
from gateway.errors import InvalidInput
from gateway.telemetry.timeline import Timeline
from gateway.tenants.keyring import Tenant

REQUEST_ID_CHARACTERS_MAX = 128
# No spaces: the next field of a log line begins after one.
REQUEST_ID = re.compile(r"[!-~]+")


class CallContext:
    """One request. Filled while it is answered, read when it is over.

    headers: as sent, names in lower case; the metadata of a gRPC call. address: of the connection's peer.
    """

    def __init__(self, headers: Sequence[tuple[bytes, bytes]], address: str) -> None:
        self.headers = headers
        self.address = address
        self._by_name = dict(headers)
        self.request_id = request_id_from(self.header(b"x-request-id"))
        self.timeline = Timeline()
        # The tenant of its key, once that is known.
        self.tenant: Tenant | None = None
        self.outcome = "ok"
        # Class of the cause of a refusal, for the log line.
        self.reason: str | None = None
        self.inputs = 0
        self.tokens = 0
        self.cached_tokens = 0
        # Of a line of a job: the id of its reservation of quota.
        self.reservation: str | None = None

    def header(self, name: bytes, missing: str = "") -> str:
        """Return a header's value, the last one if it was sent several times, or `missing`."""
        value = self._by_name.get(name)
        return missing if value is None else value.decode("latin-1")

    @property
    def repeats_headers(self) -> bool:
        """True if any header was sent several times."""
        return len(self._by_name) != len(self.headers)

    def is_ambiguous(self, name: bytes) -> bool:
        """Return whether a header was sent several times with different values."""
        if not self.repeats_headers:
            return False
        return len({value for sent, value in self.headers if sent == name}) > 1

    def timeout_s(self) -> float | None:
        """Return the time that the caller allows, None if it sets no limit.

        Raises: InvalidInput.
        """
        if b"x-timeout-s" not in self._by_name:
            return None
        value = self.header(b"x-timeout-s")
        try:
            seconds = float(value) if "_" not in value else 0.0
        except ValueError:
            seconds = 0.0
        if not 0 < seconds < float("inf"):
            raise InvalidInput("x-timeout-s must be a positive number of seconds", param="x-timeout-s")
        return seconds

    def cache_mode(self) -> CacheMode:
        """Return how `cache-control` asks to use the cache; other directives have no effect."""
        if b"cache-control" not in self._by_name:
            return "use"
        directives = {word.strip().lower() for word in self.header(b"cache-control").split(",")}
        if "no-store" in directives:
            return "bypass"
        return "refresh" if "no-cache" in directives else "use"

    def is_bulk(self) -> bool:
        """Return whether the request yields to interactive ones.

        Raises: InvalidInput.
        """
        priority = self.header(b"x-priority", "interactive").lower()
        if priority not in ("interactive", "bulk"):
            raise InvalidInput("x-priority is interactive or bulk", param="x-priority")
        return priority == "bulk"


def request_id_from(sent: str) -> str:
    """Return the caller's own id if it is fit for headers and logs, else a new one."""
    if sent and len(sent) <= REQUEST_ID_CHARACTERS_MAX and REQUEST_ID.fullmatch(sent):
        return sent
    return secrets.token_hex(16)
