"""Keys and entries of the cache, and its store in memory."""

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.contract import Embed, EmbedReply, Encode, Output, Reply, Rerank, RerankReply, Score, Truncate
from backends.contract.errors import ReplicaFailed
from gateway.cache.entries import Entry, SplitCall, decode_entry, encode_entry, entry_keys
from gateway.cache.memory_store import ENTRY_OVERHEAD, MemoryStore

PLAIN = Embed(("a",))
OTHERS = {
    "normalize": False,
    "prompt_name": "query",
    "truncate": Truncate.LEFT,
    "max_tokens": 7,
    "special_tokens": False,
    "prompt_characters": (3,),
}


def key_of(work: Embed, owner: str = "tenant t", identity: bytes = b"i", epoch: int = 0) -> bytes:
    (key,) = entry_keys(work, owner, identity, epoch)
    return key


def test_a_key_covers_everything_but_the_dimensions() -> None:
    keys = {key_of(PLAIN), key_of(PLAIN, "tenant u"), key_of(PLAIN, identity=b"j"), key_of(PLAIN, epoch=1)}
    keys |= {key_of(msgspec.structs.replace(PLAIN, **{name: value})) for name, value in OTHERS.items()}

    assert 4 + len(OTHERS) == len(keys)
    assert key_of(PLAIN) == key_of(msgspec.structs.replace(PLAIN, dimensions=3))
    known = {"inputs", "dimensions", "chat", *OTHERS}
    assert known == set(Embed.__struct_fields__)


@given(st.lists(st.text(max_size=6), min_size=1, max_size=8))
def test_equal_texts_alone_have_equal_keys(texts: list[str]) -> None:
    keys = entry_keys(Embed(tuple(texts)), "shared", b"i", 0)

    assert len(set(texts)) == len(set(keys))
    assert [key_of(Embed((text,)), "shared") for text in texts] == keys


def test_only_single_vectors_of_the_models_width_are_cached() -> None:
    assert PLAIN.is_cacheable(8)
    assert msgspec.structs.replace(PLAIN, dimensions=8).is_cacheable(8)
    assert not msgspec.structs.replace(PLAIN, dimensions=9).is_cacheable(8)
    assert msgspec.structs.replace(PLAIN, dimensions=7).is_cacheable(8)
    assert not msgspec.structs.replace(PLAIN, dimensions=7).is_cacheable(8, is_cut_plainly=False)
    assert msgspec.structs.replace(PLAIN, dimensions=8).is_cacheable(8, is_cut_plainly=False)
    assert not Encode(("a",), frozenset({Output.SPARSE})).is_cacheable(8)


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=5), st.integers(0, 2**32 - 1))
def test_an_entry_is_stored_bit_for_bit(numbers: list[float], tokens: int) -> None:
    for is_cut in (True, False, None):
        entry = Entry(np.array(numbers, "<f4").tobytes(), tokens, is_cut)
        assert entry == decode_entry(encode_entry(entry), len(numbers))


@pytest.mark.parametrize(
    "stored", [b"", b"\1\0\0\0", encode_entry(Entry(b"1234", 1, None))[:-1], b"\2" + bytes(11)]
)
def test_what_is_no_entry_is_a_miss(stored: bytes) -> None:
    assert decode_entry(stored, 1) is None


def entry_of(value: float, tokens: int, *, is_cut: bool | None = False) -> Entry:
    return Entry(np.array([value, value], "<f4").tobytes(), tokens, is_cut)


def test_found_and_computed_texts_are_joined_in_order() -> None:
    work = Embed(("a", "b", "c", "d"), prompt_characters=(1, 2, 3, 4))
    split = SplitCall(work, [entry_of(1, 5), None, entry_of(3, 7, is_cut=True), None], 2)
    missing = split.missing_work()
    rows = np.array([[2, 2], [4, 4]], np.float32)
    reply = split.joined(EmbedReply(rows, 30, (1,), (10, 20)))

    assert (("b", "d"), (2, 4)) == (missing.inputs, missing.prompt_characters)
    assert [1, 2, 3, 4] == reply.vectors[:, 0].tolist()
    assert (42, (2, 3), (5, 10, 7, 20)) == (reply.tokens, reply.truncated, reply.input_tokens)
    assert [(1, entry_of(2, 10)), (3, entry_of(4, 20, is_cut=True))] == split.new_entries(
        EmbedReply(rows, 30, (1,)), (10, 20)
    )


