"""Certificates of a test's own authority, as the PEM files that router.yaml names."""

import ssl
from pathlib import Path

import trustme


class Authority:
    """One authority and its files: ca.pem, and <name>.pem and <name>.key for each that it signed."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._authority = trustme.CA()
        self.ca = folder / "ca.pem"
        self._authority.cert_pem.write_to_path(str(self.ca))

    def sign(self, name: str, *hosts: str) -> tuple[Path, Path]:
        """A certificate for these hosts, and its private key."""
        leaf = self._authority.issue_cert(*(hosts or ("127.0.0.1", "localhost")))
        certificate, key = self._folder / f"{name}.pem", self._folder / f"{name}.key"
        certificate.write_bytes(b"".join(blob.bytes() for blob in leaf.cert_chain_pems))
        leaf.private_key_pem.write_to_path(str(key))
        return certificate, key

    def client(self, shown: tuple[Path, Path] | None = None) -> ssl.SSLContext:
        """What trusts this authority alone, and shows a certificate where it has one."""
        context = ssl.create_default_context(cafile=str(self.ca))
        if shown is not None:
            context.load_cert_chain(*shown)
        return context
