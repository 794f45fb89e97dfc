"""The first key: kept in a file, and the same for all gateways of one Redis."""

import logging
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gateway.cli.first_key import FirstKey, first_key, key_sources
from gateway.cli.serve import serve
from gateway.config.load import parse_config
from gateway.tenants.first_key_file import FirstKeyFileError, keep_first_key, read_first_key
from gateway.tenants.keyring import key_digest
from gateway.tenants.store import FIRST_KEY, TENANTS
from tests.processes.conftest import Served, wait_until
from tests.quotas.redis_server import RedisServer
from tests.quotas.test_keys_command import CONFIG, accepted

TENANT = "tenants: {acme: {limits: {requests_per_day: 5}}}\n"


def start(
    folder: Path,
    store: str = "memory",
    environment: dict[str, str] | None = None,
    *,
    more: str = "",
    is_terminal: bool = False,
) -> FirstKey | None:
    """Return the first key of a gateway that starts with this state_dir."""
    text = CONFIG.format(store=store) + f"state_dir: {folder}\n" + more
    config = parse_config(text, {}, Path.cwd())
    return first_key(config, key_sources(config, environment or {}, is_terminal=is_terminal))


def text_in(folder: Path) -> str:
    return (folder / "first-key").read_text().strip()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "state"


def test_key_is_kept_for_the_next_start_and_only_its_owner_can_read_it(folder: Path) -> None:
    first, second = start(folder), start(folder)

    assert first is not None
    assert second is not None
    assert key_digest(text_in(folder)) == first.digest == second.digest
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (folder, folder / "first-key")]
    assert [0o700, 0o600] == modes
    assert ["first-key"] == [path.name for path in folder.iterdir()]


def test_terminal_shows_a_new_key_once_and_a_log_never(tmp_path: Path) -> None:
    new, later = (start(tmp_path / "a", is_terminal=True) for _ in range(2))
    logged = start(tmp_path / "b")

    assert new is not None
    assert later is not None
    assert logged is not None
    assert text_in(tmp_path / "a") == new.shell_word
    assert f"$(cat {tmp_path}/a/first-key)" == later.shell_word
    assert f"$(cat {tmp_path}/b/first-key)" == logged.shell_word
    assert text_in(tmp_path / "b") not in logged.note


@pytest.mark.parametrize("store", ["memory", "redis"])
def test_variable_wins_and_is_not_kept(folder: Path, own_redis: RedisServer, store: str) -> None:
    url = own_redis.url if store == "redis" else store
    start(folder, url)
    kept = text_in(folder)
    key = start(folder, url, {"GATEWAY_API_KEY": "mine"})

    assert key is not None
    assert (key_digest("mine"), "$GATEWAY_API_KEY") == (key.digest, key.shell_word)
    assert kept == text_in(folder)


@pytest.mark.parametrize("store", ["file", "redis"])
def test_start_with_tenants_logs_that_the_variable_is_ignored(
    folder: Path, own_redis: RedisServer, caplog: pytest.LogCaptureFixture, store: str
) -> None:
    caplog.set_level(logging.INFO)
    own_redis.command("HSET", TENANTS, "acme", "{}")
    more = TENANT if store == "file" else ""
    key = start(folder, own_redis.url, {"GATEWAY_API_KEY": "mine"}, more=more)

    place = "router.yaml" if store == "file" else "Redis"
    assert key is None
    assert [f"GATEWAY_API_KEY is ignored: there are tenants in {place}"] == caplog.messages
    assert not folder.exists()


def test_gateways_that_start_at_once_agree(tmp_path: Path, own_redis: RedisServer) -> None:
    for number in range(10):
        folders = [tmp_path / f"{number}-{gateway}" for gateway in range(4)]
        own_redis.command("DEL", FIRST_KEY)
        with ThreadPoolExecutor(4) as pool:
            keys = list(pool.map(lambda folder: start(folder, own_redis.url), folders))
        files = [folder for folder in folders if (folder / "first-key").exists()]

        assert None not in keys
        assert 1 == len({key.digest for key in keys if key})
        [owner] = files
        assert key_digest(text_in(owner)) == keys[0].digest  # type: ignore[union-attr]
        others = [key for key in keys if key and key.shell_word == "$KEY"]
        assert 3 == len(others)
        assert "another gateway keeps in its state_dir" in others[0].note


