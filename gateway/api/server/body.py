"""Decoding of request bodies, and what errors about them name.

A body is decoded once, straight into its struct, whose schema is also the documented one. msgspec names
neither the place of a text that is no Unicode nor the allowed values of a field: both are found after it has
failed.
"""

import re
from collections.abc import Generator, Iterable, Iterator
from typing import Annotated, Any, Generic, TypeVar

import msgspec
from litestar.dto.base_dto import AbstractDTO
from litestar.dto.data_structures import DTOFieldDefinition
from litestar.openapi.spec import Reference, Schema
from litestar.typing import FieldDefinition
from msgspec import inspect

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


Body = bytes | bytearray
MARK = b"\xef\xbb\xbf"
# Larger bodies are not searched: it takes several times the decoding.
SEARCHED_BYTES_MAX = 128 * 1024
# Half of a pair of escapes: a first one without the second, or a second one without the first. Before it is
# an even number of backslashes.
HALF = re.compile(
    rb"(?<!\\)((?:\\\\)*)(?:"
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F][0-9a-fA-F]{2})"
    rb"|(?<!\\u[dD][89abAB][0-9a-fA-F]{2})\\u[dD][c-fC-F][0-9a-fA-F]{2})"
)
UNDECODED = re.compile("[\udc80-\udcff]+")
# Characters without a meaning, of which one that the body lacks stands for what is wrong.
FIRST_PRIVATE, LAST_PRIVATE = 0xE000, 0xE0FF


def without_mark(body: Body) -> Body:
    """Return a body without a byte order mark, which a reader of JSON may ignore (RFC 8259 §8.1)."""
    # `removeprefix` would copy every body.
    if body.startswith(MARK):
        return body[len(MARK) :]
    return body


def place_of_broken_text(body: Body) -> str | None:
    """Return the place of the first text that is no Unicode, such as `input[1]`; None if there is none."""
    if len(body) > SEARCHED_BYTES_MAX:
        return None
    marker = next(
        (
            character
            for character in map(chr, range(FIRST_PRIVATE, LAST_PRIVATE))
            if character.encode() not in body
        ),
        None,
    )
    if marker is None:
        return None
    repaired = HALF.sub(rb"\1" + marker.encode(), bytes(body)).decode("utf-8", "surrogateescape")
    try:
        value = msgspec.json.decode(UNDECODED.sub(marker, repaired))
    except (msgspec.DecodeError, RecursionError):
        return None
    return _place_of(value, marker) if isinstance(value, list | dict) else None


def _place_of(value: Any, marker: str) -> str | None:
    """Return the path of a text with a character. No recursion: a body may be nested deeply."""
    # Containers with the keys that lead to them, as linked pairs: most of them need no path.
    waiting: list[tuple[Any, Any]] = [(value, None)]
    while waiting:
        container, keys = waiting.pop()
        items = container.items() if isinstance(container, dict) else enumerate(container)
        for key, item in items:
            if isinstance(item, str):
                if marker in item:
                    return _path_of((key, keys))
            elif item and isinstance(item, list | dict):
                waiting.append((item, (key, keys)))
            if isinstance(key, str) and marker in key:
                return _path_of(keys)
    return None


def _path_of(keys: Any) -> str:
    """Return linked keys as a path, such as `input[1].text`."""
    path = ""
    while keys is not None:
        key, keys = keys
        path = (f"[{key}]" if isinstance(key, int) else f".{key}") + path
    return path.removeprefix(".")


# One step of the path in a msgspec error: a field, or an item of a list or a mapping.
STEP = re.compile(r"\.(?P<field>[^.\[\]]+)|\[[^\]]*\]")


def note_choices(error: msgspec.ValidationError, body: Any) -> None:
    """Add the allowed values or fields to an error about a different one. body: the type that was decoded."""
    reason, _, place = str(error).partition(" - at `$")
    if reason.startswith("Invalid enum value"):
        error.add_note(", ".join(_allowed(body, place.rstrip("`"))))
    elif reason.startswith("Object contains unknown field"):
        error.add_note(", ".join(_fields(body, place.rstrip("`"))))


def choices_of(error: msgspec.ValidationError) -> str:
    """Return the allowed values that `note_choices` has added, or nothing."""
    return next(iter(getattr(error, "__notes__", ())), "")


def _allowed(body: Any, place: str) -> list[str]:
    kinds = _kinds_at(body, place)
    values = (value for kind in kinds if isinstance(kind, inspect.LiteralType) for value in kind.values)
    return [str(value) for value in dict.fromkeys(values)]


def _fields(body: Any, place: str) -> list[str]:
    structs = [kind for kind in _kinds_at(body, place) if isinstance(kind, inspect.StructType)]
    return list(dict.fromkeys(field.encode_name for kind in structs for field in kind.fields))


def _kinds_at(body: Any, place: str) -> list[inspect.Type]:
    """Return the types that a value at a place of the body may have."""
    kinds = list(_members(inspect.type_info(body)))
    for step in STEP.finditer(place):
        kinds = [inner for kind in kinds for inner in _types_at(kind, step["field"])]
    return kinds


def _types_at(kind: inspect.Type, field: str | None) -> Iterator[inspect.Type]:
    """Yield the types one step inside a type. field: None for an item."""
    match kind:
        case inspect.StructType(fields=fields) if field is not None:
            yield from _all_members(inner.type for inner in fields if inner.encode_name == field)
        case inspect.DictType(value_type=inner):
            yield from _members(inner)
        case inspect.ListType(item_type=inner) | inspect.VarTupleType(item_type=inner) if field is None:
            yield from _members(inner)
        case inspect.TupleType(item_types=inner) if field is None:
            yield from _all_members(inner)


def _members(kind: inspect.Type) -> Iterator[inspect.Type]:
    """Yield each member of a union, without its metadata."""
    if isinstance(kind, inspect.UnionType):
        yield from _all_members(kind.types)
    elif isinstance(kind, inspect.Metadata):
        yield from _members(kind.type)
    else:
        yield kind


def _all_members(kinds: Iterable[inspect.Type]) -> Iterator[inspect.Type]:
    for kind in kinds:
        yield from _members(kind)
