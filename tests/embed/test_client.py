"""`gateway.client` on a server in a thread: tables in, tables with vectors and bad rows out."""

import asyncio
import os
import pickle
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from gateway.client import AsyncClient, CallFailed, CallStopped, Client, Embedded, remaining, split
from tests.embed.conftest import Relay
from tests.fakes.embedder import FakeEmbedder, Reply, error
from tests.fakes.tei import vector_of
from tests.waiting import PATIENCE_S

Open = Callable[..., Client]


@pytest.fixture
def server(relay: tuple[Relay, str]) -> FakeEmbedder:
    relay[0].server = FakeEmbedder()
    return relay[0].server


@pytest.fixture
def open_client(relay: tuple[Relay, str]) -> Iterator[Open]:
    opened: list[Client] = []

    def open_one(**settings: Any) -> Client:
        opened.append(Client(relay[1], "some-key", "fake", **settings))
        return opened[-1]

    yield open_one
    for client in opened:
        client.close()


def table_of(texts: Sequence[str | None]) -> pa.Table:
    keys = [f"k{number}" for number in range(len(texts))]
    return pa.table({"id": pa.array(keys, pa.string()), "text": pa.array(texts, pa.string())})


def assert_vectors(table: pa.Table) -> None:
    for row in table.to_pylist():
        np.testing.assert_allclose(row["embedding"], vector_of(row["text"])[:8], atol=1e-6)


def refuse(word: str, *, named: bool) -> Callable[[Sequence[str]], Reply | None]:
    def hook(texts: Sequence[str]) -> Reply | None:
        found = next((place for place, text in enumerate(texts) if word in text), None)
        return None if found is None else error(400, f"input {found}: no" if named else "no")

    return hook


@pytest.mark.parametrize("named", [True, False])
def test_bad_rows_are_in_a_table_of_their_own(server: FakeEmbedder, open_client: Open, named: bool) -> None:
    texts: list[str | None] = [f"text {number}" for number in range(40)]
    texts[7], texts[20], texts[33] = None, "poison", ""
    server.hook = refuse("poison", named=named)
    done = open_client(batch_inputs=16).embed_table(table_of(texts), key="id")

    assert 37 == len(done.table)
    assert ["id", "text", "embedding", "truncated"] == done.table.column_names
    assert pa.list_(pa.float32(), 8) == done.table.schema.field("embedding").type
    assert_vectors(done.table)
    assert [("k7", "empty_input"), ("k20", "status_400"), ("k33", "empty_input")] == [
        (row["id"], row["error_kind"]) for row in done.bad.to_pylist()
    ]
    assert done.bad["error_message"][1].as_py().startswith("the server returned 400: ")
    headers = server.received[0]
    assert ("bulk", "Bearer some-key") == (headers["x-priority"], headers["authorization"])


@pytest.mark.parametrize("first", [0, 1])
def test_thousands_of_bad_rows_in_one_call(server: FakeEmbedder, open_client: Open, first: int) -> None:
    # All rows of 1,100, or each second one of 2,200: more than calls fit on the stack.
    rows = 1100 * (1 + first)
    texts = ["poison" if not first or number % 2 else f"text {number}" for number in range(rows)]
    server.hook = refuse("poison", named=True)
    done = open_client(batch_inputs=rows, concurrency=1).embed_table(table_of(texts))

    assert [number for number in range(rows) if texts[number] == "poison"] == done.bad["row"].to_pylist()
    assert_vectors(done.table)
    sent = [len(body["input"]) for body in server.bodies]
    assert len(sent) < 2 * rows
    # A row is sent once more for each halving of the call, with those that are refused.
    assert sum(sent) < 13 * rows


@pytest.mark.parametrize("named_last", [False, True])
def test_good_rows_of_a_named_refusal_are_computed_once(
    server: FakeEmbedder, open_client: Open, named_last: bool
) -> None:
    texts = ["poison" if number in (300, 301, 977) else f"text {number}" for number in range(1000)]
    computed: list[str] = []

    def hook(found: Sequence[str]) -> Reply | None:
        places = [place for place, text in enumerate(found) if text == "poison"]
        if places:
            return error(400, f"input {places[-1 if named_last else 0]}: no")
        computed.extend(found)
        return None

    server.hook = hook
    done = open_client(batch_inputs=1000, concurrency=1).embed_table(table_of(texts))
    assert [300, 301, 977] == done.bad["row"].to_pylist()
    assert sorted(text for text in texts if text != "poison") == sorted(computed)
    assert len(server.bodies) < 20


def test_bad_rows_without_a_key_have_their_number(server: FakeEmbedder, open_client: Open) -> None:
    done = open_client().embed_table({"text": ["a", None, "b"], "row": [7, 8, 9]}, into="v")
    assert [7, 9] == done.table["row"].to_pylist()
    assert "v" in done.table.column_names
    assert [{"row": 1, "error_kind": "empty_input", "error_message": "the text is null or empty"}] == (
        done.bad.to_pylist()
    )


