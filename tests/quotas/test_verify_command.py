"""`gateway verify`: vectors of upstreams compared with each other and with stored fingerprints."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway.declared.store import ADDED
from tests.fakes.checkpoint import write_small_files
from tests.fakes.infinity import FakeInfinity
from tests.fakes.tei import FakeTei
from tests.fakes.threaded import serve_in_thread
from tests.fakes.vllm import FakeVllm
from tests.quotas.conftest import Commands, Ended
from tests.quotas.redis_server import RedisServer, free_port

RERANKER = {"model_type": {"reranker": {"id2label": {"0": "L"}, "label2id": {"L": 0}}}}


class Place:
    """A router.yaml with two TEI upstreams, vLLM, Infinity and a reranker. servers: by upstream."""

    def __init__(self, folder: Path, command: Commands, store: str, urls: dict[str, str]) -> None:
        self._file = folder / "router.yaml"
        self._command = command
        upstreams = "\n".join(
            f"  {name}: {{backend: {name.split('_')[0]}, replicas: [{url}]{_more(name, folder)}}}"
            for name, url in urls.items()
        )
        models = "\n".join(f"  {name}: {{upstream: {name}}}" for name in urls)
        self._file.write_text(f"quotas: {{store: {store}}}\nupstreams:\n{upstreams}\nmodels:\n{models}\n")

    def run(self, *words: str) -> Ended:
        """Run `gateway verify …`."""
        return self._command("verify", "-c", str(self._file), *words)

    def report(self, *words: str) -> tuple[object, Any]:
        """Return the exit status and the report."""
        ended = self.run("--json", *words)
        return ended.status, json.loads(ended.out)


def _more(name: str, folder: Path) -> str:
    return f", tokenizer: {write_small_files(folder)}" if name == "infinity" else ""


@pytest.fixture
def servers() -> dict[str, Any]:
    return {
        "tei": FakeTei(),
        "tei_other": FakeTei(),
        "vllm": FakeVllm(),
        "infinity": FakeInfinity(),
        "tei_rerank": FakeTei(**RERANKER),
    }


@pytest.fixture
def urls(servers: dict[str, Any]) -> Iterator[dict[str, str]]:
    with (
        serve_in_thread(servers["tei"]) as a,
        serve_in_thread(servers["tei_other"]) as b,
        serve_in_thread(servers["vllm"]) as c,
        serve_in_thread(servers["infinity"]) as d,
        serve_in_thread(servers["tei_rerank"]) as e,
    ):
        yield dict(zip(servers, (a, b, c, d, e), strict=True))


@pytest.fixture
def alone(tmp_path: Path, command: Commands, urls: dict[str, str]) -> Place:
    """Return a place with quotas in memory."""
    return Place(tmp_path, command, "memory", urls)


@pytest.fixture
def shared(tmp_path: Path, command: Commands, urls: dict[str, str], own_redis: RedisServer) -> Place:
    """Return a place with quotas in Redis."""
    return Place(tmp_path, command, own_redis.url, urls)


def test_compares_all_embedding_upstreams(alone: Place, tmp_path: Path) -> None:
    (tmp_path / "texts").write_text("red\n\ngreen and blue\n")
    status, report = alone.report("--texts", str(tmp_path / "texts"))

    assert (0, True, 8) == (status, report["agrees"], report["texts"])
    assert ["tei", "tei_other", "vllm", "infinity"] == [member["name"] for member in report["members"]]
    assert 6 == len(report["pairs"])
    assert all(pair["cosine"] > 0.999 for pair in report["pairs"])
    assert {8} == {member["dimensions"] for member in report["members"]}
    assert 1 == len({member["fingerprint"] for member in report["members"]})


def test_reports_unexpected_differences_and_fails(alone: Place, servers: dict[str, Any]) -> None:
    servers["tei_other"].space = "other "
    ended = alone.run()

    assert 1 == ended.status
    assert "tei and tei_other differ: " in ended.out
    assert "0.999 needed" in ended.out
    assert 0 == alone.run("tei", "vllm").status


def test_other_models_fail_only_with_a_min_cosine(alone: Place, servers: dict[str, Any]) -> None:
    servers["tei_other"].space = "other "
    servers["tei_other"].info["model_id"] = "another/one"

    assert 0 == alone.run("tei", "tei_other").status
    assert 1 == alone.run("tei", "tei_other", "--min-cosine", "0.9").status


def test_upstreams_behind_one_model_have_to_agree(
    command: Commands, tmp_path: Path, servers: dict[str, Any], urls: dict[str, str]
) -> None:
    """Also if their servers name the model differently, and if one is a canary; a mirror may differ."""
    servers["tei_other"].space = "other "
    servers["tei_other"].info["model_id"] = "another/one"
    upstreams = "".join(
        f"  {name}: {{backend: tei, replicas: [{urls[name]}]}}\n" for name in ("tei", "tei_other")
    )

    def verify(model: str) -> Ended:
        (tmp_path / "group.yaml").write_text(f"upstreams:\n{upstreams}models: {{m: {model}}}\n")
        return command("verify", "-c", str(tmp_path / "group.yaml"))

    for model in (
        "{upstreams: [{name: tei}, {name: tei_other}]}",
        "{upstream: tei, canary: {name: tei_other, share: 0.1}}",
    ):
        ended = verify(model)
        assert 1 == ended.status
        assert "tei and tei_other differ: " in ended.out
        assert "0.999 needed" in ended.out
    assert 0 == verify("{upstream: tei, mirror: {name: tei_other, share: 1}}").status


def test_accept_stores_the_present_fingerprint(shared: Place, servers: dict[str, Any]) -> None:
    assert [None, None] == [member["stored"] for member in shared.report("tei", "vllm")[1]["members"]]
    status, report = shared.report("tei", "--accept")
    assert (0, True) == (status, report["members"][0]["stored"]["fits"])

    servers["tei"].space = "other "
    ended = shared.run("tei")
    assert 1 == ended.status
    assert "does not give the vectors of its stored fingerprint" in ended.out
    assert "--accept" in ended.out
    assert 0 == shared.run("tei", "--accept").status
    assert 0 == shared.run("tei").status


def test_does_not_accept_differing_replicas(
    tmp_path: Path, command: Commands, own_redis: RedisServer, urls: dict[str, str], servers: dict[str, Any]
) -> None:
    place = Place(tmp_path, command, own_redis.url, {"tei": f"{urls['tei']}, {urls['tei_other']}"})
    assert 0 == place.run("tei", "--accept").status
    servers["tei_other"].space = "other "
    ended = place.run("tei", "--accept")

    assert 1 == ended.status
    assert "nothing was changed" in ended.err
    status, report = place.report("tei")
    assert (1, [True, False]) == (status, [member["stored"]["fits"] for member in report["members"]])


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["nobody"], "there is no upstream 'nobody'; there are: tei, "),
        (["--accept"], "list the upstreams"),
        (["tei", "--accept"], "kept in the gateway's memory"),
        (["tei_rerank"], "tei_rerank: it embeds nothing"),
        (["tei", "--texts", "/nowhere/texts"], "cannot be read: No such file"),
        (["tei", "--timeout", "0.000001"], "tei: no answer within 0 s"),
    ],
)
def test_verify_command_reports_failures_in_one_line(alone: Place, words: list[str], expected: str) -> None:
    ended = alone.run(*words)

    assert (1, 1) == (ended.status, ended.err.count("\n"))
    assert expected in ended.err


def test_names_an_unreachable_upstream(tmp_path: Path, command: Commands) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    ended = Place(tmp_path, command, "memory", {"tei": url}).run()

    assert 1 == ended.status
    assert ended.err.startswith("tei: ")


def test_compares_the_others_if_one_upstream_is_down(
    tmp_path: Path, command: Commands, urls: dict[str, str]
) -> None:
    down = {"tei_down": f"http://127.0.0.1:{free_port()}"}
    place = Place(tmp_path, command, "memory", {"tei": urls["tei"], **down, "tei_other": urls["tei_other"]})
    ended = place.run()
    status, report = place.report()

    assert (1, 1) == (ended.status, status)
    assert "least cosine" in ended.out
    assert ended.err.startswith("tei_down: ")
    assert ["tei", "tei_other"] == [member["name"] for member in report["members"]]
    assert ["tei_down"] == [problem.partition(":")[0] for problem in report["unread"]]


def test_accepts_nothing_if_a_replica_cannot_be_read(shared: Place, tmp_path: Path) -> None:
    path = tmp_path / "router.yaml"
    first, _, rest = path.read_text().partition("replicas: [")
    path.write_text(f'{first}replicas: ["http://127.0.0.1:{free_port()}", {rest}')
    ended = shared.run("tei", "--accept")

    assert (1, "") == (ended.status, ended.out)
    assert "no connection" in ended.err
    assert [None] == [member["stored"] for member in shared.report("tei")[1]["members"]]


def test_reports_a_store_outage(tmp_path: Path, command: Commands, urls: dict[str, str]) -> None:
    place = Place(tmp_path, command, f"redis://127.0.0.1:{free_port()}/0", {"tei": urls["tei"]})
    ended = place.run()

    assert 1 == ended.status
    assert "the store of fingerprints is unavailable" in ended.err


def test_rejects_too_many_texts_and_invalid_bounds(alone: Place, tmp_path: Path) -> None:
    (tmp_path / "texts").write_text("x\n" * 10_001)

    assert "at most 10000" in alone.run("--texts", str(tmp_path / "texts")).err
    assert 2 == alone.run("--min-cosine", "2").status


def test_verifies_and_accepts_added_upstreams(
    shared: Place, own_redis: RedisServer, urls: dict[str, str]
) -> None:
    added = {"backend": "tei", "replicas": [urls["tei"]]}
    broken = {**added, "api_key": "${UPSTREAM_NOT_SET}"}
    written = json.dumps({"upstreams": {"added": added, "broken": broken}})
    own_redis.command("HSET", ADDED, "version", "v", "additions", written)
    accepted = shared.run("added", "--accept")
    refused = shared.run("broken")

    assert (0, 1) == (accepted.status, refused.status)
    assert "added" in own_redis.command("HKEYS", "gw:spaces:1")
    assert "UPSTREAM_NOT_SET" in refused.err
