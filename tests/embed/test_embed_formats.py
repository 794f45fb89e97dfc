"""Inputs and outputs of `gateway embed`: every pair of formats, and values that are easily changed."""

import csv
import io
import json
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.embed.conftest import Command, assert_vectors
from tests.fakes.tei import vector_of

TEXTS = [
    "plain",
    'a "quoted" word, and a comma',
    "two\nlines and\r\nthree",
    "naïve ünïcode 日本語 🙂 \u2028 end",
    " spaces ",
    "tab\tand \\ backslash",
    "'single' ; semicolon",
    "\u0000 null and \x7f",
]
INPUTS = ["in.jsonl", "in.jsonl.gz", "in.csv", "in.csv.gz", "in.tsv", "in.parquet"]
OUTPUTS = ["out.parquet", "out.jsonl", "out.jsonl.gz", "out.arrow", "out.lance"]


def write_input(command: Command, name: str) -> None:
    rows = [{"id": f"{number:03d}", "text": text} for number, text in enumerate(TEXTS)]
    if ".jsonl" in name:
        command.write_rows(name, rows)
    elif name.endswith(".parquet"):
        command.write_table(name, {key: [row[key] for row in rows] for key in ("id", "text")})
    else:
        file = io.StringIO()
        writer = csv.writer(file, delimiter="\t" if ".tsv" in name else ",")
        writer.writerow(["id", "text"])
        writer.writerows(row.values() for row in rows)
        command.write(name, file.getvalue())


@pytest.mark.parametrize("target", OUTPUTS)
@pytest.mark.parametrize("source", INPUTS)
def test_every_input_becomes_every_output(command: Command, source: str, target: str) -> None:
    write_input(command, source)
    outcome = command.run(source, "--to", target, "--batch-inputs", "3")

    assert outcome.status == 0, outcome.errors
    rows = command.rows(target)
    assert TEXTS == [row["text"] for row in rows]
    assert [f"{number:03d}" for number in range(len(TEXTS))] == [row["id"] for row in rows]
    assert_vectors(rows)
    assert outcome.summary["embedded"] == len(TEXTS)
    assert not (command.folder / f"{target}.parts").exists()
    if ".jsonl" not in target:
        assert pa.list_(pa.float32(), 8) == command.table(target).schema.field("embedding").type


@pytest.mark.parametrize("target", OUTPUTS)
def test_half_precision(command: Command, target: str) -> None:
    write_input(command, "in.parquet")
    assert command.run("in.parquet", "--to", target, "--dtype", "float16").status == 0
    assert_vectors(command.rows(target), tolerance=1e-3)
    if ".jsonl" not in target:
        assert pa.list_(pa.float16(), 8) == command.table(target).schema.field("embedding").type


def test_lines_of_json_stay_as_they_are(command: Command) -> None:
    lines = [
        '{"text": "a", "big": 123456789012345678901234567890, "r": 1.10, "nested": {"b": [1, {"c": null}]}}',
        '{ "text" : "b\\u0041", "emoji": "\\ud83d\\ude42" , "empty": {} }',
        '{"text":"c","text2":"d"}',
    ]
    command.write("in.jsonl", "\n".join(lines))
    assert command.run("in.jsonl", "--to", "out.jsonl", "--field", "text").status == 0
    written = (command.folder / "out.jsonl").read_text().splitlines()
    for line, result in zip(lines, written, strict=True):
        kept, _, vector = result.rpartition(',"embedding":')
        assert line.rstrip()[:-1].rstrip() == kept
        assert len(json.loads(vector[:-1])) == 8


