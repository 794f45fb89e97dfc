"""Decoding of token ids that callers send, if the config specifies their vocabulary.

Rule: the gateway never assumes the model's own vocabulary; ids of a different one would give wrong vectors.
"""

import asyncio
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from backends.checkpoints import locate_tokenizer
from backends.errors import InvalidWork, ModelUnavailable
from gateway.calls import Deadline
from gateway.errors import InvalidInput, UpstreamFailed
from gateway.upstreams.background_opener import BackgroundOpener
from gateway.upstreams.fair_threads import CHUNK_CHARACTERS, Claim, FairThreads

if TYPE_CHECKING:
    # The tokenizers package is loaded only where ids are decoded.
    from backends.tokens import Vocabulary

# As many as `/detokenize` takes.
IDS_MAX = 1_000_000
# Text of an English token, and the price of a token id in a turn of the threads.
CHARACTERS_PER_ID = 4
IDS_REFUSED = (
    "token ids are refused: they belong to another model's vocabulary and would give wrong vectors. "
    "Send texts; with LangChain's OpenAIEmbeddings set check_embedding_ctx_length=False"
)


class IdDecoder:
    """Decoder for the callers of one upstream.

    source: hub id or path of the vocabulary; None refuses token ids.
    """

    def __init__(self, source: str | None) -> None:
        self._source = source
        self._opener: BackgroundOpener[Vocabulary] = BackgroundOpener()

    async def decode(
        self, ids: Sequence[Sequence[int]], threads: FairThreads, claim: Claim, deadline: Deadline
    ) -> list[str]:
        """Return the text of each list of ids, without special tokens.

        Raises: InvalidInput, Overloaded, DeadlineExceeded, UpstreamFailed.
        """
        if self._source is None:
            raise InvalidInput(IDS_REFUSED, param="input")
        if sum(map(len, ids)) > IDS_MAX:
            raise InvalidInput(f"more than {IDS_MAX} token ids in a call", param="input")
        try:
            async with asyncio.timeout_at(deadline.at_s):
                return await self._decode(self._source, ids, threads, claim)
        except InvalidWork as error:
            raise InvalidInput(error.message, param="input") from error
        except ModelUnavailable as error:
            raise UpstreamFailed("the model's `token_encoding` cannot be read here") from error
        except TimeoutError as error:
            raise deadline.error() from error

    async def _decode(
        self, source: str, ids: Sequence[Sequence[int]], threads: FairThreads, claim: Claim
    ) -> list[str]:
        texts: list[str] = []
        with threads.hold(claim.tenant, sum(map(len, ids)) * CHARACTERS_PER_ID):
            vocabulary = await self._opener.get(partial(_open_vocabulary, source))
            for start, lists in _chunks(ids):
                decode = partial(vocabulary.decode, lists, skip_special_tokens=True, first_index=start)
                texts += await threads.run(claim, sum(map(len, lists)) * CHARACTERS_PER_ID, decode)
        return texts


def _open_vocabulary(source: str) -> "Vocabulary":
    from backends.tokens import open_vocabulary

    return open_vocabulary(Path(locate_tokenizer(source)))


def _chunks(ids: Sequence[Sequence[int]]) -> Iterator[tuple[int, Sequence[Sequence[int]]]]:
    """Yield the index of the first list, and consecutive lists that are decoded at once."""
    start = count = 0
    for index, sequence in enumerate(ids):
        if index > start and (count + len(sequence)) * CHARACTERS_PER_ID > CHUNK_CHARACTERS:
            yield start, ids[start:index]
            start, count = index, 0
        count += len(sequence)
    yield start, ids[start:]
