"""Recorded calls of TEI 1.9.3, the comparison of an answer with them, and the differences that are kept.

`tests/golden/tei/http.jsonl` has one call a line: model, request, status, headers and reply. A long list is
cut to its first items and its length, and a time to an ellipsis.
"""

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np

from tests.fakes.tei import DIMENSIONS, FakeTei

RECORDED: list[dict[str, Any]] = [
    json.loads(line) for line in Path("tests/golden/tei/http.jsonl").read_text(encoding="utf-8").splitlines()
]
LABELS = {"0": "calm", "1": "angry", "2": "glad"}
# Facts of the recorded models in /info.
MODELS: dict[str, dict[str, Any]] = {
    "embedder": {
        "model_type": {"embedding": {"pooling": "mean"}},
        "max_input_length": 256,
        "max_batch_requests": 4,
        "tokenization_workers": 1,
    },
    "reranker": {
        "model_type": {"reranker": {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}},
        "max_input_length": 512,
    },
    "classifier": {
        "model_type": {"classifier": {"id2label": LABELS, "label2id": {}}},
        "max_input_length": 512,
    },
    "splade": {"model_type": {"embedding": {"pooling": "splade"}}, "max_input_length": 512},
}
# The recorded model has vectors of this width.
WIDTH = 384
# Names of /info that describe the program and its limits instead of the model.
PROGRAM_FACTS = frozenset(
    {"max_batch_requests", "max_client_batch_size", "version", "sha", "residence", "last_error"}
)


class Kept(NamedTuple):
    """Difference that is kept. applies: to a recorded call. status: the gateway's, if TEI's is another."""

    title: str
    applies: Callable[[dict[str, Any]], bool]
    status: int | None = None


def _is(path: str, model: str, **fields: Any) -> Callable[[dict[str, Any]], bool]:
    def applies(recorded: dict[str, Any]) -> bool:
        request = recorded["request"]
        return (
            (path, model) == (recorded["path"], recorded["model"])
            and isinstance(request, dict)
            and fields.items() <= request.items()
        )

    return applies


def _has_many_inputs(recorded: dict[str, Any]) -> bool:
    return "batch size" in str(recorded["reply"])


def _is_unreadable(recorded: dict[str, Any]) -> bool:
    return recorded["status"] in (400, 404, 405, 422) and isinstance(recorded["reply"], str)


def _is_openai(recorded: dict[str, Any]) -> bool:
    return bool(recorded["path"] == "/v1/embeddings")


def _has_ids(recorded: dict[str, Any]) -> bool:
    request = recorded["request"]
    inputs = request.get("inputs", request.get("input")) if isinstance(request, dict) else None
    return "[101, 7592" in json.dumps(inputs)


def _repeats_a_field(recorded: dict[str, Any]) -> bool:
    return "duplicate field" in str(recorded["reply"])


# In the order of the table in docs/dialects-servers.md, whose first column has the titles.
KEPT = (
    Kept("more inputs than 32", _has_many_inputs, 200),
    Kept("`/rerank` with an embedding model", _is("/rerank", "embedder"), 200),
    Kept("`/decode` of an id outside the vocabulary", _is("/decode", "embedder", ids=[999999]), 422),
    Kept("a field twice in one body", _repeats_a_field, 200),
    Kept("a request that no route can read", _is_unreadable),
    Kept("`/v1/embeddings`", _is_openai),
    Kept("`/v1/embeddings` with a reranker", _is("/v1/embeddings", "reranker"), 400),
    Kept("`x-compute-characters` of token ids", _has_ids),
    Kept("`x-compute-type`, `x-tokenization-time`", lambda recorded: "x-compute-type" in recorded["headers"]),
    Kept("`/info`", lambda recorded: recorded["path"] == "/info"),
    Kept("numbers of models with GELU", lambda recorded: recorded["path"] == "/embed_all"),
)


def kept_status(recorded: dict[str, Any]) -> int:
    """Return the status that the gateway answers with."""
    statuses = [kept.status for kept in KEPT if kept.status is not None and kept.applies(recorded)]
    return statuses[0] if statuses else recorded["status"]


def is_kept(recorded: dict[str, Any], title: str) -> bool:
    """Return whether a difference that is kept applies to a call."""
    return any(kept.applies(recorded) for kept in KEPT if kept.title == title)


