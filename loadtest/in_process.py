"""Rates of sentence-transformers, called in a process of its own; run by `loadtest.engine`.

It runs in environments that have sentence-transformers and nothing of this project: PyTorch in one, ONNX
Runtime and OpenVINO in another, because optimum needs other versions. It reads
a job in JSON, and prints figures.
"""

import json
import resource
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

CALL_TEXTS, LONE_CALLS = 32, 60


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Return bulk rates in batches of 32 sorted by length, times of a lone input in ms, and peak MB.

    job: checkpoint, backend, dtype, task, texts, query, short, repeats. Also returns the vector of `short`.
    """
    run = _runner(job)
    is_embed = job["task"] == "embed"
    texts = [text if is_embed else (job["query"], text) for text in job["texts"]]
    lone = [job["short"] if is_embed else (job["query"], job["short"])]
    first = run(lone)
    run(texts[:CALL_TEXTS])
    rates, p50_ms, p95_ms = [], [], []
    for _ in range(job["repeats"]):
        rates.append(len(texts) / _seconds(run, texts))
        waits_ms = sorted(_seconds(run, lone) * 1e3 for _ in range(LONE_CALLS))
        p50_ms.append(statistics.median(waits_ms))
        p95_ms.append(waits_ms[int(len(waits_ms) * 0.95)])
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    vector = [float(number) for number in first[0]] if is_embed else []
    return {"rates": rates, "p50_ms": p50_ms, "p95_ms": p95_ms, "peak_mb": peak_mb, "vector": vector}


def _runner(job: dict[str, Any]) -> Callable[[Any], Any]:
    from sentence_transformers import CrossEncoder, SentenceTransformer

    backend = job["backend"]
    options: dict[str, Any] = {"dtype": job["dtype"]} if backend == "torch" else {}
    if backend == "onnx":
        options["provider"] = "CPUExecutionProvider"
    settings = {"device": "cpu", "backend": backend, "model_kwargs": options}
    if job["task"] == "embed":
        encoder = SentenceTransformer(job["checkpoint"], **settings)
        return lambda texts: encoder.encode(texts, batch_size=CALL_TEXTS, show_progress_bar=False)
    cross_encoder = CrossEncoder(job["checkpoint"], **settings)
    return lambda pairs: cross_encoder.predict(pairs, batch_size=CALL_TEXTS, show_progress_bar=False)


def _seconds(run: Callable[[Any], object], inputs: object) -> float:
    started_s = time.perf_counter()
    run(inputs)
    return time.perf_counter() - started_s


if __name__ == "__main__":
    result = measure(json.load(sys.stdin))
    # Libraries print to standard output too: the result is its last line.
    print(f"\n{json.dumps(result)}")
