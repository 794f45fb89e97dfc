"""Gateway that the clients call: one process with small models for all tests of an environment.

Rule: this file and the tests next to it run in a client's own environment. They import nothing of the
project, only the standard library, pytest and the client.
"""

import hashlib
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
MODELS = ROOT / ".clients" / "models"
KEY = "clients-key"
# Keys limited to one call per minute and one call per day.
SLOW_KEY = "minute-limited-key"
SPENT_KEY = "day-limited-key"
START_S = 300.0
STOP_S = 30.0
CONFIG = """
listen: 127.0.0.1:{port}
grpc: {{listen: 127.0.0.1:{grpc_port}}}
upstreams:
  minilm: {{backend: torch, model: sentence-transformers/all-MiniLM-L6-v2}}
  ids: {{backend: torch, model: sentence-transformers/all-MiniLM-L6-v2, token_encoding: {models}/bytes}}
  cross: {{backend: torch, model: {models}/cross-encoder}}
  labels: {{backend: torch, model: {models}/classifier}}
models:
  all-minilm-l6-v2: {{upstream: minilm}}
  org/prompted: {{upstream: minilm, prompts: {{query: "query: ", document: "passage: "}}}}
  strict: {{upstream: minilm, truncate: error}}
  text-embedding-3-small: {{upstream: minilm}}
  decoding: {{upstream: ids}}
  cross: {{upstream: cross}}
  labels: {{upstream: labels}}
defaults: {{embed: all-minilm-l6-v2, rerank: all-minilm-l6-v2}}
tenants:
  clients: {{keys: ["{keys[0]}"]}}
  slow: {{keys: ["{keys[1]}"], limits: {{requests_per_minute: 1}}}}
  spent: {{keys: ["{keys[2]}"], limits: {{requests_per_day: 1}}}}
"""


class Gateway(NamedTuple):
    """Addresses of the gateway, its keys and its models.

    slow, spent: keys limited to one call per minute and one per day. prompted has prompts for roles, strict
    does not truncate, decoding accepts token ids, which are the bytes of UTF-8. cross is a cross-encoder,
    labels a classifier.
    """

    url: str
    grpc: str
    key: str = KEY
    slow: str = SLOW_KEY
    spent: str = SPENT_KEY
    model: str = "all-minilm-l6-v2"
    prompted: str = "org/prompted"
    strict: str = "strict"
    decoding: str = "decoding"
    cross: str = "cross"
    labels: str = "labels"


@pytest.fixture(scope="session")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """Start a gateway, and stop it after the tests."""
    home = tmp_path_factory.mktemp("gateway")
    port, grpc_port = _free_port(), _free_port()
    config = home / "router.yaml"
    _make_models()
    digests = [f"sha256:{hashlib.sha256(key.encode()).hexdigest()}" for key in (KEY, SLOW_KEY, SPENT_KEY)]
    config.write_text(CONFIG.format(port=port, grpc_port=grpc_port, models=MODELS, keys=digests))
    command = [ROOT / ".venv/bin/gateway", "serve", "-c", config]
    with (home / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            url = f"http://127.0.0.1:{port}"
            _wait(url, process, home / "log")
            yield Gateway(url, f"127.0.0.1:{grpc_port}")
        finally:
            process.terminate()
            process.wait(STOP_S)


def _make_models() -> None:
    """Write the models other than the default one, once for all environments."""
    command = [ROOT / ".venv/bin/python", "-m", "tests.clients.small_models", MODELS]
    if not all((MODELS / name).exists() for name in ("cross-encoder", "classifier", "bytes")):
        subprocess.run(command, check=True, cwd=ROOT, timeout=START_S)


def _wait(url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    """Wait until the model is loaded, or fail with the log."""
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
