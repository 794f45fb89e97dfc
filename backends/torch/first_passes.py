"""First passes through a network that was just opened."""

from collections.abc import Iterator

from backends.contract import Output
from backends.tokens import TextTokenizer
from backends.torch.sequences import LOGITS, Head, InputSequence, Row

# Repetitions of a text in each sequence of a batch. The compiler treats a size as variable only after it has
# changed.
SHAPES = ((1,), (2, 1, 1), (3, 2))


def run_first_passes(
    head: Head, tokenizer: TextTokenizer, max_tokens: int, outputs: frozenset[Output], vocabulary: int = 0
) -> Iterator[list[Row]]:
    """Run batches of several shapes and yield the rows of each.

    outputs: those of the network, empty for logits. vocabulary: number of token ids that the network has, 0
    for all of the tokenizer's.
    """
    (word,) = tokenizer.explain(["ready"], add_special_tokens=True)
    ids = [min(token.id, vocabulary - 1) if vocabulary else token.id for token in word][:max_tokens]
    for repeats in SHAPES:
        batch = [(ids * times)[:max_tokens] for times in repeats]
        sequences = [InputSequence(text_ids, [0] * len(text_ids)) for text_ids in batch]
        yield head.run(sequences, outputs or LOGITS)
