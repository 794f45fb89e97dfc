"""Keys of sentence-transformers' files: followed as their library follows them, or refused by name."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from sentence_transformers import CrossEncoder, MultiVectorEncoder, SentenceTransformer, SparseEncoder
from transformers import AutoModelForMaskedLM, AutoTokenizer

from backends.contract import Embed, EmbedReply, Output, Rerank, RerankReply, Truncate, Vectors
from backends.contract.errors import ModelUnavailable
from backends.recipe.options import TaskSettings
from backends.tokens.tokenizer import open_tokenizer
from gateway.calls import default_truncation
from tests.engine.checkpoints import (
    ENCODERS,
    SMALL,
    make_classifier,
    make_encoder,
    make_language_model,
    make_sentence_model,
)
from tests.engine.engines import TEXTS, cosines, dense_of, encode, engine_on, load_tiny, run_work

LONG = " ".join(f"word {number}" for number in range(200))
SETTINGS, TOKENIZER = "sentence_bert_config.json", "tokenizer_config.json"
WHOLE = "config_sentence_transformers.json"


def edit(folder: Path, name: str, **keys: Any) -> None:
    """Set keys of a JSON file; None removes a key."""
    path = folder / name
    content = {**(json.loads(path.read_text()) if path.exists() else {}), **keys}
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


async def vectors_of(folder: Path, texts: list[str], prompt_name: str | None = None) -> Vectors:
    """Return the vectors of texts that are cut as a call without an option has them cut."""
    model = load_tiny(folder)
    truncate = default_truncation(None, model.capabilities)
    work = Embed(tuple(texts), prompt_name=prompt_name, truncate=truncate)
    return (await run_work(engine_on(model), work, EmbedReply)).vectors


def assert_equal(found: Vectors, expected: Vectors) -> None:
    assert found.shape == expected.shape
    assert cosines(found, expected).min() > 0.99999


@pytest.fixture(scope="module")
def written(minilm: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a checkpoint of BERT's architecture with 130 positions, as sentence-transformers does."""
    parent = tmp_path_factory.mktemp("written")
    encoder = make_encoder(transformers.BertConfig(**SMALL), minilm, parent / "encoder")
    make_sentence_model(encoder, parent / "model", "mean")
    edit(parent / "model", SETTINGS, max_seq_length=None)
    return parent / "model"


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    """Return a copy of the checkpoint that a test may edit."""
    return shutil.copytree(written, tmp_path / "model")


@pytest.mark.parametrize(
    ("settings", "tokenizer", "expected"),
    [
        ({"max_seq_length": 40}, 16, 40),
        ({"max_seq_length": 16}, 40, 16),
        ({"max_seq_length": 100, "processor_kwargs": {"model_max_length": 24}}, 40, 24),
        ({"tokenizer_args": {"model_max_length": 24}}, 40, 24),
        ({"processing_kwargs": {"text": {"max_length": 20}}}, 40, 20),
        ({}, 40, 40),
        ({}, 4000, 130),
    ],
)
async def test_the_longest_text_is_that_of_sentence_transformers(
    settings: dict[str, Any], tokenizer: int, expected: int, folder: Path
) -> None:
    edit(folder, SETTINGS, **settings)
    edit(folder, TOKENIZER, model_max_length=tokenizer)

    assert load_tiny(folder).capabilities.max_input_tokens == expected
    assert_equal(
        await vectors_of(folder, [LONG]), SentenceTransformer(str(folder), device="cpu").encode([LONG])
    )


def test_no_length_is_above_what_the_network_can_take(folder: Path) -> None:
    edit(folder, SETTINGS, max_seq_length=4000)

    assert load_tiny(folder).capabilities.max_input_tokens == 130


async def test_a_network_that_computes_positions_takes_any_length(minilm: Path, tmp_path: Path) -> None:
    encoder = make_encoder(ENCODERS["modernbert"][0](), minilm, tmp_path / "encoder")
    make_sentence_model(encoder, tmp_path / "model", "mean")
    edit(tmp_path / "model", SETTINGS, max_seq_length=200)

    reference = SentenceTransformer(str(tmp_path / "model"), device="cpu")

    assert reference.max_seq_length == 200
    assert_equal(await vectors_of(tmp_path / "model", [LONG]), reference.encode([LONG]))


