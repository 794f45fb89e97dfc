"""Translation of exceptions of HTTP, the network and the clock to BackendError."""

import errno
import re
import socket
import ssl
from collections.abc import Iterator

import httpx

from backends.contract.errors import (
    AttemptTimedOut,
    BackendError,
    ConnectionLost,
    ProxyRefused,
    ReplicaFailed,
    ReplicaUnavailable,
)
from backends.http.connection import SlowHead
from backends.http.httpx_transport import OwnTlsFailed
from backends.http.responses import InvalidResponse

# A replica that accepts no connection within this time is treated as unavailable.
CONNECT_TIMEOUT_S = 3.0
# httpx's words of a SOCKS proxy that refuses a password, or wants one that the gateway has not.
REFUSALS_OF_SOCKS = ("Invalid username/password", "Requested ")
REASON_OF_SOCKS = re.compile(r"Proxy Server could not connect: ([A-Za-z ]{1,40})\.")
REFUSED_BY_PROXY = "the proxy refused the credentials of the gateway: check `proxy` or HTTPS_PROXY"


def translated(error: Exception, timeout_s: float, *, is_proxied: bool = False) -> BackendError:
    """Convert an exception of httpx, the network or the clock to a BackendError."""
    match error:
        case httpx.ConnectTimeout() | httpx.ConnectError():
            peer = "proxy" if is_proxied else "replica"
            # In a tunnel TLS is the replica's.
            tls_peer = peer if isinstance(error, OwnTlsFailed) else "replica"
            return ReplicaUnavailable(_connect_failure(error, peer, tls_peer))
        case httpx.ProxyError():
            return _proxy_failure(str(error))
        case SlowHead():
            return AttemptTimedOut(str(error))
        case InvalidResponse():
            return ReplicaFailed(str(error))
        case TimeoutError() | httpx.TimeoutException():
            return AttemptTimedOut(f"no answer within {timeout_s:.1f} s")
        case httpx.DecodingError() | httpx.InvalidURL() | ValueError():
            return ReplicaFailed("the reply is not valid HTTP")
    return ConnectionLost("the connection broke before the reply was complete")


def _causes_of(error: BaseException) -> Iterator[BaseException]:
    """Yield the causes of an exception: httpx's own transport wraps them, and hides that it does."""
    cause = error.__cause__ or error.__context__
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__


def _connect_failure(error: Exception, peer: str, tls_peer: str) -> str:
    """Return the reason that no connection was opened. peer, tls_peer: what it and its TLS lead to."""
    for cause in _causes_of(error):
        match cause:
            case ssl.SSLCertVerificationError():
                return f"the {tls_peer}'s certificate is not trusted"
            case ssl.SSLError():
                return f"the {tls_peer} takes no TLS connection"
            case socket.gaierror():
                return f"no connection to the {peer}: its host name is not known"
            case OSError() if cause.errno == errno.ECONNREFUSED or f"[Errno {errno.ECONNREFUSED}]" in str(
                cause
            ):
                return f"no connection to the {peer}: nothing listens at its port"
            case TimeoutError():
                return f"no connection to the {peer} within {CONNECT_TIMEOUT_S:.0f} s"
    return f"no connection to the {peer}"


def _proxy_failure(words: str) -> BackendError:
    """Return the error of a proxy that opened no tunnel. words: its status and reason, or httpx's own."""
    status = words[:3]
    # tinyproxy answers wrong credentials with 401.
    if status in {"401", "407"} or words.startswith(REFUSALS_OF_SOCKS):
        return ProxyRefused(REFUSED_BY_PROXY)
    reason = REASON_OF_SOCKS.fullmatch(words)
    shown = f"status {status}" if status.isdigit() else reason[1].lower() if reason else words
    message = f"the proxy opened no connection to the upstream: {shown}"
    # Its rules do not let the gateway go there.
    is_rule = status == "403" or shown == "connection not allowed by ruleset"
    return ProxyRefused(message) if is_rule else ReplicaUnavailable(message)
