"""Type check of parsed YAML against the schema, which reports every mistake rather than the first."""

from collections.abc import Iterator
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from gateway.config.problems import Problem, join_path
from gateway.config.schema import Section


def type_problems(value: Any, kind: Any, path: str) -> Iterator[Problem]:
    """Walk the schema and the data together, so that one wrong leaf does not hide the next."""
    if value is not None and get_origin(kind) is UnionType:
        # An optional section that is present is checked as that section.
        kind = next((member for member in get_args(kind) if _is_section(member)), kind)
    if _is_section(kind):
        yield from _section_problems(value, kind, path)
    elif get_origin(kind) is dict:
        if not isinstance(value, dict):
            yield Problem(path, f"expected a mapping, not {_type_name(value)}")
            return
        for name, item in value.items():
            yield from type_problems(item, get_args(kind)[1], join_path(path, name))
    else:
        yield from _leaf_problems(value, kind, path)


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Section)


def _section_problems(value: Any, kind: type[Section], path: str) -> Iterator[Problem]:
    if not isinstance(value, dict):
        yield Problem(path, f"expected a mapping, not {_type_name(value)}")
        return
    annotations = get_type_hints(kind, include_extras=True)
    for name, item in value.items():
        if name in annotations:
            yield from type_problems(item, annotations[name], join_path(path, name))
        else:
            yield Problem(join_path(path, name), f"unknown key; allowed here: {', '.join(annotations)}")
    for field in msgspec.structs.fields(kind):
        if field.required and field.name not in value:
            yield Problem(join_path(path, field.name), "is missing")


def _leaf_problems(value: Any, kind: Any, path: str) -> Iterator[Problem]:
    try:
        msgspec.convert(value, kind, strict=False)
    except msgspec.ValidationError as error:
        reason = str(error).split(" - at ")[0]
        if choices := _choices(kind):
            reason = f"{value!r} is not one of: {', '.join(choices)}"
        yield Problem(path, reason[0].lower() + reason[1:])


def _choices(kind: Any) -> list[str]:
    """Return the values of a Literal, including those of an optional one."""
    if get_origin(kind) is Literal:
        return [str(choice) for choice in get_args(kind)]
    return [
        choice for member in get_args(kind) if get_origin(member) is Literal for choice in _choices(member)
    ]


def _type_name(value: Any) -> str:
    """Return the value's type, because the value itself may be a secret in the wrong place."""
    return "text" if isinstance(value, str) else type(value).__name__
