"""Cutting of texts to a number of tokens that a request states, before the model's own length applies.

Source: Cohere's `max_tokens` and `max_tokens_per_doc`, Jina's `max_doc_length`: tokens of the text itself.
"""

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from backends.contract import Embed, Encode, Rerank, Truncate
from backends.texts import clip_text
from gateway.calls import Call
from gateway.errors import InvalidInput
from gateway.upstreams.fair_threads import CHUNK_CHARACTERS, Claim, FairThreads

if TYPE_CHECKING:
    # The tokenizers package is loaded only where something is counted.
    from backends.tokens import TextCounter

OpenCounter: TypeAlias = "Callable[[], Awaitable[TextCounter | None]]"


class CutCall(msgspec.Struct, frozen=True):
    """A call whose texts have no more tokens than it allows.

    indices: of the inputs that were cut, in order. is_complete: False if the texts could not be cut, because
    the model's tokenizer is not known here.
    """

    call: Call
    indices: tuple[int, ...] = ()
    is_complete: bool = True


async def cut_call(call: Call, open_counter: OpenCounter, threads: FairThreads, claim: Claim) -> CutCall:
    """Return a call without the tokens of its texts, or of the documents to rank, beyond `text_tokens`.

    A call that cuts at the left keeps the last ones. open_counter: returns the counter of the model's tokens,
    None if it is not known. Raises: InvalidInput if the call refuses to be cut, or embeds and cannot be cut;
    Overloaded.
    """
    most = call.text_tokens
    if most is None:
        return CutCall(call)
    texts = _texts_of(call)
    # A text has no more tokens than bytes.
    long = {index: text for index, text in enumerate(texts) if len(text.encode()) > most}
    if not long:
        return CutCall(call)
    counter = await open_counter()
    if counter is None:
        return _uncut(call, most)
    side = call.side or Truncate.RIGHT
    clipped = {index: clip_text(text, most, side) for index, text in long.items()}
    with threads.hold(claim.tenant, sum(map(len, clipped.values()))):
        shorter = await _cut_texts(clipped, partial(counter.cut, most=most, side=side), threads, claim)
    cut = {index: text for index, text in shorter.items() if text != texts[index]}
    if cut and call.truncate is False and not isinstance(call.work, Rerank):
        raise InvalidInput(f"input {min(cut)} has more than the {most} tokens that the request allows")
    return CutCall(_with_texts(call, [cut.get(index, text) for index, text in enumerate(texts)]), tuple(cut))


def _uncut(call: Call, most: int) -> CutCall:
    if isinstance(call.work, Rerank):
        return CutCall(call, is_complete=False)
    raise InvalidInput(
        f"cutting a text to {most} tokens needs the model's tokenizer, which is not known here; "
        "send shorter texts"
    )


async def _cut_texts(
    texts: Mapping[int, str], cut: Callable[[list[str]], list[str]], threads: FairThreads, claim: Claim
) -> dict[int, str]:
    """Return each text after it was cut, by index."""
    shorter: dict[int, str] = {}
    for indices in _chunks(texts):
        chunk = [texts[index] for index in indices]
        parts = await threads.run(claim, sum(map(len, chunk)), partial(cut, chunk))
        shorter.update(zip(indices, parts, strict=True))
    return shorter


def _chunks(texts: Mapping[int, str]) -> Iterator[list[int]]:
    """Yield the indices of consecutive texts of about a chunk's length."""
    indices: list[int] = []
    characters = 0
    for index, text in texts.items():
        if indices and characters + len(text) > CHUNK_CHARACTERS:
            yield indices
            indices, characters = [], 0
        indices.append(index)
        characters += len(text)
    yield indices


def _texts_of(call: Call) -> Sequence[str]:
    work = call.work
    assert isinstance(work, Embed | Encode | Rerank)
    return work.documents if isinstance(work, Rerank) else work.inputs


def _with_texts(call: Call, texts: list[str]) -> Call:
    field = "documents" if isinstance(call.work, Rerank) else "inputs"
    work = msgspec.structs.replace(call.work, **{field: tuple(texts)})
    return msgspec.structs.replace(call, work=work)
