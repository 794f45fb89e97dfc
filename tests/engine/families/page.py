"""Generated page of the documentation: docs/models-tested.md."""

from collections.abc import Iterator
from pathlib import Path

from tests.engine.families.family import Family, NeedsTrustedCode, Refused, Served
from tests.engine.families.table import FAMILIES

PAGE = Path(__file__).parents[3] / "docs" / "models-tested.md"
HEAD = """\
# Tested models

Look up a checkpoint, and what the built-in engine does with it. [Models](models.md) shows how to ask about
any other.

## States

| state | meaning |
|---|---|
| served | The engine computes what the checkpoint's own library computes. |
| needs trusted code | Refused unless the upstream says `trust_remote_code: true`. |
| refused | The model does not load. The error gives the reason; serve it with another backend. |

`make models` generates this page from the table of the tests in `tests/engine/families`. For each row a test
writes a small checkpoint: the family's published configuration keys, tokenizer kind and module files, a made
vocabulary and random weights. It compares token ids, and vectors or scores, with sentence-transformers, with
transformers, or with the computation of the model's card. Vectors have a cosine of at least 0.99999 in
float32, and 0.9995 in bfloat16. Of the published weights the tests have only those of all-MiniLM-L6-v2.

*Packed* means that a batch is computed without padding.
"""
TABLE = """\
| checkpoint | kind | state | packed | pooling | notes |
|---|---|---|---|---|---|
"""


def models_page() -> str:
    """Return the text of the page."""
    states = [(Served, "Served"), (NeedsTrustedCode, "Needs trusted code"), (Refused, "Refused")]
    parts = [f"\n## {title}\n\n{TABLE}{''.join(_rows(kind))}" for kind, title in states if any(_rows(kind))]
    return HEAD + "".join(parts)


def _rows(kind: type) -> Iterator[str]:
    for family in FAMILIES:
        if isinstance(family.state, kind):
            yield from (_row(checkpoint, family) for checkpoint in family.checkpoints)


def _row(checkpoint: str, family: Family) -> str:
    state = family.state
    packed = ("yes" if state.packed else "no") if isinstance(state, Served) else "–"
    name = {Served: "served", NeedsTrustedCode: "needs trusted code", Refused: "refused"}[type(state)]
    notes = state.reason if isinstance(state, Refused) else family.notes
    return f"| {checkpoint} | {family.kind} | {name} | {packed} | {family.pooling} | {notes} |\n"
