"""A parent that reads and keeps what operators add as the real one does, and has nobody follow."""

from gateway.additions.composing import ComposedConfig, compose, listing_of
from gateway.additions.entries import Additions, Edit, Listing, Put, UnknownAddition, apply_edit
from gateway.api.operators.added_models import AdditionsClient
from gateway.config.diff import ReloadOutcome, compare_configs
from gateway.config.problems import ConfigError
from gateway.config.schema import Config


class ReadingParent:
    """Beside one config, with one variable that references may name: UPSTREAM_KEY."""

    def __init__(self, file: Config) -> None:
        self._file = file
        self._standing = Additions()
        self.adding = AdditionsClient(self._change, self._listing)

    async def _change(self, edit: Edit) -> ReloadOutcome:
        before = self._composed(self._standing)
        try:
            wanted = apply_edit(self._file, self._standing, edit)
        except ConfigError as error:
            return ReloadOutcome(problems=tuple(error.problems))
        except UnknownAddition as error:
            return ReloadOutcome(problems=(error.problem,), kind="unknown")
        after = self._composed(wanted)
        if isinstance(edit, Put) and (problems := after.rejected.get((edit.part, edit.name))):
            return ReloadOutcome(problems=problems)
        self._standing = wanted
        return compare_configs(before.config, after.config)

    async def _listing(self) -> Listing:
        return listing_of(self._standing, self._composed(self._standing).rejected)

    def _composed(self, additions: Additions) -> ComposedConfig:
        return compose(self._file, additions, {"UPSTREAM_KEY": "key"}, {})
