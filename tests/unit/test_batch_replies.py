"""`gateway batch` on replies of a server that is not to be trusted."""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway.cli.batch import add_batch_options, run_batch
from tests.fakes.threaded import serve_in_thread

BATCH = "batch_1"
CONTENT = b'{"custom_id": "a"}\n'


class Server:
    """Server of one batch. reply: its state. announces: whether the length of a file is in its head."""

    def __init__(self) -> None:
        self.reply: dict[str, Any] = {
            "id": BATCH,
            "status": "completed",
            "request_counts": {"total": 1, "completed": 1, "failed": 0},
            "output_file_id": "file-1",
        }
        self.announces = True
        self.failed_lines = b""
        self.url = ""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass
        is_file = scope["path"].endswith("/content")
        body = CONTENT if is_file else json.dumps(self.reply).encode()
        if scope["path"] == "/v1/files/file-2/content":
            body = self.failed_lines
        length = [(b"content-length", str(len(body)).encode())] if self.announces else []
        await send({"type": "http.response.start", "status": 200, "headers": length})
        await send({"type": "http.response.body", "body": body})


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    found = Server()
    monkeypatch.chdir(tmp_path)
    with serve_in_thread(found) as found.url:
        yield found


def run(server: Server, action: str, *words: str) -> int:
    parser = argparse.ArgumentParser()
    add_batch_options(parser)
    return run_batch(
        parser.parse_args([action, *words, "--url", server.url]), {"GATEWAY_API_KEY": "some-key"}
    )


def test_lines_that_were_not_run_are_not_called_failed(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    server.reply |= {
        "status": "cancelled",
        "request_counts": {"total": 600, "completed": 116, "failed": 484, "unexecuted": 480},
    }
    assert run(server, "status", BATCH) == 1
    assert "116 of 600 lines completed, 4 failed, 480 not run" in capsys.readouterr().out


def test_the_name_of_the_results_is_that_of_the_command_line(server: Server, tmp_path: Path) -> None:
    assert run(server, "fetch", BATCH) == 0
    assert ["batch_1.jsonl"] == [path.name for path in tmp_path.iterdir()]
    assert (tmp_path / "batch_1.jsonl").read_bytes() == CONTENT


@pytest.mark.parametrize("action", ["fetch", "status", "cancel"])
def test_a_reply_of_another_batch_is_refused(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str], action: str
) -> None:
    (tmp_path / "place").mkdir()
    server.reply["id"] = f"{tmp_path}/place/evil\x1b[31m"
    assert run(server, action, BATCH) == 1
    captured = capsys.readouterr()
    assert "the reply is not of batch_1, but of" in captured.err
    assert "\x1b" not in captured.out + captured.err
    assert ["place"] == [path.name for path in tmp_path.rglob("*")]


@pytest.mark.parametrize("id_", ["/tmp/x", "batch_../x", "batch_", "batch_\x1b[31m", "file-1"])
def test_an_id_that_is_none_is_refused(server: Server, id_: str) -> None:
    with pytest.raises(SystemExit):
        run(server, "fetch", id_)


