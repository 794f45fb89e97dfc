"""Cross-encoder with a wide range of scores: MiniLM's encoder with a head fitted on pairs of docstrings.

A random head gives every pair the same score, and a comparison of such scores proves nothing.
"""

import shutil
from pathlib import Path

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel

from tests.engine.texts import real_texts

Pair = tuple[str, str]


def labelled_pairs() -> list[tuple[Pair, float]]:
    """Pair the first line of each docstring with its own rest (1) and with another's (0)."""
    texts = [text for text in real_texts() if "\n\n" in text][:80]
    halves = [text.split("\n\n", 1) for text in texts]
    pairs: list[tuple[Pair, float]] = []
    for index, (first, rest) in enumerate(halves):
        pairs.append(((first, rest[:200]), 1.0))
        pairs.append(((first, halves[(index + 7) % len(halves)][1][:200]), 0.0))
    return pairs


def make_cross_encoder(encoder: Path, target: Path) -> Path:
    """Write a checkpoint of BertForSequenceClassification with one label into target."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(encoder)
    model = AutoModelForSequenceClassification.from_pretrained(encoder, num_labels=1, dtype=torch.float32)
    # Pairs of similar length share a batch: padding would take two thirds of the time.
    pairs = sorted(labelled_pairs(), key=lambda labelled: len("".join(labelled[0])))
    _fit_head(model.eval(), tokenizer, pairs)
    model.save_pretrained(target)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt"):
        shutil.copy(encoder / name, target / name)
    return target


def _fit_head(model: PreTrainedModel, tokenizer: object, pairs: list[tuple[Pair, float]]) -> None:
    """Train pooler and classifier on the encoder's first tokens, computed once."""
    firsts = torch.cat(
        [
            _first_tokens(model, tokenizer, [pair for pair, _ in pairs[i : i + 16]])
            for i in range(0, len(pairs), 16)
        ]
    )
    wanted = torch.tensor([label for _, label in pairs])
    head = [*model.bert.pooler.parameters(), *model.classifier.parameters()]
    optimizer = torch.optim.Adam(head, lr=1e-3)
    for _ in range(300):
        logits = model.classifier(torch.tanh(model.bert.pooler.dense(firsts)))[:, 0]
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@torch.inference_mode(mode=False)
def _first_tokens(model: PreTrainedModel, tokenizer: object, pairs: list[Pair]) -> torch.Tensor:
    inputs = tokenizer(
        *map(list, zip(*pairs, strict=True)), padding=True, truncation=True, return_tensors="pt"
    )
    with torch.no_grad():
        hidden = model.bert(**inputs).last_hidden_state[:, 0]
    return hidden.clone()
