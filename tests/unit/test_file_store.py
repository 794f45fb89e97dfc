"""Keys and tenants in a file: what is kept, changes by several workers, and files that cannot be used."""

import asyncio
import stat
from pathlib import Path

import msgspec
import pytest

from gateway.batches.sqlite_store import SqliteJobStore
from gateway.cli.first_key import KeySources, first_key
from gateway.config.load import parse_config
from gateway.config.schema import TenantConfig
from gateway.config.state_folder import JOBS_FILE, folder_warning, make_private, make_private_folder
from gateway.declared.checkpoints import Records
from gateway.declared.host import CheckpointRecord
from gateway.declared.instances import InstanceFile
from gateway.store.errors import StoreUnavailable
from gateway.tenants.file_store import FILE_NAME, FileTenantStore
from gateway.tenants.first_key_file import keep_first_key
from gateway.tenants.follower import KeyFollower
from gateway.tenants.keyring import FirstKey, Keyring, StoredKey, key_digest
from tests.actors import TESTER

CONFIG = 'upstreams: {one: {backend: tei, replicas: ["http://tei"]}}\nmodels: {bge: {upstream: one}}\n'


def key(id_: str, tenant: str = "acme") -> StoredKey:
    return StoredKey(id_, key_digest(f"sk-{id_}"), tenant)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / FILE_NAME


async def test_keys_and_tenants_outlive_the_process(path: Path) -> None:
    store = FileTenantStore(path)
    assert (await store.look()).version == b""
    assert not await store.has_tenants()
    assert await store.put_tenant("acme", TenantConfig(limits={"tokens_per_day": 5}), by=TESTER)
    assert not await store.put_tenant("other", TenantConfig(), by=TESTER)
    created = await store.create_key(key("laptop"), by=TESTER)
    assert (created.is_created, created.has_tenant) == (True, True)
    assert not (await store.create_key(key("laptop", "other"), by=TESTER)).is_created

    again = FileTenantStore(path)
    assert await again.keys() == [key("laptop")]
    assert (await again.tenants())["acme"].limits == {"tokens_per_day": 5}
    assert await again.names() == {"acme", "other"}
    mode, content = await asyncio.to_thread(lambda: (path.stat().st_mode, path.read_bytes()))
    assert stat.S_IMODE(mode) == 0o600
    assert b"sk-laptop" not in content


async def test_an_earlier_release_reads_a_file_in_which_no_tenant_uses_what_it_lacks(path: Path) -> None:
    class EarlierTenant(msgspec.Struct, forbid_unknown_fields=True):
        limits: dict[str, int] = {}
        weight: int = 1

    class EarlierContent(msgspec.Struct):
        keys: dict[str, dict[str, object]] = {}
        tenants: dict[str, EarlierTenant] = {}

    store = FileTenantStore(path)
    await store.put_tenant("acme", TenantConfig(limits={"tokens_per_day": 5}), by=TESTER)
    await store.put_tenant("later", TenantConfig(join=False), by=TESTER)
    await store.remove_tenant("later", by=TESTER)
    await store.create_key(key("laptop"), by=TESTER)

    earlier = msgspec.json.decode(await asyncio.to_thread(path.read_bytes), type=EarlierContent)
    assert earlier.tenants == {"acme": EarlierTenant(limits={"tokens_per_day": 5})}
    assert list(earlier.keys) == ["laptop"]


async def test_files_are_private_in_a_folder_that_is_not(path: Path) -> None:
    folder = path.parent
    folder.mkdir(mode=0o755)
    folder.chmod(0o755)
    for name in ("tenants.lock", "instances.lock", ".registry.lock", "batches.sqlite"):
        # As an earlier release has left them.
        (folder / name).touch()
        (folder / name).chmod(0o644)
    await FileTenantStore(path).put_tenant("acme", TenantConfig(), by=TESTER)
    instances = InstanceFile(folder)
    instances.open()
    instances.write(())
    instances.close()
    Records(folder).write("a/b", CheckpointRecord("downloaded"))
    with Records(folder).working_on("a/b"), Records(folder).dividing_space():
        pass
    jobs = SqliteJobStore(folder / JOBS_FILE)
    await jobs.active()
    keep_first_key(folder / "first-key", "key")
    modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()}
    await jobs.aclose()

    assert {"tenants.lock", "batches.sqlite-wal", "batches.sqlite-shm", ".registry-a--b.lock"} <= modes.keys()
    assert {0o600} == set(modes.values()), modes
    warning = folder_warning(folder)
    assert warning is not None
    assert f"chmod 700 {folder}" in warning
    folder.chmod(0o700)
    assert folder_warning(folder) is None


async def test_a_removed_tenant_takes_its_keys_along(path: Path) -> None:
    store = FileTenantStore(path)
    await store.put_tenant("acme", TenantConfig(), by=TESTER)
    for id_ in ("one", "two"):
        await store.create_key(key(id_), by=TESTER)
    assert await store.revoke("one", by=TESTER)
    assert not await store.revoke("one", by=TESTER)
    assert await store.remove_tenant("acme", by=TESTER)
    assert not await store.remove_tenant("acme", by=TESTER)
    assert await store.keys() == []


