"""Readers of rows: any text survives, and reading can begin again behind every row."""

import csv
import gzip
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.cli.embed.embedding import RowReader, pack
from gateway.cli.embed.parquet_rows import ParquetRows
from gateway.cli.embed.plan import Position
from gateway.cli.embed.text_rows import CsvRows, JsonLines, Row
from tests.embed.conftest import settings_of

TEXTS = st.text(st.characters(codec="utf-8"), max_size=12)
FILES = st.lists(st.lists(st.tuples(TEXTS, TEXTS), max_size=6), min_size=1, max_size=3)
FORMATS = ["jsonl", "jsonl.gz", "csv", "csv.gz", "tsv", "parquet"]


def write(path: Path, rows: list[tuple[str, str]]) -> None:
    """Write a file of rows with the columns `text` and `other`."""
    if path.suffix == ".parquet":
        columns = {"text": [row[0] for row in rows], "other": [row[1] for row in rows]}
        schema = pa.schema([("text", pa.string()), ("other", pa.string())])
        pq.write_table(pa.table(columns, schema=schema), path, row_group_size=2)
        return
    plain = path.with_suffix("") if path.suffix == ".gz" else path
    with plain.open("w", encoding="utf-8", newline="") as file:
        if ".jsonl" in path.name:
            file.writelines(json.dumps({"text": text, "other": other}) + "\n" for text, other in rows)
        else:
            writer = csv.writer(file, delimiter="\t" if plain.suffix == ".tsv" else ",")
            writer.writerows([("text", "other"), *rows])
    if path != plain:
        path.write_bytes(gzip.compress(plain.read_bytes()))
        plain.unlink()


@contextmanager
def opened(files: list[list[tuple[str, str]]], ending: str) -> Iterator[RowReader]:
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"{number}.{ending}" for number in range(len(files))]
        for path, rows in zip(paths, files, strict=True):
            write(path, rows)
        settings = settings_of(paths)
        readers = {"jsonl": JsonLines, "csv": CsvRows, "parquet": ParquetRows}
        yield readers[settings.sources[0].format](settings)


def values(reader: RowReader, rows: list[Row]) -> list[tuple[str, str]]:
    """Return the rows as their record batches hold them."""
    found: list[tuple[str, str]] = []
    for packed in pack(rows, 2, 1000):
        for row in reader.batch(packed).to_pylist():
            fields: dict[str, Any] = json.loads(row["line"]) if "line" in row else row
            found.append((fields["text"], fields["other"]))
    return found


@pytest.mark.parametrize("ending", FORMATS)
@settings(max_examples=40)
@given(files=FILES)
def test_reading_goes_on_behind_every_row(ending: str, files: list[list[tuple[str, str]]]) -> None:
    expected = [row for rows in files for row in rows]
    with opened(files, ending) as reader:
        rows = list(reader.rows(Position()))
        assert [row.text for row in rows] == [text for text, _ in expected]
        assert values(reader, rows) == expected
        for number, row in enumerate(rows):
            rest = list(reader.rows(row.end))
            assert [later[:3] for later in rest] == [later[:3] for later in rows[number + 1 :]]
            assert values(reader, rest) == expected[number + 1 :]
