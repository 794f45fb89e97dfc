"""`gateway embed` in the test's process, on a server in a thread."""

import argparse
import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gateway.cli.embed import add_embed_options, run_embed
from gateway.cli.embed.options import sources_of
from gateway.cli.embed.plan import Settings
from gateway.client.request import Request
from tests.fakes.embedder import FakeEmbedder
from tests.fakes.tei import vector_of
from tests.fakes.threaded import serve_in_thread


class Outcome:
    """Outcome of a run: exit status, summary, and what it printed on standard error."""

    def __init__(self, status: int, printed: str, errors: str) -> None:
        self.status = status
        self.summary: dict[str, Any] = json.loads(printed) if printed else {}
        self.errors = errors


class Command:
    """The command in a folder of its own, and its server. url: None to let the command find it."""

    def __init__(self, folder: Path, server: FakeEmbedder, url: str | None, capsys: Any) -> None:
        self.folder = folder
        self.server = server
        self.url = url
        self._capsys = capsys

    def run(self, *words: str, key: str = "some-key") -> Outcome:
        """Run the command; words without a slash that name a file are in the folder."""
        parser = argparse.ArgumentParser()
        add_embed_options(parser)
        placed = [str(self.folder / word) if self._is_file(word) else word for word in words]
        address = [] if self.url is None else ["--url", self.url]
        options = parser.parse_args([*placed, *address, "--json"])
        self._capsys.readouterr()
        status = run_embed(options, {"GATEWAY_API_KEY": key})
        captured = self._capsys.readouterr()
        return Outcome(status, captured.out, captured.err.replace(f"{self.folder}/", ""))

    def _is_file(self, word: str) -> bool:
        return word.partition(".")[2][:1].isalpha() and not word.startswith("-") and "/" not in word

    def write(self, name: str, content: str | bytes) -> Path:
        """Write an input; one that ends with .gz is compressed."""
        data = content.encode() if isinstance(content, str) else content
        path = self.folder / name
        path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
        return path

    def write_rows(self, name: str, rows: list[dict[str, Any]]) -> Path:
        """Write JSONL."""
        return self.write(name, "".join(json.dumps(row) + "\n" for row in rows))

    def write_table(self, name: str, columns: Any, **options: Any) -> Path:
        """Write Parquet."""
        path = self.folder / name
        pq.write_table(pa.table(columns), path, **options)
        return path

    def table(self, name: str) -> Any:
        """Read an output as a table."""
        path = self.folder / name
        if name.endswith(".lance"):
            import lance

            return lance.dataset(str(path)).to_table()
        if name.endswith(".arrow"):
            return pa.ipc.open_file(path).read_all()
        return pq.read_table(path)

    def rows(self, name: str) -> list[dict[str, Any]]:
        """Read an output as rows."""
        if ".jsonl" not in name:
            rows: list[dict[str, Any]] = self.table(name).to_pylist()
            return rows
        data = (self.folder / name).read_bytes()
        content = gzip.decompress(data) if name.endswith(".gz") else data
        return [json.loads(line) for line in content.splitlines()]


def settings_of(paths: list[Path], encoding: str | None = None) -> Settings:
    """Return the settings of a run whose texts are in the column `text`."""
    request = Request("", "/v1/embeddings")
    return Settings(sources_of(paths), "text", None, None, "error", request, "embedding", encoding=encoding)


class Relay:
    """Server that passes each call to the one of the test in progress."""

    def __init__(self) -> None:
        self.server = FakeEmbedder()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self.server(scope, receive, send)


@pytest.fixture(scope="session")
def relay() -> Iterator[tuple[Relay, str]]:
    found = Relay()
    with serve_in_thread(found) as url:
        yield found, url


@pytest.fixture
def command(tmp_path: Path, capsys: Any, relay: tuple[Relay, str]) -> Command:
    found, url = relay
    found.server = FakeEmbedder()
    return Command(tmp_path, found.server, url, capsys)


def assert_vectors(rows: list[dict[str, Any]], field: str = "text", tolerance: float = 1e-6) -> None:
    """Check that each row has the vector of its own text, or none if it has no text."""
    for row in rows:
        if row[field]:
            np.testing.assert_allclose(row["embedding"], vector_of(row[field]), atol=tolerance)
        else:
            assert row["embedding"] is None