@pytest.mark.parametrize(
    ("reply", "tokens"),
    [
        (EmbedReply(np.ones((1, 2), np.float32), 9), None),
        (EmbedReply(np.ones((1, 2), np.float32), 9), (8,)),
        (EmbedReply(np.ones((1, 3), np.float32), 9), (9,)),
        (EmbedReply(np.full((1, 2), np.nan, np.float32), 9), (9,)),
        (RerankReply(np.ones(1, np.float32), 9), (9,)),
    ],
    ids=["no counts", "other sum", "other width", "not finite", "scores"],
)
def test_a_reply_that_is_not_exact_is_not_stored(reply: Reply, tokens: tuple[int, ...] | None) -> None:
    split = SplitCall(Embed(("a",)), [None], 2)

    assert [] == split.new_entries(reply, tokens)


def score_of(value: float, tokens: int, *, is_cut: bool | None = False, logit: float | None = None) -> Entry:
    numbers = [value, value if logit is None else logit]
    return Entry(np.array(numbers, "<f4").tobytes(), tokens, is_cut)


@pytest.mark.parametrize(
    ("work", "missing"),
    [
        (Rerank("q", ("a", "b", "c")), Rerank("q", ("a", "c"))),
        (Score((("q", "a"), ("r", "b"), ("q", "c"))), Score((("q", "a"), ("q", "c")))),
    ],
)
def test_found_and_computed_pairs_are_joined_in_order(work: Rerank | Score, missing: Rerank | Score) -> None:
    split = SplitCall(work, [None, score_of(0.25, 7, is_cut=True), None], 2)
    computed = RerankReply(np.array([0.5, 0.75], np.float32), 30, (1,))
    reply = split.joined(computed)

    assert missing == split.missing_work()
    assert [0.5, 0.25, 0.75] == reply.scores.tolist()
    assert (37, (1, 2)) == (reply.tokens, reply.truncated)
    assert [(0, score_of(0.5, 10)), (2, score_of(0.75, 20, is_cut=True))] == split.new_entries(
        computed, (10, 20)
    )
    assert [] == split.new_entries(computed, None)
    assert [] == split.new_entries(RerankReply(np.ones(3, np.float32), 30), (10, 20))
    with pytest.raises(ReplicaFailed, match="one score for each pair"):
        split.joined(RerankReply(np.ones(3, np.float32), 30))


def test_pairs_that_were_found_keep_the_order_of_their_logits() -> None:
    logits = np.array([20.0, 30.0], np.float32)
    computed = RerankReply(np.ones(2, np.float32), 30, (), logits)
    split = SplitCall(Rerank("q", ("a", "b", "c")), [None, score_of(1.0, 7, logit=25.0), None], 2)

    assert [20, 25, 30] == split.joined(computed).order.tolist()
    found = [entry for _, entry in split.new_entries(computed, (10, 20))]
    again = SplitCall(Rerank("q", ("a", "c")), found, 2)
    assert ([1, 1], [20, 30]) == (again.joined(None).scores.tolist(), again.joined(None).order.tolist())


def keys_of_pairs(work: Rerank | Score) -> list[bytes]:
    return entry_keys(work, "shared", b"i", 0)


def test_a_key_of_a_pair_covers_everything() -> None:
    plain = Rerank("q", ("a",))
    others = {
        "raw_scores": True,
        "truncate": Truncate.LEFT,
        "instruction": "task",
        "max_tokens": 7,
        "query": "r",
        "documents": ("b",),
    }
    works = [plain, *(msgspec.structs.replace(plain, **{name: value}) for name, value in others.items())]

    assert set(others) == set(Rerank.__struct_fields__)
    assert {"pairs", *others} - {"query", "documents"} == set(Score.__struct_fields__)
    keys = {key for work in [*works, Score((("q", "a"),))] for key in keys_of_pairs(work)}
    assert len(works) + 1 == len(keys)


