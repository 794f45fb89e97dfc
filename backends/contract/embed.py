"""Embed: one vector per text. Its bases are shared with the other kinds whose inputs are texts."""

import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import ClassVar, Literal, Self

import msgspec
import numpy as np

from backends.contract.capabilities import Capabilities, Operation, Truncate
from backends.contract.texts import normalized_bytes, token_upper_bounds
from backends.contract.vectors import Vectors, shape_vectors
from backends.contract.work import (
    BaseReply,
    BaseWork,
    Change,
    Chat,
    Choose,
    Lengths,
    Places,
    chained,
    chained_reports,
    check_widths,
    joined_counts,
    least,
    selected,
    text_bytes,
)

LENGTH = struct.Struct("<q")


class TextWork(BaseWork, frozen=True):
    """Request for texts, or for one conversation, which the chat template of the model renders to a text."""

    @property
    def chat(self) -> Chat | None:
        """Rendering of the one input, if it is a conversation."""
        raise NotImplementedError

    @property
    def special_tokens(self) -> bool:
        """Return whether the tokenizer's own special tokens are put around each text."""
        raise NotImplementedError

    @property
    def conversation(self) -> Chat | None:
        return self.chat

    @property
    def is_plain(self) -> bool:
        return self.chat is None and self.special_tokens

    def is_countable(self, capabilities: Capabilities) -> bool:
        return self.is_plain

    def token_bounds(self, lengths: Lengths) -> list[int]:
        """Return the bounds of the texts, or of a conversation the model's length.

        How many tokens a template adds is only known after the conversation was rendered.
        """
        if lengths.most is not None and self.chat is not None:
            return [lengths.most] * len(self.inputs)
        extra, most = normalized_bytes(lengths.prompt), lengths.most
        return [least(bound + extra, most) for bound in self._text_bounds()]

    def _text_bounds(self) -> list[int]:
        """Return an upper bound of each input's own tokens."""
        raise NotImplementedError


class PromptedWork(TextWork, frozen=True):
    """Request for outputs of texts, each with a prompt before it."""

    has_prompt: ClassVar[bool] = True
    instruction_place: ClassVar[Literal["pair", "text"] | None] = "text"

    @property
    def inputs(self) -> tuple[str, ...]:
        raise NotImplementedError

    @property
    def prompt_characters(self) -> tuple[int, ...]:
        """Length of the prompt that each input begins with; empty if no length is of interest."""
        raise NotImplementedError

    @property
    def model_inputs(self) -> tuple[str, ...]:
        return self.inputs

    def _choose(self, choose: Choose) -> Self:
        if not self.prompt_characters:
            return msgspec.structs.replace(self, inputs=choose(self.inputs))
        lengths = choose(self.prompt_characters)
        return msgspec.structs.replace(self, inputs=choose(self.inputs), prompt_characters=lengths)

    def _text_bounds(self) -> list[int]:
        return token_upper_bounds(self.inputs)

    def with_prompts(self, prompts: Iterable[str]) -> Self:
        inputs = tuple([prompt + text for prompt, text in zip(prompts, self.inputs, strict=True)])
        return msgspec.structs.replace(self, inputs=inputs, prompt_name="")

    def with_prompt_lengths(self, plain: BaseWork) -> Self:
        """Return the work with the lengths of its prompts. plain: the same work without prompts."""
        if not isinstance(plain, PromptedWork) or self.inputs == plain.inputs:
            return self
        pairs = zip(self.inputs, plain.inputs, strict=True)
        lengths = tuple([len(prompted) - len(text) for prompted, text in pairs])
        return msgspec.structs.replace(self, prompt_characters=lengths)

    def map_texts(self, change: Change, change_query: Change | None = None) -> Self:
        return msgspec.structs.replace(self, inputs=tuple(map(change, self.inputs)))


