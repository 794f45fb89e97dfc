"""Inputs of networks: type ids as the tokenizer gives them, and refusal of networks that read more than text.

transformers 4 gave type ids to more networks than transformers 5 does, and a checkpoint follows the version
with which it was written.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.sentence_transformer import modules
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PretrainedConfig

from backends.contract import Embed, EmbedReply, Rerank, RerankReply, Vectors
from backends.contract.errors import InvalidWork, ModelUnavailable
from backends.torch import wire
from backends.torch.load.inspection import inspect_folder
from tests.engine.checkpoints import SMALL, make_classifier, make_encoder
from tests.engine.engines import TEXTS, cosines, engine_on, load_tiny, run_work

TOKENIZER = "tokenizer_config.json"
QUERY, DOCUMENTS = TEXTS[0], tuple(TEXTS[1:5])
GPT = {"vocab_size": 30522, "n_positions": 130, "n_embd": 32, "n_layer": 2, "n_head": 4}
XLM = {"vocab_size": 30522, "emb_dim": 32, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 130}
LARGE = {"initializer_range": 0.3, "pad_token_id": 0}
# Networks that look type ids up among their words.
WORD_TYPES: dict[str, Callable[[], PretrainedConfig]] = {
    "gpt2": lambda: transformers.GPT2Config(**GPT | LARGE),
    "gptj": lambda: transformers.GPTJConfig(**GPT | LARGE, rotary_dim=4),
    "openai-gpt": lambda: transformers.OpenAIGPTConfig(**GPT | LARGE),
    "ctrl": lambda: transformers.CTRLConfig(**GPT | LARGE, dff=48),
    "xlm": lambda: transformers.XLMConfig(**XLM, embed_init_std=0.3, init_std=0.3, pad_index=0),
    "flaubert": lambda: transformers.FlaubertConfig(**XLM, embed_init_std=0.3, init_std=0.3, pad_index=0),
}


def edit(folder: Path, name: str, **keys: Any) -> None:
    """Set keys of a JSON file; None removes a key."""
    path = folder / name
    content = {**json.loads(path.read_text()), **keys}
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


async def scores_of(folder: Path) -> Vectors:
    work = Rerank(QUERY, DOCUMENTS, raw_scores=True)
    return np.array((await run_work(engine_on(load_tiny(folder)), work, RerankReply)).scores)


def typed_scores(folder: Path) -> Vectors:
    """Return the logits of pairs whose texts have the types 0 and 1."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    rows = [
        tokenizer(QUERY, document, return_token_type_ids=True, return_tensors="pt") for document in DOCUMENTS
    ]
    with torch.no_grad():
        return np.array([model(**row).logits[0, 0].item() for row in rows])


@pytest.mark.parametrize("types", [True, False], ids=["typed", "untyped"])
@pytest.mark.parametrize("name", WORD_TYPES)
async def test_type_ids_that_are_words_reach_the_network(
    name: str, types: bool, minilm: Path, tmp_path: Path
) -> None:
    make_encoder(WORD_TYPES[name](), minilm, tmp_path)
    names = ["input_ids", *(["token_type_ids"] if types else []), "attention_mask"]
    edit(tmp_path, TOKENIZER, model_max_length=100, model_input_names=names)
    transformer = modules.Transformer(str(tmp_path))
    stock = SentenceTransformer(modules=[transformer, modules.Pooling(32, pooling_mode="mean")], device="cpu")
    texts = [text[:200] for text in TEXTS[:5]]

    vectors = (await run_work(engine_on(load_tiny(tmp_path)), Embed(tuple(texts)), EmbedReply)).vectors

    assert cosines(vectors, stock.encode(texts, batch_size=1)).min() > 0.99999


@pytest.fixture
def classifier(minilm: Path, tmp_path: Path) -> Path:
    """Write a cross-encoder of BERT's architecture whose files do not state the inputs of its network."""
    make_classifier(transformers.BertConfig(**SMALL), minilm, tmp_path)
    edit(tmp_path, TOKENIZER, model_max_length=100, tokenizer_class="PreTrainedTokenizerFast")
    return tmp_path


@pytest.mark.parametrize("version", ["4.57.3", None])
async def test_pairs_are_typed_as_transformers_4_had_them(version: str | None, classifier: Path) -> None:
    edit(classifier, "config.json", transformers_version=version)
    stock = CrossEncoder(str(classifier), device="cpu", activation_fn=torch.nn.Identity())
    untyped = stock.predict([(QUERY, document) for document in DOCUMENTS])

    np.testing.assert_allclose(await scores_of(classifier), typed_scores(classifier), atol=1e-4)
    assert np.abs(typed_scores(classifier) - untyped).max() > 0.1
    (note,) = load_tiny(classifier).capabilities.notes
    assert (f"made with transformers {version}" if version else "names no version") in note
    boot = wire.ModelBoot("tiny", str(classifier), device="cpu")
    assert note in inspect_folder(boot, classifier).notes


async def test_pairs_are_untyped_as_transformers_5_has_them(classifier: Path) -> None:
    edit(classifier, "config.json", transformers_version="5.0.1")
    stock = CrossEncoder(str(classifier), device="cpu", activation_fn=torch.nn.Identity())

    expected = stock.predict([(QUERY, document) for document in DOCUMENTS])

    np.testing.assert_allclose(await scores_of(classifier), expected, atol=1e-4)
    assert load_tiny(classifier).capabilities.notes == ()


async def test_a_class_that_transformers_5_does_not_open_decides_nothing(
    minilm: Path, tmp_path: Path
) -> None:
    make_classifier(transformers.NystromformerConfig(**SMALL), minilm, tmp_path)
    edit(tmp_path, TOKENIZER, model_max_length=100)
    edit(tmp_path, "config.json", transformers_version="5.0.1")
    stock = CrossEncoder(str(tmp_path), device="cpu", activation_fn=torch.nn.Identity())
    expected = [stock.predict([(QUERY, document)])[0] for document in DOCUMENTS]

    np.testing.assert_allclose(await scores_of(tmp_path), expected, atol=1e-4)


def test_no_note_is_made_where_versions_agree_on_the_result(minilm: Path, tmp_path: Path) -> None:
    make_encoder(transformers.BertConfig(**SMALL), minilm, tmp_path)
    edit(tmp_path, TOKENIZER, model_max_length=100, tokenizer_class="PreTrainedTokenizerFast")
    edit(tmp_path, "config.json", transformers_version="4.57.3")

    assert not any("token_type_ids" in note for note in load_tiny(tmp_path).capabilities.notes)


def test_types_that_the_network_lacks_are_refused(classifier: Path) -> None:
    path = classifier / "tokenizer.json"
    path.write_text(
        path.read_text().replace('"type_id": 1', '"type_id": 3').replace('"type_id":1', '"type_id":3')
    )
    edit(classifier, "config.json", transformers_version="4.57.3")

    with pytest.raises(ModelUnavailable, match="gives a token the type 3, and the network has 2 types"):
        load_tiny(classifier)


async def test_a_text_without_tokens_is_refused_in_any_batch(minilm: Path, tmp_path: Path) -> None:
    make_encoder(transformers.BertConfig(**SMALL), minilm, tmp_path)
    edit(tmp_path, TOKENIZER, model_max_length=100)
    edit(tmp_path, "tokenizer.json", post_processor=None)
    engine = engine_on(load_tiny(tmp_path))

    for texts, index in ((" ",), 0), (("hello", " "), 1):
        with pytest.raises(InvalidWork, match="it has no tokens") as refused:
            await engine.run(Embed(texts))
        assert refused.value.input_index == index
