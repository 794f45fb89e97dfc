"""Files of weights: which ones a network is read from, what is checked before, and single tensors of them.

Only this module imports safetensors. Rule: code in a file of weights is never run.

The tensors of the files are compared with those of the network. One that the files lack is filled with random
numbers by transformers, and one that the network lacks is ignored: both give wrong vectors without an error.
Therefore each difference is an error, except the few of this module, which change no result.
"""

import hashlib
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NamedTuple
from zipfile import is_zipfile

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from backends.contract.errors import ModelUnavailable
from backends.recipe.recipe import ModelKind
from backends.torch.refusals import first_line

# In the order in which transformers looks for them.
NETWORK_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
# Names of number formats in safetensors; networks with narrower ones are not read.
FORMATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Starts of the names of floating-point formats with less than 16 bits, whose numbers need a scale.
NARROW_PREFIXES = ("F8_", "F6_", "F4")
# Name of a large file in the cache of the hub: the SHA-256 of its content.
CONTENT_DIGEST = re.compile("[0-9a-f]{64}")
# Start of a file that Git LFS leaves in place of a large one.
LFS_START = b"version https://git-lfs"
# Errors of reading a file that is damaged, or is no file of weights.
READ_ERRORS = (OSError, RuntimeError, KeyError, ValueError, EOFError, SafetensorError, UnpicklingError)


# Bits of an element by the name of its type in safetensors; others have 32.
ELEMENT_BITS = {
    **dict.fromkeys(("F64", "I64", "U64"), 64),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2"), 8),
    "F4": 4,
}


class StoredTensor(msgspec.Struct, frozen=True):
    """Type and shape of a tensor in a file."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Bytes of its data in the file."""
        return self.elements * ELEMENT_BITS.get(self.dtype, 32) // 8


class ShardIndex(msgspec.Struct, frozen=True):
    """Content of `….index.json`. weight_map: tensor name → file name."""

    weight_map: dict[str, str]


def network_files(checkpoint: Path) -> list[Path]:
    """Return the files that hold a network's tensors, each of them whole.

    Raises: ModelUnavailable if one is missing, cut off, or not the file that was published.
    """
    files = _listed_files(checkpoint)
    for file in files:
        check_file(file)
    return files


def stored_tensors(checkpoint: Path, folders: Sequence[str] = ()) -> dict[str, StoredTensor] | None:
    """Return the tensors of a network's files without reading their data; None if no file can show them.

    folders: those of the checkpoint's modules, which become a prefix of the names of their tensors.
    Raises: ModelUnavailable if a file is missing or cut off.
    """
    if not any((checkpoint / name).is_file() for name in NETWORK_FILES):
        return None
    files = _listed_files(checkpoint)
    if any(file.suffix != ".safetensors" for file in files):
        return None
    tensors = {name: tensor for file in files for name, tensor in read_headers(file).items()}
    for folder in folders:
        file = checkpoint / folder / "model.safetensors"
        if file.is_file():
            tensors |= {f"{folder}/{name}": tensor for name, tensor in read_headers(file).items()}
    return tensors


