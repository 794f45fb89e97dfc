"""Loader of router.yaml, which returns a Config or reports every problem at once.

The text is parsed, its placeholders are filled inside scalars, and the result is typed and cross-checked.
A misspelt key is reported and then read as the one that it most likely means, so that what is below is
checked too. The environment is an argument: only the command line reads the real one.
"""

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path

import msgspec

from gateway.config.local_files import file_problems, resolve_paths
from gateway.config.placeholders import PlaceholderFiller
from gateway.config.problems import ConfigError, Problem
from gateway.config.reader import Reader
from gateway.config.schema import Config
from gateway.config.section_checks import config_problems
from gateway.config.upstream_checks import trim_headers
from gateway.config.yaml_parser import Lines, parse_yaml

# Section that is missing or no mapping → paths whose references to it cannot be checked.
FOLLOWING = {
    "upstreams": re.compile(r"models\..*\.(upstream|(upstreams\[\d+\]|canary|mirror)\.name)$"),
    "models": re.compile(r"defaults\.|tenants\..*\.(models|model_limits)"),
}
# Settings of an upstream that imply its address.
IMPLYING = ("vendor", "nim", "bedrock")


def load_config(
    path: Path, environment: Mapping[str, str], sections: Collection[str] | None = None
) -> Config:
    """Read, fill, type and cross-check a router.yaml, and check the files that it refers to.

    sections: top-level keys that the caller uses; values with a problem elsewhere are left out. None: all.
    Raises: ConfigError with all problems.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError([Problem(str(path), f"cannot be read: {reason}")]) from error
    return _read(text, environment, path.parent).config_of(sections, file_problems)


def parse_config(
    text: str, environment: Mapping[str, str], base: Path, sections: Collection[str] | None = None
) -> Config:
    """Parse the text of a router.yaml without checking the files that it refers to.

    base: folder that relative paths start from. sections: as in `load_config`. Raises: ConfigError with all
    problems.
    """
    return _read(text, environment, base).config_of(sections)


def with_lines(path: Path, problems: Iterable[Problem]) -> list[Problem]:
    """Return problems that were found in a loaded file, with their lines. Raises: ConfigError."""
    lines = parse_yaml(path.read_text(encoding="utf-8")).lines
    found = [msgspec.structs.replace(problem, line=lines.line_of(problem.path, {})) for problem in problems]
    return sorted(found, key=_line)


class _Reading(msgspec.Struct, frozen=True):
    """A file that was read as far as possible.

    config: without the values that have a problem, None if too little is left. renamed: as in `Reader`.
    """

    config: Config | None
    problems: list[Problem]
    lines: Lines
    renamed: Mapping[str, str]

    def config_of(
        self, sections: Collection[str] | None, check: Callable[[Config], Iterable[Problem]] | None = None
    ) -> Config:
        """Return the config if it has no problem in these sections. Raises: ConfigError."""
        problems = self.problems
        if check is not None and self.config is not None:
            problems = problems + _not_near(check(self.config), problems)
        concerning = [self._with_line(problem) for problem in _concerning(problems, sections)]
        if self.config is None or concerning:
            raise ConfigError(sorted(concerning or problems, key=_line))
        return self.config

    def _with_line(self, problem: Problem) -> Problem:
        line = self.lines.line_of(problem.path, self.renamed)
        return msgspec.structs.replace(problem, line=line)


def _read(text: str, environment: Mapping[str, str], base: Path) -> _Reading:
    """Read the text of a file, with all problems but those of other files. Raises: ConfigError."""
    document = parse_yaml(text)
    filler = PlaceholderFiller(environment, base)
    try:
        filled = filler.fill(document.data, "")
        reader = Reader(filler.problems)
        sound = reader.read(filled, Config)
    except RecursionError as error:
        problem = Problem("the file", "a value contains itself or is nested too deeply")
        raise ConfigError([problem]) from error
    problems = [*document.problems, *filler.problems, *reader.corrected, *reader.problems]
    try:
        config = trim_headers(msgspec.convert({"upstreams": {}, "models": {}} | sound, Config, strict=False))
    except msgspec.ValidationError:
        # Too much is wrong to leave a config.
        return _Reading(None, problems, document.lines, reader.renamed)
    names = (reader.names.get(section, frozenset()) for section in ("upstreams", "models"))
    found = _not_at(config_problems(config, *names), problems)
    problems += [problem for problem in found if not _follows(problem, problems)]
    return _Reading(resolve_paths(config, base), problems, document.lines, reader.renamed)


def _concerning(problems: Iterable[Problem], sections: Collection[str] | None) -> list[Problem]:
    """Return the problems of these sections, and those that are in no section."""
    ignored = () if sections is None else frozenset(Config.__struct_fields__).difference(sections)
    return [problem for problem in problems if re.split(r"[.\[]", problem.path)[0] not in ignored]


def _not_at(found: Iterable[Problem], reported: Iterable[Problem]) -> list[Problem]:
    """Return the problems whose paths, or entries of whose lists, have not been reported yet."""
    paths = {path for problem in reported for path in (problem.path, re.sub(r"\[\d+\]$", "", problem.path))}
    return [problem for problem in found if problem.path not in paths]


def _not_near(found: Iterable[Problem], reported: Iterable[Problem]) -> list[Problem]:
    """Return the problems that are neither inside nor around a value that has been reported."""
    paths = [f"{problem.path}." for problem in reported]
    return [
        problem
        for problem in found
        if not any(
            path.startswith(f"{problem.path}.") or f"{problem.path}.".startswith(path) for path in paths
        )
    ]


def _follows(problem: Problem, reported: Iterable[Problem]) -> bool:
    """Return True if a problem only results from a section or a list that could not be read."""
    # `upstreams` takes the place of `upstream`.
    if any(other.path.startswith(f"{problem.path}s[") for other in reported):
        return True
    # A vendor that could not be read has an address, and so may a section of its kind.
    upstream = re.fullmatch(r"(upstreams\..+?)\.(replicas|bedrock\.region)", problem.path)
    if upstream and any(
        other.path.startswith(f"{upstream[1]}.{key}") for other in reported for key in IMPLYING
    ):
        return True
    return any(FOLLOWING[other.path].match(problem.path) for other in reported if other.path in FOLLOWING)


def _line(problem: Problem) -> float:
    """Return the line for sorting; YAML's own problems have it as their path."""
    if of_yaml := re.fullmatch(r"line (\d+)", problem.path):
        return int(of_yaml[1])
    return float("inf") if problem.line is None else problem.line
