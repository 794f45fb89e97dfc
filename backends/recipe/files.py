"""JSON files of a checkpoint's folder: its config and the files that sentence-transformers adds.

Does not interpret them beyond the order and the routes of modules, and loads no weights.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, TypeAlias

import msgspec

from backends.checkpoints.small_files import read_json_file, read_json_object, read_network_settings
from backends.checkpoints.static_models import StaticModel, find_static
from backends.contract.errors import ModelUnavailable

ROUTERS = frozenset({"Router", "Asym"})
# Module that looks up the weight of each token of a text.
TABLE = "SparseStaticEmbedding"
OWN_PACKAGE = "sentence_transformers."

ReadJson: TypeAlias = Callable[[str], dict[str, Any]]


class ListedModule(NamedTuple):
    """Entry of modules.json: the last word of its class, and its folder."""

    kind: str
    folder: str


class RouterConfig(msgspec.Struct, frozen=True):
    """Content of router_config.json. types: class of each module, by its id, which is its folder too."""

    types: dict[str, str]
    structure: dict[str, list[str]]
    parameters: dict[str, Any] = {}


class Routes(NamedTuple):
    """Modules of the route with a network, and the folders of the tables of all other routes.

    tables: route → folder. network: route with the network. default: route of inputs without a role.
    """

    modules: list[ListedModule]
    tables: Mapping[str, str] = {}
    network: str | None = None
    default: str | None = None


def read_routes(modules: Sequence[ListedModule], read_json: ReadJson) -> Routes:
    """Replace a router among the modules by the modules of its route with a network.

    read_json: reads a file of the checkpoint. Raises: ModelUnavailable if a route cannot be served.
    """
    router = next((module for module in modules if module.kind in ROUTERS), None)
    if router is None:
        return Routes(list(modules))
    config = _read_config(router, read_json)
    tables = {
        route: _place(router, ids[0])
        for route, ids in config.structure.items()
        if _kinds(config, ids) == [TABLE]
    }
    networks = [route for route in config.structure if route not in tables]
    if len(modules) > 1 or len(networks) != 1 or not tables:
        raise ModelUnavailable(
            f"the checkpoint has a {router.kind} with the routes {', '.join(config.structure)}; the built-in "
            f"engine serves one network next to routes of {TABLE} only"
        )
    ids = config.structure[networks[0]]
    listed = [
        ListedModule(kind, _place(router, id_)) for kind, id_ in zip(_kinds(config, ids), ids, strict=True)
    ]
    if not listed or listed[0].folder:
        raise ModelUnavailable(
            f"the checkpoint has its network in {listed[0].folder if listed else 'no folder'}; the built-in "
            'engine needs it at the top, where router_config.json names it ""'
        )
    return Routes(listed, tables, networks[0], _default(config))


def network_folders(router: ListedModule, read_json: ReadJson) -> list[str]:
    """Return the folders of the networks of a router, as far as its file states them."""
    at = f"{router.folder}/" if router.folder else ""
    types = (read_json(f"{at}router_config.json") or read_json(f"{at}config.json")).get("types")
    if not isinstance(types, dict):
        return []
    return [_place(router, id_) for id_, name in types.items() if str(name).endswith("Transformer")]


def _read_config(router: ListedModule, read_json: ReadJson) -> RouterConfig:
    at = f"{router.folder}/" if router.folder else ""
    # Asym wrote config.json, which at the top is the network's.
    content = read_json(f"{at}router_config.json") or (read_json(f"{at}config.json") if at else {})
    try:
        config = msgspec.convert(content, RouterConfig)
    except msgspec.ValidationError as error:
        raise ModelUnavailable(
            f"{at}router_config.json states no routes for the module {router.kind}"
        ) from error
    foreign = [name for name in config.types.values() if not name.startswith(OWN_PACKAGE)]
    unknown = [id_ for ids in config.structure.values() for id_ in ids if id_ not in config.types]
    outside = [id_ for id_ in config.types if ".." in PurePosixPath(id_).parts or id_.startswith("/")]
    if foreign or unknown or outside or config.parameters.get("route_mappings"):
        named = ", ".join([*foreign, *unknown, *outside]) or "`route_mappings`"
        raise ModelUnavailable(f"{at}router_config.json has routes that the engine does not serve: {named}")
    return config


def _kinds(config: RouterConfig, ids: Sequence[str]) -> list[str]:
    return [config.types[id_].rsplit(".", 1)[-1] for id_ in ids]


def _place(router: ListedModule, id_: str) -> str:
    return "/".join(part for part in (router.folder, id_) if part)


def _default(config: RouterConfig) -> str | None:
    stated: str | None = config.parameters.get("default_route")
    if stated is None and config.parameters.get("allow_empty_key", True):
        return next(iter(config.structure))
    return stated


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
