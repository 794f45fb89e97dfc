"""Static models: vectors equal to those of the libraries that define them, and folders that are refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, Normalize, StaticEmbedding
from tokenizers import Tokenizer
from torch import Tensor

from backends.checkpoints.locations import locate_checkpoint
from backends.contract import (
    Embed,
    EmbedReply,
    Encode,
    Operation,
    Output,
    TokenizerSettings,
    Truncate,
    Vectors,
)
from backends.contract.errors import InvalidWork, ModelUnavailable, UnsupportedWork
from backends.recipe.checkpoint import read_input_rules
from backends.recipe.options import DTypeName, TaskSettings
from backends.tokens.tokenizer import open_counter
from backends.torch.load.load_plan import LoadOptions
from backends.torch.load.loader import describe, load
from backends.torch.memory import files_bytes, held_bytes
from tests.engine.engines import cosines, engine_on, load_tiny, run_work
from tests.engine.texts import real_texts

WIDTH = 24
TABLE_FOLDER = "0_StaticEmbedding"
TEXTS = [text for text in real_texts() if text.strip()]


def tokenizer_of(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def random_rows(rows: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed))


def make_static(minilm: Path, folder: Path, *after: torch.nn.Module) -> SentenceTransformer:
    """Write a model of sentence-transformers; return it as the reference."""
    tokenizer = tokenizer_of(minilm)
    tokenizer.no_truncation()
    static = StaticEmbedding(tokenizer, random_rows(tokenizer.get_vocab_size()))
    model = SentenceTransformer(modules=[static, *after], device="cpu")
    model.save(str(folder), create_model_card=False)
    put_into_a_folder_of_its_own(folder)
    return model


def put_into_a_folder_of_its_own(folder: Path) -> None:
    """Move the table to where releases before 6 of sentence-transformers put it."""
    (folder / TABLE_FOLDER).mkdir()
    for name in ("tokenizer.json", "model.safetensors"):
        (folder / name).rename(folder / TABLE_FOLDER / name)
    modules = json.loads((folder / "modules.json").read_text())
    modules[0]["path"] = TABLE_FOLDER
    (folder / "modules.json").write_text(json.dumps(modules))


def make_model2vec(minilm: Path, folder: Path, config: dict[str, object], **tensors: Tensor) -> Path:
    """Write a folder as model2vec's `save_pretrained` does."""
    folder.mkdir()
    shutil.copy(minilm / "tokenizer.json", folder)
    tensors.setdefault("embeddings", random_rows(30522))
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "model2vec", **config}))
    return folder


def change_tensors(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def model2vec_vectors(folder: Path, texts: list[str], max_length: int | None = 512) -> Vectors:
    """Compute what `StaticModel.encode` of model2vec returns, without its limit of characters."""
    tokenizer, tensors = tokenizer_of(folder), load_file(folder / "model.safetensors")
    tokenizer.no_padding()
    tokenizer.no_truncation()
    rows = []
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False).ids[:max_length]
        known = torch.tensor([id_ for id_ in ids if id_ != tokenizer.token_to_id("[UNK]")], dtype=torch.long)
        places = tensors["mapping"][known].long() if "mapping" in tensors else known
        vectors = tensors["embeddings"][places].double()
        if "weights" in tensors:
            vectors = vectors * tensors["weights"][known].double().unsqueeze(1)
        rows.append(vectors.sum(0) / max(len(known), 1))
    vectors_of_texts: Vectors = torch.stack(rows).float().numpy()
    return vectors_of_texts


async def embed(
    folder: Path, texts: list[str], dtype: DTypeName | None = None, **options: object
) -> EmbedReply:
    model = load(folder, "tiny", LoadOptions(dtype, "cpu"))
    return await run_work(engine_on(model), Embed(tuple(texts), **options), EmbedReply)


@pytest.mark.parametrize("after", [(), (Normalize(),), (Dense(WIDTH, 8), Normalize())])
async def test_vectors_equal_those_of_sentence_transformers(
    after: tuple[torch.nn.Module, ...], minilm: Path, tmp_path: Path
) -> None:
    reference = make_static(minilm, tmp_path / "model", *after)

    reply = await embed(tmp_path / "model", TEXTS)

    expected = reference.encode(TEXTS, normalize_embeddings=True)
    np.testing.assert_allclose(reply.vectors, expected, atol=2e-6)
    assert len(TEXTS) > 200
    assert reply.truncated == ()


async def test_vectors_that_are_not_scaled_equal_those_of_sentence_transformers(
    minilm: Path, tmp_path: Path
) -> None:
    reference = make_static(minilm, tmp_path / "model")

    reply = await embed(tmp_path / "model", TEXTS, normalize=False, dimensions=8)

    np.testing.assert_allclose(reply.vectors, reference.encode(TEXTS)[:, :8], atol=2e-6)


