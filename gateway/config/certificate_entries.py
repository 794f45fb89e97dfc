"""Entries of `certificates`: the names and fingerprints by which client certificates are listed. Pure."""

import re
from collections.abc import Iterable

DNS, URI, FINGERPRINT = "dns:", "uri:", "sha256:"
DNS_NAME = re.compile(r"(?=.{1,253}\Z)[a-z0-9_]([a-z0-9_-]{0,62})(\.[a-z0-9_][a-z0-9_-]{0,62})*")
# Printable ASCII without the characters that RFC 3986 has no place for.
URI_NAME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:[!#-;=?@A-Z\[\]_a-z~]{1,2000}")
DIGITS = re.compile(r"[0-9a-f]{64}")
FORMS = "dns:indexer.example.org, uri:spiffe://example.org/indexer or sha256:<fingerprint>"


def canonical_entry(entry: str) -> str:
    """Return the form in which an entry is compared: names of hosts and fingerprints in lower case.

    A fingerprint may have colons between its bytes, as OpenSSL prints it.
    """
    kind, _, value = entry.partition(":")
    match f"{kind}:":
        case "dns:":
            # Others have letters of ASCII as their lower case: "\u212a", the sign of kelvins, has "k".
            return DNS + (value.lower() if value.isascii() else value)
        case "sha256:":
            return FINGERPRINT + value.replace(":", "").lower()
    return entry


def entry_problem(entry: str) -> str | None:
    """Return why an entry cannot identify a client certificate, None if it can."""
    canonical = canonical_entry(entry)
    kind, _, value = canonical.partition(":")
    if f"{kind}:" not in (DNS, URI, FINGERPRINT):
        return f"expected {FORMS}; a subject's common name and other names are not used"
    if "*" in value:
        return "wildcards are not supported: list each name, or each fingerprint"
    if kind == "sha256":
        return None if DIGITS.fullmatch(value) else "a fingerprint is the SHA-256 of the DER: 64 hex digits"
    if kind == "dns":
        return None if DNS_NAME.fullmatch(value) else "not the name of a host, such as indexer.example.org"
    return None if URI_NAME.fullmatch(value) else "not a URI, such as spiffe://example.org/indexer"


def entries_problem(entries: Iterable[str]) -> str | None:
    """Return the problem of the first entry that has one, None if all can be used."""
    return next((f"{entry}: {problem}" for entry in entries if (problem := entry_problem(entry))), None)
