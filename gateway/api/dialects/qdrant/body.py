"""Bodies of Qdrant's inference protocol: requests and replies."""

from typing import Literal

import msgspec

from backends.contract import Output, Truncate
from gateway.api.server.body import ModelName
from gateway.api.wire.conversations import ContentPart
from gateway.api.wire.inputs import Dimensions


class QdrantOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of an input, which a user of Qdrant writes next to it. Any other one is refused by name.

    output_type: kind of the vector, for a model that computes several; by default the dense one. prompt_name:
    of the model's prompts, in place of that of the role. instruction: the task in words, for queries.
    """

    output_type: Literal["dense", "sparse", "multivector"] | None = None
    dimensions: Dimensions | None = None
    normalize: bool | None = None
    truncate: bool | None = None
    truncation_direction: Literal["left", "right"] | None = None
    prompt_name: str | None = None
    instruction: str | None = None

    @property
    def output(self) -> Output | None:
        """Kind of the vector, None if the model decides."""
        return None if self.output_type is None else Output(self.output_type)

    @property
    def side(self) -> Truncate | None:
        """End at which an input is cut, None for the model's default."""
        return None if self.truncation_direction is None else Truncate(self.truncation_direction)


class QdrantObject(msgspec.Struct, forbid_unknown_fields=True):
    """Data of the type `object`: one input of a text, a picture and a recording, or its parts in order."""

    text: str | None = None
    image: str | None = None
    audio: str | None = None
    content: list[ContentPart] | None = None


class QdrantInput(msgspec.Struct):
    """One input. data: a text; a picture as base64, `data:` URI or address; or an object."""

    data: str | QdrantObject
    model: ModelName
    data_type: Literal["text", "image", "object"] = "text"
    options: QdrantOptions | None = None


class QdrantRequest(msgspec.Struct):
    """Body of /qdrant.

    inference: `update` for points to store, `search` for queries. token: the key, unless `authorization` has
    one.
    """

    inputs: list[QdrantInput]
    inference: Literal["update", "search"] | None = None
    token: str | None = None


class SparseVector(msgspec.Struct):
    """Weights of some terms of the vocabulary."""

    indices: list[int]
    values: list[float]


class ModelUsage(msgspec.Struct):
    """Tokens after truncation, with special tokens and the prompt."""

    tokens: int


class QdrantUsage(msgspec.Struct):
    """Usage of each model, by the name in the request."""

    models: dict[str, ModelUsage]


class QdrantResponse(msgspec.Struct):
    """One vector for each input, in the order of the inputs: dense, sparse, or one for each token."""

    embeddings: list[list[float | list[float]] | SparseVector]
    usage: QdrantUsage
