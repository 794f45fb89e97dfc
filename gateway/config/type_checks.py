"""Type check of parsed YAML against the schema, which reports every mistake rather than the first."""

import re
from collections.abc import Iterator
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from gateway.config.problems import Problem, did_you_mean, join_path

MISMATCH = re.compile(r"Expected `([^`]+)`, got `([^`]+)`")
WORDS = {
    "str": "text",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "array": "a list",
    "object": "a mapping",
    "null": "nothing",
}


def type_problems(value: Any, kind: Any, path: str) -> Iterator[Problem]:
    """Walk the schema and the data together, so that one wrong leaf does not hide the next."""
    if value is not None and get_origin(kind) in {Union, UnionType}:
        kind = _present_member(value, kind)
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
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _present_member(value: Any, kind: Any) -> Any:
    """Return the section among the alternatives of a present value, unless it may be something else."""
    members = [member for member in get_args(kind) if member is not NoneType]
    sections = [member for member in members if _is_section(member)]
    return sections[0] if sections and (len(members) == 1 or isinstance(value, dict)) else kind


def _section_problems(value: Any, kind: type[msgspec.Struct], path: str) -> Iterator[Problem]:
    if not isinstance(value, dict):
        yield Problem(path, f"expected a mapping, not {_type_name(value)}")
        return
    annotations = get_type_hints(kind, include_extras=True)
    # In `{backend:torch}` the whole text is a key, without a value.
    unspaced = {name.partition(":")[0] for name in value if ":" in name and name not in annotations}
    for name, item in value.items():
        if name in annotations:
            yield from type_problems(item, annotations[name], join_path(path, name))
        elif (key := name.partition(":")[0]) in annotations:
            # Without the rest, which may be a secret.
            yield Problem(join_path(path, key), "a space is missing after the colon")
        else:
            suggestion = did_you_mean(name, annotations)
            message = f"unknown key; {suggestion}allowed here: {', '.join(annotations)}"
            yield Problem(join_path(path, name), message)
    for field in msgspec.structs.fields(kind):
        if field.required and field.name not in {*value, *unspaced}:
            yield Problem(join_path(path, field.name), "is missing")


def _leaf_problems(value: Any, kind: Any, path: str) -> Iterator[Problem]:
    try:
        msgspec.convert(value, kind, strict=False)
    except msgspec.ValidationError as error:
        reason = str(error).split(" - at ")[0]
        if choices := _choices(kind):
            reason = f"{value!r} is not one of: {', '.join(choices)}"
            if suggestion := did_you_mean(str(value), choices):
                reason += f"; {suggestion.strip()}"
        reason = MISMATCH.sub(_mismatch, reason)
        yield Problem(path, reason[0].lower() + reason[1:])


def _mismatch(match: re.Match[str]) -> str:
    """Return a message of msgspec in the words of YAML."""
    wanted, found = (
        " or ".join(WORDS.get(name, name) for name in names.split(" | ") if name != "null" or names == "null")
        for names in match.groups()
    )
    return f"expected {wanted}, not {found}"


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
