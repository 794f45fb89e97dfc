"""Calls of `gateway embed`: forms of replies, options on the wire, retries, and replies that are no good."""

import json
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from gateway.cli.embed.embedding import pack
from gateway.cli.embed.plan import Position
from gateway.cli.embed.text_rows import Row
from gateway.client import replies
from gateway.client.calls import _retry_after_s
from gateway.client.errors import Unreadable
from gateway.client.replies import ARROW, kind_of, problem_of, read_reply, read_truncated
from tests.embed.conftest import Command, assert_vectors
from tests.fakes.arrow_memory import counted_memory
from tests.fakes.embedder import Reply, arrow_of, error
from tests.waiting import PATIENCE_S

ROWS = [{"text": f"text {number}"} for number in range(6)]
TWO = ("--batch-inputs", "2", "--concurrency", "1")


@pytest.mark.parametrize(("arrow", "packed"), [(True, True), (False, True), (False, False)])
def test_vectors_arrive_in_every_form(command: Command, arrow: bool, packed: bool) -> None:
    command.server.arrow, command.server.base64 = arrow, packed
    command.write_rows("in.jsonl", ROWS)
    outcome = command.run("in.jsonl", "--to", "out.jsonl", *TWO)
    assert outcome.status == 0, outcome.errors
    assert_vectors(command.rows("out.jsonl"))
    assert outcome.summary["tokens"] == 12
    assert outcome.summary["model"] == "fake"
    packs = [body.get("encoding_format") == "base64" for body in command.server.bodies]
    assert packs == ([False] * 3 if arrow else [False, True, True] if packed else [False, True, False, False])


@pytest.mark.parametrize("status", [406, 415])
def test_a_server_without_arrow_is_asked_for_base64(command: Command, status: int) -> None:
    command.write_rows("in.jsonl", ROWS)
    command.server.arrow = False
    command.server.faults = [error(status, "installed without Arrow")]
    assert command.run("in.jsonl", "--to", "out.jsonl", *TWO).status == 0
    assert "base64" == command.server.bodies[1]["encoding_format"]
    assert_vectors(command.rows("out.jsonl"))


def test_options_are_sent(command: Command) -> None:
    command.write_rows("in.jsonl", ROWS[:1])
    words = ("--input-type", "document", "--truncate", "left", "--dimensions", "4", "--model", "m")
    assert command.run("in.jsonl", "--to", "out.jsonl", *words).status == 0
    body = command.server.bodies[0]
    assert {
        "model": "m",
        "dimensions": 4,
        "input_type": "document",
        "truncate": "START",
        "input": ["text 0"],
    } == body
    headers = command.server.received[0]
    assert (headers["x-priority"], headers["authorization"]) == ("bulk", "Bearer some-key")


def test_prompts_by_name_go_to_the_api_of_tei(command: Command) -> None:
    command.write_rows("in.jsonl", ROWS[:1])
    assert (
        command.run("in.jsonl", "--to", "o.jsonl", "--prompt-name", "query", "--truncate", "right").status
        == 0
    )
    assert ["/embed"] == command.server.paths
    expected = {
        "prompt_name": "query",
        "truncate": True,
        "truncation_direction": "Right",
        "inputs": ["text 0"],
    }
    assert expected | {"model": "fake"} == command.server.bodies[0]


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
def test_calls_are_repeated(command: Command, status: int) -> None:
    command.write_rows("in.jsonl", ROWS)
    command.server.faults = [error(status, "busy", retry_after="0.01")] * 2
    outcome = command.run("in.jsonl", "--to", "out.jsonl", *TWO)
    assert outcome.status == 0
    assert f"{status}: busy; trying again" in outcome.errors
    assert_vectors(command.rows("out.jsonl"))


def test_a_wait_beyond_the_deadline_ends_the_run_at_once(command: Command) -> None:
    command.write_rows("in.jsonl", ROWS)
    command.server.faults = [error(429, "the month is spent", retry_after="86400")]
    outcome = command.run("in.jsonl", "--to", "out.jsonl", *TWO)
    assert outcome.status == 3
    assert "in.jsonl:1 to 2: " in outcome.errors
    assert "the month is spent; no success until --deadline (600 s)" in outcome.errors
    assert "asks to wait 86,400 s; nothing was kept, and the same command starts" in outcome.errors
    assert command.run("in.jsonl", "--to", "out.jsonl").status == 0


