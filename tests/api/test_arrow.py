"""Arrow over HTTP: bodies of texts, replies of vectors, bounds before anything is decompressed."""

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pytest

from backends.contract import TermWeights
from gateway.api.wire import arrow
from gateway.api.wire.arrow import Form, Rows, all_rows, read_texts, write_sparse, write_vectors
from gateway.app import ROUTES
from gateway.errors import EmptyInput, InvalidInput, MalformedBody
from gateway.upstreams import fair_threads
from gateway.upstreams.fair_threads import THREADS
from tests.conftest import CONFIG, Running, running_gateway
from tests.fakes.arrow_memory import counted_memory
from tests.fakes.hooks import SPLADE, until
from tests.fakes.hooks import embedder_and_reranker as fakes
from tests.fakes.tei import FakeTei, vector_of
from tests.waiting import PATIENCE_S

ARROW = "application/vnd.apache.arrow.stream"
WANTED = {"accept": ARROW}
SENT = {"content-type": ARROW}
TEXT_TYPES = [
    pa.string(),
    pa.large_string(),
    pa.string_view(),
    pa.dictionary(pa.int8(), pa.string()),
    pa.dictionary(pa.uint32(), pa.large_string()),
]
LONG = "longer than twelve bytes"


def stream(
    *batches: Sequence[str | None],
    kind: pa.DataType = pa.string(),  # noqa: B008 - types are values
    codec: str | None = None,
    name: str = "text",
) -> bytes:
    """Return texts as an IPC stream of one column."""
    columns = [pa.array(batch, pa.string()) for batch in batches]
    is_dictionary = pa.types.is_dictionary(kind)
    columns = [(column.dictionary_encode() if is_dictionary else column).cast(kind) for column in columns]
    return written([pa.record_batch([column], names=[name]) for column in columns], codec)


def written(batches: Sequence[pa.RecordBatch], codec: str | None = None) -> bytes:
    """Return batches as an IPC stream."""
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=codec, emit_dictionary_deltas=True)
    with pa.ipc.new_stream(sink, batches[0].schema, options=options) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return bytes(sink.getvalue())


def read(reply: httpx.Response) -> pa.ipc.RecordBatchStreamReader:
    """Return the reader of a reply."""
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"].startswith(ARROW)
    return pa.ipc.open_stream(reply.content)


def rows_of(column: Any) -> list[Any]:
    """Return the rows of a column of vectors: float32 arrays, None for null."""
    return [None if row is None else np.array(row, np.float32) for row in column.to_pylist()]


async def send(gateway: Running, path: str, content: bytes, **headers: str) -> httpx.Response:
    """POST an Arrow stream."""
    return await gateway.client.post(path, content=content, headers=SENT | headers)


def dictionaries(
    *batches: tuple[Sequence[str], Sequence[int]],
    kind: pa.DataType = pa.string(),  # noqa: B008 - types are values
) -> bytes:
    """Return a compressed stream. batches: values of the dictionary and indices of the rows of each.

    A dictionary that adds values to the last one is written as a delta.
    """
    columns = [
        pa.DictionaryArray.from_arrays(pa.array(indices, pa.int32()), pa.array(values, kind))
        for values, indices in batches
    ]
    return written([pa.record_batch([column], names=["text"]) for column in columns], "zstd")


def deltas(first: str, count: int) -> bytes:
    """Return a stream whose first value is a long text, and each of whose batches adds one value."""
    values = [first, *(f"t{number}" for number in range(count))]
    return dictionaries(*((values[: number + 2], [number + 1]) for number in range(count)))


DELTAS = deltas("a" * 1_000_000, 20)


@pytest.mark.parametrize("kind", TEXT_TYPES, ids=str)
@pytest.mark.parametrize("codec", [None, "lz4", "zstd"])
def test_all_kinds_of_strings_are_read(kind: pa.DataType, codec: str | None) -> None:
    body = stream(["a", None, LONG], ["b", "a"], [], [None, LONG], kind=kind, codec=codec)
    rows, texts = read_texts(body, 100, 100_000)
    assert (["a", LONG, "b", "a", LONG], (3, 2, 0, 2)) == (texts, rows.batches)
    assert (0, 2, 3, 4, 6) == rows.texts


