"""Late interaction against sentence-transformers' MultiVectorEncoder, which reads all three layouts."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from sentence_transformers import MultiVectorEncoder
from sentence_transformers.base.modules import Dense, Normalize, Transformer
from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask
from torch import nn

from backends.contract import Lengths, Operation, Output, Rerank, RerankReply, Score, ScoreKind, Vectors
from backends.contract.errors import ModelUnavailable
from backends.torch.passes.loaded_model import LoadedModel
from tests.engine.checkpoints import ENCODERS, make_encoder
from tests.engine.engines import TEXTS, cosines, encode, encode_singly, engine_on, load_tiny, run_work

QUERIES = ["parse json", "What is a socket?", *TEXTS[:4]]
PROMPTS = {"query": "[Q] ", "document": "[D] "}
EXPANSIONS = {
    "none": None,
    "fixed": {"strategy": "fixed", "length": 16, "attend": False},
    "attended": {"strategy": "fixed", "length": 16, "attend": True},
    "least": {"strategy": "min", "length": 12, "attend": False},
}


def projection() -> Dense:
    torch.manual_seed(2)
    return Dense(32, 16, bias=False, activation_function=nn.Identity(), module_input_name="token_embeddings")


def make_native(name: str, minilm: Path, folder: Path, expansion: str = "fixed") -> MultiVectorEncoder:
    encoder = make_encoder(ENCODERS[name][0](), minilm, folder / "network")
    network = Transformer(str(encoder), document_length=40, query_expansion=EXPANSIONS[expansion])
    mask = MultiVectorMask(skiplist_words=[".", ",", "the"])
    parts = [network, projection(), mask, Normalize(module_input_name="token_embeddings")]
    model = MultiVectorEncoder(modules=parts, prompts=PROMPTS, device="cpu")
    model.save(str(folder / "late"), create_model_card=False)
    return model


def make_pylate(minilm: Path, folder: Path) -> MultiVectorEncoder:
    """Write a checkpoint of PyLate 1: two modules, everything else in one file."""
    make_native("bert", minilm, folder)
    late = folder / "late"
    listed = json.loads((late / "modules.json").read_text())[:2]
    listed[1]["type"] = "pylate.models.Dense.Dense"
    (late / "modules.json").write_text(json.dumps(listed))
    dense = json.loads((late / "1_Dense" / "config.json").read_text())
    for name in ("module_input_name", "module_output_name"):
        del dense[name]
    (late / "1_Dense" / "config.json").write_text(json.dumps(dense))
    (late / "sentence_bert_config.json").write_text(
        json.dumps({"max_seq_length": 60, "do_lower_case": False})
    )
    (late / "config_sentence_transformers.json").write_text(
        json.dumps(
            {
                "model_type": "ColBERT",
                "prompts": {},
                "query_prefix": "[unused0]",
                "document_prefix": "[unused1]",
                "query_length": 20,
                "document_length": 50,
                "attend_to_expansion_tokens": False,
                "skiplist_words": ["!", "."],
            }
        )
    )
    return MultiVectorEncoder(str(late), device="cpu")


def make_original(minilm: Path, folder: Path) -> MultiVectorEncoder:
    """Write a checkpoint in the layout of colbert-ir/colbertv2.0."""
    late = make_encoder(ENCODERS["bert"][0](), minilm, folder / "late")
    config = json.loads((late / "config.json").read_text())
    (late / "config.json").write_text(json.dumps(config | {"architectures": ["HF_ColBERT"]}))
    weights = {f"bert.{name}": tensor for name, tensor in load_file(late / "model.safetensors").items()}
    weights["linear.weight"] = projection().linear.weight.detach()
    save_file(weights, late / "model.safetensors", {"format": "pt"})
    metadata = {
        "query_maxlen": 24,
        "doc_maxlen": 60,
        "attend_to_mask_tokens": False,
        "mask_punctuation": True,
    }
    (late / "artifact.metadata").write_text(json.dumps(metadata))
    return MultiVectorEncoder(str(late), device="cpu")


async def assert_same_vectors(model: LoadedModel, reference: MultiVectorEncoder) -> None:
    """Compare queries and documents, vector by vector."""
    engine = engine_on(model)
    queries = await encode(engine, QUERIES, Output.MULTIVECTOR, prompt_name="query")
    documents = await encode(engine, TEXTS, Output.MULTIVECTOR, prompt_name="document")
    assert_alike(queries.multivector, reference.encode_query(QUERIES))
    assert_alike(documents.multivector, reference.encode_document(TEXTS))


def assert_alike(found: tuple[Vectors, ...] | None, expected: list[torch.Tensor]) -> None:
    assert found is not None
    for vectors, reference in zip(found, expected, strict=True):
        np.testing.assert_allclose(vectors, np.asarray(reference), atol=1e-4)
    together = np.concatenate(found)
    assert (together @ together.T).min() < 0.9


@pytest.mark.parametrize("expansion", EXPANSIONS)
async def test_counted_tokens_stay_within_the_reserved_bound(
    expansion: str, minilm: Path, tmp_path: Path
) -> None:
    make_native("bert", minilm, tmp_path, expansion)
    model = load_tiny(tmp_path / "late")
    capabilities = model.capabilities

    for query, document in (("a", "b"), ("a " * 300, "b " * 300)):
        work = Rerank(query, (document,))
        reply = await run_work(engine_on(model), work, RerankReply)
        (bound,) = work.token_bounds(
            Lengths(capabilities.max_input_tokens, pair_overhead=capabilities.overhead_tokens)
        )
        assert reply.tokens <= bound


@pytest.mark.parametrize("expansion", EXPANSIONS)
async def test_vectors_equal_those_of_sentence_transformers(
    expansion: str, minilm: Path, tmp_path: Path
) -> None:
    reference = make_native("bert", minilm, tmp_path, expansion)
    model = load_tiny(tmp_path / "late")

    assert model.packed
    await assert_same_vectors(model, reference)


@pytest.mark.parametrize("name", ["modernbert", "xlm-roberta", "mpnet"])
async def test_other_networks_and_the_padded_path_agree(name: str, minilm: Path, tmp_path: Path) -> None:
    reference = make_native(name, minilm, tmp_path)
    model = load_tiny(tmp_path / "late")

    assert model.packed == ENCODERS[name][1]
    await assert_same_vectors(model, reference)


async def test_loads_checkpoints_of_pylate(minilm: Path, tmp_path: Path) -> None:
    reference = make_pylate(minilm, tmp_path)

    await assert_same_vectors(load_tiny(tmp_path / "late"), reference)


async def test_loads_checkpoints_of_the_original_colbert(minilm: Path, tmp_path: Path) -> None:
    reference = make_original(minilm, tmp_path)

    await assert_same_vectors(load_tiny(tmp_path / "late"), reference)


async def test_bfloat16_vectors_stay_close_and_do_not_depend_on_their_batch(
    minilm: Path, tmp_path: Path
) -> None:
    reference = make_native("bert", minilm, tmp_path)
    engine = engine_on(load_tiny(tmp_path / "late", "bfloat16"))

    for role, texts, stock in (
        ("query", QUERIES, reference.encode_query(QUERIES)),
        ("document", TEXTS, reference.encode_document(TEXTS)),
    ):
        together = await encode(engine, texts, Output.MULTIVECTOR, prompt_name=role)
        single = await encode_singly(engine, texts, Output.MULTIVECTOR, prompt_name=role)
        each = [reply.multivector[0] for reply in single if reply.multivector]
        assert least_alike(together.multivector or (), stock) > 0.999
        assert least_alike(together.multivector or (), each) > 0.9999


def least_alike(found: Sequence[Vectors], expected: Sequence[Vectors | torch.Tensor]) -> float:
    """Return the lowest mean cosine of a text's vectors, because a score uses all of them."""
    pairs = zip(found, map(np.asarray, expected), strict=True)
    return min(float(cosines(vectors, reference).mean()) for vectors, reference in pairs)


