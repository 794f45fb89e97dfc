"""Paths of `manager.listen`, which is TEI Manager's API: each is also a path below /admin."""

from gateway.api.server.call_io import Scope

# Beginning of a path on this listener → the same below /admin. Other paths are not served there.
PREFIXES = {
    "/instances": "/admin/instances",
    "/models": "/admin/registry",
    "/health": "/admin/manager/health",
    "/metrics": "/admin/manager/metrics",
}
# A path that no handler has, with errors in the manager's format.
NOWHERE = "/admin/manager/nothing"


def move_manager_path(scope: Scope) -> None:
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
