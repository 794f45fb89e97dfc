"""Gateway that the clients call: one process with small models for all tests of an environment.

Rule: this file and the tests next to it run in a client's own environment. They import nothing of the
project, only the standard library, pytest and the client. Where the client is `gateway.client`, they import
that.
"""

import base64
import hashlib
import json
import random
import re
import socket
import struct
import subprocess
import time
import urllib.request
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

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
  clip: {{backend: torch, model: {models}/clip}}
models:
  all-minilm-l6-v2: {{upstream: minilm}}
  org/prompted: {{upstream: minilm, prompts: {{query: "query: ", document: "passage: "}}}}
  strict: {{upstream: minilm, truncate: error}}
  text-embedding-3-small: {{upstream: minilm}}
  decoding: {{upstream: ids}}
  cross: {{upstream: cross}}
  labels: {{upstream: labels}}
  clip: {{upstream: clip}}
  # Names that LlamaIndex's classes require before they send images.
  embed-v4.0: {{upstream: clip}}
  voyage-multimodal-3: {{upstream: clip}}
  # Names that Perplexity's client requires.
  pplx-embed-v1-0.6b: {{upstream: minilm}}
  pplx-embed-context-v1-0.6b: {{upstream: minilm}}
batches: {{dir: {batches}}}
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
    labels a classifier, clip a dual encoder of texts and images.
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
    clip: str = "clip"


class Pictures(NamedTuple):
    """Two pictures as PNG, in the forms that clients take, and the vectors of the gateway's own reply.

    files: in a folder. uris: `data:` URIs. vectors: by Infinity's API, which no client here calls with PNG.
    """

    files: list[Path]
    uris: list[str]
    vectors: list[list[float]]

    def assert_equal(self, found: Sequence[Sequence[float]]) -> None:
        """Check the vectors that a client returns for the pictures, in their order."""
        assert len(self.vectors) == len(found)
        for expected, vector in zip(self.vectors, found, strict=True):
            assert expected == pytest.approx(list(vector), abs=1e-5)


@pytest.fixture(scope="session")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """Start a gateway, and stop it after the tests."""
    home = tmp_path_factory.mktemp("gateway")
    port, grpc_port = _free_port(), _free_port()
    config = home / "router.yaml"
    _make_models()
    digests = [f"sha256:{hashlib.sha256(key.encode()).hexdigest()}" for key in (KEY, SLOW_KEY, SPENT_KEY)]
    settings = {"port": port, "grpc_port": grpc_port, "models": MODELS, "batches": home / "batches"}
    config.write_text(CONFIG.format(keys=digests, **settings))
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


@pytest.fixture
def pictures(gateway: Gateway, tmp_path: Path) -> Pictures:
    """Return two pictures with their vectors."""
    files = [tmp_path / f"{seed}.png" for seed in range(2)]
    for seed, file in enumerate(files):
        file.write_bytes(png(60 + seed, 40, seed))
    uris = [f"data:image/png;base64,{base64.b64encode(file.read_bytes()).decode()}" for file in files]
    body = {"model": gateway.clip, "input": uris, "modality": "image"}
    vectors = [item["embedding"] for item in posted(gateway, "/infinity/embeddings", body)["data"]]
    assert vectors[0] != pytest.approx(vectors[1], abs=1e-2)
    return Pictures(files, uris, vectors)