def test_gateways_that_share_a_folder_agree(folder: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        keys = list(pool.map(lambda _: start(folder), range(8)))

    assert {key_digest(text_in(folder))} == {key.digest for key in keys if key}
    assert ["first-key"] == [path.name for path in folder.iterdir()]


def test_key_survives_the_loss_of_redis_data(folder: Path, own_redis: RedisServer) -> None:
    first = start(folder, own_redis.url)
    own_redis.command("FLUSHALL")
    second = start(folder, own_redis.url)

    assert first is not None
    assert second is not None
    assert first.digest == second.digest
    assert first.digest in own_redis.command("GET", FIRST_KEY)


def test_key_of_another_store_is_kept_but_not_valid(
    tmp_path: Path, own_redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    start(tmp_path / "a", own_redis.url)
    start(tmp_path / "b")
    kept = text_in(tmp_path / "b")
    key = start(tmp_path / "b", own_redis.url)

    assert key is not None
    assert key_digest(text_in(tmp_path / "a")) == key.digest
    assert kept == text_in(tmp_path / "b")
    assert f"remove the key {FIRST_KEY} from Redis" in caplog.text


def test_outage_creates_no_key_but_uses_the_one_that_is_kept(folder: Path, own_redis: RedisServer) -> None:
    start(folder, own_redis.url)
    kept = text_in(folder)
    own_redis.kill()
    again, other = start(folder, own_redis.url), start(folder / "other", own_redis.url)

    assert again is not None
    assert (key_digest(kept), True) == (again.digest, again.waits)
    assert other is not None
    assert ("", f"$(cat {folder}/other/first-key)", True) == (other.digest, other.shell_word, other.waits)
    assert f"to be created in {folder}/other/first-key" == other.note
    assert not (folder / "other").exists()


@pytest.fixture
def not_writable(tmp_path: Path) -> Path:
    """Return a folder that cannot be created, even by root: its parent is a file."""
    (tmp_path / "file").write_text("")
    return tmp_path / "file" / "state"


@pytest.mark.parametrize("is_shared", [False, True], ids=["memory", "redis"])
def test_without_a_folder_a_key_is_created_for_this_start_and_shown(
    not_writable: Path, own_redis: RedisServer, caplog: pytest.LogCaptureFixture, is_shared: bool
) -> None:
    url = own_redis.url if is_shared else "memory"
    first, second = start(not_writable, url), start(not_writable, url)

    assert first is not None
    assert second is not None
    assert first.digest != second.digest
    assert key_digest(first.shell_word) == first.digest
    assert first.shell_word in first.note
    assert "Not a directory" in caplog.text
    assert "set `state_dir`, or set GATEWAY_API_KEY" in caplog.text
    # Nobody would know the key of this start after the next one.
    assert "$-1" in own_redis.command("GET", FIRST_KEY)


@pytest.mark.parametrize("content", [b"", b"\n", b"two words", b"\xff\xfe", b"a\x00b"])
def test_file_without_a_key_is_reported_and_not_replaced(
    folder: Path, caplog: pytest.LogCaptureFixture, content: bytes
) -> None:
    folder.mkdir()
    (folder / "first-key").write_bytes(content)
    key = start(folder)

    assert key is not None
    assert not key.is_kept
    [line] = caplog.messages
    assert f"{folder}/first-key contains no key; remove it, or set GATEWAY_API_KEY" in line
    assert content == (folder / "first-key").read_bytes()


def test_file_that_others_can_read_is_reported(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    start(folder)
    (folder / "first-key").chmod(0o644)
    start(folder)

    assert f"run chmod 600 {folder}/first-key" in caplog.text


def test_the_faster_process_wins(folder: Path) -> None:
    path = folder / "first-key"

    assert "one" == keep_first_key(path, "one")
    assert "one" == keep_first_key(path, "two")
    assert "one" == read_first_key(path)


def test_folder_in_place_of_the_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FirstKeyFileError, match="cannot be read"):
        read_first_key(tmp_path)


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        ({"STATE_DIRECTORY": "{}/a:{}/b", "XDG_STATE_HOME": "{}/c"}, "a/first-key"),
        ({"XDG_STATE_HOME": "{}/c", "HOME": "{}/d"}, "c/embedding-gateway/first-key"),
        ({"HOME": "{}/d"}, "d/.local/state/embedding-gateway/first-key"),
    ],
)
def test_default_folder_is_the_systems(tmp_path: Path, variables: dict[str, str], place: str) -> None:
    environment = {name: value.format(tmp_path, tmp_path) for name, value in variables.items()}
    config = parse_config(CONFIG.format(store="memory"), {}, Path.cwd())
    first_key(config, key_sources(config, environment, is_terminal=False))

    assert (tmp_path / place).exists()


