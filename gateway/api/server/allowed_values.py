"""Allowed values of a field and allowed fields of an object, which errors of msgspec do not list. Pure."""

import re
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
from msgspec import inspect

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
