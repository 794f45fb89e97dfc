"""Shape of the tree: rooms, arrows between them, and depth of imports.

A room is a folder of `gateway/` or one of its loose modules; `backends/` and `loadtest/` are one room each.
"""

import ast
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.structure_figures import Tree, figures

ROOT = Path(__file__).parent.parent
PACKAGES = ("gateway", "backends", "loadtest")

LOOSE_MODULES_MAX = 11

Graph = dict[str, frozenset[str]]


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_name(path): path for package in PACKAGES for path in (ROOT / package).rglob("*.py")}


def imported_names(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@cache
def tree_of(name: str) -> ast.Module:
    return ast.parse(MODULES[name].read_text(encoding="utf-8"))


def imports_of(name: str) -> frozenset[str]:
    """Return the modules of this project that a module imports, for type checking too."""
    found = set()
    for imported in imported_names(tree_of(name)):
        module = imported
        while module and module not in MODULES:
            module = module.rpartition(".")[0]
        # A bare package holds no code.
        if module not in ("", name, *PACKAGES):
            found.add(module)
    return frozenset(found)


@cache
def graph() -> Graph:
    """Return the imports of every module. Not at import: every test process imports this file."""
    return {name: imports_of(name) for name in MODULES}


def room_of(name: str) -> str:
    parts = name.split(".")
    return parts[0] if parts[0] != "gateway" else ".".join(parts[:2])


def arrows() -> set[tuple[str, str]]:
    pairs = {(room_of(name), room_of(module)) for name, modules in graph().items() for module in modules}
    return {(room, other) for room, other in pairs if room != other}


def test_no_import_leads_back_to_its_module() -> None:
    """Late imports count too."""
    remaining = {name: set(modules) for name, modules in graph().items()}
    while leaves := [name for name, modules in remaining.items() if not modules & remaining.keys()]:
        for name in leaves:
            del remaining[name]

    assert [] == sorted(remaining)


def test_no_room_imports_a_room_that_imports_it() -> None:
    below = defaultdict(set)
    for room, other in arrows():
        below[room].add(other)

    def reachable(room: str) -> set[str]:
        found: set[str] = set()
        pending = [room]
        while pending:
            new = below[pending.pop()] - found
            found |= new
            pending.extend(new)
        return found

    assert [] == sorted(room for room in list(below) if room in reachable(room))


def test_few_modules_stand_loose_in_the_gateway() -> None:
    loose = {path.stem for path in (ROOT / "gateway").glob("*.py")} - {"__init__", "__main__"}
    assert len(loose) <= LOOSE_MODULES_MAX, sorted(loose)


def test_no_two_test_files_share_a_name() -> None:
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [] == [name for name, count in names.items() if count > 1]


def test_figures_of_a_tree_follow_their_rules(tmp_path: Path) -> None:
    files = {
        "backends/contract/work.py": "Work: TypeAlias = Embed | Rerank\nclass Late(EncodeReply): ...\n",
        "backends/contract/encode.py": "class EncodeReply(Reply): ...\nclass Chat(Struct): ...\n",
        "backends/torch/heads.py": "import backends.contract.work\nself.lane.size = self.size = 1\n",
        "backends/loose.py": "for item.place in isinstance(a, Late | str), isinstance(a, Chat): pass\n",
        "gateway/cut.py": "match work:\n    case Embed() | contract.Rerank(): lane.size += 1\n",
        "tests/test_cut.py": "monkeypatch.setattr(a, 'b', 1)\n",
        "docs/decisions/001-a.md": "# 001",
        "docs/decisions/index.md": "# Decisions",
        "CHANGELOG.md": "12345",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    assert frozenset({"Embed", "Rerank", "Late", "EncodeReply"}) == Tree(tmp_path).kinds()
    assert [
        "9, 5",
        "1, 1",
        "3 in 2 files",
        "3 in 3 files",
        "1; 1",
        "1",
        "1",
        "1; 5",
    ] == list(figures(tmp_path).values())
