"""The fake TEI answers as a real one did: statuses, headers, error bodies and the shapes of replies."""

from typing import Any

import httpx
import pytest

from tests.fakes.tei import FakeTei
from tests.recorded_tei import RECORDED, body_for_fake, fake_of, length, name_of, shape


@pytest.mark.parametrize("recorded", RECORDED, ids=name_of)
async def test_fake_answers_as_the_real_server_did(recorded: dict[str, Any]) -> None:
    server = fake_of(recorded["model"])
    async with httpx.AsyncClient(transport=httpx.ASGITransport(server), base_url="http://tei") as client:
        answer = await client.request(recorded["method"], recorded["path"], content=body_for_fake(recorded))

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
        answer = await client.post("/tokenize", content=body_for_fake(recorded))

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
