"""Entry of the table of families, and what the page says about it."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import msgspec

from backends.contract import Work
from backends.recipe.options import TaskSettings
from backends.recipe.recipe import ModelKind
from tests.engine.families.vocabularies import Vocabulary

Json: TypeAlias = dict[str, Any]
Vector: TypeAlias = Any


class Answer(NamedTuple):
    """Request with the reference's rows for it: vectors (n, dim), or scores (n,)."""

    work: Work
    rows: Vector


Reference: TypeAlias = Callable[[Path], Sequence[Answer]]
# Returns the ids of texts, cut to a number of tokens, as the checkpoint's own library computes them.
TokenIds: TypeAlias = Callable[[Path, Sequence[str], int], list[list[int]]]


class Served(msgspec.Struct, frozen=True):
    """The engine computes what the family's own library computes. packed: without padding."""

    packed: bool = True


class NeedsTrustedCode(msgspec.Struct, frozen=True):
    """The engine refuses the family unless its upstream says `trust_remote_code: true`.

    refusal: a pattern that the error matches.
    """

    refusal: str = "trust_remote_code: true"


class Refused(msgspec.Struct, frozen=True):
    """The engine refuses the family. reason: for the page. refusal: a pattern that the error matches."""

    reason: str
    refusal: str


State: TypeAlias = Served | NeedsTrustedCode | Refused


class Family(msgspec.Struct, frozen=True, kw_only=True):
    """Checkpoints with one architecture, tokenizer and layout.

    checkpoints: published hub ids. kind: of the engine; of the model itself if it is refused.
    network: class of transformers that writes the weights; "" for none.
    config: content of config.json. files: other JSON files, by their path in the checkpoint.
    write: completes a folder that has all other files, where no class of transformers writes the weights.
    rename: name of a tensor in transformers → its published name, "" to leave it out.
    extra: shapes of tensors that transformers does not write, by name.
    pooling: as the page shows it. notes: for the page; settings to write in router.yaml first.
    settings, options: those of the load.
    """

    name: str
    checkpoints: tuple[str, ...]
    kind: ModelKind | str
    state: State
    network: str
    config: Json
    vocabulary: Vocabulary
    tokenizer_config: Json = {}
    files: Mapping[str, Json | list[Json]] = {}
    rename: Callable[[str], str] = str
    write: Callable[[Path], None] | None = None
    extra: Mapping[str, tuple[int, ...]] = {}
    reference: Reference | None = None
    token_ids: TokenIds | None = None
    pooling: str = "–"
    notes: str = ""
    settings: TaskSettings = TaskSettings()
    options: Mapping[str, Any] = {}
