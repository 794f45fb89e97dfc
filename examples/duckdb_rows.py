"""Embed the result of a query with DuckDB, in batches of Arrow; DuckDB writes the Parquet files.

    KEY=… python examples/duckdb_rows.py 'rows/*.parquet' vectors.parquet --model all-minilm-l6-v2

Bad rows are in a file of their own: `vectors.parquet.bad`.
"""

import argparse
import os

import duckdb
import pyarrow as pa

from gateway.client import Client

BATCH_ROWS = 10_000


def main() -> None:
    """Embed all rows."""
    parser = argparse.ArgumentParser()
    parser.add_argument("source", help="Parquet files with the columns `id` and `text`")
    parser.add_argument("target", help="file to write")
    parser.add_argument("--url", default="http://127.0.0.1:8080")
    parser.add_argument("--model", default="all-minilm-l6-v2")
    options = parser.parse_args()
    database = duckdb.connect()

    with Client(options.url, os.environ["KEY"], options.model) as client:
        batches = database.read_parquet(options.source).to_arrow_reader(BATCH_ROWS)
        parts = [client.embed_rows(pa.Table.from_batches([batch])) for batch in batches]
    rows = database.from_arrow(pa.concat_tables(parts))
    rows.filter("error_kind IS NULL").project("id, text, embedding").write_parquet(options.target)
    bad = rows.filter("error_kind IS NOT NULL").project("id, error_kind, error_message")
    bad.write_parquet(f"{options.target}.bad")


if __name__ == "__main__":
    main()
