"""The certified provider of tests/issuer, in a process of Node.js."""

import json
import shutil
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest

from tests.waiting import PATIENCE_S

FOLDER = Path(__file__).parents[1] / "issuer"
SECRET = "a-secret-of-the-issuer-alone"


def free_port() -> int:
    """Return a port that nothing listens at."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port: int = unused.getsockname()[1]
    return port


class RealIssuer:
    """Issuer at one address, with new keys after each start.

    consoles: addresses that it sends users back to. id_token_s: lifetime of an ID token.
    """

    def __init__(self, consoles: Sequence[str] = (), id_token_s: int = 600) -> None:
        if shutil.which("node") is None or not (FOLDER / "node_modules").is_dir():
            pytest.skip("needs Node.js, and `npm ci` in tests/issuer")
        self.port = free_port()
        self.address = f"http://127.0.0.1:{self.port}"
        self._settings = {"port": self.port, "consoles": list(consoles), "idTokenSeconds": id_token_s}
        self.start()

    def start(self) -> None:
        """Start it and wait until it listens."""
        command = ["node", str(FOLDER / "issuer.mjs"), json.dumps(self._settings)]
        # Node complains of its own version on the other stream.
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert self._process.stdout is not None
        lines = iter(self._process.stdout.readline, "")
        assert self.address in (line.strip() for line in lines), "the issuer did not start"

    def stop(self) -> None:
        """End its process."""
        self._process.kill()
        self._process.wait(PATIENCE_S)
        assert self._process.stdout is not None
        self._process.stdout.close()

    def machine_token(self) -> str:
        """Return an access token of a machine for this gateway, as any client of the issuer gets it."""
        form = {"grant_type": "client_credentials", "resource": "urn:gateway", "scope": "embed"}
        reply = httpx.post(f"{self.address}/token", data=form, auth=("indexer", SECRET), timeout=10)
        token: str = reply.raise_for_status().json()["access_token"]
        return token
