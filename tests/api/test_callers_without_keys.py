"""`tenants.<name>.networks`: a caller that sends no key is known by its address, which no proxy may hide."""

import pytest

from backends.tei_protos import tei_pb2 as pb
from gateway.api.server.authentication import Authenticator
from gateway.api.server.in_flight import HeldBody, InFlight
from gateway.api.server.request_context import RequestContext
from gateway.app import ROUTES
from gateway.config.notes import keyless_notes
from gateway.config.schema import ListenerSettings, TenantConfig
from gateway.errors import GatewayError, QuotaUnavailable, TenantUnknown, Unauthenticated
from gateway.tenants.keyring import FirstKey, Keyring, key_digest
from tests.api.test_grpc import GRPC, Code, grpc_gateway
from tests.config_texts import parsed, problems_of
from tests.conftest import KEY, Boots
from tests.fakes.tei import FakeTei
from tests.waiting import PATIENCE_S

TENANTS = {name: TenantConfig() for name in ("office", "lab", "six")}
NETWORKS = {"10.0.0.0/8": "office", "10.1.2.0/24": "lab", "2001:db8::/32": "six"}
PROXIES = ["10.0.0.1", "192.0.2.0/24"]


def owner(
    peer: str, path: str = "/embed", version: str = "1.1", listen: str = "main", **headers: str
) -> str | None:
    """Return the tenant that a request without a key has, None if it is refused."""
    try:
        return tenant_of(peer, path, version, listen, **headers)
    except Unauthenticated:
        return None


def tenant_of(
    peer: str, path: str = "/embed", version: str = "1.1", listen: str = "main", **headers: str
) -> str:
    """Return the tenant that a request without a key has. Raises: Unauthenticated."""
    keyring = Keyring(TENANTS, None, networks=NETWORKS)
    authenticator = Authenticator(keyring, PROXIES)
    sent = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    address = authenticator.address_of(peer, sent)
    body = HeldBody(InFlight(0))
    context = RequestContext(ROUTES.parse(path), sent, address, body, lambda _: None, peer=peer)
    context.http_version = version
    context.came_to_operators = listen == "admin"
    return authenticator.authenticate(context).name


def test_a_web_page_is_told_why_it_needs_a_key_where_other_callers_need_none() -> None:
    with pytest.raises(Unauthenticated, match="callers here need none, but web pages do") as caught:
        tenant_of("10.9.9.9", origin="https://a.example")
    with pytest.raises(Unauthenticated) as elsewhere:
        tenant_of("203.0.113.7", origin="https://a.example")

    assert "Authorization: Bearer" in caught.value.message
    assert "web page" not in elsewhere.value.message


@pytest.mark.parametrize(
    ("peer", "tenant"),
    [
        ("10.9.9.9", "office"),
        ("::ffff:10.9.9.9", "office"),
        ("10.1.2.3", "lab"),
        ("2001:db8::7", "six"),
        ("203.0.113.7", None),
        ("::1", None),
        ("unknown", None),
    ],
)
def test_the_smallest_network_that_has_an_address_decides(peer: str, tenant: str | None) -> None:
    assert tenant == owner(peer)


@pytest.mark.parametrize(
    ("peer", "forwarded", "tenant"),
    [
        # A trusted proxy states whom it serves.
        ("192.0.2.1", "10.1.2.3", "lab"),
        ("10.0.0.1", "10.1.2.3", "lab"),
        ("::ffff:10.0.0.1", "10.1.2.3", "lab"),
        # What the caller had written before is not what the proxy has seen.
        ("192.0.2.1", "10.1.2.3, 203.0.113.7", None),
        ("192.0.2.1", "203.0.113.7, 10.1.2.3", "lab"),
        # Some proxies add the port of the connection.
        ("192.0.2.1", "10.1.2.3:4711", "lab"),
        # It has stated nobody, itself, or nonsense.
        ("10.0.0.1", "", None),
        ("::ffff:10.0.0.1", "", None),
        ("10.0.0.1", "10.0.0.1", None),
        ("192.0.2.1", "nonsense", None),
        ("192.0.2.1", "10.1.2.3:port", None),
        # Anybody can write the header.
        ("203.0.113.7", "10.1.2.3", None),
        # A proxy in the network that is not trusted: who is behind it is not known, whatever it states.
        ("10.9.9.9", "203.0.113.7", None),
        ("10.9.9.9", "10.9.9.9, 203.0.113.7", None),
    ],
)
def test_a_forwarded_address_counts_only_from_a_trusted_proxy(
    peer: str, forwarded: str, tenant: str | None
) -> None:
    sent = {"x_forwarded_for": forwarded} if forwarded else {}

    assert tenant == owner(peer, **sent)