def test_a_server_that_is_away_ends_the_run_at_the_deadline(command: Command) -> None:
    command.write_rows("in.jsonl", ROWS)
    command.url = "http://127.0.0.1:9"
    outcome = command.run("in.jsonl", "--to", "out.jsonl", "--model", "m", "--deadline", "0.05")
    assert (outcome.status, "no success until --deadline" in outcome.errors) == (3, True)


@pytest.mark.parametrize("status", [401, 403, 404, 301])
def test_other_refusals_end_the_run(command: Command, status: int) -> None:
    command.write_rows("in.jsonl", ROWS)
    command.server.hook = lambda _: error(status, "no")
    outcome = command.run("in.jsonl", "--to", "out.jsonl")
    assert (outcome.status, f"the server returned {status}: no" in outcome.errors) == (1, True)
    assert ["in.jsonl"] == [path.name for path in command.folder.iterdir()]
    assert len(command.server.bodies) == 1


def test_too_large_a_call_is_cut(command: Command) -> None:
    command.write_rows("in.jsonl", ROWS)

    def too_large(texts: Sequence[str]) -> Reply | None:
        return error(413, "too large") if len(texts) > 2 else None

    command.server.hook = too_large
    outcome = command.run("in.jsonl", "--to", "out.jsonl")
    assert (outcome.status, outcome.summary["bad"]) == (0, 0)
    assert_vectors(command.rows("out.jsonl"))


JSON = {"content-type": "application/json"}


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("<html>", "not a reply of an embeddings API"),
        ({"data": []}, "0 vectors for 2 texts"),
        ({"data": [{"embedding": [1]}, {"embedding": [1, 2]}]}, "different widths"),
        ({"data": [{"index": 0, "embedding": [1]}, {"index": 0, "embedding": [2]}]}, "not numbered from 0"),
        ({"data": [{"embedding": [1e39]}, {"embedding": [2]}]}, "not finite"),
        ({"data": [{"embedding": "!"}, {"embedding": "AAAA"}]}, "not a reply of an embeddings API"),
        ({"data": [{"embedding": []}, {"embedding": []}]}, "2 vectors for 2 texts"),
    ],
)
@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_replies_that_are_no_good_end_the_run(command: Command, content: object, problem: str) -> None:
    command.write_rows("in.jsonl", ROWS)
    body = content if isinstance(content, str) else json.dumps(content)
    command.server.hook = lambda _: (200, JSON, body.encode())
    outcome = command.run("in.jsonl", "--to", "out.jsonl", *TWO)
    assert (outcome.status, problem in outcome.errors) == (1, True), outcome.errors


def test_messages_of_a_server_do_not_reach_the_terminal_as_commands() -> None:
    assert problem_of(b'{"error": {"message": "no\\u001b[2J key"}}') == "no [2J key"
    assert problem_of(b"\x1b]0;title\x07") == " ]0;title "
    assert problem_of(b"") == "no message"
    assert problem_of(b'{"detail": [1]}') == "[1]"
    assert "[" in problem_of(b'{"x":' + b"[" * 9000)


def test_kinds_of_errors_are_the_servers_words() -> None:
    assert kind_of(b'{"error": {"message": "m", "type": "t", "code": null}}', 400) == "t"
    assert kind_of(b'{"error": {"message": "m", "type": "t", "code": "empty_input"}}', 400) == "empty_input"
    assert kind_of(b'{"error": "m", "error_type": "Validation"}', 422) == "Validation"
    for body in (b"", b"[]", b'{"error": {"code": 400}}', b'{"error": {"code": "a\\u001bb"}}'):
        assert kind_of(body, 400) == "status_400"


def test_compressed_replies_are_refused(command: Command) -> None:
    command.write_rows("in.jsonl", ROWS)
    command.server.hook = lambda _: (200, JSON | {"content-encoding": "gzip"}, b"x")
    assert "compresses its replies" in command.run("in.jsonl", "--to", "out.jsonl").errors


