"""Problems of a configuration, and the error that reports all of them at once."""

from collections.abc import Collection, Iterable
from difflib import get_close_matches

import msgspec

# A file may have thousands of names, and each comparison takes time.
NAMES_MAX = 1000
NAME_CHARACTERS_MAX = 128


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
    return f"there is no {noun} {name!r}; {did_you_mean(name, known)}there are: {_listed(known)}"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a question about the most similar name, which a list may follow, or nothing."""
    similar = get_close_matches(name[:NAME_CHARACTERS_MAX], list(known)[:NAMES_MAX], n=1)
    return f"did you mean {similar[0]!r}? " if similar else ""


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "none"
