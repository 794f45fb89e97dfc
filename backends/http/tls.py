"""Trusted authorities and client certificates of connections to upstreams."""

import ssl
from functools import cache
from typing import Literal, TypeAlias

import httpx

from backends.contract import TlsFiles

TlsUse: TypeAlias = Literal["pool", "httpx", "proxy"]


@cache
def tls_context(tls: TlsFiles, use: TlsUse = "pool") -> ssl.SSLContext:  # noqa: ARG001
    """Return the context of connections.

    use: by whom. httpx's transport changes the protocols of the context that it is given.
    """
    # Reading the trust store takes tens of milliseconds, therefore it is read once per process.
    context = httpx.create_ssl_context() if tls.ca is None else ssl.create_default_context(cafile=tls.ca)
    if tls.certificate is not None:
        context.load_cert_chain(tls.certificate, tls.private_key)
    return context


def trusted_authorities() -> bytes:
    """Return the certificates, in PEM format, that upstreams without a `ca` of their own are checked with."""
    certificates = tls_context(TlsFiles()).get_ca_certs(binary_form=True)
    return "".join(map(ssl.DER_cert_to_PEM_cert, certificates)).encode()
