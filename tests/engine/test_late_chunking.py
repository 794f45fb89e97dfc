"""Late chunking: vectors of the parts of one text, compared with transformers."""

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from backends.contract import Embed, EmbedChunks, EmbedChunksReply, EmbedReply, Vectors
from backends.contract.errors import InvalidWork, UnsupportedWork
from backends.torch.load.load_plan import LoadOptions
from backends.torch.load.loader import load
from tests.conftest import Boots
from tests.engine.checkpoints import ENCODERS, make_encoder, make_sentence_model
from tests.engine.conftest import Engines
from tests.engine.engines import EngineInProcess, engine_on, load_tiny, run_work
from tests.engine.test_instructed_texts import sentence_model, unpooled

PARTS = ("Berlin is the capital of Germany. ", "Its area is 891 square kilometres. ", "The city has lakes.")
PROMPT = "represent the document: "
# More inputs than the gateway sends in one ordinary request.
MANY = 120
CONFIG = f"""
upstreams: {{minilm: {{backend: torch, model: minilm, dtype: float32}}}}
models:
  minilm: {{upstream: minilm}}
  prompted: {{upstream: minilm, prompts: {{document: '{PROMPT}'}}}}
"""


def expected_of(checkpoint: Path, parts: tuple[str, ...], prompt: str = "", skip: int = 0) -> Vectors:
    """Return the vector of each part by transformers' network in one pass: (parts, dim), of length 1."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    rows = [
        tokenizer(text, add_special_tokens=False)["input_ids"] for text in (prompt + parts[0], *parts[1:])
    ]
    rows[0].insert(0, tokenizer.cls_token_id)
    rows[-1].append(tokenizer.sep_token_id)
    network = AutoModel.from_pretrained(checkpoint, dtype=torch.float32).eval()
    with torch.inference_mode():
        hidden = network(torch.tensor([[id_ for row in rows for id_ in row]])).last_hidden_state[0].numpy()
    ends = np.cumsum([len(row) for row in rows])
    starts = [skip, *ends[:-1]]
    means = np.stack([hidden[start:end].mean(axis=0) for start, end in zip(starts, ends, strict=True)])
    vectors: Vectors = means / np.linalg.norm(means, axis=1, keepdims=True)
    return vectors


async def test_a_part_is_the_mean_of_its_tokens_in_one_pass(minilm: Path, engine_of: Engines) -> None:
    engine = engine_of(minilm, "float32")
    # Other work shares the forward pass.
    reply, plain = await asyncio.gather(
        run_work(engine, EmbedChunks((PARTS,)), EmbedChunksReply),
        run_work(engine, Embed(PARTS), EmbedReply),
    )

    np.testing.assert_allclose(expected_of(minilm, PARTS), reply.vectors, atol=1e-6)
    assert (reply.tokens,) == reply.input_tokens
    assert reply.tokens == plain.tokens - 2 * (len(PARTS) - 1)
    # The parts know of each other: the second alone has another vector.
    assert 0.9 > float(reply.vectors[1] @ plain.vectors[1])


async def test_one_input_has_the_vector_that_it_has_without_it(minilm: Path, engine_of: Engines) -> None:
    engine = engine_of(minilm, "float32")
    late = await run_work(engine, EmbedChunks((PARTS[:1],), dimensions=64), EmbedChunksReply)
    plain = await run_work(engine, Embed(PARTS[:1], dimensions=64), EmbedReply)

    np.testing.assert_allclose(plain.vectors, late.vectors, atol=1e-6)
    assert plain.tokens == late.tokens


async def test_a_prompt_is_left_out_where_the_model_pools_none(minilm: Path, tmp_path: Path) -> None:
    checkpoint = unpooled(minilm, tmp_path)
    engine = engine_on(load_tiny(checkpoint))
    inputs = (PROMPT + PARTS[0], *PARTS[1:])
    reply = await run_work(
        engine, EmbedChunks((inputs,), prompt_name="", prompt_characters=(len(PROMPT),)), EmbedChunksReply
    )

    skip = len(AutoTokenizer.from_pretrained(checkpoint)(PROMPT)["input_ids"]) - 1
    np.testing.assert_allclose(expected_of(checkpoint, PARTS, PROMPT, skip), reply.vectors, atol=1e-5)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (("word " * 40, "word " * 40), "64 tokens; .* which has 82 tokens"),
        (("w" * 10_000, "w" * 10_000), "64 tokens; .* which has 20000 characters"),
        (("a text", " \n"), "chunk 1 has no tokens"),
    ],
)
async def test_refuses_what_has_no_vectors(
    minilm: Path, tmp_path: Path, parts: tuple[str, ...], message: str
) -> None:
    engine = engine_on(load_tiny(sentence_model(minilm, tmp_path)))

    with pytest.raises(InvalidWork, match=message):
        await run_work(engine, EmbedChunks((parts,)), EmbedChunksReply)


async def test_a_model_that_pools_otherwise_refuses(boot: Boots, minilm: Path, tmp_path: Path) -> None:
    make_config, _ = ENCODERS["bert"]
    make_sentence_model(make_encoder(make_config(), minilm, tmp_path / "encoder"), tmp_path / "model", "cls")
    model = load_tiny(tmp_path / "model")
    assert not model.capabilities.late_chunking
    with pytest.raises(UnsupportedWork, match="mean pooling"):
        await run_work(engine_on(model), EmbedChunks((PARTS,)), EmbedChunksReply)

    async with boot({}, CONFIG, engines={"minilm": EngineInProcess(model)}) as gateway:
        body = {"model": "minilm", "input": PARTS, "late_chunking": True}
        reply = await gateway.post("/v1/embeddings", body)
    error = reply.json()["error"]
    assert (400, "late_chunking") == (reply.status_code, error["param"])
    assert "its pooling: cls" in error["message"]


async def test_the_gateway_sends_one_text_that_no_other_call_shares(boot: Boots, minilm: Path) -> None:
    backend = EngineInProcess(load(minilm, "minilm", LoadOptions("float32", "cpu")))
    parts = [f"{number} " for number in range(MANY)]
    bodies: list[dict[str, Any]] = [
        {"input": list(PARTS)},
        # Equal inputs are different parts of the text.
        {"input": [PARTS[0], PARTS[0]]},
        {"input": parts},
        {"input": list(PARTS), "model": "prompted", "task": "retrieval.passage"},
    ]
    async with boot({}, CONFIG, engines={"minilm": backend}) as gateway:
        posts = [
            gateway.post("/v1/embeddings", {"model": "minilm", "late_chunking": True} | body)
            for body in bodies
        ]
        plain = gateway.post("/v1/embeddings", {"model": "minilm", "input": PARTS})
        *replies, apart = [reply.json() for reply in await asyncio.gather(*posts, plain)]
        long = await gateway.post(
            "/v1/embeddings", {"model": "minilm", "input": ["word " * 200] * 2, "late_chunking": True}
        )

    for body, reply in zip(bodies, replies, strict=True):
        prompt = PROMPT if "task" in body else ""
        vectors = np.array([item["embedding"] for item in reply["data"]], np.float32)
        np.testing.assert_allclose(expected_of(minilm, tuple(body["input"]), prompt), vectors, atol=1e-6)
    assert replies[0]["usage"]["prompt_tokens"] == apart["usage"]["prompt_tokens"] - 2 * (len(PARTS) - 1)
    assert 400 == long.status_code
    assert "maximum context length is 256 tokens" in json.dumps(long.json())
