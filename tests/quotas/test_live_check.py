"""`gateway check --live` with a real Redis, servers of two models and of another kind, and issuers."""

import json
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from gateway.cli.check import run_check
from gateway.cli.live_checks import memory_problems
from gateway.cli.main import full_parser
from tests.fakes.hooks import RERANKER
from tests.fakes.issuer import FakeIssuer
from tests.fakes.openai import FakeOpenAI
from tests.fakes.tei import FakeTei
from tests.fakes.threaded import serve_in_thread
from tests.quotas.redis_server import RedisServer, free_port

Servers = dict[str, str]


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    """Serve two models of TEI's kind, one of OpenAI's, and an issuer; yield their addresses."""
    issuer, other = FakeIssuer(), FakeTei(model_id="org/other")
    other.space = "other"
    with ExitStack() as stack:
        found = {
            "one": serve_in_thread(FakeTei()),
            "same": serve_in_thread(FakeTei()),
            "other": serve_in_thread(other),
            "openai": serve_in_thread(FakeOpenAI()),
            "reranker": serve_in_thread(FakeTei(model_type=RERANKER)),
            "issuer": serve_in_thread(issuer),
        }
        addresses = {name: stack.enter_context(server) for name, server in found.items()}
        issuer.address = addresses["issuer"]
        yield addresses


def config(
    redis: str, replicas: Sequence[str], more: str = "", issuer: str = "", backend: str = "tei"
) -> str:
    sign_on = (
        f"sign_on: {{acme: {{issuer: '{issuer}', audience: [a], claims: {{tenant: {{claim: team}}}}}}}}\n"
        if issuer
        else ""
    )
    return (
        f"quotas: {{store: '{redis}'}}\n"
        "upstreams:\n"
        "  one:\n"
        f"    backend: {backend}\n"
        f"    replicas: {json.dumps(list(replicas))}\n"
        f"{more}"
        "models: {bge: {upstream: one}}\n"
        "tenants: {acme: {}}\n"
        f"{sign_on}"
    )


def check(folder: Path, text: str, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, Any]:
    path = folder / "router.yaml"
    path.write_text(text)
    options = full_parser().parse_args(["check", "-c", str(path), "--json", *words])
    status = run_check(options, {"HF_HUB_OFFLINE": "1"})
    return status, json.loads(capsys.readouterr().out)


def test_everything_that_is_as_the_file_says_is_fine(
    own_redis: RedisServer, servers: Servers, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own_redis.command("CONFIG", "SET", "maxmemory", "64mb")
    own_redis.command("CONFIG", "SET", "maxmemory-policy", "noeviction")
    text = config(own_redis.url, [servers["one"], servers["same"]], issuer=servers["issuer"])

    assert check(tmp_path, text, capsys, "--live") == (0, check(tmp_path, text, capsys)[1])
    assert ":0\r\n" == own_redis.command("DBSIZE")


def test_every_problem_is_reported_with_its_line(
    own_redis: RedisServer, servers: Servers, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own_redis.command("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    nowhere = f"http://127.0.0.1:{free_port()}"
    text = config(
        own_redis.url,
        [servers["one"], servers["other"], servers["openai"], nowhere],
        "    tokenizer: org/there-is-no-such-tokenizer\n",
        issuer=nowhere,
    )
    status, report = check(tmp_path, text, capsys, "--live")

    assert (1, False) == (status, report["is_usable"])
    found = {(problem["line"], problem["path"], problem["message"]) for problem in report["problems"]}
    expected = [
        (1, "quotas.store", "has maxmemory-policy allkeys-lru"),
        (1, "quotas.store", "has no maxmemory"),
        (3, "upstreams.one", "give different vectors of the reference texts (cosine"),
        (5, "upstreams.one.replicas[2]", "`backend` is tei, and a server of kind openai answers"),
        (5, "upstreams.one.replicas[3]", ""),
        (6, "upstreams.one.tokenizer", "cannot be found"),
        (9, "sign_on.acme.issuer", ""),
    ]
    for line, path, words in expected:
        assert any((line, path) == each[:2] and words in each[2] for each in found), (line, path, found)
    assert len(expected) == len(found)


def test_a_store_that_is_away_or_refuses_writes_is_a_problem(
    own_redis: RedisServer, servers: Servers, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = config(own_redis.url, [servers["one"]])
    own_redis.command("ACL", "SETUSER", "default", "-@write")
    status, report = check(tmp_path, text, capsys, "--live")
    assert (1, ["quotas.store"]) == (status, [problem["path"] for problem in report["problems"]])
    assert "cannot be used for writing" in report["problems"][0]["message"]

    own_redis.kill()
    status, report = check(tmp_path, text, capsys, "--live")
    assert (1, ["quotas.store"]) == (status, [problem["path"] for problem in report["problems"]])
    # Without --live nothing is asked.
    assert 0 == check(tmp_path, text, capsys)[0]


def test_a_server_without_the_named_model_is_a_problem(
    servers: Servers, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = config("memory", [servers["openai"]], "    model: no-such-model\n", backend="openai")
    status, report = check(tmp_path, text, capsys, "--live")
    assert 1 == status
    [problem] = report["problems"]
    assert ("upstreams.one.replicas[0]", 5) == (problem["path"], problem["line"])
    assert "no-such-model" in problem["message"]


def test_a_reranker_among_embedders_is_a_problem(
    servers: Servers, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = config("memory", [servers["one"], servers["reranker"]])
    status, report = check(tmp_path, text, capsys, "--live")
    assert 1 == status
    [problem] = report["problems"]
    assert "upstreams.one.replicas[1]" == problem["path"]
    assert "another kind of model" in problem["message"]
    # Alone it is what its upstream serves.
    assert 0 == check(tmp_path, config("memory", [servers["reranker"]]), capsys, "--live")[0]


def test_a_server_that_does_not_answer_is_given_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        status, report = check(tmp_path, config("memory", [url]), capsys, "--live", "--timeout", "0.3")
    assert 1 == status
    assert [("upstreams.one.replicas[0]", "no answer within 0.3 s")] == [
        (problem["path"], problem["message"]) for problem in report["problems"]
    ]


@pytest.mark.parametrize(
    ("server", "words"),
    [
        ({"maxmemory_policy": "noeviction", "maxmemory": 100, "used_memory": 50}, []),
        ({"maxmemory_policy": "noeviction", "maxmemory": 100, "used_memory": 95}, ["refuses writes"]),
        ({"maxmemory_policy": "volatile-ttl", "maxmemory": 0}, ["volatile-ttl", "no maxmemory"]),
    ],
)
def test_memory_of_a_store(server: dict[str, Any], words: list[str]) -> None:
    found = list(memory_problems(server))
    assert len(words) == len(found)
    assert all(word in message for word, message in zip(words, found, strict=True))
