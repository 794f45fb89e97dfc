"""Command line of `gateway`: hints at what was meant, and the help."""

import pytest

from gateway.cli import main as command_line


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


def test_every_command_has_a_name_for_hints() -> None:
    (commands,) = (action.choices for action in command_line._parser()._actions if action.dest == "command")
    assert set(commands or ()) == set(command_line.NAMES)
