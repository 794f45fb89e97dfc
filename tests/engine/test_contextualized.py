"""Chunks of documents at /v1/contextualizedembeddings and with `late_chunking_params`, on our own engine."""

import base64
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from backends.contract import ChunkSize, EmbedChunks, EmbedChunksReply
from backends.contract.errors import InvalidWork
from backends.torch.load.load_plan import LoadOptions
from backends.torch.load.loader import load
from gateway.api.server.encoding import quantize
from tests.conftest import Boots, Running
from tests.engine.checkpoints import ENCODERS, make_encoder, make_sentence_model
from tests.engine.conftest import Engines
from tests.engine.engines import EngineInProcess, load_tiny, run_work
from tests.engine.test_late_chunking import CONFIG, PARTS, PROMPT, expected_of

OTHER = ("A cat sleeps.", "It dreams of mice.")
PATH = "/v1/contextualizedembeddings"
TEXT = "Größe: 中 😀 and cafe\u0301, the capital of Germany has many lakes and a river."


@pytest.fixture
async def gateway(boot: Boots, minilm: Path) -> AsyncIterator[Running]:
    backend = EngineInProcess(load(minilm, "minilm", LoadOptions("float32", "cpu")))
    async with boot({}, CONFIG, engines={"minilm": backend}) as running:
        yield running


def unpacked(text: str, dtype: str) -> Any:
    return np.frombuffer(base64.b64decode(text), dtype)


@pytest.mark.parametrize("field", ["inputs", "input"])
async def test_each_chunk_knows_its_own_document_only(gateway: Running, minilm: Path, field: str) -> None:
    body = {"model": "minilm", field: [list(PARTS), list(OTHER)], "encoding_format": "float"}
    reply = (await gateway.post(PATH, body)).json()

    assert ["list", "list", "list"] == [reply["object"], *(item["object"] for item in reply["data"])]
    assert [0, 1] == [item["index"] for item in reply["data"]]
    for item, chunks in zip(reply["data"], (PARTS, OTHER), strict=True):
        assert list(range(len(chunks))) == [each["index"] for each in item["data"]]
        vectors = [each["embedding"] for each in item["data"]]
        np.testing.assert_allclose(expected_of(minilm, chunks), vectors, atol=1e-6)
    tokenizer = AutoTokenizer.from_pretrained(minilm)
    tokens = sum(len(tokenizer(text)["input_ids"]) - 2 for text in PARTS + OTHER) + 2 * 2
    assert {"prompt_tokens": tokens, "total_tokens": tokens} == reply["usage"]
    assert "chunker_version" not in reply


async def test_a_lone_chunk_has_the_vector_of_its_text(gateway: Running) -> None:
    body = {"model": "minilm", "inputs": [[PARTS[0]], [PARTS[1]]]}
    reply = (await gateway.post(PATH, body)).json()
    plain = (await gateway.post("/v1/embeddings", {"model": "minilm", "input": PARTS[:2]})).json()

    found = [item["data"][0]["embedding"] for item in reply["data"]]
    np.testing.assert_allclose([item["embedding"] for item in plain["data"]], found, atol=1e-6)


async def test_a_prompt_stands_before_each_document(gateway: Running, minilm: Path) -> None:
    body = {"model": "prompted", "inputs": [list(PARTS), list(OTHER)], "input_type": "document"}
    reply = (await gateway.post(PATH, body)).json()

    for item, chunks in zip(reply["data"], (PARTS, OTHER), strict=True):
        vectors = [each["embedding"] for each in item["data"]]
        np.testing.assert_allclose(expected_of(minilm, chunks, PROMPT), vectors, atol=1e-6)