@pytest.mark.parametrize(
    "header",
    [
        *({name: "1"} for name in ("via", "forwarded", "x_real_ip", "x_forwarded_host", "true_client_ip")),
        *({name: "https://a.example"} for name in ("origin", "referer")),
        {"sec_fetch_site": "same-origin"},
        {"authorization": "Bearer wrong"},
        {"authorization": "ollama"},
        {"version": "1.0"},
    ],
)
def test_a_request_that_was_passed_on_or_has_a_wrong_key_is_refused(header: dict[str, str]) -> None:
    assert owner("10.9.9.9", **header) is None
    assert "office" == owner("10.9.9.9", authorization="", sec_fetch_site="none")


@pytest.mark.parametrize("path", ["/embed", "/v1/models", "/ui", "/docs"])
def test_no_network_counts_at_the_listener_of_operators(path: str) -> None:
    assert owner("10.9.9.9", path, listen="admin") is None


@pytest.mark.parametrize(
    "path", ["/admin/status", "/admin/keys", "/admin/nowhere", "/metrics", "/load", "/ui", "//admin/keys"]
)
def test_operators_need_a_key_in_every_network(path: str) -> None:
    assert owner("10.9.9.9", path) is None


def test_a_caller_without_a_key_runs_models_and_reads_nothing_that_is_stored() -> None:
    keyring = Keyring(TENANTS, None, networks={"10.0.0.0/8": "office"})
    authenticator = Authenticator(keyring)
    context = RequestContext(
        ROUTES.parse("/embed"), [], "10.1.1.1", HeldBody(InFlight(0)), lambda _: None, peer="10.1.1.1"
    )
    tenant = authenticator.authenticate(context)

    assert {"embed", "rerank", "classify", "tokenize"} == tenant.scopes
    assert "network/10.0.0.0/8" == tenant.key_id == context.key_id
    with pytest.raises(Unauthenticated):
        tenant.require_key()


@pytest.mark.parametrize(
    ("tenant", "has_store", "expected"),
    [
        ("office", False, None),
        ("unknown", False, TenantUnknown),
        # The store, which may have it, has not been read yet.
        ("unknown", True, QuotaUnavailable),
        ("default", False, TenantUnknown),
    ],
)
def test_the_tenant_of_a_listener_is_defined_in_the_file_or_the_store(
    tenant: str, has_store: bool, expected: type[GatewayError] | None
) -> None:
    keyring = Keyring(TENANTS, None, has_store=has_store)
    if expected is None:
        assert tenant == keyring.identify_listener(ListenerSettings("127.0.0.1:1", tenant)).name
        return
    with pytest.raises(expected):
        keyring.identify_listener(ListenerSettings("127.0.0.1:1", tenant))


def test_the_tenant_of_the_first_key_is_one_while_there_is_that_key() -> None:
    keyring = Keyring({}, FirstKey(key_digest("k")))
    found = keyring.identify_listener(ListenerSettings("127.0.0.1:1", "default"))
    keyring.replace_configured({"acme": TenantConfig()})

    assert "default" == found.name
    with pytest.raises(TenantUnknown):
        keyring.identify_listener(ListenerSettings("127.0.0.1:1", "default"))


BASE = """
upstreams: {one: {backend: tei, replicas: [http://tei-0]}}
models: {bge: {upstream: one}}
"""


