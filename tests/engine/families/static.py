"""Static models: a table of token vectors, of which a text's vector is the mean."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from backends.contract import Embed
from tests.engine.families.family import Answer, Family, Served
from tests.engine.families.layout import HIDDEN, PACKAGE, Files
from tests.engine.families.references import TEXTS, sentence_vectors
from tests.engine.families.vocabularies import BERT, XLM_ROBERTA

TABLE_FOLDER = "0_StaticEmbedding"
STATIC_FILES: Files = {
    "modules.json": [{"idx": 0, "name": "0", "path": TABLE_FOLDER, "type": f"{PACKAGE}.StaticEmbedding"}],
    "config_sentence_transformers.json": {
        "__version__": {"sentence_transformers": "3.3.1", "transformers": "4.47.1", "pytorch": "2.5.1"},
        "prompts": {},
        "default_prompt_name": None,
        "similarity_fn_name": "cosine",
    },
}
MODEL2VEC_CONFIG = {
    "model_type": "model2vec",
    "architectures": ["StaticModel"],
    "tokenizer_name": "baai/bge-base-en-v1.5",
    "apply_pca": 256,
    "apply_zipf": True,
    "hidden_dim": 256,
    "seq_length": 1000000,
    "normalize": True,
}
MODEL2VEC_FILES: Files = {
    "modules.json": [
        {"idx": 0, "name": "0", "path": ".", "type": f"{PACKAGE}.StaticEmbedding"},
        {"idx": 1, "name": "1", "path": "1_Normalize", "type": f"{PACKAGE}.Normalize"},
    ],
}


def write_static(folder: Path) -> None:
    """Write a table into a folder of its own, without a config.json as sentence-transformers has none."""
    (folder / "config.json").unlink()
    (folder / TABLE_FOLDER).mkdir()
    (folder / "tokenizer.json").rename(folder / TABLE_FOLDER / "tokenizer.json")
    _write_table(folder / TABLE_FOLDER, "embedding.weight")


def write_model2vec(folder: Path) -> None:
    """Write a table next to its tokenizer."""
    _write_table(folder, "embeddings")


def static_ids(folder: Path, texts: Sequence[str], max_tokens: int) -> list[list[int]]:
    """Tokenize as the libraries of static models do: without special tokens."""
    inner = folder / TABLE_FOLDER
    tokenizer = Tokenizer.from_file(str((inner if inner.is_dir() else folder) / "tokenizer.json"))
    tokenizer.no_padding()
    return [tokenizer.encode(text, add_special_tokens=False).ids[:max_tokens] for text in texts]


def model2vec_vectors(folder: Path) -> Sequence[Answer]:
    """Embed as model2vec does: the mean of known tokens, scaled to length 1."""
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    unknown_id = tokenizer.token_to_id(model["unk_token"]) if "unk_token" in model else model["unk_id"]
    rows = load_file(folder / "model.safetensors")["embeddings"].numpy()
    means = [
        np.mean([rows[id_] for id_ in ids if id_ != unknown_id], axis=0)
        for ids in static_ids(folder, TEXTS, 512)
    ]
    vectors = np.stack([mean / np.linalg.norm(mean) for mean in means])
    return [Answer(Embed(tuple(TEXTS)), vectors)]


def _write_table(folder: Path, name: str) -> None:
    size = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size()
    save_file({name: torch.randn(size, HIDDEN)}, folder / "model.safetensors")


FAMILIES = (
    Family(
        name="static-embedding",
        checkpoints=(
            "sentence-transformers/static-retrieval-mrl-en-v1",
            "sentence-transformers/static-similarity-mrl-multilingual-v1",
        ),
        kind="static",
        state=Served(),
        network="",
        config={},
        vocabulary=BERT,
        files=STATIC_FILES,
        write=write_static,
        reference=sentence_vectors,
        token_ids=static_ids,
        pooling="mean",
    ),
    Family(
        name="model2vec",
        checkpoints=(
            "minishlab/potion-base-8M",
            "minishlab/potion-base-32M",
            "minishlab/potion-retrieval-32M",
            "minishlab/M2V_base_output",
        ),
        kind="static",
        state=Served(),
        network="",
        config=MODEL2VEC_CONFIG,
        vocabulary=BERT,
        files=MODEL2VEC_FILES,
        write=write_model2vec,
        reference=model2vec_vectors,
        token_ids=static_ids,
        pooling="mean",
    ),
    Family(
        name="model2vec-multilingual",
        checkpoints=("minishlab/potion-multilingual-128M",),
        kind="static",
        state=Served(),
        network="",
        config=MODEL2VEC_CONFIG | {"tokenizer_name": "BAAI/bge-m3"},
        vocabulary=XLM_ROBERTA,
        files=MODEL2VEC_FILES,
        write=write_model2vec,
        reference=model2vec_vectors,
        token_ids=static_ids,
        pooling="mean",
    ),
)