def test_one_column_of_several_is_read_by_its_name() -> None:
    columns = {"id": pa.array([1, 2]), "text": pa.array(["a", "b"]), "huge": pa.array(["x" * 99, "y"])}
    assert ["a", "b"] == read_texts(written([pa.record_batch(columns)]), 10, 10_000)[1]
    columns["input"] = columns.pop("id")
    with pytest.raises(InvalidInput, match="has 3 columns; send one, or one of them named `text`"):
        read_texts(written([pa.record_batch(columns)]), 10, 10_000)


@pytest.mark.parametrize(
    ("body", "error", "reason"),
    [
        (b"", MalformedBody, "no valid Arrow IPC stream"),
        (b"\xff\xff\xff\xff\x10\x00\x00\x00", MalformedBody, "no valid Arrow IPC stream"),
        (stream(["a"])[:-20], MalformedBody, "no valid Arrow IPC stream"),
        (stream(["a"]) + b"more", MalformedBody, "bytes after its end"),
        (stream(["a", "", None]), EmptyInput, "row 1 is an empty text"),
        (stream(["a"] * 11), InvalidInput, "more than 10 rows"),
        (stream(*[["a"] * 2] * 6), InvalidInput, "more than 10 rows"),
        (written([pa.record_batch({"n": pa.array([1])})]), InvalidInput, "column `n` is int64; send strings"),
        (written([pa.record_batch({"n": pa.array([["a"]])})]), InvalidInput, "column `n` is list"),
        (written([pa.record_batch({"n": pa.array([b"a"])})]), InvalidInput, "column `n` is binary"),
        (written([pa.record_batch({"n": pa.nulls(2)})]), InvalidInput, "column `n` is null"),
    ],
)
def test_bad_streams_are_refused(body: bytes, error: type[Exception], reason: str) -> None:
    with pytest.raises(error, match=reason):
        read_texts(body, 10, 10_000)


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
def test_a_small_stream_of_huge_texts_is_not_decompressed(codec: str) -> None:
    body = stream(["x" * 50_000_000], codec=codec)
    before = pa.total_allocated_bytes()
    with pytest.raises(InvalidInput, match="more than 1000000 bytes once it is decompressed"):
        read_texts(body, 10, 1_000_000)
    assert pa.total_allocated_bytes() - before < 1_000_000


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
def test_a_declared_length_holds(codec: str) -> None:
    size = (5_000_000).to_bytes(8, "little")
    body = stream(["x" * 5_000_000], codec=codec)
    # The buffer of the texts follows the one of their offsets.
    at = body.rindex(size)
    with pytest.raises(MalformedBody):
        read_texts(body[:at] + (1000).to_bytes(8, "little") + body[at + 8 :], 10, 1_000_000)


def views(*texts: str | None) -> pa.DictionaryArray:
    """Return a dictionary of views, as polars writes its categories; its last value is in no row."""
    values = list(dict.fromkeys(text for text in texts if text is not None))
    places = [None if text is None else values.index(text) for text in texts]
    return pa.DictionaryArray.from_arrays(
        pa.array(places, pa.uint32()), pa.array([*values, "unused"], pa.string_view())
    )


def equal_views(valid: Any = None, first: bytes = b"") -> Any:
    """Return 20 views of the same 60,000 bytes, after a first view."""
    word = b"x" * 60_000
    view = len(word).to_bytes(4, "little") + word[:4] + bytes(8)
    buffers = [valid, pa.py_buffer(first + view * 20), pa.py_buffer(word)]
    return pa.Array.from_buffers(pa.string_view(), 20 + bool(first), buffers)