class Embed(PromptedWork, frozen=True, tag="embed"):
    """Request for one vector per input.

    dimensions: keep the first N components, then normalize (if requested), as TEI does.
    prompt_name: a key of the checkpoint's sentence-transformers prompts. None selects the checkpoint's
    default prompt; "" selects no prompt. prompt_characters: length of the prompt that each input begins with,
    for a model that leaves prompts out of its pooling (`pools_prompt`); empty for any other.
    max_tokens: a longer input is cut at so many tokens, prompt and special ones included. None is the model's
    length, which also holds if it is less. It has no effect on a request that refuses to be cut.
    chat: each input is a conversation: a JSON list of messages, objects with `role`, `content` and maybe
    `name`, whose content is a text or a list of parts with `type` and `text`. Such a request has one input.
    special_tokens: the tokenizer's own special tokens are put around each text.
    """

    inputs: tuple[str, ...]
    normalize: bool = True
    dimensions: int | None = None
    prompt_name: str | None = None
    truncate: Truncate = Truncate.RIGHT
    prompt_characters: tuple[int, ...] = ()
    max_tokens: int | None = None
    chat: Chat | None = None
    special_tokens: bool = True

    kind: ClassVar[Operation] = Operation.EMBED
    row_fault: ClassVar[str] = "the replicas of this model give vectors of different widths"

    @property
    def reply_rows(self) -> int:
        return len(self.inputs)

    def is_joinable(self, other: BaseWork) -> bool:
        """Return whether the options of another work are equal; a conversation is always alone."""
        return (
            isinstance(other, Embed)
            and self.normalize == other.normalize
            and self.truncate is other.truncate
            and self.dimensions == other.dimensions
            and self.max_tokens == other.max_tokens
            and self.prompt_name == other.prompt_name
            and bool(self.prompt_characters) == bool(other.prompt_characters)
            and self.special_tokens == other.special_tokens
            and self.chat is None
            and other.chat is None
        )

    def joined(self, others: Sequence[BaseWork]) -> Self:
        works: list[Embed] = [self, *(other for other in others if isinstance(other, Embed))]
        inputs = chained([work.inputs for work in works])
        lengths = chained([work.prompt_characters for work in works])
        return msgspec.structs.replace(self, inputs=inputs, prompt_characters=lengths)

    def is_cacheable(self, width: int, *, is_cut_plainly: bool = True) -> bool:
        """Return whether each text has a vector of its own that is the beginning of the full one.

        More dimensions than `width` are requested only by a call that its replica refuses.
        """
        if self.dimensions is None or self.dimensions == width:
            return True
        return is_cut_plainly and self.dimensions < width

    def uncut(self) -> Self:
        return msgspec.structs.replace(self, dimensions=None)

    def item_keys(self) -> Iterator[bytes]:
        """Yield the content of each text.

        A prompt that does not take part in pooling changes the vector of the same characters.
        """
        lengths = self.prompt_characters or (-1,) * len(self.inputs)
        for text, length in zip(self.inputs, lengths, strict=True):
            yield LENGTH.pack(length) + text_bytes(text)

    def rows_of(self, reply: BaseReply) -> Vectors | None:
        return reply.vectors if isinstance(reply, EmbedReply) else None

    def reply_of_rows(
        self, rows: Vectors, tokens: int, truncated: Places | None, input_tokens: Places | None
    ) -> "EmbedReply":
        """Return the reply with the requested dimensions of full vectors."""
        if self.dimensions is not None and self.dimensions != rows.shape[1]:
            rows = shape_vectors(rows, dimensions=self.dimensions, normalize=self.normalize)
        return EmbedReply(rows, tokens, truncated, input_tokens)


class EmbedReply(BaseReply, frozen=True, tag="embedded"):
    """Vectors in input order.

    vectors: (n_inputs, dim) float32; each row has length 1 if the work requested normalization.
    tokens: number of tokens after truncation, including special tokens and the prompt.
    truncated: indices of the inputs that were cut; None if the backend does not report them.
    input_tokens: number of tokens of each input; None if the backend reports only their sum.
    """

    vectors: Vectors
    tokens: int
    truncated: tuple[int, ...] | None = ()
    input_tokens: tuple[int, ...] | None = None

    @property
    def dense_vectors(self) -> Vectors:
        return self.vectors

    @classmethod
    def join(cls, replies: Sequence[Self], starts: Sequence[int]) -> Self:
        """Return one reply from those to several parts. Raises: ReplicaFailed."""
        vectors = [reply.vectors for reply in replies]
        check_widths(vectors)
        counts = chained_reports([reply.input_tokens for reply in replies])
        return cls(np.concatenate(vectors), *joined_counts(replies, starts), counts)

    def with_input_tokens(self, counts: Places) -> Self:
        return msgspec.structs.replace(self, input_tokens=counts)

    def part(self, start: int, stop: int, tokens: int) -> Self:
        """Return the results of consecutive inputs. tokens: of these.

        The vectors are a view: rows of one array, which no caller changes.
        """
        truncated, counts = self.truncated, self.input_tokens
        if truncated is not None:
            truncated = tuple([index - start for index in truncated if start <= index < stop])
        counts = None if counts is None else counts[start:stop]
        return type(self)(self.vectors[start:stop], tokens, truncated, counts)

    def select(self, places: Sequence[int]) -> Self:
        return msgspec.structs.replace(
            self,
            vectors=self.vectors[np.array(places, np.intp)],
            truncated=self._selected_cuts(places),
            input_tokens=selected(self.input_tokens, places),
        )
