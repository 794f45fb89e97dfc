"""Keys of the cache: everything that a vector or a score depends on, under one SHA-256. Pure.

Rule: a key covers the whole work but its dimensions, which are cut from the full vector afterwards. A new
field of the work is part of the key without a change here.
"""

import hashlib
import struct
from collections.abc import Iterator

import msgspec

from backends.contract import Embed, Rerank, Score, Work

# A change of the entries or of the keys needs a new edition.
EDITION = b"gateway cache 1"
# Owner of all entries of a cache whose tenants share them.
SHARED = "shared"
LENGTH = struct.Struct("<q")

_ENCODER = msgspec.msgpack.Encoder(order="deterministic")


def pairs_of(work: Rerank | Score) -> tuple[tuple[str, str], ...]:
    """Return each query with its document, in the order of the scores."""
    if isinstance(work, Score):
        return work.pairs
    return tuple([(work.query, document) for document in work.documents])


def is_cacheable(work: Work, dimensions: int, *, is_cut_plainly: bool = True) -> bool:
    """Return whether each input of a work has an output of its own: a score, or a vector of full width.

    dimensions: of the model's full vectors. More are requested only by a call that its replica refuses.
    is_cut_plainly: a narrower vector is the beginning of the full one.
    """
    if isinstance(work, Rerank | Score):
        return True
    if not isinstance(work, Embed) or work.late_chunking:
        return False
    if work.dimensions is None or work.dimensions == dimensions:
        return True
    return is_cut_plainly and work.dimensions < dimensions


def entry_keys(work: Embed | Rerank | Score, owner: str, identity: bytes, epoch: int) -> list[bytes]:
    """Return the key of each input.

    owner: of the entries, as `ItemCache.owner` names it. identity: of the outputs that the
    upstream computes. epoch: number of times that the upstream's entries became invalid.
    """
    shared = hashlib.sha256(EDITION)
    for part in (owner.encode(), identity, LENGTH.pack(epoch), _ENCODER.encode(_options(work))):
        shared.update(LENGTH.pack(len(part)) + part)
    keys = []
    for content in _contents(work):
        own = shared.copy()
        own.update(content)
        keys.append(own.digest())
    return keys


def _options(work: Embed | Rerank | Score) -> Embed | Rerank | Score:
    """Return the work without its inputs; the encoding names its kind."""
    match work:
        case Embed():
            return msgspec.structs.replace(work, inputs=(), prompt_characters=(), dimensions=None)
        case Rerank():
            return msgspec.structs.replace(work, query="", documents=())
        case Score():
            return msgspec.structs.replace(work, pairs=())


def _contents(work: Embed | Rerank | Score) -> Iterator[bytes]:
    """Yield the content of each input, which differs from that of any other input of the same options."""
    if isinstance(work, Embed):
        # A prompt that does not take part in pooling changes the vector of the same characters.
        lengths = work.prompt_characters or (-1,) * len(work.inputs)
        for text, length in zip(work.inputs, lengths, strict=True):
            yield LENGTH.pack(length) + _encoded(text)
        return
    for query, document in pairs_of(work):
        # The length says where the query ends.
        start = _encoded(query)
        yield LENGTH.pack(len(start)) + start + _encoded(document)


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
