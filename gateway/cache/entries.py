"""Keys and entries of the cache: found and missing inputs of a call, and which outputs are stored. Pure.

A key is everything that a vector or a score depends on, under one SHA-256. It covers the whole work but its
dimensions, which are cut from the full vector afterwards. A new field of a work is part of the key without a
change here.
Invariant: the joined reply has one output per input of the call, in the caller's order, and each is that of
the entry under the input's own key, or the replica's reply to that input.
"""

import hashlib
import struct
from collections.abc import Sequence

import msgspec
import numpy as np

from backends.contract import BaseReply, BaseWork, Vectors
from backends.contract.errors import ReplicaFailed

# A change of the entries or of the keys needs a new edition.
KEY_EDITION = b"gateway cache 1"
# Owner of all entries of a cache whose tenants share them.
SHARED = "shared"
LENGTH = struct.Struct("<q")
# Edition of the encoding, the entry's flags, two reserved bytes, and its tokens.
HEAD = struct.Struct("<BBxxI")
EDITION = 1
FLAGS: dict[bool | None, int] = {False: 0, True: 1, None: 2}
CUT_OF_FLAG = {flag: is_cut for is_cut, flag in FLAGS.items()}
BYTES_PER_NUMBER = 4
TOKENS_MAX = 2**32 - 1

_ENCODER = msgspec.msgpack.Encoder(order="deterministic")


def entry_keys(work: BaseWork, owner: str, identity: bytes, epoch: int) -> list[bytes]:
    """Return the key of each input of a cacheable work.

    owner: of the entries, as `ItemCache.owner` names it. identity: of the outputs that the
    upstream computes. epoch: number of times that the upstream's entries became invalid.
    """
    # The encoding of the options names the kind of work.
    options = _ENCODER.encode(work.uncut().options())
    shared = hashlib.sha256(KEY_EDITION)
    for part in (owner.encode(), identity, LENGTH.pack(epoch), options):
        shared.update(LENGTH.pack(len(part)) + part)
    keys = []
    for content in work.item_keys():
        own = shared.copy()
        own.update(content)
        keys.append(own.digest())
    return keys


class Entry(msgspec.Struct, frozen=True):
    """Result of one text, or of one pair of a query and a document.

    numbers: the full vector, or those of a pair, little-endian float32. tokens: its cost. is_cut: whether
    it was truncated, None if its server does not report it.
    """

    numbers: bytes
    tokens: int
    is_cut: bool | None


def encode_entry(entry: Entry) -> bytes:
    """Encode an entry for a store."""
    return HEAD.pack(EDITION, FLAGS[entry.is_cut], entry.tokens) + entry.numbers


def decode_entry(stored: bytes, dimensions: int) -> Entry | None:
    """Decode a stored entry, or return None if it is not a vector of this many numbers."""
    if len(stored) != HEAD.size + BYTES_PER_NUMBER * dimensions:
        return None
    edition, flag, tokens = HEAD.unpack_from(stored)
    if edition != EDITION or flag not in CUT_OF_FLAG:
        return None
    return Entry(stored[HEAD.size :], tokens, CUT_OF_FLAG[flag])


class SplitCall:
    """Inputs of one call that were looked up. entries: of each, None where there is none. width: of each."""

    def __init__(self, work: BaseWork, entries: Sequence[Entry | None], width: int) -> None:
        self.entries = entries
        self.missing = [index for index, entry in enumerate(entries) if entry is None]
        self._work = work
        self._width = width

    @property
    def hits(self) -> int:
        """Number of inputs that were found."""
        return len(self.entries) - len(self.missing)

    @property
    def hit_tokens(self) -> int:
        """Tokens of the inputs that were found."""
        return sum(entry.tokens for entry in self.entries if entry is not None)

    def missing_work(self) -> BaseWork:
        """Return the work of the missing inputs, which asks for full vectors."""
        return self._work.uncut().select(self.missing)

    def new_entries(self, reply: BaseReply, tokens: Sequence[int] | None) -> list[tuple[int, Entry]]:
        """Return the entries of the missing inputs, by input; none unless the tokens of each are known.

        reply: to `missing_work`. tokens: of each.
        """
        rows = self._rows_of(reply)
        if rows is None or not np.isfinite(rows).all():
            return []
        if tokens is None or sum(tokens) != reply.tokens or not 0 <= max(tokens) <= TOKENS_MAX:
            return []
        cut = None if reply.truncated is None else set(reply.truncated)
        return [
            (index, Entry(row.astype("<f4").tobytes(), count, None if cut is None else place in cut))
            for place, (index, row, count) in enumerate(zip(self.missing, rows, tokens, strict=True))
        ]

    def joined(self, reply: BaseReply | None) -> BaseReply:
        """Return the reply to the whole call. reply: to `missing_work`, None if nothing is missing.

        Raises: ReplicaFailed if it has not one row as wide as those of the entries for each missing input.
        """
        rows = np.empty((len(self.entries), self._width), np.float32)
        for index, entry in enumerate(self.entries):
            if entry is not None:
                rows[index] = np.frombuffer(entry.numbers, "<f4")
        tokens = self.hit_tokens
        if reply is not None:
            computed = self._rows_of(reply)
            if computed is None:
                raise ReplicaFailed(self._work.row_fault)
            rows[self.missing] = computed
            tokens += reply.tokens
        return self._work.reply_of_rows(rows, tokens, self._truncated(reply), self._input_tokens(reply))

    def _rows_of(self, reply: BaseReply) -> Vectors | None:
        """Return the numbers of the missing inputs, None if they are not those of entries."""
        rows = self._work.rows_of(reply)
        return rows if rows is not None and rows.shape == (len(self.missing), self._width) else None

    def _truncated(self, reply: BaseReply | None) -> tuple[int, ...] | None:
        if any(entry is not None and entry.is_cut is None for entry in self.entries):
            return None
        cut = [index for index, entry in enumerate(self.entries) if entry is not None and entry.is_cut]
        if reply is not None:
            if reply.truncated is None:
                return None
            cut += [self.missing[place] for place in reply.truncated]
        return tuple(sorted(cut))

    def _input_tokens(self, reply: BaseReply | None) -> tuple[int, ...] | None:
        if reply is not None and reply.input_tokens is None:
            return None
        counts = iter(reply.input_tokens or () if reply is not None else ())
        return tuple([next(counts) if entry is None else entry.tokens for entry in self.entries])
