"""Texts for runs with real models, and a reranker with random weights."""

import inspect
import json
import random
import shutil
import statistics
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import torch
import transformers

from backends.checkpoints import DEFAULT_MODEL, locate_checkpoint
from backends.contract import Truncate
from backends.tokens import open_tokenizer

_MAX_TOKENS = 250
_SOURCES = ("json", "asyncio", "pathlib", "collections", "argparse", "logging", "email.message", "decimal")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt")


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