async def test_formats_of_both_vendors(gateway: Running, minilm: Path) -> None:
    exact = expected_of(minilm, OTHER)

    async def first(**fields: Any) -> Any:
        reply = await gateway.post(PATH, {"model": "minilm"} | fields)
        assert 200 == reply.status_code, reply.text
        return [each["embedding"] for each in reply.json()["data"][0]["data"]]

    voyage, perplexity = {"inputs": [list(OTHER)]}, {"input": [list(OTHER)]}
    packed = await first(**voyage, encoding_format="base64")
    np.testing.assert_allclose(exact, [unpacked(each, "<f4") for each in packed], atol=1e-6)
    small = await first(**voyage, encoding_format="base64", output_dtype="int8", output_dimension=64)
    cut = exact[:, :64] / np.linalg.norm(exact[:, :64], axis=1, keepdims=True)
    assert 1 >= np.abs(quantize(cut, "int8").astype(int) - [unpacked(each, "i1") for each in small]).max()
    # Perplexity has no numbers: without a format it sends bytes.
    assert await first(**perplexity) == await first(**perplexity, encoding_format="base64_int8")
    bits = await first(**perplexity, encoding_format="base64_binary", dimensions=128)
    # The first component is the highest bit of the first byte.
    ones = np.unpackbits(unpacked(bits[0], "u1"))
    np.testing.assert_array_equal(exact[0, :128] > 0, ones)
    plain = (
        await gateway.post(
            "/v1/embeddings", {"model": "minilm", "input": OTHER[0], "encoding_format": "base64_int8"}
        )
    ).json()
    assert (384,) == unpacked(plain["data"][0]["embedding"], "i1").shape
    # Below its own path that is so for texts, too.
    own = (await gateway.post("/perplexity/v1/embeddings", {"model": "minilm", "input": OTHER[0]})).json()
    assert plain["data"] == own["data"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "inputs"),
        ({"inputs": []}, "inputs"),
        ({"inputs": [["a"], []]}, "inputs"),
        ({"input": [["a", ""]]}, "input"),
        ({"inputs": ["a"]}, "inputs"),
        ({"inputs": [["a"]], "input": [["a"]]}, "inputs"),
        ({"input": [["a"]], "output_dtype": "int8"}, "output_dtype"),
        ({"inputs": [["a"]], "output_dtype": "int8", "encoding_format": "base64_int8"}, "output_dtype"),
        ({"inputs": [["a"]], "dimensions": 8, "output_dimension": 9}, "dimensions"),
        ({"inputs": [["a"]], "chunk_size": 8}, "chunk_size"),
        ({"inputs": [["a"]], "enable_auto_chunking": True}, "enable_auto_chunking"),
        (
            {
                "inputs": [["a"]],
                "enable_auto_chunking": True,
                "input_type": "document",
                "chunk_size": 4,
                "chunk_overlap": 4,
            },
            "chunk_overlap",
        ),
        ({"inputs": [["a", "b"]], "enable_auto_chunking": True, "input_type": "document"}, "inputs"),
        ({"inputs": [["a"] * 9000]}, "inputs"),
    ],
    ids=str,
)
async def test_refusals_name_the_field(gateway: Running, fields: dict[str, Any], param: str) -> None:
    reply = await gateway.post(PATH, {"model": "minilm"} | fields)

    error = reply.json()
    assert (400, param) == (reply.status_code, error["error"]["param"])
    assert error["detail"] == error["error"]["message"]


async def test_a_document_longer_than_the_model_is_refused(gateway: Running) -> None:
    reply = await gateway.post(PATH, {"model": "minilm", "inputs": [["a"], ["word " * 200] * 2]})

    assert 400 == reply.status_code
    assert "input 1: This model's maximum context length is 256 tokens" in reply.json()["detail"]


async def test_a_model_without_late_chunking_is_refused(boot: Boots, minilm: Path, tmp_path: Path) -> None:
    make_config, _ = ENCODERS["bert"]
    make_sentence_model(make_encoder(make_config(), minilm, tmp_path / "encoder"), tmp_path / "model", "cls")
    backend = EngineInProcess(load_tiny(tmp_path / "model"))
    async with boot({}, CONFIG, engines={"minilm": backend}) as gateway:
        reply = await gateway.post(PATH, {"model": "minilm", "inputs": [["a", "b"]]})

    assert (400, "model") == (reply.status_code, reply.json()["error"]["param"])
    assert "its pooling: cls" in reply.json()["detail"]


