"""Cutting of texts to a number of tokens that a request states, before the model's own length applies.

Source: Cohere's `max_tokens` and `max_tokens_per_doc`, Jina's `max_doc_length`, and vLLM's
`max_tokens_per_query`: tokens of the text itself.
"""

from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from backends.contract import Rerank, Truncate
from backends.contract.texts import clip_text
from gateway.calls import Call
from gateway.errors import InvalidInput
from gateway.upstreams.fair_threads import CHUNK_CHARACTERS, Claim, FairThreads

if TYPE_CHECKING:
    # The tokenizers package is loaded only where something is counted.
    from backends.tokens.tokenizer import TextCounter

OpenCounter: TypeAlias = "Callable[[], Awaitable[TextCounter | None]]"
# Text of this length takes as long to tokenize as a hundred trips to Redis: ask for room first.
ASK_CHARACTERS = 64 * 1024
# Called with the tokens that a call has at least; refuses what does not fit into its limits.
RequireTokens: TypeAlias = Callable[[int], Awaitable[None]]


class CutCall(msgspec.Struct, frozen=True):
    """A call whose texts have no more tokens than it allows.

    indices: of the inputs that were cut, in order. is_complete: False if the texts could not be cut, because
    the model's tokenizer is not known here.
    """

    call: Call
    indices: tuple[int, ...] = ()
    is_complete: bool = True


async def cut_call(
    call: Call, open_counter: OpenCounter, threads: FairThreads, claim: Claim, require: RequireTokens
) -> CutCall:
    """Return a call without the tokens of its texts beyond `text_tokens`, and of its queries `query_tokens`.

    A call that cuts at the left keeps the last ones. open_counter: returns the counter of the model's tokens,
    None if it is not known. require: asked before long texts are cut, and again as their tokens are known.
    Raises: InvalidInput if the call refuses to be cut, or needs the counter; Overloaded; errors of `require`.
    """
    work = call.work
    queries = [item[0] for item in work.model_inputs if isinstance(item, tuple)]
    texts = [item[1] if isinstance(item, tuple) else item for item in work.model_inputs]
    long_queries, long_texts = _long(queries, call.query_tokens), _long(texts, call.text_tokens)
    if not long_queries and not long_texts:
        return CutCall(call)
    counter = await open_counter()
    if counter is None:
        if isinstance(work, Rerank) and not long_queries:
            # Cohere and Jina always cut documents, so that their clients expect no refusal.
            return CutCall(call, is_complete=False)
        raise _no_tokenizer(call.query_tokens if long_queries else call.text_tokens)
    with threads.hold(claim.tenant, sum(map(len, long_queries)) + sum(map(len, long_texts))):
        cutter = Cutter(counter, call.side or Truncate.RIGHT, threads, claim, require)
        cutter.at_least = len(work.inputs)
        cut_queries = await cutter.cut(long_queries, call.query_tokens or 0)
        cut_texts = await cutter.cut(long_texts, call.text_tokens or 0)
    shorter = work.map_texts(
        lambda text: cut_texts.get(text, text), lambda query: cut_queries.get(query, query)
    )
    pairs = enumerate(zip(work.model_inputs, shorter.model_inputs, strict=True))
    indices = tuple([index for index, (old, new) in pairs if old != new])
    if indices and call.truncate is False and not queries:
        raise InvalidInput(
            f"input {indices[0]} has more than the {call.text_tokens} tokens that the request allows"
        )
    return CutCall(msgspec.structs.replace(call, work=shorter), indices)


def _long(texts: Sequence[str], most: int | None) -> list[str]:
    """Return each text once that may have more tokens; a text has no more tokens than bytes."""
    return [] if most is None else [text for text in dict.fromkeys(texts) if len(text.encode()) > most]


def _no_tokenizer(most: int | None) -> InvalidInput:
    return InvalidInput(
        f"cutting a text to {most} tokens needs the model's tokenizer, which is not known here; "
        "send shorter texts"
    )


class Cutter:
    """Cutter of a call's texts, on the threads that its tenant has a share of.

    at_least: tokens that the call has, as far as they are known.
    """

    def __init__(
        self,
        counter: "TextCounter",
        side: Truncate,
        threads: FairThreads,
        claim: Claim,
        require: RequireTokens,
    ) -> None:
        self._counter = counter
        self._side = side
        self._threads = threads
        self._claim = claim
        self._require = require
        self.at_least = 0

    async def cut(self, texts: Sequence[str], most: int) -> dict[str, str]:
        """Return what is left of each text that has more than `most` tokens."""
        shorter: dict[str, str] = {}
        is_large = sum(map(len, texts)) > ASK_CHARACTERS
        for chunk in _chunks(texts):
            if is_large:
                await self._require(self.at_least)
            clipped = [clip_text(text, most, self._side) for text in chunk]
            cut = partial(self._counter.cut, clipped, most=most, side=self._side)
            parts = await self._threads.run(self._claim, sum(map(len, clipped)), cut)
            cut_here = {text: part for text, part in zip(chunk, parts, strict=True) if part != text}
            self.at_least += len(cut_here) * (most - 1)
            shorter |= cut_here
        return shorter


def _chunks(texts: Sequence[str]) -> Iterator[list[str]]:
    """Yield consecutive texts of about a chunk's length."""
    chunk: list[str] = []
    characters = 0
    for text in texts:
        if chunk and characters + len(text) > CHUNK_CHARACTERS:
            yield chunk
            chunk, characters = [], 0
        chunk.append(text)
        characters += len(text)
    if chunk:
        yield chunk
