"""vLLM's endpoints: score, classify, pooling, tokenize and detokenize, and its fields on shared paths."""

import base64
import json
from typing import Any

import numpy as np
import pytest

from backends.contract.vectors import sigmoid
from gateway import __version__
from gateway.api.server.encoding import NumberFormat
from gateway.api.wire.vllm import VllmOptions
from tests.conftest import Boots, Running, posted
from tests.fakes.hooks import LABELS
from tests.fakes.server import logit_of, token_rows
from tests.fakes.tei import FakeTei, logits_of, vector_of
from tests.fakes.vllm import FakeVllm

CONFIG = """
upstreams:
  embedder: {backend: vllm, replicas: ["http://embed"]}
  reranker: {backend: vllm, replicas: ["http://cross"]}
  classifier: {backend: vllm, replicas: ["http://classes"]}
  late: {backend: vllm, replicas: ["http://late"]}
models:
  bge: {upstream: embedder}
  cross: {upstream: reranker}
  moods: {upstream: classifier}
  org/colbert: {upstream: late}
defaults: {embed: bge, rerank: cross, classify: moods}
"""
LONG = "w " * 20
CHAT = {"messages": [{"role": "user", "content": "a"}]}


def fakes() -> dict[str, FakeVllm]:
    """Return a server for each task."""
    return {
        "embed": FakeVllm(),
        "cross": FakeVllm(task="classify"),
        "classes": FakeVllm(task="classify", classes=len(LABELS)),
        "late": FakeVllm(task="token_embed"),
    }


def scores_of(reply: Any) -> list[float]:
    """Return the scores, after a check that they are in order."""
    data = reply.json()["data"]
    assert list(range(len(data))) == [item["index"] for item in data]
    return [item["score"] for item in data]


NAMES = [
    ("queries", "documents"),
    ("queries", "items"),
    ("data_1", "data_2"),
    ("text_1", "text_2"),
]


@pytest.mark.parametrize(("first", "second"), NAMES)
@pytest.mark.parametrize("path", ["/score", "/v1/score", "/models/cross/score", "/models/cross/v1/score"])
async def test_scores_pairs_under_every_field_name(boot: Boots, path: str, first: str, second: str) -> None:
    reply = await posted(boot(fakes(), CONFIG), path, {first: "q", second: ["red", "blue"]})

    assert 200 == reply.status_code
    expected = sigmoid(np.array([logit_of("q", text) for text in ("red", "blue")], np.float32))
    np.testing.assert_allclose(expected, scores_of(reply), rtol=1e-5)
    body = reply.json()
    assert {"id", "object", "created", "model", "data", "usage"} == body.keys()
    assert ("list", "cross", 10) == (body["object"], body["model"], body["usage"]["total_tokens"])
    assert body["id"].startswith("score-")


