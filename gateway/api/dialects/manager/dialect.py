"""TEI Manager: its errors, and the paths of `manager.listen`, each of which is also a path below /admin.

Its handlers are those of operators, in `gateway/api/operators/manager.py`.
Source: nazq/tei-manager 0.12.0.
"""

from datetime import UTC, datetime

import msgspec

from gateway.api.server.call_io import Scope
from gateway.api.server.error_bodies import ErrorFormat
from gateway.errors import GatewayError


class ManagerError(msgspec.Struct):
    """Envelope of TEI Manager. Source: its 0.12.0. timestamp: RFC 3339, in UTC."""

    error: str
    code: str
    timestamp: str


# TEI Manager's codes, by the kind of an error; all other codes are the kind in capitals.
MANAGER_CODES = {
    "invalid_input": "VALIDATION_ERROR",
    "malformed_body": "VALIDATION_ERROR",
    "instance_invalid": "VALIDATION_ERROR",
    "instance_running": "ALREADY_RUNNING",
    "internal": "INTERNAL_ERROR",
}


def _manager_error(error: GatewayError) -> ManagerError:
    code = MANAGER_CODES.get(error.kind, error.kind.upper())
    now = datetime.now(UTC).isoformat().replace("+00:00", "Z")
    return ManagerError(error.message, code, now)


# A body that does not fit its struct is 422 there, and a value that cannot be used 400.
MANAGER = ErrorFormat(
    "manager",
    ManagerError,
    _manager_error,
    ("/admin/instances/", "/admin/manager/", "/admin/registry/"),
    lambda facts: 422 if facts.tei_status == 422 else facts.status,
)
# Beginning of a path on this listener → the same below /admin. Other paths are not served there.
PREFIXES = {
    "/instances": "/admin/instances",
    "/models": "/admin/registry",
    "/health": "/admin/manager/health",
    "/metrics": "/admin/manager/metrics",
}
# A path that no handler has, with errors in the manager's format.
NOWHERE = "/admin/manager/nothing"


def move_path(scope: Scope) -> None:
    """Replace the path of a request that came to `manager.listen`."""
    path: str = scope["path"]
    raw: bytes = scope.get("raw_path", path.encode())
    first = f"/{path.removeprefix('/').partition('/')[0]}"
    # A disguised path is compared as it was sent, and refused later.
    prefix = PREFIXES.get(first) if raw.startswith(first.encode()) else None
    if prefix is None:
        scope["path"], scope["raw_path"] = NOWHERE, NOWHERE.encode()
        return
    scope["path"] = prefix + path.removeprefix(first)
    scope["raw_path"] = prefix.encode() + raw.removeprefix(first.encode())
