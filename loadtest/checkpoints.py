"""Texts for runs with real models, and a reranker with random weights."""

import inspect
import json
import random
import shutil
import statistics
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import torch
import transformers

from backends.checkpoints.locations import DEFAULT_MODEL, locate_checkpoint
from backends.contract import Truncate
from backends.tokens.tokenizer import open_tokenizer

_MAX_TOKENS = 250
_SOURCES = ("json", "asyncio", "pathlib", "collections", "argparse", "logging", "email.message", "decimal")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt")


class LargeShape(NamedTuple):
    """Shape of a large network. products: inputs and outputs of the matrix products of one layer."""

    create: Callable[[], transformers.PreTrainedModel]
    layers: int
    products: tuple[tuple[int, int], ...]


# The vocabulary is all-MiniLM's, which is smaller; no time of the layers depends on it.
_WORDS = 30522
LARGE_SHAPES = {
    "XLM-R large": LargeShape(
        lambda: transformers.XLMRobertaModel(
            transformers.XLMRobertaConfig(
                vocab_size=_WORDS,
                hidden_size=1024,
                num_hidden_layers=24,
                num_attention_heads=16,
                intermediate_size=4096,
                max_position_embeddings=514,
                type_vocab_size=1,
            ),
            add_pooling_layer=False,
        ),
        24,
        ((1024, 3072), (1024, 1024), (1024, 4096), (4096, 1024)),
    ),
    "Qwen3 0.6B": LargeShape(
        lambda: transformers.Qwen3Model(
            transformers.Qwen3Config(
                vocab_size=_WORDS,
                hidden_size=1024,
                num_hidden_layers=28,
                num_attention_heads=16,
                num_key_value_heads=8,
                head_dim=128,
                intermediate_size=3072,
                max_position_embeddings=32768,
            )
        ),
        28,
        ((1024, 4096), (2048, 1024), (1024, 3072), (1024, 3072), (3072, 1024)),
    ),
}


def texts_for(checkpoint: Path, count: int) -> tuple[list[str], float]:
    """Return texts that fit the model, since not every server truncates, and their mean length in tokens."""
    candidates = documentation_texts(count * 2)
    lengths = open_tokenizer(checkpoint, _MAX_TOKENS + 1).encode(candidates, Truncate.RIGHT).lengths
    fitting = [(text, n) for text, n in zip(candidates, lengths, strict=True) if n <= _MAX_TOKENS][:count]
    return [text for text, _ in fitting], statistics.mean(n for _, n in fitting)


def documentation_texts(count: int, seed: int = 0) -> list[str]:
    """Return pieces of the standard library's documentation; most are short, as documents are."""
    dice = random.Random(seed)  # noqa: S311 - a seeded load
    words = " ".join(_docstrings()).split()
    texts = []
    for _ in range(count):
        length = min(180, max(3, round(dice.lognormvariate(3.2, 0.65))))
        start = dice.randrange(len(words) - length)
        texts.append(" ".join(words[start : start + length]))
    return texts


def _docstrings() -> Iterator[str]:
    for source in _SOURCES:
        for _, member in sorted(inspect.getmembers(import_module(source))):
            yield inspect.getdoc(member) or ""


def make_reranker(folder: Path) -> Path:
    """Write a cross-encoder of bge-reranker-base's shape (XLM-R base, one label) and return its folder.

    No time depends on the weights. The tokenizer is all-MiniLM's, which is smaller than the original; the
    encoder does the same work.
    """
    shape = {"vocab_size": 30522, "max_position_embeddings": 514, "type_vocab_size": 1, "num_labels": 1}
    special = {"pad_token_id": 0, "bos_token_id": 101, "eos_token_id": 102}
    config = transformers.XLMRobertaConfig(**shape, **special)
    torch.manual_seed(0)
    model = transformers.AutoModelForSequenceClassification.from_config(config)
    model.eval().save_pretrained(folder)
    copy_tokenizer(folder)
    path = folder / "tokenizer_config.json"
    changes = {"model_max_length": 512, "model_input_names": ["input_ids", "attention_mask"]}
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


def make_large(shape: LargeShape, folder: Path) -> Path:
    """Write a network with random weights in bfloat16, with mean pooling, and return its folder."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = shape.create()
    finally:
        torch.set_default_dtype(torch.float32)
    model.eval().save_pretrained(folder)
    copy_tokenizer(folder)
    source = locate_checkpoint(DEFAULT_MODEL)
    shutil.copy(source / "modules.json", folder)
    shutil.copytree(source / "1_Pooling", folder / "1_Pooling")
    path = folder / "1_Pooling" / "config.json"
    width = {"word_embedding_dimension": model.config.hidden_size}
    path.write_text(json.dumps(json.loads(path.read_text()) | width))
    return folder


def make_clip(folder: Path) -> Path:
    """Write a dual encoder of the shape of CLIP ViT-B/32 and return its folder.

    No time depends on the weights. The tokenizer is all-MiniLM's; the network has its own vocabulary size.
    """
    ends = {"bos_token_id": 101, "eos_token_id": 102, "pad_token_id": 0}
    torch.manual_seed(0)
    model = transformers.CLIPModel(transformers.CLIPConfig(text_config=ends))
    model.eval().save_pretrained(folder)
    transformers.CLIPImageProcessorPil().save_pretrained(folder)
    copy_tokenizer(folder)
    path = folder / "tokenizer_config.json"
    changes = {"model_max_length": 77, "model_input_names": ["input_ids", "attention_mask"]}
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


def copy_tokenizer(folder: Path) -> None:
    """Copy all-MiniLM's tokenizer into a folder."""
    for name in _TOKENIZER_FILES:
        shutil.copy(locate_checkpoint(DEFAULT_MODEL) / name, folder / name)
