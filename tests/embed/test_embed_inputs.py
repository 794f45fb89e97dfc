"""Inputs of `gateway embed` as other programs write them: gaps, partitions, encodings, quotes and damage."""

import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from gateway.cli.embed.options import encoding_of, sources_of
from gateway.cli.embed.parquet_rows import BATCH_BYTES_MAX, RowSizes
from gateway.cli.embed.plan import Position
from gateway.cli.embed.text_rows import CsvRows, JsonLines
from tests.embed.conftest import Command, assert_vectors, settings_of

# Rows whose first text is missing; all have other texts.
GAPS: list[list[dict[str, Any]]] = [
    [{"id": "doc-1", "text": None}, {"id": "doc-2", "text": "hello"}],
    [{"id": "doc-1"}, {"id": "doc-2", "text": "hello"}],
    [{"id": "doc-1", "title": "t"}, {"id": "doc-2", "title": "u", "text": "hello"}],
    [{"id": "doc-1", "text": 5}, {"id": "doc-2", "text": "hello"}],
    [{"id": "doc-1", "text": None}, {"id": "doc-2", "text": None}],
]


@pytest.mark.parametrize("rows", GAPS)
def test_a_first_row_without_text_does_not_change_the_field(
    command: Command, rows: list[dict[str, Any]]
) -> None:
    command.write_rows("in.jsonl", rows)
    outcome = command.run("in.jsonl", "--to", "out.parquet")
    assert (1, True) == (outcome.status, "in.jsonl:1: `text`" in outcome.errors), outcome.errors
    assert [] == command.server.bodies


def test_the_field_is_found_over_all_rows(command: Command) -> None:
    command.write_rows("in.jsonl", [{"n": 1, "body": None}, {"n": 2}, {"n": 3, "body": "hello"}])
    outcome = command.run("in.jsonl", "--to", "out.parquet", "--on-empty", "skip")
    assert outcome.status == 0, outcome.errors
    assert_vectors(command.rows("out.parquet"), "body")


def test_two_fields_with_texts_in_different_rows_are_a_choice(command: Command) -> None:
    command.write_rows("in.jsonl", [{"id": "doc-1", "body": None}, {"id": "doc-2", "body": "hello"}])
    outcome = command.run("in.jsonl", "--to", "out.parquet")
    assert (1, True) == (outcome.status, "choose with --field: columns: `id`, `body`" in outcome.errors)


def test_a_column_text_of_nulls_is_not_replaced_by_ids(command: Command) -> None:
    command.write_table("in.parquet", {"id": ["doc-1", "doc-2"], "text": pa.nulls(2)})
    outcome = command.run("in.parquet", "--to", "out.parquet")
    assert (1, True) == (outcome.status, "in.parquet row 1: `text` has no text" in outcome.errors)


def test_a_null_in_the_column_of_ids_is_bad(command: Command) -> None:
    command.write_rows("in.jsonl", [{"id": None, "text": "a"}])
    outcome = command.run("in.jsonl", "--to", "out.parquet", "--id", "id", "--field", "text")
    assert (1, True) == (outcome.status, "in.jsonl:1: has no `id`" in outcome.errors)


@pytest.mark.parametrize("target", ["out.parquet", "out.jsonl", "out.arrow"])
def test_columns_of_partitions_are_kept(command: Command, target: str) -> None:
    table = pa.table({"text": ["ein", "one", "un"], "lang": ["de", "en", None], "year": [2025, 2026, 2026]})
    folder = command.folder / "data"
    ds.write_dataset(
        table, folder, format="parquet", partitioning=["lang", "year"], partitioning_flavor="hive"
    )
    outcome = command.run(str(folder), "--to", target)
    assert outcome.status == 0, outcome.errors
    rows = command.rows(target)
    found = sorted((row["text"], row["lang"], row["year"]) for row in rows)
    assert [("ein", "de", 2025), ("one", "en", 2026), ("un", None, 2026)] == found
    assert_vectors(rows)
    if target == "out.parquet":
        expected = ds.dataset(folder, partitioning="hive").schema
        for name in ("lang", "year"):
            assert expected.field(name).type == command.table(target).schema.field(name).type


