"""Late chunking: all inputs of a request are one text, and each is pooled over its own tokens. Pure.

Sources: Günther et al., "Late Chunking" (2024), and its code, in which the first chunk takes the special
tokens and the prompt before the text, and the last one those after it. One input has the vector that it has
without late chunking.
"""

from collections.abc import Sequence
from itertools import accumulate, chain, pairwise

from backends.contract import Output
from backends.contract.errors import InvalidWork
from backends.contract.texts import CHARACTERS_PER_TOKEN
from backends.tokens.tokenizer import TextTokenizer
from backends.torch.inputs.sequences import InputSequence, PreparedSequences


def prepare_chunks(texts: Sequence[str], tokenizer: TextTokenizer, skip: int = 0) -> PreparedSequences:
    """Return one sequence with the tokens of all texts, which are tokenized one by one.

    skip: tokens at its start that belong to a prompt and are left out of pooling. Raises: InvalidWork, if the
    sequence is longer than the model, or a text has no tokens.
    """
    _check_size(sum(map(len, texts)), tokenizer.max_tokens * CHARACTERS_PER_TOKEN, "characters", tokenizer)
    rows = tokenizer.ids(texts)
    empty = next((index for index, row in enumerate(rows) if not row), None)
    if empty is not None:
        raise InvalidWork("it has no tokens, and `late_chunking` needs one of each input", input_index=empty)
    before, after = tokenizer.added_ids()
    rows[0] = [*before, *rows[0]]
    rows[-1] = [*rows[-1], *after]
    ids = list(chain.from_iterable(rows))
    _check_size(len(ids), tokenizer.max_tokens, "tokens", tokenizer)
    lengths = tuple(map(len, rows))
    # The last token of a prompt can also be the first of its text; something has to be pooled.
    bounds = [min(skip, lengths[0] - 1), *accumulate(lengths)]
    sequence = InputSequence(ids, [0] * len(ids), chunks=tuple(pairwise(bounds)))
    return PreparedSequences([sequence], frozenset({Output.DENSE}), (), lengths)


def _check_size(size: int, most: int, unit: str, tokenizer: TextTokenizer) -> None:
    if size > most:
        raise InvalidWork(
            f"This model's maximum context length is {tokenizer.max_tokens} tokens; with `late_chunking` all "
            f"inputs are one text, which has {size} {unit}. Please reduce the length of the input prompt"
        )