async def test_chunks_of_a_size_have_ranges(minilm: Path, engine_of: Engines) -> None:
    engine = engine_of(minilm, "float32")
    work = EmbedChunks(((TEXT,), ("short",)), ChunkSize(4))
    reply = await run_work(engine, work, EmbedChunksReply)

    encoded = AutoTokenizer.from_pretrained(minilm)(TEXT, return_offsets_mapping=True)
    length = len(encoded["input_ids"])
    assert reply.ranges is not None
    assert (-(-length // 4), 1) == reply.counts
    assert [(start, min(start + 4, length)) for start in range(0, length, 4)] == [
        each.tokens for each in reply.ranges[:-1]
    ]
    for each in reply.ranges[:-1]:
        offsets = [pair for pair in encoded["offset_mapping"][slice(*each.tokens)] if pair[1] > pair[0]]
        expected = (offsets[0][0], max(stop for _, stop in offsets)) if offsets else None
        assert expected == each.characters
    # A chunk of a whole text is that text.
    assert ((0, 3), (0, 5)) == (reply.ranges[-1].tokens, reply.ranges[-1].characters)
    assert (length, 3) == reply.input_tokens


@pytest.mark.parametrize(
    ("size", "length", "expected"),
    [
        (ChunkSize(4), 9, [(0, 4), (4, 8), (8, 9)]),
        (ChunkSize(4), 8, [(0, 4), (4, 8)]),
        (ChunkSize(4, 1), 8, [(0, 4), (3, 7), (6, 8)]),
        (ChunkSize(4, 1), 7, [(0, 4), (3, 7)]),
        (ChunkSize(9, 8), 9, [(0, 9)]),
        (ChunkSize(9), 1, [(0, 1)]),
        (ChunkSize(1), 2, [(0, 1), (1, 2)]),
    ],
)
def test_chunks_cover_a_text(size: ChunkSize, length: int, expected: list[tuple[int, int]]) -> None:
    assert expected == size.spans(length)


@pytest.mark.parametrize("model", ["minilm", "prompted"])
async def test_vllms_parameters_return_a_matrix_and_ranges(
    gateway: Running, engine_of: Engines, minilm: Path, model: str
) -> None:
    body = {
        "model": model,
        "input": [TEXT, "short"],
        "late_chunking_params": {"chunk_size": 5},
        "task": "retrieval.passage",
    }
    reply = (await gateway.post("/v1/embeddings", body)).json()

    prompt = PROMPT if model == "prompted" else ""
    work = EmbedChunks(((prompt + TEXT,), (prompt + "short",)), ChunkSize(5))
    expected = await run_work(engine_of(minilm, "float32"), work, EmbedChunksReply)
    assert expected.ranges is not None
    for item, span in zip(reply["data"], expected.spans, strict=True):
        np.testing.assert_allclose(expected.vectors[span], item["embedding"], atol=1e-6)
        places, ranges = item["late_chunking"]["chunks"], expected.ranges[span]
        assert [list(each.tokens) for each in ranges] == [place["token_range"] for place in places]
        for place, each in zip(places, ranges, strict=True):
            # Characters are those of the text that was sent.
            whole = (prompt + (TEXT, "short")[item["index"]])[slice(*(each.characters or (0, 0)))]
            own = (TEXT, "short")[item["index"]][slice(*(place["char_range"] or (0, 0)))]
            assert whole.endswith(own)
            assert own == whole or prompt
    assert expected.input_tokens is not None
    assert list(expected.input_tokens) == [item["late_chunking"]["input_tokens"] for item in reply["data"]]


async def test_voyages_auto_chunking_returns_the_texts(gateway: Running) -> None:
    body = {
        "model": "minilm",
        "inputs": [[TEXT], ["short"]],
        "input_type": "document",
        "enable_auto_chunking": True,
        "chunk_size": 8,
        "chunk_overlap": 2,
    }
    reply = (await gateway.post(PATH, body)).json()

    assert "tokens" == reply["chunker_version"]
    texts = [each["text"] for each in reply["data"][0]["data"]]
    assert len(texts) > 2
    assert texts[0].startswith("Größe")
    assert texts[-1].endswith("river.")
    assert all(text in TEXT for text in texts)
    assert ["short"] == [each["text"] for each in reply["data"][1]["data"]]


@pytest.mark.parametrize(("words", "size"), [(7, 8), (6, 7), (15, 8), (1, 1), (3, 1), (3, 2)])
async def test_special_tokens_make_no_chunk_of_their_own(gateway: Running, words: int, size: int) -> None:
    text = " ".join(["word"] * words)
    body = {
        "model": "minilm",
        "inputs": [[text], [text]],
        "input_type": "document",
        "enable_auto_chunking": True,
        "chunk_size": size,
    }
    reply = (await gateway.post(PATH, body)).json()

    for item in reply["data"]:
        assert text == " ".join(each["text"] for each in item["data"])
        assert "" not in [each["text"] for each in item["data"]]
        assert list(range(len(item["data"]))) == [each["index"] for each in item["data"]]
    if words <= size:
        plain = (await gateway.post("/v1/embeddings", {"model": "minilm", "input": text})).json()
        found = reply["data"][0]["data"][0]["embedding"]
        np.testing.assert_allclose(plain["data"][0]["embedding"], found, atol=1e-6)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"late_chunking": True}, "late_chunking_params"),
        ({"return_multivector": True}, "late_chunking_params"),
        ({"truncate_prompt_tokens": 8}, "truncate_prompt_tokens"),
        ({"add_special_tokens": False}, "add_special_tokens"),
        ({"encoding_format": "bytes"}, "encoding_format"),
        ({"late_chunking_params": {"chunk_size": 0}}, "late_chunking_params"),
        ({"late_chunking_params": {"chunk_size": True}}, "late_chunking_params"),
        ({"late_chunking_params": {}}, "late_chunking_params"),
        ({"late_chunking_params": {"chunk_size": 1, "overlap": 1}}, "late_chunking_params"),
        ({"input": ["word " * 9000] * 300, "late_chunking_params": {"chunk_size": 1}}, "input"),
    ],
    ids=lambda value: str(value)[:60],
)
async def test_vllms_parameters_are_refused_with_what_they_exclude(
    gateway: Running, fields: dict[str, Any], param: str
) -> None:
    body = {"model": "minilm", "input": "a", "late_chunking_params": {"chunk_size": 4}}
    reply = await gateway.post("/v1/embeddings", body | fields)

    assert (400, param) == (reply.status_code, reply.json()["error"]["param"])


async def test_a_long_text_is_not_split(minilm: Path, engine_of: Engines) -> None:
    with pytest.raises(InvalidWork, match="maximum context length is 256") as raised:
        await run_work(
            engine_of(minilm, "float32"),
            EmbedChunks((("a",), ("word " * 400,)), ChunkSize(16)),
            EmbedChunksReply,
        )
    assert 1 == raised.value.input_index