async def test_reranks_by_the_best_match_of_each_query_vector(minilm: Path, tmp_path: Path) -> None:
    reference = make_native("bert", minilm, tmp_path)
    model = load_tiny(tmp_path / "late")
    engine = engine_on(model)
    query, documents = QUERIES[0], TEXTS[:12]

    raw = await run_work(engine, Rerank(query, tuple(documents), raw_scores=True), RerankReply)
    mean = await run_work(engine, Rerank(query, tuple(documents)), RerankReply)

    expected = reference.similarity(reference.encode_query([query]), reference.encode_document(documents))[
        0
    ].numpy()
    np.testing.assert_allclose(raw.scores, expected, atol=1e-3)
    np.testing.assert_allclose(mean.scores, expected / 16, atol=1e-4)
    assert Operation.RERANK in model.capabilities.operations
    assert model.capabilities.score_kind is ScoreKind.COSINE


async def test_scores_of_several_queries_equal_separate_scores(minilm: Path, tmp_path: Path) -> None:
    make_native("bert", minilm, tmp_path)
    engine = engine_on(load_tiny(tmp_path / "late"))
    pairs = tuple((QUERIES[i % 3], TEXTS[i]) for i in range(9))

    together = await run_work(engine, Score(pairs), RerankReply)

    for i, (query, document) in enumerate(pairs):
        single = await run_work(engine, Rerank(query, (document,)), RerankReply)
        np.testing.assert_allclose(together.scores[i], single.scores[0], atol=1e-5)
    assert together.scores.std() > 0.01