@given(st.lists(st.tuples(st.text(max_size=3), st.text(max_size=3)), min_size=1, max_size=8))
def test_equal_pairs_alone_have_equal_keys(pairs: list[tuple[str, str]]) -> None:
    keys = keys_of_pairs(Score(tuple(pairs)))

    assert len(set(pairs)) == len(set(keys))
    assert [keys_of_pairs(Score((pair,)))[0] for pair in pairs] == keys
    reranked = [keys_of_pairs(Rerank(query, (document,)))[0] for query, document in pairs]
    assert len(set(pairs)) == len(set(reranked))
    assert set(keys).isdisjoint(reranked)


def test_vectors_of_another_width_fail_the_call() -> None:
    split = SplitCall(Embed(("a", "b")), [entry_of(1, 1), None], 2)

    with pytest.raises(ReplicaFailed, match="different widths"):
        split.joined(EmbedReply(np.ones((1, 3), np.float32), 1))


async def test_the_least_recently_used_entry_leaves_first() -> None:
    store = MemoryStore(2 * (10 + ENTRY_OVERHEAD), 60, lambda: 0)
    store.put([(b"a", bytes(10)), (b"b", bytes(10))], "a")
    await store.get([b"a"], "a")
    store.put([(b"c", bytes(10)), (b"large", bytes(5000))], "a")

    assert [bytes(10), None, bytes(10), None] == await store.get([b"a", b"b", b"c", b"large"], "a")
    assert (1, 2 * (10 + ENTRY_OVERHEAD)) == (store.evictions, store.size_bytes)


async def test_entries_expire_and_free_their_bytes() -> None:
    now_s = 0.0
    store = MemoryStore(10_000, 60, lambda: now_s)
    store.put([(b"a", b"1")], "a")
    now_s = 60.0

    assert [None] == await store.get([b"a"], "a")
    assert 0 == store.size_bytes


def test_a_distrusted_upstream_begins_a_new_epoch() -> None:
    store = MemoryStore(10_000, 60, lambda: 0)
    store.distrust("one")

    assert (1, 0) == (store.epoch_of("one"), store.epoch_of("two"))


async def test_one_owner_loses_its_own_entries_first() -> None:
    store = MemoryStore(100 * (10 + ENTRY_OVERHEAD), 60, lambda: 0)
    store.put([(b"small-%d" % number, bytes(10)) for number in range(20)], "small")
    store.put([(b"greedy-%d" % number, bytes(10)) for number in range(500)], "greedy")
    small = await store.get([b"small-%d" % number for number in range(20)], "small")
    assert [bytes(10)] * 20 == small
    assert 420 == store.evictions

    # Another one takes its part from the one that holds most, and no more than an equal share.
    store.put([(b"late-%d" % number, bytes(10)) for number in range(500)], "late")
    kept = {
        name: sum(
            entry is not None
            for entry in await store.get([b"%s-%d" % (name.encode(), n) for n in range(500)], name)
        )
        for name in ("small", "greedy", "late")
    }
    assert 20 == kept["small"]
    assert 100 == sum(kept.values())
    assert 33 <= kept["late"] <= 34
    assert store.size_bytes == 100 * (10 + ENTRY_OVERHEAD)


async def test_expired_entries_of_another_owner_leave_first() -> None:
    now_s = 0.0
    store = MemoryStore(10 * (10 + ENTRY_OVERHEAD), 60, lambda: now_s)
    store.put([(b"old-%d" % number, bytes(10)) for number in range(2)], "gone")
    now_s = 61.0
    store.put([(b"new-%d" % number, bytes(10)) for number in range(8)], "busy")
    store.put([(b"more-%d" % number, bytes(10)) for number in range(2)], "third")
    assert [bytes(10)] * 8 == await store.get([b"new-%d" % number for number in range(8)], "busy")
    assert [bytes(10)] * 2 == await store.get([b"more-%d" % number for number in range(2)], "third")
