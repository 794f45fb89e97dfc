"""Pages of documents as pictures: their features, and the network that gives a vector per patch and token."""

import math
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import AutoImageProcessor, AutoTokenizer, ColPaliProcessor, ColQwen2Processor

from backends.contract import Audio, Image, PatchGrid, Truncate
from backends.recipe.files import CheckpointFiles
from backends.recipe.page_encoders import PROCESSOR_FILE
from backends.torch.inputs.sequences import Features, InputSequence, ReadPart
from backends.torch.media.images import blank_image, open_image, require_pillow
from backends.torch.refusals import refuse_on_error

PROCESSORS: dict[str, Any] = {"colpali": ColPaliProcessor, "colqwen2": ColQwen2Processor}
PREFIXES = ("visual_prompt_prefix", "query_prefix")
# Of training only.
LABELS = "labels"
BLANK_SIDE = 64


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
        return self._sequence(blank_image(BLANK_SIDE))

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
