"""Models of the clients' gateway other than the default model: `python -m tests.clients.small_models FOLDER`.

Writes a cross-encoder, a classifier, a CLIP, and a vocabulary of token ids, each to a folder of its name.
Existing folders stay. Runs with the project's own Python.
"""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from tests.engine.cross_encoder import make_cross_encoder
from tests.real.classifier import make_classifier
from tests.real.media_models import make_clip


def make(folder: Path) -> None:
    """Write the missing models."""
    from backends.checkpoints.locations import DEFAULT_MODEL, locate_checkpoint

    encoder = locate_checkpoint(DEFAULT_MODEL).resolve()
    _once(folder / "cross-encoder", lambda target: make_cross_encoder(encoder, target))
    _once(folder / "classifier", lambda target: make_classifier(encoder, target))
    _once(folder / "clip", make_clip)
    _once(folder / "bytes", make_vocabulary)


def _once(target: Path, write: Callable[[Path], object]) -> None:
    if not target.exists():
        unfinished = target.with_suffix(".unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        write(unfinished)
        unfinished.rename(target)


def make_vocabulary(target: Path) -> None:
    """Write a tokenizer.json whose ids are the bytes of UTF-8."""
    model = {"type": "BPE", "vocab": {_letter(byte): byte for byte in range(256)}, "merges": []}
    bytes_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": bytes_level,
        "decoder": bytes_level,
        "model": model,
    }
    (target / "tokenizer.json").write_text(json.dumps(tokenizer))


def _letter(byte: int) -> str:
    """Return the character for a byte in byte-level vocabularies, as GPT-2 defined it.

    Printable Latin-1 bytes map to themselves, all others to the characters from 256 on.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    if byte in printable:
        return chr(byte)
    return chr(256 + sum(other not in printable for other in range(byte)))


if __name__ == "__main__":
    make(Path(sys.argv[1]))
