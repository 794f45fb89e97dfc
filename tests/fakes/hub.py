"""Fake Hub: the API and files of repositories, each with one commit, over HTTP; and made caches of it."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from huggingface_hub import constants

from tests.fakes.threaded import serve_in_thread

Files = Mapping[str, bytes]


class FakeHub:
    """ASGI app that serves repositories. `downloads` holds the paths of the files that were sent."""

    def __init__(self, repositories: Mapping[str, Files]) -> None:
        self.repositories = repositories
        self.downloads: list[str] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer one request."""
        del receive
        status, headers, body = self._answer(unquote(scope["path"]), scope["method"])
        sent = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": status, "headers": sent})
        await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})

    def _answer(self, path: str, method: str) -> tuple[int, dict[str, str], bytes]:
        for name, files in self.repositories.items():
            if path.startswith(f"/api/models/{name}"):
                return _json(self._info(name, path.removeprefix(f"/api/models/{name}")))
            prefix = f"/{name}/resolve/"
            if path.startswith(prefix):
                _, _, file = path.removeprefix(prefix).partition("/")
                if file in files:
                    return self._file(name, file, method)
        return 404, {"x-error-code": "EntryNotFound", "content-length": "0"}, b""

    def _info(self, name: str, rest: str) -> Any:
        files = self.repositories[name]
        if rest.startswith("/tree/"):
            return [
                {"type": "file", "path": path, "size": len(content), "oid": digest_of(content)}
                for path, content in files.items()
            ]
        siblings = [{"rfilename": path, "size": len(content)} for path, content in files.items()]
        return {"id": name, "modelId": name, "sha": commit_of(name), "siblings": siblings}

    def _file(self, name: str, file: str, method: str) -> tuple[int, dict[str, str], bytes]:
        content = self.repositories[name][file]
        if method == "GET":
            self.downloads.append(f"{name}/{file}")
        headers = {
            "x-repo-commit": commit_of(name),
            "etag": f'"{digest_of(content)}"',
            "content-length": str(len(content)),
        }
        return 200, headers, content


@contextmanager
def serving_hub(repositories: Mapping[str, Files], monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """Serve repositories at the address that the Hub's client uses."""
    fake = FakeHub(dict(repositories))
    with serve_in_thread(fake) as url:
        template = url + "/{repo_id}/resolve/{revision}/{filename}"
        use_hub(monkeypatch, ENDPOINT=url, HUGGINGFACE_CO_URL_TEMPLATE=template)
        yield fake


def use_hub(monkeypatch: pytest.MonkeyPatch, **settings: str | bool) -> None:
    """Change settings that the Hub's client reads from the environment when it is imported."""
    for name, value in settings.items():
        monkeypatch.setattr(constants, name, value)


def commit_of(name: str) -> str:
    """Return the commit of a repository."""
    return hashlib.sha1(name.encode(), usedforsecurity=False).hexdigest()


def digest_of(content: bytes) -> str:
    """Return the identity of a file's content, as git computes it."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def write_cache(cache: Path, name: str, files: Files) -> Path:
    """Write a repository into a cache as the Hub's client does; return the folder of its snapshot."""
    repository = cache / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / commit_of(name)
    for path, content in files.items():
        blob = repository / "blobs" / digest_of(content)
        blob.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(content)
        (snapshot / path).parent.mkdir(parents=True, exist_ok=True)
        (snapshot / path).symlink_to(blob)
    (repository / "refs").mkdir(exist_ok=True)
    (repository / "refs" / "main").write_text(commit_of(name))
    return snapshot


def _json(value: Any) -> tuple[int, dict[str, str], bytes]:
    body = json.dumps(value).encode()
    return 200, {"content-type": "application/json", "content-length": str(len(body))}, body
