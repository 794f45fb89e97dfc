"""`gateway embed` on many rows: speed and memory, a loop with the OpenAI SDK, and kills until it is complete.

    .venv/bin/python -m loadtest.embed_files --rows 200000 --kill-after 4      # three minutes

One gateway on core 0 in front of the stub, on core 1. Every row of an output is compared with the input, and
its vector with its text.
"""

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow.parquet as pq
from openai import OpenAI

from loadtest import corpora, servers
from loadtest.processes import process_group
from loadtest.servers import KEY, ROOT
from loadtest.stub_protocol import mark_of

DIMENSIONS = 256
# Texts of a call of the SDK, and the share of the rows that it embeds.
SDK_CALLS = {1: 0.01, 256: 0.1, 1024: 0.1}


def write_rows(path: Path, count: int) -> None:
    """Write JSONL with texts of mixed lengths, and with what is easily changed on the way."""
    texts = corpora.texts("mixed", 5)
    with path.open("w", encoding="utf-8") as file:
        for number, text in enumerate(islice(texts, count)):
            row = {"id": number, "text": f'{number} "{text}"\n\u65e5\u672c', "meta": {"tags": [number % 7]}}
            file.write(json.dumps(row, ensure_ascii=bool(number % 2)) + "\n")


def check(source: Path, output: Path) -> None:
    """Check that an output has each row once, in order, with its own vector. Raises: RuntimeError."""
    with source.open(encoding="utf-8") as file, pq.ParquetFile(output) as written:
        for batch in written.iter_batches(columns=["id", "text", "embedding"]):
            vectors = batch.column("embedding").flatten().to_numpy().reshape(len(batch), -1)
            rows = [json.loads(line) for line in islice(file, len(batch))]
            if [(row["id"], row["text"]) for row in rows] != list(
                zip(batch.column("id").to_pylist(), batch.column("text").to_pylist(), strict=True)
            ):
                raise RuntimeError("the rows differ from those of the input")
            marks = np.array([mark_of(row["text"]) for row in rows], np.float32)
            if not np.array_equal(vectors[:, :3], marks):
                raise RuntimeError("a row has the vector of another text")
        if file.readline():
            raise RuntimeError("rows are missing")


class Command:
    """The command on one gateway."""

    def __init__(self, folder: Path, port: int) -> None:
        self._folder = folder
        self._url = f"http://127.0.0.1:{port}"

    def start(self, source: Path, output: str) -> "subprocess.Popen[str]":
        """Start a run."""
        words = [
            sys.executable,
            "-m",
            "gateway",
            "embed",
            str(source),
            "--to",
            output,
            "--url",
            self._url,
            "--json",
        ]
        environment = {**os.environ, "GATEWAY_API_KEY": KEY, "PYTHONPATH": str(ROOT)}
        return subprocess.Popen(
            words,
            cwd=self._folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, source: Path, output: str) -> dict[str, Any]:
        """Run to the end; return the summary, with the seconds of the whole command. Raises: RuntimeError."""
        started_s = time.perf_counter()
        printed, errors = (process := self.start(source, output)).communicate(timeout=3600)
        if process.returncode:
            raise RuntimeError(errors)
        summary: dict[str, Any] = msgspec.json.decode(printed)
        return summary | {"wall_s": time.perf_counter() - started_s}

    def run_killed(self, source: Path, output: str, after_s: float) -> int:
        """Run and kill, at random moments, until a run reaches its end; return the number of kills."""
        chance, kills = random.Random(1), 0  # noqa: S311 - moments of kills
        while True:
            process = self.start(source, output)
            try:
                _, errors = process.communicate(timeout=chance.uniform(0.5, 1.5) * after_s)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
                kills += 1
                continue
            if process.returncode:
                raise RuntimeError(errors)
            return kills


def sdk_rates(source: Path, port: int, rows: int) -> Iterator[tuple[int, float]]:
    """Yield the rows per second of a plain loop, for each size of its calls."""
    client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=KEY)
    for size, share in SDK_CALLS.items():
        with source.open(encoding="utf-8") as file:
            read = [json.loads(line) for line in islice(file, int(rows * share))]
        started_s = time.perf_counter()
        with source.with_name("sdk.jsonl").open("w", encoding="utf-8") as file:
            for start in range(0, len(read), size):
                part = read[start : start + size]
                reply = client.embeddings.create(model="stub", input=[row["text"] for row in part])
                for row, item in zip(part, reply.data, strict=True):
                    file.write(json.dumps({**row, "embedding": item.embedding}) + "\n")
        yield size, len(read) / (time.perf_counter() - started_s)


def main() -> None:
    """Print the figures of one run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--kill-after", type=float, default=4.0, metavar="S", help="on average")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, process_group() as processes:
        folder = Path(name)
        stub = servers.start_stub(
            folder, "--dimensions", str(DIMENSIONS), "--items", "256", "--permits", "99999"
        )
        processes.append(stub.process)
        gateway = servers.start_gateway(
            folder,
            "logs: {access: false}\n"
            f"upstreams: {{stub: {{backend: tei, replicas: ['http://127.0.0.1:{stub.target.port}']}}}}\n"
            f"models: {{stub: {{upstream: stub}}}}\ntenants: {{main: {servers.tenant(KEY)}}}\n",
        )
        processes.append(gateway.process)
        command, source = Command(folder, gateway.target.port), folder / "rows.jsonl"
        for rows in (options.rows // 8, options.rows):
            write_rows(source, rows)
            for output in (f"{rows}.parquet", f"{rows}.out.jsonl"):
                summary = command.run(source, output)
                # The largest of all runs so far: a larger input has to stay near it.
                peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024
                print(
                    f"{output}: {source.stat().st_size >> 20} MiB, {summary['texts_per_s']:,.0f} texts/s, "
                    f"{rows / summary['wall_s']:,.0f} with start and end, peak {peak} MiB"
                )
        check(source, folder / f"{options.rows}.parquet")
        for size, rate in sdk_rates(source, gateway.target.port, options.rows):
            print(f"loop with the OpenAI SDK, {size} texts a call: {rate:,.0f} rows/s")
        kills = command.run_killed(source, "killed.parquet", options.kill_after)
        check(source, folder / "killed.parquet")
        print(f"killed {kills} times: {options.rows:,} rows once and in order, each with its own vector")


if __name__ == "__main__":
    main()
