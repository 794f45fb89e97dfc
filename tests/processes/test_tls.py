"""TLS with callers, with and without certificates of their own, and with replicas."""

import asyncio
import re
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import httpx
import pytest
import uvicorn
from cryptography.hazmat.primitives import serialization

from backends.tei_protos.tei_pb2 import EmbedRequest
from gateway.app import Collaborators, build
from gateway.config.boot import AppBoot
from gateway.config.load import load_config
from gateway.config.problems import ConfigError, Problem
from gateway.events import Event, ReplicaChanged
from gateway.tenants.keyring import key_digest
from tests.conftest import KEY
from tests.fakes.hooks import until
from tests.fakes.tei import FakeTei
from tests.processes.conftest import KEY as SERVED_KEY
from tests.processes.conftest import Served
from tests.processes.tls_files import Authority
from tests.waiting import PATIENCE_S

LISTENER = """
listen: 127.0.0.1:0
grpc: {{listen: "127.0.0.1:0"}}
tls: {tls}
upstreams: {{one: {{backend: tei, replicas: ["http://127.0.0.1:1"]}}}}
models: {{bge: {{upstream: one}}}}
"""


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """Create the authority that both sides trust."""
    return Authority(tmp_path_factory.mktemp("ours"))


@pytest.fixture(scope="module")
def strangers(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """Create an authority that neither side trusts."""
    return Authority(tmp_path_factory.mktemp("strangers"))


@pytest.fixture(scope="module")
def served_by_tls(ours: Authority) -> Iterator[Served]:
    """Serve callers with certificates; the config names its files by relative paths."""
    ours.sign("server")
    path = ours.ca.parent / "router.yaml"
    path.write_text(
        LISTENER.format(tls="{certificate: server.pem, private_key: server.key, client_ca: ca.pem}")
    )
    gateway = Served(path).wait_until_up()
    yield gateway
    gateway.stop()


def models(url: str, context: ssl.SSLContext) -> int:
    headers = {"authorization": f"Bearer {SERVED_KEY}"}
    return httpx.get(f"{url}/v1/models", headers=headers, verify=context, trust_env=False).status_code


@pytest.mark.slow
def test_serves_a_caller_with_a_trusted_certificate(served_by_tls: Served, ours: Authority) -> None:
    assert served_by_tls.url.startswith("https://")
    assert 200 == models(served_by_tls.url, ours.client(ours.sign("caller")))


@pytest.mark.slow
def test_refuses_a_missing_or_untrusted_certificate_before_http(
    served_by_tls: Served, ours: Authority, strangers: Authority
) -> None:
    for shown in (None, strangers.sign("caller")):
        with pytest.raises((httpx.ConnectError, httpx.ReadError, httpx.RemoteProtocolError)):
            models(served_by_tls.url, ours.client(shown))
    assert 200 == models(served_by_tls.url, ours.client(ours.sign("another")))


@pytest.mark.slow
def test_tls_listener_answers_no_plain_http(served_by_tls: Served) -> None:
    with pytest.raises(httpx.TransportError):
        httpx.get(served_by_tls.url.replace("https", "http") + "/livez", trust_env=False)


@pytest.mark.slow
def test_listener_without_client_ca_needs_no_caller_certificate(
    ours: Authority, strangers: Authority, tmp_path: Path
) -> None:
    certificate, key = ours.sign("plain")
    path = tmp_path / "router.yaml"
    path.write_text(LISTENER.format(tls=f"{{certificate: {certificate}, private_key: {key}}}"))
    gateway = Served(path).wait_until_up()
    try:
        assert 200 == models(gateway.url, ours.client())
        with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
            models(gateway.url, strangers.client())
    finally:
        gateway.stop()


def grpc_address(gateway: Served) -> str:
    """Return the address that the worker has logged."""
    (line,) = [line for line in gateway.log if "gRPC listens on" in line]
    found = re.search(r"127.0.0.1:\d+", line)
    assert found is not None
    return found[0]


def grpc_answers(address: str, credentials: grpc.ChannelCredentials) -> bool:
    """Return whether an RPC reaches the gateway, which refuses its model."""
    metadata = (("authorization", f"Bearer {SERVED_KEY}"), ("model", "nothing"))
    with grpc.secure_channel(address, credentials) as channel:
        content = EmbedRequest(inputs="a").SerializeToString()
        with pytest.raises(grpc.RpcError) as raised:
            channel.unary_unary("/tei.v1.Embed/Embed")(content, metadata=metadata, timeout=PATIENCE_S)
    return raised.value.code() is grpc.StatusCode.NOT_FOUND


@pytest.mark.slow
def test_grpc_has_the_same_certificates(served_by_tls: Served, ours: Authority, strangers: Authority) -> None:
    address, ca = grpc_address(served_by_tls), ours.ca.read_bytes()
    for authority, trusted in ((ours, True), (strangers, False)):
        certificate, key = authority.sign("grpc-caller")
        shown = grpc.ssl_channel_credentials(ca, key.read_bytes(), certificate.read_bytes())
        assert grpc_answers(address, shown) is trusted
    assert not grpc_answers(address, grpc.ssl_channel_credentials(ca))


@asynccontextmanager
async def replica(server: FakeTei, certificate: tuple[Path, Path], client_ca: Path) -> AsyncIterator[str]:
    """Run the fake server behind a TLS listener that demands a certificate, and yield its base URL."""
    config = uvicorn.Config(
        server,
        port=0,
        lifespan="off",
        log_config=None,
        ssl_certfile=certificate[0],
        ssl_keyfile=certificate[1],
        ssl_ca_certs=str(client_ca),
        ssl_cert_reqs=ssl.CERT_REQUIRED,
    )
    running = uvicorn.Server(config)
    serving = asyncio.create_task(running.serve())
    await until(lambda: running.started)
    port = running.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"https://127.0.0.1:{port}"
    finally:
        running.should_exit = True
        await serving


@asynccontextmanager
async def gateway(url: str, tls: str, folder: Path) -> AsyncIterator[tuple[httpx.AsyncClient, list[Event]]]:
    """Run the production application on one replica, and wait for its first attempt to join."""
    path = folder / "router.yaml"
    path.write_text(f"""
upstreams: {{one: {{backend: tei, replicas: ["{url}"], tls: {tls}}}}}
models: {{bge: {{upstream: one}}}}
""")
    events: list[Event] = []
    application = build(AppBoot(load_config(path, {}), key_digest(KEY)), Collaborators(observe=events.append))
    headers = {"authorization": f"Bearer {KEY}"}
    transport = httpx.ASGITransport(application.asgi)
    async with (
        application.lifespan(),
        httpx.AsyncClient(transport=transport, base_url="http://gateway", headers=headers) as client,
    ):
        await until(lambda: any(isinstance(event, ReplicaChanged) for event in events))
        yield client, events


async def test_presents_its_certificate_to_a_replica(ours: Authority, tmp_path: Path) -> None:
    shown, key = ours.sign("gateway")
    tls = f"{{ca: {ours.ca}, certificate: {shown}, private_key: {key}}}"
    server = FakeTei()
    async with (
        replica(server, ours.sign("replica"), ours.ca) as url,
        gateway(url, tls, tmp_path) as (client, events),
    ):
        reply = await client.post("/embed", json={"inputs": "a"})

    assert 200 == reply.status_code
    assert 1 == len(server.requests)
    assert ["up"] == [event.state for event in events if isinstance(event, ReplicaChanged)]


@pytest.mark.parametrize("fault", ["untrusted", "of_another_host", "nothing_shown", "no_tls"])
async def test_replica_with_failing_tls_does_not_join_and_the_reason_is_logged(
    ours: Authority, strangers: Authority, tmp_path: Path, fault: str
) -> None:
    shown, key = ours.sign("gateway")
    own = "" if fault == "nothing_shown" else f", certificate: {shown}, private_key: {key}"
    ca = strangers.ca if fault == "untrusted" else ours.ca
    hosts = ("elsewhere.example.org",) if fault == "of_another_host" else ()
    server = FakeTei()
    async with replica(server, ours.sign(fault, *hosts), ours.ca) as url:
        address = url.replace("https", "http") if fault == "no_tls" else url
        async with gateway(address, f"{{ca: {ca}{own}}}", tmp_path) as (client, events):
            reply = await client.post("/embed", json={"inputs": "a"})

    changes = [event for event in events if isinstance(event, ReplicaChanged)]
    assert (503, []) == (reply.status_code, server.requests)
    assert {"down"} == {event.state for event in changes}
    expected = {
        "untrusted": "certificate is not trusted",
        "of_another_host": "certificate is not trusted",
        "nothing_shown": "connection broke",
        "no_tls": "connection broke",
    }
    assert expected[fault] in changes[0].reason


def problems(folder: Path, tls: str) -> list[Problem]:
    path = folder / "router.yaml"
    path.write_text(LISTENER.format(tls=tls))
    with pytest.raises(ConfigError) as caught:
        load_config(path, {})
    return caught.value.problems


def test_reports_a_key_of_another_certificate(ours: Authority, tmp_path: Path) -> None:
    certificate, _ = ours.sign("one")
    _, key = ours.sign("two")
    (problem,) = problems(tmp_path, f"{{certificate: {certificate}, private_key: {key}}}")

    assert "tls.certificate" == problem.path
    assert "a different certificate" in problem.message


def test_reports_an_encrypted_key_without_a_prompt(ours: Authority, tmp_path: Path) -> None:
    certificate, key = ours.sign("locked")
    locked = tmp_path / "locked.key"
    plain = serialization.load_pem_private_key(key.read_bytes(), None)
    locked.write_bytes(
        plain.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"hunter2"),
        )
    )
    (problem,) = problems(tmp_path, f"{{certificate: {certificate}, private_key: {locked}}}")

    assert "tls.certificate" == problem.path
    assert "password" in problem.message


@pytest.mark.parametrize(
    "content", ["", "rubbish", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"]
)
def test_reports_every_file_that_is_not_pem(tmp_path: Path, content: str) -> None:
    (tmp_path / "x.pem").write_text(content)
    found = problems(tmp_path, "{certificate: x.pem, private_key: x.pem, client_ca: x.pem}")

    assert ["tls.certificate", "tls.client_ca"] == [problem.path for problem in found]
    assert all("PEM" in problem.message for problem in found)


def test_reports_a_folder_in_place_of_a_certificate(tmp_path: Path) -> None:
    found = problems(tmp_path, "{certificate: ., private_key: ., client_ca: .}")

    assert ["tls.certificate", "tls.client_ca"] == [problem.path for problem in found]
