"""Bases of every kind of work and reply: what the gateway asks of a request without knowing its operation.

Each operation is one module next to this one. Its work says how its inputs are cut and chosen, how large they
are and what replicas must offer; its reply says how the replies to the parts become one.
Invariant: the replies to consecutive parts of a work, joined, give each input its own result, in order.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar, Literal, Self, TypeAlias, TypeVar

import msgspec

from backends.contract.capabilities import Capabilities, Operation, Output, Truncate
from backends.contract.errors import ReplicaFailed
from backends.contract.texts import ModelInput, clip_text
from backends.contract.vectors import Vectors

# JSON escapes some one-byte characters as six bytes: \u0000.
JSON_BYTES_PER_BYTE = 6


class Chat(msgspec.Struct, frozen=True):
    """Rendering of conversations by the chat template of a model, as transformers renders them.

    add_generation_prompt: the text ends with the start of an answer. continue_final_message: it ends with the
    last message, without the mark of its end. template: of the request; None is the checkpoint's.
    variables: further variables of the template, a JSON object as text, so that work is hashable.
    """

    add_generation_prompt: bool = False
    continue_final_message: bool = False
    template: str | None = None
    variables: str = "{}"


class Image(msgspec.Struct, frozen=True, tag="image"):
    """Encoded picture as it came. media_type: of its content. width, height: pixels, as its header states."""

    data: bytes
    media_type: str
    width: int
    height: int


class Audio(msgspec.Struct, frozen=True, tag="audio"):
    """Encoded recording as it came. media_type: of its content. seconds: its length, None if not known."""

    data: bytes
    media_type: str
    seconds: float | None = None


# One piece of an input that is more than text.
Part: TypeAlias = str | Image | Audio
# One input of a piece of work. The reply has one vector, score, row of labels or token list for each.
WorkInput: TypeAlias = (
    str | tuple[str, str] | tuple[int, ...] | tuple[Part, ...] | tuple[tuple[Part, ...], tuple[Part, ...]]
)
# For each input, its index among those that are computed.
Places: TypeAlias = tuple[int, ...]
Item = TypeVar("Item")
Change: TypeAlias = Callable[[str], str]
# Chooses some entries of a row that has one for each input.
Choose: TypeAlias = Callable[[tuple[Any, ...]], tuple[Any, ...]]


class Lengths(msgspec.Struct, frozen=True):
    """Facts about a model that bound the tokens of its inputs.

    most: its length, None if it is not known. prompt: text before each input. pair_overhead: tokens that a
    reranker adds to each pair. media_tokens: the most of a picture or recording.
    """

    most: int | None = None
    prompt: str = ""
    pair_overhead: int = 0
    media_tokens: int | None = None


class BaseWork(msgspec.Struct, frozen=True):
    """Request of one operation for some inputs, with options that hold for all of them.

    A new operation writes, in this order of the class:

    - always: `kind`, `inputs` (a field does it) and `token_bounds`, and the fields `truncate` and
      `max_tokens`, or `with_lengths`;
    - if the model reads texts and they cost tokens: `model_inputs` and `map_texts`;
    - if calls may share a batch: `is_joinable` and `joined`, and `part` of its reply;
    - if a cache may keep its results: `row_fault`, `is_cacheable`, `item_keys`, `rows_of` and
      `reply_of_rows`.

    All else has a default, which holds unless the operation differs in that subject.

    kind: its operation. is_free: it costs no tokens. has_prompt: a prompt can stand before each input.
    instruction_place: an instruction is a field that its replica applies to each pair, or a prompt before
    each text, or cannot be expressed. joins_chunks: each input is a list of chunks that the model reads as
    one text, which needs `late_chunking`. row_fault: error of a reply whose rows are not those of the
    entries.
    """

    kind: ClassVar[Operation]
    is_free: ClassVar[bool] = False
    has_prompt: ClassVar[bool] = False
    instruction_place: ClassVar[Literal["pair", "text"] | None] = None
    joins_chunks: ClassVar[bool] = False
    row_fault: ClassVar[str] = ""

    # --- always written by an operation

    @property
    def inputs(self) -> Sequence[WorkInput]:
        """Texts, pairs of texts, lists of token ids, lists of parts, or pairs of such lists."""
        raise NotImplementedError

    def token_bounds(self, lengths: Lengths) -> list[int]:
        """Return an upper bound of each input's tokens: a text has no more than bytes, however normalized."""
        raise NotImplementedError

    # --- written if the model reads texts that cost tokens

    @property
    def model_inputs(self) -> Sequence[ModelInput]:
        """Text or pair that the model reads for each input."""
        raise NotImplementedError

    def map_texts(self, change: Change, change_query: Change | None = None) -> Self:
        """Return the work with every text changed. change_query: of the first text of each pair."""
        raise NotImplementedError

    # --- written together if calls may share a batch

    def is_joinable(self, other: "BaseWork") -> bool:
        """Return whether the inputs of another work could be computed with these."""
        return False

    def joined(self, others: Sequence["BaseWork"]) -> Self:
        """Return the work of its own inputs and those of joinable works, one after the other."""
        raise NotImplementedError

    # --- written together if a cache may keep one row of numbers for each input

    def is_cacheable(self, width: int, *, is_cut_plainly: bool = True) -> bool:
        """Return whether each input has an output of its own: a score, or a vector of full width.

        width: of the entries. is_cut_plainly: a narrower vector is the beginning of the full one.
        """
        return False

    def item_keys(self) -> Iterator[bytes]:
        """Yield the content of each input, which differs from that of any other input of the same options."""
        raise NotImplementedError

    def rows_of(self, reply: "BaseReply") -> Vectors | None:
        """Return the numbers of each input, (n_inputs, width) float32; None if the reply has none."""
        raise NotImplementedError

    def reply_of_rows(
        self, rows: Vectors, tokens: int, truncated: Places | None, input_tokens: Places | None
    ) -> "BaseReply":
        """Return the reply that the rows of all inputs make. rows: (n_inputs, width) float32."""
        raise NotImplementedError

    # --- defaults: options

    @property
    def operation(self) -> Operation:
        """Operation that a replica must offer."""
        return self.kind

    @property
    def prompt_name(self) -> str | None:
        """Name of the prompt before each input, None for the checkpoint's default."""
        return None

    @property
    def takes_prompt(self) -> bool:
        """Return whether a prompt would change an input."""
        return self.has_prompt

    @property
    def max_tokens(self) -> int | None:
        """Tokens at which a longer input is cut, None for the model's length."""
        return None

    @property
    def truncate(self) -> Truncate:
        """Treatment of an input that is longer than the model."""
        return Truncate.RIGHT

    @property
    def instruction(self) -> str | None:
        """Task that a replica applies to each pair, in words."""
        return None

    @property
    def conversation(self) -> Chat | None:
        """Rendering of inputs that are conversations, None for others. It has one input."""
        return None

    @property
    def is_plain(self) -> bool:
        """Return whether the model reads texts as they are, with its tokenizer's own special tokens."""
        return True

    @property
    def shared_texts(self) -> tuple[str, ...]:
        """Texts that every part repeats."""
        return ()

    def with_lengths(self, truncate: Truncate, max_tokens: int | None) -> Self:
        """Return the work with the treatment of long inputs; one that is never cut is unchanged."""
        return msgspec.structs.replace(self, truncate=truncate, max_tokens=max_tokens)

    def options(self) -> Self:
        """Return the work without its inputs."""
        return self._choose(_none)

    def uncut(self) -> Self:
        """Return the work that asks for the full output of each input."""
        return self

    # --- defaults: parts

    def _choose(self, choose: Choose) -> Self:
        """Return the work with some of its inputs."""
        return msgspec.structs.replace(self, inputs=choose(self.inputs))  # type: ignore[arg-type]

    def part(self, start: int, stop: int) -> Self:
        """Return the work of consecutive inputs."""
        return self._choose(lambda row: row[start:stop])

    def select(self, places: Sequence[int]) -> Self:
        """Return the work of the inputs at some places, in their order."""
        return self._choose(lambda row: tuple([row[place] for place in places]))

    def without_duplicates(self) -> tuple[Self, Places | None]:
        """Return the work with each different input once, and their places; None if all are different.

        Only inputs with pictures or sound are compared: an equal text costs less than the comparison saves.
        """
        return self, None

    # --- defaults: sizes

    @property
    def reply_rows(self) -> int | None:
        """Number of vectors or scores of the reply, None if it has several values for each input."""
        return None

    @property
    def counted_inputs(self) -> int:
        """Number of inputs as limits and usage count them."""
        return len(self.inputs)

    @property
    def media(self) -> Sequence[Image | Audio]:
        """Pictures and recordings of all inputs; one that several inputs share counts once."""
        return ()

    @property
    def characters(self) -> int:
        """Characters of all inputs as the model reads them; token ids have none."""
        return sum(map(_characters, self.inputs))

    def pixel_weights(self) -> Sequence[int]:
        """Return the tokens that the pictures of each input weigh by their pixels; empty without pictures."""
        return ()

    @property
    def shared_bytes(self) -> int:
        """Bytes in JSON of the texts that every part repeats."""
        return sum(len(msgspec.json.encode(text)) for text in self.shared_texts)

    @property
    def request_bytes(self) -> int:
        """Bytes of all inputs in JSON, with the texts that every part repeats."""
        return self.shared_bytes + sum(len(msgspec.json.encode(item)) + 1 for item in self.inputs)

    def wire_sizes(self, room: int | None) -> Sequence[int]:
        """Return an upper bound of each input's bytes in a JSON body, with its comma; zeros without a bound.

        room: bytes for all of them, None without a bound. The bytes are counted exactly only if the bound
        could be reached.
        """
        if room is None:
            return [0] * len(self.inputs)
        bounds = [byte_bound(item, room) for item in self.inputs]
        return bounds if sum(bounds) <= room else [_json_bytes(item, room) for item in self.inputs]

    # --- defaults: replicas

    def is_offered_by(self, capabilities: Capabilities) -> bool:
        """Return whether a replica offers the work: operation, outputs and options."""
        return self.operation in capabilities.operations

    def outputs_of(self, model: Capabilities) -> frozenset[Output]:
        """Return the outputs that the work needs of a model, apart from one vector for each input."""
        return frozenset()

    def is_countable(self, capabilities: Capabilities) -> bool:
        """Return whether the model's tokenizer alone, with its special tokens, determines the tokens."""
        return False

    def by_vectors(self, capabilities: Capabilities | None) -> "VectorScores | None":
        """Return how vectors give the scores of its pairs; None without pairs, or if replicas score them."""
        return None

    # --- defaults: texts

    def with_prompts(self, prompts: Iterable[str]) -> Self:
        """Return the work with the prompt of each input written into it; inputs without one are unchanged."""
        return self

    def with_prompt(self, prompt: str) -> Self:
        """Return the work with a prompt written into each input, in place of a named one."""
        return self.with_prompts([prompt] * len(self.inputs))

    def with_prompt_lengths(self, plain: "BaseWork") -> Self:
        """Return the work with the lengths of its prompts. plain: the same work without prompts."""
        return self

    def clip_texts(self, max_tokens: int) -> Self:
        """Return the work without the text that a model of max_tokens tokens cannot read."""
        truncate = self.truncate
        return self.map_texts(lambda text: clip_text(text, max_tokens, truncate))


