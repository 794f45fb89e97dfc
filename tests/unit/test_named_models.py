"""`gateway serve MODEL|URL ...`: the configuration of names, and of the servers behind URLs."""

import socket
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

from gateway.cli import named_models
from gateway.cli.main import full_parser
from gateway.cli.named_models import Server, ServerKey, UnusableModel, config_of, probe_server
from gateway.cli.serve import run_serve
from gateway.config.load import load_config
from tests.fakes.infinity import FakeInfinity
from tests.fakes.openai import FakeOpenAI
from tests.fakes.tei import FakeTei
from tests.fakes.threaded import serve_in_thread
from tests.fakes.vllm import FakeVllm

LISTEN = "127.0.0.1:8080"


def loaded(tmp_path: Path, names: Sequence[str], probe: Any = None) -> Any:
    """Return the configuration of some names as the gateway reads it."""
    path = tmp_path / "router.yaml"
    path.write_text(config_of(names, LISTEN, probe))
    return load_config(path, {})


def no_server(url: str) -> Server:
    raise AssertionError(url)


def test_a_hub_id_and_a_folder_are_models_of_the_engine(tmp_path: Path) -> None:
    (tmp_path / "my model").mkdir()
    config = loaded(tmp_path, ["BAAI/bge-m3", str(tmp_path / "my model")], no_server)

    assert ["bge-m3", "my-model"] == list(config.upstreams)
    assert {"torch"} == {upstream.backend for upstream in config.upstreams.values()}
    assert {"BAAI/bge-m3": "bge-m3", "bge-m3": "bge-m3", "my model": "my-model"} == {
        name: model.upstream for name, model in config.models.items()
    }
    assert str(tmp_path / "my model") == config.upstreams["my-model"].model


@pytest.mark.parametrize(
    ("server", "backend"),
    [(FakeTei(), "tei"), (FakeInfinity(), "infinity"), (FakeVllm(), "vllm"), (FakeOpenAI(), "openai")],
)
@pytest.mark.parametrize("suffix", ["", "/", "/v1"])
def test_a_server_is_known_by_its_paths(server: Any, backend: str, suffix: str, tmp_path: Path) -> None:
    with ExitStack() as stack:
        url = stack.enter_context(serve_in_thread(server))
        found = probe_server(url + suffix)
        config = loaded(tmp_path, [url + suffix])

    assert backend == found.backend
    assert config.defaults.embed in config.models
    (upstream,) = config.upstreams.values()
    assert (backend, (url,)) == (upstream.backend, upstream.replicas)
    assert set(found.models) <= set(config.models)
    assert upstream.model in {None, *found.models}


def test_each_model_of_a_server_is_an_upstream(tmp_path: Path) -> None:
    config = loaded(tmp_path, ["http://ollama:11434"], lambda _: Server("openai", ("org/a", "b:latest")))

    assert {"a": "org/a", "b-latest": "b:latest"} == {
        name: upstream.model for name, upstream in config.upstreams.items()
    }
    assert {"org/a", "a", "b:latest"} == set(config.models)


def test_servers_of_one_model_are_replicas_of_one_upstream(tmp_path: Path) -> None:
    urls = ["http://tei-0", "http://tei-1", "http://tei-0/"]
    config = loaded(tmp_path, urls, lambda _: Server("tei", ("BAAI/bge-m3",)))

    assert {"bge-m3": ("http://tei-0", "http://tei-1")} == {
        name: upstream.replicas for name, upstream in config.upstreams.items()
    }
    assert {"BAAI/bge-m3", "bge-m3"} == set(config.models)


@pytest.mark.parametrize("second", ["other/bge", "bge"])
def test_servers_of_models_with_similar_names_are_not_joined(second: str) -> None:
    served = {"http://a": Server("tei", ("org/bge",)), "http://b": Server("tei", (second,))}
    with pytest.raises(UnusableModel, match="two models are called"):
        config_of(list(served), LISTEN, served.__getitem__)


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        (["org/a", "other/a"], "two models are called"),
        (["./nowhere"], "no such folder"),
        (["a/b/c"], "no such folder"),
        (["127.0.0.1:29101"], r"did you mean http://127\.0\.0\.1:29101\?$"),
        (["tei:8080/v1"], r"did you mean http://tei:8080/v1\?$"),
        (["http://127.0.0.1:1"], "http://127.0.0.1:1: nothing listens at its port"),
        (
            ["http://no-such-host.invalid:80"],
            "http://no-such-host.invalid:80: its host name cannot be resolved",
        ),
    ],
)
def test_names_that_cannot_be_served_are_refused(names: list[str], reason: str) -> None:
    with pytest.raises(UnusableModel, match=reason):
        config_of(names, LISTEN)


def test_a_server_of_another_protocol_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        Thread(target=_greet_once, args=(listener,), daemon=True).start()

        with pytest.raises(UnusableModel, match="no HTTP server answers there"):
            probe_server(f"http://127.0.0.1:{listener.getsockname()[1]}")


