"""Preparation of inputs with pictures or sound: features from reading processes, next to texts.

Knows nothing of torch, queues or replies.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Protocol

from backends.contract import Audio, Embed, EmbedParts, Encode, Image, Output, Part, Truncate, Work
from backends.contract.errors import BackendError, InvalidWork, ReplicaFailed, UnsupportedWork
from backends.http.media import check_no_template
from backends.torch.inputs.sequences import PreparedSequences, ReadPart
from backends.torch.media.reading import READING
from backends.torch.media.reading_wire import ReadsMedium

# Larger pictures take more than half a second, and 16 bytes for each pixel.
LARGE_PIXELS = 16_000_000
WAYS_OUT = {
    Output.DENSE: "leave out what asks for others",
    Output.MULTIVECTOR: "ask for multi-vectors",
}
NAMES: dict[type, str] = {str: "text", Image: "picture", Audio: "recording"}


class PreparesTexts(Protocol):
    """Preparation of texts for the same network."""

    def check_dimensions(self, dimensions: int | None) -> None:
        """Raise InvalidWork if a vector has not so many components."""

    def prepare(self, work: Work) -> PreparedSequences:
        """Tokenize a piece of work. Raises: InvalidWork, UnsupportedWork."""


class MediaPreparer:
    """Preparation for a network that reads one text, picture or recording per input.

    output: the one that it gives.
    """

    def __init__(self, reader: ReadsMedium, texts: PreparesTexts, output: Output) -> None:
        self._output = output
        self._reader = reader
        self._texts = texts

    async def prepare(self, work: EmbedParts) -> PreparedSequences:
        """Compute the features of all inputs; texts are tokenized. Raises: InvalidWork, UnsupportedWork."""
        self._check_output(work)
        check_no_template(work)
        parts = [self._only_part(parts, index) for index, parts in enumerate(work.inputs)]
        texts = [i for i, part in enumerate(parts) if isinstance(part, str)]
        media = [i for i, part in enumerate(parts) if not isinstance(part, str)]
        owner = object()
        tokenizing = asyncio.wrap_future(READING.submit(owner, self._tokenize, work, parts, texts))
        submitted = [
            asyncio.wrap_future(
                READING.submit(owner, self._read, parts[i], i, work.truncate, is_large=_is_large(parts[i]))
            )
            for i in media
        ]
        try:
            prepared, found = await asyncio.gather(tokenizing, asyncio.gather(*submitted))
        finally:
            # After the first error nothing waits for the rest, which would take others' turns.
            tokenizing.cancel()
            for reading in submitted:
                reading.cancel()
        return _joined(prepared, texts, dict(zip(media, found, strict=True)))

    def _check_output(self, work: EmbedParts) -> None:
        """Raise InvalidWork or UnsupportedWork for an output that the model does not give."""
        if work.output is not self._output:
            raise UnsupportedWork(
                f"this model gives no {work.output.value} output; it gives: {self._output.value}; "
                f"{WAYS_OUT[self._output]}"
            )
        if self._output is Output.DENSE:
            self._texts.check_dimensions(work.dimensions)
        elif work.dimensions is not None:
            raise UnsupportedWork("`dimensions` does not apply to multivector output; leave it out")

    def _only_part(self, parts: Sequence[Part], index: int) -> Part:
        """Return the only part of an input. Raises: InvalidWork, UnsupportedWork."""
        own = NAMES[self._reader.medium]
        if len(parts) != 1:
            raise InvalidWork(
                f"this model reads one text or one {own} at a time, and input {index} has {len(parts)} "
                "parts; send each as an input of its own",
                input_index=index,
            )
        part = parts[0]
        if not isinstance(part, (str, self._reader.medium)):
            raise UnsupportedWork(
                f"this model reads texts and {own}s, and input {index} is a {NAMES[type(part)]}"
            )
        return part

    def _tokenize(self, work: EmbedParts, parts: Sequence[Part], places: Sequence[int]) -> PreparedSequences:
        """Prepare the texts. Raises: InvalidWork with the index of the input among all."""
        texts = tuple(str(parts[i]) for i in places)
        outputs = frozenset({self._output})
        if not texts:
            return PreparedSequences([], outputs, (), ())
        prompt, truncate, most = work.prompt_name, work.truncate, work.max_tokens
        embed: Embed | Encode = Embed(texts, prompt_name=prompt, truncate=truncate, max_tokens=most)
        if self._output is not Output.DENSE:
            embed = Encode(texts, outputs, prompt_name=prompt, truncate=truncate, max_tokens=most)
        try:
            return self._texts.prepare(embed)
        except InvalidWork as error:
            if error.input_index is not None:
                error.input_index = places[error.input_index]
            raise

    def _read(self, part: Part, index: int, truncate: Truncate) -> ReadPart:
        """Read a picture or recording. Raises: InvalidWork with its index."""
        assert not isinstance(part, str)
        try:
            return self._reader.read(part, truncate)
        except BackendError as error:
            error.input_index = index
            raise
        except MemoryError as error:
            raise ReplicaFailed(f"there is not enough memory to read input {index}") from error
        except Exception as error:
            # Processors of foreign bytes raise what they come across.
            raise InvalidWork(f"it could not be read: {error}", input_index=index) from error


def _is_large(part: Part) -> bool:
    return isinstance(part, Image) and part.width * part.height > LARGE_PIXELS


def _joined(
    texts: PreparedSequences, places: Sequence[int], media: Mapping[int, ReadPart]
) -> PreparedSequences:
    """Return texts and media in the order of the inputs. places: of the texts."""
    sequences = {place: part.sequence for place, part in media.items()}
    sequences |= dict(zip(places, texts.sequences, strict=True))
    lengths = {place: part.sequence.tokens for place, part in media.items()}
    lengths |= dict(zip(places, texts.lengths, strict=True))
    cut = [place for place, part in media.items() if part.is_cut]
    return PreparedSequences(
        [sequences[i] for i in range(len(sequences))],
        texts.outputs,
        tuple(sorted([*cut, *(places[i] for i in texts.truncated)])),
        tuple(lengths[i] for i in range(len(lengths))),
    )