def test_the_first_key_lives_until_there_is_a_key_for_operators(path: Path) -> None:
    config = parse_config(CONFIG, {}, path.parent)
    sources = KeySources("sk-first", None, is_terminal=False, tenants_file=path)
    store = FileTenantStore(path)
    asyncio.run(store.put_tenant("acme", TenantConfig(), by=TESTER))
    asyncio.run(store.create_key(key("laptop"), by=TESTER))
    kept = first_key(config, sources)
    assert kept is not None
    assert kept.digest == key_digest("sk-first")
    asyncio.run(store.create_key(msgspec.structs.replace(key("ops"), scopes=("embed", "admin")), by=TESTER))
    assert first_key(config, sources) is None


def test_a_file_that_cannot_be_read_lets_no_first_key_in(path: Path) -> None:
    path.parent.mkdir()
    path.write_text("{")
    sources = KeySources("sk-first", None, is_terminal=False, tenants_file=path)
    assert first_key(parse_config(CONFIG, {}, path.parent), sources) is None


def test_stored_tenants_end_the_first_key_only_where_gateways_share_them() -> None:
    for outlives in (False, True):
        first = FirstKey(key_digest("sk-first"), outlives_tenants=outlives)
        keyring = Keyring({}, first, has_store=True)
        keyring.replace_stored([], {"acme": TenantConfig()})
        assert keyring.first_key_is_ending is not outlives
        assert keyring.identify("sk-first").key_id == "first"


async def test_changes_at_the_same_time_are_all_kept(path: Path) -> None:
    stores = [FileTenantStore(path) for _ in range(4)]
    await asyncio.gather(
        *(stores[number % 4].create_key(key(str(number)), by=TESTER) for number in range(40))
    )
    assert len(await stores[0].keys()) == 40


async def test_another_worker_follows_a_change(path: Path) -> None:
    writer, keyring = FileTenantStore(path), Keyring({}, None, has_store=True)
    follower = KeyFollower(keyring, FileTenantStore(path), 60.0, lambda: None)
    running = asyncio.create_task(follower.run())
    await follower.refresh()
    await writer.put_tenant("acme", TenantConfig(), by=TESTER)
    await writer.create_key(key("laptop"), by=TESTER)
    await follower.refresh()
    assert keyring.identify("sk-laptop").key_id == "laptop"
    await writer.revoke("laptop", by=TESTER)
    await follower.refresh()
    assert not keyring.knows(key_digest("sk-laptop"))
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_another_worker_notices_a_tenant_that_is_removed_and_there_again(path: Path) -> None:
    writer, removed = FileTenantStore(path), list[str]()
    keyring = Keyring({"file": TenantConfig()}, None, has_store=True)
    await writer.put_tenant("acme", TenantConfig(), by=TESTER)
    follower = KeyFollower(keyring, FileTenantStore(path), 60.0, lambda: None, on_removed=removed.extend)
    running = asyncio.create_task(follower.run())
    await follower.refresh()
    for name in ("acme", "file"):
        await writer.put_tenant(name, TenantConfig(), by=TESTER)
        await writer.remove_tenant(name, by=TESTER)
        await writer.put_tenant(name, TenantConfig(weight=2), by=TESTER)
    await follower.refresh()
    # The tenant of router.yaml is still there.
    assert ["acme"] == removed
    await writer.put_tenant("globex", TenantConfig(), by=TESTER)
    await follower.refresh()
    assert ["acme"] == removed
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


@pytest.mark.parametrize(
    "content", [b"[]", b"{", b'{"keys": {"a": 1}}', b'{"tenants": {"a": {"limits": {"tokens_per_hair": 1}}}}']
)
def test_a_file_that_cannot_be_read_is_never_overwritten(
    path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path.parent.mkdir()
    path.write_bytes(content)
    store = FileTenantStore(path)
    for change in (
        store.create_key(key("a"), by=TESTER),
        store.put_tenant("acme", TenantConfig(), by=TESTER),
        store.revoke("a", by=TESTER),
    ):
        with pytest.raises(StoreUnavailable, match="mend or remove it"):
            asyncio.run(change)
    assert path.read_bytes() == content
    # The gateway reads the file several times a second, and logs the reason once.
    assert len(caplog.records) == 1


async def test_a_folder_that_cannot_be_made_is_reported(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file")
    with pytest.raises(StoreUnavailable, match="set `state_dir`"):
        await FileTenantStore(tmp_path / "state" / FILE_NAME).put_tenant("acme", TenantConfig(), by=TESTER)


def test_the_folders_above_a_private_one_are_private_too(tmp_path: Path) -> None:
    make_private_folder(tmp_path / "above" / "state")

    modes = [folder.stat().st_mode & 0o777 for folder in (tmp_path / "above", tmp_path / "above" / "state")]
    assert [0o700, 0o700] == modes


def test_a_file_becomes_private_and_the_target_of_a_link_stays_as_it_is(tmp_path: Path) -> None:
    file, target, link = tmp_path / "file", tmp_path / "target", tmp_path / "link"
    for path in (file, target):
        path.touch(mode=0o644)
        path.chmod(0o644)
    link.symlink_to(target)
    for path in (file, link):
        make_private(path)

    assert [0o600, 0o644] == [path.stat().st_mode & 0o777 for path in (file, target)]