@pytest.mark.parametrize(
    ("queries", "documents", "pairs"),
    [
        ("q", "a", [("q", "a")]),
        ("q", ["a"], [("q", "a")]),
        (["q"], ["a", "b"], [("q", "a"), ("q", "b")]),
        (["q", "r"], ["a", "b"], [("q", "a"), ("r", "b")]),
        ({"content": [{"type": "text", "text": "q"}]}, ["a"], [("q", "a")]),
        ("q", {"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, [("q", "a\nb")]),
    ],
)
async def test_scores_one_to_many_and_many_to_many(
    boot: Boots, queries: Any, documents: Any, pairs: list[tuple[str, str]]
) -> None:
    reply = await posted(boot(fakes(), CONFIG), "/score", {"queries": queries, "documents": documents})

    expected = sigmoid(np.array([logit_of(*pair) for pair in pairs], np.float32))
    np.testing.assert_allclose(expected, scores_of(reply), rtol=1e-5)


async def test_without_activation_scores_are_logits(boot: Boots) -> None:
    body = {"text_1": "q", "text_2": ["red"], "use_activation": False}
    reply = await posted(boot(fakes(), CONFIG), "/score", body)

    np.testing.assert_allclose([logit_of("q", "red")], scores_of(reply), rtol=1e-5)


async def test_an_embedding_model_scores_pairs_by_cosine(boot: Boots) -> None:
    servers = fakes()
    pairs = [("q", "red"), ("r", "red"), ("q", "blue")]
    body = {"model": "bge", "queries": [a for a, _ in pairs], "documents": [b for _, b in pairs]}
    async with boot(servers, CONFIG) as gateway:
        before = len(servers["embed"].requests)
        reply = await gateway.post("/score", body)

    expected = [float(vector_of(a) @ vector_of(b)) for a, b in pairs]
    np.testing.assert_allclose(expected, scores_of(reply), atol=1e-6)
    # Each text once.
    assert [["q", "red", "r", "blue"]] == [sent["input"] for _, sent in servers["embed"].requests[before:]]


async def test_more_pairs_than_a_request_holds_keep_their_order(boot: Boots) -> None:
    pairs = [(f"q{i}", f"text {i}") for i in range(100)]
    body = {"queries": [a for a, _ in pairs], "documents": [b for _, b in pairs], "use_activation": False}
    reply = await posted(boot(fakes(), CONFIG), "/score", body)

    np.testing.assert_allclose([logit_of(*pair) for pair in pairs], scores_of(reply), rtol=1e-5)


async def test_classify_returns_probabilities_by_id_and_the_likeliest_label(boot: Boots) -> None:
    reply = await posted(boot(fakes(), CONFIG), "/classify", {"input": ["red", "blue"]})

    logits = np.array([logits_of((text,), 3) for text in ("red", "blue")])
    shares = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    data = reply.json()["data"]
    assert 200 == reply.status_code
    np.testing.assert_allclose(shares, [item["probs"] for item in data], rtol=1e-5)
    assert [f"LABEL_{i}" for i in logits.argmax(axis=1)] == [item["label"] for item in data]
    assert [(0, 3), (1, 3)] == [(item["index"], item["num_classes"]) for item in data]
    assert ("moods", 6) == (reply.json()["model"], reply.json()["usage"]["prompt_tokens"])


@pytest.mark.parametrize("field", ["use_activation", "softmax", "activation"])
async def test_classes_without_activation_are_logits(boot: Boots, field: str) -> None:
    reply = await posted(boot(fakes(), CONFIG), "/classify", {"input": "red", field: False})

    np.testing.assert_allclose(logits_of(("red",), 3), reply.json()["data"][0]["probs"], rtol=1e-5)


async def post_pooling(gateway: Running, **body: Any) -> list[Any]:
    """Return the data of POST /pooling."""
    reply = await gateway.post("/pooling", body)
    assert 200 == reply.status_code, reply.text
    assert "pooling" == reply.json()["data"][0]["object"]
    return [item["data"] for item in reply.json()["data"]]


@pytest.mark.parametrize("task", [{}, {"task": "embed"}])
async def test_pooling_embeds(boot: Boots, task: dict[str, str]) -> None:
    async with boot(fakes(), CONFIG) as gateway:
        plain = await post_pooling(gateway, input=["red", "blue"], **task)
        raw = await post_pooling(gateway, input="red", use_activation=False, **task)
        packed = await post_pooling(gateway, input="red", encoding_format="base64", **task)

    np.testing.assert_allclose([vector_of("red"), vector_of("blue")], plain, rtol=1e-5)
    np.testing.assert_allclose([vector_of("red") * 2], raw, rtol=1e-5)
    np.testing.assert_allclose(vector_of("red"), np.frombuffer(base64.b64decode(packed[0]), "<f4"), rtol=1e-5)


FORMATS = [
    ("float32", "native", 1e-7),
    ("float32", "big", 1e-7),
    ("float16", "little", 1e-3),
    ("float16", "big", 1e-3),
    ("bfloat16", "little", 1e-2),
    ("bfloat16", "big", 1e-2),
]


def unpack(packed: bytes, dtype: str, endianness: str) -> Any:
    """Return the numbers of packed vectors as float32."""
    order = ">" if endianness == "big" else "<"
    if dtype == "bfloat16":
        return (np.frombuffer(packed, f"{order}u2").astype(np.uint32) << np.uint32(16)).view(np.float32)
    return np.frombuffer(packed, f"{order}f{2 if dtype == 'float16' else 4}").astype(np.float32)


@pytest.mark.parametrize(("dtype", "endianness", "rtol"), FORMATS)
@pytest.mark.parametrize("path", ["/pooling", "/v1/embeddings"])
async def test_vectors_are_packed_in_the_requested_format(
    boot: Boots, path: str, dtype: str, endianness: str, rtol: float
) -> None:
    options = {"model": "bge", "input": ["red", "blue"], "embed_dtype": dtype, "endianness": endianness}
    async with boot(fakes(), CONFIG) as gateway:
        base = await gateway.post(path, options | {"encoding_format": "base64"})
        described = await gateway.post(path, options | {"encoding_format": "bytes"}, x_request_id="mine")
        bare = await gateway.post(path, options | {"encoding_format": "bytes_only"})

    expected = np.array([vector_of("red"), vector_of("blue")])
    rows = [item.get("data", item.get("embedding")) for item in base.json()["data"]]
    packed = b"".join(base64.b64decode(row) for row in rows)
    np.testing.assert_allclose(expected.ravel(), unpack(packed, dtype, endianness), rtol=rtol)
    assert packed == described.content == bare.content
    assert "application/octet-stream" == described.headers["content-type"] == bare.headers["content-type"]
    assert "metadata" not in bare.headers
    metadata = json.loads(described.headers["metadata"])
    half = len(packed) // 2
    assert ("embd-mine", "bge", 6) == (metadata["id"], metadata["model"], metadata["usage"]["prompt_tokens"])
    common = {"embed_dtype": dtype, "endianness": endianness, "shape": [8]}
    assert [
        {"index": 0, "start": 0, "end": half} | common,
        {"index": 1, "start": half, "end": 2 * half} | common,
    ] == metadata["data"]


def test_bfloat16_rounds_to_the_nearest_even() -> None:
    numbers = np.random.default_rng(0).standard_normal(4096).astype(np.float32)
    # Halfway between two neighbours, of which the first or the second is even.
    numbers[:3] = 0.0, 1.00390625, -1.01171875
    towards_zero = numbers.view(np.uint32) & np.uint32(0xFFFF0000)
    below, above = (bits.view(np.float32).astype(np.float64) for bits in (towards_zero, towards_zero + 2**16))
    is_odd = (towards_zero >> np.uint32(16)) & np.uint32(1) == 1
    to_below, to_above = abs(numbers - below), abs(numbers - above)
    goes_away = (to_above < to_below) | ((to_above == to_below) & is_odd)

    found = unpack(NumberFormat("bfloat16").pack(numbers), "bfloat16", "native")
    np.testing.assert_array_equal(np.where(goes_away, above, below), found)


@pytest.mark.parametrize(
    ("body", "headers", "expected"),
    [
        ({"request_id": "body"}, {}, "score-body"),
        ({"request_id": "body"}, {"x_request_id": "head"}, "score-head"),
    ],
)
async def test_the_request_names_its_reply(
    boot: Boots, body: dict[str, str], headers: dict[str, str], expected: str
) -> None:
    reply = await posted(
        boot(fakes(), CONFIG), "/score", {"queries": "q", "documents": "a"} | body, **headers
    )

    assert expected == reply.json()["id"]


async def test_a_cross_encoder_classifies_single_texts(boot: Boots) -> None:
    async with boot(fakes(), CONFIG) as gateway:
        pooled = await post_pooling(gateway, model="cross", input="red", task="classify")
        classes = await gateway.post("/classify", {"model": "cross", "input": "red"})

    assert [1] == [len(row) for row in pooled]
    assert pooled[0] == classes.json()["data"][0]["probs"]


@pytest.mark.parametrize("documents", ["red", {"content": [{"type": "text", "text": "red"}]}, ["red"]])
@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
async def test_rerank_accepts_a_single_document_and_contents(boot: Boots, path: str, documents: Any) -> None:
    body = {"query": {"content": [{"type": "text", "text": "q"}]}, "documents": documents, "request_id": "r"}
    reply = (await posted(boot(fakes(), CONFIG), path, body | {"use_activation": False})).json()

    assert "r" == reply["id"]
    assert logit_of("q", "red") == pytest.approx(reply["results"][0]["relevance_score"], rel=1e-5)


TWO_TEXTS = {"content": [{"type": "text", "text": "red"}, {"type": "text", "text": "blue"}]}


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
async def test_rerank_reads_texts_of_a_document_as_lines_and_refuses_another_text(
    boot: Boots, path: str
) -> None:
    body = {"query": "q", "documents": [TWO_TEXTS], "use_activation": False}
    twofold = {"documents": [TWO_TEXTS | {"text": "red"}]}
    async with boot(fakes(), CONFIG) as gateway:
        reply = await gateway.post(path, body)
        refused = [
            await gateway.post(path, body | each)
            for each in (twofold, {"query": twofold["documents"][0]}, {"documents": [{"content": []}]})
        ]

    (found,) = reply.json()["results"]
    assert logit_of("q", "red\nblue") == pytest.approx(found["relevance_score"], rel=1e-5)
    assert [400, 400, 400] == [each.status_code for each in refused]
    assert ["`text`" in each.text for each in refused] == [True, True, False]


async def test_server_reports_version_load_and_the_length_of_models(boot: Boots) -> None:
    async with boot(fakes(), CONFIG) as gateway:
        version, load = await gateway.client.get("/version"), await gateway.client.get("/load")
        models = (await gateway.client.get("/v1/models")).json()["data"]
        keyless = [
            await gateway.client.get(path, headers={"authorization": ""}) for path in ("/version", "/load")
        ]

    assert ({"version": __version__}, {"server_load": 0}) == (version.json(), load.json())
    assert {16} == {model["max_model_len"] for model in models}
    assert [401, 401] == [reply.status_code for reply in keyless]


OUTER = """
upstreams:
  embedder: {backend: vllm, replicas: ["http://inner"], model: bge, api_key: test-key}
  reranker: {backend: vllm, replicas: ["http://inner"], model: cross, api_key: test-key}
  classifier: {backend: vllm, replicas: ["http://inner"], model: moods, api_key: test-key}
models:
  bge: {upstream: embedder}
  cross: {upstream: reranker}
  moods: {upstream: classifier}
defaults: {embed: bge, rerank: cross, classify: moods}
"""


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"model": "bge", "input": ["red", LONG]}),
        ("/pooling", {"model": "bge", "input": "red", "use_activation": False}),
        ("/score", {"queries": "q", "documents": ["red", "blue"], "use_activation": False}),
        ("/v1/rerank", {"query": "q", "documents": ["red", "blue"]}),
        ("/classify", {"input": ["red", "blue"]}),
        ("/tokenize", {"prompt": "red blue", "return_token_strs": True}),
    ],
)
async def test_a_gateway_serves_another_as_a_vllm_server(
    boot: Boots, path: str, body: dict[str, Any]
) -> None:
    async with boot(fakes(), CONFIG) as inner, boot({"inner": inner.application.asgi}, OUTER) as outer:
        expected, reply = await inner.post(path, body), await outer.post(path, body)

    assert 200 == reply.status_code, reply.text
    same, own = reply.json(), expected.json()
    for name in ("data", "results", "tokens", "token_strs", "usage"):
        assert own.get(name) == same.get(name)


