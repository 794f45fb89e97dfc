"""Messages about replicas that cannot be connected to, or that are another kind of server."""

import socket

import httpx
import pytest

from backends.contract import BackendKind, ReplicaSpec
from backends.contract.errors import BackendError, ReplicaUnavailable
from backends.http.client import UpstreamClient
from tests.conftest import remote_backend


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


@pytest.mark.parametrize(
    ("kind", "base", "request_line"),
    [
        ("tei", "", "GET /info"),
        ("tei", "/v1", "GET /v1/info"),
        ("openai", "/v1", "POST /v1/embeddings"),
        ("vllm", "", "GET /v1/models"),
    ],
)
async def test_other_kind_of_server_names_the_request(
    kind: BackendKind, base: str, request_line: str
) -> None:
    async def not_found(_: httpx.Request) -> httpx.Response:
        return httpx.Response(404, text="File not found")

    backend = remote_backend(kind, ReplicaSpec(f"http://files{base}"), httpx.MockTransport(not_found))
    with pytest.raises(BackendError, match=f"answered {request_line} with status 404: check `backend`"):
        await backend.describe(5.0)