class VectorScores(msgspec.Struct, frozen=True):
    """Scores of pairs from the vectors of their texts or images.

    work: embeds each side of the pairs. places: of each pair's two vectors in its reply. roles: of each input
    of the work, whether it is a query; None if they have no roles. has_query: all pairs have one query. raw:
    scores of late interaction are sums.
    """

    work: BaseWork
    places: list[tuple[int, int]]
    roles: Sequence[bool] | None = None
    has_query: bool = True
    raw: bool = False

    def place_of(self, index: int) -> str:
        """Return an input of the work as its caller counts pairs, as the beginning of a message."""
        if self.has_query and index == self.places[0][0]:
            return "the query: "
        return f"input {next(pair for pair, places in enumerate(self.places) if index in places)}: "


class BaseReply(msgspec.Struct, frozen=True):
    """Results of the inputs of one work, in their order.

    A new kind writes `tokens` and `truncated` (fields do it), `join` and `select`, and `part` if its calls
    may share a batch. All else has a default.

    tokens: number of tokens after truncation, including special tokens and the prompt.
    truncated: indices of the inputs that were cut; None if the backend does not report them.
    """

    is_free: ClassVar[bool] = False

    # --- always written by a kind of reply

    @property
    def tokens(self) -> int:
        """Tokens of all inputs."""
        raise NotImplementedError

    @property
    def truncated(self) -> Places | None:
        """Indices of the inputs that were cut."""
        raise NotImplementedError

    @classmethod
    def join(cls, replies: Sequence[Self], starts: Sequence[int]) -> Self:
        """Return one reply from the replies to several parts. starts: index of the first input of each.

        Raises: ReplicaFailed if replicas of one upstream return vectors of different widths, or other labels.
        """
        raise NotImplementedError

    def select(self, places: Sequence[int]) -> Self:
        """Return the results at some places, which may repeat. The tokens stay those that were computed."""
        raise NotImplementedError

    # --- written if calls may share a batch

    def part(self, start: int, stop: int, tokens: int) -> Self:
        """Return the results of consecutive inputs of joined works. tokens: of these."""
        raise NotImplementedError

    # --- defaults

    @property
    def input_tokens(self) -> Places | None:
        """Tokens of each input; None if they are not known."""
        return None

    @property
    def dense_vectors(self) -> Vectors | None:
        """One vector for each input, None if the reply has none."""
        return None

    def input_of(self, row: int) -> int:
        """Return the input of a row of `dense_vectors`."""
        return row

    @property
    def numbers(self) -> int:
        """Numbers of outputs that are larger than one vector for an input."""
        return 0

    def with_input_tokens(self, counts: Places) -> Self:
        """Return the reply with the tokens of each input, if it has a place for them."""
        return self

    def _selected_cuts(self, places: Sequence[int]) -> Places | None:
        """Return the indices among some places of the inputs that were cut."""
        if not self.truncated:
            return self.truncated
        cut = set(self.truncated)
        return tuple([index for index, place in enumerate(places) if place in cut])


