"""Embed a folder of Parquet files with Ray Data through the gateway, with Arrow in both directions.

    pip install httpx pyarrow "ray[data]"
    KEY=… python examples/ray_data.py texts/ vectors/ --url http://127.0.0.1:8080 --model all-minilm-l6-v2

Each task sends the column `text` of a block as an Arrow stream and appends the vectors of the reply: no
number is printed or parsed on the way. The gateway queues these calls behind interactive ones. Calls that
it defers are repeated for ten minutes, and the run stops if vectors of another vector space arrive.
"""

import argparse
import os
import time

import httpx
import pyarrow as pa
import pyarrow.ipc
import ray

ARROW = "application/vnd.apache.arrow.stream"
# Statuses after which the same call may succeed, and how long to repeat it.
RETRIED = (429, 502, 503, 504)
DEADLINE_S = 600


class Embedder:
    """Caller of the gateway; each of Ray's actors keeps one, with its connection."""

    def __init__(self, url: str, model: str, fingerprint: str, key: str) -> None:
        self._fingerprint = fingerprint
        self._client = httpx.Client(
            base_url=url,
            params={"model": model},
            headers={"authorization": f"Bearer {key}", "content-type": ARROW, "x-priority": "bulk"},
            timeout=120,
        )

    def __call__(self, table: pa.Table) -> pa.Table:
        """Return the rows with a column `embedding`; a row whose text is null has a null."""
        texts = table.select(["text"]).combine_chunks()
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, texts.schema) as writer:
            writer.write_table(texts)
        reply = self._post(bytes(sink.getvalue()))
        if reply.headers["x-embedding-fingerprint"] != self._fingerprint:
            raise ValueError("the gateway now serves another vector space under this name")
        vectors = pa.ipc.open_stream(pa.py_buffer(reply.content)).read_all()
        return table.append_column("embedding", vectors["embeddings"])

    def _post(self, body: bytes) -> httpx.Response:
        """Return a reply with vectors; wait as long as the gateway asks, but not beyond the deadline."""
        end_s, wait_s = time.monotonic() + DEADLINE_S, 0.5
        while True:
            try:
                reply = self._client.post("/embed", content=body)
            except httpx.TransportError:
                # The gateway restarts, or a connection broke.
                if time.monotonic() + wait_s > end_s:
                    raise
                pause_s = wait_s
            else:
                pause_s = max(float(reply.headers.get("retry-after", 0)), wait_s)
                if reply.status_code not in RETRIED or time.monotonic() + pause_s > end_s:
                    return reply.raise_for_status()
            time.sleep(pause_s)
            wait_s = min(30, 2 * wait_s)


def fingerprint_of(url: str, model: str, key: str) -> str:
    """Return the fingerprint of the model's vectors, which every task compares."""
    body = {"model": model, "input": "fingerprint"}
    reply = httpx.post(
        f"{url}/v1/embeddings", json=body, headers={"authorization": f"Bearer {key}"}, timeout=120
    )
    return reply.raise_for_status().headers["x-embedding-fingerprint"]


def main() -> None:
    """Run on this machine, or on the cluster that RAY_ADDRESS names."""
    parser = argparse.ArgumentParser()
    parser.add_argument("source", help="folder of Parquet files with a column `text`")
    parser.add_argument("target", help="folder to write")
    parser.add_argument("--url", default="http://127.0.0.1:8080")
    parser.add_argument("--model", default="all-minilm-l6-v2")
    parser.add_argument("--callers", type=int, default=2, help="calls at once")
    options = parser.parse_args()
    key = os.environ["KEY"]

    settings = (options.url, options.model, fingerprint_of(options.url, options.model, key), key)
    started_s = time.perf_counter()
    rows = ray.data.read_parquet(options.source).map_batches(
        Embedder,
        fn_constructor_args=settings,
        batch_format="pyarrow",
        batch_size=512,
        compute=ray.data.ActorPoolStrategy(size=options.callers),
        # The work is the gateway's; a caller only waits.
        num_cpus=0.1,
    )
    rows.write_parquet(options.target)
    count = ray.data.read_parquet(options.target).count()
    seconds = time.perf_counter() - started_s
    print(f"{count} rows in {seconds:.1f} s, {count / seconds:.0f} rows/s")


if __name__ == "__main__":
    main()
