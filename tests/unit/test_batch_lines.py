"""Validation of inputs: a broken file has a clear error, with its line; a valid one is planned in chunks."""

import json
import random
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.batches.lines import LineChecker, LineRules, split_chunk
from gateway.batches.records import LineProblem, Plan

RULES = LineRules("/v1/embeddings", lines_max=1000, line_bytes=2000, chunk_lines=7, chunk_bytes=900)


def check_model(model: str | None) -> LineProblem | None:
    if model == "bge":
        return None
    return LineProblem("model_not_found", f"there is no model {model!r}")


def request(number: int, **fields: object) -> bytes:
    line = {
        "custom_id": f"id-{number}",
        "method": "POST",
        "url": "/v1/embeddings",
        "body": {"model": "bge", "input": f"text {number}"},
    }
    return json.dumps(line | fields).encode()


def plan_of(content: bytes, block: int = 64, rules: LineRules = RULES) -> Plan:
    checker = LineChecker(rules, check_model)
    for start in range(0, len(content), block):
        checker.feed(content[start : start + block])
    return checker.finish(1.0)


BLANK = st.lists(st.sampled_from([b"", b" ", b"\t \r", b" " * 400]), max_size=5)
SIZES = st.lists(st.integers(0, 300), max_size=60)


@given(
    st.one_of(
        st.lists(st.tuples(BLANK, st.integers(0, 300)), max_size=40),
        SIZES.map(lambda sizes: [([], size) for size in sizes]),
    ),
    BLANK,
    st.integers(1, 5000),
    st.sampled_from([b"\n", b"\r\n"]),
    st.booleans(),
)
def test_chunks_cover_every_request_once_and_in_order_without_blank_lines(
    parts: list[tuple[list[bytes], int]], last: list[bytes], block: int, newline: bytes, ends: bool
) -> None:
    lines: list[bytes] = []
    for number, (blanks, size) in enumerate(parts):
        lines += [*blanks, request(number, body={"model": "bge", "input": "x" * size})]
    content = newline.join([*lines, *last]) + newline * ends

    plan = plan_of(content, block)

    if not parts:
        assert [problem.code for problem in plan.problems] == ["empty_file"]
        return
    assert (plan.problems, plan.total) == ((), len(parts))
    found = []
    for chunk in plan.chunks:
        assert (chunk.first, chunk.lines <= RULES.chunk_lines) == (len(found), True)
        assert chunk.lines == 1 or chunk.length <= RULES.chunk_bytes
        own = split_chunk(content[chunk.offset : chunk.offset + chunk.length])
        assert chunk.lines == len(own)
        found += own
    assert [line.custom_id for line in found] == [f"id-{n}" for n in range(len(parts))]


def test_lines_are_named_as_in_the_file_with_blank_lines() -> None:
    lines = [b"", request(0), b" ", b"", b"hello", request(0), b"", request(5, method="GET")]

    assert [(problem.line, problem.code) for problem in plan_of(b"\n".join(lines)).problems] == [
        (5, "invalid_json_line"),
        (6, "duplicate_custom_id"),
        (8, "invalid_method"),
    ]


def test_a_full_file_may_end_with_blank_lines_but_not_with_as_many_again() -> None:
    rules = msgspec.structs.replace(RULES, lines_max=20)
    content = b"\n".join([request(number) for number in range(20)])

    assert () == plan_of(content + b"\n" * 20, rules=rules).problems
    problems = plan_of(content + b"\n" * 3000, rules=rules).problems
    assert ["too_many_lines"] == [problem.code for problem in problems]


