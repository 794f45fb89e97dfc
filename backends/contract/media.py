"""Embed parts: vectors of inputs with pictures or sound."""

from collections.abc import Hashable, Iterable, Sequence
from itertools import repeat
from typing import ClassVar, Self, TypeAlias

import msgspec

from backends.contract.capabilities import Capabilities, Operation, Output, Truncate
from backends.contract.texts import token_upper_bound
from backends.contract.work import (
    Audio,
    BaseWork,
    Chat,
    Choose,
    Image,
    Lengths,
    Part,
    Places,
    byte_bound,
    least,
)

# Of Qwen2-VL: 28 x 28. CLIP and SigLIP have a fixed number, usually below the least.
PIXELS_PER_TOKEN = 784
IMAGE_TOKENS_MIN = 256
BYTES_PER_AUDIO_TOKEN = 256
# Reading a picture costs time and memory by its pixels, whatever the network makes of it. So many weigh as
# much as a token in queues and batches: a batch of 16,384 tokens has one of the largest pictures.
PIXELS_PER_WEIGHT = 4096
# JSON around a picture or recording.
MEDIA_ENVELOPE = 128


def media_in(groups: Iterable[Sequence[Part]]) -> list[Image | Audio]:
    """Return the pictures and recordings of some inputs."""
    return [part for parts in groups for part in parts if not isinstance(part, str)]


def distinct(items: Sequence[Hashable]) -> tuple[list[int], Places] | None:
    """Return where each different item is first, and of each item its index among these.

    None if all are different. Python's hash of the bytes finds candidates, and their comparison decides.
    """
    first_of: dict[Hashable, int] = {}
    for index, item in enumerate(items):
        first_of.setdefault(item, index)
    if len(first_of) == len(items):
        return None
    place_of = {item: place for place, item in enumerate(first_of)}
    return list(first_of.values()), tuple([place_of[item] for item in items])


def parts_bound(parts: Sequence[Part], lengths: Lengths) -> int:
    """Return a bound of the tokens of parts; the length of a model of images is that of its texts."""
    if lengths.media_tokens is None:
        return sum(map(_bound, parts))
    return sum([_model_bound(part, lengths) for part in parts])


def parts_weight(parts: Sequence[Part]) -> int:
    """Return the tokens that the pictures among parts weigh by their pixels."""
    return sum([p.width * p.height // PIXELS_PER_WEIGHT for p in parts if isinstance(p, Image)])


def parts_bytes(parts: Sequence[Part], room: int) -> int:
    """Return an upper bound of the bytes of parts in JSON, media in base64. room: as in `byte_bound`."""
    media = media_in([parts])
    if not media:
        return byte_bound(tuple(parts), room)
    texts = [part for part in parts if isinstance(part, str)]
    size = sum([len(medium.data) * 4 // 3 + MEDIA_ENVELOPE for medium in media])
    return size + sum([byte_bound(text, room) for text in texts])


class Turn(msgspec.Struct, frozen=True):
    """One message of a conversation. parts: their number. is_text: its content is a text, and no list."""

    role: str
    parts: int
    name: str | None = None
    is_text: bool = False


# The messages of one input, in order.
Turns: TypeAlias = tuple[Turn, ...]


class EmbedParts(BaseWork, frozen=True, tag="embed_parts"):
    """Request for one vector per input, or one per patch and token, of inputs with pictures or sound.

    inputs: the parts of each in order; one of them all is not a text. output: `DENSE`, answered by an
    `EmbedReply`, or `MULTIVECTOR`, answered by an `EncodeReply`. chat: each input is one message of a user,
    rendered by the chat template of the model. turns: each input is a conversation instead, of these
    messages, and has their parts one after the other. The other fields are those of `Embed`.
    """

    inputs: tuple[tuple[Part, ...], ...]
    output: Output = Output.DENSE
    normalize: bool = True
    dimensions: int | None = None
    prompt_name: str | None = None
    truncate: Truncate = Truncate.RIGHT
    max_tokens: int | None = None
    chat: Chat | None = None
    turns: tuple[Turns, ...] = ()
    special_tokens: bool = False

    # The rarer ability is that of sound.
    kind: ClassVar[Operation] = Operation.EMBED_IMAGE

    has_prompt: ClassVar[bool] = True

    @property
    def operation(self) -> Operation:
        """Operation with the rarest ability: sound, then images."""
        has_audio = any(isinstance(medium, Audio) for medium in self.media)
        return Operation.EMBED_AUDIO if has_audio else Operation.EMBED_IMAGE

    @property
    def media(self) -> Sequence[Image | Audio]:
        return media_in(self.inputs)

    @property
    def takes_prompt(self) -> bool:
        """Return whether an input is one text; others have no prompt."""
        return not self.turns and any(len(parts) == 1 and isinstance(parts[0], str) for parts in self.inputs)

    def without_duplicates(self) -> tuple[Self, Places | None]:
        """Return the work with each different input once, and their places; None if all are different."""
        if len(self.inputs) == 1:
            return self, None
        found = distinct(list(zip(self.inputs, self.turns or repeat(()), strict=False)))
        return (self, None) if found is None else (self.select(found[0]), found[1])

    def _choose(self, choose: Choose) -> Self:
        turns = choose(self.turns) if self.turns else ()
        return msgspec.structs.replace(self, inputs=choose(self.inputs), turns=turns)

    def token_bounds(self, lengths: Lengths) -> list[int]:
        return [parts_bound(parts, lengths) for parts in self.inputs]

    def pixel_weights(self) -> Sequence[int]:
        return list(map(parts_weight, self.inputs))

    def wire_sizes(self, room: int | None) -> Sequence[int]:
        """Return an upper bound of each input's bytes in JSON, media in base64; zeros without a bound."""
        return [0 if room is None else parts_bytes(parts, room) for parts in self.inputs]

    def outputs_of(self, model: Capabilities) -> frozenset[Output]:
        """Return the output, unless it is one vector for each input."""
        return frozenset({self.output}) - {Output.DENSE}

    def with_prompts(self, prompts: Iterable[str]) -> Self:
        if self.turns:
            return self
        inputs = tuple(
            [
                (prompt + parts[0],) if len(parts) == 1 and isinstance(parts[0], str) else parts
                for prompt, parts in zip(prompts, self.inputs, strict=True)
            ]
        )
        return msgspec.structs.replace(self, inputs=inputs, prompt_name="")


def _bound(part: Part) -> int:
    if isinstance(part, str):
        return token_upper_bound(part)
    if isinstance(part, Image):
        # How a network divides a picture is not known here: networks of pages have a token for this square.
        return IMAGE_TOKENS_MIN + part.width * part.height // PIXELS_PER_TOKEN
    return len(part.data) // BYTES_PER_AUDIO_TOKEN + 1


def _model_bound(part: Part, lengths: Lengths) -> int:
    """Return the bound of a part of an input by the lengths of the model."""
    if isinstance(part, Audio) and lengths.media_tokens is not None:
        return lengths.media_tokens
    return least(_bound(part), lengths.most if isinstance(part, str) else lengths.media_tokens)