@pytest.mark.parametrize("name", ["roberta", "xlm-roberta", "distilbert"])
async def test_settings_under_the_name_of_an_architecture_are_read(name: str, folder: Path) -> None:
    (folder / SETTINGS).unlink()
    edit(folder, f"sentence_{name}_config.json", max_seq_length=12, do_lower_case=True)

    reference = SentenceTransformer(str(folder), device="cpu")

    assert reference.max_seq_length == 12
    assert_equal(await vectors_of(folder, [LONG, "A [MASK] b"]), reference.encode([LONG, "A [MASK] b"]))


TEXT_OUTPUT = {"method": "forward", "method_output_name": "last_hidden_state"}
REFUSED: dict[str, dict[str, Any]] = {
    "config_kwargs.hidden_act": {"config_kwargs": {"hidden_act": "relu"}},
    "config_kwargs.num_hidden_layers": {"config_args": {"num_hidden_layers": 1}},
    "model_kwargs.subfolder": {"model_kwargs": {"subfolder": "other"}},
    "model_kwargs.variant": {"model_args": {"variant": "fp16"}},
    "processor_kwargs.do_lower_case": {"processor_kwargs": {"do_lower_case": False}},
    "processor_kwargs.add_eos_token": {"tokenizer_args": {"add_eos_token": True}},
    "processing_kwargs.text.add_special_tokens": {
        "processing_kwargs": {"text": {"add_special_tokens": False}}
    },
    "processing_kwargs.common.truncation": {"processing_kwargs": {"common": {"truncation": False}}},
    "modality_config.text": {
        "modality_config": {"text": {"method": "forward", "method_output_name": "pooler_output"}},
        "module_output_name": "sentence_embedding",
    },
    "the tokenizer's chat template": {
        "modality_config": {"text": TEXT_OUTPUT, "message": TEXT_OUTPUT},
        "module_output_name": "token_embeddings",
    },
    "module_output_name": {
        "modality_config": {"text": TEXT_OUTPUT},
        "module_output_name": "all_vectors",
    },
    "transformer_task": {"transformer_task": "fill-mask"},
    "tokenizer_name_or_path": {"tokenizer_name_or_path": "bert-base-cased"},
    "query_length": {"query_length": 8},
    "of_the_future": {"of_the_future": True},
}


@pytest.mark.parametrize("key", REFUSED)
def test_settings_that_change_vectors_are_refused_by_name(key: str, folder: Path) -> None:
    edit(folder, SETTINGS, modality_config=None, module_output_name=None)
    edit(folder, SETTINGS, **REFUSED[key])

    with pytest.raises(ModelUnavailable, match=key):
        load_tiny(folder)


async def test_settings_that_change_no_vector_are_accepted(folder: Path) -> None:
    edit(
        folder,
        SETTINGS,
        model_kwargs={"attn_implementation": "eager", "torch_dtype": "float32", "trust_remote_code": True},
        processor_kwargs={"padding_side": "right", "use_fast": True},
        config_kwargs={"use_cache": False, "hidden_size": 32},
        processing_kwargs={"text": {"padding": "max_length", "max_length": 64, "truncation": True}},
        unpad_inputs=False,
    )

    reference = SentenceTransformer(str(folder), device="cpu").encode(TEXTS)

    assert_equal(await vectors_of(folder, TEXTS), reference)


@pytest.mark.parametrize("width", [8, 500])
async def test_truncate_dim_shortens_dense_vectors(width: int, folder: Path) -> None:
    edit(folder, WHOLE, truncate_dim=width)
    reference = SentenceTransformer(str(folder), device="cpu")

    assert_equal(await vectors_of(folder, TEXTS), reference.encode(TEXTS))
    assert load_tiny(folder).capabilities.dimensions == min(32, width)


@pytest.mark.parametrize("value", [0, -1, "8", True])
def test_a_truncate_dim_that_is_no_width_is_refused(value: Any, folder: Path) -> None:
    edit(folder, WHOLE, truncate_dim=value)

    with pytest.raises(ModelUnavailable, match="truncate_dim"):
        load_tiny(folder)


