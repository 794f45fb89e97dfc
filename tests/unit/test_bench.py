"""`gateway bench`: its figures, its calls for each API, loads on a real server, and its picture."""

import argparse
import asyncio
import json
import math
import random
import xml.etree.ElementTree as ET
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.cli.bench import add_bench_options, plan_of, run_bench
from gateway.cli.bench_load import (
    CallEnd,
    Figures,
    Latencies,
    Load,
    LoadPlan,
    Measured,
    bodies,
    made_texts,
    open_client,
    read_reply,
    stages_of,
    target_of,
)
from gateway.cli.bench_picture import draw
from tests.fakes.tei import FakeTei
from tests.fakes.threaded import serve_in_thread
from tests.waiting import PATIENCE_S


def options_of(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_bench_options(parser)
    return parser.parse_args(words)


@given(st.lists(st.floats(2e-5, 60), min_size=1, max_size=300), st.floats(0.01, 1))
def test_quantiles_are_right_within_a_percent(durations: list[float], share: float) -> None:
    latencies = Latencies()
    for seconds in durations:
        latencies.add(seconds)
    exact = sorted(durations)[math.ceil(share * len(durations)) - 1]
    found = latencies.quantile_s(share)
    assert found is not None
    assert found == pytest.approx(exact, rel=0.006)


def test_figures_are_sums_of_good_replies() -> None:
    figures = Figures()
    figures.add(CallEnd("200", 0.1, 2, 9, {"queue": 1.5}), 0)
    figures.add(CallEnd("200", 0.2, 2, 7, {"queue": 0.5}), 1)
    figures.add(CallEnd("503", 0.3, problem="x" * 1000), 1)
    figures.add(CallEnd("503", 0.3, problem="second"), 1)
    assert (figures.good, figures.texts, figures.tokens) == (2, 4, 16)
    assert figures.statuses == {"200": 2, "503": 2}
    assert figures.examples == {"503": "x" * 200}
    assert figures.stage_ms == {"queue": 2.0}
    assert figures.latencies.count == 2


@pytest.mark.parametrize(
    ("url", "api", "expected"),
    [
        ("http://h:1", None, ("http://h:1", "/v1/embeddings", "openai")),
        ("h:1/", None, ("http://h:1", "/v1/embeddings", "openai")),
        ("https://h/v1", None, ("https://h", "/v1/embeddings", "openai")),
        ("http://h:1/models/bge/embed", None, ("http://h:1", "/models/bge/embed", "tei")),
        ("http://h:1/v2/rerank", None, ("http://h:1", "/v2/rerank", "cohere-rerank")),
        ("http://h:1/rerank", None, ("http://h:1", "/rerank", "tei-rerank")),
        ("http://h:1/rerank", "cohere-rerank", ("http://h:1", "/rerank", "cohere-rerank")),
        ("http://me:secret@h:1", "tei", ("http://h:1", "/embed", "tei")),
    ],
)
def test_the_path_decides_the_api(url: str, api: Any, expected: tuple[str, str, str]) -> None:
    target = target_of(url, api)
    assert (target.base, target.path, target.api) == expected


@pytest.mark.parametrize("url", ["ftp://h", "http://", "", "http://h:abc", "http://h:99999", "http://[::1"])
def test_other_addresses_are_refused(url: str) -> None:
    with pytest.raises(ValueError, match="is not an address"):
        target_of(url, None)


def test_bodies_go_through_all_texts() -> None:
    texts = ["a", "b", "c"]
    calls = bodies(target_of("http://h", None), "m", texts, 2)
    first, second = (json.loads(next(calls)) for _ in range(2))
    assert first == {"model": "m", "input": ["a", "b"], "encoding_format": "base64"}
    assert second["input"] == ["c", "a"]
    ranked = json.loads(next(bodies(target_of("http://h/rerank", None), None, texts, 2)))
    assert (ranked["query"], ranked["texts"]) == ("a", ["a", "b"])


def test_made_texts_have_the_words_that_were_asked_for() -> None:
    counts = [len(text.split()) for text in made_texts(40)]
    assert abs(sum(counts) / len(counts) - 40) < 1
    assert min(counts) >= 20
    assert max(counts) <= 60


def test_replies_without_a_result_for_each_text_are_problems() -> None:
    good = msgspec.json.encode({"data": [{}, {}], "usage": {"total_tokens": 5}})
    assert read_reply("openai", good, 2) == (5, "")
    assert read_reply("openai", good, 3) == (5, "2 results for 3 texts")
    assert read_reply("tei", b"[[1.0]]", 1) == (0, "")
    assert "not a reply" in read_reply("cohere-rerank", b"<html>", 1)[1]


def test_stages_are_read_from_server_timing() -> None:
    header = 'queue;dur=1.5, upstream;desc="x";dur=3, broken;dur=x, bare'
    assert stages_of(header) == {"queue": 1.5, "upstream": 3.0}


async def stopped_after(good: int, load: Load) -> Measured:
    """Stop a load once so many calls were answered: how many that are in a second depends on the machine."""
    running = asyncio.create_task(load.run())
    async with asyncio.timeout(PATIENCE_S):
        while load._figures.good < good:  # noqa: ASYNC110 - the figures have no event
            await asyncio.sleep(0.01)
    load.stop.set()
    return await running


@pytest.mark.parametrize("load", [{"callers": 3}, {"rate": 80.0}, {"rate": 80.0, "arrivals": "even"}])
async def test_a_load_counts_what_the_server_answers(load: dict[str, Any]) -> None:
    with serve_in_thread(FakeTei()) as url:
        plan = LoadPlan(target_of(f"{url}/embed", None), PATIENCE_S, 0.1, 2, PATIENCE_S, **load)
        async with open_client(None, None, PATIENCE_S) as client:
            measured = await stopped_after(6, Load(client, plan, bodies(plan.target, None, made_texts(4), 2)))
    figures = measured.figures
    assert figures.good > 5
    assert figures.statuses == {"200": figures.good}
    assert figures.texts == 2 * figures.good
    assert sum(latencies.count for latencies in figures.by_second.values()) == figures.good


async def test_a_load_that_is_stopped_keeps_its_figures() -> None:
    with serve_in_thread(FakeTei()) as url:
        plan = LoadPlan(target_of(f"{url}/embed", None), 10 * PATIENCE_S, 0.0, 1, PATIENCE_S, 2)
        async with open_client(None, None, PATIENCE_S) as client:
            load = Load(client, plan, bodies(plan.target, None, made_texts(4), 1))
            measured = await stopped_after(1, load)
    assert measured.figures.good > 0
    assert measured.seconds < plan.seconds


def test_figures_are_printed_as_json_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "load.svg"
    with serve_in_thread(FakeTei()) as url:
        words = (f"{url}/embed", "--rate", "50", "--seconds", "0.4", "--warmup", "0", "--json")
        words += ("--picture", str(picture))
        status = run_bench(options_of(*words), {})
    summary = json.loads(capsys.readouterr().out)
    assert status == 0
    assert summary["failed"] == 0
    assert summary["calls"] > 0
    assert summary["latency_ms"]["p50"] <= summary["latency_ms"]["p99"] <= summary["latency_ms"]["max"]
    assert ET.parse(picture).getroot().tag.endswith("svg")


def test_errors_are_shown_with_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with serve_in_thread(FakeTei()) as url:
        status = run_bench(options_of(f"{url}/rerank", "--seconds", "0.2", "--warmup", "0"), {})
    shown = capsys.readouterr()
    assert status == 1
    assert "replies 4" in shown.out
    assert "not a re-ranker" in shown.err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("http://h", "--rate", "5", "--callers", "2"), "exclude each other"),
        (("http://h", "--seconds", "0"), "--seconds: more than 0"),
        (("http://h", "--callers", "5000"), "--callers: more than 0 and at most 1024"),
        (("ftp://h",), "is not an address"),
        (("http://h", "--file", "/nowhere/texts"), "cannot be read"),
        (("http://127.0.0.1:1",), "http://127.0.0.1:1: "),
        (("http://h", "--file", "/dev/null"), "has no texts"),
    ],
)
def test_mistakes_are_told_in_one_line(
    words: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_bench(options_of(*words), {}) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert told in lines[0]


@pytest.mark.parametrize("key", ["sk-\nx", "ключ", "two words", "sk-\x1b"])
def test_keys_that_no_header_holds_are_refused_without_showing_them(
    key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_bench(options_of("http://h"), {"GATEWAY_API_KEY": key}) == 1
    shown = capsys.readouterr().err
    assert "GATEWAY_API_KEY is no key" in shown
    assert key not in shown


class OddServer:
    """Server whose reply to calls is fixed."""

    def __init__(self, status: int, content: bytes, headers: list[tuple[bytes, bytes]] | None = None) -> None:
        self.reply = {"type": "http.response.start", "status": status, "headers": headers or []}
        self.content = content
        self.models = b'{"data": [{"id": "m"}]}'

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass
        is_list = scope["path"] == "/v1/models"
        await send({**self.reply, "status": 200, "headers": []} if is_list else self.reply)
        await send({"type": "http.response.body", "body": self.models if is_list else self.content})


def run_on(server: OddServer, *words: str) -> int:
    with serve_in_thread(server) as url:
        # Calls at their own times count even if they end after the period, however slow the machine is.
        return run_bench(options_of(url, "--rate", "50", "--seconds", "0.2", "--warmup", "0", *words), {})


GOOD = b'{"data": [{}], "usage": null}'


@pytest.mark.parametrize(
    ("status", "content", "shown"),
    [
        (302, b"", "302: an empty body"),
        (500, b"", "500: an empty body"),
        (500, b"\x1b]0;title\x07bad", "500:  ]0;title bad"),
        (200, b'{"data": ' + b"[" * 50_000, "200: not a reply of this API"),
        (200, b"\xff", "200: not a reply of this API"),
    ],
)
def test_no_odd_reply_counts_as_good(
    status: int, content: bytes, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_on(OddServer(status, content)) == 1
    captured = capsys.readouterr()
    assert shown in captured.err
    assert "\x1b" not in captured.out + captured.err


@pytest.mark.parametrize("usage", [b"null", b"5", b"[]", b'{"total_tokens": 1.5}', b'{"total_tokens": -1}'])
def test_a_usage_without_tokens_is_none(usage: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_on(OddServer(200, b'{"data": [{}], "usage": ' + usage + b"}"), "--json") == 0
    assert json.loads(capsys.readouterr().out)["tokens_per_s"] is None


def test_stages_of_a_server_are_bounded(capsys: pytest.CaptureFixture[str]) -> None:
    header = ",".join(f"stage{number};dur=1" for number in range(500)) + ", a;dur=nan"
    assert run_on(OddServer(200, GOOD, [(b"server-timing", header.encode())]), "--json") == 0
    assert len(json.loads(capsys.readouterr().out)["stages_ms"]) == 32
    figures = Figures()
    for number in range(100):
        figures.add(CallEnd("200", 0.1, stages={f"stage{number}": 1.0}), 0)
    assert len(figures.stage_ms) == 32


def test_a_reply_without_end_is_cut(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("gateway.cli.bench_load.REPLY_BYTES_MAX", 1000)
    assert run_on(OddServer(200, b" " * 5000)) == 1
    assert "more than 1000 bytes" in capsys.readouterr().err


def test_a_list_of_models_that_cannot_be_read_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    server = OddServer(200, GOOD)
    for content in (b"[]", b"\xff", b'{"data": ' + b"[" * 50_000, b'{"data": []}'):
        server.models = content
        assert run_on(server) == 1
        assert "lists no model; name one with --model" in capsys.readouterr().err


def test_a_picture_that_cannot_be_written_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_on(OddServer(200, GOOD), "--picture", "/nowhere/load.svg") == 1
    assert "/nowhere/load.svg: No such file" in capsys.readouterr().err


def test_texts_of_a_file_are_sent(tmp_path: Path) -> None:
    file = tmp_path / "texts"
    file.write_text("one\n\n two \n")
    options = options_of("http://h", "--file", str(file))
    assert plan_of(options, "http://h").callers == 1
    calls = bodies(target_of("http://h", None), "m", ["one", "two"], 1)
    assert [json.loads(next(calls))["input"] for _ in range(3)] == [["one"], ["two"], ["one"]]


def test_the_picture_rises_with_the_percentile() -> None:
    figures, chance = Figures(), random.Random(3)
    for number in range(5000):
        figures.add(CallEnd("200", chance.lognormvariate(-4, 0.5)), number // 1000)
    root = ET.fromstring(draw(figures, "a <load> & more"))
    lines = [
        [tuple(map(float, point.split(","))) for point in line.attrib["points"].split()]
        for line in root.iter("{http://www.w3.org/2000/svg}polyline")
    ]
    assert [len(line) for line in lines[:2]] == [5, 5]
    assert all(left[0] < right[0] and left[1] >= right[1] for left, right in pairwise(lines[2]))
