"""Runs of `gateway embed` that stop and go on: parts, other settings, another vector space, bad rows."""

import csv
import fcntl
import json
import os
import shutil
from collections.abc import Sequence
from typing import Any

import pytest

from gateway.cli.embed import run as embed_run
from tests.embed.conftest import Command, assert_vectors
from tests.fakes.embedder import Reply, error

ROWS = [{"n": number, "text": f"text number {number}"} for number in range(40)]


def break_at(command: Command, text: str) -> None:
    """Have the server refuse the key once it gets a text, which ends a run."""
    command.server.hook = lambda texts: error(401, "no key") if text in texts else None


def stopped(command: Command, *words: str) -> None:
    """Run until the 20th row, which a part never has."""
    command.write_rows("in.jsonl", ROWS)
    break_at(command, "text number 20")
    arguments = ("--batch-inputs", "4", "--concurrency", "1")
    outcome = command.run("in.jsonl", "--to", "out.jsonl", *arguments, *words)
    assert outcome.status == 1, outcome.errors
    assert "401: no key; set the key in GATEWAY_API_KEY" in outcome.errors
    assert not (command.folder / "out.jsonl").exists()
    command.server.hook = lambda _: None
    command.server.bodies.clear()


def test_a_run_continues_where_it_stopped(command: Command) -> None:
    stopped(command)
    outcome = command.run("in.jsonl", "--to", "out.jsonl", "--batch-inputs", "7")
    assert "continuing after 20 rows" in outcome.errors
    assert [row["text"] for row in ROWS[20:]] == sorted(command.server.texts, key=lambda text: int(text[12:]))
    rows = command.rows("out.jsonl")
    assert ROWS == [{"n": row["n"], "text": row["text"]} for row in rows]
    assert_vectors(rows)
    assert outcome.summary["rows"] == 40
    assert outcome.summary["finished_now"]


def test_a_run_that_stops_behind_a_part_says_how_it_continues(command: Command) -> None:
    command.write_rows("in.jsonl", ROWS)
    spent = (429, {"x-should-retry": "false"}, b'{"error": {"message": "the day is spent"}}')
    command.server.hook = lambda texts: spent if "text number 20" in texts else None
    arguments = ("--batch-inputs", "4", "--concurrency", "1")
    outcome = command.run("in.jsonl", "--to", "out.jsonl", *arguments)
    assert outcome.status == 3
    assert "the day is spent; run the same command again to continue" in outcome.errors


