"""How a running gateway comes to another config, in its parent: from what is asked for to what is served.

Rule: all that can fail comes first: reading, engines that load, and the store of what operators add. Then
one config takes the place of another, and workers are told. What fails has changed nothing.
"""

import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence

from gateway.additions.entries import Additions, Edit, Put, UnknownAddition
from gateway.additions.state import AdditionsState
from gateway.additions.store import StoredAdditions
from gateway.config.diff import ReloadOutcome, compare_configs, with_live_settings
from gateway.config.problems import ConfigError, Problem
from gateway.config.schema import Config
from gateway.processes.engine_pool import Engine, EngineSet, loading_problems
from gateway.processes.reload_queue import Source, Work, tell, without_a_key
from gateway.store.errors import StoreUnavailable

# How long new engines' models may take to load.
LOAD_TIMEOUT_S = 550.0
# How often an edit is tried that others' edits outrun.
EDITS_MAX = 20
OUTRUN = ReloadOutcome(
    problems=(Problem("additions", "others change them without a pause; try again"),), kind="unavailable"
)

logger = logging.getLogger("gateway")

# Have workers serve what is served now. Given what was served before, and engines that nobody needs then.
HandOver = Callable[[Config, Sequence[Engine]], Awaitable[None]]


class ConfigApplier:
    """What is served now, and the one way to serve something else. One work at a time.

    file: as it was read at the start. has_first_key: whether a key was made then that stands in for tenants.
    """

    def __init__(
        self, file: Config, source: Source, kept: AdditionsState, hand_over: HandOver, *, has_first_key: bool
    ) -> None:
        self._file = file
        self._source = source
        self._kept = kept
        self._hand_over = hand_over
        self._has_first_key = has_first_key
        # The live parts of the file and of what was added, beside what was given to sockets and processes.
        self.config = file

    async def start(self, engines: EngineSet) -> None:
        """Serve the file and what was added to it.

        Additions that need an engine come once the gateway is up: a model that does not load ends the start.
        """
        self._engines = engines
        try:
            standing = await self._kept.load()
        except StoreUnavailable as error:
            logger.warning("what was added is not known yet, and comes when Redis is back: %s", error)
        else:
            served = await self._kept.compose(self._file, standing.additions, with_engines=False)
            self.config = served.config
            self._kept.adopt(standing, served)
        engines.replace(engines.needed(self.config))

    async def done(self, work: Work) -> ReloadOutcome:
        """Do what is asked for, or tell why all stays as it is."""
        try:
            outcome = await self._tried(work)
        except ConfigError as error:
            outcome = ReloadOutcome(problems=tuple(error.problems))
        except UnknownAddition as error:
            outcome = ReloadOutcome(problems=(error.problem,), kind="unknown")
        except StoreUnavailable as error:
            outcome = ReloadOutcome(
                problems=(Problem("quotas.store", f"it is away: {error}"),), kind="unavailable"
            )
        tell(self._source, work, outcome)
        return outcome

    async def _tried(self, work: Work) -> ReloadOutcome:
        """Raises: ConfigError, UnknownAddition, StoreUnavailable."""
        match work:
            case "file":
                file = await self._source.read()
                if problems := without_a_key(file, has_first_key=self._has_first_key):
                    raise ConfigError(problems)
                self._kept.forget_unusable()
                return await self._serve(file, self._kept.current)
            case "added":
                return await self._serve(self._file, await self._kept.load())
            case _:
                return await self._edit(work)

    async def _edit(self, edit: Edit) -> ReloadOutcome:
        self._kept.forget_unusable(edit.name)
        outcome, tries = OUTRUN, 0
        while outcome is OUTRUN and tries < EDITS_MAX:
            wanted = await self._kept.preview(self._file, edit)
            outcome = await self._serve(self._file, wanted, edit)
            tries += 1
        return outcome

    async def _serve(self, file: Config, wanted: StoredAdditions, edit: Edit | None = None) -> ReloadOutcome:
        """Serve a file with what was added beside it.

        edit: what is not stored yet, with the version before it; where it is to blame nothing changes.
        Raises: ConfigError, StoreUnavailable.
        """
        served = await self._kept.compose(file, wanted.additions)
        if isinstance(edit, Put) and (problems := served.rejected.get((edit.part, edit.name))):
            raise ConfigError(list(problems))
        outcome = compare_configs(self.config, served.config)
        needed = self._engines.needed(served.config)
        new = self._engines.new_among(needed)
        if refused := await loading_problems(new, LOAD_TIMEOUT_S):
            await self._engines.stop(new)
            self._blame(refused, served.added, edit, wanted.additions)
            return await self._serve(file, wanted, edit)
        standing = wanted if edit is None else await self._stored(wanted, new)
        if standing is None:
            return OUTRUN
        before, self.config = self.config, with_live_settings(self.config, served.config)
        self._file = file
        self._kept.adopt(standing, served)
        if outcome.changes:
            await self._hand_over(before, self._engines.replace(needed))
        return outcome

    def _blame(
        self, refused: Mapping[str, str], added: Collection[str], edit: Edit | None, additions: Additions
    ) -> None:
        """Note which additions have models that cannot be loaded, to go on without them.

        Raises: ConfigError where the file is to blame, or what is to be added now.
        """
        asked = {edit.name} if isinstance(edit, Put) and edit.part == "upstreams" else set()
        blamed = {name: why for name, why in refused.items() if name not in added or name in asked}
        if blamed:
            raise ConfigError([Problem(f"upstreams.{name}", why) for name, why in blamed.items()])
        self._kept.mark_unusable(additions, refused)

    async def _stored(self, wanted: StoredAdditions, new: Sequence[Engine]) -> StoredAdditions | None:
        """An edit, stored; None where others were faster. What was started for it is stopped then.

        Raises: StoreUnavailable.
        """
        stored = None
        try:
            stored = await self._kept.store(wanted)
        finally:
            if stored is None:
                await self._engines.stop(new)
        return stored
