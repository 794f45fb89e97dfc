"""Generated page of the documentation: docs/model-types.md."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.engine.model_types.comparison import MORE_THAN_TEXT, Outcome

PAGE = Path(__file__).parents[3] / "docs" / "model-types.md"
HEAD = """\
# Types of networks

What the built-in engine does with each type of network of transformers that reads texts. A checkpoint states
its type as `model_type` in config.json. [Models](models.md) lists checkpoints by name.

`make test-families` compares every type. It writes a checkpoint with random weights of a small size, and
embeds texts of 3 to 300 tokens, most of them longer than the windows, some with special tokens by name. The
engine's vectors, in one batch and one by one, have a cosine of at least 0.9999 to those of transformers'
`AutoModel` for each text alone, in float32. `gateway models inspect` gives the same answer as the load.
`python -m tests.engine.model_types --write` writes this page.

*Packed* types compute a batch without padding. The others compute padding, or one text at a time where
padding changes a text's vector.

A type that is served needs a `tokenizer.json`, and pooling that fits its training. Other settings of a type
can be refused: `gateway models inspect` tells.
"""
TABLE = "| type | reason |\n|---|---|\n"
NOT_COMPARED = """\
The run has no small checkpoint of these types. A load proves their weights and padding as of any other type.
Types that read pictures or sound next to a text are left out.
"""


def types_page(outcomes: Sequence[Outcome]) -> str:
    """Return the text of the page."""
    equal = [outcome for outcome in outcomes if outcome.state == "equal"]
    packed = ", ".join(f"`{outcome.model_type}`" for outcome in equal if outcome.packed)
    padded = ", ".join(f"`{outcome.model_type}`" for outcome in equal if not outcome.packed)
    return (
        f"{HEAD}\n## Served, packed\n\n{packed}\n\n## Served, with padding\n\n{padded}\n"
        f"\n## Refused\n\n{TABLE}{''.join(_rows(outcomes, 'refused'))}"
        f"\n## Not compared\n\n{NOT_COMPARED}\n{TABLE}{''.join(_rows(outcomes, 'no checkpoint'))}"
    )


def _rows(outcomes: Sequence[Outcome], state: str) -> Iterator[str]:
    for outcome in outcomes:
        if outcome.state == state and outcome.detail != MORE_THAN_TEXT:
            reason = re.sub(r"^it has `model_type` '[^']*', ", "", outcome.detail).replace("|", "\\|")
            yield f"| `{outcome.model_type}` | {reason} |\n"
