"""Listening sockets of the gateway. Knows nothing of processes.

A single worker is given the parent's socket. Several workers open one socket each on the same port. The
kernel then spreads connections evenly, which it does not for workers that race for one socket. A worker's
socket closes with it, so that no connection waits for a dead worker. The parent's socket only reserves the
port meanwhile and accepts no connections.
"""

import contextlib
import socket

from gateway.config.schema import host_and_port

BACKLOG = 2048


def open_listener(listen: str) -> socket.socket:
    """Return a socket that accepts connections. Raises: OSError."""
    family, address = _resolve(listen)
    listener = _bind(family, address)
    listener.listen(BACKLOG)
    return listener


def reserve_port(listen: str) -> socket.socket:
    """Return a socket that reserves a port for `join_port` and accepts no connections. Raises: OSError."""
    family, address = _resolve(listen)
    # Another gateway of the same user could share the port unnoticed, so first bind it exclusively.
    with contextlib.closing(_bind(family, address)) as exclusive:
        exclusive.listen(1)
    reserved = _bind(family, address, shared=True)
    # From here on, an exclusive bind by any other process fails even while no worker listens.
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    return reserved


def join_port(reserved: socket.socket) -> socket.socket:
    """Return one more socket on a reserved port. Raises: OSError."""
    return _bind(reserved.family, reserved.getsockname(), shared=True)


def address_of(bound: socket.socket) -> str:
    """Return the host:port of a socket, with an IPv6 address in brackets."""
    host, port = bound.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _resolve(listen: str) -> tuple[socket.AddressFamily, tuple[object, ...]]:
    host, port = host_and_port(listen)
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return found[0][0], found[0][4]


def _bind(
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