@pytest.mark.parametrize("task", [{}, {"task": "token_embed"}])
async def test_pooling_returns_one_vector_for_each_token(boot: Boots, task: dict[str, str]) -> None:
    async with boot(fakes(), CONFIG) as gateway:
        plain = await post_pooling(gateway, model="org/colbert", input=["red", "a b"], **task)
        raw = await post_pooling(gateway, model="org/colbert", input="a b", use_activation=False, **task)

    np.testing.assert_allclose(token_rows("red"), plain[0], rtol=1e-5)
    np.testing.assert_allclose(token_rows("a b"), plain[1], rtol=1e-5)
    np.testing.assert_allclose(token_rows("a b") * 2, raw[0], rtol=1e-5)


async def test_pooling_classifies(boot: Boots) -> None:
    async with boot(fakes(), CONFIG) as gateway:
        with_task = await post_pooling(gateway, model="moods", input="red", task="classify")
        without_task = await post_pooling(gateway, model="moods", input="red")

    assert with_task == without_task
    assert 1.0 == pytest.approx(sum(with_task[0]), rel=1e-5)


@pytest.mark.parametrize("name", ["", "/models/bge"])
async def test_tokenize_with_prompt_replies_in_vllms_dialect(boot: Boots, name: str) -> None:
    async with boot(fakes(), CONFIG) as gateway:
        plain = await gateway.post(f"{name}/tokenize", {"prompt": "red blue", "return_token_strs": True})
        bare = await gateway.post(f"{name}/tokenize", {"prompt": "red blue", "add_special_tokens": False})

    assert {
        "count": 4,
        "max_model_len": 16,
        "tokens": [101, 1003, 1004, 102],
        "token_strs": ["[CLS]", "red", "blue", "[SEP]"],
    } == plain.json()
    assert ([1003, 1004], None) == (bare.json()["tokens"], bare.json()["token_strs"])