async def test_fillers_are_not_counted_and_truncation_is_reported(minilm: Path, tmp_path: Path) -> None:
    make_native("bert", minilm, tmp_path)
    engine = engine_on(load_tiny(tmp_path / "late"))

    query = await encode(engine, ["hi"], Output.MULTIVECTOR, prompt_name="query")
    long = await encode(engine, ["hi", "word " * 100], Output.MULTIVECTOR)
    scored = await run_work(engine, Rerank("hi", ("word " * 100, "a")), RerankReply)

    assert (query.input_tokens, len((query.multivector or ())[0])) == ((6,), 16)
    assert long.truncated == (1,)
    assert long.input_tokens == (6, 40)
    assert scored.truncated == (0,)
    assert scored.tokens == 6 + 40 + 6


async def test_unknown_words_lose_their_vectors_if_the_list_names_them(minilm: Path, tmp_path: Path) -> None:
    make_native("bert", minilm, tmp_path)
    path = tmp_path / "late" / "2_MultiVectorMask" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"skiplist_words": ["[UNK]", ","]}))
    reference = MultiVectorEncoder(str(tmp_path / "late"), device="cpu")
    texts = ["a \U0001f9ff, b", *TEXTS[:3]]

    reply = await encode(
        engine_on(load_tiny(tmp_path / "late")), texts, Output.MULTIVECTOR, prompt_name="document"
    )

    assert_alike(reply.multivector, reference.encode_document(texts))


async def test_expansion_of_queries_lengthens_no_document(minilm: Path, tmp_path: Path) -> None:
    make_native("bert", minilm, tmp_path)
    path = tmp_path / "late" / "sentence_bert_config.json"
    keys = json.loads(path.read_text()) | {"max_seq_length": 10}
    path.write_text(json.dumps({key: value for key, value in keys.items() if key != "document_length"}))
    model = load_tiny(tmp_path / "late")

    await assert_same_vectors(model, MultiVectorEncoder(str(tmp_path / "late"), device="cpu"))
    reply = await encode(engine_on(model), [TEXTS[0] * 3], Output.MULTIVECTOR, prompt_name="document")
    assert reply.truncated == (0,)


