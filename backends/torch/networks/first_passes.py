"""First passes through a network that was just opened."""

from collections.abc import Iterator

from backends.contract import Output, Truncate
from backends.tokens.tokenizer import TextTokenizer
from backends.torch.inputs.sequences import LOGITS, Head, InputSequence, Row

# Repetitions of a text in each sequence of a batch. The compiler treats a size as variable only after it has
# changed.
WORD = "ready"
SHAPES = ((1,), (2, 1, 1), (3, 2))
MEDIA_COUNTS = (1, 2)


def run_first_passes(
    head: Head, tokenizer: TextTokenizer, max_tokens: int, outputs: frozenset[Output], vocabulary: int = 0
) -> Iterator[list[Row]]:
    """Run batches of several shapes and yield the rows of each.

    outputs: those of the network, empty for logits. vocabulary: number of token ids that the network has, 0
    for all of the tokenizer's.
    """
    # Both texts of a pair may have a type of their own.
    encoded = tokenizer.encode([WORD, (WORD, WORD)], Truncate.RIGHT)
    text, pair = (
        InputSequence([min(id_, vocabulary - 1) for id_ in ids] if vocabulary else ids, type_ids)
        for ids, type_ids in zip(encoded.ids, encoded.type_ids, strict=True)
    )
    for repeats in SHAPES:
        yield head.run([_repeated(text, times, max_tokens) for times in repeats], outputs or LOGITS)
    if not outputs:
        yield head.run([pair], LOGITS)


def run_media_passes(head: Head, probe: InputSequence, outputs: frozenset[Output]) -> Iterator[list[Row]]:
    """Run batches of several sizes with a picture or recording and yield the rows of each."""
    for count in MEDIA_COUNTS:
        yield head.run([probe] * count, outputs)


def _repeated(text: InputSequence, times: int, max_tokens: int) -> InputSequence:
    return InputSequence((text.ids * times)[:max_tokens], (text.type_ids * times)[:max_tokens])
