"""Every field that OpenAI, Jina, NVIDIA NIM and Voyage document for /v1/embeddings: applied or refused."""

import base64
from typing import Any

import msgspec
import numpy as np
import pytest

from gateway.api.dialects.openai.embeddings import OpenAIEmbeddingsRequest
from gateway.api.server.encoding import QuantizedType, quantize
from gateway.api.wire.vllm import VllmOptions
from tests.conftest import CONFIG, Boots, posted
from tests.fakes.tei import FakeTei, vector_of
from tests.fakes.vllm import FakeVllm

PATH = "/v1/embeddings"
CONFIG_OF_ROLES = CONFIG.replace(
    "bge: {upstream: embedder}", "bge: {upstream: embedder, prompts: {query: 'q: ', passage: 'p: '}}"
)
LATE = """
upstreams: {late: {backend: vllm, replicas: ["http://late"]}}
models: {colbert: {upstream: late}}
"""
# Field → a value whose effect the gateway applies (or that asks for nothing), and one that it refuses.
# A field without the second is applied with every value; `user` is the only one that is ignored.
OPENAI_FIELDS: dict[str, tuple[Any, ...]] = {
    "input": ("a", {"image": "x"}),
    "model": ("bge", "nowhere"),
    "encoding_format": ("base64", "hex"),
    "dimensions": (4, 9),
    "user": ("u",),
}
JINA_FIELDS: dict[str, tuple[Any, ...]] = {
    "embedding_type": (["float", "ubinary"], "int4"),
    "encoding_type": ("float", "int4"),
    "task": ("retrieval.query", "nl2code.query"),
    "normalized": (False,),
    "truncate": (True, "MIDDLE"),
    "late_chunking": (False, True),
    "return_multivector": (False, True),
    "return_tokenized_input": (False, True),
    "input_type": ("document", "search_query"),
}
NIM_FIELDS: dict[str, tuple[Any, ...]] = {
    "input_type": ("passage", "other"),
    "truncate": ("START", "MIDDLE"),
    "embedding_type": ("int8", "int4"),
    "modality": (["text"], "image"),
    "dimensions": (4, 9),
    "user": ("u",),
}
VOYAGE_FIELDS: dict[str, tuple[Any, ...]] = {
    "input_type": ("query", "other"),
    "truncation": (True, "yes"),
    "output_dimension": (4, 9),
    "output_dtype": ("int8", "int4"),
    "encoding_format": ("base64", "hex"),
}
PEERS = {"openai": OPENAI_FIELDS, "jina": JINA_FIELDS, "nim": NIM_FIELDS, "voyage": VOYAGE_FIELDS}
FIELDS = [(peer, field) for peer, fields in PEERS.items() for field in fields]


async def post_json(boot: Boots, body: Any, status: int = 200, config: str = CONFIG) -> Any:
    """Return the JSON of one POST, after a check of its status."""
    replicas = {"tei-0": FakeTei(), "tei-1": FakeTei()}
    for fake in replicas.values():
        fake.prompts = frozenset()
    reply = await posted(boot(replicas, config), PATH, {"input": "a"} | body)
    assert status == reply.status_code, reply.text
    return reply.json()


@pytest.mark.parametrize(("peer", "field"), FIELDS)
async def test_a_documented_field_is_applied_or_refused(boot: Boots, peer: str, field: str) -> None:
    applied, *refused = PEERS[peer][field]
    await post_json(boot, {field: applied})
    for value in refused:
        reply = await post_json(boot, {field: value}, 404 if field == "model" else 400)
        assert reply["error"]["message"] == reply["detail"]


def test_each_field_of_the_body_belongs_to_a_peer() -> None:
    named = {field for fields in PEERS.values() for field in fields} - {"user"}
    own = {"embed_dtype", "endianness", "late_chunking_params"}
    vllms = {field.name for field in msgspec.structs.fields(VllmOptions)} | own

    assert {field.name for field in msgspec.structs.fields(OpenAIEmbeddingsRequest)} - vllms == named