async def test_cuts_texts_where_the_tokenizer_of_sentence_transformers_does(
    minilm: Path, tmp_path: Path
) -> None:
    make_static(minilm, tmp_path / "model")
    tokenizer = tokenizer_of(tmp_path / "model" / TABLE_FOLDER)
    tokenizer.enable_truncation(16)
    tokenizer.save(str(tmp_path / "model" / TABLE_FOLDER / "tokenizer.json"))
    reference = SentenceTransformer(str(tmp_path / "model"), device="cpu")

    reply = await embed(tmp_path / "model", TEXTS)

    np.testing.assert_allclose(reply.vectors, reference.encode(TEXTS, normalize_embeddings=True), atol=2e-6)
    assert max(reply.input_tokens or ()) == 16
    assert len(reply.truncated) > 50


@pytest.mark.parametrize("config", [{}, {"max_length": 7}, {"max_length": None}])
async def test_vectors_equal_those_of_model2vec(
    config: dict[str, object], minilm: Path, tmp_path: Path
) -> None:
    folder = make_model2vec(minilm, tmp_path / "model", config)
    most = config.get("max_length", 512)

    reply = await embed(folder, TEXTS, normalize=False)

    assert isinstance(most, int | None)
    np.testing.assert_allclose(reply.vectors, model2vec_vectors(folder, TEXTS, most), rtol=1e-4, atol=1e-5)


async def test_unknown_words_do_not_count_in_model2vec(minilm: Path, tmp_path: Path) -> None:
    folder = make_model2vec(minilm, tmp_path / "model", {})
    unknown = "\U00010600"

    reply = await embed(folder, ["known words", f"known {unknown} words", unknown, "\t"])

    assert reply.input_tokens == (2, 3, 1, 0)
    np.testing.assert_allclose(reply.vectors[0], reply.vectors[1], atol=1e-6)
    assert not reply.vectors[2:].any()


async def test_tokens_of_model2vec_can_share_rows(minilm: Path, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    folder = make_model2vec(
        minilm,
        tmp_path / "model",
        {},
        embeddings=random_rows(100),
        mapping=torch.randint(100, (30522,), generator=generator, dtype=torch.int32),
        weights=torch.rand(30522, generator=generator),
    )

    reply = await embed(folder, TEXTS, normalize=False)

    np.testing.assert_allclose(reply.vectors, model2vec_vectors(folder, TEXTS), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int8])
async def test_table_keeps_the_number_format_of_its_file(
    dtype: torch.dtype, minilm: Path, tmp_path: Path
) -> None:
    rows = random_rows(30522) * (30 if dtype is torch.int8 else 1)
    folder = make_model2vec(minilm, tmp_path / "model", {}, embeddings=rows.to(dtype))
    model = load(folder, "tiny", LoadOptions(device="cpu"))

    reply = await embed(folder, TEXTS, normalize=False)

    expected = model2vec_vectors(folder, TEXTS)
    np.testing.assert_allclose(reply.vectors, expected, atol=1e-5 * np.abs(expected).max())
    assert model.capabilities.dtype == str(dtype).removeprefix("torch.")
    assert held_bytes(model.head) == rows.numel() * dtype.itemsize
    assert held_bytes(model.head) < files_bytes(folder) < held_bytes(model.head) + 1000


async def test_operator_can_shrink_the_table(minilm: Path, tmp_path: Path) -> None:
    make_static(minilm, tmp_path / "model")
    model = load_tiny(tmp_path / "model", "bfloat16")

    reply = await run_work(engine_on(model), Embed(tuple(TEXTS)), EmbedReply)

    exact = await embed(tmp_path / "model", TEXTS)
    assert cosines(reply.vectors, exact.vectors).min() > 0.9999
    assert held_bytes(model.head) == 30522 * WIDTH * 2


def test_reports_what_it_has(minilm: Path, tmp_path: Path) -> None:
    make_static(minilm, tmp_path / "model")
    options = LoadOptions(device="cpu")

    model = load(tmp_path / "model", "tiny", options).capabilities

    assert (model.dimensions, model.pooling, model.dtype) == (WIDTH, "mean", "float32")
    assert (model.max_input_tokens, model.outputs) == (32768, {Output.DENSE})
    assert Operation.EMBED in model.operations
    assert Operation.RERANK not in model.operations
    assert describe(tmp_path / "model", "tiny", options).dimensions == WIDTH


def test_gateway_counts_no_special_tokens(minilm: Path, tmp_path: Path) -> None:
    make_static(minilm, tmp_path / "model")

    counter = open_counter(tmp_path / "model")

    assert (counter.special_tokens, counter.count(["two words"])) == (0, [2])
    assert read_input_rules(tmp_path / "model").max_tokens == 32768