def read_headers(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a safetensors file without reading their data. Raises: ModelUnavailable."""
    try:
        with safe_open(path, "pt") as file:
            slices = {name: file.get_slice(name) for name in _names(file)}
            tensors = {
                name: StoredTensor(part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()
            }
    except READ_ERRORS as error:
        raise unreadable(path, error) from error
    for name, tensor in tensors.items():
        _refuse_narrow(path, name, tensor.dtype if tensor.dtype.startswith(NARROW_PREFIXES) else None)
    return tensors


def check_file(path: Path) -> None:
    """Check that a file of weights is whole, and that it is the published file where its digest is known.

    Raises: ModelUnavailable.
    """
    try:
        if path.suffix == ".safetensors":
            # A header must account for every byte of the file.
            with safe_open(path, "pt"):
                pass
        published = path.resolve().name if path.is_symlink() else ""
        if not CONTENT_DIGEST.fullmatch(published):
            return
        status = path.stat()
        digest = _sha256(path.resolve(), status.st_size, status.st_mtime_ns)
    except READ_ERRORS as error:
        raise unreadable(path, error) from error
    if digest != published:
        raise ModelUnavailable(
            f"{path} is damaged: its SHA-256 is {digest}, and that of the published file is {published}; "
            "delete it and fetch the model again"
        )


def stored_formats(files: Iterable[Path]) -> frozenset[torch.dtype]:
    """Return the number formats of the files' floating-point tensors. Raises: ModelUnavailable."""
    formats: set[torch.dtype] = set()
    for path in files:
        try:
            formats |= set(_formats_of(path))
        except READ_ERRORS as error:
            raise unreadable(path, error) from error
    return frozenset(formats)


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Return all tensors of a small module's folder. Raises: ModelUnavailable."""
    path = folder / "model.safetensors"
    return read_file(path if path.is_file() else folder / "pytorch_model.bin")


def read_file(path: Path) -> dict[str, Tensor]:
    """Return all tensors of a file: safetensors, or a state dict of torch. Raises: ModelUnavailable."""
    check_file(path)
    try:
        return load_file(path) if path.suffix == ".safetensors" else _read_pickled(path)
    except READ_ERRORS as error:
        raise unreadable(path, error) from error


def read_tensor(checkpoint: Path, name: str) -> Tensor | None:
    """Return one tensor from a network's files, None if they have none of that name.

    Raises: ModelUnavailable.
    """
    for path in network_files(checkpoint):
        try:
            tensor = _tensor_of(path, name)
        except READ_ERRORS as error:
            raise unreadable(path, error) from error
        if tensor is not None:
            return tensor
    return None


def unreadable(path: Path, error: Exception) -> ModelUnavailable:
    """Return the error for a file of weights that could not be read."""
    if _is_pointer(path):
        return ModelUnavailable(
            f"{path} is a pointer of Git LFS and holds no weights; run `git lfs pull` in its repository"
        )
    return ModelUnavailable(
        f"the weights in {path} could not be read: {first_line(error)}; fetch the file again"
    )


def _is_pointer(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(LFS_START)) == LFS_START
    except OSError:
        return False


def _listed_files(checkpoint: Path) -> list[Path]:
    name = next((name for name in NETWORK_FILES if (checkpoint / name).is_file()), None)
    if name is None:
        raise ModelUnavailable(f"{checkpoint} has no weights: it needs {' or '.join(NETWORK_FILES[::2])}")
    return _shards(checkpoint / name) if name.endswith(".json") else [checkpoint / name]


def _shards(index: Path) -> list[Path]:
    try:
        names = msgspec.json.decode(index.read_bytes(), type=ShardIndex).weight_map.values()
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ModelUnavailable(f"{index} is no valid index of weights: {error}") from error
    shards = [index.parent / name for name in sorted(set(names))]
    missing = [shard.name for shard in shards if not shard.is_file()]
    if missing:
        raise ModelUnavailable(
            f"{len(missing)} of {len(shards)} files that {index} names are missing: "
            f"{', '.join(missing[:3])}; fetch the model again"
        )
    return shards


def _formats_of(path: Path) -> Iterator[torch.dtype]:
    if path.suffix != ".safetensors":
        floats = {name: value for name, value in _read_pickled(path).items() if value.is_floating_point()}
        for name, value in floats.items():
            _refuse_narrow(path, name, None if value.dtype in FORMATS.values() else str(value.dtype))
            yield value.dtype
        return
    names = {tensor.dtype for tensor in read_headers(path).values()}
    yield from (FORMATS[name] for name in names & FORMATS.keys())


def _refuse_narrow(path: Path, name: str, found: str | None) -> None:
    if found is not None:
        raise ModelUnavailable(
            f"{path} holds {name} as {found}, which the built-in engine does not read; give the checkpoint "
            "with the weights that it was made from"
        )


def _tensor_of(path: Path, name: str) -> Tensor | None:
    if path.suffix != ".safetensors":
        return _read_pickled(path).get(name)
    with safe_open(path, "pt") as file:
        tensor: Tensor | None = file.get_tensor(name) if name in _names(file) else None
    return tensor


def _names(file: Any) -> Iterator[str]:
    yield from file.keys()


def _read_pickled(path: Path) -> dict[str, Tensor]:
    # Files of torch before 1.6 cannot be mapped.
    state: dict[str, Tensor] = torch.load(path, "cpu", weights_only=True, mmap=is_zipfile(path))
    return state


@lru_cache(maxsize=1024)
def _sha256(path: Path, size: int, modified_ns: int) -> str:
    """Return the digest of a file, computed once for each size and time of its last change."""
    del size, modified_ns
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# Parts of networks for other tasks, which stand at the top of a checkpoint's names next to the encoder. They
# are ignored only where the network that is loaded has no part of that name.
OTHER_TASKS = frozenset(
    {
        "classifier",  # sequence or token classification
        "cls",  # BERT: masked words and next sentence
        "decoder",  # ModernBERT: masked words; T5: text generation
        "discriminator_predictions",  # ELECTRA
        "generator_lm_head",  # ELECTRA
        "generator_predictions",  # ELECTRA
        "head",  # ModernBERT: before the masked words
        "lm_head",  # next or masked words
        "lm_predictions",  # DeBERTa: masked words
        "mask_predictions",  # DeBERTa
        "pooler",  # a layer for classifiers behind the first token
        "pre_classifier",  # DistilBERT
        "predictions",  # ALBERT: masked words
        "qa_outputs",  # question answering
        "score",  # sequence classification of decoders
        "sop_classifier",  # ALBERT: order of sentences
        "vocab_layer_norm",  # DistilBERT: masked words
        "vocab_projector",  # DistilBERT: masked words
        "vocab_transform",  # DistilBERT: masked words
    }
)
# ColBERT's projection, which has a reader of its own.
PROJECTION = "linear."
# BERT's next-sentence layer lies inside the head for masked words, the next word's inside a model of pages.
OTHER_TASKS_INSIDE = ("cls.seq_relationship.", "vlm.lm_head.", "vlm.language_model.lm_head.")
# Tables that follow from the configuration; the network computes them itself.
COMPUTED = ("position_ids", "token_type_ids", "inv_freq", "masked_bias", "relative_position_index")
# Kinds whose readers take token vectors only, so that the encoder's own pooler is removed.
WITHOUT_POOLER: frozenset[ModelKind] = frozenset({"dense", "multivector"})
# Tensors that a message names, of each sort.
NAMED = 2


class TensorDifferences(NamedTuple):
    """Names of tensors that differ between files and network, as transformers reports them.

    parts: names of the network's top modules. mismatched: name, shape in the file, shape in the network.
    """

    parts: Collection[str]
    missing: Collection[str]
    unexpected: Collection[str]
    mismatched: Collection[tuple[str, Any, Any]]

    @classmethod
    def of(cls, parts: Collection[str], info: Mapping[str, Any]) -> "TensorDifferences":
        """Return the differences in the loading info of transformers."""
        return cls(parts, info["missing_keys"], info["unexpected_keys"], info["mismatched_keys"])


def describe_faults(differences: TensorDifferences, kind: ModelKind, prefix: str) -> str:
    """Return a sentence on the tensors that make the network wrong, empty if there are none.

    prefix: name of the encoder among the network's parts, where it is one of several.
    """
    unneeded = "pooler." if kind in WITHOUT_POOLER else ()
    missing = sorted(name for name in differences.missing if not name.startswith(unneeded))
    unexpected = sorted(
        name
        for name in differences.unexpected
        if not _is_of_another_task(name, differences.parts, prefix)
        and not (kind == "multivector" and name.startswith(PROJECTION))
    )
    shapes = [
        f"{name} {list(stored)} instead of {list(expected)}"
        for name, stored, expected in sorted(differences.mismatched)
    ]
    faults = [
        _list_names(missing, "missing"),
        _list_names(unexpected, "unexpected"),
        _list_names(shapes, "of another shape"),
    ]
    return "; ".join(fault for fault in faults if fault)


def _is_of_another_task(name: str, parts: Collection[str], prefix: str) -> bool:
    if name.startswith(OTHER_TASKS_INSIDE) or name.rsplit(".", 1)[-1] in COMPUTED:
        return True
    top = name.split(".", 1)[0]
    # An encoder inside a network for another task brings its pooler along under its own name.
    return top in OTHER_TASKS - set(parts) or name.startswith(f"{prefix}.pooler.")


def _list_names(names: list[str], fault: str) -> str:
    if not names:
        return ""
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return f"{fault}: {', '.join(names[:NAMED])}{more}"


def first_infinite(network: nn.Module) -> str | None:
    """Return the name of a weight that is NaN or infinite. It takes a tenth of a second per gigabyte."""
    for name, weight in network.named_parameters():
        # Much faster than `isfinite` of each number, and NaN is passed on.
        if weight.numel() and not all(extreme.isfinite() for extreme in torch.aminmax(weight.detach())):
            return name
    return None