@pytest.mark.parametrize("field", ["dimensions", "output_dimension"])
async def test_a_width_is_cut_under_either_name(boot: Boots, field: str) -> None:
    reply = await post_json(boot, {field: 4})

    cut = vector_of("a")[:4]
    np.testing.assert_allclose(cut / np.linalg.norm(cut), reply["data"][0]["embedding"], rtol=1e-6)


async def test_too_many_dimensions_are_refused_with_their_param(boot: Boots) -> None:
    error = (await post_json(boot, {"dimensions": 9}, 400))["error"]

    assert ("dimensions", "invalid_request_error") == (error["param"], error["type"])


@pytest.mark.parametrize(("kind", "prompt"), [("query", "q: "), ("passage", "p: "), ("document", "p: ")])
async def test_input_type_selects_the_prompt(boot: Boots, kind: str, prompt: str) -> None:
    reply = await post_json(boot, {"input_type": kind}, config=CONFIG_OF_ROLES)

    np.testing.assert_array_equal(
        vector_of(prompt + "a"), np.array(reply["data"][0]["embedding"], np.float32)
    )


@pytest.mark.parametrize("task", ["nl2code.query", "code2nl.passage"])
async def test_a_task_of_code_selects_its_own_prompt(boot: Boots, task: str) -> None:
    name = task.replace(".query", "_query").replace(".passage", "_document")
    config = CONFIG.replace(
        "bge: {upstream: embedder}", f"bge: {{upstream: embedder, prompts: {{{name}: 'c: '}}}}"
    )
    reply = await post_json(boot, {"task": task}, config=config)

    np.testing.assert_array_equal(vector_of("c: a"), np.array(reply["data"][0]["embedding"], np.float32))


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"truncate": "NONE"}, 400),
        ({"truncate": "END"}, 200),
        ({"truncate": "START"}, 200),
        ({"truncation": False}, 400),
        ({"truncation": True}, 200),
    ],
    ids=str,
)
async def test_truncation_of_each_peer(boot: Boots, fields: Any, status: int) -> None:
    model = "bge" if status == 400 else "strict"
    await post_json(boot, {"input": "w " * 20, "model": model} | fields, status)


@pytest.mark.parametrize(("truncate", "direction"), [("START", "Left"), ("END", None)])
async def test_truncate_names_the_end_that_is_cut(boot: Boots, truncate: str, direction: str | None) -> None:
    replicas = {"tei-0": FakeTei(), "tei-1": FakeTei()}
    async with boot(replicas) as gateway:
        await gateway.post(PATH, {"input": "w " * 20, "truncate": truncate})

    (sent,) = [request for fake in replicas.values() for _, request in fake.requests]
    assert direction == sent.get("truncation_direction")


@pytest.mark.parametrize("kind", ["int8", "uint8", "binary", "ubinary"])
@pytest.mark.parametrize("field", ["embedding_type", "output_dtype"])
async def test_numbers_of_a_type(boot: Boots, field: str, kind: QuantizedType) -> None:
    reply = await post_json(boot, {field: kind})

    assert quantize(vector_of("a")[None], kind)[0].tolist() == reply["data"][0]["embedding"]


@pytest.mark.parametrize("kind", ["int8", "uint8", "binary", "ubinary"])
async def test_voyage_packs_the_numbers_of_a_type(boot: Boots, kind: QuantizedType) -> None:
    reply = await post_json(boot, {"output_dtype": kind, "encoding_format": "base64"})

    expected = quantize(vector_of("a")[None], kind)[0]
    packed = np.frombuffer(base64.b64decode(reply["data"][0]["embedding"]), expected.dtype)
    np.testing.assert_array_equal(expected, packed)


async def test_several_types_are_listed_by_name(boot: Boots) -> None:
    reply = await post_json(boot, {"embedding_type": ["float", "base64", "ubinary", "float"]})

    embedding = reply["data"][0]["embedding"]
    assert ["float", "base64", "ubinary"] == list(embedding)
    assert quantize(vector_of("a")[None], "ubinary")[0].tolist() == embedding["ubinary"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"dimensions": 4, "output_dimension": 2}, "output_dimension"),
        ({"truncate": True, "truncation": False}, "truncation"),
        ({"embedding_type": "float", "output_dtype": "int8"}, "output_dtype"),
    ],
    ids=str,
)
async def test_fields_that_contradict_each_other_are_refused(boot: Boots, fields: Any, param: str) -> None:
    assert param == (await post_json(boot, fields, 400))["error"]["param"]


