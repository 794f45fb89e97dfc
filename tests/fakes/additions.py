"""Parent process that reads and stores additions as the real one does, without workers."""

from gateway.api.operators.additions import AdditionsClient
from gateway.config.diff import ReloadOutcome, compare_configs
from gateway.config.problems import ConfigError
from gateway.config.schema import Config
from gateway.declared.additions import Additions, Edit, Listing, Put, UnknownAddition
from gateway.declared.composition import ComposedConfig, compose, listing_of


class ReadingParent:
    """Parent of one config. References may name one variable: UPSTREAM_KEY."""

    def __init__(self, file: Config) -> None:
        self._file = file
        self._additions = Additions()
        self.adding = AdditionsClient(self._change, self._listing)

    async def _change(self, edit: Edit) -> ReloadOutcome:
        before = self._compose(self._additions)
        try:
            wanted = edit.apply(self._file, self._additions)
        except ConfigError as error:
            return ReloadOutcome(problems=tuple(error.problems))
        except UnknownAddition as error:
            return ReloadOutcome(problems=(error.problem,), kind="unknown")
        after = self._compose(wanted)
        if isinstance(edit, Put) and (problems := after.rejected.get((edit.part, edit.name))):
            return ReloadOutcome(problems=problems)
        self._additions = wanted
        return compare_configs(before.config, after.config)

    async def _listing(self) -> Listing:
        return listing_of(self._additions, self._compose(self._additions).rejected)

    def _compose(self, additions: Additions) -> ComposedConfig:
        return compose(self._file, additions, {"UPSTREAM_KEY": "key"}, {})
