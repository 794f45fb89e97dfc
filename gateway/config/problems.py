"""Problems of a configuration, and the error that reports all of them at once."""

from collections.abc import Collection

import msgspec


class Problem(msgspec.Struct, frozen=True):
    """One mistake: its path in the file, and a message that lists the allowed values."""

    path: str
    message: str


class ConfigError(Exception):
    """A configuration that cannot be used. problems: every mistake that was found."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("\n".join(f"{problem.path}: {problem.message}" for problem in problems))
        self.problems = problems


def join_path(path: str, name: str) -> str:
    """Return the path of an entry below a parent path; the root's path is empty."""
    return f"{path}.{name}" if path else name


def unknown_name(noun: str, name: str, known: Collection[str]) -> str:
    """Return the message for a reference to an entry that does not exist."""
    return f"there is no {noun} {name!r}; there are: {', '.join(sorted(known)) or 'none'}"