async def test_detokenize_keeps_special_tokens(boot: Boots) -> None:
    reply = await posted(boot(fakes(), CONFIG), "/detokenize", {"tokens": [101, 7, 102]})

    assert {"prompt": "t101 t7 t102"} == reply.json()


def assert_refused(reply: Any, status: int, param: str | None = None) -> None:
    """Check that a reply is an error in vLLM's envelope."""
    assert status == reply.status_code, reply.text
    assert ["error"] == list(reply.json())
    error = reply.json()["error"]
    assert {"message", "type", "param", "code"} == error.keys()
    assert status == error["code"]
    assert error["message"]
    assert param in (None, error["param"])


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/score", {"queries": "q"}, None),
        ("/score", {"queries": ["q", "r"], "documents": ["a", "b", "c"]}, "queries"),
        ("/score", {"queries": "q", "documents": []}, "documents"),
        ("/score", {"queries": "", "documents": ["a"]}, "queries"),
        ("/score", {"queries": "q", "documents": 7}, None),
        ("/score", {"queries": "q", "documents": [{"content": [{"type": "image_url"}]}]}, "documents"),
        ("/score", {"queries": "q", "documents": [LONG], "max_tokens_per_doc": 5}, None),
        ("/score", {"queries": "q", "documents": ["a"], "max_tokens_per_doc": -5}, None),
        ("/score", {"queries": "q", "documents": ["a"] * 2049}, "documents"),
        ("/score", {"queries": "q", "documents": ["a"], "model": "moods"}, "model"),
        ("/classify", {"input": []}, "input"),
        ("/classify", {"input": ""}, "input"),
        ("/classify", {}, "input"),
        ("/classify", {"input": [1, 2]}, "input"),
        ("/classify", {"input": "a", "messages": [{"role": "user", "content": "a"}]}, "messages"),
        ("/classify", {"messages": []}, "messages"),
        ("/classify", {"messages": [[]]}, "messages"),
        ("/classify", {"messages": [{"role": "user", "content": "a"}, []]}, "messages"),
        ("/classify", {"messages": [{"role": "user", "content": "a"}] * 1025}, "messages"),
        ("/classify", {"messages": [{"role": "user", "content": []}]}, "messages"),
        ("/classify", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
        ("/classify", {"messages": [{"role": "user", "content": "a", "tool_calls": []}]}, None),
        ("/classify", {"messages": [{"role": "user", "content": None}]}, None),
        ("/classify", {"messages": [{"role": "", "content": "a"}]}, None),
        ("/classify", CHAT | {"add_generation_prompt": True, "continue_final_message": True}, None),
        ("/classify", CHAT | {"chat_template": "x" * 65_537}, "chat_template"),
        ("/classify", CHAT | {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ("/classify", CHAT | {"chat_template_kwargs": {"x": "x" * 65_537}}, "chat_template_kwargs"),
        ("/classify", CHAT | {"instruction": "find"}, "instruction"),
        ("/pooling", CHAT | {"input": "a"}, "messages"),
        ("/score", CHAT | {"queries": "q", "documents": "a"}, "messages"),
        ("/classify", {"input": "a", "model": "bge"}, "model"),
        ("/pooling", {"input": "a", "task": "token_classify"}, "task"),
        ("/pooling", {"input": "a", "task": "plugin"}, "task"),
        ("/pooling", {"input": "a", "task": "nothing"}, None),
        ("/pooling", {"input": "a", "dimensions": 4}, "dimensions"),
        ("/pooling", {"input": ["a"] * 257, "encoding_format": "bytes"}, "encoding_format"),
        ("/pooling", {"input": "a", "embed_dtype": "fp8_e4m3"}, None),
        ("/pooling", {"input": "a", "endianness": "middle"}, None),
        ("/tokenize", {"messages": [{"role": "user", "content": "a"}]}, "messages"),
        ("/tokenize", {"prompt": ["a"]}, None),
        ("/detokenize", {"tokens": []}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": "a"}, None),
    ],
    ids=str,
)
async def test_rejects_unsupported_requests_in_vllms_envelope(
    boot: Boots, path: str, body: Any, param: str | None
) -> None:
    assert_refused(await posted(boot(fakes(), CONFIG), path, body), 400, param)


async def test_other_errors_use_vllms_envelope_too(boot: Boots) -> None:
    async with boot({**fakes(), "cross": FakeVllm(task="embed")}, CONFIG) as gateway:
        assert_refused(
            await gateway.post("/score", {"queries": "q", "documents": "a", "model": "none"}), 404, "model"
        )
        assert_refused(await gateway.client.post("/score", content=b"{"), 400)
        gateway.client.headers["authorization"] = "Bearer wrong"
        assert_refused(await gateway.post("/score", {}), 401)


@pytest.mark.parametrize(
    ("options", "status"),
    [
        ({}, 200),
        ({"truncate_prompt_tokens": None}, 200),
        ({"truncate_prompt_tokens": -1}, 200),
        ({"truncate_prompt_tokens": 16}, 200),
        ({"truncate_prompt_tokens": 8}, 200),
        ({"truncate_prompt_tokens": 8, "truncation_side": "left"}, 400),
        ({"truncate_prompt_tokens": 0}, 400),
        ({"truncate_prompt_tokens": -2}, 400),
        ({"add_special_tokens": True, "priority": 0, "padding": "do_not_pad"}, 200),
        ({"priority": 3}, 400),
        ({"padding": "max_length"}, 400),
        ({"mm_processor_kwargs": {"a": 1}}, 400),
        ({"instruction": "find"}, 400),
        ({"chat_template": "x"}, 400),
        ({"add_generation_prompt": True}, 400),
        ({"continue_final_message": True}, 400),
        ({"add_generation_prompt": False, "continue_final_message": None}, 200),
        ({"media_io_kwargs": {"a": 1}}, 400),
        ({"normalize": False}, 400),
        ({"request_id": "r" * 257}, 400),
        # Fields that name a request, and unknown fields, change nothing.
        ({"request_id": "r", "cache_salt": "s", "user": "u", "nonsense": 1}, 200),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": LONG, "model": "bge"}),
        ("/score", {"queries": "q", "documents": [LONG]}),
        ("/classify", {"input": LONG}),
        ("/pooling", {"input": LONG}),
    ],
)
async def test_every_path_accepts_and_rejects_the_same_options(
    boot: Boots, path: str, body: dict[str, Any], options: dict[str, Any], status: int
) -> None:
    reply = await posted(boot(fakes(), CONFIG), path, body | options)

    assert status == reply.status_code, reply.text


async def test_pairs_take_no_other_special_tokens(boot: Boots) -> None:
    async with boot(fakes(), CONFIG) as gateway:
        for path in ("/score", "/rerank"):
            body = {"query": "q", "queries": "q", "documents": ["a"], "add_special_tokens": False}
            assert 400 == (await gateway.post(path, body)).status_code, path


TALK = [
    {"role": "system", "content": "be kind"},
    {"role": "user", "content": [{"type": "text", "text": "red"}]},
]
RENDERED = "system: be kind | user: red"
OPTIONS: dict[str, Any] = {
    "add_special_tokens": True,
    "add_generation_prompt": True,
    "chat_template_kwargs": {"instruction": "x"},
}
OPTIONS_TEXT = (
    " | add_special_tokens=True | add_generation_prompt=True | chat_template_kwargs={'instruction': 'x'}"
)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"messages": TALK}, [RENDERED]),
        ({"messages": [TALK]}, [RENDERED]),
        ({"messages": TALK, **OPTIONS}, [RENDERED + OPTIONS_TEXT]),
        ({"messages": TALK, "continue_final_message": True}, [RENDERED + " | continue_final_message=True"]),
        ({"messages": [TALK, [{"role": "user", "content": "blue"}]]}, [RENDERED, "user: blue"]),
        ({"input": "red", "add_special_tokens": False}, ["bare red"]),
    ],
    ids=str,
)
async def test_conversations_reach_vllm_as_they_are(
    boot: Boots, fields: dict[str, Any], expected: list[str]
) -> None:
    servers = fakes() | {
        "embed": FakeVllm(max_tokens=64),
        "late": FakeVllm(task="token_embed", max_tokens=64),
    }
    servers |= {"classes": FakeVllm(task="classify", classes=len(LABELS), max_tokens=64)}
    async with boot(servers, CONFIG) as gateway:
        vectors = (await gateway.post("/v1/embeddings", {"model": "bge"} | fields)).json()["data"]
        pooled = (await gateway.post("/pooling", {"model": "bge"} | fields)).json()["data"]
        tokens = (await gateway.post("/pooling", {"model": "org/colbert"} | fields)).json()["data"]
        classes = (await gateway.post("/classify", fields)).json()["data"]

    rows = [vector_of(text) for text in expected]
    np.testing.assert_allclose(rows, [item["embedding"] for item in vectors], rtol=1e-5)
    np.testing.assert_allclose(rows, [item["data"] for item in pooled], rtol=1e-5)
    for text, item in zip(expected, tokens, strict=True):
        np.testing.assert_allclose(token_rows(text), item["data"], rtol=1e-5)
    for text, item in zip(expected, classes, strict=True):
        assert int(np.argmax(logits_of((text,), len(LABELS)))) == int(np.argmax(item["probs"]))


