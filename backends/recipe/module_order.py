"""Order of a checkpoint's sentence-transformers modules: those before pooling, and those behind it.

Pure. Source: sentence-transformers 6, whose modules pass named tensors on. A module that stands where its
tensor does not exist yet, or is not read any more, is an error.
"""

from collections.abc import Sequence
from typing import NoReturn, get_args

from backends.contract.errors import ModelUnavailable
from backends.recipe.files import ROUTERS, TABLE, CheckpointFiles, ListedModule, network_folders
from backends.recipe.recipe import Projection, ProjectionKind

KINDS: dict[str, ProjectionKind] = {kind: kind for kind in get_args(ProjectionKind)}
# Modules that change nothing outside of training.
IDENTITIES = frozenset({"Dropout"})
LAYER_MIX = "WeightedLayerPooling"
NETWORKS = frozenset({"Transformer", "MLMTransformer", "StaticEmbedding"})
# Modules that may stand in several places. Of several poolings the last one counts, as each replaces the
# vector of the one before.
REPEATABLE = frozenset({*KINDS, *IDENTITIES, "Pooling"})


def check_order(files: CheckpointFiles) -> None:
    """Raise ModelUnavailable unless the modules begin with their only network, and it is at the top."""
    modules = files.modules
    if not modules:
        return
    kinds = [module.kind for module in modules]
    if kinds[0] not in NETWORKS or NETWORKS & set(kinds[1:]):
        raise ModelUnavailable(
            f"{files.checkpoint} lists the modules {', '.join(kinds)} in modules.json; the first, and "
            "no other, has to be its network"
        )
    repeated = sorted({kind for kind in kinds if kinds.count(kind) > 1} - REPEATABLE)
    if repeated:
        raise ModelUnavailable(
            f"{files.checkpoint} lists {', '.join(repeated)} more than once in modules.json; "
            "remove the entries that do not belong to the model"
        )
    if kinds[0] != "StaticEmbedding" and modules[0].folder:
        _refuse_folder(files, modules[0].folder)


def refuse_folders(files: CheckpointFiles) -> None:
    """Raise ModelUnavailable for modules without a network at the top, with what they are."""
    listed = files.listed
    if not listed:
        return
    first, kinds = listed[0], ", ".join(module.kind for module in listed)
    if first.kind in ROUTERS:
        folders = network_folders(first, files.read_json)
        raise ModelUnavailable(
            f"{files.checkpoint} is the module {first.kind} of sentence-transformers with networks in the "
            f"folders {', '.join(folders) or 'of its routes'}; the built-in engine serves one network, at "
            f"the top, next to routes of {TABLE}: serve the model with Infinity behind this gateway, or each "
            "folder of a network as an upstream of its own"
        )
    if first.kind == TABLE:
        raise ModelUnavailable(
            f"{files.checkpoint} is a {TABLE}, a table of token weights without a network; the built-in "
            "engine serves it as the route of queries next to a network for documents only"
        )
    if first.kind not in NETWORKS:
        raise ModelUnavailable(
            f"{files.checkpoint} begins with the module {first.kind} of sentence-transformers ({kinds}), "
            "which is no network of transformers; the built-in engine does not have it: serve the model with "
            "Infinity behind this gateway"
        )
    if first.folder:
        _refuse_folder(files, first.folder)


def _refuse_folder(files: CheckpointFiles, folder: str) -> NoReturn:
    raise ModelUnavailable(
        f"{files.checkpoint} has its network in {folder}; move the files of that folder to the top, and set "
        'its `path` in modules.json to ""'
    )


def projections(files: CheckpointFiles) -> tuple[Projection, ...]:
    """Return the modules behind pooling, or all if there is no pooling; the last scaling is left out."""
    found = [Projection(KINDS[kind], folder) for kind, folder in _behind(files.modules) if kind in KINDS]
    while found and found[-1].kind == "Normalize":
        found.pop()
    return tuple(found)


def is_scaled(files: CheckpointFiles) -> bool:
    """Return whether the last module that changes vectors scales them to length 1."""
    kinds = [module.kind for module in files.modules if module.kind in KINDS]
    return bool(kinds) and kinds[-1] == "Normalize"


def token_projections(files: CheckpointFiles) -> tuple[Projection, ...]:
    """Return the modules between network and pooling that project each token. Raises: ModelUnavailable."""
    before = [
        module for module in _before(files.modules) if module.kind in KINDS or module.kind in IDENTITIES
    ]
    for kind, folder in before:
        if kind != "Dense":
            raise ModelUnavailable(
                f"{files.checkpoint} lists {kind} before Pooling, where there is no vector of the text yet"
            )
        read = files.read_json(f"{folder}/config.json")
        name = read.get("module_input_name", "sentence_embedding")
        if {name, read.get("module_output_name") or name} != {"token_embeddings"}:
            raise ModelUnavailable(
                f"{files.checkpoint}/{folder} stands before Pooling and projects {name}, not token_embeddings"
            )
    return tuple(Projection("Dense", folder) for _, folder in before)


def layer_weights(files: CheckpointFiles) -> str | None:
    """Return the folder of the weights of layers, None if vectors are those of the last layer.

    Raises: ModelUnavailable.
    """
    places = [place for place, module in enumerate(files.modules) if module.kind == LAYER_MIX]
    if not places:
        return None
    if places != [1]:
        raise ModelUnavailable(f"{files.checkpoint} lists {LAYER_MIX} elsewhere than behind its network")
    if not files.config.get("output_hidden_states"):
        raise ModelUnavailable(
            f"{files.checkpoint} lists {LAYER_MIX}, which sentence-transformers skips without "
            "`output_hidden_states: true` in config.json; set that, or remove the module"
        )
    return files.modules[1].folder


def _pooling_place(modules: Sequence[ListedModule]) -> int | None:
    places = (place for place, module in enumerate(modules) if module.kind == "Pooling")
    return max(places, default=None)


def _before(modules: Sequence[ListedModule]) -> Sequence[ListedModule]:
    place = _pooling_place(modules)
    return () if place is None else modules[:place]


def _behind(modules: Sequence[ListedModule]) -> Sequence[ListedModule]:
    place = _pooling_place(modules)
    return modules if place is None else modules[place + 1 :]