BROKEN: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "cut": (lambda line: line[: len(line) // 2], "invalid_json_line"),
    "text": (lambda _: b"hello", "invalid_json_line"),
    "latin-1": (lambda line: line.replace(b"text", "t\xe9xt".encode("latin-1")), "invalid_json_line"),
    "two objects": (lambda line: line + line, "invalid_json_line"),
    "comma": (lambda line: line + b",", "invalid_json_line"),
    "nested": (lambda _: b'{"x": ' + b"[" * 990, "invalid_json_line"),
    "nested and closed": (
        lambda _: request(0, custom_id="n", x=json.loads("[" * 100 + "]" * 100)),
        "invalid_json_line",
    ),
    "number": (lambda _: b"17", "invalid_request"),
    "no id": (lambda line: line.replace(b'"custom_id"', b'"id"'), "invalid_request"),
    "id a number": (lambda _: request(0, custom_id=17), "invalid_request"),
    "empty id": (lambda _: request(0, custom_id=""), "invalid_custom_id"),
    "long id": (lambda _: request(0, custom_id="x" * 513), "invalid_custom_id"),
    "repeated id": (lambda _: request(0), "duplicate_custom_id"),
    "GET": (lambda line: line.replace(b"POST", b"GET"), "invalid_method"),
    "other url": (
        lambda line: line.replace(b"/v1/embeddings", b"/v1/chat/completions"),
        "mismatched_endpoint",
    ),
    "no body": (lambda line: line.replace(b'"body"', b'"boby"'), "invalid_request"),
    "body a list": (lambda _: request(0, custom_id="b", body=[1]), "invalid_request"),
    "body a text": (lambda _: request(0, custom_id="b", body="text"), "invalid_request"),
    "other model": (lambda line: line.replace(b"bge", b"ada"), "model_not_found"),
    "model a number": (lambda line: line.replace(b'"bge"', b"17"), "invalid_request"),
    "long": (lambda _: request(0, custom_id="l", body={"input": "x" * 3000}), "line_too_long"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_line_is_named_with_its_number(kind: str) -> None:
    damage, code = BROKEN[kind]
    for seed in range(50):
        dice = random.Random(seed)
        lines = [request(number) for number in range(dice.randrange(2, 80))]
        # The first line stays whole: a repeated id is that of an earlier line.
        broken = dice.randrange(1, len(lines))
        lines[broken] = damage(lines[broken])

        plan = plan_of(b"\n".join(lines) + b"\n", dice.randrange(1, 3000))

        found = [(problem.code, problem.line) for problem in plan.problems]
        assert found == [(code, broken + 1)], seed
        assert plan.problems[0].message
        assert plan.chunks == ()


def test_problems_are_in_the_order_of_the_lines() -> None:
    lines = [request(0), request(0), b"hello", request(3), request(3, method="GET")]
    plan = plan_of(b"\n".join(lines), 1000)

    assert [(problem.line, problem.code) for problem in plan.problems] == [
        (2, "duplicate_custom_id"),
        (3, "invalid_json_line"),
        (5, "invalid_method"),
        (5, "duplicate_custom_id"),
    ]


FOREIGN = {
    "gzip": b"\x1f\x8b\x08\x00" + b"\x00" * 50,
    "zip": b"PK\x03\x04" + b"\x00" * 50,
    "zstd": b"\x28\xb5\x2f\xfd" + b"\x00" * 50,
    "bzip2": b"BZh9" + b"\x00" * 50,
    "byte order mark": b"\xef\xbb\xbf" + request(0),
    "UTF-16": "\ufeff".encode("utf-16-le") + request(0).decode().encode("utf-16-le"),
    "Parquet": b"PAR1" + b"\x00" * 50,
    "JSON array": b"[" + request(0) + b"]",
}


@pytest.mark.parametrize("block", [1, 3, 1000])
@pytest.mark.parametrize("kind", FOREIGN)
def test_a_file_of_another_format_is_named(kind: str, block: int) -> None:
    plan = plan_of(FOREIGN[kind], block)

    assert [(problem.code, problem.line) for problem in plan.problems] == [("invalid_file", 1)]
    assert kind in plan.problems[0].message


def test_too_many_lines_are_refused_without_reading_on() -> None:
    rules = LineRules("/v1/embeddings", lines_max=3, line_bytes=2000)
    checker = LineChecker(rules, check_model)
    checker.feed(b"\n".join(map(request, range(6))) + b"\n")

    assert checker.is_hopeless
    assert [problem.code for problem in checker.finish(1.0).problems] == ["too_many_lines"]


def test_a_line_without_end_takes_no_memory() -> None:
    checker = LineChecker(RULES, check_model)
    checker.feed(request(0) + b"\n")
    for _ in range(1000):
        checker.feed(b"x" * 4096)
        assert len(checker._rest) <= 4096
    checker.feed(b"\n" + request(1))

    assert [(problem.code, problem.line) for problem in checker.finish(1.0).problems] == [
        ("line_too_long", 2)
    ]


def test_each_of_many_problems_has_its_line() -> None:
    lines = [request(number) if number % 2 else b"{" for number in range(40)]

    plan = plan_of(b"\n".join(lines))

    assert [problem.line for problem in plan.problems] == list(range(1, 41, 2))


def test_brackets_in_texts_and_next_to_each_other_are_no_nesting() -> None:
    body = {
        "model": "bge",
        "input": ["[" * 300, '\\"[{' * 300],
        "x": [[]] * 50,
        "y": json.loads("[" * 97 + "]" * 97),
    }
    rules = msgspec.structs.replace(RULES, line_bytes=5000)

    assert plan_of(request(0, body=body), rules=rules).problems == ()


def test_a_line_that_cannot_be_read_does_not_end_its_chunk() -> None:
    deep = (
        request(1, body={"model": "bge", "input": "x"})[:-2] + b', "x": ' + b"[" * 2000 + b"]" * 2000 + b"}}"
    )
    lines = split_chunk(b"\n".join([request(0), deep, b"no JSON", request(3)]))

    assert [(line.custom_id, not line.body) for line in lines] == [
        ("id-0", False),
        ("id-1", True),
        ("", True),
        ("id-3", False),
    ]
