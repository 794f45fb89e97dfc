"""Generated page of the documentation: docs/model-types.md."""

import re
from collections.abc import Iterable, Sequence
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

A type that is served needs a `tokenizer.json`, and pooling that fits its training. A checkpoint with other
settings of its type can be refused; `gateway models inspect` gives the reason.
"""
NOT_COMPARED = """\
The run makes no small checkpoint of these types: sizes set by the names of keys do not fit their code. A load
proves their weights and padding as of any other type. Types that read pictures or sound next to a text are
left out.
"""


def types_page(outcomes: Sequence[Outcome]) -> str:
    """Return the text of the page."""
    equal = [outcome for outcome in outcomes if outcome.state == "equal"]
    left_out = [outcome for outcome in outcomes if outcome.state == "no checkpoint"]
    refused = (outcome for outcome in outcomes if outcome.state == "refused")
    return (
        f"{HEAD}\n## Served, packed\n\n{_names(outcome for outcome in equal if outcome.packed)}"
        f"\n## Served, with padding\n\n{_names(outcome for outcome in equal if not outcome.packed)}"
        f"\n## Refused\n\n| type | reason |\n|---|---|\n{''.join(map(_row, refused))}"
        f"\n## Not compared\n\n{NOT_COMPARED}\n"
        f"{_names(outcome for outcome in left_out if outcome.detail != MORE_THAN_TEXT)}"
    )


def _names(outcomes: Iterable[Outcome]) -> str:
    return ", ".join(f"`{outcome.model_type}`" for outcome in outcomes) + "\n"


def _row(outcome: Outcome) -> str:
    reason = re.sub(r"^it has `model_type` '[^']*', (which )?", "", outcome.detail).replace("|", "\\|")
    return f"| `{outcome.model_type}` | {reason} |\n"
