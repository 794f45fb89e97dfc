"""Features of pictures, pages and recordings, as a checkpoint's processor of transformers computes them."""

import math
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import (
    AutoFeatureExtractor,
    AutoImageProcessor,
    AutoTokenizer,
    ClapFeatureExtractor,
    ColPaliProcessor,
    ColQwen2Processor,
)

from backends.contract import Audio, Image, PatchGrid, Truncate
from backends.contract.errors import InvalidWork, ModelUnavailable
from backends.recipe.files import CheckpointFiles
from backends.recipe.media_encoders import PROCESSOR_FILE
from backends.torch.inputs.sequences import Features, InputSequence, ReadPart
from backends.torch.media.images import blank_image, open_image, require_pillow
from backends.torch.media.reading_wire import ReaderKind, ReadsMedium
from backends.torch.media.sounds import open_recording, require_soundfile
from backends.torch.refusals import refuse_on_error
from backends.torch.stock.architectures import read_config

# Pixels of a picture after its shorter side was brought to the network's size: 400 MB as RGB.
RESIZED_PIXELS_MAX = 2**27
BLANK_SIDE = 32


class ImageReader:
    """Conversion of pictures to the features of one network.

    processor: of transformers, with Pillow. count_tokens: returns the tokens that the network makes of a
    batch's features.
    """

    medium = Image

    def __init__(self, processor: Any, count_tokens: Callable[[Any], int]) -> None:
        self._processor = processor
        self._count_tokens = count_tokens

    @cached_property
    def tokens_max(self) -> int:
        """Tokens of any picture: all are brought to one size."""
        return self.probe().tokens

    def read(self, part: Image | Audio, truncate: Truncate) -> ReadPart:
        """Return the features of a picture, which is never cut. Raises: InvalidWork."""
        del truncate
        image = open_image(part.data)
        _check_resized(self._processor, *image.size)
        return ReadPart(self._sequence(image))

    def probe(self) -> InputSequence:
        """Return the features of a blank picture."""
        return self._sequence(blank_image(BLANK_SIDE))

    def _sequence(self, image: Any) -> InputSequence:
        found = self._processor(images=[image], return_tensors="np")
        arrays = {name: np.ascontiguousarray(array) for name, array in found.items()}
        return InputSequence([], [], features=Features(arrays, self._count_tokens(arrays["pixel_values"])))


class SoundReader:
    """Conversion of recordings to the features of one network. tokens: that it makes of each."""

    medium = Audio

    def __init__(self, processor: ClapFeatureExtractor, tokens: int) -> None:
        self._processor = processor
        self.tokens_max = tokens

    def read(self, part: Image | Audio, truncate: Truncate) -> ReadPart:
        """Return the features of a recording, cut to the network's seconds. Raises: InvalidWork.

        transformers takes a random part of a longer one, whose vector differs between two requests.
        """
        rate, seconds = self._processor.sampling_rate, self._processor.max_length_s
        samples, is_cut = open_recording(part.data, rate, seconds, truncate)
        return ReadPart(self._sequence(samples), is_cut)

    def probe(self) -> InputSequence:
        """Return the features of silence."""
        return self._sequence(np.zeros(self._processor.sampling_rate, dtype=np.float32))

    def _sequence(self, samples: Any) -> InputSequence:
        rate = self._processor.sampling_rate
        found = self._processor(samples, sampling_rate=rate, return_tensors="np")
        arrays = {
            "input_features": found["input_features"].astype(np.float32),
            "is_longer": found["is_longer"],
        }
        return InputSequence([], [], features=Features(arrays, self.tokens_max))


def open_sound_reader(checkpoint: Path, config: Any) -> SoundReader:
    """Return the reader of a checkpoint. config: of its network. Raises: ModelUnavailable."""
    require_soundfile()
    audio = config.audio_config
    with refuse_on_error(f"the feature extractor of {checkpoint} could not be read"):
        processor = AutoFeatureExtractor.from_pretrained(
            checkpoint, local_files_only=True, trust_remote_code=False
        )
    if not isinstance(processor, ClapFeatureExtractor):
        raise ModelUnavailable(
            f"{checkpoint} has a {type(processor).__name__}, which the built-in engine does not have for CLAP"
        )
    # Each stage after the first merges four patches.
    side = audio.spec_size // audio.patch_size >> len(audio.depths) - 1
    return SoundReader(processor, max(1, side * side))


def open_image_reader(checkpoint: Path, config: Any) -> ImageReader:
    """Return the reader of a checkpoint. config: of its network. Raises: ModelUnavailable."""
    require_pillow()
    vision = config.vision_config
    with refuse_on_error(f"the image processor of {checkpoint} could not be read"):
        processor = AutoImageProcessor.from_pretrained(
            checkpoint, backend="pil", local_files_only=True, trust_remote_code=False
        )
    # One token stands for the whole picture in the networks that have a class embedding.
    whole = int(config.model_type == "clip")
    return ImageReader(processor, lambda pixels: _patches(pixels, int(vision.patch_size)) + whole)


