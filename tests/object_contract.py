"""Promises of every store of objects, as checks that the tests of a folder and of a bucket run."""

import asyncio
from pathlib import Path

from gateway.batches.objects import Objects


async def check_an_upload_appears_whole(objects: Objects, folder: Path) -> None:
    """Check that nothing of an upload is seen before its commit."""
    del folder
    upload = await objects.start("files/a.data")
    blocks = [bytes([number]) * 700_000 for number in range(20)]
    for block in blocks:
        await upload.write(block)
    assert await objects.read("files/a.data") is None
    await upload.commit()
    assert b"".join([block async for block in objects.stream("files/a.data")]) == b"".join(blocks)


async def check_an_aborted_upload_leaves_nothing(objects: Objects, folder: Path) -> None:
    """Check that an upload that was aborted never appears."""
    del folder
    upload = await objects.start("files/b.data")
    await upload.write(b"x" * 6_000_000)
    await upload.abort()
    assert await objects.read("files/b.data") is None
    assert await objects.names("files/") == []


async def check_one_of_many_creators_wins(objects: Objects, folder: Path) -> None:
    """Check that exactly one of the writers that create an object succeeds, and that its content stays."""
    del folder
    values = [b"%d" % number * 100 for number in range(16)]
    created = await asyncio.gather(*(objects.create("jobs/j/plan.json", value) for value in values))
    assert created.count(True) == 1
    assert await objects.read("jobs/j/plan.json") == values[created.index(True)]
    assert not await objects.create("jobs/j/plan.json", b"late")


async def check_a_part_of_an_object_is_read(objects: Objects, folder: Path) -> None:
    """Check that any range of an object can be read."""
    del folder
    data = bytes(range(256)) * 4000
    await objects.create("files/c.data", data)
    for offset, length in ((0, 1), (5, 100_000), (999_999, 24_001), (1_023_999, 1)):
        blocks = [block async for block in objects.stream("files/c.data", offset, length)]
        assert b"".join(blocks) == data[offset : offset + length]


async def check_a_local_file_becomes_an_object(objects: Objects, folder: Path) -> None:
    """Check that a file moves into the store, whatever its size."""
    for number, size in enumerate((0, 1, 6_000_000)):
        path = folder / f"local-{number}"
        path.write_bytes(b"y" * size)
        await objects.add(f"jobs/j/results/{number}", path)
        assert not path.exists()
        assert await objects.read(f"jobs/j/results/{number}") == b"y" * size


async def check_names_below_a_prefix_are_listed_and_removed(objects: Objects, folder: Path) -> None:
    """Check that lists have all names below a prefix, and that removing a missing one is no error."""
    del folder
    names = [f"jobs/k/chunks/{number:06}.json" for number in range(30)]
    await asyncio.gather(*(objects.create(name, b"{}") for name in [*names, "jobs/kk/job.json"]))
    assert await objects.names("jobs/k/chunks/") == names
    assert await objects.folders("jobs/") == ["k", "kk"]
    assert await objects.folders("none/") == []
    await objects.remove([*names[:20], "jobs/k/none"])
    assert await objects.names("jobs/k/") == names[20:]
    await objects.remove([])
    assert await objects.names("jobs/none/") == []


CHECKS = (
    check_an_upload_appears_whole,
    check_an_aborted_upload_leaves_nothing,
    check_one_of_many_creators_wins,
    check_a_part_of_an_object_is_read,
    check_a_local_file_becomes_an_object,
    check_names_below_a_prefix_are_listed_and_removed,
)
