"""The gateway that clients call: a process on the default model, one for all tests of an environment.

Rule: this file and the tests beside it run in a client's own environment, so they import none of the
project and only what every environment has: the standard library and pytest.
"""

import os
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
KEY = "a-key-of-clients"
START_S = 120.0
STOP_S = 30.0
CONFIG = """
listen: 127.0.0.1:{port}
upstreams:
  minilm: {{backend: torch, model: sentence-transformers/all-MiniLM-L6-v2}}
models:
  all-minilm-l6-v2: {{upstream: minilm}}
  org/prompted: {{upstream: minilm, prompts: {{query: "query: ", document: "passage: "}}}}
  strict: {{upstream: minilm, truncate: error}}
defaults: {{embed: all-minilm-l6-v2, rerank: all-minilm-l6-v2}}
"""


class Gateway(NamedTuple):
    """Where it is, a key that it takes, and models: plain, with prompts for roles, one that cuts nothing."""

    url: str
    key: str = KEY
    model: str = "all-minilm-l6-v2"
    prompted: str = "org/prompted"
    strict: str = "strict"


@pytest.fixture(scope="session")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A gateway that is up; it has ended when the tests have."""
    home = tmp_path_factory.mktemp("gateway")
    port = _free_port()
    config = home / "router.yaml"
    config.write_text(CONFIG.format(port=port))
    command = [ROOT / ".venv/bin/gateway", "serve", "-c", config]
    with (home / "log").open("wb") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, env={**os.environ, "GATEWAY_API_KEY": KEY}
        )
        try:
            url = f"http://127.0.0.1:{port}"
            _wait(url, process, home / "log")
            yield Gateway(url)
        finally:
            process.terminate()
            process.wait(STOP_S)


def _wait(url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    """Until the model is loaded; with the log where it never is."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/readyz", timeout=5):
                return
        except OSError:
            time.sleep(0.2)
    pytest.fail(f"the gateway did not start:\n{log.read_text()}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