async def test_max_active_dims_keeps_the_largest_terms(minilm: Path, tmp_path: Path) -> None:
    make_language_model(ENCODERS["bert"][0](), minilm, tmp_path / "network", AutoModelForMaskedLM)
    model = SparseEncoder(str(tmp_path / "network"), device="cpu", max_active_dims=9)
    model.save(str(tmp_path / "splade"), create_model_card=False)
    reference = SparseEncoder(str(tmp_path / "splade"), device="cpu")
    expected = reference.encode(TEXTS, convert_to_sparse_tensor=False, convert_to_tensor=True).numpy()

    reply = await encode(engine_on(load_tiny(tmp_path / "splade")), TEXTS, Output.SPARSE)

    assert [9] * len(TEXTS) == [len(terms.indices) for terms in reply.sparse or ()]
    found = np.stack([dense_of(terms) for terms in reply.sparse or ()])
    np.testing.assert_allclose(found, expected, atol=1e-4)


@pytest.mark.parametrize("place", ["config", "arguments", "vocabulary"])
async def test_texts_are_cut_at_the_side_that_the_tokenizer_names(place: str, folder: Path) -> None:
    edit(folder, SETTINGS, max_seq_length=16)
    if place == "config":
        edit(folder, TOKENIZER, truncation_side="left")
    elif place == "arguments":
        edit(folder, SETTINGS, processor_kwargs={"truncation_side": "left", "model_max_length": 16})
    else:
        cut = {"direction": "Left", "max_length": 16, "strategy": "LongestFirst", "stride": 0}
        edit(folder, "tokenizer.json", truncation=cut)
        edit(folder, TOKENIZER, truncation_side=None)
    reference = SentenceTransformer(str(folder), device="cpu")
    capabilities = load_tiny(folder).capabilities

    assert_equal(await vectors_of(folder, [LONG, "short"]), reference.encode([LONG, "short"]))
    assert capabilities.truncation_side is Truncate.LEFT
    assert any("lose their start" in note for note in capabilities.notes)


@pytest.mark.parametrize("normalizer", [None, {"type": "NFC"}, {"type": "Sequence", "normalizers": []}])
async def test_lower_case_leaves_special_tokens(normalizer: Any, folder: Path) -> None:
    document = json.loads((folder / "tokenizer.json").read_text()) | {"normalizer": normalizer}
    (folder / "tokenizer.json").write_text(json.dumps(document))
    edit(folder, TOKENIZER, tokenizer_class="PreTrainedTokenizerFast", do_lower_case=None)
    edit(folder, SETTINGS, do_lower_case=True)
    texts = ["The [MASK] of France", "ΟΔΟΣ [PAD] End", "[CLS] A [SEP] B", "İstanbul"]

    reference = SentenceTransformer(str(folder), device="cpu").encode(texts)

    assert_equal(await vectors_of(folder, texts), reference)


@pytest.mark.parametrize("name", ["roberta", "camembert", "mpnet"])
async def test_a_padding_token_in_a_text_has_no_position(name: str, minilm: Path, tmp_path: Path) -> None:
    configs = {name: make for name, (make, _) in ENCODERS.items()}
    configs["camembert"] = lambda: transformers.CamembertConfig(**SMALL | {"type_vocab_size": 1})
    encoder = make_encoder(configs[name](), minilm, tmp_path / "encoder")
    reference = make_sentence_model(encoder, tmp_path / "model", "mean")
    texts = ["a [PAD] b and more", "[PAD]", "plain text", "x [PAD] [PAD] y [PAD]"]

    expected = np.stack([reference.encode(text) for text in texts])

    assert_equal(await vectors_of(tmp_path / "model", texts), expected)


@pytest.mark.parametrize(
    "config",
    [
        {"model_input_names": ["input_ids", "attention_mask"]},
        {"tokenizer_class": "DistilBertTokenizer"},
        {},
    ],
    ids=["names", "class", "bert"],
)
async def test_a_network_gets_type_ids_if_its_tokenizer_has_them(
    config: dict[str, Any], minilm: Path, tmp_path: Path
) -> None:
    make_classifier(transformers.BertConfig(**SMALL), minilm, tmp_path)
    edit(tmp_path, TOKENIZER, model_max_length=100, **config)
    documents = TEXTS[1:6]
    stock = CrossEncoder(str(tmp_path), device="cpu", activation_fn=torch.nn.Identity())
    expected = stock.predict([(TEXTS[0], document) for document in documents])

    work = Rerank(TEXTS[0], tuple(documents), raw_scores=True)
    reply = await run_work(engine_on(load_tiny(tmp_path)), work, RerankReply)

    np.testing.assert_allclose(reply.scores, expected, atol=1e-4)


