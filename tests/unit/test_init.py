"""`gateway init`: a commented router.yaml from options or answers, which is never overwritten."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from gateway.cli.init import Ask, editor_line, editor_schema, run_init, run_schema
from gateway.cli.main import full_parser
from gateway.config.load import load_config
from tests.fakes.infinity import FakeInfinity
from tests.fakes.tei import FakeTei
from tests.fakes.threaded import serve_in_thread


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "conf" / "router.yaml"


def run(file: Path, *words: str, ask: Ask | None = None, environment: Mapping[str, str] | None = None) -> int:
    file.parent.mkdir(exist_ok=True)
    options = full_parser().parse_args(["init", *words, "-o", str(file)])
    return run_init(options, environment or {}, ask or refuse_to_answer)


def refuse_to_answer(question: str) -> str:
    raise AssertionError(question)


@pytest.fixture
def at_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)


def answering(answers: Sequence[str], questions: list[str]) -> Ask:
    remaining: Iterator[str] = iter(answers)

    def ask(question: str) -> str:
        questions.append(question)
        try:
            return next(remaining)
        except StopIteration:
            raise EOFError from None

    return ask


def test_options_make_a_file_that_names_its_schema(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with ExitStack() as stack:
        tei, infinity = (
            stack.enter_context(serve_in_thread(server))
            for server in (FakeTei(), FakeInfinity(models=("org/other",)))
        )
        options = ("--listen", "0.0.0.0:9000", "--store", "redis://redis:6379/0")
        assert 0 == run(file, "BAAI/bge-m3", tei, infinity, *options)

    config = load_config(file, {})
    assert ["torch", "tei", "infinity"] == [upstream.backend for upstream in config.upstreams.values()]
    assert ("0.0.0.0:9000", "redis://redis:6379/0") == (config.listen, config.quotas.store)
    assert {"BAAI/bge-m3", "bge-m3"} <= set(config.models)
    assert file.read_text().startswith(editor_line())
    assert editor_schema() == (file.parent / "router.schema.json").read_text()
    assert f"start it: gateway serve -c {file}" in capsys.readouterr().out


def test_file_has_a_comment_above_each_section(file: Path) -> None:
    run(file, "BAAI/bge-m3")
    lines = file.read_text().splitlines()

    for section in ("listen", "quotas", "upstreams", "models", "defaults"):
        (index,) = [index for index, line in enumerate(lines) if line.startswith(f"{section}:")]
        assert lines[index - 1].startswith("# ")
    assert "# tenants:" in lines


@pytest.mark.usefixtures("at_a_terminal")
def test_answers_make_a_file(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    questions: list[str] = []
    with serve_in_thread(FakeTei()) as url:
        answers = ["", "http://127.0.0.1:1", url, "org/other", "", "127.0.0.1:9001", ""]
        assert 0 == run(file, ask=answering(answers, questions))

    config = load_config(file, {})
    assert ["tei", "torch"] == [upstream.backend for upstream in config.upstreams.values()]
    assert ("127.0.0.1:9001", "memory") == (config.listen, config.quotas.store)
    shown = capsys.readouterr()
    assert "http://127.0.0.1:1: nothing listens at its port" in shown.err
    assert ": tei\n" in shown.out
    assert "  model or URL 2: " in questions


@pytest.mark.usefixtures("at_a_terminal")
def test_interrupted_answers_write_nothing(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert 1 == run(file, ask=answering(["org/model", ""], []))

    assert [] == list(file.parent.iterdir())
    assert "nothing was written" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ((), "name a model or a server"),
        (("http://127.0.0.1:1",), "nothing was written: http://127.0.0.1:1: "),
        (("./nowhere",), "no such folder"),
        (("a/b", "--listen", "here"), "line 7: listen: 'here': expected host:port"),
        (("a/b", "--store", "memcached"), "quotas.store: not one of"),
    ],
)
def test_refuses_what_cannot_be_served(
    file: Path, capsys: pytest.CaptureFixture[str], words: Sequence[str], reason: str
) -> None:
    assert 1 == run(file, *words)

    assert reason in capsys.readouterr().err
    assert [] == list(file.parent.iterdir())


def test_overwrites_neither_the_file_nor_another_schema(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file.parent.mkdir()
    (file.parent / "router.schema.json").write_text("mine")
    assert 0 == run(file, "org/model")
    before = file.read_bytes()
    assert 1 == run(file, "org/other")

    assert before == file.read_bytes()
    assert "mine" == (file.parent / "router.schema.json").read_text()
    assert "exists already, and is not overwritten" in capsys.readouterr().err


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_folder_that_cannot_be_written_is_an_error(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.parent.mkdir(mode=0o500)
    assert 1 == run(file, "org/model")

    assert f"{file} cannot be written: Permission denied" in capsys.readouterr().err


def test_folder_that_does_not_exist_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = full_parser().parse_args(["init", "org/model", "-o", str(tmp_path / "no" / "router.yaml")])
    assert 1 == run_init(options, {}, refuse_to_answer)

    assert "router.yaml cannot be written: No such file or directory" in capsys.readouterr().err


def test_schema_is_printed_or_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "router.schema.json"
    for words in ([], ["-o", str(file)], ["-o", str(file)]):
        assert 0 == run_schema(full_parser().parse_args(["schema", *words]), {})
    assert 1 == run_schema(full_parser().parse_args(["schema", "-o", str(tmp_path / "no" / "file")]), {})

    shown = capsys.readouterr()
    assert editor_schema() == shown.out == file.read_text()
    assert "cannot be written: No such file or directory" in shown.err


def test_a_link_in_place_of_the_schema_is_not_followed(file: Path, tmp_path: Path) -> None:
    file.parent.mkdir()
    link = file.with_name("router.schema.json")
    link.symlink_to(tmp_path / "elsewhere")
    assert 0 == run(file, "BAAI/bge-m3")
    assert link.is_symlink()
    assert not (tmp_path / "elsewhere").exists()


def test_the_key_of_a_server_is_a_variable_in_the_file(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = FakeTei()
    server.api_key = "sk-secret"
    with serve_in_thread(server) as url:
        assert 1 == run(file, url)
        assert f"{url}: the server wants a key; " in capsys.readouterr().err
        environment = {"TEI_KEY": "sk-secret"}
        assert 0 == run(file, url, "--upstream-key-env", "TEI_KEY", environment=environment)

    assert "api_key: ${TEI_KEY}" in file.read_text().replace("'", "")
    (upstream,) = load_config(file, environment).upstreams.values()
    assert ("tei", "sk-secret") == (upstream.backend, upstream.api_key)
