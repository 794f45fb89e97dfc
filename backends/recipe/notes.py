"""Notes for operators on a checkpoint: pooling that no file states, activations of scores, short vectors.

Pure. A name is a hint for the operator only: it never selects a pooling. Source of the rule for shorter
vectors: the card of nomic-embed-text-v1.5, whose vectors pass a layer norm without weights before they are
cut. None of its other files states it.
"""

import re
from collections.abc import Iterator

from backends.recipe.files import CheckpointFiles
from backends.recipe.options import TaskSettings
from backends.recipe.recipe import Recipe

NOMIC = "nomic_bert"
PUBLISHED = "nomic-embed-text-v1.5"
CARD = "README.md"
CARD_CHARACTERS = 1_000_000
# Code of a card: a layer norm, and in the next line the first components.
NORMED_CUT = re.compile(r"layer_norm\([^\n]*\n[^\n]*\[:, ?:")


def norms_before_cut(files: CheckpointFiles, settings: TaskSettings) -> bool:
    """Return whether a vector passes a layer norm before it is cut, by the card or the name of the model."""
    if _is_nomic(files) and settings.model.rstrip("/").rpartition("/")[2] == PUBLISHED:
        return True
    return NORMED_CUT.search(_card_of(files)) is not None


def cut_notes(files: CheckpointFiles, recipe: Recipe) -> Iterator[str]:
    """Yield a note on `dimensions` where cards and files differ."""
    if recipe.kind != "dense":
        return
    if recipe.norm_before_cut:
        yield (
            f"a vector passes a layer norm before `dimensions` cuts it, as in the card of {PUBLISHED}; "
            "sentence-transformers' `truncate_dim` does without"
        )
    elif _is_nomic(files):
        yield (
            f"`dimensions` cuts a vector as it is; if the model was made from {PUBLISHED}, whose card takes "
            f"a layer norm before, put its {CARD} into the folder"
        )


def _is_nomic(files: CheckpointFiles) -> bool:
    """Return whether the network is that of nomic-embed-text 1 and 1.5, which has no experts."""
    return files.config.get("model_type") == NOMIC and not files.config.get("num_experts")


def _card_of(files: CheckpointFiles) -> str:
    try:
        with (files.checkpoint / CARD).open(encoding="utf-8", errors="replace") as card:
            return card.read(CARD_CHARACTERS)
    except OSError:
        return ""


# Families whose cards take the vector of the first token; docs/engine-models.md lists them.
FIRST_TOKEN = re.compile(r"unsup-simcse|sapbert(?!.*mean)|specter|medcpt-(query|article)", re.IGNORECASE)
POOLER = re.compile(r"(?<!un)sup-simcse", re.IGNORECASE)


def pooling_notes(files: CheckpointFiles, recipe: Recipe, settings: TaskSettings) -> Iterator[str]:
    """Yield a note if a classifier is left out, or the mean of the vectors is a default of no file."""
    architectures = files.config.get("architectures") or []
    is_configured = settings.pooling is not None or settings.task == "embed"
    has_classifier = any(str(name).endswith("ForSequenceClassification") for name in architectures)
    if recipe.kind == "dense" and is_configured and has_classifier:
        yield (
            "the checkpoint has a classifier, which the settings of the upstream leave out; without `task` "
            "and `pooling` it scores pairs"
        )
    if recipe.kind != "dense" or files.modules or settings.pooling is not None or recipe.pooling != ("mean",):
        return
    yield (
        "pooling is `mean` because the checkpoint has no modules.json, as in sentence-transformers; if its "
        "card takes another vector, set `pooling` of the upstream"
    )
    # A folder has the name that its owner gave it; the config may name the repository.
    names = (settings.model.rstrip("/").rpartition("/")[2], str(files.config.get("_name_or_path", "")))
    if any(POOLER.search(name) for name in names):
        yield "its name suggests SimCSE with a layer behind the first token, which the engine does not apply"
    elif any(FIRST_TOKEN.search(name) for name in names):
        yield "its name suggests a family that takes the first token; if its card does, set `pooling: cls`"


# Key of sentence-transformers before 4.
OLD_KEY = "sbert_ce_default_activation_function"


def score_notes(files: CheckpointFiles, recipe: Recipe) -> Iterator[str]:
    """Yield a note if sentence-transformers applies another function to the logits than the engine."""
    if recipe.kind != "classifier":
        return
    named = files.config.get("sentence_transformers")
    stated = named.get("activation_fn") if isinstance(named, dict) else files.config.get(OLD_KEY)
    usual = "sigmoid" if len(recipe.labels) == 1 or recipe.multi_label else "softmax"
    name = str(stated or "").rpartition(".")[2]
    if name and name.lower() != usual:
        yield (
            f"`activation_fn` of the checkpoint is {name}, which the engine does not apply: scores are the "
            f"{usual} of the logits, and calls with `raw_scores` get the logits"
        )