def expanded(value: Any) -> Any:
    """Return a recorded request with its repeated texts written out."""
    if isinstance(value, str) and value.startswith("<"):
        word, count = value[1:-1].rsplit(" times", 1)[0].rsplit(" ", 1)
        return word.strip("'") * int(count)
    if isinstance(value, dict):
        return {name: expanded(item) for name, item in value.items()}
    return [expanded(item) for item in value] if isinstance(value, list) else value


def body_of(request: Any) -> bytes:
    """Return the bytes of a recorded request."""
    if isinstance(request, dict) and set(request) == {"raw"}:
        return str(request["raw"]).encode()
    return json.dumps(expanded(request)).encode() if request is not None else b""


def name_of(recorded: dict[str, Any]) -> str:
    """Return the name of a call for the list of tests."""
    return f"{RECORDED.index(recorded)}-{recorded['model']}-{recorded['path']}"


def fake_of(model: str) -> FakeTei:
    """Return a server that describes itself as a recorded one did."""
    server = FakeTei(max_client_batch_size=32, **MODELS[model])
    server.prompts = frozenset()
    return server


def body_for_fake(recorded: dict[str, Any]) -> bytes:
    """Return the bytes of a request for the fake, whose vectors are shorter."""
    request = recorded["request"]
    if isinstance(request, dict) and (request.get("dimensions") or 0) in range(1, WIDTH):
        # Half of the fake's vectors stands for any part.
        request = {**request, "dimensions": DIMENSIONS // 2}
    return body_of(request)


def shape(value: Any) -> Any:
    """Return the types and field names of a reply, with the lengths of lists that are not numbers' own."""
    if isinstance(value, dict) and set(value) == {"first", "length"}:
        return ["list", shape(value["first"][0])]
    if isinstance(value, dict):
        return {name: shape(item) for name, item in value.items()}
    if isinstance(value, list):
        return ["list", shape(value[0])] if value else ["list"]
    return (
        "number" if isinstance(value, int | float) and not isinstance(value, bool) else type(value).__name__
    )


def length(value: Any) -> int:
    """Return the length of a recorded list, or of one that was not cut."""
    return int(value["length"]) if isinstance(value, dict) and "length" in value else len(value)


def assert_answered(
    recorded: dict[str, Any], reply: httpx.Response, status: int, *, counts: bool = True
) -> None:
    """Check the status, the error type and the headers of an answer. counts: those of headers too."""
    assert status == reply.status_code, reply.text
    if reply.status_code != recorded["status"]:
        return
    if isinstance(recorded["reply"], dict) and "error_type" in recorded["reply"]:
        assert recorded["reply"]["error_type"] == reply.json()["error_type"]
    if recorded["status"] == 200 and not is_kept(recorded, "`/v1/embeddings`"):
        names = {name for name in recorded["headers"] if name.startswith("x-")}
        assert names <= set(reply.headers)
        counted = names & {"x-compute-characters", "x-compute-tokens"} if counts else set()
        if is_kept(recorded, "`x-compute-characters` of token ids"):
            counted -= {"x-compute-characters"}
        assert {name: recorded["headers"][name] for name in counted} == {
            name: reply.headers[name] for name in counted
        }


def assert_equal(expected: Any, found: Any, tolerance: float) -> None:
    """Check a reply with its numbers. tolerance: largest difference of two numbers."""
    if isinstance(expected, dict) and set(expected) == {"first", "length"}:
        assert expected["length"] == len(found)
        found = found[: len(expected["first"])]
        expected = expected["first"]
    if isinstance(expected, dict):
        # The gateway may add facts of its own.
        assert expected.keys() - PROGRAM_FACTS <= found.keys()
        for name in expected.keys() - PROGRAM_FACTS:
            assert_equal(expected[name], found[name], tolerance)
    elif isinstance(expected, list):
        assert len(expected) == len(found)
        for item, other in zip(expected, found, strict=True):
            assert_equal(item, other, tolerance)
    elif isinstance(expected, float):
        assert abs(expected - found) <= tolerance, (expected, found)
    elif isinstance(expected, str) and expected.endswith("…"):
        np.testing.assert_allclose(_floats(expected), _floats(found[: len(expected) - 1]), atol=tolerance)
    else:
        assert expected == found


def _floats(text: str) -> Any:
    """Return the whole numbers in the first part of a base64 text."""
    text = text.rstrip("…")
    raw = base64.b64decode(text[: len(text) // 16 * 16])
    return np.frombuffer(raw, dtype="<f4")
