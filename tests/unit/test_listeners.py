"""Several sockets on one port: permission to bind it, and the spread of connections."""

import errno
import socket
from contextlib import ExitStack

import pytest

from gateway.processes import listeners


def count_connections(listener: socket.socket) -> int:
    """Accept and count the connections that wait at a socket."""
    listener.setblocking(False)
    number = 0
    while True:
        try:
            listener.accept()[0].close()
        except BlockingIOError:
            return number
        number += 1


def joined(resources: ExitStack, reserved: socket.socket) -> socket.socket:
    listener = resources.enter_context(listeners.join_port(reserved))
    listener.listen(128)
    return listener


def connect(resources: ExitStack, address: tuple[str, int], count: int = 1) -> None:
    for _ in range(count):
        resources.enter_context(socket.create_connection(address, timeout=5))


def test_spreads_connections_over_joined_sockets_only() -> None:
    with ExitStack() as resources:
        reserved = resources.enter_context(listeners.reserve_port("127.0.0.1:0"))
        first, second = joined(resources, reserved), joined(resources, reserved)
        connect(resources, reserved.getsockname(), 64)
        both = (count_connections(first), count_connections(second))

    assert 64 == sum(both)
    assert min(both) > 0


def test_closed_socket_receives_no_connections() -> None:
    with ExitStack() as resources:
        reserved = resources.enter_context(listeners.reserve_port("127.0.0.1:0"))
        first, second = joined(resources, reserved), joined(resources, reserved)
        first.close()
        connect(resources, reserved.getsockname(), 32)

        assert 32 == count_connections(second)


def test_reserved_port_refuses_connections_and_other_binds() -> None:
    with ExitStack() as resources:
        reserved = resources.enter_context(listeners.reserve_port("127.0.0.1:0"))
        host, port = reserved.getsockname()
        with pytest.raises(ConnectionRefusedError):
            connect(resources, (host, port))
        for open_again in (listeners.reserve_port, listeners.open_listener):
            with pytest.raises(OSError, match="in use") as refused:
                open_again(f"{host}:{port}")
            assert errno.EADDRINUSE == refused.value.errno


def test_port_can_be_reserved_again_while_connections_linger() -> None:
    with ExitStack() as resources:
        reserved = resources.enter_context(listeners.reserve_port("127.0.0.1:0"))
        host, port = reserved.getsockname()
        listener = joined(resources, reserved)
        client = resources.enter_context(socket.create_connection((host, port), timeout=5))
        # Closed on this side first, so that this side keeps the port in TIME_WAIT.
        listener.accept()[0].close()
        client.recv(1)
        client.close()
        listener.close()
        reserved.close()

        resources.enter_context(listeners.reserve_port(f"{host}:{port}"))