def test_special_tokens_in_texts_are_split_if_the_tokenizer_says_so(folder: Path) -> None:
    edit(folder, TOKENIZER, split_special_tokens=True)
    texts = ["a [MASK] b [SEP] c", LONG + " [SEP]"]
    stock = AutoTokenizer.from_pretrained(folder)

    tokenizer = open_tokenizer(folder, 32)

    for one in (tokenizer, tokenizer.with_max_tokens(32)):
        expected = stock(texts, truncation=True, max_length=32)["input_ids"]
        assert expected == one.encode(texts, Truncate.RIGHT).ids


@pytest.mark.parametrize("length", [12, 40, 4000])
async def test_a_length_of_a_role_takes_precedence_over_that_of_the_tokenizer(
    length: int, minilm: Path, tmp_path: Path
) -> None:
    make_encoder(transformers.BertConfig(**SMALL), minilm, tmp_path / "encoder")
    model = MultiVectorEncoder(str(tmp_path / "encoder"), device="cpu")
    model.save(str(tmp_path / "model"), create_model_card=False)
    edit(tmp_path / "model", TOKENIZER, model_max_length=20)
    edit(tmp_path / "model", SETTINGS, document_length=length, max_seq_length=None)
    reference = MultiVectorEncoder(str(tmp_path / "model"), device="cpu")

    reply = await encode(engine_on(load_tiny(tmp_path / "model")), [LONG], Output.MULTIVECTOR)

    (found,) = reply.multivector or ()
    if length > 130:
        # The library fails beyond the positions of the network.
        assert len(found) == 130
    else:
        np.testing.assert_allclose(found, reference.encode_document([LONG])[0], atol=1e-4)


async def test_the_prompt_of_passages_is_that_of_documents(folder: Path) -> None:
    edit(folder, WHOLE, prompts={"query": "query: ", "passage": "passage: "})
    reference = SentenceTransformer(str(folder), device="cpu")

    found = await vectors_of(folder, TEXTS, prompt_name="document")

    assert_equal(found, reference.encode(TEXTS, prompt_name="passage"))


async def test_an_empty_prompt_of_documents_stays_empty(folder: Path) -> None:
    edit(folder, WHOLE, prompts={"query": "query: ", "passage": "passage: ", "document": ""})
    reference = SentenceTransformer(str(folder), device="cpu")

    found = await vectors_of(folder, TEXTS, prompt_name="document")

    assert_equal(found, reference.encode_document(TEXTS))


@pytest.mark.parametrize("positions", ["table", "none"])
async def test_a_network_without_a_table_of_positions_takes_any_length(
    positions: str, minilm: Path, tmp_path: Path
) -> None:
    keys = SMALL | {
        "relative_attention": True,
        "pos_att_type": ["p2c"],
        "position_biased_input": positions == "table",
    }
    encoder = make_encoder(transformers.DebertaV2Config(**keys), minilm, tmp_path / "encoder")
    make_sentence_model(encoder, tmp_path / "model", "mean")
    edit(tmp_path / "model", SETTINGS, max_seq_length=200)
    limit = load_tiny(tmp_path / "model").capabilities.max_input_tokens

    assert limit == (130 if positions == "table" else 200)
    if positions == "none":
        stock = SentenceTransformer(str(tmp_path / "model"), device="cpu")
        assert_equal(await vectors_of(tmp_path / "model", [LONG]), stock.encode([LONG]))


async def test_positions_under_another_name_limit_the_length(minilm: Path, tmp_path: Path) -> None:
    config = transformers.GPT2Config(
        vocab_size=30522,
        n_positions=130,
        n_embd=32,
        n_layer=2,
        n_head=4,
        initializer_range=0.3,
        pad_token_id=0,
    )
    encoder = make_encoder(config, minilm, tmp_path / "encoder")
    make_sentence_model(encoder, tmp_path / "model", "mean")
    edit(tmp_path / "model", SETTINGS, max_seq_length=None)
    edit(tmp_path / "model", TOKENIZER, model_max_length=1024)

    stock = SentenceTransformer(str(tmp_path / "model"), device="cpu")

    assert load_tiny(tmp_path / "model").capabilities.max_input_tokens == 130
    assert_equal(await vectors_of(tmp_path / "model", [LONG]), stock.encode([LONG]))


