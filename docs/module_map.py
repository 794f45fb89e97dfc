"""Writer of MODULES.md: the first line of every module's docstring, by room.

`python docs/module_map.py` writes the page; a test compares it with the tree.
"""

import ast
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "MODULES.md"
HEAD = """\
# Modules

Every module with its first line, for a reader who looks for the file to change. `make modules` writes this
page. [ARCHITECTURE.md](ARCHITECTURE.md) explains the rooms.
"""


def page() -> str:
    """Return the page for the tree as it is."""
    files = [path for package in ("gateway", "backends") for path in sorted((ROOT / package).rglob("*.py"))]
    modules = [path.relative_to(ROOT) for path in files if not path.stem.endswith(("_pb2", "__init__"))]
    rooms = groupby(sorted(modules, key=lambda path: (path.parent.parts, path)), key=lambda path: path.parent)
    return HEAD + "".join(
        f"\n## {room.as_posix()}/\n\n" + "".join(f"- `{path.name}`: {_first_line(path)}\n" for path in paths)
        for room, paths in rooms
    )


def _first_line(path: Path) -> str:
    docstring = ast.get_docstring(ast.parse((ROOT / path).read_text(encoding="utf-8"))) or ""
    return " ".join(docstring.partition("\n\n")[0].split())


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
