"""Notes on pooling for checkpoints whose files do not state it.

Pure. A name is a hint for the operator only: it never selects a pooling.
"""

import re
from collections.abc import Iterator

from backends.recipe.files import CheckpointFiles
from backends.recipe.options import TaskSettings
from backends.recipe.recipe import Recipe

# Families whose cards take the vector of the first token; docs/backends.md lists them.
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