def test_the_number_of_calls_at_once_is_bounded(command: Command) -> None:
    command.write_rows("in.jsonl", [{"text": f"{number}"} for number in range(60)])
    inside, most, lock, both = 0, 0, threading.Lock(), threading.Barrier(3)

    def count(_: Sequence[str]) -> None:
        nonlocal inside, most
        with lock:
            inside += 1
            most = max(most, inside)
        both.wait(PATIENCE_S)
        with lock:
            inside -= 1

    command.server.hook = count
    assert (
        command.run("in.jsonl", "--to", "out.jsonl", "--batch-inputs", "2", "--concurrency", "3").status == 0
    )
    assert most == 3


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--batch-inputs", "0"), "--batch-inputs: more than 0"),
        (("--dimensions", "-1"), "--dimensions: more than 0"),
        (("--concurrency", "9999"), "--concurrency: more than 0 and at most 1,024"),
        (("--deadline", "nan"), "--deadline: more than 0"),
        (("--delimiter", ";;"), "--delimiter is one character"),
    ],
)
def test_bounds_of_options(command: Command, words: Sequence[str], problem: str) -> None:
    command.write_rows("in.jsonl", ROWS)
    outcome = command.run("in.jsonl", "--to", "out.jsonl", *words)
    assert (outcome.status, problem in outcome.errors) == (1, True)


def test_headers_of_truncated_inputs() -> None:
    assert read_truncated(None, 3) == ()
    assert read_truncated("unknown", 3) is None
    assert read_truncated("0,2-3, 5", 6) == (0, 2, 3, 5)
    for header in ("6", "3-1", "x", "0-999999999999", "-1"):
        with pytest.raises(Unreadable):
            read_truncated(header, 6)


def test_waits_may_be_dates() -> None:
    import httpx

    assert _retry_after_s(httpx.Headers({"retry-after": "3"})) == 3
    assert _retry_after_s(httpx.Headers({"retry-after": "Wed, 21 Oct 2015 07:28:00 GMT"})) == 0
    assert _retry_after_s(httpx.Headers({"retry-after": "Wed, 21 Oct 2015 07:28:00 -0000"})) == 0
    assert 10**9 < (_retry_after_s(httpx.Headers({"retry-after": "Fri, 31 Dec 9999 23:00:00 -0000"})) or 0)
    for unreadable in ("soon", f"Wed, 21 Oct {'9' * 30} 07:28:00 GMT", "Wed, 21 Oct 2015 07:28:00 +99999999"):
        assert _retry_after_s(httpx.Headers({"retry-after": unreadable})) is None
    assert _retry_after_s(httpx.Headers()) is None


@pytest.mark.parametrize("tokens", [10**400, 2**31 + 1, -1])
@pytest.mark.parametrize("arrow", [True, False])
def test_impossible_counts_of_tokens_are_refused(command: Command, tokens: int, arrow: bool) -> None:
    command.write_rows("in.jsonl", ROWS)
    vectors = np.ones((len(ROWS), 8), np.float32)
    data = [{"embedding": row} for row in vectors.tolist()]
    as_json = json.dumps({"data": data, "usage": {"total_tokens": tokens}}).encode()
    reply = (
        (200, {"content-type": ARROW}, arrow_of(vectors, tokens))
        if arrow
        else (200, {"content-type": "application/json"}, as_json)
    )
    command.server.hook = lambda _: reply
    outcome = command.run("in.jsonl", "--to", "out.jsonl")
    assert outcome.status == 1
    assert ("tokens" in outcome.errors, "total_tokens" in outcome.errors) == (True, not arrow)


@pytest.mark.parametrize("tokens", ["9" * 4000, "9" * 5000, "-1", "many"])
def test_impossible_counts_in_a_header_are_refused(command: Command, tokens: str) -> None:
    command.write_rows("in.jsonl", ROWS)
    body = json.dumps([[1.0] * 8] * len(ROWS)).encode()
    command.server.hook = lambda _: (200, {"x-compute-tokens": tokens}, body)
    outcome = command.run("in.jsonl", "--to", "out.jsonl")
    assert (outcome.status, f"the reply counts '{tokens[:80]}' tokens" in outcome.errors) == (1, True)


