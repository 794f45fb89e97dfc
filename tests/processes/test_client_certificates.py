"""Client certificates in place of keys, over HTTP and gRPC, with the certificates of a real authority."""

import re
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.x509.oid import ExtendedKeyUsageOID

from backends.tei_protos import tei_multiplexer_pb2 as mux
from backends.tei_protos import tei_pb2 as pb
from gateway.tenants.keyring import key_digest
from tests.fakes.tei import FakeTei
from tests.fakes.threaded import serve_in_thread
from tests.processes.callers import is_logged
from tests.processes.conftest import Served, wait_until
from tests.processes.test_admin_listener import free_port
from tests.processes.test_tls import grpc_address
from tests.processes.tls_files import Authority
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.slow

CONFIG = """
listen: 127.0.0.1:0
grpc: {{listen: "127.0.0.1:0"}}
tls: {{certificate: server.pem, private_key: server.key, client_ca: ca.pem, client_certificates: {mode}}}
logs: {{format: json}}
manager: {{listen: "127.0.0.1:{port}"}}
admin: {{certificates: ["dns:operator.example"]}}
upstreams: {{one: {{backend: tei, replicas: ["{replica}"]}}}}
models: {{bge: {{upstream: one}}, other: {{upstream: one}}}}
tenants:
  acme:
    keys: ["{key}"]
    models: [bge]
    limits: {{requests_per_day: 1000}}
    certificates: [{acme}]
  globex: {{models: [other], certificates: ["sha256:{globex}"]}}
"""
KEY = "acme-key"
DENIED = (httpx.ConnectError, httpx.ReadError, httpx.RemoteProtocolError)
ACME = '"dns:Indexer.Acme.example", "uri:spiffe://acme/indexer"'

Shown = tuple[Path, Path]


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """Create the authority of the gateway and its clients."""
    authority = Authority(tmp_path_factory.mktemp("authority"))
    authority.sign("server")
    return authority


@pytest.fixture(scope="module")
def replica() -> Iterator[str]:
    with serve_in_thread(FakeTei()) as url:
        yield url


@pytest.fixture(scope="module")
def pinned(ours: Authority) -> Shown:
    """Create a certificate without a name, which is listed by its fingerprint."""
    return ours.sign_client("pinned")


class Gateway:
    """A gateway whose file can be written again. process: the one that serves. manager_port: of instances."""

    def __init__(self, folder: Path, replica: str, pinned: Shown, mode: str) -> None:
        self.manager_port = free_port()
        self._file = folder / f"{mode}.yaml"
        leaf = x509.load_pem_x509_certificate(pinned[0].read_bytes())
        self._values = {
            "mode": mode,
            "port": self.manager_port,
            "replica": replica,
            "key": key_digest(KEY),
            # As OpenSSL prints it.
            "globex": leaf.fingerprint(hashes.SHA256()).hex(":").upper(),
        }
        self.write()
        state = {"XDG_STATE_HOME": str(folder / f"state-{mode}")}
        self.process = Served(self._file, state).wait_until_up()

    @property
    def url(self) -> str:
        return self.process.url

    def write(self, acme: str = ACME) -> None:
        """Write the file. acme: certificates of that tenant."""
        self._file.write_text(CONFIG.format(acme=acme, **self._values))


@pytest.fixture(scope="module")
def gateway(ours: Authority, replica: str, pinned: Shown) -> Iterator[Gateway]:
    """Serve callers with certificates and callers with keys on one listener."""
    running = Gateway(ours.ca.parent, replica, pinned, "optional")
    yield running
    running.process.stop()


@pytest.fixture(scope="module")
def indexer(ours: Authority) -> Shown:
    return ours.sign_client("by-dns", x509.DNSName("indexer.acme.example"))


@contextmanager
def calling(gateway: Gateway, ours: Authority, shown: Shown | None = None) -> Iterator[httpx.Client]:
    """Open a client that sends no key. shown: its certificate."""
    context: ssl.SSLContext = ours.client(shown)
    with httpx.Client(base_url=gateway.url, verify=context, timeout=PATIENCE_S, trust_env=False) as client:
        yield client


def models(client: httpx.Client, **headers: str) -> list[str] | int:
    """Return the models that the caller may use, by which its tenant shows, or the status of a refusal."""
    reply = client.get("/v1/models", headers=headers)
    return [entry["id"] for entry in reply.json()["data"]] if reply.is_success else reply.status_code


def models_with(gateway: Gateway, ours: Authority, shown: Shown | None, **headers: str) -> list[str] | int:
    with calling(gateway, ours, shown) as client:
        return models(client, **headers)


def test_listed_names_and_fingerprints_identify_their_tenants(
    gateway: Gateway, ours: Authority, pinned: Shown, indexer: Shown
) -> None:
    by_uri = ours.sign_client("by-uri", x509.UniformResourceIdentifier("spiffe://acme/indexer"))
    found = [models_with(gateway, ours, shown) for shown in (indexer, by_uri, pinned)]

    assert [["bge"], ["bge"], ["other"]] == found


