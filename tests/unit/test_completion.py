"""`gateway completion`: scripts that complete commands, options, choices and files."""

import subprocess
from pathlib import Path

import pytest

from gateway.cli.completion import SHELLS, run_completion
from gateway.cli.main import full_parser

pytest.importorskip("shtab", reason="it is not installed yet; run make install")

# Completes the words given as arguments, the last of which may be unfinished.
COMPLETE = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=()
_shtab_gateway
printf '%s\\n' "${COMPREPLY[@]}"
"""


def script(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert 0 == run_completion(full_parser().parse_args(["completion", shell]), {})
    return capsys.readouterr().out


@pytest.mark.parametrize("shell", SHELLS)
def test_every_command_is_completed(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = script(shell, capsys)

    assert [] == [
        word for word in ("serve", "init", "keys", "revoke", "tenants", "usage") if word not in text
    ]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["ini"], {"init"}),
        (["keys", ""], {"create", "list", "revoke", "rotate"}),
        (["usage", "--c"], {"--ca", "--config", "--csv"}),
        (["keys", "create", "acme", "--scope", "a"], {"admin", "admin:read"}),
        (["check", "-c", "rou"], {"router.yaml"}),
        (["completion", "z"], {"zsh"}),
    ],
)
def test_bash_completes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], expected: set[str]
) -> None:
    (tmp_path / "gateway.bash").write_text(script("bash", capsys))
    (tmp_path / "router.yaml").write_text("")
    command = ["bash", "-c", COMPLETE, "bash", "gateway.bash", "gateway", *words]
    shown = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=10, check=True)

    assert expected == set(shown.stdout.split())
