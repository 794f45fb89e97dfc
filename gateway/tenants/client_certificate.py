"""Client certificates in place of keys: their names, and what the entries of a tenant identify. Pure."""

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from gateway.config.certificate_entries import DNS, FINGERPRINT, URI, canonical_entry
from gateway.config.schema import Config, TenantConfig

# Begins the id under which an entry appears in logs, usage and batches.
ID_PREFIX = "certificate:"
# Names that stand in ids as they are. All others are hashed.
SHORT_NAME = re.compile(r"(?!sha256-)[!-~]{1,64}")
FINGERPRINT_DIGITS = 16
HASH_DIGITS = 32
# For an operator who lists certificates where none is verified.
UNVERIFIED_NOTE = "this gateway verifies no client certificates: set `tls.client_ca` in router.yaml"
# Kinds of a subject alternative name, as the ssl module names them.
KINDS: Mapping[str, str] = {"DNS": DNS, "URI": URI}


class ClientCertificate(msgspec.Struct, frozen=True):
    """A certificate of a client, which the TLS library has verified.

    entries: its fingerprint and its names, in the form of entries. The TLS library bounds the size of a
    certificate, and thereby their number. expires_s: seconds since 1970.
    """

    entries: tuple[str, ...]
    expires_s: float

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the certificate, in the form of an entry."""
        return self.entries[0]


def client_certificate(der: bytes, names: Iterable[tuple[str, Any]], expires_s: float) -> ClientCertificate:
    """Return a certificate with what may identify it. names: subject alternative names, with their kinds."""
    entries = [FINGERPRINT + hashlib.sha256(der).hexdigest()]
    entries += [canonical_entry(KINDS[kind] + name) for kind, name in names if kind in KINDS]
    return ClientCertificate(tuple(entries), expires_s)


def id_of(entry: str) -> str:
    """Return the id of an entry in canonical form, under which its calls appear as those of a key."""
    kind, _, value = entry.partition(":")
    if f"{kind}:" == FINGERPRINT:
        return f"{ID_PREFIX}sha256-{value[:FINGERPRINT_DIGITS]}"
    if SHORT_NAME.fullmatch(value):
        return ID_PREFIX + value
    return f"{ID_PREFIX}sha256-{digest_of_entry(entry)[:HASH_DIGITS]}"


def digest_of_entry(entry: str) -> str:
    """Return the SHA-256 of an entry, by which batches know it again."""
    return hashlib.sha256(entry.encode("utf-8", "surrogatepass")).hexdigest()


def sharing_problem(
    name: str, entries: Sequence[str], stored: Mapping[str, TenantConfig], file: Config
) -> str | None:
    """Return which entry of a stored tenant is listed elsewhere, so that it would not identify the tenant.

    stored: all tenants of the store. file: router.yaml. None if no entry is.
    """
    wanted = set(map(canonical_entry, entries))
    lists = {other: settings.certificates for other, settings in {**stored, **file.tenants}.items()}
    lists.pop(name, None)
    for owner, listed in (*lists.items(), ("`admin.certificates`", file.admin.certificates)):
        for entry in listed:
            if canonical_entry(entry) in wanted:
                return f"{entry} is listed by {owner} too: a certificate identifies one tenant"
    return None
