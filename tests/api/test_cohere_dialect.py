"""Cohere's /v2/embed and /v1/embed."""

import base64
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from gateway.api.dialects.cohere.embed import EmbedV1Request, EmbedV2Request
from gateway.api.server.encoding import EmbeddingType, quantize
from gateway.tenants.keyring import key_digest
from tests.conftest import CONFIG, KEY, Boots, posted
from tests.fakes.checkpoint import write_small_files
from tests.fakes.tei import FakeTei, vector_of

V1, V2 = "/v1/embed", "/v2/embed"
TEXTS = ["red", "green", "blue", "cyan", "pink"]
BODY = {"input_type": "search_document", "texts": TEXTS}
VECTORS = np.array([vector_of(text) for text in TEXTS])
PROMPTED = CONFIG.replace(
    "bge: {upstream: embedder}", "bge: {upstream: embedder, prompts: {query: 'q: ', passage: 'p: '}}"
)
LONG = "w " * 20


async def post_json(boot: Boots, path: str, body: Any, status: int = 200, config: str = CONFIG) -> Any:
    """Return the JSON of one POST, after a check of its status."""
    reply = await posted(boot({"tei-0": FakeTei(), "tei-1": FakeTei()}, config), path, body)
    assert status == reply.status_code, reply.text
    return reply.json()


@pytest.mark.parametrize("path", [V2, "/models/org/bge/v2/embed"])
async def test_v2_reply_has_the_fields_that_coheres_clients_read(boot: Boots, path: str) -> None:
    reply = await post_json(boot, path, BODY)

    assert {"id", "response_type", "embeddings", "texts", "meta"} == reply.keys()
    assert "embeddings_by_type" == reply["response_type"]
    assert TEXTS == reply["texts"]
    assert "2" == reply["meta"]["api_version"]["version"]
    assert reply["meta"]["billed_units"]["input_tokens"] >= len(TEXTS)
    np.testing.assert_array_equal(VECTORS, np.array(reply["embeddings"]["float"], np.float32))


@pytest.mark.parametrize("kind", ["int8", "uint8", "binary", "ubinary"])
@pytest.mark.parametrize("path", [V1, V2])
async def test_each_type_quantizes_the_same_vectors(boot: Boots, path: str, kind: EmbeddingType) -> None:
    reply = await post_json(boot, path, BODY | {"embedding_types": [kind]})

    assert {kind: quantize(VECTORS, kind).tolist()} == reply["embeddings"]


@pytest.mark.parametrize("path", [V1, V2])
async def test_returns_several_types_in_one_reply(boot: Boots, path: str) -> None:
    kinds = ["base64", "float", "binary", "float"]
    reply = (await post_json(boot, path, BODY | {"embedding_types": kinds}))["embeddings"]

    assert set(kinds) == reply.keys()
    packed = [np.frombuffer(base64.b64decode(encoded), "<f4") for encoded in reply["base64"]]
    np.testing.assert_array_equal(VECTORS, packed)


async def test_v1_without_types_returns_plain_vectors(boot: Boots) -> None:
    reply = await post_json(boot, V1, {"texts": TEXTS})

    assert ("embeddings_floats", TEXTS) == (reply["response_type"], reply["texts"])
    np.testing.assert_array_equal(VECTORS, np.array(reply["embeddings"], np.float32))


async def test_accepts_inputs_of_one_text_part(boot: Boots) -> None:
    inputs = [{"content": [{"type": "text", "text": text}]} for text in TEXTS]
    reply = await post_json(boot, V2, {"input_type": "classification", "inputs": inputs})

    assert "texts" not in reply
    np.testing.assert_array_equal(VECTORS, np.array(reply["embeddings"]["float"], np.float32))


@pytest.mark.parametrize("dimensions", [1, 4, 8])
async def test_output_dimension_cuts_and_normalizes(boot: Boots, dimensions: int) -> None:
    reply = await post_json(boot, V2, BODY | {"output_dimension": dimensions})

    cut = VECTORS[:, :dimensions]
    cut = cut / np.linalg.norm(cut, axis=1, keepdims=True)
    np.testing.assert_allclose(cut, reply["embeddings"]["float"], rtol=1e-5)


@pytest.mark.parametrize(
    ("input_type", "prompt"),
    [("search_query", "q: "), ("search_document", "p: "), ("classification", ""), ("clustering", "")],
)
@pytest.mark.parametrize("path", [V1, V2])
async def test_input_type_selects_the_models_prompt(
    boot: Boots, path: str, input_type: str, prompt: str
) -> None:
    body = {"texts": ["red"], "input_type": input_type, "embedding_types": ["float"]}
    reply = await post_json(boot, path, body, config=PROMPTED)

    np.testing.assert_array_equal(
        [vector_of(prompt + "red")], np.array(reply["embeddings"]["float"], np.float32)
    )


@pytest.mark.parametrize(("fields", "prompt"), [({}, ""), ({"input_type": "passage"}, "p: ")])
async def test_v2_accepts_vllms_prompt_names_and_their_absence(
    boot: Boots, fields: dict[str, str], prompt: str
) -> None:
    reply = await post_json(boot, V2, {"texts": ["red"]} | fields, config=PROMPTED)

    np.testing.assert_array_equal(
        [vector_of(prompt + "red")], np.array(reply["embeddings"]["float"], np.float32)
    )


async def test_a_prompt_that_the_model_lacks_is_refused(boot: Boots) -> None:
    server = FakeTei()
    server.prompts = frozenset()
    async with boot({"tei-0": server, "tei-1": server}) as gateway:
        reply = await gateway.post(V2, {"texts": ["red"], "input_type": "nothing"})

    assert 400 == reply.status_code


