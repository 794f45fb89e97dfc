"""Decoding of token ids that callers send, if the config specifies their vocabulary.

Rule: the gateway takes ids for the model's own only as the config states; ids of a different vocabulary
would give wrong vectors.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from backends.checkpoints.locations import locate_tokenizer
from backends.contract import TokenizerSource
from backends.contract.errors import InvalidWork, ModelUnavailable
from gateway.calls import Deadline
from gateway.config.schema import OWN_VOCABULARY
from gateway.errors import EmptyInput, InvalidInput, NoReplica, UpstreamFailed
from gateway.upstreams.background_opener import BackgroundOpener
from gateway.upstreams.fair_threads import CHUNK_CHARACTERS, Claim, FairThreads

if TYPE_CHECKING:
    # The tokenizers package is loaded only where ids are decoded.
    from backends.tokens.tokenizer import Vocabulary

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

    source: hub id or path of the vocabulary, or `OWN_VOCABULARY`; None refuses token ids. own: returns the
    place of the model's own tokenizer, None while it is unknown.
    """

    def __init__(self, source: str | None, own: Callable[[], TokenizerSource | None]) -> None:
        self._source = source
        self._own = own
        self._opener: BackgroundOpener[Vocabulary] = BackgroundOpener()

    async def decode(
        self, ids: Sequence[Sequence[int]], threads: FairThreads, claim: Claim, deadline: Deadline
    ) -> list[str]:
        """Return the text of each list of ids, without the special tokens that a tokenizer adds.

        The text of ids of the model's own vocabulary may be empty; of another one it may not.
        Raises: EmptyInput, InvalidInput, Overloaded, DeadlineExceeded, NoReplica, UpstreamFailed.
        """
        if self._source is None:
            raise InvalidInput(IDS_REFUSED, param="input")
        if sum(map(len, ids)) > IDS_MAX:
            raise InvalidInput(f"more than {IDS_MAX} token ids in a call", param="input")
        try:
            async with asyncio.timeout_at(deadline.at_s):
                texts = await self._decode(self._place(self._source), ids, threads, claim)
        except InvalidWork as error:
            raise InvalidInput(error.message, param="input") from error
        except ModelUnavailable as error:
            raise UpstreamFailed("the model's `token_encoding` cannot be read here") from error
        except TimeoutError as error:
            raise deadline.error() from error
        if self._source != OWN_VOCABULARY and not all(texts):
            raise EmptyInput("`input` contains ids of special tokens only", param="input")
        return texts

    def _place(self, source: str) -> TokenizerSource:
        """Return the place of the vocabulary. Raises: NoReplica."""
        place = self._own() if source == OWN_VOCABULARY else TokenizerSource(source)
        if place is None:
            raise NoReplica("the vocabulary of the model is unknown until a replica has joined")
        return place

    async def _decode(
        self, source: TokenizerSource, ids: Sequence[Sequence[int]], threads: FairThreads, claim: Claim
    ) -> list[str]:
        texts: list[str] = []
        with threads.hold(claim.tenant, sum(map(len, ids)) * CHARACTERS_PER_ID):
            vocabulary = await self._opener.get(partial(_open_vocabulary, source))
            for start, lists in _chunks(ids):
                if self._source == OWN_VOCABULARY:
                    decode = partial(vocabulary.decode_own, lists, first_index=start)
                else:
                    decode = partial(vocabulary.decode, lists, skip_special_tokens=True, first_index=start)
                texts += await threads.run(claim, sum(map(len, lists)) * CHARACTERS_PER_ID, decode)
        return texts


def _open_vocabulary(source: TokenizerSource) -> "Vocabulary":
    from backends.tokens.tokenizer import open_vocabulary

    return open_vocabulary(Path(locate_tokenizer(source.location)), source.settings)


def _chunks(ids: Sequence[Sequence[int]]) -> Iterator[tuple[int, Sequence[Sequence[int]]]]:
    """Yield the index of the first list, and consecutive lists that are decoded at once."""
    start = count = 0
    for index, sequence in enumerate(ids):
        if index > start and (count + len(sequence)) * CHARACTERS_PER_ID > CHUNK_CHARACTERS:
            yield start, ids[start:index]
            start, count = index, 0
        count += len(sequence)
    yield start, ids[start:]
