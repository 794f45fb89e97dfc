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

from gateway.cli.bench import add_bench_options, bench, plan_of
from gateway.cli.bench_calls import bodies, made_texts, read_reply, stages_of, target_of
from gateway.cli.bench_figures import CallEnd, Figures, Latencies
from gateway.cli.bench_load import Load, LoadPlan, open_client
from gateway.cli.bench_picture import draw
from tests.fakes.tei import FakeTei
from tests.fakes.threaded import serve_in_thread


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


@pytest.mark.parametrize("url", ["ftp://h", "http://", ""])
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


@pytest.mark.parametrize("load", [{"callers": 3}, {"rate": 80.0}, {"rate": 80.0, "arrivals": "even"}])
async def test_a_load_counts_what_the_server_answers(load: dict[str, Any]) -> None:
    with serve_in_thread(FakeTei()) as url:
        plan = LoadPlan(target_of(f"{url}/embed", None), 0.6, 0.1, 2, 5.0, **load)
        async with open_client(None, None, 5.0) as client:
            calls = bodies(plan.target, None, made_texts(4), 2)
            measured = await Load(client, plan, calls).run()
    figures = measured.figures
    assert figures.good > 5
    assert figures.statuses == {"200": figures.good}
    assert figures.texts == 2 * figures.good
    assert sum(latencies.count for latencies in figures.by_second.values()) == figures.good


async def test_a_load_that_is_stopped_keeps_its_figures() -> None:
    with serve_in_thread(FakeTei()) as url:
        plan = LoadPlan(target_of(f"{url}/embed", None), 60.0, 0.0, 1, 5.0, 2)
        async with open_client(None, None, 5.0) as client:
            load = Load(client, plan, bodies(plan.target, None, made_texts(4), 1))
            running = asyncio.create_task(load.run())
            await asyncio.sleep(0.3)
            load.stop.set()
            measured = await asyncio.wait_for(running, 5)
    assert measured.figures.good > 0
    assert measured.seconds < 5


def test_figures_are_printed_as_json_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "load.svg"
    with serve_in_thread(FakeTei()) as url:
        words = (f"{url}/embed", "--seconds", "0.4", "--warmup", "0", "--json", "--picture", str(picture))
        status = bench(options_of(*words), {})
    summary = json.loads(capsys.readouterr().out)
    assert status == 0
    assert summary["failed"] == 0
    assert summary["calls"] > 0
    assert summary["latency_ms"]["p50"] <= summary["latency_ms"]["p99"] <= summary["latency_ms"]["max"]
    assert ET.parse(picture).getroot().tag.endswith("svg")


def test_errors_are_shown_with_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with serve_in_thread(FakeTei()) as url:
        status = bench(options_of(f"{url}/rerank", "--seconds", "0.2", "--warmup", "0"), {})
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
    ],
)
def test_mistakes_are_told_in_one_line(
    words: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(options_of(*words), {}) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert told in lines[0]


def test_texts_of_a_file_are_sent(tmp_path: Path) -> None:
    file = tmp_path / "texts"
    file.write_text("one\n\n two \n")
    options = options_of("http://h", "--file", str(file))
    assert plan_of(options).callers == 1
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
