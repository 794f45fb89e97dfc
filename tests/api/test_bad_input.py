"""Invalid requests, and the error that each dialect answers."""

import asyncio
import json
import tracemalloc
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from gateway.api.server.body import place_of_broken_text
from tests.conftest import CONFIG, KEY, Boots, Running
from tests.fakes.hooks import Gate, tei_with_hook, until
from tests.fakes.hooks import embedder_and_reranker as fakes
from tests.fakes.tei import FakeTei

OPENAI, EMBED, RERANK, SIMILARITY, TOKENIZE = (
    "/v1/embeddings",
    "/embed",
    "/rerank",
    "/similarity",
    "/tokenize",
)
MEGABYTE = 1_000_000


def assert_openai(reply: httpx.Response, status: int, code: str | None, param: str | None = None) -> None:
    """Assert OpenAI's envelope: four keys, of which two are a string or null."""
    assert "application/json" == reply.headers["content-type"]
    error = reply.json()["error"]
    assert ["error", "detail"] == list(reply.json())
    assert {"message", "type", "param", "code"} == error.keys()
    assert (status, "invalid_request_error") == (reply.status_code, error["type"])
    assert (code, param) == (error["code"], error["param"])
    assert error["message"]


def assert_tei(reply: httpx.Response, status: int, error_type: str) -> None:
    """Assert TEI's envelope: two keys."""
    assert "application/json" == reply.headers["content-type"]
    assert {"error", "error_type"} == reply.json().keys()
    assert (status, error_type) == (reply.status_code, reply.json()["error_type"])
    assert reply.json()["error"]