def _greet_once(listener: socket.socket) -> None:
    connection, _ = listener.accept()
    with connection:
        connection.sendall(b"220 mail.example.org ready\r\n")


HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"


@pytest.mark.parametrize(
    "beginning",
    [b"HTTP/1.1 ", HEAD + b"x-more: ", HEAD + b"content-length: 100000\r\n\r\n"],
    ids=["status", "headers", "body"],
)
def test_a_reply_that_never_ends_is_not_waited_for(beginning: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(named_models, "PROBE_TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        Thread(target=_drip, args=(listener, beginning), daemon=True).start()

        with pytest.raises(UnusableModel, match="no answer within"):
            probe_server(f"http://127.0.0.1:{listener.getsockname()[1]}")


def _drip(listener: socket.socket, beginning: bytes) -> None:
    """Send the beginning of a reply, and then a byte at a time, each before a read would time out."""
    connection, _ = listener.accept()
    with connection, suppress(OSError):
        connection.sendall(beginning)
        while True:
            connection.sendall(b" ")
            Event().wait(0.02)


def test_json_that_is_nested_without_end_is_no_answer() -> None:
    nested = b"[" * 100_000

    async def respond(scope: Any, receive: Any, send: Any) -> None:
        del scope, receive
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": nested})

    with serve_in_thread(respond) as url, pytest.raises(UnusableModel, match="no TEI, vLLM, Infinity"):
        probe_server(url)


@pytest.mark.parametrize(
    ("arguments", "code", "named"),
    [
        (["a/b/c"], 1, "no such folder"),
        (["--port", "9000"], 2, "need MODEL|URL"),
        (["-c", "/nowhere/router.yaml"], 1, "gateway serve BAAI/bge-m3"),
    ],
)
def test_the_command_refuses_with_a_way_out(
    arguments: list[str], code: int, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert code == run_serve(full_parser().parse_args(["serve", *arguments]), {})
    assert named in capsys.readouterr().err


def test_the_command_prints_its_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["serve", "BAAI/bge-m3", "--host", "::1", "--port", "9000", "--print-config"]

    assert 0 == run_serve(full_parser().parse_args(arguments), {})
    printed = capsys.readouterr().out
    assert "listen: '[::1]:9000'" in printed
    assert "model: BAAI/bge-m3" in printed


@pytest.mark.parametrize("name", ["${GATEWAY_API_KEY}", "x${file:/etc/passwd}", "evil\x1b[31m", "a\nb"])
def test_names_that_a_server_must_not_give_are_refused(name: str) -> None:
    with pytest.raises(UnusableModel, match="cannot be used"):
        config_of(["http://one", "http://two"], "127.0.0.1:0", lambda _: Server("openai", ("fine", name)))


KEY = ServerKey("SERVER_KEY", "sk-right")


@pytest.mark.parametrize("server", [FakeTei(), FakeInfinity(), FakeVllm(), FakeOpenAI()])
def test_a_server_that_wants_a_key_is_known_by_it(server: Any) -> None:
    server.api_key = KEY.value
    with serve_in_thread(server) as url:
        with pytest.raises(UnusableModel, match=r"wants a key; .*--upstream-key-env \(401 at /"):
            probe_server(url)
        with pytest.raises(UnusableModel, match=r"refuses the key in SERVER_KEY \(401 at /"):
            probe_server(url, ServerKey("SERVER_KEY", "sk-wrong"))
        assert probe_server(url, KEY).models


def test_the_key_is_not_sent_to_where_a_server_redirects() -> None:
    received: list[dict[bytes, bytes]] = []

    async def receive_all(scope: Any, receive: Any, send: Any) -> None:
        del receive
        received.append(dict(scope["headers"]))
        await send({"type": "http.response.start", "status": 404, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    with serve_in_thread(receive_all) as other:

        async def redirect(scope: Any, receive: Any, send: Any) -> None:
            del receive
            assert (b"authorization", b"Bearer sk-right") in scope["headers"]
            headers = [(b"location", other.encode() + scope["path"].encode())]
            await send({"type": "http.response.start", "status": 307, "headers": headers})
            await send({"type": "http.response.body", "body": b""})

        with serve_in_thread(redirect) as url, pytest.raises(UnusableModel, match="no TEI, vLLM, Infinity"):
            probe_server(url, KEY)

    assert [True] * 5 == [b"authorization" not in headers for headers in received]


@pytest.mark.parametrize(
    ("variable", "value", "reason"),
    [
        ("sk-abc", "", "the name of a variable, and not the key itself"),
        ("ABSENT", None, "the variable ABSENT is not set"),
        ("BROKEN", "two words", "BROKEN is no key"),
    ],
)
def test_variables_without_a_key_are_refused(
    variable: str, value: str | None, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["serve", "http://127.0.0.1:1", "--upstream-key-env", variable]
    environment = {} if value is None else {variable: value}

    assert 1 == run_serve(full_parser().parse_args(words), environment)
    assert reason in capsys.readouterr().err
