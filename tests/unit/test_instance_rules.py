"""Pure parts of instances: logs, templates, the table, the state file, and checks of the configuration."""

from pathlib import Path

import msgspec
import pytest

from gateway.config.load import parse_config
from gateway.config.problems import ConfigError
from gateway.config.schema import UpstreamSettings
from gateway.declared.host import CreateInstance, InstanceRecord, InstanceTable
from gateway.declared.instances import InstanceFile, StateFileError, engine_settings, render, values_of
from gateway.processes.instance import BYTES_MAX, LINE_BYTES_MAX, LINES_MAX, LogLines
from tests.fakes.instances import CONFIG


def test_the_log_keeps_the_last_lines() -> None:
    log = LogLines()
    log.feed(b"".join(b"%d\n" % number for number in range(LINES_MAX + 5)) + b"half")
    kept = log.slice(None, None)
    assert (LINES_MAX, "5", str(LINES_MAX + 4)) == (kept.total_lines, kept.lines[0], kept.lines[-1])
    log.feed(b" a line\r\n\xff\n")
    log.feed(b"end")
    log.finish()
    assert ["half a line", "�", "end"] == log.slice(-3, None).lines


def test_the_log_is_bounded_in_bytes() -> None:
    log = LogLines()
    for _ in range(40):
        log.feed(b"x" * 65536)
    log.feed(b"\nnext\n")
    cut, following = log.slice(None, None).lines
    assert LINE_BYTES_MAX <= len(cut) < LINE_BYTES_MAX + 20
    assert "next" == following
    for _ in range(1000):
        log.add("ü" * LINE_BYTES_MAX)
    assert sum(len(line.encode()) for line in log.slice(None, None).lines) <= BYTES_MAX


@pytest.mark.parametrize(
    ("start", "end", "expected"),
    [
        (None, None, (0, 3)),
        (-2, None, (1, 3)),
        (0, 1, (0, 1)),
        (2, 1, (2, 1)),
        (-9, 9, (0, 3)),
        (5, None, (3, 3)),
    ],
)
def test_slices_report_their_positions(start: int | None, end: int | None, expected: tuple[int, int]) -> None:
    log = LogLines()
    for line in "abc":
        log.add(line)
    part = log.slice(start, end)
    assert (*expected, 3) == (part.start, part.end, part.total_lines)
    assert list("abc")[start:end] == part.lines


def test_a_value_becomes_one_argument() -> None:
    argv = ["serve", "--model={model_id}", "--port", "{port}", "--pooling", "{pooling}", "{extra_args}", "-v"]
    settings = CreateInstance("a", "x; rm -rf $HOME", extra_args=["--flag", "two words"])
    values = values_of(settings, settings.model_id, 8081)

    rendered = render(argv, values, settings.extra_args or ())
    expected = ["serve", "--model=x; rm -rf $HOME", "--port", "8081", "--flag", "two words", "-v"]
    assert expected == rendered
    assert ["--pooling", "cls"] == render(argv, values | {"pooling": "cls"}, ())[4:6]
    assert ["16384", "512"] == render(["{max_batch_tokens}", "{max_concurrent_requests}"], values, ())


def test_braces_in_values_are_text() -> None:
    settings = CreateInstance("a", "{port}")
    assert ["{port}"] == render(["{model_id}"], values_of(settings, "{port}", 1), ())


def test_the_state_file_has_one_owner_and_keeps_the_order(tmp_path: Path) -> None:
    file = InstanceFile(tmp_path / "state")
    assert () == file.open()
    records = tuple(
        InstanceRecord(CreateInstance(name, "m"), "engine", 1.5, started=name != "b") for name in "cab"
    )
    file.write(records)
    with pytest.raises(StateFileError, match="another gateway"):
        InstanceFile(tmp_path / "state").open()
    file.close()
    again = InstanceFile(tmp_path / "state")
    assert records == again.open()
    again.close()
    assert ["instances.json", "instances.lock"] == sorted(
        path.name for path in (tmp_path / "state").iterdir()
    )
    (tmp_path / "state/instances.json").write_text("[{")
    with pytest.raises(StateFileError, match="repair or remove"):
        InstanceFile(tmp_path / "state").open()


def test_an_empty_table_has_no_instances() -> None:
    table = InstanceTable()
    assert (0, None, None) == (len(table), table.by_name("a"), table.by_index(0))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('[serve, "{model_id}"', '["{name}", "{model_id}"', "begins with the program"),
        ('"{port}"', '"8080"', "has no place for {port}"),
        ('"{extra_args}"', '"-x{extra_args}"', "an argument of its own"),
        ('"{prometheus_port}"', '"{shell}"', "{shell} is no placeholder"),
        ("kind: fake", "kind: fakes", "no kind 'fakes'"),
        ("    fake:", "    engine:", "is not `engine`"),
        ("backend: tei\n      argv", "backend: torch\n      argv", "is not one of"),
        ("listen: 127.0.0.1:0", "listen: nowhere", "expected host:port"),
        ("listen: 127.0.0.1:0", "listen: 127.0.0.1:8080", "a port of its own"),
    ],
)
def test_checks_of_the_configuration(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in CONFIG
    with pytest.raises(ConfigError) as raised:
        parse_config(CONFIG.replace(old, new), {}, tmp_path)
    assert message in "; ".join(str(problem) for problem in raised.value.problems)


def test_an_engine_runs_the_model_as_the_upstream_that_it_joins() -> None:
    own = UpstreamSettings(backend="torch", model="org/x", dtype="bfloat16", device="cpu", preload=False)
    wanted = UpstreamSettings(backend="torch", model="org/x", device="cuda:1")
    assert wanted == engine_settings(wanted, None)
    expected = msgspec.structs.replace(own, device="cuda:1", preload=True)
    assert expected == engine_settings(wanted, msgspec.structs.replace(own, replicas=("http+unix://a/b",)))
