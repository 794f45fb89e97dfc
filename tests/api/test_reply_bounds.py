"""Bounds on the output of one call, in every dialect that has outputs larger than its input."""

from typing import Any

import pytest

from backends.contract.texts import DETOKENIZE_IDS_MAX, TOKENIZE_BYTES_MAX
from gateway.api.wire.inputs import TOKEN_VECTORS_MAX
from tests.conftest import Boots, posted
from tests.fakes.hooks import SPLADE
from tests.fakes.tei import FakeTei
from tests.fakes.vllm import FakeVllm

LATE = """
upstreams: {only: {backend: vllm, replicas: ["http://one"], request_inputs: 2}}
models: {m: {upstream: only}}
"""
PLAIN = LATE.replace("vllm", "tei")
ENCODE = "/v1/encode/m"
TEXTS = ["red", "green", "blue", "cyan", "pink", "grey"]


def multivector(texts: list[str]) -> Any:
    """Return a body of /v1/encode."""
    return {"items": [{"text": text} for text in texts], "params": {"output_types": ["multivector"]}}


async def reply_to(boot: Boots, path: str, body: Any, server: Any, config: str) -> tuple[int, str]:
    """Return status and text of the reply to one POST."""
    reply = await posted(boot({"one": server}, config), path, body)
    return reply.status_code, reply.text


LONG = "é" * (TOKEN_VECTORS_MAX // 2)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (ENCODE, multivector([LONG, "a"])),
        ("/embed_all", {"inputs": [LONG, "a"]}),
        ("/pooling", {"input": [LONG, "a"], "task": "token_embed"}),
    ],
)
async def test_texts_for_token_vectors_are_bounded_before_they_are_sent(
    boot: Boots, path: str, body: Any
) -> None:
    server = FakeVllm(task="token_embed")
    server.max_tokens = TOKEN_VECTORS_MAX
    status, text = await reply_to(boot, path, body, server, LATE)

    assert status in (400, 413, 422)
    assert f"more than {TOKEN_VECTORS_MAX} tokens" in text


async def test_texts_count_no_more_tokens_than_the_model_reads(boot: Boots) -> None:
    server = FakeTei(max_input_length=512, max_client_batch_size=32)
    status, text = await reply_to(boot, "/embed_all", {"inputs": ["w " * 4096] * 32}, server, PLAIN)

    assert 200 == status, text


async def test_dense_output_is_not_bounded_as_token_vectors_are(boot: Boots) -> None:
    body = {"items": [{"text": "w " * TOKEN_VECTORS_MAX}]}

    assert 200 == (await reply_to(boot, ENCODE, body, FakeTei(auto_truncate=True), PLAIN))[0]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (ENCODE, multivector(TEXTS)),
        ("/embed_all", {"inputs": TEXTS}),
        ("/pooling", {"input": TEXTS, "task": "token_embed"}),
    ],
)
@pytest.mark.parametrize(("numbers", "is_refused"), [(100, True), (10_000, False)])
async def test_the_numbers_of_a_reply_are_bounded(
    boot: Boots, monkeypatch: pytest.MonkeyPatch, path: str, body: Any, numbers: int, is_refused: bool
) -> None:
    # Each slice of two texts is below the smaller bound.
    monkeypatch.setattr("gateway.dispatch.REPLY_NUMBERS_MAX", numbers)
    status, text = await reply_to(boot, path, body, FakeVllm(task="token_embed"), LATE)

    assert is_refused is (status in (400, 413, 422)), text
    assert is_refused is (f"more than {numbers} numbers" in text)


async def test_the_terms_of_a_reply_are_bounded(boot: Boots, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.dispatch.REPLY_NUMBERS_MAX", 1)
    status, text = await reply_to(boot, "/embed_sparse", {"inputs": TEXTS}, FakeTei(model_type=SPLADE), PLAIN)

    assert 422 == status
    assert "more than 1 numbers" in text


HALF = TOKENIZE_BYTES_MAX // 2


@pytest.mark.parametrize(
    "body",
    [
        pytest.param({"inputs": ["a" * HALF, "a" * HALF, "a"]}, id="TEI"),
        pytest.param({"inputs": "ü" * (HALF + 1)}, id="TEI-bytes"),
        pytest.param({"prompt": "a" * (TOKENIZE_BYTES_MAX + 1)}, id="vLLM"),
    ],
)
async def test_tokenized_text_is_bounded(boot: Boots, body: Any) -> None:
    status, text = await reply_to(boot, "/tokenize", body, FakeTei(), PLAIN)

    assert status in (400, 422)
    assert f"more than {TOKENIZE_BYTES_MAX} bytes" in text


@pytest.mark.parametrize(("path", "field"), [("/decode", "ids"), ("/detokenize", "tokens")])
async def test_decoded_ids_are_bounded(boot: Boots, path: str, field: str) -> None:
    body = {field: [7] * (DETOKENIZE_IDS_MAX + 1)}
    status, text = await reply_to(boot, path, body, FakeTei(), PLAIN)

    assert status in (400, 422)
    assert f"more than {DETOKENIZE_IDS_MAX} ids" in text
