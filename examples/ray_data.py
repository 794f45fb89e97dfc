"""Embed a folder of Parquet files with Ray Data through the gateway.

    KEY=… python examples/ray_data.py texts/ vectors/ --url http://127.0.0.1:8080 --model all-minilm-l6-v2

Each of Ray's actors has a client. It repeats calls that the gateway defers, and fails if vectors of another
space arrive. A bad row has a null vector, and the reason.
"""

import argparse
import logging
import os
import time

import pyarrow as pa
import ray

from gateway.client import Client


class Embedder:
    """Embedder of blocks, with the settings of a client."""

    def __init__(self, client: Client) -> None:
        self._client = client
        # It logs each call, and Ray prints the lines of all workers.
        logging.getLogger("httpx").setLevel(logging.WARNING)

    def __call__(self, rows: pa.Table) -> pa.Table:
        """Return the rows with their vectors and errors."""
        return self._client.embed_rows(rows)


def main() -> None:
    """Run on this machine, or on the cluster that RAY_ADDRESS names."""
    parser = argparse.ArgumentParser()
    parser.add_argument("source", help="folder of Parquet files with a column `text`")
    parser.add_argument("target", help="folder to write")
    parser.add_argument("--url", default="http://127.0.0.1:8080")
    parser.add_argument("--model", default="all-minilm-l6-v2")
    parser.add_argument("--workers", type=int, default=2, help="processes that call the gateway")
    options = parser.parse_args()

    with Client(options.url, os.environ["KEY"], options.model) as first:
        # All workers accept the vector space of the first reply only.
        fingerprint = first.fingerprint()
    client = Client(options.url, os.environ["KEY"], options.model, fingerprint=fingerprint)
    started_s = time.perf_counter()
    rows = ray.data.read_parquet(options.source).map_batches(
        Embedder,
        fn_constructor_args=(client,),
        batch_format="pyarrow",
        batch_size=5000,
        compute=ray.data.ActorPoolStrategy(size=options.workers),
        # The work is the gateway's; a worker only waits.
        num_cpus=0.1,
    )
    rows.write_parquet(options.target)
    count = ray.data.read_parquet(options.target).count()
    seconds = time.perf_counter() - started_s
    print(f"{count} rows in {seconds:.1f} s, {count / seconds:.0f} rows/s")


if __name__ == "__main__":
    main()
