"""Preparation of queries of pages: each with a prefix, and with fillers behind it whose vectors count."""

from collections.abc import Sequence

from backends.contract import Embed, Encode, Output, Truncate
from backends.contract.errors import UnsupportedWork, input_too_long
from backends.contract.refusals import check_plain_texts
from backends.recipe.recipe import QueryForm
from backends.tokens.tokenizer import TextTokenizer
from backends.torch.inputs.sequences import InputSequence, PreparedSequences


def prepare_queries(
    texts: Sequence[str],
    work: Embed | Encode,
    outputs: frozenset[Output],
    form: QueryForm,
    tokenizer: TextTokenizer,
) -> PreparedSequences:
    """Tokenize queries; truncation keeps what stands around them. Raises: InvalidWork, UnsupportedWork."""
    check_plain_texts(work, "a model of pages")
    if work.truncate is Truncate.LEFT:
        raise UnsupportedWork("this model cannot cut the left end of a query, where its prefix is")
    (suffix,) = tokenizer.ids([form.suffix])
    limit = min(work.max_tokens or tokenizer.max_tokens, tokenizer.max_tokens) - len(suffix)
    written = [form.prefix + text for text in texts]
    encoded = tokenizer.encode(written, work.truncate, limit, special=False)
    too_long = next((i for i, ids in enumerate(encoded.ids) if len(ids) > limit), None)
    if too_long is not None:
        raise input_too_long(limit, f"{encoded.lengths[too_long]} tokens", too_long)
    sequences = [InputSequence([*ids, *suffix], [0] * (len(ids) + len(suffix))) for ids in encoded.ids]
    lengths = tuple(sequence.tokens for sequence in sequences)
    return PreparedSequences(sequences, outputs, encoded.truncated, lengths)
