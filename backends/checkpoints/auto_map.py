"""Classes that a checkpoint's `auto_map` names, and the files that define them.

transformers looks up a class of a checkpoint's own code in this entry of config.json: a module and a class
in the checkpoint's repository, or in the repository before `--`.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from backends.contract.errors import ModelUnavailable

REFERENCE = re.compile(
    r"(?:(?P<repository>[\w.-]+/[\w.-]+)--)?(?P<module>[A-Za-z_]\w*)\.(?P<name>[A-Za-z_]\w*)"
)
# The two forms of relative imports that transformers follows.
RELATIVE_IMPORT = re.compile(r"^\s*(?:from\s+\.(\w+)\s+import|import\s+\.(\w+)\s*$)", re.MULTILINE)


class ClassReference(NamedTuple):
    """Class of a checkpoint's own code. repository: None for the checkpoint's own."""

    repository: str | None
    module: str
    name: str

    @property
    def label(self) -> str:
        """Name and place of the class for messages."""
        return f"`{self.name}` of {self.repository or 'its own repository'}"

    @property
    def local_name(self) -> str:
        """Module and class, without the repository."""
        return f"{self.module}.{self.name}"


def read_auto_map(config: Mapping[str, Any]) -> dict[str, ClassReference]:
    """Return the classes of `auto_map` by the auto class that they stand for.

    Raises: ModelUnavailable for an entry that names no class.
    """
    entries = config.get("auto_map") or {}
    if not isinstance(entries, Mapping):
        raise ModelUnavailable("`auto_map` in config.json is not an object")
    return {str(auto_class): _reference(auto_class, entry) for auto_class, entry in entries.items() if entry}


def _reference(auto_class: str, entry: Any) -> ClassReference:
    # A tokenizer has two entries, of which the second is the fast one.
    names = [name for name in (entry if isinstance(entry, list) else [entry]) if name is not None]
    match = REFERENCE.fullmatch(str(names[-1])) if names else None
    if match is None:
        raise ModelUnavailable(f"`auto_map` names no class for {auto_class}: {entry!r}; give `module.Class`")
    return ClassReference(match["repository"], match["module"], match["name"])


def missing_modules(folder: Path, modules: Iterable[str]) -> list[str]:
    """Return the files that the modules, or those that they import relatively, lack in a folder."""
    pending, seen, missing = list(modules), set[str](), []
    while pending:
        name = f"{pending.pop()}.py"
        if name in seen:
            continue
        seen.add(name)
        try:
            text = (folder / name).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            missing.append(name)
            continue
        pending.extend(first or second for first, second in RELATIVE_IMPORT.findall(text))
    return sorted(missing)


def missing_own_code(folder: Path) -> list[str]:
    """Return the missing files of the code that lies in a checkpoint's own repository."""
    try:
        config = msgspec.json.decode((folder / "config.json").read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError):
        return []
    references = read_auto_map(config).values()
    modules = [reference.module for reference in references if reference.repository is None]
    return missing_modules(folder, modules)
