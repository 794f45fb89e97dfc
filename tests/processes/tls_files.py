"""Certificates of a test authority, as PEM files for router.yaml."""

import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

import trustme
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID


class Authority:
    """A certificate authority. Its files are ca.pem, and <name>.pem and <name>.key for each certificate."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._authority = trustme.CA()
        self.ca = folder / "ca.pem"
        self._authority.cert_pem.write_to_path(str(self.ca))

    def sign(self, name: str, *hosts: str) -> tuple[Path, Path]:
        """Create a certificate for these hosts, and return the paths of it and of its private key."""
        leaf = self._authority.issue_cert(*(hosts or ("127.0.0.1", "localhost")))
        certificate, key = self._folder / f"{name}.pem", self._folder / f"{name}.key"
        certificate.write_bytes(b"".join(blob.bytes() for blob in leaf.cert_chain_pems))
        leaf.private_key_pem.write_to_path(str(key))
        return certificate, key

    def sign_client(
        self,
        name: str,
        *names: x509.GeneralName,
        ends: datetime | None = None,
        usage: x509.ObjectIdentifier = ExtendedKeyUsageOID.CLIENT_AUTH,
    ) -> tuple[Path, Path]:
        """Create a client's certificate with these alternative names, and return as `sign` does.

        ends: by default in a day. Its common name is its name here.
        """
        key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
        signer = serialization.load_pem_private_key(self._authority.private_key_pem.bytes(), None)
        authority = x509.load_pem_x509_certificate(self._authority.cert_pem.bytes())
        assert isinstance(signer, ec.EllipticCurvePrivateKey)
        builder = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
            .issuer_name(authority.subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(days=2))
            .not_valid_after(ends or now + timedelta(days=1))
            .add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
        )
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        leaf = builder.sign(signer, hashes.SHA256())
        files = self._folder / f"{name}.pem", self._folder / f"{name}.key"
        files[0].write_bytes(leaf.public_bytes(serialization.Encoding.PEM))
        files[1].write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        return files

    def client(self, shown: tuple[Path, Path] | None = None) -> ssl.SSLContext:
        """Create a TLS context that trusts only this authority. shown: certificate and key of the client."""
        context = ssl.create_default_context(cafile=str(self.ca))
        if shown is not None:
            context.load_cert_chain(*shown)
        return context
