"""Vectors in polars, pandas and LanceDB, on the memory of the gateway's Arrow reply.

    pip install httpx lancedb pandas polars pyarrow
    KEY=… python examples/arrow_frames.py http://127.0.0.1:8080 all-minilm-l6-v2

It embeds a few texts, shows that polars and pandas use the numbers where they arrived, and searches a table
of LanceDB.
"""

import os
import sys
import tempfile

import httpx
import lancedb
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.ipc

TEXTS = ["an apple", "a pear", "a car", "the sea"]
ARROW = "application/vnd.apache.arrow.stream"


def embed(url: str, model: str, texts: list[str]) -> pa.Table:
    """Return the vectors of texts, a column `embeddings`."""
    reply = httpx.post(
        f"{url}/v1/embeddings",
        json={"model": model, "input": texts},
        headers={"authorization": f"Bearer {os.environ['KEY']}", "accept": ARROW},
        timeout=60,
    )
    reply.raise_for_status()
    # The reader refers to the bytes of the reply; nothing is copied.
    return pa.ipc.open_stream(pa.py_buffer(reply.content)).read_all()


def address_of(column: pa.ChunkedArray) -> int:
    """Return where in memory the numbers of a column begin."""
    return column.chunk(0).flatten().buffers()[1].address


def main(url: str, model: str) -> None:
    """Print one line for each library."""
    table = embed(url, model, TEXTS)
    arrived = address_of(table["embeddings"])

    frame = pl.from_arrow(table).with_columns(text=pl.Series(TEXTS))
    print(
        "polars:",
        frame.schema["embeddings"],
        "copied:",
        address_of(frame.to_arrow()["embeddings"]) != arrived,
    )

    pandas = table.to_pandas(types_mapper=pd.ArrowDtype)
    kept = pa.Table.from_pandas(pandas)["embeddings"]
    print("pandas:", pandas.dtypes["embeddings"], "copied:", address_of(kept) != arrived)

    rows = table.rename_columns({"embeddings": "vector"}).append_column("text", pa.array(TEXTS))
    with tempfile.TemporaryDirectory() as folder:
        stored = lancedb.connect(folder).create_table("texts", data=rows)
        [question] = embed(url, model, ["fruit to eat"])["embeddings"].to_pylist()
        print("LanceDB:", [row["text"] for row in stored.search(question).limit(2).to_list()])


if __name__ == "__main__":
    main(*sys.argv[1:])
