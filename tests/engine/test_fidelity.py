"""Vectors and scores of the engine against sentence-transformers and transformers in float32."""

import asyncio
import shutil
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from backends.contract import Embed, EmbedReply, Rerank, RerankReply, Vectors
from backends.recipe.options import DTypeName
from backends.torch import wire
from backends.torch.load.load_plan import LoadOptions
from backends.torch.load.loader import load
from backends.torch.passes.engine import Engine
from tests.engine.conftest import Engines
from tests.engine.cross_encoder import labelled_pairs
from tests.engine.texts import ODDITIES, PHRASES, real_texts

pytestmark = pytest.mark.slow

SHORT_COUNT = len(PHRASES) + len(ODDITIES)
# All phrases and oddities, and every third of the docstrings, which are longer.
TEXTS = [*real_texts()[:SHORT_COUNT], *real_texts()[SHORT_COUNT::3]]


async def embed_texts(engine: Engine, texts: list[str], size: int) -> Vectors:
    replies = await asyncio.gather(
        *(engine.run(Embed(tuple(texts[i : i + size]))) for i in range(0, len(texts), size))
    )
    return np.concatenate([reply.vectors for reply in replies if isinstance(reply, EmbedReply)])


@pytest.fixture(scope="module")
def reference(minilm: Path) -> Vectors:
    """Encode the texts with sentence-transformers in float32: (n, 384), rows of length 1."""
    model = SentenceTransformer(str(minilm), device="cpu", model_kwargs={"dtype": "float32"})
    vectors: Vectors = model.encode(TEXTS, normalize_embeddings=True, show_progress_bar=False)
    return vectors.astype(np.float32)


@pytest.fixture(scope="module")
def batched() -> dict[DTypeName, Vectors]:
    """Return the cache of `embed_batched`, whose texts take the longest of this file."""
    return {}


async def embed_batched(engine: Engine, dtype: DTypeName, cache: dict[DTypeName, Vectors]) -> Vectors:
    """Return the vectors of the texts for a dtype in batches of 32, computed once."""
    if dtype not in cache:
        cache[dtype] = await embed_texts(engine, texts_for(dtype), 32)
    return cache[dtype]


def texts_for(dtype: DTypeName) -> list[str]:
    """Return all texts, or every fourth in a half format, which many CPUs compute ten times as slowly."""
    return TEXTS if dtype == "float32" else TEXTS[::4]


@pytest.mark.parametrize(
    ("dtype", "least"), [("float32", 0.99999), ("bfloat16", 0.9995), ("float16", 0.9999)]
)
async def test_vectors_equal_those_of_sentence_transformers(
    dtype: DTypeName,
    least: float,
    minilm: Path,
    engine_of: Engines,
    reference: Vectors,
    batched: dict[DTypeName, Vectors],
) -> None:
    vectors = await embed_batched(engine_of(minilm, dtype), dtype, batched)
    texts = texts_for(dtype)
    expected = reference[[TEXTS.index(text) for text in texts]]

    assert len(TEXTS) >= 100
    cosines = (vectors * expected).sum(axis=1)
    assert least <= cosines.min(), texts[int(cosines.argmin())][:80]


@pytest.mark.parametrize(
    ("dtype", "least"), [("float32", 0.999999), ("bfloat16", 0.9999), ("float16", 0.9999)]
)
async def test_text_has_the_same_vector_alone_and_in_any_batch(
    dtype: DTypeName, least: float, minilm: Path, engine_of: Engines, batched: dict[DTypeName, Vectors]
) -> None:
    engine = engine_of(minilm, dtype)
    texts = texts_for(dtype)[: 60 if dtype == "float32" else 15]

    together = await embed_batched(engine, dtype, batched)
    alone = await embed_texts(engine, texts, 1)

    assert least <= (together[: len(texts)] * alone).sum(axis=1).min()


@cache
def reference_model(checkpoint: Path) -> torch.nn.Module:
    return AutoModelForSequenceClassification.from_pretrained(checkpoint, dtype=torch.float32).eval()


def reference_scores(checkpoint: Path, query: str, documents: list[str]) -> Vectors:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = reference_model(checkpoint)
    inputs = tokenizer(
        [query] * len(documents), documents, padding=True, truncation=True, return_tensors="pt"
    )
    with torch.no_grad():
        scores: Vectors = torch.sigmoid(model(**inputs).logits[:, 0]).numpy()
    return scores


def reference_scores_by_length(checkpoint: Path, query: str, documents: list[str]) -> Vectors:
    """Score documents of similar length together: padding would take two thirds of the time."""
    order = sorted(range(len(documents)), key=lambda index: len(documents[index]))
    scores = np.empty(len(documents), np.float32)
    for start in range(0, len(order), 12):
        indices = order[start : start + 12]
        scores[indices] = reference_scores(checkpoint, query, [documents[index] for index in indices])
    return scores


async def test_rerank_scores_equal_those_of_transformers(cross_encoder: Path, engine_of: Engines) -> None:
    engine = engine_of(cross_encoder, "float32")
    documents = [pair[1] for pair, _ in labelled_pairs()][:30]
    all_scores = []
    for query in [pair[0] for pair, _ in labelled_pairs()][:6:2]:
        reply = await engine.run(Rerank(query, tuple(documents)))
        assert isinstance(reply, RerankReply)
        expected = reference_scores_by_length(cross_encoder, query, documents)
        np.testing.assert_allclose(reply.scores, expected, atol=1e-4, rtol=0)
        all_scores.append(reply.scores)

    # The comparison proves something only if the scores differ.
    assert np.concatenate(all_scores).std() > 0.15


async def test_saturated_scores_bring_the_logits_to_sort_by(cross_encoder: Path, tmp_path: Path) -> None:
    shutil.copytree(cross_encoder, tmp_path / "steep")
    file = tmp_path / "steep" / "model.safetensors"
    weights = load_file(file)
    weights["classifier.bias"] = torch.full_like(weights["classifier.bias"], 100.0)
    save_file(weights, file, {"format": "pt"})
    engine = Engine(
        load(tmp_path / "steep", "model", LoadOptions("float32", "cpu")),
        batch_tokens=4096,
        queue_tokens=10**9,
    )
    documents = tuple(pair[1] for pair, _ in labelled_pairs()[:8])
    work = Rerank("Parse JSON text", documents)
    reply = await engine.run(work)
    raw = await engine.run(replace(work, raw_scores=True))

    assert isinstance(reply, RerankReply)
    assert isinstance(raw, RerankReply)
    assert {1.0} == set(reply.scores.tolist())
    sent = wire.reply_decoder.decode(wire.encoder.encode(reply))
    assert isinstance(sent, RerankReply)
    np.testing.assert_array_equal(raw.scores, sent.order)
    assert len(documents) == len(set(sent.order.tolist()))


async def test_raw_scores_are_the_logits_before_the_sigmoid(cross_encoder: Path, engine_of: Engines) -> None:
    engine = engine_of(cross_encoder, "float32")
    work = Rerank("Parse JSON text", ("Parse a JSON document", "Open a socket"))

    scores = await engine.run(work)
    raw = await engine.run(Rerank(work.query, work.documents, raw_scores=True))

    assert isinstance(scores, RerankReply)
    assert isinstance(raw, RerankReply)
    np.testing.assert_allclose(scores.scores, 1 / (1 + np.exp(-raw.scores)), atol=1e-6)