async def reply_of_colbert(boot: Boots, path: str, body: Any, status: int = 200) -> Any:
    """Return the reply of a model with one vector for each token."""
    async with boot({"late": FakeVllm(task="token_embed")}, LATE) as gateway:
        reply = await gateway.post(path, {"input": ["a b", "c"]} | body)
    assert status == reply.status_code, reply.text
    return reply.json()


async def test_multivector_returns_a_vector_for_each_token(boot: Boots) -> None:
    reply = await reply_of_colbert(boot, PATH, {"return_multivector": True})
    same = await reply_of_colbert(boot, "/v1/multi-vector", {"input_type": "document"})

    assert reply["data"] == same["data"]
    assert [("embeddings", 0), ("embeddings", 1)] == [
        (item["object"], item["index"]) for item in reply["data"]
    ]
    assert [4, 3] == [len(item["embeddings"]) for item in reply["data"]]
    np.testing.assert_allclose(1, np.linalg.norm(reply["data"][0]["embeddings"], axis=1), rtol=1e-5)


async def test_multivectors_have_the_requested_type_and_width(boot: Boots) -> None:
    whole = await reply_of_colbert(boot, "/v1/multi-vector", {})
    reply = await reply_of_colbert(boot, "/v1/multi-vector", {"embedding_type": "base64", "dimensions": 4})

    rows = np.array(whole["data"][0]["embeddings"], np.float32)[:, :4]
    packed = [np.frombuffer(base64.b64decode(item), "<f4") for item in reply["data"][0]["embeddings"]]
    np.testing.assert_allclose(rows / np.linalg.norm(rows, axis=1, keepdims=True), packed, rtol=1e-5)


@pytest.mark.parametrize(
    ("body", "param"),
    [({"dimensions": 10_000}, "dimensions"), ({"normalized": False}, "normalized")],
    ids=str,
)
async def test_multivectors_refuse_what_they_cannot_have(boot: Boots, body: Any, param: str) -> None:
    assert param == (await reply_of_colbert(boot, "/v1/multi-vector", body, 400))["error"]["param"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"use_activation": False, "normalized": True}, "normalized"),
        ({"use_activation": True, "normalized": False}, "normalized"),
        ({"use_activation": False, "softmax": True}, "use_activation"),
        ({"truncate": False, "truncate_prompt_tokens": 4}, "truncate_prompt_tokens"),
        ({"truncate": "NONE", "truncate_prompt_tokens": 4}, "truncate_prompt_tokens"),
        ({"truncation": False, "truncate_prompt_tokens": -1}, "truncate_prompt_tokens"),
        ({"truncate": "START", "truncation_side": "right", "truncate_prompt_tokens": 4}, "truncation_side"),
        ({"use_activation": False, "return_multivector": True}, "use_activation"),
    ],
)
async def test_options_of_vllm_and_others_that_contradict_each_other_are_refused(
    boot: Boots, fields: dict[str, Any], param: str
) -> None:
    async with boot({"tei-0": FakeTei()}) as gateway:
        reply = await gateway.post("/v1/embeddings", {"model": "bge", "input": "a b c"} | fields)

    assert (400, param) == (reply.status_code, reply.json()["error"]["param"])


@pytest.mark.parametrize(
    "fields",
    [
        {"use_activation": True, "normalized": True},
        {"truncate": "END", "truncation_side": "right"},
        {"truncate": True, "truncate_prompt_tokens": -1},
    ],
)
async def test_fields_that_say_the_same_twice_are_taken(boot: Boots, fields: dict[str, Any]) -> None:
    async with boot({"tei-0": FakeTei()}) as gateway:
        reply = await gateway.post("/v1/embeddings", {"model": "bge", "input": "a b c"} | fields)

    assert 200 == reply.status_code, reply.text
