"""References: what a family's own library computes from the same folder."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from sentence_transformers import SentenceTransformer, SparseEncoder
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from backends.contract import Embed, Encode, Output, Score
from tests.engine.families.family import Answer
from tests.engine.texts import PHRASES, real_texts

TEXTS = [*PHRASES[:5], "a", "yes", *real_texts()[44:48]]
PAIRS = tuple(zip(TEXTS, reversed(TEXTS), strict=True))
PROMPTS_MAX = 2


def prompt_names(folder: Path) -> list[str]:
    """Return the names of a few prompts of the checkpoint."""
    path = folder / "config_sentence_transformers.json"
    prompts = json.loads(path.read_text()).get("prompts", {}) if path.is_file() else {}
    return list(prompts)[:PROMPTS_MAX]


def sentence_vectors(folder: Path) -> Sequence[Answer]:
    """Embed with sentence-transformers, without a prompt and with the first prompts."""
    model = SentenceTransformer(str(folder), device="cpu", model_kwargs={"dtype": "float32"})
    answers = []
    for name in (None, *prompt_names(folder)):
        vectors = model.encode(TEXTS, prompt_name=name, normalize_embeddings=True)
        answers.append(Answer(Embed(tuple(TEXTS), prompt_name=name), np.asarray(vectors, np.float32)))
    return answers


def sparse_weights(folder: Path) -> Sequence[Answer]:
    """Weigh terms with sentence-transformers' SparseEncoder."""
    model = SparseEncoder(str(folder), device="cpu", model_kwargs={"dtype": "float32"})
    weights = model.encode(TEXTS, convert_to_sparse_tensor=False, convert_to_tensor=True).numpy()
    return [Answer(Encode(tuple(TEXTS), frozenset({Output.SPARSE})), weights)]


def routed_weights(folder: Path) -> Sequence[Answer]:
    """Weigh terms with sentence-transformers' SparseEncoder: without a role, of documents and of queries."""
    model = SparseEncoder(str(folder), device="cpu", model_kwargs={"dtype": "float32"})
    encoders = {None: model.encode, "document": model.encode_document, "query": model.encode_query}
    answers = []
    for role, encode in encoders.items():
        weights = encode(TEXTS, convert_to_sparse_tensor=False, convert_to_tensor=True).numpy()
        answers.append(Answer(Encode(tuple(TEXTS), frozenset({Output.SPARSE}), prompt_name=role), weights))
    return answers


def classifier_scores(folder: Path) -> Sequence[Answer]:
    """Score pairs with transformers' sequence classifier and a sigmoid."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    queries, documents = map(list, zip(*PAIRS, strict=True))
    inputs = tokenizer(queries, documents, padding=True, truncation=True, return_tensors="pt")
    with torch.no_grad():
        logits = model(**inputs).logits[:, 0]
    return [Answer(Score(PAIRS), torch.sigmoid(logits).numpy())]


def auto_tokenizer_ids(folder: Path, texts: Sequence[str], max_tokens: int) -> list[list[int]]:
    """Tokenize with transformers' AutoTokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids: list[list[int]] = tokenizer(list(texts), truncation=True, max_length=max_tokens)["input_ids"]
    return ids
