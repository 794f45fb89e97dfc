"""SIE's encode and score, in JSON and msgpack."""

import json
from typing import Any

import msgspec
import numpy as np
import pytest

from backends.contract import EmbedReply, Encode, EncodeReply, Output, TermWeights
from gateway.api.dialects.sie.dialect import (
    EncodeParams,
    OutputDtype,
    SieEncodeRequest,
    SieItem,
    decode_encode,
    encode_items,
)
from gateway.api.server.encoding import json_bytes, quantize_rows
from gateway.api.server.inference_api import InferenceApi
from gateway.api.server.request import Request
from gateway.config.schema import Limits
from tests.conftest import CONFIG, Boots, posted
from tests.fakes.hooks import embedder_and_reranker as fakes
from tests.fakes.tei import score_of, vector_of

ENCODE, SCORE = "/v1/encode/bge", "/v1/score/cross"
TEXTS = ["red", "green", "blue"]
ITEMS = [{"id": "a", "text": "red"}, {"text": "green"}, {"id": "c", "text": "blue"}]
MSGPACK = "application/msgpack"
PROMPTED = CONFIG.replace(
    "bge: {upstream: embedder}", "bge: {upstream: embedder, prompts: {query: 'q: ', document: 'd: '}}"
)


async def post_json(boot: Boots, path: str, body: Any, status: int = 200, config: str = CONFIG) -> Any:
    """Return the JSON of one POST, after a check of its status."""
    reply = await posted(boot(fakes(), config), path, body)
    assert status == reply.status_code, reply.text
    return reply.json()


@pytest.mark.parametrize("path", [ENCODE, "/v1/encode/org/bge", "/v1/encode/org%2Fbge"])
@pytest.mark.parametrize("field", ["items", "input", "inputs"])
async def test_items_become_dense_vectors_with_their_ids(boot: Boots, path: str, field: str) -> None:
    reply = await post_json(boot, path, {field: ITEMS})

    assert {"model", "items", "timing"} == reply.keys()
    assert ["a", None, "c"] == [item.get("id") for item in reply["items"]]
    assert "id" not in reply["items"][1]
    assert all((8, "float32") == (item["dense"]["dims"], item["dense"]["dtype"]) for item in reply["items"])
    vectors = np.array([item["dense"]["values"] for item in reply["items"]], np.float32)
    np.testing.assert_array_equal([vector_of(text) for text in TEXTS], vectors)


@pytest.mark.parametrize("sent_as", ["application/json", MSGPACK, "application/x-msgpack"])
@pytest.mark.parametrize("accept", ["*/*", "application/json", MSGPACK, "application/x-msgpack"])
async def test_each_body_is_json_or_msgpack_by_its_header(boot: Boots, sent_as: str, accept: str) -> None:
    packs = "msgpack" in sent_as
    body = msgspec.msgpack.encode({"items": ITEMS}) if packs else json.dumps({"items": ITEMS}).encode()
    async with boot(fakes()) as gateway:
        reply = await gateway.client.post(
            ENCODE, content=body, headers={"content-type": sent_as, "accept": accept}
        )

    assert 200 == reply.status_code
    if "msgpack" in accept:
        assert MSGPACK == reply.headers["content-type"]
        dense = msgspec.msgpack.decode(reply.content)["items"][0]["dense"]
        vector = np.frombuffer(dense["values"][b"data"], dense["values"][b"type"])
    else:
        assert "application/json" == reply.headers["content-type"]
        vector = np.array(reply.json()["items"][0]["dense"]["values"], np.float32)
    np.testing.assert_array_equal(vector_of("red"), vector)


@pytest.mark.parametrize(
    ("body", "status"), [(b"\xc1", 400), (b"", 400), (msgspec.msgpack.encode({"items": 5}), 400)]
)
async def test_rejects_malformed_msgpack_with_400_in_json(boot: Boots, body: bytes, status: int) -> None:
    async with boot(fakes()) as gateway:
        reply = await gateway.client.post(ENCODE, content=body, headers={"content-type": MSGPACK})

    assert status == reply.status_code
    assert "INVALID_INPUT" == reply.json()["detail"]["code"]


