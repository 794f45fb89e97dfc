"""Writer of MODULES.md: the first line of every module and script, by room.

`python docs/module_map.py` writes the page; a test compares it with the tree.
"""

import ast
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "MODULES.md"
HEAD = """\
# Modules

Every Python module and every script that runs in Redis (`.lua`), each with its first line, for a reader who
looks for the file to change. `make modules` writes this page. [ARCHITECTURE.md](ARCHITECTURE.md) explains the
rooms. The console in `gateway/api/operators/console/src` is TypeScript; its files begin with such a line too.
"""
# Beginnings of comments, in files other than Python's.
COMMENTS = {".lua": "--"}
# Packages of the console may have scripts in other languages.
LEFT_OUT = {"node_modules"}


def page() -> str:
    """Return the page for the tree as it is."""
    files = [path for package in ("gateway", "backends") for path in _files(ROOT / package)]
    modules = [path.relative_to(ROOT) for path in files if not path.stem.endswith(("_pb2", "__init__"))]
    rooms = groupby(sorted(modules, key=lambda path: (path.parent.parts, path)), key=lambda path: path.parent)
    return HEAD + "".join(
        f"\n## {room.as_posix()}/\n\n" + "".join(f"- `{path.name}`: {_first_line(path)}\n" for path in paths)
        for room, paths in rooms
    )


def _files(folder: Path) -> list[Path]:
    suffixes = {".py", *COMMENTS}
    found = (path for path in folder.rglob("*") if path.suffix in suffixes)
    return [path for path in found if LEFT_OUT.isdisjoint(path.relative_to(folder).parts)]


def _first_line(path: Path) -> str:
    text = (ROOT / path).read_text(encoding="utf-8")
    if path.suffix == ".py":
        text = ast.get_docstring(ast.parse(text)) or ""
    else:
        sign = COMMENTS[path.suffix]
        lines = iter(text.splitlines())
        beginning = []
        for line in lines:
            if not line.startswith(sign):
                break
            beginning.append(line.removeprefix(sign).strip())
        # The first sentence.
        text = " ".join(beginning).partition(". ")[0].removesuffix(".") + "." if beginning else ""
    return " ".join(text.partition("\n\n")[0].split())


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