def test_other_certificates_are_verified_and_identify_nobody(gateway: Gateway, ours: Authority) -> None:
    names = {
        # The common name, which no entry means.
        "indexer.acme.example": (),
        "wildcard": (x509.DNSName("*.acme.example"),),
        "below": (x509.DNSName("a.indexer.acme.example"),),
        "other-path": (x509.UniformResourceIdentifier("spiffe://acme/indexer/2"),),
        "other-kind": (x509.RFC822Name("indexer@acme.example"), x509.DNSName("acme")),
    }
    for name, listed in names.items():
        assert 401 == models_with(gateway, ours, ours.sign_client(name, *listed)), name
    with calling(gateway, ours, ours.sign_client("of-nobody")) as client:
        reply = client.post("/v1/embeddings", json={"input": "a"})
    assert re.search(r"no tenant lists this client certificate, sha256:[0-9a-f]{64}", reply.text)


def test_certificate_of_two_tenants_identifies_neither(gateway: Gateway, ours: Authority) -> None:
    names = (x509.DNSName("indexer.acme.example"), x509.DNSName("operator.example"))
    shown = ours.sign_client("of-two", *names)

    assert 401 == models_with(gateway, ours, shown)
    assert ["bge"] == models_with(gateway, ours, shown, authorization=f"Bearer {KEY}")


def test_handshake_refuses_what_the_authority_does_not_vouch_for(
    gateway: Gateway, ours: Authority, tmp_path: Path
) -> None:
    name = x509.DNSName("indexer.acme.example")
    refused = [
        ours.sign_client("expired", name, ends=datetime.now(UTC) - timedelta(hours=1)),
        ours.sign_client("of-a-server", name, usage=ExtendedKeyUsageOID.SERVER_AUTH),
        Authority(tmp_path).sign_client("stranger", name),
    ]
    for shown in refused:
        with pytest.raises(DENIED):
            models_with(gateway, ours, shown)


def test_key_of_the_request_wins_over_the_certificate(
    gateway: Gateway, ours: Authority, pinned: Shown
) -> None:
    with calling(gateway, ours, pinned) as client:
        assert ["bge"] == models(client, authorization=f"Bearer {KEY}")
        assert 401 == models(client, authorization="Bearer wrong")
        assert 401 == models(client, **{"api-key": "wrong"})
        # Each request counts, not the connection.
        assert ["other"] == models(client)
    with calling(gateway, ours) as client:
        assert ["bge"] == models(client, authorization=f"Bearer {KEY}")
        assert 401 == models(client)


def test_web_page_is_not_identified_by_the_certificate_of_its_browser(
    gateway: Gateway, ours: Authority, indexer: Shown
) -> None:
    assert 401 == models_with(gateway, ours, indexer, origin="https://page.example")


def test_calls_have_the_limits_of_the_tenant_and_an_id_in_logs_and_usage(
    gateway: Gateway, ours: Authority, indexer: Shown
) -> None:
    with calling(gateway, ours, indexer) as client:
        reply = client.post("/v1/embeddings", json={"model": "bge", "input": "a"})
        denied = client.post("/v1/embeddings", json={"model": "other", "input": "a"})
    with calling(gateway, ours, ours.sign_client("operator", x509.DNSName("operator.example"))) as client:
        usage = client.get("/admin/usage?by=key").json()

    assert (200, "1000") == (reply.status_code, reply.headers["x-ratelimit-limit-requests"])
    assert 403 == denied.status_code
    assert wait_until(lambda: is_logged(gateway.process, '"key":"certificate:indexer.acme.example"'))
    assert [("acme", "certificate:indexer.acme.example")] == [
        (row["tenant"], row["key"]) for row in usage["data"] if row["key"].startswith("certificate:")
    ]


def test_only_listed_certificates_are_operators(
    gateway: Gateway, ours: Authority, indexer: Shown, pinned: Shown
) -> None:
    for shown, status in ((indexer, 403), (pinned, 403), (None, 401)):
        with calling(gateway, ours, shown) as client:
            assert status == client.post("/admin/reload").status_code
    with calling(gateway, ours, ours.sign_client("operator", x509.DNSName("operator.example"))) as client:
        assert 200 == client.post("/admin/reload").status_code
        record = client.get("/admin/audit").json()["data"][0]
        assert ("certificate:operator.example", "certificate") == (record["actor"], record["actor_kind"])
        key = {"tenant": "acme", "id": record["actor"], "scopes": ["admin"]}
        assert 422 == client.post("/admin/keys", json=key).status_code
        assert 403 == client.post("/v1/embeddings", json={"model": "bge", "input": "a"}).status_code


