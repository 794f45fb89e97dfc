"""Rule of a checkpoint for vectors of fewer components than its own.

Pure. Source: the card of nomic-embed-text-v1.5, whose vectors pass a layer norm without weights before they
are cut. None of its other files states it.
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