def test_places_of_callers_without_keys_are_checked() -> None:
    text = (
        BASE
        + """
trusted_proxies: [192.0.2.0/24, "::ffff:198.51.100.0/120"]
listeners:
  - {address: "127.0.0.1:8080", tenant: acme}
  - {address: "nowhere", tenant: operators}
tenants:
  acme: {networks: [10.0.0.0/8, 10.1.2.3/8, "0.0.0.0/0", 192.0.2.128/25, 192.0.0.0/16]}
  other: {networks: [10.0.0.0/8, "::/0"]}
  operators: {networks: [10.2.0.0/16]}
  mapped: {networks: ["::ffff:127.0.0.2", "::ffff:0:0/96", "::ffff:10.9.0.0/112"]}
"""
    )
    assert {
        "trusted_proxies[1]": "is IPv4 in the form of IPv6, which counts as IPv4: write 198.51.100.0/24",
        "listeners[0].address": (
            "needs a port of its own, other than those of `listen`, `admin.listen`, `grpc.listen` and "
            "`manager.listen`"
        ),
        "listeners[1].address": "'nowhere': expected host:port, such as 127.0.0.1:8080",
        "listeners[1].tenant": "operators need a key",
        "tenants.acme.networks[1]": "not an address or a network, such as 10.0.0.0/8",
        "tenants.acme.networks[2]": (
            "is every address; for callers without a key from anywhere, `listeners` has a port of its own"
        ),
        "tenants.acme.networks[3]": "has no effect: all of it are `trusted_proxies`, which are no callers",
        "tenants.other.networks[0]": "is also tenants.acme.networks[0]",
        "tenants.other.networks[1]": (
            "is every address; for callers without a key from anywhere, `listeners` has a port of its own"
        ),
        "tenants.operators.networks": "operators need a key",
        "tenants.mapped.networks[0]": "is IPv4 in the form of IPv6, which counts as IPv4: write 127.0.0.2/32",
        "tenants.mapped.networks[1]": (
            "is every address; for callers without a key from anywhere, `listeners` has a port of its own"
        ),
        "tenants.mapped.networks[2]": "is IPv4 in the form of IPv6, which counts as IPv4: write 10.9.0.0/16",
    } == {problem.path: problem.message for problem in problems_of(text)}


def test_each_place_is_a_note_and_there_is_none_by_default() -> None:
    text = (
        BASE
        + """
listeners:
  - {address: "0.0.0.0:9001", tenant: acme}
  - {address: "127.0.0.1:9002", tenant: stored}
tenants: {acme: {networks: [10.0.0.0/8, 10.0.0.1]}}
"""
    )
    assert [
        (
            "listeners[0]: a caller at 0.0.0.0:9001 needs no key, and is the tenant acme, from every "
            "network that leads there"
        ),
        "listeners[1]: a caller at 127.0.0.1:9002 needs no key, and is the tenant stored",
        (
            "listeners[1].tenant: there is no tenant 'stored' in this file: callers get 403 until "
            "`gateway tenants set` has made it"
        ),
        "tenants.acme.networks: a caller from 10.0.0.0/8, 10.0.0.1 needs no key, and is this tenant",
    ] == [f"{note.path}: {note.message}" for note in keyless_notes(parsed(text))]
    assert [] == list(keyless_notes(parsed(BASE)))


CALLERS = f"""
tenants:
  acme: {{keys: ["{key_digest(KEY)}"]}}
  bench: {{networks: [127.0.0.1], limits: {{requests_per_month: 2}}}}
"""


async def test_limits_of_the_tenant_count_for_callers_without_a_key(boot: Boots) -> None:
    async with boot({"tei-0": FakeTei()}, BASE + CALLERS) as gateway:
        with_key = [(await gateway.post("/embed", {"inputs": "a"})).status_code for _ in range(3)]
        gateway.client.headers.pop("authorization")
        without = [(await gateway.post("/embed", {"inputs": "a"})).status_code for _ in range(3)]
        moved = gateway.follow(BASE + CALLERS.replace("127.0.0.1", "192.0.2.1"))
        after = (await gateway.post("/embed", {"inputs": "a"})).status_code
        await moved

    assert ([200] * 3, [200, 200, 429], 401) == (with_key, without, after)


async def test_an_rpc_needs_no_key_in_a_network() -> None:
    async with grpc_gateway(GRPC + CALLERS) as client:
        rpc = client.channel.unary_unary("/tei.v1.Embed/Embed")
        text = pb.EmbedRequest(inputs="a").SerializeToString()
        codes = [
            await rpc(text, metadata=metadata, timeout=PATIENCE_S).code()
            for metadata in ((), (("x-forwarded-for", "127.0.0.1"),), (("authorization", "Bearer no"),))
        ]

    assert [Code.OK, Code.UNAUTHENTICATED, Code.UNAUTHENTICATED] == codes