def test_clients_of_instances_need_no_key(
    gateway: Gateway, ours: Authority, indexer: Shown, pinned: Shown
) -> None:
    operator = ours.sign_client("operator", x509.DNSName("operator.example"))
    url = f"https://127.0.0.1:{gateway.manager_port}/instances"
    statuses = []
    for shown in (operator, indexer, pinned, None):
        with calling(gateway, ours, shown) as client:
            statuses.append(client.get(url).status_code)

    assert [200, 403, 403, 401] == statuses


def test_reload_ends_and_gives_an_identity_on_open_connections(
    gateway: Gateway, ours: Authority, indexer: Shown
) -> None:
    operator = ours.sign_client("operator", x509.DNSName("operator.example"))
    new = ours.sign_client("new", x509.DNSName("new.acme.example"))
    with (
        calling(gateway, ours, indexer) as before,
        calling(gateway, ours, new) as after,
        calling(gateway, ours, operator) as admin,
    ):
        assert [["bge"], 401] == [models(before), models(after)]
        gateway.write('"dns:new.acme.example"')
        try:
            reply = admin.post("/admin/reload")
            assert [401, ["bge"]] == [models(before), models(after)]
        finally:
            gateway.write()
            admin.post("/admin/reload")
        assert ["bge"] == models(before)
    assert "tenants.acme.certificates" in reply.text


def test_resumed_session_keeps_the_certificate(gateway: Gateway, ours: Authority, indexer: Shown) -> None:
    request = b"GET /v1/models HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n"
    address, context = ("127.0.0.1", httpx.URL(gateway.url).port), ours.client(indexer)
    replies: list[bytes] = []
    session: ssl.SSLSession | None = None
    resumed = []
    for _ in range(2):
        with (
            socket.create_connection(address, timeout=PATIENCE_S) as plain,
            context.wrap_socket(plain, server_hostname="127.0.0.1", session=session) as connection,
        ):
            connection.sendall(request)
            replies.append(b"".join(iter(lambda: connection.recv(65536), b"")))
            # With TLS 1.3 it comes after the handshake.
            session = connection.session
            resumed.append(connection.session_reused)

    assert [False, True] == resumed
    assert all(b" 200 OK" in reply and b'"bge"' in reply for reply in replies)


def call_grpc(
    address: str, ours: Authority, shown: Shown | None, **metadata: str
) -> tuple[grpc.StatusCode, grpc.StatusCode]:
    """Return the status of an RPC of TEI, and of one of TEI Manager, without further metadata."""
    chain = () if shown is None else (shown[1].read_bytes(), shown[0].read_bytes())
    credentials = grpc.ssl_channel_credentials(ours.ca.read_bytes(), *chain)
    target = mux.Target(instance_name="bge")
    requests = {
        "/tei.v1.Embed/Embed": pb.EmbedRequest(inputs="a"),
        "/tei_multiplexer.v1.TeiMultiplexer/Embed": mux.EmbedRequest(
            target=target, request=pb.EmbedRequest(inputs="a")
        ),
    }
    codes = []
    with grpc.secure_channel(address, credentials) as channel:
        for method, request in requests.items():
            rpc = channel.unary_unary(method, lambda message: message.SerializeToString())
            model = () if "multiplexer" in method else (("model", "bge"),)
            try:
                rpc(request, metadata=(*model, *metadata.items()), timeout=PATIENCE_S)
                codes.append(grpc.StatusCode.OK)
            except grpc.RpcError as error:
                codes.append(error.code())
    return codes[0], codes[1]


def test_grpc_clients_are_identified_as_over_http(
    gateway: Gateway, ours: Authority, indexer: Shown, pinned: Shown, tmp_path: Path
) -> None:
    address, code = grpc_address(gateway.process), grpc.StatusCode
    stranger = Authority(tmp_path).sign_client("stranger", x509.DNSName("indexer.acme.example"))
    key = {"authorization": f"Bearer {KEY}"}
    cases = [
        (indexer, {}, code.OK),
        (None, {}, code.UNAUTHENTICATED),
        (None, key, code.OK),
        (pinned, {}, code.PERMISSION_DENIED),
        (pinned, key, code.OK),
        (indexer, {"authorization": "Bearer wrong"}, code.UNAUTHENTICATED),
        (ours.sign_client("unlisted", x509.DNSName("b.example")), {}, code.UNAUTHENTICATED),
        (stranger, key, code.UNAVAILABLE),
    ]
    for shown, metadata, expected in cases:
        assert (expected, expected) == call_grpc(address, ours, shown, **metadata), (shown, metadata)


def test_required_certificates_refuse_callers_without_one(
    ours: Authority, replica: str, pinned: Shown, indexer: Shown
) -> None:
    running = Gateway(ours.ca.parent, replica, pinned, "required")
    try:
        with pytest.raises(DENIED):
            models_with(running, ours, None, authorization=f"Bearer {KEY}")
        assert ["bge"] == models_with(running, ours, indexer)
    finally:
        running.process.stop()