def stream_of(column: Any, codec: str | None = None) -> bytes:
    """Return an Arrow stream of one column of vectors."""
    table = pa.table({"embeddings": column})
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=codec)
    with pa.ipc.new_stream(sink, table.schema, options=options) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())


@pytest.mark.parametrize(
    "column",
    [
        pa.array([[{"x": 1}]], pa.list_(pa.struct([("x", pa.int8())]), 1)),
        pa.array([["1"]], pa.list_(pa.string(), 1)),
        pa.array([[None]], pa.list_(pa.null(), 1)),
        pa.array([[1.0]], pa.list_(pa.float32())),
        pa.array([[1.0], [2.0]], pa.list_(pa.float32(), 1)),
        pa.array([None], pa.list_(pa.float32(), 1)),
    ],
    ids=["structs", "texts", "nulls", "no fixed size", "too many", "no vector"],
)
def test_vectors_that_are_no_numbers_are_refused(column: Any) -> None:
    with pytest.raises(Unreadable):
        read_reply(stream_of(column), ARROW, 1)


def test_a_damaged_stream_is_refused_whatever_is_damaged() -> None:
    body = stream_of(pa.FixedSizeListArray.from_arrays(pa.array(np.ones(12, np.float32)), 4))
    for place in range(0, len(body), 2):
        for damage in (b"\x00\x00", b"\xff\xff", b"\x00\x80"):
            damaged = body[:place] + damage + body[place + 2 :]
            try:
                assert (3, 4) == read_reply(damaged, ARROW, 3).vectors.shape
            except Unreadable:
                continue


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
def test_compressed_vectors_are_read_within_a_bound(codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    column = pa.FixedSizeListArray.from_arrays(pa.array(np.zeros(1024 * 1024, np.float32)), 1024)
    body = stream_of(column, codec)
    assert len(body) < 100_000
    assert (1024, 1024) == read_reply(body, ARROW, 1024).vectors.shape
    monkeypatch.setattr(replies, "REPLY_BYTES_MAX", 4 * 1024 * 1024 - 1)
    before = pa.total_allocated_bytes()
    with pytest.raises(Unreadable, match="once it is decompressed"):
        read_reply(body, ARROW, 1024)
    assert before == pa.total_allocated_bytes()


def stream_with(kind: pa.DataType, values: Sequence[Sequence[str]]) -> bytes:
    """Return a compressed stream of a vector a batch, next to a column of texts. values: of each batch."""
    vector = pa.FixedSizeListArray.from_arrays(pa.array(np.ones(8, np.float32)), 8)
    columns = [pa.array(batch, pa.string()) for batch in values]
    if pa.types.is_dictionary(kind):
        indices = [pa.array([len(column) - 1], pa.int32()) for column in columns]
        columns = list(map(pa.DictionaryArray.from_arrays, indices, columns))
    batches = [pa.record_batch([vector, column], names=["embeddings", "other"]) for column in columns]
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression="zstd", emit_dictionary_deltas=True)
    with pa.ipc.new_stream(sink, batches[0].schema, options=options) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return bytes(sink.getvalue())


def test_deltas_of_a_dictionary_are_refused_before_they_are_joined() -> None:
    values = ["a" * 1_000_000, *(f"t{number}" for number in range(20))]
    batches = [values[: number + 2] for number in range(20)]
    body = stream_with(pa.dictionary(pa.int32(), pa.string()), batches)
    assert len(body) < 20_000
    with counted_memory() as pool, pytest.raises(Unreadable, match="a delta of a dictionary"):
        read_reply(body, ARROW, 20)
    assert pool.max_memory() < 1_000_000


def test_other_columns_of_a_reply_are_not_read() -> None:
    body = stream_with(pa.string(), [["a" * 1_000_000]] * 20)
    assert len(body) < 40_000
    with counted_memory() as pool:
        assert (20, 8) == read_reply(body, ARROW, 20).vectors.shape
    assert pool.max_memory() < 1_000_000


