"""TEI's paths for hosting platforms: /invocations of SageMaker, /vertex of Vertex AI."""

from typing import Any

import numpy as np
import pytest

from gateway.api.dialects.tei.operations import truncated_in
from tests.api.test_tei_operations import CONFIG, fakes
from tests.conftest import Boots, posted
from tests.fakes.hooks import LABELS
from tests.fakes.tei import score_of, vector_of


async def test_invocations_answers_as_the_root_path_does(boot: Boots) -> None:
    for body in ({"inputs": ["a", "b"]}, {"inputs": "a", "model": "moods"}, {"query": "q", "texts": ["a"]}):
        async with boot(fakes(), CONFIG) as gateway:
            root = await gateway.post("/", body)
            reply = await gateway.post("/invocations", body)

        assert (root.status_code, root.json()) == (reply.status_code, reply.json())
        assert root.headers.get("x-compute-tokens") == reply.headers.get("x-compute-tokens")


async def test_instances_with_the_same_options_share_upstream_requests(boot: Boots) -> None:
    servers = fakes()
    instances: list[dict[str, Any]] = [
        {"inputs": "a"},
        {"inputs": ["b", "c"]},
        {"inputs": "d", "normalize": False},
        {"inputs": "e"},
    ]
    reply = await posted(boot(servers, CONFIG), "/vertex", {"instances": instances})

    first, second, third, fourth = reply.json()["predictions"]
    np.testing.assert_array_equal([vector_of("a")], np.array(first, np.float32))
    np.testing.assert_array_equal([vector_of("b"), vector_of("c")], np.array(second, np.float32))
    np.testing.assert_allclose([vector_of("d") * 2], third, rtol=1e-6)
    np.testing.assert_array_equal([vector_of("e")], np.array(fourth, np.float32))
    sent = [body.get("input", body.get("inputs")) for _, body in servers["embed"].requests]
    assert [["a", "b", "c"], ["d"], ["e"]] == sent


async def test_instances_of_every_kind_of_model(boot: Boots) -> None:
    instances: list[dict[str, Any]] = [
        {"query": "q", "texts": ["a", "b"], "model": "cross"},
        {"inputs": "a", "model": "cross"},
        {"inputs": "a", "model": "moods"},
        {"inputs": [["a"], ["b", "c"]], "model": "moods"},
        {"inputs": "two words", "model": "splade"},
        {"inputs": {"source_sentence": "a", "sentences": ["a"]}},
    ]
    reply = await posted(boot(fakes(), CONFIG), "/vertex", {"instances": instances})

    assert 200 == reply.status_code, reply.text
    ranks, label, labels, batch, terms, cosines = reply.json()["predictions"]
    assert pytest.approx(score_of("q", "a"), rel=1e-6) == {rank["index"]: rank["score"] for rank in ranks}[0]
    assert ["LABEL_0"] == [item["label"] for item in label]
    assert set(LABELS) == {item["label"] for item in labels}
    assert [3, 3] == [len(items) for items in batch]
    assert [2] == [len(items) for items in terms]
    assert [pytest.approx(1.0)] == cosines


def test_truncated_inputs_are_counted_over_all_calls() -> None:
    assert (1, 3, 5) == truncated_in([(1,), (), (0, 2)], [2, 1, 3])
    assert () == truncated_in([(), ()], [1, 1])
    assert None is truncated_in([(0,), None], [1, 1])


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"instances": []}, 400),
        ({}, 422),
        ({"instances": [{"inputs": ""}]}, 400),
        ({"instances": [{"inputs": ["a"] * 1025}, {"inputs": ["a"] * 1024}]}, 422),
        ({"instances": [{"inputs": "a"}, {"query": "q"}]}, 422),
        ({"instances": [{"inputs": "a"}, {"inputs": "a", "normalize": False}] * 17}, 422),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_vertex_refuses_instances_in_teis_envelope(boot: Boots, body: Any, status: int) -> None:
    reply = await posted(boot(fakes(), CONFIG), "/vertex", body)

    assert status == reply.status_code
    assert {"error", "error_type"} == reply.json().keys()
