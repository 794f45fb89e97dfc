"""Arrow types of JSON values that were seen, for columns of rows that have no schema. Pure.

A column whose values have no type in common is text: the JSON of each value.
"""

from collections.abc import Mapping
from types import NoneType
from typing import Any, Literal, TypeAlias

import msgspec

DEPTH_MAX = 16
FIELDS_MAX = 1000
INT_MIN, INT_MAX = -(2**63), 2**63 - 1
# Integers up to here are exact as float64.
EXACT_MAX = 2**53

Scalar: TypeAlias = Literal["null", "bool", "int", "large", "float", "string", "json"]


SCALARS: dict[type, Scalar] = {NoneType: "null", bool: "bool", float: "float", str: "string"}


class ListShape(msgspec.Struct, frozen=True):
    """Lists with items of one shape."""

    item: "Shape"


class ObjectShape(msgspec.Struct, frozen=True):
    """Objects with fields in the order in which they were seen first."""

    fields: dict[str, "Shape"]


Shape: TypeAlias = Scalar | ListShape | ObjectShape


class JsonText(str):
    """JSON of a value that has no counterpart, such as a number of 5,000 digits."""

    __slots__ = ()


def shape_of(value: object, depth: int = 0) -> Shape:
    """Return the shape of one value. large: an integer beyond those that float64 holds exactly."""
    scalar = SCALARS.get(type(value))
    if scalar is not None:
        return scalar
    if isinstance(value, int):
        return _int_shape(value)
    if depth >= DEPTH_MAX or isinstance(value, JsonText):
        return "json"
    if isinstance(value, list):
        item: Shape = "null"
        for element in value:
            item = common(item, shape_of(element, depth + 1))
        return ListShape(item)
    assert isinstance(value, Mapping)
    if not value or len(value) > FIELDS_MAX:
        # Parquet has no type without fields.
        return ObjectShape({}) if not value else "json"
    return ObjectShape({name: shape_of(field, depth + 1) for name, field in value.items()})


def _int_shape(value: int) -> Shape:
    if not INT_MIN <= value <= INT_MAX:
        return "json"
    return "int" if abs(value) <= EXACT_MAX else "large"


def common(first: Shape, second: Shape) -> Shape:
    """Return the shape that holds values of both shapes."""
    if second in (first, "null"):
        return first
    if first == "null":
        return second
    if isinstance(first, ListShape) and isinstance(second, ListShape):
        return ListShape(common(first.item, second.item))
    if isinstance(first, ObjectShape) and isinstance(second, ObjectShape):
        return _common_object(first, second)
    both = {kind for kind in (first, second) if isinstance(kind, str)}
    if both == {"int", "float"}:
        return "float"
    return "large" if both == {"int", "large"} else "json"


def _common_object(first: ObjectShape, second: ObjectShape) -> Shape:
    if second.fields.keys() <= first.fields.keys() and all(
        first.fields[name] == shape for name, shape in second.fields.items()
    ):
        return first
    fields = dict(first.fields)
    for name, shape in second.fields.items():
        fields[name] = common(fields.get(name, "null"), shape)
    return ObjectShape(fields) if len(fields) <= FIELDS_MAX else "json"


def is_text(shape: Shape) -> bool:
    """Return whether values of a shape are stored as the text of their JSON."""
    return shape == "json" or (isinstance(shape, ObjectShape) and not shape.fields)


def converted(value: Any, shape: Shape) -> Any:
    """Return a value as its column stores it."""
    if value is None:
        return None
    if is_text(shape):
        if isinstance(value, JsonText):
            return str(value)
        return msgspec.json.encode(value).decode()
    if isinstance(shape, ListShape):
        return [converted(item, shape.item) for item in value]
    if isinstance(shape, ObjectShape):
        return {name: converted(value.get(name), field) for name, field in shape.fields.items()}
    return value


def is_plain(shape: Shape) -> bool:
    """Return whether values of a shape are stored as they are."""
    if isinstance(shape, ListShape):
        return is_plain(shape.item)
    if isinstance(shape, ObjectShape):
        return bool(shape.fields) and all(is_plain(field) for field in shape.fields.values())
    return shape != "json"
