"""Features of pictures and recordings, as a checkpoint's processor computes them with transformers' code."""

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoFeatureExtractor, AutoImageProcessor, ClapFeatureExtractor

from backends.contract import Audio, Image, Truncate
from backends.contract.errors import InvalidWork, ModelUnavailable
from backends.torch.inputs.sequences import Features, InputSequence, ReadPart
from backends.torch.media.images import blank_image, open_image, require_pillow
from backends.torch.media.sounds import open_recording, require_soundfile
from backends.torch.refusals import refuse_on_error

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
