"""Preparation of documents for late chunking: one sequence a document, and the tokens of its chunks.

Sources: Günther et al., "Late Chunking" (2024), and its code, in which the first chunk takes the special
tokens and the prompt before the text, and the last one those after it. A lone chunk has the vector that it
has without late chunking. vLLM, entrypoints/pooling/late_chunking: chunks of a size, and their ranges.
"""

from collections.abc import Sequence
from itertools import accumulate, chain, pairwise

import msgspec

from backends.contract import ChunkRange, ChunkSize, Output
from backends.contract.errors import InvalidWork
from backends.contract.texts import CHARACTERS_PER_TOKEN
from backends.tokens.tokenizer import TextTokenizer
from backends.torch.inputs.sequences import InputSequence, PreparedSequences


class Document(msgspec.Struct, frozen=True):
    """Chunks of one document with its prompt before the first one.

    prompt_characters: length of the prompt. skip: tokens of the prompt that are left out of pooling.
    """

    chunks: tuple[str, ...]
    prompt_characters: int = 0
    skip: int = 0


def prepare_documents(
    documents: Sequence[Document], size: ChunkSize | None, tokenizer: TextTokenizer, most: int
) -> PreparedSequences:
    """Return one sequence for each document. size: of the chunks, None if they are given.

    most: tokens of a document. Raises: InvalidWork, if a document is longer, or one of its chunks has no
    tokens.
    """
    sequences: list[InputSequence] = []
    ranges: list[ChunkRange] = []
    for index, document in enumerate(documents):
        try:
            _check_size(sum(map(len, document.chunks)), most * CHARACTERS_PER_TOKEN, "characters", most)
            if size is None:
                sequences.append(_of_chunks(document, tokenizer))
            else:
                sequence, own_ranges = _of_size(document, size, tokenizer)
                sequences.append(sequence)
                ranges += own_ranges
            _check_size(sequences[-1].tokens, most, "tokens", most)
        except InvalidWork as error:
            error.input_index = index if len(documents) > 1 else None
            raise
    lengths = tuple([sequence.tokens for sequence in sequences])
    outputs = frozenset({Output.DENSE})
    return PreparedSequences(sequences, outputs, (), lengths, ranges=None if size is None else tuple(ranges))


def _of_chunks(document: Document, tokenizer: TextTokenizer) -> InputSequence:
    """Return the sequence of a document whose chunks are tokenized one by one. Raises: InvalidWork."""
    rows = tokenizer.ids(document.chunks)
    empty = next((index for index, row in enumerate(rows) if not row), None)
    if empty is not None:
        raise InvalidWork(f"chunk {empty} has no tokens, and late chunking needs one of each")
    before, after = tokenizer.added_ids()
    rows[0] = [*before, *rows[0]]
    rows[-1] = [*rows[-1], *after]
    ids = list(chain.from_iterable(rows))
    lengths = tuple(map(len, rows))
    # The last token of a prompt can also be the first of its text; something has to be pooled.
    bounds = [min(document.skip, lengths[0] - 1), *accumulate(lengths)]
    return InputSequence(ids, [0] * len(ids), chunks=tuple(pairwise(bounds)))


def _of_size(
    document: Document, size: ChunkSize, tokenizer: TextTokenizer
) -> tuple[InputSequence, list[ChunkRange]]:
    """Return the sequence of a text that is cut into chunks, and their ranges in it. Raises: InvalidWork."""
    ids, offsets = tokenizer.ids_with_offsets(document.chunks[0])
    skip = min(document.skip, len(ids) - 1)

    def characters(chunk: tuple[int, int]) -> tuple[int, int] | None:
        return _characters(offsets[slice(*chunk)], document.prompt_characters)

    chunks = [(start + skip, stop + skip) for start, stop in size.spans(len(ids) - skip)]
    if size.joins_ends:
        chunks = _joined_ends(chunks, [place for place, each in enumerate(chunks) if characters(each)])
    ranges = [ChunkRange(chunk, characters(chunk)) for chunk in chunks]
    return InputSequence(ids, [0] * len(ids), chunks=tuple(chunks)), ranges


def _joined_ends(chunks: Sequence[tuple[int, int]], places: Sequence[int]) -> list[tuple[int, int]]:
    """Join the first and last chunks that have no text to the next ones. places: of chunks with text."""
    start, stop = chunks[0][0], chunks[-1][1]
    if not places:
        return [(start, stop)]
    kept = list(chunks[places[0] : places[-1] + 1])
    kept[0] = (start, kept[0][1])
    kept[-1] = (kept[-1][0], stop)
    return kept


def _characters(offsets: Sequence[tuple[int, int]], prompt: int) -> tuple[int, int] | None:
    """Return the characters of some tokens in the text behind a prompt; special tokens have none."""
    places = [(max(start, prompt), stop) for start, stop in offsets if stop > max(start, prompt)]
    return (places[0][0] - prompt, max(stop for _, stop in places) - prompt) if places else None


def _check_size(size: int, limit: int, unit: str, most: int) -> None:
    if size > limit:
        raise InvalidWork(
            f"This model's maximum context length is {most} tokens; with late chunking a document is one "
            f"text, which has {size} {unit}. Please reduce the length of the input prompt"
        )
