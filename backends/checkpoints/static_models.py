"""Static models: recognition of their folders, and the rules by which their own libraries read texts.

A static model is a table with one vector per token; a text's vector is the mean of its tokens' vectors.
Does not need torch, and reads no weights.
Sources: `StaticEmbedding` of sentence-transformers 6.2, `StaticModel` of model2vec 0.10, and
`WordLlamaInference` of wordllama 0.4. None of them adds special tokens.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec

from backends.contract.errors import ModelUnavailable

Library: TypeAlias = Literal["sentence-transformers", "model2vec", "wordllama"]

# A mean has no longest text: this bounds the work of one input where no file does.
UNLIMITED_TOKENS = 32768
# model2vec's limit where its config states none.
MODEL2VEC_TOKENS = 512
# Files of wordllama: <model>_<components>.safetensors, and <model>_tokenizer_config.json.
WORDLLAMA_WEIGHTS = re.compile(r"(?P<model>.+)_(?P<width>\d+)")
WORDLLAMA_TOKENIZER = "_tokenizer_config.json"


class StaticModel(msgspec.Struct, frozen=True):
    """Files of a static model, and the library that defines its vectors.

    tokenizer: file of the `tokenizers` package. weights: safetensors file, which a copy for counting lacks.
    """

    library: Library
    tokenizer: Path
    weights: Path

    @property
    def drops_unknown(self) -> bool:
        """True if words that the vocabulary lacks do not count in the mean."""
        return self.library == "model2vec"

    def missing_files(self) -> list[str]:
        """Return the names of files that are not there."""
        return [path.name for path in (self.tokenizer, self.weights) if not path.is_file()]


class _ListedModule(msgspec.Struct):
    """Entry of modules.json."""

    type: str
    path: str = ""


class _ModelType(msgspec.Struct):
    """Part of any config.json."""

    model_type: str | None = None


class _Config(msgspec.Struct):
    """Part of config.json that model2vec writes; max_length: None for no limit."""

    max_length: int | None = MODEL2VEC_TOKENS


class _Truncation(msgspec.Struct):
    """Part of tokenizer.json that cuts texts."""

    max_length: int


class _Vocabulary(msgspec.Struct, frozen=True):
    """Unknown token of a vocabulary: its text, or its id in a unigram model."""

    unk_token: str | None = None
    unk_id: int | None = None


class _TokenizerFile(msgspec.Struct):
    """Content of tokenizer.json without the vocabulary itself."""

    truncation: _Truncation | None = None
    model: _Vocabulary = _Vocabulary()


def find_static(checkpoint: Path) -> StaticModel | None:
    """Return the static model in a folder, or None if there is none.

    Raises: ModelUnavailable if a wordllama folder does not hold exactly one model.
    """
    listed = _read(checkpoint / "modules.json", list[_ListedModule]) or ()
    folder = next((module.path for module in listed if module.type.endswith(".StaticEmbedding")), None)
    config = _read(checkpoint / "config.json", _ModelType)
    is_model2vec = config is not None and config.model_type == "model2vec"
    if folder is None and not is_model2vec:
        return _find_wordllama(checkpoint)
    place = checkpoint / (folder or "")
    library: Library = "model2vec" if is_model2vec else "sentence-transformers"
    return StaticModel(library, place / "tokenizer.json", place / "model.safetensors")


def max_tokens(static: StaticModel, checkpoint: Path) -> int:
    """Return the most tokens of a text that count. Raises: ModelUnavailable for an unreadable tokenizer."""
    if static.library == "wordllama":
        return UNLIMITED_TOKENS
    if static.library == "model2vec":
        config = _read(checkpoint / "config.json", _Config)
        return UNLIMITED_TOKENS if config is None else config.max_length or UNLIMITED_TOKENS
    truncation = _read_tokenizer(static.tokenizer).truncation
    return UNLIMITED_TOKENS if truncation is None else truncation.max_length


def unknown_token(static: StaticModel) -> str | int | None:
    """Return the token of words that the vocabulary lacks, or its id; None if there is none.

    Raises: ModelUnavailable for an unreadable tokenizer.
    """
    vocabulary = _read_tokenizer(static.tokenizer).model
    return vocabulary.unk_id if vocabulary.unk_token is None else vocabulary.unk_token


def _find_wordllama(checkpoint: Path) -> StaticModel | None:
    """Return the model in a folder of wordllama: its package, or its cache."""
    models = list(_wordllama_models(checkpoint))
    if len(models) > 1:
        names = ", ".join(model.weights.name for model in models)
        raise ModelUnavailable(
            f"{checkpoint} holds several models of wordllama ({names}); copy `weights/` with one of them and "
            "`tokenizers/` to a folder of its own"
        )
    return models[0] if models else None


def _wordllama_models(checkpoint: Path) -> Iterator[StaticModel]:
    for weights in sorted(checkpoint.glob("weights/*.safetensors")):
        # A model of bits, <model>_<components>_binary, does not match.
        name = WORDLLAMA_WEIGHTS.fullmatch(weights.stem)
        tokenizer = checkpoint / "tokenizers" / f"{name['model'] if name else ''}{WORDLLAMA_TOKENIZER}"
        if tokenizer.is_file():
            yield StaticModel("wordllama", tokenizer, weights)


def _read_tokenizer(path: Path) -> _TokenizerFile:
    found: _TokenizerFile | None = _read(path, _TokenizerFile)
    if found is None:
        raise ModelUnavailable(f"no readable {path.name} in {path.parent}")
    return found


def _read(path: Path, kind: Any) -> Any:
    """Return the content of a JSON file, None if there is no such file. Raises: ModelUnavailable."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ModelUnavailable(f"{path} is not valid JSON: {error}") from error