def joined_counts(replies: Sequence[BaseReply], starts: Sequence[int]) -> tuple[int, Places | None]:
    """Return the tokens of all parts, and the inputs that were cut; None if a part does not report them."""
    tokens = sum(reply.tokens for reply in replies)
    cut: list[int] = []
    for start, reply in zip(starts, replies, strict=True):
        if reply.truncated is None:
            return tokens, None
        cut.extend([start + index for index in reply.truncated])
    return tokens, tuple(cut)


def chained(parts: Sequence[tuple[Item, ...]]) -> tuple[Item, ...]:
    """Return the entries of all parts one after the other."""
    return tuple([item for part in parts for item in part])


def chained_reports(parts: Sequence[tuple[Item, ...] | None]) -> tuple[Item, ...] | None:
    """Return what all parts report of their inputs, or None if one of them does not report it."""
    known = [part for part in parts if part is not None]
    return chained(known) if len(known) == len(parts) else None


def selected(row: tuple[Item, ...] | None, places: Sequence[int]) -> tuple[Item, ...] | None:
    """Return the entries at some places; None stays None."""
    return None if row is None else tuple([row[place] for place in places])


def check_widths(parts: Sequence[Vectors]) -> None:
    """Check that vectors of several parts are equally wide. Raises: ReplicaFailed."""
    if len({part.shape[1] for part in parts}) > 1:
        raise ReplicaFailed("the replicas of this model give vectors of different widths")


def least(bound: int, most: int | None) -> int:
    """Return a bound, or the lower one of both."""
    return bound if most is None else min(bound, most)


def text_bytes(text: str) -> bytes:
    """Return the bytes of a text that may contain lone surrogates."""
    return text.encode("utf-8", "surrogatepass")


def byte_bound(item: WorkInput, room: int) -> int:
    """Return an upper bound of an input's bytes in JSON, with its comma; of lists, the exact number."""
    if not isinstance(item, str):
        return len(msgspec.json.encode(item)) + 1
    # A text that has no room, whatever its bytes, is not encoded: that takes 0.1 s for a text of 31 MB.
    return len(item) if len(item) > room else len(item.encode()) * JSON_BYTES_PER_BYTE + 3


def _json_bytes(item: WorkInput, room: int) -> int:
    return len(item) if isinstance(item, str) and len(item) > room else len(msgspec.json.encode(item)) + 1


def _characters(item: WorkInput) -> int:
    if isinstance(item, str):
        return len(item)
    return sum([len(part) for part in item if isinstance(part, str)])


def _none(_row: tuple[Any, ...]) -> tuple[Any, ...]:
    return ()
