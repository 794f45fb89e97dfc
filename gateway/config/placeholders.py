"""Replacement of `${NAME}`, `${NAME:-default}` and `${file:/path}` inside the scalars of parsed YAML.

`${url:NAME}` and `${url:file:/path}` are the same, percent-encoded for a part of a URL, such as a password.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from gateway.config.problems import Problem, join_path

# A file with more values than this reaches them through nested YAML aliases, which would exhaust the memory.
VALUES_MAX = 100_000
PLACEHOLDER = re.compile(r"\$\$\{|\$\{([^}]*)\}")
LINE_ENDS = "\r\n"
VARIABLE = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(?::-(.*))?", re.DOTALL)


# Names of files in the text of router.yaml, before it is parsed.
FILE_REFERENCE = re.compile(r"\$\{(?:url:)?file:([^}]+)\}")


def files_in(text: str, base: Path) -> frozenset[Path]:
    """Return the files that placeholders of a text name. base: folder that relative paths start from."""
    return frozenset(base / name for name in FILE_REFERENCE.findall(text.replace("$${", "")))


class PlaceholderFiller:
    """Filler of placeholders, which collects a problem for each one that it cannot fill.

    base: folder that relative `${file:…}` paths start from.
    """

    def __init__(self, environment: Mapping[str, str], base: Path) -> None:
        self._environment = environment
        self._base = base
        self._values = 0
        self.problems: list[Problem] = []

    def fill(self, value: Any, path: str) -> Any:
        """Return a copy of a parsed value with every placeholder replaced.

        Raises: RecursionError if the value contains itself or has too many parts.
        """
        self._values += 1
        if self._values > VALUES_MAX:
            raise RecursionError
        match value:
            case dict():
                return {str(key): self.fill(item, join_path(path, str(key))) for key, item in value.items()}
            case list():
                return [self.fill(item, f"{path}[{index}]") for index, item in enumerate(value)]
            case str():
                return PLACEHOLDER.sub(lambda match: self._replacement(match, path), value)
        return value

    def _replacement(self, match: re.Match[str], path: str) -> str:
        inside = match.group(1)
        if inside is None:
            # $${ is the escape for a literal ${.
            return "${"
        # Not the variable `url` with a default.
        if inside.startswith("url:") and not inside.startswith("url:-"):
            return quote(self._value(inside.removeprefix("url:"), path, "url:"), safe="")
        return self._value(inside, path)

    def _value(self, inside: str, path: str, prefix: str = "") -> str:
        """Return the value of a placeholder. prefix: what is written before it, for messages."""
        if inside.startswith("file:"):
            return self._read_file(inside.removeprefix("file:"), path)
        variable = VARIABLE.fullmatch(inside)
        if variable is None:
            message = f"${{{inside}}} is not ${{NAME}}, ${{NAME:-default}}, ${{file:/path}} or ${{url:NAME}}"
            return self._report(path, message)
        name, default = variable.groups()
        # Secrets from files and from other programs end in a line's end, which belongs to no value.
        value = self._environment.get(name, "").rstrip(LINE_ENDS) or default
        if value is None:
            way_out = f"set it, or write ${{{prefix}{name}:-default}}"
            return self._report(path, f"the environment has no {name}; {way_out}")
        return value

    def _read_file(self, name: str, path: str) -> str:
        try:
            return (self._base / name).read_text(encoding="utf-8").rstrip(LINE_ENDS)
        except (OSError, UnicodeDecodeError) as error:
            return self._report(path, f"the file {name} cannot be read ({type(error).__name__})")

    def _report(self, path: str, message: str) -> str:
        self.problems.append(Problem(path, message))
        return ""
