"""YAML: a parser that knows lines and rejects duplicate keys, and a writer. The only importer of PyYAML."""

import math
import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

import yaml

from gateway.config.problems import ConfigError, Problem

MERGE_TAG = "tag:yaml.org,2002:merge"
BOOL_TAG, TEXT_TAG = "tag:yaml.org,2002:bool", "tag:yaml.org,2002:str"
# What the keys of a router.yaml look like.
KEY = re.compile(r"[a-z][a-z_]{0,40}")
INDEX = re.compile(r"\[(\d+)\]")


class Lines:
    """Line of each entry of a document, by its path."""

    def __init__(self, root: yaml.Node) -> None:
        self._root = root
        self._entries: dict[int, dict[str, tuple[int, yaml.Node]]] = {}

    def line_of(self, path: str, renamed: Mapping[str, str]) -> int | None:
        """Return the line of an entry, or of the closest one that contains it; None if that is the root.

        renamed: path in which a key was corrected → the key as it is written.
        """
        line, node, start = None, self._root, 0
        while start < len(path):
            found = self._child(node, path, start, renamed)
            if found is None:
                return line
            line, node, start = found
        return line

    def _child(
        self, node: yaml.Node, path: str, start: int, renamed: Mapping[str, str]
    ) -> tuple[int, yaml.Node, int] | None:
        """Return the line, the value and the end of the next part of a path, if the document has it."""
        if isinstance(node, yaml.SequenceNode):
            index = INDEX.match(path, start)
            if index is None or int(index[1]) >= len(node.value):
                return None
            item = node.value[int(index[1])]
            return item.start_mark.line + 1, item, index.end()
        if not isinstance(node, yaml.MappingNode):
            return None
        entries = self._entries_of(node)
        start += path.startswith(".", start)
        # A name may contain dots: the longest one that exists is the entry.
        for end in _ends(path, start):
            entry = entries.get(renamed.get(path[:end], path[start:end]))
            if entry is not None:
                return (*entry, end)
        return None

    def _entries_of(self, node: yaml.MappingNode) -> dict[str, tuple[int, yaml.Node]]:
        """Return line and value of each entry. Those of a merge come first, and are overridden."""
        if id(node) not in self._entries:
            self._entries[id(node)] = {
                str(key.value): (key.start_mark.line + 1, value) for key, value in node.value
            }
        return self._entries[id(node)]


class Document(NamedTuple):
    """A parsed document. problems: keys that are given twice, of which the last counts."""

    data: Any
    lines: Lines
    problems: list[Problem]


def parse_yaml(text: str) -> Document:
    """Parse a document whose root is a mapping.

    Raises: ConfigError with one problem, which includes the line number if it is known.
    """
    try:
        # A subclass of SafeLoader, which constructs plain values only.
        loader = _Loader(text)
        root = loader.get_single_node()
        data = None if root is None else loader.construct_document(root)
    except yaml.MarkedYAMLError as error:
        line, words = _fault_of(error, text.splitlines())
        place = "the file" if line is None else f"line {line}"
        raise ConfigError([Problem(place, f"not valid YAML: {words}")]) from error
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError([Problem("the file", f"not valid YAML: {error}")]) from error
    if root is None or not isinstance(data, dict):
        raise ConfigError([Problem("the file", "expected a mapping with upstreams and models")])
    return Document(data, Lines(root), loader.problems)


