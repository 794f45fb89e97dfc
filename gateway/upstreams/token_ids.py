"""Decoding of token ids that callers send, if the config specifies their vocabulary.

Rule: the gateway never assumes the model's own vocabulary; ids of a different one would give wrong vectors.
"""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from backends.checkpoints import locate_tokenizer
from backends.errors import InvalidWork, ModelUnavailable
from gateway.errors import DeadlineExceeded, InvalidInput, UpstreamFailed

if TYPE_CHECKING:
    # The tokenizers package is loaded only where ids are decoded.
    from backends.tokens import Vocabulary

DECODING = ThreadPoolExecutor(1, "decode")
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
        self._vocabulary: Vocabulary | None = None

    async def decode(self, ids: Sequence[Sequence[int]], timeout_s: float) -> list[str]:
        """Return the text of each list of ids, without special tokens.

        Raises: InvalidInput, DeadlineExceeded, UpstreamFailed.
        """
        if self._source is None:
            raise InvalidInput(IDS_REFUSED, param="input")
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(timeout_s):
                return await loop.run_in_executor(DECODING, self._decode, self._source, ids)
        except InvalidWork as error:
            raise InvalidInput(error.message, param="input") from error
        except ModelUnavailable as error:
            raise UpstreamFailed("the model's `token_encoding` cannot be read here") from error
        except TimeoutError as error:
            raise DeadlineExceeded("the call's time ran out") from error

    def _decode(self, source: str, ids: Sequence[Sequence[int]]) -> list[str]:
        from backends.tokens import open_vocabulary

        # DECODING has one thread, so the vocabulary is opened once.
        if self._vocabulary is None:
            self._vocabulary = open_vocabulary(Path(locate_tokenizer(source)))
        return self._vocabulary.decode(ids, skip_special_tokens=True)