async def test_long_text_is_refused_or_cut_as_the_caller_says(minilm: Path, tmp_path: Path) -> None:
    folder = make_model2vec(minilm, tmp_path / "model", {"max_length": 4})
    engine = engine_on(load_tiny(folder))

    left = await run_work(engine, Embed(("a b c d e f",), truncate=Truncate.LEFT), EmbedReply)
    end = await run_work(engine, Embed(("c d e f",)), EmbedReply)

    np.testing.assert_array_equal(left.vectors, end.vectors)
    assert left.truncated == (0,)
    with pytest.raises(InvalidWork, match="6 tokens"):
        await engine.run(Embed(("a b c d e f",), truncate=Truncate.ERROR))
    with pytest.raises(UnsupportedWork, match="tokens"):
        await engine.run(Encode(("a",), frozenset({Output.TOKENS})))


def test_locates_a_folder_without_config_json(minilm: Path, tmp_path: Path) -> None:
    make_static(minilm, tmp_path / "model")

    assert not (tmp_path / "model" / "config.json").exists()
    assert locate_checkpoint(str(tmp_path / "model")) == tmp_path / "model"
    (tmp_path / "model" / TABLE_FOLDER / "model.safetensors").unlink()
    with pytest.raises(ModelUnavailable, match=r"lacks model\.safetensors"):
        locate_checkpoint(str(tmp_path / "model"))


def swap_shape(tensors: dict[str, Tensor]) -> None:
    tensors["embeddings"] = tensors["embeddings"].flatten()


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (
            lambda tensors: tensors.update(table=tensors.pop("embeddings")),
            "no tensor embedding.weight or emb",
        ),
        (lambda tensors: tensors.update(more=torch.zeros(1)), r"unexpected tensors \(more\)"),
        (lambda tensors: tensors.update(embeddings=random_rows(30521)), "30521 vectors for 30522 tokens"),
        (lambda tensors: tensors["embeddings"][7].fill_(torch.nan), "in embeddings that is not finite"),
        (lambda tensors: tensors.update(mapping=torch.full((30522,), 30522)), "mapping to rows"),
        (lambda tensors: tensors.update(weights=torch.ones(3)), r"weights of shape \(3,\)"),
        (swap_shape, "embeddings of shape"),
    ],
)
def test_refuses_a_table_that_is_not_whole(
    change: Callable[[dict[str, Tensor]], object], fault: str, minilm: Path, tmp_path: Path
) -> None:
    folder = make_model2vec(minilm, tmp_path / "model", {})
    change_tensors(folder, change)

    with pytest.raises(ModelUnavailable, match=fault):
        load(folder, "tiny", LoadOptions(device="cpu"))


def test_refuses_settings_that_do_not_apply(minilm: Path, tmp_path: Path) -> None:
    folder = make_model2vec(minilm, tmp_path / "model", {})

    with pytest.raises(ModelUnavailable, match="leave out `pooling`"):
        load_tiny(folder, settings=TaskSettings(pooling="cls"))
    with pytest.raises(ModelUnavailable, match="nothing to compile"):
        load(folder, "tiny", LoadOptions(device="cpu", compiled=True))
    with pytest.raises(ModelUnavailable, match="no reranker"):
        load_tiny(folder, settings=TaskSettings(task="rerank"))
    with pytest.raises(ModelUnavailable, match="leave out `add_bos_token`"):
        load(folder, "tiny", LoadOptions(device="cpu", tokenizer=TokenizerSettings(add_eos_token=True)))


def test_refuses_a_folder_with_several_models_of_wordllama(minilm: Path, tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    (tmp_path / "tokenizers").mkdir()
    shutil.copy(minilm / "tokenizer.json", tmp_path / "tokenizers" / "x_tokenizer_config.json")
    for width in (8, 16):
        table = {"embedding.weight": torch.zeros(30522, width)}
        save_file(table, tmp_path / "weights" / f"x_{width}.safetensors")

    with pytest.raises(ModelUnavailable, match=r"x_16\.safetensors, x_8\.safetensors"):
        locate_checkpoint(str(tmp_path))


async def test_vectors_equal_those_of_wordllama() -> None:
    wordllama = pytest.importorskip("wordllama")
    folder = Path(wordllama.__file__).parent
    reference = wordllama.WordLlama.load(cache_dir=folder, disable_download=True)

    reply = await embed(locate_checkpoint(str(folder)), TEXTS, normalize=False)
    short = await embed(folder, TEXTS, dimensions=64)

    expected = reference.embed(TEXTS)
    np.testing.assert_allclose(reply.vectors, expected, atol=1e-6)
    assert cosines(short.vectors, expected[:, :64]).min() > 0.999999
    assert describe(folder, "wordllama", LoadOptions(device="cpu")).dtype == "float16"
