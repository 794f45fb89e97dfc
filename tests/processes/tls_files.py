"""Certificates of a test authority, as PEM files for router.yaml."""

import ssl
from pathlib import Path

import trustme


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

    def client(self, shown: tuple[Path, Path] | None = None) -> ssl.SSLContext:
        """Create a TLS context that trusts only this authority. shown: certificate and key of the client."""
        context = ssl.create_default_context(cafile=str(self.ca))
        if shown is not None:
            context.load_cert_chain(*shown)
        return context
