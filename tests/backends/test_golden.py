"""What real servers said, replayed: the adapters still ask the same, and still make the same of it.

tests/golden is written by `python -m tests.real.record`; package and command are inside each file.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from backends import infinity_wire, vllm_wire
from backends.checkpoints import DEFAULT_MODEL, locate_checkpoint
from backends.contract import BackendKind, QueueDepth, ReplicaSpec, ReportsQueueDepth
from backends.errors import InvalidWork, ReplicaFailed
from backends.http import UpstreamResponse
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
    """The small files of each checkpoint that was served, by its name."""
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
    return {
        "all-MiniLM-L6-v2": str(source),
        "cross-encoder": str(cross),
        "classifier": str(classifier),
    }


TASKS: dict[str, Task] = {"all-MiniLM-L6-v2": "embed", "cross-encoder": "rerank", "classifier": "classify"}


def replay(exchanges: list[dict[str, Any]]) -> httpx.MockTransport:
    """Answers what was asked then, and nothing else."""

    def answer(request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content) if request.content else None
        asked = {"method": request.method, "path": request.url.path, "body": body}
        said = next((one["response"] for one in exchanges if one["request"] == asked), None)
        assert said is not None, f"never recorded: {asked}"
        content = said["text"].encode() if "text" in said else json.dumps(said["json"]).encode()
        return httpx.Response(said["status"], headers=said["headers"], content=content)

    return httpx.MockTransport(answer)


def test_recordings_cover_every_server_and_kind_of_model() -> None:
    models = ("all-MiniLM-L6-v2", "classifier", "cross-encoder")

    assert [f"{server}/{model}" for server in ("infinity", "vllm") for model in models] == FILES


@pytest.mark.parametrize("name", FILES)
async def test_replayed_conversation_has_the_recorded_outcomes(name: str, small_copies: dict[str, str]) -> None:
    talk = recorded(name)
    kind: BackendKind = "infinity" if name.startswith("infinity") else "vllm"
    model = name.split("/")[1]
    task = TASKS[model]
    tokenizer = small_copies[model] if kind == "infinity" else None
    spec = ReplicaSpec("http://recorded", tokenizer=tokenizer)
    backend = remote_backend(kind, spec, replay(talk["exchanges"]))
    told = await backend.describe(30.0)

    assert talk["described"] == {
        "model_id": told.model_id,
        "operations": sorted(told.operations),
        "max_input_tokens": told.max_input_tokens,
        "dimensions": told.dimensions,
        "outputs": sorted(told.outputs),
        "labels": list(told.labels),
        "notes": list(told.notes),
    }
    assert talk["outcomes"].keys() == WORKS[task].keys()
    for title, expected in talk["outcomes"].items():
        found = await outcome_of(lambda work: backend.run(work, 30.0), WORKS[task][title])
        numbers = expected.pop("numbers", []), found.pop("numbers", [])
        assert (title, expected) == (title, found)
        np.testing.assert_allclose(*numbers, rtol=1e-6, atol=1e-6)
    assert isinstance(backend, ReportsQueueDepth)
    assert QueueDepth(0) == await backend.queue_depth(5.0)


# Everything else is what an adapter did wrong, or the operator: never the caller.
CALLERS = {
    ("vllm/all-MiniLM-L6-v2", "too_long"),
    ("vllm/cross-encoder", "too_long"),
    # The gateway lets no empty list through, and no adapter knows the switch of old by that name.
    ("vllm/all-MiniLM-L6-v2", "empty_list"),
    ("vllm/all-MiniLM-L6-v2", "removed_switch"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_recorded_refusal_is_the_callers_only_where_an_input_is_at_fault(name: str) -> None:
    read = infinity_wire.failure if name.startswith("infinity") else vllm_wire.failure
    for title, refused in recorded(name)["refusals"].items():
        said = refused["response"]
        error = read(UpstreamResponse(said["status"], said["headers"], json.dumps(said["json"]).encode()))

        assert (title, type(error)) == (title, InvalidWork if (name, title) in CALLERS else ReplicaFailed)
