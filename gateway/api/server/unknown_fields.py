"""Fields of a request body that its dialect does not have: found at no cost where there are none, and named.

A body is decoded into a twin of its struct that refuses unknown fields, which costs msgspec nothing. Only
where it refuses one is the body decoded again without that, and its names of fields are read. Their values
are skipped, not decoded. A struct with `takes_other_fields` has any fields by its documentation; one that
refuses unknown fields itself still does.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache, reduce
from operator import or_
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import msgspec
from msgspec import inspect

from gateway.api.server.body_bounds import ARRAYS, MAPS
from gateway.config.problems import similar_name
from gateway.errors import InvalidInput

HEADER = "x-ignored-fields"
# Of one reply: names, and characters of each. They come from a caller.
NAMES_MAX = 16
NAME_CHARACTERS_MAX = 64
# Of one body: unknown names that are looked at. Others may be the same as those before them.
EXAMINED_MAX = 1024
UNSAFE = re.compile(r"[^A-Za-z0-9_.-]")
CONTENT = re.compile(rb"[^ \t\r\n]")
BRACE = re.compile(rb"\{")
# How msgspec's error begins.
REFUSED = "Object contains unknown field"

Body = bytes | bytearray
Decode = Callable[..., Any]


class UnknownFields(Exception):
    """A body has fields that its struct does not have."""


class Shape(msgspec.Struct, frozen=True):
    """Objects and arrays that a value of a body may be.

    fields: known names of an object's fields, with the shapes of their values; None if it is no object. open:
    other names are allowed. items: shape of an array's items, None if no object is among them.
    """

    fields: "Mapping[str, Shape | None] | None" = None
    open: bool = False
    items: "Shape | None" = None


class UnknownField(msgspec.Struct, frozen=True):
    """One field. path: with safe characters only. known: the names that its object has."""

    path: str
    name: str
    known: tuple[str, ...]


@cache
def strict_twin(struct: type[msgspec.Struct]) -> type[msgspec.Struct]:
    """Return a subclass that refuses unknown fields in itself, and in the structs of its fields."""
    changed: list[Any] = []
    for field in msgspec.structs.fields(struct):
        kind = _strict(field.type)
        if kind is not field.type:
            settings = {
                "name": field.encode_name,
                "default": field.default,
                "default_factory": field.default_factory,
            }
            changed.append((field.name, kind, msgspec.field(**settings)))
    if takes_other_fields(struct) and not changed:
        return struct
    return msgspec.defstruct(
        struct.__name__,
        changed,
        bases=(struct,),
        module=struct.__module__,
        kw_only=True,
        forbid_unknown_fields=not takes_other_fields(struct),
    )


def takes_other_fields(struct: type[Any]) -> bool:
    """Return whether a struct has any fields by its documentation."""
    return getattr(struct, "takes_other_fields", False)


def _strict(kind: Any) -> Any:
    """Return an annotation with the twins of the structs in it; the same object if there are none."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return strict_twin(kind)
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Annotated:
        inner = _strict(parts[0])
        return kind if inner is parts[0] else Annotated[(inner, *parts[1:])]
    if origin not in (Union, UnionType, list, tuple):
        return kind
    strict = tuple([_strict(part) for part in parts])
    if all(new is old for new, old in zip(strict, parts, strict=True)):
        return kind
    return reduce(or_, strict) if origin in (Union, UnionType) else origin[strict]


def is_about_unknown_field(error: msgspec.ValidationError) -> bool:
    """Return whether a struct has refused a field."""
    return str(error).startswith(REFUSED)


@cache
def shape_of(struct: type[msgspec.Struct]) -> Shape:
    """Return the shape of a body, by its own struct."""
    shape = _shape([inspect.type_info(struct)])
    assert shape is not None
    return shape


def _shape(kinds: Iterable[inspect.Type]) -> Shape | None:
    """Return the shape of a value of one of some types; None if it has no objects with known fields."""
    fields: dict[str, Shape | None] | None = None
    is_open, items, waiting = False, [], list(kinds)
    while waiting:
        match waiting.pop():
            case inspect.UnionType(types=types):
                waiting += types
            case inspect.Metadata(type=inner):
                waiting.append(inner)
            case inspect.StructType(cls=struct) as found:
                # A union has one struct at most.
                fields = {field.encode_name: _shape([field.type]) for field in found.fields}
                is_open = takes_other_fields(struct)
            case inspect.ListType(item_type=inner) | inspect.VarTupleType(item_type=inner):
                items.append(inner)
    below = _shape(items) if items else None
    return None if fields is None and below is None else Shape(fields, is_open, below)


class FieldScan:
    """Scan of one body for unknown fields. found: the first ones, each once. has_more: there are others."""

    def __init__(self, decode: Decode) -> None:
        self.found: dict[str, UnknownField] = {}
        self.has_more = False
        self._decode = decode
        self._examined = 0

    def read(self, value: memoryview, shape: Shape, path: str = "") -> None:
        """Read the names of a value's fields. path: of the value."""
        first = value[0]
        if self.has_more:
            return
        if shape.fields is not None and (first == ord("{") or first in MAPS):
            self._read_object(value, shape.fields, path, is_open=shape.open)
        # An array without a brace has no objects, whatever its texts have. Of msgpack that is not known.
        elif shape.items is not None and (first in ARRAYS or (first == ord("[") and BRACE.search(value))):
            for item in self._decode(value, type=list[msgspec.Raw]):
                self.read(memoryview(item), shape.items, f"{path.removesuffix('.')}[].")

    def _read_object(
        self, value: memoryview, fields: "Mapping[str, Shape | None]", path: str, *, is_open: bool
    ) -> None:
        for name, inner in self._decode(value, type=dict[str, msgspec.Raw]).items():
            if self.has_more:
                return
            if name in fields:
                below = fields[name]
                if below is not None:
                    self.read(memoryview(inner), below, f"{path}{name}.")
            elif not is_open:
                self._add(path, name, tuple(fields))

    def header(self) -> str:
        """Return the names as the value of a header."""
        return ", ".join([*self.found, *(["..."] if self.has_more else [])])

    def refusal(self) -> InvalidInput:
        """Return the error that names the first of them, and the most similar known one."""
        field = next(iter(self.found.values()))
        similar = similar_name(field.name, field.known)
        way_out = f"did you mean `{similar}`?" if similar else "leave it out"
        return InvalidInput(f"`{field.path}` is not a field of this request; {way_out}", param=field.path)

    def _add(self, path: str, name: str, known: tuple[str, ...]) -> None:
        self._examined += 1
        if self._examined > EXAMINED_MAX:
            self.has_more = True
            return
        shown = path + UNSAFE.sub("?", name[:NAME_CHARACTERS_MAX])
        if shown in self.found:
            return
        if len(self.found) == NAMES_MAX:
            self.has_more = True
            return
        self.found[shown] = UnknownField(shown, name[:NAME_CHARACTERS_MAX], known)


def scan_fields(body: Body, struct: type[msgspec.Struct], *, is_msgpack: bool) -> FieldScan:
    """Return the unknown fields of a body that was decoded into its struct."""
    scan = FieldScan(msgspec.msgpack.decode if is_msgpack else msgspec.json.decode)
    # Parts of a body come without the space around them.
    first = None if is_msgpack else CONTENT.search(body)
    scan.read(memoryview(body)[0 if first is None else first.start() :], shape_of(struct))
    return scan
