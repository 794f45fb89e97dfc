"""Problems of a configuration, and the error that reports all of them at once."""

from collections.abc import Collection, Iterable, Iterator, Sized
from difflib import get_close_matches

import msgspec

# A file may have thousands of names, and each comparison takes time.
NAMES_MAX = 1000
NAME_CHARACTERS_MAX = 128


class Problem(msgspec.Struct, frozen=True):
    """One mistake: its path in the file, a message that lists the allowed values, and its line, if known."""

    path: str
    message: str
    line: int | None = None

    def __str__(self) -> str:
        place = "" if self.line is None else f"line {self.line}: "
        return f"{place}{self.path}: {self.message}"


class ConfigError(Exception):
    """A configuration that cannot be used. problems: every mistake that was found."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("\n".join(map(str, problems)))
        self.problems = problems


def count_of(items: Sized, noun: str) -> str:
    """Return the number of items with its noun."""
    return f"{len(items)} {noun}{'' if len(items) == 1 else 's'}"


def join_path(path: str, name: str) -> str:
    """Return the path of an entry below a parent path; the root's path is empty."""
    return f"{path}.{name}" if path else name


def unknown_name(noun: str, name: str, known: Collection[str]) -> str:
    """Return the message for a reference to an entry that does not exist."""
    return f"there is no {noun} {name!r}; {did_you_mean(name, known)}there are: {_listed(known)}"


def unknown_models(models: Iterable[str], path: str, known: Collection[str]) -> Iterator[Problem]:
    """Yield a problem for each name in a list that no model has."""
    for index, model in enumerate(models):
        if model not in known:
            yield Problem(f"{path}[{index}]", unknown_name("model", model, known))


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a question about the most similar name, which a list may follow, or nothing."""
    similar = similar_name(name, known)
    return "" if similar is None else f"did you mean {similar!r}? "


def similar_name(name: str, known: Iterable[str], min_similarity: float = 0.6) -> str | None:
    """Return the most similar name, or None if none is similar."""
    names = list(known)[:NAMES_MAX]
    return next(iter(get_close_matches(name[:NAME_CHARACTERS_MAX], names, 1, min_similarity)), None)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "none"


def missing_extra(name: str) -> str:
    """Return the problem of a setting whose optional packages are not installed."""
    return (
        f"needs the extra `{name}`: .venv/bin/pip install -r requirements/runtime.txt, or the image built "
        "with EXTRAS=all"
    )