def test_a_submitted_batch_has_an_id(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in.jsonl").write_text("{}")
    server.reply["id"] = "\x1b]0;evil\x07"
    assert run(server, "submit", "in.jsonl") == 1
    captured = capsys.readouterr()
    assert (captured.out, "\x1b" in captured.err) == ("", False)


def test_words_of_the_server_are_no_commands_for_the_terminal(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    server.reply |= {"status": "x\x1b[31m", "errors": {"data": [{"message": "y\x1b[31m"}]}}
    for action in ("status", "cancel", "fetch"):
        run(server, action, BATCH)
    captured = capsys.readouterr()
    assert "batch_1 is x [31m" in captured.out
    assert "y [31m" in captured.err
    assert "\x1b" not in captured.out + captured.err


def test_impossible_counts_are_refused(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    server.reply["request_counts"]["total"] = 10**400
    assert run(server, "status", BATCH) == 1
    assert "is not a gateway of this release" in capsys.readouterr().err


@pytest.mark.parametrize("announces", [True, False])
def test_a_download_is_bounded(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str], announces: bool
) -> None:
    server.announces = announces
    assert run(server, "fetch", BATCH, "--max-bytes", str(len(CONTENT) - 1)) == 1
    assert f"has more than {len(CONTENT) - 1} bytes" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    assert run(server, "fetch", BATCH, "--max-bytes", str(len(CONTENT))) == 0


def test_a_link_is_neither_followed_nor_replaced(server: Server, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.write_text("precious")
    for name in ("batch_1.jsonl.part", "batch_1.jsonl", "batch_1.errors.jsonl"):
        link = tmp_path / name
        link.symlink_to(mine)
        assert run(server, "fetch", BATCH) == 1
        assert (link.is_symlink(), mine.read_text()) == (True, "precious")
        link.unlink()


def test_a_part_of_another_command_is_left_as_it_is(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    part = tmp_path / "batch_1.jsonl.part"
    part.write_text("half")
    assert run(server, "fetch", BATCH) == 1
    assert "batch_1.jsonl.part exists" in capsys.readouterr().err
    assert part.read_text() == "half"


def test_a_file_is_replaced_only_by_force(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "old.jsonl").write_text("old")
    assert run(server, "fetch", BATCH, "--to", "old.jsonl") == 1
    assert "old.jsonl exists: choose another name, or replace it with --force" in capsys.readouterr().err
    assert (tmp_path / "old.jsonl").read_bytes() == b"old"
    assert run(server, "fetch", BATCH, "--to", "old.jsonl", "--force") == 0
    assert ["old.jsonl"] == [path.name for path in tmp_path.iterdir()]
    assert (tmp_path / "old.jsonl").read_bytes() == CONTENT


def test_results_and_failed_lines_need_a_file_each(server: Server) -> None:
    assert run(server, "fetch", BATCH, "--to", "one.jsonl", "--errors", "one.jsonl") == 1


def test_shows_why_a_batch_waits(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    server.reply |= {"status": "in_progress", "wait_reason": "the limit\x1b[31m is spent"}
    assert run(server, "status", BATCH) == 0
    captured = capsys.readouterr()
    assert captured.err == "it waits: the limit [31m is spent\n"
    assert "batch_1 is in_progress: 1 of 1 lines completed, 0 failed" in captured.out


def test_lists_batches(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    batch = server.reply | {"wait_reason": "its \x1b turn", "model": "bge", "created_at": 0}
    server.reply = {"data": [batch, batch | {"id": "batch_2"}], "has_more": True}
    assert run(server, "list") == 0
    captured = capsys.readouterr()
    assert [line.split()[0] for line in captured.out.splitlines()] == ["batch", "batch_1", "batch_2"]
    assert "bge" in captured.out
    assert "its   turn" in captured.out
    assert "pass a higher --limit" in captured.err


def test_an_interrupt_says_that_the_batch_goes_on(
    server: Server, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    server.reply["status"] = "in_progress"
    monkeypatch.setattr("gateway.cli.batch.time.sleep", interrupt)
    assert run(server, "status", BATCH, "--wait") == 130
    assert capsys.readouterr().err == (
        "batch_1 goes on; follow it with `gateway batch status batch_1 --wait`\n"
    )


def test_names_the_missing_file(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(server, "submit", "none.jsonl") == 1
    assert capsys.readouterr().err == "none.jsonl: No such file or directory\n"


def test_without_an_address_says_how_to_name_one(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    server.url = ""
    assert run(server, "status", BATCH, "-c", "none.yaml") == 1
    assert "there is no none.yaml: pass the URL of the gateway with --url" in capsys.readouterr().err


def failed_line(number: int) -> bytes:
    body = {"error": {"message": f"text {number} is too long\x1b[31m"}}
    return json.dumps({"custom_id": f"row-{number}", "response": {"status_code": 413, "body": body}}).encode()


@pytest.mark.parametrize(("completed", "status"), [(0, 1), (993, 3), (1000, 0)])
def test_lines_that_failed_are_in_the_exit_status_with_their_reasons(
    server: Server, capsys: pytest.CaptureFixture[str], tmp_path: Path, completed: int, status: int
) -> None:
    failed = 1000 - completed
    server.failed_lines = b"".join(failed_line(number) + b"\n" for number in range(failed))
    server.reply["request_counts"] = {"total": 1000, "completed": completed, "failed": failed}
    server.reply["output_file_id"] = "file-1" if completed else None
    server.reply["error_file_id"] = "file-2" if failed else None
    (tmp_path / "in.jsonl").write_text("{}")

    assert run(server, "submit", "in.jsonl", "--wait", "--reasons", "2") == status
    reasons = capsys.readouterr().err.splitlines()
    assert reasons == (
        [f"row-{number}: 413: text {number} is too long [31m" for number in range(2)]
        + ["`gateway batch fetch batch_1` writes all lines that failed"]
        if failed
        else []
    )

    assert run(server, "fetch", BATCH, "--to", "out.jsonl") == status
    fetched = capsys.readouterr()
    written = {path.name for path in tmp_path.iterdir()} - {"in.jsonl"}
    expected = {"out.jsonl": completed, "out.errors.jsonl": failed}
    assert written == {name for name, lines in expected.items() if lines}
    assert set(fetched.out.splitlines()[:-1]) == written
    is_explained = "out.jsonl is not written: no line of the batch was completed" in fetched.err
    assert is_explained == (not completed)


def test_lines_that_were_never_run_have_a_reason(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    error = {"code": "batch_expired", "message": ""}
    server.failed_lines = json.dumps({"custom_id": "a", "error": error}).encode() + b"\n{\n" + failed_line(1)
    server.reply["request_counts"] = {"total": 3, "completed": 0, "failed": 3}
    server.reply |= {"status": "expired", "error_file_id": "file-2"}
    assert run(server, "status", BATCH) == 1
    # The last line is cut, the one before is broken.
    assert capsys.readouterr().err.splitlines()[0] == "a: batch_expired"


def test_scripts_get_one_document(server: Server, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    server.failed_lines = failed_line(7) + b"\n"
    server.reply |= {"request_counts": {"total": 2, "completed": 1, "failed": 1}, "error_file_id": "file-2"}
    (tmp_path / "in.jsonl").write_text("{}")
    expected = {
        "batch": BATCH,
        "failures": [{"custom_id": "row-7", "message": "413: text 7 is too long\x1b[31m"}],
    }

    for words in (("submit", "in.jsonl", "--wait"), ("status", BATCH)):
        assert run(server, *words, "--json") == 3
        found = json.loads(capsys.readouterr().out)
        assert found | {"batch": found["batch"]["id"]} == expected
    assert run(server, "fetch", BATCH, "--json") == 3
    found = json.loads(capsys.readouterr().out)
    assert (found["results"], found["errors"]) == ("batch_1.jsonl", "batch_1.errors.jsonl")
    assert run(server, "cancel", BATCH, "--json") == 0
    assert json.loads(capsys.readouterr().out)["id"] == BATCH