def posted(gateway: Gateway, path: str, body: dict[str, Any]) -> Any:
    """Return the reply to a POST without a client."""
    request = urllib.request.Request(
        gateway.url + path,
        json.dumps(body).encode(),
        {"authorization": f"Bearer {gateway.key}", "content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.load(reply)


# Three texts of different lengths, the first of which answers the question.
FRUIT = ["an apple a day", "the sea is deep", "parse JSON quickly"]
FRUIT_QUESTION = "fruit to eat"
Matrix = Sequence[Sequence[float]]


class Expected(NamedTuple):
    """What the gateway itself returns for `FRUIT`, to compare with what a client returns.

    plain: vectors of its texts. documents, query: those with the prompts of `Gateway.prompted`; query: of
    the first text. ranks: (index, cosine) to `FRUIT_QUESTION`, best first. logits: the same by the
    cross-encoder, before the sigmoid.
    """

    plain: list[list[float]]
    documents: list[list[float]]
    query: list[float]
    ranks: list[tuple[int, float]]
    logits: list[tuple[int, float]]


@pytest.fixture(scope="session")
def expected(gateway: Gateway) -> Expected:
    """Return the gateway's own replies in OpenAI's, Cohere's and TEI's API."""

    def vectors(texts: list[str]) -> list[list[float]]:
        items = posted(gateway, "/v1/embeddings", {"model": gateway.model, "input": texts})["data"]
        return [item["embedding"] for item in items]

    question = {"query": FRUIT_QUESTION}
    body = question | {"model": gateway.model, "documents": FRUIT}
    ranks = [
        (item["index"], item["relevance_score"]) for item in posted(gateway, "/v2/rerank", body)["results"]
    ]
    body = question | {"model": gateway.cross, "texts": FRUIT, "raw_scores": True}
    logits = [(item["index"], item["score"]) for item in posted(gateway, "/rerank", body)]
    assert 0 == ranks[0][0]
    return Expected(
        vectors(FRUIT),
        vectors([f"passage: {text}" for text in FRUIT]),
        vectors([f"query: {FRUIT[0]}"])[0],
        ranks,
        logits,
    )


def assert_vectors(expected: Matrix, found: Iterable[Iterable[float]]) -> None:
    """Check the vectors that a client returns, and their order."""
    rows = [list(row) for row in found]
    assert len(expected) == len(rows)
    for wanted, row in zip(expected, rows, strict=True):
        assert list(wanted) == pytest.approx(row, abs=1e-4)


def assert_ranks(expected: Sequence[tuple[int, float]], found: Iterable[tuple[int, float]]) -> None:
    """Check the (index, score) that a client returns, best first."""
    places, scores = zip(*found, strict=True)
    assert tuple(index for index, _ in expected) == places
    assert [score for _, score in expected] == pytest.approx(list(scores), abs=1e-3)


def documented(gateway: Gateway, page: str, heading: str, language: str = "python", at: int = 0) -> str:
    """Return a block of docs/ below a heading, with the gateway's address, key and models. at: its place."""
    text = (ROOT / "docs" / f"{page}.md").read_text()
    section = text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    block = re.findall(rf"^```{language}\n(.*?)^```", section, re.DOTALL | re.MULTILINE)[at]
    values = {
        "gateway:8080": gateway.url.removeprefix("http://"),
        "<key>": gateway.key,
        "bge-reranker-v2-m3": gateway.cross,
        "bge-m3": gateway.model,
        "1024": "384",
    }
    for shown, value in values.items():
        block = block.replace(shown, value)
    return str(block)


def run_documented(gateway: Gateway, page: str, heading: str) -> dict[str, Any]:
    """Run the block of Python below a heading, as `documented`; return what it defines."""
    names: dict[str, Any] = {}
    exec(compile(documented(gateway, page, heading), heading, "exec"), names)
    return names


def png(width: int, height: int, seed: int) -> bytes:
    """Return an RGB picture as PNG, written by hand because not every client has a library of images."""
    dice = random.Random(seed)
    lines = b"".join(b"\0" + dice.randbytes(width * 3) for _ in range(height))
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(lines)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
        for name, body in chunks
    )


def _make_models() -> None:
    """Write the models other than the default one, once for all environments."""
    command = [ROOT / ".venv/bin/python", "-m", "tests.clients.small_models", MODELS]
    if not all((MODELS / name).exists() for name in ("cross-encoder", "classifier", "bytes", "clip")):
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
