"""Replay of recorded conversations: adapters send the same requests and decode the same outcomes.

`python -m tests.real.record` writes tests/golden. Each file contains the package and the command line.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from backends.checkpoints.locations import DEFAULT_MODEL, locate_checkpoint
from backends.contract import BackendKind, QueueDepth, ReplicaSpec, ReportsQueueDepth, TokenizerSource
from backends.contract.errors import InvalidWork, ReplicaFailed
from backends.http.client import UpstreamResponse
from backends.infinity import wire as infinity_wire
from backends.vllm import wire as vllm_wire
from tests.conftest import remote_backend
from tests.fakes.hooks import LABELS
from tests.real.outcomes import outcome_of
from tests.real.works import WORKS, Task

GOLDEN = Path(__file__).parents[1] / "golden"
FILES = sorted(path.relative_to(GOLDEN).with_suffix("").as_posix() for path in GOLDEN.glob("*/*.json"))


def recorded(name: str) -> Any:
    return json.loads((GOLDEN / f"{name}.json").read_text())


@pytest.fixture(scope="module")
def small_copies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Copy the small files of each served checkpoint and return their paths by name."""
    source = locate_checkpoint(DEFAULT_MODEL)
    cross = tmp_path_factory.mktemp("cross-encoder")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, cross / name)
    classifier = tmp_path_factory.mktemp("classifier")
    for path in cross.iterdir():
        shutil.copy(path, classifier / path.name)
    config = json.loads((cross / "config.json").read_text())
    named = config | {"id2label": {str(index): label for index, label in enumerate(LABELS)}}
    (classifier / "config.json").write_text(json.dumps(named))
    return {"all-MiniLM-L6-v2": str(source), "cross-encoder": str(cross), "classifier": str(classifier)}


TASKS: dict[str, Task] = {"all-MiniLM-L6-v2": "embed", "cross-encoder": "rerank", "classifier": "classify"}


def replay(exchanges: list[dict[str, Any]]) -> httpx.MockTransport:
    """Return a transport that answers recorded requests and refuses all others."""

    def handle(request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content) if request.content else None
        # Recorded without this probe. The recorded models have no template that an instruction could change.
        if body is not None and request.url.path == "/v1/score":
            body.pop("instruction", None)
        sent = {"method": request.method, "path": request.url.path, "body": body}
        recorded = {entry["request"]["path"] for entry in exchanges}
        if request.url.path == "/classify" and "/classify" not in recorded:
            # A cross-encoder was recorded without this probe, too.
            return httpx.Response(404, json={"detail": "Not Found"})
        if body is not None and "audio_url" in json.dumps(body.get("messages")):
            # Recorded without this probe. vLLM answers it as it does the one with a picture.
            error = {"message": "all-MiniLM-L6-v2 is not a multimodal model", "type": "BadRequestError"}
            return httpx.Response(400, json={"error": error | {"param": None, "code": 400}})
        if body is not None and request.url.path == "/v1/score" and isinstance(body["text_2"], dict):
            # Recorded without this probe, too: vLLM's words for a model of texts.
            error = {"message": "MultiModalParam is not supported for BertForSequenceClassification"}
            return httpx.Response(400, json={"error": error | {"type": "BadRequestError", "code": 400}})
        response = next((entry["response"] for entry in exchanges if entry["request"] == sent), None)
        assert response is not None, f"never recorded: {sent}"
        content = response["text"].encode() if "text" in response else json.dumps(response["json"]).encode()
        return httpx.Response(response["status"], headers=response["headers"], content=content)

    return httpx.MockTransport(handle)


def test_recordings_cover_every_server_and_kind_of_model() -> None:
    models = ("all-MiniLM-L6-v2", "classifier", "cross-encoder")

    assert [f"{server}/{model}" for server in ("infinity", "vllm") for model in models] == FILES


@pytest.mark.parametrize("name", FILES)
async def test_replayed_conversation_has_the_recorded_outcomes(
    name: str, small_copies: dict[str, str]
) -> None:
    conversation = recorded(name)
    kind: BackendKind = "infinity" if name.startswith("infinity") else "vllm"
    model = name.split("/")[1]
    task = TASKS[model]
    tokenizer = TokenizerSource(small_copies[model]) if kind == "infinity" else None
    spec = ReplicaSpec("http://recorded", tokenizer=tokenizer)
    backend = remote_backend(kind, spec, replay(conversation["exchanges"]))
    capabilities = await backend.describe(30.0)

    assert conversation["described"] == {
        "model_id": capabilities.model_id,
        "operations": sorted(capabilities.operations),
        "max_input_tokens": capabilities.max_input_tokens,
        "dimensions": capabilities.dimensions,
        "outputs": sorted(capabilities.outputs),
        "labels": list(capabilities.labels),
        "notes": list(capabilities.notes),
    }
    assert conversation["outcomes"].keys() == WORKS[task].keys()
    for title, expected in conversation["outcomes"].items():
        found = await outcome_of(lambda work: backend.run(work, 30.0), WORKS[task][title])
        numbers = expected.pop("numbers", []), found.pop("numbers", [])
        assert (title, expected) == (title, found)
        np.testing.assert_allclose(*numbers, rtol=1e-6, atol=1e-6)
    assert isinstance(backend, ReportsQueueDepth)
    assert QueueDepth(0) == await backend.queue_depth(5.0)


# Refusals of an input. All others are faults of an adapter or the operator, never of the caller.
INPUT_REFUSALS = {
    ("vllm/all-MiniLM-L6-v2", "too_long"),
    ("vllm/cross-encoder", "too_long"),
    # The gateway refuses empty lists, and no adapter sends the removed switch to this release.
    ("vllm/all-MiniLM-L6-v2", "empty_list"),
    ("vllm/all-MiniLM-L6-v2", "removed_switch"),
}


@pytest.mark.parametrize("name", FILES)
def test_recorded_refusals_are_invalid_work_only_if_an_input_is_at_fault(name: str) -> None:
    to_error = infinity_wire.failure if name.startswith("infinity") else vllm_wire.failure
    for title, refusal in recorded(name)["refusals"].items():
        response = refusal["response"]
        body = json.dumps(response["json"]).encode()
        error = to_error(UpstreamResponse(response["status"], response["headers"], body))

        assert (title, type(error)) == (
            title,
            InvalidWork if (name, title) in INPUT_REFUSALS else ReplicaFailed,
        )
