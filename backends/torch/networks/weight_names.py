"""Comparison of the tensors in a checkpoint with those of its network.

Pure. A tensor that the files lack is filled with random numbers by transformers, and one that the network
lacks is ignored: both give wrong vectors without an error. Therefore each difference is an error, except the
few of this module, which change no result.
"""

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from backends.recipe.recipe import ModelKind

# Parts of networks for other tasks, which stand at the top of a checkpoint's names next to the encoder. They
# are ignored only where the network that is loaded has no part of that name.
OTHER_TASKS = frozenset(
    {
        "classifier",  # sequence or token classification
        "cls",  # BERT: masked words and next sentence
        "decoder",  # ModernBERT: masked words; T5: text generation
        "discriminator_predictions",  # ELECTRA
        "generator_lm_head",  # ELECTRA
        "generator_predictions",  # ELECTRA
        "head",  # ModernBERT: before the masked words
        "lm_head",  # next or masked words
        "lm_predictions",  # DeBERTa: masked words
        "mask_predictions",  # DeBERTa
        "pooler",  # a layer for classifiers behind the first token
        "pre_classifier",  # DistilBERT
        "predictions",  # ALBERT: masked words
        "qa_outputs",  # question answering
        "score",  # sequence classification of decoders
        "sop_classifier",  # ALBERT: order of sentences
        "vocab_layer_norm",  # DistilBERT: masked words
        "vocab_projector",  # DistilBERT: masked words
        "vocab_transform",  # DistilBERT: masked words
    }
)
# ColBERT's projection, which has a reader of its own.
PROJECTION = "linear."
# BERT's next-sentence layer lies inside the head for masked words, the next word's inside a model of pages.
OTHER_TASKS_INSIDE = ("cls.seq_relationship.", "vlm.lm_head.", "vlm.language_model.lm_head.")
# Tables that follow from the configuration; the network computes them itself.
COMPUTED = ("position_ids", "token_type_ids", "inv_freq", "masked_bias", "relative_position_index")
# Kinds whose readers take token vectors only, so that the encoder's own pooler is removed.
WITHOUT_POOLER: frozenset[ModelKind] = frozenset({"dense", "multivector"})
# Tensors that a message names, of each sort.
NAMED = 2


class TensorDifferences(NamedTuple):
    """Names of tensors that differ between files and network, as transformers reports them.

    parts: names of the network's top modules. mismatched: name, shape in the file, shape in the network.
    """

    parts: Collection[str]
    missing: Collection[str]
    unexpected: Collection[str]
    mismatched: Collection[tuple[str, Any, Any]]

    @classmethod
    def of(cls, parts: Collection[str], info: Mapping[str, Any]) -> "TensorDifferences":
        """Return the differences in the loading info of transformers."""
        return cls(parts, info["missing_keys"], info["unexpected_keys"], info["mismatched_keys"])


def describe_faults(differences: TensorDifferences, kind: ModelKind, prefix: str) -> str:
    """Return a sentence on the tensors that make the network wrong, empty if there are none.

    prefix: name of the encoder among the network's parts, where it is one of several.
    """
    missing = sorted(name for name in differences.missing if not _may_be_missing(name, kind))
    unexpected = sorted(
        name
        for name in differences.unexpected
        if not _is_of_another_task(name, differences.parts, prefix)
        and not (kind == "multivector" and name.startswith(PROJECTION))
    )
    shapes = [
        f"{name} {list(stored)} instead of {list(expected)}"
        for name, stored, expected in sorted(differences.mismatched)
    ]
    faults = [
        _list_names(missing, "missing"),
        _list_names(unexpected, "unexpected"),
        _list_names(shapes, "of another shape"),
    ]
    return "; ".join(fault for fault in faults if fault)


def _may_be_missing(name: str, kind: ModelKind) -> bool:
    return kind in WITHOUT_POOLER and name.startswith("pooler.")


def _is_of_another_task(name: str, parts: Collection[str], prefix: str) -> bool:
    if name.startswith(OTHER_TASKS_INSIDE) or name.rsplit(".", 1)[-1] in COMPUTED:
        return True
    top = name.split(".", 1)[0]
    # An encoder inside a network for another task brings its pooler along under its own name.
    return top in OTHER_TASKS - set(parts) or name.startswith(f"{prefix}.pooler.")


def _list_names(names: list[str], fault: str) -> str:
    if not names:
        return ""
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return f"{fault}: {', '.join(names[:NAMED])}{more}"


def first_infinite(network: nn.Module) -> str | None:
    """Return the name of a weight that is NaN or infinite. It takes a tenth of a second per gigabyte."""
    for name, weight in network.named_parameters():
        # Much faster than `isfinite` of each number, and NaN is passed on.
        if weight.numel() and not all(extreme.isfinite() for extreme in torch.aminmax(weight.detach())):
            return name
    return None