def test_columns_of_json_get_types(command: Command) -> None:
    rows: list[dict[str, Any]] = [
        {"text": "a", "n": 1, "mixed": 1, "deep": {"x": [1, 2], "y": {"z": True}}, "big": 2**70, "e": {}},
        {"text": "b", "n": 2.5, "mixed": "one", "deep": {"x": [], "w": "only here"}, "big": 1, "e": {}},
        {"text": "c", "late": [{"k": 1}, {"k": None, "l": 2}], "deep": None, "mixed": [1], "exact": 2**60},
    ]
    command.write_rows("in.jsonl", rows)
    outcome = command.run("in.jsonl", "--to", "out.parquet")
    found = command.rows("out.parquet")
    assert [1.0, 2.5, None] == [row["n"] for row in found]
    assert ["1", '"one"', "[1]"] == [row["mixed"] for row in found]
    assert {"x": [1, 2], "y": {"z": True}, "w": None} == found[0]["deep"]
    assert {"x": [], "y": None, "w": "only here"} == found[1]["deep"]
    assert [{"k": 1, "l": None}, {"k": None, "l": 2}] == found[2]["late"]
    assert [str(2**70), "1", None] == [row["big"] for row in found]
    assert found[2]["exact"] == 2**60
    assert found[0]["e"] == "{}"
    assert {"mixed", "big", "e"} == set(outcome.summary["columns_as_json"])
    assert_vectors(found)


def plain(table: Any) -> Any:
    """Return a table without metadata, with values in place of dictionaries."""
    kinds = [field.type for field in table.schema]
    kinds = [kind.value_type if pa.types.is_dictionary(kind) else kind for kind in kinds]
    return table.cast(pa.schema(list(zip(table.schema.names, kinds, strict=True))))


def test_numbers_and_depths_beyond_all_types(command: Command) -> None:
    values = ["9" * 5000, "1e999", "[" * 600 + "]" * 600, '{"deep": ' * 20 + "1" + "}" * 20]
    lines = [f'{{"text": "a", "value": {value}}}' for value in values]
    command.write("in.jsonl", "\n".join([*lines, f'{{"text": "b", "value": {"[" * 9000}{"]" * 9000}}}']))
    outcome = command.run("in.jsonl", "--to", "out.parquet", "--on-bad", "skip")
    assert (outcome.status, outcome.summary["bad"]) == (0, 1), outcome.errors
    found = [row["value"] for row in command.rows("out.parquet")]
    assert values[:3] == found[:3]
    assert json.loads(values[3]) == json.loads(found[3])
    assert command.run("in.jsonl", "--to", "out.jsonl", "--on-bad", "skip").status == 0
    assert values[0] in (command.folder / "out.jsonl").read_text()


def odd_columns() -> dict[str, Any]:
    return {
        "text": pa.array(["a", "b", "a", None], pa.string()).dictionary_encode(),
        "large": pa.array(["x", None, "y", "z"], pa.large_string()),
        "nothing": pa.nulls(4),
        "moment": pa.array([1, 2, 3, None], pa.timestamp("ns", "UTC")),
        "day": pa.array([1, None, 3, 4], pa.date32()),
        "money": pa.array([Decimal("1.10"), None, Decimal("-3.00"), Decimal(0)], pa.decimal128(9, 2)),
        "raw": pa.array([b"\x00\xff", b"", None, b"z"]),
        "map": pa.array([[("k", 1)], [], None, [("a", 2)]], pa.map_(pa.string(), pa.int64())),
        "vector": pa.array([[1.0, 2.0], None, [], [3.0]], pa.list_(pa.float32())),
        "struct": pa.array([{"a": 1, "b": ["x"]}, None, {"a": None, "b": []}, {"a": 2, "b": None}]),
        "flag": pa.array([True, None, False, True]),
    }


