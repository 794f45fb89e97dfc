"""Random work of every kind, and replies in which each input has a result of its own."""

import hashlib
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
from hypothesis import strategies as st

from backends.contract import (
    Audio,
    BaseReply,
    BaseWork,
    Chat,
    ChunkRange,
    ChunkSize,
    Classify,
    ClassifyReply,
    Detokenize,
    DetokenizeReply,
    Embed,
    EmbedChunks,
    EmbedChunksReply,
    EmbedParts,
    EmbedReply,
    Encode,
    EncodeReply,
    Image,
    Output,
    Part,
    PatchGrid,
    Rerank,
    RerankReply,
    Score,
    ScoreParts,
    TermWeights,
    Token,
    Tokenize,
    TokenizeReply,
    Truncate,
    Turn,
)
from gateway.calls import Similarity

TEXT = st.text(st.sampled_from('abä水\U0001f600"\\\x00'), max_size=6)
TEXTS = st.lists(TEXT, min_size=1, max_size=12).map(tuple)
PAIRS = st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=12).map(tuple)
PART: st.SearchStrategy[Part] = st.one_of(
    TEXT,
    st.builds(Image, st.binary(max_size=3), st.just("image/png"), st.integers(1, 99), st.just(70)),
    st.builds(Audio, st.binary(max_size=3), st.just("audio/wav")),
)
PARTS = st.lists(PART, min_size=1, max_size=3).map(tuple)
LONG = st.sampled_from(Truncate)
LENGTH = st.none() | st.integers(1, 9)
INSTRUCTION = st.none() | TEXT
NAME = st.sampled_from([None, "", "query"])


@st.composite
def embeds(draw: st.DrawFn) -> Embed:
    """Draw texts to embed, some of which carry the lengths of their prompts."""
    work = draw(
        st.builds(
            Embed,
            TEXTS,
            normalize=st.booleans(),
            dimensions=st.none() | st.just(1),
            prompt_name=NAME,
            truncate=LONG,
            max_tokens=LENGTH,
            special_tokens=st.booleans(),
        )
    )
    lengths = tuple(range(1, len(work.inputs) + 1)) if draw(st.booleans()) else ()
    chat = Chat() if len(work.inputs) == 1 and draw(st.booleans()) else None
    return msgspec.structs.replace(work, prompt_characters=lengths, chat=chat)


@st.composite
def parts_to_embed(draw: st.DrawFn) -> EmbedParts:
    """Draw inputs with media, some of which are conversations."""
    inputs = draw(st.lists(PARTS, min_size=1, max_size=8).map(tuple))
    output = draw(st.sampled_from([Output.DENSE, Output.MULTIVECTOR]))
    roles = [draw(st.sampled_from(["user", "query"])) for _ in inputs] if draw(st.booleans()) else []
    turns = tuple([(Turn(role, len(parts)),) for role, parts in zip(roles, inputs, strict=False)])
    return EmbedParts(inputs, output, chat=draw(st.sampled_from([None, Chat()])), turns=turns)


# Every kind of work, those that only the gateway knows included.
WORKS: dict[type[BaseWork], st.SearchStrategy[Any]] = {
    Embed: embeds(),
    EmbedChunks: st.builds(
        EmbedChunks,
        st.lists(st.lists(TEXT, min_size=1, max_size=4).map(tuple), min_size=1, max_size=8).map(tuple),
        st.none() | st.builds(ChunkSize, st.integers(1, 9)),
        prompt_name=NAME,
    ),
    Encode: st.builds(
        Encode, TEXTS, st.frozensets(st.sampled_from(Output), min_size=1), prompt_name=NAME, truncate=LONG
    ),
    EmbedParts: parts_to_embed(),
    Rerank: st.builds(Rerank, TEXT, TEXTS, st.booleans(), LONG, INSTRUCTION, LENGTH),
    Score: st.builds(Score, PAIRS, st.booleans(), LONG, INSTRUCTION, LENGTH),
    Classify: st.builds(
        Classify,
        st.lists(TEXT | st.tuples(TEXT, TEXT), min_size=1, max_size=12).map(tuple),
        st.booleans(),
        LONG,
    ),
    Tokenize: st.builds(Tokenize, TEXTS, st.booleans(), NAME, st.booleans()),
    Detokenize: st.builds(
        Detokenize,
        st.lists(st.lists(st.integers(0, 9), max_size=4).map(tuple), min_size=1, max_size=12).map(tuple),
    ),
    Similarity: st.builds(Similarity, TEXT, TEXTS, NAME),
    ScoreParts: st.builds(
        ScoreParts,
        st.lists(st.tuples(PARTS, PARTS), min_size=1, max_size=6).map(tuple),
        st.booleans(),
        LONG,
        INSTRUCTION,
        LENGTH,
    ),
}
# Kinds that replicas compute.
REPLICA_WORKS = {kind: works for kind, works in WORKS.items() if kind is not Similarity}


