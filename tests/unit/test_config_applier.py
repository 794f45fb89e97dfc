"""What is asked of the parent is done one after the other, and what fails has changed nothing."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from gateway.additions.entries import Additions, Put, Remove
from gateway.additions.state import AdditionsState
from gateway.additions.store import AdditionsInMemory, StoredAdditions
from gateway.config.diff import ReloadOutcome
from gateway.config.schema import Config
from gateway.processes.config_applier import EDIT_ATTEMPTS_MAX, ConfigApplier
from gateway.processes.config_source import ConfigSource
from gateway.processes.engine_pool import EnginePool, EngineProcess
from gateway.processes.reload_queue import ReloadJob
from gateway.processes.restarts import Restarts
from gateway.store.errors import StoreUnavailable
from tests.unit.test_addition_settings import FILE, TEI

TWO, MORE = Put("upstreams", "two", TEI), Put("models", "more", {"upstream": "two"})


class Store(AdditionsInMemory):
    """Others are faster so often; away: nobody answers."""

    def __init__(self) -> None:
        super().__init__()
        self.outrun = 0
        self.away = False

    async def load(self) -> StoredAdditions:
        """As it is told."""
        if self.away:
            raise StoreUnavailable("no answer")
        return await super().load()

    async def replace(self, expected: str, additions: Additions) -> StoredAdditions | None:
        """As it is told."""
        if self.outrun:
            self.outrun -= 1
            return None
        return await super().replace(expected, additions)


class Parent:
    """The real one without processes. handed: which models workers were told of, each time."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "router.yaml"
        self.file.write_text(FILE)
        self.store = Store()
        self.handed: list[list[str]] = []
        source = ConfigSource(self.file, {})
        self.kept = AdditionsState(self.store, {})
        self._source = source
        self.now: ConfigApplier

    async def start(self) -> None:
        """From the file and what stands."""
        file = await self._source.read()
        self.now = ConfigApplier(file, self._source, self.kept, self._hand_over, has_first_key=True)
        await self.now.start(EnginePool(lambda: "/nowhere", {}, lambda _: None, Restarts(lambda *_: None)))

    async def _hand_over(self, _: Config, left: Sequence[EngineProcess]) -> None:
        assert not left
        self.handed.append(sorted(self.now.config.models))

    async def refused(self, work: ReloadJob) -> ReloadOutcome:
        """What came of it, which is nothing."""
        before = len(self.handed), self.now.config, await AdditionsInMemory.load(self.store)
        outcome = await self.now.apply(work)
        assert before == (len(self.handed), self.now.config, await AdditionsInMemory.load(self.store))
        assert outcome.problems
        return outcome


@pytest.fixture
async def parent(tmp_path: Path) -> Parent:
    one = Parent(tmp_path)
    await one.start()
    return one


async def test_retries_an_edit_that_lost_a_race(parent: Parent) -> None:
    parent.store.outrun = EDIT_ATTEMPTS_MAX - 1
    assert ["upstreams.two"] == [one.path for one in (await parent.now.apply(TWO)).changes]
    parent.store.outrun = EDIT_ATTEMPTS_MAX
    assert "unavailable" == (await parent.refused(MORE)).kind


async def test_checks_an_edit_against_the_changes_of_other_gateways(parent: Parent) -> None:
    await parent.now.apply(TWO)
    await parent.store.replace(await parent.store.version(), Additions())

    assert ["models.more.upstream"] == [one.path for one in (await parent.refused(MORE)).problems]
    assert "unknown" == (await parent.refused(Remove("upstreams", "two"))).kind
    # It is still served until the change is followed.
    assert "two" in parent.now.config.upstreams
    await parent.now.apply("added")
    assert "two" not in parent.now.config.upstreams


async def test_does_not_update_workers_without_a_change(parent: Parent) -> None:
    for work in (TWO, TWO, MORE, "file", "added"):
        assert () == (await parent.now.apply(work)).problems

    assert [["bge"], ["bge", "more"]] == parent.handed


async def test_invalid_file_and_unavailable_store_change_nothing(parent: Parent) -> None:
    await parent.now.apply(TWO)
    parent.store.away = True
    assert ["unavailable", "unavailable"] == [(await parent.refused(work)).kind for work in (MORE, "added")]
    parent.file.write_text(FILE.replace("upstream: one", "upstream: none"))
    assert "invalid" == (await parent.refused("file")).kind
    # The file alone needs no store, and what was added stays.
    parent.file.write_text(FILE.replace("bge:", "bge2:"))
    assert () == (await parent.now.apply("file")).problems
    assert ({"one", "two"}, {"bge2"}) == (parent.now.config.upstreams.keys(), parent.now.config.models.keys())


async def test_start_without_store_serves_the_file_first(tmp_path: Path) -> None:
    parent = Parent(tmp_path)
    await parent.store.replace("", Additions({"two": TEI}, {"more": MORE.settings}))
    parent.store.away = True
    await parent.start()
    assert ["bge"] == list(parent.now.config.models)
    parent.store.away = False
    await parent.now.apply("added")

    assert [["bge", "more"]] == parent.handed