@pytest.mark.parametrize(
    ("fields", "way_out"),
    [
        ({"chat_template": "{{ messages }}"}, "trust-request-chat-template"),
        ({"messages": [{"role": "unknown", "content": "a"}]}, "chat template"),
    ],
    ids=str,
)
async def test_vllms_refusal_of_a_conversation_has_its_reason(
    boot: Boots, fields: dict[str, Any], way_out: str
) -> None:
    reply = await posted(boot(fakes(), CONFIG), "/v1/embeddings", {"model": "bge", **CHAT, **fields})

    assert 400 == reply.status_code
    assert way_out in reply.json()["error"]["message"]


async def test_a_long_conversation_is_cut_by_the_server_that_renders_it(boot: Boots) -> None:
    body = {"model": "bge", "messages": [{"role": "user", "content": LONG * 400}]}
    async with boot(fakes(), CONFIG) as gateway:
        reply = await gateway.post("/v1/embeddings", body)
        refused = await gateway.post("/v1/embeddings", body | {"truncate": False})

    assert (200, "unknown") == (reply.status_code, reply.headers["x-truncated-inputs"])
    assert 400 == refused.status_code
    assert refused.json()["error"]["message"].startswith("This model's maximum context length is 16 tokens")
    assert "template" not in refused.json()["error"]["message"]