def test_a_dictionary_of_views_is_read() -> None:
    batch = pa.record_batch([views("a", None, LONG, "a")], names=["text"])
    rows, texts = read_texts(written([batch]), 10, 1000)

    assert (["a", LONG, "a"], (0, 2, 3)) == (list(texts), tuple(rows.texts))


@pytest.mark.parametrize("kind", [pa.string_view(), *TEXT_TYPES[3:]], ids=str)
def test_texts_of_several_batches_count_together(kind: pa.DataType) -> None:
    """A dictionary is in each batch again, and its texts become objects each time."""
    body = stream(*[["x" * 60_000]] * 20, kind=kind, codec="zstd")
    assert len(body) < 100_000
    with pytest.raises(InvalidInput, match=r"bytes together|once it is decompressed"):
        read_texts(body, 100, 1_000_000)


def test_views_of_a_dictionary_that_share_their_bytes_count_each_time() -> None:
    column = pa.DictionaryArray.from_arrays(pa.array([0], pa.uint32()), equal_views())
    body = written([pa.record_batch([column], names=["text"])])
    assert len(body) < 100_000
    with pytest.raises(InvalidInput, match="more than 1000000 bytes together"):
        read_texts(body, 100, 1_000_000)


@pytest.mark.parametrize("kind", [pa.string_view(), *TEXT_TYPES[3:]], ids=str)
def test_texts_that_share_their_bytes_count_each_time(kind: pa.DataType) -> None:
    if pa.types.is_string_view(kind):
        body = written([pa.record_batch([equal_views()], names=["text"])])
    else:
        body = stream(["x" * 60_000] * 20, kind=kind)
    assert len(body) < 100_000
    with pytest.raises(InvalidInput, match="more than 1000000 bytes together"):
        read_texts(body, 100, 1_000_000)


def test_deltas_of_a_dictionary_are_refused_before_they_are_joined() -> None:
    """Pyarrow copies the whole dictionary at each delta."""
    assert len(DELTAS) < 10_000
    with counted_memory() as pool, pytest.raises(InvalidInput, match="has a delta of a dictionary"):
        read_texts(DELTAS, 100, 10_000_000)
    assert pool.max_memory() < 1_000_000


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.string_view()], ids=str)
def test_each_dictionary_of_a_stream_counts(kind: pa.DataType) -> None:
    batches = [([letter * 100_000], [0]) for letter in "abcdefghij"]
    body = dictionaries(*batches, kind=kind)
    assert len(body) < 10_000
    with counted_memory() as pool:
        assert [values[0] for values, _ in batches] == read_texts(body, 20, 1_100_000)[1]
    # The last ones, compressed and not, and the copy of views; not all ten.
    assert 100_000 < pool.max_memory() < 700_000
    with counted_memory() as pool, pytest.raises(InvalidInput, match="once it is decompressed"):
        read_texts(body, 20, 900_000)
    assert pool.max_memory() < 100_000