def test_a_partition_that_is_named_alone_keeps_its_column(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    (command.folder / "lang=pt%2FBR").mkdir()
    command.write_table("lang=pt%2FBR/a.parquet", {"text": ["um"]})
    monkeypatch.chdir(command.folder)
    assert command.run("./lang=pt%2FBR/a.parquet", "--to", "out.jsonl").status == 0
    assert "pt/BR" == command.rows("out.jsonl")[0]["lang"]


def test_partitions_of_other_formats_are_refused_with_their_place(command: Command) -> None:
    (command.folder / "data" / "lang=de").mkdir(parents=True)
    command.write_rows("data/lang=de/a.jsonl", [{"text": "ein"}])
    outcome = command.run(str(command.folder / "data"), "--to", "out.jsonl")
    assert (1, True) == (outcome.status, "data/lang=de/a.jsonl: its folder" in outcome.errors)
    assert "whose column `lang` is not in the rows" in outcome.errors


UNCLOSED = "id,text\n1,fine\n" + '2,"never closed\n' + "".join(f"{n},row {n}\n" for n in range(3, 53))


@pytest.mark.parametrize("end", ["", '53,"closed"\n', '53,",more\n'])
@pytest.mark.parametrize("words", [(), ("--on-bad", "skip")])
def test_a_missing_quote_hides_no_rows(command: Command, end: str, words: tuple[str, ...]) -> None:
    command.write("in.csv", UNCLOSED + end)
    outcome = command.run("in.csv", "--to", "out.parquet", "--field", "text", *words)
    last = 54 if end else 53
    assert 1 == outcome.status
    assert f"in.csv:3: a quote makes the lines 3 to {last} one row" in outcome.errors
    assert not (command.folder / "out.parquet").exists()


def test_a_value_of_too_many_lines_is_refused(command: Command) -> None:
    command.write("in.csv", UNCLOSED + "more,rows\n" * 10_000 + '"\n')
    outcome = command.run("in.csv", "--to", "out.parquet", "--field", "text", "--on-bad", "skip")
    assert (1, True) == (outcome.status, "in.csv:3: a quote opens a value" in outcome.errors)


@pytest.mark.parametrize(("line", "mark"), [("sep=;\r\n", ";"), ('"sep=;"\n', ";"), ("SEP=\t\n", "\t")])
def test_a_first_line_gives_the_delimiter(command: Command, line: str, mark: str) -> None:
    rows = [("id", "text"), *((str(number), f"a, {number}") for number in range(300))]
    command.write("in.csv", line + "".join(f"{mark.join(row)}\n" for row in rows))
    outcome = command.run("in.csv", "--to", "out.parquet", "--batch-inputs", "100")
    assert outcome.status == 0, outcome.errors
    assert rows[1:] == [(row["id"], row["text"]) for row in command.rows("out.parquet")]


def test_that_line_is_no_header_where_the_delimiter_is_given(command: Command) -> None:
    command.write("in.csv", "sep=,\nid|text\n1|a\n")
    assert command.run("in.csv", "--to", "out.jsonl", "--delimiter", "|").status == 0
    assert [("1", "a")] == [(row["id"], row["text"]) for row in command.rows("out.jsonl")]


ACCENTS = ["plain", "café naïve", "last €", "Ċ \u0a0a \u0a0d"]


@pytest.mark.parametrize("source", ["in.csv", "in.jsonl", "in.csv.gz", "in.jsonl.gz"])
@pytest.mark.parametrize(
    ("encoding", "written"),
    [
        ("cp1252", "cp1252"),
        ("utf-16", "utf-16"),
        ("UTF-16", "utf-16-be-mark"),
        ("utf-16-le", "utf-16-le"),
        ("utf-32", "utf-32"),
        ("gb18030", "gb18030"),
        ("utf-8-sig", "utf-8-sig"),
    ],
)
def test_files_of_other_encodings(command: Command, source: str, encoding: str, written: str) -> None:
    texts = ACCENTS[:3] if encoding == "cp1252" else ACCENTS
    if "csv" in source:
        content = "id,text\r\n" + "".join(f"{number},{text}\r\n" for number, text in enumerate(texts))
    else:
        content = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)
    data = ("\ufeff" + content).encode("utf-16-be") if "mark" in written else content.encode(written)
    command.write(source, data)
    outcome = command.run(source, "--to", "out.parquet", "--encoding", encoding, "--batch-inputs", "2")
    assert outcome.status == 0, outcome.errors
    assert texts == [row["text"] for row in command.rows("out.parquet")]


@pytest.mark.parametrize("source", ["in.csv", "in.jsonl"])
def test_another_encoding_is_named_with_the_way_to_read_it(command: Command, source: str) -> None:
    content = "id,text\n1,plain\n2,café\n" if source == "in.csv" else '{"text": "x"}\n\n{"text": "café"}\n'
    command.write(source, content.encode("cp1252"))
    outcome = command.run(source, "--to", "out.parquet")
    assert 1 == outcome.status
    assert f"{source}:3: is not UTF-8" in outcome.errors
    assert "--encoding" in outcome.errors
    assert "--on-bad" not in outcome.errors