def test_progress_without_a_terminal_is_a_line(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    command.write_rows("in.jsonl", ROWS)
    arguments = ("--batch-inputs", "10", "--concurrency", "1")
    assert "texts/s" not in command.run("in.jsonl", "--to", "quick.jsonl", *arguments).errors
    monkeypatch.setattr(embed_run, "LINE_S", 0.0)
    lines = command.run("in.jsonl", "--to", "slow.jsonl", *arguments).errors.splitlines()
    rows = [line.split()[1] for line in lines if line.endswith(" tokens/s")]
    assert ["10", "20", "30", "40"] == rows
    assert any(line.startswith("100%  40 rows  ") for line in lines)


def test_a_complete_output_is_not_made_again(command: Command) -> None:
    command.write_rows("in.jsonl", ROWS)
    assert command.run("in.jsonl", "--to", "out.parquet").status == 0
    command.server.bodies.clear()
    again = command.run("in.jsonl", "--to", "out.parquet")
    assert (again.status, again.summary["finished_now"], again.summary["rows"]) == (0, False, 40)
    assert not command.server.bodies
    other = command.run("in.jsonl", "--to", "out.parquet", "--dimensions", "4")
    assert (other.status, "--dimensions was None and is 4; --overwrite replaces it" in other.errors) == (
        1,
        True,
    )
    other = command.run("in.jsonl", "--to", "out.parquet", "--dtype", "float16")
    assert (other.status, "--dtype was 'float32' and is 'float16'; --over" in other.errors) == (1, True)
    assert command.run("in.jsonl", "--to", "out.parquet", "--dimensions", "4", "--overwrite").status == 0
    assert {4} == {len(row["embedding"]) for row in command.rows("out.parquet")}


def test_other_files_are_not_replaced(command: Command) -> None:
    command.write_rows("in.jsonl", ROWS)
    command.write("out.jsonl", "precious")
    assert command.run("in.jsonl", "--to", "out.jsonl").status == 1
    assert (command.folder / "out.jsonl").read_text() == "precious"


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--dimensions", "4"), "--dimensions was None and is 4"),
        (("--model", "other"), "--model was 'fake' and is 'other'"),
        (("--input-type", "query"), "--input-type was None and is 'query'"),
        (("--prompt-name", "p"), "--prompt-name was None and is 'p'"),
        (("--truncate", "left"), "--truncate was None and is 'left'"),
        (("--column", "v"), "--column was 'embedding' and is 'v'"),
        (("--id", "n"), "--id-field was None and is 'n'"),
    ],
)
def test_other_settings_do_not_continue_a_run(command: Command, words: Sequence[str], reason: str) -> None:
    stopped(command)
    outcome = command.run("in.jsonl", "--to", "out.jsonl", *words)
    assert outcome.status == 1
    assert "an unfinished run cannot be continued" in outcome.errors
    assert reason in outcome.errors
    assert not command.server.bodies


def test_other_input_does_not_continue_a_run(command: Command) -> None:
    stopped(command)
    path = command.write_rows("in.jsonl", [*ROWS, {"text": "one more"}])
    assert "in.jsonl has changed" in command.run("in.jsonl", "--to", "out.jsonl").errors
    path.rename(command.folder / "b.jsonl")
    assert "the input was in.jsonl" in command.run("b.jsonl", "--to", "out.jsonl").errors
    assert command.run("b.jsonl", "--to", "out.jsonl", "--overwrite").status == 0
    assert 41 == len(command.rows("out.jsonl"))


def test_an_overwriting_run_continues_too(command: Command) -> None:
    command.write_rows("in.jsonl", ROWS)
    assert command.run("in.jsonl", "--to", "out.jsonl").status == 0
    stopped_texts = command.server.texts
    command.server.bodies.clear()
    break_at(command, "text number 20")
    words = ("in.jsonl", "--to", "out.jsonl", "--overwrite", "--batch-inputs", "4", "--concurrency", "1")
    assert command.run(*words).status == 1
    command.server.hook = lambda _: None
    command.server.bodies.clear()
    outcome = command.run(*words)
    assert (outcome.status, outcome.summary["finished_now"]) == (0, True)
    assert len(stopped_texts) == 40
    assert 20 == len(command.server.texts)
    assert_vectors(command.rows("out.jsonl"))


def test_an_input_that_changes_meanwhile_is_noticed(command: Command) -> None:
    path = command.write_rows("in.jsonl", ROWS)

    def grow(_: Sequence[str]) -> None:
        os.utime(path, ns=(1, 1))

    command.server.hook = grow
    outcome = command.run("in.jsonl", "--to", "out.jsonl")
    assert (outcome.status, "has changed while it was read" in outcome.errors) == (1, True)
    assert not (command.folder / "out.jsonl").exists()


def test_another_fingerprint_in_the_middle_stops_the_run(command: Command) -> None:
    command.write_rows("in.jsonl", ROWS)

    def change(texts: Sequence[str]) -> None:
        if "text number 20" in texts:
            command.server.fingerprint = "fedcba9876543210"

    command.server.hook = change
    arguments = ("in.jsonl", "--to", "out.jsonl", "--batch-inputs", "4", "--concurrency", "1")
    for _ in range(2):
        outcome = command.run(*arguments)
        assert outcome.status == 1
        assert "fingerprint fedcba9876543210 instead of 0123456789abcdef" in outcome.errors
        assert not (command.folder / "out.jsonl").exists()
    command.server.hook = lambda _: None
    command.server.fingerprint = "0123456789abcdef"
    assert command.run(*arguments).status == 0
    assert_vectors(command.rows("out.jsonl"))


