"""Classifier of three labels: MiniLM's encoder with a random head, scaled to spread the scores."""

import shutil
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from backends.contract import Vectors

LABELS = ("joy", "anger", "fear")


def make_classifier(encoder: Path, target: Path) -> Path:
    """Write a checkpoint of BertForSequenceClassification with three labels into target."""
    torch.manual_seed(0)
    names = dict(enumerate(LABELS))
    model = AutoModelForSequenceClassification.from_pretrained(
        encoder, num_labels=3, id2label=names, dtype=torch.float32
    )
    with torch.no_grad():
        model.classifier.weight.mul_(20)
    model.save_pretrained(target)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt"):
        shutil.copy(encoder / name, target / name)
    return target


def logits_by_transformers(checkpoint: Path, texts: tuple[str, ...]) -> Vectors:
    """Return (n_texts, 3) float32, computed by transformers one text at a time."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModelForSequenceClassification.from_pretrained(checkpoint, dtype=torch.float32).eval()
    rows = []
    for text in texts:
        inputs = tokenizer(text, truncation=True, max_length=512, return_tensors="pt")
        with torch.no_grad():
            rows.append(model(**inputs).logits[0].numpy())
    return np.stack(rows)
