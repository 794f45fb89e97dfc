"""Keys of the cache: everything that a vector depends on, under one SHA-256. Pure.

Rule: a key covers the whole work but its dimensions, which are cut from the full vector afterwards. A new
field of the work is part of the key without a change here.
"""

import hashlib
import struct

import msgspec

from backends.contract import Embed, Work

# A change of the entries or of the keys needs a new edition.
EDITION = b"gateway cache 1"
LENGTH = struct.Struct("<q")

_ENCODER = msgspec.msgpack.Encoder(order="deterministic")


def is_cacheable(work: Work, dimensions: int) -> bool:
    """Return whether each text of a work has a vector of its own, as wide as the model's.

    dimensions: of the model's full vectors. More are requested only by a call that its replica refuses.
    """
    if not isinstance(work, Embed) or work.late_chunking:
        return False
    return work.dimensions is None or work.dimensions <= dimensions


def entry_keys(work: Embed, owner: str, identity: bytes, epoch: int) -> list[bytes]:
    """Return the key of each input.

    owner: of the entries, as `ItemCache.owner` names it. identity: of the vectors that the
    upstream computes. epoch: number of times that the upstream's entries became invalid.
    """
    shared = hashlib.sha256(EDITION)
    options = msgspec.structs.replace(work, inputs=(), prompt_characters=(), dimensions=None)
    for part in (owner.encode(), identity, LENGTH.pack(epoch), _ENCODER.encode(options)):
        shared.update(LENGTH.pack(len(part)) + part)
    # A prompt that does not take part in pooling changes the vector of the same characters.
    lengths = work.prompt_characters or (-1,) * len(work.inputs)
    keys = []
    for text, length in zip(work.inputs, lengths, strict=True):
        own = shared.copy()
        own.update(LENGTH.pack(length) + text.encode("utf-8", "surrogatepass"))
        keys.append(own.digest())
    return keys
