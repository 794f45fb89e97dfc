"""Notes on scores of classifiers for checkpoints whose library applies another activation. Pure."""

from collections.abc import Iterator

from backends.recipe.files import CheckpointFiles
from backends.recipe.recipe import Recipe

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