@pytest.mark.parametrize("dtype", ["int8", "uint8", "binary", "ubinary"])
async def test_output_dtype_quantizes_the_same_vectors(boot: Boots, dtype: Any) -> None:
    reply = await post_json(boot, ENCODE, {"items": ITEMS, "params": {"output_dtype": dtype}})

    expected = quantize_rows(np.array([vector_of(text) for text in TEXTS]), dtype).tolist()
    assert expected == [item["dense"]["values"] for item in reply["items"]]


@pytest.mark.parametrize(("is_query", "prompt"), [(True, "q: "), (False, "d: "), (None, "")])
async def test_is_query_selects_the_models_prompt(boot: Boots, is_query: bool | None, prompt: str) -> None:
    body = {"items": ITEMS[:1], "params": {"options": {"is_query": is_query, "profile": "default"}}}
    reply = await post_json(boot, ENCODE, body, config=PROMPTED)

    vector = np.array(reply["items"][0]["dense"]["values"], np.float32)
    np.testing.assert_array_equal(vector_of(prompt + "red"), vector)


async def test_score_ranks_every_item_best_first(boot: Boots) -> None:
    body = {"query": {"id": "q1", "text": "q"}, "items": ITEMS}
    reply = await post_json(boot, SCORE, body)

    order = sorted(range(3), key=lambda i: -score_of("q", TEXTS[i]))
    names = ["a", "item-1", "c"]
    assert ("cross", "q1") == (reply["model"], reply["query_id"])
    assert [(names[i], rank) for rank, i in enumerate(order)] == [
        (item["item_id"], item["rank"]) for item in reply["scores"]
    ]
    np.testing.assert_allclose(
        [score_of("q", TEXTS[i]) for i in order], [item["score"] for item in reply["scores"]], rtol=1e-6
    )


@pytest.mark.parametrize(
    ("path", "body", "status", "code"),
    [
        (ENCODE, {}, 400, "INVALID_INPUT"),
        (ENCODE, {"items": []}, 400, "INVALID_INPUT"),
        (ENCODE, {"items": ITEMS, "input": ITEMS}, 400, "INVALID_INPUT"),
        (ENCODE, {"items": [{"id": "a"}]}, 400, "INVALID_INPUT"),
        (ENCODE, {"items": [{"text": ""}]}, 400, "INVALID_INPUT"),
        (ENCODE, {"items": [{"text": "a", "images": [{}]}]}, 400, "INVALID_INPUT"),
        (ENCODE, {"items": ITEMS, "params": {"output_types": ["dense", "x"]}}, 400, "INVALID_INPUT"),
        (ENCODE, {"items": ITEMS, "params": {"output_types": []}}, 400, "INVALID_INPUT"),
        (ENCODE, {"items": ITEMS, "params": {"output_dtype": "int4"}}, 400, "INVALID_INPUT"),
        (ENCODE, {"items": ITEMS, "params": {"instruction": "find"}}, 400, "INVALID_INPUT"),
        (ENCODE, {"items": ITEMS, "params": {"options": {"lora_id": "x"}}}, 400, "INVALID_INPUT"),
        (ENCODE, {"items": ITEMS, "params": {"options": {"profile": "x"}}}, 400, "INVALID_INPUT"),
        (ENCODE, {"items": ITEMS, "params": {"options": {"muvera": {}}}}, 400, "INVALID_INPUT"),
        (ENCODE, {"items": ITEMS, "params": {"output_types": ["sparse"]}}, 400, "OPERATION_UNSUPPORTED"),
        ("/v1/encode/cross", {"items": ITEMS}, 400, "OPERATION_UNSUPPORTED"),
        ("/v1/encode/no/where", {"items": ITEMS}, 404, "MODEL_NOT_FOUND"),
        (SCORE, {"query": {"text": ""}, "items": ITEMS}, 400, "INVALID_INPUT"),
        (SCORE, {"query": {}, "items": ITEMS}, 400, "INVALID_INPUT"),
        (SCORE, {"query": {"text": "q"}, "items": []}, 400, "INVALID_INPUT"),
        (SCORE, {"query": {"text": "q"}, "items": ITEMS, "instruction": "x"}, 400, "INVALID_INPUT"),
        ("/v1/score/no/where", {"query": {"text": "q"}, "items": ITEMS}, 404, "MODEL_NOT_FOUND"),
    ],
    ids=str,
)
async def test_rejects_unsupported_requests_with_a_code_and_a_message(
    boot: Boots, path: str, body: Any, status: int, code: str
) -> None:
    detail = (await post_json(boot, path, body, status))["detail"]

    assert {"code", "message"} == detail.keys()
    assert code == detail["code"]
    assert detail["message"]


