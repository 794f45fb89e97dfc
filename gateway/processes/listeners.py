"""The sockets that callers reach. Knows nothing of processes.

One worker is handed the parent's socket. Several have one each on the same port, and the kernel spreads
connections over them evenly, which workers that race for one socket do not. A worker's own ends with it, so
that no connection waits for a dead one; the parent's holds the port meanwhile and takes none.
"""

import contextlib
import socket

from gateway.config.schema import host_and_port

BACKLOG = 2048


def listening(listen: str) -> socket.socket:
    """A socket that takes connections. Raises: OSError."""
    family, address = _address(listen)
    listener = _bound(family, address)
    listener.listen(BACKLOG)
    return listener


def holding(listen: str) -> socket.socket:
    """A socket that keeps a port for those that `join` it, and takes no connection. Raises: OSError."""
    family, address = _address(listen)
    # Another gateway of the same user could share the port unnoticed: ask as a stranger would.
    with contextlib.closing(_bound(family, address)) as stranger:
        stranger.listen(1)
    holder = _bound(family, address, shared=True)
    # From here on a stranger is told that the port is in use, even while no worker listens.
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    return holder


def join(holder: socket.socket) -> socket.socket:
    """One more socket on a holder's port. Raises: OSError."""
    return _bound(holder.family, holder.getsockname(), shared=True)


def _address(listen: str) -> tuple[socket.AddressFamily, tuple[object, ...]]:
    host, port = host_and_port(listen)
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return found[0][0], found[0][4]


def _bound(
    family: socket.AddressFamily | int, address: tuple[object, ...], *, shared: bool = False
) -> socket.socket:
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bound.bind(address)
    except OSError:
        bound.close()
        raise
    return bound
