"""Routes of sentence-transformers' `Router`: modules of their own for queries and for documents.

Pure. Served is a network for one role with a table of weights for the other, as sparse models without a
network for queries have it. Source: sentence-transformers 6, `Router` and `SparseStaticEmbedding`.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any, NamedTuple, TypeAlias

import msgspec

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
