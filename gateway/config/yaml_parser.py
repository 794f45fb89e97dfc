"""YAML: a parser that rejects duplicate keys, and a writer. The only module that imports PyYAML."""

import math
from collections.abc import Hashable
from datetime import UTC, datetime
from typing import Any

import yaml

from gateway.config.problems import ConfigError, Problem

MERGE_TAG = "tag:yaml.org,2002:merge"


def parse_yaml(text: str) -> Any:
    """Parse a document whose root is a mapping.

    Raises: ConfigError with one problem, which includes the line number if it is known.
    """
    try:
        # A subclass of SafeLoader, which constructs plain values only.
        data = yaml.load(text, Loader=_Loader)  # noqa: S506
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}" if error.problem_mark else "the file"
        raise ConfigError([Problem(line, f"not valid YAML: {error.problem}")]) from error
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError([Problem("the file", f"not valid YAML: {error}")]) from error
    if not isinstance(data, dict):
        raise ConfigError([Problem("the file", "expected a mapping with upstreams and models")])
    return data


def format_yaml(data: Any) -> str:
    """Return plain values as YAML, each key on a line of its own."""
    text: str = yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=math.inf)
    return text


class _Loader(yaml.SafeLoader):
    """Safe loader that rejects a duplicate key, where PyYAML would silently keep the last value."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:  # noqa: FBT001, FBT002 - the base class's signature
        seen: set[str] = set()
        for key_node, _ in node.value:
            if key_node.tag == MERGE_TAG:
                # Keys that a merge brings in may be overridden; that is its purpose.
                continue
            if not isinstance(key_node, yaml.ScalarNode):
                raise yaml.MarkedYAMLError(problem="a key is one word", problem_mark=key_node.start_mark)
            # Compared as text: every key is a name, and 1 would become the same name as "1".
            key = key_node.value
            if key in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"the key {key!r} is given twice", problem_mark=key_node.start_mark
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
