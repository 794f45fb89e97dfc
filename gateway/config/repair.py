"""Repair of a configuration with mistakes, so that one mistake does not hide those below or after it."""

from collections.abc import Collection, Mapping
from typing import Any, get_args, get_origin, get_type_hints

import msgspec

from gateway.config.problems import Problem, join_path, similar_name
from gateway.config.type_checks import RENAMED_KEYS, is_section, present_member, unknown_key

# Between a key and its correction. Suggestions are less certain.
MIN_SIMILARITY = 0.8


class KeyCorrector:
    """Corrector of misspelt keys. renamed: path with the corrected key → the key as it is written."""

    def __init__(self) -> None:
        self.renamed: dict[str, str] = {}
        self.problems: list[Problem] = []

    def correct(self, value: Any, kind: Any, path: str = "") -> Any:
        """Return a copy of parsed data with misspelt keys corrected, where the correct one is not given."""
        kind = present_member(value, kind)
        if not isinstance(value, dict):
            return value
        if get_origin(kind) is dict:
            item_kind = get_args(kind)[1]
            return {
                name: self.correct(item, item_kind, join_path(path, name)) for name, item in value.items()
            }
        if not is_section(kind):
            return value
        annotations = get_type_hints(kind, include_extras=True)
        corrected: dict[str, Any] = {}
        for written, item in value.items():
            name = self._meant(written, annotations, {*value, *corrected}, path)
            corrected[name] = self.correct(item, annotations.get(name), join_path(path, name))
        return corrected

    def _meant(self, written: str, known: Mapping[str, Any], taken: Collection[str], path: str) -> str:
        """Return the key that a written one means, or the written one."""
        # A colon: a space is missing after it, which has a message of its own.
        if written in known or ":" in written:
            return written
        current = RENAMED_KEYS.get(written)
        name = current if current in known else similar_name(written, known, MIN_SIMILARITY)
        if name is None or name in taken:
            return written
        self.renamed[join_path(path, name)] = written
        self.problems.append(unknown_key(written, known, path))
        return name


def sound_parts(value: Any, kind: Any, path: str, bad_paths: Collection[str]) -> Any:
    """Return a copy of parsed data without the values at some paths, and without what needs them.

    Returns msgspec.UNSET if nothing is left.
    """
    if path in bad_paths:
        return msgspec.UNSET
    kind = present_member(value, kind)
    if isinstance(value, list):
        is_sound = not any(f"{path}[{index}]" in bad_paths for index in range(len(value)))
        return value if is_sound else msgspec.UNSET
    if not isinstance(value, dict):
        return value
    if is_section(kind):
        kinds = get_type_hints(kind, include_extras=True)
    elif get_origin(kind) is dict:
        kinds = dict.fromkeys(value, get_args(kind)[1])
    else:
        return value
    parts = {
        name: sound_parts(item, kinds.get(name), join_path(path, name), bad_paths)
        for name, item in value.items()
    }
    sound = {name: part for name, part in parts.items() if part is not msgspec.UNSET}
    is_whole = not is_section(kind) or all(
        field.name in sound for field in msgspec.structs.fields(kind) if field.required
    )
    # The file itself is kept, with what it has.
    return sound if is_whole or not path else msgspec.UNSET