class FullChecks:
    """Column of a batch that counts the full checks of all its values, and of its dictionary's."""

    count = 0

    def __init__(self, column: Any) -> None:
        self._column = column

    def validate(self, *, full: bool = False) -> None:
        FullChecks.count += full
        self._column.validate(full=full)

    def __len__(self) -> int:
        return len(self._column)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._column, name)


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.string_view()], ids=str)
def test_a_dictionary_is_checked_once(kind: pa.DataType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the number of batches that share it: the work is proportional to the decompressed bytes."""
    columns, check = arrow._columns, arrow._TextReader._checked
    checked: list[list[str]] = []

    def count(reader: Any, dictionary: Any) -> Any:
        checked.append(dictionary.to_pylist())
        return check(reader, dictionary)

    monkeypatch.setattr(arrow._TextReader, "_checked", count)
    monkeypatch.setattr(arrow, "_columns", lambda *given, **named: map(FullChecks, columns(*given, **named)))
    monkeypatch.setattr(FullChecks, "count", 0)
    first, second = ["€" * 1000, "b"], ["c"]
    body = dictionaries((first, [1]), *[(first, [])] * 300, *[(second, [0])] * 2, (first, [0]), kind=kind)
    rows, texts = read_texts(body, 310, 1_000_000)

    assert (["b", "c", "c", "€" * 1000], 304) == (texts, len(rows.batches))
    assert ([first, second, first], 0) == (checked, FullChecks.count)


def test_batches_without_rows_count_as_rows() -> None:
    assert [0] * 19 + [1] == list(read_texts(stream(*[[]] * 19, ["a"]), 10, 10_000)[0].batches)
    with pytest.raises(InvalidInput, match="more than 10 rows"):
        read_texts(stream(*[[]] * 20, ["a"]), 10, 10_000)


@pytest.mark.parametrize("index", [1, -1])
def test_an_index_outside_the_dictionary_is_refused(index: int) -> None:
    values = pa.array(["a"])
    column = pa.DictionaryArray.from_arrays(pa.array([0, index], pa.int8()), values, safe=False)
    with pytest.raises(MalformedBody, match="out of bounds"):
        read_texts(written([pa.record_batch([column], names=["text"])]), 10, 10_000)


@pytest.mark.parametrize("in_dictionary", [False, True])
def test_views_of_nulls_do_not_make_room_for_other_texts(in_dictionary: bool) -> None:
    """Their lengths are undefined: here a negative one."""
    null = (-(2**31)).to_bytes(4, "little", signed=True) + bytes(12)
    column = equal_views(pa.py_buffer((2**21 - 2).to_bytes(3, "little")), null)
    if in_dictionary:
        column = pa.DictionaryArray.from_arrays(pa.array([0], pa.int8()), column)
    body = written([pa.record_batch([column], names=["text"])])
    with pytest.raises(InvalidInput, match="more than 1000000 bytes together"):
        read_texts(body, 100, 1_000_000)


@pytest.mark.parametrize("length", [-(2**31), -5, 5000, 2**31 - 1])
@pytest.mark.parametrize("in_dictionary", [False, True])
def test_views_of_nulls_are_not_read(length: int, in_dictionary: bool) -> None:
    """Arrow's `cast` reads them, and a negative length ends the process."""
    null = length.to_bytes(4, "little", signed=True) + b"\x7f" * 12
    view = (1).to_bytes(4, "little") + b"a" + bytes(11)
    column = pa.Array.from_buffers(pa.string_view(), 2, [pa.py_buffer(b"\x02"), pa.py_buffer(null + view)])
    if in_dictionary:
        column = pa.DictionaryArray.from_arrays(pa.array([0, 1], pa.int8()), column)
    rows, texts = read_texts(written([pa.record_batch([column], names=["text"])]), 10, 1000)
    assert (["a"], (1,)) == (texts, rows.texts)


def test_damaged_streams_are_refused_or_read() -> None:
    generator = np.random.default_rng(5)
    bodies = [
        stream(["a", None, LONG], [LONG, "b"], kind=kind, codec=codec)
        for kind in TEXT_TYPES
        for codec in (None, "lz4", "zstd")
    ]
    refused = 0
    for number in range(3000):
        body = bytearray(bodies[number % len(bodies)])
        for _ in range(int(generator.integers(1, 4))):
            body[int(generator.integers(len(body)))] = int(generator.integers(256))
        if number % 5 == 0:
            del body[int(generator.integers(len(body))) :]
        try:
            _, texts = read_texts(bytes(body), 10, 100_000)
            assert sum(map(len, texts)) <= 100_000
        except (MalformedBody, InvalidInput, EmptyInput):
            refused += 1
    assert 1000 < refused < 3000


def test_vectors_keep_batches_and_nulls() -> None:
    vectors = np.random.default_rng(1).random((3, 4), np.float32)
    reader = pa.ipc.open_stream(
        write_vectors(vectors, Rows((2, 0, 3), (0, 2, 4)), Form("lz4", {"model": "m"}))
    )
    batches = list(reader)
    assert "embeddings: fixed_size_list<item: float not null>[4]" == str(reader.schema).split("\n")[0]
    assert {b"model": b"m"} == reader.schema.metadata
    assert [2, 0, 3] == [batch.num_rows for batch in batches]
    found = [row for batch in batches for row in rows_of(batch.column(0))]
    assert [True, False, True, False, True] == [row is not None for row in found]
    np.testing.assert_array_equal(vectors, np.array([row for row in found if row is not None]))


def test_vectors_without_nulls_have_tei_managers_schema() -> None:
    reader = pa.ipc.open_stream(write_vectors(np.ones((2, 3), np.float32), all_rows(2)))
    assert (
        "embeddings: fixed_size_list<item: float not null>[3] not null" == str(reader.schema).split("\n")[0]
    )


def test_term_weights_keep_nulls_and_empty_rows() -> None:
    terms = [
        TermWeights(np.array([1, 5], np.int32), np.array([0.5, 0.25], np.float32)),
        TermWeights(np.array([], np.int32), np.array([], np.float32)),
    ]
    (batch,) = pa.ipc.open_stream(write_sparse(terms, Rows((3,), (0, 2))))
    first, null, empty = batch.column(0).to_pylist()
    assert [{"index": 1, "value": 0.5}, {"index": 5, "value": 0.25}] == first
    assert (None, []) == (null, empty)


async def test_texts_and_vectors_travel_as_arrow() -> None:
    async with running_gateway(fakes()) as gateway:
        body = stream(["a b", None], ["c", LONG], kind=pa.large_string(), codec="zstd")
        reply = await send(
            gateway, "/embed?normalize=false&dimensions=4", body, accept=f'{ARROW};codecs="lz4"'
        )
        plain = await gateway.client.post(
            "/embed", json={"inputs": ["a b", "c", LONG], "normalize": False, "dimensions": 4}
        )
    reader = read(reply)
    batches = list(reader)
    assert f"{ARROW}; codecs=lz4" == reply.headers["content-type"]
    assert {"x-compute-tokens", "server-timing", "x-request-id"} <= set(reply.headers)
    assert [2, 2] == [batch.num_rows for batch in batches]
    found = [row for batch in batches for row in rows_of(batch.column(0))]
    assert found.pop(1) is None
    np.testing.assert_array_equal(np.array(plain.json(), np.float32), np.array(found))
    assert {b"model", b"tokens"} == set(reader.schema.metadata)


async def test_the_same_vectors_as_json_base64_and_arrow() -> None:
    texts = ["a b", "c", LONG]
    async with running_gateway(fakes()) as gateway:
        replies = [
            await gateway.client.post(
                "/v1/embeddings", json={"input": texts, "model": "bge"}, headers=WANTED
            ),
            await send(gateway, "/v1/embeddings?model=bge", stream(texts)),
            await send(gateway, "/models/bge/embed", stream(texts)),
        ]
    expected = np.array([vector_of(text) for text in texts])
    for reply in replies:
        (batch,) = read(reply)
        np.testing.assert_array_equal(expected, np.array(rows_of(batch.column(0))))


async def test_sparse_vectors_as_arrow() -> None:
    config = CONFIG.replace(
        "models:\n",
        "  splade: {backend: tei, replicas: ['http://splade']}\nmodels:\n  s: {upstream: splade}\n",
    )
    async with running_gateway({"splade": FakeTei(model_type=SPLADE)} | fakes(), config) as gateway:
        reply = await send(gateway, "/embed_sparse?model=s", stream(["a b", None]))
        plain = await gateway.client.post("/embed_sparse", json={"inputs": "a b", "model": "s"})
    (batch,) = read(reply)
    assert [plain.json()[0], None] == batch.column("sparse_embeddings").to_pylist()


@pytest.mark.parametrize(
    ("path", "body", "status", "reason"),
    [
        ("/embed?nothing=1", stream(["a"]), 422, "`nothing` is no option of this path"),
        ("/embed?inputs=a", stream(["a"]), 422, "`inputs` is no option of this path"),
        ("/embed?dimensions=4&dimensions=5", stream(["a"]), 422, "twice"),
        ("/embed?dimensions=many", stream(["a"]), 422, "dimensions"),
        ("/embed", stream(["a", None, ""]), 400, "row 2 is an empty text"),
        ("/embed", stream([None]), 400, "has no text"),
        ("/embed", DELTAS, 422, "has a delta of a dictionary; send each dictionary as a whole"),
        ("/embed", stream(*[[]] * 4096, ["a"]), 422, "more than 4096 batches"),
        ("/v1/embeddings?model=bge", DELTAS, 400, "has a delta of a dictionary"),
        ("/embed", b"\xff\xff\xff\xffno stream", 400, "no valid Arrow IPC stream"),
        (
            "/v1/embeddings?model=bge",
            written([pa.record_batch({"n": pa.array([1.5])})]),
            400,
            "is double; send strings",
        ),
        ("/v1/embeddings?model=bge&encoding_format=base64", stream(["a"]), 400, "float32"),
        ("/v1/embeddings?model=bge&return_multivector=true", stream(["a"]), 400, "multi-vectors"),
    ],
)
async def test_bad_requests_are_refused_in_the_dialect(
    path: str, body: bytes, status: int, reason: str
) -> None:
    async with running_gateway(fakes()) as gateway:
        reply = await send(gateway, path, body)
    assert (status, "application/json") == (reply.status_code, reply.headers["content-type"])
    assert reason in reply.text


@asynccontextmanager
async def busy_gateway(
    monkeypatch: pytest.MonkeyPatch, calls: int
) -> AsyncIterator[tuple[Running, list[str], list["asyncio.Task[httpx.Response]"]]]:
    """Yield a gateway whose threads for Arrow are busy, their names, and the calls that wait for them."""
    gate, names, read_now = threading.Event(), list[str](), arrow.read_texts

    def read_later(*arguments: Any, **named: Any) -> Any:
        names.append(threading.current_thread().name)
        gate.wait(PATIENCE_S)
        return read_now(*arguments, **named)

    monkeypatch.setattr(arrow, "read_texts", read_later)
    async with running_gateway(fakes()) as gateway:
        tasks = [asyncio.create_task(send(gateway, "/embed", stream(["a"]))) for _ in range(calls)]
        try:
            await until(lambda: len(names) == THREADS)
            yield gateway, names, tasks
        finally:
            gate.set()
            await asyncio.gather(*tasks)


async def test_streams_are_read_by_few_threads_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    async with busy_gateway(monkeypatch, 40) as (gateway, names, tasks), asyncio.timeout(PATIENCE_S):
        # Uploads, journals and replies run in the loop's own pool, which has fewer threads than 40.
        assert "free" == await asyncio.to_thread(lambda: "free")
        assert 200 == (await gateway.client.post("/embed", json={"inputs": "a"}, headers=WANTED)).status_code
        assert (THREADS, False) == (len(names), any(task.done() for task in tasks))
    assert [200] * 40 == [task.result().status_code for task in tasks]
    assert THREADS >= len(set(names))


async def test_streams_that_wait_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    body = stream(["a"])
    monkeypatch.setattr(fair_threads, "TENANT_CHARACTERS_MAX", 3 * len(body))
    async with busy_gateway(monkeypatch, 3) as (gateway, _, tasks):
        refused = await send(gateway, "/embed", body)
    assert 429 == refused.status_code
    assert "too much of your text is waiting to be read" in refused.text
    assert "retry-after" in refused.headers
    assert [200] * 3 == [task.result().status_code for task in tasks]


async def test_a_stream_waits_only_so_long(monkeypatch: pytest.MonkeyPatch) -> None:
    async with busy_gateway(monkeypatch, 2) as (gateway, names, _):
        monkeypatch.setattr(arrow, "READING_S", 0.05)
        refused = await send(gateway, "/embed", stream(["a"]))
    assert (429, THREADS) == (refused.status_code, len(names))
    assert "the Arrow stream was not read within 0.05 s" in refused.text


def with_head(schema: pa.Schema, **batch: Any) -> bytes:
    """Return a stream of one batch of one text."""
    sink = pa.BufferOutputStream()
    columns = [pa.array(["a"]) for _ in schema]
    with pa.ipc.new_stream(sink, schema) as writer:
        writer.write_batch(pa.record_batch(columns, schema=schema), **batch)
    return sink.getvalue().to_pybytes()


@pytest.mark.parametrize(
    ("stream", "reason"),
    [
        (with_head(pa.schema([(f"c{n}", pa.string()) for n in range(129)])), "more than 128 fields"),
        (with_head(pa.schema([("text", pa.string())], {f"k{n}": "" for n in range(128)})), "more than 128"),
        (
            with_head(pa.schema([pa.field("text", pa.string(), metadata={f"k{n}": "" for n in range(128)})])),
            "more than 128",
        ),
        (with_head(pa.schema([("text", pa.string())], {"k": "v" * 65_536})), "a head of more than 65536"),
        (with_head(pa.schema([("text", pa.string())]), custom_metadata={"k": "v"}), "metadata of its own"),
    ],
    ids=["columns", "schema", "field", "head", "batch"],
)
def test_heads_whose_parts_may_share_bytes_are_bounded(stream: bytes, reason: str) -> None:
    with counted_memory() as pool, pytest.raises(MalformedBody, match=reason):
        read_texts(stream, 100, 10**6)
    assert not pool.max_memory()


def test_a_schema_may_have_metadata_and_other_columns() -> None:
    fields = [("text", pa.string()), *((f"c{n}", pa.string()) for n in range(99))]
    assert read_texts(with_head(pa.schema(fields, {"pandas": "x" * 20_000})), 100, 10**6)[1] == ["a"]


def test_an_error_names_the_row_of_its_input() -> None:
    error = InvalidInput("input 1: it is too long")
    error.name_rows((0, 2))
    assert "input 1: it is too long" == error.message
    error.input_index = 1
    error.name_rows((0, 2))
    assert "row 2: it is too long" == error.message


async def test_nulls_need_an_arrow_reply() -> None:
    async with running_gateway(fakes()) as gateway:
        refused = await send(gateway, "/embed", stream(["a", None]), accept="application/json")
        served = await send(gateway, "/embed", stream(["a"]), accept="application/json")
    assert (422, 200) == (refused.status_code, served.status_code)
    assert "accept Arrow" in refused.text
    np.testing.assert_array_equal([vector_of("a")], np.array(served.json(), np.float32))


async def test_the_document_names_the_paths_that_take_arrow() -> None:
    async with running_gateway(fakes()) as gateway:
        paths = (await gateway.client.get("/docs/openapi.json")).json()["paths"]
    found = set()
    for path, item in paths.items():
        operation = item.get("post", {})
        contents = [operation.get("requestBody", {}), operation.get("responses", {}).get("200", {})]
        if any(ARROW in content.get("content", {}) for content in contents):
            assert all(ARROW in content["content"] for content in contents)
            found.add(path)
    answers = {path: ROUTES.parse(path.replace("{name}", "a")).options.answer for path in paths}
    # An upload is answered without Litestar too, and is no endpoint of a model.
    endpoints: Any = {path: answer for path, answer in answers.items() if hasattr(answer, "__self__")}
    assert found == {path for path, answer in endpoints.items() if answer.__self__.forms.arrow is not None}
    assert 8 == len(found)


async def test_without_the_package_arrow_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrow, "find_spec", lambda _: None)
    async with running_gateway(fakes()) as gateway:
        sent = await send(gateway, "/embed", stream(["a"]))
        wanted = await gateway.client.post("/embed", json={"inputs": "a"}, headers=WANTED)
    assert [415, 415] == [sent.status_code, wanted.status_code]
    assert "extra `grpc`" in sent.text
    assert "extra `grpc`" in wanted.text
