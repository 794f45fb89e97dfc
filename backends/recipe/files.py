"""JSON files of a checkpoint's folder: its config and the files that sentence-transformers adds.

Does not interpret them, and loads no weights.
"""

from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

from backends.checkpoints.json_files import read_json_file, read_json_object
from backends.checkpoints.network_settings import read_network_settings
from backends.checkpoints.static_models import StaticModel, find_static
from backends.contract.errors import ModelUnavailable
from backends.recipe.routes import ListedModule, Routes, read_routes

Json = dict[str, Any]
# Packages whose modules the engine knows.
MODULE_PACKAGES = ("sentence_transformers.", "pylate.")


class CheckpointFiles:
    """Small files of a checkpoint, each read on first use; {} for a missing file.

    Raises: ModelUnavailable for a file that is not valid JSON.
    """

    def __init__(self, checkpoint: Path) -> None:
        self.checkpoint = checkpoint

    @cached_property
    def config(self) -> Json:
        """Configuration of transformers: config.json."""
        return self.read_json("config.json")

    @cached_property
    def sentence_config(self) -> Json:
        """Prompts and kind of the whole model, by sentence-transformers or PyLate."""
        return self.read_json("config_sentence_transformers.json")

    @cached_property
    def modules(self) -> list[ListedModule]:
        """Entries of modules.json in order; empty for a plain transformers checkpoint.

        A router stands for the modules of its route with a network.
        """
        return self.routes.modules

    @cached_property
    def routes(self) -> Routes:
        """Modules by the role of an input, where modules.json lists a router.

        Raises: ModelUnavailable for routes that the engine does not serve.
        """
        return read_routes(self.listed, self.read_json)

    @cached_property
    def own_modules(self) -> list[str]:
        """Classes of modules.json that are code of the checkpoint or of an unknown package."""
        names = [str(entry["type"]) for entry in self._entries]
        return [name for name in names if not name.startswith(MODULE_PACKAGES)]

    @cached_property
    def static(self) -> StaticModel | None:
        """Static model in the folder, None if there is none."""
        return find_static(self.checkpoint)

    @cached_property
    def listed(self) -> list[ListedModule]:
        """Entries of modules.json as they stand there, a router among them."""
        _refuse_repeated_names(self._entries, self.checkpoint)
        return [
            ListedModule(str(entry["type"]).rsplit(".", 1)[-1], _folder_of(entry, self.checkpoint))
            for entry in self._entries
        ]

    @cached_property
    def _entries(self) -> list[Json]:
        return read_json_file(self.checkpoint / "modules.json", list[Json]) or []

    @cached_property
    def transformer_config(self) -> Json:
        """Settings of sentence-transformers for the network itself: lengths, lower case."""
        folder = _network_folder(self.listed)
        return read_network_settings(lambda name: self.read_json(f"{folder}/{name}"))

    @cached_property
    def tokenizer_config(self) -> Json:
        """Content of tokenizer_config.json in the network's folder."""
        return self.read_json(f"{_network_folder(self.listed)}/tokenizer_config.json")

    def module_folder(self, kind: str) -> str | None:
        """Return the folder of the last module of a kind, None if there is none."""
        return _last_folder(self.modules, kind)

    def module_config(self, kind: str, name: str = "config.json") -> Json:
        """Return a file of a module's folder, {} if no module of its kind is listed."""
        folder = _last_folder(self.modules, kind)
        return {} if folder is None else self.read_json(f"{folder or '.'}/{name}")

    def read_json(self, name: str) -> Json:
        """Return a file by its path in the checkpoint."""
        return read_json_object(self.checkpoint / name)

    def has(self, name: str) -> bool:
        """Return True if there is a file of that name."""
        return (self.checkpoint / name).is_file()


def _folder_of(entry: Json, checkpoint: Path) -> str:
    """Return the folder of a module, "" for the top. Raises: ModelUnavailable if it leads out of it."""
    path = PurePosixPath(str(entry.get("path", "")))
    if path.is_absolute() or ".." in path.parts:
        raise ModelUnavailable(f"{checkpoint}/modules.json names a folder outside of it: {path}")
    return "/".join(path.parts)


def _refuse_repeated_names(entries: Sequence[Json], checkpoint: Path) -> None:
    """Raise ModelUnavailable for names of several modules, of which their library keeps the last."""
    names = Counter(str(entry["name"]) for entry in entries if "name" in entry)
    repeated = sorted(name for name, count in names.items() if count > 1)
    if repeated:
        raise ModelUnavailable(f"{checkpoint}/modules.json gives a name to several modules: {repeated[0]}")


def _last_folder(modules: Sequence[ListedModule], kind: str) -> str | None:
    return next((module.folder for module in reversed(modules) if module.kind == kind), None)


def _network_folder(listed: Sequence[ListedModule]) -> str:
    """Return the folder of the network, the top if no module is listed."""
    # The network's files are also read for other servers, whose routes need not be known.
    return _last_folder(listed, "Transformer") or "."