@pytest.mark.parametrize(
    ("fingerprint", "problem"), [("mixed", "replicas with different"), (None, "none instead")]
)
def test_unknown_spaces_stop_the_run(command: Command, fingerprint: str | None, problem: str) -> None:
    stopped(command)
    command.server.fingerprint = fingerprint
    assert problem in command.run("in.jsonl", "--to", "out.jsonl").errors


def test_vectors_of_another_width_stop_the_run(command: Command) -> None:
    command.server.fingerprint = None
    stopped(command)
    command.server.dimensions = 5
    assert "5 dimensions instead of 8" in command.run("in.jsonl", "--to", "out.jsonl").errors


def test_one_run_at_a_time_writes_an_output(command: Command) -> None:
    command.write_rows("in.jsonl", ROWS)
    folder = command.folder / "out.jsonl.parts"
    folder.mkdir()
    with (folder / "lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        outcome = command.run("in.jsonl", "--to", "out.jsonl")
        assert (folder / "lock").exists()
    assert (outcome.status, "another process writes this output" in outcome.errors) == (1, True)
    assert command.run("in.jsonl", "--to", "out.jsonl").status == 0


def test_a_damaged_part_is_named(command: Command) -> None:
    stopped(command)
    parts = sorted((command.folder / "out.jsonl.parts").glob("part-*"))
    parts[-1].write_bytes(b"nothing")
    outcome = command.run("in.jsonl", "--to", "out.jsonl")
    assert (outcome.status, "delete the folder to start from the beginning" in outcome.errors) == (1, True)


def test_a_damaged_manifest_costs_no_part(command: Command) -> None:
    stopped(command)
    folder = command.folder / "out.jsonl.parts"
    before = sorted(path.name for path in folder.iterdir())
    content = (folder / "manifest.json").read_bytes()
    (folder / "manifest.json").write_bytes(content[:-40])
    outcome = command.run("in.jsonl", "--to", "out.jsonl")
    assert (outcome.status, "manifest.json cannot be read" in outcome.errors) == (1, True)
    assert before == sorted(path.name for path in folder.iterdir())
    (folder / "manifest.json").write_bytes(content)
    assert command.run("in.jsonl", "--to", "out.jsonl").status == 0


def test_an_unfinished_part_does_not_count(command: Command) -> None:
    stopped(command)
    unfinished = command.folder / "out.jsonl.parts" / "part-000777.tmp"
    unfinished.write_bytes(b"half")
    (command.folder / "out.jsonl.parts" / "output.tmp").mkdir()
    assert command.run("in.jsonl", "--to", "out.jsonl").status == 0
    assert 40 == len(command.rows("out.jsonl"))


def test_a_killed_end_is_completed(command: Command) -> None:
    stopped(command)
    folder, kept = command.folder / "out.jsonl.parts", command.folder / "kept"
    shutil.copytree(folder, kept)
    assert command.run("in.jsonl", "--to", "out.jsonl").status == 0
    # As if the process had been killed while it deleted the parts.
    kept.rename(folder)
    outcome = command.run("in.jsonl", "--to", "out.jsonl")
    assert (outcome.status, outcome.summary["finished_now"]) == (0, False)
    assert not folder.exists()


@pytest.mark.parametrize("source", ["in.jsonl", "in.csv", "in.parquet"])
def test_rows_without_text(command: Command, source: str) -> None:
    rows: list[dict[str, Any]] = [{"n": str(n), "text": text} for n, text in enumerate(["a", None, "", "b"])]
    if source == "in.jsonl":
        command.write_rows(source, [*rows, {"n": "4"}])
    elif source == "in.csv":
        command.write(source, 'n,text\n0,a\n1,\n2,""\n\n3,b\n4,\n')
    else:
        command.write_table(source, {"n": list("01234"), "text": ["a", None, "", "b", None]})
    failed = command.run(source, "--to", "out.jsonl")
    place = {"in.jsonl": "in.jsonl:2", "in.csv": "in.csv:3", "in.parquet": "in.parquet row 2"}[source]
    assert (failed.status, f"{place}: `text` has no text; --on-empty skip" in failed.errors) == (1, True)
    skipped = command.run(source, "--to", "out.jsonl", "--on-empty", "skip")
    assert skipped.status == 0, skipped.errors
    assert ["0", "3"] == [row["n"] for row in command.rows("out.jsonl")]
    assert skipped.summary["skipped"] == 3
    for target in ("nulls.jsonl", "nulls.parquet", "nulls.lance", "nulls.arrow"):
        nulls = command.run(source, "--to", target, "--on-empty", "null")
        assert (nulls.status, nulls.summary["empty"]) == (0, 3), nulls.errors
        written = command.rows(target)
        assert list("01234") == [row["n"] for row in written]
        assert [0, 3] == [index for index, row in enumerate(written) if row["embedding"] is not None]


def test_a_file_without_any_text_is_refused(command: Command) -> None:
    command.write_rows("in.jsonl", [{"text": ""}] * 3)
    outcome = command.run("in.jsonl", "--to", "out.jsonl", "--on-empty", "null")
    assert (outcome.status, "no row has a text" in outcome.errors) == (1, True)


BAD_JSON = [
    ('{"text": "x"', "is no JSON object"),
    ('["x"]', "is no JSON object"),
    ("null", "is no JSON object"),
    ('{"text": 5}', "`text` is no text"),
    ('{"text": ["x"]}', "`text` is no text"),
    ('{"text": "\\ud800"}', ""),
    ('{"text": "x", "n": NaN}', "is no JSON object"),
    ("\ufffd".encode("utf-16-le").decode("latin-1"), "is not UTF-8"),
]


@pytest.mark.parametrize(("line", "problem"), BAD_JSON)
def test_bad_lines_are_named(command: Command, line: str, problem: str) -> None:
    lines = ['{"text": "a"}', "", line, '{"text": "b"}']
    command.write("in.jsonl", "\r\n".join(lines).encode("latin-1"))
    failed = command.run("in.jsonl", "--to", "out.jsonl")
    assert failed.status == 1
    assert f"in.jsonl:3: {problem}" in failed.errors
    passed = command.run("in.jsonl", "--to", "out.jsonl", "--on-bad", "skip")
    assert passed.status == 0, passed.errors
    assert ["a", "b"] == [row["text"] for row in command.rows("out.jsonl")]
    assert passed.summary["bad"] == 1
    assert passed.summary["bad_rows"][0].partition(": ")[0].endswith("in.jsonl:3")


def test_bad_records_of_csv_are_named(command: Command) -> None:
    content = (
        b'id,text\r\n1,"a\nb"\r\n2,x,y\r\n3,"un"quoted\r\n4,\xff\r\n,no id\r\n5,"last ""one"""\r\n6,"open'
    )
    command.write("in.csv", content)
    failed = command.run("in.csv", "--to", "out.jsonl", "--id", "id")
    assert "in.csv:4: has 3 values for 2 columns" in failed.errors
    passed = command.run("in.csv", "--to", "out.jsonl", "--on-bad", "skip", "--id", "id")
    assert passed.status == 0, passed.errors
    rows = command.rows("out.jsonl")
    assert [("1", "a\nb"), ("5", 'last "one"')] == [(row["id"], row["text"]) for row in rows]
    found = [problem.rpartition("/")[2] for problem in passed.summary["bad_rows"]]
    assert ["in.csv:4", "in.csv:5", "in.csv:6", "in.csv:7", "in.csv:9"] == [
        p.partition(": ")[0] for p in found
    ]
    assert "is not UTF-8" in found[2]
    assert "has no `id`" in found[3]


def test_rows_that_the_server_refuses_are_found(command: Command) -> None:
    command.write_rows("in.jsonl", [*ROWS[:9], {"text": "a poisoned text"}, *ROWS[9:]])
    command.server.refused_word = "poisoned"
    failed = command.run("in.jsonl", "--to", "out.jsonl")
    assert failed.status == 1
    assert "in.jsonl:10: the server returned 422: a word is refused; --on-bad skip" in failed.errors
    passed = command.run("in.jsonl", "--to", "out.jsonl", "--on-bad", "skip")
    assert (passed.status, passed.summary["bad"]) == (0, 1), passed.errors
    rows = command.rows("out.jsonl")
    assert [row["text"] for row in ROWS] == [row["text"] for row in rows]
    assert_vectors(rows)


def test_a_refused_row_that_the_server_names_is_sent_alone_at_once(command: Command) -> None:
    command.write_rows("in.jsonl", [*ROWS[:9], {"text": "a poisoned text"}, *ROWS[9:20]])

    def refuse(texts: Sequence[str]) -> Reply | None:
        places = [place for place, text in enumerate(texts) if text == "a poisoned text"]
        return error(400, f"input {places[0]}: it is refused") if places else None

    command.server.hook = refuse
    outcome = command.run("in.jsonl", "--to", "out.jsonl", "--on-bad", "skip", "--concurrency", "1")
    assert (outcome.status, outcome.summary["bad"]) == (0, 1), outcome.errors
    assert_vectors(command.rows("out.jsonl"))
    assert [21, 9, 1, 11] == [len(body["input"]) for body in command.server.bodies if "input" in body][-4:]


TOO_SLOW = "the model's deadline of 60 s passed; send fewer inputs"


@pytest.mark.parametrize("place", [0, 9, 24])
def test_rows_that_the_server_never_answers_are_found(command: Command, place: int) -> None:
    rows = [*ROWS[:24], *ROWS[:1]]
    rows[place] = {"text": "a hanging text"}
    command.write_rows("in.jsonl", rows)

    def deadline_passes(texts: Sequence[str]) -> Reply | None:
        return error(504, TOO_SLOW) if "a hanging text" in texts else None

    command.server.hook = deadline_passes
    failed = command.run("in.jsonl", "--to", "out.jsonl", "--concurrency", "1", "--deadline", "60")
    assert failed.status == 1
    assert f"in.jsonl:{place + 1}: the server returned 504: {TOO_SLOW}; --on-bad skip" in failed.errors
    command.server.bodies.clear()
    passed = command.run("in.jsonl", "--to", "out.jsonl", "--on-bad", "skip", "--concurrency", "1")
    assert (passed.status, passed.summary["bad"]) == (0, 1), passed.errors
    kept = command.rows("out.jsonl")
    assert [row["text"] for row in rows if row["text"] != "a hanging text"] == [row["text"] for row in kept]
    assert_vectors(kept)
    sent = [len(body["input"]) for body in command.server.bodies if "a hanging text" in body["input"]]
    assert sent == sorted(sent, reverse=True)
    assert sent[-3:] != [1, 1, 1]
    assert sent[-2:] == [1, 1]


def test_a_busy_server_loses_no_row(command: Command) -> None:
    command.write_rows("in.jsonl", ROWS[:4])
    # Each row is sent alone once, and the first of them three times more, before anything is answered.
    command.server.faults = [error(504, TOO_SLOW)] * 10
    passed = command.run("in.jsonl", "--to", "out.jsonl", "--on-bad", "skip", "--concurrency", "1")
    assert (passed.status, passed.summary["bad"]) == (0, 0), passed.errors
    assert [row["text"] for row in ROWS[:4]] == [row["text"] for row in command.rows("out.jsonl")]


def test_options_that_the_server_refuses_end_the_run_soon(command: Command) -> None:
    command.write_rows("in.jsonl", [{"text": f"{number}"} for number in range(1000)])
    command.server.hook = lambda _: error(400, "no such dimensions")
    outcome = command.run("in.jsonl", "--to", "out.jsonl", "--on-bad", "skip", "--concurrency", "1")
    assert outcome.status == 1
    assert "no such dimensions; the server refuses every row" in outcome.errors
    assert len(command.server.bodies) < 200


def test_truncated_texts_are_counted_and_named(command: Command) -> None:
    command.write_rows("in.jsonl", ROWS)

    def cut(texts: Sequence[str]) -> Reply | None:
        command.server.headers = {"x-truncated-inputs": "0,2-3"} if len(texts) > 3 else {}
        return None

    command.server.hook = cut
    outcome = command.run("in.jsonl", "--to", "out.jsonl", "--batch-inputs", "20", "--concurrency", "1")
    assert outcome.summary["truncated"] == 6
    places = [place.rpartition(":")[2] for place in outcome.summary["truncated_rows"]]
    assert ["1", "3", "4", "21", "23", "24"] == places


def test_positions_in_csv_are_between_records(command: Command) -> None:
    with (command.folder / "in.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text"])
        texts = [f'"{number}"\nsecond, line\r\n{"x" * number}' for number in range(60)]
        writer.writerows([text] for text in texts)
    break_at(command, texts[30])
    arguments = ("in.csv", "--to", "out.jsonl", "--batch-inputs", "5", "--concurrency", "2")
    assert command.run(*arguments).status == 1
    command.server.hook = lambda _: None
    outcome = command.run(*arguments)
    assert "continuing after 30 rows" in outcome.errors
    assert texts == [row["text"] for row in command.rows("out.jsonl")]
    assert_vectors(command.rows("out.jsonl"))


