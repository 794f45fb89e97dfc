"""Type check of parsed YAML against the schema, which reports every mistake rather than the first."""

import re
from collections.abc import Collection, Iterator
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from gateway.config.problems import Problem, did_you_mean, join_path

MISMATCH = re.compile(r"Expected `([^`]+)`, got `([^`]+)`")
BOUND = re.compile(r"Expected `([^`]+)` (of length )?(>=|<=|>|<) (\S+)")
MOMENT = re.compile(r"Invalid RFC3339.*")
COMPARISONS = {">=": "at least", "<=": "at most", ">": "above", "<": "below"}
# Place of an entry of a list, or of a key in it, as msgspec writes it.
INDEX = re.compile(r"\[\d+\](\.\w+)?")
WORDS = {
    "str": "text",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "array": "a list",
    "object": "a mapping",
    "null": "nothing",
}
# Former keys of upstreams → the current ones.
RENAMED_KEYS = {
    "batch_inputs": "request_inputs",
    "batch_tokens": "request_tokens",
    "batch_bytes": "request_bytes",
}
# Types of PyYAML's values.
WORDS_OF_TYPES = {
    str: WORDS["str"],
    bool: WORDS["bool"],
    int: WORDS["int"],
    float: WORDS["float"],
    list: WORDS["array"],
    dict: WORDS["object"],
    NoneType: WORDS["null"],
}


def type_problems(value: Any, kind: Any, path: str) -> Iterator[Problem]:
    """Walk the schema and the data together, so that one wrong leaf does not hide the next."""
    kind = present_member(value, kind)
    if is_section(kind):
        yield from _section_problems(value, kind, path)
    elif get_origin(kind) is dict:
        if not isinstance(value, dict):
            yield Problem(path, f"expected a mapping, not {_type_name(value)}")
            return
        name_kind, item_kind = get_args(kind)
        for name, item in value.items():
            yield from _leaf_problems(name, name_kind, path)
            yield from type_problems(item, item_kind, join_path(path, name))
    else:
        yield from _leaf_problems(value, kind, path)


def is_section(kind: Any) -> bool:
    """Return True if a type of the schema is a mapping with fixed keys."""
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def present_member(value: Any, kind: Any) -> Any:
    """Return the section or mapping that a present value is, unless it may be something else."""
    if value is None or get_origin(kind) not in {Union, UnionType}:
        return kind
    members = [member for member in get_args(kind) if member is not NoneType]
    if len(members) == 1 and get_origin(members[0]) is dict:
        return members[0]
    sections = [member for member in members if is_section(member)]
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
            yield unknown_key(name, annotations, path)
    for field in msgspec.structs.fields(kind):
        if field.required and field.name not in {*value, *unspaced}:
            yield Problem(join_path(path, field.name), "is missing")


def unknown_key(name: str, known: Collection[str], path: str) -> Problem:
    """Return the problem of a key that the section at a path does not have."""
    if (current := RENAMED_KEYS.get(name)) in known:
        return Problem(join_path(path, name), f"`{name}` is now `{current}`")
    message = f"unknown key; {did_you_mean(name, known)}allowed here: {', '.join(known)}"
    return Problem(join_path(path, name), message)


def with_current_keys(upstream: Any) -> Any:
    """Return a stored upstream, which another release may have written, with the current keys."""
    if not isinstance(upstream, dict):
        return upstream
    former = {RENAMED_KEYS[key]: value for key, value in upstream.items() if key in RENAMED_KEYS}
    return former | {key: value for key, value in upstream.items() if key not in RENAMED_KEYS}


def _leaf_problems(value: Any, kind: Any, path: str) -> Iterator[Problem]:
    try:
        msgspec.convert(value, kind, strict=False)
    except msgspec.ValidationError as error:
        reason, _, place = str(error).partition(" - at `$")
        if index := INDEX.match(place):
            path += index[0]
        if choices := _choices(kind):
            reason = f"{value!r} is not one of: {', '.join(choices)}"
            if suggestion := did_you_mean(str(value), choices):
                reason += f"; {suggestion.strip()}"
        reason = BOUND.sub(
            _bound, MISMATCH.sub(_mismatch, MOMENT.sub("not a date such as 2027-01-31", reason))
        )
        yield Problem(path, reason[0].lower() + reason[1:])


def _mismatch(match: re.Match[str]) -> str:
    """Return a message of msgspec in the words of YAML."""
    wanted, found = (
        # A whole number is a number.
        " or ".join(
            WORDS.get(name, name)
            for name in names.replace("int | float", "float").split(" | ")
            if name != "null" or names == "null"
        )
        for names in match.groups()
    )
    return f"expected {wanted}, not {found}"


def _bound(match: re.Match[str]) -> str:
    """Return a message of msgspec about a bound in the words of YAML."""
    kind, is_length, comparison, bound = match.groups()
    relation = COMPARISONS[comparison]
    amount = bound.removesuffix(".0")
    return f"expected {WORDS.get(kind, kind)}{' of length' if is_length else ','} {relation} {amount}"


def _choices(kind: Any) -> list[str]:
    """Return the values of a Literal, including those of an optional one."""
    if get_origin(kind) is Literal:
        return [str(choice) for choice in get_args(kind)]
    return [
        choice for member in get_args(kind) if get_origin(member) is Literal for choice in _choices(member)
    ]


def _type_name(value: Any) -> str:
    """Return the value's type, because the value itself may be a secret in the wrong place."""
    return WORDS_OF_TYPES.get(type(value), type(value).__name__)