@pytest.mark.parametrize("field", ["input_type", "task", "late_chunking"])
async def test_conversations_have_no_fields_of_texts(boot: Boots, field: str) -> None:
    value = {"input_type": "query", "task": "retrieval.query", "late_chunking": True}[field]
    reply = await posted(boot(fakes(), CONFIG), "/v1/embeddings", {"model": "bge", **CHAT, field: value})

    assert (400, field) == (reply.status_code, reply.json()["error"]["param"])


@pytest.mark.parametrize(("options", "scale"), [({}, 1), ({"use_activation": False}, 2)])
async def test_openais_path_returns_raw_vectors_on_request(
    boot: Boots, options: dict[str, Any], scale: int
) -> None:
    reply = await posted(boot(fakes(), CONFIG), "/v1/embeddings", {"input": "red", "model": "bge"} | options)

    np.testing.assert_allclose(vector_of("red") * scale, reply.json()["data"][0]["embedding"], rtol=1e-5)


async def test_shared_rerank_path_returns_raw_scores_on_request(boot: Boots) -> None:
    body = {"query": "q", "documents": ["red"], "use_activation": False, "top_n": 0}
    async with boot(fakes(), CONFIG) as gateway:
        reply = await gateway.post("/rerank", body)
        rejected = await gateway.post("/v1/rerank", body | {"truncate_prompt_tokens": 0})

    assert logit_of("q", "red") == pytest.approx(reply.json()["results"][0]["relevance_score"], rel=1e-5)
    assert 400 == rejected.status_code


