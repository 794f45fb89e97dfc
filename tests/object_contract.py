"""Promises of every store of objects, as tests that those of a folder and of a bucket inherit."""

import asyncio
from contextlib import suppress
from pathlib import Path

from gateway.batches.objects import Objects


class ObjectContract:
    """Tests of the store that a fixture `objects` returns."""

    async def test_an_upload_appears_whole(self, objects: Objects) -> None:
        blocks = [bytes([number]) * 700_000 for number in range(20)]
        async with objects.writing("files/a.data") as write:
            for block in blocks:
                await write(block)
            assert await objects.read("files/a.data") is None
        assert b"".join([block async for block in objects.stream("files/a.data")]) == b"".join(blocks)

    async def test_an_aborted_upload_leaves_nothing(self, objects: Objects) -> None:
        with suppress(KeyError):
            async with objects.writing("files/b.data") as write:
                await write(b"x" * 6_000_000)
                raise KeyError
        assert await objects.read("files/b.data") is None
        assert await objects.names("files/") == []

    async def test_one_of_many_creators_wins(self, objects: Objects) -> None:
        values = [b"%d" % number * 100 for number in range(16)]
        created = await asyncio.gather(*(objects.create("jobs/j/plan.json", value) for value in values))
        assert created.count(True) == 1
        assert await objects.read("jobs/j/plan.json") == values[created.index(True)]
        assert not await objects.create("jobs/j/plan.json", b"late")

    async def test_a_part_of_an_object_is_read(self, objects: Objects) -> None:
        data = bytes(range(256)) * 4000
        await objects.create("files/c.data", data)
        for offset, length in ((0, 1), (5, 100_000), (999_999, 24_001), (1_023_999, 1)):
            blocks = [block async for block in objects.stream("files/c.data", offset, length)]
            assert b"".join(blocks) == data[offset : offset + length]

    async def test_a_local_file_becomes_an_object(self, objects: Objects, tmp_path: Path) -> None:
        for number, size in enumerate((0, 1, 6_000_000)):
            path = tmp_path / f"local-{number}"
            path.write_bytes(b"y" * size)
            await objects.add(f"jobs/j/results/{number}", path)
            assert not path.exists()
            assert await objects.read(f"jobs/j/results/{number}") == b"y" * size

    async def test_names_below_a_prefix_are_listed_and_removed(self, objects: Objects) -> None:
        names = [f"jobs/k/chunks/{number:06}.json" for number in range(30)]
        await asyncio.gather(*(objects.create(name, b"{}") for name in [*names, "jobs/kk/job.json"]))
        assert await objects.names("jobs/k/chunks/") == names
        assert await objects.folders("jobs/") == ["k", "kk"]
        assert await objects.folders("none/") == []
        await objects.remove([*names[:20], "jobs/k/none"])
        assert await objects.names("jobs/k/") == names[20:]
        await objects.remove([])
        assert await objects.names("jobs/none/") == []
