"""Tokens that a network has no vector for, as its tokenizer has more tokens than its table has rows.

Ids are compared with the table before a pass: a processor raises an IndexError in the middle of it, and a GPU
loses all that the process computes.
"""

from backends.contract.errors import InvalidWork
from backends.tokens.tokenizer import TextTokenizer
from backends.torch.inputs.sequences import PreparedSequences

NAMED_MAX = 5


def require_words(prepared: PreparedSequences, rows: int, tokenizer: TextTokenizer) -> None:
    """Compare ids with the rows of a table. Raises: InvalidWork for the first text with a higher one."""
    for place, sequence in enumerate(prepared.sequences):
        if sequence.ids and max(sequence.ids) >= rows:
            token = tokenizer.token(next(id_ for id_ in sequence.ids if id_ >= rows))
            raise InvalidWork(
                f"it contains the token {token!r}, for which the network has no vector",
                input_index=prepared.input_of(place),
            )


def missing_words(tokenizer: TextTokenizer, rows: int) -> tuple[str, ...]:
    """Return the note on tokens without a vector, if there are any."""
    beyond = tokenizer.tokens_from(rows)
    if not beyond:
        return ()
    names = ", ".join(map(repr, beyond[:NAMED_MAX])) + (", …" if len(beyond) > NAMED_MAX else "")
    note = f"the network has vectors for {rows} tokens, and none for {len(beyond)} of its tokenizer: {names}"
    return (f"{note}; a text with one of them is refused",)
