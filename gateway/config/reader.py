"""Reader of parsed YAML by the types of the schema, which reports every mistake rather than the first.

One walk over the schema and the data corrects misspelt keys, checks types, and leaves out what has a problem
together with what needs it. So one mistake hides neither those below it nor those that a later check finds.
"""

import re
from collections.abc import Iterable, Mapping
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from backends.kinds import KINDS
from backends.openai.kind import OPENAI
from backends.openai.vendors import VENDORS
from gateway.config.problems import Problem, did_you_mean, join_path, similar_name

MISMATCH = re.compile(r"Expected `([^`]+)`, got `([^`]+)`")
BOUND = re.compile(r"Expected `([^`]+)` (of length )?(>=|<=|>|<) (\S+)")
MOMENT = re.compile(r"Invalid RFC3339.*")
COMPARISONS = {">=": "at least", "<=": "at most", ">": "above", "<": "below"}
# Place of an entry of a list, or of a key in it, as msgspec writes it.
INDEX = re.compile(r"\[\d+\](\.\w+)?")
# Between a key and its correction. Suggestions are less certain.
MIN_SIMILARITY = 0.8
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
# Values that are written at one key and belong to another, by that key → what is meant.
MISPLACED: dict[str, dict[str, str]] = {
    "backend": {name: f"`backend: {OPENAI.name}, vendor: {name}`" for name in VENDORS.keys() - KINDS.keys()},
    "vendor": {name: f"`backend: {name}` without `vendor`" for name in KINDS.keys() - VENDORS.keys()},
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


class Reader:
    """Reader of one document.

    reported: problems of its values that are known already. corrected: problems of misspelt keys. renamed:
    path with such a key's correction → the key as it is written. problems: all others. names: of the entries
    of each mapping, by its path, also of entries that are left out.
    """

    def __init__(self, reported: Iterable[Problem] = ()) -> None:
        self._reported = {problem.path for problem in reported}
        self._lists = {re.sub(r"\[\d+\]$", "", path) for path in self._reported} - self._reported
        self.corrected: list[Problem] = []
        self.problems: list[Problem] = []
        self.renamed: dict[str, str] = {}
        self.names: dict[str, frozenset[str]] = {}

    def read(self, value: Any, kind: Any, path: str = "") -> Any:
        """Return the parts of a value that are sound; msgspec.UNSET if none are."""
        if path in self._reported:
            return msgspec.UNSET
        kind = _present_member(value, kind)
        is_dict = get_origin(kind) is dict
        if not is_dict and not _is_section(kind):
            return self._leaf(value, kind, path)
        if not isinstance(value, dict):
            self.problems.append(Problem(path, f"expected a mapping, not {_type_name(value)}"))
            return msgspec.UNSET
        return self._mapping(value, kind, path) if is_dict else self._section(value, kind, path)

    def _mapping(self, value: dict[str, Any], kind: Any, path: str) -> Any:
        name_kind, item_kind = get_args(kind)
        self.names[path] = frozenset(value)
        wrong = [problem for name in value if (problem := _leaf_problem(name, name_kind, path))]
        self.problems += wrong
        parts = {name: self.read(item, item_kind, join_path(path, name)) for name, item in value.items()}
        return msgspec.UNSET if wrong else _without_unset(parts)

    def _section(self, value: dict[str, Any], kind: type[msgspec.Struct], path: str) -> Any:
        hints, fields = get_type_hints(kind, include_extras=True), msgspec.structs.fields(kind)
        kinds = {field.encode_name: hints[field.name] for field in fields}
        # In `{backend:torch}` the whole text is a key, without a value.
        present = {name.partition(":")[0] for name in value if ":" in name and name not in kinds}
        parts: dict[str, Any] = {}
        for written, item in value.items():
            name = self._meant(written, kinds, {*value, *parts}, path)
            present.add(name)
            if name in kinds:
                parts[name] = self.read(item, kinds[name], join_path(path, name))
            elif (key := name.partition(":")[0]) in kinds:
                # Without the rest, which may be a secret.
                self.problems.append(Problem(join_path(path, key), "a space is missing after the colon"))
            else:
                self.problems.append(_unknown_key(name, kinds, path))
        required = [field.encode_name for field in fields if field.required]
        missing = [name for name in required if name not in present]
        self.problems += [Problem(join_path(path, name), "is missing") for name in missing]
        sound = _without_unset(parts)
        # The file itself is kept, with what it has.
        return sound if not path or all(name in sound for name in required) else msgspec.UNSET

    def _meant(self, written: str, known: Mapping[str, Any], taken: set[str], path: str) -> str:
        """Return the key that a written one means, or the written one."""
        # A colon: a space is missing after it, which has a message of its own.
        if written in known or ":" in written:
            return written
        current = RENAMED_KEYS.get(written)
        name = current if current in known else similar_name(written, known, MIN_SIMILARITY)
        if name is None or name in taken:
            return written
        self.renamed[join_path(path, name)] = written
        self.corrected.append(_unknown_key(written, known, path))
        return name

    def _leaf(self, value: Any, kind: Any, path: str) -> Any:
        problem = _leaf_problem(value, kind, path)
        if problem is not None and problem.path not in self._reported | self._lists:
            self.problems.append(problem)
        return msgspec.UNSET if problem is not None or path in self._lists else value


def type_problems(value: Any, kind: Any, path: str) -> list[Problem]:
    """Return the problems of a value that needs to be of a type of the schema."""
    reader = Reader()
    reader.read(value, kind, path)
    return [*reader.corrected, *reader.problems]


def with_current_keys(upstream: Any) -> Any:
    """Return a stored upstream, which another release may have written, with the current keys."""
    if not isinstance(upstream, dict):
        return upstream
    former = {RENAMED_KEYS[key]: value for key, value in upstream.items() if key in RENAMED_KEYS}
    return former | {key: value for key, value in upstream.items() if key not in RENAMED_KEYS}


def _without_unset(parts: Mapping[str, Any]) -> dict[str, Any]:
    return {name: part for name, part in parts.items() if part is not msgspec.UNSET}


def _is_section(kind: Any) -> bool:
    """Return True if a type of the schema is a mapping with fixed keys."""
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _present_member(value: Any, kind: Any) -> Any:
    """Return the section or mapping that a present value is, unless it may be something else."""
    if value is None or get_origin(kind) not in {Union, UnionType}:
        return kind
    members = [member for member in get_args(kind) if member is not NoneType]
    if len(members) == 1 and get_origin(members[0]) is dict:
        return members[0]
    sections = [member for member in members if _is_section(member)]
    return sections[0] if sections and (len(members) == 1 or isinstance(value, dict)) else kind


def _unknown_key(name: str, known: Mapping[str, Any], path: str) -> Problem:
    """Return the problem of a key that the section at a path does not have."""
    if (current := RENAMED_KEYS.get(name)) in known:
        return Problem(join_path(path, name), f"`{name}` is now `{current}`")
    message = f"unknown key; {did_you_mean(name, known)}allowed here: {', '.join(known)}"
    return Problem(join_path(path, name), message)


def _leaf_problem(value: Any, kind: Any, path: str) -> Problem | None:
    try:
        msgspec.convert(value, kind, strict=False)
    except msgspec.ValidationError as error:
        reason, _, place = str(error).partition(" - at `$")
        if index := INDEX.match(place):
            path += index[0]
        if choices := _choices(kind):
            reason = f"{value!r} is not one of: {', '.join(choices)}"
            if isinstance(value, str) and (way_out := MISPLACED.get(path.rpartition(".")[2], {}).get(value)):
                reason = f"{value!r} is not one of these; write {way_out}"
            elif suggestion := did_you_mean(str(value), choices):
                reason += f"; {suggestion.strip()}"
        reason = BOUND.sub(
            _bound, MISMATCH.sub(_mismatch, MOMENT.sub("not a date such as 2027-01-31", reason))
        )
        return Problem(path, reason[0].lower() + reason[1:])
    return None


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