def _fault_of(error: yaml.MarkedYAMLError, lines: Sequence[str]) -> tuple[int | None, str]:
    """Return the line at fault, and what is wrong with it.

    PyYAML reports the line at which it could not go on, which is often the one after.
    """
    words = error.problem or "it cannot be read"
    if error.problem_mark is None:
        return None, words
    line = error.problem_mark.line + 1
    start = line if error.context_mark is None else error.context_mark.line + 1
    if words == "could not find expected ':'":
        return start, f"{_shown(lines, start)} has no colon behind it"
    if words == "mapping values are not allowed here":
        return _fault_above(line, lines)
    if words.startswith(("expected <block end>", "expected '<document start>'")):
        return line, f"{_shown(lines, line)} is not indented as the entries that it belongs to"
    if words.startswith(("expected ',' or ", "expected the node content")) and start != line:
        return start, f"what begins here with `{_opening(error, lines)}` is not closed before line {line}"
    if words == "found unexpected end of stream":
        return start, "a quotation mark is not closed"
    if "'\\t'" in words:
        return line, "it is indented by a tab; YAML wants spaces"
    return line, words


def _fault_above(line: int, lines: Sequence[str]) -> tuple[int, str]:
    """Return the fault if a line has a colon that continues the text of the line above it."""
    above = next((number for number in range(line - 1, 0, -1) if _content(lines, number)), None)
    if above is None:
        return line, "there are two colons in one entry; text with a colon and a space needs quotation marks"
    text = _content(lines, above)
    if ":" not in text:
        return above, f"{_shown(lines, above)} has no colon behind it"
    if ": " not in text:
        return above, f"{_shown(lines, above)} has no space behind its colon"
    if _indent(lines, line) > _indent(lines, above):
        return line, f"it is indented deeper than line {above}, which has a value already"
    return line, "there are two colons in one entry; text with a colon and a space needs quotation marks"


def _content(lines: Sequence[str], line: int) -> str:
    text = lines[line - 1].strip()
    return "" if text.startswith("#") else text


def _indent(lines: Sequence[str], line: int) -> int:
    return len(lines[line - 1]) - len(lines[line - 1].lstrip())


def _shown(lines: Sequence[str], line: int) -> str:
    """Return the key of a line. Anything else in it may be a secret."""
    name = _content(lines, line).removeprefix("- ").partition(":")[0]
    return f"`{name}`" if KEY.fullmatch(name) else "this line"


def _opening(error: yaml.MarkedYAMLError, lines: Sequence[str]) -> str:
    mark = error.context_mark
    assert mark is not None
    return lines[mark.line][mark.column : mark.column + 1]


def format_yaml(data: Any) -> str:
    """Return plain values as YAML, each key on a line of its own."""
    text: str = yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=math.inf)
    return text


def _ends(path: str, start: int) -> Iterator[int]:
    """Yield the positions at which a name may end that begins at `start`, the last one first."""
    yield len(path)
    for end in range(len(path) - 1, start, -1):
        if path[end] in ".[":
            yield end


class _Loader(yaml.SafeLoader):
    """Safe loader that reports a duplicate key, where PyYAML would silently keep the last value."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.problems: list[Problem] = []

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:  # noqa: FBT001, FBT002 - the base class's signature
        seen: set[str] = set()
        for key_node, _ in node.value:
            if key_node.tag == MERGE_TAG:
                # Keys that a merge brings in may be overridden; that is its purpose.
                continue
            if not isinstance(key_node, yaml.ScalarNode):
                raise yaml.MarkedYAMLError(problem="a key is one word", problem_mark=key_node.start_mark)
            # Every key is a name: `on` and `no` are words, and 1 would become the same name as "1".
            key = key_node.value
            if key_node.tag == BOOL_TAG:
                key_node.tag = TEXT_TAG
            if key in seen:
                line = key_node.start_mark.line + 1
                self.problems.append(
                    Problem(f"line {line}", f"not valid YAML: the key {key!r} is given twice")
                )
            seen.add(key)
        return super().construct_mapping(node, deep)

    def construct_moment(self, node: yaml.ScalarNode) -> datetime:
        """Construct a timestamp; a date without a time is midnight UTC, as on the command line."""
        found = self.construct_yaml_timestamp(node)
        return (
            found if isinstance(found, datetime) else datetime(found.year, found.month, found.day, tzinfo=UTC)
        )


_Loader.add_constructor("tag:yaml.org,2002:timestamp", _Loader.construct_moment)