@pytest.mark.parametrize(("truncate", "status"), [("NONE", 400), ("START", 200), ("END", 200), (None, 200)])
async def test_truncate_decides_whether_long_texts_are_cut(
    boot: Boots, truncate: str | None, status: int
) -> None:
    await post_json(boot, V2, {"texts": [LONG], "input_type": "search_query", "truncate": truncate}, status)


@pytest.mark.parametrize(("truncate", "side"), [("START", "left"), ("END", "right")])
async def test_truncate_selects_the_end_to_cut(boot: Boots, truncate: str, side: str) -> None:
    server = FakeTei(auto_truncate=False)
    async with boot({"tei-0": server}) as gateway:
        await gateway.post(V2, BODY | {"texts": [LONG], "truncate": truncate})

    assert {side} == {body["truncation_direction"].lower() for _, body in server.requests}


@pytest.mark.parametrize(
    ("path", "wrong"),
    [
        (V2, {"texts": None}),
        (V2, {"texts": []}),
        (V2, {"texts": ["a", ""]}),
        (V2, {"texts": "a"}),
        (V2, {"texts": [5]}),
        (V2, {"input_type": ""}),
        (V2, {"input_type": "image"}),
        (V2, {"inputs": [{"content": [{"type": "text", "text": "a"}]}]}),
        (V2, {"texts": None, "inputs": []}),
        (V2, {"texts": None, "inputs": [{"content": []}]}),
        (V2, {"texts": None, "inputs": [{"content": [{"type": "text", "text": "a"}] * 2}]}),
        (V2, {"texts": None, "inputs": [{"content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}),
        (V2, {"texts": None, "images": ["data:image/png;base64,"]}),
        (V2, {"embedding_types": []}),
        (V2, {"embedding_types": ["float16"]}),
        (V2, {"truncate": "MIDDLE"}),
        (V2, {"output_dimension": 0}),
        (V2, {"output_dimension": 9}),
        (V2, {"max_tokens": 0}),
        (V2, {"max_tokens": 2, "texts": ["one two three"]}),
        (V1, {"texts": None}),
        (V1, {"images": ["data:"]}),
        (V1, {"texts": [""]}),
    ],
    ids=str,
)
async def test_rejects_unsupported_requests_with_400_and_a_message(
    boot: Boots, path: str, wrong: Any
) -> None:
    reply = await post_json(boot, path, BODY | wrong, 400)

    assert {"message"} == reply.keys()
    assert reply["message"]


async def test_accepts_more_texts_than_cohere(boot: Boots) -> None:
    texts = [f"text {i}" for i in range(200)]
    reply = await post_json(boot, V2, {"texts": texts, "input_type": "search_document"})

    np.testing.assert_array_equal(
        [vector_of(text) for text in texts], np.array(reply["embeddings"]["float"], np.float32)
    )


@pytest.mark.parametrize("path", [V1, V2])
@pytest.mark.parametrize(
    ("truncate", "text"), [(None, "one two"), ("END", "one two"), ("START", "two three"), ("NONE", None)]
)
async def test_max_tokens_cuts_or_refuses_as_truncate_says(
    boot: Boots, tmp_path: Path, path: str, truncate: str | None, text: str | None
) -> None:
    config = CONFIG.replace("backend: tei", f"tokenizer: {write_small_files(tmp_path)}, backend: tei")
    body = {
        "texts": ["one two three", "a"],
        "input_type": "clustering",
        "embedding_types": ["float"],
        "max_tokens": 2,
    }
    async with boot({"tei-0": FakeTei(), "tei-1": FakeTei()}, config) as gateway:
        reply = await gateway.post(path, body | ({} if truncate is None else {"truncate": truncate}))

    assert (400 if text is None else 200) == reply.status_code
    if text is not None:
        vectors = np.array(reply.json()["embeddings"]["float"], np.float32)
        np.testing.assert_array_equal([vector_of(text), vector_of("a")], vectors)
        assert "0" == reply.headers["x-truncated-inputs"]


async def test_max_tokens_that_no_text_exceeds_needs_no_tokenizer(boot: Boots) -> None:
    await post_json(boot, V2, BODY | {"max_tokens": 4096})


# Every field that Cohere documents, of both versions. `images` is refused, the others are applied.
DOCUMENTED = {
    *("texts", "images", "inputs", "model", "input_type", "max_tokens", "output_dimension"),
    *("embedding_types", "truncate", "priority"),
}


def test_each_documented_field_is_a_field_of_the_body() -> None:
    assert DOCUMENTED == {field.name for field in msgspec.structs.fields(EmbedV2Request)}
    # Only the second version has these.
    v1 = {field.name for field in msgspec.structs.fields(EmbedV1Request)}
    assert {"inputs", "priority"} == DOCUMENTED - v1


async def test_coheres_clients_check_their_key(boot: Boots) -> None:
    tenants = f"tenants: {{acme: {{keys: ['{key_digest(KEY)}']}}}}"
    async with boot({"tei-0": FakeTei()}, CONFIG + tenants) as gateway:
        valid = await gateway.client.post("/v1/check-api-key")
        wrong = await gateway.client.post("/v1/check-api-key", headers={"authorization": "Bearer wrong"})

    assert (200, {"valid": True, "organization_id": "acme", "owner_id": None}) == (
        valid.status_code,
        valid.json(),
    )
    assert (401, {"message"}) == (wrong.status_code, wrong.json().keys())