async def test_requests_several_kinds_of_output_in_one_call() -> None:
    unused: Any = None
    data = SieEncodeRequest(items=[SieItem(text="a")], params=EncodeParams(output_types=["sparse", "dense"]))

    call = await decode_encode(
        Request(data, unused, InferenceApi(unused, unused, unused, unused, Limits(inputs=10)), "bge")
    )
    assert Encode(("a",), frozenset({Output.SPARSE, Output.DENSE})) == call.work


def encoded() -> EncodeReply:
    """Return two inputs with every kind of output."""
    rows = np.linspace(-1, 1, 24, dtype=np.float32).reshape(3, 8)
    terms = [TermWeights(np.array([3, 70], np.int32), np.array([0.5, 2], np.float32))] * 2
    return EncodeReply(7, rows[:2], tuple(terms), (rows, rows[:1]))


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
def test_item_holds_all_kinds_of_output(dtype: OutputDtype) -> None:
    reply = encoded()
    items = json.loads(json_bytes(encode_items(reply, ["a", None], dtype)))

    assert [{"id", "dense", "sparse", "multivector"}, {"dense", "sparse", "multivector"}] == [
        item.keys() for item in items
    ]
    kind = "float16" if dtype == "float16" else "float32"
    assert {"dims": None, "dtype": kind, "indices": [3, 70], "values": [0.5, 2.0]} == items[0]["sparse"]
    multivector = items[0]["multivector"]
    assert (8, 3, dtype) == (multivector["token_dims"], multivector["num_tokens"], multivector["dtype"])
    assert (3, 8) == np.array(multivector["values"]).shape
    assert dtype == items[1]["dense"]["dtype"]


def test_item_omits_kinds_that_were_not_requested() -> None:
    reply = EmbedReply(np.ones((1, 2), np.float32), 1)

    (item,) = encode_items(reply, [None], "float32")
    assert {"dense"} == item.keys()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"lora_id": "x"}, "name the model that has it"),
        ({"profile": "fast"}, "name a model"),
        ({"muvera": {}}, "multivector"),
        ({"smve": {}}, "multivector"),
        ({"pooling": "cls"}, "allowed: is_query, normalize"),
    ],
)
async def test_an_option_is_refused_with_the_way_out(boot: Boots, options: Any, reason: str) -> None:
    body = {"items": ITEMS, "params": {"options": options}}

    assert reason in (await post_json(boot, ENCODE, body, 400))["detail"]["message"]


async def test_vectors_are_not_normalized_on_request(boot: Boots) -> None:
    body = {"items": ITEMS[:1], "params": {"options": {"normalize": False}}}
    whole = (await post_json(boot, ENCODE, body))["items"][0]["dense"]["values"]
    body["params"] = {"output_types": ["dense", "sparse"], "options": {"normalize": False}}

    np.testing.assert_allclose(vector_of("red") * 2, whole, rtol=1e-5)
    assert "dense output alone" in (await post_json(boot, ENCODE, body, 400))["detail"]["message"]


async def test_models_are_listed_in_sies_form(boot: Boots) -> None:
    async with boot(fakes()) as gateway:
        body = (await gateway.client.get("/v1/models")).json()

    models = {model["name"]: model for model in body["models"]}
    assert [item["id"] for item in body["data"]] == list(models)
    assert {
        "name": "bge",
        "loaded": True,
        "state": "loaded",
        "outputs": ["dense"],
        "dims": {"dense": 8},
        "max_sequence_length": 16,
        "inputs": ["text"],
        "aliases": [],
    } == models["bge"]
    assert ["score"] == models["cross"]["outputs"]


async def test_models_of_dead_replicas_are_not_loaded(boot: Boots) -> None:
    async with boot({}) as gateway:
        models = (await gateway.client.get("/v1/models")).json()["models"]

    assert {("available", False)} == {(model["state"], model["loaded"]) for model in models}