def test_columns_of_parquet_keep_their_types(command: Command) -> None:
    columns = odd_columns()
    command.write_table("in.parquet", columns, row_group_size=3)
    outcome = command.run("in.parquet", "--to", "out.parquet", "--on-empty", "null", "--field", "text")
    assert outcome.status == 0, outcome.errors
    before, after = pq.read_table(command.folder / "in.parquet"), command.table("out.parquet")
    assert before.schema.remove_metadata() == after.drop_columns("embedding").schema.remove_metadata()
    assert plain(before).equals(plain(after.drop_columns("embedding")))
    assert_vectors(after.select(["text", "embedding"]).to_pylist())


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_parquet_with_nulls_has_lists_that_older_readers_know(command: Command, dtype: str) -> None:
    number = {"float32": pa.float32(), "float16": pa.float16()}[dtype]
    command.write_table("in.parquet", {"text": ["a", None, "bb", ""]})
    options = ("--on-empty", "null", "--dtype", dtype)
    for target, kind in (("out.parquet", pa.list_(number)), ("out.arrow", pa.list_(number, 8))):
        assert command.run("in.parquet", "--to", target, *options).status == 0
        table = command.table(target)
        assert kind == table.schema.field("embedding").type
        table.validate(full=True)
        rows = table.to_pylist()
        assert [False, True, False, True] == [row["embedding"] is None for row in rows]
        np.testing.assert_allclose(rows[2]["embedding"], vector_of("bb")[:8], atol=1e-3)
    assert command.run("in.parquet", "--to", "kept.parquet", "--on-empty", "skip").status == 0
    assert pa.list_(pa.float32(), 8) == command.table("kept.parquet").schema.field("embedding").type


@pytest.mark.parametrize("target", ["out.arrow", "out.lance"])
def test_dictionaries_become_values_elsewhere(command: Command, target: str) -> None:
    columns = odd_columns()
    # Lance has no type for these.
    kept = {name: column for name, column in columns.items() if name not in ("map", "nothing")}
    command.write_table("in.parquet", kept, row_group_size=3)
    outcome = command.run("in.parquet", "--to", target, "--on-empty", "null", "--field", "text")
    assert outcome.status == 0, outcome.errors
    before = pq.read_table(command.folder / "in.parquet")
    after = command.table(target)
    assert plain(before).equals(plain(after.drop_columns(["embedding"])))
    assert_vectors(after.select(["text", "embedding"]).to_pylist())


def test_values_of_parquet_as_json(command: Command) -> None:
    command.write_table("in.parquet", odd_columns())
    outcome = command.run("in.parquet", "--to", "out.jsonl", "--on-empty", "null", "--field", "text")
    assert outcome.status == 0, outcome.errors
    row = command.rows("out.jsonl")[0]
    assert row["moment"].startswith("1970-01-01 00:00:00.000000001")
    assert row["money"] == "1.10"
    assert row["raw"] == "AP8="
    assert row["map"] == [["k", 1]]
    assert row["struct"] == {"a": 1, "b": ["x"]}


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.string_view()])
def test_texts_of_parquet_have_several_types(command: Command, kind: Any) -> None:
    command.write_table("in.parquet", {"text": pa.array(["a", "bb"], kind), "n": [1, 2]})
    assert command.run("in.parquet", "--to", "out.parquet").status == 0
    assert_vectors(command.rows("out.parquet"))


def test_a_column_of_nulls_may_be_the_field(command: Command) -> None:
    command.write_table("a.parquet", {"text": pa.nulls(2), "n": [1, 2]})
    command.write_table("b.parquet", {"n": pa.array([3], pa.int32()), "text": ["x"]})
    outcome = command.run("a.parquet", "b.parquet", "--to", "out.parquet", "--on-empty", "null")
    assert outcome.status == 0, outcome.errors
    assert [1, 2, 3] == [row["n"] for row in command.rows("out.parquet")]
    assert_vectors(command.rows("out.parquet"))


def test_a_folder_stands_for_its_files(command: Command) -> None:
    (command.folder / "data").mkdir()
    for number in (2, 0, 1):
        command.write_rows(f"data/{number}.jsonl", [{"text": f"text {number}"}])
    (command.folder / "data" / "_SUCCESS").write_text("")
    assert command.run(str(command.folder / "data"), "--to", "out.jsonl").status == 0
    assert ["text 0", "text 1", "text 2"] == [row["text"] for row in command.rows("out.jsonl")]


def test_the_output_says_how_it_was_made(command: Command) -> None:
    command.write_rows("in.jsonl", [{"text": "a"}])
    command.run("in.jsonl", "--to", "out.parquet", "--dimensions", "4")
    facts = json.loads(command.table("out.parquet").schema.metadata[b"gateway embed"])
    assert facts["space"] == {"dimensions": 4, "fingerprint": "0123456789abcdef", "model": "fake"}
    assert facts["request"]["dimensions"] == 4


