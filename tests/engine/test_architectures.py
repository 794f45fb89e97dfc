"""Supported architectures against the stock libraries in float32, with and without padding."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from sentence_transformers.sentence_transformer import modules
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PretrainedConfig

from backends.contract import Embed, EmbedReply, Rerank, RerankReply, Truncate, Vectors
from backends.recipe.options import DTypeName
from backends.torch.load.load_plan import LoadOptions
from backends.torch.load.loader import load
from backends.torch.passes.engine import Engine
from backends.torch.passes.loaded_model import LoadedModel
from tests.engine.checkpoints import (
    DECODER,
    DECODERS,
    ENCODERS,
    SMALL,
    make_classifier,
    make_encoder,
    make_sentence_model,
)
from tests.engine.texts import real_texts

TEXTS = [text for text in real_texts() if len(text) > 12][:40]
QUERY, DOCUMENTS = TEXTS[0], TEXTS[1:20]
LONGROPE = {"rope_type": "longrope", "long_factor": [4.0] * 4, "short_factor": [1.0] * 4}
SHORT_FIRST = DECODER | {"max_position_embeddings": 130, "original_max_position_embeddings": 16}
# Networks in which padding, or a longer text in the batch, changes a text's vectors.
SENSITIVE: dict[str, Callable[[], PretrainedConfig]] = {
    "fnet": lambda: transformers.FNetConfig(**SMALL | {"max_position_embeddings": 130}),
    "convbert": lambda: transformers.ConvBertConfig(**SMALL | {"embedding_size": 32}),
    "yoso": lambda: transformers.YosoConfig(**SMALL),
    "phi3": lambda: transformers.Phi3Config(**SHORT_FIRST, rope_scaling=LONGROPE),
}
# Networks that begin positions after that of padding.
OFFSET = {
    "esm": lambda: transformers.EsmConfig(**SMALL | {"pad_token_id": 1}),
    "ibert": lambda: transformers.IBertConfig(**SMALL | {"pad_token_id": 1}),
    "data2vec": lambda: transformers.Data2VecTextConfig(**SMALL | {"pad_token_id": 1}),
}


def load_tiny(folder: Path, dtype: DTypeName = "float32") -> LoadedModel:
    return load(folder, "tiny", LoadOptions(dtype, "cpu"))


async def vectors_of(model: LoadedModel, texts: list[str], size: int = 8) -> Vectors:
    engine = Engine(model, batch_tokens=256, queue_tokens=10**9)
    replies = await asyncio.gather(
        *(engine.run(Embed(tuple(texts[i : i + size]))) for i in range(0, len(texts), size))
    )
    return np.concatenate([reply.vectors for reply in replies if isinstance(reply, EmbedReply)])


def assert_same_vectors(vectors: Vectors, expected: Vectors) -> None:
    cosines = (vectors * expected).sum(axis=1)
    assert len(cosines) == len(TEXTS)
    assert cosines.min() > 0.99999
    # Vectors that all point in one direction would agree after any computation.
    assert (expected @ expected.T).min() < 0.95


@pytest.mark.parametrize("name", ENCODERS)
async def test_encoders_agree_with_sentence_transformers(name: str, minilm: Path, tmp_path: Path) -> None:
    config, packed = ENCODERS[name]
    encoder = make_encoder(config(), minilm, tmp_path / "encoder")
    stock = make_sentence_model(encoder, tmp_path / "sentence", "mean")
    model = load_tiny(tmp_path / "sentence")

    assert packed == model.packed
    assert_same_vectors(await vectors_of(model, TEXTS), stock.encode(TEXTS, normalize_embeddings=True))


@pytest.mark.parametrize("name", DECODERS)
async def test_decoders_agree_with_sentence_transformers(name: str, minilm: Path, tmp_path: Path) -> None:
    encoder = make_encoder(DECODERS[name](), minilm, tmp_path / "encoder")
    stock = make_sentence_model(encoder, tmp_path / "sentence", "lasttoken")
    model = load_tiny(tmp_path / "sentence")

    assert model.packed
    assert_same_vectors(await vectors_of(model, TEXTS), stock.encode(TEXTS, normalize_embeddings=True))


@pytest.mark.parametrize("name", SENSITIVE)
async def test_texts_are_computed_apart_where_a_batch_would_change_them(
    name: str, minilm: Path, tmp_path: Path
) -> None:
    encoder = make_encoder(SENSITIVE[name](), minilm, tmp_path / "encoder")
    stock = make_sentence_model(encoder, tmp_path / "sentence", "mean")
    model = load_tiny(tmp_path / "sentence")

    expected = stock.encode(TEXTS, batch_size=1, normalize_embeddings=True)
    assert not model.packed
    assert_same_vectors(await vectors_of(model, TEXTS), expected)
    if name in {"fnet", "convbert"}:
        assert (stock.encode(TEXTS, normalize_embeddings=True) * expected).sum(axis=1).min() < 0.999


async def test_sparse_attention_does_not_depend_on_earlier_texts(minilm: Path, tmp_path: Path) -> None:
    config = transformers.BigBirdConfig(**SMALL | {"block_size": 4, "num_random_blocks": 1})
    encoder = make_encoder(config, minilm, tmp_path / "encoder")
    stock = make_sentence_model(encoder, tmp_path / "sentence", "mean")
    # The network attends to all tokens from here on.
    stock.encode("ok")
    model = load_tiny(tmp_path / "sentence")

    assert_same_vectors(await vectors_of(model, TEXTS), stock.encode(TEXTS, normalize_embeddings=True))


@pytest.mark.parametrize("name", ["convbert", "fnet", "yoso"])
async def test_pairs_are_scored_apart_where_a_batch_would_change_them(
    name: str, minilm: Path, tmp_path: Path
) -> None:
    make_classifier(SENSITIVE[name](), minilm, tmp_path)
    model = load_tiny(tmp_path)
    engine = Engine(model, batch_tokens=10**6, queue_tokens=10**9)
    documents = (*DOCUMENTS[:4], " ".join(DOCUMENTS))

    together = await engine.run(Rerank(QUERY, documents, raw_scores=True))
    alone = [await engine.run(Rerank(QUERY, (text,), raw_scores=True)) for text in documents]

    assert isinstance(together, RerankReply)
    scores = [reply.scores[0] for reply in alone if isinstance(reply, RerankReply)]
    np.testing.assert_allclose(together.scores, scores, atol=1e-4)


@pytest.mark.parametrize("name", OFFSET)
async def test_input_of_the_greatest_length_has_positions(name: str, minilm: Path, tmp_path: Path) -> None:
    model = load_tiny(make_encoder(OFFSET[name](), minilm, tmp_path))

    reply = await Engine(model, batch_tokens=256, queue_tokens=10**9).run(
        Embed(("word " * 200,), truncate=Truncate.RIGHT)
    )

    assert isinstance(reply, EmbedReply)
    assert reply.tokens == 128


async def test_a_batch_may_have_more_tokens_than_the_network_has_positions(
    minilm: Path, tmp_path: Path
) -> None:
    config = transformers.CLIPTextConfig(**SMALL | {"max_position_embeddings": 40, "eos_token_id": 102})
    folder = make_encoder(config, minilm, tmp_path)
    together = await vectors_of(load_tiny(folder), TEXTS, size=40)

    assert_same_vectors(together, await vectors_of(load_tiny(folder), TEXTS, size=1))


@pytest.mark.parametrize("name", ["bert", "mpnet", "modernbert"])
async def test_bfloat16_vectors_do_not_depend_on_their_batch(name: str, minilm: Path, tmp_path: Path) -> None:
    make_encoder(ENCODERS[name][0](), minilm, tmp_path)
    model = load_tiny(tmp_path, "bfloat16")

    together = await vectors_of(model, TEXTS)
    alone = await vectors_of(model, TEXTS, size=1)

    assert (together * alone).sum(axis=1).min() > 0.9999


@pytest.mark.parametrize(
    "pooling", ["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]
)
async def test_poolings_agree_with_sentence_transformers(pooling: str, minilm: Path, tmp_path: Path) -> None:
    encoder = make_encoder(ENCODERS["bert"][0](), minilm, tmp_path / "encoder")
    stock = make_sentence_model(encoder, tmp_path / "sentence", pooling)

    vectors = await vectors_of(load_tiny(tmp_path / "sentence"), TEXTS)

    assert_same_vectors(vectors, stock.encode(TEXTS, normalize_embeddings=True))


async def test_modules_after_pooling_are_applied_in_order(minilm: Path, tmp_path: Path) -> None:
    encoder = make_encoder(ENCODERS["bert"][0](), minilm, tmp_path / "encoder")
    torch.manual_seed(1)
    after = [
        modules.Normalize(),
        modules.Dense(32, 64),
        modules.Dense(64, 16, bias=False, activation_function=torch.nn.Identity()),
        modules.Normalize(),
    ]
    stock = make_sentence_model(encoder, tmp_path / "sentence", "mean", after)
    model = load_tiny(tmp_path / "sentence")

    vectors = await vectors_of(model, TEXTS)

    assert model.capabilities.dimensions == 16
    np.testing.assert_allclose(vectors, stock.encode(TEXTS), atol=1e-5)


async def test_prompts_by_name_agree_with_sentence_transformers(minilm: Path, tmp_path: Path) -> None:
    encoder = make_encoder(ENCODERS["bert"][0](), minilm, tmp_path / "encoder")
    prompts = {"query": "search for this: ", "document": "a passage: "}
    stock = make_sentence_model(encoder, tmp_path / "sentence", "mean", prompts=prompts)
    engine = Engine(load_tiny(tmp_path / "sentence"), batch_tokens=256, queue_tokens=10**9)

    for name in prompts:
        reply = await engine.run(Embed(tuple(TEXTS), prompt_name=name))
        assert isinstance(reply, EmbedReply)
        expected = stock.encode(TEXTS, prompt_name=name, normalize_embeddings=True)
        np.testing.assert_allclose(reply.vectors, expected, atol=1e-5)


@pytest.mark.parametrize(
    "name", ["bert", "albert", "roberta", "xlm-roberta", "distilbert", "electra", "modernbert", "mpnet"]
)
async def test_cross_encoders_agree_with_transformers(name: str, minilm: Path, tmp_path: Path) -> None:
    config, packed = ENCODERS[name]
    make_classifier(config(), minilm, tmp_path)
    model = load_tiny(tmp_path)

    reply = await Engine(model, batch_tokens=256, queue_tokens=10**9).run(
        Rerank(QUERY, tuple(DOCUMENTS), raw_scores=True)
    )

    assert isinstance(reply, RerankReply)
    assert packed == model.packed
    expected = logits_of(tmp_path, model.recipe.max_tokens)
    np.testing.assert_allclose(reply.scores, expected, atol=1e-4)
    assert expected.std() > 0.05


def logits_of(folder: Path, max_tokens: int) -> Vectors:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    takes_types = getattr(model.config, "type_vocab_size", 0) > 1
    logits = []
    for document in DOCUMENTS:
        inputs = tokenizer(QUERY, document, truncation=True, max_length=max_tokens, return_tensors="pt")
        if not takes_types:
            inputs.pop("token_type_ids", None)
        with torch.no_grad():
            logits.append(model(**inputs).logits[0, 0].item())
    return np.array(logits, dtype=np.float32)
