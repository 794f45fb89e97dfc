"""Figures of a tree: its size, and how often the code takes apart what belongs to another module.

`python -m tests.structure_figures [--tree PATH]` prints them for this tree, or for another version, such as
an export by `git archive COMMIT | tar x -C PATH`. They are read, not tested: code that is cut to suit a
figure is no better. Counted in gateway/ and backends/:

- **Kinds of work and reply**: structs of the unions `Work` and `Reply` in the contract and gateway/calls.py,
  or subclasses there of classes of these names. Each `isinstance` and pattern of a `match` that names one.
- **Attributes of another object**: each target such as `replica.health` of an assignment, of any form. The
  object is anything but the names `self` and `cls`: `self.pool.load` counts. Generated code is left out.
- **Small modules with one importer**: below 60 lines, imported by one other module.
"""

import argparse
import ast
import sys
from collections import Counter, defaultdict
from pathlib import Path

ROOT = Path(__file__).parent.parent
SMALL_LINES = 60
UNIONS = frozenset({"Work", "Reply"})


class Tree:
    """Python files of one version of the project, parsed once."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.product = [
            path for room in ("gateway", "backends") for path in sorted((root / room).rglob("*.py"))
        ]
        self.tests = sorted((root / "tests").rglob("*.py"))
        self.texts = {path: path.read_text(encoding="utf-8") for path in (*self.product, *self.tests)}
        self.parsed = {path: ast.parse(self.texts[path]) for path in self.product}

    def lines(self, paths: list[Path]) -> int:
        return sum(self.texts[path].count("\n") for path in paths)

    def kinds(self) -> frozenset[str]:
        """Return the names of all kinds of work and reply."""
        backends = self.root / "backends"
        places = [
            backends / "contract.py",
            *(backends / "contract").rglob("*.py"),
            self.root / "gateway/calls.py",
        ]
        statements = [node for path in places if path in self.parsed for node in self.parsed[path].body]
        kinds: set[str] = set()
        for node in statements:
            if isinstance(node, ast.AnnAssign) and node.value and names_in(node.target) & UNIONS:
                kinds |= {name for name in names_in(node.value) if name[0].isupper()}
        classes = [node for node in statements if isinstance(node, ast.ClassDef) and node.bases]
        families = set(UNIONS)
        for _ in classes:  # one generation of subclasses each time
            families |= {node.name for node in classes if names_in(node.bases[0]) & families}
        return frozenset((kinds | families) - UNIONS)

    def distinctions(self) -> Counter[Path]:
        """Count the tests for a kind of work or reply, by file."""
        kinds, found = self.kinds(), Counter[Path]()
        for path, tree in self.parsed.items():
            for node in ast.walk(tree):
                match node:
                    case ast.Call(func=ast.Name(id="isinstance"), args=[_, named]):
                        found[path] += bool(names_in(named) & kinds)
                    case ast.MatchClass(cls=named):
                        found[path] += bool(names_in(named) & kinds)
        return +found

    def foreign_assignments(self) -> Counter[Path]:
        """Count the assigned attributes of objects other than `self` and `cls`, by file."""
        found = Counter[Path]()
        for path, tree in self.parsed.items():
            for node in ast.walk(tree):
                if not isinstance(node, ast.Attribute) or not isinstance(node.ctx, ast.Store):
                    continue
                is_own = isinstance(node.value, ast.Name) and node.value.id in {"self", "cls"}
                found[path] += not is_own and not path.name.endswith("_pb2.py")
        return +found

    def small_modules(self) -> list[str]:
        """Return the small modules that one other module imports."""
        modules = {self._name(path): path for path in self.product}
        importers = defaultdict[str, set[str]](set)
        for name, path in modules.items():
            for imported in imported_names(self.parsed[path]):
                module = imported
                while module and module not in modules:
                    module = module.rpartition(".")[0]
                importers[module] |= {name} - {module}
        return [
            name
            for name, path in modules.items()
            if len(importers[name]) == 1 and self.lines([path]) < SMALL_LINES and path.name != "__init__.py"
        ]

    def loose_modules(self, folder: str) -> int:
        return len([path for path in (self.root / folder).glob("*.py") if path.name != "__init__.py"])

    def _name(self, path: Path) -> str:
        return ".".join(path.relative_to(self.root).with_suffix("").parts).removesuffix(".__init__")


def names_in(node: ast.AST) -> set[str]:
    """Return the names in an expression, and those behind its dots."""
    found = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
    return found | {part.attr for part in ast.walk(node) if isinstance(part, ast.Attribute)}


def imported_names(tree: ast.Module) -> list[str]:
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def figures(root: Path) -> dict[str, str]:
    """Return the figures of the tree at a path, by what they count."""
    tree = Tree(root)
    kinds, attributes = tree.distinctions(), tree.foreign_assignments()
    patched = sum(tree.texts[path].count("monkeypatch.setattr(") for path in tree.tests)
    decisions = [path for path in (root / "docs/decisions").glob("*.md") if path.name != "index.md"]
    changelog = (root / "CHANGELOG.md").stat().st_size
    return {
        "lines and modules in gateway/ and backends/": f"{tree.lines(tree.product):,}, {len(tree.product)}",
        "lines and modules in tests/": f"{tree.lines(tree.tests):,}, {len(tree.tests)}",
        "`isinstance` and `match` on a kind of work or reply": f"{kinds.total()} in {len(kinds)} files",
        "assigned attributes of another object": f"{attributes.total()} in {len(attributes)} files",
        "loose modules in backends/; in backends/torch/": (
            f"{tree.loose_modules('backends')}; {tree.loose_modules('backends/torch')}"
        ),
        f"modules below {SMALL_LINES} lines with one importer": str(len(tree.small_modules())),
        "`monkeypatch.setattr` in tests": str(patched),
        "decision records; bytes of CHANGELOG": f"{len(decisions)}; {changelog:,}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Print the figures of a tree.")
    parser.add_argument("--tree", type=Path, default=ROOT, help="root of another version of the project")
    rows = figures(parser.parse_args().tree.resolve()).items()
    sys.stdout.writelines(
        [
            "| figure | value |\n|---|---|\n",
            *(f"| {name} | {value} |\n" for name, value in rows),
        ]
    )


if __name__ == "__main__":
    main()