def test_a_header_of_another_encoding_is_named(command: Command) -> None:
    command.write("in.csv", "text,année\na,1\n".encode("cp1252"))
    outcome = command.run("in.csv", "--to", "out.parquet")
    assert "in.csv:1: the header is not UTF-8" in outcome.errors
    assert "--encoding" in outcome.errors


def test_an_undecodable_value_beside_the_text_costs_no_call(command: Command) -> None:
    command.write("in.jsonl", b'{"text": "a", "other": {"deep": "\xff"}}\n')
    outcome = command.run("in.jsonl", "--to", "out.parquet")
    assert (1, True) == (outcome.status, "in.jsonl:1: is not UTF-8" in outcome.errors)
    assert [] == command.server.bodies


@pytest.mark.parametrize("encoding", ["nonsense", "rot13", "base64", "cp037", "idna", "utf-7\0"])
def test_an_encoding_of_no_text_is_refused(command: Command, encoding: str) -> None:
    command.write("in.csv", "text\na\n")
    outcome = command.run("in.csv", "--to", "out.parquet", "--encoding", encoding)
    assert (1, True) == (outcome.status, "is no encoding of lines of text" in outcome.errors)


def test_an_encoding_is_part_of_a_run(command: Command) -> None:
    command.write("in.csv", "text\ncaf\u00e9\n".encode("cp1252"))
    command.run("in.csv", "--to", "out.parquet", "--encoding", "cp1252")
    outcome = command.run("in.csv", "--to", "out.parquet", "--encoding", "cp1250")
    assert "--encoding was 'cp1252' and is 'cp1250'" in outcome.errors


def test_encodings_are_not_of_parquet(command: Command) -> None:
    command.write_table("in.parquet", {"text": ["a"]})
    outcome = command.run("in.parquet", "--to", "out.parquet", "--encoding", "cp1252")
    assert "--encoding is for JSONL and CSV" in outcome.errors


@pytest.mark.parametrize("content", ["id,text\r1,hello\r2,world\r", "id,text\n1,hello\r2,world\r3,x\r"])
def test_lines_of_old_macs_are_refused_in_words(command: Command, content: str) -> None:
    command.write("in.csv", content)
    outcome = command.run("in.csv", "--to", "out.parquet")
    assert 1 == outcome.status
    assert "lines of the file end with CR alone" in outcome.errors
    assert "newline" not in outcome.errors
    command.write("in.jsonl", '{"text": "a"}\r{"text": "b"}\r')
    assert "end with CR alone" in command.run("in.jsonl", "--to", "out.parquet", "--field", "text").errors


def damaged(path: Path, columns: dict[str, Any]) -> None:
    """Write Parquet, and spoil the marked texts in it."""
    pq.write_table(pa.table(columns), path, compression="none", use_dictionary=False)
    path.write_bytes(path.read_bytes().replace(b"SPOIL", b"SP\xffIL"))


@pytest.mark.parametrize("target", ["out.parquet", "out.jsonl"])
@pytest.mark.parametrize("place", ["text", "other", "nested"])
def test_texts_of_parquet_that_are_not_utf8(command: Command, place: str, target: str) -> None:
    columns: dict[str, Any] = {"text": ["a", "b", "c"], "other": ["x", "y", "z"]}
    columns["nested"] = [{"s": "p"}, {"s": "q"}, {"s": "r"}]
    columns[place][1] = {"s": "SPOIL"} if place == "nested" else "SPOIL"
    damaged(command.folder / "in.parquet", columns)
    outcome = command.run("in.parquet", "--to", target, "--field", "text")
    assert (1, True) == (outcome.status, f"in.parquet row 2: `{place}` is damaged" in outcome.errors)
    outcome = command.run("in.parquet", "--to", target, "--field", "text", "--on-bad", "skip")
    assert (0, 1) == (outcome.status, outcome.summary["bad"]), outcome.errors
    assert ["a", "c"] == [row["text"] for row in command.rows(target)]


