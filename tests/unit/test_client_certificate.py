"""Client certificates as keys: entries, their owners, and the precedence of files and stores."""

import hashlib
import logging

import pytest

from gateway.config.certificate_entries import canonical_entry, entry_problem
from gateway.config.schema import TenantConfig
from gateway.errors import QuotaUnavailable, Unauthenticated
from gateway.tenants.client_certificate import ClientCertificate, client_certificate, id_of
from gateway.tenants.keyring import Keyring, key_digest

DIGEST = hashlib.sha256(b"der").hexdigest()
LATER_S = 1e11


def certificate(*names: str, expires_s: float = LATER_S) -> ClientCertificate:
    """Return a certificate with these DNS names."""
    return client_certificate(b"der", [("DNS", name) for name in names], expires_s)


def listing(*entries: str, limit: int = 1) -> TenantConfig:
    return TenantConfig(certificates=entries, limits={"requests_per_day": limit})


def test_entries_of_a_certificate_are_its_fingerprint_and_its_names() -> None:
    names = [
        ("DNS", "A.Example"),
        ("email", "a@example"),
        ("URI", "spiffe://Acme/A"),
        ("IP Address", "10.0.0.1"),
        ("DirName", ((("commonName", "b.example"),),)),
    ]

    assert (f"sha256:{DIGEST}", "dns:a.example", "uri:spiffe://Acme/A") == client_certificate(
        b"der", names, LATER_S
    ).entries


@pytest.mark.parametrize(
    ("written", "canonical"),
    [
        ("dns:Indexer.Acme.example", "dns:indexer.acme.example"),
        ("uri:spiffe://Acme/Indexer", "uri:spiffe://Acme/Indexer"),
        ("sha256:" + ":".join([DIGEST[at : at + 2].upper() for at in range(0, 64, 2)]), f"sha256:{DIGEST}"),
    ],
)
def test_hosts_and_fingerprints_are_compared_in_lower_case(written: str, canonical: str) -> None:
    assert (canonical, None) == (canonical_entry(written), entry_problem(written))


def test_no_letter_beyond_ascii_becomes_one_of_ascii() -> None:
    # OpenSSL reads a name of a certificate whatever its bytes are.
    shown = client_certificate(b"", [("DNS", "\u212aey.example")], 0.0)

    assert "dns:key.example" not in shown.entries


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ("indexer.acme.example", "common name"),
        ("cn:indexer", "common name"),
        ("ip:10.0.0.1", "expected dns:"),
        ("DNS:a.example", "expected dns:"),
        ("dns:*.acme.example", "wildcards"),
        ("uri:spiffe://acme/*", "wildcards"),
        ("dns:", "not the name"),
        ("dns:a..example", "not the name"),
        ("dns:a.example.", "not the name"),
        ("dns:a.example\n", "not the name"),
        ("uri:indexer", "not a URI"),
        ("uri:spiffe://acme/in dexer", "not a URI"),
        ("sha256:abc", "64 hex digits"),
    ],
)
def test_entry_that_can_identify_nothing_is_refused(entry: str, problem: str) -> None:
    assert problem in str(entry_problem(entry))


def test_ids_are_short_and_tell_entries_apart() -> None:
    long = "dns:" + ".".join(["a" * 60, "b" * 60])

    assert "certificate:a.example" == id_of("dns:a.example")
    assert "certificate:spiffe://acme/a" == id_of("uri:spiffe://acme/a")
    assert f"certificate:sha256-{DIGEST[:16]}" == id_of(f"sha256:{DIGEST}")
    assert len(id_of(long)) < 60
    assert id_of(long) != id_of(long + "c")


def test_key_with_the_digest_of_a_fingerprint_is_another_thing() -> None:
    keyring = Keyring({"acme": listing(key_digest("key"))}, None)

    with pytest.raises(Unauthenticated):
        keyring.identify("key")
    assert "acme" == keyring.identify_certificate(client_certificate(b"key", (), LATER_S)).name


def test_expiry_counts_on_a_connection_that_stays_open() -> None:
    now_s = 1000.0
    keyring = Keyring({"acme": listing("dns:a.example")}, None, lambda: now_s)
    assert "acme" == keyring.identify_certificate(certificate("a.example", expires_s=1001.0)).name

    now_s = 1001.0
    with pytest.raises(Unauthenticated, match="expired"):
        keyring.identify_certificate(certificate("a.example", expires_s=1001.0))


def test_file_takes_precedence_over_stored_tenants() -> None:
    keyring = Keyring({"acme": listing("dns:a.example", limit=7)}, None, has_store=True)
    stored = {
        "acme": listing("dns:old.example"),
        "beta": listing("dns:a.example", "dns:b.example"),
    }
    keyring.replace_stored((), stored)

    owner = keyring.identify_certificate(certificate("a.example"))
    assert ("acme", 7) == (owner.name, owner.limits[0].amount)
    assert "beta" == keyring.identify_certificate(certificate("b.example")).name
    # The file's settings apply as a whole.
    with pytest.raises(Unauthenticated):
        keyring.identify_certificate(certificate("old.example"))


def test_entry_of_two_stored_tenants_identifies_neither_and_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    keyring = Keyring({}, None, has_store=True)
    stored = {"acme": listing("dns:a.example", "dns:own.example"), "beta": listing("dns:A.example")}
    with caplog.at_level(logging.WARNING, "gateway"):
        keyring.replace_stored((), stored)
        keyring.replace_stored((), stored)

    with pytest.raises(Unauthenticated):
        keyring.identify_certificate(certificate("a.example"))
    assert "acme" == keyring.identify_certificate(certificate("own.example")).name
    assert ["several tenants list dns:a.example, which identifies none: acme, beta"] == caplog.messages


def test_unknown_certificate_may_be_in_a_store_that_is_away() -> None:
    keyring = Keyring({"acme": listing("dns:a.example")}, None, has_store=True)
    with pytest.raises(QuotaUnavailable):
        keyring.identify_certificate(certificate("b.example"))
    assert "acme" == keyring.identify_certificate(certificate("a.example")).name

    keyring.replace_stored(())
    with pytest.raises(Unauthenticated):
        keyring.identify_certificate(certificate("b.example"))


def test_certificate_opens_no_operators_paths_unless_admin_lists_it() -> None:
    keyring = Keyring(
        {"operators": listing("dns:a.example")}, None, operator_certificates=["dns:admin.example"]
    )
    of_tenant = keyring.identify_certificate(certificate("a.example"))
    of_admin = keyring.identify_certificate(certificate("admin.example"))

    assert ("admin" in of_tenant.scopes, "metrics" in of_tenant.scopes) == (False, False)
    assert {"admin", "metrics"} == of_admin.scopes


def test_job_of_a_certificate_runs_while_its_tenant_lists_it() -> None:
    keyring = Keyring({"acme": listing("dns:a.example")}, None)
    owner = keyring.identify_certificate(certificate("a.example"))
    assert owner == keyring.owner_by_id("acme", owner.key_id, owner.key_mark)
    assert not owner.is_narrowed

    keyring.replace_configured({"acme": listing("dns:b.example")})
    with pytest.raises(Unauthenticated):
        keyring.owner_by_id("acme", owner.key_id, owner.key_mark)
