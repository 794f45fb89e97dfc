"""Choice of the size of a forward pass on a processor, by the time that passes of the loaded network take."""

import time
from collections.abc import Callable

from backends.contract import Output, Truncate
from backends.tokens import TextTokenizer
from backends.torch.first_passes import WORD
from backends.torch.loaded_model import CPU_BATCH_TOKENS
from backends.torch.sequences import LOGITS, Head, InputSequence

# Larger passes compute more tokens per second, but the next request waits for the whole pass.
PASS_TOKENS_MAX = 4096
PASS_S_MAX = 0.15
# A short pass shows whether a pass of twice the smallest size can be fast enough. It takes up to twice as
# long per token.
PROBE_TOKENS = 256
PROBE_SLOWNESS = 2
# Tokens of each sequence, as many as a paragraph has.
SEQUENCE_TOKENS = 64
TRIES = 2


def measure_pass_size(
    head: Head, tokenizer: TextTokenizer, max_tokens: int, outputs: frozenset[Output]
) -> int:
    """Return the best size of a pass of a network, in tokens. outputs: empty for logits."""
    length = min(SEQUENCE_TOKENS, max_tokens)
    encoded = tokenizer.encode([" ".join([WORD] * length)], Truncate.RIGHT)
    sequence = InputSequence(encoded.ids[0][:length], encoded.type_ids[0][:length])

    def seconds(tokens: int) -> float:
        sequences = [sequence] * (tokens // len(sequence.ids))
        return min(_pass_seconds(head, sequences, outputs or LOGITS) for _ in range(TRIES))

    return best_size(seconds)


def best_size(seconds: Callable[[int], float]) -> int:
    """Return the most tokens of a pass within `PASS_S_MAX`, as long as more are not slower per token.

    seconds: runs a pass of this many tokens and returns its duration.
    """
    size = CPU_BATCH_TOKENS
    if seconds(PROBE_TOKENS) * 2 * size / PROBE_TOKENS > PASS_S_MAX * PROBE_SLOWNESS:
        return size
    took_s = seconds(size)
    while size < PASS_TOKENS_MAX:
        doubled_s = seconds(size * 2)
        if doubled_s > min(PASS_S_MAX, took_s * 2):
            break
        size, took_s = size * 2, doubled_s
    return size


def _pass_seconds(head: Head, sequences: list[InputSequence], outputs: frozenset[Output]) -> float:
    started_s = time.perf_counter()
    head.run(sequences, outputs)
    return time.perf_counter() - started_s