def test_all_rows_in_one_table_have_one_schema(server: FakeEmbedder, open_client: Open) -> None:
    client = open_client()
    whole = client.embed_rows(table_of(["a", None]))
    assert [None, "empty_input"] == whole["error_kind"].to_pylist()
    assert whole["embedding"].to_pylist()[1] is None
    for texts in ([], [None, None], ["a"]):
        assert whole.schema == client.embed_rows(table_of(texts)).schema
        assert whole.schema == open_client().embed_rows(table_of(texts)).schema
    assert (1, 1) == tuple(map(len, split(whole, "id")))


def test_any_arrow_stream_is_embedded(server: FakeEmbedder, open_client: Open) -> None:
    client, table = open_client(), table_of(["a", "b", "a"])
    for rows in (table.to_batches()[0], pa.RecordBatchReader.from_batches(table.schema, table.to_batches())):
        assert_vectors(client.embed_table(rows).table)
    packed = table.set_column(1, "text", table["text"].dictionary_encode())
    assert_vectors(client.embed_table(packed).table)
    large = table.set_column(1, "text", table["text"].cast(pa.large_string()))
    assert_vectors(client.embed_table(large).table)


@pytest.mark.parametrize(
    ("columns", "problem"),
    [
        ({"body": ["a"]}, "no column `text`"),
        ({"text": [1]}, "holds no texts, but int64"),
        ({"text": ["a"], "embedding": [1]}, "a column `embedding` already"),
        ({"text": ["a"], "error_kind": [1]}, "a column `error_kind` already"),
    ],
)
def test_columns_that_do_not_fit_are_refused(open_client: Open, columns: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        open_client().embed_table(pa.table(columns))


def test_calls_keep_their_bounds(server: FakeEmbedder, open_client: Open) -> None:
    texts = ["x" * 400_000] * 5 + [None] + ["y"] * 5 + ["z" * 2_000_000]
    assert 11 == len(open_client(batch_inputs=4).embed_table(table_of(texts)).table)
    sent = sorted([len(text) for text in body["input"]] for body in server.bodies)
    assert [[1, 1], [400_000, 1, 1, 1], [400_000, 400_000], [400_000, 400_000], [2_000_000]] == sent


def test_calls_are_repeated_as_the_server_asks(server: FakeEmbedder, open_client: Open) -> None:
    server.faults = [error(503, "away", retry_after="0.01"), error(429, "busy", retry_after="0.01")]
    assert_vectors(open_client(concurrency=1).embed_table(table_of(["a"])).table)
    assert 3 == len(server.bodies)


def test_a_wait_beyond_the_deadline_stops_the_call(server: FakeEmbedder, open_client: Open) -> None:
    server.hook = lambda _: error(429, "later", retry_after="60")
    with pytest.raises(CallStopped, match=r"row 0 to 1: .*later; no success until deadline_s \(5 s\)"):
        open_client(deadline_s=5).embed_table(table_of(["a", "b"]))
    assert 1 == len(server.bodies)


def test_a_spent_limit_stops_at_once(server: FakeEmbedder, open_client: Open) -> None:
    server.hook = lambda _: error(429, "the month is spent", retry_after="1", x_should_retry="false")
    with pytest.raises(CallStopped, match="the month is spent"):
        open_client().embed_table(table_of(["a"]))
    assert 1 == len(server.bodies)


def test_a_refused_key_fails(server: FakeEmbedder, open_client: Open) -> None:
    server.hook = lambda _: error(401, "no such key")
    with pytest.raises(CallFailed, match="the server returned 401: no such key"):
        open_client().embed_table(table_of(["a"] * 1000))


def test_options_that_are_refused_fail_and_rows_do_not(server: FakeEmbedder, open_client: Open) -> None:
    bad = table_of(["poison"] * 100)
    server.hook = lambda _: error(400, "no such dimensions")
    with pytest.raises(CallFailed, match="no such dimensions; the server refuses every row"):
        open_client(concurrency=1).embed_table(bad)
    assert len(server.bodies) < 80
    server.hook = refuse("poison", named=False)
    assert (0, 100) == tuple(map(len, open_client(concurrency=1).embed_table(bad)))


def test_vectors_of_two_spaces_are_not_mixed(server: FakeEmbedder, open_client: Open) -> None:
    client = open_client()
    assert "0123456789abcdef" == client.fingerprint()
    server.fingerprint = "fedcba9876543210"
    with pytest.raises(CallFailed, match="of another space"):
        client.embed_table(table_of(["a"]))
    with pytest.raises(CallFailed, match="accepts 0123456789abcdef only"):
        open_client(fingerprint="0123456789abcdef").embed_table(table_of(["a"]))


def test_cut_texts_are_marked(server: FakeEmbedder, open_client: Open) -> None:
    server.headers = {"x-truncated-inputs": "1"}
    rows = open_client().embed_rows(table_of(["a", "b", None, "c"]))
    assert [False, True, None, False] == rows["truncated"].to_pylist()
    server.headers = {"x-truncated-inputs": "unknown"}
    assert [None, None] == open_client().embed_rows(table_of(["a", "b"]))["truncated"].to_pylist()


def test_a_run_is_resumed_by_key(server: FakeEmbedder, open_client: Open) -> None:
    rows, client = table_of([f"text {number}" if number % 5 else None for number in range(20)]), open_client()
    first = client.embed_table(rows.slice(3, 8), key="id")
    done = pa.chunked_array([*first.table["id"].chunks, *first.bad["id"].chunks])
    second = client.embed_table(remaining(rows, "id", done), key="id")
    assert rows["id"].to_pylist() == sorted(
        [key for found in (*first, *second) for key in found["id"].to_pylist()], key=lambda key: int(key[1:])
    )


def test_a_client_is_pickled_by_its_settings(server: FakeEmbedder, open_client: Open) -> None:
    client = open_client(dimensions=4)
    client.embed_table(table_of(["a"]))
    with pickle.loads(pickle.dumps(client)) as restored:
        found = restored.embed_table(table_of(["b"])).table
    assert 4 == found.schema.field("embedding").type.list_size


@pytest.mark.filterwarnings("ignore:This process.*multi-threaded:DeprecationWarning")
def test_a_forked_process_closes_nothing_of_its_parent(server: FakeEmbedder, open_client: Open) -> None:
    client = open_client()
    client.embed_table(table_of(["a"]))
    if not (child := os.fork()):
        try:
            client.close()
        finally:
            os._exit(0)
    assert (child, 0) == os.waitpid(child, 0)
    assert_vectors(client.embed_table(table_of(["b"])).table)


@pytest.mark.filterwarnings("ignore:This process.*multi-threaded:DeprecationWarning")
def test_a_forked_process_opens_connections_of_its_own(server: FakeEmbedder, open_client: Open) -> None:
    client = open_client()
    client.embed_table(table_of(["a"]))
    if not (child := os.fork()):
        status = 1
        try:
            status = len(client.embed_table(table_of(["b"])).bad)
            client.close()
        finally:
            os._exit(status)
    assert (child, 0) == os.waitpid(child, 0)
    assert_vectors(client.embed_table(table_of(["c"])).table)


def test_threads_share_a_client(server: FakeEmbedder, open_client: Open) -> None:
    client, inside, most, lock = open_client(concurrency=2, batch_inputs=1), 0, 0, threading.Lock()
    both = threading.Barrier(2)

    def count(_: Sequence[str]) -> None:
        nonlocal inside, most
        with lock:
            inside += 1
            most = max(most, inside)
        both.wait(PATIENCE_S)
        with lock:
            inside -= 1

    server.hook = count
    with ThreadPoolExecutor(3) as pool:
        for found in pool.map(client.embed_table, [table_of(["a", "b"])] * 3):
            assert_vectors(found.table)
    assert 2 == most


def test_close_ends_the_calls_of_other_threads(server: FakeEmbedder, open_client: Open) -> None:
    client, arrived, freed = open_client(concurrency=1), threading.Semaphore(0), threading.Event()

    def hold(_: Sequence[str]) -> None:
        arrived.release()
        freed.wait(PATIENCE_S)

    server.hook = hold
    with ThreadPoolExecutor(2) as pool:
        try:
            calls = [pool.submit(client.embed_table, table_of([text])) for text in "ab"]
            assert arrived.acquire(timeout=PATIENCE_S)
            client.close()
            for call in calls:
                with pytest.raises(CallStopped, match="the client was closed"):
                    call.result(PATIENCE_S)
        finally:
            freed.set()
    assert "gateway.client" not in [thread.name for thread in threading.enumerate()]
    server.hook = lambda _: None
    assert_vectors(client.embed_table(table_of(["c"])).table)


async def test_close_ends_the_calls_of_other_tasks(server: FakeEmbedder, relay: tuple[Relay, str]) -> None:
    arrived, freed = threading.Event(), threading.Event()

    def hold(_: Sequence[str]) -> None:
        arrived.set()
        freed.wait(PATIENCE_S)

    server.hook = hold
    client = AsyncClient(relay[1], "some-key", "fake")
    call = asyncio.create_task(client.embed_table(table_of(["a"])))
    try:
        assert await asyncio.to_thread(arrived.wait, PATIENCE_S)
        await client.close()
        with pytest.raises(CallStopped, match="the client was closed"):
            await asyncio.wait_for(call, PATIENCE_S)
    finally:
        freed.set()


async def test_coroutines(server: FakeEmbedder, relay: tuple[Relay, str]) -> None:
    async with AsyncClient(relay[1], "some-key", "fake") as client:
        found = await asyncio.gather(
            *[client.embed_table(table_of([text, None]), key="id") for text in "abc"]
        )
        assert "0123456789abcdef" == await client.fingerprint()
    assert all(isinstance(one, Embedded) and (1, 1) == tuple(map(len, one)) for one in found)


@pytest.mark.parametrize("address", ["gateway:8080", "ftp://gateway", "http://", "http://user:word@gateway"])
def test_addresses_that_are_none_are_refused(address: str) -> None:
    with pytest.raises(ValueError, match="`address`"):
        Client(address)
    with pytest.raises(ValueError, match="`concurrency`"):
        Client("http://gateway", concurrency=0)
    with pytest.raises(TypeError, match="retries"):
        Client("http://gateway", retries=3)
