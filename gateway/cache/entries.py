"""Entries of the cache, and the split of a call into found and missing inputs. Pure.

Invariant: the joined reply has one output per input of the call, in the caller's order, and each is that of
the entry under the input's own key, or the replica's reply to that input.
"""

import struct
from collections.abc import Sequence

import msgspec
import numpy as np

from backends.contract import Embed, EmbedReply, Reply, Rerank, RerankReply, Score, Vectors
from backends.contract.errors import ReplicaFailed
from backends.vectors import shape_vectors

# Edition of the encoding, the entry's flags, two reserved bytes, and its tokens.
HEAD = struct.Struct("<BBxxI")
EDITION = 1
FLAGS: dict[bool | None, int] = {False: 0, True: 1, None: 2}
CUT_OF_FLAG = {flag: is_cut for is_cut, flag in FLAGS.items()}
BYTES_PER_NUMBER = 4
TOKENS_MAX = 2**32 - 1


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


class Split:
    """Inputs of one call that were looked up. entries: of each input, None where there is none."""

    def __init__(self, entries: Sequence[Entry | None]) -> None:
        self.entries = entries
        self.missing = [index for index, entry in enumerate(entries) if entry is None]

    @property
    def hits(self) -> int:
        """Number of inputs that were found."""
        return len(self.entries) - len(self.missing)

    @property
    def hit_tokens(self) -> int:
        """Tokens of the inputs that were found."""
        return sum(entry.tokens for entry in self.entries if entry is not None)

    def _entries_of(
        self, rows: Vectors, tokens: Sequence[int] | None, reply: EmbedReply | RerankReply
    ) -> list[tuple[int, Entry]]:
        """Return the entries of the missing inputs, by input; none unless the tokens of each are known.

        rows: the numbers of each.
        """
        if tokens is None or sum(tokens) != reply.tokens or not 0 <= max(tokens) <= TOKENS_MAX:
            return []
        if not np.isfinite(rows).all():
            return []
        cut = None if reply.truncated is None else set(reply.truncated)
        return [
            (index, Entry(row.astype("<f4").tobytes(), count, None if cut is None else place in cut))
            for place, (index, row, count) in enumerate(zip(self.missing, rows, tokens, strict=True))
        ]

    def _truncated(self, reply: EmbedReply | RerankReply | None) -> tuple[int, ...] | None:
        if any(entry is not None and entry.is_cut is None for entry in self.entries):
            return None
        cut = [index for index, entry in enumerate(self.entries) if entry is not None and entry.is_cut]
        if reply is not None:
            if reply.truncated is None:
                return None
            cut += [self.missing[place] for place in reply.truncated]
        return tuple(sorted(cut))


class SplitPairs(Split):
    """Call for the scores of pairs. Each entry has two numbers: the score, and the one to sort it by."""

    def __init__(self, work: Rerank | Score, entries: Sequence[Entry | None]) -> None:
        super().__init__(entries)
        self._work = work

    def missing_work(self) -> Rerank | Score:
        """Return the work of the missing pairs."""
        work = self._work
        if isinstance(work, Score):
            return msgspec.structs.replace(work, pairs=tuple([work.pairs[index] for index in self.missing]))
        documents = tuple([work.documents[index] for index in self.missing])
        return msgspec.structs.replace(work, documents=documents)

    def new_entries(self, reply: Reply, tokens: Sequence[int] | None) -> list[tuple[int, Entry]]:
        """Return the entries of the missing pairs, by pair. reply: to `missing_work`. tokens: of each."""
        if not isinstance(reply, RerankReply) or reply.scores.shape != (len(self.missing),):
            return []
        return self._entries_of(np.stack([reply.scores, reply.order], axis=1), tokens, reply)

    def joined(self, reply: Reply | None) -> RerankReply:
        """Return the reply to the whole call. reply: to `missing_work`, None if nothing is missing.

        Raises: ReplicaFailed if it does not have one score for each pair.
        """
        scores, order = np.empty((2, len(self.entries)), np.float32)
        for index, entry in enumerate(self.entries):
            if entry is not None:
                scores[index], order[index] = np.frombuffer(entry.numbers, "<f4")
        tokens = self.hit_tokens
        if reply is None:
            return RerankReply(scores, tokens, self._truncated(None), order)
        if not isinstance(reply, RerankReply) or reply.scores.shape != (len(self.missing),):
            raise ReplicaFailed("the reply has not one score for each pair")
        scores[self.missing], order[self.missing] = reply.scores, reply.order
        return RerankReply(scores, tokens + reply.tokens, self._truncated(reply), order)


class SplitCall(Split):
    """Call for the vectors of texts. dimensions: of the model's full vectors."""

    def __init__(self, work: Embed, entries: Sequence[Entry | None], dimensions: int) -> None:
        super().__init__(entries)
        self._work = work
        self._dimensions = dimensions

    def missing_work(self) -> Embed:
        """Return the work of the missing inputs, which asks for full vectors."""
        work, missing = self._work, self.missing
        lengths = work.prompt_characters
        return msgspec.structs.replace(
            work,
            inputs=tuple([work.inputs[index] for index in missing]),
            prompt_characters=tuple([lengths[index] for index in missing]) if lengths else (),
            dimensions=None,
        )

    def new_entries(self, reply: Reply, tokens: Sequence[int] | None) -> list[tuple[int, Entry]]:
        """Return the entries of the missing texts, by input. reply: to `missing_work`. tokens: of each."""
        if not isinstance(reply, EmbedReply) or reply.vectors.shape != (len(self.missing), self._dimensions):
            return []
        return self._entries_of(reply.vectors, tokens, reply)

    def joined(self, reply: Reply | None) -> EmbedReply:
        """Return the reply to the whole call. reply: to `missing_work`, None if nothing is missing.

        Raises: ReplicaFailed if its vectors are not as wide as those of the entries.
        """
        assert reply is None or isinstance(reply, EmbedReply)
        vectors = np.empty((len(self.entries), self._dimensions), np.float32)
        for index, entry in enumerate(self.entries):
            if entry is not None:
                vectors[index] = np.frombuffer(entry.numbers, "<f4")
        if reply is not None:
            if reply.vectors.shape != (len(self.missing), self._dimensions):
                raise ReplicaFailed("the replicas of this model give vectors of different widths")
            vectors[self.missing] = reply.vectors
        tokens = self.hit_tokens + (0 if reply is None else reply.tokens)
        return EmbedReply(self._cut(vectors), tokens, self._truncated(reply), self._input_tokens(reply))

    def _cut(self, vectors: Vectors) -> Vectors:
        work = self._work
        if work.dimensions is None or work.dimensions == self._dimensions:
            return vectors
        return shape_vectors(vectors, dimensions=work.dimensions, normalize=work.normalize)

    def _input_tokens(self, reply: EmbedReply | None) -> tuple[int, ...] | None:
        computed: Sequence[int] = ()
        if reply is not None:
            if reply.input_tokens is None:
                return None
            computed = reply.input_tokens
        counts = iter(computed)
        return tuple([next(counts) if entry is None else entry.tokens for entry in self.entries])