def kinds_of(base: type[Any]) -> Iterator[type[Any]]:
    """Yield the kinds of work or reply below a base; the bases between them have no tag."""
    for kind in base.__subclasses__():
        if kind.__struct_config__.tag is not None:
            yield kind
        yield from kinds_of(kind)


def number_of(item: object, salt: int = 0) -> int:
    """Return a number that belongs to the content of an input."""
    return int.from_bytes(hashlib.sha256(f"{salt}{item!r}".encode()).digest()[:2])


def reply_to(work: BaseWork, salt: int = 0, *, reports: bool = True) -> Any:
    """Return a reply in which each input has its own result. salt: of all numbers.

    reports: it has the cuts and tokens of each input, too.
    """
    inputs = list(work.model_inputs) if isinstance(work, Rerank) else list(work.inputs)
    numbers = [number_of(item, salt) for item in inputs]
    vectors = np.array([[number, -number] for number in numbers], np.float32).reshape(len(inputs), 2)
    cut = tuple([i for i, number in enumerate(numbers) if number % 3 == 0]) if reports else None
    counts = tuple([number % 50 for number in numbers]) if reports else None
    tokens = sum([number % 50 for number in numbers])
    match work:
        case Tokenize():
            lists = [
                (Token(number, str(item), special=False),)
                for number, item in zip(numbers, inputs, strict=True)
            ]
            return TokenizeReply(tuple(lists))
        case Detokenize():
            return DetokenizeReply(tuple([f"{number}" for number in numbers]))
        case Embed() | EmbedParts(output=Output.DENSE):
            return EmbedReply(vectors, tokens, cut, counts)
        case EmbedChunks():
            sizes = [1 + number % 3 for number in numbers]
            rows = np.repeat(vectors, sizes, axis=0)
            ranges = [ChunkRange((i, i + 1)) for size in sizes for i in range(size)]
            return EmbedChunksReply(
                rows, tuple(sizes), tokens, None if work.size is None else tuple(ranges), cut, counts
            )
        case Rerank() | Score() | ScoreParts():
            return RerankReply(vectors[:, 0], tokens, cut, vectors[:, 1] if reports else None)
        case Classify():
            return ClassifyReply(("yes", "no"), vectors, tokens, cut)
        case Encode():
            outputs = work.outputs
        case _:
            outputs = frozenset({Output.MULTIVECTOR})
    matrices = tuple([vectors[[i] * (1 + number % 3)] for i, number in enumerate(numbers)])
    terms = tuple([TermWeights(np.array([n], np.int32), np.array([n + 1], np.float32)) for n in numbers])
    grids = tuple([PatchGrid(n, 1, 1) if n % 2 else None for n in numbers]) if reports else None
    return EncodeReply(
        tokens,
        vectors if Output.DENSE in outputs else None,
        terms if Output.SPARSE in outputs else None,
        matrices if Output.MULTIVECTOR in outputs else None,
        matrices if Output.TOKENS in outputs else None,
        cut,
        counts,
        grids,
    )


def plain(reply: BaseReply) -> Any:
    """Return a reply as lists and numbers, which can be compared."""
    return msgspec.to_builtins(reply, enc_hook=lambda array: array.tolist())