def test_truncation_side_alone_does_not_enable_truncation() -> None:
    options = VllmOptions(truncation_side="left")

    assert options.cuts is None


@pytest.mark.parametrize(
    ("path", "body", "tokens"),
    [
        ("/v1/embeddings", {"input": ["red", LONG], "model": "bge"}, 3 + 8),
        ("/pooling", {"input": LONG}, 8),
        ("/classify", {"input": LONG}, 8),
        ("/score", {"queries": "q", "documents": [LONG, "red"]}, 8 + 5),
        ("/v1/rerank", {"query": "q", "documents": [LONG, "red"]}, 8 + 5),
        ("/score", {"queries": "q", "documents": LONG, "model": "bge"}, 3 + 8),
    ],
)
async def test_inputs_are_cut_at_the_requested_length(
    boot: Boots, path: str, body: dict[str, Any], tokens: int
) -> None:
    reply = await posted(boot(fakes(), CONFIG), path, body | {"truncate_prompt_tokens": 8})

    assert 200 == reply.status_code, reply.text
    assert tokens == reply.json()["usage"]["total_tokens"]
    assert "unknown" == reply.headers["x-truncated-inputs"]


async def test_a_server_that_cuts_at_its_own_length_only_refuses_another(boot: Boots) -> None:
    body = {"input": LONG, "model": "bge"}
    async with boot({"tei-0": FakeTei(), "tei-1": FakeTei()}) as gateway:
        refused = await gateway.post("/v1/embeddings", body | {"truncate_prompt_tokens": 8})
        longer = await gateway.post("/v1/embeddings", body | {"truncate_prompt_tokens": 512})

    assert (400, 200) == (refused.status_code, longer.status_code)
    assert "8 tokens" in refused.json()["error"]["message"]
