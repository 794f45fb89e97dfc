"""Loader of router.yaml, which returns a Config or reports every problem at once.

The text is parsed, its placeholders are filled inside scalars, and the result is typed and cross-checked.
The environment is an argument: only the command line reads the real one.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from gateway.config.cross_checks import EntryNames, cross_problems
from gateway.config.file_checks import file_problems
from gateway.config.placeholders import PlaceholderFiller
from gateway.config.problems import ConfigError, Problem, join_path
from gateway.config.relative_paths import resolve_paths
from gateway.config.schema import Config, ModelSettings, TenantConfig, UpstreamSettings
from gateway.config.type_checks import type_problems
from gateway.config.yaml_parser import parse_yaml

_REQUIRED_FIELDS: dict[str, tuple[str, ...]] = {
    section: tuple(field.name for field in msgspec.structs.fields(kind) if field.required)
    for section, kind in (
        ("upstreams", UpstreamSettings),
        ("models", ModelSettings),
        ("tenants", TenantConfig),
    )
}


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
    config = parse_config(text, environment, path.parent, sections)
    if problems := _concerning(file_problems(config), sections):
        raise ConfigError(problems)
    return config


def parse_config(
    text: str, environment: Mapping[str, str], base: Path, sections: Collection[str] | None = None
) -> Config:
    """Parse the text of a router.yaml without checking the files that it refers to.

    base: folder that relative paths start from. sections: as in `load_config`. Raises: ConfigError with all
    problems.
    """
    data = parse_yaml(text)
    filler = PlaceholderFiller(environment, base)
    try:
        filled = filler.fill(data, "")
    except RecursionError as error:
        problem = Problem("the file", "a value contains itself or is nested too deeply")
        raise ConfigError([problem]) from error
    problems = list(filler.problems)
    problems += _not_at(type_problems(filled, Config, ""), problems)
    config = _convert_sound_parts(filled, [problem.path for problem in problems])
    if config is not None:
        names = EntryNames(frozenset(filled["upstreams"]), frozenset(filled["models"]))
        problems += _not_at(cross_problems(config, names), problems)
    concerning = _concerning(problems, sections)
    if config is None or concerning:
        raise ConfigError(concerning or problems)
    return resolve_paths(config, base)


def _concerning(problems: Iterable[Problem], sections: Collection[str] | None) -> list[Problem]:
    """Return the problems of these sections, and those that are in no section."""
    ignored = () if sections is None else frozenset(Config.__struct_fields__).difference(sections)
    return [problem for problem in problems if re.split(r"[.\[]", problem.path)[0] not in ignored]


def _not_at(found: Iterable[Problem], reported: Iterable[Problem]) -> list[Problem]:
    """Return the problems whose paths have not been reported yet."""
    paths = {problem.path for problem in reported}
    return [problem for problem in found if problem.path not in paths]


def _convert_sound_parts(filled: dict[str, Any], bad_paths: Collection[str]) -> Config | None:
    """Convert the data without the values already found wrong, so that the rest is cross-checked too.

    Returns None if too much is wrong to leave a config.
    """
    sound = _without_paths(filled, "", bad_paths)
    try:
        return msgspec.convert(sound, Config, strict=False)
    except msgspec.ValidationError:
        return None


def _without_paths(value: Any, path: str, bad_paths: Collection[str]) -> Any:
    if not isinstance(value, dict):
        return value
    sound = {}
    required = _REQUIRED_FIELDS.get(path, ())
    for name, item in value.items():
        item_path = join_path(path, str(name))
        # A whole entry is dropped only if the bad value is one that it requires.
        if item_path in bad_paths or any(join_path(item_path, field) in bad_paths for field in required):
            continue
        sound[name] = _without_paths(item, item_path, bad_paths)
    return sound
