"""A failed reload or edit changes nothing, workers learn only of changes, and equal reloads are merged."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from gateway.audit.records import AuditRecord
from gateway.config.diff import ReloadOutcome
from gateway.config.problems import Problem
from gateway.config.schema import Config
from gateway.declared.additions import Additions, Put, Remove
from gateway.declared.composition import AdditionsState
from gateway.declared.store import AdditionsInMemory, StoredAdditions
from gateway.processes.child import Restarts
from gateway.processes.config_applier import (
    EDIT_ATTEMPTS_MAX,
    ConfigApplier,
    ConfigSource,
    ReloadJob,
    ReloadQueue,
    watch_secrets,
)
from gateway.processes.engine_pool import EnginePool, EngineProcess
from gateway.store.errors import StoreUnavailable
from tests.unit.test_addition_settings import FILE, TEI
from tests.waiting import PATIENCE_S

TWO, MORE = Put("upstreams", "two", TEI), Put("models", "more", {"upstream": "two"})


class Store(AdditionsInMemory):
    """Store with a number of lost races. away: the store is unavailable."""

    def __init__(self) -> None:
        self.records: list[AuditRecord] = []
        super().__init__(self._keep)
        self.lost_races = 0
        self.away = False

    async def load(self) -> StoredAdditions:
        """Load the additions, unless the store is unavailable."""
        if self.away:
            raise StoreUnavailable("no answer")
        return await super().load()

    async def _keep(self, record: AuditRecord) -> None:
        self.records.append(record)

    async def replace(
        self, expected: str, additions: Additions, records: Sequence[AuditRecord]
    ) -> StoredAdditions | None:
        """Replace the additions, unless a race is lost."""
        if self.lost_races:
            self.lost_races -= 1
            return None
        return await super().replace(expected, additions, records)


class Parent:
    """The applier without processes. updates: names of the models in each update of the workers."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "router.yaml"
        self.file.write_text(FILE)
        self.store = Store()
        self.updates: list[list[str]] = []
        source = ConfigSource(self.file, {})
        self.additions = AdditionsState(self.store, {})
        self._source = source
        self.applier: ConfigApplier
        # Models that were compared, and what the workers know of them.
        self.compared: list[list[str]] = []
        self.differing: tuple[Problem, ...] = ()

    async def start(self, *, has_first_key: bool = True) -> None:
        """Start from the file and the stored additions."""
        file = await self._source.read()
        self.applier = ConfigApplier(
            file,
            self._source,
            self.additions,
            self._update_workers,
            self._differing_spaces,
            lambda config: config,
            has_first_key=has_first_key,
        )
        await self.applier.start(
            EnginePool(lambda: "/nowhere", {}, lambda _: None, Restarts(lambda *_: None))
        )

    async def _update_workers(self, _: Config, unneeded: Sequence[EngineProcess]) -> None:
        assert not unneeded
        self.updates.append(sorted(self.applier.config.models))

    async def _differing_spaces(self, config: Config) -> tuple[Problem, ...]:
        self.compared.append(sorted(config.models))
        return self.differing

    async def refused(self, work: ReloadJob) -> ReloadOutcome:
        """Apply a job and return its outcome, which must have changed nothing."""
        before = len(self.updates), self.applier.config, await AdditionsInMemory.load(self.store)
        outcome = await self.applier.apply(work)
        assert before == (len(self.updates), self.applier.config, await AdditionsInMemory.load(self.store))
        assert outcome.problems
        return outcome


@pytest.fixture
async def parent(tmp_path: Path) -> Parent:
    started = Parent(tmp_path)
    await started.start()
    return started


async def test_reload_without_tenants_needs_a_first_key(tmp_path: Path) -> None:
    parent = Parent(tmp_path)
    await parent.start(has_first_key=False)

    [problem] = (await parent.refused("file")).problems
    assert "tenants" == problem.path
    assert "a first key is needed; it takes effect only at start: restart the gateway" in problem.message


async def test_retries_an_edit_that_lost_a_race(parent: Parent) -> None:
    parent.store.lost_races = EDIT_ATTEMPTS_MAX - 1
    assert ["upstreams.two"] == [change.path for change in (await parent.applier.apply(TWO)).changes]
    parent.store.lost_races = EDIT_ATTEMPTS_MAX
    assert "unavailable" == (await parent.refused(MORE)).kind


async def test_checks_an_edit_against_the_changes_of_other_gateways(parent: Parent) -> None:
    await parent.applier.apply(TWO)
    await parent.store.replace(await parent.store.version(), Additions(), ())

    assert ["models.more.upstream"] == [problem.path for problem in (await parent.refused(MORE)).problems]
    assert "unknown" == (await parent.refused(Remove("upstreams", "two"))).kind
    # It is served until the change of the other gateway is applied.
    assert "two" in parent.applier.config.upstreams
    await parent.applier.apply("added")
    assert "two" not in parent.applier.config.upstreams


