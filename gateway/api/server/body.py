"""Decoding of request bodies for handlers that Litestar calls, and types that bodies share.

A body is decoded once, straight into its struct, whose schema is also the documented one.
"""

from collections.abc import Generator
from typing import Annotated, Any, Generic, TypeVar

import msgspec
from litestar.dto.base_dto import AbstractDTO
from litestar.dto.data_structures import DTOFieldDefinition
from litestar.openapi.spec import Reference, Schema
from litestar.typing import FieldDefinition

from gateway.api.server.allowed_values import note_choices
from gateway.api.server.body_texts import without_mark

T = TypeVar("T")
# Longer than any name in a configuration, and short enough to be repeated in an error.
ModelName = Annotated[str, msgspec.Meta(max_length=512)]
# Every integer of a body has an upper bound. Without one msgspec parses numbers of thousands of digits, in
# quadratic time; with one it refuses them at once. Up to this one JSON is exact in every language.
INTEGER_MAX = 2**53 - 1
Integer = Annotated[int, msgspec.Meta(ge=-INTEGER_MAX, le=INTEGER_MAX)]


class OnePass(AbstractDTO[T], Generic[T]):
    """DTO that decodes a body in one pass, where Litestar's own parses to dicts and converts them after."""

    def decode_bytes(self, value: bytes) -> Any:
        """Decode a body into the struct that the handler's `data` is annotated with.

        Raises: msgspec.DecodeError, UnicodeDecodeError, RecursionError.
        """
        try:
            return msgspec.json.decode(without_mark(value), type=self.model_type)
        except msgspec.ValidationError as error:
            note_choices(error, self.model_type)
            raise

    @classmethod
    def create_for_field_definition(
        cls, field_definition: FieldDefinition, handler_id: str, backend_cls: Any = None
    ) -> None:
        """Create nothing: there is no transfer model, because the struct is the wire format."""

    @classmethod
    def create_openapi_schema(
        cls, field_definition: FieldDefinition, handler_id: str, schema_creator: Any
    ) -> Reference | Schema:
        """Return the schema of the struct."""
        del handler_id
        schema: Reference | Schema = schema_creator.for_field_definition(field_definition)
        return schema

    @classmethod
    def generate_field_definitions(cls, model_type: type[Any]) -> Generator[DTOFieldDefinition, None, None]:
        """Generate nothing: fields are not transferred one by one."""
        del model_type
        yield from ()

    @classmethod
    def detect_nested_field(cls, field_definition: FieldDefinition) -> bool:
        """Return False: nested fields need no transfer model."""
        del field_definition
        return False


class AsWritten(OnePass[T], Generic[T]):
    """DTO that documents a struct but decodes to plain values, so that the handler reports every problem."""

    def decode_bytes(self, value: bytes) -> Any:
        """Decode a body to dicts, lists and scalars."""
        return msgspec.json.decode(without_mark(value))

    @classmethod
    def create_openapi_schema(
        cls, field_definition: FieldDefinition, handler_id: str, schema_creator: Any
    ) -> Reference | Schema:
        """Return the schema of the struct, not of the annotation of the handler's `data`."""
        del field_definition, handler_id
        schema: Reference | Schema = schema_creator.for_field_definition(
            FieldDefinition.from_annotation(cls.model_type)
        )
        return schema