MOMENT = 1_700_000_000_123_456_789


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        (pa.struct([("at", pa.timestamp("ns"))]), {"at": MOMENT}, {"at": "2023-11-14 22:13:20.123456789"}),
        (pa.list_(pa.struct([("for", pa.duration("ns"))])), [{"for": 1001}], [{"for": 1001}]),
        (pa.map_(pa.string(), pa.time64("ns")), [("k", 1)], [["k", "00:00:00.000000001"]]),
        (pa.large_list(pa.timestamp("ns")), [MOMENT], ["2023-11-14 22:13:20.123456789"]),
    ],
)
def test_nanoseconds_in_nested_values_become_json(
    command: Command, kind: Any, value: Any, expected: Any
) -> None:
    command.write_table("in.parquet", {"text": ["a", "b"], "x": pa.array([value, None], kind)})
    outcome = command.run("in.parquet", "--to", "out.jsonl")
    assert outcome.status == 0, outcome.errors
    assert [expected, None] == [row["x"] for row in command.rows("out.jsonl")]


def test_values_beyond_json_are_refused_before_a_call(command: Command) -> None:
    moments = pa.array([2**62], pa.timestamp("us"))
    command.write_table("in.parquet", {"text": ["a"], "at": moments})
    outcome = command.run("in.parquet", "--to", "out.jsonl")
    assert (1, True) == (outcome.status, "in.parquet rows 1 to 1: a column has values" in outcome.errors)
    assert [] == command.server.bodies
    assert 0 == command.run("in.parquet", "--to", "out.parquet").status


def test_links_out_of_a_folder_are_refused(command: Command) -> None:
    (command.folder / "data").mkdir()
    (command.folder / "secrets").mkdir()
    command.write_rows("data/a.jsonl", [{"text": "mine"}])
    command.write_rows("secrets/b.jsonl", [{"text": "not mine"}])
    for target in ("b.jsonl", "."):
        link = command.folder / "data" / "link.jsonl"
        link.symlink_to(command.folder / "secrets" / target)
        outcome = command.run(str(command.folder / "data"), "--to", "out.jsonl")
        assert (1, True) == (outcome.status, "data/link.jsonl: is a symbolic link" in outcome.errors)
        link.unlink()
    assert [] == command.server.bodies
    # A link that is named is meant.
    link.symlink_to(command.folder / "secrets" / "b.jsonl")
    assert 0 == command.run(str(link), "--to", "out.jsonl").status


def test_a_small_file_of_huge_rows_is_refused(command: Command) -> None:
    texts = pa.chunked_array([pa.array(["x" * 1_000_000] * 100)] * 20)
    path = command.write_table("in.parquet", {"text": texts}, compression="zstd", row_group_size=2000)
    assert path.stat().st_size < 1000
    outcome = command.run("in.parquet", "--to", "out.parquet")
    assert (1, True) == (outcome.status, "stand for 2,0" in outcome.errors), outcome.errors
    assert [] == command.server.bodies


def test_long_values_of_a_dictionary_bound_what_is_decoded_at_once(command: Command) -> None:
    values = [os.urandom(500_000).hex() for _ in range(2)]
    path = command.write_table(
        "in.parquet", {"text": values * 200, "n": [[1, 2]] * 400}, dictionary_pagesize_limit=2**24
    )
    with pq.ParquetFile(path) as file:
        sizes = RowSizes(sources_of([path])[0], file)
        rows = sizes.batch_rows(0)
        sizes.close()
    assert rows * 1_000_000 <= BATCH_BYTES_MAX < (rows + 10) * 1_100_000


def test_a_row_of_a_billion_values_is_refused(command: Command) -> None:
    column = pa.DictionaryArray.from_arrays(pa.array([0] * 3_000_000, pa.int8()), pa.array(["x" * 300]))
    nested = pa.ListArray.from_arrays(pa.array([0, 3_000_000], pa.int32()), column)
    command.write_table("in.parquet", {"text": ["a"], "x": nested}, compression="zstd")
    outcome = command.run("in.parquet", "--to", "out.parquet")
    assert 1 == outcome.status
    assert "stand for" in outcome.errors


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "utf-32", "gb18030"])
@pytest.mark.parametrize("name", ["in.csv", "in.jsonl", "in.csv.gz"])
def test_reading_goes_on_behind_every_row_of_other_encodings(
    command: Command, name: str, encoding: str
) -> None:
    texts = [*ACCENTS, "two\nlines", "\u0a0a\u000a", "日本", ""]
    if "csv" in name:
        lines = [f'"{number}";"{text}"\r\n' for number, text in enumerate(texts)]
        content = "sep=;\r\nid;text\r\n" + "".join(lines)
    else:
        content = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)
    path = command.write(name, content.encode(encoding))
    settings = settings_of([path], encoding_of(encoding))
    reader = CsvRows(settings) if "csv" in name else JsonLines(settings)
    rows = list(reader.rows(Position()))
    assert texts == [row.text for row in rows]
    for number, row in enumerate(rows):
        assert texts[number + 1 :] == [later.text for later in reader.rows(row.end)]
