"""SPLADE models against sentence-transformers' SparseEncoder and the formula written out."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from sentence_transformers import SparseEncoder
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sparse_encoder.modules import SpladePooling
from transformers import AutoModelForMaskedLM, AutoTokenizer

from backends.contract import Embed, Operation, Output, Vectors
from backends.contract.errors import UnsupportedWork
from backends.recipe.options import TaskSettings
from backends.torch.networks import readers
from tests.engine.checkpoints import ENCODERS, SMALL, make_language_model
from tests.engine.engines import TEXTS, cosines, dense_of, encode, encode_singly, engine_on, load_tiny


def make_splade(name: str, minilm: Path, folder: Path, **pooling: str) -> SparseEncoder:
    """Write a checkpoint; return the model that wrote it as the reference."""
    make_language_model(ENCODERS[name][0](), minilm, folder / "network", AutoModelForMaskedLM)
    network = Transformer(str(folder / "network"), transformer_task="fill-mask", max_seq_length=64)
    model = SparseEncoder(modules=[network, SpladePooling(**pooling)], device="cpu")
    model.save(str(folder / "splade"), create_model_card=False)
    return model


def stock(model: SparseEncoder) -> Vectors:
    return model.encode(TEXTS, convert_to_sparse_tensor=False, convert_to_tensor=True).numpy()


@pytest.mark.parametrize("name", ["bert", "distilbert", "xlm-roberta", "modernbert", "electra", "mpnet"])
async def test_weights_equal_those_of_sentence_transformers(name: str, minilm: Path, tmp_path: Path) -> None:
    reference = make_splade(name, minilm, tmp_path)
    model = load_tiny(tmp_path / "splade")

    reply = await encode(engine_on(model), TEXTS, Output.SPARSE)

    assert model.packed == ENCODERS[name][1]
    assert reply.sparse is not None
    found = np.stack([dense_of(terms) for terms in reply.sparse])
    np.testing.assert_allclose(found, stock(reference), atol=1e-4)
    assert found.std(axis=0).max() > 0.1


@pytest.mark.parametrize("strategy", ["max", "sum"])
@pytest.mark.parametrize("activation", ["relu", "log1p_relu"])
async def test_all_poolings_agree_when_logits_are_computed_in_chunks(
    strategy: str, activation: str, minilm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = make_splade(
        "bert", minilm, tmp_path, pooling_strategy=strategy, activation_function=activation
    )
    # A limit so small that a text's logits are computed in several pieces.
    monkeypatch.setattr(readers, "CHUNK_BYTES", 7 * 4 * 30522)

    reply = await encode(engine_on(load_tiny(tmp_path / "splade")), TEXTS, Output.SPARSE)

    found = np.stack([dense_of(terms) for terms in reply.sparse or ()])
    np.testing.assert_allclose(found, stock(reference), atol=1e-4, rtol=1e-5)


async def test_bfloat16_weights_stay_close_and_do_not_depend_on_their_batch(
    minilm: Path, tmp_path: Path
) -> None:
    reference = stock(make_splade("bert", minilm, tmp_path))
    engine = engine_on(load_tiny(tmp_path / "splade", "bfloat16"))

    together = await encode(engine, TEXTS, Output.SPARSE)
    single = await encode_singly(engine, TEXTS, Output.SPARSE)

    found = np.stack([dense_of(terms) for terms in together.sparse or ()])
    each = np.stack([dense_of(reply.sparse[0]) for reply in single if reply.sparse])
    assert cosines(found, reference).min() > 0.999
    assert cosines(found, each).min() > 0.9999


# Heads of the last three pass on more of their encoder's output than the token vectors.
MASKED: dict[str, Callable[[], transformers.PretrainedConfig]] = {
    "bert": ENCODERS["bert"][0],
    "bart": lambda: transformers.BartConfig(
        vocab_size=30522,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        max_position_embeddings=300,
        pad_token_id=0,
    ),
    "longformer": lambda: transformers.LongformerConfig(
        **SMALL | {"attention_window": 8, "max_position_embeddings": 300}
    ),
    "luke": lambda: transformers.LukeConfig(
        **SMALL | {"entity_vocab_size": 10, "entity_emb_size": 16, "max_position_embeddings": 300}
    ),
}


@pytest.mark.parametrize("name", MASKED)
async def test_operator_can_serve_a_masked_language_model_as_splade(
    name: str, minilm: Path, tmp_path: Path
) -> None:
    make_language_model(MASKED[name](), minilm, tmp_path, AutoModelForMaskedLM)
    model = load_tiny(tmp_path, settings=TaskSettings(pooling="splade"))

    reply = await encode(engine_on(model), TEXTS[:3], Output.SPARSE, Output.TOKENS)

    reference = AutoModelForMaskedLM.from_pretrained(tmp_path).eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    for i, text in enumerate(TEXTS[:3]):
        inputs = tokenizer(text, truncation=True, max_length=model.recipe.max_tokens, return_tensors="pt")
        with torch.no_grad():
            out = reference(**inputs, output_hidden_states=True)
        expected = out.logits[0].relu().log1p().amax(dim=0).numpy()
        np.testing.assert_allclose(dense_of((reply.sparse or ())[i]), expected, atol=1e-4)
        states = out.get("hidden_states", out.get("decoder_hidden_states"))
        np.testing.assert_allclose((reply.token_vectors or ())[i], states[-1][0], atol=1e-4)
    assert {Output.SPARSE, Output.TOKENS} == model.capabilities.outputs
    assert model.capabilities.pooling == "splade"


async def test_rejects_requests_for_dense_vectors(minilm: Path, tmp_path: Path) -> None:
    make_splade("bert", minilm, tmp_path)
    model = load_tiny(tmp_path / "splade")

    assert Operation.EMBED not in model.capabilities.operations
    with pytest.raises(UnsupportedWork):
        await engine_on(model).run(Embed(("a",)))
    with pytest.raises(UnsupportedWork, match="sparse, tokens"):
        await encode(engine_on(model), ["a"], Output.DENSE, Output.SPARSE)