@pytest.mark.parametrize("source", ["in.parquet", "in.jsonl.gz"])
def test_positions_in_other_files(command: Command, source: str) -> None:
    if source == "in.parquet":
        command.write_table(source, {"text": [row["text"] for row in ROWS]}, row_group_size=7)
    else:
        command.write_rows(source, ROWS)
    break_at(command, "text number 20")
    arguments = (source, "--to", "out.jsonl", "--batch-inputs", "3", "--concurrency", "1")
    assert command.run(*arguments).status == 1
    command.server.hook = lambda _: None
    assert "continuing after" in command.run(*arguments).errors
    assert [row["text"] for row in ROWS] == [row["text"] for row in command.rows("out.jsonl")]
    assert_vectors(command.rows("out.jsonl"))


def test_several_files_are_one_output(command: Command) -> None:
    names = [f"{number}.jsonl" for number in range(3)]
    for number, name in enumerate(names):
        command.write_rows(name, ROWS[number * 13 : number * 13 + 13])
    break_at(command, "text number 20")
    assert command.run(*names, "--to", "out.jsonl", "--batch-inputs", "4").status == 1
    command.server.hook = lambda _: None
    assert command.run(*names, "--to", "out.jsonl").status == 0
    assert ROWS[:39] == [{"n": row["n"], "text": row["text"]} for row in command.rows("out.jsonl")]
    command.write("c.csv", "text\na\n")
    assert "different formats" in command.run(names[0], "c.csv", "--to", "x.jsonl").errors
    assert "given twice" in command.run(names[0], names[0], "--to", "x.jsonl").errors


def test_the_summary_of_bad_rows_is_bounded(command: Command) -> None:
    command.write("in.jsonl", json.dumps({"text": "a"}) + "\nbad" * 100)
    outcome = command.run("in.jsonl", "--to", "out.jsonl", "--on-bad", "skip")
    assert (outcome.summary["bad"], len(outcome.summary["bad_rows"])) == (100, 20)