def test_moments_of_microseconds_are_iso_in_json(command: Command) -> None:
    moment = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    command.write_table("in.parquet", {"text": ["a"], "at": pa.array([moment], pa.timestamp("us", "UTC"))})
    command.run("in.parquet", "--to", "out.jsonl")
    assert command.rows("out.jsonl")[0]["at"] == "2026-01-02T03:04:05Z"


@pytest.mark.parametrize(
    ("name", "content", "words", "problem"),
    [
        ("in.txt", "x", (), "the name of an input ends with"),
        ("in.csv", "", (), "the file is empty"),
        ("in.csv", "a;b\n1;2\n", (), "';' separates columns, pass it as --delimiter"),
        ("in.csv", "a,b,a\n1,2,3\n", (), "two columns have the name `a`"),
        ("in.csv", "a,b\n1,2\n", (), "no column `text`, and 2 columns with texts; choose with --field"),
        ("in.csv", "a,b\n1,2\n", ("--field", "c"), "there is no column `c`; columns: `a`, `b`"),
        ("in.csv", "text,embedding\n1,2\n", (), "a column `embedding` is there already"),
        ("in.csv", "\ufeff".encode("utf-16"), (), "name the encoding of the file with --encoding"),
        (
            "in.jsonl",
            '{"text": "a", "embedding": [1]}\n',
            (),
            "name another one for the vectors with --column",
        ),
        ("in.jsonl", "[]\n", (), "no row that is a JSON object"),
        ("in.jsonl", '{"n": 1}\n', (), "no column `text`, and 0 columns with texts"),
        ("in.parquet", "PAR1", (), "is no readable Parquet file"),
        ("in.jsonl.gz", "", (), "no row that is a JSON object"),
    ],
)
def test_unusable_inputs_are_refused(
    command: Command, name: str, content: str | bytes, words: tuple[str, ...], problem: str
) -> None:
    command.write(name, content)
    outcome = command.run(name, "--to", "out.parquet", *words)
    assert outcome.status == 1
    assert problem in outcome.errors
    assert not (command.folder / "out.parquet").exists()


def test_a_column_of_numbers_is_no_field(command: Command) -> None:
    command.write_table("in.parquet", {"n": [1], "s": ["x"]})
    outcome = command.run("in.parquet", "--to", "out.parquet", "--field", "n")
    assert (outcome.status, "the column `n` holds no texts; texts: `s`" in outcome.errors) == (1, True)


def test_a_truncated_gzip_file_ends_with_its_line(command: Command) -> None:
    path = command.write_rows(
        "in.jsonl.gz", [{"text": f"text {number} {number**9}"} for number in range(2000)]
    )
    path.write_bytes(path.read_bytes()[:-300])
    outcome = command.run("in.jsonl.gz", "--to", "out.jsonl")
    assert outcome.status == 1
    assert "the file cannot be read on" in outcome.errors


def test_without_pylance_the_way_out_is_named(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.cli.embed.outputs.find_spec", lambda _: None)
    command.write_rows("in.jsonl", [{"text": "a"}])
    outcome = command.run("in.jsonl", "--to", "out.lance")
    assert outcome.status == 1
    assert "install the gateway's extra `lance`, or write Parquet" in outcome.errors
    assert not command.server.bodies


def test_without_pyarrow_the_extra_is_named(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.cli.embed.find_spec", lambda _: None)
    assert "extra `grpc`" in command.run("in.jsonl", "--to", "out.jsonl").errors


def test_names_of_outputs_decide_the_format(command: Command, tmp_path: Path) -> None:
    command.write_rows("in.jsonl", [{"text": "a"}])
    assert "the name of the output ends with" in command.run("in.jsonl", "--to", "out.xlsx").errors
    assert "no such folder" in command.run("in.jsonl", "--to", str(tmp_path / "none" / "o.jsonl")).errors
