"""Rooms of the project, and the test files of each: the logic behind pytest's option --room."""

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]


@cache
def rooms() -> Mapping[str, str]:
    """Return the dotted module name of each room, by the room's name.

    A room is a folder at any depth of gateway/, a loose module of gateway/, backends or a folder in it, or
    loadtest. The names of the gateway's rooms leave out "gateway/".
    """
    found = {}
    for package in ("gateway", "backends", "loadtest"):
        for init in (ROOT / package).rglob("__init__.py"):
            folder = init.parent.relative_to(ROOT)
            found[folder.as_posix()] = ".".join(folder.parts)
    for module in (ROOT / "gateway").glob("[!_]*.py"):
        found[f"gateway/{module.stem}"] = f"gateway.{module.stem}"
    del found["gateway"]
    return {room.removeprefix("gateway/"): found[room] for room in sorted(found)}


def belongs(path: Path, room: str) -> bool:
    """Return True if a test file is about a room.

    It is if it is in the folder of that name in tests/, if it imports one of the room's modules, or if its
    name begins with one of them, as test_lane_histories.py does with gateway/lane/lane.py.
    """
    module = rooms()[room]
    if path.is_relative_to(ROOT / "tests" / room):
        return True
    if any(f"{path.stem}_".startswith(f"test_{name}_") for name in _module_names(module)):
        return True
    return any(name == module or name.startswith(f"{module}.") for name in _imported(path.read_text()))


@cache
def _module_names(module: str) -> frozenset[str]:
    place = ROOT.joinpath(*module.split("."))
    if not place.is_dir():
        return frozenset({place.name})
    return frozenset(file.stem for file in place.glob("[!_]*.py"))


def _imported(source: str) -> set[str]:
    """Return the modules that a file names in its imports; `from a import b` counts as a and as a.b."""
    found = set(re.findall(r"^\s*import ([\w.]+)", source, re.MULTILINE))
    for module, names in re.findall(r"^\s*from ([\w.]+) import (\([^)]*\)|[^\n]*)", source, re.MULTILINE):
        found.add(module)
        found |= {f"{module}.{name}" for name in re.findall(r"\w+", names)}
    return found
