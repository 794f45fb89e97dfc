"""Embed Parquet files with Dask, on the processes of this machine or of a cluster.

    KEY=… python examples/dask_rows.py rows/ vectors/ --model all-minilm-l6-v2

Each file of the output has all rows of one of the input; a bad row has a null vector, and the reason.
"""

import argparse
import os
from pathlib import Path

import dask
import pyarrow.parquet as pq

from gateway.client import Client


def embed_file(client: Client, source: Path, target: Path) -> int:
    """Embed the rows of a file; return their number. A file that is there already is complete."""
    if not target.exists():
        unfinished = target.with_suffix(".part")
        pq.write_table(client.embed_rows(pq.read_table(source)), unfinished)
        unfinished.replace(target)
    return pq.read_metadata(target).num_rows


def main() -> None:
    """Embed all files."""
    parser = argparse.ArgumentParser()
    parser.add_argument("source", type=Path, help="folder of Parquet files with a column `text`")
    parser.add_argument("target", type=Path, help="folder to write")
    parser.add_argument("--url", default="http://127.0.0.1:8080")
    parser.add_argument("--model", default="all-minilm-l6-v2")
    options = parser.parse_args()
    options.target.mkdir(exist_ok=True)

    client = Client(options.url, os.environ["KEY"], options.model)
    files = sorted(options.source.glob("*.parquet"))
    tasks = [dask.delayed(embed_file)(client, file, options.target / file.name) for file in files]
    print(f"{sum(dask.compute(*tasks, scheduler='processes', num_workers=2))} rows")


if __name__ == "__main__":
    main()