async def test_does_not_update_workers_without_a_change(parent: Parent) -> None:
    for work in (TWO, TWO, MORE, "file", "added"):
        assert () == (await parent.applier.apply(work)).problems

    assert [["bge"], ["bge", "more"]] == parent.updates


async def test_updates_workers_when_the_file_takes_over_an_equal_addition(parent: Parent) -> None:
    await parent.applier.apply(Put("models", "more", {"upstream": "one"}))
    assert {"more"} == parent.applier.added_models
    parent.file.write_text(
        FILE.replace("{bge: {upstream: one}}", "{bge: {upstream: one}, more: {upstream: one}}")
    )
    assert () == (await parent.applier.apply("file")).changes

    assert (frozenset(), 2) == (parent.applier.added_models, len(parent.updates))


async def test_invalid_file_and_unavailable_store_change_nothing(parent: Parent) -> None:
    await parent.applier.apply(TWO)
    parent.store.away = True
    assert ["unavailable", "unavailable"] == [(await parent.refused(work)).kind for work in (MORE, "added")]
    parent.file.write_text(FILE.replace("upstream: one", "upstream: none"))
    assert "invalid" == (await parent.refused("file")).kind
    # The file by itself needs no store, and the additions stay.
    parent.file.write_text(FILE.replace("bge:", "bge2:"))
    assert () == (await parent.applier.apply("file")).problems
    assert ({"one", "two"}, {"bge2"}) == (
        parent.applier.config.upstreams.keys(),
        parent.applier.config.models.keys(),
    )


async def test_start_without_store_serves_the_file_first(tmp_path: Path) -> None:
    parent = Parent(tmp_path)
    await parent.store.replace("", Additions({"two": TEI}, {"more": MORE.settings}), ())
    parent.store.away = True
    await parent.start()
    assert ["bge"] == list(parent.applier.config.models)
    parent.store.away = False
    await parent.applier.apply("added")

    assert [["bge", "more"]] == parent.updates


WITH_CANARY = FILE.replace(
    "models: {", "models: {trial: {upstream: one, canary: {name: more, share: 0.1}}, "
).replace("upstreams: {", 'upstreams: {more: {backend: tei, replicas: ["http://c"]}, ')


async def test_a_reload_of_the_file_puts_canaries_back_even_without_a_change(parent: Parent) -> None:
    parent.file.write_text(WITH_CANARY)
    await parent.applier.apply("file")
    await parent.applier.apply("added")
    assert 1 == len(parent.updates)
    assert frozenset() == parent.applier.restored

    await parent.applier.apply("file")
    assert 2 == len(parent.updates)
    assert parent.applier.restored is None


async def test_refuses_models_whose_upstreams_are_known_to_differ(parent: Parent) -> None:
    problem = Problem("models.trial.canary.name", "cosine 0.1, 0.999 needed")
    parent.differing = (problem,)
    parent.file.write_text(WITH_CANARY)

    assert (problem,) == (await parent.refused("file")).problems
    assert [["trial"]] == parent.compared


async def test_merges_equal_reloads_and_runs_every_edit() -> None:
    done: list[ReloadJob] = []
    answered: list[ReloadJob] = []

    async def do(job: ReloadJob) -> ReloadOutcome:
        done.append(job)
        return ReloadOutcome()

    reloads = ReloadQueue(do)
    requested: list[ReloadJob] = ["file", TWO, "file", "added", TWO, "added"]
    for job in requested:
        reloads.enqueue(job, lambda _, job=job: answered.append(job))  # type: ignore[misc]
    keeping = asyncio.create_task(reloads.run_jobs())
    await reloads.run(MORE)
    keeping.cancel()

    assert ["file", TWO, "added", TWO, MORE] == done
    assert sorted(map(str, requested)) == sorted(map(str, answered))


async def test_a_rotated_secret_is_applied_and_an_edited_file_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.processes.config_applier.SECRETS_EVERY_S", 0.01)
    file, secret = tmp_path / "router.yaml", tmp_path / "key"
    file.write_text("upstreams: {a: {api_key: '${file:key}', headers: {x: '$${file:other}'}}}")
    secret.write_text("first")
    source = ConfigSource(file, {})
    changed = asyncio.Event()
    watch = asyncio.create_task(watch_secrets(source, changed.set))
    assert {secret} == set(source.secrets())
    try:
        # As Kubernetes does: another file takes the name.
        await asyncio.sleep(0)
        (tmp_path / "new").write_text("second")
        (tmp_path / "new").replace(secret)
        await asyncio.wait_for(changed.wait(), PATIENCE_S)

        changed.clear()
        file.write_text(file.read_text() + "# half of an edit")
        assert source.is_edited
        secret.write_text("the third one")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(changed.wait(), 0.2)
    finally:
        watch.cancel()
