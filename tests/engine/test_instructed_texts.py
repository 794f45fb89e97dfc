"""Instructions and prompts on the engine, compared with sentence-transformers."""

import json
from collections import ChainMap
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from backends.contract import Embed, EmbedReply, Rerank, Truncate
from backends.contract.errors import InvalidWork, UnsupportedWork
from backends.recipe.options import TaskSettings
from gateway.prepare import InstructedModel
from tests.engine.checkpoints import ENCODERS, make_classifier, make_encoder, make_sentence_model
from tests.engine.engines import TEXTS, engine_on, load_tiny, run_work

PROMPTS = ("Represent the question: ", "Represent the title of a science paper: ", "")


def sentence_model(minilm: Path, folder: Path) -> Path:
    """Return a tiny checkpoint that pools by mean."""
    make_config, _ = ENCODERS["bert"]
    make_sentence_model(make_encoder(make_config(), minilm, folder / "encoder"), folder / "model", "mean")
    return folder / "model"


def unpooled(minilm: Path, folder: Path) -> Path:
    """Return a tiny checkpoint that leaves prompts out of its mean."""
    checkpoint = sentence_model(minilm, folder)
    pooling = checkpoint / "1_Pooling" / "config.json"
    pooling.write_text(json.dumps(json.loads(pooling.read_text()) | {"include_prompt": False}))
    return checkpoint


def prompted(texts: list[str]) -> Embed:
    """Return work whose texts begin with several prompts in turn."""
    plain = Embed(tuple(texts))
    inputs = tuple(PROMPTS[i % len(PROMPTS)] + text for i, text in enumerate(texts))
    return replace(plain, inputs=inputs, prompt_name="").with_prompt_lengths(plain)


async def test_prompts_written_into_the_texts_are_left_out_of_the_pooling(
    minilm: Path, tmp_path: Path
) -> None:
    from sentence_transformers import SentenceTransformer

    checkpoint = unpooled(minilm, tmp_path)
    model = load_tiny(checkpoint)
    reference = SentenceTransformer(str(checkpoint), device="cpu", model_kwargs={"dtype": "float32"})

    reply = await run_work(engine_on(model), prompted(TEXTS), EmbedReply)

    assert not model.capabilities.pools_prompt
    for index, prompt in enumerate(PROMPTS):
        expected = reference.encode(
            TEXTS[index :: len(PROMPTS)], prompt=prompt, normalize_embeddings=True, show_progress_bar=False
        )
        np.testing.assert_allclose(reply.vectors[index :: len(PROMPTS)], expected, atol=1e-5)
    pooled = await run_work(engine_on(model), replace(prompted(TEXTS), prompt_characters=()), EmbedReply)
    assert np.abs(pooled.vectors - reply.vectors).max() > 1e-3


def test_refuses_prompts_that_truncation_would_touch(minilm: Path, tmp_path: Path) -> None:
    prepare = load_tiny(unpooled(minilm, tmp_path)).preparer.prepare
    long = "word " * 2000

    with pytest.raises(InvalidWork, match="the prompt alone"):
        prepare(Embed((long + "text",), prompt_characters=(len(long),)))
    with pytest.raises(UnsupportedWork, match="left end"):
        prepare(Embed(("a " + long,), prompt_characters=(2,), truncate=Truncate.LEFT))


def test_published_instructors_leave_the_instruction_out(minilm: Path, tmp_path: Path) -> None:
    checkpoint = sentence_model(minilm, tmp_path)

    assert load_tiny(checkpoint).capabilities.pools_prompt
    instructor = load_tiny(checkpoint, settings=TaskSettings(model="hkunlp/instructor-large"))
    assert not instructor.capabilities.pools_prompt


def test_a_classifier_takes_no_instruction(minilm: Path, tmp_path: Path) -> None:
    make_config, _ = ENCODERS["bert"]
    model = load_tiny(make_classifier(make_config(), minilm, tmp_path))

    assert not model.capabilities.takes_instruction
    with pytest.raises(UnsupportedWork, match="instruction"):
        model.preparer.prepare(Rerank("q", ("a",), instruction="find"))


async def test_an_instruct_embedder_reads_the_instruction_in_the_form_of_its_own_prompts(
    minilm: Path, tmp_path: Path
) -> None:
    make_config, _ = ENCODERS["bert"]
    prompts = {"query": "Instruct: Given a question, find its answer\nQuery:", "document": ""}
    encoder = make_encoder(make_config(), minilm, tmp_path / "encoder")
    reference = make_sentence_model(encoder, tmp_path / "model", "mean", prompts=prompts)
    model = load_tiny(tmp_path / "model")
    instructed = InstructedModel("m", None, ChainMap(model.capabilities.prompts), model.capabilities)

    prompt = instructed.query_prompt("Find a similar text")
    reply = await run_work(engine_on(model), Embed(tuple(TEXTS)).with_prompt(prompt), EmbedReply)

    by_card = "Instruct: Find a similar text\nQuery:"
    expected = reference.encode(TEXTS, prompt=by_card, normalize_embeddings=True, show_progress_bar=False)
    np.testing.assert_allclose(reply.vectors, expected, atol=1e-5)
