"""Address and key of commands that send requests to a gateway: the same rule for all of them."""

import argparse
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from gateway.cli import main as command_line
from gateway.cli.gateway_client import RequestRefused
from gateway.cli.main import full_parser
from gateway.cli.operator_options import DEFAULT_CONFIG, DEFAULT_URL, FoundGateway, find_gateway
from gateway.tenants.first_key_file import FILE_NAME
from tests.fakes.threaded import serve_in_thread

NAMED, OTHER = "named-key", "key-of-the-variable"
COMMANDS = {
    "status": ["status", "--json"],
    "fleet": ["status", "--fleet", "--json"],
    "drain": ["drain"],
    "replicas": ["replicas", "list"],
    "instances": ["instances", "list"],
    "usage": ["usage"],
    "batch": ["batch", "list"],
    "bench": ["bench", "--model", "m", "--seconds", "1", "--warmup", "0"],
    "embed": ["embed", "rows.jsonl", "--to", "out.jsonl", "--model", "m"],
}


class Recorder:
    """Server that refuses every request. keys: those that it received."""

    def __init__(self) -> None:
        self.keys: list[str] = []
        self.url = ""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass
        headers = dict(scope["headers"])
        self.keys.append(headers.get(b"authorization", b"").decode().removeprefix("Bearer "))
        body = b'{"error": {"message": "refused"}}'
        status = 401 if self.keys[-1] == "ended" else 400
        head = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": head})
        await send({"type": "http.response.body", "body": body})


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("GATEWAY_URL", "GATEWAY_API_KEY", "STATE_DIRECTORY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    return tmp_path


@pytest.fixture
def there() -> Iterator[Recorder]:
    """Serve the gateway of the configuration."""
    found = Recorder()
    with serve_in_thread(found) as found.url:
        yield found


@pytest.fixture
def elsewhere() -> Iterator[Recorder]:
    found = Recorder()
    with serve_in_thread(found) as found.url:
        yield found


def write_config(folder: Path, url: str, more: str = "") -> Path:
    path = folder / "router.yaml"
    path.write_text(
        f"listen: {urlsplit(url).netloc}\nstate_dir: {folder}/own\n{more}"
        "upstreams: {one: {backend: tei, replicas: ['http://127.0.0.1:9']}}\nmodels: {m: {upstream: one}}\n"
    )
    return path


def keep_first_key(folder: Path, key: str) -> None:
    (folder / "own").mkdir()
    path = folder / "own" / FILE_NAME
    path.write_text(f"{key}\n")
    path.chmod(0o600)


def run(monkeypatch: pytest.MonkeyPatch, words: Sequence[str]) -> int:
    monkeypatch.setattr("sys.argv", ["gateway", *words])
    with pytest.raises(SystemExit) as ended:
        command_line.main()
    assert isinstance(ended.value.code, int)
    return ended.value.code


@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS)
def test_every_command_finds_its_gateway_by_one_rule(
    words: list[str], folder: Path, there: Recorder, elsewhere: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_config(folder, there.url)
    keep_first_key(folder, "first")
    (folder / "key").write_text(NAMED)

    assert run(monkeypatch, words) == 1
    assert (set(there.keys), elsewhere.keys) == ({"first"}, [])

    monkeypatch.setenv("GATEWAY_URL", elsewhere.url)
    monkeypatch.setenv("GATEWAY_API_KEY", OTHER)
    there.keys.clear()
    run(monkeypatch, words)
    assert (there.keys, set(elsewhere.keys)) == ([], {OTHER})

    elsewhere.keys.clear()
    run(monkeypatch, [*words, "-c", "router.yaml", "--key-file", "key"])
    assert (set(there.keys), elsewhere.keys) == ({NAMED}, [])

    there.keys.clear()
    run(monkeypatch, [*words, "-c", "router.yaml", "--url", elsewhere.url])
    assert (there.keys, set(elsewhere.keys)) == ([], {OTHER})


def test_commands_that_have_an_address_have_all_options_of_the_rule() -> None:
    checked = set()
    for name, parser in leaves(full_parser()):
        options = {option for action in parser._actions for option in action.option_strings}
        if "--url" in options:
            checked.add(name.split()[0])
            assert {"--key-file", "--ca", "--config"} <= options, name
            assert parser.get_default("config") is DEFAULT_CONFIG, name
    assert {words[0] for words in COMMANDS.values()} == checked


def leaves(parser: argparse.ArgumentParser, name: str = "") -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Yield each command and action that does something."""
    nested = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not nested:
        yield name, parser
    for action in nested:
        for word, found in action.choices.items():
            yield from leaves(found, f"{name} {word}".strip())


def options_of(config: Path = DEFAULT_CONFIG, url: str | None = None) -> argparse.Namespace:
    return argparse.Namespace(config=config, url=url, key_file=None, ca=None)


def test_without_a_file_the_gateway_is_the_one_that_serve_starts(folder: Path) -> None:
    found = find_gateway(options_of(), {}, for_operators=True)
    assert (DEFAULT_URL, None) == (found.url, found.key)
    assert "there is no router.yaml here" in found.hint

    with pytest.raises(RequestRefused, match=r"there is no none\.yaml"):
        find_gateway(options_of(Path("none.yaml")), {"GATEWAY_URL": "http://other"}, for_operators=True)


def test_the_first_key_is_sent_to_the_address_of_the_file_only(folder: Path) -> None:
    path = write_config(folder, "http://127.0.0.1:1")
    keep_first_key(folder, "first")

    assert find_gateway(options_of(), {}, for_operators=True).key == "first"
    assert find_gateway(options_of(), {"GATEWAY_URL": "http://a"}, for_operators=True) == (
        "http://a",
        None,
        0,
        "",
    )
    assert find_gateway(options_of(path, "http://a"), {}, for_operators=True).key is None
    write_config(folder, "http://127.0.0.1:1", "tenants: {acme: {}}\n")
    assert find_gateway(options_of(), {}, for_operators=True).key is None


def test_a_first_key_that_has_ended_is_not_sent_again(there: Recorder) -> None:
    found = FoundGateway(there.url, "ended", is_first=True)
    with closing(found.client(None)) as client:
        for _ in range(2):
            with pytest.raises(RequestRefused, match="returned 400"):
                client.send("GET", "/admin/status")
    assert there.keys == ["ended", "", ""]
