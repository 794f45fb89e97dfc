"""Fields that clients of Jina, NVIDIA NIM and Voyage add to OpenAI's embeddings request. Pure.

Source: Jina's OpenAPI document 2026.04.02, NVIDIA's reference of the embedding NIM 2.2, Voyage's API
reference and voyageai 0.5.0.
Rule: a field is applied, or refused by name. Only `user` changes nothing and is ignored.
"""

from typing import Annotated, Literal

import msgspec

from backends.contract import Truncate
from gateway.api.server.body import INTEGER_MAX
from gateway.api.server.encoding import (
    BYTES,
    EmbeddingType,
    EmbedDtype,
    Encoding,
    Endianness,
    NumberFormat,
    PackedFormat,
    QuantizedType,
    VectorFormat,
    packed_type,
)
from gateway.api.wire.inputs import SIDE_OF, Dimensions, TruncateSide
from gateway.api.wire.vllm import VllmOptions
from gateway.errors import InvalidInput
from gateway.prompts import Role

# Jina's names, as its models have them.
Task = Literal[
    "retrieval.query",
    "retrieval.passage",
    "code.query",
    "code.passage",
    "text-matching",
    "classification",
    "clustering",
    "separation",
]
ROLE_OF_TASK: dict[str, Role] = {
    "retrieval.query": "query",
    "retrieval.passage": "document",
    "code.query": "query",
    "code.passage": "document",
    "text-matching": "similarity",
    "classification": "classification",
    "clustering": "clustering",
    "separation": "separation",
}
# Of jina-code-embeddings, whose prompts are one for each task and role.
CodeTask = Literal[
    "nl2code.query",
    "nl2code.passage",
    "qa.query",
    "qa.passage",
    "code2code.query",
    "code2code.passage",
    "code2nl.query",
    "code2nl.passage",
    "code2completion.query",
    "code2completion.passage",
]
InputType = Literal["query", "document", "passage"]
ROLE_OF_TYPE: dict[InputType, Role] = {"query": "query", "document": "document", "passage": "document"}
Modality = Literal["text", "image", "text_image"]
# Each of them is computed; there are six.
EmbeddingTypes = Annotated[list[EmbeddingType], msgspec.Meta(min_length=1, max_length=16)]
# Why each of these is refused if it is on.
REFUSED = {
    "return_tokenized_input": "`/tokenize` returns the tokens of a text",
}


class LateChunkingParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Size of the chunks that are made of each input, in tokens with special ones."""

    chunk_size: Annotated[int, msgspec.Meta(ge=1, le=INTEGER_MAX)]


class EmbeddingOptions(VllmOptions, kw_only=True):
    """Options of an embeddings request, without its inputs and model.

    Jina's: task, normalized, late_chunking, return_multivector (one vector for each token),
    return_tokenized_input. Jina's and NIM's: embedding_type, which overrides encoding_format, and truncate.
    encoding_type: the first name of embedding_type, which LlamaIndex sends.
    NIM's: modality. Voyage's: output_dimension, output_dtype, truncation. input_type: `passage` is NIM's
    document. vLLM's: embed_dtype and endianness of packed vectors, late_chunking_params. Perplexity's:
    encoding_format as base64_int8 or base64_binary.
    """

    encoding_format: VectorFormat | PackedFormat | None = None
    dimensions: Dimensions | None = None
    task: Task | CodeTask | None = None
    input_type: InputType | None = None
    normalized: bool | None = None
    truncate: bool | TruncateSide | None = None
    embedding_type: EmbeddingType | EmbeddingTypes | None = None
    encoding_type: EmbeddingType | EmbeddingTypes | None = None
    late_chunking: bool | None = None
    return_multivector: bool | None = None
    return_tokenized_input: bool | None = None
    modality: Modality | list[Modality] | None = None
    output_dimension: Dimensions | None = None
    output_dtype: Literal["float"] | QuantizedType | None = None
    truncation: bool | None = None
    embed_dtype: EmbedDtype | None = None
    endianness: Endianness | None = None
    late_chunking_params: LateChunkingParams | None = None

    @property
    def makes_chunks(self) -> bool:
        """Return whether the inputs are chunks, or are cut into chunks, that are read in their document."""
        return bool(self.late_chunking) or self.late_chunking_params is not None

    def check_all(self) -> None:
        """Check that no option asks for a computation that the gateway does not do. Raises: InvalidInput."""
        self.check_of_texts()
        for field, way_out in REFUSED.items():
            if getattr(self, field):
                raise InvalidInput(f"`{field}` is not supported: {way_out}", param=field)
        modalities = [self.modality] if isinstance(self.modality, str) else self.modality or []
        if any(modality != "text" for modality in modalities):
            raise InvalidInput("`modality` is text; images are not supported", param="modality")

    def role(self) -> Role | None:
        """Return the role of the inputs, or None. `task` takes precedence over `input_type`."""
        if self.task is not None:
            return ROLE_OF_TASK.get(self.task)
        return None if self.input_type is None else ROLE_OF_TYPE[self.input_type]

    def prompt_name(self) -> str | None:
        """Return the name of the prompt that a task of code names; others follow from the role."""
        task = self.task
        if task is None or task in ROLE_OF_TASK:
            return None
        # As the checkpoint's config_sentence_transformers.json names them.
        return task.replace(".query", "_query").replace(".passage", "_document")

    def width(self) -> int | None:
        """Return the requested width of the vectors, or None for the model's own. Raises: InvalidInput."""
        self._check_one_of("dimensions", "output_dimension")
        return self.dimensions or self.output_dimension

    def cut_and_side(self) -> tuple[bool | None, Truncate | None]:
        """Return whether inputs that are too long are cut, and at which end; None follows the model's config.

        Raises: InvalidInput.
        """
        self._check_one_of("truncate", "truncation")
        setting = self.truncation if self.truncate is None else self.truncate
        own_side = self.side
        side = SIDE_OF.get(setting) if isinstance(setting, str) else None
        if side is not None and own_side not in (None, side):
            raise InvalidInput("send `truncate` or `truncation_side`, one of them", param="truncation_side")
        cut = setting != "NONE" if isinstance(setting, str) else setting
        if self.truncate_prompt_tokens is None:
            return cut, own_side or side
        if cut is False:
            raise InvalidInput(
                "`truncate_prompt_tokens` cuts, which `truncate` or `truncation` forbids: send one of them",
                param="truncate_prompt_tokens",
            )
        return self.cuts, own_side or side

    def encoding(self) -> Encoding:
        """Return the format of the vectors in the reply. Raises: InvalidInput."""
        packed = self.encoding_format == "base64"
        kinds = self._types()
        quantized = packed_type(self.encoding_format)
        if quantized is not None:
            return self._quantized(quantized)
        if kinds is None and self.output_dtype in {None, "float"}:
            return Encoding(("base64" if packed else "float",), numbers=self.numbers())
        self._check_plain_numbers()
        if kinds is None:
            assert self.output_dtype is not None
            return Encoding((self.output_dtype,), packed)
        if self.output_dtype is not None:
            raise InvalidInput("send `embedding_type` or `output_dtype`, one of them", param="output_dtype")
        return Encoding((kinds,) if isinstance(kinds, str) else tuple(dict.fromkeys(kinds)))

    def _quantized(self, kind: QuantizedType) -> Encoding:
        """Return Perplexity's format of the vectors. Raises: InvalidInput."""
        for field in ("output_dtype", "embedding_type", "encoding_type", "embed_dtype", "endianness"):
            if getattr(self, field) is not None:
                raise InvalidInput(
                    f"send `{field}`, or `{self.encoding_format}` as `encoding_format`, not both", param=field
                )
        return Encoding((kind,), packed=True)

    def _types(self) -> EmbeddingType | list[EmbeddingType] | None:
        """Return Jina's types of the vectors. Raises: InvalidInput."""
        self._check_one_of("embedding_type", "encoding_type")
        return self.encoding_type if self.embedding_type is None else self.embedding_type

    def normalizes(self) -> bool:
        """Return whether vectors are to have length 1. Raises: InvalidInput if fields differ."""
        own = self.normalized
        if own is not None and own is self.is_raw() and self._has_activation():
            raise InvalidInput("send `normalized` or `use_activation`, one of them", param="normalized")
        return own is not False and not self.is_raw()

    def _has_activation(self) -> bool:
        return any(value is not None for value in (self.use_activation, self.softmax, self.activation))

    def numbers(self) -> NumberFormat:
        """Return the format of packed vectors."""
        return NumberFormat(self.embed_dtype or "float32", self.endianness or "native")

    def _check_plain_numbers(self) -> None:
        """Check that vLLM's fields of packed vectors do not meet those of a type. Raises: InvalidInput."""
        type_field = "output_dtype" if self._types() is None else "embedding_type"
        if self.encoding_format in BYTES:
            raise InvalidInput(f"send `{type_field}` with `float` or `base64`", param="encoding_format")
        if self.numbers() not in {NumberFormat(), NumberFormat(endianness="little")}:
            raise InvalidInput(
                f"send `{type_field}`, or `embed_dtype` and `endianness`, not both", param="embed_dtype"
            )

    def _check_one_of(self, name: str, other: str) -> None:
        """Check that two fields of one meaning do not contradict each other. Raises: InvalidInput."""
        first, second = getattr(self, name), getattr(self, other)
        if first is not None and second is not None and first != second:
            raise InvalidInput(f"send `{name}` or `{other}`, one of them", param=other)
