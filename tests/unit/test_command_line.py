"""Command line of `gateway`: hints at what was meant, and the help."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.cli import main as command_line
from gateway.cli.context import shown
from gateway.config.schema import TenantConfig
from gateway.tenants.file_store import FILE_NAME, FileTenantStore
from gateway.tenants.keyring import key_digest
from tests.actors import TESTER
from tests.unit.test_gateway_address import leaves
from tests.waiting import PATIENCE_S

# Commands whose output is no report for people.
NO_JSON = {
    "serve": "it runs until it is stopped; its log is JSON where there is no terminal",
    "init": "it writes a file, and asks questions",
    "schema": "it prints a document",
    "completion": "it prints a script",
    "import litellm": "it prints a document",
}
NAME = "müller-日本🙂"


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["batc"], "there is no command 'batc'; did you mean `batch`? `gateway --help` lists all"),
        (["sttaus"], "did you mean `status`?"),
        (["xyzzy"], "there is no command 'xyzzy'; `gateway --help` lists all"),
        (["check", "typo.yaml"], "unrecognized arguments: typo.yaml; a configuration is named with -c FILE"),
        (["check", "--typo"], "unrecognized arguments: --typo\n"),
        (["embed", "a.csv", "--to", "b.csv", "--typo", "c.yaml"], "unrecognized arguments: --typo"),
    ],
)
def test_a_wrong_command_line_ends_with_a_hint(
    words: list[str], shown: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["gateway", *words])
    with pytest.raises(SystemExit) as ended:
        command_line.main()
    assert ended.value.code == 2
    assert shown in capsys.readouterr().err


@pytest.mark.parametrize("value", ["nan", "inf", "0", "-1", "soon"])
@pytest.mark.parametrize(
    "words", [["models", "inspect", "m"], ["models", "verify", "m"], ["verify"], ["check", "--live"]]
)
def test_a_timeout_that_is_no_time_is_a_wrong_command_line(
    words: list[str], value: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["gateway", *words, f"--timeout={value}"])
    with pytest.raises(SystemExit) as ended:
        command_line.main()
    assert ended.value.code == 2
    shown = f"argument --timeout: more than 0 and at most 86400 seconds, not {value!r}"
    assert shown in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "unbuffered", "output"),
    [
        ("schema", "", ">/dev/full"),
        ("schema", "1", ">/dev/full"),
        ("check -c $FILE", "", ">/dev/full"),
        ("check --json -c $FILE", "", ">/dev/full"),
        ("models list", "", ">/dev/full"),
        ("--version", "", ">/dev/full"),
        ("--version", "", ">&-"),
        ("schema", "", ">&-"),
    ],
)
def test_an_output_that_cannot_be_written_is_one_line(
    tmp_path: Path, words: str, unbuffered: str, output: str
) -> None:
    file = tmp_path / "router.yaml"
    upstreams = '{one: {backend: tei, replicas: ["http://tei"]}}'
    file.write_text(f"upstreams: {upstreams}\nmodels: {{m: {{upstream: one}}}}\n")
    variables = {"PYTHON": sys.executable, "FILE": str(file), "PYTHONUNBUFFERED": unbuffered}
    ended = subprocess.run(
        ["sh", "-c", f"$PYTHON -m gateway {words} {output}"],
        env=os.environ | variables | {"HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )

    assert 1 == ended.returncode
    assert 1 == ended.stderr.count("\n"), ended.stderr
    assert ("is closed" if output == ">&-" else "No space left on device") in ended.stderr


def test_help_imports_neither_libraries_nor_the_server() -> None:
    script = "import sys, gateway.cli.main as line; line.parser_of().format_help(); print(*sys.modules)"
    modules = set(
        subprocess.check_output([sys.executable, "-c", script], text=True, timeout=PATIENCE_S).split()
    )

    assert not modules & {"msgspec", "numpy", "httpx", "redis", "rich", "gateway.config.schema"}


def gateway(*words: str, encoding: str) -> "subprocess.CompletedProcess[bytes]":
    """Run a command on a terminal of an encoding."""
    environment = os.environ | {"PYTHONIOENCODING": encoding}
    command = [sys.executable, "-m", "gateway", *words]
    return subprocess.run(command, env=environment, capture_output=True, timeout=PATIENCE_S, check=False)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_every_terminal_gets_every_name(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "router.yaml"
    upstreams = '{one: {backend: tei, replicas: ["http://tei"]}}'
    path.write_text(
        f"listen: 127.0.0.1:0\nstate_dir: {tmp_path}\nupstreams: {upstreams}\n"
        "models: {m: {upstream: one}}\n"
    )
    asyncio.run(FileTenantStore(tmp_path / FILE_NAME).put_tenant(NAME, TenantConfig(), by=TESTER))
    table = gateway("tenants", "list", "-c", str(path), encoding=encoding)
    listed = gateway("tenants", "list", "--json", "-c", str(path), encoding=encoding)

    assert (0, 0) == (table.returncode, listed.returncode), table.stderr.decode()
    assert [NAME] == list(json.loads(listed.stdout.decode(encoding)))
    assert ("-" if encoding == "utf-8" else "-\\u65e5\\u672c\\ud83d\\ude42") in table.stdout.decode(encoding)


def test_a_document_is_utf8_on_every_terminal(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    params = {"model": "openai/e5", "api_base": "http://tei"}
    entry = {"model_name": NAME, "litellm_params": params, "model_info": {"mode": "embedding"}}
    path.write_text(yaml.safe_dump({"model_list": [entry]}))
    ended = gateway("import", "litellm", str(path), encoding="ascii")

    assert 0 == ended.returncode, ended.stderr.decode()
    assert [NAME] == list(yaml.safe_load(ended.stdout.decode())["models"])


def test_every_command_that_reports_something_does_it_for_scripts_too() -> None:
    without = {
        name
        for name, parser in leaves(command_line.full_parser())
        if not any("--json" in action.option_strings for action in parser._actions)
    }
    assert set(NO_JSON) == without


def test_changes_and_lists_are_one_document_for_scripts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "router.yaml"
    upstreams = '{one: {backend: tei, replicas: ["http://tei"]}}'
    path.write_text(
        f"listen: 127.0.0.1:0\nstate_dir: {tmp_path}\nupstreams: {upstreams}\n"
        "models: {m: {upstream: one}}\n"
    )

    def run(*words: str, status: int = 0) -> Any:
        monkeypatch.setattr("sys.argv", ["gateway", *words, "-c", str(path), "--json"])
        with pytest.raises(SystemExit) as ended:
            command_line.main()
        assert status == ended.value.code
        return json.loads(capsys.readouterr().out)

    changed = run("tenants", "set", "acme", "--limit", "tokens_per_minute=10")
    assert ("acme", 10) == (changed["tenant"], changed["settings"]["limits"]["tokens_per_minute"])
    assert ["acme"] == list(run("tenants", "list"))

    created = run("keys", "create", "acme", "--id", "one")
    assert ("one", True) == (created["id"], created["is_stored"])
    assert key_digest(created["key"]) == created["digest"]
    rotated = run("keys", "rotate", "one", "--new-id", "two")
    assert ("two", "one") == (rotated["id"], rotated["replaces"]["id"])
    assert {"revoked": "one"} == run("keys", "revoke", "one")
    assert ["two"] == [key["id"] for key in run("keys", "list")]
    assert "digest" in run("keys", "create", "acme", "--yaml")["yaml"]
    assert {"removed": "acme"} == run("tenants", "remove", "acme")

    assert (True, 1) == ((found := run("check"))["is_usable"], found["models"])
    path.write_text("listen: 1\n")
    assert [("listen", 1)] == [
        (problem["path"], problem["line"]) for problem in run("check", status=1)["problems"][:1]
    ]


@pytest.mark.parametrize(
    ("amount", "text"), [(9.12e-06, "0.00000912"), (250.5, "250.5"), (3.0, "3"), (0.0, "0")]
)
def test_amounts_have_no_exponent(amount: float, text: str) -> None:
    assert text == shown(amount)
