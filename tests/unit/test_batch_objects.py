"""Objects in a folder keep the promises of every store of objects, and survive kills and a full disk."""

import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.batches.objects import UNFINISHED, FolderObjects, Objects, ObjectsUnavailable
from tests.object_contract import ObjectContract


class TestFolder(ObjectContract):
    """A folder keeps the promises, and leaves nothing unfinished."""

    @pytest.fixture
    def objects(self, tmp_path: Path) -> Iterator[Objects]:
        yield FolderObjects(tmp_path / "objects")
        assert list((tmp_path / "objects" / UNFINISHED).iterdir()) == []


async def test_a_full_disk_is_reported_and_leaves_nothing(tmp_path: Path) -> None:
    objects = FolderObjects(tmp_path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    # The kernel writes the bytes that fit, and then fails, as on a full disk.
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(ObjectsUnavailable) as full:
            async with objects.writing("files/a.data") as write:
                await write(b"x" * 2000)
        with pytest.raises(ObjectsUnavailable):
            await objects.create("files/a.json", b"x" * 2000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)

    assert full.value.is_full
    assert await objects.names("files/") == []
    assert list((tmp_path / UNFINISHED).iterdir()) == []


async def test_sweeps_what_killed_gateways_have_left(tmp_path: Path) -> None:
    objects = FolderObjects(tmp_path)
    old, new = tmp_path / UNFINISHED / "old", tmp_path / UNFINISHED / "new"
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (1, 1))

    await objects.sweep(3600)

    assert not old.exists()
    assert new.exists()


async def test_other_users_cannot_read(tmp_path: Path) -> None:
    objects = FolderObjects(tmp_path / "objects")
    await objects.create("files/a.json", b"{}")

    for path in (tmp_path / "objects", tmp_path / "objects" / "files"):
        assert path.stat().st_mode & 0o077 == 0


async def test_a_removal_leaves_the_folder_in_which_others_create_jobs(tmp_path: Path) -> None:
    objects = FolderObjects(tmp_path)
    await objects.create("jobs/a/job.json", b"{}")

    await objects.remove(["jobs/a/job.json"])

    assert sorted(entry.name for entry in os.scandir(tmp_path)) == ["jobs", UNFINISHED]
    assert list(os.scandir(tmp_path / "jobs")) == []