def name_tokens(late: Path, tokens: dict[str, str | None]) -> None:
    """State other special tokens of a tokenizer, which keeps [MASK] in its vocabulary."""
    (late / "special_tokens_map.json").unlink(missing_ok=True)
    file = late / "tokenizer_config.json"
    stated = json.loads(file.read_text())
    for name in ("added_tokens_decoder", "mask_token", "eos_token"):
        stated.pop(name, None)
    stated |= {"tokenizer_class": "PreTrainedTokenizerFast"} | tokens
    file.write_text(json.dumps({name: text for name, text in stated.items() if text is not None}))


@pytest.mark.parametrize("layout", ["native", "pylate"])
@pytest.mark.parametrize(
    "tokens",
    [
        {"mask_token": "[unused7]"},
        {"mask_token": "[unused7]", "eos_token": "[SEP]"},
        {"eos_token": "[unused9]"},
        {"tokenizer_class": "BertTokenizer"},
        {"tokenizer_class": "BertTokenizerFast", "mask_token": "the"},
    ],
    ids=["another mask", "mask before end", "end", "class", "word"],
)
async def test_queries_are_filled_up_with_the_tokenizers_own_token(
    layout: str, tokens: dict[str, str | None], minilm: Path, tmp_path: Path
) -> None:
    make = make_pylate if layout == "pylate" else make_native
    make(*(() if layout == "pylate" else ("bert",)), minilm, tmp_path)
    name_tokens(tmp_path / "late", tokens)
    reference = MultiVectorEncoder(str(tmp_path / "late"), device="cpu")

    await assert_same_vectors(load_tiny(tmp_path / "late"), reference)


def test_a_tokenizer_without_mask_and_end_token_is_refused(minilm: Path, tmp_path: Path) -> None:
    make_native("bert", minilm, tmp_path)
    name_tokens(tmp_path / "late", {})
    with pytest.raises(ValueError, match="has neither"):
        MultiVectorEncoder(str(tmp_path / "late"), device="cpu")
    with pytest.raises(ModelUnavailable, match="name the token as `token` of `query_expansion`"):
        load_tiny(tmp_path / "late")

    file = tmp_path / "late" / "sentence_bert_config.json"
    settings = json.loads(file.read_text())
    settings["query_expansion"]["token"] = "[no such token]"
    file.write_text(json.dumps(settings))
    with pytest.raises(ModelUnavailable, match="filled up with '\\[no such token\\]'"):
        load_tiny(tmp_path / "late")


@pytest.mark.parametrize("kept", [["Dense", "MultiVectorMask"], ["Normalize", "Dense", "MultiVectorMask"]])
async def test_vectors_have_length_1_only_if_the_last_module_scales_them(
    kept: list[str], minilm: Path, tmp_path: Path
) -> None:
    make_native("bert", minilm, tmp_path)
    late = tmp_path / "late"
    file = late / "modules.json"
    modules = {module["type"].rpartition(".")[2]: module for module in json.loads(file.read_text())}
    listed = [modules["Transformer"], *(modules[kind] for kind in kept)]
    file.write_text(json.dumps([module | {"idx": place} for place, module in enumerate(listed)]))
    reference = MultiVectorEncoder(str(late), device="cpu")
    model = load_tiny(late)

    await assert_same_vectors(model, reference)
    lengths = np.linalg.norm(np.asarray(reference.encode_query(QUERIES)[0]), axis=1)
    assert np.abs(lengths - 1).max() > 0.1
    # The products of such vectors are no cosines.
    assert model.capabilities.score_kind is ScoreKind.LOGIT
    reply = await run_work(engine_on(model), Rerank(QUERIES[0], tuple(TEXTS[:5])), RerankReply)
    expected = reference.similarity(reference.encode_query(QUERIES[:1]), reference.encode_document(TEXTS[:5]))
    np.testing.assert_allclose(reply.scores, np.asarray(expected)[0], rtol=1e-4)
