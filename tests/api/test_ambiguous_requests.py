"""Requests that a proxy in front could read in a different way than the gateway are refused."""

import asyncio

import pytest

from gateway.tenants.keyring import key_digest
from tests.conftest import KEY
from tests.fakes.tei import FakeTei
from tests.socket_gateway import socket_gateway
from tests.waiting import PATIENCE_S

OPERATOR = "operator-key"
CONFIG = f"""
admin: {{keys: ["{key_digest(OPERATOR)}"]}}
upstreams: {{one: {{backend: tei, replicas: ["http://tei-0"]}}}}
models: {{bge: {{upstream: one}}}}
tenants: {{acme: {{keys: ["{key_digest(KEY)}"]}}}}
"""
BODY = b'{"input":"a"}'
CHUNKED = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
MINE = b"authorization: Bearer " + KEY.encode()


async def replies_to(*requests: bytes) -> list[bytes]:
    """Return the reply to each request, sent on a connection of its own."""
    async with socket_gateway(FakeTei(), CONFIG) as gateway, asyncio.timeout(PATIENCE_S):
        return [await gateway.exchange(request) for request in requests]


async def statuses_of(*requests: bytes) -> list[int]:
    """Return the status of each reply."""
    return [int(reply.split(b" ", 2)[1]) for reply in await replies_to(*requests)]


def embed_request(*lines: bytes, body: bytes) -> bytes:
    head = [b"POST /v1/embeddings HTTP/1.1", b"host: x", b"connection: close", *lines, b"", b""]
    return b"\r\n".join(head) + body


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([b"transfer-encoding: chunked"], 200),
        ([b"Transfer-Encoding: Chunked"], 200),
        ([b"transfer-encoding: gzip, chunked"], 400),
        ([b"transfer-encoding: gzip", b"transfer-encoding: chunked"], 400),
        ([b"transfer-encoding: chunked", b"transfer-encoding: gzip"], 400),
    ],
)
async def test_the_only_transfer_coding_is_chunked(lines: list[bytes], expected: int) -> None:
    assert [expected] == await statuses_of(embed_request(MINE, *lines, body=CHUNKED))


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([MINE], 200),
        ([MINE, MINE], 200),
        ([MINE, b"x-a: 1", b"x-a: 2"], 200),
        ([b"authorization: Bearer other", MINE], 401),
        ([MINE, b"Authorization: Bearer other"], 401),
        ([MINE, b"authorization:"], 401),
    ],
)
async def test_different_keys_in_one_request_are_refused(lines: list[bytes], expected: int) -> None:
    length = b"content-length: %d" % len(BODY)

    assert [expected] == await statuses_of(embed_request(*lines, length, body=BODY))


def operators_request(target: bytes) -> bytes:
    head = b"GET %b HTTP/1.1\r\nhost: x\r\nconnection: close\r\nauthorization: Bearer %b\r\n\r\n"
    return head % (target, OPERATOR.encode())


async def test_names_at_the_end_of_operators_paths_may_be_encoded() -> None:
    targets = b"/admin/models/org/one", b"/admin/models/org%2F%6Done"
    plain, encoded = await replies_to(*map(operators_request, targets))

    # The handler's own 404: this gateway takes no additions.
    assert all(b"serves only its own configuration" in reply for reply in (plain, encoded))


async def test_operators_paths_are_served_only_as_they_are_written() -> None:
    targets = {
        b"/admin/status": 200,
        b"/admin/usage?tenant=a//c%61": 200,
        b"/admin/status/": 200,
        b"/metrics": 200,
        b"//admin/status": 404,
        b"/admin//status": 404,
        b"/%61dmin/status": 404,
        b"/admin/%73tatus": 404,
        b"/admin%2Fstatus": 404,
        b"//metrics": 404,
        b"/%6Detrics": 404,
        b"//ui": 404,
        b"//admin/models/org/one": 404,
        b"/admin/models%2Forg": 404,
        # Callers' paths have no such rule.
        b"//livez": 200,
    }
    sent = [operators_request(target) for target in targets]

    assert targets == dict(zip(targets, await statuses_of(*sent), strict=True))
