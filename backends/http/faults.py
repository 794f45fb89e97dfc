"""Translation of exceptions of HTTP, the network and the clock to BackendError."""

import errno
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
from backends.http.responses import InvalidResponse

# A replica that accepts no connection within this time is treated as unavailable.
CONNECT_TIMEOUT_S = 3.0
REFUSED_BY_PROXY = "the proxy refused the credentials of the gateway: check `proxy` or HTTPS_PROXY"


def translated(error: Exception, timeout_s: float, *, is_proxied: bool = False) -> BackendError:
    """Convert an exception of httpx, the network or the clock to a BackendError."""
    match error:
        case httpx.ConnectTimeout() | httpx.ConnectError():
            return ReplicaUnavailable(_connect_failure(error, "proxy" if is_proxied else "replica"))
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


def _connect_failure(error: Exception, peer: str) -> str:
    """Return the reason that no connection was opened. peer: what it leads to."""
    for cause in _causes_of(error):
        match cause:
            case ssl.SSLCertVerificationError():
                return "the replica's certificate is not trusted"
            case ssl.SSLError():
                return "the replica takes no TLS connection"
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
    """Return the error of a proxy that opened no tunnel. words: its status and reason."""
    status = words[:3]
    # tinyproxy answers wrong credentials with 401.
    if status in {"401", "407"}:
        return ProxyRefused(REFUSED_BY_PROXY)
    shown = f": status {status}" if status.isdigit() else ""
    message = f"the proxy opened no connection to the upstream{shown}"
    # 403: its rules do not let the gateway go there.
    return ProxyRefused(message) if status == "403" else ReplicaUnavailable(message)
