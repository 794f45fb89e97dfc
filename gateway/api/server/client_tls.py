"""TLS with clients that show certificates: whether they must, and the certificate of a connection."""

import asyncio
import ssl

from gateway.config.schema import ListenerTls
from gateway.tenants.client_certificate import ClientCertificate, client_certificate


def verify_mode(tls: ListenerTls) -> ssl.VerifyMode:
    """Return whether clients must show a certificate, may show one, or are not asked for one."""
    if tls.client_ca is None:
        return ssl.CERT_NONE
    return ssl.CERT_REQUIRED if tls.client_certificates == "required" else ssl.CERT_OPTIONAL


def certificate_of(transport: asyncio.BaseTransport) -> ClientCertificate | None:
    """Return the client's certificate, None if it has shown none.

    The handshake has ended: it fails for a certificate that `tls.client_ca` did not sign, or whose time is
    over. A certificate that was not verified is read as an empty one.
    """
    verified = transport.get_extra_info("peercert")
    if not verified:
        return None
    der = transport.get_extra_info("ssl_object").getpeercert(binary_form=True)
    expires_s = ssl.cert_time_to_seconds(verified["notAfter"])
    return client_certificate(der, verified.get("subjectAltName", ()), expires_s)
