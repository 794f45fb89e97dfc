"""Search a folder of pictures by words: one model embeds both, and the closest vectors are the best pictures.

    python examples/search_pictures.py ~/Pictures "a dog on a beach"
    MODEL=siglip python examples/search_pictures.py scans "an invoice"

The gateway needs a model that embeds images (docs/media.md), the script the packages httpx and numpy.
GATEWAY_URL or LISTEN sets the gateway's address, GATEWAY_API_KEY the key, and MODEL the model, else `clip`.
"""

import base64
import mimetypes
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np

URL = os.environ.get("GATEWAY_URL") or f"http://{os.environ.get('LISTEN', '127.0.0.1:8080')}"
KEY = os.environ.get("GATEWAY_API_KEY", "")
MODEL = os.environ.get("MODEL", "clip")
MEDIA_TYPES = {"image/png", "image/jpeg", "image/webp", "image/gif"}
# Base64 makes a picture larger by a third, and the gateway takes 32 MiB in a request unless it is configured.
REQUEST_BYTES = 16 * 1024 * 1024
SHOWN = 5


def pictures_in(folder: Path) -> list[Path]:
    """Return the pictures in a folder and below it, in order of their paths."""
    return sorted(path for path in folder.rglob("*") if mimetypes.guess_type(path)[0] in MEDIA_TYPES)


def batches(paths: Sequence[Path]) -> list[list[Path]]:
    """Return the pictures in groups that fit into one request each."""
    groups: list[list[Path]] = []
    room = 0
    for path in paths:
        size = path.stat().st_size
        if not groups or size > room:
            groups.append([])
            room = REQUEST_BYTES
        groups[-1].append(path)
        room -= size
    return groups


def image(path: Path) -> dict[str, str]:
    """Return a picture as an input."""
    return {"image": base64.b64encode(path.read_bytes()).decode()}


class Refused(Exception):
    """The gateway refused a request."""


def embed(inputs: Sequence[Any]) -> np.ndarray:
    """Return the vectors of texts and pictures: (n, dim) float32, each row of length 1. Raises: Refused."""
    try:
        reply = httpx.post(
            f"{URL}/v1/embeddings",
            json={"model": MODEL, "input": list(inputs), "encoding_format": "base64"},
            headers={"authorization": f"Bearer {KEY}"},
            timeout=300,
        )
    except httpx.TransportError as error:
        sys.exit(f"no gateway at {URL}: {error}")
    if reply.status_code == 400:
        raise Refused(reply.json()["error"]["message"])
    if reply.status_code != 200:
        sys.exit(f"{reply.status_code}: {reply.json()['error']['message']}")
    rows = [np.frombuffer(base64.b64decode(item["embedding"]), "<f4") for item in reply.json()["data"]]
    return np.stack(rows)


def embed_pictures(paths: Sequence[Path]) -> tuple[list[Path], list[np.ndarray]]:
    """Return the pictures that the model read, and their vectors. A refused group is sent one by one."""
    try:
        return list(paths), list(embed([image(path) for path in paths]))
    except Refused as error:
        if len(paths) == 1:
            print(f"left out: {paths[0]}: {error}", file=sys.stderr)
            return [], []
    found = [embed_pictures([path]) for path in paths]
    return [path for read, _ in found for path in read], [row for _, rows in found for row in rows]


def main(arguments: Sequence[str]) -> None:
    """Print the best pictures for some words, best first, with their cosines."""
    if len(arguments) != 2:
        sys.exit('usage: search_pictures.py FOLDER "WORDS"')
    folder, words = Path(arguments[0]), arguments[1]
    paths = pictures_in(folder)
    if not paths:
        sys.exit(f"{folder} has no PNG, JPEG, WebP or GIF")
    if not KEY:
        sys.exit("set GATEWAY_API_KEY to a key of the gateway")
    found = [embed_pictures(group) for group in batches(paths)]
    read, vectors = [path for part, _ in found for path in part], [row for _, rows in found for row in rows]
    if not read:
        sys.exit("the model read none of the pictures")
    scores = np.stack(vectors) @ embed([{"text": words}])[0]
    for place in np.argsort(-scores, kind="stable")[:SHOWN]:
        print(f"{scores[place]:.3f}  {read[place].relative_to(folder)}")


if __name__ == "__main__":
    main(sys.argv[1:])
