"""Replicas that cannot be connected to: the message tells an unknown name from a closed port."""

import socket

import pytest

from backends.errors import ReplicaUnavailable
from backends.http import UpstreamClient


def closed_port() -> int:
    """Return a port at which nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_closed_port_is_told(host: str) -> None:
    client = UpstreamClient(f"http://{host}:{closed_port()}")
    with pytest.raises(ReplicaUnavailable, match="nothing listens at its port"):
        await client.get("/info", 5.0)


async def test_unknown_name_is_told() -> None:
    client = UpstreamClient("http://no-such-host.invalid:80")
    with pytest.raises(ReplicaUnavailable, match="its host name is not known"):
        await client.get("/info", 5.0)