def test_the_old_name_of_the_length_is_read(folder: Path) -> None:
    edit(folder, TOKENIZER, model_max_length=None, max_len=33)

    assert load_tiny(folder).capabilities.max_input_tokens == 33
    assert SentenceTransformer(str(folder), device="cpu").max_seq_length == 33


@pytest.mark.parametrize(
    ("name", "keys", "message"),
    [
        (
            WHOLE,
            {"default_prompt_name": "nope"},
            "`default_prompt_name` is 'nope', which is none of its prompts",
        ),
        (WHOLE, {"prompts": {"query": 3}}, "`prompts` maps no names to texts"),
        (WHOLE, {"prompts": ["query"]}, "`prompts` maps no names to texts"),
        (SETTINGS, {"max_seq_length": "64"}, "is '64', which is no number of tokens"),
        (SETTINGS, {"max_seq_length": -1}, "is -1, which is no number of tokens"),
        (TOKENIZER, {"model_max_length": "40"}, "is '40', which is no number of tokens"),
    ],
)
def test_values_of_another_type_are_refused(
    name: str, keys: dict[str, Any], message: str, folder: Path
) -> None:
    edit(folder, name, **keys)

    with pytest.raises(ModelUnavailable, match=message):
        load_tiny(folder)


CARD = """
embeddings = mean_pooling(model_output, encoded_input["attention_mask"])
embeddings = F.layer_norm(embeddings, normalized_shape=(embeddings.shape[1],))
embeddings = embeddings[:, :matryoshka_dim]
"""


@pytest.mark.parametrize("place", ["published", "local", "card"])
@pytest.mark.parametrize("normalize", [True, False])
async def test_nomics_vectors_pass_a_layer_norm_before_they_are_cut(
    place: str, normalize: bool, minilm: Path, tmp_path: Path
) -> None:
    folder = tmp_path / ("nomic-embed-text-v1.5" if place == "local" else "model")
    reference = make_sentence_model(
        make_encoder(ENCODERS["nomic"][0](), minilm, tmp_path / "n"), folder, "mean"
    )
    names = {"published": "nomic-ai/nomic-embed-text-v1.5", "local": str(folder), "card": "anything"}
    if place == "card":
        (folder / "README.md").write_text(CARD)
    model = load_tiny(folder, settings=TaskSettings(model=names[place]))
    engine = engine_on(model)
    full = reference.encode(TEXTS, convert_to_tensor=True)
    expected = torch.nn.functional.layer_norm(full, normalized_shape=(full.shape[1],))[:, :12]
    if normalize:
        expected = torch.nn.functional.normalize(expected, p=2, dim=1)
    work = Embed(tuple(TEXTS), dimensions=12, normalize=normalize)
    cut = await run_work(engine, work, EmbedReply)
    whole = await run_work(engine, Embed(tuple(TEXTS), dimensions=full.shape[1]), EmbedReply)

    np.testing.assert_allclose(cut.vectors, expected.cpu().numpy(), atol=1e-4)
    assert_equal(whole.vectors, full.cpu().numpy())
    assert model.capabilities.norm_before_cut
    assert any("a layer norm before `dimensions`" in note for note in model.capabilities.notes)


async def test_other_vectors_of_that_network_are_cut_as_they_are(minilm: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    reference = make_sentence_model(
        make_encoder(ENCODERS["nomic"][0](), minilm, tmp_path / "n"), folder, "mean"
    )
    (folder / "README.md").write_text("a layer_norm( is not cut here\n")
    model = load_tiny(folder, settings=TaskSettings(model="nomic-ai/nomic-embed-text-v1"))
    cut = await run_work(engine_on(model), Embed(tuple(TEXTS), dimensions=12), EmbedReply)

    assert_equal(cut.vectors, reference.encode(TEXTS, truncate_dim=12))
    assert any("cuts a vector as it is" in note for note in model.capabilities.notes)
