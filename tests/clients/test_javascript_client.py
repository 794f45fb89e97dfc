"""JavaScript clients: openai, cohere-ai, mistral, together, huggingface, ollama, voyageai, grpc-js, types.

`environments.py` installs them from `javascript/package-lock.json`, next to this environment's Python.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.clients.conftest import ROOT, Gateway

# Node is below the environment, beside the copies of the scripts that it runs.
HOME = Path(sys.prefix) / "javascript"
CALL_S = 240.0
WIDTH = 384
# The fields of the gateway's own reply with which the clients' vectors are compared.
TEXTS = ["an apple", "the sea"]


def run(gateway: Gateway, *command: str) -> str:
    """Run a program of the clients; return its output."""
    settings = {
        "GATEWAY": gateway.url,
        "GRPC": gateway.grpc,
        "KEY": gateway.key,
        "MODEL": gateway.model,
        "PROTOS": str(ROOT),
    }
    done = subprocess.run(
        command,
        cwd=HOME,
        env=os.environ | settings,
        capture_output=True,
        text=True,
        timeout=CALL_S,
        check=False,
    )
    assert 0 == done.returncode, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def vectors(gateway: Gateway) -> list[list[float]]:
    """Return what the gateway answers without a client."""
    import urllib.request

    request = urllib.request.Request(
        f"{gateway.url}/embed",
        json.dumps({"inputs": TEXTS, "model": gateway.model}).encode(),
        {"authorization": f"Bearer {gateway.key}", "content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=CALL_S) as reply:
        found: list[list[float]] = json.load(reply)
    return found


def called(gateway: Gateway, client: str) -> Any:
    """Return what a client printed."""
    return json.loads(run(gateway, "node", "call.mjs", client))


def assert_near(expected: list[list[float]], found: list[list[float]]) -> None:
    """Check vectors that one engine has computed in batches of different sizes."""
    assert [WIDTH] * len(expected) == [len(row) for row in found]
    for row, other in zip(expected, found, strict=True):
        assert sum(a * b for a, b in zip(row, other, strict=True)) > 0.999


def test_openai(gateway: Gateway, vectors: list[list[float]]) -> None:
    found = called(gateway, "openai")
    assert_near(vectors, found["vectors"])
    assert_near(vectors[:1], [found["floats"]])
    assert ([64, 64], True) == (found["widths"], found["tokens"] > 0)
    assert gateway.model in found["models"]
    assert ("NotFoundError", 404) == (found["unknown"]["name"], found["unknown"]["status"])
    assert ("AuthenticationError", 401) == (found["stranger"]["name"], found["stranger"]["status"])


def test_openai_batches(gateway: Gateway, vectors: list[list[float]]) -> None:
    found = called(gateway, "batches")
    assert_near(vectors, found["vectors"])
    assert ["id-0", "id-1"] == found["ids"]
    assert [["id-2", 400, True]] == found["errors"]
    assert {"total": 3, "completed": 2, "failed": 1} == found["counts"]
    assert ("input.jsonl", "batch") == (found["file"]["filename"], found["file"]["purpose"])
    assert ("completed", {"night": "1"}) == (found["status"], found["metadata"])
    assert (True, True) == (found["listed"], found["deleted"])
    assert ("cancelling", "cancelled") == (found["cancelling"], found["cancelled"])
    assert [20_000, ["batch_cancelled"]] == found["lines"]
    assert ("NotFoundError", 404) == (found["unknown"]["name"], found["unknown"]["status"])
    assert ("BadRequestError", 400) == (found["late"]["name"], found["late"]["status"])


def test_cohere(gateway: Gateway, vectors: list[list[float]]) -> None:
    found = called(gateway, "cohere")
    assert_near(vectors, found["vectors"])
    assert ([WIDTH] * 2, [1]) == (found["bytes"], found["ranks"][:1])
    assert 2 == len(found["ranks"])
    assert {"valid": True, "organizationId": "clients"} == found["key"]
    assert 401 == found["stranger"]["status"]
    assert ("NotFoundError", 404) == (found["unknown"]["name"], found["unknown"]["status"])


def test_huggingface(gateway: Gateway, vectors: list[list[float]]) -> None:
    found = called(gateway, "huggingface")
    assert_near(vectors, found["vectors"])
    assert 1 == max(range(3), key=found["similarities"].__getitem__)
    assert found["stranger"] is not None


def test_ollama(gateway: Gateway, vectors: list[list[float]]) -> None:
    found = called(gateway, "ollama")
    assert_near(vectors, found["vectors"])
    assert WIDTH == len(found["old"])
    assert gateway.model in {name.removesuffix(":latest") for name in found["models"]}
    assert "nowhere" in found["unknown"]["message"]


def test_voyage(gateway: Gateway, vectors: list[list[float]]) -> None:
    found = called(gateway, "voyage")
    assert_near(vectors, found["vectors"])
    assert (True, [1], 2) == (found["tokens"] > 0, found["ranks"][:1], len(found["ranks"]))
    # Without `topK`, which this client leaves out then.
    assert (found["ranks"], 3) == (found["all"][:2], len(found["all"]))
    assert "an apple" == found["texts"][0]["document"]
    assert found["unknown"]["status"] == 404


def test_mistral(gateway: Gateway, vectors: list[list[float]]) -> None:
    found = called(gateway, "mistral")
    assert_near(vectors, found["vectors"])
    assert (True, 0) == (bool(found["id"]), found["usage"]["completionTokens"])
    assert [gateway.model, "base"] in found["models"]
    assert 256 == found["model"]
    assert found["unknown"] is not None


def test_together(gateway: Gateway, vectors: list[list[float]]) -> None:
    found = called(gateway, "together")
    assert_near(vectors, found["vectors"])
    assert ([1, "an apple"], 2) == (found["ranks"][0], len(found["ranks"]))


def test_grpc(gateway: Gateway, vectors: list[list[float]]) -> None:
    found = json.loads(run(gateway, "node", "call_grpc.mjs"))
    assert_near(vectors[:1], [found["vector"]])
    assert_near(vectors[:1], [found["multiplexed"]])
    assert sum(number**2 for number in found["raw"]) != pytest.approx(1.0, abs=1e-3)
    assert ({"count": 10_000, "code": 0}, True) == (found["many"], found["repeated"])
    # INVALID_ARGUMENT, UNAUTHENTICATED.
    assert [3, 16, 3] == [found[name]["code"] for name in ("empty", "stranger", "untargeted")]
    assert 3 == found["failed"]["code"]
    assert found["failed"]["details"].startswith("message 1: ")
    assert 1 == max(found["ranks"]["ranks"], key=lambda rank: rank["score"])["index"]
    assert found["info"]["max_input_length"] > 0
    for reflected in found["reflected"]:
        assert {"tei.v1.Embed", "tei_multiplexer.v1.TeiMultiplexer"} <= set(reflected["services"])
        assert WIDTH == reflected["width"]


def test_generated_types(gateway: Gateway, vectors: list[list[float]]) -> None:
    document = f"{gateway.url}/docs/openapi.json"
    run(gateway, "npx", "--no-install", "openapi-typescript", document, "--output", "gateway.d.ts")
    run(gateway, "npx", "--no-install", "tsc", "--project", "tsconfig.json")
    found = json.loads(run(gateway, "node", "built/typed.js"))
    assert_near(vectors, found["vectors"])
    assert_near(vectors[:1], [found["plain"]])
    assert (True, 1) == (found["tokens"] > 0, found["best"])
    assert 404 == found["unknown"]["status"]
    assert "nowhere" in found["unknown"]["error"]["error"]["message"]