async def post_bytes(
    boot: Boots, path: str, body: bytes, config: str = CONFIG, **headers: str
) -> httpx.Response:
    """Send one POST of raw bytes and return the reply."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    async with boot(fakes(), config) as gateway:
        return await gateway.client.post(path, content=body, headers=named)


NOT_JSON = {
    "nothing": b"",
    "spaces": b"   ",
    "cut_off": b'{"input": "a',
    "one_brace_too_many": b'{"input": "a", "inputs": "a"}}',
    "single_quotes": b"{'input': 'a'}",
    "not_a_number": b'{"input": "a", "inputs": "a", "dimensions": NaN}',
    "infinity": b'{"input": "a", "inputs": "a", "dimensions": Infinity}',
    "invalid_utf8": b'{"input": "\xff", "inputs": "\xff"}',
    "overlong_utf8": b'{"input": "\xc0\xaf", "inputs": "\xc0\xaf"}',
    "surrogate_in_utf8": b'{"input": "\xed\xa0\x80", "inputs": "\xed\xa0\x80"}',
    "lone_high_surrogate": b'{"input": "\\ud800 a", "inputs": "\\ud800 a"}',
    "lone_low_surrogate": b'{"input": "\\udc00 a", "inputs": "\\udc00 a"}',
    "utf16": '{"input": "a", "inputs": "a"}'.encode("utf-16"),
    "form": b"input=a&inputs=a",
    "deep_list": b'{"unknown_field": ' + b"[" * 100_000 + b"]" * 100_000 + b', "input": "a", "inputs": "a"}',
    "deep_object": b'{"x":' * 100_000 + b"1" + b"}" * 100_000,
}


@pytest.mark.parametrize("body", NOT_JSON.values(), ids=NOT_JSON.keys())
async def test_malformed_json_is_400_in_both_dialects(boot: Boots, body: bytes) -> None:
    broken_text = None if place_of_broken_text(body) is None else "input"
    assert_openai(await post_bytes(boot, OPENAI, body), 400, None, broken_text)
    assert_tei(await post_bytes(boot, EMBED, body), 400, "Validation")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ([], None),
        ("a", None),
        (None, None),
        ({}, "input"),
        ({"model": "bge"}, "input"),
        ({"input": None}, "input"),
        ({"input": 5}, "input"),
        ({"input": {"image": "a"}}, "input"),
        ({"input": ["a", None]}, "input"),
        ({"input": ["a", 1.5]}, "input"),
        ({"input": [[["a"]]]}, "input"),
        ({"input": "a", "model": 5}, "model"),
        ({"input": "a", "encoding_format": "binary"}, "encoding_format"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": -1}, "dimensions"),
        ({"input": "a", "dimensions": 1.5}, "dimensions"),
        ({"input": "a", "dimensions": "4"}, "dimensions"),
        ({"input": "a", "dimensions": 2**70}, "dimensions"),
        ({"input": "a", "user": 7}, "user"),
    ],
    ids=str,
)
async def test_openai_names_the_field_of_the_wrong_type(boot: Boots, body: Any, param: str | None) -> None:
    assert_openai(await post_bytes(boot, OPENAI, json.dumps(body).encode()), 400, None, param)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (EMBED, []),
        (EMBED, {}),
        (EMBED, {"inputs": 5}),
        (EMBED, {"inputs": ["a", 1]}),
        (EMBED, {"inputs": "a", "truncate": "yes"}),
        (EMBED, {"inputs": "a", "truncation_direction": "up"}),
        (EMBED, {"inputs": "a", "normalize": 1}),
        (EMBED, {"inputs": "a", "prompt_name": 1}),
        (EMBED, {"inputs": "a", "dimensions": 0}),
        (EMBED, {"inputs": "a", "dimensions": 1.5}),
        (EMBED, {"inputs": "a", "dimensions": 9}),
        (RERANK, {"query": "q"}),
        (RERANK, {"texts": ["a"]}),
        (RERANK, {"query": "q", "texts": "a"}),
        (RERANK, {"query": ["q"], "texts": ["a"]}),
        (RERANK, {"query": "q", "texts": ["a", 1]}),
        (SIMILARITY, {"inputs": "a"}),
        (SIMILARITY, {"inputs": {"source_sentence": "a"}}),
        (SIMILARITY, {"inputs": {"source_sentence": "a", "sentences": "b"}}),
        (SIMILARITY, {"inputs": {"source_sentence": "a", "sentences": ["b"]}, "parameters": []}),
        (TOKENIZE, {"inputs": [1, 2]}),
        (TOKENIZE, {"inputs": "a", "add_special_tokens": None}),
    ],
    ids=str,
)
async def test_tei_answers_422_to_a_wrong_value(boot: Boots, path: str, body: Any) -> None:
    assert_tei(await post_bytes(boot, path, json.dumps(body).encode()), 422, "Validation")


@pytest.mark.parametrize("body", [b'{"inputs": "\\ud800"}', b'{"inputs": "a'], ids=["surrogate", "cut"])
async def test_half_a_surrogate_pair_is_named(boot: Boots, body: bytes) -> None:
    async with boot({"tei-0": FakeTei()}) as gateway:
        reply = await gateway.client.post(EMBED, content=body)
    assert 400 == reply.status_code
    assert "half of a surrogate pair" in reply.json()["error"]


SURROGATES = [
    b"\\ud800x",
    b"x\\udbff",
    b"\\udc00",
    b"\\ud800\\u0041",
    b"\\\\\\ud83d",
    b"\xed\xa0\x80",
    b"x\xff",
]


@pytest.mark.parametrize("text", SURROGATES)
@pytest.mark.parametrize(
    ("path", "body", "place"),
    [
        (OPENAI, b'{"input": ["a", "%b", "c"]}', "input[1]"),
        (OPENAI, b'{"input": "%b"}', "input"),
        (EMBED, b'{"inputs": ["\\ud83d\\ude00", "\\\\ud83d", "%b"]}', "inputs[2]"),
        ("/v1/rerank", b'{"query": "q", "documents": ["a", {"text": "%b"}]}', "documents[1].text"),
    ],
)
async def test_a_text_that_is_no_unicode_is_named_by_its_index(
    boot: Boots, path: str, body: bytes, place: str, text: bytes
) -> None:
    async with boot({"tei-0": FakeTei()}) as gateway:
        reply = await gateway.client.post(path, content=body.replace(b"%b", text))
        fine = await gateway.client.post(OPENAI, content=b'{"input": ["\\ud83d\\ude00", "\\\\ud83d"]}')

    assert (400, 200) == (reply.status_code, fine.status_code)
    assert f"the text `{place}` is not Unicode" in reply.text


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (OPENAI, {"input": ["a", "b"]}),
        (OPENAI, {"input": ["a" * 100_000]}),
        (EMBED, {"inputs": "a"}),
        ("/v1/rerank", {"query": "q", "documents": ["a"]}),
        ("/api/show", {"model": "bge"}),
    ],
    ids=["two", "large", "tei", "rerank", "ollama"],
)
async def test_a_byte_order_mark_before_the_body_is_ignored(boot: Boots, path: str, body: Any) -> None:
    content = json.dumps(body).encode()
    async with boot({"tei-0": FakeTei()}) as gateway:
        replies = [await gateway.client.post(path, content=mark + content) for mark in (b"", b"\xef\xbb\xbf")]
        twice = await gateway.client.post(path, content=2 * b"\xef\xbb\xbf" + content)

    assert replies[0].status_code == replies[1].status_code != 400
    assert 400 == twice.status_code


@pytest.mark.parametrize("inputs", ["", [], ["a", ""], [""]], ids=str)
async def test_openai_refuses_an_empty_input(boot: Boots, inputs: Any) -> None:
    assert_openai(
        await post_bytes(boot, OPENAI, json.dumps({"input": inputs}).encode()), 400, "empty_input", "input"
    )


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (EMBED, {"inputs": ""}),
        (EMBED, {"inputs": []}),
        (EMBED, {"inputs": ["a", ""]}),
        (RERANK, {"query": "q", "texts": []}),
        (SIMILARITY, {"inputs": {"source_sentence": "a", "sentences": []}}),
        (SIMILARITY, {"inputs": {"source_sentence": "", "sentences": ["a"]}}),
        (SIMILARITY, {"inputs": {"source_sentence": "a", "sentences": [""]}}),
        (TOKENIZE, {"inputs": []}),
        (TOKENIZE, {"inputs": ""}),
    ],
    ids=str,
)
async def test_tei_refuses_an_empty_input_with_400(boot: Boots, path: str, body: Any) -> None:
    assert_tei(await post_bytes(boot, path, json.dumps(body).encode()), 400, "Empty")


@pytest.mark.parametrize("ids", [[1, 2, 3], [[1, 2], [3]], ["a", [1]]], ids=str)
async def test_token_ids_are_refused_with_the_way_out(boot: Boots, ids: Any) -> None:
    openai = await post_bytes(boot, OPENAI, json.dumps({"input": ids}).encode())
    tei = await post_bytes(boot, EMBED, json.dumps({"inputs": ids}).encode())

    assert_openai(openai, 400, None, "input")
    assert_tei(tei, 422, "Validation")
    assert "check_embedding_ctx_length=False" in openai.json()["error"]["message"]
    assert "check_embedding_ctx_length=False" in tei.json()["error"]


async def test_2048_inputs_are_accepted_and_2049_refused(boot: Boots) -> None:
    allowed, excess = ["a"] * 2048, ["a"] * 2049

    assert 200 == (await post_bytes(boot, OPENAI, json.dumps({"input": allowed}).encode())).status_code
    assert_openai(await post_bytes(boot, OPENAI, json.dumps({"input": excess}).encode()), 400, None, "input")
    assert_tei(await post_bytes(boot, EMBED, json.dumps({"inputs": excess}).encode()), 422, "Validation")
    body = {"query": "q", "texts": excess}
    assert_tei(await post_bytes(boot, RERANK, json.dumps(body).encode()), 422, "Validation")
    body = {"inputs": {"source_sentence": "a", "sentences": excess}}
    assert_tei(await post_bytes(boot, SIMILARITY, json.dumps(body).encode()), 422, "Validation")


@pytest.mark.parametrize("model", ["nowhere", "", "BGE", "bge ", "/bge", "\x00"])
async def test_an_unknown_model_is_404(boot: Boots, model: str) -> None:
    openai = await post_bytes(boot, OPENAI, json.dumps({"input": "a", "model": model}).encode())
    tei = await post_bytes(boot, EMBED, json.dumps({"inputs": "a", "model": model}).encode())
    ranks = await post_bytes(
        boot, RERANK, json.dumps({"query": "q", "texts": ["a"], "model": model}).encode()
    )

    assert_openai(openai, 404, "model_not_found", "model")
    assert_tei(tei, 404, "NotFound")
    assert_tei(ranks, 404, "NotFound")


@pytest.mark.parametrize(
    "key", ["", "Bearer", "Bearer ", "Bearer wrong", "wrong", "Basic dGVzdC1rZXk=", f"Bearer {KEY}x"]
)
async def test_no_key_and_a_wrong_key_are_401(boot: Boots, key: str) -> None:
    openai = await post_bytes(boot, OPENAI, b'{"input": "a"}', authorization=key)
    tei = await post_bytes(boot, EMBED, b'{"inputs": "a"}', authorization=key)

    assert_openai(openai, 401, "invalid_api_key")
    assert_tei(tei, 401, "Unauthenticated")
    assert "wrong" not in openai.text
    assert "wrong" not in tei.text


async def test_a_non_ascii_key_is_401(boot: Boots) -> None:
    async with boot({"tei-0": FakeTei()}) as gateway:
        headers = [(b"authorization", b"Bearer \xff\xfe")]
        reply = await gateway.client.post(OPENAI, json={"input": "a"}, headers=headers)

    assert_openai(reply, 401, "invalid_api_key")


@pytest.mark.parametrize("encoding", ["gzip", "GZIP", "deflate", "br", "zstd", "gzip, identity"])
async def test_compressed_bodies_are_415(boot: Boots, encoding: str) -> None:
    compressed = await post_bytes(boot, OPENAI, b'{"input": "a"}', content_encoding=encoding)
    plain = await post_bytes(boot, OPENAI, b'{"input": "a"}', content_encoding="identity")

    assert_openai(compressed, 415, "unsupported_media")
    assert 200 == plain.status_code


async def unreadable_body() -> AsyncIterator[bytes]:
    """Fail the test if the gateway reads the body."""
    raise AssertionError("the body was read")
    yield b""


async def streamed_body(megabytes: int, read: list[int]) -> AsyncIterator[bytes]:
    """Yield a body of unannounced size. read: counts the megabytes that were read of it, in its only item."""
    yield b'{"input": "'
    for _ in range(megabytes):
        read[0] += 1
        yield b"a" * MEGABYTE
    yield b'"}'


async def post_stream(gateway: Running, path: str, body: AsyncIterator[bytes], length: str) -> httpx.Response:
    headers = {"content-length": length} if length else {"transfer-encoding": "chunked"}
    return await gateway.client.post(path, content=body, headers=headers)


async def test_an_announced_body_too_large_is_413_before_it_is_read(boot: Boots) -> None:
    async with boot({"tei-0": FakeTei()}) as gateway:
        announced = await post_stream(gateway, OPENAI, unreadable_body(), str(40 * MEGABYTE))
        assert_openai(announced, 413, "body_too_large")
        assert "the body is larger than 33554432 bytes" == announced.json()["error"]["message"]
        assert_tei(
            await post_stream(gateway, EMBED, unreadable_body(), str(40 * MEGABYTE)), 413, "Validation"
        )


async def test_a_streamed_body_too_large_is_413_and_not_read_to_its_end(boot: Boots) -> None:
    read = [0]
    async with boot({"tei-0": FakeTei()}) as gateway:
        assert_openai(await post_stream(gateway, OPENAI, streamed_body(40, read), ""), 413, "body_too_large")
        assert 40 > read[0]
        assert_tei(await post_stream(gateway, EMBED, streamed_body(40, read), ""), 413, "Validation")


async def test_a_body_above_the_total_is_413_while_another_call_is_in_flight(boot: Boots) -> None:
    gate = Gate()
    async with boot({"tei-0": tei_with_hook(gate)}) as gateway:
        waiting_call = asyncio.create_task(gateway.post(OPENAI, {"input": "a"}))
        await until(lambda: gate.waiting == 1)
        reply = await post_stream(gateway, OPENAI, unreadable_body(), str(600 * MEGABYTE))
        gate.opened.set()
        await waiting_call

    assert_openai(reply, 413, "body_too_large")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/nowhere", 404),
        ("POST", "/v1/nowhere", 404),
        ("POST", "/v1/", 404),
        ("GET", OPENAI, 405),
        ("DELETE", OPENAI, 405),
        ("POST", "/v1/models", 405),
        ("GET", "/embeddings", 405),
    ],
)
async def test_unknown_paths_below_v1_answer_in_openais_dialect(
    boot: Boots, method: str, path: str, status: int
) -> None:
    async with boot({"tei-0": FakeTei()}) as gateway:
        reply = await gateway.client.request(method, path)

    assert_openai(reply, status, "not_found" if status == 404 else "method_not_allowed")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nowhere", 404),
        ("POST", "/nowhere", 404),
        ("GET", EMBED, 405),
        ("PUT", RERANK, 405),
        ("GET", "/models/bge/embed", 405),
        # An unknown operation is read as part of a name.
        ("POST", "/models/bge/nowhere", 404),
        ("POST", "/info", 405),
        ("POST", "/health", 405),
    ],
)
async def test_other_unknown_paths_answer_in_teis_dialect(
    boot: Boots, method: str, path: str, status: int
) -> None:
    async with boot({"tei-0": FakeTei()}) as gateway:
        reply = await gateway.client.request(method, path, json={"inputs": "a"})

    assert_tei(reply, status, "NotFound")
    # RFC 9110, 15.5.6: a 405 must carry Allow.
    assert (status == 405) is bool(reply.headers.get("allow"))


@pytest.mark.parametrize("body", [b'{"input": "a', b'{"input": 5}', b'{"input": "a", "model": "nowhere"}'])
async def test_no_replica_receives_a_refused_call(boot: Boots, body: bytes) -> None:
    server = FakeTei()
    async with boot({"tei-0": server}) as gateway:
        reply = await gateway.client.post(OPENAI, content=body)

    assert 400 <= reply.status_code < 500
    assert [] == server.requests


WIDE_PARTS = [b"[],", b"{},", b'{"a":1},', b'"",', b"9,"]


@pytest.mark.parametrize(
    ("path", "start"),
    [
        (OPENAI, b'{"input": ['),
        (OPENAI, b'{"input": "a", "messages": ['),
        (OPENAI, b'{"input": "a", "unknown": ['),
        (EMBED, b'{"inputs": ['),
        ("/v1/rerank", b'{"query": "q", "documents": ['),
        (RERANK, b'{"query": "q", "texts": ['),
        ("/v1/score/bge", b'{"query": {"text": "q"}, "items": ['),
        ("/", b'{"inputs": ['),
    ],
)
@pytest.mark.parametrize("part", WIDE_PARTS, ids=str)
async def test_a_wide_body_is_refused_before_it_is_decoded(
    boot: Boots, path: str, start: bytes, part: bytes
) -> None:
    body = start + part * (4_000_000 // len(part)) + part[:-1] + b"]}"
    async with boot({"tei-0": FakeTei()}) as gateway:
        # Count what msgspec takes: a decoded body of this kind is ten to a hundred times as large.
        tracemalloc.start()
        try:
            reply = await gateway.client.post(path, content=body)
            _, peak_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()

    assert reply.status_code in (400, 422)
    assert "the body has more than" in reply.text
    assert 3 * len(body) > peak_bytes


async def test_a_wide_msgpack_body_is_refused_before_it_is_decoded(boot: Boots) -> None:
    body = b"\x81\xa5items\xdd\x00\x0f\x42\x40" + b"\x80" * 1_000_000
    reply = await post_bytes(boot, "/v1/encode/bge", body, content_type="application/msgpack")

    assert 400 == reply.status_code
    assert "the body has more than" in reply.text


async def test_repeated_types_have_a_bound(boot: Boots) -> None:
    body = {"texts": ["a"], "input_type": "search_query", "embedding_types": ["float"] * 17}

    assert 400 == (await post_bytes(boot, "/v2/embed", json.dumps(body).encode())).status_code


async def test_a_large_body_of_text_with_punctuation_is_served(boot: Boots) -> None:
    text = 'a list: [1, 2], a mapping: {"a": "b"}, and a backslash \\ ' * 20_000
    reply = await post_bytes(boot, OPENAI, json.dumps({"input": [text, text]}).encode())

    assert 200 == reply.status_code
