"""Request bodies decoded once, straight into their typed struct; the OpenAPI schema is that struct's."""

from collections.abc import Generator
from typing import Annotated, Any, Generic, TypeVar

import msgspec
from litestar.dto.base_dto import AbstractDTO
from litestar.dto.data_structures import DTOFieldDefinition
from litestar.openapi.spec import Reference, Schema
from litestar.typing import FieldDefinition

from gateway.api.server.allowed_values import note_choices

T = TypeVar("T")
# Longer than any name that a config holds, short enough to be repeated in an error.
ModelName = Annotated[str, msgspec.Meta(max_length=512)]


class OnePass(AbstractDTO[T], Generic[T]):
    """Litestar would parse to dicts first and convert after; this decodes in one pass.

    Raises (from decode_bytes): msgspec.DecodeError, UnicodeDecodeError, RecursionError.
    """

    def decode_bytes(self, value: bytes) -> Any:
        """The struct that the handler's `data` is annotated with."""
        try:
            return msgspec.json.decode(value, type=self.model_type)
        except msgspec.ValidationError as error:
            note_choices(error, self.model_type)
            raise

    @classmethod
    def create_for_field_definition(
        cls, field_definition: FieldDefinition, handler_id: str, backend_cls: Any = None
    ) -> None:
        """There is no transfer model: the struct is the wire."""

    @classmethod
    def create_openapi_schema(
        cls, field_definition: FieldDefinition, handler_id: str, schema_creator: Any
    ) -> Reference | Schema:
        """The struct's own schema."""
        del handler_id
        schema: Reference | Schema = schema_creator.for_field_definition(field_definition)
        return schema

    @classmethod
    def generate_field_definitions(cls, model_type: type[Any]) -> Generator[DTOFieldDefinition, None, None]:
        """Nothing is generated."""
        del model_type
        yield from ()

    @classmethod
    def detect_nested_field(cls, field_definition: FieldDefinition) -> bool:
        """Nothing is nested."""
        del field_definition
        return False


class AsWritten(OnePass[T], Generic[T]):
    """Documented as its struct and decoded to plain values, of which the handler tells all that is wrong."""

    def decode_bytes(self, value: bytes) -> Any:
        """Dicts, lists and scalars."""
        return msgspec.json.decode(value)

    @classmethod
    def create_openapi_schema(
        cls, field_definition: FieldDefinition, handler_id: str, schema_creator: Any
    ) -> Reference | Schema:
        """The struct's, whatever the handler's `data` is annotated with."""
        del field_definition, handler_id
        schema: Reference | Schema = schema_creator.for_field_definition(
            FieldDefinition.from_annotation(cls.model_type)
        )
        return schema
