"""Sockets on one port: who may join, who is refused, where connections go."""

import errno
import socket
from contextlib import ExitStack

import pytest

from gateway.processes import listeners


def taken(listener: socket.socket) -> int:
    """How many connections wait at a socket."""
    listener.setblocking(False)
    number = 0
    while True:
        try:
            listener.accept()[0].close()
        except BlockingIOError:
            return number
        number += 1


def joined(held: ExitStack, holder: socket.socket) -> socket.socket:
    one = held.enter_context(listeners.join_port(holder))
    one.listen(128)
    return one


def connect(held: ExitStack, address: tuple[str, int], count: int = 1) -> None:
    for _ in range(count):
        held.enter_context(socket.create_connection(address, timeout=5))


def test_spreads_connections_over_joined_sockets_only() -> None:
    with ExitStack() as held:
        holder = held.enter_context(listeners.reserve_port("127.0.0.1:0"))
        one, other = joined(held, holder), joined(held, holder)
        connect(held, holder.getsockname(), 64)
        both = (taken(one), taken(other))

    assert 64 == sum(both)
    assert min(both) > 0


def test_closed_socket_receives_no_connections() -> None:
    with ExitStack() as held:
        holder = held.enter_context(listeners.reserve_port("127.0.0.1:0"))
        one, other = joined(held, holder), joined(held, holder)
        one.close()
        connect(held, holder.getsockname(), 32)

        assert 32 == taken(other)


def test_reserved_port_refuses_connections_and_other_binds() -> None:
    with ExitStack() as held:
        holder = held.enter_context(listeners.reserve_port("127.0.0.1:0"))
        host, port = holder.getsockname()
        with pytest.raises(ConnectionRefusedError):
            connect(held, (host, port))
        for open_anew in (listeners.reserve_port, listeners.open_listener):
            with pytest.raises(OSError, match="in use") as refused:
                open_anew(f"{host}:{port}")
            assert errno.EADDRINUSE == refused.value.errno


def test_port_can_be_reserved_again_while_connections_linger() -> None:
    with ExitStack() as held:
        holder = held.enter_context(listeners.reserve_port("127.0.0.1:0"))
        host, port = holder.getsockname()
        one = joined(held, holder)
        client = held.enter_context(socket.create_connection((host, port), timeout=5))
        # Closed here first, so that it is this side that waits out stray packets.
        one.accept()[0].close()
        client.recv(1)
        client.close()
        one.close()
        holder.close()

        held.enter_context(listeners.reserve_port(f"{host}:{port}"))
