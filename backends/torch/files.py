"""What lies in a checkpoint's folder, as JSON: its config and what sentence-transformers puts beside it.

Knows nothing of what any of it means, and loads no weights.
"""

from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from backends.errors import ModelUnavailable

Json = dict[str, Any]


class Module(NamedTuple):
    """One line of modules.json: the last word of its class, and its folder."""

    kind: str
    folder: str


class Files:
    """A checkpoint's small files, each read when it is first asked for; {} where there is none.

    Raises: ModelUnavailable for one that is no JSON.
    """

    def __init__(self, checkpoint: Path) -> None:
        self.checkpoint = checkpoint

    @cached_property
    def config(self) -> Json:
        """What transformers says: config.json."""
        return self.json("config.json")

    @cached_property
    def sentence(self) -> Json:
        """What sentence-transformers, or PyLate, says of the whole model: prompts and kind."""
        return self.json("config_sentence_transformers.json")

    @cached_property
    def modules(self) -> list[Module]:
        """modules.json in order; empty for a plain transformers checkpoint."""
        path = self.checkpoint / "modules.json"
        if not path.is_file():
            return []
        listed = _decoded(path, list[Json])
        return [Module(str(one["type"]).rsplit(".", 1)[-1], str(one.get("path", ""))) for one in listed]

    @cached_property
    def transformer(self) -> Json:
        """What sentence-transformers says of the network itself: lengths, lower case."""
        return self.of_module("Transformer", "sentence_bert_config.json")

    @cached_property
    def tokenizer(self) -> Json:
        """tokenizer_config.json, where the network is."""
        return self.of_module("Transformer", "tokenizer_config.json")

    def folder(self, kind: str) -> str | None:
        """Where a module lies; None where there is none of its kind."""
        return next((one.folder for one in self.modules if one.kind == kind), None)

    def of_module(self, kind: str, name: str = "config.json") -> Json:
        """A file in a module's folder. The network's are at the top where no module is listed."""
        folder = self.folder(kind)
        if folder is None and kind != "Transformer":
            return {}
        return self.json(f"{folder or '.'}/{name}")

    def json(self, name: str) -> Json:
        """A file by its path in the checkpoint."""
        path = self.checkpoint / name
        return _decoded(path, Json) if path.is_file() else {}

    def has(self, name: str) -> bool:
        """Whether there is a file of that name."""
        return (self.checkpoint / name).is_file()


def _decoded(path: Path, kind: Any) -> Any:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ModelUnavailable(f"{path} is not valid JSON: {error}") from error