def test_replies_of_tei_are_lists() -> None:
    assert read_reply(b"[[1.0, 2.0], [3.0, 4.0]]", "application/json", 2).vectors.tolist() == [[1, 2], [3, 4]]
    with pytest.raises(Unreadable):
        read_reply(b"ARROW1", "application/vnd.apache.arrow.stream", 1)


def test_rows_are_packed_by_texts_and_bytes() -> None:
    def row(text: str | None, size: int = 1, group: int = 0) -> Row:
        return Row(1, text, size, None, Position(), group)

    def sizes(rows: list[Row], *bounds: int) -> list[int]:
        return [len(packed) for packed in pack(rows, *bounds)]

    assert sizes([row("a")] * 7, 3, 100) == [3, 3, 1]
    assert sizes([row("aaa"), row("éé"), row("b" * 50), row("c")], 9, 7) == [2, 1, 1]
    assert sizes([row("a", 60), row(None, 60), row("b", 10)], 9, 99, 100) == [1, 2]
    assert sizes([row(None)] * 5 + [row("a")] * 2, 1, 9) == [6, 1]
    assert sizes([row("a"), row("b", group=1)], 9, 99) == [1, 1]
    assert sizes([], 9, 99) == []


SPENT = "limit tokens_per_day: 0 remain, it starts again on 2026-11-27 (UTC), try again in 18h"


@pytest.mark.parametrize(
    "body", [{"error": {"message": SPENT, "code": "insufficient_quota"}}, {"error": SPENT}]
)
def test_a_limit_of_the_day_that_is_spent_ends_the_run_at_once(command: Command, body: Any) -> None:
    command.write_rows("in.jsonl", ROWS)
    headers = {"retry-after": "60", "x-should-retry": "false"}
    command.server.hook = lambda _: (429, headers, json.dumps(body).encode())
    outcome = command.run("in.jsonl", "--to", "out.jsonl")
    assert outcome.status == 3
    assert f"the server returned 429: {SPENT}; nothing was kept" in outcome.errors
    assert len(command.server.bodies) == 1


def test_a_limit_of_the_hour_is_waited_for(command: Command) -> None:
    command.write_rows("in.jsonl", ROWS)
    body = json.dumps({"error": {"message": "the hour is spent", "code": "rate_limit_exceeded"}}).encode()
    command.server.faults = [(429, {"retry-after": "0.01", "x-should-retry": "false"}, body)]
    assert command.run("in.jsonl", "--to", "out.jsonl", *TWO).status == 0
    assert_vectors(command.rows("out.jsonl"))


def test_the_address_is_that_of_the_configuration(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(command.folder)
    command.write_rows("in.jsonl", ROWS)
    address, command.url = str(command.url).removeprefix("http://"), None
    command.write("router.yaml", f"listen: {address}\n")
    assert command.run("in.jsonl", "--to", "out.jsonl").status == 0
    assert_vectors(command.rows("out.jsonl"))
    command.write("other.yaml", "listen: 127.0.0.1:9\n")
    outcome = command.run("in.jsonl", "--to", "o.jsonl", "-c", "other.yaml", "--deadline", "0.05")
    assert "http://127.0.0.1:9/v1/models: " in outcome.errors
    command.write("router.yaml", "listen: [1]\n")
    outcome = command.run("in.jsonl", "--to", "o.jsonl")
    assert (outcome.status, "router.yaml has 1 problem" in outcome.errors) == (1, True)
    outcome = command.run("in.jsonl", "--to", "o.jsonl", "-c", "absent.yaml")
    assert (outcome.status, "there is no absent.yaml" in outcome.errors) == (1, True)


def test_a_refused_key_is_reported_with_the_address(command: Command) -> None:
    command.write_rows("in.jsonl", ROWS)
    command.server.models_reply = error(401, "no such key")
    outcome = command.run("in.jsonl", "--to", "out.jsonl")
    assert outcome.status == 1
    assert f"{command.url}/v1/models: the server returned 401: no such key; set the key" in outcome.errors
