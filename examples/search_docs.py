"""Search the standard library's documentation: retrieve by embedding, then rerank.

    make example                                   # against a gateway that `make serve` runs
    python examples/search_docs.py "read a csv"    # your own question

The script needs the packages openai, httpx and numpy. GATEWAY_URL or LISTEN sets the gateway's address, and
GATEWAY_API_KEY the key.
"""

import importlib
import inspect
import os
import sys
from typing import NamedTuple

import httpx
import numpy as np
from openai import OpenAI, OpenAIError

URL = os.environ.get("GATEWAY_URL") or f"http://{os.environ.get('LISTEN', '127.0.0.1:8080')}"
KEY = os.environ.get("GATEWAY_API_KEY", "")
MODEL = "all-minilm-l6-v2"
MODULES = """
    asyncio base64 bisect collections csv datetime difflib functools glob gzip hashlib heapq itertools json
    logging os pathlib random re shutil socket sqlite3 statistics string subprocess tempfile textwrap
    threading time urllib.parse zipfile
""".split()
QUESTIONS = [
    "how to parse JSON",
    "wait for several tasks at once",
    "the most common elements of a list",
    "split a string where a regular expression matches",
    "compress bytes with gzip",
]
CANDIDATES = 20


class Entry(NamedTuple):
    """Documentation of a function: dotted name, summary, and the first 120 words of the text."""

    name: str
    summary: str
    text: str


def documentation() -> list[Entry]:
    """Return the documentation of the modules' public functions."""
    found: dict[str, Entry] = {}
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        for attribute in getattr(module, "__all__", None) or dir(module):
            member = getattr(module, attribute, None)
            text = inspect.getdoc(member) if inspect.isroutine(member) else None
            if text and not attribute.startswith("_"):
                name = f"{module_name}.{attribute}"
                summary = " ".join(text.split("\n\n")[0].split())
                found[name] = Entry(name, f"{name}: {summary}", f"{name}: {' '.join(text.split()[:120])}")
    return list(found.values())


def embed(client: OpenAI, texts: list[str]) -> np.ndarray:
    """Return the texts' vectors: (n, dim) float32, each row of length 1."""
    reply = client.embeddings.create(model=MODEL, input=texts)
    return np.array([item.embedding for item in reply.data], dtype=np.float32)


def rerank(query: str, texts: list[str]) -> list[tuple[int, float]]:
    """Return the texts' indices and scores, best first."""
    reply = httpx.post(
        f"{URL}/rerank",
        json={"query": query, "texts": texts},
        headers={"authorization": f"Bearer {KEY}"},
        timeout=60,
    )
    reply.raise_for_status()
    return [(rank["index"], rank["score"]) for rank in reply.json()]


def main() -> None:
    """Index the functions once, then print the best matches for each question."""
    if not KEY:
        sys.exit("set GATEWAY_API_KEY to the key that the gateway printed")
    client = OpenAI(base_url=f"{URL}/v1", api_key=KEY)
    entries = documentation()
    print(f"indexing {len(entries)} functions …", flush=True)
    summaries = [entry.summary for entry in entries]
    index = np.concatenate([embed(client, summaries[i : i + 256]) for i in range(0, len(entries), 256)])
    for question in sys.argv[1:] or QUESTIONS:
        # Embeddings of the summaries select candidates quickly. The whole texts decide the order.
        similar = index @ embed(client, [question])[0]
        candidates = [entries[i] for i in np.argsort(-similar)[:CANDIDATES]]
        print(f"\n{question}")
        for place, score in rerank(question, [entry.text for entry in candidates])[:3]:
            name, _, text = candidates[place].summary.partition(": ")
            print(f"  {score:.3f}  {name:32} {text[:70]}")


if __name__ == "__main__":
    try:
        main()
    except (OpenAIError, httpx.HTTPError) as error:
        sys.exit(f"the gateway at {URL} did not do its part: {error}")
