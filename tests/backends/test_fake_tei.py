"""The fake TEI answers as a real one did: statuses, headers, error bodies and the shapes of replies.

`tests/golden/tei/http.jsonl` has one recorded call of TEI 1.9.3 a line: the model, the request, the status,
the headers and the reply. A long list is cut to its first items and its length, and a time to an ellipsis.
"""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fakes.tei import DIMENSIONS, FakeTei

RECORDED = [
    json.loads(line) for line in Path("tests/golden/tei/http.jsonl").read_text(encoding="utf-8").splitlines()
]
LABELS = {"0": "calm", "1": "angry", "2": "glad"}
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


def expanded(value: Any) -> Any:
    """Return a recorded request with its repeated texts written out."""
    if isinstance(value, str) and value.startswith("<"):
        word, count = value[1:-1].rsplit(" times", 1)[0].rsplit(" ", 1)
        return word.strip("'") * int(count)
    if isinstance(value, dict):
        return {name: expanded(item) for name, item in value.items()}
    return [expanded(item) for item in value] if isinstance(value, list) else value


def sent(recorded: dict[str, Any]) -> bytes:
    request = recorded["request"]
    if isinstance(request, dict) and set(request) == {"raw"}:
        return str(request["raw"]).encode()
    body = expanded(request)
    if isinstance(body, dict) and (body.get("dimensions") or 0) in range(1, WIDTH):
        # The fake's vectors are shorter; half of theirs stands for any part.
        body["dimensions"] = DIMENSIONS // 2
    return json.dumps(body).encode() if body is not None else b""


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
    return int(value["length"]) if isinstance(value, dict) and "length" in value else len(value)


@pytest.mark.parametrize(
    "recorded", RECORDED, ids=[f"{at}-{entry['model']}-{entry['path']}" for at, entry in enumerate(RECORDED)]
)
async def test_fake_answers_as_the_real_server_did(recorded: dict[str, Any]) -> None:
    server = FakeTei(max_client_batch_size=32, **MODELS[recorded["model"]])
    server.prompts = frozenset()
    async with httpx.AsyncClient(transport=httpx.ASGITransport(server), base_url="http://tei") as client:
        answer = await client.request(recorded["method"], recorded["path"], content=sent(recorded))

    expected = recorded["reply"]
    assert recorded["status"] == answer.status_code
    assert set(recorded["headers"]) == set(answer.headers)
    for name in ("content-type", "x-compute-characters", "x-compute-tokens", "x-compute-type"):
        assert recorded["headers"].get(name) == answer.headers.get(name)
    if isinstance(expected, str):
        assert expected.split(":")[0] == answer.text.split(":")[0]
    elif recorded["status"] != 200:
        assert expected == answer.json()
    else:
        reply = answer.json()
        assert shape(expected) == shape(reply)
        assert length(expected) == length(reply) or recorded["path"] == "/predict"


async def test_tokens_are_the_slices_of_the_recorded_text() -> None:
    recorded = next(entry for entry in RECORDED if entry["path"] == "/tokenize")
    server = FakeTei(max_client_batch_size=32, max_input_length=256)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(server), base_url="http://tei") as client:
        answer = await client.post("/tokenize", content=sent(recorded))

    places = ("text", "special", "start", "stop")
    assert [[token[name] for name in places] for token in recorded["reply"][0]] == [
        [token[name] for name in places] for token in answer.json()[0]
    ]


async def test_a_batch_takes_a_permit_for_each_input() -> None:
    server = FakeTei(max_client_batch_size=32, max_concurrent_requests=2)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(server), base_url="http://tei") as client:
        statuses = [
            (await client.post("/embed", json={"inputs": texts})).status_code
            for texts in (["a", "b"], ["a", "b", "c"], "a")
        ]

    assert [200, 429, 200] == statuses
    assert (0, 2) == (server.in_flight, server.most_in_flight)