def test_banner_shows_an_absolute_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = parse_config(CONFIG.format(store="memory") + "state_dir: a b\n", {}, Path())
    key = first_key(config, key_sources(config, {}, is_terminal=False))

    assert key is not None
    assert f"$(cat '{tmp_path}/a b/first-key')" == key.shell_word


def test_relative_state_dir_starts_from_the_folder_of_the_file(tmp_path: Path) -> None:
    config = parse_config(CONFIG.format(store="memory") + "state_dir: var\n", {}, tmp_path)

    assert str(tmp_path / "var") == config.state_dir


@pytest.mark.slow
def test_two_gateways_and_a_restart_accept_one_key(tmp_path: Path, own_redis: RedisServer) -> None:
    def served(name: str) -> Served:
        path = tmp_path / name / "router.yaml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(CONFIG.format(store=own_redis.url))
        return Served(path, {"GATEWAY_API_KEY": ""})

    running = [served(name) for name in ("a", "b")]
    try:
        for gateway in running:
            gateway.wait_until_up()
        [file] = list(tmp_path.glob("*/state/*/first-key"))
        key = file.read_text().strip()
        assert [True, True] == [accepted(gateway.url, key) for gateway in running]
        for gateway in running:
            gateway.stop()
        running = [served(name).wait_until_up() for name in ("a", "b")]
        assert [True, True] == [accepted(gateway.url, key) for gateway in running]
        # The worker reads a file key only by its digest.
        assert all(key not in gateway.banner + "".join(gateway.log) for gateway in running)
    finally:
        for gateway in running:
            gateway.stop()


def test_worker_refuses_a_waiting_key_once_tenants_are_found(tmp_path: Path, own_redis: RedisServer) -> None:
    path = tmp_path / "router.yaml"
    path.write_text(CONFIG.format(store=own_redis.url))
    # On the disk, so that no gateway sees it without them.
    own_redis.command("HSET", TENANTS, "acme", "{}")
    own_redis.command("SAVE")
    own_redis.kill()
    gateway = Served(path).wait_until_up()
    try:
        own_redis.restart()
        line = "the first key is ignored: there are tenants in Redis"
        assert wait_until(lambda: any(line in written for written in gateway.log))
    finally:
        gateway.stop()


@pytest.mark.parametrize("end", ["\n", "\r\n", " "])
def test_a_line_end_belongs_to_no_key(tmp_path: Path, end: str) -> None:
    found = start(tmp_path, environment={"GATEWAY_API_KEY": f"mine{end}"})
    assert found is not None
    assert key_digest("mine") == found.digest


def test_a_key_of_several_lines_is_refused_at_the_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # `serve` replaces the handlers of its process, which is that of other tests here.
    monkeypatch.setattr(logging.root, "handlers", [])
    monkeypatch.setattr(logging.root, "level", logging.root.level)
    (tmp_path / "router.yaml").write_text(CONFIG.format(store="memory") + f"state_dir: {tmp_path}\n")
    assert 1 == serve(tmp_path / "router.yaml", {"GATEWAY_API_KEY": "my-secret\r\nx: y"})
    shown = capsys.readouterr().err
    assert "GATEWAY_API_KEY has a line break" in shown
    assert "my-secret" not in shown