def _patches(pixels: Any, side: int) -> int:
    """Return the patches of one picture. pixels: (1, 3, height, width), or (1, patches, patch) if cut."""
    if pixels.ndim == 3:
        return int(pixels.shape[1])
    return max(1, (pixels.shape[-2] // side) * (pixels.shape[-1] // side))


def _check_resized(processor: Any, width: int, height: int) -> None:
    """Raise InvalidWork for a picture so narrow that it would take gigabytes to be resized."""
    size = getattr(processor, "size", None)
    shortest = getattr(size, "shortest_edge", None) if getattr(processor, "do_resize", False) else None
    if shortest and shortest * shortest * max(width, height) / min(width, height) > RESIZED_PIXELS_MAX:
        raise InvalidWork(
            f"the picture of {width} x {height} pixels is too narrow for a model of {shortest} pixels; "
            "cut it into parts"
        )


PROCESSORS: dict[str, Any] = {"colpali": ColPaliProcessor, "colqwen2": ColQwen2Processor}
PREFIXES = ("visual_prompt_prefix", "query_prefix")
# Of training only.
LABELS = "labels"
BLANK_PAGE_SIDE = 64


class PageReader:
    """Conversion of pages to token ids and pixels, by the processor of transformers with Pillow."""

    medium = Image

    def __init__(self, processor: Any) -> None:
        self._processor = processor

    @cached_property
    def tokens_max(self) -> int:
        """Most tokens of a page: all have one size, or so many pixels at most."""
        blank, processor = self.probe(), self._processor.image_processor
        assert blank.features is not None
        grid, pixels = blank.features.grid, processor.size.longest_edge
        if grid is None or not pixels:
            return blank.tokens
        patches = pixels // (processor.patch_size * processor.merge_size) ** 2
        return blank.tokens - grid.rows * grid.columns + patches

    def read(self, part: Image | Audio, truncate: Truncate) -> ReadPart:
        """Return the features of a page, which is never cut. Raises: InvalidWork."""
        del truncate
        return ReadPart(self._sequence(open_image(part.data)))

    def probe(self) -> InputSequence:
        """Return the features of a blank page."""
        return self._sequence(blank_image(BLANK_PAGE_SIDE))

    def _sequence(self, image: Any) -> InputSequence:
        found = self._processor.process_images(images=[image])
        arrays = {name: np.asarray(tensor) for name, tensor in found.items() if name != LABELS}
        ids = arrays["input_ids"][0]
        places = np.flatnonzero(ids == self._processor.image_token_id)
        grid = patch_grid(places, self._sides(arrays))
        return InputSequence([], [], features=Features(arrays, len(ids), grid))

    def _sides(self, arrays: Mapping[str, NDArray[Any]]) -> tuple[int, int] | None:
        """Return rows and columns of a page's patches if the processor reports them."""
        stated = arrays.get("image_grid_thw")
        if stated is None:
            return None
        side = self._processor.image_processor.merge_size
        return int(stated[0, 1]) // side, int(stated[0, 2]) // side


def open_page_reader(checkpoint: Path, config: Any) -> PageReader:
    """Return the reader of a checkpoint. config: of its network. Raises: ModelUnavailable."""
    require_pillow()
    options = {"local_files_only": True, "trust_remote_code": False}
    stated = CheckpointFiles(checkpoint).read_json(PROCESSOR_FILE)
    prefixes = {name: stated[name] for name in PREFIXES if stated.get(name)}
    with refuse_on_error(f"the processor of {checkpoint} could not be read"):
        pictures = AutoImageProcessor.from_pretrained(checkpoint, backend="pil", **options)
        texts = AutoTokenizer.from_pretrained(checkpoint, **options)
        return PageReader(PROCESSORS[config.model_type](pictures, texts, **prefixes))


def patch_grid(places: NDArray[np.intp], sides: tuple[int, int] | None) -> PatchGrid | None:
    """Return the grid of a page's patches, None if their vectors do not form one.

    places: indices of their tokens. sides: rows and columns; None means as many of both.
    """
    rows, columns = sides or (math.isqrt(len(places)),) * 2
    if not len(places) or rows * columns != len(places) or places[-1] - places[0] + 1 != len(places):
        return None
    return PatchGrid(int(places[0]), rows, columns)


OPENERS: dict[ReaderKind, Callable[[Path, Any], ReadsMedium]] = {
    "image": open_image_reader,
    "audio": open_sound_reader,
    "page": open_page_reader,
}


def open_reader(kind: ReaderKind, checkpoint: Path) -> ReadsMedium:
    """Return the reader of a checkpoint. Raises: ModelUnavailable."""
    with refuse_on_error(f"{checkpoint} could not be loaded"):
        config = read_config(checkpoint)
    return OPENERS[kind](checkpoint, config)
